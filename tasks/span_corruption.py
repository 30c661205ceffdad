"""Span corruption, the pre-training objective of T5, as tf.data transformations.

Raffel et al. 2020 (arXiv 1910.10683, section 3.1.4): a sentinel replaces each corrupted span of the
input, and the target lists the spans, each after its sentinel. With equal seeds, ids equal those of
`t5.data.preprocessors`; unlike there, no text is ever dropped.
"""

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.text import sentinels

NOISE_DENSITY = 0.15
MEAN_SPAN_LENGTH = 3.0

_SHORTEST_TEXT, _LONGEST_TEXT = 2, 2**31


def text_as_targets(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Renames the field "text" of a source to "targets", and drops the others.

    Raises:
        UserError: there is no such field.
    """
    fields: Any = dataset.element_spec
    if "text" not in fields:
        raise errors.UserError(
            f"pre-training reads documents in the field 'text', and its source has {list(fields)}; "
            "name a task of documents, such as @pretraining.text_span_corruption()."
        )
    return dataset.map(lambda row: {"targets": row["text"]}, tf.data.AUTOTUNE)


def check_corpus(name: str, corpus: Any) -> None:
    """Raises `UserError` if `corpus`, an argument of the task `name`, is no task."""
    if not isinstance(corpus, seqio.Task):
        raise errors.UserError(
            f"{name}: corpus={corpus!r} is no task; give one whose documents are to be taken, such "
            "as @pretraining.text_span_corruption()."
        )


class SegmentSizes(NamedTuple):
    """Numbers of tokens of a full segment, before and after corruption.

    Attributes:
        text: tokens of text before corruption.
        inputs: encoder tokens, including the end token.
        targets: decoder tokens, including the end token.
        spans: number of corrupted spans, and so of sentinels.
    """

    text: int
    inputs: int
    targets: int
    spans: int


def segment_sizes(
    inputs_length: int,
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
) -> SegmentSizes:
    """Returns the sizes of the longest segment whose corrupted form fits `inputs_length` tokens.

    Raises:
        UserError: `inputs_length` is too short for any text.
    """

    def sizes(length: int) -> SegmentSizes:
        return _corrupted_sizes(length, noise_density, mean_span_length)

    # The inputs grow with the text. Text can be very long if nearly all of it is corrupted.
    lengths = range(_SHORTEST_TEXT, _LONGEST_TEXT)
    num_fitting = bisect.bisect_right(lengths, inputs_length, key=lambda n: sizes(n).inputs)
    if not num_fitting:
        raise errors.UserError(
            f"encoder_length={inputs_length} holds no corrupted text; it must be at least "
            f"{sizes(_SHORTEST_TEXT).inputs}."
        )
    return sizes(lengths[num_fitting - 1])


def span_corruption(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, Any],
    *,
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
    merge_documents: bool = True,
) -> tf.data.Dataset:
    """Turns documents, token ids under "targets", into pairs of corrupted text and spans.

    Args:
        dataset: documents without end tokens.
        sequence_length: lengths of "inputs" and "targets", including end tokens.
        output_features: the features, which must have the same vocabulary.
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens.
        merge_documents: as in T5, concatenates documents without a separator and cuts them into
            segments of equal length, so there is no padding. Otherwise a segment ends with its
            document, and packing may put several in one row.

    Raises:
        UserError: targets do not fit `sequence_length`, or there are too few sentinels.
    """
    check_lengths_given(sequence_length)
    vocabulary = output_features["targets"].vocabulary
    sizes = segment_sizes(
        sequence_length["inputs"], noise_density=noise_density, mean_span_length=mean_span_length
    )
    _check_fit(sizes, sequence_length, vocabulary)
    segments = split_documents(dataset, sizes.text, merge_documents=merge_documents)
    ids = sentinels.ids_of(vocabulary)

    def corrupt_segment(tokens: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return corrupt(
            tokens,
            seed,
            first_sentinel=ids[0],
            sentinel_ids=ids,
            noise_density=noise_density,
            mean_span_length=mean_span_length,
        )

    corrupt_all: Any = seqio.map_over_dataset(corrupt_segment, num_seeds=1)
    return corrupt_all(segments)


def check_lengths_given(sequence_length: Mapping[str, int] | None) -> None:
    """Raises `UserError` if the length of segments is not given."""
    if sequence_length is None or not {"inputs", "targets"} <= set(sequence_length):
        raise errors.UserError(
            f"sequence_length={sequence_length} lacks the lengths of text; give both, such as "
            'get_dataset({"inputs": 512, "targets": 114}, "train").'
        )


def corrupt(
    tokens: tf.Tensor,
    seed: tf.Tensor,
    *,
    first_sentinel: int,
    sentinel_ids: Sequence[int] = (),
    noise_density: float = NOISE_DENSITY,
    mean_span_length: float = MEAN_SPAN_LENGTH,
) -> dict[str, tf.Tensor]:
    """Returns "inputs" and "targets" of one segment, without end tokens; `seed` holds two ints.

    Sentinels count down from `first_sentinel`, unless `sentinel_ids` lists them in order.
    """
    sentinel = functools.partial(_sentinel_id, first=first_sentinel, ids=sentinel_ids)
    seeds = tf.unstack(tf.random.split(seed, 6))
    noise = random_spans(
        tf.size(tokens),
        seeds[0],
        seeds[1],
        noise_density=noise_density,
        mean_span_length=mean_span_length,
    )
    return {
        "inputs": _sentinel_per_span(tokens, noise, sentinel),
        "targets": _sentinel_per_span(tokens, tf.logical_not(noise), sentinel),
    }


def random_spans(
    length: tf.Tensor,
    noise_seed: tf.Tensor,
    text_seed: tf.Tensor,
    *,
    noise_density: float,
    mean_span_length: float,
) -> tf.Tensor:
    """Returns a mask of `length` positions, true in the spans to corrupt; it starts with text.

    All masks with the required numbers of tokens and spans are equally likely.
    """
    # One token cannot be both text and noise: its mask is truncated from a mask of two.
    padded = tf.maximum(length, 2)
    num_noise = _round(tf.cast(padded, tf.float32) * noise_density)
    num_noise = tf.minimum(tf.maximum(num_noise, 1), padded - 1)
    num_spans = tf.maximum(_round(tf.cast(num_noise, tf.float32) / mean_span_length), 1)
    # Text precedes each span.
    num_spans = tf.minimum(num_spans, padded - num_noise)
    noise_lengths = _random_parts(num_noise, num_spans, noise_seed)
    text_lengths = _random_parts(padded - num_noise, num_spans, text_seed)
    ends = tf.cumsum(tf.reshape(tf.stack([text_lengths, noise_lengths], axis=1), [-1]))
    part = tf.searchsorted(ends, tf.range(length), side="right")
    return part % 2 == 1


def _random_parts(total: tf.Tensor, num_parts: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Splits `total` into `num_parts` positive integers, all splits equally likely."""
    is_cut = tf.cast(tf.range(total - 1) < num_parts - 1, tf.int32)
    part = tf.cumsum(tf.pad(seqio.stateless_shuffle(is_cut, seed), [[1, 0]]))
    return tf.math.segment_sum(tf.ones_like(part), part)


def _sentinel_id(numbers: tf.Tensor, *, first: int, ids: Sequence[int]) -> tf.Tensor:
    """Returns the ids of sentinels numbered from 0; the result for -1 is unused."""
    if not ids or tuple(ids) == tuple(range(first, first - len(ids), -1)):
        return first - numbers
    return tf.gather(tf.constant(ids, numbers.dtype), tf.clip_by_value(numbers, 0, len(ids) - 1))


def _sentinel_per_span(
    tokens: tf.Tensor, mask: tf.Tensor, sentinel: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Replaces each run of masked tokens by the next sentinel."""
    follows = tf.pad(mask[:-1], [[1, 0]])
    starts = tf.logical_and(mask, tf.logical_not(follows))
    marks = sentinel(tf.cumsum(tf.cast(starts, tokens.dtype)) - 1)
    return tf.boolean_mask(
        tf.where(starts, marks, tokens), tf.logical_not(tf.logical_and(mask, follows))
    )


def split_documents(
    dataset: tf.data.Dataset, segment_length: int, *, merge_documents: bool
) -> tf.data.Dataset:
    """Splits documents, token ids under "targets", into segments; only the last may be shorter.

    With `merge_documents`, all documents are concatenated first.
    """
    documents = dataset.map(lambda example: example["targets"])
    if merge_documents:
        return documents.rebatch(segment_length)
    return documents.filter(lambda tokens: tf.size(tokens) > 0).flat_map(
        lambda tokens: tf.data.Dataset.from_tensors(tokens).rebatch(segment_length)
    )


def _corrupted_sizes(length: int, noise_density: float, mean_span_length: float) -> SegmentSizes:
    """Returns the sizes that `random_spans` produces, with the same rounding in float32."""
    num_noise = int(np.round(np.float32(length) * np.float32(noise_density)))
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(int(np.round(np.float32(num_noise) / np.float32(mean_span_length))), 1)
    num_spans = min(num_spans, length - num_noise)
    return SegmentSizes(
        text=length,
        inputs=length - num_noise + num_spans + 1,
        targets=num_noise + num_spans + 1,
        spans=num_spans,
    )


def _check_fit(
    sizes: SegmentSizes, sequence_length: Mapping[str, int], vocabulary: seqio.Vocabulary
) -> None:
    faults = []
    if sizes.targets > sequence_length["targets"]:
        faults.append(
            f"decoder_length={sequence_length['targets']} is too short for the spans of "
            f"encoder_length={sequence_length['inputs']}: they take {sizes.targets} tokens; set "
            f"decoder_length to at least {sizes.targets}, or lower encoder_length."
        )
    num_sentinels = len(sentinels.ids_of(vocabulary))
    if sizes.spans > num_sentinels:
        faults.append(
            f"the vocabulary has {num_sentinels} sentinels, but encoder_length="
            f"{sequence_length['inputs']} takes out {sizes.spans} spans and each needs its own; "
            f"set num_sentinels of the vocabulary to at least {sizes.spans}, raise "
            "mean_span_length (20 in byte-level T5s), or lower encoder_length."
        )
    errors.raise_all(faults, where="span corruption")


def _round(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.round(x), tf.int32)
