"""Attention over packed rows whose logits are never held for all queries at once.

Queries are taken in chunks, and the backward pass computes the weights of a chunk again, so that
memory grows with the length of a row and not with its square. On TPU, kernels do the same on-chip.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from convt5.ops import gathered_keys, implementation
from convt5.ops.masking import attention_mask

CHUNK_BYTES = 2**25
"""Bytes of the logits of one chunk of queries, at most."""

CHUNK_BYTES_ON_CPU = 2**22
"""The same where a chunk should stay in a processor's cache."""

_HIDDEN = -1e9  # The logit of a hidden key, finite so that a query without keys stays finite.


def attend(
    query: Float[Array, "batch target heads head_dim"],
    key: Float[Array, "batch source heads head_dim"],
    value: Float[Array, "batch source heads head_dim"],
    query_segment_ids: Int[Array, "batch target"],
    key_segment_ids: Int[Array, "batch source"],
    *,
    causal: bool = False,
    distance_bias: Float[Array, "heads distances"] | None = None,
) -> Float[Array, "batch target heads head_dim"]:
    """Returns softmax(query key^T + bias) value, where queries read keys of their own segment.

    Vaswani et al. 2017 (arXiv 1706.03762), equation 1, without the factor 1 / sqrt(head_dim),
    which T5 leaves to the initial query projection. Softmax in at least float32.

    Args:
        query, key, value: projected positions.
        query_segment_ids, key_segment_ids: packed examples. Nothing reads segment 0, padding.
            Queries without a key return zero.
        causal: hides the keys behind each query's own position.
        distance_bias: added to the logits, by the distance of key minus query position, from
            1 - target to source - 1.
    """
    return _attend(causal, query, key, value, distance_bias, query_segment_ids, key_segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(causal, query, key, value, bias, query_ids, key_ids):
    return _run(_whole, causal, query, key, value, bias, query_ids, key_ids)


def _run(whole, causal, *arrays):
    """Computes `whole` of the arrays, which devices may share."""
    devices = implementation.devices()
    if devices is not None:
        return gathered_keys.attend(causal, devices, whole, *arrays)
    return whole(causal, *arrays)


def _whole(causal, query, key, value, bias, query_ids, key_ids):
    """On TPU by kernels where they serve; elsewhere in chunks."""
    arrays = (query, key, value, query_ids, key_ids)
    in_chunks = functools.partial(_attend_in_chunks, causal, bias)
    return implementation.run(in_chunks, _kernels(causal, bias, query, key), *arrays)


def _forward(causal, *arguments):
    return _attend(causal, *arguments), arguments


def _backward(causal, residuals, cotangent):
    return (*_run(_whole_gradients, causal, *residuals, cotangent), None, None)


def _whole_gradients(causal, query, key, value, bias, query_ids, key_ids, cotangent):
    arrays = (query, key, value, query_ids, key_ids, cotangent)
    in_chunks = functools.partial(_gradients_in_chunks, causal, bias)
    kernels = _kernels(causal, bias, query, key, backward=True)
    return implementation.run(in_chunks, kernels, *arrays)


_attend.defvjp(_forward, _backward)


def _kernels(causal, bias, query, key, *, backward=False) -> implementation.Offer:
    if not implementation.wanted() or implementation.has_old_tpus():
        return implementation.Offer()
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.pallas import attention as kernels

    heads, head_dim = query.shape[2:]
    settings = kernels.Settings(head_dim, causal, interpret=implementation.interpreted())
    if not kernels.is_supported(settings, _flat(query), _flat(key)):
        return implementation.Offer()
    run = functools.partial(kernels.gradients if backward else kernels.attend, settings)
    return implementation.Offer(alone=_between_heads(run, heads, bias, backward))


def _between_heads(run, heads: int, bias, backward: bool) -> implementation.Kernels:
    """Returns `run`, which knows no axis of heads, with the arguments and results of `_attend`."""
    biases = () if bias is None else (bias,)

    def attend(query, key, value, *ids):
        return _with_heads(run(*map(_flat, (query, key, value)), *ids, *biases), heads)

    def gradients(query, key, value, query_ids, key_ids, cotangent):
        given = (*map(_flat, (query, key, value)), query_ids, key_ids, *biases, _flat(cotangent))
        *drows, dbias = (*run(*given), *([] if biases else [None]))
        return (*(_with_heads(a, heads) for a in drows), dbias)

    return gradients if backward else attend


def _flat(a):
    """[batch, length, heads, head_dim] as the dense layers have it."""
    return a.reshape(*a.shape[:2], -1)


def _with_heads(a, heads: int):
    return a.reshape(*a.shape[:2], heads, -1)


# --- In chunks ------------------------------------------------------------------------------------


def _attend_in_chunks(causal, bias, query, key, value, query_ids, key_ids):
    def attend(chunk_bytes):
        chunks = _chunks(query, query_ids, key, chunk_bytes)

        def one(chunk):
            return _attend_rows(causal, chunk, chunk.query, key, value, bias, key_ids)

        return _merged(lax.map(one, chunks), query.shape[1])

    return _by_platform(attend)


def _gradients_in_chunks(causal, bias, query, key, value, query_ids, key_ids, cotangent):
    def differentiate(chunk_bytes):
        chunks = _chunks(query, query_ids, key, chunk_bytes)
        wide = jnp.promote_types(query.dtype, jnp.float32)

        def one(sums, given):
            chunk, dy = given

            def rows(query, key, value, bias):
                return _attend_rows(causal, chunk, query, key, value, bias, key_ids)

            _, vjp = jax.vjp(rows, chunk.query, key, value, bias)
            dquery, *others = vjp(dy)
            return jax.tree.map(lambda total, part: total + part, sums, others), dquery

        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, wide), [key, value, bias])
        dy = _split(cotangent, chunks.query.shape[2])
        sums, dquery = lax.scan(one, zeros, (chunks, dy))
        others = jax.tree.map(lambda a, like: a.astype(like.dtype), sums, [key, value, bias])
        return _merged(dquery, query.shape[1]), *others

    return _by_platform(differentiate)


