"""Image preprocessing: resizing, and random augmentation in training.

All randomness derives from a seed, so that a resumed run sees the same images.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from convt5 import errors
from convt5.errors import checks
from convt5.vision.policies import Policy

# Principal components of red, green and blue in [0, 1] over ImageNet, one column per component.
_COLOR_SPREADS = np.array([0.2175, 0.0188, 0.0045])
_COLOR_DIRECTIONS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)

Seed = tuple[int, int]
"""The seed of the data, and the number of the image or batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Augmentation:
    """Random augmentation: that of arXiv 2106.14881, and RandAugment.

    An image is cropped and resized, flipped, changed by a policy, and its colours are shifted.

    Attributes:
        crop_area: smallest and largest fraction of the area to crop ("random resized crop"); None
            crops the center, by `resize_size` of the data.
        crop_aspect: smallest and largest ratio of width to height of the crop.
        flip: whether to flip half of the images horizontally.
        policy: `policies.AutoAugment` or `policies.RandAugment`, or None.
        color_jitter: standard deviation of the shift along the principal components of ImageNet's
            colours (Krizhevsky et al. 2012); 0.1 in the paper, 0 for none, as for grey images.
        mixup_alpha: parameter of mixup's beta distribution (arXiv 1710.09412), in which an image is
            the mean of two; 0 for none.
        cutmix_alpha: parameter of CutMix's beta distribution (arXiv 1905.04899), in which a box of
            another image is pasted; 0 for none. With both, each batch uses one of them at random.
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
            f"{name}={getattr(self, name)} must be at least 0, and finite."
            for name in ("mixup_alpha", "cutmix_alpha", "color_jitter")
            if not 0 <= getattr(self, name) < np.inf
        ]
        for name, most in (("crop_area", 1.0), ("crop_aspect", np.inf)):
            value = getattr(self, name)
            if value is not None and not (len(value) == 2 and 0 < value[0] <= value[1] <= most):
                faults.append(f"{name}={value} must be the least and the greatest, above 0.")
        errors.raise_all(faults, where="Augmentation")

    def without_mixing(self) -> "Augmentation":
        """Returns the augmentation without mixup and CutMix."""
        return dataclasses.replace(self, mixup_alpha=0.0, cutmix_alpha=0.0)

    def apply(
        self, image: np.ndarray, *, size: int, seed: Seed, shorter_side: int | None = None
    ) -> np.ndarray:
        """Returns the augmented and resized image, as float32 in [0, 255].

        Args:
            image: uint8 [height, width, channels].
            size: height and width of the result.
            seed: random seed.
            shorter_side: as in `resize`, if there is no `crop_area`.
        """
        drawn = np.random.default_rng([*seed, 1])
        if self.crop_area is not None:
            image = self._crop(image, drawn)
            image = _resize(image, size, size)
        else:
            image = resize(image, size=size, shorter_side=shorter_side)
        image = image[:, ::-1] if self.flip and drawn.random() < 0.5 else image
        if self.policy is not None:
            pixels = np.clip(np.round(image), 0, 255).astype(np.uint8)
            image = self.policy.apply(pixels, drawn).astype(np.float32)
        return self._with_jitter(image, drawn) if self.color_jitter else image

    def mix(self, batch: Mapping[str, np.ndarray], *, seed: Seed) -> dict[str, np.ndarray]:
        """Returns a batch with images mixed in pairs, and both labels of each."""
        alphas = [a for a in (self.mixup_alpha, self.cutmix_alpha) if a]
        if not alphas:
            return dict(batch)
        drawn = np.random.default_rng([*seed, 2])
        uses_cutmix = bool(self.cutmix_alpha) and (len(alphas) == 1 or drawn.random() < 0.5)
        alpha = self.cutmix_alpha if uses_cutmix else self.mixup_alpha
        share = drawn.beta(alpha, alpha)
        images = batch["images"]
        others = np.roll(images, 1, axis=0)  # Their order is already random.
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
        """Shifts all pixels equally, along the principal components of colour."""
        if image.shape[-1] != 3:
            raise errors.UserError(
                f"color_jitter={self.color_jitter} needs images of three channels, but these "
                f"have {image.shape[-1]}; set it to 0."
            )
        shares = drawn.normal(0, self.color_jitter, 3)
        shift = _COLOR_DIRECTIONS @ (shares * _COLOR_SPREADS)
        return np.clip(image + 255 * shift, 0, 255).astype(np.float32)

    def _crop(self, image: np.ndarray, drawn: np.random.Generator) -> np.ndarray:
        """Crops a box of random area and aspect; after ten that do not fit, the whole image."""
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


def resize(image: np.ndarray, *, size: int, shorter_side: int | None = None) -> np.ndarray:
    """Resizes the shorter side to `shorter_side` (or `size`), and crops the center of `size`."""
    shorter_side = shorter_side or size
    scale = shorter_side / min(image.shape[:2])
    height, width = (max(shorter_side, round(side * scale)) for side in image.shape[:2])
    # Only the center is computed, because an elongated image has many times more pixels.
    return _resize(image, height, width, size)


def _resize(image: np.ndarray, height: int, width: int, most: int | None = None) -> np.ndarray:
    """Interpolates linearly; when shrinking, averages over all pixels that are merged.

    Returns the center of the resized image, at most `most` pixels high and wide.
    """
    rows, columns = (_middle(side, most or side) for side in (height, width))
    pixels = image.astype(np.float32)
    if image.shape[:2] == (height, width):
        return pixels[rows.start : rows.stop, columns.start : columns.stop]
    # Two matrix products: over rows, then over columns.
    pixels = np.tensordot(_weights(image.shape[0], height, rows), pixels, axes=(1, 0))
    return np.matmul(_weights(image.shape[1], width, columns), pixels)


def _middle(side: int, most: int) -> range:
    first = (side - most) // 2
    return range(first, first + most)


@functools.lru_cache(maxsize=256)
def _weights(size: int, new_size: int, wanted: range) -> np.ndarray:
    """Returns the weight of each old pixel in each new one: triangles around their centers."""
    scale = size / new_size
    centres = (np.arange(wanted.start, wanted.stop) + 0.5) * scale - 0.5
    distance = np.abs(centres[:, None] - np.arange(size)[None]) / max(scale, 1.0)
    weights = np.maximum(1.0 - distance, 0.0)
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _with_box(
    images: np.ndarray, others: np.ndarray, share: float, drawn: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Pastes a box of `others`; also returns the fraction of pixels that are kept."""
    height, width = images.shape[1:3]
    sides = np.sqrt(1 - share) * np.asarray([height, width]) / 2
    centre = drawn.uniform(0, [height, width])
    top, left = np.maximum(np.round(centre - sides), 0).astype(int)
    bottom, right = np.minimum(np.round(centre + sides), [height, width]).astype(int)
    images = images.copy()
    images[:, top:bottom, left:right] = others[:, top:bottom, left:right]
    return images, 1 - (bottom - top) * (right - left) / (height * width)
