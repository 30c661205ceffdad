"""Operators on arrays whose types hold their shardings, as on a mesh that `jax.make_mesh` builds.

Mesh axes are explicit there: JAX derives the sharding of every intermediate result from rules,
which refuse loops and products that XLA's partitioner shards well.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

P = ParamSpec("P")
R = TypeVar("R")


def partitioned(num_axes: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that leaves the sharding inside of an operator to XLA's partitioner.

    Args:
        num_axes: the results are sharded like so many leading axes of the first argument.
    """

    def decorate(operator: Callable[P, R]) -> Callable[P, R]:
        signature, compute = inspect.signature(operator), _untyped(operator)

        @functools.wraps(operator)
        def call(*arguments: P.args, **settings: P.kwargs) -> R:
            given = signature.bind(*arguments, **settings).arguments
            arrays = {name: a for name, a in given.items() if isinstance(a, jax.Array)}
            meshes = [jax.typeof(a).sharding.mesh for a in arrays.values()]
            mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
            if mesh is None:
                return operator(*arguments, **settings)
            first = jax.typeof(next(iter(given.values()))).sharding.spec
            sharding = NamedSharding(mesh, PartitionSpec(*first[:num_axes]))

            @jax.jit
            @functools.partial(
                jax.sharding.auto_axes, axes=mesh.explicit_axes, out_sharding=sharding
            )
            def run(arrays):
                return compute(**given | arrays)

            return run(arrays)

        return call

    return decorate


def _untyped(operator: Callable[..., R]) -> Callable[..., R]:
    """Returns an operator that may be called with its arguments by name, for the type checker."""
    return operator
