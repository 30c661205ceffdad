"""The machine that figures come from: what it is, and how fast it copies and multiplies at best."""

import os
import platform
from typing import Any

import jax
import jax.numpy as jnp

from convt5.benchmarks.timing import in_turns

_COPY_ELEMENTS = 2**25
_MATRIX = 2048


def describe(*, repeats: int) -> dict[str, Any]:
    """Returns names and versions, and the ceilings that figures are held against.

    `copy_bytes_per_second` counts bytes read and bytes written.
    """
    device = jax.devices()[0]
    x = jnp.ones(_COPY_ELEMENTS, jnp.float32)
    matrix = jnp.ones((_MATRIX, _MATRIX), jnp.float32)
    copy, multiply = jax.jit(lambda x: -x), jax.jit(lambda a: a @ a)
    taken = in_turns({"copy": lambda: copy(x), "matmul": lambda: multiply(matrix)}, repeats=repeats)
    return {
        "suite": "machine",
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "processor": _processor(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "copy_bytes_per_second": 2 * x.nbytes / taken["copy"].seconds,
        "matmul_flops": 2 * _MATRIX**3 / taken["matmul"].seconds,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model n")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
