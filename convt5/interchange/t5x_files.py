"""Reads arrays from T5X checkpoints, native (msgpack and zarr) or Orbax, one array at a time.

A native checkpoint is a folder with a file `checkpoint`, a msgpack tree, whose large arrays are
zarr folders beside it, read by TensorStore. Shapes in files are compared with file sizes before
memory is allocated. Missing chunks raise an error, because TensorStore would read them as zeros.
"""

import itertools
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
from etils import epath

from convt5 import errors
from convt5.checkpoints import array_files
from convt5.errors.checks import MOST_STEPS
from convt5.interchange.mapping import Shape
from convt5.runtime import foreign_files

MOST_TREE_BYTES = 2**27
"""Most bytes of the file `checkpoint`; that of an 11B model, with its small arrays, has 30 MB."""

_MOST_ENTRIES = 2**20
_MOST_DEPTH = 64
_MOST_LAYERS = 1000
_MOST_ARRAYS = 100 * _MOST_LAYERS
_REMEDY = "copy the checkpoint again, or name another one."
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int32", "int64", "uint32")
_ZARR_DTYPES = {"<f8": 8, "<f4": 4, "<f2": 2, "bfloat16": 2}
# TensorStore unpacks these to no more than the declared size of a piece.
_COMPRESSIONS = (None, "gzip", "zlib", "zstd")
_NDARRAY, _SCALAR = 1, 3  # Flax's extension types of msgpack.


class Files:
    """The arrays of one checkpoint by name, such as `target/decoder/layers_0/mlp/wi/kernel`.

    Attributes:
        folder: folder of the checkpoint.
        shapes: shapes of all arrays.
    """

    def __init__(self, path: str | pathlib.Path):
        """Opens a checkpoint, or the newest in a folder of `checkpoint_<step>`.

        Raises:
            UserError: there is none, or it is damaged.
        """
        self.folder = find(pathlib.Path(path))
        is_native = (self.folder / "checkpoint").is_file()
        reader = _Native if is_native else _Orbax
        try:
            self._reader = reader(self.folder)
        except errors.UserError:
            raise
        except Exception as error:  # Damaged files raise many kinds.
            raise foreign_files.unreadable(self.folder, _told(error), _REMEDY) from None
        self.shapes: dict[str, Shape] = self._reader.shapes

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """Returns an array; raises `UserError` if it cannot be read, or weights are integers."""
        try:
            value = np.asarray(self._reader.read(name))
            if dtype is np.float32 and value.dtype.kind in "iub":
                raise ValueError(f"{value.dtype} is no dtype of weights")
            return np.asarray(value, dtype)
        except errors.UserError:
            raise
        except Exception as error:
            why = f"{errors.clip(name, limit=120)}: {_told(error)}"
            raise foreign_files.unreadable(self.folder, why, _REMEDY) from None

    def step(self) -> int:
        """Returns the number of updates made; 0 if not recorded."""
        if "state/step" not in self.shapes:
            return 0
        value = float(self.read("state/step", np.float64).reshape(-1)[0])
        if not 0 <= value < MOST_STEPS or value != int(value):
            raise foreign_files.unreadable(self.folder, f"its step is {value}", _REMEDY)
        return int(value)


class OneByOne:
    """A checkpoint of `t5x/examples/scalable_t5`, under the names that `t5x/examples/t5` has.

    There arrays of all layers are stacked along axis 1, and each layer has a relative bias. Biases
    that are equal in all layers of a stack are read as one.

    Attributes:
        folder: folder of the checkpoint.
        shapes: shapes of all arrays.
    """

    def __init__(self, files: Files):
        """Takes arrays apart by their layers.

        Raises:
            UserError: layers differ in their relative bias, or are too many.
        """
        self.folder, self.step, self._files = files.folder, files.step, files
        self._latest: tuple[str, np.ndarray] = ("", np.empty(0))
        self._places: dict[str, tuple[str, int | None]] = {}
        self.shapes: dict[str, Shape] = {}
        for name, shape in files.shapes.items():
            match = re.fullmatch(r"(target/(?:en|de)coder/layers)(/.+)", name)
            if match and len(shape) > 1:
                if len(self.shapes) > _MOST_ARRAYS:
                    why = f"it has more than {_MOST_ARRAYS:,} arrays of single layers"
                    raise foreign_files.unreadable(self.folder, why, _REMEDY)
                if shape[1] > _MOST_LAYERS:
                    why = f"{errors.clip(name)} has {shape[1]:,} layers"
                    raise foreign_files.unreadable(self.folder, why, _REMEDY)
                for i in range(shape[1]):
                    self._place(f"{match[1]}_{i}{match[2]}", name, i)
            else:
                self._place(name, name, None)
        for stack in ("encoder", "decoder"):
            self._share_bias(stack)

    def read(self, name: str) -> np.ndarray:
        """Returns an array in float32; raises `UserError` if it cannot be read."""
        source, layer = self._places[name]
        if layer is None:
            return self._files.read(source)
        if self._latest[0] != source:
            self._latest = (source, self._files.read(source))
        return self._latest[1][:, layer]

    def _place(self, name: str, source: str, layer: int | None) -> None:
        shape = self._files.shapes[source]
        self._places[name] = (source, layer)
        self.shapes[name] = shape if layer is None else (shape[0], *shape[2:])

    def _share_bias(self, stack: str) -> None:
        pattern = rf"target/{stack}/layers_\d+/relative_posemb/rel_embedding"
        own = [name for name in self.shapes if re.fullmatch(pattern, name)]
        if not own:
            return
        first = self.read(own[0])
        if any(not np.array_equal(first, self.read(name)) for name in own[1:]):
            raise errors.UserError(
                f"{self.folder}: the {len(own)} layers of the {stack} have different relative "
                "biases (relative_posemb), and convt5 has one for all layers of a stack, so this "
                "model cannot be imported."
            )
        self._place(f"target/{stack}/relpos_bias/rel_embedding", *self._places[own[0]])
        for name in own:
            del self.shapes[name], self._places[name]


