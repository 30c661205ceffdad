"""COGS, compositional semantic parsing: a sentence in, its logical form out, results by category.

Kim and Linzen 2020 (arXiv 2010.05465). Its split "gen" holds 21 kinds of new combinations of known
parts; accuracy is the exact match of the whole logical form.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from convt5.text.task_format import Field, TaskFormat

from . import formats, metrics, vocabularies
from .local_files import InvalidUtf8
from .sources import shuffle_buffer_size
from .tables import Example, Path, Row, TableSource

STRUCTURAL = ("cp_recursion", "obj_pp_to_subj_pp", "pp_recursion")
"""Categories of "gen" with structures that training does not have; the others have new words."""

COLUMNS = ("text", "target", "category")


def cogs(
    path: Path,
    vocabulary: seqio.Vocabulary | None = None,
    *,
    columns: Sequence[str] | None = COLUMNS,
    prompt: str = "",
    invalid_utf8: InvalidUtf8 = "refuse",
    name: str = "cogs",
) -> seqio.Task:
    """Returns COGS from local files: the public .tsv, or .jsonl with the fields of `COLUMNS`.

    Args:
        path: the folder of train, dev, test and gen, whose splits are then "train", "validation",
            "test" and "gen"; or these files by split.
        vocabulary: from `vocabularies.sentencepiece`; None takes bytes.
        columns: fields of .tsv files, which have no header line; None takes them from their first.
        prompt: stands before the sentence.
        invalid_utf8: as of `classification.text_classification`.
        name: of the task; it is registered under the same, if at all.

    Raises:
        UserError: a path without files.
    """
    source = TableSource(path, _parse, columns=columns, invalid_utf8=invalid_utf8)
    parts = (prompt, Field("text")) if prompt else (Field("text"),)
    written = TaskFormat(task=name, parts=parts)
    feature = seqio.Feature(vocabulary=vocabulary or vocabularies.characters(), add_eos=True)
    return seqio.Task(
        name,
        source=source,
        preprocessors=[
            functools.partial(
                formats.write_inputs,
                format=written,
                others=_target_and_category,
                num_parallel_calls=None,
            ),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=_with_category,
        metric_fns=[exact_match],
        shuffle_buffer_size=shuffle_buffer_size(source),
    )


def exact_match(
    targets: Sequence[metrics.CategoryText], predictions: Sequence[str]
) -> dict[str, float]:
    """Returns the exact match of all logical forms, and where there are several categories, of
    each and of the lexical and the structural ones together."""
    found = {target.category for target in targets}
    groups = {"structural": STRUCTURAL, "lexical": sorted(found - set(STRUCTURAL))}
    return metrics.exact_match_by_category(targets, predictions, groups=groups)


def _target_and_category(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"targets": row["target"], "category": row["category"]}


def _parse(row: Row) -> Example | None:
    # A header line, which the public tables do not have.
    if tuple(map(row.stripped, COLUMNS)) == COLUMNS:
        return None
    texts = {field: row.text(field) for field in ("text", "target")}
    return texts | {"category": row.stripped("category")}


def _with_category(
    text: str, *, example: Mapping[str, Any] | None = None, is_target: bool = False, **_
) -> Any:
    if not is_target or example is None:
        return text
    return metrics.CategoryText(text, tf.compat.as_text(example["category"]))
