"""Everything that one update changes: step, model, optimizer state; made directly where it lives.

`trainer` and `checkpoint` use the abstract state (shapes) and its shardings before any allocation.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, PRNGKeyArray

from convt5 import sharding
from convt5.tree_paths import named_leaves

Tree = Any


class ModelConfig(Protocol):
    """A description that builds a model, whose `nnx.Param` variables are trained."""

    def build(self, key: PRNGKeyArray) -> nnx.Module: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training after `step` updates.

    Attributes:
        step: updates made.
        model: an NNX module; as a tree it holds the parameters, and statistics that no update of
            the optimizer touches where it has any (`nnx.BatchStat`).
        opt_state: of the optimizer over `parameters(model)`: plain containers and arrays.
    """

    step: Int[Array, ""]
    model: nnx.Module
    opt_state: Tree

    def apply_gradients(
        self, optimizer: optax.GradientTransformation, gradients: nnx.Module
    ) -> "TrainState":
        """Returns the state after one update; `gradients` has the structure of the model."""
        before = parameters(self.model)
        updates, opt_state = optimizer.update(parameters(gradients), self.opt_state, before)
        after = optax.apply_updates(before, updates)
        return TrainState(self.step + 1, with_parameters(self.model, after), opt_state)

    def with_statistics(self, statistics: Mapping[str, Array]) -> "TrainState":
        """Returns the state whose model holds other statistics, given by name; others stay."""
        return dataclasses.replace(self, model=with_statistics(self.model, statistics))


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Returns the parameters as nested plain dicts: arrays and names, no library classes."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_parameters(model: nnx.Module, values: Tree) -> nnx.Module:
    """Returns a model like `model` that holds `values`, nested as `parameters` returns them."""
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def with_statistics(model: nnx.Module, statistics: Mapping[str, Array]) -> nnx.Module:
    """Returns a model like `model` that holds other statistics, in the dtype of the old ones.

    Raises:
        KeyError: a name of no statistic: parameters change by updates alone.
    """
    trained = {name for name, _ in named_leaves(parameters(model))}
    leaves = dict(named_leaves(model))
    if unknown := statistics.keys() - (leaves.keys() - trained):
        raise KeyError(f"no statistics of the model are called {', '.join(sorted(unknown))}")
    leaves |= {name: value.astype(leaves[name].dtype) for name, value in statistics.items()}
    return jax.tree.unflatten(jax.tree.structure(model), list(leaves.values()))


def new_state(
    model_config: ModelConfig, optimizer: optax.GradientTransformation, key: PRNGKeyArray
) -> TrainState:
    """Returns the state before the first update, wherever jax places it by itself."""
    model = model_config.build(key)
    return TrainState(jnp.zeros([], jnp.int32), model, optimizer.init(parameters(model)))


def abstract_state(
    model_config: ModelConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns the state with shapes in the place of arrays; allocates nothing."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: new_state(model_config, optimizer, key), key)


def state_shardings(abstract: TrainState, mesh: Mesh, rules: Sequence[sharding.Rule]) -> TrainState:
    """Returns the state with shardings in the place of arrays, by a table of rules."""
    return sharding.tree_shardings(abstract, abstract.model, mesh, rules)


def init_state(
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    shardings: TrainState,
) -> TrainState:
    """Returns the state before the first update, each device making only its own part."""
    make = jax.jit(lambda key: new_state(model_config, optimizer, key), out_shardings=shardings)
    return make(key)
