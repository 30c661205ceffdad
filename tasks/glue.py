"""The nine tasks of GLUE from local files, in T5's form.

Wang et al. 2018 (arXiv 1804.07461); Raffel et al. 2019 (arXiv 1910.10683), appendix D. SST-2 and
MultiNLI are also tasks of the paper, so `classification.paper_task` describes them.
"""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio
import tensorflow as tf

from convt5 import errors
from convt5.runtime.local_files import InvalidUtf8
from convt5.text import task_format

from . import classification, generation, metrics, vocabularies
from .tables import Example, Layout, Path, Row, TableSource, find_splits

STSB = "stsb"
LARGEST_SCORE = 5.0
"""The highest score of STS-B; the lowest is 0."""


class Classification(NamedTuple):
    """A GLUE task with labels.

    Attributes:
        prompt: template of the input, with GLUE's names of the fields in braces.
        labels: in GLUE's order; of two labels, the second is the positive one.
        layout: layout of the published files.
        metric_fns: metrics beside accuracy and F1.
    """

    prompt: str
    labels: Sequence[str]
    layout: Layout = Layout()
    metric_fns: Sequence[metrics.LabelMetric] = ()


_SENTENCES = "sentence1: {sentence1} sentence2: {sentence2}"
CLASSIFICATIONS: Mapping[str, Classification] = types.MappingProxyType(
    {
        "cola": Classification(
            "cola sentence: {sentence}",
            ("unacceptable", "acceptable"),
            Layout(columns=("source", "label", "mark", "sentence")),
            (metrics.matthews_corrcoef,),
        ),
        "mrpc": Classification(
            f"mrpc {_SENTENCES}",
            ("not_equivalent", "equivalent"),
            Layout(
                aliases={
                    "sentence1": ["#1 String"],
                    "sentence2": ["#2 String"],
                    "label": ["Quality"],
                }
            ),
        ),
        "qqp": Classification(
            "qqp question1: {question1} question2: {question2}",
            ("not_duplicate", "duplicate"),
            # Some lines of the published file have line breaks inside a question.
            Layout(aliases={"label": ["is_duplicate"]}, skips_malformed=True),
        ),
        "qnli": Classification(
            "qnli question: {question} sentence: {sentence}", ("entailment", "not_entailment")
        ),
        "rte": Classification(f"rte {_SENTENCES}", ("entailment", "not_entailment")),
        "wnli": Classification(f"wnli {_SENTENCES}", ("not_entailment", "entailment")),
    }
)
_OF_THE_PAPER = ("sst2", "mnli")
WNLI_SIMPLE = "wnli_simple"
"""T5's second form of WNLI, used to evaluate models trained on WSC."""
NAMES = (*CLASSIFICATIONS, STSB, *_OF_THE_PAPER, WNLI_SIMPLE)
_PRONOUNS = frozenset(["he", "she", "they", "it", "her", "his", "their", "them", "him"])


def glue(
    name: str,
    path: Path,
    vocabulary: seqio.Vocabulary | None = None,
    *,
    validation_fraction: float = classification.VALIDATION_FRACTION,
    invalid_utf8: InvalidUtf8 = "refuse",
    rank: bool = False,
) -> seqio.Task:
    """Returns a GLUE task from local files.

    Args:
        name: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli or wnli_simple. wnli_simple asks
            for the referent of a pronoun, and is correct if the answer agrees with the label. It is
            for evaluation only and has no "train" split; a file or a glob is "validation".
        path: files as in `classification.text_classification`: those published by GLUE (.tsv), or
            rows with GLUE's fields in TFDS and in Hugging Face's `datasets`. Labels are numbers or
            names; rows labelled -1 have no answer and are skipped.
        vocabulary: for instance from `vocabularies.sentencepiece`; None means bytes.
        validation_fraction: fraction of the "train" rows held out if there are no files for
            "validation".
        invalid_utf8: as in `classification.text_classification`.
        rank: see `classification.classification_task`; stsb and wnli_simple have no labels to rank.

    Raises:
        UserError: no such task, `path` has no files, or rank=True for a task without labels.
    """
    if name not in NAMES:
        raise errors.UserError(
            f"name={name!r} is none of the tasks of GLUE, {list(NAMES)}; "
            f"text_classification reads any other from files.{errors.suggest(name, NAMES)}"
        )
    read: dict[str, Any] = {
        "validation_fraction": validation_fraction,
        "invalid_utf8": invalid_utf8,
    }
    if name in _OF_THE_PAPER:
        return classification.paper_task(name, path, vocabulary, rank=rank, **read)
    if name in (STSB, WNLI_SIMPLE):
        if rank:
            answers = "numbers" if name == STSB else "texts"
            raise errors.UserError(
                f"rank=True chooses among labels, and name={name!r} has {answers} for answers; "
                "leave it out."
            )
        make = _stsb if name == STSB else _wnli_simple
        return make(path, vocabulary, read)
    task = CLASSIFICATIONS[name]
    return classification.text_classification(
        path,
        classification.by_name_or_number(task.labels),
        text_field=task_format.fields_of(task.prompt),
        prompt=task.prompt,
        layout=task.layout,
        vocabulary=vocabulary,
        metric_fns=task.metric_fns,
        rank=rank,
        name=name,
        **read,
    )


