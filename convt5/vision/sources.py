"""Sources of labelled images: scikit-learn's digits, arrays in a file, image files, TFDS.

A source opens a split as images that can be read in any order. Errors name the file.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import io
import itertools
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from PIL import ExifTags, Image

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import foreign_files, quiet_imports, tfds_features

OnCorrupt = Literal["refuse", "skip"]

MOST_PIXELS = 2**26
"""Most pixels of an image in a file: 67 million."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
_SPLIT = "{split}"


class CorruptImage(errors.UserError):
    """Raised for a file that is not an image; the message names it."""


class ImageSet(NamedTuple):
    """The images of one split.

    Attributes:
        size: number of images.
        labels: smallest and largest label.
        read: returns an image by index, uint8 [height, width, channels], and its label.
        fingerprint: identifies the images, by their pixels or their names.
        class_names: names of the labels, if they have names.
        content: identifies the content of named images, as far as is known without reading them.
    """

    size: int
    labels: tuple[int, int]
    read: Callable[[int], tuple[np.ndarray, int]]
    fingerprint: str
    class_names: tuple[str, ...] = ()
    content: str = ""


class ImageSource(Protocol):
    """The interface of sources; raises `UserError` for missing data or data of another kind."""

    def open(self, split: str) -> ImageSet: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digits:
    """The 1,797 handwritten digits of scikit-learn, 8x8 grey pixels, without download.

    Of every six images, the last is in "validation", the one before in "test", the others in
    "train".
    """

    def open(self, split: str) -> ImageSet:
        """Returns the images of "train", "validation" or "test"."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise errors.UserError(
                "the digits are part of scikit-learn, which is not installed; pip install "
                "scikit-learn, or choose another source of images."
            ) from None
        if split not in ("train", "validation", "test"):
            raise errors.UserError(
                f"split={split!r} of the digits must be train, validation or test."
            )
        pixels, labels = map(np.asarray, load_digits(return_X_y=True))
        place = np.arange(len(labels)) % 6
        chosen = {"validation": place == 5, "test": place == 4}.get(split, place < 4)
        # Pixel values range from 0 to 16.
        images = np.round(pixels.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
        return in_memory(images[chosen], labels[chosen])


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Npz:
    """Arrays in a .npz file: `images` uint8 [N, H, W] or [N, H, W, C], and `labels` [N].

    Attributes:
        path: the file; `{split}` in it is replaced by the split.
    """

    path: str

    _REMEDY: ClassVar[str] = "expected a .npz file with the arrays images and labels."

    def open(self, split: str) -> ImageSet:
        """Returns the images of a file."""
        with foreign_files.Npz(self._file(split), remedy=self._REMEDY) as file:
            shape = self._checked(file)
            images, labels = file.read("images"), file.read("labels")
        return in_memory(images.reshape(shape), labels)

    def check(self, split: str) -> None:
        """Raises `UserError` for an existing file that is invalid; reads no array."""
        if self._file(split).exists():
            with foreign_files.Npz(self._file(split), remedy=self._REMEDY) as file:
                self._checked(file)

    def _file(self, split: str) -> pathlib.Path:
        return pathlib.Path(os.path.expanduser(self.path.replace(_SPLIT, split)))

    def _checked(self, file: foreign_files.Npz) -> tuple[int, ...]:
        """Returns the shape [N, H, W, C] of the images in a file, from its headers."""
        images, labels = [file.header(name).stand_in() for name in ("images", "labels")]
        if images.ndim == 3:
            images = images[..., None]
        errors.raise_all(_array_faults(images, labels), where=str(file.path))
        return images.shape


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Folder:
    """Image files in one folder for each class; classes are numbered in the order of their names.

    If `{split}` is in the path and there is a split "train", its folders define the numbers of the
    classes, so that a split without some of them has the same labels. Otherwise all splits must
    have the same folders, some of which may be empty. Names that begin with a dot are ignored. A
    warning counts files of other kinds, and images outside of the class folders.

    Images are identified by their names and sizes in bytes, which a copy keeps, unlike times. A
    file that is replaced by one of equal name and size is not noticed: reading all files of a large
    folder would take minutes.

    Attributes:
        path: the folder of the class folders; `{split}` in it is replaced by the split.
        channels: 3 reads colour, 1 grey.
    """

    path: str
    channels: int = 3

    def __post_init__(self):
        if self.channels not in (1, 3):
            raise errors.UserError(
                f"Folder: channels={self.channels} must be 1 (grey) or 3 (colour)."
            )

    def open(self, split: str) -> ImageSet:
        """Lists the files, without reading them.

        Raises:
            UserError: there is no image, or a class folder holds only files of other kinds.
        """
        root = self._root(split)
        if not root.is_dir():
            raise errors.UserError(f"path={root} is no folder; name one with a folder per class.")
        own, classes = _class_folders(root), self._classes(root)
        files: list[tuple[pathlib.Path, int]] = []
        unread = [path for path in root.iterdir() if _is_image(path) and not path.is_dir()]
        for label, name in enumerate(classes):
            images, others = _class_files(root / name) if name in own else ([], [])
            files += [(path, label) for path in images]
            unread += others
        if unread:
            warnings.warn(
                f"path={root}: {len(unread):,} files are not read, such as "
                f"{str(unread[0].relative_to(root))!r}: images are files in class folders that end "
                f"in {', '.join(_SUFFIXES)}.",
                stacklevel=2,
            )
        if not files:
            raise errors.UserError(
                f"path={root} holds no image; expected files that end in {', '.join(_SUFFIXES)}, "
                "in one folder for each class."
            )
        names = [str(path.relative_to(root)) for path, _ in files]
        if classes != own:
            names += classes

        def read(index: int) -> tuple[np.ndarray, int]:
            path, label = files[index]
            return decode(path, channels=self.channels), label

        return ImageSet(
            size=len(files),
            labels=(files[0][1], files[-1][1]),
            read=read,
            fingerprint=_digest(names),
            class_names=tuple(map(errors.printable, classes)),
            content=_digest([*names, *(_num_bytes(path) for path, _ in files)]),
        )

    def _root(self, split: str) -> pathlib.Path:
        return pathlib.Path(os.path.expanduser(self.path.replace(_SPLIT, split)))

    def _classes(self, root: pathlib.Path) -> list[str]:
        """Returns the classes in the order of their numbers."""
        own = _class_folders(root)
        if _SPLIT not in self.path:
            return own
        train = self._root("train")
        if train.is_dir():
            known = _class_folders(train)
            strange = [name for name in own if name not in known]
            if strange:
                raise errors.UserError(
                    f"path={root} has folders that {train} lacks: "
                    f"{', '.join(errors.abbreviate(strange))}; those of train number the classes, "
                    "so add them there (they can be empty), or remove them here."
                )
            return known
        for other in self._siblings(root):
            # Folders without common classes are not splits of the same data.
            if set(folders := _class_folders(other)) & set(own) and folders != own:
                raise errors.UserError(
                    f"path={root} and {other} have different folders, so that their classes would "
                    "be numbered differently; call the folder of the training images train, or "
                    "give both the same folders (they can be empty)."
                )
        return own

    def _siblings(self, root: pathlib.Path) -> list[pathlib.Path]:
        """Returns the folders of possible other splits."""
        pattern = glob.escape(self.path.replace(_SPLIT, "\0")).replace("\0", "*")
        folders = [pathlib.Path(name) for name in sorted(glob.glob(os.path.expanduser(pattern)))]
        return [path for path in folders if path.is_dir() and path != root]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Tfds:
    """A TFDS data set with features `image` and `label`, such as mnist, cifar10, imagenet2012.

    It must be prepared in a format with random access; nothing is downloaded.

    Attributes:
        name: name of the data set; include its version for reproducible runs: "mnist:3.0.1".
        data_dir: folder of its data; None means TFDS's default.
    """

    name: str
    data_dir: str | None = None

    def open(self, split: str) -> ImageSet:
        """Returns the images of a split."""
        foreign_files.check_tfds(self.name, self.data_dir, setting="name")
        with quiet_imports.without_tensorflow_chatter():
            import tensorflow_datasets as tfds
        _tensorflow()
        tfds_features.import_none_of_others()
        try:
            builder: Any = tfds.builder(self.name, data_dir=self.data_dir)
            examples = builder.as_data_source(split=split)
        except errors.UserError:
            raise
        except Exception as error:  # TFDS raises many kinds.
            raise errors.UserError(
                f"split={split!r} of name={self.name!r} cannot be read; prepare it with `tfds "
                f"build {self.name} --file_format=array_record`, or set data_dir to where it is. "
                f"TFDS says: {str(error).strip().splitlines()[0]}"
            ) from None
        features = builder.info.features
        if not features or not {"image", "label"} <= set(features):
            raise errors.UserError(
                f"name={self.name!r} has no features image and label; choose a data set for the "
                "classification of images."
            )
        image, label = features["image"], features["label"]
        kinds = tfds.features.Image, tfds.features.ClassLabel
        if not all(map(isinstance, (image, label), kinds)) or image.np_dtype != np.uint8:
            raise errors.UserError(
                f"name={self.name!r} has image={image} and label={label}; choose a data set with "
                "an Image of uint8 and a ClassLabel."
            )

        def read(index: int) -> tuple[np.ndarray, int]:
            example: Any = examples[index]
            return np.asarray(example["image"]), int(example["label"])

        return ImageSet(
            size=len(examples),
            labels=(0, label.num_classes - 1),
            read=read,
            fingerprint=f"{builder.info.full_name} {split} {len(examples)}",
            class_names=tuple(label.names),
        )


def _array_faults(images: np.ndarray, labels: np.ndarray) -> list[str]:
    """Returns errors in arrays of images [N, H, W, C] and labels."""
    faults = []
    if images.dtype != np.uint8 or images.ndim != 4:
        faults.append(
            f"images are {images.dtype} {images.shape}; they must be uint8 [N, H, W] or "
            "[N, H, W, C]."
        )
    elif images.shape[-1] not in (1, 3):
        faults.append(f"images have {images.shape[-1]} channels; they must have 1 (grey) or 3.")
    elif not images.size and len(images):
        faults.append(f"images are {images.shape[1]}x{images.shape[2]} and have no pixel.")
    if not images.ndim or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        count = len(images) if images.ndim else "the"
        faults.append(
            f"labels are {labels.dtype} {labels.shape}; they must be integers, one for each of "
            f"{count} images."
        )
    elif not len(labels):
        faults.append("there is no image.")
    return faults


def _class_folders(root: pathlib.Path) -> list[str]:
    children = (child for child in root.iterdir() if not child.name.startswith("."))
    return sorted(child.name for child in children if child.is_dir())


def _class_files(folder: pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Returns the images of a class, at any depth, and its files of other kinds."""
    paths = sorted(map(pathlib.Path, foreign_files.files_below(folder)))
    images = list(filter(_is_image, paths))
    others = list(itertools.filterfalse(_is_image, paths))
    if others and not images:
        raise errors.UserError(
            f"class folder {str(folder)!r} holds no image, but {len(others):,} files of other "
            f"kinds, such as {others[0].name!r}; convert them to one of {', '.join(_SUFFIXES)}, or "
            "remove them: a class may be empty."
        )
    return images, others


