"""Batches of images: in a known order, from where a run stopped, with faults named by file."""

import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import shutil
import struct
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from convt5.data.prefetching import position, split_position
from convt5.errors import UserError
from convt5.vision.augmentation import Augmentation, resize
from convt5.vision.images import ImageDataConfig
from convt5.vision.sources import CorruptImage, Digits, Folder, Npz, Tfds, decode, in_memory


@dataclasses.dataclass(frozen=True)
class Numbered:
    """Images whose every pixel is their number, labelled with it modulo 5."""

    count: int = 23

    def open(self, split):
        numbers = np.arange(self.count)
        pixels = np.broadcast_to(numbers[:, None, None, None], (self.count, 4, 4, 1))
        return in_memory(pixels.astype(np.uint8), numbers % 5)


def config(**changes) -> ImageDataConfig:
    known = {
        "source": Numbered(),
        "batch_size": 6,
        "image_size": 4,
        "in_channels": 1,
        "num_classes": 5,
        "mean": 0.0,
        "stddev": 1 / 255,
    }
    return ImageDataConfig(**known | changes)


def build(host: int = 0, hosts: int = 1, **changes):
    return config(**changes).build(process_index=host, process_count=hosts)


def numbers(batch) -> list[int]:
    return np.round(batch["images"][:, 0, 0, 0]).astype(int).tolist()


def test_finite_data_gives_every_image_once_in_order():
    batches = list(build(num_epochs=1, shuffle=False))
    seen = [n for batch in batches for n in np.extract(batch["weights"], numbers(batch))]
    assert seen == list(range(23))
    assert [len(batch["labels"]) for batch in batches] == [6, 6, 6, 6]
    assert batches[-1]["weights"].tolist() == [1, 1, 1, 1, 1, 0]
    for batch in batches:
        np.testing.assert_array_equal(batch["labels"], np.asarray(numbers(batch)) % 5)


def test_endless_data_gives_every_image_once_in_each_epoch():
    batches = build(batch_size=23)
    first, second = numbers(next(batches)), numbers(next(batches))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != numbers(next(build(batch_size=23, seed=1)))


def test_hosts_share_each_batch():
    whole = build()
    hosts = [build(host, 3) for host in range(3)]
    for _ in range(5):
        parts = [number for host in hosts for number in numbers(next(host))]
        assert parts == numbers(next(whole))


AUGMENTED = {"augmentation": Augmentation(crop_area=(0.2, 1), flip=True, mixup_alpha=1.0)}


@pytest.mark.parametrize("changes", [{}, AUGMENTED])
@pytest.mark.parametrize("taken", [0, 3, 9])
def test_a_position_continues_with_the_same_batches(changes, taken):
    batches, again = build(**changes), build(**changes)
    for _ in range(taken):
        next(batches)
    again.set_state(batches.get_state())
    for _ in range(4):
        jax.tree.map(np.testing.assert_array_equal, next(batches), next(again))
    skipped = build(**changes)
    snapshot, _ = split_position(build(**changes).get_state())
    skipped.set_state(position(snapshot, taken + 4))
    jax.tree.map(np.testing.assert_array_equal, next(skipped), next(batches))


def test_a_position_of_other_data_is_refused():
    state = build().get_state()
    for changes in ({"seed": 3}, {"source": Numbered(24)}):
        with pytest.raises(UserError, match="the data of the run changed since its checkpoint"):
            build(**changes).set_state(state)


def test_a_run_goes_on_where_its_images_were_copied_to(tmp_path):
    images = np.arange(12 * 4 * 4, dtype=np.uint8).reshape(12, 4, 4)
    np.savez(tmp_path / "train.npz", images=images, labels=np.arange(12) % 5)

    def build_from(path):
        return build(source=Npz(path=str(path)))

    batches = build_from(tmp_path / "train.npz")
    next(batches)
    state, expected = batches.get_state(), next(batches)
    resumed = build_from(shutil.move(tmp_path / "train.npz", tmp_path / "moved.npz"))
    resumed.set_state(state)
    jax.tree.map(np.testing.assert_array_equal, next(resumed), expected)


