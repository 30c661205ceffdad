"""A run trains, logs every step once, continues exactly, and says what is wrong when it cannot."""

import dataclasses
import inspect
import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import get_type_hints

import counting_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick

import convt5
from convt5 import errors
from convt5.analysis.cost_report import Subject
from convt5.checkpoints import checkpoint, reading, record
from convt5.data.prefetching import position, split_position
from convt5.evaluation import EvalConfig, PredictConfig, TaskEval
from convt5.interchange import initialization
from convt5.modeling import sharding
from convt5.sweeps.study import Grid
from convt5.text import task_format
from convt5.train import dry_run
from convt5.training import optimizer, run_directory, run_log, schedule
from convt5.training.averaging import EMA
from convt5.training.interruption import Interrupted
from convt5.training.loop import Loop
from convt5.training.patience import Patience
from convt5.training.plan import make_plan
from convt5.training.spikes import SkipSpikes
from convt5.training.train_step import LossSums, StepConfig
from convt5.training.trainer import TrainRun, train
from convt5.vision import images, sources
from convt5.vision.augmentation import Augmentation

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
        snapshot, skip = split_position(state)
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
def run(tmp_path, shared_steps):
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


def test_each_setting_of_a_run_is_declared_once_and_gin_sees_it():
    declared = [n for part in TrainRun.__mro__ for n in inspect.get_annotations(part)]
    assert len(declared) == len(set(declared))
    assert inspect.signature(train) == inspect.signature(TrainRun)
    assert inspect.signature(train).parameters.keys() == set(declared)
    assert get_type_hints(train).keys() - {"return"} == set(declared)
    # Tools that look at a step of a run hold it, and repeat none of it.
    assert not {f.name for f in dataclasses.fields(Subject)} & set(declared)


def test_a_run_is_checked_and_planned_before_anything_is_written(run, monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "train", TrainRun)
    made = run(mesh=sharding.MeshConfig(fsdp=2))
    made.check()
    made.check_data()
    plan = made.plan(jax.devices()[:2])
    assert plan.mesh.shape["fsdp"] == 2
    assert plan.num_parameters() == WIDTH * WIDTH
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Written(RandomData):
    """Data of a task that writes its inputs by a template."""

    task: str = "topics"
    template: str = "topic: {text}"

    def task_formats(self):
        return (task_format.of_template(self.task, self.template),)


def test_inputs_that_an_evaluation_writes_otherwise_are_noted(run, monkeypatch):
    monkeypatch.setitem(globals(), "train", TrainRun)
    other = Written(template="{text} topic:")
    for measured, is_noted in (
        ({"eval_data": Written()}, False),
        ({"eval_data": other}, True),
        ({"eval_data": other, "task_evals": [other]}, True),
        ({"task_evals": [dataclasses.replace(other, task="another")]}, False),
    ):
        notes = run(train_data=Written(), **measured).notes()
        assert len(notes) == is_noted
        assert all("'{text} topic:'" in note and "'topic: {text}'" in note for note in notes)


@pytest.fixture
def stopped_in(run, monkeypatch):
    """Calls `run`, which SIGTERM reaches while a step is made."""

    def call(step, **settings):
        update = Loop._update

        def update_and_stop(loop, batch):
            metrics = update(loop, batch)
            if loop.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return metrics

        with monkeypatch.context() as patch:
            patch.setattr(Loop, "_update", update_and_stop)
            with pytest.raises(Interrupted, match=f"after step {step},"):
                run(**settings)

    return call


def records(folder):
    return run_log.read_records(folder / "run" / "metrics.jsonl")


def final_kernel(folder, step=10):
    model = jax.eval_shape(lambda: Linear(jax.random.key(0), WIDTH))
    params = reading.load_params(folder / "run", model, step=step)
    return np.asarray(params.kernel[...])


def test_training_lowers_the_loss_and_records_every_step_once(run, tmp_path):
    result = run(num_steps=60, every_steps=60, eval_every_steps=30)
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


def test_the_wait_for_the_first_batch_is_no_share_of_training(run, tmp_path, monkeypatch):
    read = RandomBatches.__next__

    def read_slowly(self):
        time.sleep(0.2 * (self.count == 0))
        return read(self)

    monkeypatch.setattr(RandomBatches, "__next__", read_slowly)
    run(num_steps=1, eval_every_steps=None)
    assert records(tmp_path)[0]["data_wait_share"] == 0.0


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


@pytest.mark.slow
def test_samples_are_shown_and_kept_during_training_where_asked_for(run, tmp_path, capsys):
    def report(model, data):
        return f"sum {float(model.kernel[...].sum()):.6f} of seed {data.seed}"

    seen = {}
    for every in (None, 3):
        folder = tmp_path / str(every)
        run(run_dir=str(folder), report=report, report_every_steps=every)
        seen[every] = run_log.read_samples(folder)
    assert seen[3][3] in capsys.readouterr().err
    assert list(seen[None]) == [10]
    assert list(seen[3]) == [3, 6, 9, 10]
    # It changes nothing, and the end is the same.
    assert seen[3][10] == seen[None][10]
    assert len({text.splitlines()[-1] for text in seen[3].values()}) == 4
    for step, text in seen[3].items():
        assert text.endswith("of seed 1")
        assert text.startswith(f"step {step}\n") == (step < 10)
    # A run that goes on from step 8 repeats what came after.
    log = run_log.open_run_log(tmp_path / "3", num_steps=10, last_step=8, is_first_process=True)
    log.open_files(last_step=8, wandb_project=None, config={})
    log.sample(9, "again")
    log.close()
    assert run_log.read_samples(tmp_path / "3") == {3: seen[3][3], 6: seen[3][6], 9: "again"}


