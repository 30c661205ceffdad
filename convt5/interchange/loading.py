"""`convt5.load_model`: loads a trained model from its folder, in any supported format."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from convt5 import errors
from convt5.checkpoints import reading
from convt5.interchange import hugging_face, portable, pytorch_model
from convt5.interchange.mapping import Imported, Report, Source, build_model
from convt5.modeling.tree_paths import named_leaves
from convt5.runtime import local_files
from convt5.training.train_state import abstract_model

if TYPE_CHECKING:
    from convt5.modeling.model import ConvT5
    from convt5.vision.model import ViT


def load_model(
    directory: epath.PathLike, *, step: int | None = None, ema: bool = False, **settings: Any
) -> "ConvT5 | ViT":
    """Loads the model in a folder: a run, an export of convt5, or a T5 of Hugging Face.

    A text model (`ConvT5`), called on encoder_input_tokens [batch, source] and decoder_input_tokens
    [batch, target], returns float32 logits [batch, target, vocab]. A vision model (`vision.ViT`),
    called on images [batch, height, width, channels], returns `ViTOutput` with float32 logits
    [batch, classes].

    Args:
        directory: a run directory, its `checkpoints` folder, one step in it, or a folder written by
            `convt5.convert --to=safetensors` or transformers.
        step: the checkpoint of a run; None means the newest.
        ema: loads the average over the updates, if the run kept one.
        **settings: overrides of the model's description that do not change shapes, such as
            dtype="float32" or taps_cross_segments=True.

    Raises:
        UserError: nothing that can be loaded, or a setting that does not exist or does not fit the
            parameters.
    """
    if not is_exported(directory):
        config = with_settings(run_config(directory, step=step), settings)
        abstract = abstract_model(config)
        return reading.load_params(directory, abstract, step=step, ema=ema)
    if step is not None:
        raise errors.UserError(
            f"step={step}, but {directory} is an exported model without steps; leave it out."
        )
    if ema:
        check_average(directory)
    imported = read_exported(directory)
    return build_model(with_settings(imported.config, settings), imported.params)


def check_average(directory: epath.PathLike) -> None:
    """Raises `UserError` if an exported model, or one checkpoint, has no average of the model."""
    if is_exported(directory):
        raise errors.UserError(
            f"{directory} is an exported model, which has no moving average of the parameters; "
            "leave out ema."
        )
    reading.check_average(directory)


def is_exported(directory: epath.PathLike) -> bool:
    """Returns whether a folder holds a model without a run."""
    path = os.path.expanduser(directory)
    return portable.is_directory(path) or hugging_face.is_directory(path)


def read_exported(directory: epath.PathLike, *, allow_unmapped: bool = False) -> Imported:
    """Reads a folder for which `is_exported` is true."""
    path = pathlib.Path(os.path.expanduser(directory))
    return _reader(path).read_model(path, allow_unmapped=allow_unmapped)


def exported_config(directory: epath.PathLike) -> Any:
    """Returns the description of the model in such a folder, without reading its weights."""
    path = pathlib.Path(os.path.expanduser(directory))
    config, _ = _reader(path).read_description(path)
    return config


def fingerprint(directory: epath.PathLike) -> str:
    """Returns what identifies an exported model, wherever it lies: its description and weights.

    Weights are read as by `local_files.contents`: of files above 16 MiB, blocks.
    """
    path = pathlib.Path(os.path.expanduser(directory))
    read = [
        local_files.contents(os.fspath(file))
        for file in sorted(path.iterdir())
        if _is_of_model(file)
    ]
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()[:32]


def _is_of_model(file: pathlib.Path) -> bool:
    is_described = file.name in (portable.DESCRIPTION, hugging_face.CONFIG)
    return file.is_file() and (is_described or file.suffix in (".safetensors", ".bin"))


def _reader(path: pathlib.Path) -> Any:
    return portable if portable.is_directory(path) else of_transformers(path)


def of_transformers(directory: epath.PathLike) -> Any:
    """Returns the module that reads a folder of transformers: of models of ours, or of T5."""
    path = os.path.expanduser(directory)
    return pytorch_model if pytorch_model.is_directory(path) else hugging_face


def read_run(directory: epath.PathLike, *, step: int | None = None) -> Imported:
    """Reads the parameters of a run, with their description."""
    folder = reading.find_checkpoint(directory, step=step)
    model = load_model(folder)
    params = {name: jax.device_get(leaf) for name, leaf in named_leaves(model)}
    sources = tuple(Source(path=name, names=(name,)) for name in params)
    report = Report(mapped=[(name, name) for name in params])
    if reading.has_average(folder):
        report.notes.append(
            "these are the last parameters, not the run's moving average; to export that, call "
            "convt5.save_model(convt5.load_model(RUN, ema=True), FOLDER)."
        )
    return Imported(
        config=model.config,
        params=params,
        sources=sources,
        report=report,
        step=reading.step_of(folder),
    )


def run_config(directory: epath.PathLike, *, step: int | None = None) -> Any:
    """Returns the description of a run's model, `ConvT5Config` or `ViTConfig`."""
    folder = reading.find_checkpoint(directory, step=step)
    return portable.revive(reading.read_description(folder), where=str(folder))


def with_settings(config: Any, settings: dict[str, Any]) -> Any:
    """Returns a description with some settings replaced; unknown ones raise `UserError`."""
    known = [field.name for field in dataclasses.fields(config)]
    errors.raise_all(
        [
            f"setting {name!r} is unknown.{errors.suggest(name, known)}"
            for name in settings
            if name not in known
        ],
        where="load_model",
    )
    return dataclasses.replace(config, **settings)
