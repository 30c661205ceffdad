"""Progress of a command on standard error: a bar in a terminal, plain lines elsewhere."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from convt5.errors import printable
from convt5.runtime import terminal
from convt5.runtime.amounts import duration, short_number
from convt5.runtime.bars import Bar


class Progress:
    """Counts examples; each call adds to the count.

    Args:
        total: total number; None if unknown.
        done: number of examples done before this process started.
        label: shown before the numbers.
        out: standard error by default.
        seconds_between_lines: plain lines that follow sooner are dropped, except the last.
    """

    def __init__(
        self,
        total: int | None,
        *,
        done: int = 0,
        label: str = "",
        out: TextIO | None = None,
        seconds_between_lines: float = 10.0,
    ):
        self._first = done
        self._label = f"{label}: " if label else ""
        self._interval = seconds_between_lines
        self._started = self._last_line = time.monotonic()
        self._bar = Bar(out or sys.stderr, total=total, done=done, label=label, unit="example")

    def __call__(self, examples: int) -> None:
        self._bar.update(examples)
        if not self._bar.is_shown and time.monotonic() - self._last_line >= self._interval:
            self._last_line = time.monotonic()
            self.message(self._line())

    def message(self, text: str) -> None:
        """Shows a line, above the bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Closes the bar, and shows the elapsed time."""
        self._bar.close()
        seconds = time.monotonic() - self._started
        count = self._bar.done - self._first
        if count:
            speed = short_number(count / max(seconds, 1e-9))
            self.message(
                f"{self._label}{count} examples in {duration(seconds)} ({speed} examples/s)"
            )

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        done, total = self._bar.done, self._bar.total
        rate = (done - self._first) / seconds
        speed = f"{short_number(rate)} examples/s"
        if total is None:
            return f"{self._label}{done} examples  {speed}"
        total = max(total, done)  # There may be more than was expected.
        seconds_left = (total - done) / rate if rate else math.inf
        share = f"{100 * done / max(total, 1):.0f}%"
        return (
            f"{self._label}{done}/{total} ({share})  {speed}"
            f"{f'  ETA {duration(seconds_left)}' if math.isfinite(seconds_left) else ''}"
        )


@contextlib.contextmanager
def elapsed(what: str, *, out: TextIO | None = None) -> Iterator[None]:
    """Shows the elapsed time of an activity without measurable progress, in a terminal only.

    Args:
        what: the activity, such as "compiling for v5e:4x4".
        out: standard error by default.
    """
    stream = terminal.unchanged(out or sys.stderr)
    if not stream.isatty():
        yield
        return
    started, ended = time.monotonic(), threading.Event()

    def show() -> None:
        while True:
            text = f"{printable(what)}: {duration(time.monotonic() - started)}"
            print(f"\r{text}", end="", file=stream, flush=True)
            if ended.wait(1.0):
                print(f"\r{' ' * len(text)}\r", end="", file=stream, flush=True)
                return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