def test_a_run_keeps_where_its_steps_were_made_and_what_they_took(run, tmp_path):
    run(num_steps=4)
    run(num_steps=10)
    found = run_log.read_notes(tmp_path / "run" / "machines.jsonl")
    assert list(found) == [0, 4]
    for about in found.values():
        assert about["convt5"] == convt5.__version__
        assert about["device"] == jax.devices()[0].device_kind
        assert about["parameters"] == WIDTH * WIDTH
        assert about["start_total_seconds"] > 0
        # Of a batch there are 32 source tokens and up to as many targets, as 0 is padding.
        assert 32 <= about["flops_per_step"] / about["flops_per_token"] <= 64


def test_reports_that_nothing_makes_are_refused(run):
    with pytest.raises(errors.UserError, match=r"report_every_steps=3 asks for reports, but"):
        run(report_every_steps=3)


def test_the_unigram_entropy_is_that_of_the_validation_targets(run):
    batches = RandomBatches(RandomData(seed=1, num_batches=3))
    tokens = np.concatenate([next(batches)["decoder_target_tokens"].ravel() for _ in range(3)])
    shares = np.unique(tokens, return_counts=True)[1] / tokens.size
    assert run().target_unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum())


@pytest.mark.parametrize("stop_at", quick([4, 5, 7, 8], chosen=[7]))
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


@pytest.mark.slow
def test_other_intervals_of_records_evaluate_no_other_step(run, stopped_in, tmp_path):
    stopped_in(3, log_every_steps=50)
    run(log_every_steps=3)
    assert [r["step"] for r in records(tmp_path) if "validation/loss" in r] == [5, 10]
    assert [r["step"] for r in records(tmp_path)] == [1, 5, 6, 9, 10]


def test_a_stop_ends_only_when_the_checkpoint_has_been_read_back(run, stopped_in, monkeypatch):
    check, handled = checkpoint.read_back.check, {}

    def note(folder, *expected):
        handled[folder.name] = signal.getsignal(signal.SIGTERM) is not before
        check(folder, *expected)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(checkpoint.read_back, "check", note)
    stopped_in(7)
    assert handled == {"4": True, "7": True}


@pytest.mark.slow
def test_a_run_in_a_bucket_trains_continues_and_keeps_every_event(run, bucket, tmp_path):
    run(num_steps=10)
    for num_steps in (6, 10):
        run(run_dir="gs://bucket/run", num_steps=num_steps, config_text="a = 1\n")
    np.testing.assert_array_equal(final_kernel(bucket), final_kernel(tmp_path))
    assert [r["loss"] for r in records(bucket)] == [r["loss"] for r in records(tmp_path)]
    assert len(list((bucket / "run" / "tensorboard").iterdir())) == 2


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
    assert "of 10 steps none are left" in capsys.readouterr().err


def test_a_call_that_trains_nothing_leaves_the_settings_as_they_are(run, tmp_path):
    path = tmp_path / "run" / "config.gin"
    run(config_text="a = 1\n")
    run(config_text="a = 2\n")
    ended = RandomData(num_batches=10)
    run(config_text="a = 3\n", num_steps=20, train_data=ended)
    assert path.read_text() == "a = 1\n"
    assert not list(path.parent.glob("config.before*"))
    run(config_text="a = 4\n", num_steps=12)
    assert path.read_text() == "a = 4\n"
    assert (tmp_path / "run" / "config.before_step_10.gin").read_text() == "a = 1\n"


def test_another_batch_size_is_refused_before_data_is_read(run, monkeypatch):
    run(num_steps=4)

    def refuse(*args, **settings):
        raise AssertionError("data was read")

    monkeypatch.setattr(RandomData, "build", refuse)
    with pytest.raises(errors.UserError, match=r"batch_size=16 .* differs from the 8 of"):
        run(train_data=RandomData(batch_size=16))


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(run, tmp_path):
    run(num_steps=6)
    run(num_steps=10)
    run(run_dir=str(tmp_path / "whole" / "run"))
    np.testing.assert_array_equal(final_kernel(tmp_path), final_kernel(tmp_path / "whole"))


def test_training_ends_with_the_data(run, tmp_path, capsys):
    assert run(train_data=RandomData(num_batches=6)).step == 6
    assert "the training data ends after step 6 of 10" in capsys.readouterr().err
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


