"""The TPU kernels of the convolutions, computed without a TPU: equal to plain JAX and to loops."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tpu_operator_costs as operator_costs
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quick import quick
from second_derivatives import hessian_product, hessian_products

from convt5.analysis import topology
from convt5.ops import (
    depthwise_conv,
    dispatch,
    dynamic_conv,
    lightweight_conv,
    linear_cross_entropy,
)
from convt5.ops.convolution import reference
from convt5.ops.convolution.tpu import calls, streamed
from convt5.ops.convolution.tpu import kernels as tpu_kernels
from convt5.ops.geometry import Taps, pad_widths

CONVOLUTIONS = {
    "depthwise": depthwise_conv,
    "lightweight": lightweight_conv,
    "dynamic": dynamic_conv,
}


def draw(kind, *, batch=2, length=256, taps=3, heads=2, embed=128, dtype=jnp.float32):
    """Inputs, weights (or logits) and a cotangent of one convolution."""
    rng = np.random.default_rng(0)
    shape = {
        "depthwise": (taps, embed),
        "lightweight": (taps, heads),
        "dynamic": (batch, length, taps, heads),
    }[kind]
    x, dy = (jnp.asarray(rng.normal(size=(batch, length, embed)), dtype) for _ in range(2))
    return x, jnp.asarray(rng.normal(size=shape), dtype if kind == "dynamic" else jnp.float32), dy


def packed_rows(batch, length):
    """Segments that end inside blocks and at their edges, with padding between and after."""
    ids = np.zeros((batch, length), np.int32)
    edges = [0, length // 5, length // 2, length // 2 + 3, length - 9]
    for segment, (start, stop) in enumerate(itertools.pairwise(edges), start=1):
        ids[::2, start:stop] = segment
    ids[1::2, 5:] = 7
    ids[0, length // 3 : length // 3 + 4] = 0
    return jnp.asarray(ids)


def largest_error(found, expected):
    scale = float(jnp.max(jnp.abs(expected.astype(jnp.float32))))
    difference = found.astype(jnp.float32) - expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(difference))) / scale


CASES = {
    "adjacent, packed": ("depthwise", {"taps": 3}, {}, True),
    "even, dilated, causal": (
        "depthwise",
        {"taps": 4},
        {"dilation": 8, "padding": "CAUSAL"},
        False,
    ),
    "shared, packed": ("dynamic", {"taps": 3, "heads": 2}, {}, True),
    "shared, dilated, causal": (
        "dynamic",
        {"taps": 4, "heads": 2, "length": 384},
        {"dilation": 5, "padding": "CAUSAL"},
        True,
    ),
    "kernels that cross registers": (
        "dynamic",
        {"taps": 3, "heads": 12, "embed": 384},
        {"padding": (0, 2)},
        False,
    ),
    "kernel per channel, packed": ("dynamic", {"taps": 3, "heads": 128}, {"dilation": 9}, True),
    "kernel per channel, far reach": (
        "dynamic",
        {"taps": 3, "heads": 128},
        {"dilation": 70},
        True,
    ),
    "kernel per channel, causal": (
        "dynamic",
        {"taps": 4, "heads": 128},
        {"padding": "CAUSAL"},
        False,
    ),
}


@pytest.mark.parametrize(
    "case", quick(list(CASES), chosen=[name for name in CASES if "packed" in name])
)
def test_kernels_equal_the_plain_formulation_across_blocks(case):
    kind, sizes, options, packed = CASES[case]
    x, weights, dy = draw(kind, **sizes)
    taps, dilation = sizes["taps"], options.get("dilation", 1)
    where = Taps(
        taps, dilation, *pad_widths(taps, dilation, options.get("padding", "CENTERED")), False
    )
    ids = packed_rows(*x.shape[:2]) if packed else None
    # Blocks smaller than the row, so that taps reach over their edges.
    operation = tpu_kernels.Operation(where, kind == "dynamic", True, packed, True, max_rows=128)
    given = (x, weights) if ids is None else (ids, x, weights)
    call = tpu_kernels._call(operation, "backward", x, weights)
    assert call is not None
    if not case.endswith("far reach"):
        assert isinstance(call, calls.Call)
        assert call.grid[2] == x.shape[1] // 128 > 1
    else:
        assert isinstance(call, streamed.Streamed)

    @jax.jit
    def both(given, dy):
        kernels = (
            tpu_kernels.forward(operation, *given),
            *tpu_kernels.backward(operation, *given, dy),
        )
        plainly = (
            reference.forward(where, True, ids, x, weights),
            *reference.backward(where, True, ids, x, weights, dy),
        )
        return kernels, plainly

    for found, expected in zip(*both(given, dy), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # Float32 sums of the same terms in another order.
        assert largest_error(found, expected) < 1e-6


@pytest.mark.tpu
@pytest.mark.parametrize("kind", quick(list(CONVOLUTIONS), chosen=["dynamic"]))
def test_programs_with_numbers_of_64_bits_are_compiled_without_kernels(compiler, x64, kind):
    device = topology.load("v5e:2x2").devices[0]

    def struct(a):
        sharding = jax.sharding.SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def slopes(x, weights, dy):
        return jax.vjp(CONVOLUTIONS[kind], x, weights)[1](dy)

    text = jax.jit(slopes).lower(*map(struct, draw(kind))).compile().as_text() or ""
    assert "tpu_custom_call" not in text


def compiled_gradients(kind, options, *arrays, choice="interpreted kernels"):
    """Compiles the output and both gradients of the public function, for such arrays."""

    @jax.jit
    def run(x, weights, dy):
        y, vjp = jax.vjp(functools.partial(CONVOLUTIONS[kind], **options), x, weights)
        return y, *vjp(dy)

    with dispatch.using(choice=choice):
        traced = run.trace(*arrays)
        assert ("pallas_call" in str(traced.jaxpr)) == (choice != "plain")
        return traced.lower().compile()


def gradients(kind, options, x, weights, dy, choice="interpreted kernels"):
    """The output and both gradients, from the public function."""
    return compiled_gradients(kind, options, x, weights, dy, choice=choice)(x, weights, dy)


@pytest.mark.parametrize("kind", quick(["lightweight", "dynamic"], chosen=["lightweight"]))
def test_kernels_equal_loops_written_from_the_equations(kind):
    # A length that no block divides.
    x, logits, dy = draw(kind, batch=1, length=20, taps=4)
    ids = packed_rows(1, 20)
    y, *_ = gradients(kind, {"segment_ids": ids, "dilation": 2}, x, logits, dy)
    if kind == "lightweight":
        weights = oracles.lightweight_weights(logits, 1, 20, 128)
    else:
        weights = oracles.dynamic_weights(logits, 128)
    expected = oracles.convolve(x, weights, dilation=2, segment_ids=np.asarray(ids))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", quick(list(CONVOLUTIONS), chosen=["dynamic"]))
def test_bfloat16_is_rounded_once_after_a_float32_sum(kind):
    x, weights, dy = draw(kind, length=40, taps=5, dtype=jnp.bfloat16)
    options = {"segment_ids": packed_rows(2, 40)}
    found = gradients(kind, options, x, weights, dy)
    wide = gradients(kind, options, *(a.astype(jnp.float32) for a in (x, weights, dy)), "plain")
    for low, exact in zip(found, wide, strict=True):
        # Half a unit in the last of 8 bits, and float32 sums on its edge.
        np.testing.assert_allclose(
            low.astype(jnp.float32), exact, rtol=2.0**-8, atol=1e-6 * np.abs(exact).max()
        )


def test_what_lies_in_padding_or_in_other_segments_is_never_read():
    x, logits, dy = draw("dynamic", length=128, taps=7)
    ids = jnp.asarray(np.repeat([[1, 0, 2, 3]], 32, axis=1) * np.ones((2, 1), np.int32))
    poisoned = jnp.where((ids == 3) | (ids == 0), jnp.nan, 0)[..., None]
    run = compiled_gradients("dynamic", {"segment_ids": ids}, x, logits, dy)
    clean, found = run(x, logits, dy), run(x + poisoned, logits, dy + poisoned)
    kept = np.asarray((ids != 3) & (ids != 0))
    for a, b in zip(found, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])
    assert not np.any(np.asarray(found[0])[np.asarray(ids == 0)])


SPLIT = [("depthwise", 256), ("dynamic", 2), ("dynamic", 1)]


@pytest.mark.parametrize("case", quick(SPLIT, chosen=SPLIT[1:2]), ids=str)
def test_rows_and_channels_split_over_devices_without_gathering(case):
    kind, heads = case
    x, weights, dy = draw(kind, batch=4, length=16, heads=heads, embed=256)
    options = {"segment_ids": packed_rows(4, 16)}
    expected = gradients(kind, options, x, weights, dy, "plain")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*axes)))  # noqa: E731
    x, dy = (place(a, "data", None, "tensor") for a in (x, dy))
    weights = place(weights, *(["data"] if kind == "dynamic" else []))
    ids = place(options["segment_ids"], "data")

    def run(x, weights, dy, ids):
        convolve = functools.partial(CONVOLUTIONS[kind], segment_ids=ids)
        y, vjp = jax.vjp(convolve, x, weights)
        return y, *vjp(dy)

    devices = dispatch.Devices(mesh, ("data",), ("tensor",))
    with dispatch.using(choice="interpreted kernels"), dispatch.using(devices=devices):
        compiled = jax.jit(run).lower(x, weights, dy, ids).compile()
    assert "all-gather" not in compiled.as_text()
    for found, wanted in zip(compiled(x, weights, dy, ids), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("depthwise", {"batch": 3}), ("depthwise", {"embed": 128}), ("dynamic", {"heads": 3})],
    ids=str,
)
def test_what_devices_cannot_share_is_computed_plainly(kind, sizes):
    x, weights, _ = jax.eval_shape(lambda: draw(kind, **{"batch": 4, "embed": 384} | sizes))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    devices = dispatch.Devices(mesh, ("data",), ("tensor",))
    with dispatch.using(choice="kernels"), dispatch.using(devices=devices):
        traced = jax.make_jaxpr(CONVOLUTIONS[kind])(x, weights)
    assert "pallas_call" not in str(traced)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"embed": 96}, {}),
        ({"length": 4096, "taps": 31, "heads": 2, "batch": 1, "embed": 512}, {"dilation": 128}),
        ({}, {"taps_cross_segments": True}),
        ({}, {"tap_dropout_rate": 0.5, "dropout_key": 0}),
    ],
    ids=["channels", "reach", "crossing taps", "dropout"],
)
def test_what_kernels_do_not_serve_is_computed_plainly(sizes, options):
    if "dropout_key" in options:
        options = options | {"dropout_key": jax.random.key(0)}
    x, logits, _ = jax.eval_shape(lambda: draw("dynamic", **sizes))
    with dispatch.using(choice="kernels"):
        traced = jax.make_jaxpr(functools.partial(dynamic_conv, **options))(x, logits)
    assert "pallas_call" not in str(traced)


# --- What they move -------------------------------------------------------------------------------


def kernel_calls(jaxpr):
    """The Pallas calls anywhere in a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for value in equation.params.values():
            for program in value if isinstance(value, tuple) else (value,):
                inner = getattr(program, "jaxpr", program)
                if hasattr(inner, "eqns"):
                    yield from kernel_calls(inner)


