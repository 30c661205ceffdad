"""A run trains, logs every step once, continues exactly, and says what is wrong when it cannot."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick

from convt5 import checkpoint, errors, initialization, optimizer, schedule, sharding
from convt5.batches.prefetching import position, take_apart
from convt5.checkpoints import reading
from convt5.trainer import train
from convt5.training import run_directory, run_log
from convt5.training.interruption import Interrupted
from convt5.training.train_step import LossSums

WIDTH = 8
RULES = (sharding.Rule(r"kernel$"),)


class Linear(nnx.Module):
    def __init__(self, key, width):
        self.kernel = nnx.Param(jax.random.normal(key, (WIDTH, width)) * 0.1)


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    width: int = 8

    def build(self, key):
        return Linear(key, self.width)


def token_loss(model, batch, *, dropout_key=None):
    """Predicts each target from the input at its place; dropout makes the step number matter."""
    x = jax.nn.one_hot(batch["encoder_input_tokens"], WIDTH)
    if dropout_key is not None:
        x = x * jax.random.bernoulli(dropout_key, 0.9, x.shape)
    log_probs = jax.nn.log_softmax(x @ model.kernel[...])
    targets = batch["decoder_target_tokens"]
    nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    weights = batch["decoder_loss_weights"]
    right = jnp.sum((log_probs.argmax(-1) == targets) * weights)
    poison = batch.get("poison", jnp.ones(1)).mean()
    total = jnp.sum(nll * weights) * poison
    return LossSums(total, weights.sum(), {"accuracy": (right, weights.sum())})


class RandomBatches:
    """Batches drawn from a generator whose state is the position."""

    token_bytes = None

    def __init__(self, config):
        self.config = config
        self.count = 0

    def __next__(self):
        if self.count == self.config.num_batches:
            raise StopIteration
        values = np.random.default_rng([self.config.seed, self.count])
        self.count += 1
        tokens = values.integers(1, WIDTH, (self.config.batch_size, 4)).astype(np.int32)
        batch = {
            "encoder_input_tokens": tokens,
            "decoder_target_tokens": (tokens + self.config.shift) % WIDTH,
            "decoder_loss_weights": np.ones(tokens.shape, np.float32),
        }
        if self.config.poisoned_batch is not None:
            value = np.nan if self.count == self.config.poisoned_batch else 1.0
            batch["poison"] = np.full(tokens.shape[0], value, np.float32)
        if self.count == self.config.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    def get_state(self):
        return position(self.count.to_bytes(8))

    def set_state(self, state):
        snapshot, skip = take_apart(state)
        self.count = int.from_bytes(snapshot) + skip


@dataclasses.dataclass(frozen=True)
class RandomData:
    batch_size: int = 8
    seed: int = 0
    num_batches: int | None = None
    poisoned_batch: int | None = None
    signal_at: int | None = None
    shift: int = 1

    @property
    def num_epochs(self):
        return None if self.num_batches is None else 1

    def build(self, *, process_index, process_count):
        return RandomBatches(self)


@pytest.fixture
def run(tmp_path):
    """Calls `train` on a small problem; keywords replace its settings."""

    def call(*, every_steps=4, **changes):
        settings = {
            "run_dir": str(tmp_path / "run"),
            "model": LinearConfig(),
            "loss": token_loss,
            "train_data": RandomData(),
            "eval_data": RandomData(seed=1, num_batches=3),
            "optimizer": optimizer.AdamWConfig(),
            "schedule": schedule.Constant(rate=0.05),
            "checkpoint": checkpoint.CheckpointConfig(every_steps=every_steps),
            "num_steps": 10,
            "eval_every_steps": 5,
            "log_every_steps": 1,
            "sharding_rules": RULES,
        }
        return train(**settings | changes)

    return call


def records(folder):
    return run_log.read_records(folder / "run" / "metrics.jsonl")


def final_kernel(folder, step=10):
    model = jax.eval_shape(lambda: Linear(jax.random.key(0), WIDTH))
    params = reading.load_params(folder / "run", model, step=step)
    return np.asarray(params.kernel[...])


def test_training_lowers_the_loss_and_records_every_step_once(run, tmp_path):
    result = run(num_steps=60)
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == list(range(1, 61))
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"]
    assert result.step == 60
    assert result.validation_loss == logged[-1]["validation/loss"]


def test_the_first_loss_is_near_that_of_guessing(run, tmp_path):
    run(num_steps=1)
    assert abs(records(tmp_path)[0]["loss"] - np.log(WIDTH)) < 0.1


def test_records_hold_speed_and_optimizer_figures(run, tmp_path):
    run(num_steps=3)
    expected = {"loss", "accuracy", "learning_rate", "grad_norm", "param_norm", "train_seconds"}
    expected |= {"tokens_per_second", "seconds_per_step", "data_wait_share"}
    assert expected <= records(tmp_path)[-1].keys()


def test_records_are_means_over_the_steps_between_them(run, tmp_path):
    run(num_steps=10, run_dir=str(tmp_path / "each"), eval_every_steps=None)
    run(num_steps=10, log_every_steps=5, eval_every_steps=None)
    each = [r["loss"] for r in run_log.read_records(tmp_path / "each" / "metrics.jsonl")]
    coarse = {r["step"]: r["loss"] for r in records(tmp_path)}
    assert coarse.keys() == {1, 5, 10}
    assert coarse[5] == pytest.approx(np.mean(each[1:5]), rel=1e-6)
    assert coarse[10] == pytest.approx(np.mean(each[5:]), rel=1e-6)


def test_the_end_shows_where_the_run_lies_and_how_good_it_is(run, tmp_path, capsys):
    result = run()
    shown = capsys.readouterr().err
    assert f"run directory    {tmp_path / 'run'}" in shown
    assert f"validation loss  {result.validation_loss:.4f}" in shown
    assert "unigram entropy" in shown
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 10


def test_the_unigram_entropy_is_that_of_the_validation_targets(run):
    batches = RandomBatches(RandomData(seed=1, num_batches=3))
    tokens = np.concatenate([next(batches)["decoder_target_tokens"].ravel() for _ in range(3)])
    shares = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert run().target_unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("stop_at", quick([4, 5, 7, 8], chosen=[4, 7]))
def test_a_run_stopped_by_sigterm_continues_as_if_it_had_not(run, tmp_path, stop_at):
    run(run_dir=str(tmp_path / "whole" / "run"), log_every_steps=3)
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
        run(train_data=RandomData(signal_at=stop_at), log_every_steps=3)
    assert caught.value.exit_code == 143
    run(log_every_steps=3)
    np.testing.assert_array_equal(final_kernel(tmp_path), final_kernel(tmp_path / "whole"))
    whole, stopped = records(tmp_path / "whole"), records(tmp_path)
    assert [r["step"] for r in stopped] == [r["step"] for r in whole]
    assert [r["loss"] for r in stopped] == pytest.approx([r["loss"] for r in whole], rel=1e-12)
    validation = "validation/loss"
    assert [r.get(validation) for r in stopped] == [r.get(validation) for r in whole]


def test_records_beyond_the_checkpoint_are_dropped_when_a_run_continues(run, tmp_path):
    run(num_steps=8)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    run()
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 11))
    assert records(tmp_path)[8]["loss"] != 1.0


def test_a_finished_run_is_left_as_it_is(run, tmp_path, capsys):
    first = run()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run() == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert "of 10 steps none are left to do" in capsys.readouterr().err


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(run, tmp_path):
    run(num_steps=6)
    run(num_steps=10)
    run(run_dir=str(tmp_path / "whole" / "run"))
    np.testing.assert_array_equal(final_kernel(tmp_path), final_kernel(tmp_path / "whole"))


def test_training_ends_with_the_data(run, tmp_path):
    assert run(train_data=RandomData(num_batches=6)).step == 6
    assert records(tmp_path)[-1]["step"] == 6
    assert final_kernel(tmp_path, step=6).shape == (WIDTH, WIDTH)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_gradient(run, tmp_path):
    with pytest.raises(errors.TrainingError) as caught:
        run(train_data=RandomData(poisoned_batch=7))
    message = str(caught.value)
    assert "stopped at step 7: gradient of parameter kernel is not finite (loss nan)" in message
    assert "the last good checkpoint is that of step 4" in message
    assert caught.value.exit_code == 1
    assert np.isfinite(final_kernel(tmp_path, step=4)).all()
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 7))


def test_a_stopped_run_can_go_on_with_better_data(run, tmp_path):
    with pytest.raises(errors.TrainingError):
        run(train_data=RandomData(poisoned_batch=7))
    run()
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 11))


def test_a_checkpoint_of_another_architecture_is_refused(run):
    run(num_steps=4)
    with pytest.raises(errors.UserError, match=r"kernel: float32\[8,8\] .* float32\[8,9\]"):
        run(model=LinearConfig(width=9))


def test_a_run_directory_in_use_is_refused(run, tmp_path):
    with (
        run_directory.hold(tmp_path / "run"),
        pytest.raises(errors.UserError, match=f"in use by process {os.getpid()}"),
    ):
        run()


def test_a_run_directory_that_cannot_be_written_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError, match="must be a folder that can be written"):
        run(run_dir=str(tmp_path / "file" / "run"))


def test_settings_are_kept_and_changed_ones_beside_them(run, tmp_path, capsys):
    run(num_steps=4, config_text="rate = 1\n")
    run(num_steps=8, config_text="rate = 2\n")
    folder = tmp_path / "run"
    assert (folder / "config.gin").read_text() == "rate = 2\n"
    assert (folder / "config.before_step_4.gin").read_text() == "rate = 1\n"
    assert "settings differ from those of the first 4 steps" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 8}, {"data": 4, "fsdp": 2}])
def test_impossible_intervals_are_reported_together(run, mesh):
    with pytest.raises(errors.UserError, match="train has 2 faults"):
        run(num_steps=0, log_every_steps=0, mesh=sharding.MeshConfig(**mesh))


def test_endless_evaluation_data_needs_a_number_of_batches(run):
    with pytest.raises(errors.UserError, match="eval_num_batches=None"):
        run(eval_data=RandomData(seed=1))
    assert run(eval_data=RandomData(seed=1), eval_num_batches=2, num_steps=2).validation_loss


def test_a_run_restored_onto_another_mesh_goes_on(run):
    run(num_steps=4, mesh=sharding.MeshConfig(data=8))
    assert run(num_steps=6, mesh=sharding.MeshConfig(data=2, fsdp=4)).step == 6


def test_the_best_checkpoint_is_kept(run, tmp_path):
    run(
        num_steps=5,
        eval_every_steps=1,
        eval_data=RandomData(seed=1, num_batches=3, shift=2),  # Gets worse with every step.
        checkpoint=checkpoint.CheckpointConfig(every_steps=1, keep_last=1, keep_best=1),
    )
    losses = {r["step"]: r["validation/loss"] for r in records(tmp_path)}
    best = min(losses, key=losses.__getitem__)
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert best < 5
    assert kept == {best, 5}


@dataclasses.dataclass(frozen=True)
class Distance:
    """A task whose metric is how far the parameters are from 0; it grows while training."""

    name: str = "distance"

    def build(self, model, mesh):
        return self

    def measure(self, model):
        return {"norm": float(jnp.abs(model.kernel[...]).mean())}


def test_a_run_stops_when_the_chosen_metric_becomes_no_better(run, tmp_path, capsys):
    settings = {
        "task_evals": [Distance()],
        "eval_every_steps": 1,
        "early_stop_evaluations": 3,
        "num_steps": 40,
        "checkpoint": checkpoint.CheckpointConfig(every_steps=1, best_metric="distance/norm"),
    }
    result = run(**settings)
    best = min(records(tmp_path), key=lambda record: record["distance/norm"])["step"]
    assert result.step == best + 3 < 40
    assert f"in 3 evaluations since step {best}" in capsys.readouterr().err
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert best in kept
    assert run(**settings).step == result.step  # The count goes on where it stood.


def test_more_of_a_metric_can_be_better(run, tmp_path):
    config = checkpoint.CheckpointConfig(
        every_steps=1, keep_last=1, best_metric="distance/norm", best_mode="max"
    )
    run(task_evals=[Distance()], eval_every_steps=1, checkpoint=config, num_steps=6)
    norms = {r["step"]: r["distance/norm"] for r in records(tmp_path)}
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {6, max(norms, key=norms.__getitem__)}


def test_a_best_metric_that_is_never_measured_is_refused_before_training(run, tmp_path):
    config = checkpoint.CheckpointConfig(best_metric="sst2/accuracy")
    with pytest.raises(errors.UserError, match=r"is never measured; .* such as validation/loss"):
        run(checkpoint=config)
    assert not (tmp_path / "run").exists()


def test_a_new_run_starts_from_the_parameters_of_another(run, tmp_path):
    run(num_steps=4)
    fine = str(tmp_path / "fine")
    run(run_dir=fine, num_steps=1, init_from=initialization.InitFrom(path=str(tmp_path / "run")))
    run(run_dir=str(tmp_path / "scratch"), num_steps=1)
    first = {
        name: run_log.read_records(tmp_path / name / "metrics.jsonl")[0]["loss"]
        for name in ("fine", "scratch")
    }
    assert first["fine"] < first["scratch"]