def test_values_are_normalised_and_channels_repeated_or_swapped():
    batch = next(build(in_channels=3, mean=(0.1, 0.2, 0.3), stddev=0.5, shuffle=False))
    expected = (3 / 255 - np.asarray([0.1, 0.2, 0.3])) / 0.5
    np.testing.assert_allclose(batch["images"][3, 0, 0], expected, rtol=1e-6)
    swapped = config(
        in_channels=3, mean=(0.1, 0.2, 0.3), stddev=0.5, shuffle=False, channel_order="bgr"
    )
    images = next(swapped.build(process_index=0, process_count=1))["images"]
    np.testing.assert_array_equal(images, batch["images"][..., ::-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 4}, "labels run from 0 to 4 .* num_classes=4"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"resize_size": 3}, "resize_size=3 must be at least image_size=4"),
        ({"in_channels": 2}, "in_channels=2 must be 1"),
        ({"channel_order": "gbr"}, "channel_order='gbr' must be one of rgb, bgr"),
        ({"on_corrupt": "ignore"}, "on_corrupt='ignore' must be one of refuse, skip"),
        ({"mean": (0.1, 0.2)}, "must be one number, or 1"),
        ({"stddev": 0.0}, "stddev=0.0 must be positive"),
        ({"stddev": np.inf}, "stddev=inf must be positive, and finite"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        build(**changes)


def test_a_batch_that_hosts_cannot_share_is_refused():
    with pytest.raises(UserError, match="batch_size=6 cannot be split evenly over 4 hosts"):
        build(0, 4)


def test_colour_is_not_made_grey_silently(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4, 3), np.uint8), labels=np.arange(3))
    with pytest.raises(UserError, match="images have 3 channels, and in_channels=1"):
        next(build(source=Npz(path=f"{tmp_path}/a.npz")))


def test_the_digits_are_split_without_overlap():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    splits = [Digits().open(split) for split in ("train", "validation", "test")]
    assert [split.size for split in splits] == [1199, 299, 299]
    assert {split.labels for split in splits} == {(0, 9)}
    train = splits[0]
    assert train.read(0)[0].shape == (8, 8, 1)
    assert max(train.read(i)[0].max() for i in range(100)) == 255
    with pytest.raises(UserError, match="must be train, validation or test"):
        Digits().open("all")


