"""Ends examples with their end token and truncates them to the rows of a model.

Features that are not what their task declares, and ids that its vocabulary does not have, are
refused here, for training, reports and evaluation alike.

seqio truncates features after the preprocessors of a task, including the end token added by
`append_eos`. A model trained on such data never learns to end a long answer. Here a task is read
without truncation (`untruncated`), and NumPy ends and truncates the examples of a block at once: as
a step of the task, TensorFlow took a fifth of the processor time of a block.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.data.rows import Ragged

_NO_CACHE = {"_cache_step_idx": None, "_cache_dataset_placerholder": None}


def after_cache(task: seqio.Task) -> seqio.Task:
    """Returns a task with the preprocessors that follow its cache, for examples read from there."""
    (place,) = (i for i, step in enumerate(task.preprocessors) if _marks_cache(step))
    return _with_steps(task, task.preprocessors[place + 1 :], **_NO_CACHE)


def without_cache(task: seqio.Task) -> seqio.Task:
    """Returns a task that is not cached; seqio would give its random steps other seeds."""
    steps = [step for step in task.preprocessors if not _marks_cache(step)]
    return _with_steps(task, steps, **_NO_CACHE)


def untruncated(task: seqio.Task) -> seqio.Task:
    """Returns a task that leaves truncation, and end tokens of its last step, to `end_and_cut`.

    Steps that need lengths still get them. seqio's own truncation is off only with
    `trim_output_features=False`. Reading raises `UserError` if the task does not make the features
    that it declares.
    """
    appends, cuts = seqio.preprocessors.append_eos, seqio.preprocessors.append_eos_after_trim
    steps = [appends if _function(step) is cuts else step for step in task.preprocessors]
    if steps and _function(steps[-1]) is appends:
        steps.pop()
    return _with_steps(task, [*steps, functools.partial(_check_features, task=task.name)])


def check_ids(sequences: Ragged, feature: Any, *, name: str, task: str) -> None:
    """Checks the ids of a feature, of which JAX would read others than the vocabulary has.

    Args:
        sequences: the values of a feature.
        feature: its `seqio.Feature`.
        name: its name.
        task: the name of its task.

    Raises:
        UserError: an id is not in the vocabulary.
    """
    if not _holds_ids(feature):
        return
    size = feature.vocabulary.vocab_size
    strange = sequences.values[(sequences.values < 0) | (sequences.values >= size)]
    if len(strange):
        raise errors.UserError(
            f"task {task!r}: its {name!r} hold the id {strange[0]}, but their vocabulary has the "
            f"ids 0 to {size - 1}; give the feature the vocabulary that its ids are of, and 0, "
            "which is padding, to positions that are to be ignored."
        )


def end_and_cut(
    sequences: Ragged, feature: Any, length: int | None = None
) -> tuple[Ragged, np.ndarray]:
    """Appends missing end tokens and truncates, so that each sequence ends with its end token.

    A feature that has no end token, or does not hold ids, is only truncated.

    Args:
        sequences: the values of a feature.
        feature: its `seqio.Feature`.
        length: tokens to keep at most, at least 1, end token included; None truncates nothing.

    Returns:
        The sequences, and which of them lost more than padding, as bool [sequences].
    """
    end_id = _end_id(feature)
    if end_id is not None:
        sequences = _ended(sequences, end_id)
    was_cut = np.zeros(len(sequences.lengths), bool)
    if length is None or sequences.lengths.max(initial=0) <= length:
        return sequences, was_cut
    is_longer = sequences.lengths > length
    kept = sequences.cut(length)
    number = np.repeat(np.arange(len(was_cut)), sequences.lengths)
    was_cut[number[(sequences.places() >= length) & (sequences.values != 0)]] = True
    if end_id is not None:
        last = kept.offsets[1:][is_longer] - 1
        kept.values[last[kept.values[last] != 0]] = end_id
    return kept, was_cut


def end_example(
    example: Mapping[str, Any],
    output_features: Mapping[str, Any],
    lengths: Mapping[str, int],
    *,
    task: str,
) -> dict[str, Any]:
    """Returns an example with `end_and_cut` applied to each feature that is a sequence.

    Raises:
        UserError: an id is not in its vocabulary; names the task.
    """
    ended = dict(example)
    for name, feature in output_features.items():
        if name in ended and feature.rank == 1:
            values = np.asarray(ended[name])
            alone = Ragged(values, np.array([len(values)]))
            check_ids(alone, feature, name=name, task=task)
            ended[name] = end_and_cut(alone, feature, lengths.get(name))[0].values
    return ended


def _ended(sequences: Ragged, end_id: int) -> Ragged:
    """Appends the end token where it is missing."""
    # If a task pads its own rows, the end token precedes the padding.
    is_open = sequences.lengths == 0
    ends = sequences.offsets[1:]
    last = sequences.values[ends[~is_open] - 1]
    is_open[~is_open] = (last != end_id) & (last != 0)
    values = np.insert(sequences.values, ends[is_open], end_id)
    return Ragged(values, sequences.lengths + is_open)


def _end_id(feature: Any) -> int | None:
    """Returns the end token of a feature; None if it has none, or does not hold ids."""
    return feature.vocabulary.eos_id if feature.add_eos and _holds_ids(feature) else None


def _holds_ids(feature: Any) -> bool:
    return feature.rank == 1 and tf.as_dtype(feature.dtype).is_integer


def _check_features(
    dataset: tf.data.Dataset, output_features: Mapping[str, Any], *, task: str
) -> tf.data.Dataset:
    """Raises `UserError` if examples are not what a task declares; else returns the dataset."""
    made: Any = dataset.element_spec
    faults = []
    for name, feature in output_features.items():
        if name in made:
            found, declared = (
                f"{tf.as_dtype(dtype).name} of rank {rank}"
                for dtype, rank in (
                    (made[name].dtype, made[name].shape.rank),
                    (feature.dtype, feature.rank),
                )
            )
            if found != declared:
                faults.append(
                    f"its preprocessors make {name!r} {found}, but its seqio.Feature is "
                    f"{declared}; seqio.preprocessors.tokenize makes ids of text."
                )
            elif name in ("inputs", "targets") and not _holds_ids(feature):
                faults.append(
                    f"its {name!r} are {declared}, but models of text read token ids: integers of "
                    "rank 1; make ids of them, and declare a seqio.Feature with their vocabulary."
                )
        elif feature.required:
            faults.append(
                f"its preprocessors make no feature {name!r}, but {list(made)}; add or correct the "
                "one that makes it."
            )
    errors.raise_all(faults, where=f"task {task!r}")
    return dataset


def _with_steps(task: seqio.Task, steps: Sequence[Any], **others: Any) -> seqio.Task:
    """Returns a copy with other preprocessors, and other attributes."""
    # `Task.replace` would turn a subclass into a plain task.
    copied = copy.copy(task)
    vars(copied).update(_preprocessor_constructor_args=steps, preprocessors=steps, **others)
    return copied


def _marks_cache(step: Any) -> bool:
    return isinstance(step, seqio.CacheDatasetPlaceholder)


def _function(step: Any) -> Any:
    """Returns the function of a step, whose arguments may be bound."""
    return getattr(step, "func", step)
