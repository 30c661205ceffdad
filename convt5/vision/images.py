"""Batches of labelled images; their position can be saved and restored exactly.

Gin files bind `images.ImageDataConfig` in the scopes `train/` and `eval/`. Order and augmentation
derive from the seed and the number of images read.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from convt5 import errors
from convt5.data.prefetching import rows_per_host
from convt5.data.row_order import Passes, RowsOfBatch
from convt5.errors import checks
from convt5.vision.augmentation import Augmentation, resize
from convt5.vision.description import ViTDescription
from convt5.vision.sources import CorruptImage, ImageSet, ImageSource, OnCorrupt

ChannelOrder = Literal["rgb", "bgr"]

_MOST_SPARES = 1000  # Images tried when a whole batch is corrupt.


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class ImageDataConfig:
    """The images to read, and how they become batches.

    Attributes:
        source: the source of images, such as `sources.Folder`.
        split: split of the source.
        batch_size: rows over all hosts.
        image_size: height and width of the resized images.
        in_channels: 3 or 1; grey images become colour by repetition.
        num_classes: number of classes; labels must be smaller.
        resize_size: resizes the shorter side to this before cropping the center of `image_size`;
            None means `image_size`. Ignored if the augmentation has `crop_area`.
        mean, stddev: subtracted from and divided out of channels in [0, 1]; one value for all, or
            one each for red, green, blue.
        channel_order: "bgr" for models of pycls.
        augmentation: random augmentation, or None.
        on_corrupt: what to do with an unreadable image: "refuse" ends the run, "skip" replaces it
            by a row of weight 0, counts it and warns.
        shuffle: False keeps the order of the data; None and True shuffle.
        seed: random seed of everything.
        num_epochs: passes over the data; None never ends. The last batch of finite data is padded
            with rows of weight 0.
    """

    source: ImageSource
    split: str = "train"
    batch_size: int
    image_size: int
    in_channels: int = 3
    num_classes: int
    resize_size: int | None = None
    mean: float | Sequence[float] = 0.5
    stddev: float | Sequence[float] = 0.5
    channel_order: ChannelOrder = "rgb"
    augmentation: Augmentation | None = None
    on_corrupt: OnCorrupt = "refuse"
    shuffle: bool | None = None
    seed: int = 0
    num_epochs: int | None = None

    def __post_init__(self):
        faults = checks.least_faults(
            self, ("batch_size", "image_size", "num_classes", "num_epochs")
        )
        if self.seed < 0:
            faults.append(f"seed={self.seed} must be at least 0.")
        if self.in_channels not in (1, 3):
            faults.append(f"in_channels={self.in_channels} must be 1 (grey) or 3 (colour).")
        if self.resize_size is not None and self.resize_size < self.image_size:
            faults.append(
                f"resize_size={self.resize_size} must be at least image_size={self.image_size}, "
                "the size of the crop."
            )
        for name, kinds in (("channel_order", ChannelOrder), ("on_corrupt", OnCorrupt)):
            if getattr(self, name) not in get_args(kinds):
                faults.append(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(get_args(kinds))}."
                )
        for name in ("mean", "stddev"):
            if np.size(getattr(self, name)) not in (1, self.in_channels):
                faults.append(
                    f"{name}={getattr(self, name)} must be one number, or {self.in_channels}."
                )
        if not np.all(np.isfinite(self.mean)):
            faults.append(f"mean={self.mean} must be finite.")
        if not np.all((np.asarray(self.stddev) > 0) & np.isfinite(self.stddev)):
            faults.append(f"stddev={self.stddev} must be positive, and finite.")
        errors.raise_all(faults, where="ImageDataConfig")

    def check_model(self, model: Any) -> None:
        """Raises `UserError` unless a model reads such images and has a logit for every label.

        Also checks the source if it can be checked without reading, and exists already.
        """
        if not isinstance(model, ViTDescription):
            raise errors.UserError(
                f"configuration: the data are images, and model={type(model).__name__} reads none; "
                "give a model of images, such as --gin_file=gin/models/vit_c_tiny.gin, or a run "
                "file of text."
            )
        faults = [
            f"{name}={getattr(self, name)} of the images differs from {name}="
            f"{getattr(model, name)} of the model; set both to the same."
            for name in ("image_size", "in_channels")
            if getattr(self, name) != getattr(model, name)
        ]
        if self.num_classes > model.num_classes:
            faults.append(
                f"num_classes={self.num_classes} of the images is more than num_classes="
                f"{model.num_classes} of the model, which has no logit for the others; set both "
                "to the same."
            )
        errors.raise_all(faults, where="configuration")
        check = getattr(self.source, "check", None)
        if check is not None:
            check(self.split)

    def build(self, *, process_index: int, process_count: int) -> "ImageBatches":
        """Returns this host's rows of each batch.

        Raises:
            UserError: the data cannot be read as configured.
        """
        rows = rows_per_host(self.batch_size, process_count)
        opened = self.source.open(self.split)
        low, high = opened.labels
        if low < 0 or high >= self.num_classes:
            more = f"set num_classes, also of the model, to at least {high + 1}, or " * (low >= 0)
            raise errors.UserError(
                f"labels run from {low} to {high} in split={self.split!r}, but num_classes="
                f"{self.num_classes} allows 0 to {self.num_classes - 1}; {more}correct the labels."
            )
        return ImageBatches(self, opened, slice(process_index * rows, (process_index + 1) * rows))


class ImageBatches:
    """Host batches: `images` [rows, height, width, channels], `labels` and `weights` [rows].

    Attributes:
        token_bytes: None, because there is no text.
        num_images: number of images of the split.
        class_names: names of the labels, if they have names.
        content: identifies the images.
        num_skipped: number of unreadable images so far.
    """

    token_bytes = None

    def __init__(self, config: ImageDataConfig, images: ImageSet, row_slice: slice):
        self.num_images = images.size
        self.class_names = images.class_names
        self.content = images.content or images.fingerprint
        self.num_skipped = 0
        self._config = config
        self._images = images
        self._passes = Passes(
            images.size,
            config=config,
            row_slice=row_slice,
            settings={
                **dataclasses.asdict(config),
                "images": images.fingerprint,
                **({"content": images.content} if images.content else {}),
            },
            item="image",
        )

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns the next batch; hosts agree on the number of batches."""
        taken, config = self._passes.batch(), self._config
        # Padding rows repeat images, which keeps batch statistics realistic.
        batch = self._batch(taken)
        batch["weights"] *= taken.is_row
        self._passes.advance()
        if config.augmentation is not None:
            batch = config.augmentation.mix(batch, seed=(config.seed, int(taken.numbers[0])))
        return batch

    def skip(self) -> None:
        """Skips the next batch without reading it."""
        self._passes.advance()

    def get_state(self) -> bytes:
        """Returns the position."""
        return self._passes.get_state()

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Raises:
            UserError: it belongs to other data settings.
        """
        self._passes.set_state(state)

    def _batch(self, taken: RowsOfBatch) -> dict[str, np.ndarray]:
        chosen = zip(taken.rows.tolist(), taken.numbers.tolist(), strict=True)
        read = [self._read(index, number) for index, number in chosen]
        is_image = [image is not None for image in read]
        # A row without an image repeats another one, which keeps batch statistics realistic.
        spare = next((image for image in read if image is not None), None)
        if spare is None:
            spare = self._spare(int(taken.rows[-1]), int(taken.numbers[-1]))
        images, labels = zip(*(image or spare for image in read), strict=True)
        return {
            "images": self._normalised(np.stack(images)),
            "labels": np.asarray(labels, np.int32),
            "weights": np.asarray(is_image, np.float32),
        }

    def _read(self, index: int, number: int) -> tuple[np.ndarray, int] | None:
        """Returns an image of the right size in [0, 255] and its label; None if skipped."""
        try:
            return self._changed(index, number)
        except CorruptImage as error:
            if self._config.on_corrupt == "refuse":
                raise
            self.num_skipped += 1
            warnings.warn(f"skipped ({self.num_skipped} so far): {error}", stacklevel=2)
            return None

    def _spare(self, index: int, number: int) -> tuple[np.ndarray, int]:
        """Returns the next readable image, independently of what was read before."""
        tried = min(self.num_images, _MOST_SPARES)
        for further in range(1, tried + 1):
            try:
                return self._changed((index + further) % self.num_images, number)
            except CorruptImage:
                continue  # It is counted at its own position.
        raise errors.UserError(
            f"none of the {tried} images that follow one another can be read; check the data."
        )

    def _changed(self, index: int, number: int) -> tuple[np.ndarray, int]:
        """Reads, augments and resizes an image; `number` seeds the augmentation."""
        config = self._config
        image, label = self._images.read(index)
        if config.augmentation is not None:
            image = config.augmentation.apply(
                image,
                size=config.image_size,
                seed=(config.seed, number),
                shorter_side=config.resize_size,
            )
        else:
            image = resize(image, size=config.image_size, shorter_side=config.resize_size)
        return self._with_channels(image), label

    def _with_channels(self, image: np.ndarray) -> np.ndarray:
        wanted = self._config.in_channels
        if image.shape[-1] not in (1, wanted):
            can_be_read = image.shape[-1] == 3
            remedy = "set in_channels=3, also of the model, or give" if can_be_read else "give"
            raise errors.UserError(
                f"images have {image.shape[-1]} channels, and in_channels={wanted}; {remedy} "
                "other images."
            )
        return np.repeat(image, wanted, axis=-1) if image.shape[-1] < wanted else image

    def _normalised(self, pixels: np.ndarray) -> np.ndarray:
        config = self._config
        scaled = pixels.astype(np.float32) / 255
        mean, stddev = np.asarray(config.mean), np.asarray(config.stddev)
        images = ((scaled - mean) / stddev).astype(np.float32)
        return images[..., ::-1].copy() if config.channel_order == "bgr" else images
