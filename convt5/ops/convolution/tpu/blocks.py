"""Blocks of rows for the TPU kernels, and the window of neighbouring rows that a block reads.

A block reads its own rows and the halo that its taps reach as one window. The windows of
neighbouring blocks overlap. Used by `bodies` and `calls`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from convt5.ops.geometry import Taps
from convt5.ops.tpu_kernels import LANES

CHUNK = 16
"""Rows computed at a time: one packed register of bfloat16, two registers of float32."""

NOBODY = -(2**31)
"""Segment id of padding inside kernels, where it must not equal any other, nor itself."""


@dataclasses.dataclass(frozen=True)
class Window:
    """The rows that a block reads: its own, and some before and after."""

    before: int
    rows: int
    after: int

    @property
    def size(self) -> int:
        return self.before + self.rows + self.after


@dataclasses.dataclass(frozen=True)
class Blocks:
    """One convolution over `length` positions, cut into blocks.

    Attributes:
        taps: the geometry.
        length: length of the arrays, a multiple of `rows`.
        rows, channels: sizes of a block.
        packed: whether there are segment ids.
    """

    taps: Taps
    length: int
    rows: int
    channels: int
    packed: bool

    @property
    def inputs(self) -> Window:
        """The rows that the taps of a block read."""
        return self._window(self.taps.left, self.taps.right, CHUNK)

    @property
    def readers(self) -> Window:
        """The rows whose taps read a block."""
        return self._window(self.taps.right, self.taps.left, CHUNK)

    @property
    def reader_lanes(self) -> Window:
        """The same rows as `readers`, rounded to whole lanes for arrays with positions on lanes."""
        return self._window(self.taps.right, self.taps.left, LANES)

    @property
    def segments(self) -> Window:
        """The rows of `inputs` and `readers` together, rounded to whole lanes."""
        reach = max(self.taps.left, self.taps.right)
        return self._window(reach, reach, LANES)

    @property
    def own(self) -> Window:
        return Window(0, self.rows, 0)

    def _window(self, before: int, after: int, multiple: int) -> Window:
        above, below = (-(-reach // multiple) * multiple for reach in (before, after))
        return Window(above, self.rows, below)

    def fetched(self, window: Window) -> int:
        """Returns the rows of a window that are fetched: at most all rows of the array."""
        return min(self.length, window.size)

    def start(self, window: Window, block, multiple: int):
        """Returns the first row fetched for a block; the window may begin before the array."""
        last = self.length - self.fetched(window)
        return pl.multiple_of(jnp.clip(block * self.rows - window.before, 0, last), multiple)

    def locate(self, window: Window, block, at, size: int):
        """Locates `size` rows that begin `at` rows into the window of a block.

        Returns the index among the fetched rows, and the position of the first row in the array. If
        that is outside the array, the caller must mask what it reads.
        """
        position = block * self.rows - window.before + at
        row = position - self.start(window, block, size)
        row = jnp.clip(row, 0, self.fetched(window) - size)
        return pl.multiple_of(row, size), position

    def inside(self, position, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Returns whether positions along `axis`, starting at `position`, are in the array."""
        position = position + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (position >= 0) & (position < self.length)

    def row_spec(self, window: Window) -> pl.BlockSpec:
        """Returns the block specification of [batch, length, embed]."""
        channels = self.channels
        return pl.BlockSpec(
            (None, pl.Element(self.fetched(window)), pl.Element(channels)),
            lambda b, c, i: (b, self.start(window, i, CHUNK), c * channels),
        )

    def segment_spec(self) -> pl.BlockSpec:
        """Returns the block specification of segment ids [batch, 1, length]."""
        window = self.segments
        return pl.BlockSpec(
            (None, pl.Element(1), pl.Element(self.fetched(window))),
            lambda b, c, i: (b, 0, self.start(window, i, LANES)),
        )

    def lane_spec(self, window: Window, taps: int, num_kernels: int) -> pl.BlockSpec:
        """Returns the block specification of [batch, taps, kernels, length]."""
        return pl.BlockSpec(
            (None, pl.Element(taps), pl.Element(num_kernels), pl.Element(self.fetched(window))),
            lambda b, c, i: (b, 0, 0, self.start(window, i, LANES)),
        )

    def tap_spec(self, window: Window, taps: int) -> pl.BlockSpec:
        """Returns the block specification of [batch, taps, length, embed]."""
        channels = self.channels
        return pl.BlockSpec(
            (None, pl.Element(taps), pl.Element(self.fetched(window)), pl.Element(channels)),
            lambda b, c, i: (b, 0, self.start(window, i, CHUNK), c * channels),
        )
