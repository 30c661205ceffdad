"""Cross-entropy of tokens with label smoothing and z-loss, with and without logits in memory."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from convt5.ops import dispatch
from convt5.ops.cross_entropy import chunked, sharded
from convt5.ops.cross_entropy.chunked import Settings, accumulated_dtype
from convt5.ops.explicit import partitioned
from convt5.ops.masking import check_are_arrays
from convt5.ops.varying import vary_alike

Scalar = Float[Array, ""]


class CrossEntropySums(NamedTuple):
    """Sums over all tokens, weighted per token.

    Attributes:
        loss: the training loss: cross-entropy of the smoothed targets plus z-loss. Only this sum
            has gradients.
        cross_entropy: cross-entropy of the targets in nats, without smoothing and z-loss.
        z_term: z_loss * logsumexp(logits)^2.
        right: correct tokens: the target has the largest logit (the lowest id among equal ones).
            Tokens whose logits are not finite count as wrong.
    """

    loss: Scalar
    cross_entropy: Scalar
    z_term: Scalar
    right: Scalar


@partitioned(0)
def linear_cross_entropy(
    x: Float[Array, "batch length embed"],
    table: Float[Array, "vocab embed"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> CrossEntropySums:
    """Returns weighted sums over tokens whose logits are x table^T.

    `loss` is the sum of both terms of `token_cross_entropy`; `cross_entropy` is its first term
    without label smoothing.

    The logits of all tokens are never in memory at once: they exist for one chunk of tokens at a
    time, and on TPU only on-chip. The gradients of x and table are computed together with the loss,
    chunk by chunk, so that no logit is computed twice. Only `loss` has gradients, and only in x and
    table. Products have operands in the dtype of x and accumulate in float32.

    Raises:
        ValueError: the array shapes are inconsistent, targets are not integers, or x holds
            integers.
    """
    check_are_arrays(x=x, table=table, targets=targets, weights=weights)
    if table.ndim != 2 or table.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"table has shape {table.shape} but x has shape {x.shape}; both end with [embed]."
        )
    if weights.shape != x.shape[:-1]:
        raise ValueError(
            f"weights has shape {weights.shape} but x has shape {x.shape}; weights has one number "
            "for each token."
        )
    targets = _check_targets(targets, x=x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x has dtype {x.dtype}, which the table would be rounded to; give floating point."
        )
    if x.size == 0:
        zero = jnp.zeros((), accumulated_dtype(x))
        return CrossEntropySums(zero, zero, zero, zero)
    arrays = vary_alike(x, table, targets, weights)
    return _loss_alone_has_gradients(_sums(z_loss, label_smoothing, *arrays))


def _check_targets(targets, **of_tokens) -> jax.Array:
    """Returns the targets as int32, because smaller types overflow in a large vocabulary."""
    ((name, array),) = of_tokens.items()
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets has dtype {targets.dtype}; ids of tokens are integers.")
    if array.ndim != 3 or targets.shape != array.shape[:-1]:
        raise ValueError(
            f"targets has shape {targets.shape} but {name} has shape {array.shape}; both begin "
            "with [batch, length]."
        )
    return jnp.asarray(targets, jnp.int32)


def _loss_alone_has_gradients(sums) -> CrossEntropySums:
    return jax.tree.map(lax.stop_gradient, sums)._replace(loss=sums.loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(z_loss, label_smoothing, x, table, targets, weights) -> CrossEntropySums:
    settings = Settings(z_loss, label_smoothing, with_gradients=False)
    return CrossEntropySums(*_compute(settings, x, table, targets, weights)[0])


def _sums_forward(z_loss, label_smoothing, x, table, targets, weights):
    settings = Settings(z_loss, label_smoothing, with_gradients=True)
    sums, gradients = _compute(settings, x, table, targets, weights)
    return CrossEntropySums(*sums), gradients


def _sums_backward(z_loss, label_smoothing, gradients, cotangents):
    del z_loss, label_smoothing
    # The cotangent has the accumulated dtype; a loss scale can be too large for that of x.
    dx, dtable = ((a * cotangents.loss).astype(a.dtype) for a in gradients)
    return dx, dtable, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _compute(settings: Settings, x, table, targets, weights):
    """Returns the four sums, and the gradients of the loss in x and table, or ()."""
    arrays = (x, table, targets, weights.astype(accumulated_dtype(x)))
    return dispatch.run(_table(settings, x, table), *arrays)


def _table(settings: Settings, x, table) -> dispatch.Table:
    formulations = dispatch.Table(functools.partial(chunked.sums, settings))
    if not dispatch.may_use_kernels() or dispatch.has_old_tpus():
        return formulations
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.cross_entropy import tpu

    compute = functools.partial(tpu.sums, settings, interpret=dispatch.interpreted())
    devices = dispatch.devices()
    parts = 1 if devices is None else sharded.batch_parts(devices, x.shape[0])
    if parts is None or not tpu.is_supported(x.shape[0] // parts * x.shape[1], x, table):
        return formulations
    if devices is None:
        return formulations._replace(tpu=compute)
    return formulations._replace(shared_tpus=sharded.over_rows(devices, compute))


@partitioned(2)
def token_cross_entropy(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """Returns the cross-entropy in nats and the z-loss of each token, unweighted.

    cross-entropy = logsumexp(l) - (1 - s) l[target] - s mean(l), with s the label smoothing, which
    gives the target probability 1 - s + s / vocab and every other id s / vocab.
    z-loss = z_loss * logsumexp(l)^2 (the regulariser of Mesh TensorFlow, Shazeer and Stern 2018).
    Both are computed in at least float32. The backward pass keeps the logits and one number per
    token, but no probabilities.

    Raises:
        ValueError: targets are not one integer per token.
    """
    check_are_arrays(logits=logits, targets=targets)
    targets = _check_targets(targets, logits=logits)
    return _cross_entropy(z_loss, label_smoothing, *vary_alike(logits, targets))


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
    target_probabilities = jnp.where(_is_target(logits, targets), 1.0 - label_smoothing, 0.0)
    target_probabilities = target_probabilities + label_smoothing / logits.shape[-1]
    return (d_logits - target_probabilities * d_nll[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _is_target(logits, targets):
    ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return ids[None, None, :] == targets[..., None]
