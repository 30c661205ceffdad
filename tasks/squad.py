"""SQuAD v1.1, extractive question answering, as text-to-text in T5's form.

Rajpurkar et al. 2016 (arXiv 1606.05250). Importing this registers the TFDS data set with seqio.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from convt5.runtime.local_files import InvalidUtf8
from convt5.text import task_format

from . import formats, metrics, registration, vocabularies
from .sources import PreparedTfdsSource, shuffle_buffer_size
from .tables import Example, Path, Row, TableSource

TFDS_NAME = "squad/v1.1:3.0.0"


def squad(
    path: Path | None = None,
    vocabulary: seqio.Vocabulary | None = None,
    *,
    data_dir: str | None = None,
    invalid_utf8: InvalidUtf8 = "refuse",
    mark_shared: bool = False,
    name: str = "squad",
) -> seqio.Task:
    """Returns SQuAD from TFDS, or from local .jsonl files with "context", "question", "answers".

    Args:
        path: a folder whose files are named after splits; a file or glob, which is "train"; or a
            mapping from splits to these. "answers" is a text or a list: training uses the first,
            metrics the best match. None reads TFDS.
        vocabulary: None means bytes for files, and T5's vocabulary (downloaded) for TFDS.
        data_dir: folder of prepared TFDS data; None means TFDS's `~/tensorflow_datasets`.
        invalid_utf8: for local files, as in `classification.text_classification`.
        mark_shared: whether words of the question are marked in the context, for models without
            attention in the encoder (`task_format.mark_shared`).
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: `path` has no files.
    """
    if path is None:
        source = PreparedTfdsSource(TFDS_NAME, data_dir)
        vocabulary = vocabulary or vocabularies.published_t5()
        steps = [_tfds_rows]
    else:
        source = TableSource(path, _parse, invalid_utf8=invalid_utf8)
        vocabulary = vocabulary or vocabularies.characters()
        steps = []
    feature = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    features = {"inputs": feature, "targets": feature}
    return question_answering(name, source, steps, features, mark_shared=mark_shared)


def question_answering(
    name: str,
    source: seqio.DataSource,
    steps: Sequence[Callable[..., tf.data.Dataset]],
    output_features: Mapping[str, Any],
    *,
    mark_shared: bool = False,
) -> seqio.Task:
    """Returns a task in the form of SQuAD.

    Args:
        name: name of the task.
        source: any seqio source.
        steps: preprocessors that turn its examples into rows of "context", "question" and
            "answers", a vector of texts.
        output_features: the features "inputs" and "targets".
        mark_shared: as in `squad`.
    """
    # The question comes first, so that truncation of a long context keeps it.
    written = task_format.of_template(
        name,
        "question: {question} context: {context}",
        space_punctuation=True,
        mark_shared=mark_shared,
    )
    return registration.task(
        name,
        source=source,
        preprocessors=[
            *steps,
            functools.partial(formats.write_inputs, format=written, others=_answers_of_row),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=output_features,
        postprocess_fn=_answers,
        metric_fns=[metrics.squad],
        shuffle_buffer_size=shuffle_buffer_size(source),
    )


def _answers_of_row(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns "targets" (the first answer) and "answers", formatted like inputs."""
    answers = task_format.space_punctuation(row["answers"], tf.strings.regex_replace)
    return {"targets": answers[0], "answers": answers}


def _tfds_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda x: {**x, "answers": x["answers"]["text"]})


def _parse(row: Row) -> Example:
    answers = row.value("answers")
    answers = answers if isinstance(answers, list) else [answers]
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise row.error(f"has answers={answers!r}, which must be one text or several.")
    return {
        "context": row.text("context"),
        "question": row.text("question"),
        "answers": answers,
    }


def _answers(
    text: str, *, example: Mapping[str, Any] | None = None, is_target: bool = False, **_
) -> Any:
    if not is_target or example is None:
        return text
    return [tf.compat.as_text(answer) for answer in example["answers"]]


registration.add(squad())
