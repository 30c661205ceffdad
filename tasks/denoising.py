"""Denoising objectives other than span corruption: prefix language modelling and UL2.

Each is derived from a task of `pretraining`, with its text and vocabulary. Importing this registers
them for the text inside Python and for C4, such as "pydoc_ul2" and "c4_prefix_lm".
"""

import bisect
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import seqio
import tensorflow as tf

from convt5 import errors
from convt5.text import sentinels

from . import pretraining, registration
from .span_corruption import (
    check_corpus,
    check_lengths_given,
    segment_sizes,
    span_corruption,
    split_documents,
    text_as_targets,
)

PREFIX_LM_DENSITY = 0.5
"""Mean fraction of the text that is the target in T5's prefix language modelling."""

SEQUENTIAL_DENSITY = 0.25
"""Mean fraction of the text that is the target in UL2's prefix language modelling."""


class Denoiser(NamedTuple):
    """The setting of one span corruption denoiser of UL2."""

    mean_span_length: float
    noise_density: float


REGULAR = (Denoiser(3, 0.15), Denoiser(8, 0.15))
EXTREME = (Denoiser(3, 0.5), Denoiser(8, 0.5), Denoiser(64, 0.15), Denoiser(64, 0.5))
_SHORTEST_INPUTS = 3


def prefix_lm(
    corpus: seqio.Task,
    *,
    noise_density: float = PREFIX_LM_DENSITY,
    mode: str = "",
    merge_documents: bool = True,
    name: str = "prefix_lm",
) -> seqio.Task:
    """Returns prefix language modelling: the start of a text in, its continuation out.

    Args:
        corpus: a task that provides documents and vocabulary, such as
            `pretraining.text_span_corruption`.
        noise_density: mean fraction of the text that is the target, in (0, 0.5].
        mode: text that precedes the inputs.
        merge_documents: see `pretraining.span_corruption_task`.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: noise_density is out of range.
    """
    if not 0 < noise_density <= 0.5:
        raise errors.UserError(
            f"{name}: noise_density={noise_density} must be in (0, 0.5]; T5 takes 0.5, UL2 0.25."
        )
    split = functools.partial(
        split_prefix, noise_density=noise_density, mode=mode, merge_documents=merge_documents
    )
    return _task(name, corpus, split)


def ul2(
    corpus: seqio.Task,
    *,
    regular_rate: float = len(REGULAR),
    sequential_rate: float = 1.0,
    extreme_rate: float = len(EXTREME),
    modes: bool = True,
    merge_documents: bool = True,
    name: str = "ul2",
) -> seqio.Mixture:
    """Returns UL2's mixture of denoisers (Tay et al. 2022, arXiv 2205.05131, section 3.1.2).

    Regular denoisers are T5's span corruption, extreme ones corrupt more or longer spans, and the
    sequential one is prefix language modelling.

    Args:
        corpus: a task that provides documents and vocabulary, such as
            `pretraining.text_span_corruption`.
        regular_rate, sequential_rate, extreme_rate: relative rates of the three kinds, by default
            equal for each of the seven denoisers. Denoisers of one kind have equal rates.
        modes: whether inputs begin with "[R]", "[S]" or "[X]".
        merge_documents: see `pretraining.span_corruption_task`.
        name: name of the mixture; use the same one if you register it.

    Raises:
        UserError: rates are negative, not finite or all zero.
    """
    rates = (regular_rate, sequential_rate, extreme_rate)
    if not all(0 <= rate < math.inf for rate in rates) or not sum(rates):
        raise errors.UserError(
            f"{name}: regular_rate={regular_rate}, sequential_rate={sequential_rate} and "
            f"extreme_rate={extreme_rate} must be at least 0, and one of them more; "
            "none may be infinite."
        )
    # Together the denoisers buffer as many examples for shuffling as a single task.
    buffer = seqio.SHUFFLE_BUFFER_SIZE // (len(REGULAR) + 1 + len(EXTREME))
    tasks: list[tuple[seqio.Task, float]] = []
    for letter, rate, denoisers in (("R", regular_rate, REGULAR), ("X", extreme_rate, EXTREME)):
        for i, denoiser in enumerate(denoisers):
            corrupt = functools.partial(
                fit_span_corruption,
                **denoiser._asdict(),
                mode=f"[{letter}] " if modes else "",
                merge_documents=merge_documents,
            )
            task = _task(f"{name}_{letter.lower()}{i}", corpus, corrupt)
            tasks.append((task, rate / len(denoisers)))
    sequential = prefix_lm(
        corpus,
        noise_density=SEQUENTIAL_DENSITY,
        mode="[S] " if modes else "",
        merge_documents=merge_documents,
        name=f"{name}_s",
    )
    tasks.append((sequential, sequential_rate))
    return seqio.Mixture(
        name, [(task.replace(shuffle_buffer_size=buffer), rate) for task, rate in tasks if rate]
    )