def test_arrays_come_from_the_file_of_a_split(tmp_path):
    for split in ("train", "test"):
        images = np.full((2, 4, 4), len(split), np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(2, dtype=np.uint8))
    source = Npz(path=f"{tmp_path}/{{split}}.npz")
    assert numbers(next(build(source=source, split="test", batch_size=2))) == [4, 4]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 4, 4), np.uint8)}, r"a\.npz cannot be read .*labels"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "they must be uint8"),
        (
            {"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, int)},
            "one for each of 2 images",
        ),
        (
            {"images": np.zeros((0, 4, 4), np.uint8), "labels": np.zeros(0, int)},
            "there is no image",
        ),
        (
            {"images": np.uint8(3), "labels": np.int64(2)},
            r"images are uint8 \(\); .*\n.*one for each of the images",
        ),
        (
            {"images": np.zeros((2, 0, 0, 3), np.uint8), "labels": np.zeros(2, int)},
            "images are 0x0 and have no pixel",
        ),
        (
            {"images": np.zeros((2, 4, 4, 4), np.uint8), "labels": np.zeros(2, int)},
            r"images have 4 channels; they must have 1 \(grey\) or 3",
        ),
    ],
)
def test_arrays_that_are_no_images_are_named(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        Npz(path=f"{tmp_path}/a.npz").open("train")


@pytest.mark.parametrize("kind", ["half", "array", "flipped"])
def test_a_damaged_file_of_arrays_is_named(kind, tmp_path):
    if kind == "half":
        (tmp_path / "a.npz").write_bytes(b"PK\x03\x04half")
    elif kind == "array":  # As np.save writes it.
        with (tmp_path / "a.npz").open("wb") as file:
            np.save(file, np.zeros((2, 4, 4), np.uint8))
    else:
        np.savez_compressed(tmp_path / "a.npz", images=pixels(8, 9)[None], labels=np.zeros(1, int))
        whole = bytearray((tmp_path / "a.npz").read_bytes())
        whole[60:200] = bytes(byte ^ 255 for byte in whole[60:200])
        (tmp_path / "a.npz").write_bytes(whole)
    with pytest.raises(UserError, match=r"a\.npz cannot be read"):
        Npz(path=f"{tmp_path}/a.npz").open("train")


@functools.cache
def tensorflow():
    with warnings.catch_warnings():  # TensorFlow's own imports warn.
        warnings.simplefilter("ignore")
        return pytest.importorskip("tensorflow", reason="only TensorFlow decodes image files")


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Four grey images in two classes, of different sizes."""
    tf = tensorflow()
    for index, name in enumerate(("cat/1.png", "cat/2.png", "dog/10.png", "dog/11.PNG")):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((5 + index, 9, 1), 10 * index, np.uint8)
        path.write_bytes(tf.io.encode_png(pixels).numpy())
    return tmp_path / "images"


def test_a_folder_has_a_class_in_each_of_its_folders(folder):
    (folder / "notes.txt").write_text("no image")
    opened = Folder(path=str(folder), channels=1).open("train")
    assert opened.class_names == ("cat", "dog")
    source = Folder(path=str(folder), channels=1)
    batch = next(build(source=source, batch_size=4, num_epochs=1, shuffle=False))
    assert numbers(batch) == [0, 10, 20, 30]
    assert batch["labels"].tolist() == [0, 0, 1, 1]


def test_a_position_of_a_folder_whose_images_changed_is_refused(folder, tmp_path):
    def build_from(path):
        return build(source=Folder(path=str(path), channels=1))

    state = build_from(folder).get_state()
    build_from(shutil.copytree(folder, tmp_path / "copy")).set_state(state)
    (tmp_path / "copy" / "cat" / "1.png").write_bytes((folder / "dog" / "10.png").read_bytes())
    with pytest.raises(UserError, match=r"the data of the run changed since its .*content: "):
        build_from(tmp_path / "copy").set_state(state)
    earlier = json.loads(split_position(state)[0])
    del earlier["settings"]["content"]  # Earlier versions told the names alone.
    build_from(tmp_path / "copy").set_state(position(json.dumps(earlier).encode()))


def test_files_of_a_folder_that_are_not_read_are_told(folder):
    for name in ("1.jpg", "cat/scan.tif", "dog/Thumbs.db"):
        (folder / name).touch()
    with pytest.warns(UserWarning, match=r"images: 3 files are not read, such as '1.jpg': images"):
        assert Folder(path=str(folder)).open("train").size == 4
    (folder / "dog" / "10.png").unlink()
    (folder / "dog" / "11.PNG").unlink()
    with pytest.raises(UserError, match=r"dog' holds no image, but 1 files .* such as 'Thumbs.db'"):
        Folder(path=str(folder)).open("train")


def test_names_of_images_may_be_any_bytes(folder):
    (folder / "cat").rename(folder / os.fsdecode(b"c\xe4t"))
    (folder / "dog" / "10.png").rename(folder / "dog" / os.fsdecode(b"10 %\n\xff.png"))
    opened = Folder(path=str(folder), channels=1).open("train")
    assert [opened.read(i)[1] for i in range(opened.size)] == [0, 0, 1, 1]
    assert opened.class_names == ("c\\udce4t", "dog")


def test_a_folder_holds_images_of_every_kind_of_file(tmp_path):
    (tmp_path / "cat").mkdir()
    for kind in ("bmp", "gif", "jpeg", "jpg", "PNG", "webp"):
        Image.fromarray(pixels(4, 4)).save(tmp_path / "cat" / f"1.{kind}")
    assert Folder(path=str(tmp_path)).open("train").size == 6


def test_hidden_folders_and_files_are_no_classes_and_no_images(folder):
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / "cat" / "folder.png").mkdir()
    (folder / "cat" / "._1.png").write_bytes(b"of another system")
    opened = Folder(path=str(folder), channels=1).open("train")
    assert (opened.class_names, opened.size, opened.labels) == (("cat", "dog"), 4, (0, 1))


def test_links_to_folders_of_images_are_followed(folder, tmp_path):
    (folder / "cat").rename(tmp_path / "elsewhere")
    (folder / "cat").mkdir()
    (folder / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    assert Folder(path=str(folder), channels=1).open("train").size == 4


def written(root: pathlib.Path, splits: dict[str, str]) -> Folder:
    """One image in each of the class folders, whose names are letters, of each split."""
    tf = tensorflow()
    for split, classes in splits.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            encoded = tf.io.encode_png(np.zeros((4, 4, 1), np.uint8)).numpy()
            (root / split / name / "1.png").write_bytes(encoded)
    return Folder(path=f"{root}/{{split}}", channels=1)


def test_the_folders_of_train_number_the_classes_of_all_splits(tmp_path):
    source = written(tmp_path, {"train": "abc", "validation": "bc", "test": "abcz"})
    opened = source.open("validation")
    assert opened.class_names == source.open("train").class_names == ("a", "b", "c")
    assert opened.labels == (1, 2)
    assert [opened.read(i)[1] for i in range(opened.size)] == [1, 2]
    with pytest.raises(UserError, match=r"test has folders that .*train lacks: z; those of train"):
        source.open("test")


def test_without_train_splits_of_different_classes_are_refused(tmp_path):
    source = written(tmp_path, {"training": "abc", "validation": "bc", "others": "xy"})
    for split in ("training", "validation"):
        with pytest.raises(UserError, match="have different folders, so that their classes"):
            source.open(split)
    (tmp_path / "validation" / "a").mkdir()
    assert source.open("validation").labels == (1, 2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("kind", "mode", "tolerance"),
    [
        ("bmp", "RGB", 0),
        ("bmp", "P", 0),
        ("bmp", "1", 0),
        ("gif", "P", 0),
        ("jpeg", "CMYK", 6),
        ("webp", "RGB", 0),
        ("webp", "RGBA", 0),
    ],
)
def test_every_kind_of_file_is_read_in_colour_and_grey(channels, kind, mode, tolerance, tmp_path):
    tensorflow()
    path = tmp_path / "1.jpg"
    Image.fromarray(pixels(10, 14)).convert(mode).save(path, kind)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    found = decode(path, channels=channels)
    assert (found.shape, found.dtype) == ((10, 14, channels), np.uint8)
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=tolerance)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation, tmp_path):
    tensorflow()
    path, exif = tmp_path / "1.jpg", Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels(10, 14)).save(path, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    # Decoders of JPEG round differently.
    np.testing.assert_allclose(decode(path, channels=3), expected, atol=6)


def test_damaged_metadata_hide_no_pixels(tmp_path):
    tensorflow()
    path, plain = tmp_path / "1.jpg", tmp_path / "2.jpg"
    Image.fromarray(pixels(10, 14)).save(path, exif=b"Exif\0\0none")
    Image.fromarray(pixels(10, 14)).save(plain)
    np.testing.assert_array_equal(decode(path, channels=3), decode(plain, channels=3))


@pytest.mark.parametrize("kind", ["bmp", "gif"])
def test_a_truncated_file_of_another_kind_is_corrupt(kind, tmp_path):
    tensorflow()
    path = tmp_path / f"1.{kind}"
    Image.fromarray(pixels(10, 14)).save(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CorruptImage, match=rf"1\.{kind} cannot be read as an image"):
        decode(path, channels=1)


@dataclasses.dataclass(frozen=True)
class PartlyCorrupt(Numbered):
    """Of which some images cannot be read."""

    corrupt: tuple[int, ...] = (6, 7, 8, 9, 10, 11, 12)

    def open(self, split):
        opened = super().open(split)

        def read(index):
            if index in self.corrupt:
                raise CorruptImage(f"image {index} cannot be read")
            return opened.read(index)

        return opened._replace(read=read)


def test_a_batch_that_is_corrupt_throughout_repeats_the_next_image_and_weighs_nothing():
    batches = build(source=PartlyCorrupt(), num_epochs=1, shuffle=False, on_corrupt="skip")
    with pytest.warns(UserWarning, match="skipped"):
        found = list(batches)
    assert [batch["weights"].sum() for batch in found] == [6, 0, 5, 5]
    assert numbers(found[1]) == [13] * 6
    assert batches.num_skipped == 7
    # A run that continues there sees the same.
    again = build(source=PartlyCorrupt(), num_epochs=1, shuffle=False, on_corrupt="skip")
    again.skip()
    with pytest.warns(UserWarning, match="skipped"):
        jax.tree.map(np.testing.assert_array_equal, next(again), found[1])


def test_a_corrupt_file_is_named_or_skipped_and_counted(folder):
    (folder / "cat" / "2.png").write_bytes(b"no image")
    source = Folder(path=str(folder), channels=1)
    with pytest.raises(UserError, match=r"cat/2\.png cannot be read as an image"):
        next(build(source=source, batch_size=4, num_epochs=1, shuffle=False))
    batches = build(source=source, batch_size=4, num_epochs=1, shuffle=False, on_corrupt="skip")
    with pytest.warns(UserWarning, match=r"skipped \(1 so far\): .*cat/2\.png"):
        batch = next(batches)
    assert batch["weights"].tolist() == [1, 0, 1, 1]
    assert batches.num_skipped == 1
    for path in folder.rglob("*.[pP][nN][gG]"):
        path.write_bytes(b"no image")
    unread = build(source=source, batch_size=4, num_epochs=1, shuffle=False, on_corrupt="skip")
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(UserError, match="none of the 4 images"),
    ):
        next(unread)


def png(width, height):
    def chunk(kind, content):
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def jpeg(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def gif(version, width, height):
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x00"
    return version + struct.pack("<HHBBB", width, height, 0, 0, 0) + frame + b";"


HUGE_IMAGES = {
    "a.png": png(2**16, 2**12),
    "wide.png": png(2**30, 1),
    "a.jpg": jpeg(65_000, 65_000),
    "a.gif": gif(b"GIF89a", 65_000, 65_000),
    "a.bmp": b"BM" + struct.pack("<IIIIiiHHIIIIII", 0, 0, 54, 40, 2**20, 2**20, 1, 24, *[0] * 6),
    "gif.png": gif(b"GIF87a", 65_000, 65_000),
}


@pytest.mark.parametrize("name", HUGE_IMAGES)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_more_pixels_than_memory_is_refused_before_it_is_unpacked(
    name, channels, tmp_path
):
    path = tmp_path / name
    path.write_bytes(HUGE_IMAGES[name])
    with pytest.raises(UserError, match=r"are more than [\d,]+ pixels"):
        decode(path, channels=channels)


def test_a_film_is_not_unpacked_whole(tmp_path):
    path = tmp_path / "a.gif"
    frames = [Image.new("P", (40, 30), color) for color in range(9)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    assert decode(path, channels=3).shape == (30, 40, 3)


def test_an_empty_or_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no image"):
        Folder(path=str(tmp_path)).open("train")
    with pytest.raises(UserError, match="is no folder"):
        Folder(path=f"{tmp_path}/{{split}}").open("train")
    with pytest.raises(UserError, match="~nobody-here/images is no folder"):
        Folder(path="~nobody-here/images").open("train")


@pytest.mark.parametrize(
    ("name", "channels", "classes"),
    [("mnist", 1, 10), ("cifar10", 3, 10), ("imagenet2012", 3, 1000)],
)
def test_tfds_gives_the_images_of_its_data_sets(name, channels, classes):
    tensorflow()
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=6):
        found = build(
            source=Tfds(name=name),
            batch_size=4,
            in_channels=channels,
            num_classes=classes,
            image_size=16,
            num_epochs=1,
            shuffle=False,
        )
        batches = list(found)
    assert [batch["weights"].sum() for batch in batches] == [4, 2]
    assert batches[0]["images"].shape == (4, 16, 16, channels)
    assert 0 <= batches[0]["labels"].min() <= batches[0]["labels"].max() < classes
    assert np.ptp(batches[0]["images"]) > 10


@pytest.mark.parametrize("name", ["mnist:3.0.1", "no_such_data_set"])
def test_what_tfds_does_not_hold_is_named(name, tmp_path):
    tensorflow()
    with pytest.raises(UserError, match=f"split='train' of name='{name}' cannot be read"):
        Tfds(name=name, data_dir=str(tmp_path)).open("train")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imdb_reviews", "has no features image and label"),
        ("chexpert", r"label=Sequence\(ClassLabel.* choose a data set with an Image of uint8"),
    ],
)
def test_data_sets_of_another_kind_are_named(name, message):
    tensorflow()
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=1), pytest.raises(UserError, match=message):
        Tfds(name=name).open("train")


def pixels(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels)
    return np.random.default_rng(height * width).integers(0, 256, shape).astype(np.uint8)


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 20), st.integers(1, 24))
def test_resizing_is_that_of_jax(size, new_size):
    image = pixels(size, size)
    expected = jax.image.resize(
        jnp.asarray(image, jnp.float32), (new_size, new_size, 3), "linear", antialias=True
    )
    np.testing.assert_allclose(resize(image, size=new_size), expected, atol=1e-2)


def test_the_middle_is_cut_out_after_the_shorter_side_is_brought_to_size():
    image = pixels(8, 16)
    np.testing.assert_array_equal(resize(image, size=8), image[:, 4:12])
    np.testing.assert_array_equal(resize(image, size=4, shorter_side=8), image[2:6, 6:10])


@pytest.mark.parametrize("turned", [False, True])
def test_thin_images_need_little_memory(turned):
    """All of this one, of 896,000 x 224 pixels, would need gigabytes."""
    image = np.arange(4000, dtype=np.uint16)[:, None, None] // 16 * np.ones((1, 1, 1), np.uint16)
    found = resize(image.swapaxes(0, 1) if turned else image, size=224)
    found = found.swapaxes(0, 1) if turned else found
    assert found.shape == (224, 224, 1)
    np.testing.assert_allclose(found, np.full(found.shape, 124.5), atol=0.5)


def test_the_size_before_cutting_is_kept_with_an_augmentation(tmp_path):
    np.savez(tmp_path / "a.npz", images=pixels(9, 12)[None], labels=np.zeros(1, int))
    known = {"source": Npz(path=f"{tmp_path}/a.npz"), "batch_size": 1, "in_channels": 3}
    known |= {"resize_size": 6, "num_epochs": 1}
    batches = [build(**known, augmentation=chosen) for chosen in (None, Augmentation())]
    np.testing.assert_array_equal(*(next(b)["images"] for b in batches))


def test_random_crops_hold_their_share_of_the_image_and_repeat_by_their_seed():
    augmentation = Augmentation(crop_area=(0.25, 0.5), flip=True)
    image = pixels(24, 30)
    crops = [augmentation.apply(image, size=12, seed=(0, i)) for i in range(6)]
    assert {crop.shape for crop in crops} == {(12, 12, 3)}
    assert all(np.abs(a - b).max() > 1 for a, b in itertools.pairwise(crops))
    np.testing.assert_array_equal(crops[4], augmentation.apply(image, size=12, seed=(0, 4)))


@pytest.mark.parametrize("kind", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_keeps_as_much_of_each_label_as_of_each_image(kind):
    batch = {
        "images": np.repeat(np.eye(4, dtype=np.float32), 64).reshape(4, 4, 8, 8).swapaxes(1, 3),
        "labels": np.arange(4),
        "weights": np.ones(4, np.float32),
    }
    mixed = Augmentation(**{kind: 1.0}).mix(batch, seed=(0, 3))
    share = mixed["images"].mean(axis=(1, 2))  # One channel for each image of the batch.
    own = share[np.arange(4), mixed["labels"]]
    np.testing.assert_allclose(own, mixed["label_share"], rtol=1e-5)
    np.testing.assert_allclose(share[np.arange(4), mixed["other_labels"]], 1 - own, rtol=1e-5)
    assert 0 < own[0] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"mixup_alpha": -1.0}, "mixup_alpha"), ({"crop_area": (0.5, 0.1)}, "crop_area")],
)
def test_augmentations_that_cannot_be_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        Augmentation(**changes)


@pytest.mark.parametrize("labels", [[-1, 0, 1], [0, 1, 5]])
def test_labels_out_of_range_are_named(labels, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 4), np.uint8), labels=np.array(labels))
    message = f"labels run from {min(labels)} to {max(labels)} in split='train'"
    with pytest.raises(UserError, match=message):
        build(source=Npz(path=f"{tmp_path}/a.npz"))


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_truncated_file_is_corrupt(kind, tmp_path):
    tf = tensorflow()
    encode = {"png": tf.io.encode_png, "jpeg": tf.io.encode_jpeg}[kind]
    whole = encode(pixels(40, 40)).numpy()
    path = tmp_path / "cat" / f"1.{kind}"
    path.parent.mkdir()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"1\.{kind} cannot be read as an image"):
        next(build(source=Folder(path=str(tmp_path)), batch_size=1, in_channels=3))


def test_a_pipe_among_images_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "1.png")
    with pytest.raises(CorruptImage, match=r"1\.png cannot be read as an image \(it is no regular"):
        decode(tmp_path / "1.png", channels=3)
