"""Cross-entropy with label smoothing and z-loss, with logits in memory and without."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from quick import quick
from second_derivatives import hessian_product, hessian_products

from convt5.errors import UserError
from convt5.ops import dispatch, linear_cross_entropy, token_cross_entropy
from convt5.ops.cross_entropy import chunked
from convt5.ops.cross_entropy import tpu as kernels
from convt5.ops.cross_entropy.operators import CrossEntropySums
from convt5.ops.dispatch import Devices
from convt5.training.losses import TextLoss

SETTINGS = [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.3)]


def example(dtype: DTypeLike = np.float64, batch=2, length=3, vocab=7, scale=3.0):
    rng = np.random.default_rng(0)
    logits = scale * rng.normal(size=(batch, length, vocab))
    return jnp.asarray(logits, dtype), jnp.asarray(rng.integers(0, vocab, (batch, length)))


def direct(logits, targets, z_loss, label_smoothing):
    """The same loss through the whole distribution of targets, differentiate by jax."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    onehot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    wanted = (1 - label_smoothing) * onehot + label_smoothing / logits.shape[-1]
    return jnp.sum(wanted * (log_z[..., None] - logits), axis=-1), z_loss * log_z**2


@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_both_terms_equal_the_definition(x64, z_loss, label_smoothing):
    logits, targets = example()
    settings = {"z_loss": z_loss, "label_smoothing": label_smoothing}
    found = jax.jit(functools.partial(token_cross_entropy, **settings))(logits, targets)
    expected = oracles.cross_entropy(
        logits, targets, z_loss=z_loss, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_the_backward_pass_equals_automatic_differentiation(x64, z_loss, label_smoothing):
    logits, targets = example()
    cotangents = (jnp.arange(6.0).reshape(2, 3) - 2, jnp.linspace(0.5, 2, 6).reshape(2, 3))

    @jax.jit
    def gradients(logits, cotangents):
        settings = {"z_loss": z_loss, "label_smoothing": label_smoothing}
        _, ours = jax.vjp(lambda x: token_cross_entropy(x, targets, **settings), logits)
        _, theirs = jax.vjp(lambda x: direct(x, targets, z_loss, label_smoothing), logits)
        return ours(cotangents)[0], theirs(cotangents)[0]

    np.testing.assert_allclose(*gradients(logits, cotangents), rtol=1e-12, atol=1e-14)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    nll, z_term = token_cross_entropy(jnp.zeros((1, 2, 50)), jnp.zeros((1, 2), jnp.int32))
    np.testing.assert_allclose(nll, np.log(50), rtol=1e-6)
    np.testing.assert_array_equal(z_term, 0)


def test_bfloat16_logits_give_a_float32_loss_and_a_bfloat16_gradient():
    logits, targets = example(jnp.bfloat16)
    nll, z_term = jax.jit(functools.partial(token_cross_entropy, z_loss=1e-4))(logits, targets)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(token_cross_entropy(x, targets)[0])))(logits)
    assert nll.dtype == z_term.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    expected, _ = oracles.cross_entropy(np.asarray(logits, np.float64), targets)
    np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=1e-6)


def test_huge_logits_stay_finite():
    logits, targets = jnp.array([[[1e30, -1e30, 0.0]]]), jnp.array([[1]])
    total = jax.value_and_grad(lambda x: jnp.sum(token_cross_entropy(x, targets)[0]))
    loss, gradient = jax.jit(total)(logits)
    np.testing.assert_allclose(loss, 2e30, rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[[1.0, -1.0, 0.0]]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_targets_of_few_bits_are_the_same_ids(unchecked, dtype):
    logits, targets = example(np.float32, vocab=300)
    targets = targets % 100
    x, table, _, weights = outputs_and_table(np.float32, length=3, vocab=300)
    for of_ids in (
        lambda ids: jnp.sum(token_cross_entropy(logits, ids)[0]),
        lambda ids: linear_cross_entropy(x, table, ids, weights).loss,
    ):
        of_ids = jax.jit(of_ids)
        np.testing.assert_array_equal(of_ids(jnp.asarray(targets, dtype)), of_ids(targets))


def test_no_probabilities_are_kept_for_the_backward_pass():
    logits, targets = example(np.float32, length=4, vocab=64)
    _, vjp = jax.vjp(lambda x: token_cross_entropy(x, targets, z_loss=1e-4), logits)
    kept = [a for a in jax.tree.leaves(vjp) if getattr(a, "shape", ()) == logits.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], logits)


