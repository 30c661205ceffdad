"""Entry point of `python -m convt5.convert`: converts models from and to other formats.

A conversion is written to a hidden folder beside its destination and moved there when complete.
After a kill, the same command repeats it.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from convt5 import errors
from convt5.configuration import command_line
from convt5.interchange.operative_config import OperativeConfig
from convt5.runtime import atomic_files, folders
from convt5.text import task_format, vocabulary_files

if TYPE_CHECKING:
    from convt5.interchange.mapping import Imported

SOURCES = ("mesh_tf", "t5x", "transformers", "hf", "pycls", "safetensors", "run")
TARGETS = ("run", "transformers", "hf", "safetensors", "stablehlo")

_ONLY_FOR = {
    ("mesh_tf", "t5x"): ("operative_config", "optimizer"),
    ("pycls",): ("num_heads", "image_size", "stem_strides"),
}

COMMAND = command_line.Command(
    name="convert",
    summary="Converts a model of another format into a run directory for train, eval and infer, "
    "or writes a model in another format.",
    needs_gin_file=False,
    reads_gin=False,
    examples=[
        (
            "import a released Mesh TensorFlow checkpoint, with its optimizer state",
            "--from=mesh_tf --checkpoint=lconv_base/model.ckpt-524288 "
            "--operative_config=lconv_base/operative_config.gin --optimizer "
            "--vocabulary=sentencepiece.model --output_dir=runs/lconv_base",
        ),
        (
            "import a checkpoint of T5X with the state of its optimizer",
            "--from=t5x --checkpoint=t5_1_1_base/checkpoint_1000000 --optimizer "
            "--vocabulary=sentencepiece.model --output_dir=runs/t5_base",
        ),
        (
            "import a T5 from Hugging Face",
            "--from=hf --checkpoint=t5-v1_1-base --output_dir=runs/t5_base",
        ),
        (
            "import a Vision Transformer of pycls",
            "--from=pycls --checkpoint=ViT-C-1GF.pyth --output_dir=runs/vit_c_1gf",
        ),
        (
            "export a trained T5 for Hugging Face transformers",
            "--to=hf --checkpoint=runs/t5_base --output_dir=exports/t5_base",
        ),
        (
            "export any text model for transformers, with one PyTorch file that computes it",
            "--to=transformers --checkpoint=runs/dynamic --output_dir=exports/dynamic",
        ),
        (
            "export any model as safetensors with a JSON description",
            "--to=safetensors --checkpoint=runs/dynamic --output_dir=exports/dynamic",
        ),
        (
            "export encoder and decoding step as programs that need no convt5",
            "--to=stablehlo --checkpoint=runs/dynamic --output_dir=exports/programs "
            "--encoder_length=512 --decoder_length=114",
        ),
    ],
    flags=[
        command_line.Flag(
            "from",
            f"format of the checkpoint, one of {', '.join(SOURCES)} (default: run, a run "
            "directory of convt5).",
            {"default": "run", "dest": "source"},
        ),
        command_line.Flag(
            "to",
            f"format to write, one of {', '.join(TARGETS)} (default: run).",
            {"default": "run", "dest": "target"},
        ),
        command_line.Flag(
            "checkpoint",
            "the checkpoint to read: for mesh_tf a folder or a prefix, such as "
            "model.ckpt-524288; for pycls a .npz, .safetensors or .pyth file; otherwise a "
            "folder.",
        ),
        command_line.Flag("output_dir", "the folder to create; it must not exist, or be empty."),
        command_line.Flag(
            "operative_config",
            "the operative_config.gin of a mesh_tf checkpoint, which sets tap offsets and the "
            "number of heads, or the model.gin of a t5x checkpoint (default: the one beside the "
            "checkpoint).",
        ),
        command_line.Flag(
            "optimizer",
            "also imports the optimizer state of a mesh_tf or t5x checkpoint, to continue "
            "training; otherwise the optimizer state is initialized.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "num_heads",
            "attention heads of a pycls model (default: one per 64 channels).",
            {"type": int},
        ),
        command_line.Flag(
            "image_size",
            "height and width of a pycls model's images in pixels (default: from its position "
            "table).",
            {"type": int},
        ),
        command_line.Flag(
            "stem_strides",
            "strides of a pycls model's stem, such as 2,2,2,2,1 (default: 2 for each "
            "convolution that adds channels).",
        ),
        command_line.Flag(
            "vocabulary",
            "the vocabulary of a text model: a SentencePiece .model file, or bytes (default: "
            "the vocabulary beside the checkpoint).",
        ),
        command_line.Flag(
            "license",
            "of the weights, for the model card of --to=transformers: an identifier such as "
            "apache-2.0.",
        ),
        command_line.TRUST_FLAG,
        command_line.Flag(
            "allow_unmapped",
            "ignores variables that belong to no known part of the model.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "dtype",
            "dtype of activations in the run: float32 (the default of an import) or bfloat16.",
        ),
        command_line.Flag(
            "step", "the step of a run to read (default: the newest).", {"type": int}
        ),
        command_line.Flag(
            "encoder_length",
            "input length of stablehlo programs, in tokens (default: 512).",
            {"type": int},
        ),
        command_line.Flag(
            "decoder_length",
            "most decoding steps of stablehlo programs (default: 114).",
            {"type": int},
        ),
    ],
)


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
    step: int | None = None
    encoder_length: int | None = None
    decoder_length: int | None = None

    def __post_init__(self):
        faults = []
        for name, value, known in (
            ("--from", self.source, SOURCES),
            ("--to", self.target, TARGETS),
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
        if self.license is not None and self.target != "transformers":
            faults.append("--license is for --to=transformers, which writes a model card.")
        lengths = (self.encoder_length, self.decoder_length)
        if self.target != "stablehlo" and lengths != (None, None):
            faults.append("--encoder_length and --decoder_length are for --to=stablehlo.")
        errors.raise_all(faults, where="convert")


def main(argv: Sequence[str]) -> int:
    """Converts according to the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    given = vars(arguments.flags)
    names = [field.name for field in dataclasses.fields(Conversion)]
    missing = [f"--{name}" for name in ("checkpoint", "output_dir") if not given[name]]
    if missing:
        raise errors.UserError(
            f"{' and '.join(missing)} must be given; see python -m convt5.convert --help."
        )
    for name in ("checkpoint", "operative_config"):
        given[name] = given[name] and os.path.expanduser(given[name])
    given["trust"] = arguments.trust
    conversion = Conversion(**{name: given[name] for name in names})
    report = convert(conversion)
    print(report)
    return 0


