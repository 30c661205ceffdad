"""Batches of a seqio task or mixture; their position can be saved and restored exactly.

Gin files bind `data.DataConfig` in the scopes `train/` and `eval/`. This module needs TensorFlow,
but hides accelerators from it.
"""

import concurrent.futures
import dataclasses
import functools
import io
import json
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from convt5 import errors
from convt5.data import data_report, task_sources
from convt5.data.counts import Counts
from convt5.data.mixing import BlockPlace, MakeBlock, MixedStream, TaskStream, seeds
from convt5.data.prefetching import (
    MOST_SKIPPED,
    Prefetcher,
    check_settings,
    naming_damage,
    position,
    rows_per_host,
    split_position,
    told_by_sources,
)
from convt5.data.rows import Batch, RowLayout
from convt5.data.task_blocks import TaskBlocks
from convt5.errors import checks
from convt5.runtime import foreign_files
from convt5.tasks import (
    classification,
    formats,
    label_checks,
    vocabularies,
)
from convt5.text import vocabulary_files
from convt5.text.task_format import TaskFormat

__all__ = ["BatchIterator", "DataConfig", "Prefetcher"]

# First bytes of tf.data checkpoints, the positions of earlier versions.
_ARCHIVE = b"PK"
_MOST_SETTINGS_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class DataConfig:
    """The examples to read, and how they become batches.

    Attributes:
        mixture: name of a registered seqio task or mixture, or such an object.
        split: split of the task, such as "train" or "validation".
        batch_size: rows over all hosts.
        encoder_length: tokens per encoder row, including the end token.
        decoder_length: tokens per decoder row, including the end token. None means the longest
            label, for tasks with labels.
        pack: packs several short examples into a row; taps and attention do not cross between them.
        shuffle: False keeps the order of the source, which for text files is a random one; None and
            True shuffle.
        seed: random seed of the order, and of everything random in the task.
        num_epochs: passes over each task; None never ends. The last batch of finite data is padded
            with empty rows of weight 0.
        use_cached: reads tasks from seqio's cache; tasks that require their cache always do.
        cache_dirs: folders of seqio caches, or one, in addition to those known to seqio.
    """

    mixture: Any
    split: str = "train"
    batch_size: int
    encoder_length: int
    decoder_length: int | None = None
    pack: bool = False
    shuffle: bool | None = None
    seed: int = 0
    num_epochs: int | None = None
    use_cached: bool = False
    cache_dirs: str | Sequence[str] = ()

    def __post_init__(self):
        errors.raise_all(
            checks.least_faults(
                self, ("batch_size", "encoder_length", "decoder_length", "num_epochs")
            ),
            where="DataConfig",
        )
        task_sources.use_caches(self.cache_dirs)
        if self.decoder_length is None:
            object.__setattr__(self, "decoder_length", self._longest_label())

    def provider(self) -> seqio.Task | seqio.Mixture:
        """Returns the task or mixture.

        Raises:
            UserError: the name is not registered, the split or a feature is missing, a task ranks
                labels, or two tasks have one name.
        """
        provider = self.mixture
        if isinstance(provider, str):
            provider = _find_registered(provider)
        if not isinstance(provider, seqio.Task | seqio.Mixture):
            raise errors.UserError(
                f"mixture={provider!r} is not a seqio task or mixture; name a registered one, "
                "or a function that returns one, such as @pretraining.text_span_corruption()."
            )
        splits = {s for task in seqio.get_subtasks(provider) for s in self._splits(task)}
        if self.split not in splits:
            raise errors.UserError(
                f"split={self.split!r} is none of {sorted(splits)}, the splits of "
                f"{provider.name}.{errors.suggest(self.split, splits)}"
            )
        missing = {"inputs", "targets"} - set(provider.output_features)
        if missing:
            raise errors.UserError(
                f"mixture={provider.name!r} has no feature {' and '.join(sorted(missing))}; "
                "an encoder-decoder reads 'inputs' and 'targets'."
            )
        names = [task.name for task in seqio.get_subtasks(provider)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise errors.UserError(
                f"mixture={provider.name!r} has two different tasks called {twice.pop()!r}, of "
                "which only one would be read; give each a name of its own."
            )
        ranking = [task.name for task in seqio.get_subtasks(provider) if _holds_every_label(task)]
        if ranking:
            raise errors.UserError(
                f"mixture={provider.name!r} is for rank classification: {ranking[0]!r} pairs "
                "each text with every label, correct or not, and serves only for evaluation "
                "(evaluation.TaskEval, or eval --task); name the task that was made without "
                "rank=True, or with t5's mode='train'."
            )
        return provider

    def check_model(self, model: Any) -> None:
        """Raises `UserError` if the model reads no text, or its stem would mix packed rows."""
        checks.check_reads_text(model)
        if self.pack:
            checks.check_reads_packed(model, "pack=True puts", "set data.DataConfig.pack = False")

    def check_vocabularies(self) -> None:
        """Raises `UserError` if ids of different tasks of a mixture mean different texts."""
        first, *others = seqio.get_subtasks(self.provider())
        for task in others:
            for name in ("inputs", "targets"):
                one, other = (each.output_features[name].vocabulary for each in (first, task))
                if one != other and not _are_copies(one, other):
                    raise errors.UserError(
                        f"mixture={getattr(self.mixture, 'name', self.mixture)!r}: the {name} of "
                        f"{first.name!r} have the vocabulary {_described(one)}, and those of "
                        f"{task.name!r} have {_described(other)}; give all its tasks the same one."
                    )

    def check_apart(self, train: "DataConfig") -> None:
        """Raises `UserError` if files to measure a task are those of another that is trained on."""
        train.check_held_out(self._tasks_of_files(), self.split)

    def check_held_out(self, measured: Sequence[seqio.Task], split: str) -> None:
        """Raises `UserError` if files to measure tasks are those of others that are trained on."""
        if self.split == "train" != split:
            task_sources.check_apart(self._tasks_of_files(), measured, split)

    def check_labels(self) -> None:
        """Raises `UserError` for a label that `decoder_length` would truncate."""
        for task in self.tasks():
            label_checks.check_lengths(task, self.decoder_length, "decoder_length")

    def _longest_label(self) -> int:
        """Returns the tokens of the longest label of the tasks."""
        lengths = {}
        for task in self.tasks():
            _load_vocabulary(task.output_features["targets"].vocabulary)
            lengths[task.name] = label_checks.longest(task)
        without = [f"{name!r} has none" for name, length in lengths.items() if length is None]
        if self.pack:
            without.append("pack=True puts several in a row")
        if without:
            raise errors.UserError(
                f"decoder_length=None means the longest label, but {' and '.join(without)}; set "
                "decoder_length to the tokens of a decoder row."
            )
        return max(filter(None, lengths.values()))

    def check_rows(self) -> None:
        """Reads the first rows of each local file of the split.

        Raises:
            UserError: one of them lacks a field, or is invalid otherwise.
        """
        for task in self.tasks():
            check = getattr(task.source, "check_rows", None)
            if check:
                check(self.split)
            elif isinstance(task.source, seqio.FileDataSource):
                data_report.check_reads(task, self)

    def is_at_hand(self) -> bool:
        """Returns whether first examples are available without reading much text first."""
        return all(getattr(task.source, "is_at_hand", True) for task in self.tasks())

    def describe(self) -> str:
        """Returns the data report by task: documents, tokens, rows, truncation and padding.

        Raises:
            UserError: the data cannot be read as configured.
        """
        title = (
            f"data {self.split}: rows of {self.encoder_length} + {self.decoder_length} tokens"
            f"{', packed' if self.pack else ''}"
        )
        return data_report.describe(title, data_report.measure(self))

    def kept_text(self) -> vocabulary_files.KeptText | None:
        """Returns the text of each token id; None if no vocabulary file can express it."""
        text = vocabulary_files.of_features(self.provider().output_features)
        return text and text._replace(
            encoder_length=self.encoder_length,
            decoder_length=self.decoder_length,
            holds_sentinels=any(each.makes_sentinels for each in self.task_formats()),
        )

    def task_formats(self) -> tuple[TaskFormat, ...]:
        """Returns the input format of each task."""
        return formats.of(self.provider())

    def build(
        self,
        *,
        process_index: int,
        process_count: int,
        maker: Callable[[str], MakeBlock] | None = None,
        share: seqio.ShardInfo | None = None,
    ) -> "BatchIterator":
        """Returns this host's rows of each batch; hosts of endless data read different examples.

        Args:
            process_index: index of the host, or shard.
            process_count: number of hosts, or shards.
            maker: returns a function that makes the blocks of a task, given its name, such as
                `BlockWorkers.maker`; None makes them in this process.
            share: the only examples of finite data to read; None reads all.

        Raises:
            UserError: the data cannot be read as configured.
        """
        rows = rows_per_host(self.batch_size, process_count)
        provider = self.provider()
        _load_vocabulary(provider.output_features["inputs"].vocabulary)
        vocabulary = _load_vocabulary(provider.output_features["targets"].vocabulary)
        self.check_vocabularies()
        self.check_labels()
        endless = self.num_epochs is None
        # Hosts must agree on the number of batches, so each reads all of finite data.
        if endless:
            share = seqio.ShardInfo(process_index, process_count)
        share = share if share and share.num_shards > 1 else None
        settings = self._settings(provider) | {"process_count": process_count}
        if share and not endless:
            settings["share"] = [share.index, share.num_shards]
        first = 0 if endless else process_index * rows
        assert self.decoder_length is not None  # Set as the description was made.
        return BatchIterator(
            self._examples(share, maker),
            RowLayout(self.encoder_length, self.decoder_length, self.pack),
            batch_size=rows if endless else self.batch_size,
            row_slice=slice(first, first + rows),
            vocabulary=vocabulary,
            settings=settings,
        )

    def task_blocks(self, share: seqio.ShardInfo | None = None) -> dict[str, TaskBlocks]:
        """Returns the block maker of each task, by name.

        Raises:
            UserError: a task cannot be read as configured.
        """
        lengths = {"inputs": self.encoder_length, "targets": self.decoder_length}
        tasks = list(self._rates())
        return {
            task.name: TaskBlocks(
                task,
                self.split,
                lengths,
                shuffle=self.shuffle is not False,
                seed=self.seed if len(tasks) == 1 else self._seed_of(task),
                share=share,
                cached=self.is_cached(task),
            )
            for task in tasks
        }

    def _seed_of(self, task: seqio.Task) -> int:
        """Returns the seed of a task in a mixture, where each reads in an order of its own.

        Tasks that share documents, such as the denoisers of UL2, would otherwise read the same ones
        at the same time, and a run would see a fraction of the documents several times.
        """
        number = zlib.crc32(task.name.encode())
        return int(seeds(self.seed, number).generate_state(1)[0])

    def _examples(
        self,
        share: seqio.ShardInfo | None,
        maker: Callable[[str], MakeBlock] | None,
    ) -> MixedStream:
        rates = self._rates()
        if maker is None:
            blocks = self.task_blocks(share)
            makers = {name: task_blocks.make for name, task_blocks in blocks.items()}
        else:
            makers = {task.name: maker(task.name) for task in rates}
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="convt5-blocks")
        streams = {
            name: TaskStream(make, executor, self.num_epochs, name) for name, make in makers.items()
        }
        return MixedStream(streams, list(rates.values()), self.seed)

    def tasks(self) -> list[seqio.Task]:
        """Returns the tasks that have the split."""
        tasks = seqio.get_subtasks(self.provider())
        return [task for task in tasks if self.split in self._splits(task)]

    def _tasks_of_files(self) -> list[seqio.Task]:
        """Returns the tasks that are read from their source."""
        return [task for task in self.tasks() if not self.is_cached(task)]

    def _splits(self, task: seqio.Task) -> list[str]:
        return task_sources.splits(task, cached=self._wants_cache(task))

    def _rates(self) -> dict[seqio.Task, float]:
        """Returns the tasks to read, with their relative rates."""
        tasks = self.tasks()
        rates = _rates(self.provider(), tasks)
        return {task: rate for task, rate in zip(tasks, rates, strict=True) if rate}

    def num_examples(self) -> dict[str, int] | None:
        """Returns the source examples per epoch of each task; None if one is unknown."""
        counts = {
            task.name: None if self.is_cached(task) else task.num_input_examples(self.split)
            for task in self._rates()
        }
        known = {name: count for name, count in counts.items() if count}
        return known if len(known) == len(counts) else None

    def is_cached(self, task: seqio.Task) -> bool:
        """Returns whether a task is read from seqio's cache.

        Raises:
            UserError: it is to be, but there is none.
        """
        if not self._wants_cache(task):
            return False
        if task.cache_dir:
            return True
        why = "can only be" if task.requires_caching else "is to be"
        raise errors.UserError(
            f"task {task.name!r} {why} read from a cache of seqio, and none is in "
            f"cache_dirs={list(seqio.get_global_cache_dirs())}; make it with python -m "
            f"seqio.scripts.cache_tasks_main --tasks={task.name} --output_cache_dir=DIR "
            "--module_import=MODULE, and set data.DataConfig.cache_dirs = ['DIR'], or leave "
            "use_cached unset and CacheDatasetPlaceholder out of the task."
        )

    def _wants_cache(self, task: seqio.Task) -> bool:
        return task.requires_caching or (self.use_cached and task.supports_caching)

    def identity(self) -> dict[str, Any]:
        """Returns what determines the rows: settings, rates, identity of data and vocabulary.

        Settings of the tasks themselves show in the first block of each.
        """
        provider = self.provider()
        rates = {task.name: rate for task, rate in self._rates().items()}
        first = {
            name: blocks.make(BlockPlace()).examples.digest()
            for name, blocks in self.task_blocks().items()
        }
        settings = self._settings(provider) | {"rates": rates, "first_blocks": first}
        return json.loads(json.dumps(settings))

    def _settings(self, provider: seqio.Task | seqio.Mixture) -> dict[str, Any]:
        """Returns the settings that must be equal for a position to mean the same batches."""
        settings = dataclasses.asdict(dataclasses.replace(self, mixture=provider.name))
        settings["shuffle"] = self.shuffle is not False
        settings.pop("cache_dirs")
        found = told_by_sources(seqio.get_subtasks(provider), "fingerprint")
        contents = list(dict.fromkeys(found.values()))
        text = self.kept_text()
        return {
            **settings,
            **({"content": contents} if contents else {}),
            **({"vocabularies": text.fingerprints} if text else {}),
        }


