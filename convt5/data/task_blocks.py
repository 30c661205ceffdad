"""Makes the blocks of a seqio task: reads, preprocesses and shuffles source examples by block.

A task is a function from source examples to examples. TensorFlow traces it once, and calls it with
the examples of each block and a seed derived from the block.
"""

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.data import row_ends, task_sources
from convt5.data.mixing import NO_BLOCK, Block, BlockPlace, seeds
from convt5.data.rows import Examples, Ragged
from convt5.runtime import cores, quiet_imports
from convt5.tasks import vocabularies

quiet_imports.hide_accelerators(tf)

FEATURES = ("inputs", "targets")

# Limits of a block: the most examples and the least bytes. Text is joined into full rows within a
# block, which leaves half a row empty on average: under 0.5 % of 128 rows.
_MOST_EXAMPLES = 8192
_LEAST_BYTES = 2**20
_ROWS, _BYTES_PER_TOKEN = 128, 4
# Examples are read in windows of about this many bytes, estimated from the first ones.
_WINDOW_BYTES, _WIDEST_WINDOW, _JUDGED = 2**16, 256, 32
_MOST_WINDOWS = 16  # Of a block of the least bytes; as many are read while a block is made.
# Sources without their own shuffling are shuffled fully up to this many examples, else in a buffer.
_SHUFFLED_WHOLLY, _SHUFFLED = 100_000, 1_000
_RAGGED_BATCH = 512
_CORES_PER_THREAD = 4
# Random operations whose seeds are fixed when they are traced.
_STATEFUL_RANDOM_OPS = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "ShuffleAndRepeatDatasetV2",
        "ShuffleDatasetV2",
        "ShuffleDatasetV3",
        "TruncatedNormal",
    }
)
_building = threading.RLock()


class TaskBlocks:
    """Makes the blocks of one split of a task, for one host's share of its examples.

    Args:
        task: any seqio task.
        split: split of the task.
        lengths: tokens of "inputs" and "targets".
        shuffle: whether each epoch is shuffled anew, or in the order of the source.
        seed: random seed of the order, and of everything random in the task.
        share: this host's share of the examples; None reads all.
        cached: whether to read examples from seqio's cache.

    Raises:
        UserError: the task cannot be read this way.
    """

    def __init__(
        self,
        task: seqio.Task,
        split: str,
        lengths: Mapping[str, int],
        *,
        shuffle: bool,
        seed: int,
        share: seqio.ShardInfo | None,
        cached: bool,
    ):
        self._task = task
        self._split = split
        self._shuffle = shuffle
        self._seed = seed
        self._share = share
        self._source = task_sources.checked_source(task, split, cached=cached)
        longest = _ROWS * _BYTES_PER_TOKEN * max(lengths.values())
        self._block_bytes = max(_LEAST_BYTES, longest)
        opened = self._open(0)
        self._windows = _Windows(self._open, opened)
        self._preprocess = preprocessing(task, opened.element_spec, lengths, cached=cached)

    def make(self, place: BlockPlace) -> Block:
        """Reads and makes a block, which is the same wherever it is made.

        Raises:
            TrainingError: the data cannot be read.
            UserError: an id is not in its vocabulary.
        """
        windows, num_read = self._read(place)
        if not windows:
            return NO_BLOCK
        random = seeds(self._seed, place.epoch, place.number, self._share_index())
        block_seed, order_seed = random.generate_state(2).tolist()
        examples = self._preprocess(_concatenate(windows), block_seed % (2**31 - 2**16))
        if self._shuffle:
            examples = examples.take(np.random.default_rng(order_seed).permutation(examples.count))
        return Block(examples, num_read)

    def pass_over(self, place: BlockPlace) -> int:
        """Reads a block without making it; returns its number of source examples."""
        return self._read(place)[1]

    def _read(self, place: BlockPlace) -> tuple[list[tf.data.Dataset], int]:
        windows, num_read, num_bytes = [], 0, 0
        for window in self._windows.after(place.epoch, place.first):
            windows.append(window.examples)
            num_read += window.count
            num_bytes += window.num_bytes
            if num_bytes >= self._block_bytes or num_read >= _MOST_EXAMPLES:
                break
        self._windows.went_on(place.epoch, place.first + num_read)
        return windows, num_read

    def _share_index(self) -> int:
        return self._share.index if self._share else 0

    def _open(self, epoch: int) -> tf.data.Dataset:
        """Returns the source examples of an epoch, in order."""
        source, share = self._source, self._share
        seed = int(seeds(self._seed, epoch).generate_state(1)[0]) % 2**31
        of_source = share
        if share and not source.supports_arbitrary_sharding:
            is_cut = len(source.list_shards(self._split)) >= share.num_shards
            of_source = share if is_cut else None
        with _building:
            settings = {"split": self._split, "shuffle": self._shuffle, "seed": seed}
            dataset = task_sources.without_autograph(
                lambda: source.get_dataset(**settings, shard_info=of_source)
            )
            if share and of_source is None:
                dataset = dataset.shard(share.num_shards, share.index)
            if self._shuffle and not source.performs_internal_shuffling:
                dataset = dataset.shuffle(self._num_shuffled(dataset), seed=seed)
        return dataset

    def _num_shuffled(self, dataset: tf.data.Dataset) -> int:
        known = int(dataset.cardinality())
        if known < 0:
            known = self._source.num_input_examples(self._split) or 0
        if 0 < known <= _SHUFFLED_WHOLLY:
            return known
        return max(self._task.shuffle_buffer_size or 0, _SHUFFLED)


