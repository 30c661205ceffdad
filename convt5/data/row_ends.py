"""Truncates examples to the rows of a model while keeping their end token.

seqio truncates features after the preprocessors of a task, including the end token added by
`append_eos`. A model trained on such data never learns to end a long answer.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import seqio
import tensorflow as tf

Provider = TypeVar("Provider", seqio.Task, seqio.Mixture)


def keep_end_tokens(provider: Provider) -> Provider:
    """Returns a task or mixture whose features always end with their end token.

    Applies to features with add_eos=True, whatever the preprocessors are, and appends missing end
    tokens. Features with add_eos=False are truncated as seqio does.
    """
    return _with_last_step(provider, end_and_cut, {})


def after_cache(task: seqio.Task) -> seqio.Task:
    """Returns a task with the preprocessors that follow its cache, for examples read from there."""
    (place,) = (i for i, step in enumerate(task.preprocessors) if _marks_cache(step))
    return _with_steps(copy.copy(task), task.preprocessors[place + 1 :])


def without_cache(task: seqio.Task) -> seqio.Task:
    """Returns a task that is not cached; seqio would give its random steps other seeds."""
    steps = [step for step in task.preprocessors if not _marks_cache(step)]
    return _with_steps(copy.copy(task), steps)


def without_truncation(provider: Provider) -> Provider:
    """Returns the task or mixture without truncation, except in steps that need lengths."""
    return _with_last_step(provider, end, {})


def end(dataset: tf.data.Dataset, output_features: Mapping[str, Any]) -> tf.data.Dataset:
    """Appends missing end tokens to the features that should have one."""
    return end_and_cut(dataset, output_features)


def end_and_cut(
    dataset: tf.data.Dataset,
    output_features: Mapping[str, Any],
    sequence_length: Mapping[str, int] | None = None,
) -> tf.data.Dataset:
    """Truncates features to `sequence_length`, end token included; None truncates nothing.

    The feature `was_cut(feature)` then tells whether a feature was truncated, here or by seqio.
    """
    lengths = sequence_length or {}

    def fit(name: str, ids: tf.Tensor, limit: int | None) -> tf.Tensor:
        end_id = _end_id(output_features.get(name), ids)
        return ids if end_id is None else _append_end(ids, end_id, limit)

    def fit_all(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        whole = {name: fit(name, value, None) for name, value in example.items()}
        was_cut_flags = {
            was_cut(name): tf.reduce_any(tf.not_equal(whole[name][limit:], 0))
            for name, limit in lengths.items()
            if name in whole
        }
        return {
            name: fit(name, value, lengths.get(name)) for name, value in whole.items()
        } | was_cut_flags

    return dataset.map(fit_all, num_parallel_calls=tf.data.AUTOTUNE)


def was_cut(feature: str) -> str:
    """Returns the name of the feature that tells whether `feature` was truncated."""
    return f"{feature}_was_cut"


def _end_id(feature: Any, ids: tf.Tensor) -> int | None:
    """Returns the end token of a feature; None if it has none, or does not hold ids."""
    if feature is None or not feature.add_eos or ids.shape.rank != 1 or not ids.dtype.is_integer:
        return None
    return feature.vocabulary.eos_id


def _append_end(ids: tf.Tensor, end_id: int, limit: int | None) -> tf.Tensor:
    # If a task pads its own rows, the end token precedes the padding.
    last = ids[-1:]
    is_ended = tf.reduce_any(tf.logical_or(tf.equal(last, end_id), tf.equal(last, 0)))
    added = tf.fill([1 - tf.cast(is_ended, tf.int32)], tf.constant(end_id, ids.dtype))
    whole = tf.concat([ids, added], axis=0)
    if limit is None:
        return whole
    last = whole[:limit][-1:]
    loses_end = tf.logical_and(tf.size(whole) > limit, tf.not_equal(last, 0))
    ended = tf.where(loses_end, tf.constant(end_id, ids.dtype), last)
    return tf.concat([whole[:limit][:-1], ended], axis=0)


def _with_last_step(
    provider: Provider, step: Callable[..., tf.data.Dataset], copies: dict[int, Any]
) -> Provider:
    """Returns a copy whose tasks end in `step`; `made` caches the copies made so far."""
    if id(provider) in copies:  # A task may be in several parts of a mixture.
        return copies[id(provider)]
    copied = copies[id(provider)] = copy.copy(provider)
    if isinstance(copied, seqio.Mixture):
        copied._tasks = [_with_last_step(task, step, copies) for task in copied._tasks]
        copied._sub_mixtures = [
            _with_last_step(part, step, copies) for part in copied._sub_mixtures
        ]
        parts = [*copied._tasks, *copied._sub_mixtures]
        copied._task_map = {part.name: part for part in parts}
        return copied
    steps = [_without_truncation(each) for each in copied.preprocessors]
    # In place of seqio's own step, so that saved positions stay valid.
    if steps and getattr(steps[-1], "func", steps[-1]) is seqio.preprocessors.append_eos:
        steps.pop()
    steps.append(step)
    vars(copied).update(_preprocessor_constructor_args=steps, preprocessors=steps)
    return copied


def _with_steps(task: seqio.Task, steps: Sequence[Any]) -> seqio.Task:
    """Sets the preprocessors of a task without cache."""
    # `Task.replace` would turn a subclass into a plain task.
    vars(task).update(
        _preprocessor_constructor_args=steps,
        preprocessors=steps,
        _cache_step_idx=None,
        _cache_dataset_placerholder=None,
    )
    return task


def _marks_cache(step: Any) -> bool:
    return isinstance(step, seqio.CacheDatasetPlaceholder)


def _without_truncation(step: Any) -> Any:
    """Returns a variant of `append_eos` that does not truncate; other steps unchanged."""
    cuts = getattr(step, "func", step) is seqio.preprocessors.append_eos_after_trim
    return seqio.preprocessors.append_eos if cuts else step