class BatchIterator:
    """Host batches with the keys of seqio's EncDecFeatureConverter.

    Attributes:
        vocabulary: the vocabulary of the targets.
        token_bytes: number of bytes of text of each token id; None if unknown.
    """

    def __init__(
        self,
        examples: MixedStream,
        layout: RowLayout,
        *,
        batch_size: int,
        row_slice: slice,
        vocabulary: seqio.Vocabulary,
        settings: Mapping[str, Any],
    ):
        self.vocabulary = vocabulary
        self.token_bytes = vocabularies.token_bytes(vocabulary)
        self._examples = examples
        self._layout = layout
        self._batch_size = batch_size
        self._row_slice = row_slice
        self._settings = json.loads(json.dumps(settings))
        self._at_the_start = True
        self._examples_per_batch = batch_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Returns int32 arrays of [rows, length].

        Raises:
            UserError: there is no batch.
            TrainingError: the data cannot be read.
        """
        try:
            batch = self._next_batch()
        except tf.errors.OpError as error:
            raise errors.TrainingError(
                f"mixture={self._settings['mixture']!r}, split={self._settings['split']!r}: its "
                f"data cannot be read: {error.message.strip()}. A file may be truncated or "
                "missing: restore it, or, if it belongs to a cache that is rebuilt "
                "automatically, remove the cache folder; the same command then resumes from the "
                "last checkpoint."
            ) from error
        if batch is None and self._at_the_start:
            raise errors.UserError(
                f"mixture={self._settings['mixture']!r} gives no batch of "
                f"batch_size={self._settings['batch_size']} from "
                f"split={self._settings['split']!r}: the split is empty, or has fewer examples "
                "than there are hosts or shards; check the data, or use fewer of them."
            )
        if batch is None:
            raise StopIteration
        self._at_the_start = False
        return {name: rows[self._row_slice] for name, rows in batch.items()}

    def num_read(self) -> dict[str, tuple[int, int]]:
        """Returns for each task the number of whole epochs and of further source examples read."""
        tasks = self._examples.get_state()["tasks"]
        return {name: (epoch, first) for name, (epoch, _, first, *_) in tasks.items()}

    def counts(self) -> dict[str, Counts]:
        """Returns the counts of the examples read so far, by task."""
        return self._examples.counts()

    def get_state(self) -> bytes:
        """Returns the position: a few integers, and the settings that it belongs to."""
        state = {"examples": self._examples.get_state(), "settings": self._settings}
        return position(json.dumps(state, separators=(",", ":")).encode())

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position; the batches that followed it then follow again.

        Raises:
            UserError: the position belongs to other data settings.
        """
        snapshot, skip = split_position(state)
        if snapshot.startswith(_ARCHIVE):
            return self._go_on_from_archive(snapshot)
        with naming_damage():
            saved = foreign_files.parse_json(snapshot, kind=dict)
            settings, examples = dict(saved["settings"]), saved["examples"]
            if skip > MOST_SKIPPED:  # Each has to be read.
                raise ValueError(f"it skips {skip:,} batches, more than {MOST_SKIPPED}")
        check_settings(self._settings, settings, item="example")
        with naming_damage():
            self._examples.set_state(examples)
        self._at_the_start = False
        for _ in range(skip):
            next(self)

    def _go_on_from_archive(self, snapshot: bytes) -> None:
        """Starts a newly shuffled epoch in place of a position saved by tf.data.

        Raises:
            UserError: the settings differ, or the number of epochs would.
        """
        with naming_damage(), zipfile.ZipFile(io.BytesIO(snapshot)) as archive:
            member = archive.getinfo("settings.json")
            if member.file_size > _MOST_SETTINGS_BYTES:
                raise ValueError(f"{member.file_size} bytes of settings")
            saved = foreign_files.parse_json(archive.read(member), kind=dict)
            saved.pop("text", None)  # Paths and dates of files, which differ between machines.
            if "content" in saved:
                saved["content"] = list(dict.fromkeys(saved["content"]))
        saved["shuffle"] = self._settings["shuffle"]
        check_settings({name: self._settings.get(name) for name in saved}, saved, item="example")
        if self._settings["num_epochs"] is not None:
            raise errors.UserError(
                "the run's position in its data was saved by an earlier version, and num_epochs="
                f"{self._settings['num_epochs']} passes cannot be counted from there; start a new "
                "run_dir with initialization.InitFrom.path = this run and "
                "initialization.InitFrom.continue_training = True."
            )
        warnings.warn(
            "the data position was saved by an earlier version: training continues with a new "
            "pass over the data, in a different order",
            stacklevel=3,
        )

    def _next_batch(self) -> Batch | None:
        """Returns the next rows; only the last batch of finite data has fewer."""
        num_wanted = self._examples_per_batch
        while True:
            examples = self._examples.peek(num_wanted)
            ends = self._layout.row_ends(examples.inputs.lengths, examples.targets.lengths)
            is_last_open = self._layout.pack and len(ends) <= self._batch_size
            if examples.count < num_wanted or not (is_last_open or len(ends) < self._batch_size):
                break
            num_wanted *= 2
        ends = ends[: self._batch_size]
        if not len(ends):
            return None
        taken = int(ends[-1])
        self._examples.advance(taken)
        # A packed row is complete only when the next example does not fit.
        self._examples_per_batch = taken + taken // 8 + 1 if self._layout.pack else num_wanted
        return self._layout.batch(examples.part(0, taken), ends, self._batch_size)


