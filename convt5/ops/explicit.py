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


def partitioned(
    num_axes: int, *, like: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that leaves the sharding inside of an operator to XLA's partitioner.

    Args:
        num_axes: the results are sharded like so many leading axes of one of the arguments.
        like: its name; None: the first.
    """

    def decorate(operator: Callable[P, R]) -> Callable[P, R]:
        signature, compute = inspect.signature(operator), _untyped(operator)
        pattern = like or next(iter(signature.parameters))

        @functools.wraps(operator)
        def call(*arguments: P.args, **settings: P.kwargs) -> R:
            given = signature.bind(*arguments, **settings)
            leaves, structure = jax.tree.flatten((given.args, given.kwargs))
            arrays = {n: a for n, a in enumerate(leaves) if isinstance(a, jax.Array)}
            meshes = [jax.typeof(a).sharding.mesh for a in arrays.values()]
            mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
            if mesh is None:
                return operator(*arguments, **settings)
            spec = jax.typeof(given.arguments[pattern]).sharding.spec
            sharding = NamedSharding(mesh, PartitionSpec(*spec[:num_axes]))

            @jax.jit
            @functools.partial(
                jax.sharding.auto_axes, axes=mesh.explicit_axes, out_sharding=sharding
            )
            def run(arrays):
                whole = [arrays.get(n, a) for n, a in enumerate(leaves)]
                arguments, settings = jax.tree.unflatten(structure, whole)
                return compute(*arguments, **settings)

            return run(arrays)

        return call

    return decorate


def _untyped(operator: Callable[..., R]) -> Callable[..., R]:
    """Returns an operator that may be called with any arguments, for the type checker."""
    return operator
