"""Everything that one update changes: step, model, optimizer state; made directly where it lives.

`trainer` and `checkpoint` use the abstract state (shapes) and its shardings before any allocation.
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


class ModelConfig(Protocol):
    """A description that builds a model, whose `nnx.Param` variables are its parameters."""

    def build(self, key: PRNGKeyArray) -> nnx.Module: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training after `step` updates.

    Attributes:
        step: updates made.
        model: an NNX module; as a tree it holds the parameters, and what no update of the
            optimizer touches: frozen parameters (`freezing.Frozen`) and, where it has any,
            statistics (`nnx.BatchStat`).
        opt_state: of the optimizer over `parameters(model)`: plain containers and arrays.
        ema: the average of the model over its updates, another such module; None where the run
            keeps none.
        spikes: what is known of the steps before, where updates that stand out are left out.
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
        """Returns the state whose model holds other statistics, given by name; others stay."""
        return dataclasses.replace(self, model=with_statistics(self.model, statistics))

    def with_measured(self, estimate: Callable[[nnx.Module], Mapping[str, Array]]) -> "TrainState":
        """Returns the state whose model and average hold the statistics that `estimate` finds."""
        state = self.with_statistics(estimate(self.model))
        if self.ema is None:
            return state
        return dataclasses.replace(state, ema=with_statistics(self.ema, estimate(self.ema)))

    def averaged(self, averaging: Averaging | None) -> "TrainState":
        """Returns the state whose average takes in the update just made; as it is without one."""
        if averaging is None:
            return self
        return dataclasses.replace(self, ema=averaging.after(self.step - 1, self.ema, self.model))

    def unless(self, is_left_out: Bool[Array, ""], before: "TrainState") -> "TrainState":
        """Returns this state, or with model and optimizer of `before` where it is left out.

        The step counts as made all the same, also where the learning rate counts steps.
        """
        new, old = (self.model, self.opt_state), (before.model, before.opt_state)

        def choose(a: Tree, b: Tree) -> Tree:
            return a if _is_place_in_schedule(a) else jnp.where(is_left_out, b, a)

        kept = jax.tree.map(choose, new, old, is_leaf=_is_place_in_schedule)
        return dataclasses.replace(self, model=kept[0], opt_state=kept[1])

    def starting_with(self, model: nnx.Module) -> "TrainState":
        """Returns the state before the first update of another model; the average is a copy."""
        ema = None if self.ema is None else jax.tree.map(jnp.copy, model)
        return dataclasses.replace(self, model=model, ema=ema)


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Returns those that are trained, as nested plain dicts: arrays and names, no library classes.

    Frozen ones are not among them; see `num_parameters`.
    """
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def num_parameters(model: nnx.Module, *, frozen: bool) -> int:
    """Returns how many numbers the parameters hold that are frozen, or those that are trained."""
    state = nnx.state(model, Frozen if frozen else nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def _is_place_in_schedule(tree: Tree) -> bool:
    return isinstance(tree, optax.ScaleByScheduleState)


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
    """Returns the state before the first update, wherever jax places it by itself."""
    model = freeze(model_config.build(key), frozen)
    ema = jax.tree.map(jnp.copy, model) if with_ema else None
    opt_state = optimizer.init(parameters(model))
    spikes = SpikeMemory.new() if with_spikes else None
    return TrainState(jnp.zeros([], jnp.int32), model, opt_state, ema, spikes)


def abstract_state(
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    with_ema: bool = False,
    with_spikes: bool = False,
    frozen: Sequence[str] = (),
) -> TrainState:
    """Returns the state with shapes in the place of arrays; allocates nothing."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    make = functools.partial(
        new_state,
        model_config,
        optimizer,
        with_ema=with_ema,
        with_spikes=with_spikes,
        frozen=frozen,
    )
    return jax.eval_shape(make, key)


def state_shardings(abstract: TrainState, mesh: Mesh, rules: Sequence[sharding.Rule]) -> TrainState:
    """Returns the state with shardings in the place of arrays, by a table of rules."""
    return sharding.tree_shardings(abstract, abstract.model, mesh, rules)


def init_state(
    model_config: ModelConfig,
    optimizer: optax.GradientTransformation,
    key: PRNGKeyArray,
    shardings: TrainState,
    *,
    frozen: Sequence[str] = (),
) -> TrainState:
    """Returns the state before the first update, each device making only its own part."""
    make = functools.partial(
        new_state,
        model_config,
        optimizer,
        with_ema=shardings.ema is not None,
        with_spikes=shardings.spikes is not None,
        frozen=frozen,
    )
    return jax.jit(make, out_shardings=shardings)(key)
