"""Attention on several devices: queries stay, the keys and values of their rows are gathered.

Each device attends from the queries and heads it holds to all keys of their rows. Where devices
share rows it gathers them; the backward pass adds up the gradients of keys and values and leaves
each device its own. Logits never travel. Serves self-attention, and encoder-decoder attention,
whose memory is split like the queries. What travels grows with the length, unlike `halo`'s; where
rows are whole it is the gradient of the bias alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from convt5.ops import implementation
from convt5.ops.implementation import Devices

Attend = Callable[..., Any]
"""Computes one direction on one device from causal, query, key, value, bias, two segment ids, and
backward what it found, the logarithms of sums that it returned with it, and the cotangent.

The bias is [heads, distances] or None. Backward it returns the gradients of query to bias.
"""

_HIDDEN = -1e9


def attend(causal: bool, devices: Devices, alone: Attend, *arrays: Any):
    """Returns what `alone` computes, from rows, heads and pieces of rows that devices hold.

    Args:
        causal: hides keys behind each query.
        devices: that hold them.
        alone: computes attention, or its gradients, on one device.
        arrays: query, key, value, bias (or None), query and key segment ids, all as
            `ops.attention.attend` has them; the backward pass also the two arrays that this
            returned, and the cotangent of the first.

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
        with implementation.over_devices(None):
            found = alone(causal, query, key, value, bias, ids, key_ids, *backward)
        return _bias_summed(devices, *found) if backward else found
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
    with implementation.over_devices(None):
        found = alone(False, query, key, value, own, ids, key_ids, *backward)
    if not backward:
        return found
    dquery, dkey, dvalue, down = found
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
