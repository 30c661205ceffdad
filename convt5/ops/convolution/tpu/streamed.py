"""Backward pass for kernels of every position and channel whose taps reach far.

Blocks of rows would read the logits, the largest array, once for every block in reach. Here each
step of the grid takes one tap of all rows. The gradient needs the softmax normaliser, so each tap
passes twice, the second time from fast memory. Running sums are rescaled when the maximum grows
(online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.convolution.tpu import bodies
from convt5.ops.convolution.tpu.blocks import CHUNK, Blocks
from convt5.ops.tpu_kernels import LANES, result

LOWEST = -3e38
"""A finite number below every finite logit, so that logits of minus infinity get weight zero."""


@dataclasses.dataclass(frozen=True)
class Streamed:
    """One backward pass; `blocks` is a single block of rows of 128 channels."""

    blocks: Blocks
    batch: int
    embed: int
    softmax: bool
    interpret: bool

    @property
    def num_taps(self) -> int:
        return self.blocks.taps.count

    def bytes_accessed(self, itemsize: int) -> int:
        cells = self.batch * self.blocks.length
        ids = 4 * cells * self.blocks.packed * self.embed // LANES
        return itemsize * cells * self.embed * (3 + 2 * self.num_taps) + ids

    def vmem_bytes(self, itemsize: int) -> int:
        blocks = self.blocks
        windows = blocks.inputs.size + 2 * blocks.readers.size
        kept = 4 * (windows + 4 * blocks.length + blocks.packed * blocks.segments.size)
        logits = itemsize * self.num_taps * blocks.length
        return LANES * (2 * itemsize * 5 * blocks.length + kept + logits)


def backward(
    call: Streamed, x: jax.Array, logits: jax.Array, ids: jax.Array | None, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients in x and in logits [batch, taps, length, embed]."""
    blocks, taps, length = call.blocks, call.num_taps, call.blocks.length
    row = pl.BlockSpec((None, length, LANES), lambda b, c, step: (b, 0, c))
    segment = pl.BlockSpec((None, 1, length), lambda b, c, step: (b, 0, 0))
    tap = (None, None, length, LANES)
    read = pl.BlockSpec(tap, lambda b, c, step: (b, jnp.minimum(step, taps - 1), 0, c))
    written = pl.BlockSpec(tap, lambda b, c, step: (b, jnp.maximum(step - taps, 0), 0, c))
    scratch = [pltpu.VMEM((1, blocks.segments.size, LANES), jnp.int32)] * blocks.packed
    for window in (blocks.inputs, blocks.readers, blocks.readers):
        scratch.append(pltpu.VMEM((1, window.size, LANES), jnp.float32))
    scratch += [pltpu.VMEM((length, LANES), jnp.float32)] * 4
    arrays = [x, dy, logits, *([ids] if blocks.packed else [])]
    if not call.interpret:
        arrays = [pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in arrays]
    run = pl.pallas_call(
        functools.partial(_body, call),
        grid=(call.batch, call.embed // LANES, 2 * taps),
        in_specs=[row, row, read, *([segment] if blocks.packed else [])],
        out_specs=[row, written],
        out_shape=[result(a.shape, a.dtype) for a in (x, logits)],
        scratch_shapes=[*scratch, pltpu.VMEM((taps, length, LANES), logits.dtype)],
        interpret=call.interpret,
        cost_estimate=pl.CostEstimate(
            flops=6 * x.size * taps,
            transcendentals=2 * x.size * taps * call.softmax,
            bytes_accessed=call.bytes_accessed(max(x.dtype.itemsize, logits.dtype.itemsize)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    dx, dlogits = run(*arrays)
    return dx, dlogits


class _Memory(NamedTuple):
    """Fast memory of one row of 128 channels, kept from tap to tap.

    Attributes:
        x, dy, weights: rows that taps read at an offset; `weights` holds those of one tap.
        segments: the segment ids.
        largest, total: running maximum of the logits, and sum of exp(logit - maximum).
        gradient_sum: running sum of exp(logit - maximum) times the gradient of the weight.
        dx: running sum of the gradient in x.
        logits: the logits of all taps.
    """

    x: bodies.Rows
    dy: bodies.Rows
    weights: bodies.Rows
    segments: bodies.Segments
    largest: Any
    total: Any
    gradient_sum: Any
    dx: Any
    logits: Any

    def weight_gradient(self, row, offset):
        """Returns the gradient in the weight of a tap, for a chunk of rows."""
        same = self.segments.same(row, offset)
        gradient = self.dy.read(row, 0, 0) * self.x.read(row, offset, 0)
        return gradient if same is None else jnp.where(same, gradient, 0.0)


def _body(call: Streamed, x, dy, logits, *refs: Any) -> None:
    blocks, taps = call.blocks, call.num_taps
    step = pl.program_id(2)
    remaining = list(refs)
    take = functools.partial(remaining.pop, 0)
    ids = take() if blocks.packed else None
    dx, dlogits = take(), take()
    segments = bodies.Segments(bodies.Rows(take(), blocks.segments) if blocks.packed else None)
    windows = (blocks.inputs, blocks.readers, blocks.readers)
    x_rows, dy_rows, weight_rows = (bodies.Rows(take(), window) for window in windows)
    memory = _Memory(x_rows, dy_rows, weight_rows, segments, *remaining)

    @pl.when(step == 0)
    def _():
        memory.x.fill(x, blocks, 0)
        memory.dy.fill(dy, blocks, 0)
        segments.fill(ids, blocks, 0)
        memory.weights.ref[...] = jnp.zeros(memory.weights.ref.shape, jnp.float32)
        memory.largest[...] = jnp.full(memory.largest.shape, LOWEST, jnp.float32)
        for ref in (memory.total, memory.gradient_sum, memory.dx):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    @pl.when(step < taps)
    def _():
        _gather(call, memory, logits, step)

    @pl.when(step >= taps)
    def _():
        _differentiate(call, memory, dlogits, step - taps)

    @pl.when(step == 2 * taps - 1)
    def _():
        dx[...] = memory.dx[...].astype(dx.dtype)


def _gather(call: Streamed, memory: _Memory, logits, tap) -> None:
    """Keeps the logits of a tap, and adds it to the sums of the softmax and its gradient."""
    offset = _offset(call, tap)

    def chunk(row, at):
        logit = logits[at, :]
        memory.logits[tap, at, :] = logit
        if not call.softmax:
            return
        logit = logit.astype(jnp.float32)
        largest, total, gradient_sum = memory.largest, memory.total, memory.gradient_sum
        higher = jnp.maximum(largest[at, :], logit)
        shrink, power = jnp.exp(largest[at, :] - higher), jnp.exp(logit - higher)
        largest[at, :] = higher
        total[at, :] = total[at, :] * shrink + power
        shrunk = gradient_sum[at, :] * shrink
        gradient_sum[at, :] = shrunk + power * memory.weight_gradient(row, offset)

    _for_chunks(call, chunk)


def _differentiate(call: Streamed, memory: _Memory, dlogits, tap) -> None:
    """Writes the gradient in the logits of a tap, and adds that in x which it gives."""
    offset = _offset(call, tap)

    def differentiate(row, at):
        weight = memory.logits[tap, at, :].astype(jnp.float32)
        gradient = memory.weight_gradient(row, offset)
        if call.softmax:
            weight = jnp.exp(weight - memory.largest[at, :]) / memory.total[at, :]
            gradient = weight * (gradient - memory.gradient_sum[at, :] / memory.total[at, :])
        dlogits[at, :] = gradient.astype(dlogits.dtype)
        memory.weights.ref[0, pl.ds(row + memory.weights.window.before, CHUNK), :] = weight

    def collect(row, at):
        same = memory.segments.same(row, -offset)
        part = memory.weights.read(row, -offset, 0) * memory.dy.read(row, -offset, 0)
        memory.dx[at, :] += part if same is None else jnp.where(same, part, 0.0)

    _for_chunks(call, differentiate)
    _for_chunks(call, collect)


def _offset(call: Streamed, tap):
    return tap * call.blocks.taps.dilation - call.blocks.taps.left


def _for_chunks(call: Streamed, body: Callable[[Any, Any], None]) -> None:
    """Calls `body` with the first row of each chunk, and with its rows."""

    def one(i, _):
        row = pl.multiple_of(i * CHUNK, CHUNK)
        body(row, pl.ds(row, CHUNK))
        return 0

    lax.fori_loop(0, call.blocks.length // CHUNK, one, 0)
