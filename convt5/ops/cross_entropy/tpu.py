"""Cross-entropy of a large vocabulary as Pallas kernels for TPU: no logit leaves the chip.

Blocks of the table pass by the tokens twice: once for the normaliser of each token, once more,
computing the logits again, for the gradients. Beside arguments and results nothing is in memory.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.tpu_kernels import LANES, dot, padded, result

ROWS = 256
"""Rows of the table in a block."""

VMEM_BYTES = 14 * 2**20
"""On-chip memory that the blocks may take, of the 16 MiB that any generation has."""

MOST_CHUNKS = 16
"""Into how many chunks tokens may be cut that do not fit the chip at once."""

LEAST_CHUNK = 0.57
"""Tokens of a chunk for each channel: with fewer, the table passes so often that logits are less.

A chunk moves the table four times, 16 vocab embed bytes. That of plain JAX, of `embed` tokens, does
as well, and 12 bytes of each of its logits.
"""

_HIDDEN = -1e30
_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("arbitrary",))


def is_supported(tokens: int, x, table) -> bool:
    """Whether the kernels take `tokens` rows of x [..., embed]."""
    embed = x.shape[-1]
    if (
        tokens == 0
        or embed % LANES
        or x.dtype not in (jnp.bfloat16, jnp.float32)
        or table.dtype != jnp.float32
    ):
        return False
    chunk = _most_tokens(x, in_chunks=True)
    return tokens <= _most_tokens(x) or LEAST_CHUNK * embed <= chunk >= tokens / MOST_CHUNKS


def sums(settings, x, table, targets, weights, *, interpret: bool = False):
    """Returns what `chunked.sums` returns: four sums, and gradients if wanted.

    Args:
        settings: z_loss, label_smoothing and with_gradients.
        x: [batch, length, embed].
        table: [vocab, embed].
        targets, weights: [batch, length].
        interpret: computes without a TPU, to be tested.
    """
    tokens, embed = targets.size, x.shape[-1]
    count = 1
    if tokens > _most_tokens(x):
        count = math.ceil(tokens / _most_tokens(x, in_chunks=True))
    size = padded(math.ceil(tokens / count), 16)

    def cut(a, *rest):
        flat = a.reshape(tokens, *rest)
        return jnp.pad(flat, [(0, count * size - tokens)] + [(0, 0)] * len(rest))

    flat = cut(x, embed), cut(targets), cut(weights)
    if not interpret:
        # Otherwise the compiler may copy the whole table to the chip before the kernel.
        table = _off_the_chip(table)
    parts, dxs, dtable = [], [], None
    # Not a loop: the compiler counts what a loop does once.
    for i in range(count):
        own = [a[i * size : (i + 1) * size] for a in flat]
        part, columns = _sums_and_columns(settings, interpret, table, *own)
        parts.append(part)
        if settings.with_gradients:
            dx, dtable = _gradients(own[0], table, columns, dtable, interpret)
            dxs.append(dx)
    totals = tuple(sum(part) for part in zip(*parts, strict=True))
    if not settings.with_gradients:
        return totals, ()
    return totals, (jnp.concatenate(dxs)[:tokens].reshape(x.shape), dtable)


def _off_the_chip(a):
    return pltpu.with_memory_space_constraint(a, pltpu.HBM)


def _sums_and_columns(settings, interpret, table, x, targets, weights):
    """Returns the sums of x [tokens, embed], and what its gradients need of each token."""
    z_loss, smoothing, _ = settings
    vocab = table.shape[0]
    statistics = _statistics(x, table, targets, interpret)
    log_z, target, mean, best = (statistics[:, i] for i in range(4))
    nll = log_z - target
    smoothed = log_z - (1.0 - smoothing) * target - smoothing * mean
    z_term = z_loss * log_z**2
    # Where logits are not finite the best id is the first, whatever they are.
    right = ((best == targets) & jnp.isfinite(log_z)).astype(jnp.float32)
    totals = tuple(jnp.sum(a * weights) for a in (smoothed + z_term, nll, z_term, right))
    # Of each token: what its softmax, its target and every id of the vocabulary are weighted by.
    softmax_weight = weights * (1.0 + 2.0 * z_loss * log_z)
    columns = [log_z, softmax_weight, weights * (1.0 - smoothing), weights * (smoothing / vocab)]
    return totals, _columns(targets, *columns)


def _columns(*columns):
    """Puts numbers of each token beside one another: [tokens, 128]. Ids below 2^24 are exact."""
    stacked = jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)
    return jnp.pad(stacked, ((0, 0), (0, LANES - len(columns))))


def _statistics(x, table, targets, interpret: bool):
    """Returns of each token, as columns: log_z, the target's and the mean logit, the best id."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    column = pltpu.VMEM((tokens, 1), jnp.float32)
    return pl.pallas_call(
        functools.partial(_statistics_kernel, vocab),
        grid=(pl.cdiv(vocab, ROWS),),
        in_specs=[_whole(tokens, embed), _rows(embed), _whole(tokens, LANES)],
        out_specs=_whole(tokens, LANES),
        out_shape=result((tokens, LANES), jnp.float32),
        scratch_shapes=[column] * 5,
        compiler_params=_IN_ORDER,
        cost_estimate=_cost(x, table, products=1, tables=1),
        interpret=interpret,
    )(x, table, _columns(targets))


