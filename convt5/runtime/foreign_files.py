"""Reads JSON, lines of text and NumPy arrays from untrusted files.

What a file states about itself is compared with its size before memory is allocated. Any error is a
`ValueError` that says why, or a `UserError` that also names the file.
"""

import collections
import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from etils import epath

from convt5 import errors
from convt5.runtime import atomic_files

MOST_JSON_BYTES = 2**23
"""Most bytes of a file of settings; Python takes up to 25 times as much memory to hold it."""

MOST_VOCABULARY_BYTES = 2**27
"""Most bytes of a SentencePiece model; those with a million pieces have 20 MB."""

MOST_LINE_BYTES = 2**26
"""Most bytes of a line of text, and so of an example: 64 MiB."""

# Real data does not compress better than to a hundredth, except for small files.
_MOST_RATIO = 100
_ALWAYS_ALLOWED = 2**26
_NUMBERS = "biuf"
_TFDS_CLASS = ("type", "pythonClassName", "python_class_name")
_PIECE = 2**20
_POINTER = b"version https://git-lfs.github.com/spec/"
_SHOWN = 300
_LONGEST_NAME = 255
_MOST_DEPTH = 100
_MOST_DIGITS = 40  # An integer of 128 bits has 39; one of 309 does not convert to a float.


class TooLargeError(ValueError):
    """Raised for a file that holds, or would unpack to, more than is allowed."""


def parse_json(text: str | bytes, *, kind: type = object) -> Any:
    """Parses JSON; raises `ValueError` for invalid text or another kind of value.

    Also refuses nesting deeper than 100, integers of more than 40 digits and repeated keys.
    """
    try:
        value = json.loads(text, object_pairs_hook=with_different_keys, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    if not isinstance(value, kind):
        raise ValueError(f"it holds {type(value).__name__}, not {kind.__name__}")
    return value


def with_different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; raises `ValueError` for a key that is there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} is there twice")
    return result


def read_json(path: epath.PathLike, *, remedy: str, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """Returns the JSON object in a small file.

    Args:
        path: a local or remote file.
        remedy: the remedy for an unreadable file, the end of the message.
        most_bytes: maximum size.

    Raises:
        UserError: the file is missing, not regular, too large, or holds no JSON object.
    """
    try:
        return parse_json(read_bytes(path, most_bytes), kind=dict)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, remedy) from error


def find_json(path: epath.PathLike) -> dict[str, Any] | None:
    """Returns the JSON object in a small file; None if it is missing or unreadable."""
    with contextlib.suppress(OSError):
        return recorded_json(path)
    return None


def recorded_json(path: epath.PathLike) -> dict[str, Any] | None:
    """Returns the JSON object in a small file; None if it is missing or damaged.

    Raises:
        OSError: it is there, and cannot be read. What it tells of may be whole.
    """
    try:
        return parse_json(read_bytes(path, MOST_JSON_BYTES), kind=dict)
    except (FileNotFoundError, ValueError):
        return None


def read_bytes(path: epath.PathLike, most: int) -> bytes:
    """Returns the contents of a small file; raises `TooLargeError` above `most` bytes."""
    check_regular(path)
    with epath.Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"it has more than {most:,} bytes")
    return content


