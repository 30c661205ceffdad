"""The settings of a trained model: its gin settings, its vocabulary, and its training lengths.

A run directory has them in `config.gin`; gin files that describe a run replace it.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from convt5 import errors
from convt5.configuration import gin_config, gin_files
from convt5.configuration.trust import Untrusted, named_by_own
from convt5.evaluation.settings import EvalConfig, PredictConfig, Rank
from convt5.interchange import run_files
from convt5.runtime import folders
from convt5.text import plain_vocabularies, vocabulary_files
from convt5.text import task_format as formats
from convt5.text.task_format import TaskFormat
from convt5.text.vocabulary_files import BYTES, TextFeatures
from convt5.training.moved_runs import DATA_ARGUMENTS, data_is_gone
from convt5.training.run_directory import CONFIG_FILE


class RunSettings(NamedTuple):
    """The settings of a command that uses a trained model.

    Attributes:
        train: arguments of `trainer.train`; empty for a model without a run.
        predict, evaluate: as bound by gin.
        trained_on: where another gin file may have replaced the data in `train`, a function that
            returns the run's own data; it raises `UserError` if that data is gone. Otherwise None.
        kept: the vocabulary files beside the model.
    """

    train: Mapping[str, Any]
    predict: PredictConfig
    evaluate: EvalConfig
    trained_on: Callable[[], Any] | None = None
    kept: vocabulary_files.KeptText | None = None

    @classmethod
    def unknown(cls, kept: vocabulary_files.KeptText | None = None) -> "RunSettings":
        """Returns the settings of a model without a run."""
        return cls({}, PredictConfig(), EvalConfig(), kept=kept)

    @property
    def data(self) -> Any:
        """The run's evaluation data, or else its training data; None without either."""
        return _data(self.train)

    def trained_lengths(self) -> dict[str, int | None]:
        """Returns the lengths of the training data, named as in `PredictConfig`.

        They are unknown if the data is gone and the run is of an earlier version.
        """
        names = {"max_input_length": "encoder_length", "max_length": "decoder_length"}
        about: Any = self.data or self.kept
        try:
            return {ours: getattr(about, name, None) for ours, name in names.items()}
        except errors.UserError as error:  # The lengths are in a cache that is gone.
            if self.kept is None:
                print(f"the lengths of the run are not known: {error}", file=sys.stderr)
            return {ours: getattr(self.kept, name, None) for ours, name in names.items()}


def read(
    checkpoint: str | None,
    files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    *,
    needs_data: bool | None = True,
    trust: Sequence[str] = (),
) -> RunSettings:
    """Reads the settings of a run and of the command that uses it.

    Args:
        checkpoint: a run directory or a path inside it. Its config.gin comes before `files`, unless
            these describe a run themselves.
        files: gin files.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        needs_data: whether it is an error if the data of the run is gone. Not so if the settings
            name tasks to evaluate; the data is then left out. None always leaves it out.
        trust: modules besides convt5's that the run's settings may import and name.

    Raises:
        Untrusted: the run's settings name something that could run code and is not trusted.
        UserError: other errors of `gin_config.load`.
    """
    statements = gin_files.read_all(files)
    bound = [s for s in statements if isinstance(s, gin_files.Binding)]
    is_run = any(f".{b.selector}".endswith(".trainer.train") for b in bound)
    run_config = config_file(checkpoint) if checkpoint else None
    trained_on = None
    if run_config is not None and not is_run:
        if files:
            # Modules that the user's own files import are trusted here as well.
            trusted = (*trust, *named_by_own(statements))
            trained_on = functools.partial(_data_of_run, str(run_config), trusted)
        files, is_run = [str(run_config), *files], True
    if checkpoint and run_config is None:
        gin_config.import_trusted(trust)
    roots = ["@convt5.evaluation.PredictConfig", "@convt5.evaluation.EvalConfig"]
    if is_run:
        roots.append("@convt5.training.trainer.train")
    kept = vocabulary_files.load(checkpoint) if checkpoint else None
    if checkpoint:
        # The checkpoint itself determines these, so its settings need not name them.
        names = ("RUN_DIR", *(["VOCABULARY"] if kept else []))
        missing = [name for name in names if gin_files.is_required(statements, name)]
        bindings = [f"{name}={os.path.expanduser(checkpoint)!r}" for name in missing] + [*bindings]
    config = gin_config.load(files, bindings, roots=roots, supplied=["config_text"], trusted=trust)
    run_dir = str(run_config.parent) if run_config is not None else None
    train: dict[str, Any] = {}
    with vocabulary_files.of_run(run_dir):
        tasks = _build(config, EvalConfig, ("tasks",), run_dir, needs_data)
        evaluate = EvalConfig(**tasks)
        if is_run:
            from convt5.training import trainer

            # Named tasks replace the data of the run.
            needed = needs_data and not evaluate.tasks
            train = _build(config, trainer.train, DATA_ARGUMENTS, run_dir, needed)
    predict = PredictConfig(**config.arguments(PredictConfig))
    return RunSettings(train, predict, evaluate, trained_on, kept)


