"""Metrics give the percentages of T5's own, and count what is no label as wrong."""

import functools
import math
import sys
import warnings

import numpy as np
import pytest
from convt5.tasks import metrics
from convt5.tasks.metrics import CategoryText, RankedLabel
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5 import errors

LABELS = ("negative", "positive")
SENTIMENTS = st.lists(
    st.tuples(st.sampled_from(LABELS), st.sampled_from((*LABELS, "banana"))), min_size=1
)


def test_accuracy_is_a_percentage():
    assert metrics.accuracy(["a", "b", "c", "d"], ["a", "b", "c", "x"]) == {"accuracy": 75.0}


def test_exact_match_looks_at_words_and_not_at_blanks():
    found = metrics.exact_match(["x ( 1 )", "y ( 2 )"], [" x  ( 1 ) ", "y ( 3 )"])
    assert found == {"exact_match": 50.0}


def test_metrics_refuse_lists_of_unequal_length():
    with pytest.raises(ValueError, match="zip"):
        metrics.accuracy(["a", "b"], ["a"])


@given(SENTIMENTS)
@settings(max_examples=30, deadline=None)
def test_binary_f1_is_that_of_t5(pairs):
    t5_metrics = pytest.importorskip("t5.evaluation.metrics")
    targets, predictions = (list(texts) for texts in zip(*pairs, strict=True))
    found = metrics.binary_f1(targets, predictions, negative="negative", positive="positive")
    numbers = [
        np.array([LABELS.index(x) if x in LABELS else -1 for x in xs])
        for xs in (targets, predictions)
    ]
    if 1 in numbers[0] or 1 in numbers[1] or -1 in numbers[1]:
        assert found["f1"] == pytest.approx(t5_metrics.f1_score_with_invalid(*numbers)["f1"])
    else:
        assert found["f1"] == 0.0


def test_macro_f1_is_that_of_scikit_learn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    labels = ["a", "b", "c"]
    targets = random.choice(labels, 60).tolist()
    predictions = random.choice([*labels, "none"], 60).tolist()
    expected = sklearn_metrics.f1_score(targets, predictions, labels=labels, average="macro")
    found = metrics.macro_f1(targets, predictions, labels=labels)
    assert found == {"macro_f1": pytest.approx(100 * expected)}


def test_a_label_that_never_occurs_has_f1_zero():
    assert metrics.macro_f1(["a"], ["a"], labels=["a", "b"]) == {"macro_f1": 50.0}


def test_predictions_that_are_no_label_are_counted():
    assert metrics.invalid(["a", "b"], ["a", "banana"], labels=["a", "b"]) == {"invalid": 50.0}


def test_categories_and_groups_of_them_are_reported():
    targets = [CategoryText("x", "old"), CategoryText("y", "new"), CategoryText("z", "newer")]
    groups = {"fresh": ["new", "newer"], "absent": ["none"]}
    found = metrics.exact_match_by_category(targets, ["x", "y", "?"], groups=groups)
    assert found == {
        "exact_match": pytest.approx(200 / 3),
        "exact_match/fresh": 50.0,
        "exact_match/old": 100.0,
        "exact_match/new": 100.0,
        "exact_match/newer": 0.0,
    }


def test_a_single_category_is_not_reported_twice():
    targets = [CategoryText("x", "all"), CategoryText("y", "all")]
    assert metrics.exact_match_by_category(targets, ["x", "?"]) == {"exact_match": 50.0}


