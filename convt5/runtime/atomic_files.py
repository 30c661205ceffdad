"""Files that are written atomically, and never through links."""

import contextlib
import errno
import hashlib
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator

from etils import epath

from convt5.runtime import file_locks

AnyPath = pathlib.Path | epath.Path

_PARTIAL = ".partial"
_PARTIALS = f".{'[0-9a-f]' * 16}{_PARTIAL}"
_SECONDS_HELD = 3600.0
"""What changed later may belong to a live process on a file system without locks."""
_LONG_NAME = 200
"""Longest file name in bytes that still allows a suffix on every file system."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

_OF_EQUAL_FILES = ("st_mode", "st_size", "st_mtime_ns")


def is_remote(path: epath.PathLike) -> bool:
    """Returns whether a path is in an object store, such as gs://bucket/folder."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[AnyPath]:
    """Yields a temporary file, which replaces `path` on success.

    If `path` is a link, the link is replaced, not its target. The temporary file is in the same
    folder, with an unpredictable name; after a kill, a later call for that folder deletes it.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}{_PARTIAL}")
    if is_remote(path):
        yield partial
        partial.replace(path)
        return
    remove_abandoned(path.parent, _PARTIALS)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        file_locks.lock(file)
        yield partial
        os.fsync(file)  # Otherwise the name may outlive the contents when the machine stops.
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def replace_text(path: AnyPath, text: str) -> None:
    """Replaces a file atomically: the name always refers to a complete file."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())


def sync(folder: pathlib.Path) -> None:
    """Puts the files of a folder on the disk, before its name says that it is whole.

    Otherwise the name may outlive them when the machine stops.
    """
    for path in folder.rglob("*"):
        if kind(path) == "a file":
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def check_replaceable(path: pathlib.Path) -> None:
    """Raises `OSError` where a local file could not be replaced later; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def to_write_again(folder: epath.PathLike) -> str:
    """Returns what a user can do about a folder that cannot be written any more."""
    if not is_remote(folder) and not os.path.lexists(folder):
        return "It was removed, or its disk is gone: put it back"
    return "Free space there, change its permissions, or move away what is in its place"


def remove_left_overs(folder: AnyPath) -> None:
    """Removes temporary files of killed processes from a folder that no other process writes."""
    for path in pathlib.Path(folder).glob(_PARTIALS):
        path.unlink(missing_ok=True)


def remove_abandoned(folder: AnyPath, pattern: str) -> None:
    """Removes what killed processes left unfinished in a folder that others may write now.

    Kept is what a process has locked, and what was changed lately. Nothing is raised: others may
    remove the same, or own it.

    Args:
        folder: a local folder.
        pattern: of the names of unfinished files and folders, which their processes lock.
    """
    for path in pathlib.Path(folder).glob(pattern):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if time.time() - _last_change(path) > _SECONDS_HELD and file_locks.lock(file):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(file)


def _last_change(path: pathlib.Path) -> float:
    """Returns when a file, or a folder or one of its files, was last changed."""
    inside = path.iterdir() if path.is_dir() else ()
    return max(each.lstat().st_mtime for each in (path, *inside))


def unfinished(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """Returns the hidden path beside a folder at which it is written until it is complete.

    The path depends on the arguments alone. Long names are shortened; a link at this path is
    removed, not followed.
    """
    name = folder.name
    if len(os.fsencode(name)) > _LONG_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    path = folder.with_name(f".{name}.{ending}")
    if path.is_symlink():
        path.unlink()
    return path


def not_followed(path: str, flags: int) -> int:
    """Opens a regular file, never through a link: an `opener` for `open`.

    Raises:
        OSError: the path is a link, a folder, a pipe or a device.
    """
    # Opening a pipe without this flag would block.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise OSError(0, "it is no regular file with one name", path)
    return file


def check_same(file: int, path: os.PathLike[str] | str) -> None:
    """Raises `OSError` if a path no longer names an open file or folder: writes would be lost.

    A link at the end of the path is not followed.
    """
    found, opened = os.lstat(path), os.fstat(file)
    # Network file systems may number a file anew at each look.
    is_alike = all(getattr(found, n) == getattr(opened, n) for n in _OF_EQUAL_FILES)
    if not os.path.samestat(found, opened) and not is_alike:
        raise OSError(errno.ESTALE, "another file was put in its place", os.fspath(path))


def make_folder(path: AnyPath) -> None:
    """Creates a folder unless it exists; raises `OSError` for a link to one."""
    path.mkdir(parents=True, exist_ok=True)
    if not is_remote(path) and kind(path) != "a folder":
        raise NotADirectoryError(errno.ENOTDIR, f"it is {kind(path)}", os.fspath(path))


def kind(path: os.PathLike) -> str | None:
    """Returns the kind of a path, such as "a folder" or "a link"; None if it does not exist."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "a device")
