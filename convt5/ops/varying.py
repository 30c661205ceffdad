"""Mesh axes over which arrays vary inside `jax.shard_map`, which JAX tracks in their types.

JAX refuses loops whose carry changes its type, and `custom_vjp` rules whose cotangents vary over
other axes than the arguments. Outside shard_map, and with `check_vma=False`, no array varies, and
these functions return their arguments unchanged.
"""

from typing import Any

import jax
from jax import lax


def axes_of(*trees: Any) -> frozenset[str]:
    """Returns the mesh axes over which any array of the trees varies."""
    types = [jax.typeof(a).manual_axis_type for a in jax.tree.leaves(trees)]
    return frozenset[str]().union(*(kind.varying for kind in types))


def vary_over(axes: frozenset[str], tree: Any) -> Any:
    """Casts every array of a tree to vary over at least these axes.

    The transpose sums over devices: the gradient of a replicated array is the sum over all shards.
    """
    if not axes:
        return tree

    def cast(a):
        missing = axes - axes_of(a)
        return lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a

    return jax.tree.map(cast, tree)


def vary_alike(*trees: Any) -> Any:
    """Casts all arrays to vary over the union of their axes, as the rules of a custom_vjp need."""
    return vary_over(axes_of(trees), trees)


def vary_like(like: Any, tree: Any) -> Any:
    """Casts the initial carry of a loop to vary like the value added to it."""
    return vary_over(axes_of(like), tree)


def invariant_types(tree: Any) -> Any:
    """Replaces the types of varying arrays by those of one device's local arrays."""

    if not axes_of(tree):
        return tree

    def forget(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype) if axes_of(a) else a

    return jax.tree.map(forget, tree)
