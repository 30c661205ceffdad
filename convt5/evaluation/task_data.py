"""The examples of a seqio task for evaluation: complete, in order, each once."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from convt5 import errors
from convt5.data import row_ends, task_blocks, task_sources
from convt5.evaluation.predictor import TextVocabulary
from convt5.evaluation.registry import find_registered
from convt5.evaluation.run_settings import check_readable
from convt5.tasks import formats, label_checks
from convt5.text import sentinels, vocabulary_files
from convt5.text.task_format import TaskFormat
from convt5.text.vocabulary_files import TextFeatures, same_pieces

Example = Mapping[str, Any]


def find_tasks(named: Sequence[Any]) -> list[seqio.Task]:
    """Returns the tasks among names and objects, including those of mixtures, each once.

    Raises:
        UserError: an unregistered name, no task, or two different tasks of one name.
    """
    tasks: dict[str, seqio.Task] = {}
    for provider in named:
        if isinstance(provider, str):
            provider = find_registered(provider)
        if not isinstance(provider, seqio.Task | seqio.Mixture):
            raise errors.UserError(f"tasks: {provider!r} is no seqio task or mixture.")
        for task in seqio.get_subtasks(provider):
            if tasks.setdefault(task.name, task) is not task:
                raise errors.UserError(
                    f"tasks: two different ones are called {task.name!r}, and so would their "
                    "results be; give one of them another name."
                )
    return list(tasks.values())


def find_task(named: Any) -> seqio.Task:
    """Returns one task, given by name or as an object.

    Raises:
        UserError: as `find_tasks`, or it is a mixture of several.
    """
    tasks = find_tasks([named])
    if len(tasks) != 1:
        names = ", ".join(task.name for task in tasks)
        raise errors.UserError(
            f"task={getattr(named, 'name', named)} is a mixture; name one of its tasks: {names}."
        )
    return tasks[0]


def find_format(named: Any) -> TaskFormat:
    """Returns the input format of one task, given by name or as an object.

    Raises:
        UserError: as `find_task`.
    """
    return formats.of(find_task(named))[0]


def check_split(task: seqio.Task, split: str) -> None:
    """Raises `UserError` if a task does not have this split."""
    splits = task_sources.splits(task, cached=task.requires_caching)
    if split not in splits:
        raise errors.UserError(
            f"split={split} is none of {', '.join(splits)}, the splits of "
            f"{task.name}; choose one of these.{errors.suggest(split, splits)}"
        )


def check_task(
    task: seqio.Task,
    split: str,
    *,
    vocab_size: int,
    max_length: int | None = None,
    trained: TextFeatures | None = None,
) -> None:
    """Checks that a model can be evaluated on a task, without reading an example.

    Args:
        task: the task.
        split: the split that will be read.
        vocab_size: rows of the model's token table.
        max_length: longest target in tokens; None if targets are not read.
        trained: the vocabularies with which the model was trained, if known.

    Raises:
        UserError: the task lacks the split or a feature, has another vocabulary, or has labels that
            are too long.
    """
    check_split(task, split)
    for name in ("inputs", "targets"):
        if name not in task.output_features:
            raise errors.UserError(
                f"task={task.name} has no feature {name!r}; an encoder-decoder reads 'inputs' and "
                "'targets'."
            )
        vocabulary = task.output_features[name].vocabulary
        check_readable(
            vocabulary,
            of=f"task={task.name}",
            remedy="give the task one that is here, as the files of gin/tasks do",
        )
        known = getattr(trained, name) if trained else None
        if known is not None and not _same_ids(known, vocabulary):
            raise errors.UserError(
                f"task={task.name} reads {name} with {_describe(vocabulary)}, but the model was "
                f"trained with {_describe(known)}; the ids would stand for other text. Give the "
                "task the model's vocabulary, or evaluate a model with the task's vocabulary."
            )
        _check_sentinels(task, name, known)
        _check_size(task, vocabulary, vocab_size)
    if max_length is not None:
        label_checks.check_lengths(task, max_length, "max_length")


def read_examples(
    task: seqio.Task,
    split: str,
    *,
    lengths: Mapping[str, int],
    num_examples: int | None = None,
    every_nth: int = 1,
    seed: int = 0,
) -> list[Example]:
    """Returns the examples of a split as NumPy values, in the task's order.

    Args:
        task: a task with the features "inputs" and "targets".
        split: checked by `check_task`.
        lengths: lengths of the features, for tasks whose preprocessors need them, such as span
            corruption; the examples of other tasks are not truncated.
        num_examples: number of examples, from the first; None means all. For a task that ranks
            labels it counts rows, which have one example per label.
        every_nth: takes only the first of each so many examples, before `num_examples`.
        seed: random seed of preprocessors.

    Raises:
        UserError: there is no example, or a target is not UTF-8.
        TrainingError: the data cannot be read.
    """
    given = dict(lengths) if needs_lengths(task) else None
    with _naming_lengths(lengths):
        dataset = _open(task, split, given, seed)
    spec: Any = dataset.element_spec
    if _ranks_labels(spec):
        dataset = _of_rows(dataset, num_examples, every_nth)
    else:
        dataset = dataset.shard(every_nth, 0)
        if num_examples is not None:
            dataset = dataset.take(num_examples)
    try:
        read: Any = dataset.as_numpy_iterator()
        examples: list[Any] = [
            row_ends.end_example(example, task.output_features, given or {}, task=task.name)
            for example in read
        ]
    except tf.errors.OpError as error:
        raise errors.TrainingError(
            f"split={split} of task={task.name} cannot be read: {error.message.strip()}. A file "
            "may be truncated or missing: restore it, or remove the folder of its cache, which "
            "is then rebuilt."
        ) from error
    if not examples:
        raise errors.UserError(f"split={split} of task={task.name} holds no example.")
    _check_targets(examples, task.name, split)
    return examples


def _open(
    task: seqio.Task, split: str, lengths: Mapping[str, int] | None, seed: int
) -> tf.data.Dataset:
    # Tasks that require their cache may have a source that only their authors can read.
    is_cached = bool(task.requires_caching and task.cache_dir)
    if not is_cached:
        task_sources.check_files(task, task.source, split)
        task = row_ends.without_cache(task)
    read = functools.partial(
        row_ends.untruncated(task).get_dataset,
        sequence_length=lengths,
        split=split,
        use_cached=is_cached,
        shuffle=False,
        seed=seed,
        num_epochs=1,
        try_in_mem_cache=False,
    )
    return task_sources.without_autograph(read).with_options(task_blocks.options())


def _check_targets(examples: Iterable[Example], task: str, split: str) -> None:
    for number, example in enumerate(examples, start=1):
        try:
            if isinstance(target := example.get("targets_pretokenized"), bytes):
                target.decode()
        except UnicodeDecodeError as error:
            raise errors.UserError(
                f"task={task}: the 'targets' of example {number} of split={split} are not UTF-8 "
                f"({error}), but metrics compare texts; correct the data."
            ) from None


@contextlib.contextmanager
def _naming_lengths(lengths: Mapping[str, int]) -> Iterator[None]:
    """Renames lengths in error messages to the settings of evaluation."""
    try:
        yield
    except errors.UserError as error:
        if "encoder_length" not in str(error):
            raise
        raise errors.UserError(
            f"{error} Here encoder_length is max_input_length={lengths.get('inputs')}, and "
            f"decoder_length is max_length={lengths.get('targets')}."
        ) from None


def _of_rows(dataset: tf.data.Dataset, num_examples: int | None, every_nth: int) -> tf.data.Dataset:
    """Selects examples as `read_examples` does, by the rows from which ranked labels come."""
    if num_examples is not None:
        end = num_examples * every_nth
        dataset = dataset.take_while(lambda example: example["idx"][0] < end)
    return dataset.filter(lambda example: example["idx"][0] % every_nth == 0)


def row_numbers(examples: Sequence[Example]) -> list[int]:
    """Returns the row of each example: its index, or, if labels are ranked, that of its row."""
    if _ranks_labels(examples[0]):
        return [int(example["idx"][0]) for example in examples]
    return list(range(len(examples)))


def are_answers(examples: Sequence[Example]) -> list[bool]:
    """Returns whether each target is a correct answer; ranked wrong labels are not."""
    if _ranks_labels(examples[0]):
        return [bool(example["is_correct"]) for example in examples]
    return [True] * len(examples)


def token_ids(example: Example, feature: str) -> list[int]:
    """Returns the ids of a feature, without padding that the task has added at its end."""
    return np.trim_zeros(np.asarray(example[feature]), "b").tolist()


def original_text(example: Example, feature: str, decode: Callable[[list[int]], str]) -> str:
    """Returns the text of a feature before tokenization, or else its decoded ids.

    Bytes that are not UTF-8 become U+FFFD; `read_examples` refuses them in targets.
    """
    text = example.get(f"{feature}_pretokenized")
    if text is None:
        return decode(np.asarray(example[feature]).tolist())
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def _ranks_labels(example: Mapping[str, Any]) -> bool:
    """Returns whether "idx" numbers rows and labels, as in `one_example_per_label` and t5."""
    return "is_correct" in example and tuple(example["idx"].shape) == (2,)


def needs_lengths(task: seqio.Task) -> bool:
    """Returns whether a task makes its examples to fit given lengths, as span corruption does."""
    for preprocessor in task.preprocessors:
        parameter = inspect.signature(preprocessor).parameters.get("sequence_length")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            return True
    return False


def _check_size(task: seqio.Task, vocabulary: TextVocabulary, vocab_size: int) -> None:
    try:
        vocabulary_files.check_size(vocabulary, vocab_size)
    except errors.UserError as error:
        raise errors.UserError(f"task={task.name}: {error}") from None


def _check_sentinels(task: seqio.Task, name: str, known: Any) -> None:
    """Raises `UserError` if a task marks spans with other sentinels than those of a model."""
    if known is None or not formats.of(task)[0].makes_sentinels:
        return
    own, trained = map(sentinels.ids_of, (task.output_features[name].vocabulary, known))
    if own[:1] != trained[:1]:
        raise errors.UserError(
            f"task={task.name} has {len(own)} sentinels in its {name}, the first of which is id "
            f"{own[0] if own else None}, but the model was trained with {len(trained)}, beginning "
            f"with id {trained[0] if trained else None}; give the task the model's vocabulary."
        )


def _same_ids(one: Any, other: Any) -> bool:
    """Returns whether ids mean the same text; the number of sentinels may differ."""
    if isinstance(one, seqio.ByteVocabulary) and isinstance(other, seqio.ByteVocabulary):
        return True
    kinds = seqio.SentencePieceVocabulary
    if isinstance(one, kinds) and isinstance(other, kinds):
        paths = [epath.Path(each.sentencepiece_model_file) for each in (one, other)]
        return paths[0] == paths[1] or same_pieces(*[path.read_bytes() for path in paths])
    return one == other


def _describe(vocabulary: TextVocabulary) -> str:
    path = getattr(vocabulary, "sentencepiece_model_file", None)
    kind = f"SentencePiece {path}" if path else type(vocabulary).__name__
    return f"{kind} ({vocabulary.vocab_size} ids)"