def test_a_checkpoint_of_another_run_is_not_called_one_of_this_run(run, tmp_path):
    run(num_steps=4)
    source = initialization.InitFrom(path=str(tmp_path / "run"), continue_training=True)
    fine = {"run_dir": str(tmp_path / "fine"), "init_from": source}
    with pytest.raises(errors.TrainingError, match="no checkpoint was written before"):
        run(train_data=RandomData(poisoned_batch=1), **fine)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", quick([schedule.Cosine, schedule.Linear], chosen=[schedule.Cosine])
)
def test_steps_without_a_learning_rate_are_told(run, tmp_path, capsys, kind):
    for total_steps, final_fraction, is_told in ((4, 0.0, True), (4, 0.1, False), (6, 0.0, False)):
        rate = kind(peak=0.1, total_steps=total_steps, final_fraction=final_fraction)
        folder = tmp_path / f"{total_steps} {final_fraction}"
        run(run_dir=str(folder), schedule=rate, num_steps=6)
        told = f"rate is 0 after step 4, the total_steps of {kind.__name__}"
        assert (told in capsys.readouterr().err) == is_told
        rates = [r["learning_rate"] for r in run_log.read_metrics(folder)]
        assert (rates[4:] == [0.0, 0.0]) == is_told
        assert all(rates[:4])


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


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [1, 4])
def test_a_best_step_that_has_no_checkpoint_is_told(run, tmp_path, capsys, every_steps):
    run(
        num_steps=5,
        eval_every_steps=1,
        eval_data=RandomData(seed=1, num_batches=3, shift=2),  # Gets worse with every step.
        every_steps=every_steps,
    )
    best = min(records(tmp_path), key=lambda r: r["validation/loss"])["step"]
    assert best < 4
    told = f"after step {best}, which has no checkpoint\n" in capsys.readouterr().err
    assert told == (every_steps == 4)


@dataclasses.dataclass(frozen=True)
class Distance:
    """A task whose metric is how far the parameters are from 0; it grows while training."""

    name: str = "distance"

    def build(self, model, mesh):
        return self

    def measure(self, model):
        return {"norm": float(jnp.abs(model.kernel[...]).mean())}


@pytest.mark.slow
@pytest.mark.parametrize("mode", quick(["min", "max"], chosen=["max"]))
def test_a_run_shows_the_metric_of_its_task_and_its_best_value(run, tmp_path, capsys, mode):
    config = checkpoint.CheckpointConfig(every_steps=1, best_metric="distance/norm", best_mode=mode)
    settings = {"task_evals": [Distance()], "eval_every_steps": 1, "checkpoint": config}
    run(num_steps=2, **settings)
    result = run(num_steps=5, **settings)
    values = {r["step"]: r["distance/norm"] for r in records(tmp_path)}
    best = {"min": min, "max": max}[mode](values, key=lambda step: values[step])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for found in (summary, dataclasses.asdict(result)):
        assert found["metric"] == "distance/norm"
        assert (found["metric_step"], found["metric_value"]) == (5, values[5])
        assert (found["best_step"], found["best_value"]) == (best, values[best])
    shown = capsys.readouterr().err
    assert f"distance norm {values[5]:.4f}" in shown
    assert f"  distance norm    {values[5]:.4f}  best {values[best]:.4f} after step {best}" in shown


@pytest.mark.slow
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


def test_a_run_that_stops_early_has_saved_the_best_step(run, tmp_path):
    config = checkpoint.CheckpointConfig(every_steps=1000, best_metric="distance/norm")
    run(
        task_evals=[Distance()],
        eval_every_steps=2,
        early_stop_evaluations=2,
        num_steps=40,
        checkpoint=config,
    )
    norms = {r["step"]: r["distance/norm"] for r in records(tmp_path) if "distance/norm" in r}
    kept = {int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()}
    assert min(norms, key=norms.__getitem__) in kept


@pytest.mark.parametrize("call", [train, lambda **settings: dry_run(TrainRun(**settings))])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_num_batches": 0}, "eval_num_batches=0 must be at least 1"),
        ({"eval_data": RandomData()}, "eval_data with num_epochs=None never ends"),
        ({"eval_every_steps": None, "early_stop_evaluations": 1}, "set eval_every_steps"),
        ({"eval_data": None, "early_stop_evaluations": 1}, "but nothing is evaluated"),
        ({"num_steps": 2**31}, r"num_steps=2147483648 must be .* below 2\*\*31"),
        ({"init_from": initialization.InitFrom(path="/nowhere")}, "no checkpoint in /nowhere"),
        ({"run_dir": ""}, "run_dir='' must name a folder"),
        ({"run_dir": "/proc/version"}, "/proc/version is a file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    run, tmp_path, monkeypatch, call, settings, message
):
    monkeypatch.setitem(globals(), "train", call)
    with pytest.raises(errors.UserError, match=message):
        run(**settings)
    assert not (tmp_path / "run").exists()


def test_a_misspelt_best_metric_is_told_before_the_first_step(run, tmp_path):
    config = checkpoint.CheckpointConfig(best_metric="validation/acuracy")
    with pytest.raises(errors.UserError, match=r"Did you mean validation/accuracy.* There are"):
        run(checkpoint=config)
    assert not (tmp_path / "run").exists()


