"""How figures look, and how they are written: Matplotlib without a display, or a message instead.

Lines differ in style and marker as well as in colour, so that they are told apart in print, by eyes
that see fewer colours, and where they coincide. The suffix of a file chooses its format.
"""

import functools
import logging
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration.command_line import Flag
from convt5.runtime import atomic_files
from convt5.runtime.amounts import short_number

SUFFIX = ".png"
SUFFIX_FLAG = Flag(
    "plot_suffix",
    "format of the pictures: .png, or .svg and .pdf, which stay sharp at any size.",
    {"default": SUFFIX, "metavar": "SUFFIX"},
)
"""Of commands that draw several pictures into a folder."""

_DOTS_PER_INCH = 150
_LINES = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_MOST_MARKERS = 12  # Of a line.
_MOST_NAMED = 8  # Values that an axis names one by one.


def figure_class(what: str) -> Any:
    """Returns `matplotlib.figure.Figure`, which keeps no global state.

    Args:
        what: what is drawn, the subject of the error message.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        # Deferred: matplotlib is optional, and slow to import.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.UserError(
            f"{what} needs the package matplotlib, which is not installed (tables are written); "
            "pip install 'convt5[plot]', or uv run --extra plot ..."
        ) from error
    # Otherwise it tells of its caches and fonts on standard error.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    return Figure


def check_path(path: pathlib.Path, *, flag: str) -> None:
    """Checks, before anything takes long, that a picture can be written to a file.

    Raises:
        UserError: naming the flag: no format has such a suffix, or the folder cannot be written.
    """
    faults = _suffix_faults(path.suffix, f"--{flag}={path}")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        faults.append(f"--{flag}={path} cannot be written; name a file in a folder that can.")
    errors.raise_all(faults, where="flags")


def check_suffix(suffix: str) -> None:
    """Raises `UserError` for a value of `SUFFIX_FLAG` that is the suffix of no format."""
    errors.raise_all(_suffix_faults(suffix, f"--{SUFFIX_FLAG.name}={suffix}"), where="flags")


def _suffix_faults(suffix: str, given: str) -> list[str]:
    known = figure_class("the plot")().canvas.get_supported_filetypes()
    if suffix[:1] == "." and suffix[1:].lower() in known:
        return []
    return [f"{given} must end in one of {', '.join(f'.{name}' for name in known)}."]


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure in the format of its suffix, the same bytes for the same figure.

    Raises:
        UserError: Matplotlib cannot draw its values.
    """
    import matplotlib  # An extra.

    dated = {".svg": "Date", ".pdf": "CreationDate", ".ps": "CreationDate"}.get(path.suffix.lower())
    # Type 42: journals refuse the fonts that are the default.
    fonts: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "convt5"}
    _add_fonts(figure)
    with matplotlib.rc_context(fonts), atomic_files.replacing(path) as partial:
        try:
            figure.savefig(
                partial,
                dpi=_DOTS_PER_INCH,
                format=path.suffix[1:],
                metadata={dated: None} if dated else None,
            )
        except (ValueError, OverflowError) as error:  # Values near the largest float.
            raise errors.UserError(
                f"{path} cannot be drawn ({error}); leave out the run whose values are absurd."
            ) from error


def style(number: int, *, points: int = 1, joined: bool = True) -> dict[str, Any]:
    """Returns how the line of a number is drawn, as keywords of `Axes.plot`.

    Lines that coincide stay visible: later ones are thinner, broken, with hollow markers at other
    points.

    Args:
        number: of the line, from 0.
        points: of the line; long ones have markers at some points alone.
        joined: whether points are joined.
    """
    tens, ones = divmod(number, 10)
    every = max(1, math.ceil(points / _MOST_MARKERS))
    return {
        "color": f"C{ones}",
        "linestyle": _LINES[(ones + tens) % len(_LINES)] if joined else "none",
        "linewidth": max(1.2, 2.4 - 0.3 * (number % len(_LINES))),
        "marker": _MARKERS[(ones + 3 * tens) % len(_MARKERS)],
        "markersize": 5,
        "markerfacecolor": "none" if number % 2 else f"C{ones}",
        "markevery": (number % every, every),
        "zorder": 2 + 0.01 * number,
    }


