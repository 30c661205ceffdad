"""Parameters that devices hold in parts, whole only while the layer that reads them runs.

This is fully sharded data parallelism (ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054). Modules
say that they gather their own parameters by `gathers_itself = True`, and call `whole`; training
says where parameters lie, by `gathered`. Without training nothing is in parts.
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
"""The metadata of variables in parts."""


class Placement(NamedTuple):
    """Where a parameter lies between steps, in parts, and where while it is used.

    Attributes:
        kept, used: both.
        whole_sums: gradients are summed over devices whole, and then cut into parts, which sends
            up to twice as much as leaving each device its part of the sum at once.
    """

    kept: NamedSharding
    used: NamedSharding
    whole_sums: bool


def gathered(model: Module, kept: Module, used: Module, *, whole_sums: bool) -> Module:
    """Returns the model with its parameters whole, but for modules that gather themselves.

    Args:
        model: with parameters that lie as `kept` says.
        kept, used: a `NamedSharding` in place of each parameter.
        whole_sums: see `Placement`; of the modules that gather themselves. Others, such as the
            token table, always have them: to leave each device its part of the gradient of a
            lookup, the compiler may gather all activations on all devices.
    """

    def gather(node, kept, used):
        if not _gathers_itself(node):
            return _gather(Placement(kept, used, whole_sums=True), node)
        return jax.tree.map(
            lambda variable, kept, used: variable.copy(
                **{_PLACEMENT: Placement(kept.get_value(), used.get_value(), whole_sums)}
            ),
            *(node, kept, used),
            is_leaf=_is_variable,
        )

    return jax.tree.map(gather, model, kept, used, is_leaf=_gathers_itself)


def whole(module: Module) -> Module:
    """Returns the module with the parameters whole that `gathered` left in parts."""

    def gather(variable, placement: Placement):
        found = variable.copy(_gather(placement, variable.get_value()))
        found.del_metadata(_PLACEMENT)
        return found

    return _map_parts(gather, module)


def stacked(layers: Sequence[Any]) -> Any:
    """Returns trees of one form as one, each array with a new first axis; parts stay in parts."""

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
    if placement.whole_sums:
        gradient = jax.lax.with_sharding_constraint(gradient, placement.used)
    return (jax.lax.with_sharding_constraint(gradient, placement.kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def _map_parts(change, tree):
    def changed(node):
        placement = node.get_metadata(_PLACEMENT, None) if _is_variable(node) else None
        return node if placement is None else change(node, placement)

    return jax.tree.map(changed, tree, is_leaf=_is_variable)


def _is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def _gathers_itself(node) -> bool:
    return isinstance(node, nnx.Module) and getattr(node, "gathers_itself", False)
