"""Files that appear under their name only when complete, and that are not written through links."""

import contextlib
import hashlib
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator

from etils import epath

AnyPath = pathlib.Path | epath.Path

_PARTIAL = ".partial"
_LONG_NAME = 200
"""Bytes of a name to which more cannot be added on every file system."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path names a file or folder of an object store, such as gs://bucket/folder."""
    return "://" in os.fspath(path)


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[AnyPath]:
    """Gives a file to write, which takes the place of `path` unless that fails or is killed.

    Where `path` is a link, the link is replaced and what it leads to stays. The file lies beside
    it under a name that nobody can foresee; a kill leaves it behind, for `remove_left_overs`.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}{_PARTIAL}")
    if is_remote(path):
        yield partial
        partial.replace(path)
        return
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remove_left_overs(folder: AnyPath) -> None:
    """Removes what killed processes left behind in a folder that no other process writes."""
    for path in pathlib.Path(folder).glob(f".{'[0-9a-f]' * 16}{_PARTIAL}"):
        path.unlink(missing_ok=True)


def unfinished(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """Returns where a folder lies beside its place until it is complete: hidden, same each time.

    Its name fits where that of `folder` does; a link in its place is removed, not followed.
    """
    name = folder.name
    if len(os.fsencode(name)) > _LONG_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    path = folder.with_name(f".{name}.{ending}")
    if path.is_symlink():
        path.unlink()
    return path


def not_followed(path: str, flags: int) -> int:
    """Opens a regular file, and nothing through a link: an `opener` of `open`.

    Raises:
        OSError: a link, a folder, a pipe or a device lies there.
    """
    # A pipe would wait for its other end.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(file)
        raise OSError(0, "it is no regular file with one name", path)
    return file


def kind(path: os.PathLike) -> str | None:
    """Returns what lies at a path, such as "a folder" or "a link"; None where nothing does."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "a device")
