"""Reads a model of one format and writes it in another, into a folder that appears when complete.

A conversion is written to a hidden folder beside its destination and moved there when complete.
After a kill, the same command repeats it. `convt5.save_model` writes a model that a program made.
"""

import contextlib
import dataclasses
import operator
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
from etils import epath

from convt5 import errors
from convt5.interchange import (
    hugging_face,
    loading,
    mean_of_runs,
    mesh_tf,
    model_card,
    portable,
    pycls,
    pytorch_model,
    run_files,
    stablehlo,
    t5x,
)
from convt5.interchange.conversion import Conversion, check_destination
from convt5.interchange.mapping import Imported
from convt5.interchange.operative_config import OperativeConfig
from convt5.interchange.optimizer_state import import_state, of_sum
from convt5.interchange.t5x_files import Files
from convt5.interchange.tf_checkpoint import Checkpoint
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.tree_paths import named_leaves
from convt5.runtime import atomic_files, folders
from convt5.text import task_format, vocabulary_files
from convt5.training import run_directory
from convt5.vision.architecture import ViTConfig

if TYPE_CHECKING:
    from convt5.modeling.model import ConvT5
    from convt5.vision.model import ViT

_NO_VOCABULARY = (
    "no vocabulary lies beside the checkpoint: predictions will ask for it, and "
    f"{run_files.RUN_FILE} trains in that of T5; name the model's with --vocabulary=FILE.model."
)

_NO_NORMALISATION = (
    "how images were normalised is unknown: config.gin normalises them by the defaults of "
    "images.ImageDataConfig; set its channel_order, mean and stddev as in training."
)


def convert(
    conversion: Conversion,
    destination: pathlib.Path,
    features: vocabulary_files.TextFeatures | None = None,
) -> str:
    """Creates the destination; returns a message for the user.

    Args:
        conversion: what to read and to write.
        destination: the folder to create, as `check_destination` returns it.
        features: those of `conversion.vocabulary`; None means those beside the checkpoint.

    Raises:
        UserError: the input is invalid; nothing is written then.
    """
    readers = {"mesh_tf": _read_mesh_tf, "t5x": _read_t5x, "pycls": _read_pycls, "run": _read_run}
    read = readers.get(conversion.source, _read_exported)
    imported, make_state, training = read(conversion)
    _check_kinds(conversion, imported.config)
    if conversion.dtype:
        config = dataclasses.replace(imported.config, dtype=conversion.dtype)
        imported = imported._replace(config=config)
    origin = f"Imported from {conversion.checkpoint} ({conversion.source}) by convt5.convert."
    text = _text_of(conversion, imported, features)
    formats = task_format.load(conversion.checkpoint)
    class_names = run_directory.find_class_names(conversion.checkpoint)
    if conversion.target == "run":
        if text is None and isinstance(imported.config, ConvT5Config):
            imported.report.notes.append(_NO_VOCABULARY)
        if not imported.normalisation and isinstance(imported.config, ViTConfig):
            imported.report.notes.append(_NO_NORMALISATION)
    has_tokenizer = False
    with new_directory(destination) as folder:
        if formats:
            task_format.write(folder, formats)
        if class_names:
            run_directory.write_class_names(epath.Path(folder), class_names)
        if text is not None:
            vocabulary_files.write(folder / vocabulary_files.FOLDER, text)
            if conversion.target in ("transformers", "hf"):
                has_tokenizer = vocabulary_files.write_for_hugging_face(folder, text)
        if conversion.target == "run":
            state = make_state(imported)
            run_files.write_run(
                folder,
                imported,
                state,
                training,
                run_dir=destination,
                origin=origin,
                keeps_vocabulary=text is not None and text.inputs == text.targets,
            )
        else:
            _export(folder, imported, conversion, text=text, has_tokenizer=has_tokenizer)
    report = imported.report
    # The variables of a run keep their names. The notes come last, where they are seen.
    variables = "" if conversion.source == "run" else report.variables()
    return f"{variables}{report.overview()}{_next_step(conversion, destination)}"


