"""Tasks from local files with generated answers: numbers as text, summaries."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from convt5.runtime.local_files import InvalidUtf8
from convt5.text import task_format

from . import formats, metrics, registration, vocabularies
from .sources import shuffle_buffer_size
from .tables import Example, Layout, Path, Row, TableSource

TARGET = "targets"
"""The field of the answer."""


def generation_task(
    name: str,
    source: seqio.DataSource,
    vocabulary: seqio.Vocabulary | None,
    *,
    prompt: str,
    metric_fns: Sequence[Callable[..., Mapping[str, float]]],
    postprocess_fn: Callable[..., Any] | None = None,
) -> seqio.Task:
    """Returns a task whose target is a text.

    Args:
        name: shown in logs and results; the task is not registered.
        source: rows with the fields of `prompt`, and the answer under `TARGET`.
        vocabulary: the vocabulary of inputs and targets; None means bytes.
        prompt: template of the input, with fields in braces.
        metric_fns: functions of targets and predictions.
        postprocess_fn: applied to both, as in seqio; None leaves them unchanged.
    """
    feature = seqio.Feature(vocabulary=vocabulary or vocabularies.characters(), add_eos=True)
    written = task_format.of_template(name, prompt)
    return registration.task(
        name,
        source=source,
        preprocessors=[
            functools.partial(formats.write_inputs, format=written, others=_answer),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=postprocess_fn,
        metric_fns=list(metric_fns),
        shuffle_buffer_size=shuffle_buffer_size(source),
    )


def summarization(
    path: Path,
    vocabulary: seqio.Vocabulary | None = None,
    *,
    document_field: str = "document",
    summary_field: str = "summary",
    columns: Sequence[str] | None = None,
    validation_fraction: float = 0.0,
    invalid_utf8: InvalidUtf8 = "refuse",
    name: str = "summarization",
) -> seqio.Task:
    """Returns a summarization task for local files, in T5's form, measured by ROUGE.

    Args:
        path: files as in `classification.text_classification`.
        vocabulary: for instance from `vocabularies.sentencepiece`; None means bytes.
        document_field, summary_field: their fields in a row; "article" and "highlights", the names
            in CNN/Daily Mail, are also recognised.
        columns: the fields of .tsv and .csv files without a header line.
        validation_fraction: fraction of the "train" rows held out if there are no files for
            "validation", in [0, 0.5].
        invalid_utf8: as in `classification.text_classification`.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: `path` has no files. Errors in a row are raised when it is read.
    """
    layout = Layout(aliases={"document": ["article"], "summary": ["highlights"]})
    return generation_task(
        name,
        TableSource(
            path,
            functools.partial(
                _document, document_field=document_field, summary_field=summary_field
            ),
            columns=columns,
            layout=layout,
            validation_fraction=validation_fraction,
            invalid_utf8=invalid_utf8,
        ),
        vocabulary,
        prompt="summarize: {document}",
        metric_fns=[metrics.rouge],
    )


def _document(row: Row, *, document_field: str, summary_field: str) -> Example:
    return {"document": row.text(document_field), TARGET: row.text(summary_field)}


def _answer(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"targets": row[TARGET]}
