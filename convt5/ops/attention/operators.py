"""Attention over packed rows that never holds the logits of all queries in memory.

Logits exist one block at a time, and the backward pass recomputes the softmax weights of a block.
Memory grows linearly with the length of a row, not with its square. On TPU, Pallas kernels keep the
logits on-chip.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convt5.ops import dispatch
from convt5.ops.attention import blockwise_attention, sharded_attention
from convt5.ops.explicit import partitioned
from convt5.ops.masking import attention_mask, check_axes, checked_flag, checked_segments
from convt5.ops.varying import vary_alike


@partitioned(4)
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
    which T5 moves into the initial query projection. The softmax is computed in at least float32.

    Segments are independent only while all numbers are finite. A hidden key has weight zero, and
    zero times a NaN or an infinity in its value (in the backward pass also in the key) is a NaN in
    every query. Convolutions isolate a NaN in x; a NaN in the logits of a dynamic convolution
    spreads in the backward pass.

    Args:
        query, key, value: projected positions.
        query_segment_ids, key_segment_ids: packed examples. Nothing reads segment 0, padding.
            Queries without a key return zeros.
        causal: hides the keys after each query's own position.
        distance_bias: bias of the logits for each distance, key position minus query position,
            from 1 - target to source - 1.

    Raises:
        ValueError: the shapes of the arrays do not fit together, or query holds integers.
    """
    ids = _checked_ids(query, key, value, query_segment_ids, key_segment_ids, distance_bias)
    causal = checked_flag("causal", causal)
    if 0 in (*query.shape, *key.shape):
        return jnp.zeros_like(query)
    devices = dispatch.devices()
    if causal and devices and devices.split_lengths and ids[0] is not ids[1]:
        # A bias can hide a later key only from a query that also has an earlier one.
        reads = attention_mask(*ids, causal=True).any(axis=-1)
        ids = jnp.where(reads, ids[0], 0), ids[1]
    return _attend(causal, *vary_alike(query, key, value, distance_bias, *ids))


def _checked_ids(query, key, value, query_ids, key_ids, bias):
    """Returns the segment ids; raises ValueError for shapes that would broadcast, or be cut."""
    for name, array in {"query": query, "key": key, "value": value}.items():
        check_axes(name, array, "batch length heads head_dim")
    ids = (
        checked_segments("query_segment_ids", query_ids),
        checked_segments("key_segment_ids", key_ids),
    )
    batch, target, heads, _ = query.shape
    source = key.shape[1]
    expected = {
        "key": (key, (batch, source, *query.shape[2:])),
        "value": (value, key.shape),
        "query_segment_ids": (ids[0], (batch, target)),
        "key_segment_ids": (ids[1], (batch, source)),
    }
    if bias is not None:
        check_axes("distance_bias", bias, "heads distances")
        expected["distance_bias"] = (bias, (heads, max(0, target + source - 1)))
    for name, (array, shape) in expected.items():
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
    return ids


def _output(causal, *arguments):
    return _run(_unsplit, causal, *arguments)[0]


def _forward(causal, *arguments):
    out, lse = dispatch.one_operation(functools.partial(_run, _unsplit, causal), *arguments)
    return out, (*arguments, out, lse)


def _backward(causal, residuals, d_out):
    return (*_run(_unsplit_gradients, causal, *residuals, d_out), None, None)


_attend = dispatch.differentiable(1, _output, forward=_forward, backward=_backward)


def _run(compute, causal, *arrays):
    """Applies `compute` to the arrays, sharded over devices where the context says so."""
    devices = dispatch.devices()
    if devices is not None:
        return sharded_attention.attend(causal, devices, compute, *arrays)
    return compute(causal, *arrays)


def _unsplit(causal, *arrays):
    """Returns the output, and the logsumexp `lse` that the gradients need."""
    return dispatch.run(_table("attend", causal, *arrays), *arrays)


def _unsplit_gradients(causal, *arrays):
    """Returns the gradients in query, key, value and bias."""
    return dispatch.run(_table("gradients", causal, *arrays), *arrays)


def _table(direction: str, causal: bool, query, key, value, *_) -> dispatch.Table:
    table = blockwise_attention.table(direction, causal, query, key)
    if not dispatch.may_use_kernels() or dispatch.has_old_tpus():
        return table
    # Deferred: importing Pallas takes time, which programs without TPUs need not spend.
    from convt5.ops.attention import tpu

    kernels = tpu.kernels(direction, causal, query, key, value, interpret=dispatch.interpreted())
    if kernels is None:
        return table
    beside = blockwise_attention.table(direction, causal, query, key, beside_kernels=True)
    if dispatch.interpreted():
        return beside._replace(tpu=kernels)
    # Other platforms have no kernels, and need no second way to compute `lse`.
    return table._replace(default=beside.default, gpu=table.default, tpu=kernels)