def _check_kinds(conversion: Conversion, config: Any) -> None:
    """Raises `UserError` for a target that knows mixing kinds by their names only."""
    described = getattr(config, "described_kinds", ())
    if described and conversion.target in ("run", "transformers"):
        raise errors.UserError(
            f"--to={conversion.target} writes only mixing kinds that a name selects, and "
            f"{conversion.checkpoint} has a description of {', '.join(described)}; write "
            "--to=safetensors or --to=stablehlo. A run of its own starts from such a folder with "
            "trainer.train.init_from=@initialization.InitFrom()."
        )


def save_model(
    model: "ConvT5 | ViT", directory: epath.PathLike, *, vocabulary: Any = None, step: int = 0
) -> None:
    """Writes a model that a program made, as `convt5.convert --to=safetensors` exports a run.

    `convt5.load_model`, `convt5.load_predictor`, `convt5.convert`, `convt5.infer` and the setting
    `InitFrom.source` read the folder, which appears when it is complete.

    Args:
        model: the model; this host must hold all of its parameters.
        directory: the local folder to create.
        vocabulary: of inputs and targets, as `convt5.load_vocabulary` returns it. Predictions of a
            model without one must be given it.
        step: number of updates made, which the folder tells.

    Raises:
        UserError: the folder is in use or cannot be written, parameters are on other hosts, the
            vocabulary cannot be kept or has more ids than the model, or the step is no number of
            updates.
    """
    config: Any = model.config
    params = dict(named_leaves(model))
    if away := [name for name, value in params.items() if not value.is_fully_addressable]:
        raise errors.UserError(
            f"parameter {away[0]!r} is partly on other hosts; gather it first, with "
            "jax.experimental.multihost_utils.process_allgather."
        )
    with contextlib.suppress(TypeError):  # JSON holds no number of JAX or NumPy.
        step = operator.index(step)
    if fault := portable.step_fault(step):
        raise errors.UserError(f"{fault}.")
    destination = check_destination(os.fspath(directory))
    text = None if vocabulary is None else _kept_text(vocabulary, config)
    with new_directory(destination) as folder:
        if text is not None:
            vocabulary_files.write(folder / vocabulary_files.FOLDER, text)
        portable.write_model(folder, config, jax.device_get(params), step=step)


def _kept_text(vocabulary: Any, config: Any) -> vocabulary_files.KeptText:
    if not isinstance(config, ConvT5Config):
        raise errors.UserError(
            f"vocabulary is for text models, not for a {type(config).__name__}; leave it out."
        )
    kept = vocabulary_files.of(vocabulary)
    if kept is None:
        raise errors.UserError(
            f"vocabulary={vocabulary!r} cannot be kept; give one that convt5.load_vocabulary made."
        )
    vocabulary_files.check_size(vocabulary, config.vocab_size)
    return vocabulary_files.KeptText(kept, kept)


def _text_of(
    conversion: Conversion, imported: Imported, features: vocabulary_files.TextFeatures | None
) -> vocabulary_files.KeptText | None:
    """Returns the text of the model's token ids, as far as known."""
    if features is None:
        return vocabulary_files.load(conversion.checkpoint)
    limit = getattr(imported.config, "vocab_size", None)
    if limit is None:
        raise errors.UserError(
            f"--vocabulary={conversion.vocabulary} is for text models, and "
            f"{conversion.checkpoint} holds a {type(imported.config).__name__}; leave it out."
        )
    for vocabulary in (features.inputs, features.targets):
        vocabulary_files.check_size(vocabulary, limit)
    inputs, targets = map(vocabulary_files.of, (features.inputs, features.targets))
    name = str(conversion.vocabulary)
    if note := vocabulary_files.replacement(name, inputs, conversion.checkpoint):
        imported.report.notes.append(note)
    if inputs is None or targets is None:
        return None
    text = vocabulary_files.KeptText(inputs, targets, features.add_eos)
    with contextlib.suppress(errors.UserError):  # That of the model may be damaged.
        if kept := vocabulary_files.load(conversion.checkpoint):
            text = text._replace(
                encoder_length=kept.encoder_length, decoder_length=kept.decoder_length
            )
    return text


