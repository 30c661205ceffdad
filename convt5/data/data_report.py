"""The data report at the start of a run: documents, tokens, rows, truncation and padding.

Each task is measured on a bounded number of its first source examples, so that a start takes a
moment however large the data is. Totals are extrapolated if the source can count its examples.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.data import row_ends, task_blocks, task_sources
from convt5.data.rows import Ragged, RowLayout
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
    try:
        _Sample(task, config)
    except (tf.errors.OpError, OSError) as error:
        raise errors.UserError(
            f"task {task.name!r}, split={config.split!r}: its first rows cannot be read: "
            f"{getattr(error, 'message', str(error)).strip()}."
        ) from error


def _measure(task: seqio.Task, config: Any) -> TaskReport:
    try:
        sample = _Sample(task, config)
    except tf.errors.OpError as error:
        raise errors.TrainingError(
            f"task {task.name!r}, split={config.split!r}: its data cannot be read: "
            f"{error.message.strip()}."
        ) from error
    if not sample.num_examples:
        raise errors.UserError(
            f"task {task.name!r}, split={config.split!r}, gives no example of its first "
            f"{sample.num_documents} source examples; check the data."
        )
    documents = None
    if not config.is_cached(task):
        is_whole = sample.is_whole
        documents = sample.num_documents if is_whole else task.num_input_examples(config.split)
    times = (documents or 0) / max(sample.num_documents, 1)
    lengths, ids = sample.lengths, sample.ids
    sizes = {name: sequences.lengths for name, sequences in ids.items()}
    row_sizes = {name: np.minimum(sizes[name], limit) for name, limit in lengths.items()}
    layout = RowLayout(config.encoder_length, config.decoder_length, config.pack)
    num_rows = len(layout.row_ends(sizes["inputs"], sizes["targets"]))
    padding = {name: 1 - row_sizes[name].sum() / (num_rows * lengths[name]) for name in lengths}
    cut = {name: float((sizes[name] > lengths[name]).mean()) for name in lengths}
    unknown_id = vocabularies.unknown_id(task.output_features["targets"].vocabulary)
    unknown = 0.0 if unknown_id is None else float(ids["targets"].holding(unknown_id).mean())

    def whole(value: float, *, is_known: bool = True) -> int | None:
        return round(value * times) if documents and is_known else None

    return TaskReport(
        name=task.name,
        documents=documents,
        text_bytes=whole(sample.num_bytes),
        tokens=whole(sum(map(np.sum, sizes.values())), is_known=sample.has_all_examples),
        rows=whole(num_rows, is_known=sample.has_all_examples),
        measured_documents=sample.num_documents,
        measured_rows=sample.num_examples,
        **_ratios(task, ids),
        cut_inputs=cut["inputs"],
        cut_targets=cut["targets"],
        unknown_targets=unknown,
        padding_inputs=float(padding["inputs"]),
        padding_targets=float(padding["targets"]),
    )


class _Sample:
    """The first source examples of a task, and the examples that training makes of them."""

    def __init__(self, task: seqio.Task, config: Any):
        self.lengths = {"inputs": config.encoder_length, "targets": config.decoder_length}
        self.num_documents = self.num_bytes = 0
        self.is_whole = False
        is_cached = config.is_cached(task)
        source = task_sources.checked_source(task, config.split, cached=is_cached)
        settings = {"split": config.split, "shuffle": False, "seed": config.seed}
        documents = task_sources.without_autograph(lambda: source.get_dataset(**settings))
        self._count(documents)
        first = documents.take(self.num_documents).map(_shorten)
        # Traced once, for this report and for training.
        preprocess = task_blocks.preprocessing(
            task, first.element_spec, self.lengths, cached=is_cached
        )
        made = preprocess.sequences(first, config.seed)
        total = len(made["inputs"].lengths)
        self.num_examples = min(total, _MOST_EXAMPLES)
        self.has_all_examples = self.num_examples == total
        self.ids = {
            name: row_ends.end_and_cut(made[name], feature)[0].part(0, self.num_examples)
            for name, feature in task.output_features.items()
            if name in made
        }

    def _count(self, documents: tf.data.Dataset) -> None:
        sizes = documents.take(_MOST_DOCUMENTS + 1).map(_num_bytes)
        for size in sizes.with_options(task_blocks.options()):
            if self.num_documents == _MOST_DOCUMENTS or self.num_bytes > _MOST_BYTES:
                return
            self.num_documents += 1
            self.num_bytes += int(size)
        self.is_whole = True


@tf.autograph.experimental.do_not_convert
def _num_bytes(example: Any) -> tf.Tensor:
    values = [value for value in tf.nest.flatten(example) if value.dtype == tf.string]
    sizes = [tf.reduce_sum(tf.strings.length(value)) for value in values]
    return tf.add_n(sizes) if sizes else tf.constant(0)


@tf.autograph.experimental.do_not_convert
def _shorten(example: Any) -> Any:
    def shorten(value: Any) -> Any:
        is_text = isinstance(value, tf.Tensor) and value.dtype == tf.string
        return tf.strings.substr(value, 0, _LONGEST_TEXT) if is_text else value

    if isinstance(example, dict):
        return {name: shorten(value) for name, value in example.items()}
    return shorten(example)


def _ratios(task: seqio.Task, ids: Mapping[str, Ragged]) -> dict[str, float | None]:
    """Returns the mean number of tokens per word, and of bytes of text per token."""
    num_tokens = num_words = 0
    num_bytes: int | None = 0
    for name, sequences in ids.items():
        vocabulary = task.output_features[name].vocabulary
        sizes = vocabularies.token_bytes(vocabulary)
        if sizes is None:
            return {"tokens_per_word": None, "bytes_per_token": None}
        marks = {*sentinels.never_text(vocabulary), 0, vocabulary.eos_id}
        for tokens in np.split(sequences.values, sequences.offsets[1:-1]):
            text = [token for token in tokens.tolist() if token not in marks]
            num_tokens += len(text)
            num_bytes += int(sizes[text].sum())
            num_words += len(vocabulary.decode(text).split())
    return {
        "tokens_per_word": num_tokens / num_words if num_words else None,
        "bytes_per_token": num_bytes / num_tokens if num_tokens else None,
    }


def _count(value: int | None, about: str = "") -> str:
    return "an unknown number of" if value is None else f"{about}{value:,}"