def _rates(provider: seqio.Task | seqio.Mixture, tasks: Sequence[seqio.Task]) -> list[float]:
    """Returns the relative rate of each task."""
    if isinstance(provider, seqio.Task):
        return [1.0]
    _check_sampling(provider)
    rates = []
    for task in tasks:
        try:
            rates.append(float(provider.get_rate(task)))
        except (ArithmeticError, AssertionError, TypeError, ValueError) as error:
            raise errors.UserError(
                f"mixture={provider.name!r}: the rate of task {task.name!r} cannot be computed "
                f"({error}): the number of its examples is not known; write the rate of this task "
                "as a number, or give its source num_input_examples."
            ) from error
    if not all(0 <= rate < float("inf") for rate in rates) or not 0 < sum(rates) < float("inf"):
        shown = ", ".join(f"{t.name}: {r}" for t, r in zip(tasks, rates, strict=True))
        raise errors.UserError(
            f"mixture={provider.name!r} has the rates {shown}; they must be finite and at least "
            "0, and so must their sum, and one of them above 0."
        )
    return rates


def _check_sampling(mixture: seqio.Mixture) -> None:
    """Raises `UserError` for a mixture that samples from its tasks in a custom way."""
    sample = mixture._sample_fn
    if getattr(sample, "func", sample) != tf.data.Dataset.sample_from_datasets:
        raise errors.UserError(
            f"mixture={mixture.name!r} has a custom sample_fn, but convt5 draws tasks by their "
            "rates; remove sample_fn, and write the rates as numbers."
        )


