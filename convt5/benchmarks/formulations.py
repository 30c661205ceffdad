"""The formulations of weight gradients against one another, and the one that is chosen."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.benchmarks.operators import BATCH, EMBED
from convt5.benchmarks.timing import in_turns
from convt5.ops import taps

KERNEL_SIZES = (3, 7, 15, 31)
HEADS = (2, 16, EMBED)
DILATIONS = (1, 8)
_STATIC: tuple[taps.Formulation, ...] = ("whole", "staged", "chunked")
_DYNAMIC: tuple[taps.Formulation, ...] = ("whole", "chunked", "banded")


def suite(lengths: Sequence[int], *, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields a record for each gradient, kernel size, dilation and length."""
    for length, size, dilation in itertools.product(lengths, KERNEL_SIZES, DILATIONS):
        reach = (size - 1) * dilation
        where = taps.Taps(size, dilation, reach // 2, reach - reach // 2, cross_segments=False)
        static = functools.partial(taps.static_weight_gradient, where, segment_ids=None)
        yield _measure(f"static K={size} d={dilation}", static, _STATIC, length, repeats)
        for heads in HEADS:
            dynamic = functools.partial(
                taps.dynamic_weight_gradient, where, segment_ids=None, heads=heads
            )
            case = f"dynamic K={size} d={dilation} H={heads}"
            # Blocks of rows do not serve taps that reach further than the row.
            served = _DYNAMIC if reach <= length else _DYNAMIC[:2]
            yield _measure(case, dynamic, served, length, repeats)


def _measure(
    case: str, gradient: Any, served: Sequence[taps.Formulation], length: int, repeats: int
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, cotangent = (
        jnp.asarray(rng.normal(size=(BATCH, length, EMBED)), jnp.float32) for _ in range(2)
    )
    compiled = {"chosen": jax.jit(gradient).lower(x, cotangent).compile()}
    for formulation in served:
        with taps.computed(formulation):
            # A function of its own: what jit has traced keeps its formulation.
            compiled[formulation] = (
                jax.jit(lambda x, y: gradient(x, y)).lower(x, cotangent).compile()
            )
    sides = {name: functools.partial(call, x, cotangent) for name, call in compiled.items()}
    taken = in_turns(sides, repeats=repeats)
    best = min(served, key=lambda name: taken[name].seconds)
    return {
        "suite": "formulations",
        "case": case,
        "length": length,
        **taken["chosen"].as_json(),
        "best": best,
        "best_seconds": taken[best].seconds,
        "times_best": taken["chosen"].seconds / taken[best].seconds,
    }
