"""Baselines without a network, to compare models with.

`python -m convt5.evaluation.baselines --gin_file=gin/tasks/trec6.gin --gin.DATA=... --split=test`
prints a row for each task. For classification there are the most frequent label, and naive Bayes on
words and word pairs, or with `--pieces` on the pieces of the vocabulary, which are all that a model
reads; for questions about a passage, the sentence that shares most words with the question.
"""

import collections
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from convt5 import errors
from convt5.configuration import command_line
from convt5.reports import markdown

SMOOTHING = 0.1
_MOST_LABELS = 100
_QUESTION = re.compile(r"question: (.*?) context: (.*)", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<= [.!?]) ")
COMMAND = command_line.Command(
    name="evaluation.baselines",
    summary="Prints baselines, in per cent, which a trained model should exceed. Of "
    "classification tasks: accuracies of the most frequent label of the training split, and of "
    "naive Bayes on words and word pairs. Of questions about a passage: the metrics of the "
    "sentence that shares most words with the question.",
    examples=[
        (
            "question types",
            "--gin_file=gin/tasks/trec6.gin --gin.DATA=data/trec6 --gin.VOCABULARY=spm.model "
            "--split=test",
        ),
    ],
    flags=[
        command_line.Flag("split", "split to evaluate (default: validation)."),
        command_line.Flag(
            "pieces",
            "naive Bayes counts the pieces of the vocabulary, which a model reads, instead of "
            "words and word pairs.",
            {"action": "store_true"},
        ),
    ],
)


class Labelled(NamedTuple):
    """Texts of one split, and their labels."""

    texts: Sequence[str]
    labels: Sequence[str]


def majority(train: Labelled, test: Labelled) -> float:
    """Returns the test accuracy of the most frequent training label."""
    ((label, _),) = collections.Counter(train.labels).most_common(1)
    return sum(answer == label for answer in test.labels) / len(test.labels)


