"""The state that an update changes: step, model and optimizer state, created sharded.

`trainer` and `checkpoint` use its abstract shapes and its shardings before any allocation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from convt5.modeling import sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training.averaging import Averaging
from convt5.training.freezing import Frozen, freeze
from convt5.training.spikes import SpikeMemory

Tree = Any
MakeState = Callable[[PRNGKeyArray], "TrainState"]
"""Makes a new state from a random key."""


class ModelConfig(Protocol):
    """A description that builds a model; the model's `nnx.Param` variables are its parameters."""

    def build(self, key: PRNGKeyArray) -> nnx.Module: ...


def abstract_model(config: ModelConfig) -> Any:
    """Returns the shapes of a model; allocates nothing.

    JAX keeps the trace, so that models of equal descriptions are built once.
    """
    return _first_model.eval_shape(config)


@functools.partial(jax.jit, static_argnums=0)
def _first_model(config: ModelConfig) -> nnx.Module:
    return config.build(jax.random.key(0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training after `step` updates.

    Attributes:
        step: number of updates made.
        model: an NNX module. As a tree it holds the parameters, and what the optimizer never
            changes: frozen parameters (`freezing.Frozen`) and statistics (`nnx.BatchStat`), if any.
        opt_state: optimizer state over `parameters(model)`: plain containers and arrays.
        ema: the average of the model over its updates, also a module; None if disabled.
        spikes: statistics for skipping loss spikes; None if disabled.
    """

    step: Int[Array, ""]
    model: nnx.Module
    opt_state: Tree
    ema: nnx.Module | None = None
    spikes: SpikeMemory | None = None

    def apply_gradients(
        self, optimizer: optax.GradientTransformation, gradients: nnx.Module
    ) -> "TrainState":
        """Returns the state after one update; `gradients` has the structure of the model."""
        before = parameters(self.model)
        updates, opt_state = optimizer.update(parameters(gradients), self.opt_state, before)
        after = optax.apply_updates(before, updates)
        model = with_parameters(self.model, after)
        return dataclasses.replace(self, step=self.step + 1, model=model, opt_state=opt_state)

    def with_statistics(self, statistics: Mapping[str, Array]) -> "TrainState":
        """Returns the state with new values for some statistics of the model, by name."""
        return dataclasses.replace(self, model=with_statistics(self.model, statistics))

    def with_estimated(self, estimate: Callable[[nnx.Module], Mapping[str, Array]]) -> "TrainState":
        """Returns the state with statistics of model and average re-estimated by `estimate`."""
        state = self.with_statistics(estimate(self.model))
        if self.ema is None:
            return state
        return dataclasses.replace(state, ema=with_statistics(self.ema, estimate(self.ema)))

    def with_average(self, averaging: Averaging | None) -> "TrainState":
        """Returns the state whose average includes the last update; unchanged without one."""
        if averaging is None:
            return self
        return dataclasses.replace(self, ema=averaging.after(self.step - 1, self.ema, self.model))

    def unless(self, is_left_out: Bool[Array, ""], before: "TrainState") -> "TrainState":
        """Returns this state, or model and optimizer of `before` if `is_left_out`.

        The step counts in both cases, also for the learning rate.
        """
        new, old = (self.model, self.opt_state), (before.model, before.opt_state)

        def choose(a: Tree, b: Tree) -> Tree:
            return a if _is_place_in_schedule(a) else jnp.where(is_left_out, b, a)

        chosen = jax.tree.map(choose, new, old, is_leaf=_is_place_in_schedule)
        return dataclasses.replace(self, model=chosen[0], opt_state=chosen[1])

    def starting_with(self, model: nnx.Module) -> "TrainState":
        """Returns the initial state for another model, with the average as a copy of it."""
        ema = None if self.ema is None else jax.tree.map(jnp.copy, model)
        return dataclasses.replace(self, model=model, ema=ema)


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Returns the trained parameters as nested plain dicts of arrays, without library classes.

    Does not include frozen ones; see `num_parameters`.
    """
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def num_parameters(model: nnx.Module, *, frozen: bool) -> int:
    """Returns the number of elements of the frozen, or of the trained, parameters."""
    state = nnx.state(model, Frozen if frozen else nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def _is_place_in_schedule(tree: Tree) -> bool:
    return isinstance(tree, optax.ScaleByScheduleState)


def with_parameters(model: nnx.Module, values: Tree) -> nnx.Module:
    """Returns a copy of `model` with these values, nested as `parameters` returns them."""
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def with_statistics(model: nnx.Module, statistics: Mapping[str, Array]) -> nnx.Module:
    """Returns a copy of `model` with new statistics, cast to the dtype of the old ones.

    Raises:
        KeyError: a name is not that of a statistic. Only updates change parameters.
    """
    *_, others = nnx.split(model, nnx.Param, Frozen, ...)
    leaves = dict(named_leaves(model))
    if unknown := statistics.keys() - {name for name, _ in named_leaves(others)}:
        raise KeyError(f"no statistics of the model are called {', '.join(sorted(unknown))}")
    leaves |= {name: value.astype(leaves[name].dtype) for name, value in statistics.items()}
    return jax.tree.unflatten(jax.tree.structure(model), list(leaves.values()))


def new_state(
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    *,
    with_ema: bool = False,
    with_spikes: bool = False,
    frozen: Sequence[str] = (),
) -> TrainState:
    """Returns the initial state, with JAX's default placement."""
    model = freeze(model_config.build(key), frozen)
    ema = jax.tree.map(jnp.copy, model) if with_ema else None
    opt_state = optimizer.init(parameters(model))
    spikes = SpikeMemory.new() if with_spikes else None
    return TrainState(jnp.zeros([], jnp.int32), model, opt_state, ema, spikes)


def abstract_state(
    model_config: ModelConfig, optimizer: optax.GradientTransformation, **settings: Any
) -> TrainState:
    """Returns the shapes of a `new_state` with these settings; allocates nothing."""
    return shapes_of(functools.partial(new_state, model_config, optimizer, **settings))


def shapes_of(make: MakeState) -> TrainState:
    """Returns the shapes of a new state.

    If the same function is jitted afterwards, JAX does not trace it again.
    """
    return jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))


def state_shardings(abstract: TrainState, mesh: Mesh, rules: Sequence[sharding.Rule]) -> TrainState:
    """Returns the state with shardings in place of arrays, by sharding rules."""
    return sharding.tree_shardings(abstract, abstract.model, mesh, rules)


def make_init_state(make: MakeState, shardings: TrainState) -> MakeState:
    """Returns a jitted function from a key to the initial state.

    Each device creates only its own part.

    Args:
        make: makes the state, such as `functools.partial(new_state, model_config, optimizer)`.
        shardings: its shardings.
    """
    return jax.jit(make, out_shardings=shardings)
