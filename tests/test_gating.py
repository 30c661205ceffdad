"""Gated linear units: values and gradients are those of JAX, and are computed once."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from second_derivatives import hessian_product, hessian_products
from test_dense import values_and_gradients

from convt5.analysis import topology
from convt5.modeling.layers import Norm
from convt5.modeling.mixers import convolution as convolution_mixer
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.mixers.depthwise import Depthwise
from convt5.ops.gating import gate


def plain_gate(x, logits):
    return x * jax.nn.sigmoid(logits)


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 4), max_size=3))
def test_values_and_gradients_are_those_of_the_plain_product(shape):
    x, logits, dy = arrays(shape, shape, shape)
    found, expected = values_and_gradients(gate, plain_gate, x, logits, dy)
    np.testing.assert_array_equal(found[0], expected[0])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_logits_far_from_zero_are_finite():
    x, dy = arrays((4,), (4,))
    logits = jnp.array([-1e4, -90.0, 90.0, 1e4])
    dx, dlogits = jax.vjp(gate, x, logits)[1](dy)
    np.testing.assert_allclose(dx, dy * jnp.array([0.0, 0.0, 1.0, 1.0]), atol=1e-6)
    np.testing.assert_allclose(dlogits, 0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_everything_stays_in_the_dtype_of_the_operands(dtype):
    x, logits, dy = arrays(*[(2, 3)] * 3, dtype=dtype)
    y, vjp = jax.vjp(gate, x, logits)
    assert {a.dtype for a in (y, *vjp(dy))} == {jnp.dtype(dtype)}


def test_second_derivatives_are_those_of_the_plain_product(x64):
    operands = arrays((2, 3), (2, 3), dtype=np.float64)
    expected = hessian_product(lambda *a: jnp.sum(jnp.sin(plain_gate(*a))), operands)
    for found in hessian_products(lambda *a: jnp.sum(jnp.sin(gate(*a))), operands):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.tpu
def test_gradients_of_a_block_access_fewer_bytes_than_with_the_plain_product(compiler, monkeypatch):
    chip = SingleDeviceSharding(topology.load("v5p:1x1x1").devices[0])
    config = Depthwise(kernel_size=7)

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=chip), tree)

    def make(key):
        return Norm(768), config.build(
            SimpleNamespace(
                emb_dim=768,
                mlp_dim=2048,
                mlp="relu",
                num_heads=1,
                head_dim=1,
                dropout_rate=0.0,
                dtype="float32",
                taps_cross_segments=False,
            ),
            key=key,
        )

    parts = placed(jax.eval_shape(make, jax.random.key(0)))
    x = placed(jax.ShapeDtypeStruct((2, 256, 768), jnp.bfloat16))
    ids = placed(jax.ShapeDtypeStruct((2, 256), jnp.int32))

    def accessed():
        def slope(parts, x, dy, ids):
            norm, convolution = parts
            return jnp.sum((x + convolution(norm(x), StackInputs(ids))) * dy, dtype=jnp.float32)

        compiled = jax.jit(jax.grad(slope, (0, 1))).lower(parts, x, x, ids).compile()
        return compiled.cost_analysis()["bytes accessed"]

    once = accessed()
    monkeypatch.setattr(convolution_mixer, "gate", plain_gate)
    assert once < accessed()
