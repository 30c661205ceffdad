"""Standard streams that may be closed: what nobody reads is dropped, and the work goes on.

Ctrl-C ends `tee` as well as the run that it reads, `... 2>&1 | tee log`, and the run has still its
state to save; so has one whose terminal was closed. Results go to standard output, where commands
end once nobody reads them.
"""

import errno
import os
import sys
from typing import Any, TextIO

_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Of a pipe whose reader has ended, and of a terminal that is gone."""


class Unheard:
    """A text stream which, once nobody reads it any more, takes what is written and drops it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        if error.errno not in _NOBODY_READS:
            raise error
        # Native code writes to the same file; and what the stream holds back goes there as well.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def open_all() -> None:
    """Leads streams that were closed (`>&-`) to nowhere.

    Otherwise the next file that is opened takes their number, and what native code has to tell is
    written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest number that is free.
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def stderr_may_be_closed() -> None:
    """Has the process go on when nobody reads its standard error any more."""
    sys.stderr = Unheard(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
