"""Helpers of all TPU kernels: matrix products, padding to whole blocks, types of results."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import ManualAxisType
from jax.typing import DTypeLike

LANES = 128
"""Lanes of a vector register; lengths and channels must be multiples of this."""


def dot(a, b, contract=(1, 0)):
    """Returns the matrix product over the given axis of each factor, accumulated in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def padded(length: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result, which varies over no mesh axis.

    `dispatch.run` traces kernels with the types of one device, even inside shard_map.
    """
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType())
