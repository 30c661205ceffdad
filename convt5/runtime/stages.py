"""The stages of the start of a process, and the seconds that each took."""

import contextlib
import os
import time
from collections.abc import Iterator

_imported_at = time.perf_counter()
_spent: dict[str, float] = {}


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Counts the time inside as part of a stage, such as "data"; stages may overlap."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _spent[name] = _spent.get(name, 0.0) + time.perf_counter() - began


def spent() -> dict[str, float]:
    """Returns the seconds of each stage so far, and as `total` those since the process began."""
    return {**_spent, "total": _since_beginning()}


def _since_beginning() -> float:
    """Returns the age of the process, or of this module where the system does not tell."""
    try:
        with open("/proc/self/stat") as file:
            # The name of the program, in parentheses, may hold blanks.
            began = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _imported_at
