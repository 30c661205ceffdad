"""What is better when less, and what runs recorded before accuracies were percentages."""

import math

import pytest

from convt5.runtime import metric_names

TEXT = {"loss": 3.5, "cross_entropy": 3.0, "accuracy": 0.25, "z_loss": 0.5}
IMAGES = {"loss": 1.5, "accuracy": 0.75, "top_5_accuracy": "nan"}
PARTIAL = {"loss": 1.5, "top_5_accuracy": 0.5}


def renamed(half, record):
    return {f"{half}{name}": value for name, value in record.items()}


@pytest.mark.parametrize("half", ["", "validation/", "ema/validation/"])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (TEXT, {"objective": 3.5, "loss": 3.0, "cross_entropy": 3.0, "token_accuracy": 25.0}),
        (IMAGES, {"objective": 1.5, "loss": 1.5, "accuracy": 75.0, "top_5_accuracy": "nan"}),
        (PARTIAL, {"objective": 1.5, "loss": 1.5, "top_5_accuracy": 50.0}),
        ({"loss": 1.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.5}),
    ],
    ids=["text", "images", "some of images", "a loss of one's own"],
)
def test_earlier_records_are_read_under_todays_names(half, before, now):
    other = {"step": 4, "trec6/accuracy": 57.4, "trec6/loss": 0.1}
    found = metric_names.current(other | renamed(half, before))
    assert found == other | renamed(half, {"z_loss": 0.5, **now} if before is TEXT else now)
    assert metric_names.current(found) == found


@pytest.mark.parametrize(
    ("saved", "wanted", "factor"),
    [
        ({"metric": "validation/loss"}, "validation/loss", 1.0),
        ({"metric": "validation/loss"}, "task/f1", None),
        ({"metric": "validation/accuracy"}, "validation/token_accuracy", 100.0),
        ({"metric": "validation/accuracy"}, "validation/accuracy", 100.0),
        ({"metric": "ema/validation/accuracy"}, "ema/validation/accuracy", 100.0),
        ({"metric": "validation/accuracy", "percent": True}, "validation/accuracy", 1.0),
        ({"metric": "validation/accuracy", "percent": True}, "validation/token_accuracy", None),
        ({"metric": "task/accuracy"}, "task/accuracy", 1.0),
        ({}, "validation/loss", 1.0),
    ],
)
def test_saved_values_of_accuracies_become_percentages(saved, wanted, factor):
    assert metric_names.factor(saved, wanted) == factor


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        *[("validation/loss", 2.5, "2.5000"), ("trec6/accuracy", 57.4123, "57.41")],
        *[("task/mse", 0.0, "0.0000"), ("task/mse", 2.5e-5, "2.5e-05")],
        *[("validation/loss", -4e30, "-4e+30"), ("validation/loss", math.inf, "inf")],
    ],
)
def test_losses_have_four_decimals_and_others_four_digits(metric, value, text):
    assert metric_names.format_value(metric, value) == text


@pytest.mark.parametrize(
    ("metric", "falls"),
    [
        *[(name, True) for name in ("validation/loss", "task/WER", "task/Edit Distance")],
        *[(name, True) for name in ("task/val-loss", "task/RMSE", "bits_per_byte")],
        *[(name, False) for name in ("task/f1", "task/chrF", "tokens_per_second", "loss/f1")],
        *[(name, False) for name in ("task/flawless", "bytes_per_second_per_chip")],
    ],
)
def test_errors_and_losses_are_better_when_lower_however_they_are_spelled(metric, falls):
    assert metric_names.lower_is_better(metric) == falls