class TestRankClassification:
    TARGETS = tuple(RankedLabel(i, j, j == i % 2) for i in range(3) for j in range(2))

    def test_the_likeliest_label_is_chosen(self):
        scores = [-1.0, -2.0, -3.0, -1.0, -9.0, -8.0]
        found = metrics.rank_classification(self.TARGETS, scores, labels=LABELS)
        assert found["accuracy"] == pytest.approx(200 / 3)
        assert found["f1"] == pytest.approx(200 / 3)

    def test_it_agrees_with_t5(self):
        t5_metrics = pytest.importorskip("t5.evaluation.metrics")
        random = np.random.default_rng(1)
        labels = ["a", "b", "c"]
        truths = random.integers(3, size=20)
        targets = [RankedLabel(i, j, bool(truths[i] == j)) for i in range(20) for j in range(3)]
        scores = random.normal(size=60)
        expected = t5_metrics.rank_classification(
            [((t.example, t.label), t.is_correct, 1.0, 1) for t in targets], scores, num_classes=3
        )
        found = metrics.rank_classification(targets, scores, labels=labels)
        assert found["accuracy"] == pytest.approx(expected["accuracy"])
        assert found["macro_f1"] == pytest.approx(expected["mean_3class_f1"])

    @pytest.mark.parametrize("right", [0, 1])
    def test_scores_that_are_no_numbers_make_an_example_wrong(self, right):
        targets = [RankedLabel(i, j, j == right) for i in range(2) for j in range(2)]
        scores = [math.nan, math.nan, -1.0, math.nan]
        found = metrics.rank_classification(targets, scores, labels=LABELS)
        assert found == {"accuracy": 0.0, "f1": 0.0, "macro_f1": 0.0}
        several = [target._replace(is_correct=True) for target in targets]
        found = metrics.rank_classification(several, scores, labels=LABELS)
        assert found == {"accuracy": 0.0}

    def test_order_does_not_matter(self):
        scores = [-1.0, -2.0, -3.0, -1.0, -9.0, -8.0]
        order = [4, 1, 5, 0, 3, 2]
        shuffled = [self.TARGETS[i] for i in order], [scores[i] for i in order]
        assert metrics.rank_classification(*shuffled, labels=LABELS) == (
            metrics.rank_classification(self.TARGETS, scores, labels=LABELS)
        )

    def test_an_example_whose_labels_were_cut_off_is_left_out(self):
        found = metrics.rank_classification(self.TARGETS[:3], [-1.0, -2.0, 0.0], labels=LABELS)
        assert found["accuracy"] == 100.0

    def test_any_of_several_right_labels_counts_as_in_t5(self):
        t5_metrics = pytest.importorskip("t5.evaluation.metrics")
        right = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)
        scores = [-1.0, -2.0, -3.0, -1.0, -2.0, -3.0, -3.0, -2.0, -1.0]
        targets = [RankedLabel(i, j, bool(right[i, j])) for i in range(3) for j in range(3)]
        expected = t5_metrics.rank_classification(
            [((t.example, t.label), t.is_correct, 1.0, 1) for t in targets], scores, num_classes=3
        )
        found = metrics.rank_classification(targets, scores, labels=["a", "b", "c"])
        assert found == pytest.approx(expected) == {"accuracy": pytest.approx(200 / 3)}

    def test_an_example_without_a_right_label_is_an_error(self):
        targets = [RankedLabel(0, 0, False), RankedLabel(0, 1, False)]
        with pytest.raises(errors.UserError, match="a right label for each example"):
            metrics.rank_classification(targets, [-1.0, -2.0], labels=LABELS)

    def test_too_few_scores_are_an_error(self):
        with pytest.raises(errors.UserError, match=r"all 2 labels .* raise num_examples"):
            metrics.rank_classification(self.TARGETS[:1], [-1.0], labels=LABELS)


class TestSquad:
    def test_the_best_of_several_answers_counts(self):
        pytest.importorskip("t5.evaluation.metrics")
        found = metrics.squad([["the red cat", "a dog"], ["Paris"]], ["Red cat!", "in Paris"])
        assert found == {"em": 50.0, "f1": pytest.approx(100 * (1 + 2 / 3) / 2)}

    def test_without_t5_the_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "t5.evaluation.metrics", None)
        with pytest.raises(errors.UserError, match="package t5"):
            metrics.squad([["x"]], ["x"])


# --- Of GLUE and of summaries ---------------------------------------------------------------------

matthews = functools.partial(metrics.matthews_corrcoef, labels=LABELS)


@given(SENTIMENTS)
@settings(max_examples=30, deadline=None)
def test_the_correlation_of_matthews_is_that_of_t5(pairs):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    sides = list(zip(*pairs, strict=True))
    numbers = [[LABELS.index(x) if x in LABELS else -1 for x in side] for side in sides]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A single class in all.
        expected = 100 * sklearn_metrics.matthews_corrcoef(*numbers)
    found = matthews(*sides)
    assert found == {"matthews_corrcoef": pytest.approx(expected, abs=1e-9)}


