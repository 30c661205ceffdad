"""Folders of checkpoints, whose names are taken literally or refused; of runs; of the user's cache.

orbax finds its files by glob patterns that begin with the folder's name, and TensorStore
interprets some characters of a local name. Either could write what nobody can read again.
"""

import glob
import os
import pathlib
from collections.abc import Iterator

from etils import epath
from etils.epath import gpath

from convt5 import errors
from convt5.runtime.atomic_files import is_remote

_STORES = ("gs", "s3", "az", "hf")
"""URL schemes of object stores; epath also accepts local folders such as /gs for them."""

_LONGEST_INSIDE = 200
"""Bytes of the longest name that a checkpoint adds to its run directory, with a margin."""


class _LocalFolder(gpath.PosixGPath):
    """A local folder whose own name is taken literally in glob patterns."""

    def glob(self, pattern: str) -> Iterator["_LocalFolder"]:
        for name in glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)):
            yield type(self)(name)


def literal(path: epath.PathLike) -> epath.Path:
    """Returns the absolute path of a checkpoint folder, as orbax and TensorStore can use it.

    Raises:
        UserError: they would misinterpret the name.
    """
    name = os.fspath(path)
    check(name)
    return epath.Path(name) if is_remote(name) else _LocalFolder(_absolute(name))


def run_folder(model: epath.PathLike, kept: str) -> epath.Path | None:
    """Returns the folder with the file `kept` of the run or model that contains `model`, or None.

    Only RUN, RUN/checkpoints and RUN/checkpoints/STEP belong to RUN. Files in other parent folders
    of a model, such as /tmp/config.gin, may be anybody's.
    """
    name = os.fspath(model)
    folder = epath.Path(name if is_remote(name) else os.path.abspath(os.path.expanduser(name)))
    run = folder
    for inside in (folder, folder.parent):
        if inside.name == "checkpoints" and not (folder / kept).exists():
            run = inside.parent
            break
    return run if (run / kept).exists() else None


def user_cache() -> pathlib.Path | None:
    """Returns convt5's folder in the user's cache (XDG_CACHE_HOME, by default ~/.cache).

    Returns None for a user without a home, such as a number that no container knows.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if base.startswith("~") else pathlib.Path(base, "convt5")


def needed_cache(what: str) -> pathlib.Path:
    """Returns `user_cache()` for what cannot do without, such as "text path='a.txt' is stored".

    Raises:
        UserError: there is none.
    """
    cache = user_cache()
    if cache is None:
        raise errors.UserError(
            f"{what} in the user's cache, but this user has no home folder; set XDG_CACHE_HOME to "
            "a folder that can be written."
        )
    return cache


def check(path: epath.PathLike, *, what: str = "the checkpoint folder") -> None:
    """Raises `UserError` if checkpoints cannot be stored in a folder of this name.

    Args:
        path: the folder, which need not exist.
        what: the setting to name in the message, such as `run_dir`.
    """
    name = os.fspath(path)
    if fault := _remote_fault(name) if is_remote(name) else _local_fault(name):
        raise errors.UserError(f"{what}={name!r} {fault}; choose another folder.")


def check_outside_checkpoints(path: epath.PathLike, *, what: str) -> None:
    """Raises `UserError` for an output that would lie among, or in, the checkpoints of a run.

    There it would be taken for a checkpoint, or be deleted with one.

    Args:
        path: the file or folder, which need not exist.
        what: the setting to name in the message, such as `run_dir`.
    """
    name = os.fspath(path)
    if is_remote(name) and _remote_fault(name):
        return  # Runs are in no other stores.
    output = epath.Path(name if is_remote(name) else os.path.realpath(os.path.expanduser(name)))
    for folder in (output, *output.parents):
        if folder.name == "checkpoints" and _holds_steps(folder):
            raise errors.UserError(
                f"{what}={name!r} lies in {os.fspath(folder)!r}, which holds the checkpoints of a "
                "run and nothing else; choose a place outside."
            )


def _holds_steps(folder: epath.Path) -> bool:
    """Returns whether one of the entries of a folder is a checkpoint."""
    try:
        entries = folder.iterdir() if folder.is_dir() else ()
        return any(entry.name.isdigit() and (entry / "about").exists() for entry in entries)
    except OSError:  # It cannot be read.
        return False


def _remote_fault(name: str) -> str | None:
    # Orbax takes the URLs of other stores for local folders.
    return None if name.startswith("gs://") else "must be a local folder, or begin with gs://"


def _local_fault(name: str) -> str | None:
    if "\0" in name:
        return "holds a zero character, which no file system takes"
    folder = _absolute(name)
    shown = "" if folder == name else f"({folder!r}) "
    parts = folder.split(os.sep)
    try:
        length = len(folder.encode())
    except UnicodeEncodeError:
        return f"{shown}holds bytes that are no UTF-8, which checkpoints cannot be read from"
    if "\\" in folder:
        return f"{shown}holds a backslash, which checkpoints would be written without"
    if any(part.endswith("gs:") for part in parts):
        return f"{shown}has a part that ends in 'gs:', which is taken for Google Cloud Storage"
    if parts[1] in _STORES:
        return f"{shown}begins with /{parts[1]}, which is taken for {parts[1]}://"
    exists = next(p for p in _upwards(folder) if os.path.exists(p))
    if length + _LONGEST_INSIDE > os.pathconf(exists, "PC_PATH_MAX"):
        return f"is too long: {length} bytes, to which checkpoints add up to {_LONGEST_INSIDE}"
    longest = os.pathconf(exists, "PC_NAME_MAX")
    if any(len(part.encode()) > longest for part in parts):
        return f"has a part longer than {longest} bytes, the most that this file system takes"
    return None


def _absolute(name: str) -> str:
    path = os.path.expanduser(name)
    # TensorStore resolves `link/..` to the parent of the link, the system to that of its target.
    return os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)


def _upwards(folder: str) -> Iterator[str]:
    """Yields a folder and all its parents."""
    while folder != os.sep:
        yield folder
        folder = os.path.dirname(folder)
    yield folder
