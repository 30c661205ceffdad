"""Shifts the rows of a sequence along its length, as the taps of a convolution read them.

Positions outside the row, padding and, by default, other segments read as zero. Used by all
formulations in plain JAX.
"""

import copy
import functools

import jax.numpy as jnp
from jax import lax

from convt5.ops.geometry import Taps


class Reader:
    """Reads the rows of x that a tap sees, one per output row; zero where there is none.

    Attributes:
        left, right: zero rows added before and after the row.
        starts: first row that each tap reads, an index into the padded row.

    Args:
        behind: output rows after the last that may also be read; they see zeros.
        filler: padding channels after each row in memory.
    """

    def __init__(self, taps: Taps, x, segment_ids, *, behind: int = 0, filler: int = 0):
        length, self._embed = x.shape[1:]
        # Taps that reach beyond the row read zeros, however far they reach.
        self.left, self.right = min(taps.left, length), min(taps.right, length)
        self.starts = [self.left + max(-self.left, min(self.right, o)) for o in taps.offsets]
        stop = length + self.right + behind
        hidden = hide_padding(x, segment_ids)
        self._padded = rows_between(hidden, -self.left, stop, filler=filler)
        self._length = length
        self._segment_ids = self._padded_ids = None
        if segment_ids is not None and not taps.cross_segments:
            self._segment_ids = rows_between(segment_ids, 0, length + behind)
            self._padded_ids = rows_between(segment_ids, -self.left, stop)

    def __call__(self, tap: int, start=0, rows: int | None = None):
        """Returns the rows that outputs start to start + rows read; `start` may be traced."""
        rows = self._length if rows is None else rows
        first = self.starts[tap] + start
        read = chunk(self._padded, first, rows)[..., : self._embed]
        if self._segment_ids is None:
            return read
        theirs = chunk(self._padded_ids, first, rows)
        ours = chunk(self._segment_ids, start, rows)
        return jnp.where((theirs == ours)[..., None], read, 0)

    def piece(self, start, rows: int, example) -> "Reader":
        """Returns a reader for `rows` output rows from `start`, of one example or all (None).

        `start` and `example` may be traced.
        """
        own = copy.copy(self)
        own._length = rows
        wider = rows + self.left + self.right
        own._padded = piece(self._padded, start, wider, example)
        if self._segment_ids is not None:
            own._segment_ids = piece(self._segment_ids, start, rows, example)
            own._padded_ids = piece(self._padded_ids, start, wider, example)
        return own


def hide_padding(x, segment_ids):
    """Returns x with zeros at padding, segment 0."""
    return x if segment_ids is None else jnp.where((segment_ids != 0)[..., None], x, 0)


def rows_between(a, start: int, stop: int, *, filler: int = 0):
    """Returns rows start to stop of the second axis, zero outside the array.

    Args:
        filler: number of zeros appended to the last axis.
    """
    length = a.shape[1]
    first, last = (max(0, min(length, i)) for i in (start, stop))
    inside = a[:, first:last]
    if last - first == stop - start and filler == 0:
        return inside
    before = min(max(0, -start), stop - start)
    after = stop - start - before - (last - first)
    widths = [(0, 0), (before, after), *[(0, 0)] * (a.ndim - 2)]
    if filler:
        widths[-1] = (0, filler)
    return jnp.pad(inside, widths)


def chunk(a, start, rows: int):
    """Returns `rows` rows of the second axis from `start`, which may be traced."""
    if isinstance(start, int):
        return a[:, start : start + rows]
    return lax.dynamic_slice_in_dim(a, start, rows, axis=1)


def piece(a, start, rows: int, example):
    """Returns `rows` rows from `start` of one example, [1, rows, ...], or of all (None).

    `start` and `example` may be traced.
    """
    if example is None:
        return chunk(a, start, rows)
    rest = (0,) * (a.ndim - 2)
    return lax.dynamic_slice(a, (example, start, *rest), (1, rows, *a.shape[2:]))


def split_kernels(x, num_kernels: int):
    """Splits the channels by kernel: [batch, length, kernels, embed / kernels]."""
    return x.reshape(*x.shape[:-1], num_kernels, x.shape[-1] // num_kernels)


def wide_dtype(*arrays) -> jnp.dtype:
    """Returns the dtype in which these arrays are summed: at least float32."""
    return functools.reduce(jnp.promote_types, (a.dtype for a in arrays), jnp.float32)
