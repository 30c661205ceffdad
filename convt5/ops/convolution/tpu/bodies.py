"""Bodies of the TPU kernels: sums over taps and their transposes, on one block in fast memory.

Rows that taps read are float32, because a float32 register can start at any row. Segment ids arrive
along the lanes and are transposed, so that each row of a register holds the id of its position.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from convt5.ops.convolution.tpu.blocks import CHUNK, NOBODY, Blocks, Window
from convt5.ops.tpu_kernels import LANES

Tile = Callable[[int], jax.Array]
"""Returns the weights of tile n, 128 channels: [CHUNK, 128] or [1, 128]."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a window in float32.

    Attributes:
        ref: [tiles, window, 128]. With 128 channels in a tile, a read may begin at any row.
        window: the rows held.
    """

    ref: jax.Ref
    window: Window

    def fill(self, source: jax.Ref, blocks: Blocks, block) -> None:
        """Copies a window; rows outside the array become zero, unless segment ids hide them."""

        def copy(i, _):
            at = pl.multiple_of(i * CHUNK, CHUNK)
            row, position = blocks.locate(self.window, block, at, CHUNK)
            values = source[pl.ds(row, CHUNK), :].astype(jnp.float32)
            if not blocks.packed:
                values = jnp.where(blocks.inside(position, values.shape, 0), values, 0.0)
            for tile in range(values.shape[1] // LANES):
                self.ref[tile, pl.ds(at, CHUNK), :] = values[:, tile * LANES : (tile + 1) * LANES]
            return 0

        lax.fori_loop(0, self.window.size // CHUNK, copy, 0)

    def read(self, row, offset, tile: int) -> jax.Array:
        """Returns [CHUNK, 128]: the rows from `row` of the block, shifted by `offset`."""
        return self.ref[tile, pl.ds(row + (self.window.before + offset), CHUNK), :]


@dataclasses.dataclass(frozen=True)
class Segments:
    """Segment ids of the positions of a window, equal in all lanes; empty if not packed."""

    rows: Rows | None

    def fill(self, source: jax.Ref | None, blocks: Blocks, block) -> None:
        if self.rows is None or source is None:
            return
        for at in range(0, self.rows.window.size, LANES):
            row, position = blocks.locate(self.rows.window, block, at, LANES)
            ids = source[:, pl.ds(row, LANES)]
            ids = jnp.where(blocks.inside(position, ids.shape, 1), ids, 0)
            self.rows.ref[0, pl.ds(at, LANES), :] = jnp.broadcast_to(ids, (LANES, LANES)).T

    def same(self, row, offset) -> jax.Array | None:
        """Returns whether rows and shifted rows share a segment; padding belongs to none."""
        if self.rows is None:
            return None
        ours = self.rows.read(row, 0, 0)
        ours = jnp.where(ours == 0, NOBODY, ours)
        return ours == self.rows.read(row, offset, 0)


def _chunks(blocks: Blocks, body: Callable[[jax.Array], None]) -> None:
    def step(i, _):
        body(pl.multiple_of(i * CHUNK, CHUNK))
        return 0

    lax.fori_loop(0, blocks.rows // CHUNK, step, 0)


def _visible(values, same):
    return values if same is None else jnp.where(same, values, 0.0)


def sum_taps(blocks: Blocks, out: jax.Ref, rows: Rows, segments: Segments, offsets, weight) -> None:
    """Writes sum_j weight(j) rows[i + offset j]; `weight(tap, row)` gives a `Tile` function."""
    tiles = range(blocks.channels // LANES)

    def body(row):
        totals = [jnp.zeros((CHUNK, LANES), jnp.float32) for _ in tiles]
        for tap, offset in enumerate(offsets):
            same, weights = segments.same(row, offset), weight(tap, row)
            for tile in tiles:
                product = weights(tile) * rows.read(row, offset, tile)
                totals[tile] = totals[tile] + _visible(product, same)
        for tile in tiles:
            out[pl.ds(row, CHUNK), pl.ds(tile * LANES, LANES)] = totals[tile].astype(out.dtype)

    _chunks(blocks, body)


def products(blocks: Blocks, x: Rows, dy: Rows, segments: Segments, row, tap: int) -> Tile:
    """Returns dy[i] x[i + offset] for 128 channels, zero where the tap reads nothing."""
    offset = blocks.taps.offsets[tap]
    same = segments.same(row, offset)
    return lambda tile: _visible(dy.read(row, 0, tile) * x.read(row, offset, tile), same)


# --- Weights of taps ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SharedWeights:
    """Weights of every position, for kernels shared by neighbouring channels.

    Attributes:
        flat: [taps * kernels, window] float32, positions along the lanes, for the softmax.
        transposed: [tiles, window, 128]: the transpose, positions along the sublanes, for the
            product with channels; a tile holds 128 weights of each position.
        num_kernels, group: number of kernels, and channels of each.
        window: the rows held.
    """

    flat: jax.Ref
    transposed: jax.Ref
    num_kernels: int
    group: int
    window: Window

    def fill(self, logits: jax.Ref, blocks: Blocks, block, softmax: bool) -> None:
        taps = range(blocks.taps.count)
        for at in range(0, self.window.size, LANES):
            row, position = blocks.locate(self.window, block, at, LANES)
            inside = blocks.inside(position, (self.num_kernels, LANES), 1)
            read = [logits[tap, :, pl.ds(row, LANES)].astype(jnp.float32) for tap in taps]
            weights = [jnp.where(inside, value, 0.0) for value in read]
            weights = _softmax(weights) if softmax else weights
            for tap in taps:
                self.flat[pl.ds(tap * self.num_kernels, self.num_kernels), pl.ds(at, LANES)] = (
                    weights[tap]
                )
        for tile, start in _squares(self.flat):
            square = self.flat[pl.ds(tile * LANES, LANES), pl.ds(start, LANES)]
            self.transposed[tile, pl.ds(start, LANES), :] = square.T

    def tile(self, tap: int, row, offset: int) -> Tile:
        start = row + (self.window.before + offset)

        @functools.cache
        def column(kernel):
            at, lane = divmod(tap * self.num_kernels + kernel, LANES)
            block = self.transposed[at, pl.ds(start, CHUNK), :]
            return jnp.broadcast_to(block[:, lane : lane + 1], (CHUNK, LANES))

        def weights(tile):
            first, *others = self.kernels_of(tile)
            weight = column(first)
            for kernel in others:
                lane = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1)
                weight = jnp.where(
                    lane >= kernel * self.group - tile * LANES, column(kernel), weight
                )
            return weight

        return weights

    def kernels_of(self, tile: int) -> range:
        return range(tile * LANES // self.group, ((tile + 1) * LANES - 1) // self.group + 1)


def _squares(flat: jax.Ref) -> list[tuple[int, int]]:
    """Lists the 128 x 128 squares to transpose: tile of weights, and first position."""
    weights, positions = flat.shape
    return [(i // LANES, j) for i in range(0, weights, LANES) for j in range(0, positions, LANES)]


def _softmax(logits: list[jax.Array]) -> list[jax.Array]:
    """Softmax over a list of taps, in the order of `reference.tap_softmax`."""
    largest = functools.reduce(jnp.maximum, logits)
    powers = [jnp.exp(logit - largest) for logit in logits]
    total = functools.reduce(jnp.add, powers)
    return [power / total for power in powers]


def _softmax_gradient(weights: list[jax.Array], d_weights: list[jax.Array]) -> list[jax.Array]:
    parts = [weight * d_weight for weight, d_weight in zip(weights, d_weights, strict=True)]
    total = functools.reduce(jnp.add, parts)
    return [part - weight * total for part, weight in zip(parts, weights, strict=True)]


@dataclasses.dataclass(frozen=True)
class ChannelWeights:
    """Weights of every position and channel.

    Attributes:
        ref: [taps, tiles, window, 128] float32.
        window: the rows held.
    """

    ref: jax.Ref
    window: Window

    def fill(self, logits: jax.Ref, blocks: Blocks, block, softmax: bool) -> None:
        taps = range(blocks.taps.count)

        def chunk(i, _):
            at = pl.multiple_of(i * CHUNK, CHUNK)
            row, position = blocks.locate(self.window, block, at, CHUNK)
            inside = blocks.inside(position, (CHUNK, LANES), 0)
            for tile in range(blocks.channels // LANES):
                from_tile = (pl.ds(row, CHUNK), pl.ds(tile * LANES, LANES))
                read = [logits[(tap, *from_tile)].astype(jnp.float32) for tap in taps]
                weights = [jnp.where(inside, value, 0.0) for value in read]
                weights = _softmax(weights) if softmax else weights
                for tap in taps:
                    self.ref[tap, tile, pl.ds(at, CHUNK), :] = weights[tap]
            return 0

        lax.fori_loop(0, self.window.size // CHUNK, chunk, 0)

    def tile(self, tap: int, row, offset: int) -> Tile:
        start = row + (self.window.before + offset)
        return lambda tile: self.ref[tap, tile, pl.ds(start, CHUNK), :]


# --- Gradients of weights -------------------------------------------------------------------------


def static_gradient(
    blocks: Blocks, out: jax.Ref, partial: jax.Ref, x: Rows, dy: Rows, segments: Segments
) -> None:
    """Adds dy[i] x[i + offset] over the rows of the block to `out` [taps, embed].

    First sums every eighth row into `partial` [taps, 8, embed].
    """
    partial[...] = jnp.zeros(partial.shape, jnp.float32)

    def body(row):
        for tap in range(blocks.taps.count):
            product = products(blocks, x, dy, segments, row, tap)
            for tile in range(blocks.channels // LANES):
                at = (tap, slice(None), pl.ds(tile * LANES, LANES))
                values = product(tile)
                partial[at] += sum(values[i : i + 8] for i in range(0, CHUNK, 8))

    _chunks(blocks, body)

    @pl.when(pl.program_id(2) == 0)
    def _():
        out[...] = jnp.zeros(out.shape, jnp.float32)

    for tap in range(blocks.taps.count):
        out[pl.ds(tap, 1), :] += jnp.sum(partial[tap], axis=0, keepdims=True)


def shared_gradient(
    blocks: Blocks,
    out: jax.Ref,
    weights: SharedWeights,
    d_weights: tuple[jax.Ref, jax.Ref],
    x: Rows,
    dy: Rows,
    segments: Segments,
    softmax: bool,
) -> None:
    """Writes the gradient in the logits, [taps, kernels, rows].

    `d_weights` is scratch memory for the gradient in the weights, transposed, then flat, as in
    `SharedWeights`.
    """
    transposed, flat = d_weights
    taps, num_kernels = range(blocks.taps.count), weights.num_kernels

    def body(row):
        lane = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1)
        for tap in taps:
            product = products(blocks, x, dy, segments, row, tap)
            sums = {}
            for tile in range(blocks.channels // LANES):
                values = product(tile)
                for kernel in weights.kernels_of(tile):
                    first = kernel * weights.group - tile * LANES
                    part = values
                    if first > 0 or first + weights.group < LANES:
                        part = jnp.where((lane >= first) & (lane < first + weights.group), part, 0)
                    sums[kernel] = sums[kernel] + part if kernel in sums else part
            for kernel, total in sums.items():
                at, column = divmod(tap * num_kernels + kernel, LANES)
                total = jnp.sum(total, axis=1, keepdims=True)
                transposed[at, pl.ds(row, CHUNK), pl.ds(column, 1)] = total

    _chunks(blocks, body)
    for tile, start in _squares(flat):
        flat[pl.ds(tile * LANES, LANES), pl.ds(start, LANES)] = transposed[
            tile, pl.ds(start, LANES), :
        ].T
    own_rows = pl.ds(weights.window.before, blocks.rows)
    gradient = [flat[pl.ds(tap * num_kernels, num_kernels), :] for tap in taps]
    if softmax:
        own_weights = [
            weights.flat[pl.ds(tap * num_kernels, num_kernels), own_rows] for tap in taps
        ]
        gradient = _softmax_gradient(own_weights, gradient)
    for tap in taps:
        out[tap] = gradient[tap].astype(out.dtype)


def channel_gradient(
    blocks: Blocks,
    out: jax.Ref,
    weights: ChannelWeights,
    x: Rows,
    dy: Rows,
    segments: Segments,
    softmax: bool,
) -> None:
    """Writes the gradient in the logits, [taps, rows, embed]."""
    taps = range(blocks.taps.count)

    def body(row):
        product = [products(blocks, x, dy, segments, row, tap) for tap in taps]
        for tile in range(blocks.channels // LANES):
            gradient = [product[tap](tile) for tap in taps]
            if softmax:
                own_weights = [weights.tile(tap, row, 0)(tile) for tap in taps]
                gradient = _softmax_gradient(own_weights, gradient)
            for tap in taps:
                at = (tap, pl.ds(row, CHUNK), pl.ds(tile * LANES, LANES))
                out[at] = gradient[tap].astype(out.dtype)

    _chunks(blocks, body)
