"""Attention in blocks equals attention written out, values and gradients, whatever the blocks."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick import quick
from second_derivatives import hessian_product, hessian_products

from convt5.analysis import collectives
from convt5.ops import attend, dispatch
from convt5.ops.attention import blockwise_attention
from convt5.ops.dispatch import Devices
from convt5.ops.masking import attention_mask

BATCH, HEADS, HEAD_DIM = 2, 3, 4


def segments(*lengths, length):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, length - len(ids))).astype(np.int32)


def draw(target, source, *, dtype=np.float64):
    rng = np.random.default_rng(0)
    query = rng.normal(size=(BATCH, target, HEADS, HEAD_DIM))
    key, value = rng.normal(size=(2, BATCH, source, HEADS, HEAD_DIM))
    bias = rng.normal(size=(HEADS, target + source - 1))
    return [jnp.asarray(a, dtype) for a in (query, key, value, bias)]


def ids_of(target, source):
    query_ids = [segments(target // 2, target // 3, length=target), segments(target, length=target)]
    key_ids = [segments(source // 3, source // 2, length=source), segments(source, length=source)]
    return jnp.stack(query_ids), jnp.stack(key_ids)


def written_out(query, key, value, bias, query_ids, key_ids, *, causal):
    """One query at a time, over the keys that it reads and no others."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    found = np.zeros(query.shape)
    batch, target, heads, _ = query.shape
    for b, i, h in np.ndindex(batch, target, heads):
        if query_ids[b, i] == 0:
            continue
        read = key_ids[b] == query_ids[b, i]
        if causal:
            read &= np.arange(key.shape[1]) <= i
        places = np.flatnonzero(read)
        if len(places) == 0:
            continue
        logits = key[b, places, h] @ query[b, i, h]
        if bias is not None:
            logits = logits + np.asarray(bias)[h, places - i + target - 1]
        weights = np.exp(logits - logits.max())
        found[b, i, h] = weights / weights.sum() @ value[b, places, h]
    return found


# The logits of eight queries, eight keys and a head in float64 take 512 bytes.
BLOCKS = {"one query": 1, "a few queries": 200, "a head": 600, "a row": 1600, "all": 10**9}


@pytest.fixture(autouse=True)
def blocks_of_few_queries(request, monkeypatch):
    if "at_least" not in request.node.name:
        monkeypatch.setattr(blockwise_attention, "FEWEST_QUERIES_ON_CPU", 1)


@pytest.fixture(params=BLOCKS.values(), ids=BLOCKS)
def block_bytes(request, monkeypatch):
    use_blocks(monkeypatch, request.param)


def use_blocks(monkeypatch, block_bytes):
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", block_bytes)


CASES = {
    "cross": (7, 5, False, False),
    "self, bias": (8, 8, False, True),
    "causal, bias": (8, 8, True, True),
    "one query, bias": (1, 5, False, True),
    "many queries, bias": (11, 3, False, True),
}


@functools.cache
def expected_of(case):
    """Attention written out, and gradients by automatic differentiation of logits in memory."""
    target, source, causal, biased = CASES[case]
    query, key, value, bias = draw(target, source)
    query_ids, key_ids = ids_of(target, source)

    def plain(query, key, value, bias):
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if biased:
            distances = jnp.arange(source)[None] - jnp.arange(target)[:, None]
            logits = logits + bias[:, distances + target - 1][None]
        mask = attention_mask(query_ids, key_ids, causal=causal)[:, None]
        shares = jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=-1), 0.0)
        found = jnp.einsum("bhqk,bkhd->bqhd", shares, value)
        return jnp.sum(cotangents_of(query, query_ids) * found)

    gradients = jax.jit(jax.grad(plain, range(4)))(query, key, value, bias)
    bias = bias if biased else None
    return written_out(query, key, value, bias, query_ids, key_ids, causal=causal), gradients


def cotangents_of(query, query_ids):
    cosines = jnp.cos(jnp.arange(query.size)).reshape(query.shape)
    return cosines * (query_ids != 0)[..., None, None]


# Every case in two sizes of blocks, and one in all; the others compile programs much like these.
CASES_IN_BLOCKS = [*itertools.product(CASES, BLOCKS)]
CHOSEN = [
    (case, size)
    for case, size in CASES_IN_BLOCKS
    if size == ("one query" if case == "causal, bias" else "a few queries")
]


