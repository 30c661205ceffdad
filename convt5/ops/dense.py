"""Matrix products with a kernel, whose gradients are products in the order that processors like."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@jax.custom_vjp
def dense(
    x: Float[Array, "*batch in"], kernel: Float[Array, "in out"]
) -> Float[Array, "*batch out"]:
    """Returns x @ kernel.

    The gradient of the kernel is x^T dy. The transpose rule of JAX makes (dy^T x)^T of it, for
    which XLA on CPU writes dy transposed, and computes what dy comes from a second time as it does
    so: a sixth of a training step. On TPU both are the same.
    """
    return jnp.dot(x, kernel)


def _forward(x, kernel):
    return jnp.dot(x, kernel), (x, kernel)


def _backward(residuals, dy):
    x, kernel = residuals
    dx = lax.dot_general(dy, kernel, (((dy.ndim - 1,), (1,)), ((), ())))
    rows = tuple(range(x.ndim - 1))
    return dx, lax.dot_general(x, dy, ((rows, rows), ((), ())))


dense.defvjp(_forward, _backward)
