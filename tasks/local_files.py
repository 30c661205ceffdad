"""Finds and opens files, local or remote, plain or compressed, with errors that name them."""

import bz2
import contextlib
import glob
import gzip
import lzma
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from convt5 import errors

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
"""What opens a file whose name ends so."""


def find(pattern: str) -> list[str]:
    """Returns the files that a path or glob matches, in order; `**` matches folders of any depth.

    Raises:
        UserError: there is none.
    """
    pattern = os.path.expanduser(pattern)
    if "://" in pattern:
        names = [name for name in tf.io.gfile.glob(pattern) if not tf.io.gfile.isdir(name)]
    else:
        names = [name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name)]
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
    """Returns a file's full name, its size and when it last changed."""
    if "://" in name:
        stat = tf.io.gfile.stat(name)
        return name, stat.length, stat.mtime_nsec
    stat = os.stat(name)
    return os.path.abspath(name), stat.st_size, stat.st_mtime_ns


def open_bytes(name: str) -> Any:
    """Opens a file to read its bytes, decompressed as its name says."""
    opener = OPENERS.get(pathlib.PurePath(name).suffix, open)
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
            f"text file {name!r} is not UTF-8 ({error}); convert it, or leave it out of the path."
        ) from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, OSError) as error:
        raise errors.UserError(
            f"text file {name!r} cannot be read ({error}); is it complete?"
        ) from error
