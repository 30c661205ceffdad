"""Averages over updates: exact in what they are, saved, restored, and invisible where not kept."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick
from test_vision_training import LOSS, PLAIN, Stripes, batch
from test_vision_training import run as run_stripes

import convt5
from convt5.checkpoints import checkpoint, reading
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.errors import UserError
from convt5.interchange import loading
from convt5.modeling import sharding
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.tree_paths import named_leaves
from convt5.training import optimizer, schedule
from convt5.training.averaging import EMA, ScaledEMA
from convt5.training.losses import TextLoss
from convt5.training.plan import make_plan
from convt5.training.train_step import StepConfig
from convt5.vision import placement
from convt5.vision.images import ImageDataConfig
from convt5.vision.statistics import Reestimate


def by_hand(values, *, share, every_steps, warmup_steps):
    """The averages after each update, one number at a time."""
    average, found = np.float64(values[0]), []
    for update, value in enumerate(values[1:]):
        if update % every_steps == 0:
            newest = 1.0 if update < warmup_steps else share
            average = (1 - newest) * average + newest * value
        found.append(average)
    return found


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_an_average_is_that_of_its_definition(values, decay, every_steps, warmup_steps):
    ema = EMA(decay=decay, every_steps=every_steps, warmup_steps=warmup_steps)
    average, found = {"x": jnp.float32(values[0])}, []
    for update, value in enumerate(values[1:]):
        average = ema.after(jnp.int32(update), average, {"x": jnp.float32(value)})
        found.append(float(average["x"]))
    share = 1 - decay**every_steps
    expected = by_hand(values, share=share, every_steps=every_steps, warmup_steps=warmup_steps)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_average_over_many_updates_is_neither_too_small_nor_too_large():
    draw = np.random.default_rng(0)
    mean = draw.normal(size=64)
    ema = EMA(decay=0.9999)

    def update(average, step):
        noise = jax.random.normal(jax.random.key(step), (64,))
        model = jnp.float32(mean) * (1 + 0.05 * noise)
        return ema.after(step, average, model), model

    average, models = jax.lax.scan(update, jnp.float32(mean), jnp.arange(20_000, dtype=jnp.int32))
    exact = mean
    for model in np.asarray(models, np.float64):
        exact = 0.9999 * exact + 0.0001 * model
    np.testing.assert_allclose(average, exact, rtol=2e-5)


def test_the_average_of_the_paper_takes_more_the_larger_the_batch_and_the_rarer_its_changes():
    assert ScaledEMA(batch_size=2048, num_epochs=400).share == pytest.approx(1.6384e-3)
    assert ScaledEMA(batch_size=2048, num_epochs=1, factor=1.0).share == 1.0
    ema = ScaledEMA(batch_size=10, num_epochs=2, factor=0.01, every_steps=4)
    moved = [float(ema.after(jnp.int32(i), jnp.float32(0), jnp.float32(1))) for i in range(5)]
    assert moved == pytest.approx([0.2, 0, 0, 0, 0.2])


def test_during_warm_up_the_average_is_the_model_bit_for_bit():
    model = {"x": jax.random.normal(jax.random.key(0), (50,))}
    found = EMA(warmup_steps=2).after(jnp.int32(1), {"x": jnp.full(50, 0.1)}, model)
    np.testing.assert_array_equal(found["x"], model["x"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(decay=1.0), r"decay=1.0 must be in \[0, 1\)"),
        (lambda: EMA(every_steps=0), "every_steps=0 must be an integer of at least 1"),
        (lambda: EMA(warmup_steps=-1), "warmup_steps=-1 must be an integer of at least 0"),
        (lambda: EMA(warmup_steps=2**31), "warmup_steps=2147483648 must be less than 2147483648"),
        (lambda: EMA(every_steps=2**31), "every_steps=2147483648 must be less than 2147483648"),
        (
            lambda: ScaledEMA(batch_size=1, num_epochs=1, warmup_steps=2**31),
            "warmup_steps=2147483648 must be less than 2147483648",
        ),
        (lambda: ScaledEMA(batch_size=0, num_epochs=1), "batch_size=0"),
        (lambda: ScaledEMA(batch_size=1, num_epochs=1, factor=0.0), "factor=0.0 must be positive"),
    ],
)
def test_averages_that_cannot_be_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


@functools.cache
def plan(ema=None, mesh=(1, 1, 1)):
    data, fsdp, tensor = mesh
    return make_plan(
        StepConfig(
            model=PLAIN,
            loss=LOSS,
            optimizer=optimizer.SGDConfig(),
            schedule=schedule.Constant(rate=0.1),
            mesh=sharding.MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
            sharding_rules=placement.rules(),
            ema=ema,
        ),
        batch_size=16,
        devices=jax.devices()[: data * fsdp * tensor],
    )


def names(tree) -> list[str]:
    return [name for name, _ in named_leaves(tree)]


@pytest.mark.parametrize("mesh", quick([(1, 1, 1), (2, 2, 2)], chosen=[]))
def test_parameters_and_statistics_are_averaged_and_the_model_trains_as_without(mesh):
    chosen, plain = plan(EMA(decay=0.5), mesh), plan(mesh=mesh)
    state, alone = chosen.init_state(), plain.init_state()
    averages = {name: np.asarray(leaf) for name, leaf in named_leaves(state.ema)}
    assert names(state.ema) == names(state.model)
    for seed in range(2):
        placed = jax.device_put(batch(seed), chosen.batch_sharding)
        state, _ = chosen.train_step(state, placed)
        alone, _ = plain.train_step(alone, placed)
        for name, leaf in named_leaves(state.model):
            averages[name] = 0.5 * averages[name] + 0.5 * np.asarray(leaf)
    assert any(name.endswith("norm/variance") for name in averages)
    for name, leaf in named_leaves(state.ema):
        np.testing.assert_allclose(leaf, averages[name], rtol=1e-5, atol=1e-7, err_msg=name)
    for (name, a), b in zip(named_leaves(state.model), jax.tree.leaves(alone.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_without_an_average_step_and_checkpoint_are_as_if_there_were_none(tmp_path):
    state = plan().init_state()
    assert state.ema is None
    assert not any("ema" in name.split("/") for name in names(state))
    more = names(plan(EMA()).abstract)
    assert len(more) == len(names(plan().abstract)) + len(names(state.model))
    saved = saved_names(tmp_path, state)
    assert set(saved) == {"params", "optimizer"}
    assert not any(name.startswith("ema/") for name in saved["optimizer"])


def saved_names(folder, state) -> dict[str, list[str]]:
    checkpointer = Checkpointer(folder, CheckpointConfig(), model_config=PLAIN)
    checkpointer.save(1, state, data=DataPositions())
    checkpointer.wait()
    checkpointer.close()
    about = json.loads((folder / "1" / "about" / "metadata").read_text())
    return {part: list(about[part]) for part in ("params", "optimizer")}


def ema_run(folder, **changes):
    data = ImageDataConfig(
        source=Stripes(), batch_size=16, image_size=8, in_channels=1, num_classes=3, seed=5
    )
    known = {
        "model": PLAIN,
        "ema": EMA(decay=0.9),
        "statistics": Reestimate(data=data, num_batches=2),
        "checkpoint": checkpoint.CheckpointConfig(every_steps=4, best_metric="ema/validation/loss"),
    }
    return run_stripes(folder, **known | changes)


def loaded(folder, *, ema):
    abstract = jax.eval_shape(PLAIN.build, jax.random.key(0))
    return reading.load_params(folder, abstract, ema=ema)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_a_run_that_continues_has_the_average_exactly(tmp_path):
    ema_run(tmp_path / "whole", num_steps=9)
    ema_run(tmp_path / "parts", num_steps=5)
    ema_run(tmp_path / "parts", num_steps=9)
    for ema in (False, True):
        models = [loaded(tmp_path / n, ema=ema) for n in ("whole", "parts")]
        jax.tree.map(np.testing.assert_array_equal, *models)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_raw_and_averaged_metrics_are_reported_and_the_average_is_loaded(tmp_path):
    result = ema_run(tmp_path, num_steps=5)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation/loss"] == result.validation_loss != last["ema/validation/loss"]
    assert {"ema/validation/accuracy", "ema/validation/top_5_accuracy"} <= last.keys()
    model, average = (convt5.load_model(tmp_path, ema=ema) for ema in (False, True))
    (note,) = loading.read_run(tmp_path).report.notes
    assert "not the run's moving average" in note
    images = batch()["images"]
    assert np.abs(model(images).logits - average(images).logits).max() > 1e-5
    for stats in (model.stem.layers[0].norm.mean, average.stem.layers[0].norm.mean):
        assert np.abs(stats[...]).max() > 0


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_a_run_without_an_average_is_named_where_one_is_wanted(tmp_path):
    run_stripes(tmp_path, model=PLAIN, num_steps=1)
    with pytest.raises(UserError, match="holds no moving average of the parameters"):
        convt5.load_model(tmp_path, ema=True)
    with pytest.raises(UserError, match=r"best_metric='ema/validation/loss' is never recorded"):
        ema_run(tmp_path / "b", ema=None)
    with pytest.raises(UserError, match="was made without ema, but the run now continues with ema"):
        run_stripes(tmp_path, model=PLAIN, num_steps=2, ema=EMA())


def test_a_start_from_other_parameters_averages_from_these():
    state = plan(EMA()).init_state()
    other = jax.tree.map(lambda x: x + 1, state.model)
    started = state.starting_with(other)
    jax.tree.map(np.testing.assert_array_equal, started.ema, other)
    assert dataclasses.replace(state, ema=None).starting_with(other).ema is None


@pytest.mark.nightly
@pytest.mark.slow
def test_a_text_model_is_averaged_as_well():
    stack = StackConfig(num_layers=1, mixing="dynamic", kernel_size=3, num_kernels=2)
    config = ConvT5Config(
        vocab_size=16,
        emb_dim=8,
        mlp_dim=8,
        num_heads=2,
        head_dim=4,
        dtype="float32",
        encoder=stack,
        decoder=stack,
    )
    chosen = make_plan(
        StepConfig(
            model=config,
            loss=TextLoss(),
            optimizer=optimizer.AdafactorConfig(),
            schedule=schedule.Constant(rate=0.1),
            ema=EMA(decay=0.75),
        ),
        batch_size=2,
        devices=jax.devices()[:1],
    )
    state = chosen.init_state()
    before = jax.device_get(state.ema)
    tokens = np.ones((2, 6), np.int32)
    text = {
        "encoder_input_tokens": tokens,
        "decoder_input_tokens": tokens,
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": np.ones((2, 6), np.int32),
    }
    state, _ = chosen.train_step(state, jax.device_put(text, chosen.batch_sharding))
    jax.tree.map(
        lambda ema, old, new: np.testing.assert_allclose(ema, 0.75 * old + 0.25 * new, atol=1e-6),
        jax.device_get(state.ema),
        before,
        jax.device_get(state.model),
    )
