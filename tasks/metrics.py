"""Metrics of downstream tasks, as seqio calls them: targets and predictions in, percentages out.

Names and rules are those of `t5.evaluation.metrics`, so that numbers can be compared; only SQuAD's
needs that package itself.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import logging

from convt5 import errors


class RankedLabel(NamedTuple):
    """A target of rank classification: one label of one example.

    Attributes:
        example, label: their numbers.
        is_correct: whether it is the label of the example.
    """

    example: int
    label: int
    is_correct: bool


class CategoryText(NamedTuple):
    """A target whose results are also reported by category."""

    text: str
    category: str


def accuracy(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns how many predictions equal their target."""
    return {"accuracy": _percent_equal(targets, predictions)}


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns how many predictions equal their target, blanks aside."""
    return {"exact_match": _percent_equal(_spaced(targets), _spaced(predictions))}


def exact_match_by_category(
    targets: Sequence[CategoryText],
    predictions: Sequence[str],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, float]:
    """Returns the exact match of everything, of each category, and of groups of categories.

    Args:
        targets: texts with their category.
        predictions: texts.
        groups: name and categories of each; categories that no target has are left out.
    """
    members = collections.defaultdict(list)
    for target, prediction in zip(targets, predictions, strict=True):
        members[target.category].append((target.text, prediction))
    chosen = {"exact_match": list(members)}
    if len(members) > 1:
        chosen |= {
            f"exact_match/{name}": [category for category in categories if category in members]
            for name, categories in (groups or {}).items()
        }
        chosen |= {f"exact_match/{category}": [category] for category in sorted(members)}
    return {
        name: exact_match(*zip(*(p for c in categories for p in members[c]), strict=True))[
            "exact_match"
        ]
        for name, categories in chosen.items()
        if categories
    }


def binary_f1(
    targets: Sequence[str], predictions: Sequence[str], *, negative: str, positive: str
) -> dict[str, float]:
    """Returns the F1 of the label `positive`; a prediction that is no label counts as wrong."""
    wrong = {negative: positive, positive: negative}
    predictions = [
        prediction if prediction in wrong else wrong[target]
        for target, prediction in zip(targets, predictions, strict=True)
    ]
    return {"f1": 100 * _f1(targets, predictions, positive)}


def macro_f1(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns the mean of the F1 of each label; that of a label which never occurs is 0."""
    scores = [_f1(targets, predictions, label) for label in labels]
    return {"macro_f1": 100 * sum(scores) / len(scores)}


def invalid(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns how many predictions are none of the labels, hence wrong whatever was meant."""
    known = set(labels)
    strange = sum(prediction not in known for prediction in predictions)
    return {"invalid": 100 * strange / len(targets)}


def rank_classification(
    targets: Sequence[RankedLabel], scores: Sequence[float], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns the metrics of choosing the label with the highest log-probability.

    Where an example has several right labels, each of them counts as right, and accuracy alone is
    returned, as t5 does.

    Args:
        targets: every label of every example, in any order.
        scores: log-probability of each, given the input.
        labels: their texts, by number; of two labels the second is the positive one.

    Raises:
        UserError: no example has all of its labels, or one of those has no right label.
    """
    examples: dict[int, dict[int, tuple[float, bool]]] = collections.defaultdict(dict)
    for target, score in zip(targets, scores, strict=True):
        examples[target.example][target.label] = (float(score), target.is_correct)
    # A limit on the number of examples may cut the last one's labels off.
    whole = [ranked for ranked in examples.values() if len(ranked) == len(labels)]
    if len(whole) < len(examples):
        logging.warning("rank classification leaves out an example with too few labels")
    if not whole:
        raise errors.UserError(
            f"rank classification needs the scores of all {len(labels)} labels of an example, but "
            f"{len(targets)} scores hold those of none; raise num_examples."
        )
    right = [[i for i, (_, correct) in ranked.items() if correct] for ranked in whole]
    chosen = [max(sorted(ranked), key=lambda i: ranked[i][0]) for ranked in whole]
    if not all(right):
        raise errors.UserError(
            "rank classification needs a right label for each example, and there is one without; "
            f"the labels are {list(labels)}: add what is missing, or leave the example out."
        )
    if max(map(len, right)) > 1:
        hits = sum(choice in numbers for choice, numbers in zip(chosen, right, strict=True))
        return {"accuracy": 100 * hits / len(whole)}
    truths = [labels[number] for (number,) in right]
    return of_labels(truths, [labels[choice] for choice in chosen], labels=labels)


def of_labels(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns accuracy and F1: of the second label where there are two, else the mean of all."""
    if len(labels) == 2:
        f1 = binary_f1(targets, predictions, negative=labels[0], positive=labels[1])
    else:
        f1 = {}
    return accuracy(targets, predictions) | f1 | macro_f1(targets, predictions, labels=labels)


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns exact match and F1 of SQuAD: `em` and `f1`, for the best of several answers each.

    Raises:
        UserError: the package t5 is not installed.
    """
    try:
        from t5.evaluation import metrics as t5_metrics
    except ImportError as error:
        raise errors.UserError(
            f"the metrics of SQuAD are those of the package t5, which cannot be imported ({error});"
            ' `uv sync` installs it; with pip, see "Installing as a package" in README.md.'
        ) from error
    return {k: float(v) for k, v in t5_metrics.squad(targets, predictions).items()}


def _percent_equal(targets: Sequence[str], predictions: Sequence[str]) -> float:
    equal = sum(t == p for t, p in zip(targets, predictions, strict=True))
    return 100 * equal / len(targets)


def _spaced(texts: Sequence[str]) -> list[str]:
    """Texts with one blank between words: vocabularies differ in the blanks they give back."""
    return [" ".join(text.split()) for text in texts]


def _f1(targets: Sequence[str], predictions: Sequence[str], label: str) -> float:
    pairs = list(zip(targets, predictions, strict=True))
    true_positives = sum(t == label == p for t, p in pairs)
    mentions = sum(t == label for t, _ in pairs) + sum(p == label for _, p in pairs)
    return 2 * true_positives / mentions if mentions else 0.0