def _build(
    config: gin_config.Config,
    function: Callable[..., Any],
    with_data: Sequence[str],
    run_dir: str | None,
    needs_data: bool | None,
) -> dict[str, Any]:
    """Returns the arguments of a configurable; leaves out those `with_data` as `read` says."""
    settings = config.arguments(function, leave_out=with_data)
    if needs_data is not None:
        try:
            settings |= config.arguments(function, only=with_data)
        except errors.UserError as error:
            if needs_data:
                raise data_is_gone(error, run_dir) if run_dir else error from None
            print(
                f"the settings of {function.__name__} are left out that need data: {error}",
                file=sys.stderr,
            )
    return settings


def read_for_text(
    checkpoint: str | None,
    files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    *,
    vocabulary: str | None = None,
    trust: Sequence[str] = (),
) -> RunSettings:
    """Reads settings as `read` does, for texts that do not come from the run's data.

    A run whose data is gone can still be used if its vocabulary is saved with it, or is named.
    """
    kept = vocabulary_files.load(checkpoint) if checkpoint else None
    knows_text = bool(vocabulary or kept)
    # A run with saved vocabulary, lengths and task format needs no data.
    knows_all = kept and kept.encoder_length and formats.load(checkpoint or "") is not None
    needs_data = None if knows_all and not files else not knows_text
    try:
        return read(checkpoint, files, bindings, needs_data=needs_data, trust=trust)
    except errors.UserError as error:
        is_refused = isinstance(error, Untrusted) and not (error.missing and vocabulary)
        if not knows_text or files or bindings or is_refused:
            raise
        print(f"the run's settings are left out: {error}", file=sys.stderr)
        return RunSettings.unknown(kept)


def _data(train: Mapping[str, Any]) -> Any:
    return train.get("eval_data") or train.get("train_data")


def _data_of_run(config_gin: str, trust: Sequence[str]) -> Any:
    from convt5.training import trainer

    config = gin_config.load(
        [config_gin],
        roots=["@convt5.training.trainer.train"],
        supplied=["config_text"],
        trusted=trust,
    )
    with vocabulary_files.of_run(os.path.dirname(config_gin)):
        return _data(config.arguments(trainer.train, only=DATA_ARGUMENTS))


def config_file(checkpoint: epath.PathLike) -> epath.Path | None:
    """Returns the config.gin of the run that `checkpoint` belongs to, or None."""
    run = folders.run_folder(checkpoint, CONFIG_FILE)
    return None if run is None else run / CONFIG_FILE


def load_vocabulary(source: epath.PathLike, *, trust: Sequence[str] = ()) -> Any:
    """Returns the input vocabulary of a model folder, of a SentencePiece file, or of "bytes".

    Args:
        source: one of these.
        trust: modules besides convt5's that a run's settings may import.

    Raises:
        UserError: `source` does not name a vocabulary.
    """
    return text_features(str(source), trust=trust).inputs


def text_features(
    source: str, settings: RunSettings | None = None, *, trust: Sequence[str] = ()
) -> TextFeatures:
    """Returns the vocabularies of a model, of a SentencePiece file, or of "bytes".

    Args:
        source: one of these.
        settings: the settings of the run, if they have been read.
        trust: as in `read`, if they have not.
    """
    from convt5.tasks import vocabularies

    source = os.path.expanduser(source)
    if source == BYTES:
        return TextFeatures(vocabularies.characters(), vocabularies.characters())
    if os.path.isfile(source) or str(source).endswith(".model"):
        return TextFeatures(*[vocabularies.sentencepiece(source)] * 2)
    features = vocabulary_files.load_features(source)
    if features is None:
        if settings is None:
            has_run = config_file(source) is not None
            settings = read(source, trust=trust) if has_run else RunSettings.unknown()
        features = _features_of_data(source, settings)
    if features is None:
        raise errors.UserError(
            f"vocabulary: {source} is neither a SentencePiece file, nor a model with a "
            f"vocabulary, nor a run whose {CONFIG_FILE} names a seqio task; name the vocabulary "
            "that the model was trained with: a SentencePiece file (--vocabulary=FILE.model), "
            f"or bytes (--vocabulary={BYTES})."
        )
    return features


def chosen_features(
    vocabulary: str | None,
    checkpoint: str,
    settings: RunSettings,
    *,
    of_seqio: bool = False,
    trust: Sequence[str] = (),
) -> TextFeatures:
    """Returns the vocabularies of `vocabulary` if named, which is told if the model's differ.

    Those saved with a model are objects of seqio, whose import takes seconds, only with `of_seqio`.
    """
    if not vocabulary and settings.kept and not of_seqio:
        return plain_vocabularies.features(settings.kept, checkpoint)
    if not vocabulary:
        return text_features(checkpoint, settings)
    features = text_features(vocabulary, trust=trust)
    given = vocabulary_files.of(features.inputs)
    if note := vocabulary_files.replacement(vocabulary, given, checkpoint):
        print(f"note: {note}", file=sys.stderr)
    return features


