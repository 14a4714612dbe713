"""The ``airdata`` command.

airdata ckpt ls ROOT         steps under a root: valid or not, files, bytes, when
airdata ckpt show PATH       what one checkpoint holds
airdata ckpt verify PATH     read every byte and compare it with its digest
airdata ckpt prune ROOT      remove old steps, as a CheckpointManager would
airdata ckpt convert A B     a checkpoint into one file of torch.save or safetensors, or back
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from airdata.errors import AirdataError, CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
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
    commands = checkpoints.add_subparsers(required=True, metavar="ls|show|verify|prune|convert")

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
    prune.add_argument(
        "--keep-best", type=_best, metavar="METRIC[:max]", help="the step with the lowest, or highest, stays"
    )
    prune.add_argument("--pin", type=int, action="append", default=[], metavar="STEP", help="this step stays")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    convert = add("convert", "turn a checkpoint into one file, or a file into a checkpoint", "FROM", _convert)
    convert.add_argument("target", metavar="TO", help="a file (.pt, .safetensors) or, from a file, a checkpoint's path")
    convert.add_argument("--below", default="", metavar="NAME", help="only what is under this name, such as 'model'")
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


def _best(text: str) -> tuple[str, Literal["min", "max"]]:
    metric, _, mode = text.partition(":")
    if not metric or mode not in {"", "min", "max"}:
        raise argparse.ArgumentTypeError(f"{text!r} must be METRIC, METRIC:min or METRIC:max")
    return metric, "max" if mode == "max" else "min"


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
    from airdata.checkpoint import policies, retention  # noqa: PLC0415

    keep: list[policies.Policy] = [policies.KeepLast(parsed.keep_last), policies.Pinned(parsed.pin)]
    if parsed.keep_every is not None:
        keep.append(policies.KeepEvery(parsed.keep_every))
    if parsed.keep_best is not None:
        keep.append(policies.KeepBest(*parsed.keep_best))
    root = Volume.of(parsed.path, parsed.storage_options)
    steps = retention.published_steps(root)
    if not steps:
        print(f"no step is published under {root}")
        return 0
    removed = retention.prune(root, steps[-1], keep, dry_run=parsed.dry_run)
    verb = "would remove" if parsed.dry_run else "removed"
    print(f"{verb} {len(removed)} of {len(steps)} steps{': ' if removed else ''}{', '.join(map(str, removed))}")
    return 0


def _convert(parsed: argparse.Namespace) -> int:
    from tqdm import tqdm  # noqa: PLC0415

    from airdata.checkpoint import convert  # noqa: PLC0415

    to_file, from_file = (name.endswith(convert.SUFFIXES) for name in (parsed.target, parsed.path))
    if to_file == from_file:
        raise CheckpointError(
            f"one of the two must be a file ({', '.join(convert.SUFFIXES)}) and the other a checkpoint's path"
        )
    if from_file and parsed.below:
        raise CheckpointError("--below takes a part of a checkpoint; it has no meaning for a file")
    with tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        if from_file:
            convert.import_file(parsed.path, Volume.of(parsed.target, parsed.storage_options), progress=bar.update)
            left_out = []
        else:
            checkpoint = Volume.of(parsed.path, parsed.storage_options)
            left_out = convert.export_file(checkpoint, parsed.target, below=parsed.below, progress=bar.update)
    print(f"wrote {parsed.target}")
    if left_out:
        print(f"  without {len(left_out)} values that are no tensors: {', '.join(left_out[:10])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
