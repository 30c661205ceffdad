"""What is done to images before a model sees them: resizing, and random changes in training.

Everything random follows from a seed, so that a run that continues sees what it would have seen.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from convt5 import errors

Seed = tuple[int, int]
"""The seed of the data, and which image or batch is meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes, as in arXiv 2106.14881 but for AutoAugment and PCA colour jitter.

    Attributes:
        crop_area: least and greatest share of the area that is cut out and resized ("random
            resized crop"); None takes the middle of the image.
        crop_aspect: least and greatest width over height of what is cut out.
        flip: half of the images are mirrored.
        mixup_alpha: of the beta distribution of the share of mixup (arXiv 1710.09412), in which
            an image is the mean of two; 0 for none.
        cutmix_alpha: likewise of CutMix (arXiv 1905.04899), which pastes a box of another image.
            With both, each batch is given one of them.
    """

    crop_area: Sequence[float] | None = None
    crop_aspect: Sequence[float] = (3 / 4, 4 / 3)
    flip: bool = False
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __post_init__(self):
        faults = [
            f"{name}={getattr(self, name)} must be at least 0."
            for name in ("mixup_alpha", "cutmix_alpha")
            if getattr(self, name) < 0
        ]
        for name, most in (("crop_area", 1.0), ("crop_aspect", np.inf)):
            value = getattr(self, name)
            if value is not None and not (len(value) == 2 and 0 < value[0] <= value[1] <= most):
                faults.append(f"{name}={value} must be the least and the greatest, above 0.")
        errors.raise_all(faults, where="Augmentation")

    def apply(self, image: np.ndarray, *, size: int, seed: Seed) -> np.ndarray:
        """Returns the changed image, resized, as float32 in [0, 255]."""
        drawn = np.random.default_rng([*seed, 1])
        if self.crop_area is not None:
            image = self._crop(image, drawn)
            image = _resize(image, size, size)
        else:
            image = resized(image, size=size)
        return image[:, ::-1] if self.flip and drawn.random() < 0.5 else image

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
    image = _resize(image, height, width)
    top, left = (height - size) // 2, (width - size) // 2
    return image[top : top + size, left : left + size]


def _resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Interpolates linearly; where the image shrinks, over all pixels that fall together."""
    pixels = image.astype(np.float32)
    if image.shape[:2] == (height, width):
        return pixels
    # Two products of matrices: rows, then columns.
    pixels = np.tensordot(_weights(image.shape[0], height), pixels, axes=(1, 0))
    return np.matmul(_weights(image.shape[1], width), pixels)


@functools.lru_cache(maxsize=256)
def _weights(size: int, new_size: int) -> np.ndarray:
    """The weight of each old pixel in each new one: triangles around the new pixels' centres."""
    scale = size / new_size
    centres = (np.arange(new_size) + 0.5) * scale - 0.5
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
