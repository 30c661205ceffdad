"""Cross-entropy of a large vocabulary as Pallas kernels for TPU: no logit leaves the chip.

Blocks of the table pass by the tokens twice: once for the normaliser of each token, once more,
computing the logits again, for the gradients. Beside arguments and results nothing is in memory.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.pallas.conv_blocks import LANES
from convt5.ops.pallas.products import dot, padded

ROWS = 256
"""Rows of the table in a block."""

VMEM_BYTES = 14 * 2**20
"""On-chip memory that the blocks may take, of the 16 MiB that any generation has."""

MOST_CHUNKS = 8
"""How often the table may be read: tokens that do not fit the chip at once come in chunks."""

_HIDDEN = -1e30
_IN_ORDER = pltpu.CompilerParams(dimension_semantics=("arbitrary",))


def is_supported(tokens: int, x, table) -> bool:
    """Whether the kernels take `tokens` rows of x [..., embed]."""
    return (
        tokens > 0
        and x.shape[-1] % LANES == 0
        and x.dtype in (jnp.bfloat16, jnp.float32)
        and table.dtype == jnp.float32
        and tokens <= MOST_CHUNKS * _most_tokens(x)
    )


def sums(settings, x, table, targets, weights, *, interpret: bool = False):
    """Returns what `convt5.ops.losses` computes in chunks: four sums, and gradients if wanted.

    Args:
        settings: z_loss, label_smoothing and with_gradients.
        x: [batch, length, embed].
        table: [vocab, embed].
        targets, weights: [batch, length].
        interpret: computes without a TPU, to be tested.
    """
    tokens, embed = targets.size, x.shape[-1]
    count = math.ceil(tokens / _most_tokens(x))
    size = padded(math.ceil(tokens / count), 16)

    def cut(a, *rest):
        flat = a.reshape(tokens, *rest)
        return jnp.pad(flat, [(0, count * size - tokens)] + [(0, 0)] * len(rest))

    flat = cut(x, embed), cut(targets), cut(weights)
    if not interpret:
        # Otherwise the compiler may copy the whole table to the chip before the kernel.
        table = pltpu.with_memory_space_constraint(table, pltpu.HBM)
    # Not a loop: the compiler counts what a loop does once.
    chunks = [
        _chunk(settings, interpret, table, *(a[i * size : (i + 1) * size] for a in flat))
        for i in range(count)
    ]
    totals = tuple(sum(part) for part in zip(*(chunk[0] for chunk in chunks), strict=True))
    if not settings.with_gradients:
        return totals, ()
    dx, dtable = zip(*(chunk[1] for chunk in chunks), strict=True)
    return totals, (jnp.concatenate(dx)[:tokens].reshape(x.shape), sum(dtable))


def _chunk(settings, interpret, table, x, targets, weights) -> tuple[Sequence, Sequence]:
    """Returns the sums and the gradients for x [tokens, embed]."""
    z_loss, smoothing, with_gradients = settings
    vocab = table.shape[0]
    found = _statistics(x, table, targets, interpret)
    log_z, target, mean, best = (found[:, i] for i in range(4))
    nll = log_z - (1.0 - smoothing) * target - smoothing * mean
    z_term = z_loss * log_z**2
    # Where logits are not finite the best id is the first, whatever they are.
    right = ((best == targets) & jnp.isfinite(log_z)).astype(jnp.float32)
    totals = tuple(jnp.sum(a * weights) for a in (nll + z_term, nll, z_term, right))
    if not with_gradients:
        return totals, ()
    # Of each token: what its softmax, its target and every id of the vocabulary are weighted by.
    softmax_weight = weights * (1.0 + 2.0 * z_loss * log_z)
    columns = [log_z, softmax_weight, weights * (1.0 - smoothing), weights * (smoothing / vocab)]
    return totals, _gradients(x, table, _columns(targets, *columns), interpret)


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
        out_shape=jax.ShapeDtypeStruct((tokens, LANES), jnp.float32),
        scratch_shapes=[column] * 5,
        compiler_params=_IN_ORDER,
        cost_estimate=_cost(x, table, products=1),
        interpret=interpret,
    )(x, table, _columns(targets))


def _gradients(x, table, columns, interpret: bool):
    (tokens, embed), vocab = x.shape, table.shape[0]
    return pl.pallas_call(
        functools.partial(_gradient_kernel, vocab),
        grid=(pl.cdiv(vocab, ROWS),),
        in_specs=[_whole(tokens, embed), _rows(embed), _whole(tokens, LANES)],
        out_specs=[_whole(tokens, embed), _rows(embed)],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(table.shape, table.dtype),
        ],
        scratch_shapes=[pltpu.VMEM((tokens, embed), jnp.float32)],
        compiler_params=_IN_ORDER,
        cost_estimate=_cost(x, table, products=3),
        interpret=interpret,
    )(x, table, columns)


# --- Kernels --------------------------------------------------------------------------------------


def _statistics_kernel(vocab, x, table, columns, found, top, total, target, summed, best):
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
        lane = lax.broadcasted_iota(jnp.int32, found.shape, 1)
        y = jnp.zeros(found.shape, jnp.float32)
        for i, result in enumerate(results):
            y = jnp.where(lane == i, result, y)
        found[...] = y


def _gradient_kernel(vocab, x, table, columns, dx, dtable, dx_sum):
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
    dtable[...] = dot(dlogits, x[...], contract=(0, 0))

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


def _most_tokens(x) -> int:
    """Returns how many tokens fit the chip, with the blocks of the larger of the two kernels."""
    embed, size = x.shape[-1], x.dtype.itemsize
    # Blocks of the table and of its gradient, each twice, and the block in the dtype of x.
    fixed = ROWS * embed * (4 * 4 + size)
    # x, its gradient and the sum of it; the columns; logits, ids, powers and their gradient.
    each = embed * (2 * size + 4) + LANES * 4 + ROWS * (3 * 4 + size)
    return max(16, (VMEM_BYTES - fixed) // each // 16 * 16)


def _whole(rows: int, columns: int) -> pl.BlockSpec:
    """An array that stays on the chip: it comes once, and needs no second place."""
    return pl.BlockSpec((rows, columns), lambda i: (0, 0), pipeline_mode=pl.Buffered(1))


def _rows(embed: int) -> pl.BlockSpec:
    return pl.BlockSpec((ROWS, embed), lambda i: (i, 0))


def _cost(x, table, *, products: int) -> pl.CostEstimate:
    """Returns operations, and the bytes that come and go: with gradients, those of both as well."""
    (tokens, embed), vocab = x.shape, table.shape[0]
    kept = x.size * x.dtype.itemsize + table.size * table.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * products * tokens * vocab * embed,
        transcendentals=tokens * vocab,
        bytes_accessed=kept * (1 if products == 1 else 2)
        + tokens * LANES * 4 * (2 if products == 1 else 1),
    )
