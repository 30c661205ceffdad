"""How TPU kernels cut a convolution into blocks of rows, and what a block sees of its neighbours.

A block reads its own rows and a halo of those that its taps reach, as one window that overlaps the
windows of its neighbours. Used by `bodies` and `calls`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from convt5.ops.geometry import Taps
from convt5.ops.tpu_kernels import LANES

CHUNK = 16
"""Rows computed at a time: one packed register of bfloat16, two of float32."""

NOBODY = -(2**31)
"""Stands for the segment of padding, so that it equals no other, not even itself."""


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows that a block reads: its own, and some before and after them."""

    before: int
    rows: int
    after: int

    @property
    def size(self) -> int:
        return self.before + self.rows + self.after


@dataclasses.dataclass(frozen=True)
class Blocks:
    """One convolution of rows of `length` positions, cut into blocks.

    Attributes:
        taps: the geometry.
        length: of the arrays, a multiple of `rows`.
        rows, channels: of a block.
        packed: whether there are segment ids.
    """

    taps: Taps
    length: int
    rows: int
    channels: int
    packed: bool

    @property
    def inputs(self) -> Window:
        """What the taps of the block read."""
        return self._window(self.taps.left, self.taps.right, CHUNK)

    @property
    def readers(self) -> Window:
        """The rows whose taps read the block."""
        return self._window(self.taps.right, self.taps.left, CHUNK)

    @property
    def reader_lanes(self) -> Window:
        """As `readers`, for arrays whose positions lie along the lanes."""
        return self._window(self.taps.right, self.taps.left, LANES)

    @property
    def segments(self) -> Window:
        """Covers `inputs` and `readers`; positions lie along the lanes."""
        reach = max(self.taps.left, self.taps.right)
        return self._window(reach, reach, LANES)

    @property
    def own(self) -> Window:
        return Window(0, self.rows, 0)

    def _window(self, before: int, after: int, multiple: int) -> Window:
        above, below = (-(-reach // multiple) * multiple for reach in (before, after))
        return Window(above, self.rows, below)

    def fetched(self, window: Window) -> int:
        """Rows of a window that are read from the array: not more than there are."""
        return min(self.length, window.size)

    def start(self, window: Window, block, multiple: int):
        """The first row fetched for a block, where the window itself may begin before the array."""
        last = self.length - self.fetched(window)
        return pl.multiple_of(jnp.clip(block * self.rows - window.before, 0, last), multiple)

    def locate(self, window: Window, block, at, size: int):
        """Finds `size` rows that begin `at` rows into the window of a block.

        Returns the row to read of those fetched, and the position of the first in the array;
        where that is outside, what is read must be hidden.
        """
        position = block * self.rows - window.before + at
        row = position - self.start(window, block, size)
        row = jnp.clip(row, 0, self.fetched(window) - size)
        return pl.multiple_of(row, size), position

    def inside(self, position, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Whether positions from the given one along `axis` lie in the array."""
        position = position + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position >= 0) & (position < self.length)

    def row_spec(self, window: Window) -> pl.BlockSpec:
        """Of [batch, length, embed]."""
        channels = self.channels
        return pl.BlockSpec(
            (None, pl.Element(self.fetched(window)), pl.Element(channels)),
            lambda b, c, i: (b, self.start(window, i, CHUNK), c * channels),
        )

    def segment_spec(self) -> pl.BlockSpec:
        """Of [batch, 1, length]."""
        window = self.segments
        return pl.BlockSpec(
            (None, pl.Element(1), pl.Element(self.fetched(window))),
            lambda b, c, i: (b, 0, self.start(window, i, LANES)),
        )

    def lane_spec(self, window: Window, taps: int, heads: int) -> pl.BlockSpec:
        """Of [batch, kernel, heads, length]."""
        return pl.BlockSpec(
            (None, pl.Element(taps), pl.Element(heads), pl.Element(self.fetched(window))),
            lambda b, c, i: (b, 0, 0, self.start(window, i, LANES)),
        )

    def tap_spec(self, window: Window, taps: int) -> pl.BlockSpec:
        """Of [batch, kernel, length, embed]."""
        channels = self.channels
        return pl.BlockSpec(
            (None, pl.Element(taps), pl.Element(self.fetched(window)), pl.Element(channels)),
            lambda b, c, i: (b, 0, self.start(window, i, CHUNK), c * channels),
        )