@pytest.mark.gpu
@pytest.mark.parametrize("where", quick(CASES_IN_BLOCKS, chosen=CHOSEN), ids=str)
def test_values_equal_attention_written_out_and_gradients_automatic_ones(x64, monkeypatch, where):
    case, size = where
    use_blocks(monkeypatch, BLOCKS[size])
    target, source, causal, biased = CASES[case]
    arrays, ids = draw(target, source), ids_of(target, source)

    @jax.jit
    def run(*arrays):
        def in_blocks(query, key, value, bias):
            bias = bias if biased else None
            return attend(query, key, value, *ids, causal=causal, distance_bias=bias)

        found, pull_back = jax.vjp(in_blocks, *arrays)
        return in_blocks(*arrays), found, pull_back(cotangents_of(arrays[0], ids[0]))

    alone, found, gradients = run(*arrays)
    expected, expected_gradients = expected_of(case)
    for values in (alone, found):
        np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def test_gradients_are_those_of_finite_differences(x64, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", 200)
    inputs = draw(6, 5)
    query_ids, key_ids = ids_of(6, 5)

    @jax.jit
    def loss(inputs):
        query, key, value, bias = inputs
        found = attend(query, key, value, query_ids, key_ids, distance_bias=bias)
        return jnp.sum(jnp.sin(found) * (query_ids != 0)[..., None, None])

    directions = [jnp.cos(jnp.arange(a.size)).reshape(a.shape) for a in inputs]
    slope = sum(
        jnp.vdot(g, d) for g, d in zip(jax.jit(jax.grad(loss))(inputs), directions, strict=True)
    )
    step = 1e-6

    def along(s):
        return loss([a + s * d for a, d in zip(inputs, directions, strict=True)])

    np.testing.assert_allclose(slope, (along(step) - along(-step)) / (2 * step), rtol=1e-7)


@pytest.mark.gpu
def test_nothing_reaches_across_segments_or_from_padding(x64, block_bytes):
    query, key, value, _ = draw(8, 8)
    ids = jnp.stack([segments(3, 3, length=8)] * 2)

    @jax.jit
    def first_segment(key, value):
        return attend(query, key, value, ids, ids)[:, :3]

    spoilt = [a.at[:, 3:].set(1e6) for a in (key, value)]
    np.testing.assert_array_equal(first_segment(*spoilt), first_segment(key, value))


def test_memory_of_a_step_grows_with_the_length_and_not_its_square():
    def temporaries(length):
        array = jax.ShapeDtypeStruct((1, length, 4, 16), jnp.float32)
        ids = jnp.ones((1, length), jnp.int32)
        loss = jax.grad(lambda q, k, v: attend(q, k, v, ids, ids).sum(), (0, 1, 2))
        analysis = jax.jit(loss).lower(array, array, array).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(8192) < 2.2 * temporaries(4096)


def test_a_bias_is_not_spread_over_positions_again_for_each_logit():
    query = jax.ShapeDtypeStruct((8, 32, 4, 8), jnp.float32)
    bias = jax.ShapeDtypeStruct((4, 63), jnp.float32)
    ids = jnp.ones((8, 32), jnp.int32)

    def gradients(query, bias):
        y, vjp = jax.vjp(lambda q, b: attend(q, q, q, ids, ids, distance_bias=b), query, bias)
        return y, vjp(y)

    text = jax.jit(gradients).lower(query, bias).compile().as_text()
    of_logits = [part for part in text.split("\n}") if "f32[8,4,32,32]" in part]
    assert of_logits
    # Slices of repeated rows: reading them by reshapes takes an integer division for each logit.
    assert not [part for part in of_logits if f"f32[4,{32 * 62}]{{1,0}} slice(" in part]


@pytest.mark.parametrize(
    ("source", "queries"), [(4096, 256), (8192, 128), (65536, 128)], ids=lambda n: str(n)
)
def test_blocks_have_at_least_128_queries(source, queries):
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32) for n in (1024, source))
    ids = [jnp.ones(a.shape[:2], jnp.int32) for a in (query, key)]
    lowered = jax.jit(attend).lower(query, key, key, *ids).as_text()
    rows = {int(found) for found in re.findall(rf"tensor<1x1x(\d+)x{source}xf32>", lowered)}
    assert rows == {16, queries}  # of turned keys and of logits


def test_sums_over_blocks_are_float32_where_values_are_bfloat16(monkeypatch):
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", 1)
    query, key, value, _ = draw(64, 4, dtype=jnp.bfloat16)
    ids = (jnp.ones((BATCH, 64), jnp.int32), jnp.ones((BATCH, 4), jnp.int32))
    ones = jnp.ones_like(query)
    found = jax.jit(lambda v: jax.vjp(lambda v: attend(query, key, v, *ids), v)[1](ones)[0])(value)
    # Each query gives every key a weight; over the keys of a query they sum to one.
    np.testing.assert_allclose(found.astype(np.float32).sum(axis=1), 64.0, rtol=0.01)


