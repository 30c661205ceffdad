"""The convolutions and their gradients in plain JAX, for every backend, shape and type.

Weights are a kernel [kernel, embed] for all positions, or logits [batch, length, kernel, heads] of
each position; `convolution` documents them. The arithmetic is that of `taps`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from convt5.ops import implementation, separate_taps, taps
from convt5.ops.taps import Taps


def normalize(
    softmax: bool,
    rate: float,
    logits,
    key,
    *,
    tap_softmax: Callable[..., Any] = taps.tap_softmax,
):
    """Returns the weights of the taps in at least float32; taps are the axis before the last."""
    weights = logits.astype(taps.wide_dtype(logits))
    if softmax:
        weights = tap_softmax(weights)
    if not _drops(rate, key):
        return weights
    kept = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
    return jnp.where(kept, weights / (1.0 - rate), 0.0)


def forward(where: Taps, softmax: bool, segment_ids, x, weights, *, rate=0.0, key=None):
    """Returns the convolution; `softmax`, `rate` and `key` only matter to logits."""
    if weights.ndim == 2:
        return taps.weighted_sum(where, x, weights[None, None], segment_ids)

    def together():
        normalized = normalize(softmax, rate, weights, key, tap_softmax=taps.plain_tap_softmax)
        return taps.weighted_sum(where, x, normalized, segment_ids)

    def divided_last():
        # XLA on CPU would divide the weights again for every channel.
        powers, total = taps.tap_powers(weights.astype(taps.wide_dtype(weights)))
        return taps.weighted_sum(where, x, powers, segment_ids, total)

    def apart():
        return separate_taps.forward(where, segment_ids, x, weights)

    if not softmax or _drops(rate, key):
        return together()
    return implementation.by_platform(together, cpu=divided_last, gpu=apart)


def backward(where: Taps, softmax: bool, segment_ids, x, weights, cotangent, *, rate=0.0, key=None):
    """Returns the gradients in x and in the weights."""
    if weights.ndim == 2:
        # Transposing a sum of shifts mirrors it: row i was read by the rows that it would read.
        mirrored = weights[::-1][None, None]
        dx = taps.weighted_sum(where.mirrored(), cotangent, mirrored, segment_ids)
        dkernel = taps.static_weight_gradient(where, x, cotangent, segment_ids)
        return dx.astype(x.dtype), dkernel.astype(weights.dtype)

    def together():
        normalized, vjp = jax.vjp(functools.partial(normalize, softmax, rate, key=key), weights)
        dx = taps.transposed_sum(where, cotangent, normalized, segment_ids)
        slopes = taps.dynamic_weight_gradient(where, x, cotangent, segment_ids, weights.shape[-1])
        (dlogits,) = vjp(slopes.astype(normalized.dtype))
        return dx.astype(x.dtype), dlogits

    def apart():
        return separate_taps.backward(where, segment_ids, x, weights, cotangent)

    can_be_apart = softmax and not _drops(rate, key)
    return implementation.by_platform(together, gpu=apart if can_be_apart else None)


def _drops(rate: float, key) -> bool:
    return key is not None and rate != 0.0
