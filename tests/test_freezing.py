"""Frozen parameters stay as they are, cost no gradient and no memory; all others are as without."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest
import tiny_run
from flax import nnx
from quick import quick
from test_model import tiny_config
from test_train_step import MESHES, ONE_DEVICE, build_mesh, text_batch, text_config

from convt5 import errors
from convt5.checkpoints.checkpoint import CheckpointConfig
from convt5.data.prefetching import position, split_position
from convt5.interchange import loading
from convt5.modeling.architecture import StackConfig
from convt5.modeling.model import ConvT5
from convt5.modeling.tree_paths import matches, named_leaves
from convt5.training import freezing, schedule
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, AdamWConfig, SGDConfig
from convt5.training.plan import make_plan
from convt5.training.train_state import abstract_state, parameters
from convt5.training.train_step import StepConfig
from convt5.training.trainer import train

RATE = schedule.Constant(rate=0.1)
ENCODER = ("^encoder/", "token_embedder")


WITHOUT_CANON = {
    "encoder": StackConfig(num_layers=2, mixing=("dynamic", "attention"), kernel_size=3),
    "decoder": StackConfig(num_layers=1, mixing="lightweight", kernel_size=4, num_kernels=2),
}
"""Layers of several kinds that compile in half the time of those of `text_config`."""


def plan_of(*, mesh=ONE_DEVICE, optimizer=None, frozen=(), **model):
    size = build_mesh(mesh).size
    return make_plan(
        StepConfig(
            model=text_config(**WITHOUT_CANON | model),
            loss=TextLoss(),
            optimizer=optimizer or SGDConfig(momentum=0.9),
            schedule=RATE,
            mesh=mesh,
            frozen=frozen,
        ),
        batch_size=16,
        devices=jax.devices()[:size],
    )


class Update(NamedTuple):
    """Named parameters before and after one update, and what it returned and cost."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]
    flops: float
    argument_bytes: int


def one_update(**settings) -> Update:
    plan = plan_of(**settings)
    state = plan.init_state()
    before = jax.device_get(dict(named_leaves(state.model)))
    batch = jax.device_put(text_batch(), plan.batch_sharding)
    compiled = plan.train_step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    return Update(
        before,
        jax.device_get(dict(named_leaves(state.model))),
        jax.device_get(metrics),
        compiled.cost_analysis()["flops"],
        compiled.memory_analysis().argument_size_in_bytes,
    )


@pytest.fixture(scope="module")
def all_trained():
    return one_update()


@pytest.fixture(scope="module")
def encoder_frozen():
    return one_update(frozen=ENCODER)


@pytest.mark.parametrize("frozen", quick([ENCODER, (r"/layers/0/",)], chosen=[ENCODER]))
@pytest.mark.slow
def test_frozen_parameters_stay_and_others_change_as_ever(all_trained, encoder_frozen, frozen):
    if frozen == ENCODER:
        update = encoder_frozen
    else:
        update = one_update(frozen=frozen, mesh=MESHES["2x2x2"])
    squares = 0.0
    for name, value in update.after.items():
        if matches(name, frozen):
            np.testing.assert_array_equal(value, update.before[name], err_msg=name)
        else:
            expected = all_trained.after[name]
            np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)
            squares += np.sum(np.square((update.before[name] - value) / 0.1))
    assert update.metrics["all_finite"]
    np.testing.assert_allclose(update.metrics["grad_norm"], np.sqrt(squares), rtol=1e-4)


@pytest.mark.slow
def test_a_pattern_may_freeze_one_of_two_layers_that_are_scanned_together():
    stack = StackConfig(num_layers=3, mixing="depthwise", kernel_size=3)
    settings = {"encoder": tiny_run.STACK, "decoder": stack, "scan_layers": True}
    before, after, *_ = one_update(frozen=["^decoder/layers/1/"], **settings)
    changed = {name for name in after if not np.array_equal(after[name], before[name])}
    layers = {name.split("/")[2] for name in changed if name.startswith("decoder/layers/")}
    assert layers == {"0", "2"}


@pytest.mark.parametrize("optimizer", [AdafactorConfig(), AdamWConfig(), SGDConfig(momentum=0.9)])
def test_the_optimizer_remembers_nothing_of_frozen_parameters(optimizer):
    state = abstract_state(text_config(**WITHOUT_CANON), optimizer.build(RATE), frozen=ENCODER)
    names = [name for name, _ in named_leaves(state.opt_state)]
    assert any("decoder/layers" in name for name in names)
    assert not any("encoder/layers" in name or "token_embedder" in name for name in names)
    assert not any(matches(name, ENCODER) for name, _ in named_leaves(parameters(state.model)))


