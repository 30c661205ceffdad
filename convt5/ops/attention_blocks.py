"""Attention in plain JAX, whose logits exist for one block at a time.

A block is some rows of the batch, some heads and some of their queries, against all keys. The
backward pass computes the weights of a block again. Inside of blocks arrays have their heads before
their positions, and keys and values are turned over once, as matrix products want them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from convt5.ops import implementation
from convt5.ops.masking import attention_mask
from convt5.ops.varying import vary_like

BLOCK_BYTES = 2**25
"""Bytes of the logits of one block, at most."""

BLOCK_BYTES_ON_CPU = 2**22
"""The same where a block should stay in a processor's cache."""

FEWEST_QUERIES_ON_CPU = 128
"""But no fewer queries than these, which is as many as make products of full speed."""

FILLER = 16
"""Unused entries behind rows that are turned over.

Rows of a power of two bytes share sets of a processor's cache, and are read four times slower.
"""


def attend(causal: bool, bias, query, key, value, query_ids, key_ids):
    """Returns what `ops.attention.attend` does, of the same arguments, and `log_sums`.

    Those are the logarithms of the sums by which a softmax divides, [batch, target, heads]; 0 for
    queries without keys.
    """

    def compute(size: _Size):
        def one_group(group: _Group):
            (values,) = group.others

            def one_block(block: _Queries):
                logits = _logits(causal, block, group)
                top = jnp.max(logits, axis=-1, keepdims=True)
                # Whatever it is, it cancels, and so do its derivatives.
                top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
                powers = jnp.exp(logits - top)
                total = jnp.sum(powers, axis=-1, keepdims=True)
                total = jnp.where(total == 0.0, 1.0, total)
                found = _product("bhqk,bhkd->bhqd", powers.astype(values.dtype), values)
                return (found / total).astype(query.dtype), top + jnp.log(total)

            blocks = lax.map(one_block, _queries(size, group))
            return [_join_queries(a, query.shape[1]) for a in blocks]

        others = (_heads_first(size, value),)
        groups = _groups(size, query, key, bias, query_ids, key_ids, others)
        found, log_sums = (_positions_first(a) for a in _map_groups(one_group, groups))
        return found, log_sums[..., 0]

    return _by_platform(compute, query, key)


def gradients(causal: bool, bias, query, key, value, query_ids, key_ids, found, log_sums, slope):
    """Returns the gradients of `attend` in query, key, value and bias.

    Args:
        causal, bias, query, key, value, query_ids, key_ids: its arguments.
        found, log_sums: what it returned of them.
        slope: the cotangent of `found`.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)

    def compute(size: _Size):
        # A single group is no array of its own: what is turned over or filled up would be so anew
        # where it is read.
        is_single = _is_whole(size, query)

        def one_group(group: _Group):
            keys, values, *rows = group.others

            def one_block(sums, given: tuple[_Queries, list[jax.Array]]):
                block, (log_sum, mean, dy) = given
                weights = jnp.exp(_logits(causal, block, group) - log_sum)
                dlogits = weights * (_product("bhqd,bhdk->bhqk", dy, values) - mean)
                narrow = dlogits.astype(query.dtype)
                axes, queries = "bhqd,bhqk->bhdk", block.query
                if not is_single:
                    # The smaller factors are turned over, and apart from the products: XLA on CPU
                    # does so in a fraction of the time.
                    axes = "bhdq,bhqk->bhdk"
                    queries, dy = lax.optimization_barrier((_turned(queries), _turned(dy)))
                dkeys = _product(axes, queries, narrow)
                dvalues = _product(axes, dy, weights.astype(query.dtype))
                parts = (dkeys, dvalues, _bias_gradient(block, group, dlogits))
                dquery = _product("bhqk,bhkd->bhqd", narrow, keys).astype(query.dtype)
                return jax.tree.map(jnp.add, sums, parts), dquery

            zeros = [jnp.zeros(group.keys.shape, wide)] * 2
            dbias = None if bias is None else jnp.zeros(group.bias.shape, wide)
            blocks = (_queries(size, group), [_split_queries(size, a) for a in rows])
            sums = vary_like(group.query, (*zeros, dbias))
            (*dkeys, dbias), dquery = lax.scan(one_block, sums, blocks)
            if is_single:
                dkeys = lax.optimization_barrier(dkeys)
            else:
                dkeys = [jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, FILLER))) for a in dkeys]
            return _join_queries(dquery, query.shape[1]), *dkeys, dbias

        # The mean of a query's slopes, by the weights of its keys.
        means = jnp.sum(found.astype(wide) * slope.astype(wide), axis=-1)
        rows = (key, log_sums[..., None], means[..., None], slope)
        keys, *rows = (_heads_first(size, a) for a in rows)
        others = (keys, _channels_first(size, value), *rows)
        groups = _groups(size, query, key, bias, query_ids, key_ids, others)
        dquery, *dkeys, dbias = _map_groups(one_group, groups)
        dkeys = (_positions_first(a[..., : key.shape[1]], positions_last=True) for a in dkeys)
        drows = zip((_positions_first(dquery), *dkeys), (query, key, value), strict=True)
        drows = [a.astype(array.dtype) for a, array in drows]
        if bias is not None:
            dbias = dbias.sum(axis=0).reshape(bias.shape).astype(bias.dtype)
        return *drows, dbias

    return _by_platform(compute, query, key)


# --- Blocks ---------------------------------------------------------------------------------------


class _Size(NamedTuple):
    """What a block has of rows of the batch, heads and queries.

    The first two divide theirs, and one is 1 or the other all heads; the last block of queries is
    filled up with padding.
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
    keys: Any  # [batch, heads, head_dim, source]
    others: Any  # More arrays, [batch, heads, ...]
    bias: Any  # [heads, distances]
    query_ids: Any  # [batch, target]
    key_ids: Any  # [batch, source]