def _stsb(path: Path, vocabulary: seqio.Vocabulary | None, read: Mapping[str, Any]) -> seqio.Task:
    """Returns STS-B: the similarity of two sentences, a number written as text."""
    return generation.generation_task(
        STSB,
        TableSource(path, _parse_scored, layout=Layout(aliases={"label": ["score"]}), **read),
        vocabulary,
        prompt=f"{STSB} {_SENTENCES}",
        metric_fns=[metrics.regression],
        postprocess_fn=_number_if_target,
    )


def _wnli_simple(
    path: Path, vocabulary: seqio.Vocabulary | None, read: Mapping[str, Any]
) -> seqio.Task:
    """Returns WNLI as pronoun resolution: the premise with a marked pronoun, and its referent."""
    splits = find_splits(path)
    kept = {split: files for split, files in splits.items() if split != "train"}
    feature = seqio.Feature(vocabulary or vocabularies.characters(), add_eos=True)
    return seqio.Task(
        WNLI_SIMPLE,
        source=TableSource(
            kept or {"validation": splits["train"]},
            _sentences_with_a_pronoun,
            invalid_utf8=read["invalid_utf8"],
        ),
        preprocessors=[
            _referents,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=_names_the_referent,
        metric_fns=[metrics.accuracy],
    )


def _sentences_with_a_pronoun(row: Row) -> Example | None:
    numbers = classification.by_name_or_number(CLASSIFICATIONS["wnli"].labels)
    label = classification.label_of(row, "label", numbers)
    if label is None:
        return None
    sentences = {name: row.text(name) for name in ("sentence1", "sentence2")}
    words = {word.strip(".,?!") for word in sentences["sentence1"].lower().split()}
    if not words & _PRONOUNS:
        raise row.error(f"has none of {sorted(_PRONOUNS)} under 'sentence1', which WNLI is about.")
    is_entailed = label == CLASSIFICATIONS["wnli"].labels[1]
    return sentences | {"label": str(int(is_entailed))}


def _referents(dataset: tf.data.Dataset) -> tf.data.Dataset:
    preprocessors = metrics.of_t5("data.preprocessors", "the second form of WNLI")
    numbered = dataset.enumerate().map(
        lambda number, row: {**row, "label": tf.strings.to_number(row["label"]), "idx": number}
    )
    return preprocessors.wnli_simple(numbered)


def _names_the_referent(
    text: str, *, example: Any = None, is_target: bool = False, **_: Any
) -> Any:
    """Returns 1 if an answer names the referent of the pronoun in the hypothesis, else 0."""
    postprocessors = metrics.of_t5("data.postprocessors", "the second form of WNLI")
    return int(postprocessors.wsc_simple(text, example, is_target))


def _parse_scored(row: Row) -> Example | None:
    text = row.stripped("label")
    score = metrics.number_of(text)
    if score == -1:
        return None
    if score is None or not 0 <= score <= LARGEST_SCORE:
        raise row.error(
            f"has {text!r} under 'label', where STS-B has a score of 0 to {LARGEST_SCORE:g}."
        )
    sentences = {name: row.text(name) for name in ("sentence1", "sentence2")}
    return {**sentences, generation.TARGET: score_text(score)}


def score_text(score: float) -> str:
    """Rounds to a multiple of 0.2 with one decimal, in float32 as T5 does."""
    rounded = np.round(np.float32(score) * np.float32(5)) / np.float32(5)
    return f"{rounded:.1f}"


def _number_if_target(text: str, *, is_target: bool = False, **_: Any) -> float | str:
    return float(text) if is_target else text
