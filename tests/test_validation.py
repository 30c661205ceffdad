"""The validation loss is the mean over all tokens of the same batches, each time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convt5 import errors
from convt5.modeling import sharding
from convt5.training.train_step import LossSums
from convt5.training.validation import TargetCounts, Validation, place_batch


class ListedBatches:
    token_bytes = None

    def __init__(self, batches):
        self.batches = batches
        self.position = 0

    def __next__(self):
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]

    def get_state(self):
        return bytes([self.position])

    def set_state(self, state):
        self.position = state[0]


@dataclasses.dataclass(frozen=True)
class Listed:
    batches: tuple
    batch_size: int = 8
    num_epochs: int | None = 1

    def build(self, *, process_index, process_count):
        return ListedBatches(self.batches)


def batch(targets, weights):
    rows = np.zeros((8, len(targets)), np.int32) + np.asarray(targets, np.int32)
    return {
        "decoder_target_tokens": rows,
        "decoder_loss_weights": np.zeros(rows.shape, np.float32) + np.float32(weights),
    }


@jax.jit
def eval_step(model, batch):
    weights = batch["decoder_loss_weights"]
    total = jnp.sum(batch["decoder_target_tokens"] * model * weights)
    return LossSums(total, weights.sum(), {"twice": (2 * total, weights.sum())})


@pytest.fixture
def split():
    return sharding.batch_sharding(sharding.MeshConfig().build())


def test_the_loss_is_the_mean_over_tokens_not_over_batches(split):
    data = Listed((batch([1, 1], [1, 1]), batch([4, 9], [1, 0])))
    measured = Validation(data, eval_step, split, num_batches=None).measure(jnp.float32(1))
    assert measured == pytest.approx({"loss": 2.0, "twice": 4.0})


def test_every_measurement_takes_the_same_batches(split):
    data = Listed((batch([1], 1), batch([3], 1)))
    validation = Validation(data, eval_step, split, num_batches=None)
    assert [validation.measure(jnp.float32(1))["loss"] for _ in range(3)] == [2.0, 2.0, 2.0]


def identity(split, *batches, **settings):
    validation = Validation(Listed(batches), eval_step, split, num_batches=None, **settings)
    assert not validation.identity
    validation.measure(jnp.float32(1))
    first = validation.identity
    validation.measure(jnp.float32(2))
    assert validation.identity == first
    return first


def test_the_same_rows_in_any_order_are_one_evaluation_and_any_other_row_makes_another(split):
    rows = batch([1, 2], 1), batch([3, 4], 1)
    mixed = {name: rows[0][name].copy() for name in rows[0]}
    swapped = {name: rows[1][name].copy() for name in rows[1]}
    for name in mixed:
        mixed[name][0], swapped[name][0] = rows[1][name][0], rows[0][name][0]
    first = identity(split, *rows)
    assert identity(split, *reversed(rows)) == identity(split, mixed, swapped) == first
    others = [
        rows[:1],
        (*rows, rows[0]),
        (rows[0], batch([3, 5], 1)),
        (rows[0], batch([4, 3], 1)),
        (rows[0], batch([3, 4], [1, 0])),
    ]
    assert len({identity(split, *other) for other in others} - {first}) == len(others)


def test_a_number_of_batches_limits_a_measurement(split):
    data = Listed((batch([1], 1), batch([3], 1)), num_epochs=None)
    assert Validation(data, eval_step, split, num_batches=1).measure(jnp.float32(1))["loss"] == 1


def test_data_without_a_batch_is_found_before_training(split):
    with pytest.raises(errors.UserError, match="eval_data holds no batch"):
        Validation(Listed(()), eval_step, split, num_batches=None).prepare()


def test_looking_at_the_data_first_changes_no_measurement(split):
    data = Listed((batch([1], 1), batch([3], 1)))
    validation = Validation(data, eval_step, split, num_batches=None)
    validation.prepare()
    assert validation.measure(jnp.float32(1))["loss"] == 2.0


def test_no_batches_at_all_cannot_be_asked_for(split):
    with pytest.raises(errors.UserError, match="eval_num_batches=0 must be at least 1"):
        Validation(Listed(()), eval_step, split, num_batches=0)


def test_the_entropy_counts_weighted_targets_only(split):
    data = Listed((batch([1, 2, 7], [1, 1, 0]), batch([1, 2, 7], [1, 1, 0])))
    validation = Validation(data, eval_step, split, num_batches=None)
    assert validation.target_unigram_entropy() is None
    validation.measure(jnp.float32(1))
    assert validation.target_unigram_entropy() == pytest.approx(np.log(2))


def test_batches_without_targets_have_no_entropy():
    counts = TargetCounts()
    counts.add({"images": np.zeros((2, 3))})
    assert counts.entropy() is None


def test_a_placed_batch_is_split_over_devices_and_counts_real_tokens(split):
    placed = place_batch(batch([5, 0, 6], 1) | {"encoder_input_tokens": np.eye(8)}, split)
    assert placed.num_tokens == 8 * 2 + 8
    shards = placed.arrays["decoder_target_tokens"].addressable_shards
    assert {shard.data.shape for shard in shards} == {(1, 3)}


def test_targets_get_the_bytes_they_stand_for_where_known(split):
    token_bytes = np.array([0, 0, 4, 1], np.int32)
    placed = place_batch(batch([2, 3, 1], 1), split, token_bytes=token_bytes)
    np.testing.assert_array_equal(placed.arrays["decoder_target_bytes"][0], [4, 1, 0])
