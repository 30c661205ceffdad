"""Text classification as text-to-text: the tasks of the paper, and any task from local files.

Importing this registers the paper's TFDS tasks with seqio, each also as `<name>_rank`, which ranks
the labels instead of generating one. Gin files call `paper_task` to read one of them from local
files, and `text_classification` for any other task, without writing Python.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import seqio
import tensorflow as tf

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import descriptions
from convt5.runtime.local_files import InvalidUtf8
from convt5.text import task_format

from . import formats, label_checks, metrics, registration, vocabularies
from .sources import PreparedTfdsSource, shuffle_buffer_size
from .tables import Example, Layout, Path, Row, TableSource

Labels = Sequence[str | float | bool] | Mapping[Any, str | float | bool | None]

TOXICITY_THRESHOLD = 0.5
"""Fraction of raters above which a comment is toxic, as defined by Civil Comments."""

VALIDATION_FRACTION = 0.1
"""Fraction of training examples held out if a data set has no validation split."""

_HELD_OUT = {"train": "train[:90%]", "validation": "train[90%:]", "test": "test"}
_TARGET = "label"
"""The field of `classification_task` with the text of the label."""


class PaperTask(NamedTuple):
    """A task of the paper: its TFDS data set, and its text-to-text form.

    Attributes:
        tfds_name: name, configuration and version.
        splits: TFDS's name of each split.
        to_row: converts a TFDS example to a row as in local files: the fields of `prompt`, and the
            name of the label under "label".
        prompt: template of the input, with fields in braces.
        labels: in the order of TFDS if that has numbers; of two labels, the second is positive.
        keep: selects the TFDS examples that belong to the task; None keeps all.
        layout: layout of published files.
        numbered: whether files may have the numbers of labels instead of their names.
    """

    tfds_name: str
    splits: Mapping[str, str]
    to_row: Callable[[Any], dict[str, tf.Tensor]]
    prompt: str
    labels: Sequence[str]
    keep: Callable[[Any], tf.Tensor] | None = None
    layout: Layout = Layout()
    numbered: bool = False


def by_name_or_number(labels: Sequence[str]) -> dict[str, str | None]:
    """Returns the target for each label in a file, which may be a name or a number from 0.

    Rows without an answer, labelled -1 or -, are skipped.
    """
    numbers = {str(number): label for number, label in enumerate(labels)}
    return {**numbers, **{label: label for label in labels}, "-1": None, "-": None}


def _from_numbers(
    labels: Sequence[str], *, text: str = "text", label: str = "label"
) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Converts examples whose labels are numbers to rows."""
    return lambda x: {"text": x[text], "label": tf.gather(labels, x[label])}


