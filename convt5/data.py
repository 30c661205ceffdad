"""Batches of a seqio task or mixture, with a position that can be saved and set exactly.

Gin files bind `data.DataConfig` in the scopes `train/` and `eval/`. This is the module that needs
TensorFlow; it leaves accelerators alone.
"""

import dataclasses
import functools
import io
import json
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors, vocabulary_files
from convt5.batches.prefetching import (
    Prefetcher,
    check_settings,
    position,
    rows_per_host,
    take_apart,
)
from convt5.configuration import checks
from convt5.runtime import foreign_files
from convt5.task_format import TaskFormat
from convt5.tasks import (  # pyright: ignore[reportMissingImports]
    classification,
    formats,
    label_checks,
    row_ends,
    vocabularies,
)

__all__ = ["BatchIterator", "DataConfig", "Prefetcher", "unigram_entropy"]

tf.config.set_visible_devices([], "GPU")
tf.config.set_visible_devices([], "TPU")

_SETTINGS_FILE = "settings.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which examples are read, and how they become batches.

    Attributes:
        mixture: name of a registered seqio task or mixture, or such an object.
        split: of the task, such as "train" or "validation".
        batch_size: rows over all hosts.
        encoder_length: tokens of an encoder row, end token included.
        decoder_length: tokens of a decoder row, end token included.
        pack: several short examples share a row; taps and attention do not cross between them.
        shuffle: None shuffles endless data only.
        seed: of the order, and of everything random in the task.
        num_epochs: passes over the data; None never ends. The last batch of finite data is filled
            up with empty rows of weight 0.
    """

    mixture: Any
    split: str = "train"
    batch_size: int
    encoder_length: int
    decoder_length: int
    pack: bool = False
    shuffle: bool | None = None
    seed: int = 0
    num_epochs: int | None = None

    def __post_init__(self):
        errors.raise_all(
            checks.least_faults(
                self, ("batch_size", "encoder_length", "decoder_length", "num_epochs")
            ),
            where="DataConfig",
        )

    def provider(self) -> seqio.Task | seqio.Mixture:
        """Returns the task or mixture.

        Raises:
            UserError: nothing is registered under its name, it lacks the split or a feature, or it
                ranks labels.
        """
        provider = self.mixture
        if isinstance(provider, str):
            provider = _registered(provider)
        if not isinstance(provider, seqio.Task | seqio.Mixture):
            raise errors.UserError(
                f"mixture={provider!r} is no seqio task or mixture; name a registered one, or "
                "call a function that returns one, such as "
                "@pretraining.text_span_corruption()."
            )
        if self.split not in provider.splits:
            raise errors.UserError(
                f"split={self.split!r} is none of {sorted(provider.splits)}, the splits of "
                f"{provider.name}.{errors.suggest(self.split, provider.splits)}"
            )
        missing = {"inputs", "targets"} - set(provider.output_features)
        if missing:
            raise errors.UserError(
                f"mixture={provider.name!r} has no feature {' and '.join(sorted(missing))}; "
                "an encoder-decoder reads 'inputs' and 'targets'."
            )
        ranking = [task.name for task in seqio.get_subtasks(provider) if _holds_every_label(task)]
        if ranking:
            raise errors.UserError(
                f"mixture={provider.name!r} ranks labels: {ranking[0]!r} holds each text with "
                "every label, right or wrong, and is for evaluation alone (evaluation.TaskEval, or "
                "eval --task); name the task that was made without rank=True, or with t5's "
                "mode='train'."
            )
        return provider

    def check_model(self, model: Any) -> None:
        """Raises `UserError` for a model that reads no text, or whose stem mixes packed rows."""
        checks.check_reads_text(model)
        if self.pack:
            checks.check_reads_packed(model, "pack=True puts", "set data.DataConfig.pack = False")

    def check_labels(self) -> None:
        """Raises `UserError` for a label that `decoder_length` would cut."""
        for task in seqio.get_subtasks(self.provider()):
            label_checks.check_lengths(task, self.decoder_length, "decoder_length")

    def kept_text(self) -> vocabulary_files.KeptText | None:
        """Returns what the ids of rows stand for; None where no file could say it."""
        features = self.provider().output_features
        inputs, targets = (
            vocabulary_files.of(features[name].vocabulary) for name in ("inputs", "targets")
        )
        if inputs is None or targets is None:
            return None
        return vocabulary_files.KeptText(
            inputs, targets, features["inputs"].add_eos, self.encoder_length, self.decoder_length
        )

    def task_formats(self) -> tuple[TaskFormat, ...]:
        """Returns how each task writes its inputs."""
        return formats.of(self.provider())

    def build(self, *, process_index: int, process_count: int) -> "BatchIterator":
        """Returns this host's rows of each batch; hosts of endless data read different examples.

        Raises:
            UserError: the data cannot be read as configured.
        """
        rows = rows_per_host(self.batch_size, process_count)
        provider = self.provider()
        _readable(provider.output_features["inputs"].vocabulary)
        vocabulary = _readable(provider.output_features["targets"].vocabulary)
        self.check_labels()
        endless = self.num_epochs is None
        # Hosts must agree on the number of batches: each takes its rows from all of finite data.
        shard_info = seqio.ShardInfo(process_index, process_count) if endless else None
        first = 0 if endless else process_index * rows

        def make_batches() -> tf.data.Dataset:
            examples = self._examples(provider, shard_info)
            return examples.batch(rows if endless else self.batch_size, drop_remainder=endless)

        return BatchIterator(
            make_batches,
            row_slice=slice(first, first + rows),
            vocabulary=vocabulary,
            settings=self._settings(provider) | {"process_count": process_count},
        )

    def _examples(
        self, provider: seqio.Task | seqio.Mixture, shard_info: seqio.ShardInfo | None
    ) -> tf.data.Dataset:
        lengths = {"inputs": self.encoder_length, "targets": self.decoder_length}
        examples = row_ends.fitted(provider).get_dataset(
            sequence_length=lengths,
            split=self.split,
            shuffle=self.num_epochs is None if self.shuffle is None else self.shuffle,
            seed=self.seed,
            shard_info=shard_info if shard_info and shard_info.num_shards > 1 else None,
            num_epochs=self.num_epochs,
            # A cache in memory would become part of each saved position.
            try_in_mem_cache=False,
        )
        # Features fit by now, so that no length is left to check.
        converter = seqio.EncDecFeatureConverter(pack=self.pack, apply_length_check=False)
        return converter(examples, task_feature_lengths=lengths).with_options(pipeline_options())

    def _settings(self, provider: seqio.Task | seqio.Mixture) -> dict[str, Any]:
        """What must be equal for a saved position to mean the same batches."""
        settings = dataclasses.asdict(dataclasses.replace(self, mixture=provider.name))
        fingerprints = [
            getattr(task.source, "fingerprint", None) for task in seqio.get_subtasks(provider)
        ]
        contents = [fingerprint() for fingerprint in fingerprints if fingerprint]
        text = self.kept_text()
        return {
            **settings,
            **({"content": contents} if contents else {}),
            **({"vocabularies": [t.fingerprint for t in text[:2]]} if text else {}),
        }


class BatchIterator:
    """Host batches under the names of seqio's EncDecFeatureConverter.

    Attributes:
        vocabulary: what target ids stand for.
        token_bytes: bytes of text that each id stands for; None where that is not known.
    """

    def __init__(
        self,
        make_batches: Callable[[], tf.data.Dataset],
        *,
        row_slice: slice,
        vocabulary: seqio.Vocabulary,
        settings: Mapping[str, Any],
    ):
        self.vocabulary = vocabulary
        self.token_bytes = vocabularies.token_bytes(vocabulary)
        self._make_batches = make_batches
        self._row_slice = row_slice
        self._settings = dict(settings)
        self._iterator = iter(make_batches())
        self._at_the_start = True

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns arrays of [rows, length].

        Raises:
            UserError: there is not a single batch.
            TrainingError: the data cannot be read.
        """
        try:
            batch = next(self._iterator)
        except StopIteration:
            if not self._at_the_start:
                raise
            raise errors.UserError(
                f"mixture={self._settings['mixture']!r} gives no batch of "
                f"batch_size={self._settings['batch_size']} from split="
                f"{self._settings['split']!r}: it holds no example, or fewer than hosts read; "
                "check the data, or use fewer hosts."
            ) from None
        except tf.errors.OpError as error:
            raise errors.TrainingError(
                f"mixture={self._settings['mixture']!r}, split={self._settings['split']!r}: its "
                f"data cannot be read: {error.message.strip()}. A file may be cut short or gone: "
                "put it back, or, where it lies in a cache that is made anew, remove its whole "
                "folder; the same command then continues from the last checkpoint."
            ) from error
        self._at_the_start = False
        return {name: self._host_rows(rows.numpy()) for name, rows in batch.items()}

    def get_state(self) -> bytes:
        """Returns the position; its size follows from the buffers, not from the batches so far."""
        buffer = io.BytesIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            tf.train.Checkpoint(iterator=self._iterator).write(f"{folder}/position")
            archive.writestr(_SETTINGS_FILE, json.dumps(self._settings))
            for path in sorted(pathlib.Path(folder).iterdir()):
                archive.write(path, path.name)
        return position(buffer.getvalue())

    def set_state(self, state: bytes) -> None:
        """Goes to a position, after which the batches are those that followed when it was saved.

        Raises:
            UserError: the position belongs to other data settings.
        """
        snapshot, skip = take_apart(state)
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(io.BytesIO(snapshot)) as archive,
        ):
            own = json.loads(json.dumps(self._settings))
            saved = json.loads(archive.read(_SETTINGS_FILE))
            # Earlier versions noted the folders and dates of files, which other machines lack.
            saved.pop("text", None)
            for name in {"content", "vocabularies"} - saved.keys():
                own.pop(name, None)
            check_settings(own, saved, item="example")
            for name in archive.namelist():
                if pathlib.PurePath(name).name != name:
                    raise errors.UserError(
                        f"the data position in the checkpoint holds {name!r}, which is no plain "
                        "file name; start a new run_dir."
                    )
            try:
                unpacked = sum(member.file_size for member in archive.infolist())
                foreign_files.check_expansion(unpacked, len(snapshot))
            except foreign_files.TooLargeError as error:
                raise errors.UserError(
                    f"the data position in the checkpoint is damaged ({error}); start a new "
                    "run_dir."
                ) from None
            archive.extractall(folder)
            # A used dataset object would go on with the random numbers of its last iterator.
            self._iterator = iter(self._make_batches())
            tf.train.Checkpoint(iterator=self._iterator).read(f"{folder}/position")
        self._at_the_start = False
        for _ in range(skip):
            next(self._iterator)

    def _host_rows(self, rows: np.ndarray) -> np.ndarray:
        wanted = self._row_slice
        mine = rows[wanted]
        missing = wanted.stop - wanted.start - len(mine)
        return np.pad(mine, [(0, missing), (0, 0)]) if missing else mine


