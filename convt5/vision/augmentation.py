"""What is done to images before a model sees them: resizing, and random changes in training.

Everything random follows from a seed, so that a run that continues sees what it would have seen.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from convt5 import errors
from convt5.vision.policies import Policy

# Principal components of red, green and blue in [0, 1] over ImageNet: a column for each direction.
_COLOR_SPREADS = np.array([0.2175, 0.0188, 0.0045])
_COLOR_DIRECTIONS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)

Seed = tuple[int, int]
"""The seed of the data, and which image or batch is meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes: those of arXiv 2106.14881, and RandAugment.

    An image is cut out and resized, mirrored, changed by a policy, and its colours are shifted.

    Attributes:
        crop_area: least and greatest share of the area that is cut out and resized ("random
            resized crop"); None takes the middle of the image, by `resize_size` of the data.
        crop_aspect: least and greatest width over height of what is cut out.
        flip: half of the images are mirrored.
        policy: `policies.AutoAugment` or `policies.RandAugment`; None for neither.
        color_jitter: standard deviation of the shift along the principal components of the colours
            of ImageNet (Krizhevsky et al. 2012), 0.1 in the paper; 0 for none, as for grey images.
        mixup_alpha: of the beta distribution of the share of mixup (arXiv 1710.09412), in which
            an image is the mean of two; 0 for none.
        cutmix_alpha: likewise of CutMix (arXiv 1905.04899), which pastes a box of another image.
            With both, each batch is given one of them.
    """

    crop_area: Sequence[float] | None = None
    crop_aspect: Sequence[float] = (3 / 4, 4 / 3)
    flip: bool = False
    policy: Policy | None = None
    color_jitter: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __post_init__(self):
        faults = [
            f"{name}={getattr(self, name)} must be at least 0."
            for name in ("mixup_alpha", "cutmix_alpha", "color_jitter")
            if getattr(self, name) < 0
        ]
        for name, most in (("crop_area", 1.0), ("crop_aspect", np.inf)):
            value = getattr(self, name)
            if value is not None and not (len(value) == 2 and 0 < value[0] <= value[1] <= most):
                faults.append(f"{name}={value} must be the least and the greatest, above 0.")
        errors.raise_all(faults, where="Augmentation")

    def without_mixing(self) -> "Augmentation":
        """Returns the same changes of each image alone."""
        return dataclasses.replace(self, mixup_alpha=0.0, cutmix_alpha=0.0)

    def apply(
        self, image: np.ndarray, *, size: int, seed: Seed, shorter_side: int | None = None
    ) -> np.ndarray:
        """Returns the changed image, resized, as float32 in [0, 255].

        Args:
            image: uint8 [height, width, channels].
            size: height and width of the result.
            seed: of what is drawn.
            shorter_side: as of `resized`, where no `crop_area` is cut out.
        """
        drawn = np.random.default_rng([*seed, 1])
        if self.crop_area is not None:
            image = self._crop(image, drawn)
            image = _resize(image, size, size)
        else:
            image = resized(image, size=size, shorter_side=shorter_side)
        image = image[:, ::-1] if self.flip and drawn.random() < 0.5 else image
        if self.policy is not None:
            pixels = np.clip(np.round(image), 0, 255).astype(np.uint8)
            image = self.policy.apply(pixels, drawn).astype(np.float32)
        return self._with_jitter(image, drawn) if self.color_jitter else image

    def mix(self, batch: Mapping[str, np.ndarray], *, seed: Seed) -> dict[str, np.ndarray]:
        """Returns a batch whose images hold a part of another one, with the labels of both."""
        alphas = [a for a in (self.mixup_alpha, self.cutmix_alpha) if a]
        if not alphas:
            return dict(batch)
        drawn = np.random.default_rng([*seed, 2])
        uses_cutmix = bool(self.cutmix_alpha) and (len(alphas) == 1 or drawn.random() < 0.5)
        alpha = self.cutmix_alpha if uses_cutmix else self.mixup_alpha
        share = drawn.beta(alpha, alpha)
        images = batch["images"]
        others = np.roll(images, 1, axis=0)  # Their order is random already.
        if uses_cutmix:
            images, share = _with_box(images, others, share, drawn)
        else:
            images = (share * images + (1 - share) * others).astype(np.float32)
        return {
            **batch,
            "images": images,
            "other_labels": np.roll(batch["labels"], 1),
            "label_share": np.full(len(images), share, np.float32),
        }

    def _with_jitter(self, image: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
        """Shifts all pixels alike, most along the directions in which colours differ most."""
        if image.shape[-1] != 3:
            raise errors.UserError(
                f"color_jitter={self.color_jitter} needs images of three channels, but these "
                f"have {image.shape[-1]}; set it to 0."
            )
        shares = drawn.normal(0, self.color_jitter, 3)
        shift = _COLOR_DIRECTIONS @ (shares * _COLOR_SPREADS)
        return np.clip(image + 255 * shift, 0, 255).astype(np.float32)

    def _crop(self, image: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
        """Cuts out a box of random area and aspect; after ten that do not fit, the whole."""
        height, width = image.shape[:2]
        (least, most), (low, high) = self.crop_area or (1.0, 1.0), np.log(self.crop_aspect)
        for _ in range(10):
            pixels = drawn.uniform(least, most) * height * width
            aspect = np.exp(drawn.uniform(low, high))
            rows, columns = round(np.sqrt(pixels / aspect)), round(np.sqrt(pixels * aspect))
            if 0 < rows <= height and 0 < columns <= width:
                top = drawn.integers(height - rows + 1)
                left = drawn.integers(width - columns + 1)
                return image[top : top + rows, left : left + columns]
        return image


def resized(image: np.ndarray, *, size: int, shorter_side: int | None = None) -> np.ndarray:
    """Brings the shorter side to `shorter_side` (or `size`) and returns the middle of `size`."""
    shorter_side = shorter_side or size
    scale = shorter_side / min(image.shape[:2])
    height, width = (max(shorter_side, round(side * scale)) for side in image.shape[:2])
    # Only the middle is computed: the whole of a thin image has many times as many pixels.
    return _resize(image, height, width, size)


def _resize(image: np.ndarray, height: int, width: int, most: int | None = None) -> np.ndarray:
    """Interpolates linearly; where the image shrinks, over all pixels that fall together.

    Returns the middle of the resized image, at most `most` pixels high and wide.
    """
    rows, columns = (_middle(side, most or side) for side in (height, width))
    pixels = image.astype(np.float32)
    if image.shape[:2] == (height, width):
        return pixels[rows.start : rows.stop, columns.start : columns.stop]
    # Two products of matrices: rows, then columns.
    pixels = np.tensordot(_weights(image.shape[0], height, rows), pixels, axes=(1, 0))
    return np.matmul(_weights(image.shape[1], width, columns), pixels)


def _middle(side: int, most: int) -> range:
    first = (side - most) // 2
    return range(first, first + most)


@functools.lru_cache(maxsize=256)
def _weights(size: int, new_size: int, wanted: range) -> np.ndarray:
    """The weight of each old pixel in the wanted new ones: triangles around their centres."""
    scale = size / new_size
    centres = (np.arange(wanted.start, wanted.stop) + 0.5) * scale - 0.5
    distance = np.abs(centres[:, None] - np.arange(size)[None]) / max(scale, 1.0)
    weights = np.maximum(1.0 - distance, 0.0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _with_box(
    images: np.ndarray, others: np.ndarray, share: float, drawn: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Pastes a box of `others`; returns the share of the pixels that stayed as well."""
    height, width = images.shape[1:3]
    sides = np.sqrt(1 - share) * np.asarray([height, width]) / 2
    centre = drawn.uniform(0, [height, width])
    top, left = np.maximum(np.round(centre - sides), 0).astype(int)
    bottom, right = np.minimum(np.round(centre + sides), [height, width]).astype(int)
    images = images.copy()
    images[:, top:bottom, left:right] = others[:, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)