# --- From outputs and the table, without logits in memory -----------------------------------------


ARGUMENTS = ("x", "table", "targets", "weights")


def outputs_and_table(dtype: DTypeLike = np.float64, batch=2, length=5, embed=6, vocab=11):
    rng = np.random.default_rng(1)
    x = jnp.asarray(2 * rng.normal(size=(batch, length, embed)) / embed**0.5, dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    table = jnp.asarray(rng.normal(size=(vocab, embed)), wide)
    targets = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (batch, length)), table.dtype)
    return x, table, targets, weights


def through_logits(x, table, targets, weights, z_loss, label_smoothing):
    """The sums from logits in memory, differentiate by jax."""
    logits = jnp.einsum("ble,ve->blv", x, table)
    smoothed, z_term = direct(logits, targets, z_loss, label_smoothing)
    nll, _ = direct(logits, targets, z_loss=0.0, label_smoothing=0.0)
    right = jnp.argmax(logits, axis=-1) == targets
    sums = [jnp.sum(a * weights) for a in (smoothed + z_term, nll, z_term, right)]
    return sums[0], CrossEntropySums(*sums)


def assert_equal_in_float64(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def without_logits(*arrays, z_loss, label_smoothing):
    sums = linear_cross_entropy(*arrays, z_loss=z_loss, label_smoothing=label_smoothing)
    return sums.loss, sums


@pytest.mark.parametrize("chunk_logits", quick([10**6, 33, 1], chosen=[33]))
@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_sums_and_gradients_equal_those_through_logits(
    x64, monkeypatch, chunk_logits, z_loss, label_smoothing
):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", chunk_logits)
    arrays = outputs_and_table()
    settings = {"z_loss": z_loss, "label_smoothing": label_smoothing}
    ours = functools.partial(without_logits, **settings)

    @jax.jit
    def run(*arrays):
        found = jax.value_and_grad(ours, (0, 1), has_aux=True)(*arrays)
        theirs = functools.partial(through_logits, **settings)
        return found, ours(*arrays)[1], jax.value_and_grad(theirs, (0, 1), has_aux=True)(*arrays)

    found, alone, expected = run(*arrays)
    jax.tree.map(assert_equal_in_float64, found, expected)
    # Without gradients the sums are the same.
    np.testing.assert_array_equal(alone, found[0][1])


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.bfloat16, 1 / 3), (jnp.float16, 2.0**16)])
def test_the_scale_of_a_loss_is_not_rounded_to_the_dtype_of_x(dtype, scale):
    x, table, targets, weights = outputs_and_table(dtype)

    def gradient(scale):
        loss = lambda x: scale * linear_cross_entropy(x, table, targets, weights / 256).loss  # noqa: E731
        return jax.jit(jax.grad(loss))(x)

    expected = scale * np.asarray(gradient(1.0), np.float64)
    np.testing.assert_array_equal(gradient(scale), jnp.asarray(expected, dtype))


def test_only_the_loss_has_gradients():
    x, table, targets, weights = outputs_and_table(np.float32)
    sums = lambda x: linear_cross_entropy(x, table, targets, weights, z_loss=0.1)  # noqa: E731
    gradients = jax.jit(jax.jacrev(sums))(x)
    for name in ("cross_entropy", "z_term", "right"):
        np.testing.assert_array_equal(getattr(gradients, name), 0)
    assert np.any(gradients.loss)


