"""Where a path lives.

A user names data as ``/Volumes/<catalog>/<schema>/<volume>/…``, ``dbfs:/Volumes/…``, an fsspec URL or a plain
directory. :func:`Volume.of` turns any of these into one value that says which place is meant and how it may be read:

    "/Volumes/main/demo/digits"  ──►  AIRDATA_VOLUMES=/data          ──►  directory /data/main/demo/digits
                                      AIRDATA_VOLUMES=s3://bucket/v  ──►  s3://bucket/v/main/demo/digits
                                      a mount of that name           ──►  the mount itself
                                      none of these                  ──►  VolumeError, with the remedy

Nothing here moves bytes; see ``airdata.transport``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from airdata.errors import VolumeError

__all__ = ["VOLUMES_VARIABLE", "Volume", "safe_url"]

VOLUMES_VARIABLE = "AIRDATA_VOLUMES"

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_OCTAL = re.compile(rb"\\([0-7]{3})")  # how a blank is written there
_VOLUMES_ROOT = "/Volumes"
# A mount of one of these is a network away: it is copied to local disk once instead of read each epoch.
_NETWORK_FILESYSTEMS = frozenset(
    "9p afs beegfs ceph cifs davfs glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 pvfs2 smb3 smbfs virtiofs wekafs".split()
)


@dataclass(frozen=True)
class Volume:
    """A place that holds files.

    Attributes:
        url: what identifies the place: an fsspec URL, or an absolute directory; no trailing slash. Not to be printed as
            it is, since a URL may carry credentials: use :func:`safe_url`.
        name: the path as the user wrote it, for messages.
        storage_options: arguments of the fsspec driver. Not part of equality, of ``repr`` or of anything saved.
        hedge_seconds: a second request is made for an object of up to 8 MiB whose first has not been answered for this
            long; 0 for never. It cuts the longest waits and adds requests.
    """

    url: str
    name: str = field(compare=False)
    storage_options: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    hedge_seconds: float = field(default=0.0, compare=False)

    @staticmethod
    def of(
        path: str | os.PathLike[str] | Volume,
        storage_options: Mapping[str, Any] | None = None,
        *,
        hedge_seconds: float = 0.0,
    ) -> Volume:
        """Resolve what a user wrote.

        Args:
            path: a ``/Volumes/…`` path, with or without ``dbfs:``; an fsspec URL; a directory; or a Volume.
            storage_options: arguments of the fsspec driver, such as ``endpoint_url`` or ``anon``.
            hedge_seconds: see :class:`Volume`.

        Raises:
            VolumeError: the path is empty, a mangled URL, or a ``/Volumes`` path that is neither mounted nor mapped.
        """
        if isinstance(path, Volume):
            options = path.storage_options if storage_options is None else dict(storage_options)
            return replace(path, storage_options=options, hedge_seconds=hedge_seconds or path.hedge_seconds)
        name = os.fspath(path)
        if not isinstance(name, str) or not name:
            raise VolumeError(f"a volume path must be a non-empty str or os.PathLike, got {path!r}")
        return Volume(_resolve(name), safe_url(name.rstrip("/") or "/"), dict(storage_options or {}), hedge_seconds)

    @property
    def directory(self) -> str | None:
        """The local directory, when plain ``open`` reaches the files; None for a URL."""
        return None if _SCHEME.match(self.url) else self.url

    @property
    def in_place(self) -> bool:
        """Whether the files already lie on a plain local disk, so that a cache would only copy them."""
        return self.directory is not None and not is_network_filesystem(filesystem_type(self.directory))

    def join(self, relative: str) -> str:
        """The full path or URL of a file, given its path in the volume with ``/`` as separator."""
        return f"{self.url.rstrip('/')}/{relative}" if relative else self.url

    def safe_join(self, relative: str) -> str:
        """The same, fit for a message; see :func:`safe_url`."""
        return safe_url(self.join(relative))

    def __repr__(self) -> str:
        return f"Volume({safe_url(self.url)!r})"

    def child(self, relative: str) -> Volume:
        """The volume rooted at a folder of this one."""
        return replace(self, url=self.join(relative), name=f"{self.name.rstrip('/')}/{relative}")

    def __str__(self) -> str:
        return self.name


def _resolve(name: str) -> str:
    if name.startswith("dbfs:/Volumes/"):
        name = name[len("dbfs:") :]
    if name == _VOLUMES_ROOT or name.startswith(_VOLUMES_ROOT + "/"):
        return _resolve_volumes_path(name)
    scheme = _SCHEME.match(name)
    if scheme:
        if scheme[1].lower() in {"file", "local"}:
            return os.path.abspath(unquote(urlsplit(name).path) or "/")
        return name.rstrip("/")
    mangled = _ONE_SLASH.match(name)
    if mangled:
        # Path("s3://b/k") becomes s3:/b/k (Lightning#18786), and dbfs:/x was once written to a local ./dbfs:/x.
        # Neither may ever be taken for a directory of that name.
        remedy = (
            "DBFS is not supported; use /Volumes/<catalog>/<schema>/<volume>/…"
            if mangled[1] == "dbfs"
            else f"if a URL went through pathlib, pass it as a str: {mangled[1]}://…"
        )
        raise VolumeError(f"{safe_url(name)!r} is neither a URL nor a directory; {remedy}")
    return os.path.abspath(os.path.expanduser(name))


def _resolve_volumes_path(name: str) -> str:
    parts = [part for part in name.split("/")[2:] if part]
    if any(part in {".", ".."} for part in parts):
        raise VolumeError(f"{name!r}: '.' and '..' are not allowed in a /Volumes path")
    if len(parts) < 3:  # noqa: PLR2004 - catalog, schema, volume
        raise VolumeError(f"{name!r} is not a volume path; it must look like /Volumes/<catalog>/<schema>/<volume>/…")
    root = os.environ.get(VOLUMES_VARIABLE)
    if root:
        if root.startswith(_VOLUMES_ROOT + "/"):
            raise VolumeError(f"{VOLUMES_VARIABLE}={root!r} must be a directory or URL outside /Volumes")
        return "/".join([_resolve(root).rstrip("/"), *parts])
    if os.path.isdir("/".join([_VOLUMES_ROOT, *parts[:3]])):
        return "/".join([_VOLUMES_ROOT, *parts])
    raise VolumeError(
        f"{name!r}: no volume is mounted at {_VOLUMES_ROOT}/{'/'.join(parts[:3])} on this machine. "
        f"Set {VOLUMES_VARIABLE} to the directory or URL that stands for {_VOLUMES_ROOT} "
        f"(for example {VOLUMES_VARIABLE}=s3://my-bucket/volumes), or pass the storage URL itself."
    )


def safe_url(url: str) -> str:
    """The URL without the user, password and query that may hold credentials: fit for a message."""
    if not _SCHEME.match(url):
        return url
    parts = urlsplit(url)
    # abfs://container@account is an address, not a credential; only user:password@host is.
    userinfo, at, host = parts.netloc.rpartition("@")
    netloc = f"***@{host}" if ":" in userinfo else f"{userinfo}{at}{host}"
    # '?' and '#' are legal in object keys, so only the schemes that carry signatures in the query lose it.
    tail = parts.path if parts.scheme in {"http", "https"} else url[len(f"{parts.scheme}://{parts.netloc}") :]
    return f"{parts.scheme}://{netloc}{tail}"


def filesystem_type(path: str) -> str:
    """The type of the filesystem that holds ``path`` (``ext4``, ``fuse.rclone``, …), or "" where it is not known."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            mounts = file.read()
    except OSError:
        return ""  # not Linux: everything counts as local
    # By name first: to resolve links on a mount whose server has gone away would wait for it.
    kind = mounted_type(mounts, os.path.abspath(path))
    return kind if is_network_filesystem(kind) else mounted_type(mounts, os.path.realpath(path))


def mounted_type(mounts: bytes, path: str) -> str:
    """The type of the filesystem at an absolute path, by the text of ``/proc/self/mountinfo`` (proc(5)); "" if none."""
    wanted, best, kind = os.fsencode(path), b"", b""
    for line in mounts.splitlines():
        fields, _, tail = line.partition(b" - ")
        mount = _OCTAL.sub(lambda found: bytes([int(found[1], 8)]), fields.split()[4])
        if (wanted == mount or wanted.startswith(mount.rstrip(b"/") + b"/")) and len(mount) >= len(best):
            best, kind = mount, tail.split()[0]
    return os.fsdecode(kind)


def is_network_filesystem(kind: str) -> bool:
    """Whether a filesystem type is a mount of something remote."""
    # fuseblk (NTFS) and overlays in user space are local disks; every other FUSE mount is taken for a network.
    return (
        kind in _NETWORK_FILESYSTEMS or kind == "fuse" or (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs")
    )
