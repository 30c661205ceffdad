"""Output on which nothing but convt5 itself controls the terminal.

Names of files, settings, metrics and predictions may hold the sequences by which a terminal moves
its cursor, changes its title or answers; they are written out instead, `\\x1b`.
"""

import logging
import sys
from typing import Any, TextIO

from convt5.errors import printable


class Shown:
    """A text stream that writes control characters out; `stream` takes them as they are."""

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
    """Has the process show what it writes to standard output and standard error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, Shown):
            continue
        shown = Shown(stream)
        setattr(sys, name, shown)
        _redirect_logs(stream, shown)


def unchanged(stream: Any) -> TextIO:
    """Returns a stream for what must come as it is: bars of progress, and results in files.

    Texts of others that are written to it pass through `printable` before, where it is a terminal.
    """
    return stream.stream if isinstance(stream, Shown) else stream


def _redirect_logs(stream: Any, shown: Any) -> None:
    """Libraries that were imported already have their warnings go to the stream itself."""
    beneath = {id(stream), id(getattr(stream, "_stream", stream))}
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in beneath:
                handler.setStream(shown)
