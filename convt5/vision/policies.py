"""Augmentation policies, AutoAugment and RandAugment, with operations of Pillow.

Cubuk et al. 2018 (arXiv 1805.09501) and 2019 (arXiv 1909.13719). `augmentation.Augmentation`
applies a policy to an image that is already cropped and resized.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from convt5 import errors
from convt5.errors import checks

_FILL = 128  # Fills areas outside a shifted or rotated image.
_MOST_SHEAR, _MOST_TURN = 0.3, 30.0  # Pixels per pixel, and degrees.
_MOST_SHIFT = 150 / 331  # Fraction of the width: 150 pixels of the images used in the paper.
_MOST_POSTERIZED, _ENHANCED = 4, 0.9

Pixels = np.ndarray
"""uint8 [height, width, channels] with one or three channels."""


class Policy(Protocol):
    """Changes an image at random, with randomness from the generator only."""

    def apply(self, image: Pixels, drawn: np.random.Generator) -> Pixels: ...


class Step(NamedTuple):
    """One operation of a learned policy.

    Attributes:
        name: name of the operation.
        probability: probability of applying it.
        magnitude: from 0 to 10, the end of its range.
    """

    name: str
    probability: float
    magnitude: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class RandAugment:
    """Applies a few operations in sequence, each drawn from the fourteen of the paper.

    Attributes:
        num_operations: number of operations.
        magnitude: magnitude of all of them, from 0 to 10, the end of AutoAugment's range.
    """

    num_operations: int = 2
    magnitude: float = 9.0

    def __post_init__(self):
        faults = []
        if self.num_operations < 1:
            faults.append(f"num_operations={self.num_operations} must be at least 1.")
        if not 0 <= self.magnitude <= 10:
            faults.append(f"magnitude={self.magnitude} must be from 0 to 10.")
        errors.raise_all(faults, where="RandAugment")

    def apply(self, image: Pixels, drawn: np.random.Generator) -> Pixels:
        """Returns the augmented image."""
        names = drawn.choice(RANDOM_OPERATIONS, size=self.num_operations)
        return _apply_steps(image, [Step(str(name), 1.0, self.magnitude) for name in names], drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class AutoAugment:
    """The policy learned on ImageNet: one of 25 pairs of operations (table 9)."""

    def apply(self, image: Pixels, drawn: np.random.Generator) -> Pixels:
        """Returns the augmented image."""
        pair = IMAGENET_POLICY[drawn.integers(len(IMAGENET_POLICY))]
        return _apply_steps(image, pair, drawn)


def _apply_steps(image: Pixels, steps: Iterable[Step], drawn: np.random.Generator) -> Pixels:
    channels = image.shape[-1]
    opened = Image.fromarray(image[..., 0] if channels == 1 else image)
    for step in steps:
        if drawn.random() < step.probability:
            sign = 1 if drawn.random() < 0.5 else -1
            opened = OPERATIONS[step.name](opened, step.magnitude / 10, sign)
    return np.asarray(opened).reshape(image.shape)


Operation = Callable[[Image.Image, float, int], Image.Image]
"""Changes an image by a strength in [0, 1], in direction 1 or -1."""


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Transforms so that pixel (x, y) is read at (a x + b y + c, d x + e y + f)."""
    fill = _FILL if image.mode == "L" else (_FILL,) * 3
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


def shear_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, sign * _MOST_SHEAR * strength, 0, 0, 1, 0)


def shear_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, 0, 0, sign * _MOST_SHEAR * strength, 1, 0)


def translate_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, 0, sign * _MOST_SHIFT * strength * image.width, 0, 1, 0)


def translate_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, 0, 0, 0, 1, sign * _MOST_SHIFT * strength * image.height)


def rotate(image: Image.Image, strength: float, sign: int) -> Image.Image:
    fill = _FILL if image.mode == "L" else (_FILL,) * 3
    return image.rotate(sign * _MOST_TURN * strength, fillcolor=fill)


def identity(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image


def auto_contrast(image: Image.Image, strength: float, sign: int) -> Image.Image:
    """Stretches each channel to the full range of values."""
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    """Equalises the histogram of each channel."""
    return ImageOps.equalize(image)


def invert(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageOps.invert(image)


def solarize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    """Inverts values above a threshold that decreases with the strength."""
    return ImageOps.solarize(image, round(256 * (1 - strength)))


def posterize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    """Keeps the 8 highest bits of each value at strength 0, and 4 at 1."""
    return ImageOps.posterize(image, 8 - round(_MOST_POSTERIZED * strength))


def _enhancement(kind: Callable[[Image.Image], Any]) -> Operation:
    """Blends with a degenerate image: less than 1 towards it, more than 1 away from it."""

    def enhance(image: Image.Image, strength: float, sign: int) -> Image.Image:
        return kind(image).enhance(1 + sign * _ENHANCED * strength)

    return enhance


OPERATIONS: Mapping[str, Operation] = {
    "identity": identity,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
    "auto_contrast": auto_contrast,
    "equalize": equalize,
    "invert": invert,
    "solarize": solarize,
    "posterize": posterize,
    "color": _enhancement(ImageEnhance.Color),
    "contrast": _enhancement(ImageEnhance.Contrast),
    "brightness": _enhancement(ImageEnhance.Brightness),
    "sharpness": _enhancement(ImageEnhance.Sharpness),
}
RANDOM_OPERATIONS = tuple(name for name in OPERATIONS if name != "invert")

IMAGENET_POLICY: tuple[tuple[Step, Step], ...] = (
    (Step("posterize", 0.4, 8), Step("rotate", 0.6, 9)),
    (Step("solarize", 0.6, 5), Step("auto_contrast", 0.6)),
    (Step("equalize", 0.8), Step("equalize", 0.6)),
    (Step("posterize", 0.6, 7), Step("posterize", 0.6, 6)),
    (Step("equalize", 0.4), Step("solarize", 0.2, 4)),
    (Step("equalize", 0.4), Step("rotate", 0.8, 8)),
    (Step("solarize", 0.6, 3), Step("equalize", 0.6)),
    (Step("posterize", 0.8, 5), Step("equalize", 1.0)),
    (Step("rotate", 0.2, 3), Step("solarize", 0.6, 8)),
    (Step("equalize", 0.6), Step("posterize", 0.4, 6)),
    (Step("rotate", 0.8, 8), Step("color", 0.4, 0)),
    (Step("rotate", 0.4, 9), Step("equalize", 0.6)),
    (Step("equalize", 0.0), Step("equalize", 0.8)),
    (Step("invert", 0.6), Step("equalize", 1.0)),
    (Step("color", 0.6, 4), Step("contrast", 1.0, 8)),
    (Step("rotate", 0.8, 8), Step("color", 1.0, 2)),
    (Step("color", 0.8, 8), Step("solarize", 0.8, 7)),
    (Step("sharpness", 0.4, 7), Step("invert", 0.6)),
    (Step("shear_x", 0.6, 5), Step("equalize", 1.0)),
    (Step("color", 0.4, 0), Step("equalize", 0.6)),
    (Step("equalize", 0.4), Step("solarize", 0.2, 4)),
    (Step("solarize", 0.6, 5), Step("auto_contrast", 0.6)),
    (Step("invert", 0.6), Step("equalize", 1.0)),
    (Step("color", 0.6, 4), Step("contrast", 1.0, 8)),
    (Step("equalize", 0.8), Step("equalize", 0.6)),
)
