"""Writes the inputs of a task by its `TaskFormat`, and finds the format of any seqio task.

Predictions use the input format of training if the task's preprocessors include `write_inputs`, or
leave inputs unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import seqio
import tensorflow as tf

from convt5.text import task_format
from convt5.text.task_format import TaskFormat, of_template

__all__ = ["TaskFormat", "keeps_inputs", "of", "of_template", "write_inputs"]

Row = Mapping[str, tf.Tensor]
Preprocessor = TypeVar("Preprocessor", bound=Callable[..., tf.data.Dataset])

_KEEP_INPUTS: set[Any] = {
    seqio.preprocessors.append_eos,
    seqio.preprocessors.append_eos_after_trim,
    seqio.preprocessors.print_dataset,
    seqio.preprocessors.tokenize,
    seqio.preprocessors.tokenize_and_append_eos,
}
_DENOISING = {f"{__package__}.{name}" for name in ("span_corruption", "denoising", "word_recall")}


def write_inputs(
    dataset: tf.data.Dataset,
    *,
    format: TaskFormat,
    others: Callable[[Row], Row] | None = None,
    num_parallel_calls: int | None = tf.data.AUTOTUNE,
) -> tf.data.Dataset:
    """Writes "inputs" from the fields of each row, as a preprocessor of a seqio task.

    Args:
        dataset: rows with the fields of the format.
        format: the input format, which predictions use as well.
        others: returns the other features of an example from its row; None keeps all fields.
        num_parallel_calls: as in `tf.data.Dataset.map`.
    """

    def fill(row: Row) -> dict[str, tf.Tensor]:
        inputs = format.write(
            row, join=tf.strings.join, replace=tf.strings.regex_replace, mark=_mark_shared
        )
        return {**(others(row) if others else row), "inputs": inputs}

    return dataset.map(fill, num_parallel_calls=num_parallel_calls)


def _mark_shared(before: tf.Tensor, text: tf.Tensor) -> tf.Tensor:
    def of_bytes(*texts: bytes) -> bytes:
        before, text = (each.decode("utf-8", "surrogateescape") for each in texts)
        return task_format.mark_shared(before, text).encode("utf-8", "surrogateescape")

    marked = tf.numpy_function(of_bytes, [before, text], tf.string, stateful=False)
    return tf.ensure_shape(marked, [])


def keeps_inputs(preprocessor: Preprocessor) -> Preprocessor:
    """Marks a preprocessor that leaves the text of an input unchanged."""
    _KEEP_INPUTS.add(preprocessor)
    return preprocessor


def of(provider: seqio.Task | seqio.Mixture) -> tuple[TaskFormat, ...]:
    """Returns the format of a task, or of each task of a mixture."""
    return tuple(map(_of_task, seqio.get_subtasks(provider)))


def _of_task(task: seqio.Task) -> TaskFormat:
    ends = {name: feature.add_eos for name, feature in task.output_features.items()}
    without_end = tuple(name for name in ("inputs", "targets") if not ends.get(name, True))
    return dataclasses.replace(_inputs_of(task), without_end=without_end)


def _inputs_of(task: seqio.Task) -> TaskFormat:
    steps = [s for s in task.preprocessors if not isinstance(s, seqio.CacheDatasetPlaceholder)]
    writers = [i for i, step in enumerate(steps) if _function(step) is write_inputs]
    after = steps[writers[-1] + 1 :] if writers else steps
    changing = [step for step in after if _function(step) not in _KEEP_INPUTS]
    if any(getattr(_function(step), "__module__", None) in _DENOISING for step in changing):
        return task_format.plain(task.name, sentinels=True)
    if changing:
        names = [getattr(_function(step), "__name__", str(step)) for step in changing]
        return task_format.unknown(task.name, names)
    if writers:
        return steps[writers[-1]].keywords["format"]
    return task_format.plain(task.name)


def _function(step: Any) -> Any:
    while isinstance(step, functools.partial):
        step = step.func
    return step
