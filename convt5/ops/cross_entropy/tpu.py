"""Cross-entropy over a large vocabulary as Pallas kernels for TPU; logits stay on-chip.

The tokens stay on-chip while the table streams past in blocks, twice: first for the normaliser of
each token, then, with the logits recomputed, for the gradients. The kernels allocate nothing beside
arguments and results.
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
"""Most bytes of on-chip memory for the blocks; every generation has at least 16 MiB."""

MOST_CHUNKS = 16
"""Most chunks into which tokens are cut if they do not fit on-chip together."""

LEAST_CHUNK = 0.57
"""Fewest tokens of a chunk per channel; with fewer, reading the table costs more than the logits.

A chunk moves the table four times: 16 vocab embed bytes. Plain JAX, with chunks of `embed` tokens,
does the same and moves 12 bytes for each logit.
"""

_HIDDEN = -1e30
_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("arbitrary",))


def is_supported(tokens: int, x, table) -> bool:
    """Returns whether the kernels support `tokens` rows of x [..., embed]."""
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
    """Returns what `chunked.sums` returns: four sums, and gradients if requested.

    Args:
        settings: z_loss, label_smoothing and with_gradients.
        x: [batch, length, embed].
        table: [vocab, embed].
        targets, weights: [batch, length].
        interpret: interprets the kernels without a TPU, for tests.
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
        # Prevents the compiler from copying the whole table on-chip before the kernel.
        table = _in_hbm(table)
    parts, dxs, dtable = [], [], None
    # Unrolled, because the compiler's cost analysis counts the body of a loop once.
    for i in range(count):
        chunk = [a[i * size : (i + 1) * size] for a in flat]
        part, columns = _sums_and_columns(settings, interpret, table, *chunk)
        parts.append(part)
        if settings.with_gradients:
            dx, dtable = _gradients(chunk[0], table, columns, dtable, interpret)
            dxs.append(dx)
    totals = tuple(sum(part) for part in zip(*parts, strict=True))
    if not settings.with_gradients:
        return totals, ()
    return totals, (jnp.concatenate(dxs)[:tokens].reshape(x.shape), dtable)


def _in_hbm(a):
    return pltpu.with_memory_space_constraint(a, pltpu.HBM)


def _sums_and_columns(settings, interpret, table, x, targets, weights):
    """Returns the sums over x [tokens, embed], and the per-token numbers that gradients need."""
    z_loss, smoothing, _ = settings
    vocab = table.shape[0]
    statistics = _statistics(x, table, targets, interpret)
    log_z, target, mean, best = (statistics[:, i] for i in range(4))
    nll = log_z - target
    smoothed = log_z - (1.0 - smoothing) * target - smoothing * mean
    z_term = z_loss * log_z**2
    # Where logits are not finite, the best id is 0, whatever their values.
    right = ((best == targets) & jnp.isfinite(log_z)).astype(jnp.float32)
    totals = tuple(jnp.sum(a * weights) for a in (smoothed + z_term, nll, z_term, right))
    # For each token, the coefficients of its softmax, of its target and of every vocabulary id.
    softmax_weight = weights * (1.0 + 2.0 * z_loss * log_z)
    columns = [log_z, softmax_weight, weights * (1.0 - smoothing), weights * (smoothing / vocab)]
    return totals, _columns(targets, *columns)


def _columns(*columns):
    """Stacks per-token numbers as columns: [tokens, 128]. Ids below 2^24 are exact."""
    stacked = jnp.stack([column.astype(jnp.float32) for column in columns], axis=1)
    return jnp.pad(stacked, ((0, 0), (0, LANES - len(columns))))


