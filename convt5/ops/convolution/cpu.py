"""Convolutions on CPU: sums in the order that XLA:CPU computes fastest.

XLA:CPU reduces over rows fast only while a chunk of rows stays in its cache. Three measures keep it
there: chunks of rows, banded matrix products, and padding channels between rows that would
otherwise share sets of the cache.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from convt5.ops import dispatch
from convt5.ops.convolution import reference
from convt5.ops.convolution.rows import (
    Reader,
    chunk,
    hide_padding,
    piece,
    rows_between,
    wide_dtype,
)
from convt5.ops.geometry import Taps
from convt5.ops.varying import vary_like

CHUNK_ELEMENTS = 2**15
"""Elements of x in one chunk: 128 KiB in float32, well inside a second-level cache."""

PARTIAL_SUM_ELEMENTS = 2**13
"""Elements of each partial sum over rows: all channels of some of the rows."""

PARTIAL_SUM_TERMS = 16
"""Products added to a partial sum at once.

More are hardly faster and take longer to compile. With fewer, XLA:CPU recomputes the position of
the chunk for every element.
"""

UNCOPIED_TAPS = 3
"""Most taps that read x itself rather than a copy padded with zeros.

With more taps, or with taps that compare segments, handling the ends of rows costs more than the
copy.
"""

CACHE_SET_BYTES = 2**12
"""Bytes between addresses that share a set of a first-level cache."""

CACHE_WAYS = 8
"""Lines that a set of a first-level cache holds."""

CACHE_LINE_BYTES = 2**6

BAND_ROWS = 32
"""Output rows of one banded matrix product."""


def forward(taps: Taps, softmax: bool, segment_ids, x, weights, *, rate=0.0, key=None):
    """Returns `reference.forward`."""
    if weights.ndim == 2 or not softmax or reference.drops(rate, key):
        return FORMULATION.forward(taps, softmax, segment_ids, x, weights, rate=rate, key=key)
    # Divide last: otherwise XLA:CPU divides the weights again for every channel.
    powers, total = reference.tap_powers(weights.astype(wide_dtype(weights)))
    return weighted_sum(taps, x, powers, segment_ids, total)


def weighted_sum(taps: Taps, x, weights, segment_ids, total=None):
    """Returns `reference.weighted_sum`, divided by `total` [batch, length, 1, kernels] if given."""
    if dispatch.devices() is not None:
        return reference.sum_read_rows(
            taps, x, weights, segment_ids, Reader(taps, x, segment_ids), total
        )
    same_everywhere = weights.shape[:2] == (1, 1)
    # Weights that are equal at all positions are read as rows too.
    filler = _filler(x, taps.dilation, taps.count * (2 if same_everywhere else 1))
    if same_everywhere:
        # The extra, unread tap makes XLA keep the weights as an array; otherwise it recomputes
        # their softmax for every element of the result.
        weights = jnp.pad(weights[0, 0], ((0, 1), (0, 0)))[None, None]
    if segment_ids is None and taps.count <= UNCOPIED_TAPS:
        read = functools.partial(_read_uncopied, taps, x, x.shape[1])
    else:
        read = Reader(taps, x, segment_ids, filler=filler)
    return reference.sum_read_rows(taps, x, weights, segment_ids, read, total)


def _read_uncopied(taps: Taps, x, length: int, tap: int):
    first = taps.offsets[tap]
    return rows_between(x, first, first + length)


def transposed_sum(taps: Taps, dy, weights, segment_ids):
    """Returns `reference.transposed_sum`, without a padded copy of the weights."""
    if weights.size <= dy.size:
        return reference.transposed_sum(taps, dy, weights, segment_ids)
    # With one kernel per channel the padded copy would be the largest array by far. Rows outside
    # are repeated instead of zero, because the rows of dy that meet them are zero.
    mirrored, length = taps.mirrored(), dy.shape[1]
    rows = jnp.arange(length)

    def shifted_weight(tap):
        return weights[:, jnp.clip(rows + mirrored.offsets[tap], 0, length - 1), -1 - tap]

    read = Reader(mirrored, dy, segment_ids)
    return reference.transpose_read_rows(taps, dy, weights, segment_ids, read, shifted_weight)


def static_weight_gradient(taps: Taps, x, dy, segment_ids):
    """Returns `reference.static_weight_gradient`, by partial sums over chunks of rows."""
    wide = wide_dtype(x, dy)
    hidden = hide_padding(dy, segment_ids)
    # XLA:CPU sums over rows one channel at a time, with strided reads. Sums of slices it computes
    # for neighbouring channels at once, which leaves few partial sums to add.
    batch, length, embed = x.shape
    # One example at a time stays in cache. When devices share the batch, none holds every example.
    at_once = 1 if dispatch.devices() is None else batch
    most = max(1, PARTIAL_SUM_ELEMENTS // (at_once * embed))
    fewest = -(-length // (most * PARTIAL_SUM_TERMS))
    # Odd, so that the rows of a partial sum are not a power of two apart, as those of x are.
    slots = -(-length // (fewest * PARTIAL_SUM_TERMS)) | 1
    terms = min(PARTIAL_SUM_TERMS, length)
    rows = slots * terms
    chunks = -(-length // rows)
    behind = max(0, rows - length)
    filler = _filler(x, slots, 2 * terms)
    read = Reader(taps, x, segment_ids, behind=behind, filler=filler)
    dys = rows_between(hidden, 0, length + behind, filler=filler)

    def body(i, sums):
        example = None if at_once > 1 else i // chunks
        first = i % chunks * rows
        # The last chunk may overlap the one before it; rows are counted once.
        start = jnp.minimum(first, length + behind - rows)
        seen = read.piece(start, rows, example)
        part = piece(dys, start, rows, example).astype(wide)
        if chunks > 1:
            part = jnp.where(jnp.arange(rows)[:, None] >= first - start, part, 0)

        def total(tap, partial):
            products = (
                seen(tap, start, slots).astype(wide) * part[:, start : start + slots, :embed]
                for start in range(0, rows, slots)
            )
            return functools.reduce(jnp.add, products, partial)

        # A list, not one array: joining the parts would write everything once more.
        return [total(tap, partial) for tap, partial in enumerate(sums)]

    sums = vary_like(x, [jnp.zeros((at_once, slots, embed), wide)] * taps.count)
    sums = lax.fori_loop(0, batch // at_once * chunks, body, sums)
    return jnp.stack([jnp.sum(partial, axis=(0, 1)) for partial in sums])


def dynamic_weight_gradient(taps: Taps, x, dy, segment_ids, num_kernels):
    """Computes what `reference.dynamic_weight_gradient` does, in the fastest formulation."""
    gradient = _fastest(taps, x.shape[1], x.shape[2] // num_kernels)
    return gradient(taps, x, dy, segment_ids, num_kernels)


def chunked_weight_gradient(taps: Taps, x, dy, segment_ids, num_kernels):
    """Returns `dynamic_weight_gradient`, one chunk of rows at a time."""
    batch, length, _ = x.shape
    wide = wide_dtype(x, dy)
    hidden, read = hide_padding(dy, segment_ids), Reader(taps, x, segment_ids)
    rows = _chunk_rows(x)

    def body(i, filled):
        # The last chunk may overlap the one before it; it writes the same numbers again.
        start = jnp.minimum(i * rows, length - rows)
        part = chunk(hidden, start, rows)
        part = reference.chunk_weight_gradient(taps, read, part, wide, num_kernels, start)
        return lax.dynamic_update_slice_in_dim(filled, part, start, axis=1)

    empty = vary_like(x, jnp.zeros((batch, length, taps.count, num_kernels), wide))
    return lax.fori_loop(0, -(-length // rows), body, empty)


def banded_weight_gradient(taps: Taps, x, dy, segment_ids, num_kernels):
    """Returns `dynamic_weight_gradient` by matrix products of blocks of rows.

    No tap may reach further than the row is long. R rows of dy times the R + K - 1 rows of x that
    they read give a matrix whose K diagonals are the result. A dilation of d makes d interleaved
    sequences with adjacent taps.
    """
    batch, length, embed = x.shape
    count, phases = taps.count, taps.dilation
    rows = min(BAND_ROWS, -(-length // phases))
    window = rows + count - 1
    blocks = -(-length // (rows * phases))
    after = blocks * rows * phases - length
    wide = wide_dtype(x, dy)

    def phased(a, before, after):
        # batch rows phases kernels group
        a = jnp.pad(a.astype(wide), ((0, 0), (before, after), (0, 0)))
        return a.reshape(batch, -1, phases, num_kernels, embed // num_kernels)

    x_rows = phased(hide_padding(x, segment_ids), taps.left, taps.right + after)
    y_rows = phased(hide_padding(dy, segment_ids), 0, after)

    def body(i, filled):
        product = jnp.einsum(
            "brphg,bwphg->bphrw",
            chunk(y_rows, i * rows, rows),
            chunk(x_rows, i * rows, window),
            precision=lax.Precision.HIGHEST,
        )
        # Rows one element longer than those of the matrix turn its diagonals into columns.
        flat = product.reshape(*product.shape[:3], rows * window)
        flat = jnp.pad(flat, ((0, 0), (0, 0), (0, 0), (0, rows)))
        diagonals = flat.reshape(*product.shape[:3], rows, window + 1)[..., :count]
        return lax.dynamic_update_slice_in_dim(
            filled, jnp.moveaxis(diagonals, (3, 4), (1, 3)), i * rows, axis=1
        )

    empty = vary_like(x, jnp.zeros((batch, blocks * rows, phases, count, num_kernels), wide))
    filled = lax.fori_loop(0, blocks, body, empty)
    gradient = filled.reshape(batch, blocks * rows * phases, count, num_kernels)[:, :length]
    if segment_ids is None or taps.cross_segments:
        return gradient
    padded = rows_between(segment_ids, -taps.left, length + taps.right)
    same = [padded[:, j * phases : j * phases + length] == segment_ids for j in range(count)]
    return jnp.where(jnp.stack(same, axis=-1)[..., None], gradient, 0)


def _fastest(taps: Taps, length: int, group: int) -> Callable[..., Any]:
    """Returns the fastest formulation, by `python -m convt5.bench --suites=formulations`.

    Args:
        taps: the geometry.
        length: number of rows.
        group: channels of each kernel.
    """
    fits = taps.left + taps.right <= length
    if fits and taps.count >= _band_min_taps(taps.dilation, group):
        return banded_weight_gradient
    # With one channel per kernel, products need no sum; a few of them fuse better than chunks do.
    are_few = taps.count <= 3 or (group <= 32 and length <= 512)
    return reference.dynamic_weight_gradient if group == 1 or are_few else chunked_weight_gradient


def _band_min_taps(dilation: int, group: int) -> int:
    """Returns the number of taps from which a banded product saves more than it wastes."""
    if group == 1:
        return 8  # One channel per kernel: nothing to sum over.
    if group <= 8:
        return 5
    return 8 if group >= 64 and dilation > 1 else 7


FORMULATION = reference.Formulation(
    weighted_sum, transposed_sum, static_weight_gradient, dynamic_weight_gradient
)

backward = FORMULATION.backward


def _filler(x, stride: int, count: int) -> int:
    """Returns the number of padding channels to put after each row of x, or 0.

    A loop reads `count` rows, `stride` rows apart. Rows a multiple of `CACHE_SET_BYTES` apart share
    a set of the cache, which holds `CACHE_WAYS` lines. With more rows than that, none is still in
    the cache when the loop reaches the next channels.
    """
    size = x.dtype.itemsize
    example_bytes = math.prod(x.shape[1:]) * size  # Without the batch, which may be symbolic.
    if dispatch.devices() is not None or example_bytes <= CACHE_WAYS * CACHE_SET_BYTES:
        return 0

    def collide(row_bytes: int) -> bool:
        sets = CACHE_SET_BYTES // math.gcd(stride * row_bytes, CACHE_SET_BYTES)
        return count > CACHE_WAYS * sets

    row_bytes = x.shape[-1] * size
    if not collide(row_bytes) or collide(row_bytes + CACHE_LINE_BYTES):
        return 0
    return CACHE_LINE_BYTES // size


def _chunk_rows(x) -> int:
    batch, length, embed = x.shape
    return min(length, max(8, CHUNK_ELEMENTS // (batch * embed)))
