"""Reads arrays from safetensors files, one file or indexed shards, one array at a time."""

import pathlib
from collections.abc import Mapping

import numpy as np

from convt5 import errors
from convt5.interchange import weight_files
from convt5.interchange.mapping import Shape
from convt5.runtime import foreign_files

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = ("F32", "BF16", "F16", "F64")


class Files:
    """The arrays of some files by name; reading converts to float32."""

    def __init__(self, paths: list[pathlib.Path]):
        from safetensors import SafetensorError, safe_open

        self._damage = (SafetensorError, OSError, ValueError)
        self._owners = {}
        self._readers = []
        self.shapes: dict[str, Shape] = {}
        self.metadata: dict[str, str] = {}
        faults = []
        for path in paths:
            try:
                reader = safe_open(path, framework="numpy").__enter__()
                self.metadata |= reader.metadata() or {}
                names = list(reader.keys())
            except self._damage as error:
                raise _damaged(path, error) from None
            for name in names:
                if name in self._owners:
                    other = self._owners[name][1]
                    faults.append(f"{name} is in {other.name} and in {path.name}.")
                piece = reader.get_slice(name)
                self._owners[name] = (reader, path)
                self.shapes[name] = tuple(piece.get_shape())
            self._readers.append(reader)
        errors.raise_all(errors.abbreviate(faults), where=str(paths[0].parent))

    def read(self, name: str) -> np.ndarray:
        """Returns an array in float32; raises `UserError` for one of integers."""
        reader, path = self._owners[name]
        kind = reader.get_slice(name).get_dtype()
        if kind not in _FLOATS:
            raise errors.UserError(
                f"{path}: {errors.clip(name)} is stored as {kind}, which is none of "
                f"{', '.join(_FLOATS)}."
            )
        try:
            return np.asarray(reader.get_tensor(name), np.float32)
        except self._damage as error:
            raise _damaged(path, error) from None


def open_all(folder: pathlib.Path) -> Files:
    """Opens the safetensors files of a folder.

    Raises:
        UserError: there are none, one is missing, or one is damaged.
    """
    if paths := weight_files.find(folder, WHOLE, INDEX):
        return Files(paths)
    raise errors.UserError(
        f"{folder} holds neither {WHOLE} nor {INDEX}; pass a folder that holds one of them."
    )


def write(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]
) -> None:
    """Writes one file."""
    from safetensors.numpy import save_file

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    path.touch()
    mode = path.stat().st_mode  # As for any new file; safetensors lets only the owner read its own.
    save_file(contiguous, path, metadata=dict(metadata))
    path.chmod(mode)


def _damaged(path: pathlib.Path, error: Exception) -> errors.UserError:
    return foreign_files.unreadable(path, error, weight_files.REMEDY)
