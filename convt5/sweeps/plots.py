"""Plots of a study: distributions of the error, errors by setting, convergence, differences."""

import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from convt5.reports import figures
from convt5.sweeps import profile
from convt5.sweeps.analysis import Best, Key, Result
from convt5.sweeps.study import Study

DISTRIBUTIONS, SETTINGS, CONVERGENCE = "distributions", "settings", "convergence"
PROFILES, DIFFERENCES = "profiles", "differences"

Groups = Mapping[Key, Sequence[Result]]


def draw(
    study: Study,
    groups: Groups,
    bests: Mapping[Key, Best],
    folder: pathlib.Path,
    *,
    suffix: str = figures.SUFFIX,
) -> list[str]:
    """Draws all plots into a folder; returns their names.

    Raises:
        UserError: matplotlib is not installed.
    """
    draw_panels = functools.partial(_draw_panels, study)
    draw_panels(_by_panel(groups), _distributions, folder / f"{DISTRIBUTIONS}{suffix}")
    draw_panels(_by_panel(bests), _convergence, folder / f"{CONVERGENCE}{suffix}")
    names = [DISTRIBUTIONS, CONVERGENCE]
    numeric = [
        axis
        for axis in study.axes
        if axis not in study.rows and study.is_numeric(axis) and len(study.labels(axis)) > 1
    ]
    if numeric:
        _draw_settings(study, _by_panel(groups), numeric, folder / f"{SETTINGS}{suffix}")
        names.append(SETTINGS)
    return [f"{name}{suffix}" for name in names]


def draw_profiles(
    study: Study,
    profiles: Mapping[Key, profile.Line],
    folder: pathlib.Path,
    *,
    suffix: str = figures.SUFFIX,
) -> list[str]:
    """Plots the metric against `Study.over`, and differences, into a folder; returns their names.

    Raises:
        UserError: matplotlib is not installed.
    """
    _draw_panels(
        study, _by_panel(profiles), profile.draw_on, folder / f"{PROFILES}{suffix}", sharey=True
    )
    if not profile.differences(study, profiles):
        return [f"{PROFILES}{suffix}"]
    figure = _figure((8.0, 4.2))
    profile.draw_differences(study, figure.subplots(), profiles)
    figures.save(figure, folder / f"{DIFFERENCES}{suffix}")
    return [f"{PROFILES}{suffix}", f"{DIFFERENCES}{suffix}"]


def _by_panel(values: Mapping[Key, Any]) -> dict[Key, dict[str, Any]]:
    """Returns the lines of each panel: the last row, by the rows before it."""
    panels: dict[Key, dict[str, Any]] = {}
    for key, value in values.items():
        panels.setdefault(key[:-1], {})[key[-1]] = value
    return panels


def _draw_panels(
    study: Study,
    panels: Mapping[Key, Mapping[str, Any]],
    draw_on: Callable[[Study, Any, Mapping[str, Any]], None],
    path: pathlib.Path,
    *,
    sharey: Any = "row",
) -> None:
    """Draws a panel for each value of the rows before the last: first down, second across."""
    down = list(dict.fromkeys(panel[:1] for panel in panels))
    across = list(dict.fromkeys(panel[1:] for panel in panels))
    figure = _figure((5.0 * len(across) + 1.4, 3.4 * len(down) + 0.3))
    axes = figure.subplots(len(down), len(across), squeeze=False, sharey=sharey)
    for i, first in enumerate(down):
        for j, second in enumerate(across):
            lines = panels.get((*first, *second))
            if lines is None:
                axes[i][j].set_visible(False)
                continue
            draw_on(study, axes[i][j], lines)
            axes[i][j].set_title(_title(study, (*first, *second)), fontsize=10)
            figures.tidy(axes[i][j])
    _legend(study, figure)
    figures.save(figure, path)


