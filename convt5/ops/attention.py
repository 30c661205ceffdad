"""Attention over packed rows whose logits are never held for all queries at once.

Logits exist block by block, and the backward pass computes the weights of a block again, so that
memory grows with the length of a row and not with its square. On TPU, kernels do the same on-chip.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convt5.ops import attention_blocks, gathered_keys, implementation
from convt5.ops.masking import attention_mask
from convt5.ops.varying import vary_alike


def attend(
    query: Float[Array, "batch target heads head_dim"],
    key: Float[Array, "batch source heads head_dim"],
    value: Float[Array, "batch source heads head_dim"],
    query_segment_ids: Int[Array, "batch target"],
    key_segment_ids: Int[Array, "batch source"],
    *,
    causal: bool = False,
    distance_bias: Float[Array, "heads distances"] | None = None,
) -> Float[Array, "batch target heads head_dim"]:
    """Returns softmax(query key^T + bias) value, where queries read keys of their own segment.

    Vaswani et al. 2017 (arXiv 1706.03762), equation 1, without the factor 1 / sqrt(head_dim),
    which T5 leaves to the initial query projection. Softmax in at least float32.

    Segments are kept apart where numbers are finite: hidden keys have a weight of zero, and zero
    times a NaN or an infinity in a value, or backward in a key, is a NaN in every query. The
    convolutions keep those in x apart as well, but not, backward, those in logits of dynamic taps.

    Args:
        query, key, value: projected positions.
        query_segment_ids, key_segment_ids: packed examples. Nothing reads segment 0, padding.
            Queries without a key return zero.
        causal: hides the keys behind each query's own position.
        distance_bias: added to the logits, by the distance of key minus query position, from
            1 - target to source - 1.

    Raises:
        ValueError: the shapes of the arrays do not fit together, or query holds integers.
    """
    ids = query_segment_ids, key_segment_ids
    _check_shapes(query, key, value, *ids, distance_bias)
    if 0 in (*query.shape, *key.shape):
        return jnp.zeros_like(query)
    devices = implementation.devices()
    if causal and devices and devices.split_lengths and ids[0] is not ids[1]:
        # A bias hides the keys behind, which does not hide them from queries that have no others.
        reads = attention_mask(*ids, causal=True).any(axis=-1)
        ids = jnp.where(reads, ids[0], 0), ids[1]
    return _attend(causal, *vary_alike(query, key, value, distance_bias, *ids))


def _check_shapes(query, key, value, query_ids, key_ids, bias) -> None:
    """Otherwise segments and biases would be stretched or cut to positions they are not of."""
    batch, target, heads, _ = query.shape
    source = key.shape[1]
    wanted = {
        "key": (key, (batch, source, *query.shape[2:])),
        "value": (value, key.shape),
        "query_segment_ids": (query_ids, (batch, target)),
        "key_segment_ids": (key_ids, (batch, source)),
    }
    if bias is not None:
        wanted["distance_bias"] = (bias, (heads, max(0, target + source - 1)))
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}, but must have shape {shape} for query of shape "
                f"{query.shape} and key of shape {key.shape}."
            )
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            f"query has dtype {query.dtype}, which the result would be rounded to; give floating "
            "point."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(causal, query, key, value, bias, query_ids, key_ids):
    return _run(_whole, causal, query, key, value, bias, query_ids, key_ids)[0]


def _run(whole, causal, *arrays):
    """Computes `whole` of the arrays, which devices may share."""
    devices = implementation.devices()
    if devices is not None:
        return gathered_keys.attend(causal, devices, whole, *arrays)
    return whole(causal, *arrays)


def _whole(causal, query, key, value, bias, query_ids, key_ids):
    """On TPU by kernels where they serve; elsewhere in blocks.

    Returns:
        What is found, and what `attention_blocks.gradients` needs beside it.
    """
    arrays = (bias, query, key, value, query_ids, key_ids)
    in_blocks = functools.partial(attention_blocks.attend, causal)
    return implementation.run(in_blocks, _kernels(causal, query, key, value), *arrays)


def _forward(causal, *arguments):
    compute = functools.partial(_run, _whole, causal)
    found, log_sums = implementation.one_operation(compute, *arguments)
    return found, (*arguments, found, log_sums)


def _backward(causal, residuals, cotangent):
    return (*_run(_whole_gradients, causal, *residuals, cotangent), None, None)


def _whole_gradients(causal, query, key, value, bias, query_ids, key_ids, *rest):
    arrays = (bias, query, key, value, query_ids, key_ids, *rest)
    in_blocks = functools.partial(attention_blocks.gradients, causal)
    kernels = _kernels(causal, query, key, value, backward=True)
    return implementation.run(in_blocks, kernels, *arrays)


_attend.defvjp(_forward, _backward)


def _kernels(causal, query, key, value, *, backward=False) -> implementation.Offer:
    if not implementation.wanted() or implementation.has_old_tpus():
        return implementation.Offer()
    if not isinstance(query.shape[0], int):
        # Exported programs leave the batch free.
        return implementation.Offer()
    if not query.dtype == key.dtype == value.dtype:
        # Matrix products on the chip take factors of one type.
        return implementation.Offer()
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.pallas import attention as kernels

    heads, head_dim = query.shape[2:]
    settings = kernels.Settings(head_dim, causal, interpret=implementation.interpreted())
    if not kernels.is_supported(settings, _flat(query), _flat(key)):
        return implementation.Offer()
    run = functools.partial(kernels.gradients if backward else kernels.attend, settings)
    return implementation.Offer(alone=_between_heads(run, heads, backward))


def _between_heads(run, heads: int, backward: bool) -> implementation.Kernels:
    """Returns `run`, which knows no axis of heads, with the arguments and results of `_attend`."""

    def attend(bias, query, key, value, *ids):
        biases = () if bias is None else (bias,)
        found = _with_heads(run(*map(_flat, (query, key, value)), *ids, *biases), heads)
        # Kernels keep nothing for their gradients.
        return found, jnp.zeros(query.shape[:3], jnp.float32)

    def gradients(bias, query, key, value, query_ids, key_ids, found, log_sums, cotangent):
        del found, log_sums
        biases = () if bias is None else (bias,)
        given = (*map(_flat, (query, key, value)), query_ids, key_ids, *biases, _flat(cotangent))
        *drows, dbias = (*run(*given), *([] if biases else [None]))
        return (*(_with_heads(a, heads) for a in drows), dbias)

    return gradients if backward else attend


def _flat(a):
    """[batch, length, heads, head_dim] as the dense layers have it."""
    return a.reshape(*a.shape[:2], -1)


def _with_heads(a, heads: int):
    return a.reshape(*a.shape[:2], heads, -1)