def _gradients(x, table, columns, dtable, interpret: bool):
    """Returns the gradients of x and of the table; `dtable` of other chunks, or None, is added."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    others = [] if dtable is None else [dtable if interpret else _off_the_chip(dtable)]
    return pl.pallas_call(
        functools.partial(_gradient_kernel, vocab),
        grid=(pl.cdiv(vocab, ROWS),),
        in_specs=[
            _whole(tokens, embed),
            _rows(embed),
            _whole(tokens, LANES),
            *[_rows(embed)] * len(others),
        ],
        out_specs=[_whole(tokens, embed), _rows(embed)],
        out_shape=[
            result(x.shape, x.dtype),
            result(table.shape, table.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((tokens, embed), jnp.float32)],
        input_output_aliases={3: 1} if others else {},
        compiler_params=_IN_ORDER,
        cost_estimate=_cost(x, table, products=3, tables=2 + len(others)),
        interpret=interpret,
    )(x, table, columns, *others)


# --- Kernels --------------------------------------------------------------------------------------


def _statistics_kernel(vocab, x, table, columns, out, top, total, target, summed, best):
    block = pl.program_id(0)

    @pl.when(block == 0)
    def _():
        top[...] = jnp.full_like(top, _HIDDEN)
        for other in (total, target, summed, best):
            other[...] = jnp.zeros_like(other)

    logits, ids = _logits(vocab, x, table)[:2]
    is_target = ids == columns[:, 0:1].astype(jnp.int32)
    target[...] += jnp.sum(jnp.where(is_target, logits, 0.0), axis=1, keepdims=True)
    own_sum = jnp.sum(jnp.where(ids < vocab, logits, 0.0), axis=1, keepdims=True)
    summed[...] = summed[...] + own_sum
    own_top = jnp.max(logits, axis=1, keepdims=True)
    # The first among equals, of the block and of all blocks.
    own_best = jnp.min(jnp.where(logits == own_top, ids, vocab), axis=1, keepdims=True)
    best[...] = jnp.where(own_top > top[...], own_best.astype(jnp.float32), best[...])
    higher = jnp.maximum(top[...], own_top)
    powers = jnp.sum(jnp.exp(logits - higher), axis=1, keepdims=True)
    total[...] = total[...] * jnp.exp(top[...] - higher) + powers
    top[...] = higher

    @pl.when(block == pl.num_programs(0) - 1)
    def _():
        results = (top[...] + jnp.log(total[...]), target[...], summed[...] / vocab, best[...])
        lane = lax.broadcasted_iota(jnp.int32, out.shape, 1)
        y = jnp.zeros(out.shape, jnp.float32)
        for i, column in enumerate(results):
            y = jnp.where(lane == i, column, y)
        out[...] = y


def _gradient_kernel(vocab, x, table, columns, *others):
    *given, dx, dtable, dx_sum = others
    block = pl.program_id(0)

    @pl.when(block == 0)
    def _():
        dx_sum[...] = jnp.zeros_like(dx_sum)

    logits, ids, rows = _logits(vocab, x, table)
    targets, log_z, softmax_weight, target_weight, id_weight = (
        columns[:, i : i + 1] for i in range(5)
    )
    dlogits = jnp.exp(logits - log_z) * softmax_weight - id_weight
    dlogits -= jnp.where(ids == targets.astype(jnp.int32), target_weight, 0.0)
    dlogits = jnp.where(ids < vocab, dlogits, 0.0).astype(x.dtype)
    dx_sum[...] += dot(dlogits, rows, contract=(1, 0))
    slopes = dot(dlogits, x[...], contract=(0, 0))
    dtable[...] = functools.reduce(jnp.add, [other[...] for other in given], slopes)

    @pl.when(block == pl.num_programs(0) - 1)
    def _():
        dx[...] = dx_sum[...].astype(dx.dtype)


def _logits(vocab: int, x, table):
    """Returns logits [tokens, rows], hidden beyond the vocabulary, their ids, and the rows."""
    first = pl.program_id(0) * ROWS
    own = first + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
    # Beyond the table a block holds anything, even what is no number.
    rows = jnp.where(own < vocab, table[...], 0.0).astype(x.dtype)
    logits = dot(x[...], rows, contract=(1, 1))
    ids = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(ids < vocab, logits, _HIDDEN), ids, rows


# --- Blocks ---------------------------------------------------------------------------------------


def _most_tokens(x, *, in_chunks: bool = False) -> int:
    """Returns how many tokens fit the chip, in each of the two kernels; 0 where not even 16 do."""
    embed, size, exact = x.shape[-1], x.dtype.itemsize, x.dtype == jnp.float32
    column = LANES * 4  # A number of each token takes as much as 128.
    # Blocks of the table, each twice, and one in the dtype of x; x; ids, results and five columns;
    # logits, ids, powers and what is compared. Exact products have their factors in parts as well.
    statistics = _fitting(
        ROWS * embed * (2 * 4 + size),
        embed * (size + 14 * exact) + 7 * column + ROWS * 4 * 4,
    )
    # Blocks of the table, of its gradient and of that of other chunks, each twice, and one in the
    # dtype of x; x, its gradient and the sum of it; the columns; logits, ids, powers and their
    # gradient.
    gradients = _fitting(
        ROWS * embed * (8 * (2 + in_chunks) + size + 12 * exact),
        embed * (2 * size + 4 + 14 * exact) + column + ROWS * (3 * 4 + size),
    )
    return min(statistics, gradients)


def _fitting(fixed: int, each: int) -> int:
    """Returns how many tokens fit beside `fixed` bytes, in whole registers."""
    return max(0, (VMEM_BYTES - fixed) // each // 16 * 16)


def _whole(rows: int, columns: int) -> pl.BlockSpec:
    """An array that stays on the chip: it comes once, and needs no second place."""
    return pl.BlockSpec((rows, columns), lambda i: (0, 0), pipeline_mode=pl.Buffered(1))


def _rows(embed: int) -> pl.BlockSpec:
    return pl.BlockSpec((ROWS, embed), lambda i: (i, 0))


def _cost(x, table, *, products: int, tables: int) -> pl.CostEstimate:
    """Returns operations, and the bytes that come and go; `tables` counts tables and gradients."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    passes = 1 if products == 1 else 2  # Of x, or of x and its gradient.
    return pl.CostEstimate(
        flops=2 * products * tokens * vocab * embed,
        transcendentals=tokens * vocab,
        bytes_accessed=passes * x.size * x.dtype.itemsize
        + tables * table.size * table.dtype.itemsize
        + tokens * LANES * 4 * (2 if products == 1 else 1),
    )
