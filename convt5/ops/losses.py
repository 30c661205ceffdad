"""Cross-entropy of tokens with label smoothing and z-loss; used by the training loss."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def token_cross_entropy(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """Returns per token the cross-entropy in nats and the z-loss term, unweighted.

    cross-entropy = logsumexp(l) - (1 - s) l[target] - s mean(l), with s the label smoothing, which
    gives the target probability 1 - s + s / vocab and every other id s / vocab.
    z term = z_loss * logsumexp(l)^2 (Shazeer and Stern 2018's regulariser in Mesh TensorFlow).
    Both are computed in at least float32. The backward pass keeps the logits and one number per
    token; no probabilities are stored.
    """
    return _cross_entropy(z_loss, label_smoothing, logits, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(z_loss, label_smoothing, logits, targets):
    return _forward(z_loss, label_smoothing, logits, targets)[0]


def _forward(z_loss, label_smoothing, logits, targets):
    wide = _wide(logits)
    log_z = jax.nn.logsumexp(wide, axis=-1)
    # A masked sum, unlike a gather, needs no communication of logits where vocab is sharded.
    nll = log_z - (1.0 - label_smoothing) * jnp.sum(
        jnp.where(_is_target(logits, targets), wide, 0.0), axis=-1
    )
    if label_smoothing:
        nll = nll - label_smoothing * jnp.mean(wide, axis=-1)
    return (nll, z_loss * log_z**2), (logits, targets, log_z)


def _backward(z_loss, label_smoothing, residuals, cotangents):
    logits, targets, log_z = residuals
    d_nll, d_z_term = cotangents
    # d logsumexp(l) / dl is the softmax of l.
    d_log_z = (d_nll + 2.0 * z_loss * log_z * d_z_term)[..., None]
    d_logits = jnp.exp(_wide(logits) - log_z[..., None]) * d_log_z
    wanted = jnp.where(_is_target(logits, targets), 1.0 - label_smoothing, 0.0)
    wanted = wanted + label_smoothing / logits.shape[-1]
    return (d_logits - wanted * d_nll[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _is_target(logits, targets):
    ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return ids[None, None, :] == targets[..., None]
