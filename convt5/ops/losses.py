"""Cross-entropy of tokens with label smoothing and z-loss, with and without logits in memory."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from convt5.ops import implementation
from convt5.ops.dense import sum_of_products
from convt5.ops.varying import vary_alike, vary_like

CHUNK_LOGITS = 2**22
"""Logits of one chunk of tokens where the vocabulary is large beside the channels, at most."""

Scalar = Float[Array, ""]


class CrossEntropySums(NamedTuple):
    """Sums over all tokens, each times its weight.

    Attributes:
        loss: what is minimised: the cross-entropy of the smoothed targets, and the z term; the one
            sum that has gradients.
        cross_entropy: of the targets themselves in nats, without smoothing and z term.
        z_term: z_loss * logsumexp(logits)^2.
        right: tokens whose target has the largest logit, the first among equals; none whose logits
            are not finite.
    """

    loss: Scalar
    cross_entropy: Scalar
    z_term: Scalar
    right: Scalar


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

    The logits of all tokens are never held in memory: they come and go by chunks of tokens, or on
    the chip (TPU). The gradients of x and of the table are computed together with the loss, as
    each chunk passes, so that no logit is computed twice; only `loss` has gradients, and targets
    and weights have none. Products take their operands in the dtype of x and add up in float32.

    Raises:
        ValueError: the shapes of the arrays do not fit together, targets are no integers, or x
            holds integers.
    """
    if table.ndim != 2 or table.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"table has shape {table.shape} but x has shape {x.shape}; both end with [embed]."
        )
    if weights.shape != x.shape[:-1]:
        raise ValueError(
            f"weights has shape {weights.shape} but x has shape {x.shape}; weights has one number "
            "for each token."
        )
    targets = _checked(targets, x=x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x has dtype {x.dtype}, which the table would be rounded to; give floating point."
        )
    if x.size == 0:
        zero = jnp.zeros((), _accumulated(x))
        return CrossEntropySums(zero, zero, zero, zero)
    arrays = vary_alike(x, table, targets, weights)
    return _loss_alone_has_gradients(_sums(z_loss, label_smoothing, *arrays))


def _checked(targets, **of_tokens) -> jax.Array:
    """Returns the targets as int32: ids of fewer bits come round again in a large vocabulary."""
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
    settings = _Settings(z_loss, label_smoothing, with_gradients=False)
    return CrossEntropySums(*_computed(settings, x, table, targets, weights)[0])


def _sums_forward(z_loss, label_smoothing, x, table, targets, weights):
    settings = _Settings(z_loss, label_smoothing, with_gradients=True)
    sums, gradients = _computed(settings, x, table, targets, weights)
    return CrossEntropySums(*sums), gradients


def _sums_backward(z_loss, label_smoothing, gradients, cotangents):
    del z_loss, label_smoothing
    dx, dtable = (a * cotangents.loss.astype(a.dtype) for a in gradients)
    return dx, dtable, None, None


_sums.defvjp(_sums_forward, _sums_backward)


class _Settings(NamedTuple):
    z_loss: float
    label_smoothing: float
    with_gradients: bool


def _computed(settings: _Settings, x, table, targets, weights):
    """Returns the four sums, and the gradients of the first in x and table, or ()."""
    arrays = (x, table, targets, weights.astype(_accumulated(x)))
    plain = functools.partial(_in_chunks, settings)
    return implementation.run(plain, _kernels(settings, x, table), *arrays)


