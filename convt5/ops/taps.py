"""Sums over the shifted rows of a sequence, and their transposes; the arithmetic of `convolution`.

Every sum runs over all taps in one order, whatever the length of the row and wherever a segment
lies in it: terms that read nothing are zeros, never left out. That keeps a packed example equal to
the example alone, bit for bit. The gradients of weights, which sum over positions, choose their
formulation by platform: XLA:CPU reduces well only while a chunk of rows stays in its cache, and XLA
on GPU would write the products of each tap before it sums them.
"""

import contextlib
import contextvars
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from convt5.ops import implementation
from convt5.ops.varying import vary_like

CHUNK_ELEMENTS = 2**15
"""Elements of x in one chunk on CPU: 128 KiB of float32, well inside a second-level cache."""

PARTIAL_SUM_ELEMENTS = 2**13
"""Elements of each partial sum over rows on CPU, which are all channels of some of the rows."""

PARTIAL_SUM_TERMS = 16
"""Products that are added to a partial sum at once: more are little faster, and take longer to
compile; of fewer, XLA:CPU computes the place of the chunk again at every element."""

UNCOPIED_TAPS = 3
"""Up to so many taps read x itself on CPU, not a copy with zeros around: more would have more to do
with the ends of rows than the copy takes, and so have those that look at segments."""

CACHE_SET_BYTES = 2**12
"""Addresses so far apart share a set of a first-level cache on CPU."""

CACHE_WAYS = 8
"""Lines that a set holds."""

CACHE_LINE_BYTES = 2**6

BAND_ROWS = 32
"""Output rows of one banded matrix product on CPU."""

STAGED_ROWS = 128
"""Rows of each partial sum on GPU: the fewer, the more bytes are partial sums."""

Formulation = Literal["whole", "staged", "chunked", "banded"]
"""How the gradient of weights is computed: of all rows at once, by partial sums of which all are
computed together, chunk by chunk, or by products of blocks of rows."""

Formulations = Mapping[Formulation, Callable[[], Any]]

_forced: contextvars.ContextVar[Formulation | None] = contextvars.ContextVar("forced", default=None)


@contextlib.contextmanager
def computed(formulation: Formulation) -> Iterator[None]:
    """Sets the formulation of what is traced inside, to compare it with the one chosen."""
    token = _forced.set(formulation)
    try:
        yield
    finally:
        _forced.reset(token)


@dataclasses.dataclass(frozen=True)
class Taps:
    """Where the taps lie: tap j of output i reads row i + j * dilation - left.

    Attributes:
        count: taps.
        dilation: rows between neighbouring taps.
        left, right: rows read on each side of the output, (count - 1) * dilation together.
        cross_segments: whether taps read other segments of the row.
    """

    count: int
    dilation: int
    left: int
    right: int
    cross_segments: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(j * self.dilation - self.left for j in range(self.count))

    def mirrored(self) -> "Taps":
        return dataclasses.replace(self, left=self.right, right=self.left)


@jax.custom_vjp
def tap_softmax(logits):
    """Returns the softmax over the taps, the axis before the last.

    Maximum and sum are written out tap by tap: XLA:CPU takes those of an axis in an order that
    depends on the length of the row, so that `jax.nn.softmax` differs in the last bit between
    packed and separate examples.
    """
    return plain_tap_softmax(logits)


def plain_tap_softmax(logits):
    """Returns `tap_softmax` without a gradient of its own, for the forward passes of operators that
    have theirs: it can be differentiated in either direction."""
    powers, total = tap_powers(logits)
    return powers / total


def tap_powers(logits):
    """Returns the powers of e whose shares of their sum are the softmax, and that sum."""
    powers = jnp.exp(logits - _over_taps(jnp.maximum, logits))
    return powers, _over_taps(jnp.add, powers)


def _over_taps(operation, values):
    """Combines the taps in order, and keeps their axis with size one."""
    count = values.shape[-2]
    return functools.reduce(operation, (values[..., j : j + 1, :] for j in range(count)))


def _softmax_forward(logits):
    weights = plain_tap_softmax(logits)
    return weights, weights


def _softmax_backward(weights, cotangent):
    products = weights * cotangent
    return (products - weights * _over_taps(jnp.add, products),)