def test_of_equal_logits_the_first_counts_as_the_prediction():
    x, table = jnp.zeros((1, 4, 3)), jnp.ones((5, 3))
    targets = jnp.array([[0, 1, 4, 0]])
    sums = jax.jit(linear_cross_entropy)(x, table, targets, jnp.ones((1, 4)))
    assert sums.right == 2


def test_no_token_whose_logits_are_not_finite_counts_as_right():
    x = jnp.ones((1, 4, 3)).at[0, 1, 0].set(jnp.nan).at[0, 2].set(jnp.inf)
    targets = jnp.zeros((1, 4), jnp.int32)
    sums = jax.jit(linear_cross_entropy)(x, jnp.ones((5, 3)), targets, jnp.ones((1, 4)))
    assert sums.right == 2


@pytest.mark.parametrize("mesh_shape", [(8, 1), (4, 2)])
def test_devices_that_share_the_tokens_give_the_same(x64, monkeypatch, mesh_shape):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 12)
    mesh = Mesh(np.array(jax.devices()).reshape(mesh_shape), ("data", "tensor"))
    arrays = outputs_and_table(batch=8, length=14)
    ours = functools.partial(without_logits, z_loss=0.01, label_smoothing=0.1)
    expected = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(*arrays)

    @jax.jit
    def shared(*arrays):
        with dispatch.using(devices=Devices(mesh, rows=("data",), channels=("tensor",))):
            return jax.value_and_grad(ours, (0, 1), has_aux=True)(*arrays)

    x, table, targets, weights = arrays
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    found = shared(*jax.device_put((x, table, targets, weights), (rows, whole, rows, rows)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found, expected
    )


def test_no_array_holds_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 2**10)
    arrays = outputs_and_table(np.float32, batch=4, length=64, embed=16, vocab=512)
    ours = functools.partial(without_logits, z_loss=0.0, label_smoothing=0.0)
    step = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))
    memory = step.lower(*arrays).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 64 * 512 * 4 / 2


# The vocabulary ends within a block; tokens that fill no block; several chunks of tokens.
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("length", quick([7, 40], chosen=[40]))
def test_kernels_equal_chunks(monkeypatch, dtype, tolerance, length):
    monkeypatch.setattr(kernels, "_most_tokens", lambda x, in_chunks=False: 32)
    arrays = outputs_and_table(dtype, batch=2, length=length, embed=128, vocab=300)
    found = {}
    for choice in ("plain", "interpreted kernels"):
        with dispatch.using(choice=choice):
            found[choice] = jax.jit(
                lambda *a: jax.value_and_grad(
                    functools.partial(without_logits, z_loss=0.01, label_smoothing=0.1),
                    (0, 1),
                    has_aux=True,
                )(*a)
            )(*arrays)

    def compare(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())

    jax.tree.map(compare, found["interpreted kernels"], found["plain"])


@pytest.mark.parametrize("chunk_logits", [10**6, 33])
def test_second_derivatives_are_those_through_logits(x64, monkeypatch, chunk_logits):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", chunk_logits)
    x, table, *rest = outputs_and_table()
    settings = {"z_loss": 0.1, "label_smoothing": 0.1}
    ours = lambda x, table: without_logits(x, table, *rest, **settings)[0]  # noqa: E731
    plainly = lambda x, table: through_logits(x, table, *rest, *settings.values())[0]  # noqa: E731
    expected = hessian_product(plainly, (x, table))
    for found in hessian_products(ours, (x, table)):
        for a, b in zip(found, expected, strict=True):
            assert_equal_in_float64(a, b)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}])