def _from_ratings(
    labels: Sequence[str], label: str, threshold: float
) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Converts examples that are rated with a number to rows, by a threshold."""
    return lambda x: {
        "text": x["text"],
        "label": tf.where(x[label] >= threshold, labels[1], labels[0]),
    }


_SENTIMENT = ("negative", "positive")
_TOXICITY = ("non_toxic", "toxic")
_NEWS = ("World", "Sports", "Business", "Sci/Tech")
_QUESTIONS = ("description", "entity", "abbreviation", "human", "number", "location")
_INFERENCE = ("entailment", "neutral", "contradiction")

PAPER_TASKS = {
    "civil_comments": PaperTask(
        "civil_comments/CivilComments:1.2.4",
        {"train": "train", "validation": "validation", "test": "test"},
        _from_ratings(_TOXICITY, "toxicity", TOXICITY_THRESHOLD),
        "civil_comments text: {text}",
        _TOXICITY,
    ),
    "wiki_toxicity": PaperTask(
        "wikipedia_toxicity_subtypes/EnglishSubtypes:0.3.1",
        _HELD_OUT,
        _from_ratings(_TOXICITY, "toxicity", TOXICITY_THRESHOLD),
        "wiki_toxicity text: {text}",
        _TOXICITY,
    ),
    "imdb": PaperTask(
        "imdb_reviews/plain_text:1.0.0",
        _HELD_OUT,
        _from_numbers(_SENTIMENT),
        "imdb text: {text}",
        _SENTIMENT,
    ),
    # The labels of GLUE's own test splits are not public.
    "sst2": PaperTask(
        "glue/sst2:2.0.0",
        {"train": "train", "validation": "validation"},
        _from_numbers(_SENTIMENT, text="sentence"),
        "sst2 sentence: {text}",
        _SENTIMENT,
        layout=Layout(aliases={"text": ["sentence"]}),
        numbered=True,
    ),
    # Polarity 0 is negative, 4 positive; 2 is neutral and occurs only in the test split.
    "sentiment140": PaperTask(
        "sentiment140:1.0.0",
        _HELD_OUT,
        _from_ratings(_SENTIMENT, "polarity", 3),
        "sentiment140 text: {text}",
        _SENTIMENT,
        keep=lambda x: x["polarity"] != 2,
    ),
    "trec6": PaperTask(
        "trec:1.0.0",
        _HELD_OUT,
        _from_numbers(_QUESTIONS, label="label-coarse"),
        "trec6 question: {text}",
        _QUESTIONS,
    ),
    "ag_news": PaperTask(
        "ag_news_subset:1.0.0",
        _HELD_OUT,
        lambda x: {
            "text": tf.strings.join([x["title"], x["description"]], " "),
            "label": tf.gather(_NEWS, x["label"]),
        },
        "ag_news text: {text}",
        _NEWS,
    ),
    "mnli": PaperTask(
        "multi_nli:1.1.0",
        {
            "train": "train",
            "validation": "validation_matched",
            "validation_mismatched": "validation_mismatched",
        },
        lambda x: {
            "premise": x["premise"],
            "hypothesis": x["hypothesis"],
            "label": tf.gather(_INFERENCE, x["label"]),
        },
        "mnli hypothesis: {hypothesis} premise: {premise}",
        _INFERENCE,
        layout=Layout(
            aliases={
                "premise": ["sentence1"],
                "hypothesis": ["sentence2"],
                "label": ["gold_label"],
            }
        ),
        numbered=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class PaperClassification:
    """A classification task of the paper, from TFDS or from local files.

    Attributes:
        name: a key of `PAPER_TASKS`: civil_comments, wiki_toxicity, imdb, sst2, sentiment140,
            trec6, ag_news or mnli.
        path: files as in `text_classification`, with "text" (mnli: "premise" and "hypothesis") and
            the name of the label under "label"; None reads TFDS.
        vocabulary: None means bytes for files, and T5's vocabulary (downloaded) for TFDS.
        data_dir: folder of prepared TFDS data; None means TFDS's `~/tensorflow_datasets`.
        validation_fraction: fraction of the local "train" rows held out if there are no files for
            "validation".
        invalid_utf8, balance: for local files, as in `text_classification`.
        space_punctuation: as in `text_classification`.
        rank: see `classification_task`; the task is then called `<name>_rank`.

    Raises:
        UserError: `build` finds no such task, no files in `path`, or `balance` without files.
    """

    name: str
    path: Path | None = None
    vocabulary: seqio.Vocabulary | None = None
    _: dataclasses.KW_ONLY
    data_dir: str | None = None
    validation_fraction: float = VALIDATION_FRACTION
    invalid_utf8: InvalidUtf8 = "refuse"
    balance: bool = False
    space_punctuation: bool = False
    rank: bool = False

    def build(self) -> seqio.Task:
        """Returns the task."""
        if self.name not in PAPER_TASKS:
            raise errors.UserError(
                f"name={self.name!r} is none of the paper's classification tasks, "
                f"{sorted(PAPER_TASKS)}; text_classification reads any other from files."
                f"{errors.suggest(self.name, PAPER_TASKS)}"
            )
        task = PAPER_TASKS[self.name]
        if self.path is not None:
            return text_classification(
                self.path,
                by_name_or_number(task.labels) if task.numbered else task.labels,
                text_field=task_format.fields_of(task.prompt),
                prompt=task.prompt,
                vocabulary=self.vocabulary,
                layout=task.layout,
                validation_fraction=self.validation_fraction,
                invalid_utf8=self.invalid_utf8,
                balance=self.balance,
                space_punctuation=self.space_punctuation,
                rank=self.rank,
                name=self.name,
            )
        if self.balance:
            raise errors.UserError(
                f"balance=True of {self.name} repeats rows of local files, but path=None reads "
                "TFDS; set path, or leave balance out."
            )
        format = task_format.of_template(
            self.name, task.prompt, space_punctuation=self.space_punctuation
        )
        return classification_task(
            self.name,
            PreparedTfdsSource(task.tfds_name, self.data_dir, task.splits),
            self.vocabulary or vocabularies.published_t5(),
            prompt=format,
            labels=task.labels,
            preprocessors=[functools.partial(_tfds_rows, to_row=task.to_row, keep=task.keep)],
            rank=self.rank,
        )


paper_task = descriptions.function("paper_task", PaperClassification, PaperClassification.build)


@dataclasses.dataclass(frozen=True)
class TextClassification:
    """A classification task for the rows of local files: .jsonl, .tsv or .csv.

    Attributes:
        path: a folder of files named after splits (train, dev or validation, test, others); a file
            or glob, which is "train"; or a mapping from splits to these. All may be compressed.
        labels: the labels to generate, or a mapping from labels in the file to these, where None
            skips the row: {"0": "negative", "2": None, "4": "positive"}. Numbers are compared as
            text, without surrounding spaces. Of two labels, the second is the positive one of F1.
        text_field: the field of the text, or several fields.
        label_field: the field of the label.
        prompt: template of the input, with fields in braces; None means T5's form, such as
            "mnli hypothesis: {hypothesis} premise: {premise}".
        threshold: for labels that are numbers: the lowest one that means the second of two labels.
        columns: the fields of .tsv and .csv files without a header line.
        layout: how published files differ from this form.
        vocabulary: for instance from `vocabularies.sentencepiece`; None means bytes.
        validation_fraction: fraction of "train" held out if no files are "validation", in [0, 0.5]:
            every n-th row, n being its rounded inverse; 0 makes no "validation" split.
        invalid_utf8: of text that is not UTF-8, "refuse" raises an error that names file and line,
            "replace" inserts U+FFFD, "skip" skips the row.
        balance: repeats rows of "train" until every label is as frequent as the most frequent one,
            for files that have labels in other shares than the texts to predict.
        space_punctuation: puts spaces around punctuation in inputs, as T5 does for SQuAD, where
            some texts have them, as those of SST-2, and others have not.
        metric_fns, rank: see `classification_task`.
        name: name of the task; use the same one if you register it.

    Raises:
        UserError: `build` finds no files, settings contradict each other, or the vocabulary cannot
            tell or write the labels. Rows that miss a field or a label raise when they are read.
    """

    path: Path
    labels: Labels
    _: dataclasses.KW_ONLY
    text_field: str | Sequence[str] = "text"
    label_field: str = "label"
    prompt: str | None = None
    threshold: float | None = None
    columns: Sequence[str] | None = None
    layout: Layout | None = None
    vocabulary: seqio.Vocabulary | None = None
    validation_fraction: float = VALIDATION_FRACTION
    invalid_utf8: InvalidUtf8 = "refuse"
    balance: bool = False
    space_punctuation: bool = False
    metric_fns: Sequence[metrics.LabelMetric] = ()
    rank: bool = False
    name: str = "text_classification"

    def build(self) -> seqio.Task:
        """Returns the task."""
        names = _label_names(self.labels, self.name)
        errors.raise_all(checks.type_faults(self), where=self.name)
        fields = self.text_field
        text_fields = [fields] if isinstance(fields, str) else list(fields)
        generated = list(dict.fromkeys(text for text in names.values() if text is not None))
        _check_threshold(self.name, self.threshold, generated)
        prompt = self.prompt
        if prompt is None:
            prompt = " ".join([self.name, *(f"{field}: {{{field}}}" for field in text_fields)])
        _check_fields(self.name, text_fields, self.label_field, prompt)
        source = TableSource(
            self.path,
            functools.partial(
                _parse,
                text_fields=text_fields,
                label_field=self.label_field,
                names=names,
                labels=generated,
                threshold=self.threshold,
            ),
            columns=self.columns,
            layout=self.layout,
            validation_fraction=self.validation_fraction,
            invalid_utf8=self.invalid_utf8,
            balance=_TARGET if self.balance else None,
        )
        return classification_task(
            self.name,
            source,
            self.vocabulary or vocabularies.characters(),
            prompt=task_format.of_template(
                self.name, prompt, space_punctuation=self.space_punctuation
            ),
            labels=generated,
            metric_fns=self.metric_fns,
            rank=self.rank,
        )


text_classification = descriptions.function(
    "text_classification", TextClassification, TextClassification.build
)


def _parse(
    row: Row,
    *,
    text_fields: Sequence[str],
    label_field: str,
    names: Mapping[str, str | None],
    labels: Sequence[str],
    threshold: float | None,
) -> Example | None:
    """Returns the example of a row of `TextClassification`; results tell its settings.

    Args:
        row: a row of a file.
        text_fields, label_field, threshold: those of the task.
        names: the target for each label of the file, or None to skip the row.
        labels: the targets.
    """
    if threshold is not None:
        label = labels[_number(row, label_field) >= threshold]
    else:
        label = label_of(row, label_field, names)
    if label is None:
        return None
    return {**{field: row.text(field) for field in text_fields}, _TARGET: label}


def _check_fields(name: str, text_fields: Sequence[str], label_field: str, prompt: str) -> None:
    if not text_fields or set(task_format.fields_of(prompt)) != set(text_fields):
        raise errors.UserError(
            f"prompt={prompt!r} of {name} must hold each of text_field={text_fields}, one or more, "
            "in braces, and no other."
        )
    if label_field in text_fields:
        raise errors.UserError(
            f"label_field={label_field!r} of {name} is one of text_field={text_fields}, so "
            "inputs would contain the answer; name a field that holds only labels."
        )
    if _TARGET in text_fields:
        raise errors.UserError(
            f"text_field={text_fields} of {name} holds {_TARGET!r}, a name that convt5 uses for "
            "answers; rename that field in the file."
        )


def _check_threshold(name: str, threshold: float | None, generated: Sequence[str]) -> None:
    if threshold is not None and len(generated) != 2:
        raise errors.UserError(
            f"threshold={threshold} of {name} separates two labels, but labels={generated}; "
            "name two, or leave threshold out."
        )
    if threshold is not None and math.isnan(threshold):
        raise errors.UserError(
            f"threshold={threshold} of {name} must be a number; at least that means "
            f"{generated[1]!r}."
        )


def _measures(
    labels: Sequence[str], metric_fns: Sequence[metrics.LabelMetric], *, rank: bool
) -> list[Callable[..., Any]]:
    """Returns the metrics of a task as seqio calls them."""
    if rank:
        return [
            functools.partial(metrics.rank_classification, labels=labels, metric_fns=metric_fns)
        ]
    functions = (metrics.of_labels, metrics.invalid, *metric_fns)
    return [functools.partial(function, labels=labels) for function in functions]


def classification_task(
    name: str,
    source: seqio.DataSource,
    vocabulary: seqio.Vocabulary,
    *,
    prompt: str | task_format.TaskFormat,
    labels: Sequence[str],
    preprocessors: Sequence[Callable[..., tf.data.Dataset]] = (),
    metric_fns: Sequence[metrics.LabelMetric] = (),
    rank: bool = False,
) -> seqio.Task:
    """Returns a task whose target is the text of a label.

    Args:
        name: shown in logs and results; the task is not registered.
        source: any seqio source.
        vocabulary: the vocabulary of inputs and targets.
        prompt: template of the input, with fields of the examples in braces, or its format.
        labels: at least two; of two labels, the second is the positive one.
        preprocessors: produce the fields of `prompt`, and the text of the label in "label".
        metric_fns: metrics beside accuracy and F1, as functions of targets, predictions and
            `labels`.
        rank: for evaluation only: makes an example for each label of each row, and selects the most
            likely label. Needs no decoding, and every answer is valid. Adds "_rank" to the name.

    Raises:
        UserError: fewer than two labels, a repeated label, two labels with the same ids, or one
            that the vocabulary cannot reproduce.
    """
    given, labels = labels, [label.strip() for label in labels]
    if len(labels) < 2 or len(set(labels)) < len(labels) or "" in labels:
        raise errors.UserError(
            f"labels={list(given)} of {name} must be two or more different texts, apart from "
            "blanks around them."
        )
    label_checks.check_ids(labels, vocabulary, name)
    feature = seqio.Feature(vocabulary=vocabulary, add_eos=True)
    format = task_format.of_template(name, prompt) if isinstance(prompt, str) else prompt
    written = dataclasses.replace(format, labels=tuple(labels))
    steps = [
        *preprocessors,
        functools.partial(formats.write_inputs, format=written, others=_label_as_target),
    ]
    if rank:
        steps.append(functools.partial(one_example_per_label, labels=labels))
    return registration.task(
        f"{name}_rank" if rank else name,
        source=source,
        preprocessors=[
            *steps,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=_to_ranked_label if rank else _strip,
        metric_fns=_measures(labels, metric_fns, rank=rank),
        shuffle_buffer_size=shuffle_buffer_size(source),
    )


@formats.keeps_inputs
def one_example_per_label(dataset: tf.data.Dataset, *, labels: Sequence[str]) -> tf.data.Dataset:
    """Makes one example for every label of each example.

    "idx" holds the numbers of example and label, "is_correct" tells whether the label is correct,
    as in `t5.data.preprocessors.rank_classification`.
    """
    num_labels = len(labels)

    def expand(number: tf.Tensor, example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        numbers = tf.fill([num_labels], tf.cast(number, tf.int32))
        return {
            "inputs": tf.fill([num_labels], example["inputs"]),
            "targets": tf.constant(list(labels)),
            "idx": tf.stack([numbers, tf.range(num_labels)], axis=1),
            "is_correct": tf.equal(list(labels), tf.strings.strip(example["targets"])),
        }

    return dataset.enumerate().map(expand).unbatch()


def _label_as_target(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {"targets": row[_TARGET]}


def _tfds_rows(
    dataset: tf.data.Dataset,
    *,
    to_row: Callable[[Any], dict[str, tf.Tensor]],
    keep: Callable[[Any], tf.Tensor] | None,
) -> tf.data.Dataset:
    return (dataset.filter(keep) if keep else dataset).map(to_row)


def _label_names(labels: Labels, task: str) -> dict[str, str | None]:
    """Returns the target for each label in a file, both as text without surrounding spaces."""
    if isinstance(labels, str):
        raise errors.UserError(
            f"labels={labels!r} of {task} is one text; set labels to a list of two or more, such "
            "as ['negative', 'positive']."
        )
    pairs = list(labels.items()) if isinstance(labels, Mapping) else [(x, x) for x in labels]
    strange = [x for pair in pairs for x in pair if not isinstance(x, str | int | float | None)]
    if strange or any(value is None for value, _ in pairs):
        raise errors.UserError(
            f"labels={labels!r} of {task} holds {(strange or [None])[0]!r}; set labels to texts."
        )
    names = {str(x).strip(): None if text is None else str(text).strip() for x, text in pairs}
    if len(names) < len(pairs):
        raise errors.UserError(
            f"labels={labels!r} of {task} names one twice, apart from blanks around it; name each "
            "once."
        )
    return names


def label_of(row: Row, field: str, names: Mapping[str, str | None]) -> str | None:
    """Returns the target for the label of a row; None for a row to skip.

    Raises:
        UserError: the label is not in `names`.
    """
    label = row.stripped(field)
    if label not in names:
        raise row.error(
            f"has the unknown label {label!r} under {field!r}; the labels are {list(names)}; add "
            f"it to labels, or correct the line.{errors.suggest(label, names)}"
        )
    return names[label]


def _number(row: Row, field: str) -> float:
    text = row.stripped(field)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # NaN, as tables write missing values, is on neither side of a threshold.
    if math.isnan(number):
        raise row.error(f"has {text!r} under {field!r}, no number to compare with threshold.")
    return number


def _strip(text: str, **_) -> str:
    return text.strip()


def _to_ranked_label(
    text: str, *, example: Mapping[str, Any] | None = None, is_target: bool = False, **_
) -> Any:
    if not is_target or example is None:
        return text
    number, label = example["idx"]
    return metrics.RankedLabel(int(number), int(label), bool(example["is_correct"]))


for _name in PAPER_TASKS:
    for _rank in (False, True):
        _task = paper_task(_name, rank=_rank)
        registration.add(_task)