def is_file_name(name: object) -> bool:
    """Returns whether a value names a file in a folder, and cannot lead out of the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    return len(name.encode(errors="surrogatepass")) <= _LONGEST_NAME


def unreadable(path: epath.PathLike, why: BaseException | str, remedy: str) -> errors.UserError:
    """Returns the error for an unreadable file."""
    if _is_pointer(path):
        return errors.UserError(
            f"{os.fspath(path)} is a pointer of Git LFS to the file, and not the file; run git lfs "
            "pull in its repository, or download the file."
        )
    if isinstance(why, OSError):
        why = why.strerror or str(why)
    shown = " ".join(str(why).split())  # It may quote the contents of the file.
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return errors.UserError(f"{os.fspath(path)} cannot be read ({shown}); {remedy}")


def _is_pointer(path: epath.PathLike) -> bool:
    """Returns whether a local file is what Git leaves of a large one where LFS is not installed."""
    name = os.fspath(path)
    if atomic_files.is_remote(name) or not os.path.isfile(name):
        return False
    try:
        with open(name, "rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def check_regular(path: epath.PathLike) -> None:
    """Raises `ValueError` if a path is not a regular file, because opening a pipe may hang."""
    local = os.fspath(path)
    if not atomic_files.is_remote(local) and os.path.exists(local) and not os.path.isfile(local):
        raise ValueError("it is no regular file")


def files_below(folder: str | os.PathLike[str], around: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the files in a folder, at any depth, whose names do not begin with a dot.

    Links are followed, except to a folder that holds them, and run directories are left out. No
    system call is made per file.

    Args:
        folder: the folder.
        around: real paths of the folders that lead to it.

    Raises:
        UserError: a folder cannot be read.
    """
    around = (*around, os.path.realpath(folder))
    try:
        with os.scandir(folder) as scanned:
            entries = [entry for entry in scanned if not entry.name.startswith(".")]
    except OSError as error:
        raise errors.UserError(
            f"folder {os.fspath(folder)!r} cannot be read ({error.strerror}); change its "
            "permissions, or leave it out of the path."
        ) from error
    if len(around) > 1 and is_run({entry.name for entry in entries}):
        return
    for entry in entries:
        # A link that leads nowhere is a file, which its reader refuses.
        is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
        if not is_folder:
            yield entry.path
        elif os.path.realpath(entry.path) not in around:
            yield from files_below(entry.path, around)


def is_run(names: Collection[str]) -> bool:
    """Returns whether a folder with these names in it is a run directory.

    What a run writes is not data: a run inside the folder of its data would find other data when it
    resumes.
    """
    return "config.gin" in names and "checkpoints" in names


def lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file; raises `TooLargeError` for a line of more than 64 MiB."""
    number, rest = 1, b""
    while piece := file.read(_PIECE):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line + b"\n"
        number += len(whole)
        if len(rest) > MOST_LINE_BYTES:
            raise TooLargeError(f"line {number} has more than {MOST_LINE_BYTES:,} bytes")
    if rest:
        yield rest


def lines_as_they_come(stream: IO[bytes], name: str) -> Iterator[bytes]:
    """Yields lines of a pipe or terminal; raises `UserError` for one of more than 64 MiB."""
    for number in itertools.count(1):
        line = stream.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise errors.UserError(
                f"{name}, line {number} has more than {MOST_LINE_BYTES:,} bytes; end each input "
                "with a line feed."
            )
        if not line:
            return
        yield line


class _Reader(io.RawIOBase):
    """Reads what another file holds, and closes it."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


class Text(_Reader):
    """A text file that raises errors while it is read if it cannot be real text.

    Args:
        file: the file of bytes, or the decompressor.
        stored: compressed size in bytes, if compressed.

    Raises:
        TooLargeError: it unpacks to far more than its size, or has a line of more than 64 MiB.
    """

    def __init__(self, file: IO[bytes], stored: int | None = None):
        super().__init__(file)
        self._stored = stored
        self._count = self._in_line = 0

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        buffer[: len(piece)] = piece
        self._count += len(piece)
        if self._stored is not None:
            check_expansion(self._count, self._stored)
        end = piece.rfind(b"\n")
        self._in_line = len(piece) - end - 1 + (self._in_line if end < 0 else 0)
        if self._in_line > MOST_LINE_BYTES:
            raise TooLargeError(f"a line in it has more than {MOST_LINE_BYTES:,} bytes")
        return len(piece)