def trained_features(checkpoint: str, settings: RunSettings) -> TextFeatures | None:
    """Returns the vocabularies with which a model was trained; None if unknown.

    They are saved with it; for runs of earlier versions, only their data has them.

    Raises:
        UserError: the vocabulary cannot be read, or the data is gone.
    """
    return vocabulary_files.load_features(checkpoint) or _features_of_data(checkpoint, settings)


def _features_of_data(checkpoint: str, settings: RunSettings) -> TextFeatures | None:
    """Returns the vocabularies of the data that a run without saved ones was trained on."""
    import seqio

    if run_files.is_import(checkpoint):
        return None
    data = settings.trained_on() if settings.trained_on else settings.data
    cached = getattr(data, "vocabulary", None)
    if cached is not None:
        return TextFeatures(cached, cached)
    provider = getattr(data, "mixture", None)
    if isinstance(provider, str):
        from convt5.evaluation.registry import find_registered

        provider = find_registered(provider)
    if not isinstance(provider, seqio.Task | seqio.Mixture):
        return None
    features = provider.output_features
    if not {"inputs", "targets"} <= set(features):
        return None
    inputs, targets = features["inputs"], features["targets"]
    for vocabulary in (inputs.vocabulary, targets.vocabulary):
        check_readable(
            vocabulary,
            of="the run's data",
            remedy="give a copy that is here: --vocabulary=FILE.model",
        )
    return TextFeatures(inputs.vocabulary, targets.vocabulary, inputs.add_eos)


def task_format(
    checkpoint: str, settings: RunSettings, name: str | None = None, *, raw: bool = False
) -> TaskFormat | None:
    """Returns the input format of the task that a model was trained on; None without a task.

    Args:
        checkpoint: folder of the model, in which it is saved; runs of earlier versions take it from
            their data.
        settings: the settings of the run.
        name: the task, if there are several.
        raw: whether texts are used unchanged, so that no task needs to be named.

    Raises:
        UserError: a damaged file, no task of that name, or several tasks and no name.
    """
    kept = formats.load(checkpoint)
    known_formats: Sequence[TaskFormat] = kept or ()
    if kept is None and not run_files.is_import(checkpoint):
        with contextlib.suppress(errors.UserError):  # The data may be gone.
            data = settings.trained_on() if settings.trained_on else settings.data
            known_formats = formats.of_data(data)
    names = [each.task for each in known_formats]
    if name is not None:
        if name not in names:
            known = f"those that it was trained on: {', '.join(names)}" if names else "none"
            raise errors.UserError(
                f"format={name} is no task of {checkpoint}, which keeps {known}."
                f"{errors.suggest(name, names)}"
            )
        return known_formats[names.index(name)]
    # Tasks with equal formats, such as pre-training objectives, need not be distinguished.
    different = {dataclasses.replace(each, task="") for each in known_formats}
    if len(different) > 1 and not raw:
        raise errors.UserError(
            f"{checkpoint} was trained on several tasks, {', '.join(names)}, which format "
            "inputs differently; name one with format, or pass inputs unchanged with raw."
        )
    return next(iter(known_formats)) if len(different) == 1 else None


def format_notes(checkpoint: str, used: Iterable[TaskFormat]) -> list[str]:
    """Returns a note for each format that differs from that of training."""
    changed = formats.differences(used, formats.load(checkpoint) or ())
    where = f"in the training of {checkpoint}"
    return [f"note: {now.described()}; but {where}, {then.described()}." for now, then in changed]


def describe_answers(format: TaskFormat | None, config: PredictConfig, *, raw: bool = False) -> str:
    """Describes in one line how inputs are formatted and answers are found."""
    inputs = "inputs are passed unchanged"
    if format is None and not raw:
        inputs += ": the model keeps no task"
    elif format is not None and not raw:
        inputs = format.described()
    strategy = config.strategy_for(format)
    if isinstance(strategy, Rank) and format is not None:
        return f"{inputs}; answers are the most likely of its labels {list(format.labels)}"
    return f"{inputs}; answers are generated ({type(strategy).__name__})"


def check_readable(vocabulary: Any, *, of: str, remedy: str) -> None:
    """Raises `UserError` if a file of the vocabulary is missing.

    Args:
        vocabulary: a seqio vocabulary.
        of: whose vocabulary it is, for the message.
        remedy: the remedy, for the message.
    """
    import tensorflow as tf

    try:
        _ = vocabulary.vocab_size
    except (tf.errors.OpError, OSError) as error:
        name = getattr(vocabulary, "sentencepiece_model_file", vocabulary)
        raise errors.UserError(
            f"the vocabulary {name!r} of {of} cannot be read ({str(error).splitlines()[0]}); "
            f"{remedy}."
        ) from error