def text(label: str) -> str:
    """Returns a label as Matplotlib shows it letter by letter.

    A dollar begins a formula there, a first underscore hides a line, and a letter that no installed
    font has is a box; it is escaped.
    """
    label = errors.printable(label).replace("$", r"\$")
    label = "".join(c if c == "\n" or _family(c) else _escaped(c) for c in label)
    return f" {label}" if label.startswith("_") else label


def _add_fonts(figure: Any) -> None:
    """Gives all texts of a figure the fonts of their letters, after their own."""
    # In the order of `_fonts`: a letter has one font, whatever else was drawn.
    used = {_fonts()[0][0], *_families.values()}
    fonts = [name for name in dict.fromkeys(name for name, _ in _fonts()) if name in used][1:]
    if not fonts:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.draw_without_rendering()  # Makes the labels of axes.
    for shown in figure.findobj(lambda artist: hasattr(artist, "set_fontfamily")):
        shown.set_fontfamily([*shown.get_fontfamily(), *fonts])


_families: dict[str, str | None] = {}


def _family(letter: str) -> str | None:
    """Returns an installed font that shows a letter, the default one if it does; None without."""
    if letter not in _families:
        found = (name for name, open_font in _fonts() if _shows(open_font, letter))
        _families[letter] = next(found, None)
    return _families[letter]


@functools.cache
def _fonts() -> list[tuple[str, Callable[[], Any]]]:
    """Returns the names of installed fonts and what opens them, the default one first."""
    from matplotlib import font_manager, ft2font  # An extra.

    default = font_manager.FontProperties().get_name()
    # Its fallback shows a box for each letter.
    entries = [f for f in font_manager.fontManager.ttflist if "LastResort" not in f.fname]
    entries.sort(key=lambda f: (f.name != default, "Sans" not in f.name, f.name, f.fname))
    plain = (f for f in entries if (f.style, f.weight) == ("normal", 400))
    return [(f.name, functools.partial(ft2font.FT2Font, f.fname)) for f in plain]


def _shows(open_font: Callable[[], Any], letter: str) -> bool:
    try:
        font = open_font()
        return bool(font.scalable and font.get_char_index(ord(letter)))
    except (OSError, RuntimeError):  # Removed since, or of a form that cannot be drawn.
        return False


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def name_values(axis: Any, values: Iterable[float]) -> None:
    """Names the values of a scaled axis one by one where they are few, as plain numbers."""
    distinct = sorted(set(values))
    if distinct and len(distinct) <= _MOST_NAMED:
        axis.set_ticks(distinct, [f"{value:,g}" for value in distinct])
    else:
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.minorticks_off()


def log_values(axes: Any, values: Sequence[float], *, which: str = "y") -> None:
    """Makes an axis logarithmic, with plain numbers also where values span less than a decade.

    Where some values are not above 0, it is linear below the least of the others.
    """
    from matplotlib import ticker  # An extra.

    finite = [value for value in values if math.isfinite(value)]
    least = min((abs(value) for value in finite if value), default=1.0)
    greatest = max((abs(value) for value in finite), default=1.0) or 1.0
    axis = axes.yaxis if which == "y" else axes.xaxis
    set_scale = axes.set_yscale if which == "y" else axes.set_xscale
    subs = (1, 2, 5) if greatest / least < 300 else (1,)
    if min(finite, default=1.0) > 0:
        set_scale("log")
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=99))
        span = math.log10(greatest / least) if greatest > least else 0.0
        if span < 0.5:  # Too few such ticks.
            axis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    else:
        set_scale("symlog", linthresh=least, linscale=0.5)
        of_values = ticker.SymmetricalLogLocator(base=10, linthresh=least, subs=list(subs))
        ticks = of_values.tick_values(min(finite), greatest)
        # In the linear part, labels of others would be drawn over that of zero.
        axis.set_major_locator(ticker.FixedLocator([t for t in ticks if not 0 < abs(t) < least]))
    axis.set_major_formatter(lambda value, _: short_number(value))
    axis.minorticks_off()


def tidy(axes: Any) -> None:
    """Draws a light grid, and no frame above and to the right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