tap_softmax.defvjp(_softmax_forward, _softmax_backward)


def weighted_sum(where: Taps, x, weights, segment_ids, total=None):
    """Returns sum_j weights[i, j, h] x[i + offset j, c] with h the kernel of channel c.

    Args:
        where: the taps.
        x: [batch, length, embed].
        weights: [batch, length, kernel, heads]; batch and length may be 1.
        segment_ids: [batch, length] or None.
        total: [batch, length, 1, heads], by which the sum is divided, or None.
    """
    heads = weights.shape[-1]
    wide = wide_dtype(x, weights)

    def summed(weights, read):
        y = jnp.zeros(split_heads(x, heads).shape, wide)
        for tap in range(where.count):
            shifted = split_heads(read(tap).astype(wide), heads)
            y = y + weights[:, :, tap, :, None].astype(wide) * shifted
        if total is not None:
            y = y * (1 / total[:, :, 0, :, None].astype(wide))
        return hide_padding(y.reshape(x.shape).astype(x.dtype), segment_ids)

    def usual():
        return summed(weights, Reader(where, x, segment_ids))

    same_everywhere = weights.shape[:2] == (1, 1)
    length = x.shape[1]
    uncopied = segment_ids is None and where.count <= UNCOPIED_TAPS
    # Weights that are the same everywhere are read as rows too.
    filler = _filler(x, where.dilation, where.count * (2 if same_everywhere else 1))

    def on_cpu():
        rows = weights
        if same_everywhere:
            # With a tap that nobody reads they are an array of their own; otherwise XLA computes
            # their softmax again for every element of the result.
            rows = jnp.pad(weights[0, 0], ((0, 1), (0, 0)))[None, None]
        if uncopied:
            return summed(rows, lambda tap: rows_between(x, o := where.offsets[tap], o + length))
        return summed(rows, Reader(where, x, segment_ids, filler=filler))

    if implementation.devices() is not None or not (same_everywhere or uncopied or filler):
        return usual()
    return implementation.by_platform(usual, cpu=on_cpu)


def transposed_sum(where: Taps, cotangent, weights, segment_ids):
    """Returns the gradient of `weighted_sum` in x, for weights that differ between positions.

    Row i collects weights[s, j] * cotangent[s] from the rows s = i - offset j that read it.
    """
    length, heads = cotangent.shape[1], weights.shape[-1]
    wide = wide_dtype(cotangent, weights)
    mirrored = where.mirrored()
    read = Reader(mirrored, cotangent, segment_ids)

    def total(shifted_weight):
        dx = jnp.zeros(split_heads(cotangent, heads).shape, wide)
        for tap in range(where.count):
            weight = shifted_weight(tap)[..., None].astype(wide)
            dx = dx + weight * split_heads(read(tap).astype(wide), heads)
        dx = dx.reshape(cotangent.shape).astype(cotangent.dtype)
        return hide_padding(dx, segment_ids)

    def padded():
        around = rows_between(weights, -read.left, length + read.right)
        return total(lambda tap: around[:, read.starts[tap] :, -1 - tap][:, :length])

    def gathered():
        # Rows outside are repeated instead of zero: the cotangent that meets them is zero.
        rows = jnp.arange(length)
        return total(
            lambda tap: weights[:, jnp.clip(rows + mirrored.offsets[tap], 0, length - 1), -1 - tap]
        )

    if weights.size <= cotangent.size:
        return padded()
    # With kernels for single channels the copy would be the largest array in sight.
    return implementation.by_platform(padded, cpu=gathered)


