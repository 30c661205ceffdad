"""Convolutions with taps for whole rows equal sums tap by tap, and depend on nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec
from quick import quick
from test_halo import devices_of, mesh_of, packed_rows

from convt5.ops import dispatch
from convt5.ops.convolution import whole_rows
from convt5.ops.convolution.whole_rows import long_conv

METHODS = ["cpu", "default"]
"""By FFT, and by matrix products."""


def use_small_blocks(monkeypatch):
    """Rows of tens of positions are cut several times, and transforms into several blocks."""
    for name in ("_FFT", "_PRODUCTS"):
        monkeypatch.setattr(whole_rows, name, getattr(whole_rows, name)._replace(block=4))
    monkeypatch.setattr(whole_rows, "TPU_TRANSFORM", 8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


def arrays(length: int, taps: int, dtype=np.float32, embed: int = 2):
    rng = np.random.default_rng(length + taps)
    x, dy = rng.normal(size=(2, 2, length, embed)).astype(dtype)
    kernel = rng.normal(size=(taps, embed)).astype(dtype)
    return jnp.asarray(x), jnp.asarray(kernel), packed_rows(rng, 2, length), jnp.asarray(dy)


def output_and_gradients(method, padding, x, kernel, ids, dy):
    def run(x, kernel):
        return long_conv(x, kernel, padding=padding, segment_ids=ids)

    with dispatch.using(choice=method):
        y, vjp = jax.vjp(run, x, kernel)
        return y, *vjp(dy)


both = jax.jit(output_and_gradients, static_argnums=(0, 1))


def direct_sums(padding, x, kernel, ids, dy):
    """The same as O(L^2) sums, in float64: y[i] is the sum of taps[i, j] * x[j] of its segment."""
    x, kernel, dy = (np.asarray(a, np.float64) for a in (x, kernel, dy))
    length, taps = x.shape[1], len(kernel)
    left = -oracles.tap_offsets(taps, 1, padding)[0]
    which = np.arange(length)[None] - np.arange(length)[:, None] + left  # Of output i, input j.
    read = np.broadcast_to((which >= 0) & (which < taps), (len(x), length, length))
    if ids is not None:
        ids = np.asarray(ids)
        read = read & (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0)
    which = np.clip(which, 0, taps - 1)
    y = np.einsum("bij,ije,bje->bie", read, kernel[which], x)
    dx = np.einsum("bij,ije,bie->bje", read, kernel[which], dy)
    slopes = np.zeros_like(kernel)
    np.add.at(slopes, which, np.einsum("bij,bie,bje->ije", read, dy, x))
    return y, dx, slopes


CASES = [("CAUSAL", 75), ("CENTERED", 149), ((50, 20), 71), ("CAUSAL", 99)]


@pytest.mark.parametrize("packed", quick([True, False], chosen=[True]))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", quick(CASES, chosen=CASES[:1]))
def test_outputs_and_gradients_equal_direct_sums(method, case, packed):
    padding, taps = case
    x, kernel, ids, dy = arrays(75, taps)
    ids = ids if packed else None
    found = both(method, padding, x, kernel, ids, dy)
    for a, b in zip(found, direct_sums(padding, x, kernel, ids, dy), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())


def test_direct_sums_equal_loops_written_from_the_equations():
    x, kernel, ids, dy = arrays(7, 5, embed=1)
    where = {"padding": "CENTERED", "segment_ids": np.asarray(ids)}
    weights = oracles.depthwise_weights(kernel, *x.shape[:2])
    dx, slopes = oracles.convolve_gradients(x, weights, dy, **where)
    expected = oracles.convolve(x, weights, **where), dx, slopes.sum((0, 1))
    for a, b in zip(direct_sums("CENTERED", x, kernel, ids, dy), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", quick([True, False], chosen=[True]))
def test_what_must_not_be_read_has_no_influence_at_all(method, causal):
    """Not even by rounding: what is not a number would show."""
    x, kernel, _, dy = arrays(75, 75 if causal else 149)
    ids = np.array([1] * 9 + [2] * 40 + [0] * 3 + [2] * 5 + [3] * 18)[None].repeat(2, 0)
    padding = "CAUSAL" if causal else "CENTERED"
    expected = both(method, padding, x, kernel, ids, dy)
    read = np.flatnonzero(ids[0] == 2)[: 31 if causal else None]
    others = np.setdiff1d(np.arange(75), read)
    found = both(
        method,
        padding,
        x.at[:, others].set(np.nan),
        kernel,
        ids,
        dy.at[:, others].set(0),
    )
    np.testing.assert_array_equal(found[0][:, read], expected[0][:, read])
    assert not np.any(np.asarray(found[1])[:, others])
    assert not np.any(np.asarray(expected[0])[:, ids[0] == 0])


def test_an_example_is_a_run_of_equal_ids_with_the_padding_inside_of_it():
    ids = jnp.array([[0, 4, 0, 4, 4, 7, 7, 0, 4, 0], [3, 3, 3, 0, 0, 1, 1, 2, 0, 0]])
    expected = [[0, 1, 0, 1, 1, 2, 2, 0, 3, 0], [1, 1, 1, 0, 0, 2, 2, 3, 0, 0]]
    np.testing.assert_array_equal(whole_rows._numbered_runs(ids), expected)


@pytest.mark.parametrize("method", METHODS)
def test_taps_that_cross_segments_read_all_but_padding(method):
    x, kernel, ids, dy = arrays(75, 75)
    with dispatch.using(choice=method):
        found = jax.jit(functools.partial(long_conv, padding="CAUSAL", taps_cross_segments=True))(
            x, kernel, segment_ids=ids
        )
    expected = direct_sums("CAUSAL", x, kernel, (ids != 0).astype(jnp.int32), dy)
    np.testing.assert_allclose(found, expected[0], atol=2e-5)


def test_bfloat16_rows_are_summed_in_float32():
    x, kernel, ids, dy = arrays(75, 149)
    expected = direct_sums("CENTERED", x, kernel, ids, dy)[0]
    for method, tolerance in (("cpu", 2**-7), ("default", 2**-6)):
        with dispatch.using(choice=method):
            found = jax.jit(long_conv)(x.astype(jnp.bfloat16), kernel, segment_ids=ids)
        assert found.dtype == jnp.bfloat16
        error = np.asarray(found, np.float32) - expected
        assert np.sqrt(np.mean(np.square(error))) < tolerance * np.std(expected)


@pytest.mark.nightly
def test_many_blocks_of_bfloat16_are_no_less_accurate_than_few():
    x, kernel, _, dy = (jnp.asarray(a, jnp.bfloat16) for a in arrays(512, 512))
    found = both("default", "CAUSAL", x, kernel, None, dy)
    for a, b in zip(found, direct_sums("CAUSAL", x, kernel, None, dy), strict=True):
        error = np.asarray(a, np.float64) - b
        assert np.sqrt(np.mean(np.square(error))) < 1.5 * 2**-8 * np.std(b)


@pytest.mark.slow
def test_rows_that_devices_share_are_convolved_exactly():
    x, kernel, ids, dy = arrays(64, 64)
    expected = direct_sums("CAUSAL", x, kernel, ids, dy)
    mesh = mesh_of(sequence=2, tensor=2, data=2)
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("data", "sequence"))

    def run(x, ids, dy):
        return output_and_gradients("auto", "CAUSAL", x, kernel, ids, dy)

    with dispatch.using(devices=devices_of(mesh)):
        found = jax.jit(run, in_shardings=(rows, rows, rows))(x, ids, dy)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())


@pytest.mark.slow
def test_gradients_of_a_shared_kernel_are_summed_inside_of_shard_map():
    x, kernel, ids, dy = arrays(64, 64)
    mesh = mesh_of(sequence=1, data=2)
    run = functools.partial(output_and_gradients, "auto", "CAUSAL")
    spec, whole = PartitionSpec("data"), PartitionSpec()
    shared = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, whole, spec, spec), out_specs=(spec, spec, whole)
    )
    expected = direct_sums("CAUSAL", x, kernel, ids, dy)
    for a, b in zip(jax.jit(shared)(x, kernel, ids, dy), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("sides", [1, 2])
def test_operations_are_those_of_the_transforms_that_are_made(monkeypatch, sides):
    monkeypatch.setattr(whole_rows, "SUMMED_TAPS", 4)
    length = 75
    shape = jax.ShapeDtypeStruct((1, length, 1), jnp.float32)
    kernel = jax.ShapeDtypeStruct((sides * length - sides + 1, 1), jnp.float32)
    padding = "CAUSAL" if sides == 1 else "CENTERED"
    block, count = whole_rows.cut(length, 4)
    with dispatch.using(choice="cpu"):
        traced = jax.make_jaxpr(functools.partial(long_conv, padding=padding))(shape, kernel)
    taps, transforms, products = 2.0 * length * (sides * (block - 1) + 1), 0.0, 0.0
    for equation in equations(traced.jaxpr):
        if equation.primitive.name == "fft":
            (size,) = equation.params["fft_lengths"]
            many = max(equation.invars[0].aval.size, equation.outvars[0].aval.size) // size
            transforms += many * 2.5 * size * np.log2(size)
        if equation.primitive.name == "mul" and equation.outvars[0].aval.dtype == jnp.complex64:
            products += 6 * equation.outvars[0].aval.size
    assert block * count >= length
    assert whole_rows.flops(length, sides=sides) == pytest.approx(taps + transforms + products)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_operations_grow_little_faster_than_the_row():
    costs = [whole_rows.flops(length, sides=1) for length in (1024, 2048, 4096)]
    assert 2 < costs[1] / costs[0] < 2.5
    assert costs[2] < 4096 * 4096 / 5  # Of a sum over all earlier positions, two each.


@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 2), (2, 5, 0)])
def test_empty_rows_give_empty_rows(shape):
    assert long_conv(jnp.zeros(shape), jnp.zeros((5, shape[2])), padding="CAUSAL").shape == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": [[[1.0]]]}, "x has shape list, which is no array"),
        ({"x": jnp.ones((2, 9, 2), int)}, "x has dtype int32"),
        ({"kernel": jnp.ones(3)}, r"kernel has shape \(3,\), but must have the axes"),
        ({"kernel": jnp.ones((3, 1))}, "kernel has 1 channels but x has embed=2"),
        ({"kernel": jnp.ones((0, 2))}, "0 taps"),
        ({"segment_ids": jnp.ones((2, 9))}, "segment_ids has dtype float32"),
        ({"segment_ids": jnp.ones((1, 9), int)}, r"segment_ids has shape \(1, 9\) but x has shape"),
        ({"x": jnp.ones((0, 9, 2)), "kernel": jnp.ones((3, 1))}, "kernel has 1 channels"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(unchecked, changes, message):
    given = {"x": jnp.ones((2, 9, 2)), "kernel": jnp.ones((3, 2))}
    with pytest.raises(ValueError, match=message):
        long_conv(**given | changes)
