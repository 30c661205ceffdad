"""The three convolutions against loops, references, and the properties they must have."""

import functools
import itertools
import json

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from quick import quick
from second_derivatives import hessian_product, hessian_products

from convt5.modeling.sharding import BATCH_AXES, MeshConfig
from convt5.ops import (
    depthwise_conv,
    dispatch,
    dynamic_conv,
    lightweight_conv,
    pad_widths,
)
from convt5.ops.convolution import cpu, gpu
from convt5.ops.geometry import Taps

KINDS = ["depthwise", "lightweight", "dynamic"]
CONVOLUTIONS = {
    "depthwise": depthwise_conv,
    "lightweight": lightweight_conv,
    "dynamic": dynamic_conv,
}
EMBED = 4
# Machine code is not optimised where many small cases are compared within a tolerance.
QUICK_COMPILATION = {"xla_backend_optimization_level": 0}
# Results that are equal bit for bit are so in the machine code that users get.
USUAL_COMPILATION = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
few = hypothesis.settings(max_examples=8, deadline=None, derandomize=True)


def draw(kind, *, batch=2, length=9, taps=3, heads=2, embed=EMBED, seed=0, dtype=np.float64):
    """Inputs and kernel (or logits) of one convolution."""
    rng = np.random.default_rng(seed)
    shape = {
        "depthwise": (taps, embed),
        "lightweight": (taps, heads),
        "dynamic": (batch, length, taps, heads),
    }[kind]
    x = rng.normal(size=(batch, length, embed))
    return jnp.asarray(x, dtype), jnp.asarray(rng.normal(size=shape), dtype)


def segments_of(*lengths, length):
    """One row of segment ids 1, 2, ... of the given lengths, then padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.pad(ids, (0, length - len(ids))), jnp.int32)


def weights_of(kind, kernel, x):
    """The oracle's weight of every tap: [batch, length, K, embed]."""
    batch, length, embed = x.shape
    if kind == "depthwise":
        return oracles.depthwise_weights(np.asarray(kernel), batch, length)
    if kind == "lightweight":
        return oracles.lightweight_weights(kernel, batch, length, embed)
    return oracles.dynamic_weights(kernel, embed)


def kernel_gradient(kind, kernel, weight_gradient):
    """The gradient in kernel or logits, from the oracle's in the weights of every tap."""
    if kind == "depthwise":
        return weight_gradient.sum(axis=(0, 1))
    heads = kernel.shape[-1]
    slope = weight_gradient.reshape(*weight_gradient.shape[:3], heads, -1).sum(axis=-1)
    if kind == "lightweight":
        slope = slope.sum(axis=(0, 1))
    weights = oracles.softmax(np.asarray(kernel), axis=-2)
    return weights * (slope - np.sum(weights * slope, axis=-2, keepdims=True))


def relative_error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = np.max(np.abs(expected))
    return np.max(np.abs(found - expected)) / (scale if scale > 0 else 1.0)


def output_and_gradients(function, inputs, cotangent):
    @functools.partial(jax.jit, compiler_options=QUICK_COMPILATION)
    def run(inputs, cotangent):
        output, vjp = jax.vjp(function, *inputs)
        return output, vjp(cotangent.astype(output.dtype))

    return run(inputs, jnp.asarray(cotangent))


# --- Against loops -------------------------------------------------------------------------------