def find(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a checkpoint, given that or a folder with several.

    Raises:
        UserError: it is neither.
    """
    if _is_checkpoint(path):
        return path
    steps = {}
    if path.is_dir():
        for child in path.iterdir():
            match = re.fullmatch(r"checkpoint_(\d{1,12})", child.name)
            if match and _is_checkpoint(child):
                steps[int(match[1])] = child
    if steps:
        return steps[max(steps)]
    raise errors.UserError(
        f"{path} holds no checkpoint of T5X: neither a file named checkpoint, nor state/_METADATA "
        "of Orbax, nor folders checkpoint_<step> with one of them; name such a folder."
    )


def _is_checkpoint(path: pathlib.Path) -> bool:
    places = ("checkpoint", "state/_METADATA", "_METADATA")
    return any((path / place).is_file() for place in places)


class _Native:
    """A native checkpoint: msgpack, and zarr for large arrays."""

    def __init__(self, folder: pathlib.Path):
        tree = _unpack(foreign_files.read_bytes(folder / "checkpoint", MOST_TREE_BYTES))
        if not isinstance(tree, dict):
            raise ValueError("its tree is none")
        tree = tree.get("optimizer", tree)
        self._leaves = dict(_flat(tree, ""))
        self._folder = folder
        self.shapes = {}
        for name, leaf in self._leaves.items():
            is_array = isinstance(leaf, np.ndarray)
            self.shapes[name] = leaf.shape if is_array else _zarr_shape(self._zarr(name))

    def read(self, name: str) -> Any:
        leaf = self._leaves[name]
        if isinstance(leaf, np.ndarray):
            return leaf
        import tensorstore

        folder = self._zarr(name)
        _check_chunks(folder)
        store = {"driver": "file", "path": str(folder)}
        return (
            tensorstore.open({"driver": "zarr", "kvstore": store}, open=True)
            .result()
            .read()
            .result()
        )

    def _zarr(self, name: str) -> pathlib.Path:
        """Returns the zarr folder of an array, which must be inside the checkpoint."""
        path = str(self._leaves[name]["kvstore"]["path"]).rstrip("/").rpartition("/")[2]
        if not foreign_files.is_file_name(path):
            raise ValueError(f"an array lies in {errors.clip(path)}")
        return self._folder / path


class _Orbax:
    """A checkpoint that T5X saved with Orbax, and that Orbax reads."""

    def __init__(self, folder: pathlib.Path):
        import orbax.checkpoint as ocp

        self._folder = folder / "state" if (folder / "state" / "_METADATA").is_file() else folder
        self._handler = ocp.PyTreeCheckpointHandler()
        stored = array_files.check_files(self._folder)
        _check_names(foreign_files.read_json(self._folder / "_METADATA", remedy=_REMEDY))
        metadata = self._handler.metadata(epath.Path(self._folder))
        tree = getattr(metadata, "tree", metadata)
        leaves = dict(_flat(tree.get("optimizer", tree), ""))
        self._inside = ("optimizer",) if "optimizer" in tree else ()
        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self._dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
        told = sum(4 * math.prod(shape) for shape in self.shapes.values())
        foreign_files.check_expansion(told, stored)
        pieces = {
            ".".join((*self._inside, *name.split("/"))): shape
            for name, shape in self.shapes.items()
        }
        array_files.check_pieces(self._folder, pieces)

    def read(self, name: str) -> Any:
        import orbax.checkpoint as ocp

        path = (*self._inside, *name.split("/"))
        item = restore = None
        for key in reversed(path):
            item = {key: 0 if item is None else item}
            restore = {
                key: ocp.RestoreArgs(restore_type=np.ndarray) if restore is None else restore
            }
        arguments = ocp.args.PyTreeRestore(item, restore_args=restore, partial_restore=True)
        found = self._handler.restore(epath.Path(self._folder), args=arguments)
        for key in path:
            found = found[key]
        return found


def _check_names(metadata: Mapping[str, Any]) -> None:
    """Raises `ValueError` for names of arrays from which Orbax would make paths elsewhere."""
    for entry in metadata["tree_metadata"].values():
        for key in entry["key_metadata"]:
            if not foreign_files.is_file_name(key["key"]):
                raise ValueError(f"an array has {errors.clip(key['key'])} in its name")


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by name; a TensorStore spec is a leaf."""
    if isinstance(tree, Mapping) and not ("driver" in tree and "kvstore" in tree):
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}/{key}" if prefix else str(key))
    elif tree is not None and prefix != "version":
        yield prefix, tree