def convert(conversion: Conversion) -> str:
    """Creates `output_dir`; returns a message for the user.

    Raises:
        UserError: the input or the destination is invalid; nothing is written then.
    """
    destination = check_destination(conversion.output_dir)
    read = {
        "mesh_tf": _read_mesh_tf,
        "t5x": _read_t5x,
        "transformers": _read_exported,
        "hf": _read_exported,
        "pycls": _read_pycls,
        "safetensors": _read_exported,
        "run": _read_run,
    }[conversion.source]
    imported, make_state, training = read(conversion)
    if conversion.dtype:
        config = dataclasses.replace(imported.config, dtype=conversion.dtype)
        imported = imported._replace(config=config)
    origin = f"Imported from {conversion.checkpoint} ({conversion.source}) by convt5.convert."
    text = _kept_text(conversion, imported)
    formats = task_format.load(conversion.checkpoint)
    with new_directory(destination) as folder:
        if formats:
            task_format.write(folder, formats)
        if text is not None:
            vocabulary_files.write(folder / vocabulary_files.FOLDER, text)
            if conversion.target in ("transformers", "hf"):
                vocabulary_files.write_for_hugging_face(folder, text)
        if conversion.target == "run":
            from convt5.interchange import run_files

            state = make_state(imported)
            run_files.write_run(
                folder, imported, state, training, run_dir=destination, origin=origin
            )
        else:
            _export(folder, imported, conversion)
    return f"{imported.report.text()}{_next_step(conversion, destination)}"


