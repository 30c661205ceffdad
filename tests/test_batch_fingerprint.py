"""The fingerprint of a batch follows from every element and its place, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5.modeling import sharding
from convt5.training.batch_fingerprint import FingerprintedLoss, fingerprint
from convt5.training.train_step import LossSums

SHAPE = (8, 3)
TOKENS = np.random.default_rng(0).integers(0, 50, SHAPE).astype(np.int32)
BATCH = {"tokens": TOKENS, "weights": np.ones(SHAPE, np.float32)}
mark = jax.jit(fingerprint)


@settings(deadline=None)
@given(st.sampled_from(sorted(BATCH)), st.integers(0, 7), st.integers(0, 2))
def test_any_element_changes_it(name, row, column):
    changed = BATCH[name].copy()
    changed[row, column] += 1
    assert mark(BATCH | {name: changed}) != mark(BATCH)


@settings(deadline=None)
@given(st.permutations(range(8)))
def test_another_order_of_rows_changes_it(order):
    moved = BATCH | {"tokens": TOKENS[np.array(order)]}
    assert (mark(moved) == mark(BATCH)) == (list(order) == list(range(8)))


def test_it_is_exact_in_float32_and_the_same_on_any_mesh():
    split = sharding.batch_sharding(sharding.MeshConfig().build())
    whole = int(mark(BATCH))
    assert int(mark(jax.device_put(BATCH, split))) == whole
    assert int(np.float32(whole)) == whole


def test_types_of_any_width_count():
    half = {"x": np.ones(4, np.float16), "flags": np.array([True, False])}
    assert mark(half) != mark(half | {"flags": np.array([False, True])})


@pytest.mark.parametrize("key", [None, 3])
def test_the_loss_and_its_metrics_stay_what_they_are(key):
    def loss(model, batch, *, dropout_key=None):
        total = jnp.float32(model + (dropout_key or 0))
        return LossSums(total, jnp.float32(2), {"other": (total, total)})

    means = FingerprintedLoss(loss=loss)(1.0, BATCH, dropout_key=key).means()
    assert means.pop("batch_fingerprint") == mark(BATCH)
    expected = loss(1.0, BATCH, dropout_key=key).means()
    assert jax.tree.map(float, means) == jax.tree.map(float, expected)
