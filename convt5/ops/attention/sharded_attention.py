"""Attention on several devices: queries stay, the keys and values of their rows are gathered.

Each device attends from the queries and heads it holds to all keys of their rows. Where devices
share rows they gather keys and values; the backward pass sums the gradients of keys and values and
scatters them to their owners. Logits never travel. Serves self-attention, and encoder-decoder
attention, whose memory is split like the queries. The bytes sent grow with the length, unlike those
of convolutions; where rows are whole only the gradient of the bias is sent.
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
"""Computes one direction on one device from causal, query, key, value, bias, query and key segment
ids; backward also from the output, its logsumexp and its cotangent.

The bias is [heads, distances] or None. Backward it returns the gradients of query to bias.
"""

_HIDDEN = -1e9


def attend(causal: bool, devices: Devices, alone: Attend, *arrays: Any):
    """Returns attention, or its gradients, of rows, heads and lengths split over devices.

    Args:
        causal: hides keys after each query.
        devices: which hold the parts.
        alone: computes it on one device.
        arrays: query, key, value, bias (or None), query and key segment ids, all as
            `operators.attend` has them; backward also the output, its logsumexp and its cotangent.

    Raises:
        ValueError: a length that the devices do not divide.
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


def _piece(
    causal: bool, devices: Devices, alone: Attend, target: int, query, key, value, bias, ids, *rest
):
    """Computes the queries of one device; `target` counts those of all."""
    key_ids, *backward = rest
    if not devices.split_lengths:
        with dispatch.using(devices=None):
            results = alone(causal, query, key, value, bias, ids, key_ids, *backward)
        return _bias_summed(devices, *results) if backward else results
    gather = functools.partial(lax.all_gather, axis_name=devices.lengths, axis=1, tiled=True)
    key, value, key_ids = gather(key), gather(value), gather(key_ids)
    piece, source = query.shape[1], key.shape[1]
    first = lax.axis_index(devices.lengths) * piece
    # Entry 0 of the own distances is that of the last own query to the first key.
    start, width = target - piece - first, piece + source - 1
    own = None if bias is None else lax.dynamic_slice_in_dim(bias, start, width, axis=1)
    if causal:
        distances = jnp.arange(width) + 1 - piece - first
        hidden = jnp.where(distances > 0, _HIDDEN, 0.0)[None]
        own = jnp.broadcast_to(hidden, (query.shape[2], width)) if own is None else own + hidden
    with dispatch.using(devices=None):
        results = alone(False, query, key, value, own, ids, key_ids, *backward)
    if not backward:
        return results
    dquery, dkey, dvalue, down = results
    scatter = functools.partial(
        lax.psum_scatter, axis_name=devices.lengths, scatter_dimension=1, tiled=True
    )
    dbias = None
    if bias is not None:
        dbias = lax.dynamic_update_slice_in_dim(jnp.zeros_like(bias), down, start, axis=1)
    return _bias_summed(devices, dquery, scatter(dkey), scatter(dvalue), dbias)


def _bias_summed(devices: Devices, dquery, dkey, dvalue, dbias):
    """Adds up the gradient of the bias over devices; the others stay as they are."""
    if dbias is not None:
        dbias = lax.psum(dbias, devices.rows + devices.lengths)
    return dquery, dkey, dvalue, dbias
