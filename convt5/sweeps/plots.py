"""Plots of a study: distributions of the error, errors by setting, and convergence."""

import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convt5.reports import figures
from convt5.sweeps import profile
from convt5.sweeps.analysis import Best, Key, Result
from convt5.sweeps.study import Study

DISTRIBUTIONS, SETTINGS, CONVERGENCE = "distributions.png", "settings.png", "convergence.png"
PROFILES = "profiles.png"

_NAMED = (2, 3, 5)  # Labelled multiples of powers of ten on logarithmic axes.

Groups = Mapping[Key, Sequence[Result]]


def draw(
    study: Study, groups: Groups, bests: Mapping[Key, Best], folder: pathlib.Path
) -> list[str]:
    """Draws all plots into a folder; returns their names.

    Raises:
        UserError: matplotlib is not installed.
    """
    title = study.rows[-1]
    _draw_panels(_by_panel(groups), _distributions, folder / DISTRIBUTIONS, title=title)
    _draw_panels(_by_panel(bests), _convergence, folder / CONVERGENCE, title=title)
    numeric = [
        axis
        for axis in study.axes
        if axis not in study.rows and study.is_numeric(axis) and len(study.labels(axis)) > 1
    ]
    if not numeric:
        return [DISTRIBUTIONS, CONVERGENCE]
    _draw_settings(_by_panel(groups), numeric, folder / SETTINGS, title=title)
    return [DISTRIBUTIONS, CONVERGENCE, SETTINGS]


def draw_profiles(
    study: Study, profiles: Mapping[Key, profile.Line], folder: pathlib.Path
) -> list[str]:
    """Plots the metric against `Study.over` into a folder; returns the name of the plot."""
    _draw_panels(
        _by_panel(profiles),
        functools.partial(profile.draw_on, study),
        folder / PROFILES,
        title=study.rows[-1],
    )
    return [PROFILES]


def _by_panel(values: Mapping[Key, Any]) -> dict[Key, dict[str, Any]]:
    """Returns the lines of each panel: the last row, by the rows before it."""
    panels: dict[Key, dict[str, Any]] = {}
    for key, value in values.items():
        panels.setdefault(key[:-1], {})[key[-1]] = value
    return panels


def _draw_panels(
    panels: Mapping[Key, Mapping[str, Any]],
    draw_on: Callable[[Any, Mapping[str, Any]], None],
    path: pathlib.Path,
    *,
    title: str,
) -> None:
    """Draws a panel for each value of the rows before the last: first down, second across."""
    down = list(dict.fromkeys(panel[:1] for panel in panels))
    across = list(dict.fromkeys(panel[1:] for panel in panels))
    figure = _figure((5.6 * len(across) + 0.6, 3.4 * len(down) + 0.3))
    axes = figure.subplots(len(down), len(across), squeeze=False)
    for i, first in enumerate(down):
        for j, second in enumerate(across):
            lines = panels.get((*first, *second))
            if lines is None:
                axes[i][j].set_visible(False)
                continue
            draw_on(axes[i][j], lines)
            _tidy(axes[i][j], (*first, *second), title=title)
    figure.savefig(path, dpi=130)


def _distributions(axes: Any, lines: Mapping[str, Sequence[Result]]) -> None:
    """Plots the empirical distribution: the fraction of runs with an error up to each limit."""
    finite = [r.error for runs in lines.values() for r in runs if math.isfinite(r.error)]
    least, greatest = min(finite, default=0.0), max(finite, default=1.0)
    # For a single error, a fraction of it.
    last = greatest + 0.05 * (max(greatest, greatest - least) or abs(greatest) or 1.0)
    for number, (label, runs) in enumerate(lines.items()):
        ordered = sorted(r.error for r in runs if math.isfinite(r.error))
        shares = [i / len(runs) for i in range(len(ordered) + 1)]
        # Starts at zero at the lowest error, and continues to the right edge.
        x = [*ordered[:1], *ordered, last]
        y = [*([0.0] if ordered else []), *shares[1:], shares[-1]]
        count = len(runs) - len(ordered)
        legend = f"{len(runs)} runs, {count} diverged" if count else f"{len(runs)} runs"
        axes.step(x, y, where="post", label=f"{label} ({legend})", color=f"C{number}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("error")
    axes.set_ylabel("share of runs with at most this error")


def _convergence(axes: Any, lines: Mapping[str, Best]) -> None:
    """Plots the error of the best setting over training steps, from the first evaluation."""
    for number, (label, best) in enumerate(lines.items()):
        steps = [step for step, _ in best.curve]
        values = [error for _, error in best.curve]
        if best.diverged:
            label = f"{label} ({best.diverged})"
        axes.plot(steps, values, label=label, color=f"C{number}", marker=".")
    _scale(axes, [error for best in lines.values() for _, error in best.curve])
    for write in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        write(lambda value, _: f"{value:.2g}")
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.set_xlabel("training steps")
    axes.set_ylabel("error at the best setting")


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Sets a logarithmic axis, with a linear part if some values are not above 0."""
    finite = [value for value in values if math.isfinite(value)]
    if min(finite, default=1.0) > 0:
        axes.set_yscale("log", subs=_NAMED)
        return
    threshold = min((abs(value) for value in finite if value), default=1.0)
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.5, subs=_NAMED)


def _draw_settings(
    panels: Mapping[Key, Mapping[str, Sequence[Result]]],
    numeric: Sequence[str],
    path: pathlib.Path,
    *,
    title: str,
) -> None:
    """Plots errors of single runs against each numeric setting."""
    figure = _figure((5.6 * len(numeric) + 0.6, 3.0 * len(panels) + 0.3))
    axes = figure.subplots(len(panels), len(numeric), squeeze=False)
    for i, (panel, lines) in enumerate(panels.items()):
        for j, axis in enumerate(numeric):
            for number, (label, runs) in enumerate(lines.items()):
                _scatter(axes[i][j], axis, label, runs, number, of=len(lines))
            values = sorted({float(run.labels[axis]) for runs in lines.values() for run in runs})
            axes[i][j].set_xscale("log")
            axes[i][j].set_xlim(values[0] / 1.3, values[-1] * 1.3)
            axes[i][j].set_xticks(values, [f"{value:g}" for value in values])
            axes[i][j].minorticks_off()
            axes[i][j].set_xlabel(axis)
            axes[i][j].set_ylabel("error")
            _tidy(axes[i][j], panel, title=title)
    figure.savefig(path, dpi=130)


def _scatter(
    axes: Any, axis: str, label: str, runs: Sequence[Result], number: int, *, of: int
) -> None:
    shown = [run for run in runs if math.isfinite(run.error)]
    shift = 1.06 ** (number - (of - 1) / 2)  # Separates lines at equal values.
    axes.plot(
        [float(run.labels[axis]) * shift for run in shown],
        [run.error for run in shown],
        linestyle="none",
        marker="o",
        markersize=4,
        alpha=0.7,
        label=label,
        color=f"C{number}",
    )


def _tidy(axes: Any, panel: Key, *, title: str) -> None:
    axes.set_title(", ".join(panel), fontsize=10)
    # Outside the axes, because points may be anywhere inside.
    axes.legend(frameon=False, title=title, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(size: tuple[float, float]) -> Any:
    return figures.figure_class("the plots")(figsize=size, layout="constrained")
