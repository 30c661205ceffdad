"""Rows of integers of one length, in local files or in an object store."""

import os
import pathlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from convt5 import errors
from convt5.runtime import atomic_files, object_stores

_MOST_OPEN = 32


class RowFile(NamedTuple):
    """A file with so many rows; `path` may be a URL."""

    path: str
    rows: int


def row_files(path: str, rows: int, per_file: int) -> list[RowFile]:
    """Returns the files with the rows of a feature, whose names begin with `path`."""
    if rows <= per_file:
        return [RowFile(f"{path}.bin", rows)]
    firsts = enumerate(range(0, rows, per_file))
    return [RowFile(f"{path}.{i:05}.bin", min(per_file, rows - first)) for i, first in firsts]


class StoredRows:
    """The rows of one feature in one or several files.

    They are read rather than memory-mapped: truncating a file then raises an error, whereas with
    a mapping it would kill the process.

    Args:
        files: the files, in the order of their rows.
        feature: "dtype" and "length" of the rows.
        limit: upper bound of the values.
        about_file: name of the file with these numbers, for messages.

    Raises:
        UserError: a local file has another size.
    """

    def __init__(
        self,
        files: Sequence[RowFile],
        feature: Mapping[str, Any],
        *,
        limit: int,
        about_file: str,
    ):
        self._files, self._limit, self._about_file = files, limit, about_file
        self._ends = np.cumsum([file.rows for file in files])
        self._dtype, self._length = np.dtype(feature["dtype"]), feature["length"]
        self._row_bytes = self._length * self._dtype.itemsize
        for file in files:
            if not atomic_files.is_remote(file.path):
                self._check_size(file)
        self._open_files: dict[int, Any] = {}
        for number in range(min(len(files), _MOST_OPEN)):
            self._file(number)

    def request(self, rows: np.ndarray) -> Callable[[], np.ndarray]:
        """Starts to read rows; calling the result returns them, int32 [rows, length].

        Raises:
            TrainingError: a file no longer contains one of the rows, or is unreadable.
            UserError: a row contains an id beyond the vocabulary, or a position beyond the row.
        """
        numbers = np.searchsorted(self._ends, rows, side="right")
        requests = []
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            first = row - int(self._ends[number] - self._files[number].rows)
            requests.append(self._file(number).request(first * self._row_bytes, self._row_bytes))
        return lambda: self._receive(rows, numbers, requests)

    def _receive(self, rows: np.ndarray, numbers: np.ndarray, requests: list[Any]) -> np.ndarray:
        received = []
        for row, number, request in zip(rows, numbers, requests, strict=True):
            try:
                received.append(request())
            except OSError as error:
                raise self._fault(number, f"cannot be read ({error.strerror})") from None
            if len(received[-1]) != self._row_bytes:
                what = f"ends within row {row}, though it did not when it was opened"
                raise self._fault(number, what)
        stored = np.frombuffer(b"".join(received), self._dtype).reshape(len(rows), self._length)
        wrong = (stored < 0) | (stored >= self._limit)
        if wrong.any():
            place = int(wrong.any(axis=1).argmax())
            raise errors.UserError(
                f"{self._files[numbers[place]].path} has {stored[wrong][0]} in row {rows[place]}, "
                f"where {self._about_file} allows numbers from 0 to {self._limit - 1}; the cache "
                "is damaged: rebuild it."
            )
        return stored.astype(np.int32)

    def _file(self, number: int) -> Any:
        """Returns an open file; of many files only some stay open."""
        file = self._open_files.pop(number, None)
        if file is None:
            path = self._files[number].path
            file = (_RemoteFile if atomic_files.is_remote(path) else _LocalFile)(path)
        self._open_files[number] = file
        if len(self._open_files) > _MOST_OPEN:
            del self._open_files[next(iter(self._open_files))]
        return file

    def _check_size(self, file: RowFile) -> None:
        expected = file.rows * self._row_bytes
        path = pathlib.Path(file.path)
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            has = "is not there" if size is None else f"has {size} bytes"
            raise errors.UserError(
                f"{path} {has}, and {self._about_file} says {expected}; the cache is damaged: "
                "rebuild it."
            )

    def _fault(self, number: int, what: str) -> errors.TrainingError:
        return errors.TrainingError(
            f"{self._files[number].path} {what}; restore the cache or rebuild it, and start again: "
            "the run resumes from its last checkpoint."
        )


class _LocalFile:
    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def request(self, first: int, count: int) -> Callable[[], bytes]:
        return lambda: os.pread(self._file, count, first)


class _RemoteFile:
    def __init__(self, path: str):
        folder, _, self._name = path.rpartition("/")
        self._store = object_stores.Store(folder)

    def request(self, first: int, count: int) -> Callable[[], bytes]:
        request = self._store.request(self._name, first, first + count)
        return lambda: object_stores.received(request)
