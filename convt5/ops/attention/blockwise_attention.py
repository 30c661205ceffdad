"""Blockwise attention in plain JAX: only one block of logits is in memory at a time.

A block holds some queries of some heads and rows of the batch, and all keys of those rows. The
backward pass recomputes the softmax weights block by block. Inside a block, the heads axis comes
before the positions; keys and values are transposed once, into the order that matrix products read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from convt5.ops import dispatch
from convt5.ops.masking import attention_mask
from convt5.ops.varying import vary_like

BLOCK_BYTES = 2**25
"""Most bytes of the logits of one block."""

BLOCK_BYTES_ON_CPU = 2**22
"""Most bytes of the logits of one block on CPU, where a block should stay in the cache."""

FEWEST_QUERIES_ON_CPU = 128
"""Fewest queries of a block on CPU; with fewer, matrix products get slow."""

FILLER = 16
"""Unused entries appended to transposed rows.

Rows whose size is a power of two bytes map to the same sets of a CPU's cache, which makes reading
them four times slower.
"""

NO_LSE = -float("inf")
"""Stands for an `lse` that the forward pass has not stored; no query has this one."""


def table(
    direction: str, causal: bool, query, key, *, beside_kernels: bool = False
) -> dispatch.Table:
    """Returns the formulations of `attend` or `gradients`, with a block size for each platform.

    Args:
        direction: "attend" or "gradients".
        causal: as in `attend`.
        query, key: arrays of these shapes and dtypes.
        beside_kernels: whether the forward pass may be a kernel, which stores no `lse`. The
            backward pass can be plain all the same: kernels have no batching rule.
    """
    compute = attend if direction == "attend" else functools.partial(gradients, beside_kernels)
    batch, target, heads, _ = query.shape
    row_bytes = key.shape[1] * jnp.promote_types(query.dtype, jnp.float32).itemsize

    def of(size: _Size):
        return functools.partial(compute, causal, size)

    if not isinstance(batch, int):
        # Exported programs have a symbolic batch size: one row at a time bounds their blocks.
        queries = _even(target, BLOCK_BYTES // (heads * row_bytes))
        return dispatch.Table(of(_Size(1, heads, queries, copies_rows=False)))
    fitting = BLOCK_BYTES // (batch * heads * row_bytes)
    default = _Size(batch, heads, _even(target, fitting), copies_rows=False)
    # The fewer heads a block has, the more queries use each key that a product reads.
    fitting = max(BLOCK_BYTES_ON_CPU // row_bytes, FEWEST_QUERIES_ON_CPU)
    whole_heads = fitting // target
    rows = _divisor(batch, whole_heads // heads)
    cpu = _Size(rows, _divisor(heads, whole_heads), _even(target, fitting), copies_rows=True)
    return dispatch.Table(of(default), cpu=of(cpu))


def attend(causal: bool, size: "_Size", query, key, value, bias, query_ids, key_ids):
    """Returns the output of `operators.attend`, and `lse`.

    `lse` is the logsumexp of the logits of each query, [batch, target, heads]; 0 for queries
    without keys.

    Args:
        causal: hides keys after each query.
        size: sizes of a block.
        query, key, value, bias, query_ids, key_ids: as in `operators.attend`.
    """

    def one_group(group: _Group):
        (values,) = group.others

        def one_block(block: _Queries):
            logits = _logits(causal, size, block, group)
            top = jnp.max(logits, axis=-1, keepdims=True)
            # The maximum cancels, and so do its derivatives.
            top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
            powers = jnp.exp(logits - top)
            total = jnp.sum(powers, axis=-1, keepdims=True)
            total = jnp.where(total == 0.0, 1.0, total)
            out = _product("bhqk,bhkd->bhqd", powers.astype(values.dtype), values)
            return (out / total).astype(query.dtype), top + jnp.log(total)

        blocks = lax.map(one_block, _queries(size, group))
        return [_join_queries(a, query.shape[1]) for a in blocks]

    others = (_heads_first(size, value),)
    groups = _groups(size, query, key, bias, query_ids, key_ids, others)
    out, lse = (_positions_first(a) for a in _map_groups(one_group, groups))
    return out, lse[..., 0]


def gradients(beside_kernels: bool, causal: bool, size: "_Size", query, key, value, bias, *rest):
    """Returns the gradients of `attend` in query, key, value and bias.

    Args:
        beside_kernels: see `table`.
        causal, size, query, key, value, bias: the arguments of `attend`.
        rest: its segment ids of queries and keys, its results, and the cotangent of its output.
    """
    query_ids, key_ids, out, lse, d_out = rest
    if beside_kernels:
        arguments = query, key, value, bias, query_ids, key_ids
        is_missing, kept = jnp.any(lse == NO_LSE), lse
        lse = lax.cond(is_missing, lambda: attend(causal, size, *arguments)[1], lambda: kept)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    # A single group gets no copy of its arrays: XLA would repeat the transpose or the padding
    # wherever they are read.
    one_group = functools.partial(_group_gradients, causal, size, _is_whole(size, query))
    # sum_k weight_k dweight_k for each query: the term that the softmax gradient subtracts.
    means = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1)
    rows = (key, lse[..., None], means[..., None], d_out)
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


def _group_gradients(causal: bool, size: "_Size", is_single: bool, group: "_Group"):
    """Returns the gradients of one group, block by block."""
    wide = jnp.promote_types(group.query.dtype, jnp.float32)
    keys, values, *rows = group.others

    def one_block(sums, block_and_rows: "tuple[_Queries, list[jax.Array]]"):
        block, (lse, mean, dy) = block_and_rows
        weights = jnp.exp(_logits(causal, size, block, group) - lse)
        dlogits = weights * (_product("bhqd,bhdk->bhqk", dy, values) - mean)
        narrow = dlogits.astype(group.query.dtype)
        axes, queries = "bhqd,bhqk->bhdk", block.query
        if not is_single:
            # Transposing the smaller factors outside the products takes XLA on CPU a fraction of
            # the time.
            axes = "bhdq,bhqk->bhdk"
            queries, dy = lax.optimization_barrier((_transpose(queries), _transpose(dy)))
        dkeys = _product(axes, queries, narrow)
        dvalues = _product(axes, dy, weights.astype(group.query.dtype))
        parts = (dkeys, dvalues, _bias_gradient(block, group, dlogits))
        dquery = _product("bhqk,bhkd->bhqd", narrow, keys).astype(group.query.dtype)
        return jax.tree.map(jnp.add, sums, parts), dquery

    zeros = [jnp.zeros(group.keys.shape, wide)] * 2
    dbias = None if group.bias is None else jnp.zeros(group.bias.shape, wide)
    blocks = (_queries(size, group), [_split_queries(size, a) for a in rows])
    sums = vary_like(group.query, (*zeros, dbias))
    (*dkeys, dbias), dquery = lax.scan(one_block, sums, blocks)
    if is_single:
        dkeys = lax.optimization_barrier(dkeys)
    else:
        dkeys = [jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, FILLER))) for a in dkeys]
    return _join_queries(dquery, group.query.shape[2]), *dkeys, dbias


# --- Blocks ---------------------------------------------------------------------------------------


class _Size(NamedTuple):
    """Numbers of batch rows, heads and queries in a block.

    The first two divide the sizes of their axes, and either there is 1 row or all heads are
    present. The last block of queries is padded.

    `copies_rows` says how a block spreads a bias over its positions: row by row, or by reshapes,
    which XLA fuses with the logits. On CPU, it would then divide integers for each logit, which
    takes longer than the rest of the softmax.
    """

    batch: int
    heads: int
    queries: int
    copies_rows: bool


def _even(length: int, most: int) -> int:
    """Returns the size of the fewest equal pieces of at most `most` each, or 1."""
    count = -(-length // max(1, min(length, most)))
    return -(-length // count)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is at most `most`, or 1."""
    return max(d for d in range(1, max(1, min(number, most)) + 1) if number % d == 0)