def _unpack(content: bytes) -> Any:
    """Returns a msgpack tree written by Flax; its memory is bounded by the number of entries."""
    count = 0

    def counted(found: list[Any]) -> list[Any]:
        nonlocal count
        count += 1 + len(found)
        if count > _MOST_ENTRIES:
            raise ValueError("it has too many entries")
        return found

    def unpack(content: bytes, **hooks: Any) -> Any:
        return msgpack.unpackb(
            content,
            list_hook=counted,
            object_pairs_hook=lambda found: dict(counted(found)),
            raw=False,
            strict_map_key=False,
            max_array_len=_MOST_DEPTH,
            max_map_len=2**16,
            **hooks,
        )

    def extension(code: int, data: bytes) -> np.ndarray:
        if code not in (_NDARRAY, _SCALAR):
            raise ValueError(f"it holds something of type {code}, which is no array")
        return _array(*unpack(data))

    return unpack(content, ext_hook=extension)


def _array(shape: Sequence[Any], dtype: Any, buffer: bytes) -> np.ndarray:
    if dtype not in _DTYPES:
        raise ValueError(f"an array is stored as {errors.clip(dtype)}")
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return np.frombuffer(buffer, kind).reshape([int(length) for length in shape])


def _zarr_about(folder: pathlib.Path) -> dict[str, Any]:
    about = foreign_files.parse_json(foreign_files.read_bytes(folder / ".zarray", 2**16), kind=dict)
    shape, chunks = about.get("shape"), about.get("chunks")
    for lengths in (shape, chunks):
        if not isinstance(lengths, list) or any(
            type(n) is not int or not 0 < n < 2**40 for n in lengths
        ):
            raise ValueError(f"{folder.name} tells the shape {errors.clip(lengths)}")
    if len(shape) != len(chunks) or any(c > n for c, n in zip(chunks, shape, strict=True)):
        raise ValueError(f"{folder.name} has chunks {chunks} of an array {shape}")
    if about.get("dtype") not in _ZARR_DTYPES:
        raise ValueError(f"{folder.name} is stored as {errors.clip(about.get('dtype'))}")
    compressor = about.get("compressor")
    compression = compressor.get("id") if isinstance(compressor, dict) else compressor
    if compression not in _COMPRESSIONS:
        raise ValueError(f"{folder.name} is compressed by {errors.clip(compression)}")
    return about


def _zarr_shape(folder: pathlib.Path) -> Shape:
    return tuple(_zarr_about(folder)["shape"])


def _check_chunks(folder: pathlib.Path) -> None:
    """Raises `ValueError` for a chunk that is missing, or too small for its unpacked size."""
    about = _zarr_about(folder)
    counts = [-(-n // c) for n, c in zip(about["shape"], about["chunks"], strict=True)]
    if math.prod(counts) > _MOST_ENTRIES:
        raise ValueError(f"{folder.name} has {math.prod(counts):,} pieces")
    separator = "/" if about.get("dimension_separator") == "/" else "."
    stored = 0
    for index in itertools.product(*map(range, counts)):
        piece = folder / (separator.join(map(str, index)) or "0")
        if not piece.is_file():
            raise ValueError(f"{folder.name} lacks its piece {piece.name}")
        stored += piece.stat().st_size
    told = math.prod(about["shape"]) * _ZARR_DTYPES[about["dtype"]]
    foreign_files.check_expansion(told, stored)


def _told(error: Exception) -> str:
    """Returns the message of an error in one line."""
    text = str(error).strip().partition("\n")[0]
    return (
        text
        if isinstance(error, ValueError | OSError) and text
        else f"{type(error).__name__} {text}"
    )
