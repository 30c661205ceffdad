"""Compares the formulations of weight gradients, and the one that is chosen."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.benchmarks.operators import BATCH, EMBED
from convt5.benchmarks.timing import in_turns
from convt5.ops import dispatch
from convt5.ops.convolution import cpu, gpu, reference
from convt5.ops.dispatch import Formulation
from convt5.ops.geometry import Taps

KERNEL_SIZES = (3, 7, 15, 31)
NUM_KERNELS = (2, 16, EMBED)
DILATIONS = (1, 8)
_STATIC: Mapping[str, Formulation] = {
    "whole": reference.static_weight_gradient,
    "staged": gpu.static_weight_gradient,
    "chunked": cpu.static_weight_gradient,
}
_DYNAMIC: Mapping[str, Formulation] = {
    "whole": reference.dynamic_weight_gradient,
    "chunked": cpu.chunked_weight_gradient,
    "banded": cpu.banded_weight_gradient,
}


def suite(lengths: Sequence[int], *, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a record for each gradient, kernel size, dilation and length."""
    for length, size, dilation in itertools.product(lengths, KERNEL_SIZES, DILATIONS):
        reach = (size - 1) * dilation
        taps = Taps(size, dilation, reach // 2, reach - reach // 2, cross_segments=False)
        given = {"segment_ids": None}
        static = {"chosen": _chosen("static_weight_gradient"), **_STATIC}
        yield _measure(f"static K={size} d={dilation}", static, taps, given, length, repeats)
        for num_kernels in NUM_KERNELS:
            dynamic = {"chosen": _chosen("dynamic_weight_gradient"), **_DYNAMIC}
            if reach > length:
                del dynamic["banded"]  # It does not support taps that reach beyond the row.
            given = {"segment_ids": None, "num_kernels": num_kernels}
            case = f"dynamic K={size} d={dilation} H={num_kernels}"
            yield _measure(case, dynamic, taps, given, length, repeats)


def _chosen(name: str) -> Formulation:
    """Returns a sum of `reference.Formulation`, in the formulation for the platform."""

    def compute(taps: Taps, x, dy, **given):
        def of(sums: reference.Formulation) -> Formulation:
            return lambda x, dy: getattr(sums, name)(taps, x, dy, **given)

        table = dispatch.Table(
            of(reference.PLAIN), cpu=of(cpu.FORMULATION), gpu=of(gpu.FORMULATION)
        )
        return dispatch.run(table, x, dy)

    return compute


def _measure(
    case: str,
    gradients: Mapping[str, Formulation],
    taps: Taps,
    given: Mapping[str, Any],
    length: int,
    repeats: int,
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, cotangent = (
        jnp.asarray(rng.normal(size=(BATCH, length, EMBED)), jnp.float32) for _ in range(2)
    )
    compiled = {
        name: jax.jit(functools.partial(gradient, taps, **given)).lower(x, cotangent).compile()
        for name, gradient in gradients.items()
    }
    sides = {name: functools.partial(call, x, cotangent) for name, call in compiled.items()}
    taken = in_turns(sides, repeats=repeats)
    best = min(gradients.keys() - {"chosen"}, key=lambda name: taken[name].seconds)
    return {
        "suite": "formulations",
        "case": case,
        "length": length,
        **taken["chosen"].as_json(),
        "best": best,
        "best_seconds": taken[best].seconds,
        "times_best": taken["chosen"].seconds / taken[best].seconds,
    }
