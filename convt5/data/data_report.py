"""The data report at the start of a run: documents, tokens, rows, truncation and padding.

Each task is measured on a bounded number of its first source examples, so that a start takes a
moment however large the data is. Totals are extrapolated if the source can count its examples.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.data import row_ends, task_blocks, task_sources
from convt5.data.rows import RowLayout
from convt5.tasks import vocabularies
from convt5.text import sentinels

_MOST_DOCUMENTS, _MOST_BYTES = 100, 2**16
_LONGEST_TEXT = 2**20
"""Most bytes of a source example that are measured; of longer ones, only the beginning."""
_MOST_EXAMPLES = 2**13


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The report on one task, measured on its first source examples.

    Attributes:
        name: name of the task.
        documents: source examples per epoch; None if the source cannot count them.
        text_bytes, tokens, rows: totals per epoch; None without `documents`, or for tokens and rows
            if the sample gives very many examples. Tokens are counted before truncation; rows are
            packed if the data is.
        measured_documents, measured_rows: the size of the sample; its rows are not packed.
        tokens_per_word, bytes_per_token: None if ids do not represent text.
        cut_inputs, cut_targets: fraction of examples longer than a row.
        unknown_targets: fraction of targets with text that the vocabulary cannot reproduce.
        padding_inputs, padding_targets: fraction of padding in the rows.
    """

    name: str
    documents: int | None
    text_bytes: int | None
    tokens: int | None
    rows: int | None
    measured_documents: int
    measured_rows: int
    tokens_per_word: float | None
    bytes_per_token: float | None
    cut_inputs: float
    cut_targets: float
    unknown_targets: float
    padding_inputs: float
    padding_targets: float

    @property
    def is_whole(self) -> bool:
        """Whether the sample is all of the data."""
        return self.documents == self.measured_documents

    def as_text(self) -> str:
        """Formats the report in two lines."""
        about = "" if self.is_whole else "about "
        counts = f"{_count(self.documents)} documents"
        if self.documents is not None:
            counts += (
                f", {_count(self.text_bytes, about)} bytes, {_count(self.tokens, about)} tokens, "
                f"{_count(self.rows, about)} rows"
            )
        ratios = [
            *([f"{self.tokens_per_word:.2f} tokens a word"] if self.tokens_per_word else []),
            *([f"{self.bytes_per_token:.2f} bytes a token"] if self.bytes_per_token else []),
            f"cut: {self.cut_inputs:.1%} of inputs, {self.cut_targets:.1%} of targets",
            *(
                [f"targets with unknown pieces: {self.unknown_targets:.1%}"]
                if self.unknown_targets
                else []
            ),
            f"padding: {self.padding_inputs:.0%} of inputs, {self.padding_targets:.0%} of targets",
        ]
        measured = "" if self.is_whole else f" (of the first {self.measured_documents} documents)"
        return f"  {self.name}: {counts}\n    {'; '.join(ratios)}{measured}"


def describe(title: str, reports: Sequence[TaskReport]) -> str:
    """Formats the reports that are shown at the start of a run."""
    return "\n".join([title, *(report.as_text() for report in reports)])


def measure(config: Any) -> list[TaskReport]:
    """Measures each task of a `data.DataConfig`.

    Raises:
        UserError: a task cannot be read, or has no example.
        TrainingError: the data cannot be read.
    """
    return [_measure(task, config) for task in config.tasks()]


def check_reads(task: seqio.Task, config: Any) -> None:
    """Reads the first examples of a task.

    Raises:
        UserError: they cannot be read.
    """
    lengths = {"inputs": config.encoder_length, "targets": config.decoder_length}
    try:
        _read_sample(task, config, lengths, is_cached=config.is_cached(task))
    except (tf.errors.OpError, OSError) as error:
        raise errors.UserError(
            f"task {task.name!r}, split={config.split!r}: its first rows cannot be read: "
            f"{getattr(error, 'message', str(error)).strip()}."
        ) from error


def _measure(task: seqio.Task, config: Any) -> TaskReport:
    lengths = {"inputs": config.encoder_length, "targets": config.decoder_length}
    is_cached = config.is_cached(task)
    try:
        sample = _read_sample(task, config, lengths, is_cached=is_cached)
    except tf.errors.OpError as error:
        raise errors.TrainingError(
            f"task {task.name!r}, split={config.split!r}: its data cannot be read: "
            f"{error.message.strip()}."
        ) from error
    if not sample.examples:
        raise errors.UserError(
            f"task {task.name!r}, split={config.split!r}, gives no example of its first "
            f"{sample.num_documents} source examples; check the data."
        )
    documents = None if is_cached else task.num_input_examples(config.split)
    if sample.is_whole:
        documents = sample.num_documents
    times = (documents or 0) / max(sample.num_documents, 1)
    ids = {name: [example[name] for example in sample.examples] for name in lengths}
    sizes = {name: np.array([len(each) for each in ids[name]]) for name in lengths}
    row_sizes = {name: np.minimum(sizes[name], limit) for name, limit in lengths.items()}
    layout = RowLayout(config.encoder_length, config.decoder_length, config.pack)
    num_rows = len(layout.row_ends(sizes["inputs"], sizes["targets"]))
    padding = {name: 1 - row_sizes[name].sum() / (num_rows * lengths[name]) for name in lengths}
    cut = {name: float((sizes[name] > lengths[name]).mean()) for name in lengths}
    targets = task.output_features["targets"].vocabulary
    unknown = [vocabularies.has_unknown(targets, each.tolist()) for each in ids["targets"]]

    def whole(value: float, *, is_known: bool = True) -> int | None:
        return round(value * times) if documents and is_known else None

    return TaskReport(
        name=task.name,
        documents=documents,
        text_bytes=whole(sample.num_bytes),
        tokens=whole(sum(map(np.sum, sizes.values())), is_known=sample.has_all_examples),
        rows=whole(num_rows, is_known=sample.has_all_examples),
        measured_documents=sample.num_documents,
        measured_rows=len(sample.examples),
        **_ratios(task, ids),
        cut_inputs=cut["inputs"],
        cut_targets=cut["targets"],
        unknown_targets=float(np.mean(unknown)),
        padding_inputs=float(padding["inputs"]),
        padding_targets=float(padding["targets"]),
    )


