"""Describes the machine of a benchmark; measures its peak rates of copying and multiplying."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from convt5.benchmarks.timing import queued_calls, run_queued
from convt5.runtime import machine

_COPY_ELEMENTS = 2**25
_MATRIX = 2048
# Enough repeats for memory to be reused, which varies between runs: touching new pages took 20
# times as long.
_REPEATS = 12


def describe() -> dict[str, Any]:
    """Returns names, versions and peak rates, as references for measurements.

    `copy_bytes_per_second` counts bytes read and bytes written.
    """
    x = jnp.ones(_COPY_ELEMENTS, jnp.float32)
    matrix = jnp.ones((_MATRIX, _MATRIX), jnp.float32)
    copy, multiply = jax.jit(lambda x: -x), jax.jit(lambda a: a @ a)
    return {
        "suite": "machine",
        **machine.describe(),
        "copy_bytes_per_second": 2 * x.nbytes / _fastest(lambda: copy(x)),
        "matmul_flops": 2 * _MATRIX**3 / _fastest(lambda: multiply(matrix)),
    }


def _fastest(call: Callable[[], Any]) -> float:
    """Returns the shortest time; a median would include first touches of memory."""
    taken, calls = [], queued_calls()
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        run_queued(call, calls)
        taken.append((time.perf_counter() - began) / calls)
    return min(taken[1:])
