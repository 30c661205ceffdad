"""Times the sides of a comparison in alternation, so that noise affects all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Medians over the repeats of one side.

    Attributes:
        seconds: wall-clock time.
        least_seconds, greatest_seconds: its range over the repeats.
        cpu_seconds: CPU time of all cores, which is less sensitive to other load.
        repeats: number of repeats.
    """

    seconds: float
    least_seconds: float
    greatest_seconds: float
    cpu_seconds: float
    repeats: int

    def as_json(self) -> dict[str, float]:
        return self._asdict()


def in_turns(sides: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, Timing]:
    """Calls every side once to warm up, then all of them in turn, `repeats` times.

    Every second round is reversed, so that no side always finds the caches left by the same other
    side. Waits for the result of each call.
    """
    for call in sides.values():
        jax.block_until_ready(call())
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(repeats):
        for name, call in list(sides.items())[:: -1 if i % 2 else 1]:
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: _median(times) for name, times in taken.items()}


def _median(times: Sequence[tuple[float, float]]) -> Timing:
    walls, processors = zip(*times, strict=True)
    return Timing(
        statistics.median(walls),
        min(walls),
        max(walls),
        statistics.median(processors),
        len(times),
    )
