"""Reads back a checkpoint that was just written, before the run relies on it."""

from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from convt5.checkpoints import named_arrays, reading, record

_BYTES = 2**20
"""Most bytes of data that are read back from each part; names and shapes are all checked."""

Shapes = Mapping[str, jax.ShapeDtypeStruct]


def smallest(arrays: Mapping[str, jax.Array]) -> Shapes:
    """Returns the smallest of the arrays with their shardings, which `check` reads."""
    chosen, total = {}, 0
    for name, leaf in sorted(arrays.items(), key=lambda item: item[1].nbytes):
        total += leaf.nbytes
        if chosen and total > _BYTES:
            break
        chosen[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return chosen


def check(folder: epath.Path, about: Mapping[str, Any], parts: Mapping[str, Shapes]) -> None:
    """Raises an error if a complete checkpoint differs from what was saved.

    All hosts must call it.

    Args:
        folder: folder of the checkpoint.
        about: the record that was saved with it.
        parts: by part, such as "params", the arrays whose data is read and compared.
    """
    reading.on_all_hosts(lambda: _compare(folder, about, list(parts)))
    for part, leaves in parts.items():
        if leaves:
            reading.read_arrays(folder, part, leaves, about)


def _compare(folder: epath.Path, about: Mapping[str, Any], parts: list[str]) -> None:
    if not folder.name.isdigit() or int(folder.name) not in reading.steps_in(folder.parent):
        raise FileNotFoundError(f"{folder} is not there")
    read_record = record.read(folder)
    for part in parts:
        if not read_record[part] == about[part] == _shapes(folder / part):
            raise ValueError(f"{folder / part} does not hold what was saved")


def _shapes(folder: epath.Path) -> dict[str, str]:
    """Opens every array of one part of a checkpoint; returns dtypes and shapes by name."""
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointHandler()
    try:
        return record.shapes(named_arrays.by_path(reader.metadata(folder).tree))
    finally:
        reader.close()
