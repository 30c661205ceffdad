"""Calls the TPU kernels on whole arrays of one device: block specifications and scratch memory.

`make_call` returns None if no kernel serves the given arrays; the caller then uses plain JAX.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convt5.ops.convolution.tpu import bodies
from convt5.ops.convolution.tpu.blocks import CHUNK, Blocks, Window
from convt5.ops.geometry import Taps
from convt5.ops.tpu_kernels import LANES, result

VMEM_BYTES = 14 * 2**20
"""Most bytes of fast memory for the blocks of one kernel; the smallest chips have 16 MiB."""

STEP_BYTES = 2**18
"""Bytes that could be moved in the time that a kernel needs between two blocks."""

MAX_ROWS = 2048
MAX_CHANNELS = 1024
MAX_UNROLLED = 512
"""Most taps times kernels, or times tiles of 128 channels; more takes too long to compile."""

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Static parameters of a convolution; `operators` documents the terms.

    Attributes:
        taps: the geometry.
        dynamic: weights are logits [batch, length, taps, kernels], not a kernel [taps, embed].
        softmax: whether the taps of a dynamic convolution are normalised.
        packed: whether segment ids are given.
        interpret: interprets the kernels without a TPU, for tests.
        max_rows: most rows of a block.
    """

    taps: Taps
    dynamic: bool
    softmax: bool
    packed: bool
    interpret: bool = False
    max_rows: int = MAX_ROWS