def test_a_best_metric_that_a_task_lacks_costs_no_steps(run, tmp_path):
    wrong = checkpoint.CheckpointConfig(best_metric="distance/nrom", every_steps=1000)
    settings = {"task_evals": [Distance()], "num_steps": 8}
    with pytest.raises(errors.UserError, match="The 5 steps so far are saved"):
        run(checkpoint=wrong, **settings)
    right = checkpoint.CheckpointConfig(best_metric="distance/norm", every_steps=1000)
    run(checkpoint=right, **settings)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 9))


def test_a_refused_command_leaves_the_settings_of_the_run_as_they_are(run, tmp_path):
    run(num_steps=4, config_text="a = 1\n")
    with pytest.raises(errors.UserError, match="data_shards=2"):
        run(num_steps=8, data_shards=2, config_text="a = 2\n")
    assert (tmp_path / "run" / "config.gin").read_text() == "a = 1\n"


def test_a_summary_that_is_none_is_written_anew(run, tmp_path):
    run(num_steps=4)
    (tmp_path / "run" / "summary.json").write_text("[]")
    assert run(num_steps=4).step == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 4


def regularised_loss(model, batch, *, dropout_key=None):
    """As text: what is minimised is half again the cross-entropy."""
    sums = token_loss(model, batch, dropout_key=dropout_key)
    right, weight = sums.metrics["accuracy"]
    metrics = {"cross_entropy": (sums.loss_sum, weight), "token_accuracy": (100 * right, weight)}
    return LossSums(1.5 * sums.loss_sum, weight, metrics)


def test_what_is_minimised_stands_beside_the_cross_entropy(run, tmp_path):
    result = run(num_steps=5, loss=regularised_loss)
    last = records(tmp_path)[-1]
    for half in ("", "validation/"):
        assert last[f"{half}objective"] == pytest.approx(1.5 * last[f"{half}cross_entropy"])
        assert last[f"{half}loss"] == last[f"{half}cross_entropy"]
    assert result.validation_loss == last["validation/cross_entropy"]
    assert result.train_loss == last["cross_entropy"]


def as_before(record):
    """Returns a record as runs wrote it when accuracies were shares of 1."""
    record = dict(record)
    for half in ("", "validation/"):
        if f"{half}objective" in record:
            record[f"{half}loss"] = record.pop(f"{half}objective")
            record[f"{half}accuracy"] = record.pop(f"{half}token_accuracy") / 100
    return record


@pytest.mark.slow
def test_a_run_directory_with_earlier_names_of_metrics_goes_on(run, stopped_in, tmp_path):
    config = checkpoint.CheckpointConfig(
        every_steps=2, best_metric="validation/token_accuracy", best_mode="max"
    )
    settings = {"loss": regularised_loss, "checkpoint": config, "log_every_steps": 4}
    settings["eval_every_steps"] = 2
    settings["early_stop_evaluations"] = 9
    whole = tmp_path / "whole" / "run"
    run(run_dir=str(whole), **settings)
    stopped_in(6, **settings)
    path = tmp_path / "run" / run_log.METRICS_FILE
    path.write_text("".join(json.dumps(as_before(r)) + "\n" for r in records(tmp_path)))
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        about = record.read(folder)
        if about["best"]["value"] is not None:
            about["best"]["value"] /= 100
            about["progress"]["patience"]["best_value"] /= 100
        about["best"]["metric"] = "validation/accuracy"
        about["progress"]["patience"]["metric"] = "validation/accuracy"
        del about["best"]["percent"], about["progress"]["patience"]["percent"]
        about["progress"]["window"] = as_before(about["progress"]["window"])
        (folder / "about" / "metadata").write_text(json.dumps(record.seal(about)))
    run(**settings)
    found, expected = (run_log.read_metrics(folder) for folder in (tmp_path / "run", whole))
    clocks = {"train_seconds", "train_cpu_seconds", "seconds_per_step", "tokens_per_second"}
    clocks.add("data_wait_share")
    by_step = {r["step"]: r for r in found}
    for wanted in expected:
        for name in wanted.keys() - clocks:
            assert by_step[wanted["step"]][name] == pytest.approx(wanted[name], rel=1e-5), name
    best = checkpoint.best_step(tmp_path / "run" / "checkpoints")
    assert best == checkpoint.best_step(whole / "checkpoints")


@pytest.mark.parametrize("metric", ["validation/loss", "validation/token_accuracy"])
def test_the_metric_tells_which_of_its_values_is_best(metric):
    config = checkpoint.CheckpointConfig(keep_last=1, best_metric=metric)
    best, worst = (1, 2) if metric == "validation/loss" else (2, 1)
    values = {1: 0.25, 2: 0.5, 3: 0.375}
    assert config.kept([1, 2, 3], values) == {best, 3}
    assert config.is_better(values[best], values[worst])
    said = dataclasses.replace(config, best_mode="max" if best == 1 else "min")
    assert said.kept([1, 2, 3], values) == {worst, 3}


