"""Products of a Hessian with a vector, in both orders that JAX can take them."""

import jax
import jax.numpy as jnp
import numpy as np


def vector_of(arguments):
    """Returns a fixed vector; NumPy compiles no program for each shape."""
    return tuple(np.cos(3.0 * np.asarray(a, np.float64) + 1.0).astype(a.dtype) for a in arguments)


def hessian_product(function, arguments):
    """Returns the product with a fixed vector, by reverse mode over reverse."""
    vector, gradient = vector_of(arguments), jax.grad(function, tuple(range(len(arguments))))

    def slope(arguments):
        return sum(jnp.sum(a * b) for a, b in zip(gradient(*arguments), vector, strict=True))

    return jax.jit(jax.grad(slope))(tuple(arguments))


def hessian_products(function, arguments):
    """Returns the product with a fixed vector, by reverse and by forward mode over reverse."""
    gradient = jax.grad(function, tuple(range(len(arguments))))
    forward = jax.jit(lambda a, v: jax.jvp(gradient, a, v)[1])
    vector = vector_of(arguments)
    return hessian_product(function, arguments), forward(tuple(arguments), vector)
