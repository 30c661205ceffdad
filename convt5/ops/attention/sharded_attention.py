"""Attention on several devices: queries stay in place, keys and values are all-gathered.

Each device attends with its own queries and heads to all keys of their rows. Where devices share
rows they all-gather keys and values, and the backward pass reduce-scatters the gradients of keys
and values. Logits are never communicated. Serves self-attention, and encoder-decoder attention
whose memory is split like the queries. The bytes sent grow with the length, unlike those of
convolutions. Where rows are not split, only the gradient of the bias is communicated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from convt5.ops import dispatch
from convt5.ops.dispatch import Devices

Attend = Callable[..., Any]
"""Computes one direction on one device.

Forward, the arguments are causal, query, key, value, bias, and segment ids of queries and keys; the
backward pass adds the output, its logsumexp and its cotangent, and returns the gradients of query,
key, value and bias. The bias is [heads, distances] or None.
"""

_HIDDEN = -1e9


def attend(causal: bool, devices: Devices, alone: Attend, *arrays: Any):
    """Returns attention, or its gradients, with rows, heads and lengths split over devices.

    Args:
        causal: hides keys after each query.
        devices: the devices that hold the parts.
        alone: computes attention on one device.
        arrays: query, key, value, bias (or None), segment ids of queries and keys, as in
            `operators.attend`; for gradients also the output, its logsumexp and its cotangent.

    Raises:
        ValueError: a length is not divisible by the number of devices that split it.
    """
    query, key, _, bias, *_ = arrays
    pieces = devices.count(devices.lengths)
    for name, length in (("target", query.shape[1]), ("source", key.shape[1])):
        if length % pieces:
            raise ValueError(
                f"{name}={length} must be a multiple of {pieces}, the devices that share it."
            )
    rows = devices.dividing(devices.rows, query.shape[0])
    heads = devices.dividing(devices.channels, query.shape[2])
    spec = PartitionSpec(rows, devices.lengths, heads)
    bias_spec = None if bias is None else PartitionSpec(heads)
    ids = PartitionSpec(rows, devices.lengths)
    backward = len(arrays) > 6
    split = Devices(devices.mesh, rows, heads, devices.lengths)
    shared = jax.shard_map(
        functools.partial(_piece, causal, split, alone, query.shape[1]),
        mesh=devices.mesh,
        in_specs=(spec, spec, spec, bias_spec, ids, ids, *([spec] * (3 * backward))),
        out_specs=(spec, spec, spec, bias_spec) if backward else (spec, spec),
        check_vma=False,
    )
    return shared(*arrays)


def _piece(causal: bool, devices: Devices, alone: Attend, target: int, *arrays):
    """Computes the queries of one device; `target` is the number of queries of all devices."""
    query, key, value, bias, ids, key_ids, *backward = arrays
    if not devices.split_lengths:
        with dispatch.using(devices=None):
            results = alone(causal, query, key, value, bias, ids, key_ids, *backward)
        return _sum_bias(devices, *results) if backward else results
    gather = functools.partial(lax.all_gather, axis_name=devices.lengths, axis=1, tiled=True)
    key, value, key_ids = gather(key), gather(value), gather(key_ids)
    piece, source = query.shape[1], key.shape[1]
    first = lax.axis_index(devices.lengths) * piece
    # Entry 0 of this device's distances is the last of its queries to the first key.
    start, width = target - piece - first, piece + source - 1
    own_bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, width, axis=1)
    if causal:
        distances = jnp.arange(width) + 1 - piece - first
        hidden = jnp.where(distances > 0, _HIDDEN, 0.0)[None]
        own_bias = (
            jnp.broadcast_to(hidden, (query.shape[2], width))
            if own_bias is None
            else own_bias + hidden
        )
    with dispatch.using(devices=None):
        results = alone(False, query, key, value, own_bias, ids, key_ids, *backward)
    if not backward:
        return results
    dquery, dkey, dvalue, down = results
    scatter = functools.partial(
        lax.psum_scatter, axis_name=devices.lengths, scatter_dimension=1, tiled=True
    )
    dbias = None
    if bias is not None:
        dbias = lax.dynamic_update_slice_in_dim(jnp.zeros_like(bias), down, start, axis=1)
    return _sum_bias(devices, dquery, scatter(dkey), scatter(dvalue), dbias)


def _sum_bias(devices: Devices, dquery, dkey, dvalue, dbias):
    """Sums the gradient of the bias over devices; returns the other gradients unchanged."""
    if dbias is not None:
        dbias = lax.psum(dbias, devices.rows + devices.lengths)
    return dquery, dkey, dvalue, dbias
