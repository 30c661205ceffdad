"""A checksum is that of the numbers, however they are held, and no flipped bit escapes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from convt5.checkpoints import checksums


def weight(index, axis):
    """The weight of one index, in Python's own integers."""
    mixed = ((index + axis) * 0x9E3779B1) % 2**32
    return (((mixed ^ (mixed >> 15)) * 0x85EBCA6B) % 2**32) | 1


def slow_checksum(array):
    """Sums word by word."""
    total = 0
    for index in np.ndindex(array.shape):
        word = int.from_bytes(array[index].tobytes(), "little")
        for axis, i in enumerate(index):
            word *= weight(i, axis)
        total += word
    return total % 2**32


def draw(shape, dtype, seed=0):
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).bytes(size)
    return np.frombuffer(raw, dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_checksum_is_the_weighted_sum_of_the_words(shape, dtype):
    array = draw(shape, dtype)
    assert checksums.checksums({"a": array}) == {"a": slow_checksum(array)}


def test_words_of_eight_bytes_are_two(x64):
    array = draw((3, 4), np.float64)
    halves = array[..., None].view(np.uint32)
    found = checksums.checksums({"a": array, "b": jnp.asarray(array)})
    assert found == dict.fromkeys("ab", slow_checksum(halves))


@pytest.mark.parametrize("spec", [P(), P("x"), P("y", "x"), P(None, ("x", "y"))])
def test_a_checksum_is_the_same_on_any_mesh_and_on_the_host(spec, monkeypatch):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    array = draw((8, 16), jnp.bfloat16)
    placed = jax.device_put(array, NamedSharding(mesh, spec))
    expected = checksums.checksums({"a": array})
    assert checksums.checksums({"a": placed}) == expected
    monkeypatch.setattr(checksums, "_COMPILED_FROM_BYTES", 0)
    assert checksums.checksums({"a": placed}) == expected


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_flipped_bit_is_noticed(data):
    array = draw(data.draw(st.sampled_from([(1,), (64,), (7, 9)])), np.uint32)
    known = checksums.checksums({"a": array})
    damaged = array.copy()
    place = data.draw(st.integers(0, array.size - 1))
    damaged.flat[place] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert checksums.find_mismatches({"a": damaged}, known) == ["a"]
    assert checksums.find_mismatches({"a": array}, known) == []


def test_swapped_and_shifted_numbers_are_noticed():
    array = draw((64, 64), np.uint32)
    known = checksums.checksums({"a": array})
    for damaged in (array.T, array[::-1], np.roll(array, 1), np.roll(array, 1, axis=1)):
        assert checksums.find_mismatches({"a": np.ascontiguousarray(damaged)}, known) == ["a"]


def test_arrays_without_a_known_checksum_pass():
    assert checksums.find_mismatches({"a": np.ones(3)}, {}) == []
