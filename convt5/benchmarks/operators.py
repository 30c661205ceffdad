"""Compares the convolutions with a plain sum of shifted inputs, forward and backward."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.benchmarks.timing import in_turns
from convt5.ops import depthwise_conv, dynamic_conv, lightweight_conv

BATCH, EMBED, HEADS = 4, 256, 2
KINDS = {"depthwise": depthwise_conv, "lightweight": lightweight_conv, "dynamic": dynamic_conv}
KERNEL_SIZES = (3, 7, 31)


def suite(
    lengths: Sequence[int], *, repeats: int, copy_bytes_per_second: float
) -> Iterator[dict[str, Any]]:
    """Yields a record for each kind, kernel size and length."""
    for length in lengths:
        for kind in KINDS:
            for taps in KERNEL_SIZES:
                yield _measure(kind, taps, length, repeats, copy_bytes_per_second)


def _measure(kind, taps, length, repeats, copy_bytes_per_second) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = {
        "depthwise": (taps, EMBED),
        "lightweight": (taps, HEADS),
        "dynamic": (BATCH, length, taps, HEADS),
    }[kind]
    x = jnp.asarray(rng.normal(size=(BATCH, length, EMBED)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=shape), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    ours = _with_gradients(KINDS[kind])
    naive = _with_gradients(functools.partial(_naive, kind))
    taken = in_turns(
        {
            "convt5": lambda: ours(x, kernel, cotangent),
            "naive": lambda: naive(x, kernel, cotangent),
        },
        repeats=repeats,
    )
    # Reads x, its cotangent and the kernel; writes the output and both gradients.
    least = 4 * x.nbytes + 2 * kernel.nbytes
    return {
        "suite": "ops",
        "case": f"{kind} K={taps}",
        "kind": kind,
        "length": length,
        # Output and both gradients take a multiply-add for each tap of each element.
        "flops": 3 * 2 * taps * x.size,
        "least_bytes": least,
        **taken["convt5"].as_json(),
        "naive_seconds": taken["naive"].seconds,
        "speedup": taken["naive"].seconds / taken["convt5"].seconds,
        "times_copy": taken["convt5"].seconds * copy_bytes_per_second / least,
    }


def _with_gradients(convolve):
    @jax.jit
    def run(x, kernel, cotangent):
        y, vjp = jax.vjp(convolve, x, kernel)
        return y, vjp(cotangent)

    return run


def _naive(kind, x, kernel):
    """Sums shifted inputs times expanded weights, differentiated by jax."""
    taps = kernel.shape[-2]
    if kind == "depthwise":
        weights = kernel[None, None]
    else:
        spread = jnp.repeat(jax.nn.softmax(kernel, axis=-2), EMBED // HEADS, axis=-1)
        weights = spread if kind == "dynamic" else spread[None, None]
    left = taps // 2
    padded = jnp.pad(x, ((0, 0), (left, taps - 1 - left), (0, 0)))
    shifted = [padded[:, j : j + x.shape[1]] for j in range(taps)]
    return sum(weights[:, :, j] * shifted[j] for j in range(taps))
