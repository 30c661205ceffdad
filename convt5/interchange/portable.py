"""A convt5 model as two plain files: model.safetensors and a JSON description.

Reading the format does not need convt5: arrays are named by parameter path, and `convt5.json` has
the settings of `ConvT5Config`, or of `ViTConfig` for a vision model, with how its images were
normalised. `describe` and `revive` also serve to record the model in checkpoints.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convt5 import errors
from convt5.checkpoints import record
from convt5.errors.checks import MOST_STEPS
from convt5.interchange import safetensors_files
from convt5.interchange.mapping import Imported, import_named
from convt5.modeling.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.modeling.mixers.base import revive as revive_mixing
from convt5.runtime import foreign_files
from convt5.vision.architecture import ViTConfig

Description = ConvT5Config | ViTConfig

DESCRIPTION = "convt5.json"
FORMAT = 1

NORMALISATION = ("channel_order", "mean", "stddev")
"""The settings of `ImageDataConfig` that normalise images."""


def is_directory(path: str | pathlib.Path) -> bool:
    return (pathlib.Path(path) / DESCRIPTION).is_file()


def write_model(
    path: str | pathlib.Path,
    config: Description,
    params: Mapping[str, np.ndarray],
    *,
    step: int = 0,
    normalisation: Mapping[str, Any] | None = None,
    mean: Mapping[str, Any] | None = None,
) -> None:
    """Writes both files into an existing folder; the last two are those of `Imported`."""
    folder = pathlib.Path(path)
    safetensors_files.write(folder / safetensors_files.WHOLE, params, metadata={"format": "convt5"})
    about = {"format": FORMAT, "step": step, "model": describe(config)}
    more = {"normalisation": normalisation, "mean": mean}
    about |= {name: dict(values) for name, values in more.items() if values}
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n")


def read_model(path: str | pathlib.Path, *, allow_unmapped: bool = False) -> Imported:
    """Reads the files of `write_model`.

    Raises:
        UserError: files are missing or damaged, or arrays do not fit the description.
    """
    folder = pathlib.Path(path)
    about = _read_about(folder)
    files = safetensors_files.open_all(folder)
    imported = import_named(
        _model_of(about, folder),
        files.shapes,
        files.read,
        step=about["step"],
        allow_unmapped=allow_unmapped,
        where=str(folder),
    )
    return imported._replace(normalisation=about["normalisation"])


def read_description(path: str | pathlib.Path) -> tuple[Description, int]:
    """Returns what a folder of `write_model` holds, without its arrays, and its step.

    Raises:
        UserError: the description is missing or damaged.
    """
    folder = pathlib.Path(path)
    about = _read_about(folder)
    return _model_of(about, folder), about["step"]


def _model_of(about: Mapping[str, Any], folder: pathlib.Path) -> Description:
    return revive(about.get("model"), where=str(folder / DESCRIPTION))


def _read_about(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the checked contents of the description; the model is checked by `revive`."""
    file = folder / DESCRIPTION
    remedy = "pass a folder written by convt5.convert --to=safetensors."
    about = {"step": 0, "normalisation": {}} | foreign_files.read_json(file, remedy=remedy)
    form, step, normalisation = (about.get(k) for k in ("format", "step", "normalisation"))
    why = ""
    if form != FORMAT:
        why = f"format {errors.clip(form)}, this version reads {FORMAT}"
    elif fault := step_fault(step):
        why = fault
    elif not isinstance(normalisation, Mapping) or not all(
        name in NORMALISATION and normalises(value) for name, value in normalisation.items()
    ):
        why = f"normalisation={errors.clip(normalisation)} must hold {', '.join(NORMALISATION)}"
    if why:
        raise foreign_files.unreadable(file, why, remedy)
    return about


def step_fault(step: object) -> str:
    """Returns why a value is no number of updates made; empty if it is one."""
    if type(step) is int and 0 <= step < MOST_STEPS:
        return ""
    return f"step={errors.clip(step)} must be an integer of at least 0, and below {MOST_STEPS}"


def normalises(value: Any) -> bool:
    """Returns whether a value may be one of `NORMALISATION`: a channel order, or numbers."""
    numbers: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    is_order = isinstance(value, str) and value in ("rgb", "bgr")
    return is_order or all(type(x) in (int, float) and math.isfinite(x) for x in numbers)


def describe(config: Description) -> dict[str, Any]:
    """Returns the settings of a model as JSON values."""
    return record.describe_config(config)


def revive(settings: Any, *, where: str = "the description of the model") -> Any:
    """Returns the `ConvT5Config` or `ViTConfig` from the result of `describe`.

    Args:
        settings: the JSON values.
        where: name of the file for messages.

    Raises:
        UserError: settings are unknown to this version, missing or wrong.
    """
    try:
        return _from_settings(settings, where)
    except TypeError as error:  # A setting is missing, or a list has a wrong element.
        raise errors.UserError(f"{where}: {error}; copy the model again.") from None
    except errors.UserError as error:
        if str(error).startswith(errors.printable(where)):
            raise
        raise errors.UserError(f"{where}: {error}") from None  # Rules name settings only.


def _from_settings(settings: Any, where: str) -> Description:
    if not isinstance(settings, Mapping):
        raise errors.UserError(
            f"{where}: the model is {errors.clip(settings)}; it must map settings to values."
        )
    if "image_size" in settings:  # Only vision models have it.
        errors.raise_all(_unknown(settings, ViTConfig), where=where)
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
        faults.append(f"stem={errors.clip(stem)} must hold the settings of a stem, or be null.")
    errors.raise_all(errors.abbreviate(faults), where=where)
    sides = {side: _stack(settings[side]) for side in ("encoder", "decoder")}
    built_stem = {} if stem is None else {"stem": TextStemConfig(**_tuples(stem))}
    return ConvT5Config(**{**settings, **sides, **built_stem})


def _stack(settings: Mapping[str, Any]) -> StackConfig:
    given = _tuples(settings)
    if "mixing" in given:
        mixing = given["mixing"]
        is_list = isinstance(mixing, tuple)
        given["mixing"] = tuple(map(revive_mixing, mixing)) if is_list else revive_mixing(mixing)
    return StackConfig(**given)


def _unknown(settings: Mapping[str, Any], described: type[Any], inside: str = "") -> list[str]:
    known = {field.name for field in dataclasses.fields(described)}
    return [
        f"setting {errors.clip(inside + name)} is unknown.{errors.suggest(name, known)}"
        for name in settings.keys() - known
    ]


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