class _Window(NamedTuple):
    """A few source examples; `num_bytes` is their approximate size."""

    examples: tf.data.Dataset
    count: int
    num_bytes: int


class _Windows:
    """Source examples in windows; reading continues where it stopped.

    Args:
        open_epoch: returns the source examples of an epoch.
        judged: those of the first epoch.
    """

    def __init__(self, open_epoch: Any, judged: tf.data.Dataset):
        self._open_epoch = open_epoch
        self._judged = judged
        self._at = (-1, -1)
        self._iterator = _dropped_at_exit(self)

    def after(self, epoch: int, first: int) -> Iterator[_Window]:
        """Yields the windows starting at an example; skips or re-reads earlier ones if needed."""
        if self._at != (epoch, first):
            examples = self._open_epoch(epoch).skip(first)
            self._iterator[:] = [iter(_in_windows(examples, self._width))]
        self._at = (-1, -1)
        for examples, sizes in self._iterator[0]:
            yield _Window(examples, len(sizes), int(np.sum(sizes)))

    def went_on(self, epoch: int, first: int) -> None:
        """Records the position of the next example."""
        self._at = (epoch, first)

    @functools.cached_property
    def _width(self) -> int:
        """Returns the examples per window, derived from the data because blocks depend on it."""
        sizes: Any = self._judged.take(_JUDGED).map(_num_bytes).with_options(options())
        mean = np.mean([_WINDOW_BYTES / _WIDEST_WINDOW, *sizes.as_numpy_iterator()])
        return max(1, int(_WINDOW_BYTES / mean))


