"""COGS, compositional semantic parsing: from a sentence to its logical form, by category.

Kim and Linzen 2020 (arXiv 2010.05465). The split "gen" has 21 categories of new combinations of
known parts. Accuracy is exact match of the whole logical form.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from convt5.runtime.local_files import InvalidUtf8
from convt5.text.task_format import Field, TaskFormat

from . import formats, metrics, registration, vocabularies
from .sources import shuffle_buffer_size
from .tables import Example, Path, Row, TableSource

STRUCTURAL = ("cp_recursion", "obj_pp_to_subj_pp", "pp_recursion")
"""Categories of "gen" with structures that are not in training; the others have new words."""

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
        path: the folder of train, dev, test and gen, which become the splits "train",
            "validation", "test" and "gen"; or a mapping from splits to files.
        vocabulary: for instance from `vocabularies.sentencepiece`; None means bytes.
        columns: fields of .tsv files without a header line; None reads them from the first line.
        prompt: text that precedes the sentence.
        invalid_utf8: as in `classification.text_classification`.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: `path` has no files.
    """
    source = TableSource(path, _parse, columns=columns, invalid_utf8=invalid_utf8)
    parts = (prompt, Field("text")) if prompt else (Field("text"),)
    written = TaskFormat(task=name, parts=parts)
    feature = seqio.Feature(vocabulary=vocabulary or vocabularies.characters(), add_eos=True)
    return registration.task(
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
            seqio.CacheDatasetPlaceholder(),
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
    """Returns the exact match over all logical forms.

    With several categories, also returns that of each, and of the lexical and the structural ones.
    """
    categories = {target.category for target in targets}
    groups = {"structural": STRUCTURAL, "lexical": sorted(categories - set(STRUCTURAL))}
    return metrics.exact_match_by_category(targets, predictions, groups=groups)


def _target_and_category(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"targets": row["target"], "category": row["category"]}


def _parse(row: Row) -> Example | None:
    # Skips a header line, which the public tables do not have.
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