def _kernels(settings: _Settings, x, table) -> implementation.Offer:
    if not implementation.wanted() or implementation.has_old_tpus():
        return implementation.Offer()
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.pallas import cross_entropy as kernels

    compute = functools.partial(kernels.sums, settings, interpret=implementation.interpreted())
    devices = implementation.devices()
    rows = 1 if devices is None else _rows_apart(devices, x.shape[0])
    if rows is None or not kernels.is_supported(x.shape[0] // rows * x.shape[1], x, table):
        return implementation.Offer()
    if devices is None:
        return implementation.Offer(alone=compute)
    return implementation.Offer(shared=_over_rows(devices, compute))


def _in_chunks(settings: _Settings, x, table, targets, weights):
    """Plain JAX. A chunk's gradient of the table costs as much as its logits at `embed` tokens."""
    devices = implementation.devices()
    compute = functools.partial(_one_device, settings)
    rows = 1 if devices is None else _rows_apart(devices, x.shape[0])
    if rows is None or _num_chunks(targets.size // rows, table) == 1:
        # The partitioner sees to it, whatever is split.
        return _one_chunk(settings, x, table, targets, weights)
    if devices is not None:
        # Left to the partitioner, every chunk would sum its gradient over all devices.
        compute = _over_rows(devices, compute)
    return compute(x, table, targets, weights)


def _rows_apart(devices: implementation.Devices, batch: int) -> int | None:
    """Returns into how many parts the batch is split, or None if that is not all that is."""
    rows = devices.count(devices.rows)
    return rows if rows == devices.mesh.size and batch % rows == 0 else None


def _over_rows(devices: implementation.Devices, compute):
    """Returns `compute` on the rows of each device, with everything but dx summed over all."""

    def own(x, table, targets, weights):
        sums, gradients = compute(x, table, targets, weights)
        total = functools.partial(lax.psum, axis_name=devices.rows)
        return jax.tree.map(total, sums), (*gradients[:1], *map(total, gradients[1:]))

    split, whole = PartitionSpec(devices.rows), PartitionSpec()

    def run(x, table, targets, weights):
        shapes = jax.eval_shape(compute, x, table, targets, weights)
        gradients = (split, whole) if shapes[1] else ()
        return jax.shard_map(
            own,
            mesh=devices.mesh,
            in_specs=(split, whole, split, split),
            out_specs=((whole,) * 4, gradients),
            check_vma=False,
        )(x, table, targets, weights)

    return run


def _num_chunks(tokens: int, table) -> int:
    vocab, embed = table.shape
    return math.ceil(tokens / max(CHUNK_LOGITS // vocab, embed, 1))


def _one_device(settings: _Settings, x, table, targets, weights):
    """One chunk of tokens after the other."""
    tokens, embed = targets.size, x.shape[-1]
    count = _num_chunks(tokens, table)
    size = math.ceil(tokens / count)
    missing = count * size - tokens

    def cut(a, *rest):
        flat = jnp.pad(a.reshape(tokens, *rest), [(0, missing)] + [(0, 0)] * len(rest))
        return flat.reshape(count, size, *rest)

    def add(total, chunk):
        sums, gradients = _one_chunk(settings, chunk[0], table, *chunk[1:])
        dx, dtable = gradients or (None, None)
        return jax.tree.map(jnp.add, total, (sums, dtable)), dx

    dtype, table = table.dtype, table.astype(_accumulated(table))  # As its gradient adds up.
    dtable = jnp.zeros_like(table) if settings.with_gradients else None
    zeros = vary_like(x, ((jnp.zeros((), weights.dtype),) * 4, dtable))
    chunks = cut(x, embed), cut(targets), cut(weights)
    (sums, dtable), dx = lax.scan(add, zeros, chunks)
    if dx is None:
        return sums, ()
    return sums, (dx.reshape(-1, embed)[:tokens].reshape(x.shape), dtable.astype(dtype))


def _one_chunk(settings: _Settings, x, table, targets, weights):
    """All logits at once; x [..., embed], targets and weights [...]."""
    z_loss, smoothing, with_gradients = settings
    wide = _accumulated(x)
    rows = table.astype(x.dtype)
    logits = jnp.einsum("...e,ve->...v", x, rows, preferred_element_type=wide)
    top = jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(logits - top)
    total = jnp.sum(powers, axis=-1)
    log_z = top[..., 0] + jnp.log(total)
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    # A masked sum, unlike a gather, needs no communication of logits where vocab is split.
    is_target = ids == targets[..., None]
    target = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    nll = log_z - target
    smoothed = nll
    if smoothing:
        smoothed = log_z - (1.0 - smoothing) * target - smoothing * jnp.mean(logits, axis=-1)
    z_term = z_loss * log_z**2
    # What argmax finds, by a sum, which processors compute faster.
    same, before = logits == target[..., None], ids < targets[..., None]
    ahead = jnp.sum((logits > target[..., None]) | (same & before), axis=-1)
    # NaN is neither ahead of the target nor behind it: such a token has no prediction.
    right = (ahead == 0) & jnp.isfinite(log_z)
    sums = [jnp.sum(a * weights) for a in (smoothed + z_term, nll, z_term, right)]
    if not with_gradients:
        return tuple(sums), ()
    # d logsumexp(l) / dl is the softmax of l.
    softmax_weight = weights * (1.0 + 2.0 * z_loss * log_z) / total
    wanted = jnp.where(is_target, 1.0 - smoothing, 0.0) + smoothing / table.shape[0]
    dlogits = powers * softmax_weight[..., None] - wanted * weights[..., None]
    dlogits = dlogits.astype(x.dtype)
    dx = jnp.einsum("...v,ve->...e", dlogits, rows, preferred_element_type=wide)
    dtable = sum_of_products(dlogits, x, preferred_element_type=wide)
    return tuple(sums), (dx.astype(x.dtype), dtable.astype(table.dtype))


def _accumulated(x):
    return jnp.promote_types(x.dtype, jnp.float32)


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

    Raises:
        ValueError: targets are not one integer for each token.
    """
    targets = _checked(targets, logits=logits)
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
    wanted = jnp.where(_is_target(logits, targets), 1.0 - label_smoothing, 0.0)
    wanted = wanted + label_smoothing / logits.shape[-1]
    return (d_logits - wanted * d_nll[..., None]).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _is_target(logits, targets):
    ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return ids[None, None, :] == targets[..., None]
