"""Depthwise convolution with about as many taps as a row is long, in O(L log^2 L) operations.

Taps of short distances are summed directly, as in `depthwise_conv`. For longer ones the row is
halved recursively: an input reaches an output in the other half of the smallest part that contains
both. Within a part, only the segment across its middle passes from one half to the other, so masks
of inputs and outputs keep any number of packed segments exactly apart. No sum includes an input
that follows a causal output, so not even rounding depends on the future. The transfer between
halves is a Fourier transform, padded so that nothing wraps around: an FFT on CPU and GPU, matrix
products elsewhere, because XLA's FFT is slow on TPU. Used by the mixing kind `long`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from convt5.ops import dispatch
from convt5.ops.convolution.checks import checked_depthwise
from convt5.ops.convolution.operators import depthwise_conv
from convt5.ops.explicit import partitioned
from convt5.ops.geometry import Padding
from convt5.ops.varying import vary_alike

SUMMED_TAPS = 32
"""Most distances that CPU and GPU sum tap by tap: about the cost of two FFTs."""

TPU_SUMMED_TAPS = 128
"""Most distances that TPU sums tap by tap; its kernels pass over memory once for all taps."""

TPU_TRANSFORM = 512
"""Most positions that TPU transforms by one matrix product."""


class Method(NamedTuple):
    """The parameters of the algorithm on one platform.

    Attributes:
        block: most distances, from 0, that are summed tap by tap.
        across: returns the contribution of first halves [batch, parts, half, embed] to second
            halves of that shape, for taps [2 * half, embed] that are zero below the block.
    """

    block: int
    across: Callable[[Array, Array], Array]


@partitioned(3)
def long_conv(
    x: Float[Array, "batch length embed"],
    kernel: Float[Array, "taps embed"],
    *,
    padding: Padding = "CENTERED",
    segment_ids: Int[Array, "batch length"] | None = None,
    taps_cross_segments: bool = False,
) -> Float[Array, "batch length embed"]:
    """Returns `depthwise_conv(x, kernel, ...)`, faster for hundreds of taps or more.

    Sums are computed in at least float32. On TPU, operands and results of the transforms have the
    dtype of `x`: sums in float32 would access half as much memory again. The backward pass keeps
    `x` and `kernel`.

    Args:
        x, kernel, padding: as in `depthwise_conv`; taps beyond the row read nothing.
        segment_ids: as in `depthwise_conv`, but an example is a run of equal ids: an id that occurs
            in two runs of a row is two examples. Padding inside a run belongs to it.
        taps_cross_segments: as in `depthwise_conv`.

    Raises:
        ValueError: as in `depthwise_conv`.
    """
    crosses = taps_cross_segments
    taps, segment_ids = checked_depthwise(x, kernel, segment_ids, 1, padding, crosses)
    if x.size == 0:
        return jnp.zeros_like(x)
    if segment_ids is not None:
        if taps.cross_segments:
            segment_ids = (segment_ids != 0).astype(jnp.int32)
        segment_ids = _numbered_runs(segment_ids)
    return _long_conv(taps.left, *vary_alike(x, kernel, segment_ids))


def _run(left: int, *arrays):
    products, transforms = (functools.partial(_convolve, how, left) for how in (_PRODUCTS, _FFT))
    return dispatch.run(dispatch.Table(products, cpu=transforms, gpu=transforms), *arrays)


def _forward(left: int, *arrays):
    def compute(x, kernel, segment_ids):
        # Not `_run` alone, whose operators have no forward-mode derivative.
        return jax.vjp(lambda *both: _run(left, *both, segment_ids), x, kernel)[0]

    return dispatch.one_operation(compute, *arrays), arrays


def _backward(left: int, arrays, dy):
    x, kernel, segment_ids = arrays
    pull_back = jax.vjp(lambda *both: _run(left, *both, segment_ids), x, kernel)[1]
    return *pull_back(dy), None


_long_conv = dispatch.differentiable(1, _run, forward=_forward, backward=_backward)


def cut(length: int, most: int) -> tuple[int, int]:
    """Returns the size, at most `most`, and the number, a power of two, of the smallest parts."""
    count = 1
    while -(-length // count) > most:
        count *= 2
    return -(-length // count), count


def flops(length: int, *, sides: int) -> float:
    """Returns the FLOPs per channel of a row of this length with taps for all of it, by FFT.

    Counts two for each multiply-add of a tap, 5/2 N log2 N for a real transform of N positions
    (including that of the taps, which all rows share) and six for each complex product.

    Args:
        length: positions of the row.
        sides: 1 for causal taps, 2 for taps on both sides.
    """
    block, count = cut(length, SUMMED_TAPS)
    total = 2.0 * length * (sides * (block - 1) + 1)
    half = block
    while half < block * count:
        parts = block * count // (2 * half)
        transform = 5 * half * np.log2(2 * half)
        total += sides * ((2 * parts + 1) * transform + 6 * parts * (half + 1))
        half *= 2
    return total


def _numbered_runs(ids):
    """Numbers the runs of equal ids in a row from 1; padding gets 0."""
    places = jnp.where(ids != 0, jnp.arange(ids.shape[1]), -1)
    latest = lax.cummax(places, axis=1)
    held = jnp.take_along_axis(ids, jnp.maximum(latest, 0), axis=1)
    begins = jnp.diff(held, axis=1, prepend=0) != 0
    return jnp.where(ids != 0, jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)


def _convolve(method: Method, left: int, x, kernel, ids):
    block, count = cut(x.shape[1], method.block)
    first, last = max(0, left - block + 1), min(kernel.shape[0], left + block)
    near = depthwise_conv(
        x, kernel[first:last], padding=(left - first, last - left - 1), segment_ids=ids
    )
    size, length = block * count, x.shape[1]
    beside = (0, 0), (0, size - length)
    rows = jnp.pad(_real(x, ids), (*beside, (0, 0)))
    # Padding inside a run belongs to it.
    runs = None if ids is None else jnp.pad(lax.cummax(ids, axis=1), beside)
    y = near.astype(jnp.promote_types(x.dtype, jnp.float32))
    if count > 1 and left >= block:
        behind = _far_taps(block, size, kernel[left::-1])
        y += _real(_onward(method, block, rows, behind, runs)[:, :length], ids)
    if count > 1 and kernel.shape[0] - left > block:
        ahead = _far_taps(block, size, kernel[left:])
        turned = None if runs is None else runs[:, ::-1]
        far = _onward(method, block, rows[:, ::-1], ahead, turned)[:, ::-1]
        y += _real(far[:, :length], ids)
    return y.astype(x.dtype)


def _real(x, ids):
    """Returns x with zeros at padding."""
    return x if ids is None else jnp.where((ids != 0)[..., None], x, jnp.zeros((), x.dtype))


def _far_taps(block: int, size: int, taps):
    """Returns the taps of distances 0 to size - 1, with zeros below `block`."""
    taps = jnp.pad(taps[:size], ((0, max(0, size - taps.shape[0])), (0, 0)))
    return jnp.where(jnp.arange(size)[:, None] < block, jnp.zeros((), taps.dtype), taps)


def _onward(method: Method, block: int, x, taps, runs):
    """Returns the sums over inputs of earlier blocks, accumulated over parts of every size."""
    batch, size, embed = x.shape
    total, half = jnp.zeros_like(x), block
    while half < size:
        parts = size // (2 * half)
        sent = x.reshape(batch, parts, 2, half, embed)[:, :, 0]
        if runs is not None:
            first, second = jnp.moveaxis(runs.reshape(batch, parts, 2, half), 2, 0)
            sends = (first == first[..., -1:]) & (first[..., -1:] == second[..., :1])
            sent = jnp.where(sends[..., None], sent, jnp.zeros((), sent.dtype))
        received = method.across(sent, taps[: 2 * half])
        if runs is not None:
            reads = second == second[..., :1]
            received = jnp.where(reads[..., None], received, jnp.zeros((), received.dtype))
        beside = jnp.zeros_like(received)
        total = total + jnp.stack([beside, received], axis=2).reshape(batch, size, embed)
        half *= 2
    return total


def _across_by_fft(x, taps):
    half, dtype = x.shape[2], jnp.promote_types(x.dtype, jnp.float32)
    spectra = jnp.fft.rfft(x.astype(dtype), 2 * half, axis=2)
    spectra *= jnp.fft.rfft(taps.astype(dtype), axis=0)[None, None]
    return jnp.fft.irfft(spectra, 2 * half, axis=2)[:, :, half:]


def _across_by_products(x, taps):
    """Transforms long halves in blocks, which bounds the size of the matrix products.

    The frequencies are those of an FFT of 2 * block positions shifted by 1/2. Terms that wrap
    around (here none do) would change sign. There are as many real frequencies as positions of a
    block.
    """
    batch, parts, half, embed = x.shape
    block = half
    while block > TPU_TRANSFORM:
        block //= 2
    count = half // block
    angles = np.outer(np.arange(block) + 0.5, np.arange(2 * block)) * (np.pi / block)
    waves = np.concatenate([np.cos(angles), -np.sin(angles)])
    product = functools.partial(_product, dtype=x.dtype)
    windows = taps.reshape(2 * count, block, embed)
    windows = jnp.concatenate([windows[:-1], windows[1:]], axis=1)
    # The axis of positions is now that of frequencies: real parts, then imaginary parts.
    spectra = product("fn,wnd->wfd", waves, windows)
    sent = product(
        "fn,bpcnd->bpcfd", waves[:, :block], x.reshape(batch, parts, count, block, embed)
    )
    if count > 1:  # Sums over blocks, here and in the backward pass.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        sent, spectra = sent.astype(wide), spectra.astype(wide)
    real, imaginary = 0.0, 0.0
    for sender in range(count):
        # Windows that lead from this block to each block of the other half, in order.
        window = spectra[None, None, count - 1 - sender : 2 * count - 1 - sender]
        a, b = sent[:, :, sender, None, :block], sent[:, :, sender, None, block:]
        c, d = window[..., :block, :], window[..., block:, :]
        real, imaginary = real + (a * c - b * d), imaginary + (a * d + b * c)
    both = jnp.concatenate([real, imaginary], axis=3)
    y = product("nf,bpcfd->bpcnd", waves[:, block:].T / block, both)
    return y.reshape(x.shape)


def _product(axes: str, waves: np.ndarray, x, *, dtype):
    """Multiplies by constants in the dtype of the rows, and sums in at least float32."""
    y = jnp.einsum(
        axes,
        jnp.asarray(waves, dtype),
        x.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    return y.astype(dtype)


_FFT = Method(SUMMED_TAPS, _across_by_fft)
_PRODUCTS = Method(TPU_SUMMED_TAPS, _across_by_products)
