"""Checks the files of arrays in a checkpoint before Orbax and TensorStore read them.

Both trust their files: they wait for the writer of a pipe, load a file of any size, unpack pieces
of any declared size, and end the process where memory is short.
"""

import math
import pathlib
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from convt5.runtime import foreign_files

_METADATA = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_SMALL = (_MANIFEST, ".zarray", "zarr.json")
_SMALL_FOLDERS = ("array_metadatas",)
_ALWAYS_ALLOWED = 2**26
_MOST_ITEM_BYTES = 8
_UNBOUNDED = "blosc"  # Unpacks to up to 2 GB, whatever size the metadata declares.


def check_files(folder: pathlib.Path) -> int:
    """Returns the size in bytes of all files in a folder.

    Raises:
        ValueError: one is no regular file, or a file of metadata is larger than 8 MiB.
    """
    stored = 0
    for file in folder.rglob("*"):
        try:
            about = file.stat()
        except FileNotFoundError:  # Its link is dangling, or a live run removes it.
            continue
        if stat.S_ISDIR(about.st_mode):
            continue
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{file} is no regular file")
        is_small = file.name.startswith("_") or file.name in _SMALL
        is_small = is_small or file.parent.name in _SMALL_FOLDERS
        if is_small and about.st_size > foreign_files.MOST_JSON_BYTES:
            raise foreign_files.TooLargeError(
                f"{file} has {about.st_size:,} bytes, above {foreign_files.MOST_JSON_BYTES:,}"
            )
        stored += about.st_size
    return stored


def check_pieces(folder: pathlib.Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises `ValueError` for arrays with pieces that unpack to more than the arrays.

    Args:
        folder: a local folder of arrays that Orbax saved.
        shapes: shapes of some arrays by name, as `decoder.norm.scale`.
    """
    import tensorstore

    # Without a cache, each array would read the manifest again.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _ALWAYS_ALLOWED}})
    driver = _driver(folder)
    base = {"driver": "file", "path": f"{folder}/"}
    opened: dict[str, Any] = {}
    for name in shapes:
        store: dict[str, Any] = base | {"path": f"{folder}/{name}/"}
        if (folder / _MANIFEST).exists():
            store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        spec = {"driver": driver, "kvstore": store}
        opened[name] = tensorstore.open(spec, open=True, read=True, context=context)
    for name, shape in shapes.items():
        array = opened[name].result()
        lengths = array.chunk_layout.write_chunk.shape or ()  # None for a scalar.
        piece = math.prod(lengths) * array.dtype.numpy_dtype.itemsize
        if piece > max(_ALWAYS_ALLOWED, _MOST_ITEM_BYTES * math.prod(shape)):
            raise foreign_files.TooLargeError(f"a piece of {name} unpacks to {piece:,} bytes")
        if _UNBOUNDED in str(array.codec.to_json()).lower():
            raise ValueError(f"{name} is compressed by {_UNBOUNDED}, which unpacks without a limit")


def _driver(folder: pathlib.Path) -> str:
    """Returns the format of the arrays in a folder, as Orbax finds it."""
    if not (folder / _METADATA).exists():
        return "zarr"
    content = foreign_files.read_bytes(folder / _METADATA, foreign_files.MOST_JSON_BYTES)
    return "zarr3" if foreign_files.parse_json(content, kind=dict).get("use_zarr3") else "zarr"
