"""Checks of the arguments of convolutions, before any of them is traced."""

import operator
from collections.abc import Mapping
from typing import Any, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from convt5.ops.geometry import Taps, pad_widths
from convt5.ops.masking import check_axes, checked_flag, checked_segments

Segments = Int[Array, "batch length"] | None


class Normalization(TypedDict, total=False):
    """How the weights of taps follow from their logits.

    Attributes:
        softmax: whether each kernel's logits are normalised over all taps (default), in at least
            float32. A tap that reads zero keeps its weight, which is not redistributed. False uses
            the logits directly as the weights.
        tap_dropout_rate: probability of setting a normalised tap to zero, by default 0; the others
            are scaled up to keep the mean (DropConnect of Wu et al. 2019, arXiv 1901.10430).
        dropout_key: random key; None (default) means deterministic.
    """

    softmax: bool
    tap_dropout_rate: float
    dropout_key: PRNGKeyArray | None


def checked_normalization(
    where: str, given: Mapping[str, Any]
) -> tuple[bool, float, PRNGKeyArray | None]:
    """Returns softmax, rate and key of the function named `where`.

    Raises:
        ValueError: a value is out of range.
        TypeError: a name is none of `Normalization`.
    """
    for name in given.keys() - Normalization.__annotations__.keys():
        raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")
    rate = checked_rate(given.get("tap_dropout_rate", 0.0))
    softmax = checked_flag("softmax", given.get("softmax", True))
    return softmax, rate, given.get("dropout_key")


def checked_depthwise(
    x, kernel, segment_ids, dilation, padding, taps_cross_segments
) -> tuple[Taps, Segments]:
    """Returns the taps of a convolution with a kernel for each channel, and its segment ids.

    Raises:
        ValueError: as in `depthwise_conv`.
    """
    check_arrays(x, "kernel", kernel, "taps embed")
    if kernel.shape[1] != x.shape[-1]:
        raise ValueError(
            f"kernel has {kernel.shape[1]} channels but x has embed={x.shape[-1]}; a depthwise "
            "kernel has shape [taps, embed]."
        )
    segment_ids = checked_positions(x, segment_ids)
    return checked_taps(kernel.shape[0], dilation, padding, taps_cross_segments), segment_ids


def check_arrays(x, name: str, weights, axes: str) -> None:
    check_axes("x", x, "batch length embed")
    check_axes(name, weights, axes)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise ValueError(f"{name} has dtype {weights.dtype}; give real numbers.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x has dtype {x.dtype}, which the result would be rounded to; give floating point."
        )


def checked_rate(rate) -> float:
    """Returns a rate as a plain number, which is a static part of a program."""
    try:
        number = float(rate)
    except (TypeError, ValueError):  # A value that is only known when the program runs, or text.
        number = -1.0
    if not 0 <= number < 1:
        raise ValueError(f"tap_dropout_rate={rate} must be in [0, 1).")
    return number


def checked_positions(x, segment_ids, **of_positions) -> Segments:
    """Returns segment ids; raises ValueError for shapes that would broadcast along positions."""
    if segment_ids is not None:
        segment_ids = checked_segments("segment_ids", segment_ids)
    for name, array in (("segment_ids", segment_ids), *of_positions.items()):
        if array is not None and array.shape[:2] != x.shape[:2]:
            raise ValueError(
                f"{name} has shape {array.shape} but x has shape {x.shape}; both begin with "
                "[batch, length]."
            )
    return segment_ids


def checked_taps(kernel_size, dilation, padding, crosses) -> Taps:
    if kernel_size < 1:
        raise ValueError("the kernel has 0 taps; it must have at least 1.")
    try:
        distance = operator.index(dilation)
    except TypeError:
        distance = 0
    if distance < 1:
        raise ValueError(
            f"dilation={dilation} must be an integer of at least 1 (1 means adjacent taps); set it "
            "to a positive integer."
        )
    left, right = pad_widths(kernel_size, distance, padding)
    crosses = checked_flag("taps_cross_segments", crosses)
    return Taps(kernel_size, distance, left, right, crosses)


def group_size(x, kernel_logits) -> int:
    embed, num_kernels = x.shape[-1], kernel_logits.shape[-1]
    if num_kernels == 0 or embed % num_kernels:
        raise ValueError(
            f"kernel_logits has num_kernels={num_kernels}, which must divide embed={embed}: each "
            "kernel serves embed / num_kernels neighbouring channels."
        )
    return embed // num_kernels