@pytest.mark.slow
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
    with pytest.raises(errors.UserError, match=r"is never recorded; .* such as validation/loss"):
        run(checkpoint=config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (["a", "b", "a"], r"two tasks named 'a', whose metrics would replace each other"),
        (["validation"], r"a task named 'validation', whose metrics .* those of eval_data"),
        (["ema"], r"a task named 'ema', whose metrics would replace those of ema"),
    ],
)
def test_tasks_whose_metrics_would_replace_others_are_refused(run, tmp_path, names, fault):
    with pytest.raises(errors.UserError, match=f"task_evals has {fault}; set another"):
        run(task_evals=[Distance(name) for name in names], ema=EMA())
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


class LaterData(RandomData):
    """Other data, which happens to begin with what the first run reads after four steps."""

    def build(self, *, process_index, process_count):
        batches = RandomBatches(self)
        batches.count = 4
        return batches


@pytest.mark.slow
def test_a_run_goes_on_with_other_data_where_another_stopped(run, tmp_path):
    settings = {"schedule": schedule.InverseSqrt(warmup_steps=2)}
    run(num_steps=4, **settings)
    source = initialization.InitFrom(path=str(tmp_path / "run"), continue_training=True)
    fine = {
        "run_dir": str(tmp_path / "fine"),
        "train_data": LaterData(),
        "init_from": source,
        **settings,
    }
    run(num_steps=6, **fine)
    run(num_steps=6, **settings)  # The run itself goes on as well.
    found, expected = (
        run_log.read_records(tmp_path / name / "metrics.jsonl") for name in ("fine", "run")
    )
    assert [record["step"] for record in found] == [5, 6]
    for ours, theirs in zip(found, expected[4:], strict=True):
        for name in ("learning_rate", "loss", "grad_norm", "param_norm"):
            assert ours[name] == theirs[name]
    wider = {"train_data": RandomData(batch_size=16, shift=2), "run_dir": str(tmp_path / "wider")}
    run(num_steps=7, **fine | wider)
    fine |= {"run_dir": str(tmp_path / "none")}
    with pytest.raises(errors.UserError, match=r"num_steps=4 counts all updates, .* after the 6 "):
        run(num_steps=4, **fine)
    with pytest.raises(errors.UserError, match="was made by another optimizer"):
        run(num_steps=7, **fine | {"optimizer": optimizer.AdafactorConfig()})
    assert not (tmp_path / "none").exists()
    with pytest.raises(errors.UserError, match="continue_training=True loads all parameters"):
        dataclasses.replace(source, exclude=["kernel"])


def test_a_run_goes_on_from_a_checkpoint_that_was_renamed(run, tmp_path):
    run(num_steps=4)
    kept = (tmp_path / "run" / "checkpoints" / "4").rename(tmp_path / "kept")
    source = initialization.InitFrom(path=str(kept), continue_training=True)
    fine = {"run_dir": str(tmp_path / "fine"), "init_from": source}
    assert run(num_steps=6, **fine).step == 6
    fine["run_dir"] = str(tmp_path / "none")
    with pytest.raises(errors.UserError, match=r"num_steps=4 counts all updates, .* after the 4 "):
        run(num_steps=4, **fine)


@dataclasses.dataclass(frozen=True)
class Counting:
    """A task that counts its evaluations, to see that none is made twice."""

    name: str = "counting"
    steps: list = dataclasses.field(default_factory=list)

    def build(self, model, mesh):
        return self

    def measure(self, model):
        self.steps.append(1)
        return {"evaluations": float(len(self.steps))}


class Marker:
    """A statistic that is measured anew before each evaluation."""

    def build(self, plan):
        return lambda model: {"seen": jnp.abs(model.kernel[...]).sum()[None]}


class WithStatistic(Linear):
    def __init__(self, key, width):
        super().__init__(key, width)
        self.seen = nnx.BatchStat(jnp.zeros(1))


class WithStatisticConfig(LinearConfig):
    def build(self, key):
        return WithStatistic(key, self.width)


@pytest.mark.slow
def test_a_run_stopped_in_its_last_step_is_evaluated_when_called_again(run, stopped_in, tmp_path):
    settings = {
        "model": WithStatisticConfig(),
        "statistics": Marker(),
        "sharding_rules": (*RULES, sharding.Rule("seen$")),
        "eval_every_steps": None,
    }
    whole = run(run_dir=str(tmp_path / "whole" / "run"), **settings)
    stopped_in(10, **settings)
    result = run(**settings)
    assert result.validation_loss == whole.validation_loss
    assert [r["step"] for r in records(tmp_path)] == list(range(1, 11))
    saved = [
        reading.load_everything(folder / "run" / "checkpoints" / "10")
        for folder in (tmp_path, tmp_path / "whole")
    ]
    jax.tree.map(np.testing.assert_array_equal, *saved)
    assert saved[0]["params"]["seen"] > 0
    best = [checkpoint.best_step(f / "run" / "checkpoints") for f in (tmp_path, tmp_path / "whole")]
    assert best == [10, 10]
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run(**settings) == result
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_checkpoint_saved_on_request_is_the_best_if_its_evaluation_was(run, stopped_in, tmp_path):
    settings = {
        "num_steps": 12,
        "eval_every_steps": 4,
        "checkpoint": checkpoint.CheckpointConfig(every_steps=4, keep_last=1, best_mode="max"),
    }
    run(run_dir=str(tmp_path / "whole" / "run"), **settings)
    stopped_in(4, **settings)
    run(**settings)
    best = [checkpoint.best_step(f / "run" / "checkpoints") for f in (tmp_path, tmp_path / "whole")]
    assert best == [4, 4]