@dataclasses.dataclass(frozen=True)
class Call:
    """One convolution as the kernels see it.

    Attributes:
        kind: "static": one kernel per channel, equal at all positions. "shared": kernels for each
            position, shared by groups of channels. "channel": one for each position and channel.
        direction: the convolution or its gradients.
        blocks: the blocks of the arrays.
        batch, embed, num_kernels: sizes.
        softmax: whether the taps are normalised.
        interpret: interprets the kernel without a TPU, for tests.
    """

    kind: str
    direction: Direction
    blocks: Blocks
    batch: int
    embed: int
    num_kernels: int
    softmax: bool = False
    interpret: bool = False

    @property
    def num_taps(self) -> int:
        return self.blocks.taps.count

    @property
    def sublanes(self) -> int:
        """Kernel count, padded to full registers."""
        return padded_kernels(self.num_kernels) if self.kind == "shared" else self.num_kernels

    @property
    def flat(self) -> int:
        """Number of weights of one position, rounded up to whole registers."""
        return -(-self.num_taps * self.sublanes // LANES) * LANES

    @property
    def grid(self) -> tuple[int, int, int]:
        blocks = self.blocks
        return self.batch, self.embed // blocks.channels, blocks.length // blocks.rows


def forward(call: Call, x: jax.Array, weights: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Returns the convolution.

    Args:
        call: the convolution.
        x: [batch, length, embed].
        weights: a kernel [taps, embed] if static, logits [batch, taps, kernels, length] if
            shared, or [batch, taps, length, embed] if per channel.
        ids: segment ids [batch, 1, length], or None.
    """
    blocks = call.blocks
    scratch = [_rows(blocks.inputs, blocks), *_segment_scratch(blocks)]
    scratch += _weight_scratch(call, blocks.own, blocks.own)
    (y,) = _run(
        call,
        cost(call, x.dtype.itemsize, weights.dtype.itemsize),
        functools.partial(_forward_body, call),
        [
            (x, blocks.row_spec(blocks.inputs)),
            *_segment_input(blocks, ids),
            (weights, _weight_spec(call, blocks.own, blocks.own)),
        ],
        [(result(x.shape, x.dtype), blocks.row_spec(blocks.own))],
        scratch,
    )
    return y


def _forward_body(call: Call, *refs: Any) -> None:
    blocks, block = call.blocks, pl.program_id(2)
    remaining = list(refs)
    take = functools.partial(remaining.pop, 0)
    x, ids = take(), take() if blocks.packed else None
    weights, y = take(), take()
    rows = bodies.Rows(take(), blocks.inputs)
    segments = bodies.Segments(bodies.Rows(take(), blocks.segments) if blocks.packed else None)
    rows.fill(x, blocks, block)
    segments.fill(ids, blocks, block)
    tile = _fill_weights(call, block, weights, remaining, blocks.own, blocks.own)
    bodies.sum_taps(
        blocks, y, rows, segments, blocks.taps.offsets, lambda tap, row: tile(tap, row, 0)
    )


def backward(
    call: Call, x: jax.Array, weights: jax.Array, ids: jax.Array | None, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients in x and weights; the latter is [batch, taps, embed] if static."""
    blocks = call.blocks
    windows = blocks.readers, blocks.reader_lanes
    scratch = [_rows(blocks.inputs, blocks), _rows(blocks.readers, blocks)]
    scratch += [*_segment_scratch(blocks), *_weight_scratch(call, *windows)]
    if call.kind == "static":
        d_weights = result((call.batch, call.num_taps, call.embed), jnp.float32)
        d_weights_spec = pl.BlockSpec(
            (None, call.num_taps, blocks.channels), lambda b, c, i: (b, 0, c)
        )
        scratch += [_float32(call.num_taps, 8, blocks.channels)]
    else:
        d_weights = result(weights.shape, weights.dtype)
        d_weights_spec = _weight_spec(call, blocks.own, blocks.own)
    if call.kind == "shared":
        scratch += [_transposed_scratch(call, blocks.own), _float32(call.flat, blocks.rows)]
    return _run(
        call,
        cost(call, x.dtype.itemsize, weights.dtype.itemsize),
        functools.partial(_backward_body, call),
        [
            (x, blocks.row_spec(blocks.inputs)),
            (dy, blocks.row_spec(blocks.readers)),
            *_segment_input(blocks, ids),
            (weights, _weight_spec(call, *windows)),
        ],
        [
            (result(x.shape, x.dtype), blocks.row_spec(blocks.own)),
            (d_weights, d_weights_spec),
        ],
        scratch,
    )


def _backward_body(call: Call, *refs: Any) -> None:
    blocks, block = call.blocks, pl.program_id(2)
    remaining = list(refs)
    take = functools.partial(remaining.pop, 0)
    x, dy, ids = take(), take(), take() if blocks.packed else None
    weights, dx, dweights = take(), take(), take()
    x_rows = bodies.Rows(take(), blocks.inputs)
    dy_rows = bodies.Rows(take(), blocks.readers)
    segments = bodies.Segments(bodies.Rows(take(), blocks.segments) if blocks.packed else None)
    x_rows.fill(x, blocks, block)
    dy_rows.fill(dy, blocks, block)
    segments.fill(ids, blocks, block)
    tile = _fill_weights(call, block, weights, remaining, blocks.readers, blocks.reader_lanes)
    # Row i was read by row i - offset, with the weight at that row.
    back = [-offset for offset in blocks.taps.offsets]
    bodies.sum_taps(blocks, dx, dy_rows, segments, back, lambda tap, row: tile(tap, row, back[tap]))
    if call.kind == "static":
        bodies.static_gradient(blocks, dweights, remaining[0], x_rows, dy_rows, segments)
    elif call.kind == "shared":
        flat, transposed, *d_weights = remaining
        group = call.embed // call.num_kernels
        shared = bodies.SharedWeights(flat, transposed, call.sublanes, group, blocks.reader_lanes)
        bodies.shared_gradient(
            blocks,
            dweights,
            shared,
            (d_weights[0], d_weights[1]),
            x_rows,
            dy_rows,
            segments,
            call.softmax,
        )
    else:
        channel = bodies.ChannelWeights(remaining[0], blocks.readers)
        bodies.channel_gradient(blocks, dweights, channel, x_rows, dy_rows, segments, call.softmax)


def _fill_weights(
    call: Call, block, weights: jax.Ref, scratch: Sequence[Any], window: Window, lanes: Window
):
    """Fills the scratch memory of the weights, and returns a function that reads one tile."""
    if call.kind == "static":
        return lambda tap, row, offset: (
            lambda tile: weights[pl.ds(tap, 1), pl.ds(tile * LANES, LANES)].astype(jnp.float32)
        )
    if call.kind == "shared":
        group = call.embed // call.num_kernels
        filled = bodies.SharedWeights(scratch[0], scratch[1], call.sublanes, group, lanes)
    else:
        filled = bodies.ChannelWeights(scratch[0], window)
    filled.fill(weights, call.blocks, block, call.softmax)
    return filled.tile


def _run(call: Call, estimate: pl.CostEstimate, body, inputs, outputs, scratch):
    shapes, out_specs = zip(*outputs, strict=True)
    arrays, in_specs = zip(*inputs, strict=True)
    if not call.interpret:
        # Without this, XLA copies whole operands to fast memory and takes the kernel's share.
        arrays = [pltpu.with_memory_space_constraint(a, pltpu.HBM) for a in arrays]
    run = pl.pallas_call(
        body,
        grid=call.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        scratch_shapes=scratch,
        interpret=call.interpret,
        cost_estimate=estimate,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
    )
    return run(*arrays)


def _float32(*shape: int):
    return pltpu.VMEM(shape, jnp.float32)


def _rows(window: Window, blocks: Blocks):
    return _float32(blocks.channels // LANES, window.size, LANES)


def _segment_scratch(blocks: Blocks):
    return [pltpu.VMEM((1, blocks.segments.size, LANES), jnp.int32)] if blocks.packed else []


def _segment_input(blocks: Blocks, ids):
    return [(ids, blocks.segment_spec())] if blocks.packed else []


def _weight_scratch(call: Call, window: Window, lanes: Window):
    if call.kind == "static":
        return []
    if call.kind == "shared":
        return [_float32(call.flat, lanes.size), _transposed_scratch(call, lanes)]
    return [_float32(call.num_taps, call.blocks.channels // LANES, window.size, LANES)]


def _transposed_scratch(call: Call, lanes: Window):
    return _float32(call.flat // LANES, lanes.size, LANES)


def _weight_spec(call: Call, window: Window, lanes: Window) -> pl.BlockSpec:
    if call.kind == "static":
        return pl.BlockSpec((call.num_taps, call.blocks.channels), lambda b, c, i: (0, c))
    if call.kind == "shared":
        return call.blocks.lane_spec(lanes, call.num_taps, call.sublanes)
    return call.blocks.tap_spec(window, call.num_taps)


def cost(call: Call, x_bytes: int, weight_bytes: int) -> pl.CostEstimate:
    """Returns the FLOPs and bytes of a kernel; halos count as often as they are read."""
    blocks, cells = call.blocks, call.batch * call.blocks.length
    read = functools.partial(rows_read, blocks)
    if call.kind == "static":
        weights = call.batch * call.num_taps * call.embed
        weight_rows = weights * weight_bytes
    else:
        weights = cells * call.num_taps * call.sublanes
        weight_rows = call.batch * call.num_taps * call.sublanes * weight_bytes
    row, ids = call.batch * call.embed * x_bytes, 4 * call.batch * blocks.packed
    ids *= call.grid[1] * read(blocks.segments)
    products = 2 * cells * call.num_taps * call.embed
    if call.direction == "forward":
        moved = row * (read(blocks.inputs) + blocks.length)
        weight_bytes_moved = weight_rows * (1 if call.kind == "static" else blocks.length)
        return pl.CostEstimate(
            flops=products,
            transcendentals=weights * call.softmax,
            bytes_accessed=moved + weight_bytes_moved + ids,
        )
    moved = row * (read(blocks.inputs) + read(blocks.readers) + blocks.length)
    if call.kind == "static":
        weight_bytes_moved = weight_rows + 4 * weights
    else:
        window = blocks.reader_lanes if call.kind == "shared" else blocks.readers
        weight_bytes_moved = weight_rows * (read(window) + blocks.length)
    return pl.CostEstimate(
        flops=2 * products,
        transcendentals=weights * call.softmax,
        bytes_accessed=moved + weight_bytes_moved + ids,
    )


# --- Blocks ---------------------------------------------------------------------------------------


def make_call(
    operation: Operation,
    kind: str,
    direction: Direction,
    shape: tuple[int, int, int],
    *,
    num_kernels: int,
    itemsize: int,
) -> Call | None:
    """Returns the call that moves the fewest bytes, or None if no kernel serves.

    Args:
        operation: the convolution.
        kind, direction, num_kernels: as in `Call`.
        shape: [batch, length, embed] of x; the length is a multiple of 128.
        itemsize: bytes per element of x and logits.
    """
    (batch, length, embed), taps = shape, operation.taps
    if embed % LANES or length % LANES or taps.cross_segments:
        return None
    if kind == "shared" and taps.count * padded_kernels(num_kernels) > MAX_UNROLLED:
        return None
    calls = [
        Call(
            kind,
            direction,
            blocks,
            batch,
            embed,
            num_kernels,
            operation.softmax,
            operation.interpret,
        )
        for blocks in _candidates(operation, kind, length, embed)
    ]
    fitting = [call for call in calls if _vmem_bytes(call, itemsize) <= VMEM_BYTES]
    return min(fitting, key=lambda call: _time(call, itemsize), default=None)


def _candidates(operation: Operation, kind: str, length: int, embed: int) -> list[Blocks]:
    """Returns the blocks that divide the array."""
    taps = operation.taps
    rows = [r for r in range(LANES, operation.max_rows + 1, LANES) if length % r == 0]
    channels = [c for c in range(LANES, min(embed, MAX_CHANNELS) + 1, LANES) if embed % c == 0]
    if kind == "shared":
        # A kernel's sum over channels must stay in one block.
        channels = [embed]
    channels = [c for c in channels if taps.count * (c // LANES) <= MAX_UNROLLED]
    return [Blocks(taps, length, r, c, operation.packed) for r in rows for c in channels]


def _time(call: Call, itemsize: int) -> float:
    """Estimates the time of a call, in bytes that could be moved meanwhile.

    The first step of the grid only loads its block.
    """
    moved, steps = cost(call, itemsize, itemsize).bytes_accessed, math.prod(call.grid)
    return moved + moved / steps + STEP_BYTES * steps


def rows_read(blocks: Blocks, window: Window) -> int:
    """Returns how many rows all blocks of one row fetch through a window, overlaps included."""
    return blocks.length // blocks.rows * blocks.fetched(window)


def _vmem_bytes(call: Call, itemsize: int) -> int:
    """Returns the bytes of fast memory: two buffers per block, and scratch memory."""
    blocks, channels, forward = call.blocks, call.blocks.channels, call.direction == "forward"
    block_elements, ids = blocks.rows * channels, blocks.packed * blocks.segments.size
    read = channels * (blocks.inputs.size + (0 if forward else blocks.readers.size))
    moved, kept = itemsize * (read + block_elements) + 4 * 8 * ids, 4 * (read + LANES * ids)
    if call.kind == "static":
        d_weights = 0 if forward else 4 * call.num_taps * channels
        return 2 * (moved + 4 * call.num_taps * channels + d_weights) + kept + 8 * d_weights
    window, lanes = blocks.own, blocks.own
    if not forward:
        window, lanes = blocks.readers, blocks.reader_lanes
    d_weights = 0 if forward else blocks.rows
    if call.kind == "shared":
        sublanes = call.num_taps * max(8, call.sublanes)
        moved += itemsize * sublanes * (lanes.size + d_weights)
        # About half of the weights of a chunk do not fit the registers and are spilled.
        kept += 2 * call.num_taps * call.sublanes * CHUNK * LANES
        return 2 * moved + kept + 4 * call.flat * 2 * (lanes.size + d_weights)
    moved += itemsize * call.num_taps * channels * (window.size + d_weights)
    return 2 * moved + kept + 4 * call.num_taps * channels * window.size


def padded_length(length: int) -> int:
    return math.ceil(length / LANES) * LANES


def padded_kernels(num_kernels: int) -> int:
    """Returns the kernel count, padded to full registers or to a smaller tile with a layout."""
    return num_kernels if num_kernels in (1, 2, 4, 8) else math.ceil(num_kernels / 16) * 16
