"""A study's metric against one of its axes: one line per model, with the costs of the models."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convt5 import errors
from convt5.reports import markdown
from convt5.sweeps import analysis
from convt5.sweeps.analysis import Best, Key, Result
from convt5.sweeps.equal_cost import describe, lengths
from convt5.sweeps.running import StudyRun, final_value, states
from convt5.sweeps.study import Study
from convt5.vision import costs as vision_costs
from convt5.vision.architecture import ViTConfig

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

_MARKERS = "os^DvPX"
"""Sizes of markers on consecutive lines, so that equal values do not hide each other."""

Line = dict[str, Best]
"""The best setting at each value of the axis, in the order of `Study.labels`."""


class Cost(NamedTuple):
    """Costs of the runs at one point of a line, over its seeds.

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


def cost_table(study: Study) -> dict[tuple[Key, str], Cost]:
    """Returns the costs of the models by row and value of the axis, from finished runs."""
    assert study.over is not None
    groups: dict[tuple[Key, str], list[StudyRun]] = {}
    for made in states(study):
        if made.is_done:
            labels = made.point.labels
            key = tuple(labels[axis] for axis in study.rows)
            groups.setdefault((key, labels[study.over]), []).append(made)
    return {key: _cost(runs) for key, runs in groups.items()}


def tables(study: Study, profiles: Mapping[Key, Line], costs: Mapping[Any, Cost]) -> str:
    """Returns Markdown tables: the metric at each value of the axis, and the costs."""
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
            study.over: label,
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
    return "\n\n".join(
        [
            f"## {study.metric} against {study.over}",
            markdown.table(shown),
            "## Costs",
            markdown.table(spent),
            "forward MFLOP: FLOPs of one example; update MB: closed-form memory of an update; "
            "seconds: training time without compilation and evaluation, on the machine of the "
            "run.",
            *sorted({f"Not known here: {cost.fault}" for cost in costs.values() if cost.fault}),
        ]
    )


def draw_on(study: Study, axes: Any, panel: Mapping[str, Line]) -> None:
    """Draws the lines of one panel; non-numeric values are placed side by side, unconnected."""
    assert study.over is not None
    numeric = study.is_numeric(study.over)
    labels = study.labels(study.over)
    if numeric:
        labels = _reached(labels, panel.values())
    places = {label: float(label) if numeric else i for i, label in enumerate(labels)}
    marks: list[tuple[list[float], str]] = []
    # A value has the same colour in all panels, even if values are missing in some.
    names = study.labels(study.rows[-1])
    for index, (name, line) in enumerate(panel.items()):
        number = names.index(name)
        beside = 0.0 if numeric else 0.12 * (index - (len(panel) - 1) / 2)
        x = [places[label] + beside for label in line]
        means = [_value(study, best.mean) for best in line.values()]
        joined = "-" if numeric else ""
        marker = _MARKERS[number % len(_MARKERS)]
        style = {"color": f"C{number}", "marker": marker, "markersize": 5, "linestyle": joined}
        style["fillstyle"] = "none"
        axes.plot(x, means, label=name, **style)
        for place, best in zip(x, line.values(), strict=True):
            seeds = [_value(study, error) for error in best.finite_errors]
            # Points of which some seeds diverged are not connected.
            alone = {"marker": ".", "linestyle": "none"} if best.diverged else {}
            style = {"color": f"C{number}", "linewidth": 1, "alpha": 0.5, **alone}
            axes.plot([place] * len(seeds), seeds, **style)
        diverged = [place for place, best in zip(x, line.values(), strict=True) if best.diverged]
        if diverged:
            marks.append((diverged, f"C{number}"))
    _mark_diverged(axes, marks, from_above=study.perfect is None)
    if numeric:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xticks(list(places.values()), labels)
    axes.set_xlabel(study.over)
    axes.set_ylabel(study.metric)
    if study.perfect is not None:
        axes.set_ylim(0, study.perfect * 1.03)


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
        run = describe(point.gin_files, point.bindings, point.trust)
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
    memory = costs.training_memory(model, run.optimizer, rows=rows, **lengths(run))
    return cost.parameters, cost.forward_flops, memory.total


def _mean_last(runs: Sequence[StudyRun], name: str) -> float | None:
    """Returns the mean over runs of the last recorded value of a cumulative metric.

    Diverged runs ended early, and are ignored.
    """
    last = [final_value(made.folder, name) for made in runs if made.status == "finished"]
    known = [value for value in last if value is not None]
    return statistics.fmean(known) if known else None


def _value(study: Study, error: float) -> float:
    return error if study.perfect is None else study.perfect - error


def _metric(study: Study, best: Best | None) -> str:
    if best is None:
        return "-"
    seeds = [_value(study, error) for error in best.finite_errors]
    if not seeds:
        return best.diverged
    decimals = 1 if study.perfect is not None and study.perfect > 1 else 3  # Percentages get one.
    least, greatest, mean = (
        f"{value:.{decimals}f}" for value in (min(seeds), max(seeds), _value(study, best.mean))
    )
    spread = f"{least}..{greatest}" if len(seeds) > 1 else least
    if best.diverged:
        return f"{best.diverged} ({spread})"
    return mean + (f" ({spread})" if len(seeds) > 1 else "")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
