"""Checks the index of a TensorFlow checkpoint before TensorFlow reads it.

TensorFlow aborts the process if a shape in the index is negative or too large. The file is a
LevelDB table (github.com/google/leveldb, doc/table_format.md) with messages of
`tensor_bundle.proto`. Needs TensorFlow.
"""

import math
import struct
from collections.abc import Callable, Iterator

import tensorflow as tf
from google.protobuf import message
from tensorflow.core.protobuf import tensor_bundle_pb2

MOST_BYTES = 2**24
"""Most bytes of an index; that of a model with 10,000 variables has one MiB."""

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # Of a block: compression type and checksum, which TensorFlow verifies.
_MOST_NAME_BYTES = 2**12
_MOST_SHARDS = 2**17
_MOST_AXES = 8


def check(content: bytes, shard_bytes: Callable[[int, int], int | None]) -> None:
    """Raises `ValueError` for an index that TensorFlow could not read from its files.

    Args:
        content: contents of the file.
        shard_bytes: returns the size of a shard, by its index and their number; None if missing.
    """
    try:
        entries = list(_entries(content))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"the table in it is damaged: {error}") from None
    if not entries or entries[0][0]:
        raise ValueError("it has no header")
    try:
        header = tensor_bundle_pb2.BundleHeaderProto.FromString(entries[0][1])
        if not 1 <= header.num_shards <= _MOST_SHARDS:
            raise ValueError(f"it tells of {header.num_shards} shards")
        for name, value in entries[1:]:
            entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            if fault := _fault(entry, header.num_shards, shard_bytes):
                raise ValueError(f"variable {name} {fault}")
    except message.DecodeError as error:
        raise ValueError(f"a message in it is damaged: {error}") from None


def _fault(
    entry: tensor_bundle_pb2.BundleEntryProto,
    num_shards: int,
    shard_bytes: Callable[[int, int], int | None],
) -> str | None:
    shape = [axis.size for axis in entry.shape.dim]
    try:
        dtype = tf.dtypes.as_dtype(entry.dtype)
    except TypeError:
        return f"is of the type {entry.dtype}, which does not exist"
    if len(shape) > _MOST_AXES or entry.shape.unknown_rank:
        return f"has {len(shape)} axes" if shape else "has no shape"
    if any(size < 0 for size in shape) or math.prod(shape) >= 2**62:
        return f"has shape {shape}"
    if entry.slices:
        return "is stored in slices, as Mesh TensorFlow stores none"
    if dtype.is_numpy_compatible and dtype != tf.string:
        expected = math.prod(shape) * dtype.size
        if entry.size != expected:
            return f"of {dtype.name} {shape} takes {entry.size} bytes rather than {expected}"
    if not 0 <= entry.shard_id < num_shards:
        return f"is in shard {entry.shard_id} of {num_shards}"
    held = shard_bytes(entry.shard_id, num_shards)
    if held is not None and not 0 <= entry.offset <= entry.offset + entry.size <= held:
        return f"ends at byte {entry.offset + entry.size} of a file of {held}; it may be truncated"
    return None


def _entries(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields names and values of the table, in order."""
    if len(content) < _FOOTER_BYTES or struct.unpack("<Q", content[-8:])[0] != _MAGIC:
        raise ValueError("it is no table of LevelDB")
    footer = content[-_FOOTER_BYTES:]
    _, at = _handle(footer, 0)  # The metaindex, which is not needed.
    index, _ = _handle(footer, at)
    total = 0
    for _, value in _block(content, index):
        place, _ = _handle(value, 0)
        total += place[1]
        if total > len(content):
            raise ValueError("its blocks overlap")
        for name, held in _block(content, place):
            yield name.decode(), held


def _block(content: bytes, place: tuple[int, int]) -> Iterator[tuple[bytes, bytes]]:
    start, size = place
    if start + size + _TRAILER_BYTES > len(content):
        raise ValueError("a block is outside of it")
    if content[start + size]:
        raise ValueError("it is compressed, as TensorFlow writes none")
    block = content[start : start + size]
    num_restarts = struct.unpack("<I", block[-4:])[0]
    end = size - 4 - 4 * num_restarts
    at, name = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        held, at = _varint(block, at)
        if shared > len(name) or shared + own > _MOST_NAME_BYTES or at + own + held > end:
            raise ValueError("a name or a value is outside of its block")
        name = name[:shared] + block[at : at + own]
        yield name, block[at + own : at + own + held]
        at += own + held


def _handle(content: bytes, at: int) -> tuple[tuple[int, int], int]:
    start, at = _varint(content, at)
    size, at = _varint(content, at)
    return (start, size), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number in it has no end")