CASES = {
    "adjacent": {"taps": 3},
    "even": {"taps": 4, "dilation": 2},
    "causal": {"taps": 3, "dilation": 2, "padding": "CAUSAL"},
    "explicit": {"taps": 3, "dilation": 2, "padding": (1, 3)},
    "one tap": {"taps": 1, "dilation": 3},
    "one position": {"taps": 3, "length": 1},
    "more taps than positions": {"taps": 9, "length": 4},
    "dilation beyond the row": {"taps": 3, "length": 4, "dilation": 11},
    "one kernel": {"taps": 3, "heads": 1},
    "kernel per channel": {"taps": 3, "heads": EMBED},
    "packed": {"taps": 3, "packed": True},
    "packed, even, causal": {"taps": 4, "dilation": 2, "padding": "CAUSAL", "packed": True},
    "packed, crossing": {"taps": 5, "packed": True, "taps_cross_segments": True},
}
_QUICK_CASES = ["even", "more taps than positions", "packed, even, causal", "packed, crossing"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", quick(list(CASES), chosen=_QUICK_CASES))
def test_outputs_and_gradients_equal_loops_written_from_the_equations(x64, kind, case):
    _check_against_loops(kind, **CASES[case])


def use_small_chunks(monkeypatch):
    """Makes gradients of weights go through several chunks, which do not divide the row."""
    monkeypatch.setattr(cpu, "CHUNK_ELEMENTS", 1)
    # Partial sums of two rows, three at a time.
    monkeypatch.setattr(cpu, "PARTIAL_SUM_ELEMENTS", 2 * EMBED)
    monkeypatch.setattr(cpu, "PARTIAL_SUM_TERMS", 3)
    monkeypatch.setattr(gpu, "STAGED_ROWS", 4)


def use_weight_gradient(monkeypatch, gradient):
    """Makes dynamic convolutions on CPU compute the gradient of their weights so."""
    monkeypatch.setattr(cpu, "_fastest", lambda *sizes: gradient)


FORMULATED_CASES = [
    {"taps": 3, "dilation": 2, "length": 21, "packed": True},
    {"taps": 5, "padding": "CAUSAL", "length": 19},
    {"taps": 4, "dilation": 3, "length": 17, "packed": True, "taps_cross_segments": True},
]


# Packed rows of one geometry, which each formulation computes in a way of its own.
QUICK_FORMULATED = quick(FORMULATED_CASES, chosen=FORMULATED_CASES[:1])


@pytest.mark.parametrize("case", QUICK_FORMULATED, ids=str)
@pytest.mark.parametrize(
    ("kind", "formulation"),
    [
        *itertools.product(("depthwise", "lightweight"), ("default", "gpu", "cpu")),
        *itertools.product(("dynamic",), ("default", "gpu", "chunked", "banded")),
    ],
)
def test_every_formulation_of_the_backward_pass_is_exact(x64, monkeypatch, kind, case, formulation):
    use_small_chunks(monkeypatch)
    monkeypatch.setattr(cpu, "BAND_ROWS", 4)
    if formulation in ("chunked", "banded"):
        use_weight_gradient(monkeypatch, getattr(cpu, f"{formulation}_weight_gradient"))
        formulation = "cpu"
    with dispatch.using(choice=formulation):
        _check_against_loops(kind, **case)


@pytest.mark.parametrize("case", QUICK_FORMULATED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_channels_between_them_are_exact(x64, monkeypatch, kind, case):
    use_small_chunks(monkeypatch)
    monkeypatch.setattr(cpu, "_filler", lambda x, stride, count: 3)
    use_weight_gradient(monkeypatch, cpu.banded_weight_gradient)
    with dispatch.using(choice="cpu"):
        _check_against_loops(kind, **case)


@pytest.mark.parametrize(
    ("embed", "dtype", "stride", "count", "expected"),
    [
        (256, "float32", 1, 32, 0),  # Four of them take all ways of four sets.
        (256, "float32", 1, 33, 16),
        (256, "bfloat16", 1, 33, 0),  # Eight sets.
        (1024, "float32", 1, 9, 16),
        (1024, "bfloat16", 2, 9, 32),
        (768, "float32", 8, 9, 16),
        (1024, "float32", 64, 9, 0),  # Any row of whole lines has the set of the one 64 before.
        (1000, "float32", 1, 33, 0),
    ],
)
def test_rows_are_set_apart_where_they_share_sets_of_the_cache(
    embed, dtype, stride, count, expected
):
    x = jax.ShapeDtypeStruct((1, 512, embed), dtype)
    assert cpu._filler(x, stride, count) == expected
    assert cpu._filler(jax.ShapeDtypeStruct((1, 4, embed), dtype), stride, count) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_set_apart_on_cpu_alone(kind):
    x, kernel = draw(kind, batch=1, length=64, taps=9, embed=1024, dtype=np.float32)
    with dispatch.using(platforms=("cpu", "tpu")):
        traced = jax.jit(CONVOLUTIONS[kind]).trace(x, kernel)
    programs = [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "tpu")]
    assert ["72x1040x" in program for program in programs] == [True, False]


@pytest.mark.parametrize("case", QUICK_FORMULATED, ids=str)
@pytest.mark.parametrize("heads", quick([1, 2, EMBED], chosen=[2]))
def test_taps_apart_as_on_gpu_are_exact(x64, case, heads):
    with dispatch.using(choice="gpu"):
        _check_against_loops("dynamic", heads=heads, **case)


def test_second_derivatives_of_taps_apart_are_those_of_taps_together(x64):
    x, logits = draw("dynamic")
    where = Taps(3, 1, 1, 1, cross_segments=False)

    def energy(x, logits):
        y = gpu.softmax_forward(where, None, x, logits)
        gradients = gpu.softmax_backward(where, None, x, logits, jnp.cos(y))
        return sum(jnp.sum(jnp.square(gradient)) for gradient in gradients)

    def expected_energy(x, logits):
        y, vjp = jax.vjp(CONVOLUTIONS["dynamic"], x, logits)
        return sum(jnp.sum(jnp.square(gradient)) for gradient in vjp(jnp.cos(y)))

    @jax.jit
    def both(x, logits):
        return [jax.grad(one, (0, 1))(x, logits) for one in (energy, expected_energy)]

    for found, one in zip(*both(x, logits), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_formulation_is_that_of_the_platform_that_is_lowered_for(kind):
    x, kernel = draw(kind, dtype=np.float32)
    with dispatch.using(platforms=("cpu", "gpu", "tpu")):
        traced = jax.jit(
            jax.grad(lambda *given: jnp.sum(jnp.sin(CONVOLUTIONS[kind](*given))), (0, 1))
        ).trace(x, kernel)

    def program(platform):
        return traced.lower(lowering_platforms=(platform,)).as_text()

    on_gpu, on_tpu = program("cuda"), program("tpu")
    assert program("rocm") == on_gpu
    if kind == "dynamic":
        # Logarithms of the softmax's sums are what is kept; elsewhere there are none.
        assert "stablehlo.log " in on_gpu
        assert "stablehlo.log " not in on_tpu
    else:
        # Products of all taps are one array, whose partial sums stay apart from their own.
        assert "optimization_barrier" in on_gpu
        assert "optimization_barrier" not in on_tpu


@pytest.mark.parametrize("kind", KINDS)
def test_equal_layers_are_traced_once_and_for_the_platforms_of_the_context_alone(monkeypatch, kind):
    traced = []

    def watch(module, direction):
        compute = getattr(module, direction)

        def watched(*given, **how):
            traced.append(module)
            return compute(*given, **how)

        monkeypatch.setattr(module, direction, watched)

    for module, direction in itertools.product((cpu, gpu), ("forward", "backward")):
        watch(module, direction)
    # Shapes that nothing has traced before.
    x, kernel = draw(kind, length=13 + KINDS.index(kind), dtype=np.float32)

    def two_layers(x, kernel):
        return jnp.sum(CONVOLUTIONS[kind](CONVOLUTIONS[kind](x, kernel), kernel))

    for platforms in (("cpu",), ("cpu", "gpu", "tpu")):
        traced.clear()
        with dispatch.using(platforms=platforms):
            jax.jit(jax.grad(two_layers, (0, 1))).trace(x, kernel)
        assert traced.count(cpu) == 2, "once in each direction"
        assert (gpu in traced) == ("gpu" in platforms)


def _check_against_loops(kind, **case):
    (x, kernel), cotangent, where, expected = _loops(kind, **case)
    convolve = functools.partial(CONVOLUTIONS[kind], **where)
    found, gradients = output_and_gradients(convolve, (x, kernel), cotangent)
    assert relative_error(found, expected[0]) < 1e-12
    assert relative_error(gradients[0], expected[1]) < 1e-12
    np.testing.assert_allclose(gradients[1], expected[2], rtol=1e-12, atol=1e-13)


@functools.cache
def _loops(
    kind,
    *,
    taps,
    length=9,
    heads=2,
    dilation=1,
    padding="CENTERED",
    packed=False,
    taps_cross_segments=False,
):
    """Arrays, settings, and the output and gradients that every formulation must give."""
    x, kernel = draw(kind, length=length, taps=taps, heads=heads)
    cotangent = draw("depthwise", length=length, seed=1)[0]
    ids = None
    if packed:
        ids = jnp.stack([segments_of(2, 3, length=length), segments_of(4, length=length)])
    where = {"dilation": dilation, "padding": padding}
    in_loops = where | {"crosses": taps_cross_segments}
    in_loops["segment_ids"] = None if ids is None else np.asarray(ids)
    weights = weights_of(kind, kernel, x)
    dx, dweights = oracles.convolve_gradients(x, weights, np.asarray(cotangent), **in_loops)
    expected = oracles.convolve(x, weights, **in_loops), dx, kernel_gradient(kind, kernel, dweights)
    where |= {"segment_ids": ids, "taps_cross_segments": taps_cross_segments}
    return (x, kernel), cotangent, where, expected


# --- Against other implementations ---------------------------------------------------------------

# Type, tolerance, and which of six neighbours of the recorded cases: each costs a compilation.
_SOME = ("float64", 1e-12, (0,))
_OTHERS = ("float64", 1e-12, (1, 2, 3, 4, 5))
_IN_FLOAT32 = ("float32", 1e-5, (0, 3))
PRECISIONS = quick([_SOME, _OTHERS, _IN_FLOAT32], chosen=[_SOME])


def _recorded(golden, name):
    folder, _, file = name.partition("/")
    cases = json.loads((golden / folder / f"{file}.json").read_text())
    cases = cases["cases"] if isinstance(cases, dict) else cases
    return cases, np.load(golden / folder / f"{file}.npz")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dilated_convolutions_equal_the_recorded_ones(golden, x64, precision):
    dtype, tolerance, sixths = precision
    cases, arrays = _recorded(golden, "oracle/dilated")
    x, cotangent = (jnp.asarray(arrays[name], dtype) for name in ("x", "cotangent"))
    for case in _some(cases, sixths):
        name, kernel = case["name"], jnp.asarray(arrays[f"w_k{case['kernel']}"], dtype)
        convolve = functools.partial(
            depthwise_conv,
            dilation=case["dilation"],
            padding=(case["pad_left"], case["pad_right"]),
        )
        y, (dx, dw) = output_and_gradients(convolve, (x, kernel), cotangent)
        assert y.dtype == dx.dtype == dw.dtype == dtype
        assert relative_error(y, arrays[f"{name}.y"]) < tolerance, name
        assert relative_error(dx, arrays[f"{name}.dx"]) < tolerance, name
        assert relative_error(dw, arrays[f"{name}.dw"]) < tolerance, name
    assert len(cases) == 34


def _some(cases, sixths):
    return [case for i, case in enumerate(cases) if i % 6 in sixths]


def _case_arrays(arrays, name, dtype):
    prefix = f"{name}."
    found = {key[len(prefix) :]: arrays[key] for key in arrays.files if key.startswith(prefix)}
    return {
        key: jnp.asarray(value, dtype if value.dtype.kind == "f" else None)
        for key, value in found.items()
    }


def _as_fairseq(convolve, case, inputs):
    """Zeroes padded inputs first and leaves padded outputs as they come, as fairseq does."""
    visible = 1 - inputs["pad_mask"].T[..., None].astype(int) if case["mask"] else None

    def run(x, *rest):
        x = x if visible is None else x * visible.astype(x.dtype)
        return convolve(jnp.swapaxes(x, 0, 1), *rest).swapaxes(0, 1)

    return run


def _check_case(case, inputs, run, names, tolerance):
    arguments = {name: inputs[name] for name in names if name in inputs}
    y, gradients = output_and_gradients(
        lambda *values: run(**dict(zip(arguments, values, strict=True))),
        tuple(arguments.values()),
        inputs["cotangent"],
    )
    assert relative_error(y, inputs["y"]) < tolerance, case["name"]
    for name, gradient in zip(arguments, gradients, strict=True):
        error = relative_error(gradient, inputs[f"d{name}"])
        assert error < tolerance, f"{case['name']}: gradient of {name}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lightweight_convolutions_equal_fairseq(golden, x64, precision):
    dtype, tolerance, sixths = precision
    cases, arrays = _recorded(golden, "fairseq/lightweight")
    # The batch-channel-time module shares kernels between interleaved channels: another function.
    cases = [case for case in cases if case["layout"] == "TBC"]
    for case in _some(cases, sixths):
        inputs = _case_arrays(arrays, case["name"], dtype)
        convolve = functools.partial(
            lightweight_conv,
            padding=(case["padding_l"], case["K"] - 1 - case["padding_l"]),
            softmax=case["softmax"],
        )
        fairseq = _as_fairseq(convolve, case, inputs)

        def run(x, weight, bias=None, fairseq=fairseq):
            y = fairseq(x, weight[:, 0].T)
            return y if bias is None else y + bias[None, None]

        _check_case(case, inputs, run, ("x", "weight", "bias"), tolerance)
    assert len(cases) == 17


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dynamic_convolutions_equal_fairseq(golden, x64, precision):
    dtype, tolerance, sixths = precision
    cases, arrays = _recorded(golden, "fairseq/dynamic")
    for case in _some(cases, sixths):
        inputs = _case_arrays(arrays, case["name"], dtype)
        names = ("x", "weight_linear.weight", "weight_linear.bias", "conv_bias", "query")
        run = functools.partial(_fairseq_dynamic, case, inputs)
        _check_case(case, inputs, lambda run=run, **given: run(given), names, tolerance)
    assert len(cases) == 17


def _fairseq_dynamic(case, inputs, given):
    left, taps, heads = case["padding_l"], case["K"], case["H"]
    x = given["x"]
    if case["mask"]:
        x = x * (1 - inputs["pad_mask"].T[..., None].astype(x.dtype))
    linear = given.get("query", x) @ given["weight_linear.weight"].T
    if "weight_linear.bias" in given:
        linear = linear + given["weight_linear.bias"][None, None]
    if case["in_proj"]:
        x, linear = linear[..., : case["C"]], linear[..., case["C"] :]
    # time batch heads taps -> batch time taps heads
    logits = linear.reshape(*linear.shape[:2], heads, taps).transpose(1, 0, 3, 2)
    if case["renorm"]:
        source = jnp.arange(case["T"])[:, None] + jnp.arange(taps)[None] - left
        inside = (source >= 0) & (source < case["T"])
        logits = jnp.where(inside[None, :, :, None], logits, -jnp.inf)
    y = dynamic_conv(
        jnp.swapaxes(x, 0, 1), logits, padding=(left, taps - 1 - left), softmax=case["softmax"]
    ).swapaxes(0, 1)
    return y + given["conv_bias"][None, None] if "conv_bias" in given else y


# --- Algebra -------------------------------------------------------------------------------------


def test_lightweight_equals_depthwise_with_repeated_softmax_kernels(x64):
    x, logits = draw("lightweight", taps=5, embed=8)
    kernel = jnp.repeat(jax.nn.softmax(logits, axis=0), 4, axis=1)
    np.testing.assert_allclose(
        lightweight_conv(x, logits), depthwise_conv(x, kernel), rtol=1e-12, atol=1e-14
    )


def test_dynamic_with_the_same_kernels_everywhere_equals_lightweight(x64):
    x, logits = draw("lightweight", taps=5)
    everywhere = jnp.broadcast_to(logits, (*x.shape[:2], *logits.shape))
    np.testing.assert_allclose(
        dynamic_conv(x, everywhere), lightweight_conv(x, logits), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("padding", ["CENTERED", "CAUSAL"])
def test_dilation_equals_a_kernel_with_zeros_between_the_taps(x64, padding):
    x, kernel = draw("depthwise", length=20, taps=4)
    spread = jnp.zeros((10, EMBED)).at[::3].set(kernel)
    widths = pad_widths(4, 3, padding)
    np.testing.assert_allclose(
        depthwise_conv(x, kernel, dilation=3, padding=padding),
        depthwise_conv(x, spread, padding=widths),
        rtol=1e-12,
        atol=1e-14,
    )


def test_a_dilated_causal_stack_sees_4096_positions():
    def stack(x):
        for layer in range(12):
            x = depthwise_conv(x, jnp.ones((2, 1)), dilation=2**layer, padding="CAUSAL")
        return x

    seen = jax.jit(jax.grad(lambda x: stack(x)[0, 4500, 0]))(jnp.zeros((1, 5000, 1)))[0, :, 0]
    np.testing.assert_array_equal(np.flatnonzero(seen), np.arange(4500 - 4095, 4501))


# --- Properties ----------------------------------------------------------------------------------

geometry = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "taps": st.sampled_from([1, 2, 3, 4, 7]),
        "dilation": st.sampled_from([1, 2, 5]),
        "padding": st.sampled_from(["CENTERED", "CAUSAL"]),
    }
)


def _convolution(kind, taps, dilation, padding, *, dtype=np.float32, **sizes):
    x, kernel = draw(kind, taps=taps, dtype=dtype, **sizes)
    convolve = functools.partial(CONVOLUTIONS[kind], dilation=dilation, padding=padding)
    return jax.jit(convolve), x, kernel


@few
@hypothesis.given(geometry, st.sampled_from([1, 4]))
def test_shifting_the_input_shifts_the_output_away_from_the_ends(where, shift):
    convolve, x, kernel = _convolution(**where, length=24)
    # Dynamic kernels move along.
    moved_kernel = jnp.roll(kernel, shift, axis=1) if kernel.ndim == 4 else kernel
    left, right = pad_widths(where["taps"], where["dilation"], where["padding"])
    hypothesis.assume(left + right + shift < 24)
    moved = convolve(jnp.roll(x, shift, axis=1), moved_kernel)
    inner = slice(left, 24 - right - shift)
    expected = convolve(x, kernel)[:, inner]
    np.testing.assert_array_equal(moved[:, left + shift : 24 - right], expected)


@few
@hypothesis.given(geometry)
def test_the_output_is_linear_in_the_input(where):
    convolve, x, kernel = _convolution(**where)
    other = draw("depthwise", seed=7, dtype=np.float32)[0]
    combined = convolve(2.0 * x - 3.0 * other, kernel)
    separate = 2.0 * convolve(x, kernel) - 3.0 * convolve(other, kernel)
    # Sums of at most seven terms of size about ten, in float32.
    np.testing.assert_allclose(combined, separate, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dilation", [1, 3])
def test_causal_convolution_never_reads_the_future(kind, dilation):
    convolve, x, kernel = _convolution(kind, 4, dilation, "CAUSAL", length=12)
    jacobian = jax.jit(jax.jacobian(lambda x: convolve(x, kernel)[0, :, 0]))(x)[:, 0, :, 0]
    np.testing.assert_array_equal(np.triu(jacobian, k=1), 0)
    assert np.all(np.diagonal(jacobian) != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_reaches_exactly_the_taps(kind):
    convolve, x, kernel = _convolution(kind, 4, 2, "CENTERED", length=15)
    gradient = jax.jit(jax.grad(lambda x: convolve(x, kernel)[0, 8, 0]))(x)
    np.testing.assert_array_equal(np.unique(np.nonzero(gradient)[1]), [4, 6, 8, 10])


@hypothesis.settings(few, max_examples=3)
@hypothesis.given(geometry, st.sampled_from([1, 6]))
def test_longer_padding_leaves_the_output_bit_for_bit(where, extra):
    _check_padding(where, extra)


@pytest.mark.nightly
@few
@hypothesis.given(geometry, st.sampled_from([1, 6]))
def test_longer_padding_of_more_kinds_leaves_the_output_bit_for_bit(where, extra):
    _check_padding(where, extra)


def _check_padding(where, extra):
    convolve, x, kernel = _convolution(**where)
    ids = jnp.ones(x.shape[:2], jnp.int32).at[1, 5:].set(0)
    longer = jnp.pad(x, ((0, 0), (0, extra), (0, 0)), constant_values=99.0)
    longer_ids = jnp.pad(ids, ((0, 0), (0, extra)))
    longer_kernel = kernel
    if where["kind"] == "dynamic":
        longer_kernel = jnp.pad(kernel, ((0, 0), (0, extra), (0, 0), (0, 0)))
    run = jax.jit(convolve, compiler_options=USUAL_COMPILATION)
    y = run(x, kernel, segment_ids=ids)
    longer_y = run(longer, longer_kernel, segment_ids=longer_ids)
    np.testing.assert_array_equal(longer_y[:, :9], y)
    np.testing.assert_array_equal(longer_y[:, 9:], 0)
    np.testing.assert_array_equal(y[1, 5:], 0)


# Examples of one length share a program.
PACKINGS = [(8, 8), (3, 3, 3), (1, 1, 14)]


@hypothesis.settings(few, max_examples=3)
@hypothesis.given(geometry, st.sampled_from(PACKINGS), st.sampled_from([1, 2, EMBED]))
def test_packed_examples_equal_separate_ones_bit_for_bit(where, lengths, heads):
    _check_packing(lengths, where, length=16, heads=heads)


@pytest.mark.gpu
@pytest.mark.nightly
@few
@hypothesis.given(geometry, st.sampled_from(PACKINGS), st.sampled_from([1, 2, EMBED]))
def test_packed_examples_of_more_kinds_equal_separate_ones_bit_for_bit(where, lengths, heads):
    _check_packing(lengths, where, length=16, heads=heads)


UNEVEN = [
    {"kind": "dynamic", "taps": 7, "dilation": 1, "padding": "CENTERED", "heads": 3},
    {"kind": "dynamic", "taps": 5, "dilation": 2, "padding": "CAUSAL", "heads": 33},
    {"kind": "lightweight", "taps": 9, "dilation": 1, "padding": "CENTERED", "heads": 1},
    {"kind": "lightweight", "taps": 31, "dilation": 1, "padding": "CENTERED", "heads": 1},
]


@pytest.mark.parametrize("where", quick(UNEVEN, chosen=UNEVEN[:1]), ids=str)
def test_rows_that_fill_vector_registers_unevenly_pack_bit_for_bit(where):
    _check_packing((45, 45), where, length=100, embed=33)


def _check_packing(lengths, where, *, length, **sizes):
    """Compares outputs and input gradients; gradients of kernels sum over positions or channels."""
    convolve, x, kernel = _convolution(**where, **sizes, batch=1, length=length)
    cotangent = jnp.cos(x)

    @functools.partial(jax.jit, compiler_options=USUAL_COMPILATION)
    def run(x, kernel, ids, cotangent):
        y, vjp = jax.vjp(lambda x: convolve(x, kernel, segment_ids=ids), x)
        return y, *vjp(cotangent)

    packed = run(x, kernel, segments_of(*lengths, length=length)[None], cotangent)
    start = 0
    for size in lengths:
        own = slice(start, start + size)
        own_kernel = kernel[:, own] if where["kind"] == "dynamic" else kernel
        alone = run(x[:, own], own_kernel, jnp.ones((1, size), jnp.int32), cotangent[:, own])
        for whole, part in zip(packed, alone, strict=True):
            np.testing.assert_array_equal(whole[:, own], part)
        start += size
    for whole in packed:
        np.testing.assert_array_equal(whole[:, start:], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_segment_equals_no_segments_bit_for_bit(kind):
    convolve, x, kernel = _convolution(kind, 4, 2, "CENTERED")
    ids = jnp.full(x.shape[:2], 5, jnp.int32)
    run = jax.jit(convolve, compiler_options=USUAL_COMPILATION)
    np.testing.assert_array_equal(run(x, kernel, segment_ids=ids), run(x, kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_padding_or_another_segment_is_never_touched(kind):
    convolve, x, kernel = _convolution(kind, 5, 1, "CENTERED", batch=1)
    ids = segments_of(3, 4, length=9)[None]

    def loss(x, kernel):
        return jnp.sum(jnp.square(convolve(x, kernel, segment_ids=ids)[:, :3]))

    poisoned = x.at[:, 3:].set(jnp.nan)
    run = jax.jit(jax.value_and_grad(loss))
    value, gradient = run(poisoned, kernel)
    expected, expected_gradient = run(x, kernel)
    assert value == expected
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_array_equal(gradient[:, 3:], 0)


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_softmax_kernels_sum_to_one(kind):
    convolve, x, kernel = _convolution(kind, 5, 1, "CENTERED", length=12)
    # A constant signal passes unchanged wherever every tap lies inside the row.
    y = convolve(jnp.ones_like(x), 30.0 * kernel)
    np.testing.assert_allclose(y[:, 2:-2], 1.0, rtol=1e-6)
    assert np.all(np.asarray(y) < 1.0 + 1e-6)


# --- Dropout of taps -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_tap_dropout_keeps_the_mean_and_drops_the_stated_share(kind):
    convolve = functools.partial(CONVOLUTIONS[kind], tap_dropout_rate=0.25)
    _, logits = draw(kind, batch=2, length=4, taps=1, heads=4, dtype=np.float32)
    x = jnp.ones((2, 4, EMBED))
    keys = jax.random.split(jax.random.key(0), 2000)
    # One tap, so its weight is 0 or 1 / 0.75.
    y = np.asarray(jax.jit(jax.vmap(lambda key: convolve(x, logits, dropout_key=key)))(keys))
    np.testing.assert_allclose(np.unique(y), [0.0, 1 / 0.75], rtol=1e-6)
    # 8000 independent draws at least: one standard deviation is below 0.005.
    assert abs(np.mean(y == 0) - 0.25) < 0.02


def test_every_position_has_its_own_draw_in_dynamic_convolution():
    x = jnp.ones((2, 64, EMBED))
    y = dynamic_conv(
        x,
        jnp.zeros((2, 64, 1, 1)),
        tap_dropout_rate=0.5,
        dropout_key=jax.random.key(1),
    )
    assert 0.2 < np.mean(np.asarray(y[:, :, 0]) == 0) < 0.8
    assert np.any(np.asarray(y[0]) != np.asarray(y[1]))


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_without_a_key_nothing_is_dropped(kind):
    x, kernel = draw(kind, dtype=np.float32)
    convolve = CONVOLUTIONS[kind]
    np.testing.assert_array_equal(convolve(x, kernel, tap_dropout_rate=0.5), convolve(x, kernel))


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_gradients_pass_through_the_taps_that_were_kept(x64, kind):
    x, logits = draw(kind)
    convolve = functools.partial(
        CONVOLUTIONS[kind], tap_dropout_rate=0.4, dropout_key=jax.random.key(2)
    )
    loss = jax.jit(lambda x, logits: jnp.sum(jnp.sin(convolve(x, logits))))
    direction = draw(kind, seed=5)
    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, logits)
    step = 1e-5
    moved = [
        loss(*(a + sign * step * d for a, d in zip((x, logits), direction, strict=True)))
        for sign in (1, -1)
    ]
    expected = sum(jnp.sum(s * d) for s, d in zip(slopes, direction, strict=True))
    # Central differences in float64: error of the order of step squared.
    np.testing.assert_allclose((moved[0] - moved[1]) / (2 * step), expected, rtol=1e-8)


# --- Types, transformations, devices -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once_after_a_float32_sum(kind):
    x, kernel = draw(kind, taps=7, dtype=jnp.bfloat16)
    y, (dx, dkernel) = output_and_gradients(
        CONVOLUTIONS[kind], (x, kernel.astype(jnp.float32)), jnp.ones_like(x)
    )
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert dkernel.dtype == jnp.float32
    convolve = jax.jit(CONVOLUTIONS[kind], compiler_options=QUICK_COMPILATION)
    exact = convolve(x.astype(jnp.float32), kernel.astype(jnp.float32))
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("kind", quick(KINDS, chosen=["dynamic"]))
def test_vmap_and_remat_change_nothing(kind):
    x, kernel = draw(kind, dtype=np.float32)
    ids = jnp.stack([segments_of(2, 5, length=9)] * 2)
    convolve = functools.partial(CONVOLUTIONS[kind], segment_ids=ids)
    loss = lambda x, kernel: jnp.sum(jnp.sin(convolve(x, kernel)))  # noqa: E731
    plain, rematerialised = (jax.grad(f, argnums=(0, 1)) for f in (loss, jax.checkpoint(loss)))

    @jax.jit
    def all_ways(x, kernel):
        doubled = jax.vmap(plain)(jnp.stack([2 * x, x]), jnp.stack([kernel, kernel]))
        return plain(x, kernel), rematerialised(x, kernel), [each[1] for each in doubled]

    for gradient, *others in zip(*all_ways(x, kernel), strict=True):
        for found in others:
            np.testing.assert_allclose(found, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", quick(KINDS, chosen=["depthwise"]))
def test_a_batch_split_over_devices_gives_the_same_gradients(monkeypatch, kind):
    use_small_chunks(monkeypatch)
    x, kernel = draw(kind, batch=8, length=20, dtype=np.float32)
    mesh = MeshConfig(data=8).build(jax.devices())
    split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    loss = lambda x, kernel: jnp.sum(jnp.sin(CONVOLUTIONS[kind](x, kernel)))  # noqa: E731
    expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernel)
    told = dispatch.Devices(mesh, BATCH_AXES, ("tensor",), ("sequence",))
    for devices in (None, told):
        with dispatch.using(devices=devices):
            gradients = jax.jit(jax.grad(lambda *given: loss(*given), argnums=(0, 1)))
            compiled = gradients.lower(split, kernel).compile()
        if devices:
            assert "all-gather" not in compiled.as_text()
        # Sums over the batch are taken in another order.
        for found, one in zip(compiled(split, kernel), expected, strict=True):
            np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", quick(KINDS, chosen=["dynamic"]))
def test_a_long_sequence_needs_memory_for_no_products_of_taps(kind):
    # 64 channels of each kernel, so that the tap weights are small beside the activations.
    x, kernel = jax.eval_shape(
        lambda: draw(kind, batch=1, length=4096, taps=12, embed=128, dtype=np.float32)
    )
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(x, kernel, ids):
        return jnp.sum(jnp.square(CONVOLUTIONS[kind](x, kernel, segment_ids=ids)))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, kernel, ids).compile()
    activations = 4 * x.size
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * activations


# --- Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_dilation_below_one_is_refused(kind):
    x, kernel = draw(kind, dtype=np.float32)
    with pytest.raises(ValueError, match="dilation=0 must be an integer of at least 1"):
        CONVOLUTIONS[kind](x, kernel, dilation=0)


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_kernels_that_do_not_divide_the_channels_are_refused(kind):
    x, kernel = draw(kind, heads=3, dtype=np.float32)
    with pytest.raises(ValueError, match="num_kernels=3, which must divide embed=4"):
        CONVOLUTIONS[kind](x, kernel)


# --- Shapes that hold nothing, or do not fit ------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}])
@pytest.mark.parametrize("kind", KINDS)
def test_no_positions_have_no_outputs_and_gradients_of_zero(kind, sizes):
    x, kernel = draw(kind, dtype=np.float32, **sizes)
    y, (dx, dkernel) = output_and_gradients(CONVOLUTIONS[kind], (x, kernel), jnp.ones_like(x))
    assert y.shape == dx.shape == x.shape
    np.testing.assert_array_equal(dkernel, np.zeros(kernel.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_other_axes_are_refused(unchecked, kind):
    x, kernel = draw(kind, dtype=np.float32)
    convolve = CONVOLUTIONS[kind]
    name = "kernel" if kind == "depthwise" else "kernel_logits"
    other = {"depthwise": kernel[0], "lightweight": x[..., None], "dynamic": kernel[0]}[kind]
    for given, message in (
        ((x[0], kernel), r"x has shape \(9, 4\), but must have the axes \[batch, length, embed\]"),
        ((x[None], kernel), "x has shape .* must have the axes"),
        ((x, other), f"{name} has shape .* must have the axes"),
        ((x.astype(int), kernel), "x has dtype int32"),
        ((x.tolist(), kernel), "x has shape list, which is no array"),
        ((x, kernel.astype(complex)), f"{name} has dtype complex64; give real numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            convolve(*given)
    with pytest.raises(ValueError, match=r"segment_ids has shape .* axes \[batch, length\]"):
        convolve(x, kernel, segment_ids=jnp.ones(x.shape, int))


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_no_kernels_are_refused(kind):
    with pytest.raises(ValueError, match="num_kernels=0, which must divide embed=4"):
        CONVOLUTIONS[kind](*draw(kind, heads=0, dtype=np.float32))


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_a_misspelt_setting_is_named(kind):
    with pytest.raises(TypeError, match=rf"{kind}_conv\(\) got .* keyword argument 'sofmax'"):
        CONVOLUTIONS[kind](*draw(kind, dtype=np.float32), sofmax=False)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_a_share_of_dropped_taps_that_is_none_is_refused(kind, rate):
    with pytest.raises(ValueError, match=r"tap_dropout_rate=.* must be in \[0, 1\)"):
        CONVOLUTIONS[kind](*draw(kind, dtype=np.float32), tap_dropout_rate=rate)


@pytest.mark.parametrize("kind", ["lightweight", "dynamic"])
def test_a_rate_is_a_number_of_any_kind_that_is_known(unchecked, kind):
    x, kernel = draw(kind, dtype=np.float32)
    drop = functools.partial(CONVOLUTIONS[kind], x, kernel, dropout_key=jax.random.key(0))
    found = drop(tap_dropout_rate=jnp.float32(0.5))
    np.testing.assert_array_equal(found, drop(tap_dropout_rate=0.5))
    with pytest.raises(ValueError, match=r"tap_dropout_rate=.* must be in \[0, 1\)"):
        jax.jit(drop)(tap_dropout_rate=0.5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("depthwise", "taps_cross_segments"),
        ("depthwise", "split_channels"),
        ("lightweight", "softmax"),
        ("dynamic", "softmax"),
    ],
)
def test_a_flag_is_true_or_false(unchecked, kind, name):
    convolve = functools.partial(CONVOLUTIONS[kind], *draw(kind, dtype=np.float32))
    found = convolve(**{name: np.bool_(True)})
    np.testing.assert_array_equal(found, convolve(**{name: True}))
    for wrong in ("no", None, jnp.array(True)):
        with pytest.raises(ValueError, match=f"{name}=.* must be True or False"):
            convolve(**{name: wrong})


@pytest.mark.parametrize("dilation", [2.0, 1.5, None])
def test_a_dilation_that_is_no_integer_is_refused(unchecked, dilation):
    with pytest.raises(ValueError, match=f"dilation={dilation} must be an integer of"):
        depthwise_conv(*draw("depthwise", dtype=np.float32), dilation=dilation)


@pytest.mark.parametrize("shape", [(2, 1), (1, 9), (2, 10)])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_other_positions_are_refused(unchecked, kind, shape):
    x, kernel = draw(kind, dtype=np.float32)
    with pytest.raises(ValueError, match=r"segment_ids has shape .* but x has shape \(2, 9, 4\)"):
        CONVOLUTIONS[kind](x, kernel, segment_ids=jnp.ones(shape, jnp.int32))


@pytest.mark.parametrize("dtype", [float, bool, complex])
def test_segments_that_are_no_integers_are_refused(unchecked, dtype):
    x, kernel = draw("depthwise", dtype=np.float32)
    with pytest.raises(ValueError, match=r"segment_ids has dtype .*; give integers"):
        depthwise_conv(x, kernel, segment_ids=jnp.ones(x.shape[:2], dtype))


def test_segments_of_more_than_32_bits_are_refused(unchecked):
    x, kernel = draw("depthwise", dtype=np.float32)
    ids = np.full(x.shape[:2], 2**32)
    with pytest.raises(ValueError, match="segment_ids holds ids of more than 32 bits"):
        depthwise_conv(x, kernel, segment_ids=ids)
    found = depthwise_conv(x, kernel, segment_ids=ids // 2**32)
    np.testing.assert_array_equal(found, depthwise_conv(x, kernel))


@pytest.mark.parametrize("shape", [(2, 1, 3, 2), (1, 9, 3, 2)])
def test_logits_of_other_positions_are_refused(unchecked, shape):
    x, _ = draw("dynamic", dtype=np.float32)
    with pytest.raises(ValueError, match=r"kernel_logits has shape .* but x has shape \(2, 9, 4\)"):
        dynamic_conv(x, jnp.ones(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_without_taps_is_refused(kind):
    x, kernel = draw(kind, taps=0, dtype=np.float32)
    with pytest.raises(ValueError, match="0 taps"):
        CONVOLUTIONS[kind](x, kernel)


def test_padding_may_be_integers_of_numpy(unchecked):
    x, kernel = draw("depthwise", dtype=np.float32)
    found = depthwise_conv(x, kernel, padding=(np.int64(2), np.int64(0)))
    np.testing.assert_array_equal(found, depthwise_conv(x, kernel, padding=(2, 0)))
    np.testing.assert_array_equal(found, depthwise_conv(x, kernel, padding=np.array([2, 0])))
    with pytest.raises(ValueError, match="must hold two integers"):
        depthwise_conv(x, kernel, padding=(2.0, 0))


# --- Second derivatives ---------------------------------------------------------------------------


def sums_of_shifts(kind, x, kernel, segment_ids):
    """A convolution of adjacent taps that JAX differentiates as often as asked."""
    taps = kernel.shape[-2]
    if kind != "depthwise":
        kernel = jnp.repeat(jax.nn.softmax(kernel, axis=-2), EMBED // kernel.shape[-1], axis=-1)
    kernel = kernel if kernel.ndim == 4 else kernel[None, None]
    total = jnp.zeros_like(x)
    for j in range(taps):
        offset = j - (taps - 1) // 2
        rows = np.arange(x.shape[1]) + offset
        inside = (rows >= 0) & (rows < x.shape[1])
        rows = np.clip(rows, 0, x.shape[1] - 1)
        seen = inside[None] & (segment_ids[:, rows] == segment_ids) & (segment_ids != 0)
        total = total + jnp.where(seen[..., None], kernel[:, :, j] * x[:, rows], 0.0)
    return total


@pytest.mark.parametrize("kind", quick(KINDS, chosen=["dynamic"]))
def test_second_derivatives_are_those_of_sums_of_shifts_in_either_mode(x64, kind):
    x, kernel = draw(kind)
    ids = jnp.stack([segments_of(5, 3, length=9), segments_of(9, length=9)])

    def loss(convolve):
        return lambda x, kernel: jnp.sum(convolve(x, kernel) ** 3)

    ours = loss(functools.partial(CONVOLUTIONS[kind], segment_ids=ids))
    plainly = loss(lambda x, kernel: sums_of_shifts(kind, x, kernel, ids))
    expected = hessian_product(plainly, (x, kernel))
    for found in hessian_products(ours, (x, kernel)):
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) < 1e-12
