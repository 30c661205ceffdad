"""Rows that devices share: equal to whole rows, and no more travels than what the taps reach."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quick import quick
from test_model import tiny_config

from convt5.analysis import collectives, topology
from convt5.modeling.architecture import StackConfig
from convt5.modeling.blocks import Stack
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.sharding import BATCH_AXES, MeshConfig, token_sharding
from convt5.ops import attend, depthwise_conv, dispatch, dynamic_conv, lightweight_conv
from convt5.ops.convolution import sharded
from convt5.ops.geometry import pad_widths

CONVOLUTIONS = {
    "depthwise": depthwise_conv,
    "lightweight": lightweight_conv,
    "dynamic": dynamic_conv,
}
BATCH, EMBED, HEADS = 2, 8, 4


def devices_of(mesh: Mesh) -> dispatch.Devices:
    return dispatch.Devices(mesh, BATCH_AXES, ("tensor",), ("sequence",))


def mesh_of(*, sequence: int, tensor: int = 1, data: int = 1) -> Mesh:
    count = sequence * tensor * data
    config = MeshConfig(data=data, sequence=sequence, tensor=tensor)
    return config.build(jax.devices()[:count])


def on_one_and_on_many(function, mesh: Mesh, *arrays):
    """Returns what a function gives on one device, and where devices share the rows."""
    expected = jax.jit(function)(*arrays)
    with dispatch.using(devices=devices_of(mesh)):
        found = jax.jit(lambda *given: function(*given))(*arrays)
    return found, expected


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        # Sums over devices are added in another order: float32 rounding of the largest, no more.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * max(1.0, np.abs(b).max()))


def packed_rows(rng: np.random.Generator, batch: int, length: int) -> jax.Array:
    """Segments of any length, in order, with padding in between and behind."""
    ids = np.sort(rng.integers(1, 5, (batch, length)), axis=1).astype(np.int32)
    ids[rng.random((batch, length)) < 0.15] = 0
    return jnp.asarray(ids)


# --- Equal to whole rows --------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [(2, 1), (0, 3), (4, 0), (9, 5), (12, 12)])
def test_a_widened_piece_is_what_the_zero_padded_row_holds_there(left, right):
    count, piece = 4, 4
    row = np.arange(1.0, 1 + count * piece)[None]
    mesh = Mesh(np.array(jax.devices()[:count]), ("sequence",))
    spec = PartitionSpec(None, "sequence")
    widen = functools.partial(
        sharded.widen, devices=("sequence",), count=count, left=left, right=right
    )
    found = jax.jit(jax.shard_map(widen, mesh=mesh, in_specs=spec, out_specs=spec))(row)
    padded = np.pad(row[0], (left, right))
    expected = [padded[i * piece :][: left + piece + right] for i in range(count)]
    np.testing.assert_array_equal(np.split(found[0], count), expected)


@st.composite
def convolutions(draw):
    kind = draw(st.sampled_from(sorted(CONVOLUTIONS)))
    taps, dilation = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 7, 11]))
    reach = (taps - 1) * dilation
    padding = draw(st.sampled_from(["CENTERED", "CAUSAL", (0, reach), (reach // 3, None)]))
    if not isinstance(padding, str):
        padding = (padding[0], reach - padding[0])
    sequence = draw(st.sampled_from([2, 4, 8]))
    return {
        "kind": kind,
        "taps": taps,
        "dilation": dilation,
        "padding": padding,
        "sequence": sequence,
        "tensor": draw(st.sampled_from([t for t in (1, 2) if t * sequence <= 8])),
        # Often shorter than the reach, so that several neighbours are asked.
        "piece": draw(st.sampled_from([1, 3, 4, 8])),
        "packed": draw(st.booleans()),
        "crosses": draw(st.booleans()),
        "dropout": draw(st.booleans()) and kind == "dynamic",
        "seed": draw(st.integers(0, 99)),
    }


def check_convolution(case):
    rng = np.random.default_rng(case["seed"])
    length, taps = case["piece"] * case["sequence"], case["taps"]
    shapes = {
        "depthwise": (taps, EMBED),
        "lightweight": (taps, HEADS),
        "dynamic": (BATCH, length, taps, HEADS),
    }
    x, dy = rng.normal(size=(2, BATCH, length, EMBED)).astype(np.float32)
    weights = rng.normal(size=shapes[case["kind"]]).astype(np.float32)
    ids = packed_rows(rng, BATCH, length) if case["packed"] else None
    dropout = {"tap_dropout_rate": 0.4, "dropout_key": jax.random.key(case["seed"])}
    convolve = functools.partial(
        CONVOLUTIONS[case["kind"]],
        dilation=case["dilation"],
        padding=case["padding"],
        segment_ids=ids,
        taps_cross_segments=case["crosses"],
        **(dropout if case["dropout"] else {}),
    )

    def both(x, weights, dy):
        y, vjp = jax.vjp(convolve, x, weights)
        return y, *vjp(dy)

    mesh = mesh_of(sequence=case["sequence"], tensor=case["tensor"])
    assert_equal(*on_one_and_on_many(both, mesh, x, weights, dy))


SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@settings(SETTINGS, max_examples=6)
@given(case=convolutions())
def test_a_convolution_of_split_rows_equals_that_of_whole_rows(case):
    check_convolution(case)


@pytest.mark.nightly
@settings(SETTINGS, max_examples=40)
@given(case=convolutions())
def test_many_convolutions_of_split_rows_equal_those_of_whole_rows(case):
    check_convolution(case)


def test_kernels_of_fewer_groups_than_devices_are_shared():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 8, EMBED)).astype(np.float32)
    logits = rng.normal(size=(BATCH, 8, 3, 2)).astype(np.float32)

    def both(x, logits):
        y, vjp = jax.vjp(dynamic_conv, x, logits)
        return y, *vjp(x)

    assert_equal(*on_one_and_on_many(both, mesh_of(sequence=2, tensor=4), x, logits))


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_gradients_of_split_rows_are_summed_in_float64(x64, kind):
    rng = np.random.default_rng(0)
    shapes = {"depthwise": (3, EMBED), "lightweight": (3, 2), "dynamic": (BATCH, 8, 3, 2)}
    x, weights = rng.normal(size=(BATCH, 8, EMBED)), rng.normal(size=shapes[kind])

    def slopes(x, weights):
        return jax.vjp(CONVOLUTIONS[kind], x, weights)[1](jnp.sin(x))

    found, expected = on_one_and_on_many(slopes, mesh_of(sequence=2, tensor=4), x, weights)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_length_that_devices_do_not_divide_is_refused():
    x = jnp.zeros((1, 6, 8))
    with (
        dispatch.using(devices=devices_of(mesh_of(sequence=4))),
        pytest.raises(ValueError, match="length=6 must be a multiple of 4, the devices"),
    ):
        depthwise_conv(x, jnp.zeros((3, 8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", quick(["plain", "interpreted kernels"], chosen=["interpreted kernels"])
)
@pytest.mark.parametrize(
    "case",
    quick(
        ["causal, biased", "causal", "biased", "another length"],
        chosen=["causal, biased"],
    ),
)
def test_attention_over_split_rows_equals_that_over_whole_rows(case, choice):
    causal, biased = "causal" in case, "biased" in case
    target, source, heads, head_dim = 8, 8 if causal or biased else 16, 2, 64
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    query, dy = draw(2, BATCH, target, heads, head_dim)
    query = query / 8
    key, value = draw(2, BATCH, source, heads, head_dim)
    bias = draw(heads, target + source - 1) if biased else None
    ids = packed_rows(rng, BATCH, target)
    key_ids = ids if causal else packed_rows(rng, BATCH, source)

    def both(query, key, value, bias, dy):
        def run(query, key, value, bias):
            return attend(query, key, value, ids, key_ids, causal=causal, distance_bias=bias)

        y, vjp = jax.vjp(run, query, key, value, bias)
        return [y, *(g for g in vjp(dy) if g is not None)]

    mesh = mesh_of(sequence=4, tensor=2)
    with dispatch.using(choice=choice):
        assert_equal(*on_one_and_on_many(both, mesh, query, key, value, bias, dy))


# --- What travels ---------------------------------------------------------------------------------

LAYERS = {"kernel_size": (3, 5), "dilation": (1, 4)}
KINDS = {
    "depthwise": {"mixing": "depthwise"},
    "lightweight": {"mixing": "lightweight", "num_kernels": 2},
    "dynamic": {"mixing": "dynamic", "num_kernels": 2},
}


def compiled_stack(mesh: Mesh, length: int, *, causal: bool, kind: str, **sizes):
    """The gradients of a stack of two convolutions, without attention, compiled for a mesh."""
    padding = "CAUSAL" if causal else "CENTERED"
    stack = StackConfig(num_layers=2, padding=padding, **LAYERS, **KINDS[kind])
    config = tiny_config(encoder=stack, **sizes)
    model = jax.eval_shape(lambda: Stack(config, decoder=False, key=jax.random.key(0)))
    whole = NamedSharding(mesh, PartitionSpec())
    model = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), model)

    def array(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=token_sharding(mesh))

    def loss(model, x, ids):
        return jnp.sum(jnp.square(model(x, StackInputs(ids)).astype(jnp.float32)))

    rows = 2 * mesh.shape["data"]
    x = array(rows, length, config.emb_dim, dtype=config.dtype)
    with dispatch.using(devices=devices_of(mesh)):
        lowered = jax.jit(jax.value_and_grad(loss)).lower(
            model, x, array(rows, length, dtype=jnp.int32)
        )
    text = lowered.compile().as_text()
    found = collectives.parse(text, dict(mesh.shape))
    summed = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
    if kind == "lightweight":
        # Of a kernel that serves several channels, the gradient that each of them has of it.
        summed += sum(LAYERS["kernel_size"]) * (config.emb_dim - stack.num_kernels)
    return found, 4 * summed


def assert_only_halos_travel(found, gradient_bytes: int):
    """Along the sequence: permutations, and sums of what every device has a part of."""
    along = [c for c in found if "sequence" in c.axes]
    kinds = {c.kind for c in along}
    assert kinds == {"collective-permute", "all-reduce"}
    sums = [c for c in along if c.kind == "all-reduce"]
    # Each gradient once, in float32, and the loss.
    assert sum(c.count * c.payload_bytes for c in sums) <= gradient_bytes + 8


def halo_bytes(found) -> float:
    return sum(
        c.count * c.sent_bytes
        for c in found
        if c.kind == "collective-permute" and c.axes == ("sequence",)
    )


def reach_bytes(*, causal: bool, row_bytes: int) -> int:
    """What a device sends in a step: x, segment ids, and gradients of the rows it was lent.

    The backward pass reads x beside the piece again, which compilers see has been sent.
    """
    total = 0
    for taps, dilation in zip(*LAYERS.values(), strict=True):
        width = sum(pad_widths(taps, dilation, "CAUSAL" if causal else "CENTERED"))
        assert width == (taps - 1) * dilation
        total += 2 * width * (2 * row_bytes + 4)  # Two rows of the batch.
    return total


@pytest.mark.parametrize("causal", quick([False, True], chosen=[False]))
@pytest.mark.parametrize("kind", quick(list(KINDS), chosen=["dynamic"]))
def test_what_travels_is_what_the_taps_reach_whatever_the_length(kind, causal):
    mesh = mesh_of(data=2, sequence=4)
    sent = []
    for length in (4096, 65536):
        found, gradient_bytes = compiled_stack(mesh, length, causal=causal, kind=kind)
        assert_only_halos_travel(found, gradient_bytes)
        sent.append(halo_bytes(found))
    assert sent[0] == sent[1] == reach_bytes(causal=causal, row_bytes=4 * EMBED)


@pytest.mark.tpu
@pytest.mark.parametrize("kind", quick(list(KINDS), chosen=["dynamic"]))
def test_on_tpu_what_travels_is_what_the_taps_reach_whatever_the_length(compiler, kind):
    devices = topology.load("v5e:2x4").devices
    mesh = MeshConfig(data=2, sequence=4).build(devices)
    sizes = {"emb_dim": 128, "mlp_dim": 256, "num_heads": 1, "head_dim": 128, "dtype": "bfloat16"}
    sent = []
    for length in (512, 4096):  # The compiler takes a minute for 65,536 positions.
        found, gradient_bytes = compiled_stack(mesh, length, causal=False, kind=kind, **sizes)
        assert_only_halos_travel(found, gradient_bytes)
        sent.append(halo_bytes(found))
    assert sent[0] == sent[1] == reach_bytes(causal=False, row_bytes=2 * 128)