def _read_sample(
    task: seqio.Task, config: Any, lengths: Mapping[str, int], *, is_cached: bool
) -> "_Sample":
    """Reads a sample, without AutoGraph if possible, which takes most of the time of a start."""
    read = functools.partial(_Sample, task, config, lengths, is_cached=is_cached)
    try:
        return tf.autograph.experimental.do_not_convert(read)()
    except (errors.UserError, tf.errors.OpError, OSError):
        raise
    except Exception:  # Raised again with AutoGraph unless that was the reason.
        return read()


class _Sample:
    """The first source examples of a task, and the examples made from them."""

    def __init__(
        self, task: seqio.Task, config: Any, lengths: Mapping[str, int], *, is_cached: bool
    ):
        self.num_documents = self.num_bytes = 0
        self.is_whole = False
        arguments = {"split": config.split, "shuffle": False}
        sampled = row_ends.untruncated(task if is_cached else row_ends.without_cache(task))
        if not is_cached:
            task_sources.check_files(task, task.source, config.split)
            source = task.source.get_dataset(**arguments, seed=config.seed)
            self._count(source)
            sampled = copy.copy(sampled)
            sampled._source = copy.copy(task.source)
            sampled._source.get_dataset = functools.partial(_first, source, self.num_documents)
        dataset = sampled.get_dataset(
            sequence_length=dict(lengths),
            **arguments,
            seed=config.seed,
            num_epochs=1,
            use_cached=is_cached,
            trim_output_features=False,
            try_in_mem_cache=False,
        )
        dataset = dataset.with_options(task_blocks.options())
        made = dataset.as_numpy_iterator()
        features = task.output_features
        self.examples = [
            row_ends.end_example(example, features, {}, task=task.name)
            for example in itertools.islice(made, _MOST_EXAMPLES)
        ]
        self.has_all_examples = next(made, None) is None

    def _count(self, source: tf.data.Dataset) -> None:
        sizes = source.take(_MOST_DOCUMENTS + 1).map(_num_bytes)
        for example in sizes.with_options(task_blocks.options()):
            if self.num_documents == _MOST_DOCUMENTS or self.num_bytes > _MOST_BYTES:
                return
            self.num_documents += 1
            self.num_bytes += int(example)
        self.is_whole = True


def _first(source: tf.data.Dataset, count: int, *_: Any, **__: Any) -> tf.data.Dataset:
    return source.take(count).map(_shorten)


def _num_bytes(example: Any) -> tf.Tensor:
    values = [value for value in tf.nest.flatten(example) if value.dtype == tf.string]
    sizes = [tf.reduce_sum(tf.strings.length(value)) for value in values]
    return tf.add_n(sizes) if sizes else tf.constant(0)


def _shorten(example: Any) -> Any:
    def shorten(value: Any) -> Any:
        is_text = isinstance(value, tf.Tensor) and value.dtype == tf.string
        return tf.strings.substr(value, 0, _LONGEST_TEXT) if is_text else value

    if isinstance(example, dict):
        return {name: shorten(value) for name, value in example.items()}
    return shorten(example)


def _ratios(task: seqio.Task, ids: Mapping[str, Sequence[np.ndarray]]) -> dict[str, float | None]:
    """Returns the mean number of tokens per word, and of bytes of text per token."""
    num_tokens = num_words = 0
    num_bytes: int | None = 0
    for name, rows in ids.items():
        vocabulary = task.output_features[name].vocabulary
        sizes = vocabularies.token_bytes(vocabulary)
        if sizes is None:
            return {"tokens_per_word": None, "bytes_per_token": None}
        marks = {*sentinels.never_text(vocabulary), 0, vocabulary.eos_id}
        for row in rows:
            text = [i for i in row.tolist() if i not in marks]
            num_tokens += len(text)
            num_bytes += int(sizes[text].sum())
            num_words += len(vocabulary.decode(text).split())
    return {
        "tokens_per_word": num_tokens / num_words if num_words else None,
        "bytes_per_token": num_bytes / num_tokens if num_tokens else None,
    }


def _count(value: int | None, about: str = "") -> str:
    return "an unknown number of" if value is None else f"{about}{value:,}"
