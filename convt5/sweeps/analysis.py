"""What the runs of a study say together: distributions, best settings, differences, convergence.

Errors are `perfect - metric`, or the metric itself; a run that diverged has an infinite error, so
that it counts and is below no limit.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from convt5.sweeps.running import Made, check_metric, states, values_of
from convt5.sweeps.study import Study
from convt5.training.run_log import read_metrics

Labels = Mapping[str, str]
Key = tuple[str, ...]


class Result(NamedTuple):
    """A run that is done.

    Attributes:
        labels: its value of every axis, and of the seed.
        curve: steps and errors of its evaluations, in order.
        error: the last of them; infinite where it diverged.
    """

    labels: Labels
    curve: tuple[tuple[int, float], ...]
    error: float


class Distribution(NamedTuple):
    """Errors over a grid.

    Attributes:
        errors: of every run, ascending.
        num_diverged: of them, at the end.
    """

    errors: tuple[float, ...]
    num_diverged: int

    def quantile(self, share: float) -> float:
        """Returns the error that a share of the runs does not exceed: the nearest rank."""
        return self.errors[max(0, math.ceil(share * len(self.errors)) - 1)]


class Best(NamedTuple):
    """The setting of least mean error over its seeds.

    Attributes:
        labels: of the axes beside `Study.rows`.
        mean: of the errors.
        errors: of each seed.
        curve: steps and errors, the means over the seeds.
    """

    labels: Labels
    mean: float
    errors: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]

    @property
    def finite_errors(self) -> tuple[float, ...]:
        return tuple(error for error in self.errors if math.isfinite(error))

    @property
    def diverged(self) -> str:
        """Says how many of its runs diverged; empty where none did."""
        count = len(self.errors) - len(self.finite_errors)
        if count in (0, len(self.errors)):
            return "diverged" if count else ""
        return f"{count} of {len(self.errors)} diverged"


def results(study: Study) -> list[Result]:
    """Returns the runs that are done.

    Raises:
        UserError: a run that has finished recorded no value of the metric.
    """
    return [_result(study, made) for made in states(study) if made.is_done]


def by_row(study: Study, found: Sequence[Result]) -> dict[Key, list[Result]]:
    """Returns results by their values of `Study.rows`, in the order of the study."""
    groups: dict[Key, list[Result]] = {}
    for result in found:
        groups.setdefault(tuple(result.labels[axis] for axis in study.rows), []).append(result)
    order = {
        axis: {label: i for i, label in enumerate(labels)}
        for axis, labels in _labels(study).items()
    }
    ranks = [order[axis] for axis in study.rows]
    return dict(
        sorted(groups.items(), key=lambda g: [rank[k] for rank, k in zip(ranks, g[0], strict=True)])
    )


def distribution(found: Sequence[Result]) -> Distribution:
    ordered = sorted(result.error for result in found)
    return Distribution(tuple(ordered), sum(math.isinf(error) for error in ordered))


def best(study: Study, found: Sequence[Result]) -> Best:
    """Returns the best setting among those with the most seeds."""
    others = [axis for axis in study.axes if axis not in study.rows]
    settings: dict[Key, list[Result]] = {}
    for result in found:
        settings.setdefault(tuple(result.labels[axis] for axis in others), []).append(result)
    most = max(map(len, settings.values()))
    complete = {key: runs for key, runs in settings.items() if len(runs) == most}
    key = min(complete, key=lambda k: statistics.fmean(r.error for r in complete[k]))
    runs = complete[key]
    return Best(
        dict(zip(others, key, strict=True)),
        statistics.fmean(run.error for run in runs),
        tuple(run.error for run in runs),
        _mean_curve(runs),
    )


def differences(study: Study, bests: Mapping[Key, Best]) -> Iterator[tuple[Key, float, float]]:
    """Yields the other rows, and the best errors at the two values of `Study.versus`.

    Which are in the order of the study; rows without results of both are left out.
    """
    if study.versus is None:
        return
    place = list(study.rows).index(study.versus)
    labels = list(_labels(study)[study.versus])[:2]
    for key in dict.fromkeys((*key[:place], *key[place + 1 :]) for key in bests):
        pair = [bests.get((*key[:place], label, *key[place:])) for label in labels]
        if len(pair) == 2 and pair[0] and pair[1]:
            yield key, pair[0].mean, pair[1].mean


def steps_to(curve: Sequence[tuple[int, float]], error: float) -> float | None:
    """Returns the steps after which an error is first reached, linear between evaluations."""
    before: tuple[int, float] | None = None
    for step, value in curve:
        if value <= error:
            if before is None or not math.isfinite(before[1]) or before[1] == value:
                return float(step)
            share = (before[1] - error) / (before[1] - value)
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None


def common_errors(bests: Mapping[Key, Best]) -> dict[Key, float]:
    """Returns, for each panel, the least error that the best setting of every line reaches.

    Panels are the rows without the last; a line is a value of the last. Lines that diverged do not
    count, and a panel of such lines alone has no error.
    """
    reached: dict[Key, list[float]] = {}
    for key, found in bests.items():
        values = [error for _, error in found.curve if math.isfinite(error)]
        if values and not found.diverged:
            reached.setdefault(key[:-1], []).append(min(values))
    return {panel: max(values) for panel, values in reached.items()}


def versus_labels(study: Study) -> list[str]:
    return list(_labels(study)[study.versus]) if study.versus else []


def _labels(study: Study) -> dict[str, dict[str, None]]:
    """Returns the labels of each axis, in the order in which grids name them."""
    return {
        axis: dict.fromkeys(label for grid in study.grids for label in grid.values(axis))
        for axis in (*study.axes,)
    }


def _result(study: Study, made: Made) -> Result:
    has_finished = made.status == "finished"
    if has_finished:
        where = f"the run in {made.folder}"
        check_metric(study.metric, read_metrics(made.folder), where=where)
    values = values_of(made.folder, study.metric)
    curve = [(step, _error(study, value)) for step, value in values]
    error = curve[-1][1] if has_finished else math.inf
    return Result(dict(made.point.labels), tuple(curve), error)


def _error(study: Study, value: float) -> float:
    error = value if study.perfect is None else study.perfect - value
    return error if math.isfinite(error) else math.inf


def _mean_curve(runs: Sequence[Result]) -> tuple[tuple[int, float], ...]:
    common = set.intersection(*(set(dict(run.curve)) for run in runs))
    curves = [dict(run.curve) for run in runs]
    return tuple(
        (step, statistics.fmean(curve[step] for curve in curves)) for step in sorted(common)
    )