@pytest.mark.parametrize("kind", quick(list(CONVOLUTIONS), chosen=["depthwise", "dynamic"]))
@pytest.mark.parametrize("dilation", quick([1, 8], chosen=[8]))
def test_kernels_state_at_least_the_bytes_of_their_operands_and_results(kind, dilation):
    case = operator_costs.Case(kind=kind, taps=7, heads=2, dilation=dilation, length=1536, batch=2)
    x, *others = case.arrays
    with dispatch.using(choice="interpreted kernels"):
        traced = jax.make_jaxpr(case.both)(x, *others, x)
    found = list(kernel_calls(traced.jaxpr))
    assert len(found) == 2
    for call in found:
        avals = [v.aval for v in (*call.invars, *call.outvars)]
        size = sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
        # Halos are read twice.
        assert size <= call.params["cost_estimate"].bytes_accessed < 1.25 * size


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_generation_compiles_the_kernels(compiler, name):
    device = topology.load(name).devices[0]
    forward, both = operator_costs.measure(
        operator_costs.Case(kind="dynamic", taps=3, heads=2), device
    )
    assert (forward.kernels, both.kernels) == (1, 2)
    # The goals of docs/performance.md.
    assert forward.ratio < 1.3
    assert both.ratio < 2


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"kind": "depthwise", "taps": 31, "heads": 768, "dilation": 8},
        {"kind": "lightweight", "taps": 31, "heads": 16},
        {"kind": "dynamic", "taps": 31, "heads": 16, "dilation": 8, "padding": "CAUSAL"},
        {"kind": "dynamic", "taps": 7, "heads": 768, "dilation": 8},
        {"kind": "dynamic", "taps": 31, "heads": 768, "dilation": 8, "padding": "CAUSAL"},
    ],
    ids=str,
)
def test_bytes_stay_near_the_least_possible(compiler, case):
    device = topology.load("v5e:2x2").devices[0]
    forward, both = operator_costs.measure(operator_costs.Case(**case), device)
    assert forward.ratio < 1.3
    assert both.ratio < 2