@pytest.mark.slow
def test_weight_decay_leaves_frozen_parameters_alone():
    optimizer = AdamWConfig(weight_decay=0.5)
    small = {"encoder": tiny_run.STACK, "decoder": tiny_run.STACK}
    before, after, *_ = one_update(optimizer=optimizer, frozen=["^encoder/"], **small)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith("encoder/")}


@pytest.mark.slow
def test_a_frozen_encoder_saves_operations_and_memory(all_trained, encoder_frozen):
    assert encoder_frozen.flops < 0.85 * all_trained.flops
    plan = plan_of(frozen=ENCODER)
    saved = 4 * (plan.num_parameters() - plan.num_trained())  # The momentum in float32.
    assert all_trained.argument_bytes - encoder_frozen.argument_bytes == saved


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (["encodr"], r"train: frozen: 'encodr' matches no parameter; correct it. There are, for"),
        (["("], r"train: frozen: '\(' is no regular expression"),
        ("^encoder", r"frozen='\^encoder' must be a list of regular expressions"),
        (["."], r"frozen=\['.'\] leaves nothing to train; name fewer parameters"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(frozen, message):
    with pytest.raises(errors.UserError, match=message):
        plan_of(frozen=frozen)


def test_a_model_without_frozen_parameters_is_left_alone():
    model = tiny_config().build(jax.random.key(0))
    structure = jax.tree.structure(model)
    assert jax.tree.structure(freezing.freeze(model, ())) == structure


@pytest.mark.nightly
@pytest.mark.slow
def test_placement_and_values_do_not_depend_on_what_is_frozen():
    whole = plan_of(mesh=MESHES["2x2x2"])
    part = plan_of(mesh=MESHES["2x2x2"], frozen=ENCODER)
    shardings = dict(named_leaves(whole.shardings.model))
    assert dict(named_leaves(part.shardings.model)) == shardings
    values = dict(named_leaves(jax.device_get(whole.init_state().model)))
    for name, value in named_leaves(jax.device_get(part.init_state().model)):
        np.testing.assert_array_equal(value, values[name])


# --- Runs ----------------------------------------------------------------------------------------


class Rows:
    """The same batch again and again."""

    token_bytes = None

    def __init__(self):
        self.count = 0

    def __next__(self):
        self.count += 1
        return text_batch()

    def get_state(self):
        return position(self.count.to_bytes(8))

    def set_state(self, state):
        snapshot, skip = split_position(state)
        self.count = int.from_bytes(snapshot) + skip


@dataclasses.dataclass(frozen=True)
class RowsData:
    batch_size: int = 16
    num_epochs: int | None = None

    def build(self, *, process_index, process_count):
        return Rows()


@pytest.fixture
def run(tmp_path, shared_steps):
    def call(name, **changes):
        settings = {
            "run_dir": str(tmp_path / name),
            "model": dataclasses.replace(tiny_run.CONFIG, dropout_rate=0.1),
            "loss": TextLoss(),
            "train_data": RowsData(),
            "optimizer": AdafactorConfig(min_dim_to_factor=8),
            "schedule": schedule.Constant(rate=0.05),
            "checkpoint": CheckpointConfig(every_steps=2),
            "num_steps": 4,
            "frozen": ENCODER,
        }
        return train(**settings | changes)

    return call


@pytest.mark.slow
def test_a_run_with_frozen_parameters_continues_exactly_and_is_a_model_as_any(run, capsys):
    whole = run("whole")
    assert "trained) on 8 x cpu" in capsys.readouterr().err
    model = loading.load_model(whole.run_dir)
    run("parts", num_steps=2)
    parts = run("parts")
    for (name, a), (_, b) in zip(
        named_leaves(model), named_leaves(loading.load_model(parts.run_dir)), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert isinstance(model, ConvT5)
    assert not any(isinstance(x, freezing.Frozen) for _, x in nnx.iter_graph(model))
    assert whole.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(model))


@pytest.mark.slow
def test_a_run_cannot_change_what_is_frozen(run):
    plain = {"model": tiny_run.CONFIG, "optimizer": SGDConfig(momentum=0.9)}
    run("a", **plain, num_steps=2)
    with pytest.raises(errors.UserError, match="frozen"):
        run("a", **plain, frozen=(), num_steps=6)
