"""Matrix products with a kernel: values and gradients are those of JAX, in another order."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from second_derivatives import hessian_product, hessian_products

from convt5.ops.dense import dense, sum_of_products


@functools.partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(first, second, *operands):
    """Of two functions: one operation after another would be a program for each shape."""
    *given, dy = operands
    each = (jax.vjp(function, *given) for function in (first, second))
    return tuple((y, *vjp(dy)) for y, vjp in each)


SIZES = st.integers(1, 4)


def arrays(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@settings(deadline=None, max_examples=30)
@given(st.lists(SIZES, max_size=3), SIZES, SIZES)
def test_values_and_gradients_are_those_of_a_dot(batch, num_in, num_out):
    x, kernel, dy = arrays([(*batch, num_in), (num_in, num_out), (*batch, num_out)])
    (y, *found), (expected_y, *expected) = values_and_gradients(dense, jnp.dot, x, kernel, dy)
    np.testing.assert_array_equal(y, expected_y)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_everything_stays_in_the_dtype_of_the_operands(dtype):
    x, kernel, dy = arrays([(2, 3, 4), (4, 5), (2, 3, 5)], dtype)
    y, vjp = jax.vjp(dense, x, kernel)
    assert {a.dtype for a in (y, *vjp(dy))} == {jnp.dtype(dtype)}


def test_gradients_have_the_dtype_of_what_they_are_of():
    x, kernel = arrays([(2, 3, 4), (4, 5)])
    x = x.astype(jnp.bfloat16)
    for operands in ((x, kernel), (kernel.T, x[0].T)):
        gradients = jax.eval_shape(jax.grad(lambda *a: jnp.sum(dense(*a)), (0, 1)), *operands)
        assert [gradient.dtype for gradient in gradients] == [a.dtype for a in operands]


def test_nothing_is_transposed_for_the_gradient_of_the_kernel():
    """Of JAX's own rule it is."""

    def transposes(function):
        x, kernel, dy = arrays([(2, 3, 4), (4, 5), (2, 3, 5)])
        made = jax.make_jaxpr(lambda x, k, dy: jax.vjp(function, x, k)[1](dy))(x, kernel, dy)
        return str(made).count("transpose[")

    assert transposes(jnp.dot) == 1
    assert transposes(dense) == 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPU")
def test_the_gradient_of_the_kernel_copies_nothing_on_cpu():
    """Of a sum over two axes the compiler turns x over first."""

    def copies(gradient):
        x, dy = arrays([(4, 64, 32), (4, 64, 48)])
        program = jax.jit(gradient).lower(x, dy).compile().as_text()
        return len(re.findall(r"= \S+ (?:copy|transpose)\(", program))

    def of_dense(x, dy):
        kernel = jnp.zeros((x.shape[-1], dy.shape[-1]), x.dtype)
        return jax.vjp(dense, x, kernel)[1](dy)[1]

    def over_two_axes(x, dy):
        return lax.dot_general(x, dy, (((0, 1), (0, 1)), ((), ())))

    assert copies(over_two_axes) > 0
    assert copies(of_dense) == 0


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of the compiler for CPU")
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 48), (48, 32)])
def test_products_over_rows_have_the_narrower_factor_first_on_cpu(num_in, num_out):
    x, y = arrays([(4, 64, num_in), (4, 64, num_out)])
    program = jax.jit(sum_of_products).lower(x, y).compile().as_text()
    assert re.findall(r"= f32\[(\d+,\d+)\]\S* dot\(", program) == ["32,48"]
    expected = np.einsum("bli,blj->ij", np.float64(x), np.float64(y))
    np.testing.assert_allclose(sum_of_products(x, y), expected, rtol=1e-4, atol=1e-4)


def test_second_derivatives_are_those_of_a_dot():
    x, kernel = arrays([(2, 3, 4), (4, 2)])
    expected = hessian_product(lambda x, k: jnp.sum(jnp.dot(x, k) ** 3), (x, kernel))
    for found in hessian_products(lambda x, k: jnp.sum(dense(x, k) ** 3), (x, kernel)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
