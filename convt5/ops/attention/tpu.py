"""Attention as Pallas kernels for TPU: the keys of a row stay on-chip, and so do all logits.

The kernels read queries, keys and values as [batch, length, heads * head_dim], the layout of the
dense layers, 128 channels at a time, and allocate nothing beside arguments and results. Where
several heads share the 128 channels, the product of one head sets the channels of the others to
zero. This costs nothing, because the matrix unit is 128 wide.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.attention.blockwise_attention import NO_LSE
from convt5.ops.tpu_kernels import LANES, dot, padded, result

LOGITS = 2**18
"""Most logits of one block of queries: 1 MiB in float32."""

LOGITS_WITH_BIAS = 2**17
"""Most logits of one block where their bias needs memory as well."""

MOST_KEYS = {"bfloat16": 4096, "float32": 1280}
"""Most keys of a row that fit the 16 MiB on-chip memory of the smallest chip, as compilers showed.

In the backward pass, keys with their gradients and sums take 24 bytes per channel. Exact float32
products also hold their factors and the logits split into parts.
"""

_HIDDEN = -1e9

# Blocks of queries run in order: the gradients of keys and values accumulate over them.
_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


class Settings(NamedTuple):
    """Static settings of the kernels.

    Attributes:
        head_dim: channels of one head.
        causal: whether keys after the query's own position are hidden.
        interpret: interprets the kernels without a TPU, for tests.
    """

    head_dim: int
    causal: bool
    interpret: bool = False


def kernels(direction: str, causal: bool, query, key, value, *, interpret: bool) -> Any:
    """Returns `attend` or `gradients` as `operators` calls them, or None if unsupported.

    Exported programs with a symbolic batch size are not supported, nor are mixed dtypes: on-chip
    matrix products need factors of one dtype.
    """
    if not isinstance(query.shape[0], int) or not query.dtype == key.dtype == value.dtype:
        return None
    heads, head_dim = query.shape[2:]
    settings = Settings(head_dim, causal, interpret)
    if not is_supported(settings, _merge_heads(query), _merge_heads(key)):
        return None
    return functools.partial(_attend if direction == "attend" else _gradients, settings, heads)


def _attend(settings: Settings, heads: int, query, key, value, bias, *ids):
    biases = () if bias is None else (bias,)
    out = attend(settings, *map(_merge_heads, (query, key, value)), *ids, *biases)
    # The forward kernel stores no logsumexp; gradients recompute it, in a kernel or not.
    return _split_heads(out, heads), jnp.full(query.shape[:3], NO_LSE, jnp.float32)


def _gradients(settings: Settings, heads: int, query, key, value, bias, *rest):
    *ids, _out, _lse, d_out = rest
    biases = () if bias is None else (bias,)
    arrays = (*map(_merge_heads, (query, key, value)), *ids, *biases, _merge_heads(d_out))
    *drows, dbias = (*gradients(settings, *arrays), *([] if biases else [None]))
    return (*(_split_heads(a, heads) for a in drows), dbias)


def _merge_heads(a):
    """Reshapes [batch, length, heads, head_dim] to the layout of the dense layers."""
    return a.reshape(*a.shape[:2], -1)


def _split_heads(a, heads: int):
    return a.reshape(*a.shape[:2], heads, -1)


def is_supported(settings: Settings, query, key) -> bool:
    """Returns whether the kernels support queries and keys [batch, length, heads * head_dim]."""
    width = query.shape[-1]
    return (
        width % LANES == 0
        and LANES % settings.head_dim == 0
        and min(query.size, key.size) > 0
        and padded(key.shape[1], LANES) <= _most_keys(settings, query.dtype)
    )


def _most_keys(settings: Settings, dtype) -> int:
    most = MOST_KEYS.get(jnp.dtype(dtype).name, 0)
    if settings.head_dim < 16:  # Each head is unrolled code: too slow to compile.
        return 0
    # Heads that share a register reuse only part of each other's memory.
    return most if settings.head_dim >= 64 else most * 5 // 8


def attend(settings: Settings, query, key, value, query_ids, key_ids, *bias):
    """Returns what `convt5.ops.attend` returns; see `is_supported`.

    Args:
        settings: static settings of the kernels.
        query, key, value: [batch, length, heads * head_dim].
        query_ids, key_ids: [batch, length].
        bias: [heads, distances], or nothing.
    """
    length = query.shape[1]
    rows = _block_rows(length, padded(key.shape[1], LANES), biased=bool(bias))
    arrays = _prepare(rows, query, key, value, query_ids, key_ids, *bias)
    grid, specs = _layout(settings, rows, arrays)
    names = ["query", "key", "key", "query_ids", "key_ids", *["bias"] * len(bias)]
    y = pl.pallas_call(
        functools.partial(_forward_kernel, settings),
        grid=grid,
        in_specs=[specs[name] for name in names],
        out_specs=specs["query"],
        out_shape=result(arrays[0].shape, query.dtype),
        compiler_params=_ORDER,
        cost_estimate=_cost(settings, arrays, arrays[:1], products=2),
        interpret=settings.interpret,
    )(*arrays)
    return y[:, :length]


def gradients(settings: Settings, query, key, value, query_ids, key_ids, *bias_and_cotangent):
    """Returns the gradients of `attend` in query, key, value and, if there is one, the bias."""
    *bias, cotangent = bias_and_cotangent
    length, source = query.shape[1], key.shape[1]
    rows = _block_rows(length, padded(source, LANES), biased=bool(bias))
    arrays = _prepare(rows, query, key, value, query_ids, key_ids, *bias)
    grid, specs = _layout(settings, rows, arrays)
    names = ["query", "key", "key", "query_ids", "key_ids", *["bias"] * len(bias), "query"]
    shapes = [result(a.shape, a.dtype) for a in arrays[:3]]
    shapes += [result((query.shape[0], *a.shape), a.dtype) for a in arrays[5:]]
    sums = pltpu.VMEM((arrays[1].shape[1], LANES), jnp.float32)
    dquery, dkey, dvalue, *dblocks = pl.pallas_call(
        functools.partial(_backward_kernel, settings),
        grid=grid,
        in_specs=[specs[name] for name in names],
        out_specs=[specs[name] for name in ("query", "key", "key", *["dbias"] * len(bias))],
        out_shape=shapes,
        scratch_shapes=[sums, sums],
        compiler_params=_ORDER,
        cost_estimate=_cost(settings, (*arrays, arrays[0]), shapes, products=5),
        interpret=settings.interpret,
    )(*arrays, _pad_length(cotangent, arrays[0].shape[1]))
    dbias = []
    for each_bias, blocks in zip(bias, dblocks, strict=True):
        cut = functools.partial(_bias_blocks, rows, length, arrays[1].shape[1])
        dbias += jax.linear_transpose(cut, each_bias)(jnp.sum(blocks, axis=0))
    return dquery[:, :length], dkey[:, :source], dvalue[:, :source], *dbias


# --- Kernels --------------------------------------------------------------------------------------


def _forward_kernel(settings, query, key, value, query_ids, key_ids, *bias_and_result):
    *bias, y = bias_and_result
    readable = _read_mask(settings, query_ids, key_ids)
    k, v = key[0], value[0]
    total = jnp.zeros(y.shape[1:], jnp.float32)
    for head, mine in _heads(settings):
        weights = _weights(_mask_channels(mine, query[0]), k, readable, [b[head, 0] for b in bias])
        total = jnp.where(mine, dot(weights.astype(v.dtype), v), total)
    y[0] = total.astype(y.dtype)


def _backward_kernel(settings, query, key, value, query_ids, key_ids, *bias_and_results):
    # A bias adds two arguments: itself comes first, its gradient after those of the rows.
    biased = len(bias_and_results) == 8
    bias, (cotangent, dquery, dkey, dvalue) = (
        bias_and_results[:biased],
        bias_and_results[biased : biased + 4],
    )
    dbias, (dk, dv) = bias_and_results[biased + 4 : -2], bias_and_results[-2:]
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    readable = _read_mask(settings, query_ids, key_ids)
    k, v = key[0], value[0]
    dq = jnp.zeros(dquery.shape[1:], jnp.float32)
    for head, mine in _heads(settings):
        q, dy = _mask_channels(mine, query[0]), _mask_channels(mine, cotangent[0])
        weights = _weights(q, k, readable, [b[head, 0] for b in bias])
        dweights = dot(dy, v, contract=(1, 1))
        products = weights * dweights
        dlogits = products - weights * jnp.sum(products, axis=1, keepdims=True)
        for sums in dbias:
            sums[0, head, 0] = _diagonal_sums(dlogits, sums.shape[-1])
        dlogits = dlogits.astype(k.dtype)
        dq = jnp.where(mine, dot(dlogits, k), dq)
        # Channels of other heads are zero in q and dy, so they add nothing to these sums.
        dk[...] += dot(dlogits, q, contract=(0, 0))
        dv[...] += dot(weights.astype(dy.dtype), dy, contract=(0, 0))
    dquery[0] = dq.astype(dquery.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        dkey[0] = dk[...].astype(dkey.dtype)
        dvalue[0] = dv[...].astype(dvalue.dtype)


def _heads(settings):
    """Yields each head that shares the 128 channels, with the mask [1, 128] of its channels."""
    channel = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    for head in range(LANES // settings.head_dim):
        first = head * settings.head_dim
        yield head, (channel >= first) & (channel < first + settings.head_dim)


def _mask_channels(mine, x):
    return jnp.where(mine, x, jnp.zeros_like(x))


def _read_mask(settings, query_ids, key_ids):
    """Returns which keys the queries of the block may read: [rows, source]."""
    own, other = query_ids[0], key_ids[0]  # [rows, 1], [1, source]
    readable = (own == other) & (other != 0)
    if settings.causal:
        shape = readable.shape
        first = pl.program_id(2) * shape[0]
        position = first + lax.broadcasted_iota(jnp.int32, shape, 0)
        readable &= lax.broadcasted_iota(jnp.int32, shape, 1) <= position
    return readable


def _weights(query, key, readable, biases):
    logits = dot(query, key, contract=(1, 1))
    for bias in biases:
        logits += _on_diagonals(bias, logits.shape)
    logits = jnp.where(readable, logits, _HIDDEN)
    powers = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    powers = jnp.where(readable, powers, 0.0)
    total = jnp.sum(powers, axis=1, keepdims=True)
    return powers / jnp.where(total == 0.0, 1.0, total)


def _on_diagonals(bias, shape):
    """Returns [rows, source] whose entry (i, j) is entry rows - 1 - i + j of `bias` [1, width]."""
    rows, source = shape
    width, have = bias.shape[1], 1
    while have < rows:
        bias = jnp.concatenate([pltpu.roll(bias, width - have, 1), bias])
        have *= 2
    return bias[:, :source]


def _diagonal_sums(a, width: int):
    """Returns the transpose of `_on_diagonals`: [1, width]."""
    rows, source = a.shape
    sums = jnp.concatenate([a, jnp.zeros((rows, width - source), a.dtype)], axis=1)
    # Row i shifts by rows - 1 - i; the upper half shifts by `rows` more than the lower half.
    while rows > 1:
        rows //= 2
        sums = pltpu.roll(sums[:rows], rows, 1) + sums[rows:]
    return sums


def _block_rows(length: int, source: int, *, biased: bool) -> int:
    """Returns the number of queries of a block: a power of two, at least 16."""
    most = LOGITS_WITH_BIAS if biased else LOGITS
    fitting = min(most // source, padded(length, 16))
    return max(16, 1 << (fitting.bit_length() - 1))


def _prepare(rows, query, key, value, query_ids, key_ids, *bias):
    """Pads rows to whole blocks, and reshapes the other arrays for the kernels."""
    target, source = padded(query.shape[1], rows), padded(key.shape[1], LANES)
    return (
        _pad_length(query, target),
        _pad_length(key, source),
        _pad_length(value, source),
        _pad_length(query_ids, target)[:, :, None],
        _pad_length(key_ids, source)[:, None, :],
        *(_bias_blocks(rows, query.shape[1], source, a) for a in bias),
    )


def _bias_blocks(rows: int, target: int, source: int, bias):
    """Returns the bias that each block of queries can read: [heads, blocks, 1, width].

    Its last entry belongs to the first query of the block and the last key.
    """
    count = -(-target // rows)
    width = padded(rows + source - 1, LANES)
    # Padded queries and keys are further apart than any distance that has a bias.
    bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (rows, rows + width)))
    first = [target - i * rows for i in range(count)]
    return jnp.stack([bias[:, i : i + width] for i in first], axis=1)[:, :, None]


def _layout(settings, rows, arrays):
    """Returns the grid (batch, 128 channels, block of queries) and its block specifications."""
    (batch, target, width), source = arrays[0].shape, arrays[1].shape[1]
    specs = {
        "query": pl.BlockSpec((1, rows, LANES), lambda b, c, i: (b, i, c)),
        "key": pl.BlockSpec((1, source, LANES), lambda b, c, i: (b, 0, c)),
        "query_ids": pl.BlockSpec((1, rows, 1), lambda b, c, i: (b, i, 0)),
        "key_ids": pl.BlockSpec((1, 1, source), lambda b, c, i: (b, 0, 0)),
    }
    for bias in arrays[5:]:
        block = (LANES // settings.head_dim, 1, 1, bias.shape[3])
        specs["bias"] = pl.BlockSpec(block, lambda b, c, i: (c, i, 0, 0))
        specs["dbias"] = pl.BlockSpec((1, *block), lambda b, c, i: (b, c, i, 0, 0))
    return (batch, width // LANES, target // rows), specs


def _cost(settings, arguments, results, *, products: int) -> pl.CostEstimate:
    """Returns the FLOPs, and the bytes of all blocks moved; keys stay on-chip while in use."""
    (batch, target, width), source = arguments[0].shape, arguments[1].shape[1]

    def moved(a) -> int:
        size = a.size * a.dtype.itemsize
        if a.ndim == 4:  # The bias is read again for every row of the batch.
            return batch * size
        if a.shape[2] == 1:  # Query ids are read for every 128 channels, one register row each.
            return width * size
        return width // LANES * size if a.shape[1] == 1 else size

    return pl.CostEstimate(
        flops=2 * products * batch * target * source * width,
        transcendentals=batch * target * source * width // settings.head_dim,
        bytes_accessed=sum(map(moved, (*arguments, *results))),
    )


def _pad_length(a, length: int):
    missing = length - a.shape[1]
    return jnp.pad(a, ((0, 0), (0, missing)) + ((0, 0),) * (a.ndim - 2)) if missing else a