def _find_registered(name: str) -> seqio.Task | seqio.Mixture:
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
    """Returns whether a preprocessor pairs each text with every label, as t5's do by default."""
    function, mode = step, "eval"
    if isinstance(step, functools.partial):
        function, mode = step.func, step.keywords.get("mode", mode)
    if function is classification.one_example_per_label:
        return True
    name = f"{function.__module__}.{getattr(function, '__name__', '')}"
    return name.startswith("t5.data.preprocessors.rank_classification") and mode != "train"


def _are_copies(one: seqio.Vocabulary, other: seqio.Vocabulary) -> bool:
    """Returns whether two vocabularies come from copies of a file."""
    kept = [vocabulary_files.of(each) for each in (one, other)]
    return kept[0] is not None and kept[0] == kept[1]


def _described(vocabulary: seqio.Vocabulary) -> str:
    """Describes a vocabulary without reading its file."""
    name = getattr(vocabulary, "sentencepiece_model_file", type(vocabulary).__name__)
    return f"{name} with {int(vocabulary.extra_ids or 0)} sentinels"


def _load_vocabulary(vocabulary: seqio.Vocabulary) -> seqio.Vocabulary:
    """Loads the vocabulary now, so that an error names a missing file."""
    try:
        _ = vocabulary.vocab_size
    except (tf.errors.OpError, OSError) as error:
        raise errors.UserError(
            f"the vocabulary {getattr(vocabulary, 'sentencepiece_model_file', vocabulary)!r} "
            f"cannot be read ({error}); give the task one that is here, such as "
            "@vocabularies.sentencepiece() with vocabularies.sentencepiece.path set."
        ) from error
    return vocabulary