@pytest.mark.parametrize("causal", quick([False, True], chosen=[True]))
def test_devices_attend_alone_and_sum_the_gradient_of_the_bias_once(x64, monkeypatch, causal):
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", 1)
    arrays, ids = draw(6, 6), ids_of(6, 6)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def gradients(query, key, value, bias, *ids):
        def loss(*arrays):
            *arrays, bias = arrays
            return jnp.sum(jnp.sin(attend(*arrays, *ids, causal=causal, distance_bias=bias)))

        return jax.grad(loss, (0, 1, 2, 3))(query, key, value, bias)

    expected = jax.jit(lambda *given: gradients(*given))(*arrays, *ids)
    where = (rows, rows, rows, NamedSharding(mesh, PartitionSpec()), rows, rows)
    with dispatch.using(devices=Devices(mesh, rows=("data",), channels=())):
        compiled = jax.jit(gradients, in_shardings=where).lower(*arrays, *ids).compile()
    for ours, theirs in zip(
        compiled(*jax.device_put((*arrays, *ids), where)), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    found = collectives.parse(compiled.as_text(), dict(mesh.shape))
    # Not once for each of the six blocks of queries.
    assert [(c.kind, c.count) for c in found] == [("all-reduce", 1)]
    assert found[0].payload_bytes == arrays[3].nbytes


def test_queries_whose_keys_lie_behind_read_nothing_where_devices_share_rows(x64):
    query, key, value, bias = draw(4, 4)
    ids = jnp.asarray([[1, 2, 2, 2]] * BATCH), jnp.asarray([[2, 2, 1, 1]] * BATCH)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])

    def run(*arrays):
        *arrays, bias = arrays
        return attend(*arrays, *ids, causal=True, distance_bias=bias)

    def both(*arrays):
        found, pull_back = jax.vjp(run, *arrays)
        return found, pull_back(jnp.sin(found))

    expected, expected_gradients = jax.jit(lambda *a: both(*a))(query, key, value, bias)
    assert not np.any(expected[:, 0])
    with dispatch.using(devices=Devices(mesh, rows=(), channels=(), lengths=("data",))):
        found, gradients = jax.jit(lambda *a: both(*a))(query, key, value, bias)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def differentiable(query, key, value, bias, query_ids, key_ids):
    """Causal attention with all logits in memory, for JAX to differentiate as often as asked."""
    target, source = query.shape[1], key.shape[1]
    places = np.arange(source)[None] - np.arange(target)[:, None] + target - 1
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias[:, places][None]
    mask = attention_mask(query_ids, key_ids, causal=True)[:, None]
    powers = jnp.where(mask, jnp.exp(logits), 0.0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    weights = powers / jnp.where(total == 0.0, 1.0, total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_bytes",
    quick([BLOCKS["a few queries"], BLOCKS["all"]], chosen=[BLOCKS["a few queries"]]),
    ids=str,
)
def test_second_derivatives_are_those_of_logits_in_memory(x64, monkeypatch, block_bytes):
    monkeypatch.setattr(blockwise_attention, "BLOCK_BYTES_ON_CPU", block_bytes)
    arguments, ids = [0.5 * a for a in draw(8, 8)], ids_of(8, 8)

    def ours(query, key, value, bias):
        y = attend(query, key, value, *ids, causal=True, distance_bias=bias)
        return jnp.sum(y**3)

    plainly = lambda *arguments: jnp.sum(differentiable(*arguments, *ids) ** 3)  # noqa: E731
    expected = hessian_product(plainly, arguments)
    for found in hessian_products(ours, arguments):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("empty", ["batch", "target", "source"])
def test_no_positions_have_no_outputs_and_gradients_of_zero(empty):
    sizes = {"batch": 2, "target": 3, "source": 4, empty: 0}
    batch, target, source = sizes.values()
    query = jnp.ones((batch, target, 2, 4))
    key = jnp.ones((batch, source, 2, 4))
    ids = jnp.ones((batch, target), jnp.int32), jnp.ones((batch, source), jnp.int32)
    bias = jnp.ones((2, max(0, target + source - 1)))

    @jax.jit
    def both(*arrays):
        y, pull_back = jax.vjp(lambda *a: attend(*a[:3], *ids, distance_bias=a[3]), *arrays)
        return y, pull_back(y)

    y, gradients = both(query, key, key, bias)
    np.testing.assert_array_equal(y, np.zeros(query.shape))
    for gradient, argument in zip(gradients, (query, key, key, bias), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(argument.shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("key", (BATCH, 5, HEADS, HEAD_DIM - 1)),
        ("key", (1, 5, HEADS, HEAD_DIM)),
        ("value", (BATCH, 4, HEADS, HEAD_DIM)),
        ("value", (BATCH, 5, HEADS, HEAD_DIM - 1)),
        ("query_segment_ids", (BATCH, 2)),
        ("query_segment_ids", (1, 3)),
        ("key_segment_ids", (BATCH, 1)),
        ("distance_bias", (HEADS, 5)),
        ("distance_bias", (HEADS, 9)),
        ("distance_bias", (1, 7)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(unchecked, name, shape):
    query, key, value, bias = draw(3, 5, dtype=np.float32)
    query_ids, key_ids = ids_of(3, 5)
    given = {"query": query, "key": key, "value": value, "distance_bias": bias}
    given |= {"query_segment_ids": query_ids, "key_segment_ids": key_ids}
    with pytest.raises(ValueError, match=f"{name} has shape .*, but must have shape"):
        attend(**given | {name: jnp.ones(shape, given[name].dtype)})


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_arrays_of_other_axes_are_refused(unchecked, name):
    given = dict(zip(("query", "key", "value"), draw(3, 5, dtype=np.float32), strict=False))
    ids = ids_of(3, 5)
    for wrong in (given[name][0], given[name].tolist()):
        with pytest.raises(ValueError, match=f"{name} has shape .*, but must have the axes"):
            attend(*(given | {name: wrong}).values(), *ids)


def test_a_bias_of_other_axes_is_refused(unchecked):
    *arrays, bias = draw(3, 5, dtype=np.float32)
    with pytest.raises(ValueError, match="distance_bias has shape list, which is no array"):
        attend(*arrays, *ids_of(3, 5), distance_bias=bias.tolist())


def test_a_flag_is_true_or_false(unchecked):
    *arrays, _ = draw(3, 5, dtype=np.float32)
    with pytest.raises(ValueError, match="causal='no' must be True or False"):
        attend(*arrays, *ids_of(3, 5), causal="no")


def test_integers_are_refused(unchecked):
    query, key, value, _ = draw(3, 5, dtype=np.float32)
    with pytest.raises(ValueError, match="query has dtype int32, which the result would be"):
        attend(query.astype(int), key, value, *ids_of(3, 5))


def test_segments_that_are_no_integers_are_refused(unchecked):
    query, key, value, _ = draw(3, 5, dtype=np.float32)
    query_ids, key_ids = ids_of(3, 5)
    with pytest.raises(ValueError, match="key_segment_ids has dtype float32"):
        attend(query, key, value, query_ids, key_ids.astype(float))


@pytest.mark.parametrize("query_dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_have_the_dtype_of_what_they_are_of(query_dtype):
    arrays = draw(3, 5, dtype=np.float32)
    dtypes = [query_dtype, jnp.float32, jnp.bfloat16, jnp.float32]
    arrays = [a.astype(dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
    query_ids, key_ids = ids_of(3, 5)

    def total(query, key, value, bias):
        y = attend(query, key, value, query_ids, key_ids, distance_bias=bias)
        return jnp.sum(y.astype(jnp.float32))

    gradients = jax.eval_shape(jax.grad(total, range(4)), *arrays)
    assert [gradient.dtype for gradient in gradients] == dtypes


@pytest.mark.parametrize("head_dim", quick([4, 64], chosen=[64]))
def test_programs_attend_for_any_batch(head_dim):
    """With 2 heads of 64 channels kernels would serve, if they knew how many rows there are."""
    rng = np.random.default_rng(0)
    (batch,) = jax.export.symbolic_shape("batch")
    given = jax.ShapeDtypeStruct((batch, 6, 2, head_dim), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch, 6), jnp.int32)
    run = jax.jit(lambda rows, ids, bias: attend(rows, rows, rows, ids, ids, distance_bias=bias))
    bias = jnp.asarray(rng.normal(size=(2, 11)), jnp.float32)
    program = jax.export.export(run, platforms=("cpu", "tpu"))(given, ids, bias)
    for count in (1, 3):
        rows = jnp.asarray(rng.normal(size=(count, 6, 2, head_dim)) / head_dim**0.5, jnp.float32)
        ids = jnp.asarray(rng.integers(0, 3, (count, 6)), jnp.int32)
        found = program.call(rows, ids, bias)
        np.testing.assert_allclose(found, run(rows, ids, bias), rtol=0, atol=2e-6)
