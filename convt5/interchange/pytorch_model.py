"""Exports any text model to Hugging Face transformers: a folder with weights and a PyTorch file.

`modeling_convt5.py`, a file of this package that is copied into the folder, computes the model with
torch and transformers alone. Arrays are those of a checkpoint, with dots for slashes in their
names, so a round trip is exact bit for bit. On import folders are data: their PyTorch file is never
read.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from convt5 import errors
from convt5.interchange import hugging_face, portable, safetensors_files
from convt5.interchange.mapping import Imported, import_named
from convt5.modeling.architecture import ConvT5Config
from convt5.runtime import foreign_files

KIND = "convt5"
"""The model type in config.json."""

CODE = "modeling_convt5.py"
_MODEL = "ConvT5ForConditionalGeneration"
_REMEDY = "pass a folder that convt5.convert --to=transformers or save_pretrained wrote."


def is_directory(path: epath.PathLike) -> bool:
    """Returns whether a folder holds a model that convt5 exported to transformers."""
    settings = foreign_files.find_json(pathlib.Path(path) / hugging_face.CONFIG) or {}
    return settings.get("model_type") == KIND


def write_model(
    path: str | pathlib.Path,
    config: ConvT5Config,
    params: Mapping[str, np.ndarray],
    *,
    step: int = 0,
    end_id: int = 1,
    longest: int | None = None,
) -> None:
    """Writes config.json, generation_config.json, weights and code into an existing folder.

    `end_id` and `longest` are as in `hugging_face.write_generation`.
    """
    folder = pathlib.Path(path)
    arrays = {_name(path): array for path, array in params.items()}
    safetensors_files.write(folder / hugging_face.WEIGHTS, arrays, metadata={"format": "pt"})
    settings = as_settings(config, step=step, end_id=end_id)
    hugging_face.write_json(folder / hugging_face.CONFIG, settings)
    hugging_face.write_generation(folder, end_id, longest)
    code = pathlib.Path(__file__).with_name(CODE).read_text()
    (folder / CODE).write_text(code)


def read_model(path: str | pathlib.Path, *, allow_unmapped: bool = False) -> Imported:
    """Reads what `write_model` or `save_pretrained` wrote, weights whole or in shards.

    Raises:
        UserError: files are missing or damaged, or arrays do not fit the description.
    """
    folder = pathlib.Path(path)
    config, step = read_description(folder)
    files = hugging_face.open_weights(folder)
    imported = import_named(
        config,
        files.shapes,
        files.read,
        _name,
        step=step,
        allow_unmapped=allow_unmapped,
        where=str(folder),
    )
    imported.report.notes += hugging_face.text_notes(folder)
    return imported


def read_description(path: str | pathlib.Path) -> tuple[ConvT5Config, int]:
    """Returns what a folder of `write_model` holds, without its arrays, and its step.

    Raises:
        UserError: the description is missing or damaged.
    """
    file = pathlib.Path(path) / hugging_face.CONFIG
    settings = foreign_files.read_json(file, remedy=_REMEDY)
    config, step = portable.revive(settings.get(KIND), where=str(file)), settings.get("step", 0)
    if not isinstance(config, ConvT5Config) or portable.step_fault(step):
        why = f"step={errors.clip(step)}, or what it describes is no text model"
        raise foreign_files.unreadable(file, why, _REMEDY)
    hugging_face.check_ids(file.parent)
    return config, step


def as_settings(config: ConvT5Config, *, step: int = 0, end_id: int = 1) -> dict[str, Any]:
    """Returns the config.json of a model."""
    module = CODE.removesuffix(".py")
    return {
        "architectures": [_MODEL],
        "model_type": KIND,
        "auto_map": {
            "AutoConfig": f"{module}.ConvT5Config",
            "AutoModelForSeq2SeqLM": f"{module}.{_MODEL}",
        },
        "is_encoder_decoder": True,
        # A tied output uses the token table itself, so there are no two tensors to tie.
        "tie_word_embeddings": False,
        **hugging_face.special_ids(end_id),
        "vocab_size": config.vocab_size,
        "hidden_size": config.emb_dim,
        "dtype": "float32",
        "torch_dtype": "float32",
        "step": step,
        KIND: portable.describe(config),
    }


def _name(path: str) -> str:
    """Returns the PyTorch name of a parameter."""
    return path.replace("/", ".")
