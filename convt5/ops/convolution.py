"""Depthwise, lightweight and dynamic convolution over packed sequences, with any dilation.

All three are sums over shifted inputs: output i of channel c is
sum_j w[j, c] * x[i + j * dilation - left, c], a cross-correlation (the taps are not flipped), zero
outside the row, at padding and, unless asked otherwise, in other segments. Used by `mixing`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convt5.ops.padding import Padding, pad_widths

Segments = Int[Array, "batch length"] | None


def depthwise_conv(
    x: Float[Array, "batch length embed"],
    kernel: Float[Array, "kernel embed"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
) -> Float[Array, "batch length embed"]:
    return _shifted_sum(x, kernel[None, None], dilation, padding, segment_ids, taps_cross_segments)


def lightweight_conv(
    x: Float[Array, "batch length embed"],
    kernel_logits: Float[Array, "kernel heads"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
    tap_dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "batch length embed"]:
    weights = _tap_weights(kernel_logits, tap_dropout_rate, dropout_key)
    return _shifted_sum(x, weights[None, None], dilation, padding, segment_ids, taps_cross_segments)


def dynamic_conv(
    x: Float[Array, "batch length embed"],
    kernel_logits: Float[Array, "batch length kernel heads"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
    tap_dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "batch length embed"]:
    weights = _tap_weights(kernel_logits, tap_dropout_rate, dropout_key)
    return _shifted_sum(x, weights, dilation, padding, segment_ids, taps_cross_segments)


def _tap_weights(logits, rate, key):
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    weights = jax.nn.softmax(logits.astype(wide), axis=-2)
    if key is not None and rate > 0.0:
        kept = jax.random.bernoulli(key, 1.0 - rate, weights.shape)
        weights = jnp.where(kept, weights / (1.0 - rate), 0.0)
    return weights


def _shifted_sum(x, weights, dilation, padding, segment_ids, taps_cross_segments):
    batch, length, embed = x.shape
    taps, heads = weights.shape[-2:]
    left, right = pad_widths(taps, dilation, padding)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if segment_ids is not None:
        x = jnp.where((segment_ids != 0)[..., None], x, 0)
        beside = jnp.pad(segment_ids, ((0, 0), (left, right)))
    padded = jnp.pad(x, ((0, 0), (left, right), (0, 0)))
    y = jnp.zeros((batch, length, heads, embed // heads), wide)
    for tap in range(taps):
        start = tap * dilation
        read = padded[:, start : start + length].astype(wide)
        if segment_ids is not None and not taps_cross_segments:
            same = beside[:, start : start + length] == segment_ids
            read = jnp.where(same[..., None], read, 0)
        read = read.reshape(batch, length, heads, embed // heads)
        y = y + weights[:, :, tap, :, None].astype(wide) * read
    y = y.reshape(x.shape).astype(x.dtype)
    if segment_ids is not None:
        y = jnp.where((segment_ids != 0)[..., None], y, 0)
    return y