@pytest.mark.tpu
def test_several_tpus_take_kernels_where_the_split_is_known_and_plain_jax_where_not(compiler):
    mesh = Mesh(np.array(topology.load("v5e:2x2").devices).reshape(2, 2), ("data", "tensor"))
    case = operator_costs.Case(kind="dynamic", taps=3, heads=2, length=128, embed=256)
    specs = [("data", None, "tensor"), ("data",), ("data",), ("data", None, "tensor")]
    x, *others = case.arrays
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for a, spec in zip((x, *others, x), specs, strict=True)
    ]
    devices = dispatch.Devices(mesh, ("data",), ("tensor",))
    with dispatch.using(devices=devices):
        told = jax.jit(case.both).lower(*arguments).compile().as_text() or ""
    untold = jax.jit(lambda *arrays: case.both(*arrays)).lower(*arguments).compile().as_text() or ""
    assert told.count('custom_call_target="tpu_custom_call"') == 2
    assert "all-gather" not in told
    assert "tpu_custom_call" not in untold


def test_programs_that_choose_by_platform_have_second_derivatives(libtpu):
    """Kernels have none: plain JAX gives them, of an operation that could be lowered to kernels."""
    x, kernel, _ = draw("depthwise", length=8)
    tokens = jnp.ones(x.shape[:2], jnp.int32)

    def loss(x, kernel):
        y = depthwise_conv(x, kernel)
        return linear_cross_entropy(y, kernel, tokens, tokens.astype(x.dtype)).loss

    found = jax.make_jaxpr(jax.grad(loss))(x, kernel)
    assert "formulation" in str(found)
    reverse, forward = hessian_products(loss, (x, kernel))
    with dispatch.using(choice="plain"):
        expected = hessian_product(loss, (x, kernel))
    for products in (reverse, forward):
        for a, b in zip(products, expected, strict=True):
            assert largest_error(a, b) < 1e-5
