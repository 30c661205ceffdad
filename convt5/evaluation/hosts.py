"""Distributes examples among the hosts of a run, and merges their results.

Each host computes its examples on its own devices, and waits for others only when all are done.
Hosts with fewer or shorter examples thus cannot block the others.
"""

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def share(
    lengths: Sequence[int], *, process_index: int | None = None, process_count: int | None = None
) -> list[int]:
    """Returns the examples of this host; each belongs to exactly one host.

    Examples are dealt in the order of their lengths, so hosts have equal work and numbers of
    examples that differ by at most one. Every host knows all lengths, so nothing is communicated.
    """
    index = jax.process_index() if process_index is None else process_index
    count = jax.process_count() if process_count is None else process_count
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    return sorted(order[index::count].tolist())


def merge(values: Sequence[Any], examples: Sequence[int]) -> list[Any]:
    """Merges the values of all hosts in the order of their examples; all hosts must call it.

    Args:
        values: this host's JSON values; numbers are transferred exactly.
        examples: the index of the example of each value.
    """
    if jax.process_count() == 1:
        pairs = list(zip(examples, values, strict=True))
    else:
        text = json.dumps(list(zip(examples, values, strict=True))).encode()
        local = np.frombuffer(text, np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.array(len(local))))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(local)] = local
        rows = np.asarray(multihost_utils.process_allgather(padded))
        pairs = [
            pair
            for row, size in zip(rows, sizes, strict=True)
            for pair in json.loads(row[:size].tobytes())
        ]
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def first_hosts(decision: bool) -> bool:
    """Returns the decision of the first host, on all hosts; all must call it."""
    if jax.process_count() == 1:
        return decision
    return bool(multihost_utils.broadcast_one_to_all(np.array(decision)))