def fit_span_corruption(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, Any],
    *,
    noise_density: float,
    mean_span_length: float,
    mode: str = "",
    merge_documents: bool = True,
) -> tf.data.Dataset:
    """Corrupts spans of the longest segments for which inputs, targets and sentinels all fit.

    With much corruption, targets or sentinels reach their limit before the inputs do, which
    `span_corruption` refuses.

    Args:
        dataset: documents without end tokens, as token ids under "targets".
        sequence_length: lengths of "inputs" and "targets", including end tokens.
        output_features: the features, with the same vocabulary.
        noise_density: fraction of the tokens to corrupt, in (0, 1).
        mean_span_length: mean length of a corrupted span in tokens.
        mode: text that precedes the inputs.
        merge_documents: see `span_corruption`.

    Raises:
        UserError: the lengths are too short for any text.
    """
    check_lengths_given(sequence_length)
    vocabulary = output_features["targets"].vocabulary
    mode_ids = vocabulary.encode(mode) if mode else []
    num_sentinels = len(sentinels.ids_of(vocabulary))
    sizes = functools.partial(
        segment_sizes, noise_density=noise_density, mean_span_length=mean_span_length
    )

    def is_too_long(inputs_length: int) -> bool:
        size = sizes(inputs_length)
        return size.targets > sequence_length["targets"] or size.spans > num_sentinels

    lengths = range(_SHORTEST_INPUTS, sequence_length["inputs"] - len(mode_ids) + 1)
    num_fitting = bisect.bisect_left(lengths, True, key=is_too_long)
    if not num_fitting:
        raise errors.UserError(
            f"encoder_length={sequence_length['inputs']} and decoder_length="
            f"{sequence_length['targets']} hold no corrupted text with noise_density="
            f"{noise_density} and a vocabulary of {num_sentinels} sentinels; raise them."
        )
    corrupted = span_corruption(
        dataset,
        {**sequence_length, "inputs": lengths[num_fitting - 1]},
        output_features,
        noise_density=noise_density,
        mean_span_length=mean_span_length,
        merge_documents=merge_documents,
    )
    return _with_mode(corrupted, mode_ids)


def split_prefix(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, int],
    output_features: Mapping[str, Any],
    *,
    noise_density: float = PREFIX_LM_DENSITY,
    mode: str = "",
    merge_documents: bool = True,
) -> tf.data.Dataset:
    """Splits segments at a random position into "inputs" and "targets".

    The length of the targets is uniform between one token and twice the mean fraction
    `noise_density` of the segment, but never more than fits.

    Args:
        dataset: documents without end tokens, as token ids under "targets".
        sequence_length: lengths of "inputs" and "targets", including end tokens.
        output_features: the features, with the same vocabulary.
        noise_density: mean fraction of the targets, in (0, 0.5].
        mode: text that precedes the inputs.
        merge_documents: see `span_corruption`.

    Raises:
        UserError: the lengths are too short for any text.
    """
    check_lengths_given(sequence_length)
    vocabulary = output_features["targets"].vocabulary
    mode_ids = vocabulary.encode(mode) if mode else []
    room = {"inputs": sequence_length["inputs"] - 1 - len(mode_ids)}
    room["targets"] = sequence_length["targets"] - 1
    if min(room.values()) < 1:
        raise errors.UserError(
            f"encoder_length={sequence_length['inputs']} and decoder_length="
            f"{sequence_length['targets']} hold no text to continue; raise them."
        )

    def split(tokens: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        length = tf.size(tokens)
        longest = tf.cast(2 * noise_density * tf.cast(length, tf.float32), tf.int32)
        longest = tf.maximum(tf.minimum(tf.minimum(longest, length - 1), room["targets"]), 1)
        num_targets = tf.random.stateless_uniform([], seed, 1, longest + 1, tf.int32)
        return {"inputs": tokens[:-num_targets], "targets": tokens[-num_targets:]}

    # With the shortest targets, the inputs are exactly full.
    segments = split_documents(dataset, room["inputs"] + 1, merge_documents=merge_documents)
    split_all: Any = seqio.map_over_dataset(split, num_seeds=1)
    return _with_mode(split_all(segments), mode_ids)


def _task(name: str, corpus: seqio.Task, denoise: Any) -> seqio.Task:
    """Returns a task with the documents of `corpus` and another objective."""
    check_corpus(name, corpus)
    return registration.task(
        name,
        source=corpus.source,
        preprocessors=[
            text_as_targets,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.CacheDatasetPlaceholder(),
            denoise,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=corpus.output_features,
        metric_fns=[],
    )


def _with_mode(dataset: tf.data.Dataset, mode_ids: list[int]) -> tf.data.Dataset:
    if not mode_ids:
        return dataset
    return dataset.map(
        lambda example: {**example, "inputs": tf.concat([mode_ids, example["inputs"]], axis=0)}
    )


for _name, _corpus in (
    ("pydoc", pretraining.pydoc_span_corruption()),
    ("c4", pretraining.c4_span_corruption()),
):
    _prefix_lm = prefix_lm(_corpus, name=f"{_name}_prefix_lm")
    registration.add(_prefix_lm)
    _ul2 = ul2(_corpus, name=f"{_name}_ul2")
    registration.add(_ul2)
