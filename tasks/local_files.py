"""Finds and opens files, local or remote, plain or compressed, with errors that name them."""

import bz2
import contextlib
import glob
import gzip
import hashlib
import lzma
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from convt5 import errors

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
"""What opens a file whose name ends so."""

COMPRESSION_RULE = f"Of compressed files those are read whose names end in {', '.join(OPENERS)}."

_WHOLE_BYTES = 2**24
_NUM_BLOCKS = 64
_BLOCK_BYTES = 2**16

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or glob, or several."""


def find(paths: Paths) -> list[str]:
    """Returns the files of one or several paths or globs, in order, each of them once.

    A file of just that name comes before what the name matches as a glob; `**` matches folders of
    any depth. Globs match no name that begins with a dot, unless they begin so themselves.

    Raises:
        UserError: one that matches no file.
    """
    patterns = [paths] if isinstance(paths, str | os.PathLike) else paths
    found: dict[str, str] = {}
    for pattern in patterns:
        for name in _matches(os.fspath(pattern)):
            found.setdefault(name if "://" in name else os.path.abspath(name), name)
    return list(found.values())


def _matches(pattern: str) -> list[str]:
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [pattern]
    if "://" in pattern:
        names = [name for name in tf.io.gfile.glob(pattern) if not tf.io.gfile.isdir(name)]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
    if not os.path.basename(pattern).startswith("."):
        names = [name for name in names if not os.path.basename(name).startswith(".")]
    if names:
        return sorted(names)
    if os.path.isdir(pattern):
        raise errors.UserError(
            f"text path={pattern!r} is a folder; set it to the files in it, such as "
            f"{os.path.join(pattern, '*.txt')!r}."
        )
    folder, name = os.path.split(pattern)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise errors.UserError(
        f"text path={pattern!r} matches no file; set it to a path or a glob of text files "
        f"(working directory {os.getcwd()!r}).{errors.suggest(name, siblings)}"
    )


def identity(name: str) -> tuple[str, int, int]:
    """Returns a file's full name, its size and when it last changed: other for each copy."""
    if "://" in name:
        stat = tf.io.gfile.stat(name)
        return name, stat.length, stat.mtime_nsec
    stat = os.stat(name)
    return os.path.abspath(name), stat.st_size, stat.st_mtime_ns


def contents(name: str) -> tuple[str, int, str | int]:
    """Returns what stays as it is where a file is copied to another folder or machine.

    That is its last name, its size and a digest of its bytes: of all of them up to 16 MiB, of 64
    blocks that are spread evenly over a larger file. Remote files are not read; when they last
    changed stands for their bytes.
    """
    if "://" in name:
        _, size, changed = identity(name)
        return os.path.basename(name), size, changed
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return os.path.basename(name), size, digest.hexdigest()


def uncompressed(name: str) -> str:
    """Returns a file's name without what says that it is compressed."""
    path = pathlib.PurePath(name)
    return str(path.with_suffix("")) if path.suffix.lower() in OPENERS else name


def suffix(name: str) -> str:
    """Returns how a file's name ends before what says that it is compressed, such as `.txt`.

    It is in lower case, whatever the name has.
    """
    return pathlib.PurePath(uncompressed(name)).suffix.lower()


def is_json_lines(name: str) -> bool:
    """Whether a file is JSON by its name: a value in each line, also where it is called .json."""
    suffixes = pathlib.PurePath(name.lower()).suffixes
    return ".jsonl" in suffixes or suffix(name) in (".ndjson", ".json")


def open_bytes(name: str) -> Any:
    """Opens a file to read its bytes, decompressed as its name says."""
    opener = OPENERS.get(pathlib.PurePath(name).suffix.lower(), open)
    if "://" not in name:
        return opener(name, "rb")
    raw = tf.io.gfile.GFile(name, "rb")
    return raw if opener is open else opener(raw, "rb")


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns what goes wrong with the bytes of a file into the user's error."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise errors.UserError(
            f"text file {name!r} is not UTF-8 ({error}); convert it, or leave it out of the path. "
            f"{COMPRESSION_RULE}"
        ) from error
    except (EOFError, lzma.LZMAError, zlib.error, OSError, tf.errors.OpError) as error:
        raise errors.UserError(
            f"text file {name!r} cannot be read ({error}); is it complete?"
        ) from error
