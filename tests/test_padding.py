"""Where the taps lie."""

import oracles
import pytest

from convt5.ops import pad_widths


@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize("padding", ["CENTERED", "CAUSAL"])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 7, 31])
def test_pad_widths_reach_the_outermost_taps_of_the_formula(kernel_size, dilation, padding):
    offsets = oracles.tap_offsets(kernel_size, dilation, padding)
    assert pad_widths(kernel_size, dilation, padding) == (-offsets[0], offsets[-1])


@pytest.mark.parametrize(("kernel_size", "widths"), [(7, (3, 3)), (4, (2, 1)), (2, (1, 0))])
def test_an_even_centered_kernel_leans_left(kernel_size, widths):
    assert pad_widths(kernel_size, 1, "CENTERED") == widths


@pytest.mark.parametrize("dilation", [1, 3, 2048])
@pytest.mark.parametrize("kernel_size", [1, 2, 4, 6])
def test_a_centered_kernel_always_holds_the_current_position(kernel_size, dilation):
    left, _ = pad_widths(kernel_size, dilation, "CENTERED")
    assert left % dilation == 0


def test_explicit_widths_are_taken_as_they_are():
    assert pad_widths(4, 2, (1, 5)) == (1, 5)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ("SAME", "padding='SAME' must be 'CENTERED', 'CAUSAL'"),
        ((1, 2), r"padding=\(1, 2\) must add up to .* = 4 for kernel_size=3, dilation=2"),
        ((-1, 5), "integers of at least 0"),
    ],
)
def test_widths_that_do_not_fit_are_refused(padding, message):
    with pytest.raises(ValueError, match=message):
        pad_widths(3, 2, padding)
