"""Geometry of a one-dimensional convolution: padding and tap offsets. Plain Python, no arrays."""

import dataclasses
import math
import operator

Padding = str | tuple[int, int]
""""CENTERED", "CAUSAL", or explicit (left, right) positions."""


def pad_widths(kernel_size: int, dilation: int, padding: Padding) -> tuple[int, int]:
    """Returns how many positions (left, right) of its output position a convolution reads.

    "CENTERED" follows arXiv 2105.03322: output i reads i + dilation * (j - ceil((K + 1) / 2)) for
    j = 1..K. An even kernel includes the current position and leans left.

    Raises:
        ValueError: unknown name, or explicit widths whose sum is not (K - 1) * dilation.
    """
    total = (kernel_size - 1) * dilation
    if isinstance(padding, str):
        left = (math.ceil((kernel_size + 1) / 2) - 1) * dilation
        named = {"CENTERED": (left, total - left), "CAUSAL": (total, 0)}
        if padding in named:
            return named[padding]
        raise ValueError(
            f"padding={padding!r} must be 'CENTERED', 'CAUSAL' or (left, right) positions."
        )
    try:
        left, right = (operator.index(width) for width in padding)
    except (TypeError, ValueError):
        left = right = -1
    if left < 0 or right < 0:
        raise ValueError(
            f"padding={padding!r} must hold two integers of at least 0: (left, right)."
        )
    widths = left, right
    if sum(widths) != total:
        raise ValueError(
            f"padding={widths} must add up to (kernel_size - 1) * dilation = {total} for "
            f"kernel_size={kernel_size}, dilation={dilation}."
        )
    return widths


@dataclasses.dataclass(frozen=True)
class Taps:
    """The rows that each output reads: tap j of output i reads row i + j * dilation - left.

    Attributes:
        count: number of taps.
        dilation: distance between neighbouring taps, in rows.
        left, right: rows read before and after the output, (count - 1) * dilation together.
        cross_segments: whether taps read other segments of the row.
    """

    count: int
    dilation: int
    left: int
    right: int
    cross_segments: bool

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of the row that each tap reads, relative to the output."""
        return tuple(j * self.dilation - self.left for j in range(self.count))

    def mirrored(self) -> "Taps":
        """Returns the taps of the transposed convolution, in reverse order."""
        return dataclasses.replace(self, left=self.right, right=self.left)
