"""What TPU kernels share: matrix products, lengths that fill whole blocks, types of results."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import ManualAxisType
from jax.typing import DTypeLike

LANES = 128
"""Columns of a vector register, and what lengths and channels must be a multiple of."""


def dot(a, b, contract=(1, 0)):
    """Returns a product in float32, over the given axis of each; float32 operands lose nothing."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def padded(length: int, multiple: int) -> int:
    """Returns the least multiple that is not below the length."""
    return -(-length // multiple) * multiple


def result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns the type of what a kernel computes: it varies over no mesh, as its arguments.

    `dispatch.run` traces kernels by the types of one device, also inside of shard_map.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType())
