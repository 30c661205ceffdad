"""Checksums of arrays, saved in checkpoints, which do not depend on how arrays are sharded.

The files of a checkpoint have no checksums of their data: a flipped bit would be read as another
number. `checkpoint` compares these checksums with those of the arrays it has read.
"""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5.modeling.sharding import replicated

# For smaller arrays, compiling a sum takes longer than computing it on the host.
_COMPILED_FROM_BYTES = 2**22


def checksums(arrays: Mapping[str, jax.Array | np.ndarray]) -> dict[str, int]:
    """Returns the checksum of each array, in [0, 2**32), the same on any mesh.

    All hosts that hold a part of an array must call it.

    The checksum of an array [n_1, ..., n_k] of words x (its bits as unsigned integers) is the sum
    of x[i_1, ..., i_k] * w_1[i_1] * ... * w_k[i_k] modulo 2**32, with odd weights w. Any change in
    a single word changes it; other damage goes undetected with probability 2**-32.
    """
    sums = {}
    for name, array in arrays.items():
        sums[name] = _dispatch(array)
        if _must_wait(array):
            jax.block_until_ready(sums[name])
    return {name: int(np.asarray(value)) for name, value in sums.items()}


def find_mismatches(
    arrays: Mapping[str, jax.Array | np.ndarray], expected: Mapping[str, int]
) -> list[str]:
    """Returns the names of arrays whose checksum differs; arrays without one pass."""
    known = {name: array for name, array in arrays.items() if name in expected}
    return [name for name, value in checksums(known).items() if value != expected[name]]


def _must_wait(array: Any) -> bool:
    """Returns whether this sum must finish before the next one starts.

    CPUs of several processes run programs in any order, and deadlock if two programs communicate at
    the same time.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return False
    return next(iter(array.sharding.device_set)).platform == "cpu"


def _dispatch(array: Any) -> Any:
    """Returns the checksum of an array, possibly before it is computed."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        if array.nbytes >= _COMPILED_FROM_BYTES or not array.is_fully_addressable:
            return _compile(array.sharding)(array)
    elif isinstance(array, jax.Array):
        array = array.addressable_data(0)
        if array.nbytes >= _COMPILED_FROM_BYTES:
            return _compile(array.sharding)(array)
    with np.errstate(over="ignore"):
        return _fold(_words(np.asarray(array)), np)


@functools.cache
def _compile(sharding: jax.sharding.Sharding) -> Any:
    mesh = getattr(sharding, "mesh", None)
    return jax.jit(
        lambda array: _fold(_device_words(array), jnp),
        out_shardings=None if mesh is None else replicated(mesh),
    )


def _fold(words: Any, xp: ModuleType) -> Any:
    for axis in reversed(range(words.ndim)):
        weights = _weights(words.shape[axis], axis, xp)
        products = words * xp.expand_dims(weights, tuple(range(axis)))
        words = xp.sum(products, axis=-1, dtype=xp.uint32)
    return words


def _weights(size: int, axis: int, xp: ModuleType) -> Any:
    """Returns pseudo-random odd numbers; even ones would lose bits."""
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
