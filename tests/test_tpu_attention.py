"""Attention kernels for TPU, computed without one, equal attention in chunks, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from quick import quick

from convt5.ops import attend, dispatch
from convt5.ops.attention import tpu as kernels
from convt5.ops.dispatch import Devices


def draw(batch, target, source, heads, head_dim, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(batch, target, heads, head_dim), *[(batch, source, heads, head_dim)] * 2]
    rows = [jnp.asarray(0.5 * rng.normal(size=shape), dtype) for shape in shapes]
    bias = jnp.asarray(rng.normal(size=(heads, target + source - 1)), jnp.float32)
    return rows, bias


def packed(batch, length):
    """Two segments and padding; the first row has another division than the others."""
    ids = np.repeat([[1, 2, 0]], batch, axis=0).repeat([length // 2, length // 3, length], axis=1)
    ids[0] = np.repeat([1, 2, 0], [length // 3, length // 3, length * 2])[: ids.shape[1]]
    return jnp.asarray(ids[:, :length], jnp.int32)


def value_and_gradients(choice, rows, ids, *, causal, bias):
    """Returns the output and its gradients along a fixed cotangent."""

    @jax.jit
    def run(rows, bias):
        def loss(rows, bias):
            y = attend(*rows, *ids, causal=causal, distance_bias=bias)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        (_, y), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(rows, bias)
        return y, found

    with dispatch.using(choice=choice):
        return jax.tree.leaves(run(rows, bias))


# Lengths that fill no block; several blocks of queries; heads that share registers, and do not.
CASES = {
    "cross": ((2, 70, 200, 4, 64), False, False),
    "cross, bias": ((2, 70, 200, 4, 64), False, True),
    "causal": ((1, 160, 160, 1, 128), True, False),
    "causal, bias, small heads": ((2, 40, 40, 8, 32), True, True),
}


@pytest.mark.parametrize("case", quick(list(CASES), chosen=["causal, bias, small heads"]))
def test_kernels_equal_attention_in_blocks(monkeypatch, case):
    sizes, causal, biased = CASES[case]
    monkeypatch.setattr(kernels, "LOGITS", 2**12)
    monkeypatch.setattr(kernels, "LOGITS_WITH_BIAS", 2**12)
    rows, bias = draw(*sizes)
    ids = packed(sizes[0], sizes[1]), packed(sizes[0], sizes[2])
    settings = {"causal": causal, "bias": bias if biased else None}
    expected = value_and_gradients("plain", rows, ids, **settings)
    found = value_and_gradients("interpreted kernels", rows, ids, **settings)
    assert len(found) == 4 + biased
    for ours, theirs in zip(found, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * scale)


@pytest.mark.parametrize("biased", quick([False, True], chosen=[True]))
@pytest.mark.parametrize(
    "transform", [jax.vmap, lambda f: lambda a: jax.jvp(f, (a[0],), (a[1],))], ids=["vmap", "jvp"]
)
def test_plain_gradients_follow_the_forward_kernel(transform, biased):
    """Only the backward pass is plain, because kernels have no rules for these transforms."""
    (rows, bias), ids = draw(2, 24, 40, 2, 64), (packed(2, 24), packed(2, 40))
    directions = jnp.asarray(np.random.default_rng(1).normal(size=(3, *rows[0].shape)), jnp.float32)

    def pull_back(choice):
        def output(rows, bias):
            return attend(*rows, *ids, distance_bias=bias if biased else None)

        with dispatch.using(choice=choice):
            return jax.jit(transform(jax.vjp(output, rows, bias)[1]))(directions)

    expected = pull_back("plain")
    for ours, theirs in zip(
        *map(jax.tree.leaves, (pull_back("interpreted kernels"), expected)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


def test_devices_compute_their_own_rows_and_heads():
    (rows, bias), ids = draw(4, 32, 128, 4, 64), (packed(4, 32), packed(4, 128))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    settings = {"causal": False, "bias": bias}
    expected = value_and_gradients("plain", rows, ids, **settings)
    with dispatch.using(devices=Devices(mesh, rows=("data",), channels=("tensor",))):
        found = value_and_gradients("interpreted kernels", rows, ids, **settings)
    assert found[0].sharding.spec[0] in ("data", ("data",))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 16, 16, 2, 48), jnp.float32),  # A head would cross registers.
        ((1, 16, 16, 1, 64), jnp.float32),  # Half a register.
        ((1, 16, 4097, 2, 64), jnp.bfloat16),  # Keys that do not fit the chip.
        ((1, 16, 1281, 2, 64), jnp.float32),
        ((1, 16, 3072, 4, 32), jnp.bfloat16),
        ((1, 16, 16, 16, 8), jnp.bfloat16),  # More heads in a register than are compiled.
        ((1, 16, 16, 2, 64), jnp.float16),
    ],
)
def test_what_kernels_do_not_serve_is_known_beforehand(sizes, dtype):
    batch, target, source, heads, head_dim = sizes
    query, key = (
        jax.ShapeDtypeStruct((batch, length, heads * head_dim), dtype)
        for length in (target, source)
    )
    assert not kernels.is_supported(kernels.Settings(head_dim, False), query, key)
    served = jax.ShapeDtypeStruct((1, 16, 128), jnp.bfloat16)
    assert kernels.is_supported(kernels.Settings(64, False), served, served)


@pytest.mark.parametrize("narrow", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_kernels_serve_arrays_of_one_type(narrow):
    rows, _ = draw(1, 16, 16, 2, 64)
    rows = [a.astype(jnp.bfloat16) if i in narrow else a for i, a in enumerate(rows)]
    ids = (packed(1, 16),) * 2

    def total(*rows):
        return jnp.sum(attend(*rows, *ids).astype(jnp.float32))

    with dispatch.using(choice="interpreted kernels"):
        program = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*rows)
    assert ("pallas_call" in str(program)) == (len(narrow) in (0, 3))
