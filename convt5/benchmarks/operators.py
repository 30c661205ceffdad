"""Compares the convolutions with a plain sum of shifted inputs, forward and backward."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.benchmarks import torch_operators
from convt5.benchmarks.timing import Timing, in_turns, queued_calls
from convt5.ops import depthwise_conv, dynamic_conv, lightweight_conv

BATCH, EMBED, HEADS = 4, 256, 2
KINDS = {"depthwise": depthwise_conv, "lightweight": lightweight_conv, "dynamic": dynamic_conv}
KERNEL_SIZES = (3, 7, 31)


def suite(
    lengths: Sequence[int],
    *,
    batch_size: int,
    channels: int,
    repeats: int,
    copy_bytes_per_second: float,
    with_torch: bool,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each kind, kernel size and length: float32 on CPU, else bfloat16.

    Args:
        lengths: positions of a row.
        batch_size: rows.
        channels: channels of a position, a multiple of `HEADS`.
        repeats: times that each side runs.
        copy_bytes_per_second: bandwidth of the machine.
        with_torch: whether depthwise convolutions of PyTorch and causal-conv1d run too, if
            installed.
    """
    for length in lengths:
        for kind in KINDS:
            for taps in KERNEL_SIZES:
                arrays = _arrays(kind, taps, (batch_size, length, channels))
                others = {}
                if with_torch and kind == "depthwise":
                    others = torch_operators.find_sides(*arrays)
                sides = {"convt5": KINDS[kind], "naive": functools.partial(_naive, kind)}
                ours = {
                    name: functools.partial(_with_gradients(convolve), *arrays)
                    for name, convolve in sides.items()
                }
                taken = in_turns({**ours, **others}, repeats=repeats, calls=queued_calls())
                yield _record(kind, arrays, taken, copy_bytes_per_second)


def _arrays(kind: str, taps: int, shape: tuple[int, int, int]) -> tuple[jax.Array, ...]:
    """Returns x, the kernel or its logits, and the cotangent."""
    rng = np.random.default_rng(0)
    of_kernel = {
        "depthwise": (taps, shape[-1]),
        "lightweight": (taps, HEADS),
        "dynamic": (*shape[:-1], taps, HEADS),
    }[kind]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return tuple(jnp.asarray(rng.normal(size=size), dtype) for size in (shape, of_kernel, shape))


def _record(
    kind: str,
    arrays: Sequence[jax.Array],
    taken: Mapping[str, Timing],
    copy_bytes_per_second: float,
) -> dict[str, Any]:
    x, kernel, _ = arrays
    taps = kernel.shape[-2]
    # Reads x, its cotangent and the kernel; writes the output and both gradients.
    least = 4 * x.nbytes + 2 * kernel.nbytes
    ours, naive = taken["convt5"], taken["naive"]
    others = {name: timing.seconds for name, timing in taken.items()}
    return {
        "suite": "ops",
        "case": f"{kind} K={taps}",
        "kind": kind,
        "length": x.shape[1],
        "batch_size": x.shape[0],
        "channels": x.shape[2],
        "dtype": str(x.dtype),
        # Output and both gradients take a multiply-add for each tap of each element.
        "flops": 3 * 2 * taps * x.size,
        "least_bytes": least,
        **ours.as_json(),
        "naive_seconds": naive.seconds,
        "torch_seconds": others.get("torch conv1d"),
        "causal_conv1d_seconds": others.get("causal-conv1d"),
        "speedup": naive.seconds / ours.seconds,
        "times_copy": ours.seconds * copy_bytes_per_second / least,
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
        spread = jnp.repeat(jax.nn.softmax(kernel, axis=-2), x.shape[-1] // HEADS, axis=-1)
        weights = spread if kind == "dynamic" else spread[None, None]
    left = taps // 2
    padded = jnp.pad(x, ((0, 0), (left, taps - 1 - left), (0, 0)))
    shifted = [padded[:, j : j + x.shape[1]] for j in range(taps)]
    return sum(weights[:, :, j] * shifted[j] for j in range(taps))
