"""Dynamic convolutions with an array for each tap, of which XLA on GPU makes few passes.

The arithmetic is that of `plain` where taps have a softmax and no dropout. There the weights are
one array [batch, length, kernel, heads], which XLA on GPU writes in float32 and reads again, more
bytes than all others where many kernels meet few channels. Here nothing but the logarithms of the
softmax's sums is kept between passes.
"""

import functools

import jax.numpy as jnp
from jax import lax

from convt5.ops.taps import Reader, Taps, hide_padding, rows_between, split_heads, wide_dtype


def forward(where: Taps, segment_ids, x, logits):
    """Returns the convolution with the softmax of `logits`, [batch, length, kernel, heads]."""
    heads, wide = logits.shape[-1], wide_dtype(x, logits)
    read = Reader(where, x, segment_ids)
    sums = _log_sums(where, logits.astype(wide))
    total = jnp.zeros(split_heads(x, heads).shape, wide)
    for tap in range(where.count):
        weight = jnp.exp(logits[:, :, tap].astype(wide) - sums)
        total = total + weight[..., None] * split_heads(read(tap).astype(wide), heads)
    return hide_padding(total.reshape(x.shape).astype(x.dtype), segment_ids)


def backward(where: Taps, segment_ids, x, logits, cotangent):
    """Returns the gradients in x and in `logits`."""
    wide = wide_dtype(x, logits)
    # Computed once: both gradients read them, and that in x for every tap at another row.
    sums = lax.optimization_barrier(_log_sums(where, logits.astype(wide)))
    dx = _gradient(where, segment_ids, logits, sums, cotangent)
    dlogits = _logits_gradient(where, segment_ids, x, logits, sums, cotangent)
    return dx.astype(x.dtype), dlogits.astype(logits.dtype)


def _log_sums(where: Taps, logits):
    """Returns the logarithm of the sum of the powers of e of all taps, [batch, length, heads]."""
    taps = [logits[:, :, tap] for tap in range(where.count)]
    largest = functools.reduce(jnp.maximum, taps)
    return largest + jnp.log(functools.reduce(jnp.add, (jnp.exp(a - largest) for a in taps)))


def _gradient(where: Taps, segment_ids, logits, sums, cotangent):
    """Returns the gradient in x: row i collects from the rows that read it."""
    length, heads, wide = cotangent.shape[1], logits.shape[-1], sums.dtype
    read = Reader(where.mirrored(), cotangent, segment_ids)
    # Rows outside have weights of 1, which meet a cotangent of 0.
    logits, sums = (rows_between(a, -read.left, length + read.right) for a in (logits, sums))
    total = jnp.zeros(split_heads(cotangent, heads).shape, wide)
    for tap in range(where.count):
        rows = slice(read.starts[tap], read.starts[tap] + length)
        weight = jnp.exp(logits[:, rows, -1 - tap].astype(wide) - sums[:, rows])
        total = total + weight[..., None] * split_heads(read(tap).astype(wide), heads)
    return hide_padding(total.reshape(cotangent.shape).astype(cotangent.dtype), segment_ids)


def _logits_gradient(where: Taps, segment_ids, x, logits, sums, cotangent):
    """Returns w (slope - mean) of each tap; the mean of its slopes is by the weights w."""
    heads, wide = logits.shape[-1], sums.dtype

    def weights_and_slopes(x, cotangent):
        read = Reader(where, x, segment_ids)
        hidden = hide_padding(cotangent, segment_ids).astype(wide)
        for tap in range(where.count):
            products = split_heads(read(tap).astype(wide) * hidden, heads)
            yield jnp.exp(logits[:, :, tap].astype(wide) - sums), jnp.sum(products, axis=-1)

    mean = functools.reduce(jnp.add, (w * slope for w, slope in weights_and_slopes(x, cotangent)))
    if heads == x.shape[-1]:
        # Slopes as large as x are computed again: behind a barrier XLA does not know them.
        x, cotangent, mean = lax.optimization_barrier((x, cotangent, mean))
    found = [w * (slope - mean) for w, slope in weights_and_slopes(x, cotangent)]
    return jnp.stack(found, axis=2)
