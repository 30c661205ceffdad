"""The nine tasks of GLUE from local files, written as T5 writes them.

Wang et al. 2018 (arXiv 1804.07461); Raffel et al. 2019 (arXiv 1910.10683), appendix D. SST-2 and
MultiNLI are tasks of the paper as well, so that `classification.paper_task` describes them.
"""

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio

from convt5 import errors
from convt5.text import task_format

from . import classification, generation, metrics
from .local_files import InvalidUtf8
from .tables import Example, Layout, Path, Row, TableSource

STSB = "stsb"
LARGEST_SCORE = 5.0
"""Of STS-B, whose least score is 0."""


class Classification(NamedTuple):
    """A task of GLUE with labels.

    Attributes:
        prompt: the input, with fields in braces under the names of GLUE.
        labels: in GLUE's order; the second of two is the positive one.
        layout: of its published files.
        metric_fns: beside accuracy and F1.
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
            # Some lines of the published file are broken in the middle of a question.
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
NAMES = (*CLASSIFICATIONS, STSB, *_OF_THE_PAPER)


def glue(
    name: str,
    path: Path,
    vocabulary: seqio.Vocabulary | None = None,
    *,
    validation_fraction: float = classification.VALIDATION_FRACTION,
    invalid_utf8: InvalidUtf8 = "refuse",
    rank: bool = False,
) -> seqio.Task:
    """Returns a task of GLUE from local files.

    Args:
        name: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte or wnli.
        path: files as `classification.text_classification` reads them: those that GLUE publishes
            (.tsv), or rows with the fields of GLUE in TFDS and Hugging Face's `datasets`. Labels
            are numbers or names; rows labelled -1 have no answer and are left out.
        vocabulary: from `vocabularies.sentencepiece`; None takes bytes.
        validation_fraction: of the rows of "train" that are held out where there are no files for
            "validation".
        invalid_utf8: as of `classification.text_classification`.
        rank: see `classification.classification_task`; stsb has no labels to rank.

    Raises:
        UserError: no such task, a path without files, or rank=True with stsb.
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
    if name == STSB:
        if rank:
            raise errors.UserError(
                "rank=True chooses among labels, and name='stsb' has numbers for answers; leave it "
                "out."
            )
        return _stsb(path, vocabulary, read)
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
    """Returns STS-B: how similar two sentences are, a number written as text."""
    return generation.generation_task(
        STSB,
        TableSource(path, _scored, layout=Layout(aliases={"label": ["score"]}), **read),
        vocabulary,
        prompt=f"{STSB} {_SENTENCES}",
        metric_fns=[metrics.regression],
        postprocess_fn=_number_if_target,
    )


def _scored(row: Row) -> Example | None:
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
    """Returns the nearest multiple of 0.2 with one decimal, computed in float32 as T5 does."""
    rounded = np.round(np.float32(score) * np.float32(5)) / np.float32(5)
    return f"{rounded:.1f}"


def _number_if_target(text: str, *, is_target: bool = False, **_: Any) -> float | str:
    return float(text) if is_target else text
