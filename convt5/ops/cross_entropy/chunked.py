"""Cross-entropy of x table^T in plain JAX, one chunk of tokens at a time."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from convt5.ops import dispatch
from convt5.ops.cross_entropy import sharded
from convt5.ops.dense import sum_of_products
from convt5.ops.varying import vary_like

CHUNK_LOGITS = 2**22
"""Most logits in one chunk of tokens where the vocabulary is much larger than the channels."""


class Settings(NamedTuple):
    """Static settings of the loss; `operators` documents the terms."""

    z_loss: float
    label_smoothing: float
    with_gradients: bool


def sums(settings: Settings, x, table, targets, weights):
    """Returns the four weighted sums of `CrossEntropySums`, and the gradients of x and table or ().

    In a chunk of `embed` tokens, the gradient of the table takes as many bytes as the logits.
    """
    devices = dispatch.devices()
    compute = functools.partial(_one_device, settings)
    parts = 1 if devices is None else sharded.batch_parts(devices, x.shape[0])
    if parts is None or _num_chunks(targets.size // parts, table) == 1:
        # XLA's partitioner handles any sharding of a single chunk.
        return _one_chunk(settings, x, table, targets, weights)
    if devices is not None:
        # With the partitioner alone, every chunk would sum its gradient over all devices.
        compute = sharded.over_rows(devices, compute)
    return compute(x, table, targets, weights)


def _num_chunks(tokens: int, table) -> int:
    vocab, embed = table.shape
    return math.ceil(tokens / max(CHUNK_LOGITS // vocab, embed, 1))


def _one_device(settings: Settings, x, table, targets, weights):
    """Computes one chunk of tokens at a time."""
    tokens, embed = targets.size, x.shape[-1]
    count = _num_chunks(tokens, table)
    size = math.ceil(tokens / count)
    missing = count * size - tokens

    def cut(a, *rest):
        flat = jnp.pad(a.reshape(tokens, *rest), [(0, missing)] + [(0, 0)] * len(rest))
        return flat.reshape(count, size, *rest)

    def add(total, chunk):
        sums, gradients = _one_chunk(settings, chunk[0], table, *chunk[1:])
        dx, dtable = gradients or (None, None)
        return jax.tree.map(jnp.add, total, (sums, dtable)), dx

    # The table has the dtype in which its gradient accumulates.
    dtype, table = table.dtype, table.astype(accumulated_dtype(table))
    dtable = jnp.zeros_like(table) if settings.with_gradients else None
    zeros = vary_like(x, ((jnp.zeros((), weights.dtype),) * 4, dtable))
    chunks = cut(x, embed), cut(targets), cut(weights)
    (sums, dtable), dx = lax.scan(add, zeros, chunks)
    if dx is None:
        return sums, ()
    return sums, (dx.reshape(-1, embed)[:tokens].reshape(x.shape), dtable.astype(dtype))


def _one_chunk(settings: Settings, x, table, targets, weights):
    """Computes all logits at once from x [..., embed], and targets and weights [...]."""
    z_loss, smoothing, with_gradients = settings
    wide = accumulated_dtype(x)
    rows = table.astype(x.dtype)
    logits = jnp.einsum("...e,ve->...v", x, rows, preferred_element_type=wide)
    top = jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = jnp.sum(powers, axis=-1)
    log_z = top[..., 0] + jnp.log(total)
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    # A masked sum, unlike a gather, needs no communication of logits where vocab is sharded.
    is_target = ids == targets[..., None]
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    nll = log_z - target
    smoothed = nll
    if smoothing:
        smoothed = log_z - (1.0 - smoothing) * target - smoothing * jnp.mean(logits, axis=-1)
    z_term = z_loss * log_z**2
    # Argmax as a count of larger logits, which is faster on CPU.
    same, before = logits == target[..., None], ids < targets[..., None]
    ahead = jnp.sum((logits > target[..., None]) | (same & before), axis=-1)
    # Comparisons with NaN are false, so a token with NaN logits must be excluded explicitly.
    right = (ahead == 0) & jnp.isfinite(log_z)
    sums = [jnp.sum(a * weights) for a in (smoothed + z_term, nll, z_term, right)]
    if not with_gradients:
        return tuple(sums), ()
    # d logsumexp(l) / dl is the softmax of l.
    softmax_weight = weights * (1.0 + 2.0 * z_loss * log_z) / total
    target_probabilities = jnp.where(is_target, 1.0 - smoothing, 0.0) + smoothing / table.shape[0]
    dlogits = powers * softmax_weight[..., None] - target_probabilities * weights[..., None]
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum("...v,ve->...e", dlogits, rows, preferred_element_type=wide)
    dtable = sum_of_products(dlogits, x, preferred_element_type=wide)
    return tuple(sums), (dx.astype(x.dtype), dtable.astype(table.dtype))


def accumulated_dtype(x) -> jnp.dtype:
    """Returns the dtype in which products of x accumulate: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)