@pytest.mark.parametrize(
    ("targets", "predictions", "expected"),
    [
        (LABELS, LABELS, 100.0),
        (LABELS, LABELS[::-1], -100.0),
        (LABELS, LABELS[:1] * 2, 0.0),
        (LABELS[:1] * 2, LABELS[:1] * 2, 0.0),
        (LABELS, ("", ""), 0.0),
    ],
    ids=["right", "wrong", "always one label", "one class", "no label"],
)
def test_matthews_at_the_edges(targets, predictions, expected):
    assert matthews(targets, predictions) == {"matthews_corrcoef": expected}


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.2, 2.5, 5.0]), st.sampled_from(["0.2", "5.0", "x", ""])),
        min_size=2,
    )
)
@settings(max_examples=30, deadline=None)
def test_correlations_are_those_of_t5_but_for_constants(pairs):
    t5_metrics = pytest.importorskip("t5.evaluation.metrics")
    postprocessors = pytest.importorskip("t5.data.postprocessors")
    targets, texts = zip(*pairs, strict=True)
    numbers = [postprocessors.string_to_float(text) for text in texts]
    found = metrics.regression(targets, texts)
    assert found["invalid"] == 100 * sum(text in ("x", "") for text in texts) / len(texts)
    for name in ("pearson_corrcoef", "spearman_corrcoef"):
        if len(set(targets)) == 1 or len(set(numbers)) == 1:
            assert found[name] == 0.0
        else:
            assert found[name] == pytest.approx(getattr(t5_metrics, name)(targets, numbers)[name])


@pytest.mark.parametrize(
    ("targets", "predictions", "pearson"),
    [
        ([1.0], ["1.0"], 0.0),
        ([0.1, 0.1, 0.1], ["0.1", "0.2", "0.3"], 0.0),
        ([1.0, 2.0], ["nan", "inf"], 0.0),
        ([1.0, 2.0], ["1e300", "-1e300"], -100.0),
        ([1.0, 2.0], [" 1 ", "2\n"], 100.0),
    ],
    ids=["a single row", "constant targets", "not finite", "huge", "blanks"],
)
def test_correlations_at_the_edges(targets, predictions, pearson):
    assert metrics.regression(targets, predictions)["pearson_corrcoef"] == pytest.approx(pearson)


def test_rouge_is_that_of_t5_and_the_same_at_every_call():
    t5_metrics = pytest.importorskip("t5.evaluation.metrics")
    targets = ["the cat sat on the mat", "dogs bark . cats do not .", "a b c"] * 5
    predictions = ["the cat lay on a mat", "cats do not . dogs bark .", ""] * 5
    found = metrics.rouge(targets, predictions)
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    assert metrics.rouge(targets, predictions) == found
    assert np.random.rand() == expected  # Random numbers of others go on as they were.
    assert found == pytest.approx(t5_metrics.rouge(targets, predictions), abs=8)
    assert found.keys() == {"rouge1", "rouge2", "rougeLsum"}


@pytest.mark.parametrize(("prediction", "expected"), [("a b c", 100.0), ("", 0.0), ("x", 0.0)])
def test_rouge_at_the_edges(prediction, expected):
    pytest.importorskip("t5.evaluation.metrics")
    assert set(metrics.rouge(["a b c"], [prediction]).values()) == {expected}


def test_targets_that_rouge_cannot_read_are_told(caplog):
    pytest.importorskip("t5.evaluation.metrics")
    texts = ["日本語の要約", "Краткое изложение", "ein Überblick"]
    with caplog.at_level("WARNING", logger="absl"):
        metrics.rouge(texts[2:], texts[2:])
        assert not caplog.records
        metrics.rouge(texts, texts)
    assert "2 of 3 targets have none, and count as 0" in caplog.text


def test_more_metrics_stand_beside_those_of_ranked_labels():
    targets = [RankedLabel(i, label, label == i % 2) for i in range(4) for label in (0, 1)]
    scores = [-1.0 if target.is_correct else -2.0 for target in targets]
    found = metrics.rank_classification(
        targets, scores, labels=LABELS, metric_fns=[metrics.matthews_corrcoef]
    )
    assert found["matthews_corrcoef"] == found["accuracy"] == 100.0