class Streams(_Reader):
    """The contents of a file of compressed streams, one behind another.

    Python's readers of .xz and .bz2 end without an error where a later stream begins with damage,
    and the rest is lost.

    Args:
        file: the compressed file, or its name.
        new: makes the decompressor of a stream, such as `lzma.LZMADecompressor`.

    Raises:
        EOFError: the file ends inside a stream.
        OSError, lzma.LZMAError: something else than a stream stands there.
    """

    def __init__(self, file: IO[bytes] | str, new: Callable[[], Any]):
        super().__init__(io.FileIO(file) if isinstance(file, str) else file)
        self._new, self._stream = new, new()

    def readinto(self, buffer: Any) -> int:
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._next_stream()
                if not packed:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input:
                packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("it ends inside a compressed stream")
            if piece := self._stream.decompress(packed, len(buffer)):
                buffer[: len(piece)] = piece
                return len(piece)

    def _next_stream(self) -> bytes:
        """Returns the first bytes behind a stream, without the zeros that may pad it."""
        packed = self._stream.unused_data or self._file.read(io.DEFAULT_BUFFER_SIZE)
        while packed and not packed.strip(b"\0"):
            packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
        return packed.lstrip(b"\0")


class Header(NamedTuple):
    """The header of an array in a file, verified against its size."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool

    def stand_in(self) -> np.ndarray:
        """Returns an array of this shape and dtype that takes no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


class Npz:
    """A .npz file of numbers; each array is checked and read only on request.

    Attributes:
        path: path of the file.
        names: names of its arrays.
    """

    def __init__(self, path: str | os.PathLike[str], *, remedy: str):
        """Opens the file.

        Raises:
            UserError: the file is missing or not a zip file, unpacks to far more than its size, or
                has encrypted or repeated members.
        """
        self.path, self._remedy = path, remedy
        try:
            check_regular(path)
            self._archive = zipfile.ZipFile(path)
            self._members = _members(self._archive, os.path.getsize(path))
        except Exception as error:  # NumPy, zipfile and decompressors raise many kinds.
            raise unreadable(path, error, remedy) from None
        self.names = [name.removesuffix(".npy") for name in self._members]

    def __enter__(self) -> "Npz":
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def header(self, name: str) -> Header:
        """Returns the shape and dtype of an array.

        Raises:
            UserError: the name does not exist, the array holds no numbers, or its shape does not
                match the stored size.
        """
        try:
            with self._open(name) as stream:
                return _read_header(stream, self._members[f"{name}.npy"].file_size)
        except Exception as error:
            raise self._unreadable(name, error) from None

    def read(self, name: str) -> np.ndarray:
        """Returns an array.

        Raises:
            UserError: as `header`, or the file is damaged.
        """
        try:
            with self._open(name) as stream:
                header = _read_header(stream, self._members[f"{name}.npy"].file_size)
                return _read_numbers(stream, header)
        except Exception as error:
            raise self._unreadable(name, error) from None

    def _open(self, name: str) -> IO[bytes]:
        if f"{name}.npy" not in self._members:
            raise ValueError("there is no such array")
        return self._archive.open(self._members[f"{name}.npy"])

    def _unreadable(self, name: str, error: Exception) -> errors.UserError:
        why = str(error) or type(error).__name__
        return unreadable(self.path, f"array {name!r}: {why}", self._remedy)


def read_npy(path: str | os.PathLike[str], *, remedy: str) -> np.ndarray:
    """Returns the array of numbers in a .npy file.

    Raises:
        UserError: the file is missing, holds no numbers, or its size does not match its shape.
    """
    try:
        check_regular(path)
        with open(path, "rb") as stream:
            return _read_numbers(stream, _read_header(stream, os.path.getsize(path)))
    except Exception as error:  # NumPy raises many kinds.
        raise unreadable(path, error, remedy) from None


def check_expansion(unpacked: int, stored: int) -> None:
    """Raises `TooLargeError` if a file would unpack to far more bytes than it has."""
    if unpacked > max(_ALWAYS_ALLOWED, _MOST_RATIO * stored):
        raise TooLargeError(
            f"its {stored:,} bytes unpack to {unpacked:,} or more, over {_MOST_RATIO} times as many"
        )


