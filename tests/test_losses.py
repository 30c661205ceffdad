"""Cross-entropy with label smoothing and z-loss."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from convt5.ops import token_cross_entropy

SETTINGS = [(0.0, 0.0), (1e-2, 0.0), (0.0, 0.1), (1e-2, 0.3)]


def example(dtype=np.float64, batch=2, length=3, vocab=7, scale=3.0):
    rng = np.random.default_rng(0)
    logits = scale * rng.normal(size=(batch, length, vocab))
    return jnp.asarray(logits, dtype), jnp.asarray(rng.integers(0, vocab, (batch, length)))


def direct(logits, targets, z_loss, label_smoothing):
    """The same loss through the whole distribution of targets, differentiated by jax."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    onehot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    wanted = (1 - label_smoothing) * onehot + label_smoothing / logits.shape[-1]
    return jnp.sum(wanted * (log_z[..., None] - logits), axis=-1), z_loss * log_z**2


@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_both_terms_equal_the_definition(x64, z_loss, label_smoothing):
    logits, targets = example()
    found = token_cross_entropy(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing)
    expected = oracles.cross_entropy(
        logits, targets, z_loss=z_loss, label_smoothing=label_smoothing
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("z_loss", "label_smoothing"), SETTINGS)
def test_the_backward_pass_equals_automatic_differentiation(x64, z_loss, label_smoothing):
    logits, targets = example()
    cotangents = (jnp.arange(6.0).reshape(2, 3) - 2, jnp.linspace(0.5, 2, 6).reshape(2, 3))
    _, vjp = jax.vjp(
        lambda logits: token_cross_entropy(
            logits, targets, z_loss=z_loss, label_smoothing=label_smoothing
        ),
        logits,
    )
    _, expected = jax.vjp(lambda l: direct(l, targets, z_loss, label_smoothing), logits)  # noqa: E741
    np.testing.assert_allclose(vjp(cotangents)[0], expected(cotangents)[0], rtol=1e-12, atol=1e-14)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    nll, z_term = token_cross_entropy(jnp.zeros((1, 2, 50)), jnp.zeros((1, 2), jnp.int32))
    np.testing.assert_allclose(nll, np.log(50), rtol=1e-6)
    np.testing.assert_array_equal(z_term, 0)


def test_bfloat16_logits_give_a_float32_loss_and_a_bfloat16_gradient():
    logits, targets = example(jnp.bfloat16)
    nll, z_term = token_cross_entropy(logits, targets, z_loss=1e-4)
    gradient = jax.grad(lambda x: jnp.sum(token_cross_entropy(x, targets)[0]))(logits)
    assert nll.dtype == z_term.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    expected, _ = oracles.cross_entropy(np.asarray(logits, np.float64), targets)
    np.testing.assert_allclose(nll, expected, rtol=1e-5, atol=1e-6)


def test_huge_logits_stay_finite():
    logits, targets = jnp.array([[[1e30, -1e30, 0.0]]]), jnp.array([[1]])
    loss, gradient = jax.value_and_grad(lambda x: jnp.sum(token_cross_entropy(x, targets)[0]))(
        logits
    )
    np.testing.assert_allclose(loss, 2e30, rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[[1.0, -1.0, 0.0]]])


def test_no_probabilities_are_kept_for_the_backward_pass():
    logits, targets = example(np.float32, length=4, vocab=64)
    _, vjp = jax.vjp(lambda x: token_cross_entropy(x, targets, z_loss=1e-4), logits)
    kept = [a for a in jax.tree.leaves(vjp) if getattr(a, "shape", ()) == logits.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], logits)
