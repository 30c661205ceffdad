"""Runs the convolutions by TPU kernels on one device, or on several that split the arrays."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from convt5.ops import dispatch
from convt5.ops.convolution.tpu import calls, streamed
from convt5.ops.convolution.tpu.blocks import Blocks
from convt5.ops.convolution.tpu.calls import Operation
from convt5.ops.dispatch import Devices, Formulation
from convt5.ops.tpu_kernels import LANES

DTYPES = (jnp.bfloat16, jnp.float32)


def add_to(
    table: dispatch.Table, operation: Operation, direction: calls.Direction, x: Any, weights: Any
) -> dispatch.Table:
    """Adds the kernels that serve these arrays to the table of formulations.

    Args:
        table: formulations, called with segment ids (or None), a key (None), x, weights and, for
            gradients, the cotangent.
        operation, direction: the computation.
        x, weights: arrays or their types. Exported programs with symbolic sizes get no kernels.
    """
    if not all(isinstance(size, int) for array in (x, weights) for size in array.shape):
        return table
    devices = dispatch.devices()
    if devices is not None:
        compute = shared(operation, direction, devices, x, weights)
        if compute is None:
            return table
        return table._replace(shared_tpus=functools.partial(_ignore_key, compute))
    if not is_supported(operation, direction, x, weights):
        return table
    compute = functools.partial(forward if direction == "forward" else backward, operation)
    return table._replace(tpu=functools.partial(_ignore_key, compute))


def _ignore_key(compute, segment_ids, key, *arrays):
    del key
    return compute(*([] if segment_ids is None else [segment_ids]), *arrays)


def is_supported(operation: Operation, direction: calls.Direction, x: Any, weights: Any) -> bool:
    """Returns whether a kernel serves arrays of these shapes and dtypes on one device."""
    return _call(operation, direction, x, weights) is not None


def _call(
    operation: Operation, direction: calls.Direction, x, weights
) -> calls.Call | streamed.Streamed | None:
    if x.dtype not in DTYPES or weights.dtype not in DTYPES or x.size == 0:
        return None
    batch, length, embed = x.shape
    num_kernels = weights.shape[-1]
    kind = _kind(operation, x, weights)
    length = calls.padded_length(length)
    itemsize = max(x.dtype.itemsize, weights.dtype.itemsize if operation.dynamic else 0)
    in_blocks = calls.make_call(
        operation,
        kind,
        direction,
        (batch, length, embed),
        num_kernels=num_kernels,
        itemsize=itemsize,
    )
    if kind != "channel" or direction == "forward" or embed % LANES:
        return in_blocks
    whole_row = Blocks(operation.taps, length, length, LANES, operation.packed)
    by_tap = streamed.Streamed(whole_row, batch, embed, operation.softmax, operation.interpret)
    if operation.taps.cross_segments or by_tap.vmem_bytes(itemsize) > calls.VMEM_BYTES:
        return in_blocks
    if in_blocks is not None:
        moved = calls.cost(in_blocks, itemsize, itemsize).bytes_accessed
        # Streaming by taps computes the weights twice, blocks only once.
        if moved <= 1.25 * by_tap.bytes_accessed(itemsize):
            return in_blocks
    return by_tap


def _kind(operation: Operation, x, weights) -> str:
    if not operation.dynamic:
        return "static"
    return "channel" if weights.shape[-1] == x.shape[-1] else "shared"


def forward(operation: Operation, *arrays):
    """Returns the convolution from segment ids [batch, length] (if packed), x and weights."""
    return _jitted(operation, "forward")(*arrays)


def backward(operation: Operation, *arrays):
    """Returns the gradients in x and in the weights; the last array is the cotangent."""
    return _jitted(operation, "backward")(*arrays)


@functools.cache
def _jitted(operation: Operation, direction: calls.Direction):
    """Returns the jitted operation, traced once for all layers of a model."""
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
    arguments = (_pad(x, extra), _to_kernel(kind, weights, extra), ids)
    arguments += tuple(_pad(dy, extra) for dy in cotangent)
    if isinstance(call, streamed.Streamed):
        dx, dweights = streamed.backward(call, *arguments)
    elif direction == "forward":
        return calls.forward(call, *arguments)[:, :length]
    else:
        dx, dweights = calls.backward(call, *arguments)
    dweights = _from_kernel(kind, dweights, length, weights.shape[-1])
    return dx[:, :length], dweights.astype(weights.dtype)


def _pad(a, rows: int):
    return jnp.pad(a, [(0, 0), (0, rows)] + [(0, 0)] * (a.ndim - 2)) if rows else a


def _to_kernel(kind: str, weights, extra: int):
    """Transposes logits to the layout of the kernels, which is also XLA's own choice."""
    if kind == "static":
        return weights
    weights = _pad(weights, extra)
    if kind == "channel":
        return weights.transpose((0, 2, 1, 3))
    weights = weights.transpose((0, 2, 3, 1))
    num_kernels = weights.shape[2]
    more = calls.padded_kernels(num_kernels) - num_kernels
    return jnp.pad(weights, ((0, 0), (0, 0), (0, more), (0, 0))) if more else weights


def _from_kernel(kind: str, dweights, length: int, num_kernels: int):
    if kind == "static":
        return jnp.sum(dweights, axis=0)
    order = (0, 3, 1, 2) if kind == "shared" else (0, 2, 1, 3)
    return dweights.transpose(order)[:, :length, :, :num_kernels]


# --- Over devices ---------------------------------------------------------------------------------


def shared(
    operation: Operation, direction: calls.Direction, devices: Devices, x: Any, weights: Any
) -> Formulation | None:
    """Returns the operation over several devices, or None if they cannot share it.

    Rows of the batch and channels are independent; the length is never split.
    """
    rows, channels = devices.count(devices.rows), devices.count(devices.channels)
    batch, length, embed = x.shape
    num_kernels = weights.shape[-1]
    if batch % rows or embed % channels or (num_kernels % channels and channels % num_kernels):
        return None
    own_x = jax.ShapeDtypeStruct((batch // rows, length, embed // channels), x.dtype)
    shape = (weights.shape[0], embed // channels)
    if operation.dynamic:
        shape = (batch // rows, *weights.shape[1:3], max(1, num_kernels // channels))
    if not is_supported(operation, direction, own_x, jax.ShapeDtypeStruct(shape, weights.dtype)):
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
    """Computes one device's part."""
    run = functools.partial(_local, operation, direction)
    if not operation.dynamic:
        results = run(*arrays)
        if direction == "forward":
            return results
        dx, dweights = results
        total = jax.lax.psum(dweights.astype(jnp.float32), devices.rows)
        return dx, total.astype(dweights.dtype)
    at = 2 if operation.packed else 1
    logits, count = arrays[at], devices.count(devices.channels)
    num_kernels = logits.shape[3]
    # One kernel may serve channels on several devices.
    first = jax.lax.axis_index(devices.channels) * num_kernels // count
    own_logits = jax.lax.dynamic_slice_in_dim(logits, first, max(1, num_kernels // count), axis=3)
    results = run(*arrays[:at], own_logits, *arrays[at + 1 :])
    if direction == "forward":
        return results
    dx, dlogits = results
    # The other channels and kernels are on other devices.
    parts = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(logits), dlogits, first, axis=3)
    total = jax.lax.psum(parts.astype(jnp.float32), devices.channels)
    return dx, total.astype(logits.dtype)