class _Group(NamedTuple):
    """All positions of the batch rows and heads of a block; `bias` may be None."""

    query: Any  # [batch, heads, target, head_dim]
    keys: Any  # [batch, heads, head_dim, source]
    others: Any  # further arrays, [batch, heads, ...]
    bias: Any  # [heads, distances]
    query_ids: Any  # [batch, target]
    key_ids: Any  # [batch, source]


class _Queries(NamedTuple):
    """The queries of one block, and the position of the first."""

    query: Any  # [batch, heads, queries, head_dim]
    ids: Any  # [batch, queries]
    start: Any


def _groups(size: _Size, query, key, bias, query_ids, key_ids, others) -> _Group:
    """Returns all groups, stacked.

    Two new leading axes count the groups along the batch and along the heads. An array has only
    those of the two that apply to it. With a single axis for both, XLA on CPU transposes slower.
    """
    query_ids, key_ids = (a.reshape(-1, size.batch, a.shape[1]) for a in (query_ids, key_ids))
    if bias is not None:
        bias = bias.reshape(-1, size.heads, bias.shape[1])
    query, keys = _heads_first(size, query), _channels_first(size, key)
    return _Group(query, keys, others, bias, query_ids, key_ids)


def _map_groups(compute: Callable[[_Group], Any], groups: _Group) -> Any:
    """Applies `compute` to each group in turn and stacks the results along two leading axes."""
    rows, heads = groups.query.shape[:2]

    def one(place):
        row, head = place // heads, place % heads
        query, keys, others = jax.tree.map(lambda a: a[row, head], groups[:3])
        bias = None if groups.bias is None else groups.bias[head]
        return compute(
            _Group(query, keys, others, bias, groups.query_ids[row], groups.key_ids[row])
        )

    results = lax.map(one, jnp.arange(rows * heads))
    return jax.tree.map(lambda a: a.reshape(rows, heads, *a.shape[1:]), results)


