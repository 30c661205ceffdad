"""Products of a Hessian with a vector, in both orders that JAX can take them."""

import jax
import jax.numpy as jnp


def hessian_products(function, arguments):
    """Returns the product with a fixed vector, by reverse and by forward mode over reverse."""
    vector = tuple(jnp.cos(3.0 * a + 1.0) for a in arguments)
    gradient = jax.grad(function, tuple(range(len(arguments))))

    def slope(arguments):
        return sum(jnp.sum(a * b) for a, b in zip(gradient(*arguments), vector, strict=True))

    reverse = jax.jit(jax.grad(slope))(tuple(arguments))
    forward = jax.jit(lambda a, v: jax.jvp(gradient, a, v)[1])(tuple(arguments), vector)
    return reverse, forward
