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
from convt5.training.run_log import show_line


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
        self._out = out or sys.stderr
        self._total = total
        self._first = self._done = done
        self._label = f"{label}: " if label else ""
        self._interval = seconds_between_lines
        self._started = self._last_line = time.monotonic()
        self._bar = Bar(self._out, total=total, done=done, label=label, unit="example")

    def __call__(self, examples: int) -> None:
        self._done += examples
        if self._bar.is_shown:
            self._bar.update(examples)
        elif time.monotonic() - self._last_line >= self._interval:
            self._last_line = time.monotonic()
            self.message(self._line())

    def message(self, text: str) -> None:
        """Shows a line, above the bar."""
        show_line(text, out=self._out, above=self._bar)

    def close(self) -> None:
        """Closes the bar, and shows the elapsed time."""
        self._bar.close()
        seconds = time.monotonic() - self._started
        if self._done > self._first:
            count = self._done - self._first
            print(
                f"{self._label}{count} examples in {duration(seconds)}"
                f" ({short_number(count / max(seconds, 1e-9))} examples/s)",
                file=self._out,
                flush=True,
            )

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (self._done - self._first) / seconds
        speed = f"{short_number(rate)} examples/s"
        if self._total is None:
            return f"{self._label}{self._done} examples  {speed}"
        seconds_left = (self._total - self._done) / rate if rate else math.inf
        share = f"{100 * self._done / max(self._total, 1):.0f}%"
        return (
            f"{self._label}{self._done}/{self._total} ({share})  {speed}"
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
