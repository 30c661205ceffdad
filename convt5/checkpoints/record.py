"""The record of a checkpoint, in one checksummed file: shapes, checksums and model settings.

Arrays are named by their path in the tree, such as `encoder/layers/0/mlp/wi/kernel`.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import foreign_files

FORMAT = 1
_MOST_BYTES = 2**26
_SHAPE = re.compile(r"[^\[\]]{1,40}\[(\d{1,15}(,\d{1,15})*)?\]")
_PART = re.compile(r"state/(\d{1,9})(?=/|$)")  # Of a chain of transformations.
_SEAL = "sha256"  # Checksum of all else in the file.


def seal(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record with its checksum, which `read` verifies."""
    return dict(about) | {_SEAL: _seal(about)}


def read(folder: epath.PathLike) -> dict[str, Any]:
    """Returns the record of the checkpoint in a folder.

    Raises:
        UserError: another version wrote it. Damaged files raise many kinds of errors.
    """
    folder = epath.Path(folder)
    path = folder / "about" / "metadata"
    about = foreign_files.parse_json(foreign_files.read_bytes(path, _MOST_BYTES), kind=dict)
    seal = about.pop(_SEAL, None)  # Earlier versions had none.
    if seal is not None and seal != _seal(about):
        raise ValueError(f"{folder / 'about'} does not match its checksum")
    if about["format"] != FORMAT:
        raise errors.UserError(
            f"{folder} has checkpoint format {about['format']}; this version reads format "
            f"{FORMAT}: use the version of convt5 that wrote it."
        )
    if fault := _fault(about):
        raise ValueError(f"{path} is invalid: {fault}")
    return about


def shapes(by_path: Mapping[str, Any]) -> dict[str, str]:
    """Returns the dtype and shape of each array as text, such as `float32[8,9]`."""
    return {
        path: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in by_path.items()
    }


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """Inverts `shapes` for one array."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in sizes.split(",") if n), jnp.dtype(dtype))


def check_shapes(
    saved: Mapping[str, str], expected: Mapping[str, str], *, what: str, where: str
) -> None:
    """Raises a `UserError` that names the differences between a checkpoint and the model."""
    lines = [f"{name}: missing in the checkpoint" for name in expected if name not in saved]
    lines += [f"{name}: not in this model" for name in saved if name not in expected]
    lines += [
        f"{name}: {saved[name]} in the checkpoint, {shape} in this model"
        for name, shape in expected.items()
        if name in saved and saved[name] != shape
    ]
    if not lines:
        return
    cause = "architecture" if what == "parameters" else "optimizer"
    settings = cause if what == "parameters" else "optimizer and the trainer.train.frozen"
    raise errors.UserError(
        f"{where} was made by another {cause}; {len(lines)} of its {what} differ:\n"
        + "\n".join(f"- {line}" for line in errors.abbreviate(lines))
        + f"\nUse the {settings} it was made with (config.gin in its run directory), or choose "
        "another run_dir."
    )


def saved_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Returns under which name each array of an optimizer state was saved.

    A name holds the position of a part of the optimizer, of which those without arrays, such as
    weight decay, may have been added or left out since.
    """
    wanted = list(wanted)
    before, now = (
        sorted({int(found[1]) for name in names if (found := _PART.match(name))})
        for names in (saved, wanted)
    )
    moved = dict(zip(now, before, strict=True)) if len(now) == len(before) else {}

    def saved_name(name: str) -> str:
        found = _PART.match(name)
        if found is None or int(found[1]) not in moved:
            return name
        return f"state/{moved[int(found[1])]}{name[found.end() :]}"

    return {name: saved_name(name) for name in wanted}


def describe_config(config: Any) -> Any:
    """Returns a dataclass as plain JSON values."""
    if not checks.is_description(config):
        return repr(config)
    return json.loads(json.dumps(config, default=_settings))


def _settings(value: Any) -> Any:
    # A mixing kind in place of a name; a name says as much of those of convt5.
    if described := getattr(value, "described", None):
        return described()
    if checks.is_description(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return repr(value)


def differences(old: Any, new: Any, *, name: str = "") -> list[str]:
    """Returns one line `name: old -> new` for each setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in sorted(old.keys() | new.keys())
            for line in differences(
                old.get(key), new.get(key), name=f"{name}.{key}" if name else key
            )
        ]
    return [] if old == new else [f"{name}: {old} -> {new}"]


def _fault(about: Mapping[str, Any]) -> str | None:
    """Returns why the arrays of a record are not described as by `shapes`, or None."""
    for part in ("params", "optimizer"):
        arrays = about.get(part)
        if not isinstance(arrays, dict):
            return f"{part}={errors.clip(arrays)} does not map names to shapes"
        for shape in arrays.values():
            if not (isinstance(shape, str) and _SHAPE.fullmatch(shape)):
                return f"{part} has the shape {errors.clip(shape)}"
    checksums = about.get("checksums", {})
    if not isinstance(checksums, dict) or not all(isinstance(c, dict) for c in checksums.values()):
        return f"checksums={errors.clip(checksums)} does not map parts to checksums"
    return None


def _seal(about: Mapping[str, Any]) -> str:
    # Round-trips through JSON first, because types of numbers and texts may change.
    text = json.dumps(json.loads(json.dumps(about)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
