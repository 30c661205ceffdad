"""A progress bar in a terminal: one line that fits its width.

Facts that do not fit are dropped, the least important first; nothing is truncated.
"""

import collections
import contextlib
import os
import time
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from convt5.errors import printable
from convt5.runtime import terminal
from convt5.runtime.amounts import duration, short_number

_WIDTH = 80  # Columns of a terminal that does not report its width.
_SECONDS_BETWEEN = 0.1
_DRAWINGS_OF_RATE = 100
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PLAIN = str.maketrans("█" + _EIGHTHS, "#" + " " * len(_EIGHTHS))


def line(
    width: int,
    *,
    done: int,
    total: int | None,
    label: str = "",
    unit: str = "step",
    rate: float | None = None,
    facts: Sequence[str] = (),
) -> str:
    """Returns the text of a bar, of at most `width` columns.

    In order of importance: the count, the first fact, the remaining time, the bar itself, the
    label, the rate, the other facts in order.

    Args:
        width: columns of the terminal.
        done, total: numbers of units; None for an unknown total.
        label: text at the start.
        unit: what is counted, in the singular.
        rate: units per second; None if unknown.
        facts: facts such as "loss 3.2101", the most important first.
    """
    total = None if total is None else max(total, done)  # There may be more than was expected.
    share = None if total is None else done / max(total, 1)
    percent = "" if share is None else f"{int(100 * share):3d}%"
    count = f"{done:,} {unit}s" if total is None else f"{done:>{len(str(total))}}/{total}"
    left = "" if rate is None or total is None else f"{duration((total - done) / rate)} left"
    # Each part with its position in the line.
    wanted = [
        (3, count),
        (1, percent),
        *((4, fact) for fact in facts[:1]),
        (5, left),
        (2, "" if share is None else _cells(share, min(30, max(10, width // 5)))),
        (0, f"{label}:" if label else ""),
        (6, "" if rate is None else _speed(rate, unit)),
        *((7, fact) for fact in facts[1:]),
    ]
    shown: list[tuple[int, str]] = []
    room = width
    for place, text in wanted:
        needed = columns(text) + 2 * bool(shown)
        if text and needed > room:
            break
        if text:
            shown.append((place, text))
            room -= needed
    # Sorting is stable, so facts keep their order.
    return "  ".join(text for _, text in sorted(shown, key=lambda part: part[0]))


def columns(text: str) -> int:
    """Returns the number of terminal columns of a text."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def _cells(share: float, count: int) -> str:
    """Returns the bar itself, drawn in eighths of a cell."""
    eighths = int(share * count * 8)
    part = _EIGHTHS[eighths % 8] if eighths < count * 8 else ""
    return f"|{('█' * (eighths // 8) + part).ljust(count)}|"


def _speed(rate: float, unit: str) -> str:
    if 0 < rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    return f"{short_number(rate)} {unit}s/s"


class Bar(contextlib.AbstractContextManager):
    """The last line of a terminal, cleared when closed.

    Nothing is drawn before the first update, nor if `out` is not a terminal.

    Args:
        out: where it is drawn; the text must not contain control characters.
        total: number of units; None if unknown. Can be changed.
        done: number of units before this process started.
        label, unit: as in `line`.
    """

    def __init__(
        self,
        out: TextIO,
        *,
        total: int | None = None,
        done: int = 0,
        label: str = "",
        unit: str = "step",
    ):
        self.is_shown = out.isatty()
        self.total = total
        self.done = done
        self._out = terminal.unchanged(out)
        self._label, self._unit = printable(label), unit
        self._facts: list[str] = []
        self._width = 0  # Columns drawn now.
        self._drawn_at = -_SECONDS_BETWEEN
        self._seen: collections.deque[tuple[float, int]] = collections.deque(
            maxlen=_DRAWINGS_OF_RATE
        )

    def update(self, count: int = 1, *, facts: Sequence[str] | None = None) -> None:
        """Counts units, and replaces the facts if given."""
        self.done += count
        if facts is not None:
            self._facts = [printable(fact) for fact in facts]
        now = time.monotonic()
        if now - self._drawn_at < _SECONDS_BETWEEN and self.done != self.total:
            return
        self._drawn_at = now
        if count:
            self._seen.append((now, self.done))
        self._draw()

    def tell(self, label: str) -> None:
        """Sets the label."""
        self._label = printable(label)
        self._draw()

    def write(self, text: str) -> None:
        """Writes a line, above the bar where it is drawn."""
        was_drawn = self._width > 0
        self._clear()
        print(printable(text), file=self._out, flush=True)
        if was_drawn:
            self._draw()

    def close(self) -> None:
        """Clears the bar."""
        self._clear()
        self.is_shown = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _rate(self) -> float | None:
        """Recent units per second; None before the second drawing."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None

    def _draw(self) -> None:
        if not self.is_shown:
            return
        # A line that fills the last column would wrap the cursor.
        width = _width_of(self._out) - 1
        text = line(
            width,
            done=self.done,
            total=self.total,
            label=self._label,
            unit=self._unit,
            rate=self._rate,
            facts=self._facts,
        )
        rest = " " * max(0, min(self._width, width) - columns(text))
        self._width = columns(text)
        self._put(f"\r{text}{rest}")

    def _clear(self) -> None:
        if self._width:
            self._put(f"\r{' ' * min(self._width, _width_of(self._out) - 1)}\r")
            self._width = 0

    def _put(self, text: str) -> None:
        try:
            text.encode(getattr(self._out, "encoding", None) or "utf-8")
        except UnicodeEncodeError:  # A terminal that lacks the characters of the bar.
            text = text.translate(_PLAIN).encode("ascii", "replace").decode()
        self._out.write(text)
        self._out.flush()


def _width_of(out: TextIO) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or _WIDTH
    except (OSError, ValueError, AttributeError):
        return _WIDTH
