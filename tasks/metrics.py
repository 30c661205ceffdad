"""Metrics of downstream tasks as seqio calls them: from targets and predictions to percentages.

Names and rules are those of `t5.evaluation.metrics`, so results are comparable. Only SQuAD, ROUGE
and the second form of WNLI need that package itself.
"""

import collections
import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from convt5 import errors


class RankedLabel(NamedTuple):
    """A target of rank classification: one label of one example.

    Attributes:
        example, label: their numbers.
        is_correct: whether it is a correct label of the example.
    """

    example: int
    label: int
    is_correct: bool


class CategoryText(NamedTuple):
    """A target whose results are also reported by category."""

    text: str
    category: str


def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the percentage of predictions that equal their target."""
    return {"accuracy": _percent_equal(targets, predictions)}


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the percentage of predictions that equal their target, ignoring whitespace."""
    return {
        "exact_match": _percent_equal(_normalize_spaces(targets), _normalize_spaces(predictions))
    }


def exact_match_by_category(
    targets: Sequence[CategoryText],
    predictions: Sequence[str],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, float]:
    """Returns the exact match of all examples, of each category, and of groups of categories.

    Args:
        targets: texts with their category.
        predictions: texts.
        groups: categories of each group, by name; categories without targets are ignored.
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
    """Returns the F1 of the label `positive`; a prediction that is not a label is wrong."""
    wrong = {negative: positive, positive: negative}
    predictions = [
        prediction if prediction in wrong else wrong[target]
        for target, prediction in zip(targets, predictions, strict=True)
    ]
    return {"f1": 100 * _f1(targets, predictions, positive)}


def macro_f1(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns the mean of the F1 of all labels; it is 0 for a label that never occurs."""
    scores = [_f1(targets, predictions, label) for label in labels]
    return {"macro_f1": 100 * sum(scores) / len(scores)}


def invalid(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns the percentage of predictions that are not labels."""
    known = set(labels)
    strange = sum(prediction not in known for prediction in predictions)
    return {"invalid": 100 * strange / len(targets)}


def matthews_corrcoef(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns Matthews' correlation for any number of labels (Gorodkin 2004's R_K).

    Predictions that are not labels form a class of their own, as in T5. The result is 0 if all
    targets, or all predictions, are of one class.
    """
    known = set(labels)
    pairs = [(t, p if p in known else None) for t, p in zip(targets, predictions, strict=True)]
    total = len(pairs)
    true, predicted = (collections.Counter(side) for side in zip(*pairs, strict=True))
    agreeing = total * sum(t == p for t, p in pairs)
    covariance = agreeing - sum(true[label] * predicted[label] for label in true)
    spreads = [total**2 - sum(n**2 for n in counts.values()) for counts in (true, predicted)]
    value = covariance / math.sqrt(math.prod(spreads)) if all(spreads) else 0.0
    return {"matthews_corrcoef": 100 * value}


UNPARSED = -1.0
"""Value of a prediction that is not a number, as in T5's STS-B, whose scores are 0 to 5."""


def number_of(text: str) -> float | None:
    """Returns the finite number that a text represents, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def regression(targets: Sequence[float], predictions: Sequence[str]) -> dict[str, float]:
    """Returns Pearson's and Spearman's correlation, and the percentage of non-numeric predictions.

    These count as `UNPARSED`. A correlation is 0 if all targets, or all predictions, are equal.
    """
    numbers = [number_of(text) for text in predictions]
    values = [UNPARSED if number is None else number for number in numbers]
    ranks = [_ranks(side) for side in (targets, values)]
    return {
        "pearson_corrcoef": 100 * _correlation(targets, values),
        "spearman_corrcoef": 100 * _correlation(*ranks),
        "invalid": 100 * sum(number is None for number in numbers) / len(numbers),
    }


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} targets for {len(b)} predictions")
    # Compared directly: rounding of a mean can make deviations of equal values nonzero.
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    # Normalised, because squares of large numbers overflow.
    scaled = [np.asarray(side, np.float64) / max(map(abs, side)) for side in (a, b)]
    x, y = (side - side.mean() for side in scaled)
    norm = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return float(np.clip(x @ y / norm, -1, 1)) if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value; equal values get the mean of their ranks."""
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places].tolist()