@contextlib.contextmanager
def new_directory(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which becomes `destination` only on success.

    First removes what a killed conversion left behind; one that is running is an error.
    """
    partial = atomic_files.unfinished(destination, "incomplete")
    with run_directory.hold(partial, what="output_dir"):
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
        atomic_files.sync(partial)
        atomic_files.check_same(opened, partial)
        os.rename(partial, destination)
        # Only now: without it, another conversion would begin, and empty the folder first.
        (destination / "lock").unlink(missing_ok=True)
    except OSError as error:
        if errors.of_full_disk(error):
            raise
        raise errors.TrainingError(
            f"output_dir={destination} cannot be put in its place ({error.strerror}: "
            f"{error.filename}), which was changed during the conversion; repeat the command, or "
            "name another folder."
        ) from error


def _read_mesh_tf(conversion: Conversion) -> tuple[Imported, Callable[..., Any], Any]:
    checkpoint = Checkpoint(conversion.checkpoint)
    path = conversion.operative_config or _beside(checkpoint.prefix)
    operative = OperativeConfig.read(path) if path else None
    settings = mesh_tf.training_settings(operative)
    imported = mesh_tf.read_model(checkpoint, operative, allow_unmapped=conversion.allow_unmapped)
    imported.report.notes += _what_was_read(conversion, operative, checkpoint.prefix, imported.step)
    moments = None
    if conversion.optimizer:
        moments = of_sum(mesh_tf.read_moments(checkpoint, imported), settings.loss_divisor)
    checkpoint.check_unread()

    def make_state(imported):
        optimizer = settings.optimizer.build(settings.schedule)
        return import_state(imported, optimizer, moments)

    return imported, make_state, settings


def _read_t5x(conversion: Conversion) -> tuple[Imported, Callable[..., Any], Any]:
    files = Files(conversion.checkpoint)
    beside = (folder / name for folder in files.folder.parents[:2] for name in t5x.GIN_FILES)
    path = conversion.operative_config or next((p for p in beside if p.is_file()), None)
    settings = OperativeConfig.read(path) if path else None
    training = t5x.training_settings(settings)
    imported = t5x.read_model(files, settings, allow_unmapped=conversion.allow_unmapped)
    imported.report.notes += _what_was_read(conversion, settings, files.folder, imported.step)
    moments = None
    if conversion.optimizer:
        moments = of_sum(t5x.read_moments(files, imported), training.loss_divisor)
        training = t5x.factoring_as_kept(training, files, imported)

    def make_state(imported):
        return import_state(imported, training.optimizer.build(training.schedule), moments)

    return imported, make_state, training


def _what_was_read(
    conversion: Conversion, settings: OperativeConfig | None, path: str | pathlib.Path, step: int
) -> list[str]:
    """Returns notes on the settings of the original run, and on a checkpoint chosen in a folder."""
    notes = []
    if settings is not None:
        notes = [
            f"{settings.where}: the file of {each} is not read; pass one that has all settings "
            "itself."
            for each in settings.includes
        ]
        if not conversion.operative_config:
            notes.append(f"settings read from {settings.where}, found beside the checkpoint.")
    if pathlib.Path(path) != pathlib.Path(conversion.checkpoint):
        notes.append(f"{path} is read, at step {step}.")
    return notes


def _read_exported(conversion: Conversion) -> tuple[Imported, Callable[..., Any], Any]:
    reader = {"hf": hugging_face, "safetensors": portable}.get(conversion.source)
    reader = reader or loading.of_transformers(conversion.checkpoint)
    imported = reader.read_model(conversion.checkpoint, allow_unmapped=conversion.allow_unmapped)
    training = run_files.default_training(imported.config)
    return imported, lambda imported: _new_state(imported, training), training


def _read_pycls(conversion: Conversion) -> tuple[Imported, Callable[..., Any], Any]:
    imported = pycls.read_model(
        conversion.checkpoint,
        num_heads=conversion.num_heads,
        image_size=conversion.image_size,
        stem_strides=_strides(conversion.stem_strides),
        allow_unmapped=conversion.allow_unmapped,
    )
    training = run_files.default_training(imported.config)
    return imported, lambda imported: _new_state(imported, training), training


def _read_run(conversion: Conversion) -> tuple[Imported, Callable[..., Any], Any]:
    imported = loading.read_run(conversion.checkpoint, step=conversion.step)
    if conversion.average:
        runs = (conversion.checkpoint, *conversion.average)
        imported = mean_of_runs.read(imported, runs, step=conversion.step)
    if isinstance(imported.config, ViTConfig):
        imported = imported._replace(normalisation=_normalisation(conversion.checkpoint))
    return imported, lambda _: None, None


def _normalisation(checkpoint: str) -> dict[str, Any]:
    """Returns how the images of a run were normalised, as far as its settings tell."""
    run = folders.run_folder(checkpoint, run_files.RUN_FILE)
    if run is None:
        return {}
    settings = OperativeConfig.read(run / run_files.RUN_FILE)
    names = portable.NORMALISATION
    found = {name: settings.get("ImageDataConfig", name, scope="train") for name in names}
    return {name: value for name, value in found.items() if portable.normalises(value)}


def _new_state(imported: Imported, training: Any) -> Any:
    return import_state(imported, training.optimizer.build(training.schedule))


def _export(
    folder: pathlib.Path,
    imported: Imported,
    conversion: Conversion,
    *,
    text: vocabulary_files.KeptText | None,
    has_tokenizer: bool,
) -> None:
    longest = text.decoder_length if text else None
    generation: dict[str, Any] = {"end_id": text.targets.end_id if text else 1, "longest": longest}
    if conversion.target != "safetensors" and not isinstance(imported.config, ConvT5Config):
        raise errors.UserError(
            f"--to={conversion.target} is for text models, and {conversion.checkpoint} holds a "
            f"{type(imported.config).__name__}; write it with --to=safetensors."
        )
    if conversion.weights == "bfloat16":
        rounded = {name: a.astype(ml_dtypes.bfloat16) for name, a in imported.params.items()}
        imported = imported._replace(params=rounded)
    if conversion.target == "transformers":
        is_t5 = hugging_face.is_t5(imported.config)
        if is_t5:
            hugging_face.write_model(folder, imported.config, imported.params, **generation)
        else:
            pytorch_model.write_model(
                folder, imported.config, imported.params, step=imported.step, **generation
            )
        card = model_card.text(
            imported,
            origin=conversion.checkpoint,
            licence=conversion.license,
            needs_code=not is_t5,
            has_tokenizer=has_tokenizer,
            longest=longest,
            others=conversion.average,
        )
        (folder / model_card.FILE).write_text(card)
    elif conversion.target == "hf":
        hugging_face.write_model(folder, imported.config, imported.params, **generation)
    elif conversion.target == "safetensors":
        portable.write_model(
            folder,
            imported.config,
            imported.params,
            step=imported.step,
            normalisation=imported.normalisation,
            mean=imported.mean,
        )
    else:
        stablehlo.write_programs(
            folder,
            imported.model(),
            encoder_length=conversion.encoder_length,
            decoder_length=conversion.decoder_length,
        )


def _strides(text: str | None) -> list[int] | None:
    """Returns the numbers of --stem_strides."""
    if text is None:
        return None
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", part) for part in text.split(",")):
        raise errors.UserError(
            f"--stem_strides={text} must be numbers with commas between them, such as 2,2,2,2,1."
        )
    return [int(part) for part in text.split(",")]


def _beside(prefix: str) -> str | None:
    """Returns the operative config in the folder of a checkpoint, or None."""
    path = epath.Path(prefix).parent / "operative_config.gin"
    return str(path) if path.is_file() else None


def _next_step(conversion: Conversion, destination: pathlib.Path) -> str:
    if conversion.target != "run":
        return f"written to {destination}"
    return f"written to {destination}\ncontinue training: {run_files.train_command(destination)}"
