"""seqio sources of whole documents, in the feature "text": local files, TFDS, text in memory.

The order of documents is determined by the seed, separately for each host and epoch.
"""

import collections
import contextlib
import functools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.runtime import foreign_files, tfds_features

from .text_files import TextFiles

_OPEN_FILES = 16
_PIECE_BYTES = 2**16
_SPLIT_TOGETHER = 16  # Documents.
_TFDS_ERRORS = (AssertionError, KeyError, ValueError, FileNotFoundError)


class TextFilesSource(seqio.DataSource):
    """Documents of local files; each split is a part of a `TextFiles`.

    Documents of more than 64 KiB are split into consecutive pieces.
    """

    def __init__(self, splits: Mapping[str, tuple[TextFiles, str]]):
        self._files = dict(splits)
        super().__init__(splits=tuple(splits))

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return False

    @property
    def performs_internal_shuffling(self) -> bool:
        return True

    def fingerprint(self) -> str:
        """Returns an identifier of the text, compared when a run resumes."""
        return "-".join(files.fingerprint() for files, _ in self._files.values())

    def num_input_examples(self, split: str) -> int:
        return sum(_num_records(name) for name in self.list_shards(split))

    @property
    def is_at_hand(self) -> bool:
        """Whether the documents are stored, or few enough to be stored at once."""
        return all(files.is_at_hand() for files, _ in self._files.values())

    def check_rows(self, split: str) -> None:
        """Reads the first documents of each file of a split, without storing them.

        Raises:
            UserError: they contain something that is not text.
        """
        self._files[split][0].check()

    def files(self, split: str) -> list[str]:
        """Returns the files of a split; none for documents held out of those of another."""
        files, part = self._files[split]
        return files.files() if part == "train" else []

    def list_shards(self, split: str) -> Sequence[str]:
        files, part = self._files[split]
        shards = files.stored()[part]
        if not shards:
            raise errors.UserError(
                f"split={split!r} of text path={files.path!r} holds no document: too few to hold "
                "any out; set validation_path, a larger validation_fraction, or separator='line'."
            )
        return shards

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_,
    ) -> tf.data.Dataset:
        names = list(self.list_shards(split))
        folder = os.path.dirname(names[0])
        shards = tf.data.Dataset.from_tensor_slices(names)
        shards = _take_share(shards, shard_info)
        if shuffle:
            shards = shards.shuffle(len(names), seed=seed)

        def read(name: tf.Tensor) -> tf.data.Dataset:
            # A saved position holds file names, which may have moved to another folder.
            name = tf.strings.regex_replace(name, ".*/", "")
            documents = tf.data.TFRecordDataset(tf.strings.join([folder, name], os.sep))
            return documents.batch(_SPLIT_TOGETHER).map(_split_long).unbatch()

        documents = shards.interleave(
            read,
            cycle_length=_OPEN_FILES,
            block_length=1,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        # All files are open at once: tasks with the same files would read the same documents.
        if shuffle and len(names) <= _OPEN_FILES:
            documents = documents.shuffle(self.num_input_examples(split), seed=seed)
        return documents.map(lambda text: {"text": text})


class PreparedTfdsSource(seqio.TfdsDataSource):
    """A prepared TFDS data set; never downloads."""

    def __init__(
        self,
        tfds_name: str,
        data_dir: str | None,
        splits: Mapping[str, str] | None = None,
        *,
        fields: Sequence[str] = (),
    ):
        """Names a data set without reading it.

        Args:
            tfds_name: name, configuration and version.
            data_dir: folder of the TFDS data; None means TFDS's default.
            splits: TFDS's name or slice of each split; None means "train" and "validation".
            fields: features that it must have.

        Raises:
            UserError: the name has no version.
        """
        if ":" not in tfds_name:
            raise errors.UserError(
                f"tfds_name={tfds_name!r} has no version; set it to one such as 'c4/en:3.1.0'."
            )
        foreign_files.check_tfds(tfds_name, data_dir, setting="tfds_name")
        tfds_features.import_none_of_others()
        self._tfds_name = tfds_name
        self._fields = tuple(fields)
        self._names = dict(splits or {"train": "train", "validation": "validation"})
        super().__init__(
            tfds_name,
            tfds_data_dir=data_dir,
            splits=dict(self._names),
            read_only=True,
        )

    def list_shards(self, split: str) -> Sequence[str]:
        with self._explained(split):
            return super().list_shards(split)

    def num_input_examples(self, split: str) -> int | None:
        with self._explained(split):
            return super().num_input_examples(split)

    def get_dataset(self, split: str | None = None, *args, **kwargs) -> tf.data.Dataset:
        split = split or "train"
        with self._explained(split):
            check_tfds_apart(self, split, self)
            dataset = super().get_dataset(split, *args, **kwargs)
        spec: Any = dataset.element_spec
        missing = [name for name in self._fields if name not in spec]
        if missing:
            raise errors.UserError(
                f"tfds_name={self._tfds_name!r} has no feature {missing[0]!r}, but {sorted(spec)}; "
                "name a data set that has it."
            )
        return dataset

    @contextlib.contextmanager
    def _explained(self, split: str) -> Iterator[None]:
        try:
            yield
        except errors.UserError:
            raise
        except _TFDS_ERRORS as error:
            self._check_split(split)
            raise errors.UserError(
                f"tfds_name={self._tfds_name!r} is not prepared in data_dir="
                f"{self.tfds_dataset.data_dir or '~/tensorflow_datasets'!r}; prepare it with "
                f"`tfds build {self._tfds_name}`, or set data_dir to where it is. "
                f"TFDS says: {str(error).partition(chr(10))[0]}"
            ) from error

    def _check_split(self, split: str) -> None:
        """Raises `UserError` for a split that an existing data set does not have."""
        try:
            known = list(self.tfds_dataset.info.splits)
        except _TFDS_ERRORS:
            return
        asked = self._names.get(split, split)
        unknown = [
            name for part in asked.split("+") if (name := part.partition("[")[0]) not in known
        ]
        if known and unknown:
            raise errors.UserError(
                f"split={split!r} of tfds_name={self._tfds_name!r} is {asked!r} of TFDS, which has "
                f"{sorted(known)}; choose one of these, or, where the task has the setting splits, "
                "set it, such as {'train': 'train[:99%]', 'validation': 'train[99%:]'}."
            )


def check_tfds_apart(
    source: seqio.TfdsDataSource, split: str, trained: seqio.TfdsDataSource
) -> None:
    """Raises `UserError` if examples of a split are also in the "train" of a source.

    The same name for the "train" and the split of a source is let be, as are sources with the same
    "train", which each compares with its own split.
    """
    names = source.tfds_dataset._split_map or {}
    train, held_out = (trained.tfds_dataset._split_map or {}).get("train"), names.get(split)
    alike = held_out if trained is source else names.get("train")
    if not isinstance(train, str) or not isinstance(held_out, str) or train == alike:
        return
    try:
        is_apart = not _have_common_examples(
            trained.tfds_dataset.info.splits[train].file_instructions,
            source.tfds_dataset.info.splits[held_out].file_instructions,
        )
    except _TFDS_ERRORS:
        return  # Reading it tells what is wrong.
    if not is_apart:
        raise errors.UserError(
            f"split={split!r} of tfds_name={source.tfds_dataset.name!r} is {held_out!r} of TFDS, "
            f"and 'train'{' of another task' * (trained is not source)} is {train!r}, which has "
            "some of its examples, so what measures the model would be trained on; set splits, "
            "such as {'train': 'train[:99%]', 'validation': 'train[99%:]'}."
        )


def _have_common_examples(train: Sequence[Any], held_out: Sequence[Any]) -> bool:
    """Returns whether parts of files that TFDS reads for two splits overlap."""
    of_file = collections.defaultdict(list)
    for part in train:
        of_file[part.filename].append(part)
    return any(
        max(part.skip, other.skip) < min(part.skip + part.take, other.skip + other.take)
        for part in held_out
        for other in of_file[part.filename]
    )


class ItemSource(seqio.DataSource):
    """A source of items that every host can access at once, such as row numbers of a table.

    Hosts share the items, shuffle their own in every epoch, and then make examples of them. A saved
    position thus holds items rather than examples. Subclasses implement `items` and `examples`.
    """

    def __init__(self, splits: Sequence[str]):
        super().__init__(splits=tuple(splits))

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        """Returns the items of a split in order, and the size of the shuffle buffer."""
        raise NotImplementedError

    def examples(self, split: str, items: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the example of each item, in order."""
        raise NotImplementedError

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    @property
    def performs_internal_shuffling(self) -> bool:
        return True

    def list_shards(self, split: str) -> Sequence[str]:
        return [split]

    def num_input_examples(self, split: str) -> int | None:
        known = int(self.items(split)[0].cardinality())
        return known if known >= 0 else None

    def get_dataset(
        self,
        split: str = "train",
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_,
    ) -> tf.data.Dataset:
        items, shuffled = self.items(split)
        items = _take_share(items, shard_info)
        if shuffle:
            items = items.shuffle(shuffled, seed=seed)
        return self.examples(split, items)


class EmbeddedTextSource(ItemSource):
    """A few documents in memory."""

    def __init__(self, splits: Mapping[str, Sequence[str]]):
        self._documents = {split: list(documents) for split, documents in splits.items()}
        super().__init__(tuple(splits))

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        documents = self._documents[split]
        return tf.data.Dataset.from_tensor_slices(documents), len(documents)

    def examples(self, split: str, items: tf.data.Dataset) -> tf.data.Dataset:
        return items.map(lambda text: {"text": text})


def shuffle_buffer_size(source: seqio.DataSource) -> int | None:
    """Returns the size of a task's shuffle buffer; None if the source has shuffled everything.

    Buffered examples are part of each saved position.
    """
    return None if source.performs_internal_shuffling else seqio.SHUFFLE_BUFFER_SIZE


@functools.lru_cache(maxsize=4096)
def _num_records(path: str) -> int:
    """Counts the records of a TFRecord file by their length fields: 12 bytes before, 4 after."""
    count, size = 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while file.tell() < size:
            (length,) = struct.unpack("<Q", file.read(8))
            file.seek(length + 8, os.SEEK_CUR)
            count += 1
    return count


def pieces(document: bytes, most: int) -> list[bytes]:
    """Splits text after spaces into parts of at most `most` bytes, whose concatenation is the text.

    Text without spaces is split between two characters.
    """
    parts, start = [], 0
    while len(document) - start > most:
        end = 1 + max(document.rfind(blank, start, start + most) for blank in (b" ", b"\n"))
        if end <= start:
            end = start + most
            while end > start + 1 and document[end] & 0xC0 == 0x80:  # Inside a character.
                end -= 1
        parts.append(document[start:end])
        start = end
    return [*parts, document[start:]]


def _split_long(documents: tf.Tensor) -> tf.Tensor:
    """Splits the long ones of several documents; returns all parts, in order."""

    def split(documents: np.ndarray) -> np.ndarray:
        parts = [part for document in documents for part in pieces(document, _PIECE_BYTES)]
        return np.array(parts, object)

    def cut() -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(split, [documents], tf.string), [None])

    is_long = tf.strings.length(documents) > _PIECE_BYTES
    return tf.cond(tf.reduce_any(is_long), cut, lambda: documents)


def _take_share(dataset: tf.data.Dataset, shard_info: seqio.ShardInfo | None) -> tf.data.Dataset:
    if shard_info is None:
        return dataset
    return dataset.shard(shard_info.num_shards, shard_info.index)
