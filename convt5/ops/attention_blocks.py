"""Attention in plain JAX, whose logits exist for one block at a time.

A block is some rows of the batch, some heads and some of their queries, against all keys. The
backward pass computes the weights of a block again. Inside of blocks arrays have their heads before
their positions, and keys and values are turned over once, as matrix products want them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from convt5.ops import implementation
from convt5.ops.masking import attention_mask

BLOCK_BYTES = 2**25
"""Bytes of the logits of one block, at most."""

BLOCK_BYTES_ON_CPU = 2**22
"""The same where a block should stay in a processor's cache."""

FEWEST_QUERIES_ON_CPU = 128
"""But no fewer queries than these, which is as many as make products of full speed."""

_HIDDEN = -1e9  # The logit of a hidden key, finite so that a query without keys stays finite.


def attend(causal: bool, bias, query, key, value, query_ids, key_ids):
    """Returns what `ops.attention.attend` does, of the same arguments."""

    def compute(size: _Size):
        def one_group(group: _Group):
            keys = _turned(group.key)

            def one_block(block: _Queries):
                powers, total = _softmax(causal, block, keys, group)
                found = _product("bhqk,bhkd->bhqd", powers.astype(value.dtype), group.value)
                return (found / total).astype(query.dtype)

            return _join_queries(lax.map(one_block, _queries(size, group)), query.shape[1])

        groups = _groups(size, query, key, value, bias, query_ids, key_ids)
        return _positions_first(size, lax.map(one_group, groups), query.shape[0])

    return _by_platform(compute, query, key)


def gradients(causal: bool, bias, query, key, value, query_ids, key_ids, found, cotangent):
    """Returns the gradients of `attend`, which found `found`, in query, key, value and bias."""
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def compute(size: _Size):
        def one_group(given: tuple[_Group, jax.Array, jax.Array]):
            group, means, cotangent = given
            keys, values = _turned(group.key), _turned(group.value)

            def one_block(sums, given: tuple[_Queries, jax.Array, jax.Array]):
                block, mean, dy = given
                powers, total = _softmax(causal, block, keys, group)
                slopes = _product("bhqd,bhdk->bhqk", dy, values)
                dlogits = powers * ((slopes - mean) / total)
                narrow = dlogits.astype(query.dtype)
                scaled = (dy / total).astype(query.dtype)
                # Transposed, so that processors turn over the smaller factor and not the logits.
                dkeys = _product("bhqd,bhqk->bhdk", block.query, narrow)
                dvalues = _product("bhqd,bhqk->bhdk", scaled, powers.astype(query.dtype))
                parts = (dkeys, dvalues, _bias_gradient(block, group, dlogits))
                dquery = _product("bhqk,bhkd->bhqd", narrow, group.key).astype(query.dtype)
                return jax.tree.map(jnp.add, sums, parts), dquery

            zeros = [jnp.zeros(a.shape, wide) for a in (keys, values)]
            dbias = None if bias is None else jnp.zeros(group.bias.shape, wide)
            blocks = (
                _queries(size, group),
                _split_queries(size, means),
                _split_queries(size, cotangent),
            )
            (dkeys, dvalues, dbias), dquery = lax.scan(one_block, (*zeros, dbias), blocks)
            dquery = _join_queries(dquery, query.shape[1])
            # Otherwise XLA on CPU turns them inside of the products, which takes twice the time.
            dkeys, dvalues = lax.optimization_barrier((dkeys, dvalues))
            return dquery, _turned(dkeys), _turned(dvalues), dbias

        groups = _groups(size, query, key, value, bias, query_ids, key_ids)
        # The mean of a query's slopes, by the weights of its keys.
        means = jnp.sum(found.astype(wide) * cotangent.astype(wide), axis=-1, keepdims=True)
        given = (_heads_first(size, a) for a in (means, cotangent))
        *drows, dbias = lax.map(one_group, (groups, *given))
        drows = [_positions_first(size, a, query.shape[0]) for a in drows]
        if bias is not None:
            dbias = dbias.reshape(-1, *bias.shape).sum(axis=0).astype(bias.dtype)
        own = zip(drows, (query, key, value), strict=True)
        return *(a.astype(array.dtype) for a, array in own), dbias

    return _by_platform(compute, query, key)