def check_tfds(name: str, data_dir: str | None, *, setting: str) -> None:
    """Raises `UserError` for a TFDS data set whose reading would run foreign code.

    TFDS downloads and runs the code of community data sets, `namespace:name`, and it imports the
    modules that a prepared data set names for its features.

    Args:
        name: name of the data set.
        data_dir: folder of its data; None means TFDS's default.
        setting: the setting of the name, for the message.
    """
    if re.match(r"[^/:=]*:[^\d*:]", name):
        raise errors.UserError(
            f"{setting}={name!r} names a data set of another community, whose code TFDS would "
            "download and run; name one of TFDS, such as 'c4/en:3.1.0'."
        )
    folder = pathlib.Path(os.path.expanduser(data_dir or "."), re.split("[/:]", name)[0])
    if data_dir is None or not folder.is_dir():
        return
    for file in sorted(folder.rglob("features.json")):
        wrong = [n for n in _feature_classes(file) if not n.startswith("tensorflow_datasets.")]
        if wrong:
            raise errors.UserError(
                f"{file} names {wrong[0]!r} for a feature, which TFDS would import; data sets may "
                "have features of tensorflow_datasets alone."
            )


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    """Raises `ValueError` for values that a recursive function could not traverse."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        lists = [each for each in level if isinstance(each, list)]
        lists += [each.values() for each in level if isinstance(each, dict)]
        level = [item for items in lists for item in items]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _members(archive: zipfile.ZipFile, stored: int) -> dict[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        if member.filename in members:
            raise ValueError(f"{member.filename!r} is there twice")
        if member.flag_bits & 1:
            raise ValueError(f"{member.filename!r} is encrypted")
        members[member.filename] = member
    check_expansion(sum(member.file_size for member in members.values()), stored)
    return members


def _read_header(stream: IO[bytes], size: int) -> Header:
    """Reads the header of an array that takes `size` bytes including the header."""
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"format {version} is none of {', '.join(map(str, readers))}")
    try:
        shape, is_fortran, dtype = readers[version](stream)
    except ValueError:
        raise
    except Exception as error:  # The header is Python text, whose parsing raises many kinds.
        raise ValueError(f"its header is damaged: {type(error).__name__}") from None
    if dtype.hasobject:
        raise ValueError("it holds objects of Python, a pickle, which is never loaded")
    if dtype.kind not in _NUMBERS or dtype.subdtype is not None:
        raise ValueError(f"it is stored as {dtype}; expected numbers")
    if any(length < 0 for length in shape):
        raise ValueError(f"its shape {shape} is negative")
    expected = math.prod(shape) * dtype.itemsize
    if stream.tell() + expected != size:
        raise ValueError(
            f"its shape {shape} takes {expected:,} bytes, but {size - stream.tell():,} are there"
        )
    header = Header(shape, dtype, is_fortran)
    header.stand_in()  # NumPy has a most of axes, and of empty arrays too a most of elements.
    return header


def _read_numbers(stream: IO[bytes], header: Header) -> np.ndarray:
    shape = header.shape[::-1] if header.is_fortran else header.shape
    array = np.empty(shape, header.dtype)
    content = array.reshape(-1).view(np.uint8).data
    at = 0
    while at < len(content):
        piece = stream.read(min(_PIECE, len(content) - at))
        if not piece:
            raise EOFError(f"{len(content) - at:,} bytes are missing")
        content[at : at + len(piece)] = piece
        at += len(piece)
    stream.read(1)  # Zip files verify checksums only at the end.
    return array.T if header.is_fortran else array


def _feature_classes(file: pathlib.Path) -> list[str]:
    classes: list[str] = []

    def note(value: dict[str, Any]) -> dict[str, Any]:
        classes.extend(v for k, v in value.items() if k in _TFDS_CLASS and isinstance(v, str))
        return value

    try:
        content = read_bytes(file, MOST_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise unreadable(file, error, "prepare the data set again.") from error
    with contextlib.suppress(ValueError, RecursionError):  # TFDS reports these itself.
        json.loads(content, object_hook=note)
    return classes
