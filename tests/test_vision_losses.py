"""Soft cross-entropy, smoothed and shared between labels, and ranks with ties."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from convt5.errors import UserError
from convt5.vision.losses import VisionLoss, label_ranks, one_hot, soft_cross_entropy
from convt5.vision.model import ViTOutput

LOGITS = np.random.default_rng(0).normal(0, 2, (6, 7)).astype(np.float32)
LABELS = np.asarray([0, 1, 2, 3, 6, 6], np.int32)


def log_probabilities() -> np.ndarray:
    return LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_label_has_what_smoothing_leaves_it(smoothing):
    """Off-class s / n, on-class 1 - s + s / n."""
    targets = np.full((6, 7), smoothing / 7)
    targets[np.arange(6), LABELS] += 1 - smoothing
    expected = -(targets * log_probabilities()).sum(axis=1)
    logits = jnp.asarray(LOGITS)
    found = soft_cross_entropy(logits, one_hot(jnp.asarray(LABELS), logits), smoothing)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ranks_are_places_in_a_stable_sort():
    logits = np.round(LOGITS)  # With ties.
    places = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)
    found = label_ranks(jnp.asarray(logits), jnp.asarray(LABELS))
    np.testing.assert_array_equal(found, places[np.arange(6), LABELS])


def test_a_row_that_is_not_a_number_is_wrong_however_many_classes_count():
    logits = LOGITS[:3, :4].copy()
    logits[0], logits[1, 2] = np.nan, np.nan
    found = label_ranks(jnp.asarray(logits), jnp.asarray([3, 1, 0]))
    assert np.all(found[:2] > 1000)
    assert found[2] < 4


def model(images, *, train):
    return ViTOutput(jnp.asarray(LOGITS), {"stem/layers/0/norm/mean": jnp.full(3, float(train))})


def sums(dropout_key=None, smoothing=0.0, **changes):
    batch = {"images": np.zeros(6), "labels": LABELS, "weights": np.ones(6, np.float32)}
    loss = VisionLoss(label_smoothing=smoothing)
    return loss(model, batch | changes, dropout_key=dropout_key)


def test_rows_of_weight_zero_count_nothing():
    weights = np.asarray([1, 1, 1, 0, 0, 0], np.float32)
    expected = -log_probabilities()[np.arange(3), LABELS[:3]].mean()
    means = sums(weights=weights).means()
    np.testing.assert_allclose(means["loss"], expected, rtol=1e-5)
    places = np.argsort(np.argsort(-LOGITS, axis=1), axis=1)[np.arange(6), LABELS][:3]
    np.testing.assert_allclose(means["accuracy"], 100 * (places < 1).mean(), rtol=1e-6)
    np.testing.assert_allclose(means["top_5_accuracy"], 100 * (places < 5).mean(), rtol=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_reported_loss_leaves_smoothing_out(mixed):
    labels = {"other_labels": LABELS[::-1].copy(), "label_share": np.full(6, 0.3, np.float32)}
    batch = labels if mixed else {}
    plain, smoothed = (sums(smoothing=s, **batch).reported() for s in (0.0, 0.1))
    assert smoothed["loss"] == plain["loss"] == plain["objective"] != smoothed["objective"]


def test_two_labels_share_the_probability():
    other, share = LABELS[::-1].copy(), np.full(6, 0.3, np.float32)
    mixed = sums(other_labels=other, label_share=share)
    expected = 0.3 * sums().loss_sum + 0.7 * sums(labels=other).loss_sum
    np.testing.assert_allclose(mixed.loss_sum, expected, rtol=1e-5)


def test_only_training_uses_and_moves_batch_statistics():
    assert sums().statistics == {}
    moved = sums(dropout_key=types.SimpleNamespace()).statistics
    np.testing.assert_array_equal(moved["stem/layers/0/norm/mean"], 1.0)


def test_smoothing_is_a_share():
    with pytest.raises(UserError, match=r"label_smoothing=1.0 must be in"):
        VisionLoss(label_smoothing=1.0)


def test_labels_of_8_bits_are_those_of_32():
    labels = np.array([3, 100])
    logits = jnp.zeros((2, 300))
    narrow = one_hot(jnp.asarray(labels, jnp.int8), logits)
    np.testing.assert_array_equal(narrow.argmax(-1), labels)
    np.testing.assert_array_equal(narrow.sum(-1), 1.0)
