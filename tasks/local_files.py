"""Finds and opens files, local or remote, plain or compressed, with errors that name them."""

import bz2
import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import lzma
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import tensorflow as tf

from convt5 import errors
from convt5.runtime import foreign_files
from convt5.runtime.whole_files import is_remote

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
"""What opens a file whose name ends so."""

COMPRESSION_RULE = f"Of compressed files those are read whose names end in {', '.join(OPENERS)}."

_WHOLE_BYTES = 2**24
_NUM_BLOCKS = 64
_BLOCK_BYTES = 2**16

InvalidUtf8 = Literal["refuse", "replace", "skip"]
"""What becomes of text with bytes that are no UTF-8: an error that names file and line, U+FFFD in
their place, or nothing of the document or row that holds them."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or glob, or several."""


def find(paths: Paths) -> list[str]:
    """Returns the files of one or several paths, globs or folders, in order, each of them once.

    A file or folder of just that name comes before what the name matches as a glob; `**` matches
    folders of any depth. A folder stands for the files in it and below. No name that begins with a
    dot is matched, unless the glob begins so itself.

    Raises:
        UserError: one that matches no file.
    """
    patterns = [paths] if isinstance(paths, str | os.PathLike) else paths
    found: dict[str, str] = {}
    for pattern in patterns:
        for name in _matches(os.fspath(pattern)):
            found.setdefault(name if is_remote(name) else os.path.abspath(name), name)
    return list(found.values())


def _matches(pattern: str) -> list[str]:
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):
        return [pattern]
    is_folder = tf.io.gfile.isdir if is_remote(pattern) else os.path.isdir
    if is_folder(pattern):
        return _files_below(pattern)
    matched = (
        tf.io.gfile.glob(pattern) if is_remote(pattern) else glob.glob(pattern, recursive=True)
    )
    names = [name for name in matched if not is_folder(name)]
    if not os.path.basename(pattern).startswith("."):
        names = [name for name in names if not os.path.basename(name).startswith(".")]
    if names:
        return sorted(names)
    folder, name = os.path.split(pattern)
    siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    raise errors.UserError(
        f"text path={pattern!r} matches no file; set it to a path or a glob of text files "
        f"(working directory {os.getcwd()!r}).{errors.suggest(name, siblings)}"
    )


def _files_below(folder: str) -> list[str]:
    walk = tf.io.gfile.walk if is_remote(folder) else os.walk
    found = []
    for parent, folders, names in walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    if not found:
        raise errors.UserError(
            f"text path={folder!r} is a folder without files; set it to files with text."
        )
    return sorted(found)


@dataclasses.dataclass
class Tally:
    """What was met while files were read.

    Attributes:
        files, empty_files: how many were read, and in how many was nothing.
        documents, text_bytes: documents or rows that were taken, and the bytes of their text.
        replaced, skipped: documents or rows with bytes that are no UTF-8, by what became of them.
    """

    files: int = 0
    empty_files: int = 0
    documents: int = 0
    text_bytes: int = 0
    replaced: int = 0
    skipped: int = 0

    def faults(self) -> str:
        """Returns what a user should know of, or nothing."""
        said = {
            "empty files": self.empty_files,
            "documents with bytes that are no UTF-8, which were replaced": self.replaced,
            "documents left out for bytes that are no UTF-8": self.skipped,
        }
        return ", ".join(f"{count:,} {what}" for what, count in said.items() if count)


def check_invalid_utf8(policy: str) -> None:
    """Raises `UserError` for a value that `InvalidUtf8` does not have."""
    if policy not in ("refuse", "replace", "skip"):
        raise errors.UserError(
            f"invalid_utf8={policy!r} must be 'refuse', 'replace' or 'skip': an error, U+FFFD in "
            "place of the bytes, or leaving out what holds them."
        )


def text_lines(file: Iterable[bytes]) -> Iterator[str]:
    """Yields lines as they are, without their ends: a line feed, and a carriage return before it.

    Nothing else ends a line: a carriage return alone, a form feed, U+0085 and U+2028 are text. A
    byte order mark at the start is none. Bytes that are no UTF-8 become halves of characters, for
    `readable` to deal with.
    """
    for number, line in enumerate(file):
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.endswith(b"\n"):
            line = line[:-1].removesuffix(b"\r")
        yield line.decode("utf-8", "surrogateescape")


def readable(text: str, name: str, line: int, policy: InvalidUtf8, tally: Tally) -> str | None:
    """Returns text as `policy` has it where bytes are no UTF-8; None leaves it out.

    Args:
        text: from `text_lines`.
        name: of the file.
        line: its number, from 1.
        policy: what becomes of such bytes.
        tally: counts them.

    Raises:
        UserError: they are to be refused.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        if policy == "refuse":
            byte = ord(text[error.start]) & 0xFF
            raise errors.UserError(
                f"file {name!r}, line {line} is not UTF-8 (byte 0x{byte:02x} after "
                f"{text[: error.start][-20:]!r}); convert the file (iconv -f latin1 -t utf-8), "
                "leave it out of the path, or set invalid_utf8 to 'replace' or 'skip'. "
                f"{COMPRESSION_RULE}"
            ) from None
    if policy == "skip":
        tally.skipped += 1
        return None
    tally.replaced += 1
    return replaced(text)


def replaced(text: str) -> str:
    """Returns text from `text_lines` with U+FFFD in place of bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def identity(name: str) -> tuple[str, int, int]:
    """Returns a file's full name, its size and when it last changed: other for each copy."""
    if is_remote(name):
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
    if is_remote(name):
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
    """Opens a file to read its bytes, decompressed as its name says.

    What it unpacks to and its lines are bounded, as `foreign_files.Text` says.
    """
    suffix = pathlib.PurePath(name).suffix.lower()
    stored = identity(name)[1] if suffix in OPENERS else None
    file: Any = tf.io.gfile.GFile(name, "rb") if is_remote(name) else name
    if suffix in OPENERS:
        file = OPENERS[suffix](file, "rb")
    elif file is name:
        file = io.FileIO(name)
    return io.BufferedReader(foreign_files.Text(file, stored), _BLOCK_BYTES)


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns what goes wrong with the bytes of a file into the user's error."""
    try:
        yield
    except (
        *(EOFError, lzma.LZMAError, zlib.error, OSError),
        *(tf.errors.OpError, foreign_files.TooLargeError),
    ) as error:
        raise errors.UserError(
            f"text file {name!r} cannot be read ({error}); is it complete?"
        ) from error
