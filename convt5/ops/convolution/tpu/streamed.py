"""Backward pass for kernels of every position and channel whose taps reach far.

Blocks of rows would read the logits, the largest array, once for every block in reach. Here each
step of the grid takes one tap of all rows. The gradient needs the softmax normaliser, so each tap
passes twice, the second time from fast memory. Running sums are rescaled when the maximum grows
(online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867).
"""

import dataclasses
import functools
from typing import Any

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


def _body(call: Streamed, x, dy, logits, *refs: Any) -> None:
    blocks, taps = call.blocks, call.num_taps
    step = pl.program_id(2)
    remaining = list(refs)
    take = functools.partial(remaining.pop, 0)
    ids = take() if blocks.packed else None
    dx, dlogits = take(), take()
    segments = bodies.Segments(bodies.Rows(take(), blocks.segments) if blocks.packed else None)
    x_rows = bodies.Rows(take(), blocks.inputs)
    dy_rows = bodies.Rows(take(), blocks.readers)
    weight_rows = bodies.Rows(take(), blocks.readers)
    largest, total, gradient_sum, sums, kept_logits = remaining

    def chunks(body):
        def one(i, _):
            row = pl.multiple_of(i * CHUNK, CHUNK)
            body(row, pl.ds(row, CHUNK))
            return 0

        lax.fori_loop(0, blocks.length // CHUNK, one, 0)

    def product(row, offset):
        """Returns the gradient in the weight of a tap."""
        same = segments.same(row, offset)
        dweight = dy_rows.read(row, 0, 0) * x_rows.read(row, offset, 0)
        return dweight if same is None else jnp.where(same, dweight, 0.0)

    @pl.when(step == 0)
    def _():
        x_rows.fill(x, blocks, 0)
        dy_rows.fill(dy, blocks, 0)
        segments.fill(ids, blocks, 0)
        weight_rows.ref[...] = jnp.zeros(weight_rows.ref.shape, jnp.float32)
        largest[...] = jnp.full(largest.shape, LOWEST, jnp.float32)
        for ref in (total, gradient_sum, sums):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    @pl.when(step < taps)
    def _():
        offset = step * blocks.taps.dilation - blocks.taps.left

        def gather(row, at):
            logit = logits[at, :]
            kept_logits[step, at, :] = logit
            if not call.softmax:
                return
            logit = logit.astype(jnp.float32)
            higher = jnp.maximum(largest[at, :], logit)
            shrink, power = jnp.exp(largest[at, :] - higher), jnp.exp(logit - higher)
            largest[at, :] = higher
            total[at, :] = total[at, :] * shrink + power
            gradient_sum[at, :] = gradient_sum[at, :] * shrink + power * product(row, offset)

        chunks(gather)

    @pl.when(step >= taps)
    def _():
        tap = step - taps
        offset = tap * blocks.taps.dilation - blocks.taps.left

        def differentiate(row, at):
            weight, gradient = kept_logits[tap, at, :].astype(jnp.float32), product(row, offset)
            if call.softmax:
                weight = jnp.exp(weight - largest[at, :]) / total[at, :]
                gradient = weight * (gradient - gradient_sum[at, :] / total[at, :])
            dlogits[at, :] = gradient.astype(dlogits.dtype)
            weight_rows.ref[0, pl.ds(row + weight_rows.window.before, CHUNK), :] = weight

        def collect(row, at):
            same = segments.same(row, -offset)
            part = weight_rows.read(row, -offset, 0) * dy_rows.read(row, -offset, 0)
            sums[at, :] += part if same is None else jnp.where(same, part, 0.0)

        chunks(differentiate)
        chunks(collect)

    @pl.when(step == 2 * taps - 1)
    def _():
        dx[...] = sums[...].astype(dx.dtype)