class _Queries(NamedTuple):
    """The queries of a block, with their first place in the row."""

    query: Any  # [batch, heads, queries, head_dim]
    ids: Any  # [batch, queries]
    start: Any


def _groups(size: _Size, query, key, bias, query_ids, key_ids, others) -> _Group:
    """Returns all groups.

    They lie along a new first axis by rows of the batch and one by heads, of which arrays have
    those that they have. Behind one axis of both, XLA on CPU would turn arrays over more slowly.
    """
    query_ids, key_ids = (a.reshape(-1, size.batch, a.shape[1]) for a in (query_ids, key_ids))
    if bias is not None:
        bias = bias.reshape(-1, size.heads, bias.shape[1])
    query, keys = _heads_first(size, query), _channels_first(size, key)
    return _Group(query, keys, others, bias, query_ids, key_ids)


def _map_groups(compute: Callable[[_Group], Any], groups: _Group) -> Any:
    """Returns what `compute` returns of each group in turn, along the first two axes."""
    rows, heads = groups.query.shape[:2]

    def one(place):
        row, head = place // heads, place % heads
        query, keys, others = jax.tree.map(lambda a: a[row, head], groups[:3])
        bias = None if groups.bias is None else groups.bias[head]
        return compute(
            _Group(query, keys, others, bias, groups.query_ids[row], groups.key_ids[row])
        )

    found = lax.map(one, jnp.arange(rows * heads))
    return jax.tree.map(lambda a: a.reshape(rows, heads, *a.shape[1:]), found)


def _heads_first(size: _Size, a):
    """[batch, length, heads, head_dim] to [*groups, batch, heads, length, head_dim]."""
    return _grouped(size, a.transpose(0, 2, 1, 3))


def _channels_first(size: _Size, a):
    """[batch, length, heads, head_dim] to [*groups, batch, heads, head_dim, length]."""
    if _is_whole(size, a):
        return _turned(_heads_first(size, a))  # Products read them so as well.
    return _grouped(size, a.transpose(0, 2, 3, 1))


def _is_whole(size: _Size, a) -> bool:
    """Whether a single group has all rows and heads of [batch, length, heads, head_dim]."""
    return size[:2] == (a.shape[0], a.shape[2])


def _grouped(size: _Size, a):
    """[batch, heads, ...] to [*groups, batch, heads, ...].

    A group has one row or all heads, so that this moves nothing.
    """
    return a.reshape(-1, a.shape[1] // size.heads, size.batch, size.heads, *a.shape[2:])


def _positions_first(a, *, positions_last: bool = False):
    """Undoes `_heads_first`, or `_channels_first` where the positions are last."""
    rows, parts, batch, heads, *rest = a.shape
    a = a.reshape(rows * batch, parts * heads, *rest)
    return a.transpose((0, 3, 1, 2) if positions_last else (0, 2, 1, 3))


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


def _logits(causal: bool, block: _Queries, group: _Group):
    """Returns the logits of a block's queries, minus infinity for keys that they may not read.

    Args:
        causal: as for `attend`.
        block: the queries.
        group: that the block is of.

    Returns:
        [batch, heads, queries, source].
    """
    queries, source = block.query.shape[2], group.keys.shape[3]
    logits = _product("bhqd,bhdk->bhqk", block.query, group.keys)
    if group.bias is not None:
        bias = group.bias.astype(logits.dtype)
        logits = logits + _by_distance(queries, source, block.start, bias)[None]
    mask = attention_mask(block.ids, group.key_ids, causal=False)
    if causal:
        places = block.start + jnp.arange(queries)
        mask &= (jnp.arange(source)[None] <= places[:, None])[None]
    return jnp.where(mask[:, None], logits, -jnp.inf)


def _bias_gradient(block: _Queries, group: _Group, dlogits):
    """Returns the sums of [batch, heads, queries, source] by distance, [heads, distances]."""
    if group.bias is None:
        return None
    expand = functools.partial(_by_distance, *dlogits.shape[2:], block.start)
    bias = group.bias.astype(dlogits.dtype)
    (found,) = jax.linear_transpose(expand, bias)(dlogits.sum(axis=0))
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
