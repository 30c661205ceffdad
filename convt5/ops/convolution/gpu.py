"""Convolutions on GPU: few passes over memory.

XLA on GPU materialises the weights after a softmax, [batch, length, taps, kernels], in float32:
more bytes than all other arrays where each kernel serves few channels. The dynamic convolutions
here use one array per tap instead, and keep only the logsumexp over the taps (`lse`) between
passes.
"""

import functools

import jax.numpy as jnp
from jax import lax

from convt5.ops.convolution import reference
from convt5.ops.convolution.rows import (
    Reader,
    hide_padding,
    rows_between,
    split_kernels,
    wide_dtype,
)
from convt5.ops.geometry import Taps

STAGED_ROWS = 128
"""Rows of each partial sum: the fewer rows, the more bytes of partial sums."""


def forward(taps: Taps, softmax: bool, segment_ids, x, weights, *, rate=0.0, key=None):
    """Returns `reference.forward`."""
    if weights.ndim == 2 or not softmax or reference.drops(rate, key):
        return reference.forward(taps, softmax, segment_ids, x, weights, rate=rate, key=key)
    return softmax_forward(taps, segment_ids, x, weights)


def backward(taps: Taps, softmax: bool, segment_ids, x, weights, dy, *, rate=0.0, key=None):
    """Returns `reference.backward`."""
    if weights.ndim == 2 or not softmax or reference.drops(rate, key):
        return FORMULATION.backward(taps, softmax, segment_ids, x, weights, dy, rate=rate, key=key)
    return softmax_backward(taps, segment_ids, x, weights, dy)


def static_weight_gradient(taps: Taps, x, dy, segment_ids):
    """Returns `reference.static_weight_gradient`, by partial sums over `STAGED_ROWS` rows.

    XLA on GPU sums one array of all taps in a single pass if each sum runs over few rows.
    """
    wide = wide_dtype(x, dy)
    batch, length, embed = x.shape
    rows = min(STAGED_ROWS, length)
    behind = -length % rows
    hidden = hide_padding(dy, segment_ids)
    read = Reader(taps, x, segment_ids, behind=behind)
    seen = jnp.stack([read(tap, 0, length + behind) for tap in range(taps.count)])
    part = rows_between(hidden, 0, length + behind).astype(wide)
    products = seen.astype(wide) * part[None]
    parts = products.reshape(taps.count, batch, -1, rows, embed).sum(axis=3)
    return lax.optimization_barrier(parts).sum(axis=(1, 2))


FORMULATION = reference.Formulation(static_weight_gradient=static_weight_gradient)


def softmax_forward(taps: Taps, segment_ids, x, logits):
    """Returns the convolution with the softmax of `logits`, [batch, length, taps, kernels]."""
    num_kernels, wide = logits.shape[-1], wide_dtype(x, logits)
    read = Reader(taps, x, segment_ids)
    lse = _logsumexp(taps, logits.astype(wide))
    total = jnp.zeros(split_kernels(x, num_kernels).shape, wide)
    for tap in range(taps.count):
        weight = jnp.exp(logits[:, :, tap].astype(wide) - lse)
        total = total + weight[..., None] * split_kernels(read(tap).astype(wide), num_kernels)
    return hide_padding(total.reshape(x.shape).astype(x.dtype), segment_ids)


def softmax_backward(taps: Taps, segment_ids, x, logits, dy):
    """Returns the gradients in x and in `logits`."""
    wide = wide_dtype(x, logits)
    # Computed once, because both gradients read it; that in x reads it for every tap at other rows.
    lse = lax.optimization_barrier(_logsumexp(taps, logits.astype(wide)))
    dx = _gradient(taps, segment_ids, logits, lse, dy)
    dlogits = _logits_gradient(taps, segment_ids, x, logits, lse, dy)
    return dx.astype(x.dtype), dlogits.astype(logits.dtype)


def _logsumexp(taps: Taps, logits):
    """Returns the logsumexp over the taps, [batch, length, kernels]."""
    of_taps = [logits[:, :, tap] for tap in range(taps.count)]
    largest = functools.reduce(jnp.maximum, of_taps)
    return largest + jnp.log(functools.reduce(jnp.add, (jnp.exp(a - largest) for a in of_taps)))


def _gradient(taps: Taps, segment_ids, logits, lse, dy):
    """Returns the gradient in x: row i sums over the rows that read it."""
    length, num_kernels, wide = dy.shape[1], logits.shape[-1], lse.dtype
    read = Reader(taps.mirrored(), dy, segment_ids)
    # Rows outside the array have weights of 1, and dy is 0 there.
    logits, lse = (rows_between(a, -read.left, length + read.right) for a in (logits, lse))
    total = jnp.zeros(split_kernels(dy, num_kernels).shape, wide)
    for tap in range(taps.count):
        rows = slice(read.starts[tap], read.starts[tap] + length)
        weight = jnp.exp(logits[:, rows, -1 - tap].astype(wide) - lse[:, rows])
        total = total + weight[..., None] * split_kernels(read(tap).astype(wide), num_kernels)
    return hide_padding(total.reshape(dy.shape).astype(dy.dtype), segment_ids)


def _logits_gradient(taps: Taps, segment_ids, x, logits, lse, dy):
    """Returns w (dw - sum over taps of w dw), with the weights w and their gradients dw."""
    num_kernels, wide = logits.shape[-1], lse.dtype

    def weights_and_gradients(x, dy):
        read = Reader(taps, x, segment_ids)
        hidden = hide_padding(dy, segment_ids).astype(wide)
        for tap in range(taps.count):
            products = split_kernels(read(tap).astype(wide) * hidden, num_kernels)
            yield jnp.exp(logits[:, :, tap].astype(wide) - lse), jnp.sum(products, axis=-1)

    mean = functools.reduce(jnp.add, (w * dw for w, dw in weights_and_gradients(x, dy)))
    if num_kernels == x.shape[-1]:
        # Behind a barrier XLA does not share these expressions, so it recomputes large arrays.
        x, dy, mean = lax.optimization_barrier((x, dy, mean))
    dlogits = [w * (dw - mean) for w, dw in weights_and_gradients(x, dy)]
    return jnp.stack(dlogits, axis=2)
