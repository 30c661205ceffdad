"""Policies of augmentation: every operation does what its name says, and repeats by its seed."""

import numpy as np
import pytest

from convt5.errors import UserError
from convt5.vision.augmentation import Augmentation
from convt5.vision.policies import (
    IMAGENET_POLICY,
    OPERATIONS,
    RANDOM_OPERATIONS,
    AutoAugment,
    RandAugment,
    Step,
    _apply_steps,
)


def image(channels: int = 3, size: int = 32) -> np.ndarray:
    draw = np.random.default_rng(channels)
    return draw.integers(0, 256, (size, size, channels)).astype(np.uint8)


def done(name: str, magnitude: float, *, pixels=None, seed: int = 0) -> np.ndarray:
    """Does one operation for certain."""
    pixels = image() if pixels is None else pixels
    return _apply_steps(pixels, [Step(name, 1.0, magnitude)], np.random.default_rng(seed))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_kind_of_image_and_all_but_some_change_it(name, channels):
    found = done(name, 7, pixels=image(channels))
    assert (found.shape, found.dtype) == ((32, 32, channels), np.uint8)
    is_changed = (found != image(channels)).any()
    # Noise reaches from 0 to 255 already, and grey has no colour.
    unchanged = {"identity", "auto_contrast", *["color"] * (channels == 1)}
    assert is_changed == (name not in unchanged)


CONTINUOUS = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "posterize")


@pytest.mark.parametrize(
    "name", [*CONTINUOUS, "color", "contrast", "brightness", "sharpness", "solarize"]
)
def test_magnitude_zero_changes_nothing(name):
    np.testing.assert_array_equal(done(name, 0), image())


def test_operations_of_values_are_those_of_their_definitions():
    pixels = image()
    np.testing.assert_array_equal(done("invert", 0), 255 - pixels)
    np.testing.assert_array_equal(done("posterize", 10), pixels & 0xF0)
    np.testing.assert_array_equal(done("solarize", 5), np.where(pixels < 128, pixels, 255 - pixels))
    np.testing.assert_array_equal(done("solarize", 10), 255 - pixels)
    narrow = (pixels // 4 + 60).astype(np.uint8)
    low, high = narrow.min(axis=(0, 1)), narrow.max(axis=(0, 1))
    stretched = done("auto_contrast", 0, pixels=narrow)
    expected = (narrow.astype(float) - low) * 255 / (high - low)
    assert np.abs(stretched - expected).max() <= 1
    spread = done("equalize", 0, pixels=narrow)
    assert np.ptp(spread) > 2 * np.ptp(narrow)
    order = np.argsort(narrow[..., 0], axis=None, kind="stable")
    assert (np.diff(spread[..., 0].reshape(-1)[order].astype(int)) >= 0).all()


@pytest.mark.parametrize(("name", "axis"), [("translate_x", 1), ("translate_y", 0)])
def test_a_translation_moves_by_its_share_of_the_image_and_fills_with_grey(name, axis):
    pixels = image(size=20)
    shift = round(150 / 331 * 20 * 0.66)
    found = [done(name, 6.6, pixels=pixels, seed=seed) for seed in range(8)]
    expected = []
    for sign in (1, -1):
        moved = np.roll(pixels, -sign * shift, axis=axis)
        edge = slice(-shift, None) if sign == 1 else slice(None, shift)
        moved[(slice(None),) * axis + (edge,)] = 128
        expected.append(moved)
    kinds = {min(range(2), key=lambda i, f=f: (f != expected[i]).sum()) for f in found}
    assert kinds == {0, 1}
    assert all(min((f != e).any() for e in expected) == 0 for f in found)


def test_a_rotation_turns_about_the_middle():
    turned = done("rotate", 10, pixels=np.full((21, 21, 1), 200, np.uint8))
    assert turned[10, 10, 0] == 200
    assert turned[0, 0, 0] == 128
    assert 0.7 < (turned == 200).mean() < 1


def test_the_operations_are_those_of_the_papers():
    assert len(RANDOM_OPERATIONS) == 14
    assert len(IMAGENET_POLICY) == 25
    steps = [step for pair in IMAGENET_POLICY for step in pair]
    assert {step.name for step in steps} <= OPERATIONS.keys()
    assert all(0 <= step.probability <= 1 and 0 <= step.magnitude <= 9 for step in steps)


@pytest.mark.parametrize("policy", [RandAugment(), AutoAugment()])
def test_a_policy_changes_images_differently_and_repeats_by_its_seed(policy):
    augmentation = Augmentation(policy=policy)
    found = [augmentation.apply(image(), size=32, seed=(0, i)) for i in range(40)]
    again = [augmentation.apply(image(), size=32, seed=(0, i)) for i in range(40)]
    np.testing.assert_array_equal(found, again)
    assert len({one.tobytes() for one in found}) > 8
    assert all(one.dtype == np.float32 and 0 <= one.min() <= one.max() <= 255 for one in found)


def test_operations_are_drawn_alike_and_in_both_directions():
    class Counted(dict):
        def __missing__(self, key):
            return 0

    drawn, counts = np.random.default_rng(0), Counted()
    for name in drawn.choice(RANDOM_OPERATIONS, size=1400):
        counts[str(name)] += 1
    assert counts.keys() == set(RANDOM_OPERATIONS)
    assert 60 < min(counts.values()) <= max(counts.values()) < 140
    both = {done("translate_x", 5, seed=seed).tobytes() for seed in range(10)}
    assert len(both) == 2


def test_colours_shift_alike_everywhere_by_what_is_drawn():
    pixels = np.full((4, 4, 3), 120, np.uint8)
    shifts = np.array(
        [
            (Augmentation(color_jitter=0.1).apply(pixels, size=4, seed=(0, i)) - 120)[0, 0]
            for i in range(300)
        ]
    )
    whole = Augmentation(color_jitter=0.1).apply(pixels, size=4, seed=(0, 0))
    assert np.ptp(whole, axis=(0, 1)).max() == 0
    # The first direction is nearly grey, with a deviation of 255 * 0.1 * 0.2175 * 0.577.
    np.testing.assert_allclose(shifts.std(axis=0), 255 * 0.1 * 0.2175 * 0.577, rtol=0.15)
    with pytest.raises(UserError, match=r"color_jitter=0\.1 needs images of three channels"):
        Augmentation(color_jitter=0.1).apply(pixels[..., :1], size=4, seed=(0, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandAugment(num_operations=0), "num_operations=0 must be at least 1"),
        (lambda: RandAugment(magnitude=11), "magnitude=11 must be from 0 to 10"),
        (lambda: Augmentation(color_jitter=-1), "color_jitter=-1"),
    ],
)
def test_policies_that_cannot_be_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
