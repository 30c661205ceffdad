"""Any convt5 model as two plain files: model.safetensors and a description in JSON.

The format needs nothing of this library to read: arrays are named by parameter path, and
`convt5.json` holds the settings of `ConvT5Config`, or of `ViTConfig` for a vision model. `describe`
and `revive` are also how a checkpoint says which model it holds.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from convt5 import errors
from convt5.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.interchange import safetensors_files
from convt5.interchange.mapping import Imported, Source, check, parameter_shapes
from convt5.vision.architecture import ViTConfig

Description = ConvT5Config | ViTConfig

DESCRIPTION = "convt5.json"
FORMAT = 1

_DESCRIPTION = "the description of the model"


def is_directory(path: str | pathlib.Path) -> bool:
    return (pathlib.Path(path) / DESCRIPTION).is_file()


def write_model(
    path: str | pathlib.Path,
    config: Description,
    params: Mapping[str, np.ndarray],
    *,
    step: int = 0,
) -> None:
    """Writes both files into an existing folder."""
    folder = pathlib.Path(path)
    safetensors_files.write(folder / safetensors_files.WHOLE, params, metadata={"format": "convt5"})
    about = {"format": FORMAT, "step": step, "model": describe(config)}
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n")


def read_model(path: str | pathlib.Path, *, allow_unmapped: bool = False) -> Imported:
    """Reads what `write_model` wrote.

    Raises:
        UserError: files missing or damaged, or arrays that do not fit the description.
    """
    folder = pathlib.Path(path)
    try:
        about = json.loads((folder / DESCRIPTION).read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
        config, step = revive(about["model"]), about.get("step", 0)
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an integer of at least 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, errors.UserError):
            raise
        raise errors.UserError(
            f"{folder / DESCRIPTION} cannot be read ({error}); pass a folder written by "
            "convt5.convert --to=safetensors."
        ) from None
    files = safetensors_files.open_all(folder)
    table = [Source(path=name, names=(name,)) for name in parameter_shapes(config)]
    report = check(
        table, config, files.shapes, skipped={}, allow_unmapped=allow_unmapped, where=str(folder)
    )
    params = {source.path: source.assemble(files.read) for source in table}
    return Imported(
        config=config,
        params=params,
        sources=tuple(table),
        report=report,
        step=step,
    )


def describe(config: Description) -> dict[str, Any]:
    """Returns the settings of a model as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def revive(settings: Mapping[str, Any]) -> Any:
    """Returns the `ConvT5Config` or `ViTConfig` that `describe` described.

    Raises:
        UserError: settings that this version does not know, or that are wrong.
    """
    if not isinstance(settings, Mapping):
        raise errors.UserError(f"{_DESCRIPTION} is {settings!r}; it must map settings to values.")
    if "image_size" in settings:  # Only images have one.
        errors.raise_all(_unknown(settings, ViTConfig), where=_DESCRIPTION)
        return ViTConfig(**settings)
    stacks = {field.name for field in dataclasses.fields(StackConfig)}
    faults = _unknown(settings, ConvT5Config)
    for side in ("encoder", "decoder"):
        given = settings.get(side)
        if not isinstance(given, Mapping):
            faults.append(f"{side} is missing.")
            continue
        faults += [f"setting {side}.{name} is unknown." for name in given.keys() - stacks]
    stem = settings.get("stem")
    if isinstance(stem, Mapping):
        faults += _unknown(stem, TextStemConfig, inside="stem.")
    elif stem is not None:
        faults.append(f"stem={stem!r} must hold the settings of a stem, or be null.")
    errors.raise_all(faults, where=_DESCRIPTION)
    sides = {side: StackConfig(**_tuples(settings[side])) for side in ("encoder", "decoder")}
    built_stem = {} if stem is None else {"stem": TextStemConfig(**_tuples(stem))}
    return ConvT5Config(**{**settings, **sides, **built_stem})


def _unknown(settings: Mapping[str, Any], described: type[Any], inside: str = "") -> list[str]:
    known = {field.name for field in dataclasses.fields(described)}
    return [
        f"setting {inside + name!r} is unknown.{errors.suggest(name, known)}"
        for name in settings.keys() - known
    ]


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
