"""One update: the same on every mesh and however it is cut, compiled once, never made if broken."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick
from test_model import VOCAB, tiny_config

from convt5.modeling.architecture import StackConfig
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import MeshConfig, Rule, batch_sharding, token_sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, SGDConfig
from convt5.training.schedule import Constant, InverseSqrt
from convt5.training.train_state import abstract_state, make_init_state, new_state, state_shardings
from convt5.training.train_step import (
    LossSums,
    StepConfig,
    describe_nonfinite,
    make_eval_step,
    make_train_step,
)

ONE_DEVICE = MeshConfig(data=1)
MESHES = {
    "8x1": MeshConfig(data=8),
    "4x2": MeshConfig(data=4, tensor=2),
    "2x4": MeshConfig(data=2, tensor=4),
    "2x2x2": MeshConfig(data=2, fsdp=2, tensor=2),
}


def build_mesh(config: MeshConfig):
    size = math.prod(dataclasses.astuple(config))
    return config.build(jax.devices()[:size])


# --- A small model, compiled in a moment ---------------------------------------------------------


class TwoLayers(nnx.Module):
    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.first = nnx.Param(0.3 * jax.random.normal(keys[0], (8, 8)))
        self.second = nnx.Param(0.3 * jax.random.normal(keys[1], (8, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ self.first[...]) @ self.second[...])


class TwoLayersConfig:
    def build(self, key: jax.Array) -> TwoLayers:
        return TwoLayers(key)


def weighted_squares(model, batch, *, dropout_key=None) -> LossSums:
    squares = jnp.sum(jnp.square(model(batch["x"]) - batch["y"]), axis=-1)
    if dropout_key is not None and "noise" in batch:
        squares += batch["noise"] * jax.random.uniform(dropout_key, squares.shape)
    total, weight = jnp.sum(squares * batch["weight"]), jnp.sum(batch["weight"])
    largest = (jnp.sum(jnp.max(jnp.abs(batch["x"]), axis=-1)), jnp.float32(batch["x"].shape[0]))
    return LossSums(total, weight, {"largest": largest})


def squares_batch(rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.normal(size=(rows, 8)).astype(np.float32),
        # Uneven on purpose: a mean of means over devices or parts would differ.
        "weight": rng.integers(0, 5, rows).astype(np.float32),
    }


def run_small(
    batch,
    *,
    mesh: MeshConfig = ONE_DEVICE,
    optimizer=None,
    steps: int = 1,
    seed: int = 0,
    first_step: int = 0,
    rate: float = 0.1,
    **options,
):
    """Returns the jitted step, the final state and the metrics of each step."""
    config = StepConfig(
        model=TwoLayersConfig(),
        loss=weighted_squares,
        optimizer=optimizer or SGDConfig(),
        schedule=Constant(rate=rate),
        **options,
    )
    transformation = config.optimizer.build(config.schedule)
    rules = [Rule("first$", ("fsdp", "tensor")), Rule("second$", ("tensor", "fsdp"))]
    placed = build_mesh(mesh)
    shardings = state_shardings(abstract_state(TwoLayersConfig(), transformation), placed, rules)
    state = new_state(TwoLayersConfig(), transformation, jax.random.key(0))
    state = dataclasses.replace(state, step=jnp.int32(first_step))
    state = jax.device_put(state, shardings)
    where, key = batch_sharding(placed), jax.random.key(seed)
    step = make_train_step(config, transformation, shardings, where, seed_key=key)
    metrics = []
    for _ in range(steps):
        state, latest = step(state, jax.device_put(batch, batch_sharding(placed)))
        metrics.append(jax.device_get(latest))
    return step, jax.device_get(state), metrics


def assert_same_model(found, expected):
    for (name, a), (_, b) in zip(named_leaves(found), named_leaves(expected), strict=True):
        # Sums over devices or parts are added in another order: float32 rounding, no more.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)


def assert_same_state(found, expected):
    assert_same_model(found.model, expected.model)
    for (name, a), (_, b) in zip(
        named_leaves(found.opt_state), named_leaves(expected.opt_state), strict=True
    ):
        # Squares of sums, whose rounding is that of their terms: small beside the largest.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max(), err_msg=name)


ACCUMULATED = [(ONE_DEVICE, 2), (ONE_DEVICE, 8), (MESHES["4x2"], 2), (MESHES["2x2x2"], 2)]


@pytest.mark.parametrize("case", quick(ACCUMULATED, chosen=ACCUMULATED[1::2]), ids=str)
def test_accumulated_gradients_make_the_same_update(case):
    mesh, parts = case
    batch = squares_batch()
    _, expected, expected_metrics = run_small(batch)
    _, found, metrics = run_small(batch, mesh=mesh, grad_accum_steps=parts)
    assert_same_model(found.model, expected.model)
    for name, value in expected_metrics[0].items():
        np.testing.assert_allclose(metrics[0][name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("rows", [8, 16])
def test_gradients_are_right_where_all_three_mesh_axes_split(rows):
    # Without explicit gathering, jaxlib 0.10.2 gets these sizes wrong by as much as the gradient.
    batch = squares_batch(rows)
    _, expected, _ = run_small(batch)
    _, found, _ = run_small(batch, mesh=MESHES["2x2x2"])
    assert_same_model(found.model, expected.model)


def test_metrics_are_means_over_the_whole_batch():
    batch = squares_batch()
    model = TwoLayers(jax.random.key(0))
    squares = np.sum(np.square(np.asarray(model(batch["x"])) - batch["y"]), axis=-1)
    _, _, (metrics,) = run_small(batch)
    weight = batch["weight"].sum()
    expected = {
        "loss": (squares * batch["weight"]).sum() / weight,
        "largest": np.abs(batch["x"]).max(axis=-1).mean(),
        "loss_weight": weight,
        "learning_rate": 0.1,
        "param_norm": np.sqrt(sum(np.square(p).sum() for p in jax.tree.leaves(model))),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert metrics["all_finite"]
    assert metrics["grad_norm"] > 0


def test_a_batch_without_any_weight_changes_nothing_but_the_step():
    batch = squares_batch()
    batch["weight"][:] = 0
    _, before, _ = run_small(batch, steps=0)
    _, after, (metrics,) = run_small(batch)
    assert int(after.step) == 1
    assert metrics["loss"] == 0
    assert metrics["all_finite"]
    assert_same_model(after.model, before.model)


def test_random_numbers_depend_on_seed_and_step_only():
    batch = {**squares_batch(), "noise": np.ones(16, np.float32)}
    losses = lambda **o: [float(m["loss"]) for m in run_small(batch, **o)[2]]  # noqa: E731
    frozen = SGDConfig(max_grad_norm=1e-20)
    first, second = losses(steps=2, optimizer=frozen)
    assert first != second
    assert losses(optimizer=frozen, first_step=1) == [second]
    assert losses(optimizer=frozen, seed=1) != [first]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_that_is_not_finite_is_told_with_the_gradient(parts):
    batch = squares_batch()
    batch["y"][3, 2] = np.inf
    _, after, (metrics,) = run_small(batch, optimizer=AdafactorConfig(), grad_accum_steps=parts)
    assert not metrics["all_finite"]
    assert not np.isfinite(metrics["loss"])
    assert describe_nonfinite(metrics, after.model) == "gradient of parameter first"


def test_an_update_that_overflows_is_told():
    config = SGDConfig(weight_decay=1e30)
    _, after, (metrics,) = run_small(squares_batch(), optimizer=config, rate=1e30)
    assert np.isfinite(metrics["loss"])
    assert not metrics["all_finite"]
    message = "the updated parameters or optimizer state"
    assert describe_nonfinite(metrics, after.model) == message


def test_no_step_is_finite_after_one_that_was_not():
    """States are updated in place: what comes after must not look sound."""
    batch = squares_batch()
    config = SGDConfig(weight_decay=1e30)
    _, after, metrics = run_small(batch, steps=3, optimizer=config, rate=1e30)
    assert [bool(one["all_finite"]) for one in metrics] == [False] * 3
    assert describe_nonfinite(metrics[1], after.model) == "parameter first"


@pytest.mark.parametrize(
    ("index", "message"),
    [(-1, None), (1, "parameter second"), (2, "gradient of parameter first"), (4, "the loss")],
)
def test_the_index_of_what_is_not_finite_is_explained(index, message):
    model = abstract_state(TwoLayersConfig(), SGDConfig().build(Constant(rate=1.0))).model
    assert describe_nonfinite({"nonfinite_index": np.int32(index)}, model) == message


def test_evaluation_has_no_random_numbers_and_its_sums_add_up():
    batch = {**squares_batch(), "noise": np.ones(16, np.float32)}
    model = TwoLayers(jax.random.key(0))
    placed = build_mesh(MESHES["8x1"])
    whole = batch_sharding(placed)
    state = abstract_state(TwoLayersConfig(), SGDConfig().build(Constant(rate=1.0)))
    shardings = state_shardings(state, placed, [Rule("first|second")])
    evaluate = make_eval_step(weighted_squares, shardings.model, whole)
    model_on_mesh = jax.device_put(model, shardings.model)
    halves = [{k: v[i::2] for k, v in batch.items()} for i in (0, 1)]
    sums = [evaluate(model_on_mesh, jax.device_put(half, whole)) for half in halves]
    total = jax.tree.map(jnp.add, *sums).means()
    expected = weighted_squares(model, batch).means()
    np.testing.assert_allclose(total["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(total["largest"], expected["largest"], rtol=1e-5)


# --- The real model ------------------------------------------------------------------------------


def text_config(**overrides):
    """Every mixing that communicates in its own way, Canon layers at every place, and heads and
    channels that 8 divides."""
    encoder = StackConfig(
        num_layers=2,
        mixing=("dynamic", "attention"),
        kernel_size=3,
        num_kernels=4,
        dilation=2,
        tap_dropout_rate=overrides.get("dropout_rate", 0.0),
        canon=("AD", "BC"),
        canon_padding="CENTERED",
    )
    decoder = StackConfig(
        num_layers=1,
        mixing="lightweight",
        kernel_size=4,
        num_kernels=2,
        canon="ABCD",
        canon_kernel_size=3,
        canon_dilation=2,
        canon_bias=True,
        canon_activation="silu",
    )
    settings = {"emb_dim": 16, "num_heads": 8, "head_dim": 2, "positions": "relative"}
    return tiny_config(**{**settings, "encoder": encoder, "decoder": decoder, **overrides})


def text_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    source = rng.integers(1, VOCAB, (16, 16), dtype=np.int32)
    target = rng.integers(1, VOCAB, (16, 8), dtype=np.int32)
    weights = np.ones_like(target)
    source[::3, 10:] = 0
    target[::2, 5:] = weights[::2, 5:] = 0
    ids = {"encoder": 1 + (np.arange(16) > 6)[None], "decoder": 1 + (np.arange(8) > 2)[None]}
    return {
        "encoder_input_tokens": source,
        "decoder_input_tokens": np.pad(target[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": target,
        "decoder_loss_weights": weights,
        "encoder_segment_ids": (ids["encoder"] * (source != 0)).astype(np.int32),
        "decoder_segment_ids": (ids["decoder"] * (target != 0)).astype(np.int32),
    }


ADAFACTOR = AdafactorConfig(min_dim_to_factor=8)


def run_text(
    config,
    mesh: MeshConfig,
    state,
    schedule,
    *,
    made_by=ADAFACTOR,
    steps: int = 1,
    batch=None,
    **options,
):
    """Returns the jitted step, the final state and the metrics of each step."""
    optimizer = made_by.build(schedule)
    placed = build_mesh(mesh)
    shardings = state_shardings(abstract_state(config, optimizer), placed, TEXT_RULES)
    if state is None:
        make = functools.partial(new_state, config, optimizer)
        state = make_init_state(make, shardings)(jax.random.key(0))
    tokens = token_sharding(placed)
    update = StepConfig(
        model=config,
        loss=TextLoss(z_loss=1e-4),
        optimizer=made_by,
        schedule=schedule,
        **options,
    )
    step = make_train_step(update, optimizer, shardings, tokens, seed_key=jax.random.key(1))
    state = jax.device_put(state, shardings)
    batch = jax.device_put(text_batch() if batch is None else batch, tokens)
    metrics = []
    for _ in range(steps):
        state, latest = step(state, batch)
        metrics.append(jax.device_get(latest))
    return step, jax.device_get(state), metrics


CONFIGS = {
    "relative": text_config(dropout_rate=0.1),
    "learned": text_config(
        positions="learned",
        max_positions=16,
        hide_start_token=True,
        encoder=StackConfig(num_layers=1, mixing="depthwise", kernel_size=3, dilation=5),
        decoder=StackConfig(num_layers=2, mixing=("dynamic", "attention"), kernel_size=3),
    ),
}


# Adafactor takes half of the compilation.
OPTIMIZERS = {"adafactor": (ADAFACTOR, InverseSqrt()), "sgd": (SGDConfig(), Constant(rate=1.0))}


@functools.cache
def one_device_update(name: str, optimizer: str):
    made_by, schedule = OPTIMIZERS[optimizer]
    start = new_state(CONFIGS[name], made_by.build(schedule), jax.random.key(0))
    start = jax.device_get(start)
    run = run_text(CONFIGS[name], ONE_DEVICE, start, schedule, made_by=made_by, steps=2)
    return start, run[1:]


def check_update_of_the_model(name: str, mesh: MeshConfig, optimizer="adafactor", **options):
    start, (expected, expected_metrics) = one_device_update(name, optimizer)
    made_by, schedule = OPTIMIZERS[optimizer]
    options |= {"made_by": made_by, "steps": 2}
    _, found, metrics = run_text(CONFIGS[name], mesh, start, schedule, **options)
    for before, after in zip(expected_metrics, metrics, strict=True):
        assert before.keys() == after.keys()
        for key in before:
            np.testing.assert_allclose(after[key], before[key], rtol=1e-5, err_msg=key)
    assert_same_state(found, expected)


# Each pair of axes shares an array somewhere; the first leaves one head to each device.
UPDATES = [
    ("relative", MeshConfig(data=1, tensor=8), "sgd"),
    ("relative", MeshConfig(data=2, fsdp=2, tensor=2), "adafactor"),
    ("relative", MeshConfig(data=1, sequence=2, tensor=4), "sgd"),
    ("relative", MeshConfig(data=1, fsdp=2, sequence=4), "sgd"),
    ("learned", MeshConfig(data=4, sequence=2), "adafactor"),
]


@pytest.mark.parametrize("case", quick(UPDATES, chosen=[]), ids=str)
def test_an_update_of_the_model_is_the_same_on_every_mesh(case):
    check_update_of_the_model(*case)


@pytest.mark.nightly
def test_accumulated_gradients_are_the_same_where_rows_are_split():
    # Without dropout, of which each microbatch has its own.
    mesh = MeshConfig(data=2, fsdp=1, sequence=2, tensor=2)
    check_update_of_the_model("learned", mesh, grad_accum_steps=2)


@pytest.mark.slow
def test_a_tiny_model_learns_one_batch_by_heart_with_one_compilation():
    config = text_config(
        encoder=StackConfig(num_layers=1, mixing="dynamic", kernel_size=3, num_kernels=4),
        decoder=StackConfig(num_layers=1, mixing="lightweight", kernel_size=4, num_kernels=2),
    )
    batch = {name: rows[:8] for name, rows in text_batch().items()}
    step, _, metrics = run_text(
        config, ONE_DEVICE, None, Constant(rate=0.05), steps=100, batch=batch
    )
    losses = [float(m["loss"]) for m in metrics]
    assert losses[0] > math.log(VOCAB) - 0.5  # Nothing was known before.
    assert losses[-1] < 0.1
    assert step._cache_size() == 1