# --- Blocks ---------------------------------------------------------------------------------------


class _Size(NamedTuple):
    """What a block has of rows of the batch, heads and queries.

    The first two divide theirs; the last block of queries is filled up with padding.
    """

    batch: int
    heads: int
    queries: int


def _by_platform(compute, query, key):
    """Calls `compute` with the size of blocks that serves the platform."""
    batch, target, heads, _ = query.shape
    row_bytes = key.shape[1] * jnp.promote_types(query.dtype, jnp.float32).itemsize
    if not isinstance(batch, int):
        # Exported programs leave it free: rows in turn, whose blocks are bounded however many.
        return compute(_Size(1, heads, _even(target, BLOCK_BYTES // (heads * row_bytes))))

    def side_by_side():
        fitting = BLOCK_BYTES // (batch * heads * row_bytes)
        return compute(_Size(batch, heads, _even(target, fitting)))

    def in_turn():
        # The fewer heads, the more queries meet each key that a product reads.
        fitting = max(BLOCK_BYTES_ON_CPU // row_bytes, FEWEST_QUERIES_ON_CPU)
        whole_heads = fitting // target
        rows = _divisor(batch, whole_heads // heads)
        return compute(_Size(rows, _divisor(heads, whole_heads), _even(target, fitting)))

    return implementation.by_platform(side_by_side, cpu=in_turn)


def _even(length: int, most: int) -> int:
    """Returns the size of the fewest equal pieces that have at most `most`, or 1."""
    count = -(-length // max(1, min(length, most)))
    return -(-length // count)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor that is at most `most`, or 1."""
    return max(d for d in range(1, max(1, min(number, most)) + 1) if number % d == 0)


class _Group(NamedTuple):
    """All positions of the rows and heads of a block; `bias` is None where there is none."""

    query: Any  # [batch, heads, target, head_dim]
    key: Any  # [batch, heads, source, head_dim]
    value: Any  # [batch, heads, source, head_dim]
    bias: Any  # [heads, distances]
    query_ids: Any  # [batch, target]
    key_ids: Any  # [batch, source]


class _Queries(NamedTuple):
    """The queries of a block, with their first place in the row."""

    query: Any  # [batch, heads, queries, head_dim]
    ids: Any  # [batch, queries]
    start: Any


def _groups(size: _Size, query, key, value, bias, query_ids, key_ids) -> _Group:
    """Returns all groups, along a new first axis."""
    batch, _, heads, _ = query.shape
    groups = (batch // size.batch, heads // size.heads)

    def of_rows(ids):
        ids = ids.reshape(groups[0], 1, size.batch, -1)
        return jnp.broadcast_to(ids, (*groups, *ids.shape[2:])).reshape(-1, *ids.shape[2:])

    if bias is not None:
        bias = jnp.tile(bias.reshape(groups[1], size.heads, -1), (groups[0], 1, 1))
    query, key, value = (_heads_first(size, a) for a in (query, key, value))
    return _Group(query, key, value, bias, of_rows(query_ids), of_rows(key_ids))


def _heads_first(size: _Size, a):
    """[batch, length, heads, head_dim] to [groups, batch, heads, length, head_dim]."""
    _, length, heads, head_dim = a.shape
    a = a.reshape(-1, size.batch, length, heads // size.heads, size.heads, head_dim)
    return a.transpose(0, 3, 1, 4, 2, 5).reshape(-1, size.batch, size.heads, length, head_dim)


def _positions_first(size: _Size, a, batch):
    """Undoes `_heads_first`."""
    length, head_dim = a.shape[3:]
    a = a.reshape(batch // size.batch, -1, size.batch, size.heads, length, head_dim)
    return a.transpose(0, 2, 4, 1, 3, 5).reshape(batch, length, -1, head_dim)


def _queries(size: _Size, group: _Group) -> _Queries:
    """Returns all blocks of a group, along a new first axis."""
    query = _split_queries(size, group.query)
    ids = _split_queries(size, group.query_ids[:, None, :, None])[:, :, 0, :, 0]
    return _Queries(query, ids, jnp.arange(len(query)) * size.queries)


def _split_queries(size: _Size, a):
    """[batch, heads, length, width] to [blocks, batch, heads, queries, width]."""
    batch, heads, length, width = a.shape
    a = jnp.pad(a, ((0, 0), (0, 0), (0, -length % size.queries), (0, 0)))
    return jnp.moveaxis(a.reshape(batch, heads, -1, size.queries, width), 2, 0)


def _join_queries(blocks, length: int):
    """Undoes `_split_queries`."""
    _, batch, heads, _, width = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(batch, heads, -1, width)[:, :, :length]


# --- Inside of a block ----------------------------------------------------------------------------


def _softmax(causal: bool, block: _Queries, keys, group: _Group):
    """Returns the powers of e of a softmax over the keys, and their sums, by which to divide.

    Args:
        causal: as for `attend`.
        block: the queries.
        keys: [batch, heads, head_dim, source].
        group: that the block is of.

    Returns:
        [batch, heads, queries, source] and [batch, heads, queries, 1], 1 for those without keys.
    """
    queries, source = block.query.shape[2], keys.shape[3]
    logits = _product("bhqd,bhdk->bhqk", block.query, keys)
    if group.bias is not None:
        bias = group.bias.astype(logits.dtype)
        logits = logits + _by_distance(queries, source, block.start, bias)[None]
    mask = attention_mask(block.ids, group.key_ids, causal=False)
    if causal:
        places = block.start + jnp.arange(queries)
        mask &= (jnp.arange(source)[None] <= places[:, None])[None]
    mask = mask[:, None]
    logits = jnp.where(mask, logits, _HIDDEN)
    powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    powers = jnp.where(mask, powers, 0.0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers, jnp.where(total == 0.0, 1.0, total)


def _bias_gradient(block: _Queries, group: _Group, dlogits):
    """Returns the sums of [batch, heads, queries, source] by distance, [heads, distances]."""
    if group.bias is None:
        return None
    expand = functools.partial(_by_distance, *dlogits.shape[2:], block.start)
    like = jax.ShapeDtypeStruct(group.bias.shape, dlogits.dtype)
    (found,) = jax.linear_transpose(expand, like)(dlogits.sum(axis=0))
    return found


def _by_distance(queries: int, source: int, start, bias):
    """Returns [heads, queries, source], where each diagonal holds one entry of `bias`.

    Rows are read from one long repetition of the entries, each a place before the last: that is
    slices and reshapes alone, and so is its transpose.
    """
    heads, distances = bias.shape
    width = queries + source - 1
    target = distances - source + 1
    # The last block may reach beyond the last query.
    bias = jnp.pad(bias, ((0, 0), (queries, 0)))
    own = lax.dynamic_slice_in_dim(bias, target - start, width, axis=1)
    if queries == 1:
        return own[:, None]
    repeated = jnp.broadcast_to(own[:, None], (heads, queries, width)).reshape(heads, -1)
    shifted = repeated[:, queries - 1 : queries - 1 + queries * (width - 1)]
    return shifted.reshape(heads, queries, width - 1)[:, :, :source]


def _product(axes: str, a, b):
    """Returns the sum of products, in at least float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(axes, a, b, preferred_element_type=wide)


def _turned(a):
    """Swaps positions and channels."""
    return a.swapaxes(-1, -2)
