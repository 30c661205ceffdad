"""Baselines without a network: the most frequent label, and naive Bayes on words and word pairs.

`python -m convt5.evaluation.baselines --gin_file=gin/tasks/trec6.gin --gin.DATA=... --split=test`
prints a row for each classification task, to compare models with.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from convt5 import errors
from convt5.configuration import command_line
from convt5.reports import markdown

SMOOTHING = 0.1
_MOST_LABELS = 100
COMMAND = command_line.Command(
    name="evaluation.baselines",
    summary="Prints baseline accuracies of classification tasks, in per cent: the most frequent "
    "label of the training split, and naive Bayes on words and word pairs. A trained "
    "model should exceed them.",
    examples=[
        (
            "question types",
            "--gin_file=gin/tasks/trec6.gin --gin.DATA=data/trec6 --gin.VOCABULARY=spm.model "
            "--split=test",
        ),
    ],
    flags=[command_line.Flag("split", "split to evaluate (default: validation).")],
)


class Labelled(NamedTuple):
    """Texts of one split, and their labels."""

    texts: Sequence[str]
    labels: Sequence[str]


def majority(train: Labelled, test: Labelled) -> float:
    """Returns the test accuracy of the most frequent training label."""
    ((label, _),) = collections.Counter(train.labels).most_common(1)
    return sum(answer == label for answer in test.labels) / len(test.labels)


def naive_bayes(train: Labelled, test: Labelled) -> float:
    """Returns the test accuracy of multinomial naive Bayes, with `SMOOTHING` added to all counts.

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

    words = CountVectorizer(ngram_range=(1, 2), token_pattern=r"\S+")
    model = MultinomialNB(alpha=SMOOTHING).fit(words.fit_transform(train.texts), train.labels)
    return float(model.score(words.transform(test.texts), test.labels))


def read(task, split: str) -> Labelled:
    """Returns the inputs and targets of a seqio task, as texts.

    Raises:
        UserError: the task lacks the split, or is not a classification.
    """
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
    if (count := len(set(labels))) > _MOST_LABELS:
        raise errors.UserError(
            f"task={task.name} has {count} different targets in {split}; baselines are for tasks "
            f"with at most {_MOST_LABELS} labels."
        )
    return Labelled(texts, labels)


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
    print(table(settings.tasks, arguments.flags.split or settings.split or "validation"))
    return 0


def table(named: Sequence[object], split: str) -> str:
    """Returns a row for each task (name or object); tasks with the same texts share one."""
    from convt5.evaluation import task_data

    rows, seen = [], []
    for task in task_data.find_tasks(named):
        train, test = read(task, "train"), read(task, split)
        if (train, test) in seen:  # For instance, a ranking and a generating task.
            continue
        seen.append((train, test))
        rows.append(
            {
                "task": task.name,
                "examples": f"{len(test.labels):,}",
                "most frequent label": f"{100 * majority(train, test):.1f}",
                "naive Bayes": f"{100 * naive_bayes(train, test):.1f}",
            }
        )
    return markdown.table(rows)


if __name__ == "__main__":
    command_line.run(main)
