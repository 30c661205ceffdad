"""Input, output and options of a conversion, checked before anything is read."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from convt5 import errors
from convt5.runtime import atomic_files, folders

SOURCES = ("mesh_tf", "t5x", "transformers", "hf", "pycls", "safetensors", "run")
TARGETS = ("run", "transformers", "hf", "safetensors", "stablehlo")
WEIGHTS = ("float32", "bfloat16")
_WEIGHT_FILES = ("transformers", "hf", "safetensors")

_READ_FROM_BUCKETS = ("mesh_tf", "run")

_ONLY_FOR = {
    ("mesh_tf", "t5x"): ("operative_config", "optimizer"),
    ("pycls",): ("num_heads", "image_size", "stem_strides"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The input, the output and the options of a conversion; fields are the command's flags."""

    source: str = "run"
    target: str = "run"
    checkpoint: str
    output_dir: str
    operative_config: str | None = None
    optimizer: bool = False
    allow_unmapped: bool = False
    num_heads: int | None = None
    image_size: int | None = None
    stem_strides: str | None = None
    vocabulary: str | None = None
    license: str | None = None
    trust: Sequence[str] = ()
    dtype: str | None = None
    weights: str = "float32"
    step: int | None = None
    average: Sequence[str] = ()
    encoder_length: int | None = None
    decoder_length: int | None = None

    def __post_init__(self):
        faults = []
        for name, value, known in (
            ("--from", self.source, SOURCES),
            ("--to", self.target, TARGETS),
            ("--weights", self.weights, WEIGHTS),
        ):
            if value not in known:
                faults.append(
                    f"{name}={value} must be one of {', '.join(known)}."
                    f"{errors.suggest(value, known)}"
                )
        faults += [
            f"--{name} is for --from={' and --from='.join(sources)}, not --from={self.source}; "
            "leave it out."
            for sources, names in _ONLY_FOR.items()
            for name in names
            if self.source not in sources and getattr(self, name)
        ]
        faults += [
            f"--{name}={getattr(self, name)} must be at least 1."
            for name in ("num_heads", "image_size")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        if self.optimizer and self.target != "run":
            faults.append(f"--optimizer is for --to=run: {self.target} holds no optimizer state.")
        if self.source == self.target == "run":
            faults.append("--from=run --to=run converts nothing; name another format.")
        if self.allow_unmapped and self.source == "run":
            faults.append("--allow_unmapped is for other formats than --from=run; leave it out.")
        if self.step is not None and self.source != "run":
            faults.append(f"--step is for --from=run, not --from={self.source}; leave it out.")
        if self.average and self.source != "run":
            faults.append(f"--average is for --from=run, not --from={self.source}; leave it out.")
        if self.license is not None and self.target != "transformers":
            faults.append("--license is for --to=transformers, which writes a model card.")
        if self.dtype is not None and self.target == "hf":
            faults.append(
                "--dtype is for activations, of which --to=hf tells nothing; leave it out, or give "
                "--weights=bfloat16."
            )
        if self.weights != "float32" and self.target not in _WEIGHT_FILES:
            faults.append(
                f"--weights={self.weights} is for --to={' and --to='.join(_WEIGHT_FILES)}; "
                f"--to={self.target} keeps float32."
            )
        lengths = (self.encoder_length, self.decoder_length)
        if self.target != "stablehlo" and lengths != (None, None):
            faults.append("--encoder_length and --decoder_length are for --to=stablehlo.")
        if self.source not in _READ_FROM_BUCKETS and atomic_files.is_remote(self.checkpoint):
            faults.append(
                f"--checkpoint={self.checkpoint} must be a local folder for --from={self.source}; "
                "copy it first, for example with gcloud storage cp --recursive."
            )
        errors.raise_all(faults, where="convert")


def check_destination(output_dir: str) -> pathlib.Path:
    """Returns the absolute destination without links; raises `UserError` if it exists."""
    if atomic_files.is_remote(output_dir):
        raise errors.UserError(
            f"output_dir={output_dir} must be a local folder; copy it to the bucket afterwards, "
            "with gcloud storage cp --recursive."
        )
    folders.check(output_dir, what="output_dir")
    folders.check_outside_checkpoints(output_dir, what="output_dir")
    given = pathlib.Path(os.path.abspath(os.path.expanduser(output_dir)))
    for path in (given, *given.parents):
        if path.is_symlink() and not path.exists():
            raise errors.UserError(
                f"output_dir={output_dir} cannot be made: {path} is a link to itself or to nothing;"
                " remove it, or name another folder."
            )
    destination = pathlib.Path(os.path.realpath(given))
    if destination.exists() and not destination.is_dir():
        raise errors.UserError(f"output_dir={output_dir} is a file; name a folder to create.")
    above = (*destination.parents, destination)  # The root has no parents.
    parent = next(folder for folder in above if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise errors.UserError(
            f"output_dir={output_dir} cannot be made: {parent} is no folder that can be written; "
            "name another, or change its permissions."
        )
    if destination.is_dir() and any(destination.iterdir()):
        raise errors.UserError(
            f"output_dir={output_dir} is in use: it holds {sorted(os.listdir(destination))[0]!r}; "
            "name a folder that does not exist, or remove this one."
        )
    return destination