def naive_bayes(
    train: Labelled,
    test: Labelled,
    *,
    encode: Callable[[str], Any] | None = None,
) -> float:
    """Returns the test accuracy of multinomial naive Bayes, with `SMOOTHING` added to all counts.

    Args:
        train, test: the examples to count, and those to classify.
        encode: returns the ids of a text, which are counted; None counts words and word pairs.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.naive_bayes import MultinomialNB
    except ImportError:
        raise errors.UserError(
            "naive Bayes is that of scikit-learn, which is not installed; pip install scikit-learn."
        ) from None

    analyzer: Any = encode or _words_and_pairs
    counts = CountVectorizer(analyzer=analyzer)
    model = MultinomialNB(alpha=SMOOTHING).fit(counts.fit_transform(train.texts), train.labels)
    return float(model.score(counts.transform(test.texts), test.labels))


def _words_and_pairs(text: str) -> list[str]:
    words = text.lower().split()
    return [*words, *map(" ".join, itertools.pairwise(words))]


def best_sentence(question: str, context: str) -> str:
    """Returns the sentence of the context that shares most different words with the question.

    Of several, the first. Unlike the sliding window of Rajpurkar et al. 2016 (arXiv 1606.05250,
    section 5.1), it does not choose a phrase within the sentence. Both texts have spaces around
    punctuation, as `squad` writes them.
    """
    asked = {word for word in question.lower().split() if word[0].isalnum()}
    sentences = _SENTENCE_END.split(context)
    return max(sentences, key=lambda sentence: len(asked & {*sentence.lower().split()}))


def read(task, split: str) -> Labelled:
    """Returns the inputs and targets of a seqio task, as texts.

    Raises:
        UserError: the task lacks the split, or is not a classification.
    """
    labelled, _ = _read(task, split)
    return _checked(task, split, labelled)


def _checked(task, split: str, labelled: Labelled) -> Labelled:
    """Returns texts unless they have too many labels for a classification."""
    if (count := len(set(labelled.labels))) > _MOST_LABELS:
        raise errors.UserError(
            f"task={task.name} has {count} different targets in {split}; baselines are for tasks "
            f"with at most {_MOST_LABELS} labels."
        )
    return labelled


def _read(task, split: str) -> tuple[Labelled, list[Mapping[str, Any]]]:
    """Returns texts as `read` does, of any task, and their examples."""
    from convt5.evaluation import task_data

    task_data.check_split(task, split)
    if task_data.needs_lengths(task) and not task.metric_fns:
        raise errors.UserError(
            f"task={task.name} cuts text to fixed lengths, as pre-training does; baselines need "
            f"a task with at most {_MOST_LABELS} labels."
        )
    features = task.output_features
    # Tasks that rank labels have one example per label.
    examples = [
        example
        for example in task_data.read_examples(task, split, lengths={})
        if example.get("is_correct", True)
    ]
    texts, labels = (
        [task_data.original_text(e, name, features[name].vocabulary.decode) for e in examples]
        for name in ("inputs", "targets")
    )
    return Labelled(texts, labels), examples


def main(argv: Sequence[str]) -> int:
    """Prints the table for the tasks on the command line; returns the exit code."""
    from convt5.evaluation import run_settings

    arguments = command_line.parse(COMMAND, argv)
    settings = run_settings.read(
        None, arguments.gin_files, arguments.gin_bindings, trust=arguments.trust
    ).evaluate
    if not settings.tasks:
        raise errors.UserError(
            f"{' '.join(arguments.gin_files)} sets no evaluation.EvalConfig.tasks; give a file of "
            "gin/tasks."
        )
    split = arguments.flags.split or settings.split or "validation"
    print(table(settings.tasks, split, pieces=arguments.flags.pieces))
    return 0


def table(named: Sequence[object], split: str, *, pieces: bool = False) -> str:
    """Returns a row for each task (name or object).

    With `pieces`, naive Bayes counts ids of the task's vocabulary instead of words and word pairs.
    Classifications and questions about a passage have a table each; classifications of the same
    texts share a row.
    """
    from convt5.evaluation import task_data

    labels, questions, seen = [], [], []
    for task in task_data.find_tasks(named):
        test, examples = _read(task, split)
        if measured := _of_sentences(task, test, examples):
            questions.append(_row(task, test) | measured)
            continue
        train, test = read(task, "train"), _checked(task, split, test)
        if (train, test) in seen:  # For instance, a ranking and a generating task.
            continue
        seen.append((train, test))
        encode = task.output_features["inputs"].vocabulary.encode if pieces else None
        labels.append(
            _row(task, test)
            | {
                "most frequent label": f"{100 * majority(train, test):.1f}",
                f"naive Bayes{' on pieces' * pieces}": (
                    f"{100 * naive_bayes(train, test, encode=encode):.1f}"
                ),
            }
        )
    return "\n\n".join(markdown.table(rows) for rows in (labels, questions) if rows)


def _row(task, test: Labelled) -> dict[str, str]:
    return {"task": task.name, "examples": f"{len(test.labels):,}"}


def _of_sentences(task, test: Labelled, examples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the task's metrics of `best_sentence`; none unless it is in the form of SQuAD.

    There, metrics compare with a list of answers. A classification, such as that of questions to
    answer with yes or no, may write its inputs alike.
    """
    asked = [match.groups() for match in map(_QUESTION.fullmatch, test.texts) if match]
    if len(asked) < len(test.texts):
        return {}
    answers = [
        task.postprocess_fn(label, example=example, is_target=True)
        for label, example in zip(test.labels, examples, strict=True)
    ]
    if not all(isinstance(each, list) for each in answers):
        return {}
    sentences = [best_sentence(question, context) for question, context in asked]
    return {
        f"best sentence: {name}": f"{value:.1f}"
        for metric in task.metric_fns
        for name, value in metric(answers, sentences).items()
    }


if __name__ == "__main__":
    command_line.run(main)
