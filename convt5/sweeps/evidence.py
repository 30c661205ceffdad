"""What finished runs say about the claims of a paper: differences, intervals and verdicts.

A difference is positive where the claim holds. It is paired: both runs have the same seed and the
same values on all other axes.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from convt5.runtime import metric_names
from convt5.sweeps import analysis
from convt5.sweeps.analysis import half_interval
from convt5.sweeps.paper import Claim, CostClaim
from convt5.sweeps.study import SEED, Study

Verdict = Literal["reproduced", "not reproduced", "cannot be said at this scale"]

_UNITS = {"seconds": "s", "flops": "FLOPs", "temporary_bytes": "bytes"}


class Line(NamedTuple):
    """The evidence on one line, such as a task or a length.

    Attributes:
        name: of the line.
        ends: the metric at the first and at the second value of the contrast, as means; None for a
            difference of differences.
        values: paired differences, a mean for each seed; of costs, the first divided by the second.
        interval: 95 % interval of their mean over seeds; of costs, that over repeats. None for
            fewer than two values, or equal ones: seeds that change nothing are no evidence.
        counts: whether it counts towards the verdict (`Claim.least`).
    """

    name: str
    ends: tuple[float, float] | None
    values: tuple[float, ...]
    interval: tuple[float, float] | None
    counts: bool = True

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


class Evidence(NamedTuple):
    """The evidence for a claim.

    Attributes:
        claim: the claim.
        unit: of the values.
        lines: those with at least one pair of runs.
        interval: 95 % interval of the mean: over the lines that count, or over the seeds of the
            only one. None without two of them, if a line has a single seed, or if seeds change
            none.
        num_missing: pairs whose runs are not finished or diverged.
        verdict: whether the interval is above the value without an effect, below it, or around it.
    """

    claim: Claim | CostClaim
    unit: str
    lines: tuple[Line, ...]
    interval: tuple[float, float] | None
    num_missing: int
    verdict: Verdict

    @property
    def mean(self) -> float | None:
        """Mean of the lines that count, geometric for ratios; None without one."""
        means = [line.mean for line in self.lines if line.counts]
        if not means:
            return None
        return statistics.geometric_mean(means) if self.is_ratio else statistics.fmean(means)

    @property
    def is_ratio(self) -> bool:
        return isinstance(self.claim, CostClaim)


def of_claim(claim: Claim, studies: Mapping[str, Study]) -> Evidence:
    """Returns the evidence of the finished runs of studies.

    Raises:
        UserError: a study has no such axis or value, or a finished run no value of the metric.
    """
    lines: list[Line] = []
    missing, units = 0, set()
    for name in claim.studies:
        study = studies[name]
        claim.check(study, name)
        own, lacking = _lines(claim, study, name)
        lines += own
        missing += lacking
        units.add(metric_names.axis(study.metric).rpartition(", ")[2].replace("%", "points"))
    interval = _mean_interval(lines)
    return Evidence(
        claim, " or ".join(sorted(units)), tuple(lines), interval, missing, _verdict(interval, 0.0)
    )


def of_costs(claim: CostClaim, records: Sequence[Mapping[str, Any]]) -> Evidence:
    """Returns the evidence of benchmark records: how many times the cost of `second` `first` has.

    The claim is reproduced if `second` costs less at every length, beyond the intervals of repeats.
    Times without an interval, as earlier versions recorded them, are not measured. Nor are costs of
    0, of which no other cost is a multiple.
    """
    is_time = claim.quantity == "seconds"
    ends = ("low_seconds", "seconds", "high_seconds") if is_time else (claim.quantity,) * 3
    by_case = {
        (record["case"], record["length"]): record
        for record in records
        if record.get("suite") == "train_step" and all(map(record.get, ends))
    }
    lengths = sorted({length for case, length in by_case if case == claim.first})
    lines = []
    for length in lengths:
        pair = [by_case.get((case, length)) for case in (claim.first, claim.second)]
        if pair[0] is None or pair[1] is None:
            continue
        first, second = (
            [float(record[end]) for end in ends] for record in pair if record is not None
        )
        lines.append(
            Line(
                f"{length:,} tokens",
                (first[1], second[1]),
                (first[1] / second[1],),
                (first[0] / second[2], first[2] / second[0]),
            )
        )
    intervals = [line.interval for line in lines if line.interval is not None]
    interval = (min(i[0] for i in intervals), max(i[1] for i in intervals)) if intervals else None
    missing = len(lengths) - len(lines)
    return Evidence(
        claim, _UNITS[claim.quantity], tuple(lines), interval, missing, _verdict(interval, 1.0)
    )


def _lines(claim: Claim, study: Study, name: str) -> tuple[list[Line], int]:
    """Returns the lines of a study, and the number of pairs that are not complete."""
    axis = claim.lines or study.over
    finished = {tuple(r.labels.items()): r for r in analysis.results(study)}
    pairs: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    missing = 0
    for cell in _cells(claim, study):
        runs = [
            finished.get(tuple((cell | dict(corner)).items()))
            for corner in itertools.product(
                *([(a, value) for value in values] for a, values in claim.contrast.items())
            )
        ]
        errors = tuple(run.error for run in runs if run is not None)
        if len(errors) < len(runs) or not all(map(math.isfinite, errors)):
            missing += 1
            continue
        line = study.word(cell[axis]) if axis else name
        pairs.setdefault(line, {}).setdefault(cell[SEED], []).append(errors)
    return [_line(study, line, by_seed, claim.least) for line, by_seed in pairs.items()], missing


def _cells(claim: Claim, study: Study) -> Iterator[dict[str, str]]:
    """Yields the labels that the runs of a pair share, with a place for those of the contrast.

    The keys stand in the order of `Point.labels`, so that completed cells equal those of runs.
    """
    seen = set()
    for point in study.points():
        labels = point.labels
        if any(labels[axis] not in values for axis, values in claim.where.items()):
            continue
        cell = {axis: "" if axis in claim.contrast else label for axis, label in labels.items()}
        key = tuple(cell.items())
        if key not in seen:
            seen.add(key)
            yield cell


def _line(
    study: Study,
    name: str,
    by_seed: Mapping[str, Sequence[tuple[float, ...]]],
    least: float | None,
) -> Line:
    """Returns a line from the errors of its pairs of runs, or of its pairs of pairs, by seed."""
    values = tuple(
        statistics.fmean(_gain(errors) for errors in pairs) for pairs in by_seed.values()
    )
    every = [errors for pairs in by_seed.values() for errors in pairs]
    means = [statistics.fmean(errors) for errors in zip(*every, strict=True)]
    ends = None
    if len(means) == 2:
        ends = (analysis.metric(study, means[0]), analysis.metric(study, means[1]))
    counts = least is None or min(means) <= analysis.error(study, least)
    return Line(name, ends, values, _interval(values), counts)


def _gain(errors: Sequence[float]) -> float:
    """Returns by how much the second error is below the first; of four, what this gains."""
    if len(errors) == 2:
        return errors[0] - errors[1]
    # In the order of `itertools.product`: the last axis changes fastest.
    return _gain(errors[2:]) - _gain(errors[:2])


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    half = half_interval(values)
    # Values that are equal, but for rounding, tell of seeds that change nothing, or of a metric
    # with few steps, and not of how far other runs would scatter.
    if half is None or half <= 1e-9 * max(map(abs, values)):
        return None
    mean = statistics.fmean(values)
    return mean - half, mean + half


def _mean_interval(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Returns the interval of the mean of the lines that count, or of the only one over seeds.

    None if one of them has a single seed, whose luck all of its lines may share, or if the seeds of
    all are as good as one.
    """
    lines = [line for line in lines if line.counts]
    if any(len(line.values) < 2 for line in lines) or all(line.interval is None for line in lines):
        return None
    return lines[0].interval if len(lines) == 1 else _interval([line.mean for line in lines])


def _verdict(interval: tuple[float, float] | None, no_effect: float) -> Verdict:
    if interval is not None and interval[0] > no_effect:
        return "reproduced"
    if interval is not None and interval[1] < no_effect:
        return "not reproduced"
    return "cannot be said at this scale"
