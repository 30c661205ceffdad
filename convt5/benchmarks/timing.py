"""Times of several sides of one comparison, taken in turns, so that a noisy machine hits all."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Medians over the repeats of one side.

    Attributes:
        seconds: by the wall clock.
        cpu_seconds: of all processors together, which other work on the machine disturbs less.
        repeats: how many were taken.
    """

    seconds: float
    cpu_seconds: float
    repeats: int

    def as_json(self) -> dict[str, float]:
        return self._asdict()


def in_turns(sides: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, Timing]:
    """Calls every side once without counting it, then all of them in turn, `repeats` times.

    Every second round goes backwards, so that no side always follows the same one and finds the
    caches as that leaves them. What a side returns is waited for.
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
    return Timing(statistics.median(walls), statistics.median(processors), len(times))
