"""The directory of a cache: where it is, whose it is, and what lies where in it.

<root>/CACHEDIR.TAG   tells backup tools to pass by, and us that the directory is ours
       locks          one byte for each thing to lock; never unlinked
       usage          bytes in use, shared by all processes
       catalogue/     which source was used when
       files/         entries that stay, by source
       transient/     files that did not fit, for as long as somebody reads them
       parts/         downloads under way
       trash/         what is being removed
       manifests/     listings of volumes, put there by airdata.manifest
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing.util
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from airdata.cache.names import FIRST, EntryName
from airdata.errors import AirdataError
from airdata.volume import filesystem_type, is_network_filesystem

__all__ = [
    "DIRECTORY_VARIABLE",
    "CacheDirectoryError",
    "Layout",
    "default_directory",
    "find_root",
    "prepare_root",
    "private_directory",
    "remove_tree",
    "scratch_directory",
]

DIRECTORY_VARIABLE = "AIRDATA_CACHE_DIR"

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# A cache of the Python package airdata: copies of files that lie elsewhere. See https://bford.info/cachedir/\n"
)
_OWN_FOLDER = "airdata"
_OWN_NAMES = frozenset("CACHEDIR.TAG locks usage catalogue files transient parts trash manifests".split())


class CacheDirectoryError(AirdataError, OSError):
    """A directory that cannot be a cache: another user's, or not a directory."""


@dataclass(frozen=True)
class Layout:
    """The paths of one cache; see the top of this module."""

    root: str

    @property
    def locks(self) -> str:
        """One byte for each thing to lock."""
        return os.path.join(self.root, "locks")

    @property
    def usage(self) -> str:
        """Bytes in use."""
        return os.path.join(self.root, "usage")

    @property
    def catalogue(self) -> str:
        """Which source was used when."""
        return os.path.join(self.root, "catalogue")

    @property
    def files(self) -> str:
        """Entries that stay."""
        return os.path.join(self.root, "files")

    @property
    def transient(self) -> str:
        """Files that pass through."""
        return os.path.join(self.root, "transient")

    @property
    def parts(self) -> str:
        """Downloads under way."""
        return os.path.join(self.root, "parts")

    @property
    def trash(self) -> str:
        """What is being removed."""
        return os.path.join(self.root, "trash")

    def first(self, name: EntryName) -> str:
        """Where an entry that stays lies, if no other one took the place before it."""
        return f"{self.root}/files/{name.generation}/{FIRST}/{name.tail}"

    def other(self, name: EntryName) -> str:
        """Where it lies otherwise."""
        return f"{self.root}/files/{name.generation}/{name.digest[:2]}/{name.digest}/{name.tail}"

    def passing(self, name: EntryName) -> str:
        """Where the same file lies while it only passes through."""
        return f"{self.root}/transient/{name.digest}/{name.tail}"

    def part(self, name: EntryName) -> str:
        """What its download is written to. One name is enough: only the holder of the entry's lock writes."""
        return f"{self.root}/parts/{name.digest}.part"


def default_directory(environ: Mapping[str, str] | None = None) -> str:
    """``$AIRDATA_CACHE_DIR``, else ``airdata`` in the user's cache folder, which stays from run to run.

    When that folder is on a network filesystem, as home directories of clusters are, or there is none, the answer is a
    folder of this user under the machine's temporary directory.
    """
    environ = os.environ if environ is None else environ
    if environ.get(DIRECTORY_VARIABLE):
        return os.path.abspath(os.path.expanduser(environ[DIRECTORY_VARIABLE]))
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(base) and not is_network_filesystem(filesystem_type(base)):
        return os.path.join(base, "airdata")
    return scratch_directory()


def scratch_directory() -> str:
    """This user's folder under the machine's temporary directory."""
    return os.path.join(tempfile.gettempdir(), f"airdata-{os.geteuid()}")


def private_directory() -> str:
    """A directory of this process alone, removed when it ends in order."""
    directory = tempfile.mkdtemp(prefix="airdata-")
    # Not atexit: that does not run in the workers of a DataLoader.
    multiprocessing.util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=0)
    return directory


def find_root(directory: str) -> str:
    """The root that :func:`prepare_root` uses or would use for a directory; changes nothing."""
    try:
        names = os.listdir(directory)
    except OSError:
        return directory
    # When something of the user's lies here, the cache keeps to a folder of its own.
    return directory if _TAG in names or _OWN_NAMES.issuperset(names) else os.path.join(directory, _OWN_FOLDER)


def prepare_root(directory: str) -> Layout:
    """Make a directory a cache, or find that it is one. Any number of processes may do so at once.

    Raises:
        CacheDirectoryError: it belongs to another user, or a part of it is not a plain directory.
        OSError: it cannot be made or written.
    """
    _make_private(directory)
    root = find_root(directory)
    if root != directory:
        _make_private(root)
    # First of all files, so that whoever looks while we are at it sees an empty directory or the tag.
    tag = os.path.join(root, _TAG)
    if not os.path.exists(tag):
        with open(tag, "w", encoding="ascii") as file:
            file.write(_TAG_TEXT)
    if stat.S_IMODE(os.stat(root).st_mode) & 0o077:
        os.chmod(root, 0o700)
    layout = Layout(root)
    for folder in (layout.files, layout.transient, layout.parts, layout.trash, layout.catalogue):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise CacheDirectoryError(errno.ENOTDIR, "a cache's folder is a link or a file; remove it", folder)
    return layout


def _make_private(directory: str) -> None:
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    user = os.geteuid()
    # Both the name and what a link leads to: in /tmp anybody may have put either there before us.
    if os.lstat(directory).st_uid != user or os.stat(directory).st_uid != user:
        raise CacheDirectoryError(
            errno.EPERM, f"belongs to another user than {user}; choose another cache directory", directory
        )
    if not os.path.isdir(directory):
        raise CacheDirectoryError(errno.ENOTDIR, "is not a directory; choose another cache directory", directory)


def remove_tree(path: str) -> int:
    """Remove a directory with all below it, following no link, and return the bytes of its files.

    What somebody else removes at the same time is no error; what cannot be removed stays.
    """
    if os.path.islink(path):
        return _remove_file(path)
    freed = 0
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            freed += _remove_file(os.path.join(folder, name))
        for name in folders:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(folder, name))
            if os.path.islink(os.path.join(folder, name)):
                _remove_file(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return freed


def _remove_file(path: str) -> int:
    try:
        status = os.lstat(path)
        os.unlink(path)
    except OSError:
        return 0
    return status.st_size if status.st_nlink == 1 else 0  # else another name keeps them
