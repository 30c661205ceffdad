"""Shows samples of span corruption as text: the input, the model's filling, and the truth.

The trainer prints them at the end of a run, and every `report_every_steps` steps. Works with any
vocabulary; see `sentinels`.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from convt5 import errors
from convt5.errors import checks, rules
from convt5.generation import decoding
from convt5.modeling.model import ConvT5, HostOrDevice
from convt5.text import sentinels

PADDING_ID = 0


class TextVocabulary(Protocol):
    """The part of `seqio.Vocabulary` needed here."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def extra_ids(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


class TextBatches(Protocol):
    """Batches with a vocabulary, such as `data.BatchIterator`."""

    vocabulary: Any

    def __next__(self) -> Mapping[str, HostOrDevice]: ...


class TextData(Protocol):
    """A description that builds batches, such as `data.DataConfig`."""

    def build(self, *, process_index: int, process_count: int) -> TextBatches: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanSamples:
    """A report with samples of span corruption; bind it to `trainer.train.report`.

    Attributes:
        num: number of examples to show.
    """

    num: int = rules.ruled(rules.count, 3)

    def __post_init__(self):
        errors.raise_all(rules.faults(self), where="SpanSamples")

    def check_model(self, model: object) -> None:
        """Raises `UserError` if the described model does not read text."""
        checks.check_reads_text(model, "report=SpanSamples shows")

    def __call__(self, model: ConvT5, data: TextData) -> str:
        """Returns samples from the first batch of `data`."""
        batches = data.build(process_index=0, process_count=1)
        if batches.vocabulary is None:
            return "no example to show: the data keeps no vocabulary, which would make text of ids"
        return render_span_samples(model, next(batches), batches.vocabulary, self.num)


class SpanExample(NamedTuple):
    """Token ids of a corrupted text and of the removed spans."""

    source: np.ndarray
    target: np.ndarray


def render_span_samples(
    model: ConvT5,
    batch: Mapping[str, HostOrDevice],
    vocabulary: TextVocabulary,
    num: int = 3,
) -> str:
    """Fills the spans of the first `num` examples of a batch greedily and renders them as text.

    Args:
        model: the model.
        batch: a span corruption batch with seqio's feature names, packed or not.
        vocabulary: the vocabulary; sentinels are shown as <1>, <2>, ...
        num: number of examples; fewer if the batch has fewer.
    """
    filled = filled_texts(model, batch, vocabulary, num)
    if not filled:
        return "no example to show: the batch holds nothing but padding"
    return "\n".join(
        f"sample {i}\n  corrupted: {source}\n  filling:   {filling}\n  truth:     {truth}"
        for i, (source, filling, truth) in enumerate(filled, start=1)
    )


class FilledText(NamedTuple):
    """A corrupted text, the spans that a model fills in, and the removed ones."""

    source: str
    filling: str
    truth: str


def filled_texts(
    model: ConvT5, batch: Mapping[str, HostOrDevice], vocabulary: TextVocabulary, num: int
) -> list[FilledText]:
    """Fills the first `num` examples of a batch; arguments as of `render_span_samples`."""
    examples = list(itertools.islice(span_examples(batch), num))
    if not examples:
        return []
    fillings = fill_spans(model, examples, end_id=end_id(vocabulary))
    return [
        FilledText(*(render(ids, vocabulary) for ids in (example.source, tokens, example.target)))
        for example, tokens in zip(examples, fillings, strict=True)
    ]


def span_examples(batch: Mapping[str, HostOrDevice]) -> Iterator[SpanExample]:
    """Yields the examples of a batch one by one, unpacking packed rows."""
    sources = np.asarray(batch["encoder_input_tokens"])
    targets = np.asarray(batch["decoder_target_tokens"])
    source_segments = _segments(batch, "encoder_segment_ids", sources)
    target_segments = _segments(batch, "decoder_segment_ids", targets)
    for row in range(sources.shape[0]):
        for segment in range(1, source_segments[row].max(initial=0) + 1):
            yield SpanExample(
                sources[row, source_segments[row] == segment],
                targets[row, target_segments[row] == segment],
            )


def fill_spans(model: ConvT5, examples: Sequence[SpanExample], *, end_id: int) -> list[np.ndarray]:
    """Returns the greedy filling of each example, at most 1.5 times as long as the truth."""
    limits = np.array([max(len(e.target) * 3 // 2, 1) for e in examples], np.int32)
    longest = model.config.max_positions if model.config.positions == "learned" else None
    limits = limits if longest is None else np.minimum(limits, longest)
    results = decoding.decode(
        model,
        _stack([e.source for e in examples]),
        max_length=int(limits.max()),
        max_lengths=limits,
        end_id=end_id,
    )
    return [
        tokens[0, : lengths[0]]
        for tokens, lengths in zip(
            np.asarray(results.tokens), np.asarray(results.lengths), strict=True
        )
    ]


def render(ids: np.ndarray, vocabulary: TextVocabulary) -> str:
    """Renders ids up to the end token as one line of text, with sentinels as <1>, <2>, ..."""
    kept = _until_end(ids, end_id(vocabulary))
    numbers = sentinels.numbers(kept, vocabulary)
    pieces, before, run = [], [], []
    for token, number in [*zip(kept, numbers, strict=True), (None, None)]:
        if token is not None and token < vocabulary.vocab_size and number is None:
            run.append(token)
            continue
        pieces.append(_decode_continuation(before, run, vocabulary))
        before, run = before + run, []
        if token is not None:
            # A table may have more rows than the vocabulary has ids.
            pieces.append("<?>" if number is None else f"<{number + 1}>")
    return "".join(pieces).replace("\n", "\\n")


def decode(ids: list[int], vocabulary: TextVocabulary) -> str:
    """Returns the text of ids, or the ids themselves if they have none."""
    text = vocabulary.decode(ids) if ids else ""
    # A vocabulary such as `seqio.PassThroughVocabulary` returns ids instead of text.
    return text if isinstance(text, str) else " ".join(map(str, text))


def _decode_continuation(before: list[int], run: list[int], vocabulary: TextVocabulary) -> str:
    """Returns the text of `run` after `before`; a vocabulary may drop a leading space of a text."""
    if not run:
        return ""
    start, whole = decode(before, vocabulary), decode(before + run, vocabulary)
    return whole[len(start) :] if whole.startswith(start) else decode(run, vocabulary)


def _until_end(ids: np.ndarray, end_id: int) -> list[int]:
    before_end = []
    for token in ids.tolist():
        if token == end_id:
            break
        if token != PADDING_ID:
            before_end.append(token)
    return before_end


def end_id(vocabulary: TextVocabulary) -> int:
    """Returns the id that ends a text."""
    return 1 if vocabulary.eos_id is None else vocabulary.eos_id


def _segments(batch: Mapping[str, HostOrDevice], name: str, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(batch[name]) if name in batch else (tokens != PADDING_ID).astype(np.int32)


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    stacked = np.zeros((len(rows), max(len(row) for row in rows)), np.int32)
    for i, row in enumerate(rows):
        stacked[i, : len(row)] = row
    return stacked
