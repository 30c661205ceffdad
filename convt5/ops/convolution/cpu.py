"""The convolutions on CPUs: sums in the order that XLA:CPU computes fastest.

XLA:CPU reduces over rows well only while a chunk of rows stays in its cache. Chunks, banded matrix
products and unused channels between rows that share sets of the cache keep it there.
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
"""Elements of x in one chunk: 128 KiB of float32, well inside a second-level cache."""

PARTIAL_SUM_ELEMENTS = 2**13
"""Elements of each partial sum over rows, which are all channels of some of the rows."""

PARTIAL_SUM_TERMS = 16
"""Products that are added to a partial sum at once: more are little faster, and take longer to
compile; of fewer, XLA:CPU computes the place of the chunk again at every element."""

UNCOPIED_TAPS = 3
"""Up to this many taps read x itself, not a copy padded with zeros.

More taps, and those that compare segments, spend more on the ends of rows than the copy takes.
"""

CACHE_SET_BYTES = 2**12
"""Addresses this far apart share a set of a first-level cache."""

CACHE_WAYS = 8
"""Lines that a set holds."""

CACHE_LINE_BYTES = 2**6

BAND_ROWS = 32
"""Output rows of one banded matrix product."""


def forward(taps: Taps, softmax: bool, segment_ids, x, weights, *, rate=0.0, key=None):
    """Returns `reference.forward`."""
    if weights.ndim == 2 or not softmax or reference.drops(rate, key):
        return reference.forward(
            taps, softmax, segment_ids, x, weights, rate=rate, key=key, sums=SUMS
        )
    # Divided last: XLA:CPU would divide the weights again for every channel.
    powers, total = reference.tap_powers(weights.astype(wide_dtype(weights)))
    return weighted_sum(taps, x, powers, segment_ids, total)


def weighted_sum(taps: Taps, x, weights, segment_ids, total=None):
    """Returns `reference.weighted_sum`, divided by `total` [batch, length, 1, heads] if given."""
    if dispatch.devices() is not None:
        return reference.sum_read_rows(
            taps, x, weights, segment_ids, Reader(taps, x, segment_ids), total
        )
    same_everywhere = weights.shape[:2] == (1, 1)
    # Weights that are the same everywhere are read as rows too.
    filler = _filler(x, taps.dilation, taps.count * (2 if same_everywhere else 1))
    if same_everywhere:
        # With a tap that nobody reads they are an array of their own; otherwise XLA computes their
        # softmax again for every element of the result.
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
    """Returns `reference.transposed_sum`, without a padded copy of many weights."""
    if weights.size <= dy.size:
        return reference.transposed_sum(taps, dy, weights, segment_ids)
    # With kernels for single channels the copy would be the largest array by far. Rows outside are
    # repeated instead of zero: the rows of dy that meet them are zero.
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
    # XLA:CPU sums over rows one channel at a time, with strides between its reads. Sums of
    # slices it computes for neighbouring channels at once; few sums are then left to take.
    batch, length, embed = x.shape
    # One example at a time stays in cache; of several devices, none holds them all.
    at_once = 1 if dispatch.devices() is None else batch
    most = max(1, PARTIAL_SUM_ELEMENTS // (at_once * embed))
    fewest = -(-length // (most * PARTIAL_SUM_TERMS))
    # Odd, so that the rows of a sum are no power of two apart, where those of x are.
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
        # The last chunk may overlap the one before it, whose rows are not counted again.
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

        # Not one array, which would be written once more to put its parts together.
        return [total(tap, partial) for tap, partial in enumerate(sums)]

    sums = vary_like(x, [jnp.zeros((at_once, slots, embed), wide)] * taps.count)
    sums = lax.fori_loop(0, batch // at_once * chunks, body, sums)
    return jnp.stack([jnp.sum(partial, axis=(0, 1)) for partial in sums])


def dynamic_weight_gradient(taps: Taps, x, dy, segment_ids, heads):
    """Returns `reference.dynamic_weight_gradient`."""
    gradient = _fastest(taps, x.shape[1], x.shape[2] // heads)
    return gradient(taps, x, dy, segment_ids, heads)


def chunked_weight_gradient(taps: Taps, x, dy, segment_ids, heads):
    """Returns `dynamic_weight_gradient`, one chunk of rows after the other."""
    batch, length, _ = x.shape
    wide = wide_dtype(x, dy)
    hidden, read = hide_padding(dy, segment_ids), Reader(taps, x, segment_ids)
    rows = _chunk_rows(x)

    def body(i, filled):
        # The last chunk may overlap the one before it, and writes the same numbers again.
        start = jnp.minimum(i * rows, length - rows)
        part = chunk(hidden, start, rows)
        part = reference.chunk_weight_gradient(taps, read, part, wide, heads, start)
        return lax.dynamic_update_slice_in_dim(filled, part, start, axis=1)

    empty = vary_like(x, jnp.zeros((batch, length, taps.count, heads), wide))
    return lax.fori_loop(0, -(-length // rows), body, empty)


def banded_weight_gradient(taps: Taps, x, dy, segment_ids, heads):
    """Returns `dynamic_weight_gradient` by matrix products of blocks of rows.

    Taps may not reach further than the row is long. A block of R rows of dy times the R + K - 1
    rows of x that it reads gives a matrix whose K diagonals are the result. A dilation d is d
    interleaved sequences of adjacent taps.
    """
    batch, length, embed = x.shape
    count, phases = taps.count, taps.dilation
    rows = min(BAND_ROWS, -(-length // phases))
    window = rows + count - 1
    blocks = -(-length // (rows * phases))
    after = blocks * rows * phases - length
    wide = wide_dtype(x, dy)

    def phased(a, before, after):
        # batch rows phases heads group
        a = jnp.pad(a.astype(wide), ((0, 0), (before, after), (0, 0)))
        return a.reshape(batch, -1, phases, heads, embed // heads)

    x_rows = phased(hide_padding(x, segment_ids), taps.left, taps.right + after)
    y_rows = phased(hide_padding(dy, segment_ids), 0, after)

    def body(i, filled):
        product = jnp.einsum(
            "brphg,bwphg->bphrw",
            chunk(y_rows, i * rows, rows),
            chunk(x_rows, i * rows, window),
            precision=lax.Precision.HIGHEST,
        )
        # Rows one longer than the matrix's turn its diagonals into columns.
        flat = product.reshape(*product.shape[:3], rows * window)
        flat = jnp.pad(flat, ((0, 0), (0, 0), (0, 0), (0, rows)))
        diagonals = flat.reshape(*product.shape[:3], rows, window + 1)[..., :count]
        return lax.dynamic_update_slice_in_dim(
            filled, jnp.moveaxis(diagonals, (3, 4), (1, 3)), i * rows, axis=1
        )

    empty = vary_like(x, jnp.zeros((batch, blocks * rows, phases, count, heads), wide))
    filled = lax.fori_loop(0, blocks, body, empty)
    gradient = filled.reshape(batch, blocks * rows * phases, count, heads)[:, :length]
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
    # Where nothing is summed products are the result; few of them are made faster than cut apart.
    are_few = taps.count <= 3 or (group <= 32 and length <= 512)
    return reference.dynamic_weight_gradient if group == 1 or are_few else chunked_weight_gradient


def _band_min_taps(dilation: int, group: int) -> int:
    """Returns the taps below which a banded product computes more than it saves."""
    if group == 1:
        return 8  # Its products are summed over nothing.
    if group <= 8:
        return 5
    return 8 if group >= 64 and dilation > 1 else 7


SUMS = reference.Sums(weighted_sum, transposed_sum, static_weight_gradient, dynamic_weight_gradient)

backward = functools.partial(reference.backward, sums=SUMS)
"""Returns `reference.backward`."""


def _filler(x, stride: int, count: int) -> int:
    """Returns how many unused channels to put after each row of x, or 0.

    A loop reads `count` rows, `stride` rows apart. Rows a multiple of `CACHE_SET_BYTES` apart share
    a set of the cache, which keeps `CACHE_WAYS` lines: with more rows than that, none is left in
    cache when the loop comes to the next channels.
    """
    size = x.dtype.itemsize
    example_bytes = math.prod(x.shape[1:]) * size  # Programs may be for any batch.
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