def _num_bytes(path: pathlib.Path) -> str:
    try:
        return str(os.stat(path).st_size)
    except OSError:  # Whoever reads it refuses or skips it.
        return ""


def _digest(lines: list[str]) -> str:
    return hashlib.sha256(os.fsencode("\n".join(lines))).hexdigest()


def _is_image(path: pathlib.Path) -> bool:
    return path.suffix.lower() in _SUFFIXES


def in_memory(images: np.ndarray, labels: np.ndarray) -> ImageSet:
    """Returns arrays as a set of images."""
    digest = hashlib.sha256(np.ascontiguousarray(images).data)
    digest.update(labels.astype(np.int64).tobytes())
    return ImageSet(
        size=len(labels),
        labels=(int(labels.min()), int(labels.max())),
        read=lambda index: (images[index], int(labels[index])),
        fingerprint=digest.hexdigest(),
    )


def decode(path: pathlib.Path, *, channels: int) -> np.ndarray:
    """Returns the pixels of a file, uint8 [height, width, channels]; of animations, the first.

    Photographs are turned upright as their metadata says, as viewers and pycls (by OpenCV) do.

    Raises:
        CorruptImage: it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # Opening a pipe may hang.
            raise _NoImageError("it is no regular file")
        content = path.read_bytes()
        orientation = _orientation(content)
        # TensorFlow ignores the palette of a .bmp, unpacks all images of a .gif, and refuses
        # transparency in a .webp.
        by_pillow = content.startswith((b"BM", b"GIF")) or content[8:12] == b"WEBP"
        pixels = (_by_pillow if by_pillow else _decode_bytes)(content, channels)
        return _UPRIGHT.get(orientation, np.asarray)(pixels)
    except (OSError, _NoImageError) as error:
        raise CorruptImage(
            f"{path} cannot be read as an image ({error}); replace or remove it, or set "
            "on_corrupt='skip'."
        ) from None


class _NoImageError(Exception):
    """Raised for bytes that are not an image."""


_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: np.rot90,
}
"""Undoes each orientation of EXIF; 1 is upright."""


def _orientation(content: bytes) -> int:
    """Returns the orientation of an image according to its header.

    Raises:
        _NoImageError: it has too many pixels: a file of kilobytes may unpack to gigabytes.
    """
    Image.init()
    for name in _FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(content[:16]) is True:
            try:
                image = factory(io.BytesIO(content), "")
            except Exception as error:  # Pillow raises many kinds.
                raise _NoImageError(str(error)) from None
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise _NoImageError(
                    f"{width}x{height} are more than {MOST_PIXELS:,} pixels; make it smaller"
                )
            return _exif_orientation(image)
    raise _NoImageError(f"it is none of {', '.join(_FORMATS)}")


def _exif_orientation(image: Image.Image) -> int:
    if "exif" not in image.info:  # Pillow would unpack a .png to look for it at the end.
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Damaged metadata, of which Pillow raises many kinds, hide no pixels.
        return 1


def _decode_bytes(content: bytes, channels: int) -> np.ndarray:
    tf = _tensorflow()
    try:
        return tf.io.decode_image(content, channels=channels, expand_animations=False).numpy()
    except tf.errors.OpError as error:
        fault = _NoImageError(str(error.message).strip().splitlines()[0])
    if channels == 1:  # TensorFlow reads some formats only in colour.
        with contextlib.suppress(_NoImageError):
            return _by_pillow(content, channels)
    raise fault


def _by_pillow(content: bytes, channels: int) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(content), formats=("BMP", "GIF", "JPEG", "WEBP")) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow raises many kinds.
        raise _NoImageError(str(error)) from None
    return pixels.reshape(*pixels.shape[:2], channels)


@functools.cache
def _tensorflow() -> Any:
    """Imports TensorFlow, which only files need, and hides accelerators from it."""
    with quiet_imports.without_tensorflow_chatter():
        import tensorflow as tf

    quiet_imports.hide_accelerators(tf)
    return tf
