"""Convolutions with rows split over devices: neighbours exchange the positions that taps reach.

A device that holds positions a to b needs the `Taps.left` positions before a and the `Taps.right`
positions after b: (K - 1) * dilation together, however long the row is. It receives this halo by
`ppermute`, convolves the widened piece alone, and drops the outputs outside its own piece. The
backward pass widens the inputs again, and returns the gradients of the halo to their owners. Used
where `dispatch.Devices.lengths` splits the rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from convt5.ops import dispatch
from convt5.ops.convolution.rows import wide_dtype
from convt5.ops.dispatch import Devices
from convt5.ops.geometry import Taps

Direction = Literal["forward", "backward"]
Convolve = Callable[..., Any]
"""Computes one direction on one device from segment ids (or None), x, weights and cotangents."""


def widen(a: jax.Array, devices: tuple[str, ...], count: int, left: int, right: int) -> jax.Array:
    """Returns this device's piece of a row with `left` positions before it and `right` after it.

    Positions outside the row are zero. A device sends at most `left + right` positions, one message
    to each neighbour that needs them. If pieces are longer than the reach, only the nearest do.

    Args:
        a: [batch, piece, ...], inside of `shard_map`.
        devices: mesh axes that split the row, in the order of its pieces.
        count: number of devices along these axes.
        left, right: positions to add on each side, at most (count - 1) * piece.
    """
    piece = a.shape[1]

    def borrowed(width: int, away: int):
        """Returns the `width` positions next to the piece, before (-1) or after (1) it."""
        parts = []
        for hop in range(1, math.ceil(width / piece) + 1):
            needed = min(piece, width - (hop - 1) * piece)
            sent = a[:, piece - needed :] if away < 0 else a[:, :needed]
            pairs = [(i, i - away * hop) for i in range(count) if 0 <= i - away * hop < count]
            # Devices without such a neighbour receive zeros.
            parts.append(lax.ppermute(sent, devices, pairs))
        return parts

    return jnp.concatenate([*reversed(borrowed(left, -1)), a, *borrowed(right, 1)], axis=1)


def convolve(
    direction: Direction, taps: Taps, devices: Devices, alone: Convolve, ids: Any, *arrays: Any
):
    """Returns the convolution of split rows, or its gradients.

    Args:
        direction: the convolution, or its gradients in x and in the weights.
        taps: the geometry.
        devices: the devices that hold the pieces.
        alone: computes the convolution on one device.
        ids: [batch, length] segment ids, or None.
        arrays: x [batch, length, embed]; weights, a kernel [taps, embed] or logits [batch,
            length, taps, kernels]; for gradients also the cotangent.

    Raises:
        ValueError: a length is not divisible by the number of devices that split it.
    """
    x, weights, *_ = arrays
    pieces, length = devices.count(devices.lengths), x.shape[1]
    if length % pieces:
        raise ValueError(
            f"length={length} must be a multiple of {pieces}, the devices that share it."
        )
    rows = devices.dividing(devices.rows, x.shape[0])
    channels = devices.dividing(devices.channels, x.shape[2])
    dynamic, num_kernels = weights.ndim == 4, weights.shape[-1]
    if num_kernels % devices.count(channels) and devices.count(channels) % num_kernels:
        channels = ()  # A kernel would serve channels on several devices.
    # Each device gets all kernels of its positions, for one may serve channels on several devices.
    weight = PartitionSpec(rows, devices.lengths) if dynamic else PartitionSpec(None, channels)
    spec = PartitionSpec(rows, devices.lengths, channels)
    packed = ids is not None
    in_specs = ([PartitionSpec(rows, devices.lengths)] if packed else []) + [spec, weight]
    backward = direction == "backward"
    split = Devices(devices.mesh, rows, channels, devices.lengths)
    shared = jax.shard_map(
        functools.partial(_piece, direction, taps, split, alone, packed),
        mesh=devices.mesh,
        in_specs=tuple(in_specs + [spec] * backward),
        out_specs=(spec, weight) if backward else spec,
        check_vma=False,
    )
    return shared(*([ids] if packed else []), *arrays)


def _piece(
    direction: Direction, taps: Taps, devices: Devices, alone: Convolve, packed: bool, *arrays
):
    """Computes the piece of one device."""
    ids, x, weights, *cotangent = arrays if packed else (None, *arrays)
    piece, pieces = x.shape[1], devices.count(devices.lengths)
    # Beyond the row everything is zero.
    left, right = (min(width, (pieces - 1) * piece) for width in (taps.left, taps.right))

    def widen_piece(a):
        return widen(a, devices.lengths, pieces, left, right)

    def pad_beside(a):
        return jnp.pad(a, ((0, 0), (left, right)) + ((0, 0),) * (a.ndim - 2))

    dynamic = weights.ndim == 4
    own_weights, first = _own_kernels(devices, weights) if dynamic else (weights, 0)
    # Outputs outside the piece are dropped, so their values do not matter; their cotangent is zero.
    inputs = (
        widen_piece(x),
        pad_beside(own_weights) if dynamic else own_weights,
        *map(pad_beside, cotangent),
    )
    with dispatch.using(devices=None):
        results = alone(ids if ids is None else widen_piece(ids), *inputs)
    if direction == "forward":
        return results[:, left : left + piece]
    dx, dweights = results
    (dx,) = jax.linear_transpose(widen_piece, x)(dx)
    if not dynamic:
        total = lax.psum(dweights.astype(wide_dtype(dweights)), devices.rows + devices.lengths)
        return dx, total.astype(dweights.dtype)
    dweights = dweights[:, left : left + piece]
    if devices.count(devices.channels) > 1:
        # The other channels and kernels are on other devices.
        dweights = lax.dynamic_update_slice_in_dim(jnp.zeros_like(weights), dweights, first, axis=3)
        total = lax.psum(dweights.astype(wide_dtype(dweights)), devices.channels)
        dweights = total.astype(weights.dtype)
    return dx, dweights


def _own_kernels(devices: Devices, logits):
    """Returns the logits of the kernels that serve this device's channels, and the first kernel."""
    num_kernels, count = logits.shape[3], devices.count(devices.channels)
    if count == 1:
        return logits, 0
    first = lax.axis_index(devices.channels) * num_kernels // count
    return lax.dynamic_slice_in_dim(logits, first, max(1, num_kernels // count), axis=3), first
