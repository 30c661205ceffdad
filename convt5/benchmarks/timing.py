"""Times the sides of a comparison in alternation, so that noise affects all of them."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Medians over the repeats of one side.

    Attributes:
        seconds: wall-clock time.
        low_seconds, high_seconds: 95 % interval of that median; with fewer than six repeats, their
            range.
        cpu_seconds: CPU time of all cores, which is less sensitive to other load.
        repeats: number of repeats.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    cpu_seconds: float
    repeats: int

    def as_json(self) -> dict[str, float]:
        return self._asdict()


def queued_calls() -> int:
    """Returns how many calls of a short program to time together.

    An accelerator runs one program while the next are started. On an H100, starting one takes 0.1
    to 0.2 ms, which is longer than many operators run.
    """
    return 1 if jax.default_backend() == "cpu" else 16


def in_turns(
    sides: Mapping[str, Callable[[], Any]], *, repeats: int, calls: int = 1
) -> dict[str, Timing]:
    """Calls every side once to warm up, then all of them in turn, `repeats` times.

    Every second round is reversed, so that no side always finds the caches left by the same other
    side.

    Args:
        sides: functions by name; what they return is waited for.
        repeats: number of rounds.
        calls: calls of a side in each round, of which only the last one is waited for.
    """
    for call in sides.values():
        jax.block_until_ready(call())
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(repeats):
        for name, call in list(sides.items())[:: -1 if i % 2 else 1]:
            wall, cpu = time.perf_counter(), time.process_time()
            run_queued(call, calls)
            ended = time.perf_counter(), time.process_time()
            taken[name].append(((ended[0] - wall) / calls, (ended[1] - cpu) / calls))
    return {name: _median(times) for name, times in taken.items()}


def run_queued(call: Callable[[], Any], calls: int) -> None:
    """Calls a function several times, and waits for the last result."""
    for _ in range(calls - 1):
        call()
    jax.block_until_ready(call())


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the median of the distribution that the values are drawn from.

    It ends at the k-th smallest and the k-th largest of n values, with the largest k for which
    1 - 2 P(Binomial(n, 1/2) < k) is at least 0.95; k is 1 if there is none. One slow value of nine
    or more does not widen it, unlike the range.
    """
    values, num = sorted(values), len(values)
    ends = [
        k
        for k in range(1, num // 2 + 1)
        if 2 * sum(math.comb(num, i) for i in range(k)) <= 0.05 * 2**num
    ]
    k = max(ends, default=1)
    return values[k - 1], values[-k]


def _median(times: Sequence[tuple[float, float]]) -> Timing:
    walls, processors = zip(*times, strict=True)
    median = statistics.median(walls)
    return Timing(median, *median_interval(walls), statistics.median(processors), len(times))
