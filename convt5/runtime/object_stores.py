"""Files below a URL such as gs://bucket/folder, read and written by TensorStore.

Object stores have no append, no rename and no locks: files are written whole, and read in parts.
"""

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from convt5 import errors

_CONTEXT = ts.Context()  # All stores of memory:// are one.
_ERRORS = (OSError, ValueError, RuntimeError)  # What TensorStore raises.


class Store:
    """The files below a URL.

    Args:
        url: a folder in Google Cloud Storage (gs://), S3 (s3://) or another store of TensorStore.

    Raises:
        UserError: TensorStore cannot open the URL.
        TrainingError: from all methods, where the store refuses or does not answer.
    """

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        try:
            opened: Any = ts.KvStore.open(self._url + "/", context=_CONTEXT)
            self._files = opened.result()
        except (OSError, ValueError) as error:
            raise errors.UserError(
                f"{url} cannot be opened ({errors.clip(error, limit=200)}); name a local folder, "
                "or one that begins with gs:// or s3://."
            ) from None

    def request(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Starts to read bytes; `result()` of what it returns waits, and `received` checks it."""
        return self._files.read(name, byte_range=slice(first, last))

    def read(self, name: str) -> bytes | None:
        """Returns a file; None if it does not exist."""
        with self._telling(name):
            found = self.request(name).result()
        return None if found.state == "missing" else found.value

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which appears whole or not at all."""
        with self._telling(name):
            self._files.write(name, content).result()

    def check_writable(self) -> None:
        """Writes a small file, and removes it where that is allowed."""
        name = f"writable_{uuid.uuid4().hex}"
        self.write(name, b"")
        with contextlib.suppress(*_ERRORS):
            self._files.write(name, None).result()

    def download(self, names: list[str], folder: pathlib.Path) -> None:
        """Writes those files that exist into a local folder."""
        for name in names:
            content = self.read(name)
            if content is not None:
                (folder / os.path.basename(name)).write_bytes(content)

    @contextlib.contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Context in which errors of TensorStore become one message."""
        try:
            yield
        except _ERRORS as error:
            raise errors.of_store(f"{self._url}/{name}", error) from None


def received(request: Any) -> bytes:
    """Waits for requested bytes.

    Raises:
        OSError: they cannot be read.
    """
    try:
        found = request.result()
    except _ERRORS as error:
        raise OSError(0, str(error)) from None
    if found.state == "missing":
        raise OSError(0, "it is not there")
    return found.value
