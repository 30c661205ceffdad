"""A study's metric against one of its axes: one line per model, with the costs of the models."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convt5 import errors
from convt5.reports import figures, tables
from convt5.reports.tables import Table
from convt5.sweeps import analysis
from convt5.sweeps.analysis import Best, Key, Result
from convt5.sweeps.equal_cost import describe, lengths
from convt5.sweeps.running import StudyRun, final_value, states
from convt5.sweeps.study import Study
from convt5.vision import costs as vision_costs
from convt5.vision.architecture import ViTConfig

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun


Line = dict[str, Best]
"""The best setting at each value of the axis, in the order of `Study.labels`."""


class Cost(NamedTuple):
    """Costs of the runs of the best setting at one point of a line, over its seeds.

    Values derived from settings are None if these cannot be read, for instance without their data.

    Attributes:
        widths: emb_dim and mlp_dim.
        parameters: number of parameters of the model.
        flops: FLOPs of the forward pass of an example.
        memory: bytes of an update by formula (`costs.training_memory`); None for a vision model,
            which has no formula.
        seconds: training time on its machine without evaluation and compilation, as a mean over
            finished runs; None if not recorded.
        cpu_seconds: CPU time of all threads of the process during that time.
        fault: why the settings cannot be read.
    """

    widths: tuple[int, int] | None = None
    parameters: int | None = None
    flops: float | None = None
    memory: float | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    fault: str | None = None


def lines(study: Study, found: Sequence[Result]) -> dict[Key, Line]:
    """Returns the line of each value of `Study.rows`, from finished runs."""
    assert study.over is not None
    profiles: dict[Key, Line] = {}
    for key, results in analysis.by_row(study, found).items():
        done = {result.labels[study.over] for result in results}
        profiles[key] = {
            label: analysis.best(study, [r for r in results if r.labels[study.over] == label])
            for label in study.labels(study.over)
            if label in done
        }
    return profiles


def cost_table(study: Study, profiles: Mapping[Key, Line]) -> dict[tuple[Key, str], Cost]:
    """Returns the costs of the best settings by row and value of the axis, from finished runs."""
    assert study.over is not None
    groups: dict[tuple[Key, str], list[StudyRun]] = {}
    for made in states(study):
        labels = made.point.labels
        key, place = tuple(labels[axis] for axis in study.rows), labels[study.over]
        # Settings that are not the best may have other costs.
        if made.is_done and profiles[key][place].labels.items() <= labels.items():
            groups.setdefault((key, place), []).append(made)
    return {key: _cost(runs) for key, runs in groups.items()}


def sections(study: Study, profiles: Mapping[Key, Line], costs: Mapping[Any, Cost]) -> list[Table]:
    """Returns tables: the metric at each value of the axis, its differences, and the costs."""
    assert study.over is not None
    labels = _reached(study.labels(study.over), profiles.values())
    shown = [
        {
            **dict(zip(study.rows, key, strict=True)),
            **{label: _metric(study, line.get(label)) for label in labels},
        }
        for key, line in profiles.items()
    ]
    spent = [
        {
            **dict(zip(study.rows, key, strict=True)),
            **line[label].labels,
            "emb, mlp": "-" if cost.widths is None else f"{cost.widths[0]}, {cost.widths[1]}",
            "parameters": "-" if cost.parameters is None else f"{cost.parameters:,}",
            "forward MFLOP": "-" if cost.flops is None else f"{cost.flops / 1e6:.2f}",
            "update MB": "-" if cost.memory is None else f"{cost.memory / 1e6:.1f}",
            "seconds": _seconds(cost.seconds),
            "CPU seconds": _seconds(cost.cpu_seconds),
        }
        for key, line in profiles.items()
        for label in line
        for cost in [costs[key, label]]
    ]
    return [
        tables.of_rows(f"{study.metric} against {study.over}", shown),
        *_difference_table(study, profiles),
        tables.of_rows(
            "Costs",
            spent,
            notes=[
                "forward MFLOP: FLOPs of one example; update MB: closed-form memory of an update; "
                "seconds: training time without compilation and evaluation, on the machine of the "
                "run.",
                *sorted({f"Not known here: {cost.fault}" for cost in costs.values() if cost.fault}),
            ],
        ),
    ]


def _difference_table(study: Study, profiles: Mapping[Key, Line]) -> list[Table]:
    """Returns the section of `differences`; none where there are none."""
    found = differences(study, profiles)
    if not found:
        return []
    assert study.over is not None
    first, second = analysis.versus_labels(study)
    others = [axis for axis in study.rows if axis != study.versus]
    labels = _reached(study.labels(study.over), profiles.values())
    rows = [
        {**dict(zip(others, key, strict=True))}
        | {label: _gain(study, gains.get(label, [])) for label in labels}
        for key, gains in found.items()
    ]
    note = "Means over seeds, paired, and half the width of their 95 % interval (Student's t)."
    return [tables.of_rows(f"{study.metric}: {second} minus {first}", rows, notes=[note])]


def _gain(study: Study, values: Sequence[float]) -> str:
    if not values:
        return "-"
    half, decimals = analysis.half_interval(values), _decimals(study)
    spread = "" if half is None else f" ± {half:.{decimals}f}"
    return f"{statistics.fmean(values):+.{decimals}f}{spread}"


def _decimals(study: Study) -> int:
    return 1 if study.perfect is not None and study.perfect > 1 else 3  # Of percentages, one.


def draw_on(study: Study, axes: Any, panel: Mapping[str, Line]) -> None:
    """Draws the lines of one panel; non-numeric values are placed side by side, unconnected."""
    assert study.over is not None
    numeric = study.is_numeric(study.over)
    labels = study.labels(study.over)
    if numeric:
        labels = _reached(labels, panel.values())
    places = {label: float(label) if numeric else float(i) for i, label in enumerate(labels)}
    marks: list[tuple[list[float], str]] = []
    # A value has the same colour in all panels, even if values are missing in some.
    names = study.labels(study.rows[-1])
    for index, (name, line) in enumerate(panel.items()):
        beside = index - (len(panel) - 1) / 2
        x = [_beside(places[label], beside, list(places.values()), numeric) for label in line]
        means = [analysis.metric(study, best.mean) for best in line.values()]
        style = figures.style(names.index(name), joined=numeric)
        axes.plot(x, means, label=figures.text(study.word(name)), **style)
        for place, best in zip(x, line.values(), strict=True):
            seeds = [analysis.metric(study, error) for error in best.finite_errors]
            # Points of which some seeds diverged are not connected.
            alone = {"marker": ".", "linestyle": "none"} if best.diverged else {}
            style = {"color": style["color"], "linewidth": 1, "alpha": 0.5, **alone}
            axes.plot([place] * len(seeds), seeds, **style)
        diverged = [place for place, best in zip(x, line.values(), strict=True) if best.diverged]
        if diverged:
            marks.append((diverged, style["color"]))
    _mark_diverged(axes, marks, from_above=study.perfect is None)
    if numeric:
        axes.set_xscale("log", base=2)
        figures.name_values(axes.xaxis, places.values())
    else:
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_xticks(list(places.values()), [figures.text(study.word(name)) for name in labels])
    axes.set_xlabel(figures.text(study.word(study.over)))
    axes.set_ylabel(figures.text(study.metric_axis(is_error=False)))
    if study.perfect is not None and numeric:
        # A correlation can be below 0, and a percentage above a `perfect` of 1.
        drawn = [each.dataLim for each in axes.get_shared_y_axes().get_siblings(axes)]
        lowest, highest = min(each.y0 for each in drawn), max(each.y1 for each in drawn)
        axes.set_ylim(1.03 * min(0.0, lowest), 1.03 * max(study.perfect, highest))


def _beside(place: float, lines_away: float, places: Sequence[float], numeric: bool) -> float:
    """Returns where a line has its point, so that those of equal values can be seen."""
    if not numeric:
        return place + 0.12 * lines_away
    return place * (max(places) / min(places)) ** (0.008 * lines_away)


def differences(
    study: Study, profiles: Mapping[Key, Line]
) -> dict[tuple[str, ...], dict[str, list[float]]]:
    """Returns what the metric gains from the first to the second value of `Study.versus`.

    By the other rows, and the value of `Study.over`, for every seed that both have.
    """
    if study.versus is None:
        return {}
    place = list(study.rows).index(study.versus)
    first, second = analysis.versus_labels(study)
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for key, line in profiles.items():
        other = profiles.get((*key[:place], second, *key[place + 1 :]), {})
        if key[place] != first:
            continue
        sign = 1 if study.perfect is None else -1
        gains = {
            label: [sign * gain for gain in analysis.paired(best, other[label])]
            for label, best in line.items()
            if label in other
        }
        if gains := {label: values for label, values in gains.items() if values}:
            found[(*key[:place], *key[place + 1 :])] = gains
    return found


def draw_differences(study: Study, axes: Any, profiles: Mapping[Key, Line]) -> None:
    """Draws `differences` in one panel: means with intervals, single seeds, and a line at zero."""
    assert study.over is not None
    found = differences(study, profiles)
    labels = [
        label for label in study.labels(study.over) if any(label in g for g in found.values())
    ]
    for number, (key, gains) in enumerate(found.items()):
        beside = 0.8 / len(found) * (number - (len(found) - 1) / 2)
        style = figures.style(number, joined=False)
        for i, label in enumerate(labels):
            values = gains.get(label, [])
            x = [i + beside + 0.04] * len(values)
            axes.plot(x, values, ".", color=style["color"], alpha=0.5, markersize=5)
        shown = [(i, gains[label]) for i, label in enumerate(labels) if label in gains]
        axes.errorbar(
            [i + beside for i, _ in shown],
            [statistics.fmean(values) for _, values in shown],
            yerr=[analysis.half_interval(values) or 0.0 for _, values in shown],
            capsize=3,
            elinewidth=1.4,
            label=figures.text(", ".join(map(study.word, key)) or study.metric),
            **style,
        )
    axes.axhline(0, color="0.3", linewidth=1, zorder=1)
    for i in range(1, len(labels)):
        axes.axvline(i - 0.5, color="0.9", linewidth=1, zorder=0)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xticks(range(len(labels)), [figures.text(study.word(label)) for label in labels])
    first, second = map(study.word, analysis.versus_labels(study))
    metric = study.metric_axis(is_error=False).replace(", %", ", percentage points")
    axes.set_ylabel(figures.text(f"{metric}\n{second} minus {first}"))
    axes.set_title(
        "mean over seeds with its 95 % interval; dots are single seeds", fontsize=9, color="0.3"
    )
    figures.tidy(axes)
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False, fontsize=8, loc="best")


def _mark_diverged(
    axes: Any, marks: Sequence[tuple[list[float], str]], *, from_above: bool
) -> None:
    """Marks diverged points of each line, in its colour, along the edge of the worst values."""
    style: dict[str, Any] = {"marker": "x", "markersize": 5, "linestyle": "none"}
    for number, (places, color) in enumerate(marks):
        height = 0.025 + 0.035 * number  # Fraction of the axes: a diverged point has no value.
        heights = [1 - height if from_above else height] * len(places)
        axes.plot(places, heights, color=color, transform=axes.get_xaxis_transform(), **style)
    if marks:
        axes.plot([], [], color="gray", label="diverged", **style)


def _reached(labels: Sequence[str], lines: Iterable[Line]) -> list[str]:
    """Returns the values of the axis at which any line has a run."""
    lines = list(lines)
    return [label for label in labels if any(label in line for line in lines)]


def _cost(runs: Sequence[StudyRun]) -> Cost:
    point = runs[0].point
    taken = Cost(
        seconds=_mean_last(runs, "train_seconds"),
        cpu_seconds=_mean_last(runs, "train_cpu_seconds"),
    )
    try:
        run = describe(point)
    except errors.UserError as error:
        return taken._replace(fault=str(error))
    model: Any = run.model
    if isinstance(model, ViTConfig):
        total = vision_costs.model_cost(model).total
        parameters, flops, memory = total.parameters, 2 * total.multiply_adds, None
    else:
        parameters, flops, memory = _text_cost(run)
    return taken._replace(
        widths=(model.emb_dim, model.mlp_dim),
        parameters=parameters,
        flops=flops,
        memory=memory,
    )


def _text_cost(run: "TrainRun") -> tuple[int, float, float]:
    """Returns parameters, FLOPs of the forward pass, and bytes of an update."""
    from convt5.analysis import costs

    model: Any = run.model
    rows = run.train_data.batch_size // run.grad_accum_steps
    cost = costs.model_cost(model, **lengths(run))
    memory = costs.training_memory(
        model,
        run.optimizer,
        rows=rows,
        frozen=run.frozen,
        averaged=run.ema is not None,
        **lengths(run),
    )
    return cost.parameters, cost.forward_flops, memory.total


def _mean_last(runs: Sequence[StudyRun], name: str) -> float | None:
    """Returns the mean over runs of the last recorded value of a cumulative metric.

    Diverged runs ended early, and are ignored.
    """
    last = [final_value(made.folder, name) for made in runs if made.status == "finished"]
    known = [value for value in last if value is not None]
    return statistics.fmean(known) if known else None


def _metric(study: Study, best: Best | None) -> str:
    if best is None:
        return "-"
    seeds = [analysis.metric(study, error) for error in best.finite_errors]
    if not seeds:
        return best.diverged
    decimals = _decimals(study)
    least, greatest, mean = (
        f"{value:.{decimals}f}"
        for value in (min(seeds), max(seeds), analysis.metric(study, best.mean))
    )
    spread = f"{least}..{greatest}" if len(seeds) > 1 else least
    if best.diverged:
        return f"{best.diverged} ({spread})"
    return mean + (f" ({spread})" if len(seeds) > 1 else "")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
