"""Escapes control characters in the output, so that only convt5 itself controls the terminal.

Names of files, settings, metrics and predictions may contain sequences that move the cursor, change
the title or query the terminal; they are shown as `\\x1b`.
"""

import logging
import sys
from typing import Any, TextIO

from convt5.errors import printable


class Shown:
    """A text stream that escapes control characters and writes the result to `stream`."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def protect() -> None:
    """Escapes all output of the process to standard output and standard error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, Shown):
            continue
        shown = Shown(stream)
        setattr(sys, name, shown)
        _redirect_logs(stream, shown)


def unchanged(stream: Any) -> TextIO:
    """Returns the unescaped stream, for progress bars and for results in files.

    Foreign text must be passed through `printable` before it is written to a terminal.
    """
    return stream.stream if isinstance(stream, Shown) else stream


def _redirect_logs(stream: Any, shown: Any) -> None:
    """Redirects the log handlers of libraries that were imported already."""
    beneath = {id(stream), id(getattr(stream, "_stream", stream))}
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in beneath:
                handler.setStream(shown)
