"""Summarises the runs of a study: distributions, best settings, differences, convergence.

The error of a run is `perfect - metric`, or the metric itself. A diverged run has an infinite
error, so it counts as worse than any limit.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from scipy import special

from convt5.sweeps.running import StudyRun, check_metric, states, values_of
from convt5.sweeps.study import GREATEST, SEED, Study
from convt5.training.run_log import read_metrics

Labels = Mapping[str, str]
Key = tuple[str, ...]


class Result(NamedTuple):
    """A finished run.

    Attributes:
        labels: its value on every axis, and its seed.
        curve: steps and errors of its evaluations, in order.
        error: its last error; infinite if it diverged.
    """

    labels: Labels
    curve: tuple[tuple[int, float], ...]
    error: float


class Distribution(NamedTuple):
    """Distribution of errors over a grid.

    Attributes:
        errors: the error of every run, ascending.
        num_diverged: number of diverged runs, at the end.
    """

    errors: tuple[float, ...]
    num_diverged: int

    def quantile(self, share: float) -> float:
        """Returns a quantile, linear between neighbours, as NumPy does and of two their mean.

        It is infinite where a neighbour that counts is.
        """
        place = share * (len(self.errors) - 1)
        below = math.floor(place)
        rest = place - below
        value = self.errors[below]
        if not rest or value == (above := self.errors[below + 1]):
            return value
        return above if math.isinf(above) else value + rest * (above - value)


class Best(NamedTuple):
    """The setting with the lowest mean error over its seeds.

    Attributes:
        labels: its values on the axes other than `Study.rows`.
        mean: mean error.
        errors: error of each seed.
        curve: steps and mean errors over the seeds.
        seeds: seeds in the order of `errors`.
    """

    labels: Labels
    mean: float
    errors: tuple[float, ...]
    curve: tuple[tuple[int, float], ...]
    seeds: tuple[str, ...] = ()

    @property
    def finite_errors(self) -> tuple[float, ...]:
        return tuple(error for error in self.errors if math.isfinite(error))

    @property
    def diverged(self) -> str:
        """Tells how many of its runs diverged; empty if none did."""
        count = len(self.errors) - len(self.finite_errors)
        if count in (0, len(self.errors)):
            return "diverged" if count else ""
        return f"{count} of {len(self.errors)} diverged"


def results(study: Study) -> list[Result]:
    """Returns the finished runs.

    Raises:
        UserError: a finished run has no value of the metric.
    """
    return [_result(study, made) for made in states(study) if made.is_done]


def by_row(study: Study, results: Sequence[Result]) -> dict[Key, list[Result]]:
    """Groups results by their values on `Study.rows`, in the order of the study."""
    groups: dict[Key, list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result.labels[axis] for axis in study.rows), []).append(result)
    order = {
        axis: {label: i for i, label in enumerate(labels)}
        for axis, labels in _labels(study).items()
    }
    ranks = [order[axis] for axis in study.rows]
    return dict(
        sorted(groups.items(), key=lambda g: [rank[k] for rank, k in zip(ranks, g[0], strict=True)])
    )


def distribution(results: Sequence[Result]) -> Distribution:
    ordered = sorted(result.error for result in results)
    return Distribution(tuple(ordered), sum(math.isinf(error) for error in ordered))


def best(study: Study, results: Sequence[Result]) -> Best:
    """Returns the best setting among those with the most seeds."""
    other_axes = [axis for axis in study.axes if axis not in study.rows]
    settings: dict[Key, list[Result]] = {}
    for result in results:
        settings.setdefault(tuple(result.labels[axis] for axis in other_axes), []).append(result)
    most = max(map(len, settings.values()))
    complete = {key: runs for key, runs in settings.items() if len(runs) == most}
    key = min(complete, key=lambda k: statistics.fmean(r.error for r in complete[k]))
    runs = complete[key]
    return Best(
        dict(zip(other_axes, key, strict=True)),
        statistics.fmean(run.error for run in runs),
        tuple(run.error for run in runs),
        _mean_curve(runs),
        tuple(run.labels[SEED] for run in runs),
    )


def differences(study: Study, bests: Mapping[Key, Best]) -> Iterator[tuple[Key, float, float]]:
    """Yields the other rows, and the best errors at both values of `Study.versus`.

    They are means over the seeds that both have, as others may be easier or harder. In the order of
    the study; rows without such seeds are skipped.
    """
    if study.versus is None:
        return
    place = list(study.rows).index(study.versus)
    labels = list(_labels(study)[study.versus])[:2]
    for key in dict.fromkeys((*key[:place], *key[place + 1 :]) for key in bests):
        pair = [bests.get((*key[:place], label, *key[place:])) for label in labels]
        by_seed = [dict(zip(best.seeds, best.errors, strict=True)) for best in pair if best]
        if len(by_seed) == 2 and (common := by_seed[0].keys() & by_seed[1].keys()):
            first, second = (statistics.fmean(own[seed] for seed in common) for own in by_seed)
            yield key, first, second


def paired(first: Best, second: Best) -> list[float]:
    """Returns what the errors of the second are above those of the first, seed by seed.

    Seeds that only one of them has, or of which a run diverged, are left out.
    """
    others = dict(zip(first.seeds, first.errors, strict=True))
    return [
        error - others[seed]
        for seed, error in zip(second.seeds, second.errors, strict=True)
        if seed in others and math.isfinite(error) and math.isfinite(others[seed])
    ]


def half_interval(values: Sequence[float], *, confidence: float = 0.95) -> float | None:
    """Returns half the width of the confidence interval of a mean, by Student's t distribution.

    None for fewer than two values, which say nothing of how far they scatter.
    """
    if len(values) < 2:
        return None
    quantile = float(special.stdtrit(len(values) - 1, 0.5 + confidence / 2))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def steps_to(curve: Sequence[tuple[int, float]], error: float) -> float | None:
    """Returns the number of steps to reach an error, interpolated between evaluations, or None."""
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
    """Returns for each panel the lowest error that the best setting of every line reaches.

    Panels are the rows without the last; each line is a value of the last row. Diverged lines are
    ignored, and a panel with only such lines has no error.
    """
    reached: dict[Key, list[float]] = {}
    for key, best in bests.items():
        values = [error for _, error in best.curve if math.isfinite(error)]
        if values and not best.diverged:
            reached.setdefault(key[:-1], []).append(min(values))
    return {panel: max(values) for panel, values in reached.items()}


def versus_labels(study: Study) -> list[str]:
    return list(_labels(study)[study.versus]) if study.versus else []


def _labels(study: Study) -> dict[str, dict[str, None]]:
    """Returns the labels of each axis, in the order of the grids."""
    return {
        axis: dict.fromkeys(label for grid in study.grids for label in grid.values(axis))
        for axis in (*study.axes,)
    }


def _result(study: Study, made: StudyRun) -> Result:
    has_finished = made.status == "finished"
    if has_finished:
        where = f"the run in {made.folder}"
        check_metric(study.metric, read_metrics(made.folder), where=where)
    values = values_of(made.folder, study.metric)
    curve = [(step, error(study, value)) for step, value in values]
    last = curve[-1][1] if has_finished else math.inf
    return Result(dict(made.point.labels), tuple(curve), last)


def metric(study: Study, error: float) -> float:
    """Returns the metric of which `error` is the error."""
    return error if study.perfect is None else study.perfect - error


def error(study: Study, value: float) -> float:
    """Returns the error of a value of the metric; infinite if no mean of such values is finite."""
    found = value if study.perfect is None else study.perfect - value
    return found if abs(found) < GREATEST else math.inf


def _mean_curve(runs: Sequence[Result]) -> tuple[tuple[int, float], ...]:
    common = set.intersection(*(set(dict(run.curve)) for run in runs))
    curves = [dict(run.curve) for run in runs]
    return tuple(
        (step, statistics.fmean(curve[step] for curve in curves)) for step in sorted(common)
    )
