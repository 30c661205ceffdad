"""Depthwise, lightweight and dynamic convolution over packed sequences, with any dilation.

All are sums over shifted inputs. Output i of channel c is the sum over taps j of
w[j, c] * x[i + j * dilation - left, c]: a cross-correlation, whose taps are not flipped. Inputs
outside the row, at padding and, by default, in other segments read as zero. The backward pass is
written by hand, because differentiating the sum would store one product per tap. On TPU, Pallas
kernels serve bfloat16 and float32 if channels are a multiple of 128, taps stay in their segment,
and their reach fits fast memory. Everything else is plain JAX.
"""

import dataclasses
import functools
from typing import Literal, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from convt5.ops import dispatch
from convt5.ops.convolution import cpu, gpu, reference, sharded
from convt5.ops.convolution.checks import (
    Normalization,
    Segments,
    check_arrays,
    checked_depthwise,
    checked_normalization,
    checked_positions,
    checked_taps,
    group_size,
)
from convt5.ops.explicit import partitioned
from convt5.ops.geometry import Padding, Taps
from convt5.ops.masking import checked_flag
from convt5.ops.varying import vary_alike


@partitioned(3)
def depthwise_conv(
    x: Float[Array, "batch length embed"],
    kernel: Float[Array, "taps embed"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
    split_channels: bool = True,
) -> Float[Array, "batch length embed"]:
    """Convolves each channel with its own kernel (Tay et al. 2021, arXiv 2105.03322, section 3).

    Products and sums are taken in at least float32; the result has the dtype of `x`.

    Args:
        x: the inputs.
        kernel: weight of each tap and channel; the first tap reads furthest left.
        dilation: distance between neighbouring taps in positions; 1 means adjacent.
        padding: "CENTERED": output i reads i + dilation * (j - ceil((K + 1) / 2)), j = 1..K, so
            an even kernel holds the current position and leans left. "CAUSAL": the last tap reads
            the current position. (left, right): positions read on each side, which add up to
            (K - 1) * dilation.
        segment_ids: the packed example of each position. 0 is padding: it reads as zero, and its
            output is zero. None: each row is one example.
        taps_cross_segments: whether taps read other segments of the row; they never read padding.
        split_channels: whether devices that split the channels convolve only their own; False if
            each device holds all channels of x and needs all of the result.

    Raises:
        ValueError: dilation, padding or array shapes are inconsistent, or x holds integers.
    """
    crosses = taps_cross_segments
    taps, segment_ids = checked_depthwise(x, kernel, segment_ids, dilation, padding, crosses)
    split_channels = checked_flag("split_channels", split_channels)
    if x.size == 0:
        return jnp.zeros_like(x)
    return _static_conv(taps, split_channels, *vary_alike(x, kernel, segment_ids))


@partitioned(3)
def lightweight_conv(
    x: Float[Array, "batch length embed"],
    kernel_logits: Float[Array, "taps kernels"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
    **normalization: Unpack[Normalization],
) -> Float[Array, "batch length embed"]:
    """Convolves groups of channels with shared, softmax-normalised kernels.

    Wu et al. 2019, arXiv 1901.10430, equation 4: channel c uses kernel floor(c * H / embed), of H
    kernels.

    Args:
        x, dilation, padding, segment_ids, taps_cross_segments: as in `depthwise_conv`.
        kernel_logits: logits of the taps of each kernel; their number divides embed.
        normalization: softmax, tap_dropout_rate and dropout_key; see `Normalization`. One dropout
            mask serves the whole batch.

    Raises:
        ValueError: as in `depthwise_conv`, or the number of kernels does not divide embed, or
            tap_dropout_rate is outside [0, 1).
    """
    check_arrays(x, "kernel_logits", kernel_logits, "taps kernels")
    softmax, rate, dropout_key = checked_normalization("lightweight_conv", normalization)
    segment_ids = checked_positions(x, segment_ids)
    taps = checked_taps(kernel_logits.shape[0], dilation, padding, taps_cross_segments)
    group = group_size(x, kernel_logits)
    if x.size == 0:
        return jnp.zeros_like(x)
    weights = reference.normalize(softmax, rate, kernel_logits, dropout_key)
    kernel = jnp.repeat(weights, group, axis=1)
    return _static_conv(taps, True, *vary_alike(x, kernel, segment_ids))


@partitioned(3)
def dynamic_conv(
    x: Float[Array, "batch length embed"],
    kernel_logits: Float[Array, "batch length taps kernels"],
    *,
    dilation: int = 1,
    padding: Padding = "CENTERED",
    segment_ids: Segments = None,
    taps_cross_segments: bool = False,
    **normalization: Unpack[Normalization],
) -> Float[Array, "batch length embed"]:
    """Convolves groups of channels with a separate kernel for every output position.

    Wu et al. 2019, arXiv 1901.10430, equation 5, for kernels that are already predicted. The
    backward pass keeps only `x` and `kernel_logits`, and recomputes the softmax.

    Args:
        x, dilation, padding, segment_ids, taps_cross_segments: as in `depthwise_conv`.
        kernel_logits: logits of the taps of each kernel at each output position.
        normalization: as in `lightweight_conv`, with a separate dropout mask for every position
            and kernel.

    Raises:
        ValueError: as in `lightweight_conv`.
    """
    check_arrays(x, "kernel_logits", kernel_logits, "batch length taps kernels")
    softmax, rate, dropout_key = checked_normalization("dynamic_conv", normalization)
    segment_ids = checked_positions(x, segment_ids, kernel_logits=kernel_logits)
    taps = checked_taps(kernel_logits.shape[2], dilation, padding, taps_cross_segments)
    group_size(x, kernel_logits)
    if x.size == 0:
        return jnp.zeros_like(x)
    devices = dispatch.devices()
    if dropout_key is not None and rate and devices and devices.split_lengths:
        # Drawn for whole rows before they are split: the same mask on every mesh.
        weights = reference.normalize(softmax, rate, kernel_logits, dropout_key)
        return _dynamic_conv(taps, False, 0.0, *vary_alike(x, weights, segment_ids, None))
    arrays = vary_alike(x, kernel_logits, segment_ids, dropout_key)
    return _dynamic_conv(taps, softmax, rate, *arrays)


def _static_run(direction, taps, split_channels, segment_ids, *arrays):
    devices = dispatch.devices()
    if split_channels or devices is None:
        return _run(direction, taps, False, segment_ids, *arrays)
    with dispatch.using(devices=dataclasses.replace(devices, channels=())):
        return _run(direction, taps, False, segment_ids, *arrays)


def _static_forward(taps, split_channels, x, kernel, segment_ids):
    compute = functools.partial(_static_run, "forward", taps, split_channels)
    y = dispatch.one_operation(compute, segment_ids, x, kernel)
    return y, (x, kernel, segment_ids)


def _static_backward(taps, split_channels, residuals, dy):
    x, kernel, segment_ids = residuals
    gradients = _static_run("backward", taps, split_channels, segment_ids, x, kernel, dy)
    return *gradients, None


def _static(taps: Taps, split_channels: bool, x, kernel, segment_ids):
    return _static_run("forward", taps, split_channels, segment_ids, x, kernel)


_static_conv = dispatch.differentiable(
    2, _static, forward=_static_forward, backward=_static_backward
)


def _dynamic(taps: Taps, softmax, rate, x, logits, segment_ids, key):
    return _run("forward", taps, softmax, segment_ids, x, logits, rate=rate, key=key)


def _dynamic_forward(taps, softmax, rate, x, logits, segment_ids, key):
    def compute(segment_ids, x, logits, key):
        return _run("forward", taps, softmax, segment_ids, x, logits, rate=rate, key=key)

    y = dispatch.one_operation(compute, segment_ids, x, logits, key)
    return y, (x, logits, segment_ids, key)


def _dynamic_backward(taps, softmax, rate, residuals, dy):
    x, logits, segment_ids, key = residuals
    gradients = _run("backward", taps, softmax, segment_ids, x, logits, dy, rate=rate, key=key)
    return *gradients, None, None


_dynamic_conv = dispatch.differentiable(
    3, _dynamic, forward=_dynamic_forward, backward=_dynamic_backward
)


def _run(
    direction: Literal["forward", "backward"],
    taps: Taps,
    softmax: bool,
    segment_ids,
    *arrays,
    rate: float = 0.0,
    key=None,
):
    """Returns the convolution or its gradients from x, weights and, if backward, the cotangent."""
    devices = dispatch.devices()
    if not reference.drops(rate, key):
        key = None
        if devices is not None and devices.split_lengths:
            whole = functools.partial(_run, direction, taps, softmax)
            return sharded.convolve(direction, taps, devices, whole, segment_ids, *arrays)
    table = _table(direction, taps, softmax, rate, segment_ids, key, *arrays[:2])
    return dispatch.run(table, segment_ids, key, *arrays)


def _table(direction, taps, softmax, rate, segment_ids, key, x, weights) -> dispatch.Table:
    """Returns the formulations of a direction, called with segment ids, key and the arrays."""

    def of(module):
        compute = getattr(module, direction)

        def formulation(segment_ids, key, *arrays):
            return compute(taps, softmax, segment_ids, *arrays, rate=rate, key=key)

        return formulation

    table = dispatch.Table(of(reference), cpu=of(cpu), gpu=of(gpu))
    if key is not None or not dispatch.may_use_kernels():
        return table
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.convolution.tpu import kernels

    operation = kernels.Operation(
        taps=taps,
        dynamic=weights.ndim == 4,
        softmax=softmax,
        packed=segment_ids is not None,
        interpret=dispatch.interpreted(),
    )
    return kernels.add_to(table, operation, direction, x, weights)