_ROUGE_WORD = re.compile("[a-z0-9]")


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the F-measures `rouge1`, `rouge2` and `rougeLsum` of summaries.

    As in T5, they are medians of resampled means, with fixed random numbers. Of a text they read
    only the letters a to z and digits; if there are targets without any, a warning tells that they
    count as 0.

    Raises:
        UserError: the package t5 is not installed.
    """
    if unread := sum(not _ROUGE_WORD.search(target.lower()) for target in targets):
        logging.warning(
            "ROUGE reads only the letters a to z and digits: %d of %d targets have none, and count "
            "as 0 whatever is predicted",
            unread,
            len(targets),
        )
    with _same_random_numbers():
        scores = of_t5("evaluation.metrics", "ROUGE").rouge(targets, predictions)
    return {name: float(value) for name, value in scores.items()}


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)


LabelMetric = Callable[..., dict[str, float]]
"""A function of targets, predictions and `labels`, such as `matthews_corrcoef`."""


def rank_classification(
    targets: Sequence[RankedLabel],
    scores: Sequence[float],
    *,
    labels: Sequence[str],
    metric_fns: Sequence[LabelMetric] = (),
) -> dict[str, float]:
    """Returns the metrics of selecting the label with the highest log-probability.

    If an example has several correct labels, each of them counts as correct, and only accuracy is
    returned, as in t5. An example with a score that is not a number (NaN) is wrong.

    Args:
        targets: every label of every example, in any order.
        scores: log-probability of each, given the input.
        labels: text of each label number; of two labels, the second is the positive one.
        metric_fns: metrics beside accuracy and F1.

    Raises:
        UserError: no example has all its labels, or an example has no correct label.
    """
    examples: dict[int, dict[int, tuple[float, bool]]] = collections.defaultdict(dict)
    for target, score in zip(targets, scores, strict=True):
        examples[target.example][target.label] = (float(score), target.is_correct)
    # A limit on the number of examples may drop labels of the last one.
    whole = [ranked for ranked in examples.values() if len(ranked) == len(labels)]
    if len(whole) < len(examples):
        logging.warning("rank classification leaves out an example with too few labels")
    if not whole:
        raise errors.UserError(
            f"rank classification needs the scores of all {len(labels)} labels of an example, but "
            f"{len(targets)} scores hold those of none; raise num_examples."
        )
    right = [[i for i, (_, correct) in ranked.items() if correct] for ranked in whole]
    chosen = [_likeliest({i: score for i, (score, _) in ranked.items()}) for ranked in whole]
    if not all(right):
        raise errors.UserError(
            "rank classification needs a right label for each example, but one has none; the "
            f"labels are {list(labels)}: add the missing label, or remove the example."
        )
    if max(map(len, right)) > 1:
        hits = sum(choice in numbers for choice, numbers in zip(chosen, right, strict=True))
        return {"accuracy": 100 * hits / len(whole)}
    predictions = ["" if choice is None else labels[choice] for choice in chosen]
    answers = [labels[number] for (number,) in right], predictions
    metrics = of_labels(*answers, labels=labels)
    for function in metric_fns:
        metrics |= function(*answers, labels=labels)
    return metrics


def _likeliest(scores: Mapping[int, float]) -> int | None:
    """Returns the label of the highest score, the lowest of equal ones; None if one is NaN."""
    if any(map(math.isnan, scores.values())):
        return None
    return max(sorted(scores), key=lambda label: scores[label])


def of_labels(
    targets: Sequence[str], predictions: Sequence[str], *, labels: Sequence[str]
) -> dict[str, float]:
    """Returns accuracy and F1: of the second of two labels, or else the mean over all labels."""
    if len(labels) == 2:
        f1 = binary_f1(targets, predictions, negative=labels[0], positive=labels[1])
    else:
        f1 = {}
    return accuracy(targets, predictions) | f1 | macro_f1(targets, predictions, labels=labels)


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's exact match and F1, `em` and `f1`, for the best of several answers.

    Raises:
        UserError: the package t5 is not installed.
    """
    scores = of_t5("evaluation.metrics", "the metrics of SQuAD").squad(targets, predictions)
    return {name: float(value) for name, value in scores.items()}


def of_t5(module: str, what: str) -> ModuleType:
    """Imports a module of the package t5.

    Args:
        module: its name in the package.
        what: what it is needed for, for the message.

    Raises:
        UserError: the package is not installed.
    """
    try:
        return importlib.import_module(f"t5.{module}")
    except ImportError as error:
        are = "is that" if what.isupper() else "are those"
        raise errors.UserError(
            f"{what} {are} of the package t5, which cannot be imported ({error});"
            ' `uv sync` installs it; with pip, see "Installing as a package" in README.md.'
        ) from error


def _percent_equal(targets: Sequence[Any], predictions: Sequence[Any]) -> float:
    equal = sum(t == p for t, p in zip(targets, predictions, strict=True))
    return 100 * equal / len(targets)


def _normalize_spaces(texts: Sequence[str]) -> list[str]:
    """Normalises whitespace to single spaces, because vocabularies restore it differently."""
    return [" ".join(text.split()) for text in texts]


def _f1(targets: Sequence[str], predictions: Sequence[str], label: str) -> float:
    pairs = list(zip(targets, predictions, strict=True))
    true_positives = sum(t == label == p for t, p in pairs)
    mentions = sum(t == label for t, _ in pairs) + sum(p == label for _, p in pairs)
    return 2 * true_positives / mentions if mentions else 0.0
