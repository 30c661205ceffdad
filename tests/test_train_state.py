"""The train state: its tree of names, its making on a mesh, and one application of gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from convt5.analysis import collectives
from convt5.modeling.layers import Dense, build_layers
from convt5.modeling.sharding import MeshConfig, Rule
from convt5.modeling.tree_paths import named_leaves
from convt5.training.optimizer import AdafactorConfig, AdamWConfig, SGDConfig
from convt5.training.schedule import Constant, Linear
from convt5.training.train_state import (
    abstract_state,
    make_init_state,
    new_state,
    parameters,
    state_shardings,
    with_parameters,
)

RULES = [Rule(r"kernel$", ("fsdp", "tensor")), Rule(r"bias$", ("tensor",))]
OPTIMIZER = SGDConfig(momentum=0.9).build(Constant(rate=0.5))


class Layer(nnx.Module):
    def __init__(self, key: jax.Array):
        self.kernel = nnx.Param(jax.random.normal(key, (4, 4)))
        self.value = nnx.Param(jnp.zeros(4))


class Pair(nnx.Module):
    def __init__(self, key: jax.Array):
        self.layers = nnx.List([Layer(k) for k in jax.random.split(key, 2)])
        self.bias = nnx.Param(jnp.zeros(4))


class PairConfig:
    def build(self, key: jax.Array) -> Pair:
        return Pair(key)


def test_names_are_the_same_in_a_module_and_in_the_dict_of_its_parameters():
    model = Pair(jax.random.key(0))
    names = {"layers/0/kernel", "layers/0/value", "layers/1/kernel", "layers/1/value", "bias"}
    assert {name for name, _ in named_leaves(model)} == names
    assert {name for name, _ in named_leaves(parameters(model))} == names


def test_parameters_go_into_a_model_and_come_out_unchanged():
    model = Pair(jax.random.key(0))
    doubled = jax.tree.map(lambda x: 2 * x, parameters(model))
    other = with_parameters(model, doubled)
    jax.tree.map(np.testing.assert_array_equal, parameters(other), doubled)
    np.testing.assert_array_equal(2 * model.layers[1].kernel[...], other.layers[1].kernel[...])


def test_the_abstract_state_has_the_shapes_of_the_real_one_and_no_arrays():
    abstract = abstract_state(PairConfig(), OPTIMIZER)
    real = new_state(PairConfig(), OPTIMIZER, jax.random.key(0))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    shape = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(shape, parameters(abstract.model)) == jax.tree.map(
        shape, parameters(real.model)
    )
    assert jax.tree.map(shape, abstract.opt_state) == jax.tree.map(shape, real.opt_state)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}])
def test_the_initial_state_is_the_same_on_every_mesh(sizes):
    rules = [*RULES, Rule("value$")]
    key = jax.random.key(3)
    abstract = abstract_state(PairConfig(), OPTIMIZER)
    shardings = state_shardings(abstract, MeshConfig(**sizes).build(), rules)
    state = make_init_state(functools.partial(new_state, PairConfig(), OPTIMIZER), shardings)(key)
    expected = jax.jit(lambda key: new_state(PairConfig(), OPTIMIZER, key))(key)
    assert state.model.layers[0].kernel[...].sharding.spec == P("fsdp", "tensor")
    for (name, found), (_, leaf) in zip(named_leaves(state), named_leaves(expected), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-6, err_msg=name)


WIDTHS = [8, 12, 8, 8]


def dense_layer(width: int, key: jax.Array) -> Dense:
    return Dense(8, width, key=key, use_bias=True)


class Tower(nnx.Module):
    def __init__(self, key: jax.Array):
        self.layers = build_layers(dense_layer, WIDTHS, key)


class TowerConfig:
    def build(self, key: jax.Array) -> Tower:
        return Tower(key)


@jax.jit
def one_by_one(key: jax.Array) -> list[Dense]:
    return [dense_layer(w, k) for w, k in zip(WIDTHS, jax.random.split(key, 4), strict=True)]


def test_layers_built_by_a_loop_equal_layers_built_one_by_one():
    key = jax.random.key(5)
    found = jax.jit(Tower)(key).layers
    jax.tree.map(np.testing.assert_array_equal, list(found), one_by_one(key))


def test_each_device_draws_only_its_part_of_layers_built_by_a_loop():
    key = jax.random.key(5)
    mesh = MeshConfig(fsdp=2, tensor=2).build()
    shardings = state_shardings(abstract_state(TowerConfig(), OPTIMIZER), mesh, RULES)
    make = make_init_state(functools.partial(new_state, TowerConfig(), OPTIMIZER), shardings)
    compiled = make.lower(key).compile()
    text = compiled.as_text()
    assert not collectives.parse(text, dict(mesh.shape))
    shapes = set(re.findall(r"32\[((?:3,)?\d+,\d+)\]", text))
    assert "3,4,4" in shapes
    assert not {"3,8,8", "3,8,4", "3,4,8", "8,8", "8,12"} & shapes
    found = list(compiled(key).model.layers)
    jax.tree.map(np.testing.assert_array_equal, found, one_by_one(key))


def test_an_update_moves_against_the_gradient_and_counts():
    state = new_state(PairConfig(), OPTIMIZER, jax.random.key(0))
    gradients = jax.tree.map(jnp.ones_like, state.model)
    after = state.apply_gradients(OPTIMIZER, gradients)
    assert int(after.step) == 1
    jax.tree.map(
        lambda old, new: np.testing.assert_allclose(new, old - 0.5, rtol=1e-5, atol=1e-6),
        parameters(state.model),
        parameters(after.model),
    )


@pytest.mark.parametrize(
    "config", [AdafactorConfig(), AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.9)]
)
def test_an_update_left_out_moves_the_learning_rate_and_nothing_else(config):
    schedule = Linear(peak=0.1, total_steps=10)
    optimizer = config.build(schedule)
    before = new_state(PairConfig(), optimizer, jax.random.key(0))
    gradients = jax.tree.map(jnp.ones_like, before.model)
    made = before.apply_gradients(optimizer, gradients)
    left_out = made.unless(jnp.array(True), before)
    assert int(left_out.step) == 1
    jax.tree.map(np.testing.assert_array_equal, left_out.model, before.model)
    memory, place = left_out.opt_state[:-1], left_out.opt_state[-1]
    jax.tree.map(np.testing.assert_array_equal, memory, before.opt_state[:-1])
    jax.tree.map(np.testing.assert_array_equal, place, made.opt_state[-1])
    assert [int(leaf) for leaf in jax.tree.leaves(place)] == [1]
    jax.tree.map(np.testing.assert_array_equal, made.unless(jnp.array(False), before), made)