def _by_platform(function):
    return lax.platform_dependent(
        cpu=lambda: function(CHUNK_BYTES_ON_CPU), default=lambda: function(CHUNK_BYTES)
    )


class _Chunks(NamedTuple):
    """Queries in chunks, which are the first axis; the last chunk is filled up with padding."""

    query: jax.Array  # [chunks, batch, rows, heads, head_dim]
    ids: jax.Array  # [chunks, batch, rows]
    start: jax.Array  # [chunks]


def _chunks(query, query_ids, key, chunk_bytes: int) -> _Chunks:
    batch, target, heads, _ = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32).itemsize
    fitting = max(1, chunk_bytes // (batch * heads * key.shape[1] * wide))
    count = -(-target // min(target, fitting))
    rows = -(-target // count)
    return _Chunks(_split(query, rows), _split(query_ids, rows), jnp.arange(count) * rows)


def _split(a, rows: int):
    """[batch, length, ...] to [chunks, batch, rows, ...]."""
    batch, length = a.shape[:2]
    count = -(-length // rows)
    a = jnp.pad(a, ((0, 0), (0, count * rows - length)) + ((0, 0),) * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(batch, count, rows, *a.shape[2:]), 1, 0)


def _merged(chunks, length: int):
    count, batch, rows = chunks.shape[:3]
    merged = jnp.moveaxis(chunks, 0, 1).reshape(batch, count * rows, *chunks.shape[3:])
    return merged[:, :length]


def _attend_rows(causal, chunk: _Chunks, query, key, value, bias, key_ids):
    """Attends from the rows of one chunk to all keys."""
    rows, source = query.shape[1], key.shape[1]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    # batch heads rows source
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=wide)
    if bias is not None:
        logits = logits + _by_distance(bias.astype(wide), chunk.start, rows, source)[None]
    mask = attention_mask(chunk.ids, key_ids, causal=False)
    if causal:
        query_positions = chunk.start + jnp.arange(rows)
        mask &= (jnp.arange(source)[None] <= query_positions[:, None])[None]
    mask = mask[:, None]
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, _HIDDEN), axis=-1), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(query.dtype), value)


def _by_distance(bias, start, rows: int, source: int):
    """Returns [heads, rows, source], where each diagonal holds one entry of `bias`.

    Rows are read from one long repetition of the entries, each a place before the last: that is
    slices and reshapes alone, and so is its transpose.
    """
    heads, distances = bias.shape
    width = rows + source - 1
    target = distances - source + 1
    # The last chunk may reach beyond the last query.
    bias = jnp.pad(bias, ((0, 0), (rows, 0)))
    own = lax.dynamic_slice_in_dim(bias, target - start, width, axis=1)
    if rows == 1:
        return own[:, None]
    repeated = jnp.broadcast_to(own[:, None], (heads, rows, width)).reshape(heads, rows * width)
    shifted = repeated[:, rows - 1 : rows - 1 + rows * (width - 1)]
    return shifted.reshape(heads, rows, width - 1)[:, :, :source]
