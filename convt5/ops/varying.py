"""Over which mesh axes arrays vary inside `jax.shard_map`, which JAX keeps in their types.

JAX refuses loops whose carry changes its type, and `custom_vjp` rules whose cotangents vary over
other axes than the arguments. Outside of shard_map, and with `check_vma=False`, no array varies,
and these functions return what they are given.
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

    The transpose sums over the devices: the gradient of a replicated array is that of all shards.
    """

    def cast(a):
        missing = axes - axes_of(a)
        return lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a

    return jax.tree.map(cast, tree)


def vary_alike(*trees: Any) -> Any:
    """Casts all arrays to vary over the axes of any of them, as the rules of a custom_vjp need."""
    return vary_over(axes_of(trees), trees)


def vary_like(like: Any, tree: Any) -> Any:
    """Casts the initial carry of a loop to vary as what is added to it."""
    return vary_over(axes_of(like), tree)


def invariant_types(tree: Any) -> Any:
    """Replaces arrays that vary by types that do not: what one device holds is all there is."""

    def forget(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype) if axes_of(a) else a

    return jax.tree.map(forget, tree)
