"""Convolutions and their gradients in plain JAX, for every platform, shape and dtype.

Weights are a kernel [taps, embed] shared by all positions, or logits [batch, length, taps, kernels]
for each position; see `operators`. Every sum over taps has a fixed order, independent of the row
length and of where a segment lies in the row, and includes the terms that are zero. A packed
example therefore equals the unpacked one bit for bit. `cpu` and `gpu` replace single sums.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from convt5.ops.convolution.rows import (
    Reader,
    hide_padding,
    rows_between,
    split_kernels,
    wide_dtype,
)
from convt5.ops.geometry import Taps


def weighted_sum(taps: Taps, x, weights, segment_ids):
    """Returns sum_j weights[i, j, h] x[i + offset j, c] with h the kernel of channel c.

    Args:
        taps: the geometry.
        x: [batch, length, embed].
        weights: [batch, length, taps, kernels]; batch and length may be 1.
        segment_ids: [batch, length] or None.
    """
    return sum_read_rows(taps, x, weights, segment_ids, Reader(taps, x, segment_ids))


def sum_read_rows(taps: Taps, x, weights, segment_ids, read, total=None):
    """Returns `weighted_sum` of the rows returned by `read(tap)`, divided by `total` if given.

    Args:
        taps, x, weights, segment_ids: as in `weighted_sum`.
        read: returns the shifted rows of a tap, [batch, length, embed].
        total: [batch, length, 1, kernels] or None.
    """
    num_kernels, wide = weights.shape[-1], wide_dtype(x, weights)
    y = jnp.zeros(split_kernels(x, num_kernels).shape, wide)
    for tap in range(taps.count):
        shifted = split_kernels(read(tap).astype(wide), num_kernels)
        y = y + weights[:, :, tap, :, None].astype(wide) * shifted
    if total is not None:
        y = y * (1 / total[:, :, 0, :, None].astype(wide))
    return hide_padding(y.reshape(x.shape).astype(x.dtype), segment_ids)


def transposed_sum(taps: Taps, dy, weights, segment_ids):
    """Returns the gradient of `weighted_sum` in x, for weights that differ between positions.

    Row i collects weights[s, j] * dy[s] from the rows s = i - offset j that read it.
    """
    length = dy.shape[1]
    read = Reader(taps.mirrored(), dy, segment_ids)
    around = rows_between(weights, -read.left, length + read.right)

    def shifted_weight(tap):
        return around[:, read.starts[tap] :, -1 - tap][:, :length]

    return transpose_read_rows(taps, dy, weights, segment_ids, read, shifted_weight)


def transpose_read_rows(taps: Taps, dy, weights, segment_ids, read, shifted_weight):
    """Returns `transposed_sum` for weights [batch, length, kernels] by `shifted_weight(tap)`."""
    num_kernels, wide = weights.shape[-1], wide_dtype(dy, weights)
    dx = jnp.zeros(split_kernels(dy, num_kernels).shape, wide)
    for tap in range(taps.count):
        weight = shifted_weight(tap)[..., None].astype(wide)
        dx = dx + weight * split_kernels(read(tap).astype(wide), num_kernels)
    return hide_padding(dx.reshape(dy.shape).astype(dy.dtype), segment_ids)


def static_weight_gradient(taps: Taps, x, dy, segment_ids):
    """Returns sum_i dy[i, c] x[i + offset j, c] over all rows, [taps, embed]."""
    wide = wide_dtype(x, dy)
    hidden = hide_padding(dy, segment_ids)
    read = Reader(taps, x, segment_ids)
    part = hidden.astype(wide)
    return jnp.stack(
        [jnp.sum(read(tap).astype(wide) * part, axis=(0, 1)) for tap in range(taps.count)]
    )


def dynamic_weight_gradient(taps: Taps, x, dy, segment_ids, num_kernels):
    """Returns the sum of dy[i, c] x[i + offset j, c] over the channels c of each kernel h.

    The shape is [batch, length, taps, kernels].
    """
    hidden, read = hide_padding(dy, segment_ids), Reader(taps, x, segment_ids)
    return chunk_weight_gradient(taps, read, hidden, wide_dtype(x, dy), num_kernels)


def chunk_weight_gradient(taps: Taps, read, dy, wide, num_kernels, start: Any = 0):
    """Returns `dynamic_weight_gradient` for the rows in `dy`, which begin at position `start`."""
    rows, part = dy.shape[1], dy.astype(wide)
    return jnp.stack(
        [
            jnp.sum(split_kernels(read(tap, start, rows).astype(wide) * part, num_kernels), axis=-1)
            for tap in range(taps.count)
        ],
        axis=2,
    )


# --- Softmax over taps ----------------------------------------------------------------------------


@jax.custom_vjp
def tap_softmax(logits):
    """Returns the softmax over the taps, the second-to-last axis.

    Maximum and sum are unrolled over the taps. XLA:CPU reduces an axis in an order that depends on
    the row length, so `jax.nn.softmax` differs in the last bit between packed and separate
    examples.
    """
    return plain_tap_softmax(logits)


def plain_tap_softmax(logits):
    """Returns `tap_softmax` without its custom gradient, so that both modes differentiate it."""
    powers, total = tap_powers(logits)
    return powers / total


def tap_powers(logits):
    """Returns exp(logits - max) and its sum over taps."""
    powers = jnp.exp(logits - _over_taps(jnp.maximum, logits))
    return powers, _over_taps(jnp.add, powers)


def _over_taps(operation, values):
    """Reduces over the taps in order, and keeps their axis with size one."""
    count = values.shape[-2]
    return functools.reduce(operation, (values[..., j : j + 1, :] for j in range(count)))


def _softmax_forward(logits):
    weights = plain_tap_softmax(logits)
    return weights, weights


def _softmax_backward(weights, d_out):
    products = weights * d_out
    return (products - weights * _over_taps(jnp.add, products),)


tap_softmax.defvjp(_softmax_forward, _softmax_backward)


def normalize(
    softmax: bool, rate: float, logits, key, *, tap_softmax: Callable[..., Any] = tap_softmax
):
    """Returns the tap weights in at least float32; taps are the second-to-last axis."""
    weights = logits.astype(wide_dtype(logits))
    if softmax:
        weights = tap_softmax(weights)
    if not drops(rate, key):
        return weights
    kept = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
    return jnp.where(kept, weights / (1.0 - rate), 0.0)


def drops(rate: float, key) -> bool:
    """Returns whether taps are dropped."""
    return key is not None and rate != 0.0


# --- Whole convolutions ---------------------------------------------------------------------------


class Formulation(NamedTuple):
    """The four sums over taps of which a convolution and its gradients consist.

    A platform replaces those that it computes faster.
    """

    weighted_sum: Callable[..., Any] = weighted_sum
    transposed_sum: Callable[..., Any] = transposed_sum
    static_weight_gradient: Callable[..., Any] = static_weight_gradient
    dynamic_weight_gradient: Callable[..., Any] = dynamic_weight_gradient

    def forward(self, taps: Taps, softmax: bool, segment_ids, x, weights, *, rate=0.0, key=None):
        """Returns the convolution; `softmax`, `rate` and `key` apply only to logits."""
        if weights.ndim == 2:
            return self.weighted_sum(taps, x, weights[None, None], segment_ids)
        normalized = normalize(softmax, rate, weights, key, tap_softmax=plain_tap_softmax)
        return self.weighted_sum(taps, x, normalized, segment_ids)

    def backward(
        self, taps: Taps, softmax: bool, segment_ids, x, weights, dy, *, rate=0.0, key=None
    ):
        """Returns the gradients in x and in the weights."""
        if weights.ndim == 2:
            # The transpose of a sum of shifts is the sum of mirrored shifts.
            mirrored = weights[::-1][None, None]
            dx = self.weighted_sum(taps.mirrored(), dy, mirrored, segment_ids)
            dkernel = self.static_weight_gradient(taps, x, dy, segment_ids)
            return dx.astype(x.dtype), dkernel.astype(weights.dtype)
        normalized, vjp = jax.vjp(functools.partial(normalize, softmax, rate, key=key), weights)
        dx = self.transposed_sum(taps, dy, normalized, segment_ids)
        dweights = self.dynamic_weight_gradient(taps, x, dy, segment_ids, weights.shape[-1])
        (dlogits,) = vjp(dweights.astype(normalized.dtype))
        return dx.astype(x.dtype), dlogits


PLAIN = Formulation()
forward, backward = PLAIN.forward, PLAIN.backward
