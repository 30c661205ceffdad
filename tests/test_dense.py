"""Matrix products with a kernel: values and gradients are those of JAX, in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5.ops.dense import dense

SIZES = st.integers(1, 4)


def arrays(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@settings(deadline=None, max_examples=30)
@given(st.lists(SIZES, max_size=3), SIZES, SIZES)
def test_values_and_gradients_are_those_of_a_dot(batch, num_in, num_out):
    x, kernel, dy = arrays([(*batch, num_in), (num_in, num_out), (*batch, num_out)])
    y, vjp = jax.vjp(dense, x, kernel)
    expected, expected_vjp = jax.vjp(jnp.dot, x, kernel)
    np.testing.assert_array_equal(y, expected)
    for mine, theirs in zip(vjp(dy), expected_vjp(dy), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_everything_stays_in_the_dtype_of_the_operands(dtype):
    x, kernel, dy = arrays([(2, 3, 4), (4, 5), (2, 3, 5)], dtype)
    y, vjp = jax.vjp(dense, x, kernel)
    assert {a.dtype for a in (y, *vjp(dy))} == {jnp.dtype(dtype)}


def test_nothing_is_transposed_for_the_gradient_of_the_kernel():
    """Of JAX's own rule it is."""

    def transposes(function):
        x, kernel, dy = arrays([(2, 3, 4), (4, 5), (2, 3, 5)])
        made = jax.make_jaxpr(lambda x, k, dy: jax.vjp(function, x, k)[1](dy))(x, kernel, dy)
        return str(made).count("transpose[")

    assert transposes(jnp.dot) == 1
    assert transposes(dense) == 0