def _heads_first(size: _Size, a):
    """Reshapes [batch, length, heads, head_dim] to [*groups, batch, heads, length, head_dim]."""
    return _group(size, a.transpose(0, 2, 1, 3))


def _channels_first(size: _Size, a):
    """Reshapes [batch, length, heads, head_dim] to [*groups, batch, heads, head_dim, length]."""
    if _is_whole(size, a):
        return _transpose(_heads_first(size, a))  # The order in which products read it.
    return _group(size, a.transpose(0, 2, 3, 1))


def _is_whole(size: _Size, a) -> bool:
    """Returns whether one group holds all rows and heads of [batch, length, heads, head_dim]."""
    return size[:2] == (a.shape[0], a.shape[2])


def _group(size: _Size, a):
    """Reshapes [batch, heads, ...] to [*groups, batch, heads, ...].

    A group has one row or all heads, so no element moves.
    """
    return a.reshape(-1, a.shape[1] // size.heads, size.batch, size.heads, *a.shape[2:])


def _positions_first(a, *, positions_last: bool = False):
    """Inverts `_heads_first`, or `_channels_first` if `positions_last`."""
    rows, parts, batch, heads, *rest = a.shape
    a = a.reshape(rows * batch, parts * heads, *rest)
    return a.transpose((0, 3, 1, 2) if positions_last else (0, 2, 1, 3))


def _queries(size: _Size, group: _Group) -> _Queries:
    """Returns all query blocks of a group, stacked along a new leading axis."""
    query = _split_queries(size, group.query)
    ids = _split_queries(size, group.query_ids[:, None, :, None])[:, :, 0, :, 0]
    return _Queries(query, ids, jnp.arange(len(query)) * size.queries)


def _split_queries(size: _Size, a):
    """Reshapes [batch, heads, length, width] to [blocks, batch, heads, queries, width]."""
    batch, heads, length, width = a.shape
    a = jnp.pad(a, ((0, 0), (0, 0), (0, -length % size.queries), (0, 0)))
    return jnp.moveaxis(a.reshape(batch, heads, -1, size.queries, width), 2, 0)


def _join_queries(blocks, length: int):
    """Inverts `_split_queries`."""
    _, batch, heads, _, width = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(batch, heads, -1, width)[:, :, :length]


# --- Inside a block -------------------------------------------------------------------------------


def _logits(causal: bool, size: _Size, block: _Queries, group: _Group):
    """Returns the logits of a block, minus infinity where a query may not read a key.

    Args:
        causal, size: as for `attend`.
        block: the queries.
        group: the group of the block, with its keys.

    Returns:
        [batch, heads, queries, source].
    """
    queries, source = block.query.shape[2], group.keys.shape[3]
    logits = _product("bhqd,bhdk->bhqk", block.query, group.keys)
    if group.bias is not None:
        bias = group.bias.astype(logits.dtype)
        spread = _copy_rows if size.copies_rows else _by_distance
        logits = logits + spread(queries, source, block.start, bias)[None]
    mask = attention_mask(block.ids, group.key_ids, causal=False)
    if causal:
        places = block.start + jnp.arange(queries)
        mask &= (jnp.arange(source)[None] <= places[:, None])[None]
    return jnp.where(mask[:, None], logits, -jnp.inf)


def _bias_gradient(block: _Queries, group: _Group, dlogits):
    """Sums [batch, heads, queries, source] over equal distances: [heads, distances]."""
    if group.bias is None:
        return None
    expand = functools.partial(_by_distance, *dlogits.shape[2:], block.start)
    bias = group.bias.astype(dlogits.dtype)
    (dbias,) = jax.linear_transpose(expand, bias)(dlogits.sum(axis=0))
    return dbias


def _by_distance(queries: int, source: int, start, bias):
    """Returns [heads, queries, source] with one entry of `bias` on each diagonal.

    Repeats the entries and reads each row one place before the last. This needs only slices and
    reshapes, and so does its transpose.
    """
    own = _own_distances(queries, source, start, bias)
    heads, width = own.shape
    if queries == 1:
        return own[:, None]
    repeated = jnp.broadcast_to(own[:, None], (heads, queries, width)).reshape(heads, -1)
    shifted = repeated[:, queries - 1 : queries - 1 + queries * (width - 1)]
    return shifted.reshape(heads, queries, width - 1)[:, :, :source]


def _copy_rows(queries: int, source: int, start, bias):
    """Returns the array of `_by_distance`; reads each row one place before the last."""
    own = _own_distances(queries, source, start, bias)

    def copy(row, rows):
        values = lax.dynamic_slice_in_dim(own, queries - 1 - row, source, axis=1)
        return lax.dynamic_update_index_in_dim(rows, values, row, axis=1)

    empty = vary_like(own, jnp.zeros((len(bias), queries, source), bias.dtype))
    return lax.fori_loop(0, queries, copy, empty)


def _own_distances(queries: int, source: int, start, bias):
    """Returns the part of a bias that a block of queries reads, [heads, queries + source - 1]."""
    target = bias.shape[1] - source + 1
    # The last block may reach beyond the last query.
    bias = jnp.pad(bias, ((0, 0), (queries, 0)))
    return lax.dynamic_slice_in_dim(bias, target - start, queries + source - 1, axis=1)


def _product(axes: str, a, b):
    """Returns an einsum of `a` and `b`, accumulated in at least float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(axes, a, b, preferred_element_type=wide)


def _transpose(a):
    """Swaps the last two axes, positions and channels."""
    return a.swapaxes(-1, -2)
