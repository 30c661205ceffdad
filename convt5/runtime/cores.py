"""The CPU cores that this process may use."""

import os


def shares(count: int) -> list[list[int]]:
    """Divides the cores among processes.

    Returns disjoint shares; some are empty where there are fewer cores than processes, and all
    where the system does not bind processes to cores, for instance on macOS.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [cores[i::count] for i in range(count)]
