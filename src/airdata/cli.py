"""The ``airdata`` command.

airdata ckpt ls ROOT         steps under a root: valid or not, files, bytes, when
airdata ckpt show PATH       what one checkpoint holds
airdata ckpt verify PATH     read every byte and compare it with its digest
airdata ckpt prune ROOT      remove old steps, as a CheckpointManager would
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from airdata.errors import AirdataError, CheckpointNotFoundError, CorruptCheckpointError
from airdata.volume import Volume

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: instead of those of the process.

    Returns:
        0 when all is well; 1 when a checkpoint is missing or damaged, or storage failed; 2 for a wrong command line.
    """
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except AirdataError as error:
        print(f"airdata: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="airdata", description="Data and checkpoints on volumes.")
    checkpoints = parser.add_subparsers(required=True, metavar="ckpt").add_parser("ckpt", help="look after checkpoints")
    commands = checkpoints.add_subparsers(required=True, metavar="ls|show|verify|prune")

    def add(name: str, text: str, place: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("path", metavar=place, help="a directory, a /Volumes path or a URL")
        added.add_argument("--storage-options", type=_options, metavar="JSON", help="arguments of the fsspec driver")
        added.set_defaults(command=command)
        return added

    add("ls", "list the steps under a root and whether they are valid", "ROOT", _ls)
    show = add("show", "list what a checkpoint holds", "PATH", _show)
    show.add_argument("--limit", type=int, default=50, help="entries to print; 0 for all (default: %(default)s)")
    add("verify", "read every byte of a checkpoint and compare it with its digest", "PATH", _verify)
    prune = add("prune", "remove old steps under a root", "ROOT", _prune)
    prune.add_argument("--keep-last", type=_positive, required=True, metavar="N", help="how many valid steps stay")
    prune.add_argument("--keep-every", type=_positive, metavar="N", help="multiples of this stay too")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _options(text: str) -> Mapping[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"anon": true}')
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _size(count: int) -> str:
    return f"{count / 1e9:,.3f} GB" if count >= 10_000_000 else f"{count / 1e3:,.1f} KB"  # noqa: PLR2004 - 10 MB


# torch takes seconds to import: only a command that was understood pays for it.


def _ls(parsed: argparse.Namespace) -> int:
    from airdata.checkpoint import layout, retention  # noqa: PLC0415
    from airdata.transport import open_transport  # noqa: PLC0415

    root = Volume.of(parsed.path, parsed.storage_options)
    damaged = 0
    steps = retention.published_steps(root)
    for step in steps:
        try:
            published = retention.check_valid(open_transport(root.child(layout.step_name(step))))
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            damaged += 1
            print(f"{step:>10}  DAMAGED  {error}")
            continue
        record = published.record
        detail = "not saved by airdata: no digests"
        if record is not None:
            detail = f"{len(record.files)} files, {_size(record.total_bytes)}, {record.ranks} ranks, {record.created}"
        print(f"{step:>10}  valid    {detail}")
    if not steps:
        print(f"no step is published under {root}")
    return 1 if damaged else 0


def _show(parsed: argparse.Namespace) -> int:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415

    from airdata.checkpoint import layout  # noqa: PLC0415
    from airdata.transport import open_transport  # noqa: PLC0415

    published = layout.read_published(open_transport(Volume.of(parsed.path, parsed.storage_options)))
    if (record := published.record) is not None:
        print(
            f"{published.name}: {len(record.files)} files, {_size(record.total_bytes)}, saved by {record.ranks} ranks "
            f"with torch {record.torch} at {record.created}"
        )
    else:
        print(f"{published.name}: {len(published.files())} files, not saved by airdata: no digests")
    entries = sorted(published.metadata.state_dict_metadata.items())
    shown = entries[: parsed.limit] if parsed.limit > 0 else entries
    for name, entry in shown:
        if isinstance(entry, TensorStorageMetadata):
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            print(f"  {name}  {dtype} {list(entry.size)}, {len(entry.chunks)} shards")
        else:
            print(f"  {name}  object")
    if len(shown) < len(entries):
        print(f"  … and {len(entries) - len(shown)} more; --limit 0 shows all")
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    from tqdm import tqdm  # noqa: PLC0415

    from airdata.checkpoint import layout  # noqa: PLC0415
    from airdata.checkpoint.verify import verify_checkpoint  # noqa: PLC0415
    from airdata.transport import open_transport  # noqa: PLC0415

    transport = open_transport(Volume.of(parsed.path, parsed.storage_options))
    expected = layout.read_published(transport).record
    total = expected.total_bytes if expected is not None else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        published = verify_checkpoint(transport, progress=bar.update)
    if (record := published.record) is None:
        print(f"{published.name}: all files are there; not saved by airdata: no digests to compare with")
    else:
        print(f"{published.name}: {len(record.files)} files, {_size(record.total_bytes)}: all as saved")
    return 0


def _prune(parsed: argparse.Namespace) -> int:
    from airdata.checkpoint import retention  # noqa: PLC0415

    root = Volume.of(parsed.path, parsed.storage_options)
    steps = retention.published_steps(root)
    if not steps:
        print(f"no step is published under {root}")
        return 0
    removed = retention.prune(
        root, steps[-1], keep_last=parsed.keep_last, keep_every=parsed.keep_every, dry_run=parsed.dry_run
    )
    verb = "would remove" if parsed.dry_run else "removed"
    print(f"{verb} {len(removed)} of {len(steps)} steps{': ' if removed else ''}{', '.join(map(str, removed))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
