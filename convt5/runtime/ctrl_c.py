"""Ctrl-C in a command: the exception that Python raises, unless something would swallow it.

Imports of native modules crash or raise errors of their own when they are interrupted, and
callbacks print the exception and continue.
"""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGINT

_IMPORTING = "<frozen importlib._bootstrap>"
_SOON = 0.05  # Seconds, after which a callback has returned.


class CtrlC:
    """Context that handles Ctrl-C for a command.

    It leaves an ignored Ctrl-C ignored, and restores the handler that it finds.

    Attributes:
        received: whether Ctrl-C was pressed. What else is raised afterwards is its consequence.
    """

    def __init__(self):
        self.received = False

    def __enter__(self) -> "CtrlC":
        self._before = signal.getsignal(signal.SIGINT)
        self._show = sys.unraisablehook
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._raise_again
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._before)
            sys.unraisablehook = self._show

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        self.received = True
        while frame is not None:
            if frame.f_code.co_filename == _IMPORTING:
                leave()
            frame = frame.f_back
        raise KeyboardInterrupt

    def _raise_again(self, raised: Any) -> None:
        if not isinstance(raised.exc_value, KeyboardInterrupt):
            return self._show(raised)
        main = threading.main_thread().ident
        timer = threading.Timer(_SOON, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()


def leave() -> None:
    """Ends the process at once."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