def test_no_tokens_cost_nothing(sizes):
    x, table, targets, weights = outputs_and_table(np.float32, **sizes)
    sums = linear_cross_entropy(x, table, targets, weights)
    np.testing.assert_array_equal(jnp.stack(sums), np.zeros(4))
    dtable = jax.grad(lambda table: linear_cross_entropy(x, table, targets, weights).loss)(table)
    np.testing.assert_array_equal(dtable, np.zeros(table.shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": jnp.zeros((5, 2), int)}, r"targets has shape \(5, 2\) but x has shape"),
        ({"targets": jnp.zeros((1, 1), int)}, r"targets has shape \(1, 1\) but x has shape"),
        ({"targets": jnp.zeros((2, 5))}, "targets has dtype float32; ids of tokens are integers"),
        ({"weights": jnp.ones((5,))}, r"weights has shape \(5,\) but x has shape \(2, 5, 6\)"),
        ({"table": jnp.ones((11, 7))}, r"table has shape \(11, 7\) but x has shape"),
        ({"x": jnp.ones((2, 5, 6), int)}, "x has dtype int32, which the table would be rounded to"),
        *(({name: [1]}, f"{name} is a list; give an array") for name in ARGUMENTS),
    ],
)
def test_arrays_that_do_not_fit_the_tokens_are_refused(unchecked, changes, message):
    given = dict(zip(ARGUMENTS, outputs_and_table(np.float32), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given)


def test_gradients_of_a_bfloat16_table_add_up_in_float32(monkeypatch):
    x, table, targets, weights = outputs_and_table(np.float32, length=64)
    given = x, table.astype(jnp.bfloat16), targets, weights

    def gradient(chunk_logits):
        monkeypatch.setattr(chunked, "CHUNK_LOGITS", chunk_logits)
        loss = lambda *arrays: linear_cross_entropy(*arrays).loss  # noqa: E731
        return jax.jit(jax.grad(loss, 1))(*given)

    whole, in_chunks = gradient(10**6), gradient(1)
    assert in_chunks.dtype == jnp.bfloat16
    # One rounding of each: 8 bits.
    np.testing.assert_allclose(
        np.asarray(in_chunks, np.float32), np.asarray(whole, np.float32), rtol=2**-7, atol=1e-5
    )


def test_targets_that_do_not_fit_the_logits_are_refused(unchecked):
    logits, _ = example(np.float32)
    for given in (logits, logits[0]):
        with pytest.raises(ValueError, match=r"targets has shape \(3,\) but logits has shape"):
            token_cross_entropy(given, jnp.zeros((3,), int))
    with pytest.raises(ValueError, match="logits is a list; give an array"):
        token_cross_entropy(logits.tolist(), jnp.zeros((3,), int))


def test_a_factor_that_is_no_number_is_refused():
    with pytest.raises(UserError, match="z_loss=nan must be at least 0"):
        TextLoss(z_loss=float("nan"))


# --- What a run reports ---------------------------------------------------------------------------


class OneToken:
    """A model that gives the target, of 32,128 ids, the probability 0.99."""

    def outputs(self, *_, **__):
        return jnp.ones((1, 1, 1))

    def output_table(self):
        return jnp.zeros((32128, 1)).at[7].set(np.log(0.99 / 0.01 * 32127))


@pytest.mark.parametrize("normalize_by", ["tokens", "positions"])
@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_a_run_reports_the_cross_entropy_beside_what_it_minimises(
    z_loss, label_smoothing, normalize_by
):
    model: Any = OneToken()
    tokens, ones = jnp.full((1, 1), 7), jnp.ones((1, 1))
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch: dict[str, jax.Array] = {name: tokens for name in (*names, "decoder_target_bytes")}
    batch |= {"decoder_loss_weights": ones}
    loss = TextLoss(z_loss=z_loss, label_smoothing=label_smoothing, normalize_by=normalize_by)
    found = jax.jit(lambda batch: loss(model, batch).reported())(batch)
    nll = -np.log(0.99)
    for name in ("loss", "cross_entropy", "bits_per_byte"):
        expected = nll / np.log(2) / 7 if name == "bits_per_byte" else nll
        np.testing.assert_allclose(found[name], expected, atol=2e-6)
    assert found["token_accuracy"] == 100
    log_z = np.log(0.99 / 0.01 * 32127 + 32127)
    logit = np.log(0.99 / 0.01 * 32127)
    smoothing = label_smoothing * (logit - logit / 32128)
    np.testing.assert_allclose(
        found["objective"], nll + smoothing + z_loss * log_z**2, rtol=1e-5, atol=2e-6
    )
