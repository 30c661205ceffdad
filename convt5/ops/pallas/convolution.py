"""The TPU kernels for arrays of several devices: each device computes its own rows and channels.

A Pallas call is opaque to the partitioner, which would gather its operands. Rows of the batch and
channels are independent; the length is never split. Used by `convolution`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from convt5.ops import plain
from convt5.ops.pallas import conv_calls as calls
from convt5.ops.taps import Taps

DTYPES = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is computed, apart from the arrays; see `convolution` for the meaning.

    Attributes:
        where: the taps.
        dynamic: weights are logits [batch, length, kernel, heads], not a kernel [kernel, embed].
        softmax: whether the taps of a dynamic convolution are normalised.
        packed: whether segment ids are given.
        interpret: computes the kernels without a TPU, for tests.
        max_rows: of a block.
    """

    where: Taps
    dynamic: bool
    softmax: bool
    packed: bool
    interpret: bool = False
    max_rows: int = calls.MAX_ROWS


def is_supported(operation: Operation, direction: calls.Direction, x: Any, weights: Any) -> bool:
    """Whether there is a kernel for arrays of these shapes and types on one device."""
    sizes = (*x.shape, *weights.shape)
    if not all(isinstance(size, int) for size in sizes):
        return False
    return _call(operation, direction, x, weights) is not None


def _call(operation: Operation, direction: calls.Direction, x, weights) -> calls.Call | None:
    if x.dtype not in DTYPES or weights.dtype not in DTYPES or x.size == 0:
        return None
    batch, length, embed = x.shape
    heads = weights.shape[-1]
    kind = "static"
    if operation.dynamic:
        kind = "channel" if heads == embed else "shared"
    return calls.make_call(
        kind,
        direction,
        operation.where,
        batch=batch,
        length=calls.padded_length(length),
        embed=embed,
        heads=heads,
        itemsize=max(x.dtype.itemsize, weights.dtype.itemsize if operation.dynamic else 0),
        packed=operation.packed,
        softmax=operation.softmax,
        interpret=operation.interpret,
        max_rows=operation.max_rows,
    )


def forward(operation: Operation, *arrays):
    """Returns the convolution.

    The arrays are segment ids [batch, length], if packed, x and weights.
    """
    return _partitioned(operation, "forward")(*arrays)


def backward(operation: Operation, *arrays):
    """Returns the gradients in x and in the weights; the arrays end with the cotangent."""
    dx, dweights = _partitioned(operation, "backward")(*arrays)
    if operation.dynamic:
        return dx, dweights
    return dx, jnp.sum(dweights, axis=0).astype(arrays[-2].dtype)


# --- On one device --------------------------------------------------------------------------------


def _local(operation: Operation, direction: calls.Direction, *arrays):
    """Computes whole arrays of a device; the gradient of a static kernel is [batch, K, embed]."""
    ids, x, weights, *cotangent = arrays if operation.packed else (None, *arrays)
    call = _call(operation, direction, x, weights)
    if call is None:
        return _local_plain(operation, direction, ids, x, weights, *cotangent)
    length = x.shape[1]
    extra = calls.padded_length(length) - length
    ids = None if ids is None else _pad(ids, extra)[:, None]
    given = (_pad(x, extra), _to_kernel(call, weights, extra), ids)
    if direction == "forward":
        return calls.forward(call, *given)[:, :length]
    dx, dweights = calls.backward(call, *given, _pad(cotangent[0], extra))
    return dx[:, :length], _from_kernel(call, dweights, length)


def _pad(a, rows: int):
    return jnp.pad(a, [(0, 0), (0, rows)] + [(0, 0)] * (a.ndim - 2)) if rows else a


def _to_kernel(call: calls.Call, weights, extra: int):
    """Brings logits into the order in which the kernels, and XLA by itself, keep them."""
    if call.kind == "static":
        return weights
    return _pad(weights, extra).transpose((0, 2, 3, 1) if call.kind == "shared" else (0, 2, 1, 3))


def _from_kernel(call: calls.Call, dweights, length: int):
    if call.kind == "static":
        return dweights
    order = (0, 3, 1, 2) if call.kind == "shared" else (0, 2, 1, 3)
    return dweights.transpose(order)[:, :length]