def static_weight_gradient(where: Taps, x, cotangent, segment_ids):
    """Returns sum_i cotangent[i, c] x[i + offset j, c] over all rows, [kernel, embed]."""
    wide = wide_dtype(x, cotangent)
    hidden = hide_padding(cotangent, segment_ids)

    def whole():
        read = Reader(where, x, segment_ids)
        part = hidden.astype(wide)
        return jnp.stack(
            [jnp.sum(read(tap).astype(wide) * part, axis=(0, 1)) for tap in range(where.count)]
        )

    def staged():
        # XLA on GPU computes sums of one array of all taps in one pass, where rows are few.
        batch, length, embed = x.shape
        rows = min(STAGED_ROWS, length)
        behind = -length % rows
        read = Reader(where, x, segment_ids, behind=behind)
        seen = jnp.stack([read(tap, 0, length + behind) for tap in range(where.count)])
        part = rows_between(hidden, 0, length + behind).astype(wide)
        products = seen.astype(wide) * part[None]
        parts = products.reshape(where.count, batch, -1, rows, embed).sum(axis=3)
        return lax.optimization_barrier(parts).sum(axis=(1, 2))

    def chunked():
        # XLA:CPU sums over rows one channel at a time, with strides between its reads. Sums of
        # slices it computes for neighbouring channels at once; few sums are then left to take.
        batch, length, embed = x.shape
        # One example at a time stays in cache; of several devices, none holds them all.
        at_once = 1 if implementation.devices() is None else batch
        most = max(1, PARTIAL_SUM_ELEMENTS // (at_once * embed))
        fewest = -(-length // (most * PARTIAL_SUM_TERMS))
        # Odd, so that the rows of a sum are no power of two apart, where those of x are.
        slots = -(-length // (fewest * PARTIAL_SUM_TERMS)) | 1
        terms = min(PARTIAL_SUM_TERMS, length)
        rows = slots * terms
        chunks = -(-length // rows)
        behind = max(0, rows - length)
        filler = _filler(x, slots, 2 * terms)
        read = Reader(where, x, segment_ids, behind=behind, filler=filler)
        cotangents = rows_between(hidden, 0, length + behind, filler=filler)

        def body(i, sums):
            example = None if at_once > 1 else i // chunks
            first = i % chunks * rows
            # The last chunk may overlap the one before it, whose rows are not counted again.
            start = jnp.minimum(first, length + behind - rows)
            seen = read.piece(start, rows, example)
            part = _piece(cotangents, start, rows, example).astype(wide)
            if chunks > 1:
                part = jnp.where(jnp.arange(rows)[:, None] >= first - start, part, 0)

            def total(tap, found):
                products = (
                    seen(tap, start, slots).astype(wide) * part[:, start : start + slots, :embed]
                    for start in range(0, rows, slots)
                )
                return functools.reduce(jnp.add, products, found)

            # Not one array, which would be written once more to put its parts together.
            return [total(tap, found) for tap, found in enumerate(sums)]

        sums = vary_like(x, [jnp.zeros((at_once, slots, embed), wide)] * where.count)
        sums = lax.fori_loop(0, batch // at_once * chunks, body, sums)
        return jnp.stack([jnp.sum(found, axis=(0, 1)) for found in sums])

    formulations: Formulations = {"chunked": chunked, "staged": staged, "whole": whole}
    return _by_platform(formulations, on_cpu="chunked", on_gpu="staged")


def dynamic_weight_gradient(where: Taps, x, cotangent, segment_ids, heads):
    """Returns the sum over the channels c of kernel h of cotangent[i, c] x[i + offset j, c].

    The result is [batch, length, kernel, heads].
    """
    batch, length, embed = x.shape
    wide = wide_dtype(x, cotangent)
    hidden = hide_padding(cotangent, segment_ids)
    read = Reader(where, x, segment_ids)

    def gradient(start, rows):
        part = _chunk(hidden, start, rows).astype(wide)
        return jnp.stack(
            [
                jnp.sum(split_heads(read(tap, start, rows).astype(wide) * part, heads), axis=-1)
                for tap in range(where.count)
            ],
            axis=2,
        )

    def chunked():
        rows = _chunk_rows(x)

        def body(i, filled):
            # The last chunk may overlap the one before it, and writes the same numbers again.
            start = jnp.minimum(i * rows, length - rows)
            return lax.dynamic_update_slice_in_dim(filled, gradient(start, rows), start, axis=1)

        empty = vary_like(x, jnp.zeros((batch, length, where.count, heads), wide))
        return lax.fori_loop(0, -(-length // rows), body, empty)

    formulations: Formulations = {
        "whole": functools.partial(gradient, 0, length),
        "chunked": chunked,
        "banded": functools.partial(_banded_products, where, x, hidden, segment_ids, heads),
    }
    return _by_platform(formulations, on_cpu=_dynamic_on_cpu(where, length, embed // heads))


def _dynamic_on_cpu(where: Taps, length: int, group: int) -> Formulation:
    """Returns what is fastest on CPU, by `python -m convt5.bench --suites=formulations`.

    Args:
        where: the taps.
        length: rows.
        group: channels of a kernel.
    """
    fits = where.left + where.right <= length
    if fits and where.count >= _band_min_taps(where.dilation, group):
        return "banded"
    # Where nothing is summed products are the result; few of them are made faster than cut apart.
    are_few = where.count <= 3 or (group <= 32 and length <= 512)
    return "whole" if group == 1 or are_few else "chunked"


def _band_min_taps(dilation: int, group: int) -> int:
    """Returns the taps below which a banded product computes more than it saves."""
    if group == 1:
        return 8  # Its products are summed over nothing.
    if group <= 8:
        return 5
    return 8 if group >= 64 and dilation > 1 else 7


def _by_platform(formulations: Formulations, *, on_cpu: Formulation, on_gpu: Formulation = "whole"):
    """Computes by the formulation that is forced, or by the one for the platform."""
    forced = _forced.get()
    if forced is not None:
        return formulations[forced]()
    cpu, gpu = (None if name == "whole" else formulations[name] for name in (on_cpu, on_gpu))
    return implementation.by_platform(formulations["whole"], cpu=cpu, gpu=gpu)


def _banded_products(where: Taps, x, cotangent, segment_ids, heads):
    """Computes `dynamic_weight_gradient` as matrix products of blocks of rows.

    A block of R rows of the cotangent times the R + K - 1 rows of x that it reads gives a matrix
    whose K diagonals are the result. A dilation d is d interleaved sequences of adjacent taps.
    """
    batch, length, embed = x.shape
    taps, phases = where.count, where.dilation
    rows = min(BAND_ROWS, -(-length // phases))
    window = rows + taps - 1
    blocks = -(-length // (rows * phases))
    after = blocks * rows * phases - length
    wide = wide_dtype(x, cotangent)

    def phased(a, before, after):
        # batch rows phases heads group
        a = jnp.pad(a.astype(wide), ((0, 0), (before, after), (0, 0)))
        return a.reshape(batch, -1, phases, heads, embed // heads)

    x_rows = phased(hide_padding(x, segment_ids), where.left, where.right + after)
    y_rows = phased(cotangent, 0, after)

    def body(i, filled):
        product = jnp.einsum(
            "brphg,bwphg->bphrw",
            _chunk(y_rows, i * rows, rows),
            _chunk(x_rows, i * rows, window),
            precision=lax.Precision.HIGHEST,
        )
        # Rows one longer than the matrix's turn its diagonals into columns.
        flat = product.reshape(*product.shape[:3], rows * window)
        flat = jnp.pad(flat, ((0, 0), (0, 0), (0, 0), (0, rows)))
        diagonals = flat.reshape(*product.shape[:3], rows, window + 1)[..., :taps]
        return lax.dynamic_update_slice_in_dim(
            filled, jnp.moveaxis(diagonals, (3, 4), (1, 3)), i * rows, axis=1
        )

    empty = vary_like(x, jnp.zeros((batch, blocks * rows, phases, taps, heads), wide))
    filled = lax.fori_loop(0, blocks, body, empty)
    gradient = filled.reshape(batch, blocks * rows * phases, taps, heads)[:, :length]
    if segment_ids is None or where.cross_segments:
        return gradient
    padded = rows_between(segment_ids, -where.left, length + where.right)
    same = [padded[:, j * phases : j * phases + length] == segment_ids for j in range(taps)]
    return jnp.where(jnp.stack(same, axis=-1)[..., None], gradient, 0)


class Reader:
    """Reads, for a tap, the row of x that each output row sees: zero where it sees nothing.

    Attributes:
        left, right: rows of zeros put before and after the row.
        starts: first row that each tap reads, counted in the padded row.

    Args:
        behind: output rows beyond the last that can be asked for too; they see zeros.
        filler: channels between rows in memory that nobody reads.
    """

    def __init__(self, where: Taps, x, segment_ids, *, behind: int = 0, filler: int = 0):
        length, self._embed = x.shape[1:]
        # Taps further away than the row is long read zeros wherever they are.
        self.left, self.right = min(where.left, length), min(where.right, length)
        self.starts = [self.left + max(-self.left, min(self.right, o)) for o in where.offsets]
        stop = length + self.right + behind
        hidden = hide_padding(x, segment_ids)
        self._padded = rows_between(hidden, -self.left, stop, filler=filler)
        self._length = length
        self._segment_ids = self._padded_ids = None
        if segment_ids is not None and not where.cross_segments:
            self._segment_ids = rows_between(segment_ids, 0, length + behind)
            self._padded_ids = rows_between(segment_ids, -self.left, stop)

    def __call__(self, tap: int, start=0, rows: int | None = None):
        """Returns what output rows start to start + rows see; `start` may be traced."""
        rows = self._length if rows is None else rows
        first = self.starts[tap] + start
        read = _chunk(self._padded, first, rows)[..., : self._embed]
        if self._segment_ids is None:
            return read
        theirs = _chunk(self._padded_ids, first, rows)
        ours = _chunk(self._segment_ids, start, rows)
        return jnp.where((theirs == ours)[..., None], read, 0)

    def piece(self, start, rows: int, example) -> "Reader":
        """Returns a reader of `rows` output rows of one example, or of all if that is None; the
        place may be traced."""
        own = copy.copy(self)
        own._length = rows
        wider = rows + self.left + self.right
        own._padded = _piece(self._padded, start, wider, example)
        if self._segment_ids is not None:
            own._segment_ids = _piece(self._segment_ids, start, rows, example)
            own._padded_ids = _piece(self._padded_ids, start, wider, example)
        return own


def hide_padding(x, segment_ids):
    """Returns [batch, length, embed] with zeros in segment 0, whatever was there."""
    return x if segment_ids is None else jnp.where((segment_ids != 0)[..., None], x, 0)


def _filler(x, stride: int, count: int) -> int:
    """Returns channels to be put between rows of x, if a loop that reads `count` of them, each
    `stride` rows after the other, would find none in cache when it comes to the next channels.

    Rows that are a multiple of `CACHE_SET_BYTES` apart share a set, which keeps `CACHE_WAYS` lines.
    """
    size = x.dtype.itemsize
    example_bytes = math.prod(x.shape[1:]) * size  # Programs may be for any batch.
    if implementation.devices() is not None or example_bytes <= CACHE_WAYS * CACHE_SET_BYTES:
        return 0

    def collide(row_bytes: int) -> bool:
        sets = CACHE_SET_BYTES // math.gcd(stride * row_bytes, CACHE_SET_BYTES)
        return count > CACHE_WAYS * sets

    row_bytes = x.shape[-1] * size
    if not collide(row_bytes) or collide(row_bytes + CACHE_LINE_BYTES):
        return 0
    return CACHE_LINE_BYTES // size


def rows_between(a, start: int, stop: int, *, filler: int = 0):
    """Returns rows start to stop of the second axis, with zeros outside the array.

    Args:
        filler: zeros to put behind each row, in the last axis.
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


def _chunk(a, start, rows: int):
    """Returns `rows` rows of the second axis from `start`, which may be traced."""
    if isinstance(start, int):
        return a[:, start : start + rows]
    return lax.dynamic_slice_in_dim(a, start, rows, axis=1)


def _piece(a, start, rows: int, example):
    """Returns `rows` rows from `start` of one example, [1, rows, ...], or of all if that is None;
    the place may be traced."""
    if example is None:
        return _chunk(a, start, rows)
    rest = (0,) * (a.ndim - 2)
    return lax.dynamic_slice(a, (example, start, *rest), (1, rows, *a.shape[2:]))


def split_heads(x, heads: int):
    """Gives the channels of each kernel an axis: [batch, length, heads, group]."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def wide_dtype(*arrays) -> jnp.dtype:
    return functools.reduce(jnp.promote_types, (a.dtype for a in arrays), jnp.float32)


def _chunk_rows(x) -> int:
    batch, length, embed = x.shape
    return min(length, max(8, CHUNK_ELEMENTS // (batch * embed)))