def check_destination(output_dir: str) -> pathlib.Path:
    """Returns the absolute destination without links; raises `UserError` if it exists."""
    if atomic_files.is_remote(output_dir):
        raise errors.UserError(
            f"output_dir={output_dir} must be a local folder; copy it to the bucket afterwards, "
            "with gcloud storage cp --recursive."
        )
    folders.check(output_dir, what="output_dir")
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
    parent = next(folder for folder in destination.parents if folder.exists())
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


@contextlib.contextmanager
def new_directory(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which becomes `destination` only on success.

    First removes what a killed conversion left behind; one that is running is an error.
    """
    from convt5.training import run_directory

    partial = atomic_files.unfinished(destination, "incomplete")
    with run_directory.hold(partial):
        for left_over in partial.iterdir():
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over)
            elif left_over.name != "lock":
                left_over.unlink()
        opened = os.open(partial, os.O_RDONLY)
        try:
            yield partial
            _put(partial, destination, opened)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(opened)


def _put(partial: pathlib.Path, destination: pathlib.Path, opened: int) -> None:
    """Renames a complete folder, unless it was replaced; `opened` is its file descriptor."""
    try:
        atomic_files.check_same(opened, partial)
        (partial / "lock").unlink(missing_ok=True)
        os.rename(partial, destination)
    except OSError as error:
        raise errors.TrainingError(
            f"output_dir={destination} cannot be put in its place ({error.strerror}: "
            f"{error.filename}), which was changed during the conversion; repeat the command, or "
            "name another folder."
        ) from error


def _read_mesh_tf(conversion: Conversion) -> tuple["Imported", Callable[..., Any], Any]:
    from convt5.interchange import mesh_tf, run_files
    from convt5.interchange.optimizer_state import import_state
    from convt5.interchange.tf_checkpoint import Checkpoint

    checkpoint = Checkpoint(conversion.checkpoint)
    path = conversion.operative_config or _beside(checkpoint.prefix)
    operative = OperativeConfig.read(path) if path else None
    settings = mesh_tf.training_settings(operative)
    imported = mesh_tf.read_model(checkpoint, operative, allow_unmapped=conversion.allow_unmapped)
    if path and not conversion.operative_config:
        imported.report.notes.append(f"settings read from {path}, found beside the checkpoint.")
    moments = mesh_tf.read_moments(checkpoint, imported) if conversion.optimizer else None
    checkpoint.check_unread()

    def make_state(imported):
        optimizer = settings.optimizer.build(settings.schedule)
        return import_state(imported, optimizer, moments)

    return imported, make_state, run_files.Training(*settings)


def _read_t5x(conversion: Conversion) -> tuple["Imported", Callable[..., Any], Any]:
    from convt5.interchange import t5x
    from convt5.interchange.optimizer_state import import_state
    from convt5.interchange.t5x_files import Files

    files = Files(conversion.checkpoint)
    beside = (folder / name for folder in files.folder.parents[:2] for name in t5x.GIN_FILES)
    path = conversion.operative_config or next((p for p in beside if p.is_file()), None)
    settings = OperativeConfig.read(path) if path else None
    training = t5x.training_settings(settings)
    imported = t5x.read_model(files, settings, allow_unmapped=conversion.allow_unmapped)
    if path and not conversion.operative_config:
        imported.report.notes.append(f"settings read from {path}, found beside the checkpoint.")
    moments = None
    if conversion.optimizer:
        moments = t5x.read_moments(files, imported)
        training = t5x.factoring_as_kept(training, files, imported)

    def make_state(imported):
        return import_state(imported, training.optimizer.build(training.schedule), moments)

    return imported, make_state, training


def _read_exported(conversion: Conversion) -> tuple["Imported", Callable[..., Any], Any]:
    from convt5.interchange import hugging_face, loading, portable, run_files

    reader = {"hf": hugging_face, "safetensors": portable}.get(conversion.source)
    reader = reader or loading.of_transformers(conversion.checkpoint)
    imported = reader.read_model(conversion.checkpoint, allow_unmapped=conversion.allow_unmapped)
    training = run_files.default_training(imported.config)
    return imported, lambda imported: _new_state(imported, training), training


def _read_pycls(conversion: Conversion) -> tuple["Imported", Callable[..., Any], Any]:
    from convt5.interchange import pycls, run_files

    imported = pycls.read_model(
        conversion.checkpoint,
        num_heads=conversion.num_heads,
        image_size=conversion.image_size,
        stem_strides=_strides(conversion.stem_strides),
        allow_unmapped=conversion.allow_unmapped,
    )
    training = run_files.default_training(imported.config)
    return imported, lambda imported: _new_state(imported, training), training


def _read_run(conversion: Conversion) -> tuple["Imported", Callable[..., Any], Any]:
    from convt5.interchange import loading

    imported = loading.read_run(conversion.checkpoint, step=conversion.step)
    return imported, lambda _: None, None


def _kept_text(conversion: Conversion, imported: "Imported") -> vocabulary_files.KeptText | None:
    """Returns the text of the model's token ids, as far as known."""
    if conversion.vocabulary is None:
        return vocabulary_files.load(conversion.checkpoint)
    limit = getattr(imported.config, "vocab_size", None)
    if limit is None:
        raise errors.UserError(
            f"--vocabulary={conversion.vocabulary} is for text models, and "
            f"{conversion.checkpoint} holds a {type(imported.config).__name__}; leave it out."
        )
    from convt5.evaluation import run_settings
    from convt5.evaluation.predictor import check_vocabulary_size

    vocabulary = run_settings.load_vocabulary(conversion.vocabulary, trust=conversion.trust)
    check_vocabulary_size(vocabulary, limit)
    kept = vocabulary_files.of(vocabulary)
    return None if kept is None else vocabulary_files.KeptText(kept, kept)


def _new_state(imported: "Imported", training: Any) -> Any:
    from convt5.interchange.optimizer_state import import_state

    return import_state(imported, training.optimizer.build(training.schedule))


def _export(folder: pathlib.Path, imported: "Imported", conversion: Conversion) -> None:
    from convt5.interchange import hugging_face, model_card, portable, pytorch_model, stablehlo
    from convt5.modeling.architecture import ConvT5Config

    if conversion.target != "safetensors" and not isinstance(imported.config, ConvT5Config):
        raise errors.UserError(
            f"--to={conversion.target} is for text models, and {conversion.checkpoint} holds a "
            f"{type(imported.config).__name__}; write it with --to=safetensors."
        )
    if conversion.target == "transformers":
        is_t5 = hugging_face.is_t5(imported.config)
        if is_t5:
            hugging_face.write_model(folder, imported.config, imported.params)
        else:
            pytorch_model.write_model(folder, imported.config, imported.params, step=imported.step)
        card = model_card.text(
            imported,
            origin=conversion.checkpoint,
            licence=conversion.license,
            needs_code=not is_t5,
        )
        (folder / model_card.FILE).write_text(card)
    elif conversion.target == "hf":
        hugging_face.write_model(folder, imported.config, imported.params)
    elif conversion.target == "safetensors":
        portable.write_model(folder, imported.config, imported.params, step=imported.step)
    else:
        given = {
            "encoder_length": conversion.encoder_length,
            "decoder_length": conversion.decoder_length,
        }
        lengths = {name: value for name, value in given.items() if value is not None}
        stablehlo.write_programs(
            folder, imported.model(), **{"encoder_length": 512, "decoder_length": 114, **lengths}
        )


def _strides(text: str | None) -> list[int] | None:
    """Returns the numbers of --stem_strides."""
    if text is None:
        return None
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise errors.UserError(
            f"--stem_strides={text} must be numbers with commas between them, such as 2,2,2,2,1."
        )
    return [int(part) for part in text.split(",")]


def _beside(prefix: str) -> str | None:
    """Returns the operative config in the folder of a checkpoint, or None."""
    path = pathlib.Path(prefix).parent / "operative_config.gin"
    return str(path) if path.is_file() else None


def _next_step(conversion: Conversion, destination: pathlib.Path) -> str:
    if conversion.target != "run":
        return f"written to {destination}"
    from convt5.interchange import run_files

    return f"written to {destination}\ncontinue training: {run_files.train_command(destination)}"


if __name__ == "__main__":
    command_line.run(main)