def unigram_entropy(batches: Iterator[Mapping[str, np.ndarray]], num_batches: int) -> float:
    """Returns the entropy of single target tokens over some batches, in nats per token.

    It is the least loss of a model that knows how often each token occurs and nothing else.
    """
    counts = np.zeros(0, np.int64)
    for _, batch in zip(range(num_batches), batches, strict=False):
        tokens = batch["decoder_target_tokens"][batch["decoder_loss_weights"] > 0]
        longer = np.bincount(tokens.ravel(), minlength=len(counts))
        longer[: len(counts)] += counts
        counts = longer
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _registered(name: str) -> seqio.Task | seqio.Mixture:
    names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in names:
        raise errors.UserError(
            f"mixture={name!r} is not registered with seqio; import the module that registers it "
            f"in the gin file.{errors.suggest(name, names)} Registered: {sorted(names)}."
        )
    return seqio.get_mixture_or_task(name)


def _holds_every_label(task: seqio.Task) -> bool:
    return any(map(_makes_every_label, task.preprocessors))


def _makes_every_label(step: Any) -> bool:
    """Whether a preprocessor gives each text with every label, as those of t5 do by default."""
    function, mode = step, "eval"
    if isinstance(step, functools.partial):
        function, mode = step.func, step.keywords.get("mode", mode)
    if function is classification.one_example_per_label:
        return True
    name = f"{function.__module__}.{getattr(function, '__name__', '')}"
    return name.startswith("t5.data.preprocessors.rank_classification") and mode != "train"


def _readable(vocabulary: seqio.Vocabulary) -> seqio.Vocabulary:
    """Reads the vocabulary now, so that a missing file is told by its name."""
    try:
        _ = vocabulary.vocab_size
    except (tf.errors.OpError, OSError) as error:
        raise errors.UserError(
            f"the vocabulary {getattr(vocabulary, 'sentencepiece_model_file', vocabulary)!r} "
            f"cannot be read ({error}); give the task one that is here, such as "
            "@vocabularies.sentencepiece() with vocabularies.sentencepiece.path set."
        ) from error
    return vocabulary


def pipeline_options() -> tf.data.Options:
    """Returns those of every dataset: always the same order, and an end that waits for nothing."""
    options = tf.data.Options()
    options.deterministic = True
    options.threading.max_intra_op_parallelism = 1
    # The tuner's thread misses the call to end now and then (seen with TensorFlow 2.21); dropping
    # the iterator, at an evaluation or the end of the process, then waits for it up to a minute.
    options.autotune.enabled = False
    return options