def _statistics(x, table, targets, interpret: bool):
    """Returns per token, as columns: log_z, the target's logit, the mean logit, the best id."""
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
    """Returns the gradients of x and table; adds to `dtable` of earlier chunks if it is given."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    sum_before = [] if dtable is None else [dtable if interpret else _in_hbm(dtable)]
    return pl.pallas_call(
        functools.partial(_gradient_kernel, vocab),
        grid=(pl.cdiv(vocab, ROWS),),
        in_specs=[
            _whole(tokens, embed),
            _rows(embed),
            _whole(tokens, LANES),
            *[_rows(embed)] * len(sum_before),
        ],
        out_specs=[_whole(tokens, embed), _rows(embed)],
        out_shape=[
            result(x.shape, x.dtype),
            result(table.shape, table.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((tokens, embed), jnp.float32)],
        input_output_aliases={3: 1} if sum_before else {},
        compiler_params=_IN_ORDER,
        cost_estimate=_cost(x, table, products=3, tables=2 + len(sum_before)),
        interpret=interpret,
    )(x, table, columns, *sum_before)


# --- Kernels --------------------------------------------------------------------------------------


def _statistics_kernel(vocab, x, table, columns, out, *scratch):
    top, total, target, summed, best = scratch
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
    # The lowest id among equal logits, within the block and over all blocks.
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


def _gradient_kernel(vocab, x, table, columns, *rest):
    *sums_before, dx, dtable, dx_sum = rest
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
    d_table = dot(dlogits, x[...], contract=(0, 0))
    dtable[...] = functools.reduce(jnp.add, [other[...] for other in sums_before], d_table)

    @pl.when(block == pl.num_programs(0) - 1)
    def _():
        dx[...] = dx_sum[...].astype(dx.dtype)


def _logits(vocab: int, x, table):
    """Returns the logits [tokens, rows], masked beyond the vocabulary, their ids, and the rows."""
    first = pl.program_id(0) * ROWS
    row_ids = first + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
    # Beyond the end of the table a block holds arbitrary values, perhaps NaN.
    rows = jnp.where(row_ids < vocab, table[...], 0.0).astype(x.dtype)
    logits = dot(x[...], rows, contract=(1, 1))
    ids = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(ids < vocab, logits, _HIDDEN), ids, rows


# --- Blocks ---------------------------------------------------------------------------------------


def _most_tokens(x, *, in_chunks: bool = False) -> int:
    """Returns how many tokens fit on-chip in both kernels, or 0 if fewer than 16 do."""
    embed, size, exact = x.shape[-1], x.dtype.itemsize, x.dtype == jnp.float32
    column = LANES * 4  # One number per token takes a whole row of 128 lanes.
    # Double-buffered blocks of the table, and one in the dtype of x; x; ids, results and five
    # columns; logits, ids, exponentials and masks. Exact products also split their factors.
    statistics = _fitting(
        ROWS * embed * (2 * 4 + size),
        embed * (size + 14 * exact) + 7 * column + ROWS * 4 * 4,
    )
    # Double-buffered blocks of the table, of its gradient and of that of other chunks, and one in
    # the dtype of x; x, its gradient and its accumulator; the columns; logits, ids, exponentials
    # and their gradient.
    gradients = _fitting(
        ROWS * embed * (8 * (2 + in_chunks) + size + 12 * exact),
        embed * (2 * size + 4 + 14 * exact) + column + ROWS * (3 * 4 + size),
    )
    return min(statistics, gradients)


def _fitting(fixed: int, each: int) -> int:
    """Returns how many tokens fit beside `fixed` bytes, rounded down to whole registers."""
    return max(0, (VMEM_BYTES - fixed) // each // 16 * 16)


def _whole(rows: int, columns: int) -> pl.BlockSpec:
    """Specifies an array that stays on-chip: it is loaded once, without a second buffer."""
    return pl.BlockSpec((rows, columns), lambda i: (0, 0), pipeline_mode=pl.Buffered(1))


def _rows(embed: int) -> pl.BlockSpec:
    return pl.BlockSpec((ROWS, embed), lambda i: (i, 0))


def _cost(x, table, *, products: int, tables: int) -> pl.CostEstimate:
    """Returns the FLOPs and the bytes moved; `tables` counts reads of tables and gradients."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    passes = 1 if products == 1 else 2  # Reads x alone, or x and its gradient.
    return pl.CostEstimate(
        flops=2 * products * tokens * vocab * embed,
        transcendentals=tokens * vocab,
        bytes_accessed=passes * x.size * x.dtype.itemsize
        + tables * table.size * table.dtype.itemsize
        + tokens * LANES * 4 * (2 if products == 1 else 1),
    )
