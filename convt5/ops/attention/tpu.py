"""Attention as Pallas kernels for TPU: a row's keys stay on the chip, and no logits leave it.

The kernels read queries, keys and values as [batch, length, heads * head_dim], as the dense layers
write them, 128 channels at a time, and take no memory beside arguments and results. Where several
heads share the 128 channels, a head's products are computed with the other heads' channels set to
zero, which costs nothing: the matrix unit is that wide.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.tpu_kernels import LANES, dot, padded, result

LOGITS = 2**18
"""Logits of one block of queries, at most: 1 MiB in float32."""

LOGITS_WITH_BIAS = 2**17
"""The same where their bias needs room as well."""

MOST_KEYS = {"bfloat16": 4096, "float32": 1280}
"""Keys of a row that fit the 16 MiB of the least chip with all else, as compilers were seen to do.

Those of the backward pass are 24 bytes a channel, with their gradients and sums. Exact products, of
float32, have their factors and the logits in parts as well.
"""

_HIDDEN = -1e9

# Blocks of queries come in order: the gradients of keys and values are summed over them.
_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


class Settings(NamedTuple):
    """What is known when a program is built.

    Attributes:
        head_dim: channels of one head.
        causal: whether keys after the query's own position are hidden.
        interpret: runs without a TPU, for tests.
    """

    head_dim: int
    causal: bool
    interpret: bool = False


def kernels(direction: str, causal: bool, query, key, value, *, interpret: bool) -> Any:
    """Returns `attend` or `gradients` as `operators` calls them, or None where they do not serve.

    Exported programs leave the batch free, and matrix products on the chip take factors of one
    dtype: both have no kernels.
    """
    if not isinstance(query.shape[0], int) or not query.dtype == key.dtype == value.dtype:
        return None
    heads, head_dim = query.shape[2:]
    settings = Settings(head_dim, causal, interpret)
    if not is_supported(settings, _flat(query), _flat(key)):
        return None
    return functools.partial(_attend if direction == "attend" else _gradients, settings, heads)


def _attend(settings: Settings, heads: int, query, key, value, bias, *ids):
    biases = () if bias is None else (bias,)
    out = attend(settings, *map(_flat, (query, key, value)), *ids, *biases)
    # Kernels keep no logsumexp for their gradients.
    return _with_heads(out, heads), jnp.zeros(query.shape[:3], jnp.float32)


def _gradients(
    settings: Settings, heads: int, query, key, value, bias, query_ids, key_ids, out, lse, d_out
):
    del out, lse
    biases = () if bias is None else (bias,)
    arrays = (*map(_flat, (query, key, value)), query_ids, key_ids, *biases, _flat(d_out))
    *drows, dbias = (*gradients(settings, *arrays), *([] if biases else [None]))
    return (*(_with_heads(a, heads) for a in drows), dbias)


def _flat(a):
    """[batch, length, heads, head_dim] as the dense layers have it."""
    return a.reshape(*a.shape[:2], -1)


def _with_heads(a, heads: int):
    return a.reshape(*a.shape[:2], heads, -1)


def is_supported(settings: Settings, query, key) -> bool:
    """Whether the kernels take queries and keys of [batch, length, heads * head_dim]."""
    width = query.shape[-1]
    return (
        width % LANES == 0
        and LANES % settings.head_dim == 0
        and min(query.size, key.size) > 0
        and padded(key.shape[1], LANES) <= _most_keys(settings, query.dtype)
    )


def _most_keys(settings: Settings, dtype) -> int:
    most = MOST_KEYS.get(jnp.dtype(dtype).name, 0)
    if settings.head_dim < 16:  # More heads than compile in seconds: each is code of its own.
        return 0
    # What one head takes is only in part taken again by the next in its register.
    return most if settings.head_dim >= 64 else most * 5 // 8


def attend(settings: Settings, query, key, value, query_ids, key_ids, *bias):
    """Returns what `convt5.ops.attend` returns; see `is_supported`.

    Args:
        settings: of the kernels.
        query, key, value: [batch, length, heads * head_dim].
        query_ids, key_ids: [batch, length].
        bias: [heads, distances], or nothing.
    """
    length = query.shape[1]
    rows = _block_rows(length, padded(key.shape[1], LANES), biased=bool(bias))
    arrays = _prepared(rows, query, key, value, query_ids, key_ids, *bias)
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
    """Returns the gradients of `attend` in query, key, value and, where there is one, the bias."""
    *bias, cotangent = bias_and_cotangent
    length, source = query.shape[1], key.shape[1]
    rows = _block_rows(length, padded(source, LANES), biased=bool(bias))
    arrays = _prepared(rows, query, key, value, query_ids, key_ids, *bias)
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
    )(*arrays, _lengthened(cotangent, arrays[0].shape[1]))
    dbias = []
    for given, blocks in zip(bias, dblocks, strict=True):
        cut = functools.partial(_bias_blocks, rows, length, arrays[1].shape[1])
        dbias += jax.linear_transpose(cut, given)(jnp.sum(blocks, axis=0))
    return dquery[:, :length], dkey[:, :source], dvalue[:, :source], *dbias


# --- Kernels --------------------------------------------------------------------------------------


def _forward_kernel(settings, query, key, value, query_ids, key_ids, *bias_and_result):
    *bias, y = bias_and_result
    readable = _readable(settings, query_ids, key_ids)
    k, v = key[0], value[0]
    total = jnp.zeros(y.shape[1:], jnp.float32)
    for head, mine in _heads(settings):
        weights = _weights(_only(mine, query[0]), k, readable, [b[head, 0] for b in bias])
        total = jnp.where(mine, dot(weights.astype(v.dtype), v), total)
    y[0] = total.astype(y.dtype)


def _backward_kernel(settings, query, key, value, query_ids, key_ids, *others):
    # With a bias there are two more: it comes first, and its gradient after those of the rows.
    biased = len(others) == 8
    bias, (cotangent, dquery, dkey, dvalue) = others[:biased], others[biased : biased + 4]
    dbias, (dk, dv) = others[biased + 4 : -2], others[-2:]
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    readable = _readable(settings, query_ids, key_ids)
    k, v = key[0], value[0]
    dq = jnp.zeros(dquery.shape[1:], jnp.float32)
    for head, mine in _heads(settings):
        q, dy = _only(mine, query[0]), _only(mine, cotangent[0])
        weights = _weights(q, k, readable, [b[head, 0] for b in bias])
        dweights = dot(dy, v, contract=(1, 1))
        products = weights * dweights
        dlogits = products - weights * jnp.sum(products, axis=1, keepdims=True)
        for sums in dbias:
            sums[0, head, 0] = _diagonal_sums(dlogits, sums.shape[-1])
        dlogits = dlogits.astype(k.dtype)
        dq = jnp.where(mine, dot(dlogits, k), dq)
        # Other heads' channels of q and dy are zero, and so are their sums here.
        dk[...] += dot(dlogits, q, contract=(0, 0))
        dv[...] += dot(weights.astype(dy.dtype), dy, contract=(0, 0))
    dquery[0] = dq.astype(dquery.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        dkey[0] = dk[...].astype(dkey.dtype)
        dvalue[0] = dv[...].astype(dvalue.dtype)


def _heads(settings):
    """Yields each head among the 128 channels, and which of them are its own: [1, 128]."""
    channel = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    for head in range(LANES // settings.head_dim):
        first = head * settings.head_dim
        yield head, (channel >= first) & (channel < first + settings.head_dim)


def _only(mine, x):
    return jnp.where(mine, x, jnp.zeros_like(x))


def _readable(settings, query_ids, key_ids):
    """Returns which keys the queries of the block read: [rows, source]."""
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
    """Returns [rows, source]: at row i, column j is entry rows - 1 - i + j of `bias` [1, width]."""
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
    # Row i moves by rows - 1 - i; the upper half moves by `rows` more than the lower one.
    while rows > 1:
        rows //= 2
        sums = pltpu.roll(sums[:rows], rows, 1) + sums[rows:]
    return sums


def _block_rows(length: int, source: int, *, biased: bool) -> int:
    """Returns how many queries are computed together: a power of two, at least 16."""
    most = LOGITS_WITH_BIAS if biased else LOGITS
    fitting = min(most // source, padded(length, 16))
    return max(16, 1 << (fitting.bit_length() - 1))


def _prepared(rows, query, key, value, query_ids, key_ids, *bias):
    """Fills rows up with padding to whole blocks, and brings the rest into their form."""
    target, source = padded(query.shape[1], rows), padded(key.shape[1], LANES)
    return (
        _lengthened(query, target),
        _lengthened(key, source),
        _lengthened(value, source),
        _lengthened(query_ids, target)[:, :, None],
        _lengthened(key_ids, source)[:, None, :],
        *(_bias_blocks(rows, query.shape[1], source, a) for a in bias),
    )


def _bias_blocks(rows: int, target: int, source: int, bias):
    """Returns the bias that each block of queries can meet: [heads, blocks, 1, width].

    Its last entry is that of the first query of the block and the last key.
    """
    count = -(-target // rows)
    width = padded(rows + source - 1, LANES)
    # Padding of queries and of keys is further away than any distance that has a bias.
    bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (rows, rows + width)))
    first = [target - i * rows for i in range(count)]
    return jnp.stack([bias[:, i : i + width] for i in first], axis=1)[:, :, None]


def _layout(settings, rows, arrays):
    """Returns the grid (batch, 128 channels, block of queries) and where its blocks lie."""
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
    """Returns operations, and the bytes of all blocks as they come and go; keys stay while used."""
    (batch, target, width), source = arguments[0].shape, arguments[1].shape[1]

    def moved(a) -> int:
        size = a.size * a.dtype.itemsize
        if a.ndim == 4:  # The bias comes again for every row of the batch.
            return batch * size
        if a.shape[2] == 1:  # Ids of queries: for every 128 channels, a row of a register each.
            return width * size
        return width // LANES * size if a.shape[1] == 1 else size

    return pl.CostEstimate(
        flops=2 * products * batch * target * source * width,
        transcendentals=batch * target * source * width // settings.head_dim,
        bytes_accessed=sum(map(moved, (*arguments, *results))),
    )


def _lengthened(a, length: int):
    missing = length - a.shape[1]
    return jnp.pad(a, ((0, 0), (0, missing)) + ((0, 0),) * (a.ndim - 2)) if missing else a
