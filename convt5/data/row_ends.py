"""Examples that fit the rows of a model: what is too long is cut, and the end token stays.

seqio cuts features after the preprocessors of a task, the end token of `append_eos` with them. A
model trained so never learns to end an answer that is long.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import seqio
import tensorflow as tf

Provider = TypeVar("Provider", seqio.Task, seqio.Mixture)


def fitted(provider: Provider) -> Provider:
    """Returns a task or mixture whose features end with their end token, cut or not.

    It holds for every feature with add_eos=True, whichever steps the task has; where none of them
    appends the end token it is appended here. Features with add_eos=False are cut as seqio does.
    """
    return _changed(provider, end_and_cut, {})


def uncut(provider: Provider) -> Provider:
    """Returns the same with features of their full length, but for steps that need lengths."""
    return _changed(provider, end, {})


def end(dataset: tf.data.Dataset, output_features: Mapping[str, Any]) -> tf.data.Dataset:
    """Appends the end token to every feature that should have one and does not."""
    return end_and_cut(dataset, output_features)


def end_and_cut(
    dataset: tf.data.Dataset,
    output_features: Mapping[str, Any],
    sequence_length: Mapping[str, int] | None = None,
) -> tf.data.Dataset:
    """Cuts features to `sequence_length`, end token included; None cuts nothing.

    Whether a feature was cut, or will be by seqio, is then told under the name `was_cut(feature)`.
    """
    lengths = sequence_length or {}

    def fit(name: str, ids: tf.Tensor, limit: int | None) -> tf.Tensor:
        end_id = _end_id(output_features.get(name), ids)
        return ids if end_id is None else _ended(ids, end_id, limit)

    def fit_all(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        whole = {name: fit(name, value, None) for name, value in example.items()}
        told = {
            was_cut(name): tf.reduce_any(tf.not_equal(whole[name][limit:], 0))
            for name, limit in lengths.items()
            if name in whole
        }
        return {name: fit(name, value, lengths.get(name)) for name, value in whole.items()} | told

    return dataset.map(fit_all, num_parallel_calls=tf.data.AUTOTUNE)


def was_cut(feature: str) -> str:
    """Returns the name under which an example tells whether a feature was cut."""
    return f"{feature}_was_cut"


def _end_id(feature: Any, ids: tf.Tensor) -> int | None:
    """Returns the id that a feature ends with; None for one without, or of other than ids."""
    if feature is None or not feature.add_eos or ids.shape.rank != 1 or not ids.dtype.is_integer:
        return None
    return feature.vocabulary.eos_id


def _ended(ids: tf.Tensor, end_id: int, limit: int | None) -> tf.Tensor:
    # A task may pad its rows itself; its end token then stands before the padding.
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


def _changed(
    provider: Provider, step: Callable[..., tf.data.Dataset], made: dict[int, Any]
) -> Provider:
    """Returns a copy whose tasks have `step` as their last; `made` holds those made so far."""
    if id(provider) in made:  # A task may be in several parts of a mixture.
        return made[id(provider)]
    changed = made[id(provider)] = copy.copy(provider)
    if isinstance(changed, seqio.Mixture):
        changed._tasks = [_changed(task, step, made) for task in changed._tasks]
        changed._sub_mixtures = [_changed(part, step, made) for part in changed._sub_mixtures]
        parts = [*changed._tasks, *changed._sub_mixtures]
        changed._task_map = {part.name: part for part in parts}
        return changed
    steps = [_without_cutting(each) for each in changed.preprocessors]
    # In the place of seqio's own, so that positions that were saved with it stay valid.
    if steps and getattr(steps[-1], "func", steps[-1]) is seqio.preprocessors.append_eos:
        steps.pop()
    # `Task.replace` would make a plain task of a subclass.
    steps.append(step)
    vars(changed).update(_preprocessor_constructor_args=steps, preprocessors=steps)
    return changed


def _without_cutting(step: Any) -> Any:
    """Returns a step that appends the end token without cutting for it, or any other as it is."""
    cuts = getattr(step, "func", step) is seqio.preprocessors.append_eos_after_trim
    return seqio.preprocessors.append_eos if cuts else step
