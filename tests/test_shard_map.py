"""Operators inside `jax.shard_map`, as it is by default: gradients are those of whole arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from quick import quick

from convt5.analysis import topology
from convt5.ops import (
    attend,
    depthwise_conv,
    dispatch,
    dynamic_conv,
    lightweight_conv,
    linear_cross_entropy,
    token_cross_entropy,
)
from convt5.ops.attention import blockwise_attention
from convt5.ops.convolution import cpu
from convt5.ops.cross_entropy import chunked
from convt5.ops.dense import dense
from convt5.ops.gating import gate

BATCH, LENGTH, HEADS, VOCAB = 8, 12, 4, 16
AXES = ("data", "tensor")
X = P("data", None, "tensor")
TOKENS = P("data")


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), AXES)


def draw(*shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def ids() -> jax.Array:
    """Three segments and padding, elsewhere in every row."""
    places = np.arange(LENGTH)[None] + np.arange(BATCH)[:, None]
    return jnp.asarray(places % 9 // 3 * (places % 5 > 0), jnp.int32)


def convolve(operator, x, weights, segments, **options):
    return operator(x, weights, segment_ids=segments, **options)


def attention(query, key, value, bias, segments):
    segments = jnp.ones(query.shape[:2], jnp.int32) if segments is None else segments
    given = (query, key, value, segments, segments)
    return attend(*given, causal=True, distance_bias=bias)


def cross_entropy(x, table, segments):
    targets = jnp.arange(x.shape[1])[None] % VOCAB + jnp.zeros(x.shape[:2], jnp.int32)
    weights = jnp.ones(x.shape[:2]) if segments is None else (segments != 0).astype(x.dtype)
    return linear_cross_entropy(x, table, targets, weights, z_loss=0.1, label_smoothing=0.1).loss


def of_logits(logits, segments):
    targets = jnp.zeros(logits.shape[:2], jnp.int32) if segments is None else segments
    return jnp.stack(token_cross_entropy(logits, targets, z_loss=0.1))


def cases(embed: int, head_dim: int = 2):
    """Of each operator: a function of its arrays and segment ids, the arrays, where they are split
    by rows of the batch, and where by channels as well, or None."""
    x = draw(BATCH, LENGTH, embed)
    rows, heads = draw(BATCH, LENGTH, HEADS, head_dim), P("data", None, "tensor")
    logits = draw(BATCH, LENGTH, 5, HEADS)
    bias = draw(HEADS, 2 * LENGTH - 1)
    return {
        "depthwise": (
            functools.partial(convolve, depthwise_conv),
            (x, draw(3, embed)),
            (TOKENS, P()),
            (X, P(None, "tensor")),
        ),
        "lightweight": (
            functools.partial(convolve, lightweight_conv, dilation=2),
            (x, draw(5, HEADS)),
            (TOKENS, P()),
            (X, P(None, "tensor")),
        ),
        "dynamic": (
            functools.partial(convolve, dynamic_conv, padding="CAUSAL"),
            (x, logits),
            (TOKENS, TOKENS),
            (X, P("data", None, None, "tensor")),
        ),
        "dynamic, dropout": (
            functools.partial(
                convolve, dynamic_conv, tap_dropout_rate=0.5, dropout_key=jax.random.key(0)
            ),
            # The same taps are dropped on every device.
            (jnp.broadcast_to(x[:1], x.shape), jnp.broadcast_to(logits[:1], logits.shape)),
            (P(), P()),
            None,
        ),
        "attend": (
            attention,
            (rows / 2, rows[::-1], rows, bias),
            (TOKENS, TOKENS, TOKENS, P()),
            (heads, heads, heads, P("tensor")),
        ),
        "linear_cross_entropy": (
            cross_entropy,
            (x, draw(VOCAB, embed)),
            (TOKENS, P()),
            None,  # The sum over channels would be of one device.
        ),
        "token_cross_entropy": (of_logits, (draw(BATCH, LENGTH, VOCAB),), (TOKENS,), None),
        "dense": (
            lambda x, kernel, _: dense(x, kernel),
            (x, draw(embed, 2 * embed)),
            (TOKENS, P()),
            (TOKENS, P(None, "tensor")),
        ),
        "gate": (lambda x, logits, _: gate(x, logits), (x, x[::-1]), (TOKENS, TOKENS), (X, X)),
    }


CASES = cases(embed=8)


def energy(function, arrays, segments):
    y = function(*arrays, segments)
    return jnp.sum(jnp.sin(y)) if y.ndim else y


def gradients(function, arrays, segments):
    return jax.grad(functools.partial(energy, function))(arrays, segments)


def sharded_gradients(function, specs, arrays, segments):
    """Gradients of a sum over devices, taken outside of shard_map, and inside of it."""
    segment_spec = None if segments is None else (P() if specs[0] == P() else TOKENS)
    options = {"mesh": mesh(), "in_specs": (specs, segment_spec)}

    def total(arrays, segments):
        found = energy(function, arrays, segments)
        return lax.psum(found, tuple(jax.typeof(found).manual_axis_type.varying))

    outside = jax.grad(jax.shard_map(total, out_specs=P(), **options))
    inside = jax.shard_map(functools.partial(gradients, function), out_specs=specs, **options)
    return outside(arrays, segments), inside(arrays, segments)


def assert_equal(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Sums over the batch are taken in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def check(case, segments, *, most_split_alone=False):
    """Compares the gradients of both ways of splitting with those of whole arrays."""
    function, arrays, *splits = case
    splits = [specs for specs in splits if specs][-1 if most_split_alone else 0 :]

    @jax.jit
    def run(arrays, segments):
        found = [sharded_gradients(function, specs, arrays, segments) for specs in splits]
        return found, gradients(function, arrays, segments)

    found, expected = run(arrays, segments)
    for outside, inside in found:
        assert_equal(outside, expected)
        assert_equal(inside, expected)


LOOPS = ["depthwise", "dynamic", "attend", "linear_cross_entropy"]
"""Whose formulations have loops, kernels and choices."""

FORMULATIONS = {
    "depthwise": ("default", "cpu", "gpu"),
    "lightweight": ("default", "cpu", "gpu"),
    "dynamic": ("default", "cpu", "gpu", "chunked"),
    "dynamic, dropout": ("default", "cpu", "chunked"),
    "attend": ("default", "cpu"),
}
"""Of operators that have others than the default."""

PROGRAMS = [
    (name, choice, packed)
    for name in CASES
    for choice in FORMULATIONS.get(name, ("default",))
    for packed in ((True,) if name in ("dense", "gate") else (True, False))
]
"""A choice or segment ids that change nothing make no other program."""

QUICK = [
    *((name, "default", True) for name in LOOPS),
    ("dynamic", "cpu", True),
    ("depthwise", "gpu", False),
]


@pytest.fixture
def several_chunks(monkeypatch):
    """Loops of attention and of the loss run more than once."""
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES", 1)
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", 1)
    monkeypatch.setattr(blockwise_attention, "FEWEST_QUERIES_ON_CPU", 1)


@pytest.mark.usefixtures("several_chunks")
@pytest.mark.parametrize("program", quick(PROGRAMS, chosen=QUICK), ids=str)
def test_gradients_inside_shard_map_are_those_of_whole_arrays(monkeypatch, program):
    name, choice, packed = program
    # Rows and channels; the quick suite splits rows alone of one formulation of each operator.
    most_split_alone = program in QUICK and choice != "default"
    if choice == "chunked":
        monkeypatch.setattr(cpu, "_fastest", lambda *sizes: cpu.chunked_weight_gradient)
        choice = "cpu"
    with dispatch.using(choice=choice):
        segments = ids() if packed else None
        check(CASES[name], segments, most_split_alone=most_split_alone)


@pytest.mark.parametrize("name", quick(LOOPS, chosen=["depthwise"]))
def test_kernels_inside_shard_map_compute_the_same(name):
    function, arrays, specs, _ = cases(embed=128, head_dim=32)[name]
    inside = jax.shard_map(
        functools.partial(gradients, function),
        mesh=mesh(),
        in_specs=(specs, TOKENS),
        out_specs=specs,
    )
    with dispatch.using(choice="interpreted kernels"):
        traced = jax.jit(inside).trace(arrays, ids())
    assert "pallas_call" in str(traced.jaxpr)
    with dispatch.using(choice="plain"):
        expected = jax.jit(functools.partial(gradients, function))(arrays, ids())
    assert_equal(traced.lower().compile()(arrays, ids()), expected)


@pytest.mark.parametrize("name", quick(list(CASES), chosen=["dense"]))
def test_gradients_inside_shard_map_need_no_jit(name):
    function, arrays, specs, _ = CASES[name]
    segments = None if specs[0] == P() else ids()
    expected = jax.jit(functools.partial(gradients, function))(arrays, segments)
    for found in sharded_gradients(function, specs, arrays, segments):
        assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LOOPS, chosen=["depthwise"]))
def test_second_derivatives_remat_and_vmap_work_inside_shard_map(name):
    function, arrays, specs, _ = CASES[name]
    spec = (specs, specs, TOKENS)

    def products(arrays, tangents, segments):
        """Of the Hessian, forward over reverse, and gradients with rematerialisation, by rows."""
        remat = functools.partial(gradients, jax.checkpoint(function))
        hessian = jax.jvp(lambda a: remat(a, segments), (arrays,), (tangents,))
        one_row = jax.vmap(lambda a: remat(a, segments))
        doubled = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arrays)
        return hessian, jax.tree.map(lambda a: a[1], one_row(doubled))

    inside = jax.shard_map(products, mesh=mesh(), in_specs=spec, out_specs=((specs, specs), specs))
    given = (arrays, jax.tree.map(jnp.cos, arrays), ids())
    assert_equal(*(jax.jit(f)(*given) for f in (inside, products)))


PUBLIC = [name for name in CASES if name not in ("dense", "gate")]


@pytest.mark.parametrize("name", quick(PUBLIC, chosen=["dynamic", "attend"]))
def test_gradients_on_a_mesh_with_explicit_axes_are_those_of_whole_arrays(name):
    function, arrays, *splits = CASES[name]
    types = (AxisType.Explicit,) * len(AXES)  # As `jax.make_mesh` builds it by default.
    explicit = jax.make_mesh((4, 2), AXES, types)
    expected = jax.jit(functools.partial(gradients, function))(arrays, ids())
    for specs in filter(None, splits):

        def put(spec, a):
            return jax.device_put(a, NamedSharding(explicit, spec))

        given = jax.tree.map(put, (specs, TOKENS), (arrays, ids()))
        found = jax.jit(functools.partial(gradients, function))(*given)
        assert_equal(found, expected)
        for a, spec in zip(found, specs, strict=True):
            assert a.sharding.is_equivalent_to(NamedSharding(explicit, spec), a.ndim)


@pytest.mark.tpu
@pytest.mark.parametrize("name", quick(LOOPS, chosen=["dynamic", "attend"]))
def test_the_tpu_compiler_takes_the_kernels_inside_shard_map(compiler, name):
    function, arrays, specs, _ = cases(embed=128, head_dim=32)[name]
    devices = np.array(topology.load("v5e:2x2").devices).reshape(4, 1)
    chips = Mesh(devices, AXES)

    def struct(spec, a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(chips, spec))

    given = jax.tree.map(struct, (specs, TOKENS), (arrays, ids()))
    inside = jax.shard_map(
        functools.partial(gradients, function),
        mesh=chips,
        in_specs=(specs, TOKENS),
        out_specs=specs,
    )
    text = jax.jit(inside).lower(*given).compile().as_text() or ""
    assert text.count('custom_call_target="tpu_custom_call"') == 2
