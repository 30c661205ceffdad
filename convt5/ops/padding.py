"""Where the taps of a one-dimensional convolution lie; plain Python, used by ops and configs."""

import math
import operator

Padding = str | tuple[int, int]
""""CENTERED", "CAUSAL", or explicit (left, right) positions."""


def pad_widths(kernel_size: int, dilation: int, padding: Padding) -> tuple[int, int]:
    """Returns the positions (left, right) that a convolution reads beside its output position.

    Centered follows arXiv 2105.03322: output i reads i + dilation * (j - ceil((K + 1) / 2)) for
    j = 1..K, so an even kernel holds the current position and leans left.

    Raises:
        ValueError: an unknown name, or explicit widths that do not add up to (K - 1) * dilation.
    """
    total = (kernel_size - 1) * dilation
    if padding == "CENTERED":
        left = (math.ceil((kernel_size + 1) / 2) - 1) * dilation
        return left, total - left
    if padding == "CAUSAL":
        return total, 0
    if isinstance(padding, str):
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