def _distributions(study: Study, axes: Any, lines: Mapping[str, Sequence[Result]]) -> None:
    """Plots the empirical distribution: the fraction of runs with an error up to each limit."""
    finite = [r.error for runs in lines.values() for r in runs if math.isfinite(r.error)]
    least, greatest = min(finite, default=0.0), max(finite, default=1.0)
    # For a single error, a fraction of it.
    last = greatest + 0.05 * (max(greatest, greatest - least) or abs(greatest) or 1.0)
    for number, label, runs in _numbered(study, lines):
        ordered = sorted(r.error for r in runs if math.isfinite(r.error))
        shares = [i / len(runs) for i in range(len(ordered) + 1)]
        # Starts at zero at the lowest error, and continues to the right edge.
        x = [*ordered[:1], *ordered, last]
        y = [*([0.0] if ordered else []), *shares[1:], shares[-1]]
        count = len(runs) - len(ordered)
        legend = f"{len(runs)} runs, {count} diverged" if count else f"{len(runs)} runs"
        style = figures.style(number) | {"marker": ""}
        axes.step(x, y, where="post", label=f"{_shown(study, label)} ({legend})", **style)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(figures.text(study.metric_axis()))
    axes.set_ylabel("share of runs with at most this error")


def _convergence(study: Study, axes: Any, lines: Mapping[str, Best]) -> None:
    """Plots the error of the best setting over training steps, from the first evaluation."""
    steps = []
    for number, label, best in _numbered(study, lines):
        x = [step for step, _ in best.curve]
        values = [error for _, error in best.curve]
        label = _shown(study, label)
        if best.diverged:
            label = f"{label} ({best.diverged})"
        axes.plot(x, values, label=label, **figures.style(number, points=len(x)))
        steps += x
    figures.log_values(axes, [error for best in lines.values() for _, error in best.curve])
    if len(set(steps)) <= 2:
        figures.name_values(axes.xaxis, steps)
    axes.set_xlabel("training steps")
    axes.set_ylabel(figures.text(f"{study.metric_axis()}\n(best setting)"))


def _draw_settings(
    study: Study,
    panels: Mapping[Key, Mapping[str, Sequence[Result]]],
    numeric: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Plots errors of single runs against each numeric setting."""
    figure = _figure((5.0 * len(numeric) + 1.4, 3.0 * len(panels) + 0.3))
    axes = figure.subplots(len(panels), len(numeric), squeeze=False)
    for i, (panel, lines) in enumerate(panels.items()):
        for j, axis in enumerate(numeric):
            for place, (number, label, runs) in enumerate(_numbered(study, lines)):
                beside = place - (len(lines) - 1) / 2
                style = figures.style(number, joined=False) | {"label": _shown(study, label)}
                _scatter(axes[i][j], axis, runs, style, beside=beside)
            values = {float(run.labels[axis]) for runs in lines.values() for run in runs}
            axes[i][j].set_xscale("log")
            axes[i][j].set_xlim(min(values) / 1.3, max(values) * 1.3)
            figures.name_values(axes[i][j].xaxis, values)
            axes[i][j].set_xlabel(figures.text(study.word(axis)))
            axes[i][j].set_ylabel(figures.text(study.metric_axis()))
            axes[i][j].set_title(_title(study, panel), fontsize=10)
            figures.tidy(axes[i][j])
    _legend(study, figure)
    figures.save(figure, path)


def _scatter(
    axes: Any, axis: str, runs: Sequence[Result], style: Mapping[str, Any], *, beside: float
) -> None:
    shown = [run for run in runs if math.isfinite(run.error)]
    shift = 1.06**beside  # Lines stand side by side where values agree.
    x = [float(run.labels[axis]) * shift for run in shown]
    axes.plot(x, [run.error for run in shown], **style)


def _numbered(study: Study, lines: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yields numbered lines: a label has one look in all panels, whatever each of them lacks."""
    names = study.labels(study.rows[-1])
    for number, (label, line) in enumerate(lines.items()):
        yield names.index(label) if label in names else number, label, line


def _title(study: Study, panel: Key) -> str:
    return figures.text(", ".join(study.word(value) for value in panel))


def _shown(study: Study, label: str) -> str:
    return figures.text(study.word(label))


def _legend(study: Study, figure: Any) -> None:
    """Names the lines: once for all panels where they agree, else beside each."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    title = figures.text(study.word(study.rows[-1]))
    named = {tuple(axes.get_legend_handles_labels()[1]) for axes in panels}
    style = {"frameon": False, "title": title, "fontsize": 8}
    if len(named) == 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", **style)
        return
    for axes in panels:
        # Beside the lines: there may be points anywhere between them.
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **style)


def _figure(size: tuple[float, float]) -> Any:
    return figures.figure_class("the plots")(figsize=size, layout="constrained")
