"""Checksums of arrays that do not depend on how devices hold them: a checkpoint's are kept with it.

The files of a checkpoint carry none for the numbers themselves: a flipped bit would be read as
another number. `checkpoint` compares them with those of what it has read.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.modeling.sharding import replicated

# Compiling a sum takes longer than making it where there is little to add.
_COMPILED_FROM_BYTES = 2**22


def checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Returns the checksum of each array, in [0, 2**32), the same on any mesh.

    All hosts that hold a part of an array must call it.

    An array [n_1, ..., n_k] of words x (its bits as unsigned integers) has the checksum sum of
    x[i_1, ..., i_k] * w_1[i_1] * ... * w_k[i_k] modulo 2**32 with odd weights w. A change in the
    bits of one word always changes it; any other damage does but for one case in 2**32.
    """
    sums = {}
    for name, array in arrays.items():
        sums[name] = _dispatched(array)
        if _must_wait(array):
            jax.block_until_ready(sums[name])
    return {name: int(np.asarray(value)) for name, value in sums.items()}


def mismatched(
    arrays: Mapping[str, jax.Array | np.ndarray], expected: Mapping[str, int]
) -> list[str]:
    """Returns the names of the arrays that are not what they were; those not expected pass."""
    known = {name: array for name, array in arrays.items() if name in expected}
    return [name for name, value in checksums(known).items() if value != expected[name]]


def _must_wait(array: Any) -> bool:
    """Whether the sum must be there before the next one begins.

    Processors of several processes run programs in any order, and wait for each other for ever
    where two of them talk at a time.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return False
    return next(iter(array.sharding.device_set)).platform == "cpu"


def _dispatched(array: Any) -> Any:
    """Returns the checksum of an array, perhaps before it is computed."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        if array.nbytes >= _COMPILED_FROM_BYTES or not array.is_fully_addressable:
            return _compiled(array.sharding)(array)
    elif isinstance(array, jax.Array):
        array = array.addressable_data(0)
        if array.nbytes >= _COMPILED_FROM_BYTES:
            return _compiled(array.sharding)(array)
    with np.errstate(over="ignore"):
        return _folded(_words(np.asarray(array)), np)


@functools.cache
def _compiled(sharding: jax.sharding.Sharding) -> Any:
    mesh = getattr(sharding, "mesh", None)
    return jax.jit(
        lambda array: _folded(_device_words(array), jnp),
        out_shardings=None if mesh is None else replicated(mesh),
    )


def _folded(words: Any, xp: ModuleType) -> Any:
    for axis in reversed(range(words.ndim)):
        weights = _weights(words.shape[axis], axis, xp)
        products = words * xp.expand_dims(weights, tuple(range(axis)))
        words = xp.sum(products, axis=-1, dtype=xp.uint32)
    return words


def _weights(size: int, axis: int, xp: ModuleType) -> Any:
    """Returns odd numbers that look random: an even one would lose bits."""
    mixed = (xp.arange(size, dtype=xp.uint32) + xp.uint32(axis)) * xp.uint32(0x9E3779B1)
    mixed ^= mixed >> xp.uint32(15)
    return mixed * xp.uint32(0x85EBCA6B) | xp.uint32(1)


def _words(array: np.ndarray) -> np.ndarray:
    size = array.dtype.itemsize
    if size == 8:
        return array[..., None].view(np.uint32)
    return array.view(f"uint{8 * size}").astype(np.uint32)


def _device_words(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
