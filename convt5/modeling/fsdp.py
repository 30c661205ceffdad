"""Fully sharded parameters: each device holds a part, and layers all-gather them when they run.

This is fully sharded data parallelism (FSDP; ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054).
Modules with `gathers_itself = True` call `gather` to all-gather their own parameters. Training says
by `gather_parameters` how parameters are sharded; outside training they are not.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

Module = TypeVar("Module", bound=nnx.Module)

_PLACEMENT = "placement"
"""Metadata key of variables whose gathering is deferred."""


class Placement(NamedTuple):
    """Shardings of a parameter between steps and while it is used.

    Attributes:
        kept, used: the sharding between steps, and while the parameter is used.
        all_reduce: all-reduces gradients and then slices them, which sends up to twice as much as a
            reduce-scatter.
    """

    kept: NamedSharding
    used: NamedSharding
    all_reduce: bool


def gather_parameters(model: Module, kept: Module, used: Module, *, all_reduce: bool) -> Module:
    """All-gathers the parameters of a model, except those of modules that gather themselves.

    Args:
        model: a model whose parameters are sharded as `kept` says.
        kept, used: trees of `NamedSharding`, one for each parameter.
        all_reduce: see `Placement`; for the modules that gather themselves. Others, such as the
            token table, always use all-reduce: for a reduce-scatter of the gradient of a lookup the
            compiler may all-gather all activations.
    """

    def gather(node, kept, used):
        if not _gathers_itself(node):
            return _gather(Placement(kept, used, all_reduce=True), node)
        return jax.tree.map(
            lambda variable, kept, used: variable.copy(
                **{_PLACEMENT: Placement(kept.get_value(), used.get_value(), all_reduce)}
            ),
            *(node, kept, used),
            is_leaf=_is_variable,
        )

    return jax.tree.map(gather, model, kept, used, is_leaf=_gathers_itself)


def gather(module: Module) -> Module:
    """All-gathers the parameters whose gathering was deferred by `gather_parameters`."""

    def gather(variable, placement: Placement):
        gathered = variable.copy(_gather(placement, variable.get_value()))
        gathered.del_metadata(_PLACEMENT)
        return gathered

    return _map_parts(gather, module)


def stack(layers: Sequence[Any]) -> Any:
    """Stacks trees of one form along a new first axis; deferred gathering stays deferred."""

    def keep(variable, placement: Placement):
        kept = placement.kept
        where = NamedSharding(kept.mesh, PartitionSpec(None, *kept.spec))
        return variable.copy(jax.lax.with_sharding_constraint(variable.get_value(), where))

    return _map_parts(keep, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(placement: Placement, x: Array) -> Array:
    return jax.lax.with_sharding_constraint(x, placement.used)


def _gather_forward(placement: Placement, x: Array) -> tuple[Array, None]:
    return _gather(placement, x), None


def _gather_backward(placement: Placement, _: None, gradient: Array) -> tuple[Array]:
    if placement.all_reduce:
        gradient = jax.lax.with_sharding_constraint(gradient, placement.used)
    return (jax.lax.with_sharding_constraint(gradient, placement.kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def _map_parts(change, tree):
    def apply(node):
        placement = node.get_metadata(_PLACEMENT, None) if _is_variable(node) else None
        return node if placement is None else change(node, placement)

    return jax.tree.map(apply, tree, is_leaf=_is_variable)


def _is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def _gathers_itself(node) -> bool:
    return isinstance(node, nnx.Module) and getattr(node, "gathers_itself", False)