def _local_plain(operation: Operation, direction: calls.Direction, ids, x, weights, *cotangent):
    given = (operation.where, operation.softmax, ids, x, weights, *cotangent)
    if direction == "forward":
        return plain.forward(*given)
    dx, slopes = plain.backward(*given)
    if operation.dynamic:
        return dx, slopes
    rows = jnp.arange(x.shape[0])[:, None, None]
    return dx, jnp.where(rows == 0, slopes.astype(jnp.float32)[None], 0)


# --- Over devices ---------------------------------------------------------------------------------


@functools.cache
def _partitioned(operation: Operation, direction: calls.Direction):
    """Returns the function of arrays that may be split, which vmap and jit can take."""

    def whole(*arrays):
        return _local(operation, direction, *arrays)

    split = custom_partitioning(whole)
    split.def_partition(
        partition=functools.partial(_partition, operation, direction),
        sharding_rule=_rule(operation, direction),
        need_replication_factors=("l", "k", *("h" if operation.dynamic else ())),
    )

    @custom_vmap
    def run(*arrays):
        return split(*arrays)

    @run.def_vmap
    def _(axis_size, batched, *arrays):
        arrays = [
            a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
            for a, is_batched in zip(arrays, batched, strict=True)
        ]
        results = jax.lax.map(lambda each: run(*each), tuple(arrays))
        return results, True if direction == "forward" else (True, True)

    return jax.jit(run)


def _rule(operation: Operation, direction: calls.Direction) -> str:
    weights = "b l k h" if operation.dynamic else "k c"
    operands = [*(["b l"] if operation.packed else []), "b l c", weights]
    if direction == "forward":
        return f"{', '.join(operands)} -> b l c"
    slopes = weights if operation.dynamic else "b k c"
    return f"{', '.join([*operands, 'b l c'])} -> b l c, {slopes}"


def _partition(operation: Operation, direction: calls.Direction, mesh, arguments, results):
    """Splits the batch and the channels as those of x are, and nothing else."""
    _, x, weights = arguments[:3] if operation.packed else (None, *arguments[:2])
    spec = getattr(x.sharding, "spec", PartitionSpec())
    rows, _, channels = (*spec, None, None, None)[:3]
    if operation.dynamic and not _heads_divide(mesh, channels, weights.shape[3]):
        channels = None
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    x = place(rows, None, channels)
    weights = place(rows, None, None, None) if operation.dynamic else place(None, channels)
    given = (*([place(rows, None)] if operation.packed else []), x, weights)
    run = functools.partial(_shard, operation, direction, channels)
    if direction == "forward":
        return mesh, run, x, given
    slopes = weights if operation.dynamic else place(rows, None, channels)
    return mesh, run, (x, slopes), (*given, x)


def _heads_divide(mesh, channels, heads: int) -> bool:
    """Whether each device has whole kernels, or channels of one."""
    axes = (channels,) if isinstance(channels, str) else (channels or ())
    devices = math.prod(mesh.shape[axis] for axis in axes)
    return heads % devices == 0 or devices % heads == 0


def _shard(operation: Operation, direction: calls.Direction, channels, *arrays):
    """Computes the part of one device; axis names `channels` hold the split of the channels."""
    if not operation.dynamic or channels is None:
        return _local(operation, direction, *arrays)
    at = 2 if operation.packed else 1
    logits = arrays[at]
    heads, devices = logits.shape[3], jax.lax.axis_size(channels)
    # One kernel may serve channels of several devices.
    first = jax.lax.axis_index(channels) * heads // devices
    own = jax.lax.dynamic_slice_in_dim(logits, first, max(1, heads // devices), axis=3)
    found = _local(operation, direction, *arrays[:at], own, *arrays[at + 1 :])
    if direction == "forward":
        return found
    # Other devices hold the other channels of a kernel, and other kernels.
    parts = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(logits), found[1], first, axis=3)
    slopes = jax.lax.psum(parts.astype(jnp.float32), channels)
    return found[0], slopes.astype(logits.dtype)