@dataclasses.dataclass(frozen=True)
class Interfering:
    """A task whose first evaluations do something else."""

    act: Callable[[], object]
    name: str = "interfering"

    def build(self, model, mesh):
        return self

    def measure(self, model):
        self.act()
        return {"norm": float(jnp.linalg.norm(model.kernel[...]))}


class UnreadableData(RandomData):
    """Data whose seventh batch cannot be read."""

    def build(self, *, process_index, process_count):
        return UnreadableBatches(self)


class UnreadableBatches(RandomBatches):
    def __next__(self):
        if self.count == 6:
            raise OSError("broken")
        return super().__next__()


def break_down(*_, **__):
    raise OSError("broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "step"),
    [
        ({"task_evals": [Interfering(break_down)]}, 5),
        ({"report": break_down, "report_every_steps": 3}, 3),
        ({"train_data": UnreadableData()}, 6),
    ],
    ids=["evaluation", "report", "data"],
)
def test_what_fails_between_steps_costs_none_of_them(run, tmp_path, capsys, broken, step):
    settings = {"every_steps": 100, "log_every_steps": 3}
    settings["task_evals"] = [Interfering(lambda: None)]
    run(run_dir=str(tmp_path / "whole" / "run"), **settings)
    with pytest.raises(OSError, match="broken"):
        run(**settings | broken)
    assert reading.steps_in(tmp_path / "run" / "checkpoints") == [step]
    assert f"step {step} is saved" in capsys.readouterr().err
    run(**settings)
    assert_equal_runs(tmp_path, tmp_path / "whole")


def test_steps_that_cannot_be_saved_after_a_failure_are_told(run, monkeypatch):
    monkeypatch.setattr(checkpoint.Checkpointer, "save", break_down)
    with (
        pytest.raises(OSError, match="broken"),
        pytest.warns(match=r"step 6 could not be saved \(OSError: broken\); .* from its start$"),
    ):
        run(train_data=UnreadableData(), every_steps=100)


def assert_equal_runs(folder, other):
    np.testing.assert_array_equal(final_kernel(folder), final_kernel(other))
    clocks = re.compile("second|data_wait")
    ours, theirs = (
        [{k: v for k, v in record.items() if not clocks.search(k)} for record in records(each)]
        for each in (folder, other)
    )
    assert ours == theirs