@tf.autograph.experimental.do_not_convert
def _in_windows(examples: tf.data.Dataset, width: int) -> tf.data.Dataset:
    """Returns pairs of a dataset of up to `width` examples, and their sizes."""

    def counted(example: Any) -> tuple[Any, tf.Tensor]:
        return example, _num_bytes(example)

    def window(*parts: Any) -> tf.data.Dataset:
        examples, sizes = parts
        together = tf.data.Dataset.from_tensors(tf.data.Dataset.zip(examples))
        return tf.data.Dataset.zip(together, sizes.batch(width))

    windows = examples.map(counted).window(width).flat_map(window)
    of_most_examples = -(-_MOST_EXAMPLES // width)
    return windows.prefetch(min(_MOST_WINDOWS, of_most_examples)).with_options(options())


def _num_bytes(example: Any) -> tf.Tensor:
    parts = [tf.zeros([], tf.int64)]
    for value in tf.nest.flatten(example, expand_composites=True):
        if value.dtype == tf.string:
            parts.append(tf.cast(tf.reduce_sum(tf.strings.length(value)), tf.int64))
        else:
            parts.append(tf.cast(tf.size(value) * value.dtype.size, tf.int64))
    return tf.add_n(parts)


def _concatenate(parts: list[tf.data.Dataset]) -> tf.data.Dataset:
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0].concatenate(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
    return parts[0]


@functools.lru_cache(maxsize=256)
def _shared_preprocessing(
    task: seqio.Task, spec: str, lengths: tuple[tuple[str, int], ...], cached: bool
):
    """Returns the preprocessing shared by all shards and splits of a task, traced once."""
    del spec
    return Preprocessing(task, dict(lengths), cached)


def preprocessing(
    task: seqio.Task, spec: Any, lengths: Mapping[str, int], *, cached: bool
) -> "Preprocessing":
    """Returns the preprocessing of a task for source examples of an element spec.

    Args:
        task: any seqio task.
        spec: the element spec.
        lengths: tokens of "inputs" and "targets".
        cached: whether the examples come from seqio's cache.

    Raises:
        UserError: a preprocessor raised it.
    """
    shared = _shared_preprocessing(task, repr(spec), tuple(sorted(lengths.items())), cached)
    shared.trace(spec)
    return shared


class Preprocessing:
    """The preprocessors of a task as one function of source examples and a seed."""

    def __init__(self, task: seqio.Task, lengths: Mapping[str, int], cached: bool):
        self._lengths = dict(lengths)
        steps_of = row_ends.after_cache if cached else row_ends.without_cache
        self._task = row_ends.untruncated(steps_of(task))
        self._unknown_id = vocabularies.unknown_id(task.output_features["targets"].vocabulary)
        self._function: Any = None
        self._is_traced = False
        self._idle: list[_Pipeline] = []

    def trace(self, spec: Any) -> None:
        """Traces the preprocessors once.

        Some tasks must be rebuilt for each block instead: those whose random numbers do not come
        from `seqio.map_over_dataset`, and those that read examples while they are built.

        Raises:
            UserError: a preprocessor raised it.
        """
        with _building:
            if self._is_traced:
                return
            function = tf.function(self._gathered, autograph=False)
            examples = tf.data.DatasetSpec(spec)
            try:
                traced = function.get_concrete_function(examples, tf.TensorSpec([], tf.int64))
                self._function = None if _draws_statefully(traced) else traced
            except errors.UserError:
                raise
            except Exception:  # `_build` raises it again unless tracing was the reason.
                self._build(_no_examples(spec), seed=0)
            self._is_traced = True

    def __call__(self, examples: tf.data.Dataset, seed: int) -> Examples:
        """Preprocesses a block; threads that call this at the same time run side by side."""
        features = self._task.output_features
        (inputs, cut_inputs), (targets, cut_targets) = (
            row_ends.end_and_cut(sequences, features[name], self._lengths[name])
            for name, sequences in self.sequences(examples, seed).items()
        )
        unknown = np.zeros(targets.lengths.shape, bool)
        if self._unknown_id is not None:
            unknown = targets.holding(self._unknown_id)
        return Examples(inputs, targets, np.stack([cut_inputs, cut_targets, unknown], axis=1))

    def sequences(self, examples: tf.data.Dataset, seed: int) -> dict[str, Ragged]:
        """Returns "inputs" and "targets" of a block as the preprocessors make them.

        Raises:
            UserError: an id is not in its vocabulary.
        """
        if self._function is not None:
            try:
                pipeline = self._idle.pop()
            except IndexError:
                pipeline = _Pipeline(self._function, examples.element_spec)
            batches = pipeline.run(examples, seed)
            self._idle.append(pipeline)  # Unless an error left it inside of a block.
        else:
            with _globally_seeded(seed):
                built = self._build(examples, seed=seed).with_options(options(in_order=True))
                batches = list(_gather(built))
        made = {name: _concatenated([batch[name] for batch in batches]) for name in FEATURES}
        for name, sequences in made.items():
            feature = self._task.output_features[name]
            row_ends.check_ids(sequences, feature, name=name, task=self._task.name)
        return made

    def _gathered(self, examples: tf.data.Dataset, seed: tf.Tensor) -> tf.data.Dataset:
        with _random_numbers_from(seed):
            return _gather(self._build(examples, seed=0))

    def _build(self, examples: tf.data.Dataset, *, seed: int) -> tf.data.Dataset:
        def read(split, shuffle_files, seed=None):
            del split, shuffle_files, seed
            return examples

        # `Task.replace` would turn a subclass into a plain task.
        task = copy.copy(self._task)
        source = seqio.FunctionDataSource(read, splits=["block"], caching_permitted=False)
        vars(task).update(_source=source)
        return task.get_dataset(
            self._lengths,
            "block",
            shuffle=False,
            seed=seed,
            num_epochs=1,
            trim_output_features=False,
            try_in_mem_cache=False,
        )


class _Pipeline:
    """A running iterator that preprocesses one block after another.

    An iterator for each block would instantiate every function of the task again, vocabulary
    included: a fourth of the time of a block of 1 MiB.

    Args:
        preprocess: the traced function of examples and a seed that returns `_gather`.
        spec: element spec of the examples.
    """

    def __init__(self, preprocess: Any, spec: Any):
        queue = tf.queue.FIFOQueue(1, [tf.variant, tf.int64], [[], []])

        def make(*block: tf.Tensor) -> tf.data.Dataset:
            examples, seed = block
            return preprocess(tf.data.experimental.from_variant(examples, spec), seed)

        blocks = tf.data.Dataset.counter().map(lambda _: queue.dequeue())
        self._queue = queue
        self._iterator = _dropped_at_exit(self)
        self._iterator.append(iter(blocks.flat_map(make).with_options(options())))

    def run(self, examples: tf.data.Dataset, seed: int) -> list[Any]:
        """Returns the batches of a block, the last of them empty."""
        variant = tf.data.experimental.to_variant(examples)
        self._queue.enqueue([variant, tf.constant(seed, tf.int64)])
        batches = []
        while not batches or len(batches[-1][FEATURES[0]].lengths):
            batches.append(next(self._iterator[0]))
        return batches


def _dropped_at_exit(owner: Any) -> list[Iterator[Any]]:
    """Returns a list that is emptied with its owner, or when the process begins to exit.

    An iterator of TensorFlow that reads ahead waits for its threads when it is dropped. Those that
    call Python functions, as the sources of some tasks do, no longer can after the interpreter has
    begun to end: the process would never exit.
    """
    iterators: list[Iterator[Any]] = []
    weakref.finalize(owner, iterators.clear)
    return iterators


class _Batch(NamedTuple):
    """Values of a feature: the tokens of several examples, and their number in each."""

    tokens: tf.Tensor
    lengths: tf.Tensor


def _gather(examples: tf.data.Dataset) -> tf.data.Dataset:
    """Returns `_Batch` by feature, the last of them without examples."""

    def select(example: Any) -> dict[str, tf.Tensor]:
        return {name: tf.cast(example[name], tf.int32) for name in FEATURES}

    def flatten(batch: Any) -> dict[str, _Batch]:
        return {name: _flatten(batch[name]) for name in FEATURES}

    none = _Batch(tf.zeros([0], tf.int32), tf.zeros([0], tf.int64))
    end = tf.data.Dataset.from_tensors(dict.fromkeys(FEATURES, none))
    return examples.map(select).ragged_batch(_RAGGED_BATCH).map(flatten).concatenate(end)


def _concatenated(parts: list[Any]) -> Ragged:
    tokens = np.concatenate([part.tokens for part in parts])
    return Ragged(tokens, np.concatenate([part.lengths for part in parts]))


def _flatten(rows: Any) -> _Batch:
    if isinstance(rows, tf.RaggedTensor):
        return _Batch(rows.flat_values, rows.row_lengths())
    # All examples have the same length.
    lengths = tf.fill(tf.shape(rows)[:1], tf.shape(rows, tf.int64)[1])
    return _Batch(tf.reshape(rows, [-1]), lengths)


@contextlib.contextmanager
def _random_numbers_from(seed: tf.Tensor) -> Iterator[None]:
    """Adds a seed that is known only when a block is made to the seeds that seqio issues.

    `seqio.map_over_dataset` takes the random numbers of each example from `tf.data.Dataset.random`,
    whose seed may be a tensor; seqio itself only counts in Python integers.
    """
    datasets: Any = tf.data.Dataset
    random = datasets.random

    def seeded(own=None, **settings):
        return random(seed if own is None else seed + own, **settings)

    datasets.random = staticmethod(seeded)
    try:
        yield
    finally:
        datasets.random = random


@contextlib.contextmanager
def _globally_seeded(seed: int) -> Iterator[None]:
    """Sets TensorFlow's global seed, which is part of every other seed, and restores it."""
    with _building:
        before, _ = tf.compat.v1.random.get_seed(0)
        tf.random.set_seed(seed)
        try:
            yield
        finally:
            tf.random.set_seed(before)


def _draws_statefully(traced: Any) -> bool:
    graph = traced.graph.as_graph_def()
    nodes = [graph.node, *(function.node_def for function in graph.library.function)]
    return any(node.op in _STATEFUL_RANDOM_OPS for part in nodes for node in part)


def _no_examples(spec: Any) -> tf.data.Dataset:
    def none():
        return iter(())

    return tf.data.Dataset.from_generator(none, output_signature=spec)


def options(*, in_order: bool = False) -> tf.data.Options:
    """Returns the options of all datasets: deterministic order, and immediate termination.

    Args:
        in_order: uses one thread, so that stateful random numbers are drawn in order too.
    """
    options = tf.data.Options()
    options.deterministic = True
    # Threads that pass examples to one another take a fifth more processor time than one. Where
    # there are few cores, the training step needs them.
    num_threads = 1 if in_order else max(1, len(cores.shares(1)[0]) // _CORES_PER_THREAD)
    options.threading.private_threadpool_size = num_threads
    options.threading.max_intra_op_parallelism = 1
    options.experimental_optimization.map_parallelization = num_threads > 1
    # The autotuner's thread sometimes misses the call to end (seen with TensorFlow 2.21). Dropping
    # the iterator, after an evaluation or at exit, then waits for it for up to a minute.
    options.autotune.enabled = False
    return options
