"""Writes the index of a TensorFlow checkpoint with any entries, also impossible ones.

Its checksums are right: what is wrong is what the entries say. The format is that of LevelDB tables
(github.com/google/leveldb, doc/table_format.md) with messages of tensor_bundle.proto.
"""

import struct
from collections.abc import Mapping

from tensorflow.core.protobuf import tensor_bundle_pb2

_MAGIC = 0xDB4775248B80FB57


def entry(*sizes: int, dtype: int = 1, shard: int = 0, offset: int = 0, size: int = 0) -> bytes:
    """Returns what an index says of a variable, of dtype float32 (1) unless told otherwise."""
    message = tensor_bundle_pb2.BundleEntryProto(
        dtype=dtype, shard_id=shard, offset=offset, size=size
    )
    for length in sizes:
        message.shape.dim.add(size=length)
    return message.SerializeToString()


def header(num_shards: int = 1) -> bytes:
    message = tensor_bundle_pb2.BundleHeaderProto(num_shards=num_shards)
    message.version.producer = 1
    return message.SerializeToString()


def index(entries: Mapping[str, bytes]) -> bytes:
    """Returns the file of an index; the header is the entry of the empty name."""
    content = b""
    names = sorted(entries)
    content += _block([(name.encode(), entries[name]) for name in names])
    data = _varint(0) + _varint(len(content) - 5)
    place = len(content)
    content += _block([])
    meta = _varint(place) + _varint(len(content) - place - 5)
    place = len(content)
    content += _block([(names[-1].encode() + b"~", data)])
    footer = meta + _varint(place) + _varint(len(content) - place - 5)
    return content + footer.ljust(40, b"\0") + struct.pack("<Q", _MAGIC)


def _block(pairs: list[tuple[bytes, bytes]]) -> bytes:
    content, starts = b"", []
    for key, value in pairs:
        starts.append(len(content))  # No key is told by what it shares with the one before.
        content += b"\0" + _varint(len(key)) + _varint(len(value)) + key + value
    starts = starts or [0]
    content += struct.pack(f"<{len(starts) + 1}I", *starts, len(starts)) + b"\0"
    return content + struct.pack("<I", _masked(_crc32c(content)))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
