"""Matrix products inside of kernels, and lengths that fill whole blocks of them."""

import jax.numpy as jnp
from jax import lax


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