@pytest.mark.slow
def test_a_stop_does_not_wait_for_an_evaluation_or_a_report(run, tmp_path):
    ended = []

    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # The signal is handled before.
        ended.append(True)

    settings = {"every_steps": 100, "task_evals": [Interfering(lambda: None)]}
    run(run_dir=str(tmp_path / "whole" / "run"), **settings)
    with pytest.raises(Interrupted, match="SIGTERM after step 3, which is saved"):
        run(**settings, report=stop, report_every_steps=3)
    with pytest.raises(Interrupted, match="SIGTERM after step 5, which is saved"):
        run(**settings | {"task_evals": [Interfering(stop)]})
    assert not ended
    assert reading.steps_in(tmp_path / "run" / "checkpoints") == [3, 5]
    with pytest.raises(Interrupted, match="SIGTERM after step 5, which is saved"):
        run(**settings | {"task_evals": [Interfering(stop)]})
    run(**settings)
    assert_equal_runs(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize("steps", quick([(1, 4), (4, 4), (1, 6), (4, 6)], chosen=[(1, 4), (1, 6)]))
def test_a_run_is_evaluated_where_its_data_ends(run, tmp_path, steps):
    log_every_steps, every_steps = steps
    counting = Counting()
    settings = {
        "train_data": RandomData(num_batches=6),
        "eval_every_steps": None,
        "log_every_steps": log_every_steps,
        "every_steps": every_steps,
        "task_evals": [counting],
    }
    result = run(**settings)
    logged = records(tmp_path)
    assert [r["step"] for r in logged] == (
        [1, 2, 3, 4, 5, 6] if log_every_steps == 1 else [1, 4, 6]
    )
    assert result.validation_loss == logged[-1]["validation/loss"] > 0
    assert result.train_loss == logged[-1]["loss"]
    assert checkpoint.best_step(tmp_path / "run" / "checkpoints") == 6
    assert run(**settings) == result
    assert records(tmp_path) == logged
    assert len(counting.steps) == 1


@pytest.mark.slow
def test_the_rate_that_is_logged_is_the_one_used_after_skipped_updates(run, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Spiky(RandomData):
        def build(self, *, process_index, process_count):
            return SpikyBatches(self)

    class SpikyBatches(RandomBatches):
        def __next__(self):
            batch = super().__next__()
            batch["poison"] = np.full(8, 1e4 if self.count in (6, 7) else 1.0, np.float32)
            return batch

    run(
        train_data=Spiky(),
        eval_data=None,
        optimizer=optimizer.SGDConfig(),
        schedule=schedule.Linear(peak=1.0, total_steps=10),
        skip_spikes=SkipSpikes(after_steps=2),
        checkpoint=checkpoint.CheckpointConfig(every_steps=1, keep_last=2),
    )
    logged = records(tmp_path)[-1]
    assert logged["skipped_updates"] == 2
    moved = np.linalg.norm(final_kernel(tmp_path) - final_kernel(tmp_path, step=9))
    assert moved == pytest.approx(logged["learning_rate"] * logged["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_another_metric_is_waited_for_anew(run):
    settings = {"task_evals": [Distance()], "eval_every_steps": 1, "early_stop_evaluations": 2}
    chosen = checkpoint.CheckpointConfig(every_steps=1, best_metric="distance/norm")
    stopped = run(num_steps=40, checkpoint=chosen, **settings).step
    assert stopped < 30
    other = checkpoint.CheckpointConfig(every_steps=1)
    assert run(num_steps=stopped + 2, checkpoint=other, **settings).step == stopped + 2


@pytest.mark.parametrize("call", [train, lambda **settings: dry_run(TrainRun(**settings))])
def test_an_evaluation_batch_that_the_devices_do_not_divide_is_refused(
    run, tmp_path, monkeypatch, call
):
    monkeypatch.setitem(globals(), "train", call)
    with pytest.raises(errors.UserError, match=r"^eval_data\.batch_size=12 must be a multiple"):
        run(eval_data=RandomData(batch_size=12, num_batches=1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("count", "message"), [(0, "data_shards=0 must be at least 1"), (3, "must divide")]
)
def test_shards_that_cannot_be_are_refused_before_the_run_directory_is_made(
    run, tmp_path, count, message
):
    with pytest.raises(errors.UserError, match=message):
        run(data_shards=count)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_whose_validation_loss_is_no_number_is_left_as_it_is(run, tmp_path):
    settings = {
        "num_steps": 2,
        "eval_data": RandomData(seed=1, num_batches=3, poisoned_batch=2),
    }
    first = run(**settings)
    assert np.isnan(first.validation_loss)
    assert str(run(**settings)) == str(first)
    text = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["validation_loss"] == "nan"


def test_all_seeds_of_64_bits_differ():
    def key(seed):
        plan = make_plan(
            StepConfig(
                model=LinearConfig(),
                loss=token_loss,
                optimizer=optimizer.SGDConfig(),
                schedule=schedule.Constant(rate=0.05),
                seed=seed,
                sharding_rules=RULES,
            ),
            batch_size=8,
        )
        return np.asarray(jax.random.key_data(plan.init_key)).tobytes()

    seeds = [0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**62, -1, -(2**63)]
    assert len({key(seed) for seed in seeds}) == len(seeds)


def test_an_average_that_is_added_to_a_run_is_refused_by_its_name(run):
    run(num_steps=1)
    with pytest.raises(errors.UserError, match=r"made without ema.* leave trainer\.train\.ema"):
        run(num_steps=2, ema=EMA())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_any_number_is_better_than_a_first_value_that_is_none(mode):
    patience = Patience(checkpoint.CheckpointConfig(best_mode=mode), 3)
    values = [np.nan, np.nan, 0.5, np.nan, 0.5, np.nan]
    for step, value in enumerate(values, start=1):
        assert not patience.is_exhausted
        patience.add(step, value)
    assert patience.is_exhausted
    assert "since step 3, where it was 0.5000" in patience.text()


def test_values_on_other_evaluation_data_are_not_compared(run, tmp_path, capsys):
    early = {"early_stop_evaluations": 100, "eval_every_steps": 1}
    run(num_steps=3, **early)
    run(num_steps=4, **early)
    folder = tmp_path / "run" / "checkpoints"
    easy = min((r["validation/loss"], r["step"]) for r in records(tmp_path))
    assert easy[1] == checkpoint.best_step(folder) == 4
    assert "is measured on other examples" not in capsys.readouterr().err
    # Targets that the model does not learn: every later loss is higher.
    harder = RandomData(seed=2, num_batches=3, shift=5)
    result = run(num_steps=9, eval_data=harder, **early)
    later = {r["step"]: r["validation/loss"] for r in records(tmp_path) if r["step"] > 4}
    assert min(later.values()) > easy[0]
    best = min(later, key=later.__getitem__)
    assert (result.best_step, result.best_value) == (best, later[best])
    assert checkpoint.best_step(folder) == best
    assert {4, best, 9} <= {*reading.steps_in(folder)}  # The earlier best one is not lost.
    shown = capsys.readouterr().err
    assert shown.count("validation/loss is measured on other examples than after step 4") == 1
    assert f"best {later[best]:.4f} after step {best}" in shown


def test_patience_goes_on_from_a_state_of_its_own_metric_only():
    config = checkpoint.CheckpointConfig(best_metric="sst2/accuracy", best_mode="max")
    patience = Patience(config, 1)
    for step, value in ((1, 0.9), (2, 0.8)):
        patience.add(step, value)
    state = json.loads(json.dumps(patience.state()))
    assert Patience(config, 1, state=state).is_exhausted
    for change in ({"best_metric": "sst2/f1"}, {"best_mode": "min"}):
        other = Patience(dataclasses.replace(config, **change), 1, state=state)
        assert not other.is_exhausted
        assert other.state()["best_step"] == 0
    older = {name: state[name] for name in ("best_step", "best_value", "since")}
    assert Patience(config, 1, state=older).is_exhausted


def test_patience_restarts_where_other_examples_are_measured():
    config = checkpoint.CheckpointConfig()
    patience = Patience(config, 2)
    for step, evaluation in enumerate(["", "a", "a"], start=1):
        assert not patience.add(step, float(step), evaluation)
    assert patience.is_exhausted
    resumed = Patience(config, 2, state=json.loads(json.dumps(patience.state())))
    assert not resumed.add(4, 9.0, "")  # Not known, so not another.
    changed = resumed.add(5, 9.5, "b")
    assert "validation/loss is measured on other examples than after step 1" in changed
    assert (resumed.best_step, resumed.best_value) == (5, 9.5)
    assert not resumed.is_exhausted


def test_settings_of_a_wrong_type_are_told_together_before_anything_is_made(tmp_path):
    settings = counting_run.settings(
        tmp_path / "run",
        num_steps=2,
        eval_num_batches=2.5,
        schedule=0.1,
        train_data=counting_run.Numbers(batch_size=8, num_examples=True),
    )
    with pytest.raises(errors.UserError) as caught:
        train(**settings)
    for words in (
        "eval_num_batches=2.5 must be of type int or NoneType",
        "train_data.num_examples=True must be of type int or NoneType",
        "schedule=0.1 must be of type Schedule",
    ):
        assert words in str(caught.value)
    assert not (tmp_path / "run").exists()


def images_of_digits(**settings):
    sizes = {"batch_size": 2, "image_size": 8, "num_classes": 10}
    return images.ImageDataConfig(**{"source": sources.Digits(), **sizes, **settings})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: checkpoint.CheckpointConfig(every_steps=float("nan")), "every_steps=nan must be"),
        (lambda: checkpoint.CheckpointConfig(keep_last="3"), "keep_last='3' must be of type int"),
        (
            lambda: schedule.InverseSqrt(linear_warmup="no"),
            "linear_warmup='no' must be of type bool",
        ),
        (lambda: schedule.Cosine(peak="0.1", total_steps=9), "Cosine: peak='0.1' must be of type"),
        (lambda: optimizer.SGDConfig(momentum="0.9"), "momentum='0.9' must be of type float"),
        (lambda: EMA(every_steps=1.5), "every_steps=1.5 must be of type int"),
        (
            lambda: TaskEval(task="t", num_examples="all", max_input_length=1, max_length=1),
            "num_examples='all' must be of type int or NoneType",
        ),
        (
            lambda: optimizer.SGDConfig(not_decayed="bias"),
            "not_decayed='bias' must be a list of str",
        ),
        (
            lambda: optimizer.AdafactorConfig(stacked=(None,)),
            r"stacked=\(None,\) must be a list of str",
        ),
        (
            lambda: Augmentation(crop_area=0.5),
            "crop_area=0.5 must be a list of float or N",
        ),
        (lambda: Augmentation(mixup_alpha=float("nan")), "mixup_alpha=nan must be at least 0"),
        (
            lambda: images_of_digits(stddev=("a", "b", "c")),
            r"stddev=\('a', 'b', 'c'\) must be of type float or a list of float",
        ),
        (lambda: images_of_digits(augmentation="no"), "augmentation='no' must be of type Augment"),
        (lambda: images_of_digits(source="digits"), "source='digits' must be of type ImageSource"),
        (lambda: images_of_digits(mean=float("nan")), "mean=nan must be finite"),
        (lambda: sources.Folder(path=1), "path=1 must be of type str"),
        (lambda: sources.Folder(path="photos", channels=2), "channels=2 must be 1"),
        (lambda: Grid(axes=["SEED"]), r"axes=\['SEED'\] must be a dictionary from str to Any"),
        (lambda: EvalConfig(predict="no"), "predict='no' must be of type bool"),
        (lambda: PredictConfig(batch_size=None), "batch_size=None must be at least 1, and an"),
    ],
)
def test_settings_of_a_wrong_type_are_told_where_a_program_makes_them(make, words):
    with pytest.raises(errors.UserError, match=words):
        make()


def test_settings_with_checked_types_are_frozen_dataclasses_and_take_numbers_of_numpy():
    made = schedule.Cosine(peak=np.float32(0.5), total_steps=np.int64(9))
    assert dataclasses.replace(made, peak=0.5) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.peak = 1.0
