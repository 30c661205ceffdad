"""Handles closed standard streams: messages that cannot be written are dropped, and work continues.

In `... 2>&1 | tee log`, Ctrl-C ends `tee` as well as the run, which still has to save its state;
likewise when a terminal is closed, or the disk of a log is full. Results go to standard output, and
commands end when these cannot be written.
"""

import os
import sys
from typing import Any, TextIO


class Unheard:
    """A text stream that drops its output once it cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        # Redirects the file descriptor, which native code and the stream's buffer also use.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def open_all() -> None:
    """Opens /dev/null for standard streams that are closed (`>&-`).

    Otherwise the next opened file gets their descriptor, and native code writes its messages to it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest free descriptor.
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def tolerate_closed_stderr() -> None:
    """Lets the process continue when its standard error cannot be written."""
    sys.stderr = Unheard(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
