"""The convolutions by TPU kernels, on one device, and on several that share rows and channels.

`convt5.ops.convolution` offers them to `implementation`, where they serve.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from convt5.ops.implementation import Devices, Kernels
from convt5.ops.pallas import conv_calls as calls
from convt5.ops.pallas import conv_streamed
from convt5.ops.pallas.conv_blocks import Blocks
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


def has_sizes(*arrays: Any) -> bool:
    """Whether all sizes are numbers: exported programs leave some free."""
    return all(isinstance(size, int) for array in arrays for size in array.shape)


def is_supported(operation: Operation, direction: calls.Direction, x: Any, weights: Any) -> bool:
    """Whether there is a kernel for arrays of these shapes and types on one device."""
    return _call(operation, direction, x, weights) is not None


def _call(
    operation: Operation, direction: calls.Direction, x, weights
) -> calls.Call | conv_streamed.Streamed | None:
    if x.dtype not in DTYPES or weights.dtype not in DTYPES or x.size == 0:
        return None
    batch, length, embed = x.shape
    heads = weights.shape[-1]
    kind = _kind(operation, x, weights)
    length = calls.padded_length(length)
    itemsize = max(x.dtype.itemsize, weights.dtype.itemsize if operation.dynamic else 0)
    in_blocks = calls.make_call(
        kind,
        direction,
        operation.where,
        batch=batch,
        length=length,
        embed=embed,
        heads=heads,
        itemsize=itemsize,
        packed=operation.packed,
        softmax=operation.softmax,
        interpret=operation.interpret,
        max_rows=operation.max_rows,
    )
    if kind != "channel" or direction == "forward" or embed % calls.LANES:
        return in_blocks
    whole = Blocks(operation.where, length, length, calls.LANES, operation.packed)
    streamed = conv_streamed.Streamed(whole, batch, embed, operation.softmax, operation.interpret)
    if operation.where.cross_segments or streamed.vmem_bytes(itemsize) > calls.VMEM_BYTES:
        return in_blocks
    if in_blocks is not None:
        moved = calls.cost(in_blocks, itemsize, itemsize).bytes_accessed
        # It computes twice what blocks compute once.
        if moved <= 1.25 * streamed.bytes_accessed(itemsize):
            return in_blocks
    return streamed


def _kind(operation: Operation, x, weights) -> str:
    if not operation.dynamic:
        return "static"
    return "channel" if weights.shape[-1] == x.shape[-1] else "shared"


def forward(operation: Operation, *arrays):
    """Returns the convolution.

    The arrays are segment ids [batch, length], if packed, x and weights.
    """
    return _jitted(operation, "forward")(*arrays)


def backward(operation: Operation, *arrays):
    """Returns the gradients in x and in the weights; the arrays end with the cotangent."""
    return _jitted(operation, "backward")(*arrays)


@functools.cache
def _jitted(operation: Operation, direction: calls.Direction):
    """Traced once for all layers of a model."""
    return jax.jit(functools.partial(_local, operation, direction))


# --- On one device --------------------------------------------------------------------------------


def _local(operation: Operation, direction: calls.Direction, *arrays):
    ids, x, weights, *cotangent = arrays if operation.packed else (None, *arrays)
    call = _call(operation, direction, x, weights)
    if call is None:
        raise ValueError(f"no kernel for {operation} of {x.shape}; ask is_supported first.")
    kind, length = _kind(operation, x, weights), x.shape[1]
    extra = calls.padded_length(length) - length
    ids = None if ids is None else _pad(ids, extra)[:, None]
    given = (_pad(x, extra), _to_kernel(kind, weights, extra), ids)
    given += tuple(_pad(dy, extra) for dy in cotangent)
    if isinstance(call, conv_streamed.Streamed):
        dx, dweights = conv_streamed.backward(call, *given)
    elif direction == "forward":
        return calls.forward(call, *given)[:, :length]
    else:
        dx, dweights = calls.backward(call, *given)
    dweights = _from_kernel(kind, dweights, length, weights.shape[-1])
    return dx[:, :length], dweights.astype(weights.dtype)


def _pad(a, rows: int):
    return jnp.pad(a, [(0, 0), (0, rows)] + [(0, 0)] * (a.ndim - 2)) if rows else a


def _to_kernel(kind: str, weights, extra: int):
    """Brings logits into the order in which the kernels, and XLA by itself, keep them."""
    if kind == "static":
        return weights
    weights = _pad(weights, extra)
    if kind == "channel":
        return weights.transpose((0, 2, 1, 3))
    weights = weights.transpose((0, 2, 3, 1))
    heads = weights.shape[2]
    more = calls.padded_heads(heads) - heads
    return jnp.pad(weights, ((0, 0), (0, 0), (0, more), (0, 0))) if more else weights


def _from_kernel(kind: str, dweights, length: int, heads: int):
    if kind == "static":
        return jnp.sum(dweights, axis=0)
    order = (0, 3, 1, 2) if kind == "shared" else (0, 2, 1, 3)
    return dweights.transpose(order)[:, :length, :, :heads]


# --- Over devices ---------------------------------------------------------------------------------


def shared(
    operation: Operation, direction: calls.Direction, devices: Devices, x: Any, weights: Any
) -> Kernels | None:
    """Returns `forward` or `backward` on several devices, or None where they cannot share it.

    Rows of the batch and channels are independent; the length is never split.
    """
    rows, channels = devices.count(devices.rows), devices.count(devices.channels)
    batch, length, embed = x.shape
    heads = weights.shape[-1]
    if batch % rows or embed % channels or (heads % channels and channels % heads):
        return None
    own = jax.ShapeDtypeStruct((batch // rows, length, embed // channels), x.dtype)
    shape = (weights.shape[0], embed // channels)
    if operation.dynamic:
        shape = (batch // rows, *weights.shape[1:3], max(1, heads // channels))
    if not is_supported(operation, direction, own, jax.ShapeDtypeStruct(shape, weights.dtype)):
        return None
    spec = PartitionSpec(devices.rows, None, devices.channels)
    ids = [PartitionSpec(devices.rows, None)] * operation.packed
    weight = PartitionSpec(None, devices.channels)
    if operation.dynamic:
        weight = PartitionSpec(devices.rows)
    backward = direction == "backward"
    return jax.shard_map(
        functools.partial(_shard, operation, direction, devices),
        mesh=devices.mesh,
        in_specs=(*ids, spec, weight, *([spec] * backward)),
        out_specs=(spec, weight) if backward else spec,
        check_vma=False,
    )


def _shard(operation: Operation, direction: calls.Direction, devices: Devices, *arrays):
    """Computes the part of one device."""
    run = functools.partial(_local, operation, direction)
    if not operation.dynamic:
        found = run(*arrays)
        if direction == "forward":
            return found
        slopes = jax.lax.psum(found[1].astype(jnp.float32), devices.rows)
        return found[0], slopes.astype(found[1].dtype)
    at = 2 if operation.packed else 1
    logits, count = arrays[at], devices.count(devices.channels)
    heads = logits.shape[3]
    # One kernel may serve channels of several devices.
    first = jax.lax.axis_index(devices.channels) * heads // count
    own = jax.lax.dynamic_slice_in_dim(logits, first, max(1, heads // count), axis=3)
    found = run(*arrays[:at], own, *arrays[at + 1 :])
    if direction == "forward":
        return found
    # Other devices hold the other channels of a kernel, and other kernels.
    parts = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(logits), found[1], first, axis=3)
    slopes = jax.lax.psum(parts.astype(jnp.float32), devices.channels)
    return found[0], slopes.astype(logits.dtype)
