"""What a trained model came with: its gin settings, its vocabulary, and the lengths it has seen.

A run directory holds them in `config.gin`; gin files that describe a run take its place.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from convt5 import errors
from convt5.configuration import gin_config, gin_files
from convt5.configuration.trust import Untrusted, named_by_own
from convt5.evaluation.settings import EvalConfig, PredictConfig, Rank
from convt5.runtime import folders
from convt5.text import task_format as formats
from convt5.text import vocabulary_files
from convt5.text.task_format import TaskFormat
from convt5.text.vocabulary_files import BYTES, TextFeatures
from convt5.training.moved_runs import DATA_ARGUMENTS, data_is_gone
from convt5.training.run_directory import CONFIG_FILE


class RunSettings(NamedTuple):
    """Settings of a command that uses a trained model.

    Attributes:
        train: arguments of `trainer.train`; empty for a model without a run.
        predict, evaluate: as gin bound them.
        trained_on: returns the data of the run alone, where `train` may have that of another gin
            file; None where they are the same. It raises `UserError` where that data is gone.
        kept: what lies beside the model of its text.
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
        """The run's evaluation data, or its training data; None where there is neither."""
        return _data(self.train)

    def trained_lengths(self) -> dict[str, int | None]:
        """Returns the lengths of the training data, named as in `PredictConfig`.

        They are unknown where the data is gone and the run of an earlier version.
        """
        names = {"max_input_length": "encoder_length", "max_length": "decoder_length"}
        about: Any = self.data or self.kept
        try:
            return {ours: getattr(about, name, None) for ours, name in names.items()}
        except errors.UserError as error:  # They lie in a cache that is gone.
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
    """Returns the settings of a run and of what is done with it.

    Args:
        checkpoint: a run directory or something in it. Its config.gin comes before `files`, unless
            these describe a run themselves.
        files: gin files.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        needs_data: whether a run whose data is gone is an error, unless the settings name tasks to
            evaluate; the data is left out otherwise. None leaves it out in any case.
        trust: modules that the run's settings may import and name, beside convt5's.

    Raises:
        Untrusted: the run's settings name what could run code, and nobody has trusted it.
        UserError: what else `gin_config.load` raises.
    """
    statements = gin_files.read_all(files)
    bound = [s for s in statements if isinstance(s, gin_files.Binding)]
    is_run = any(f".{b.selector}".endswith(".trainer.train") for b in bound)
    own = config_file(checkpoint) if checkpoint else None
    trained_on = None
    if own is not None and not is_run:
        if files:
            # What the user's own files import is trusted here as well.
            trusted = (*trust, *named_by_own(statements))
            trained_on = functools.partial(_data_of_run, str(own), trusted)
        files, is_run = [str(own), *files], True
    roots = ["@convt5.evaluation.PredictConfig", "@convt5.evaluation.EvalConfig"]
    if is_run:
        roots.append("@convt5.training.trainer.train")
    kept = vocabulary_files.load(checkpoint) if checkpoint else None
    if checkpoint:
        # What was made of the checkpoint has no reason to name it again.
        names = ("RUN_DIR", *(["VOCABULARY"] if kept else []))
        missing = [name for name in names if gin_files.is_required(statements, name)]
        bindings = [f"{name}={os.path.expanduser(checkpoint)!r}" for name in missing] + [*bindings]
    config = gin_config.load(files, bindings, roots=roots, supplied=["config_text"], trusted=trust)
    run_dir = str(own.parent) if own is not None else None
    train: dict[str, Any] = {}
    with vocabulary_files.of_run(run_dir):
        tasks = _built(config, EvalConfig, ("tasks",), run_dir, needs_data)
        evaluate = EvalConfig(**tasks)
        if is_run:
            from convt5.training import trainer

            # Tasks that are named take the place of the run's data.
            needed = needs_data and not evaluate.tasks
            train = _built(config, trainer.train, DATA_ARGUMENTS, run_dir, needed)
    predict = PredictConfig(**config.arguments(PredictConfig))
    return RunSettings(train, predict, evaluate, trained_on, kept)


def _built(
    config: gin_config.Config,
    function: Callable[..., Any],
    with_data: Sequence[str],
    run_dir: str | None,
    needs_data: bool | None,
) -> dict[str, Any]:
    """Returns the arguments of a configurable; those `with_data` are left out as `read` says."""
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
    """Returns what `read` does, for texts that are given rather than read from the run's data.

    A run whose data is elsewhere can be used all the same if its vocabulary lies beside it, or is
    named.
    """
    kept = vocabulary_files.load(checkpoint) if checkpoint else None
    knows_text = bool(vocabulary or kept)
    # A run that keeps its vocabulary, its lengths and the format of its task needs no data.
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
    """Returns the config.gin of the run that `checkpoint` is or lies in, if there is one."""
    run = folders.run_folder(checkpoint, CONFIG_FILE)
    return None if run is None else run / CONFIG_FILE


def load_vocabulary(source: epath.PathLike, *, trust: Sequence[str] = ()) -> Any:
    """Returns a vocabulary of inputs: of a model's folder, of a SentencePiece file, or "bytes".

    Args:
        source: which of them.
        trust: modules that a run's settings may import, beside convt5's.

    Raises:
        UserError: nothing there that names a vocabulary.
    """
    return text_features(str(source), trust=trust).inputs


def text_features(
    source: str, settings: RunSettings | None = None, *, trust: Sequence[str] = ()
) -> TextFeatures:
    """Returns the vocabularies of a model, of a SentencePiece file, or of "bytes".

    Args:
        source: which of them.
        settings: of the run, where they have been read.
        trust: as of `read`, where they have not.
    """
    from convt5.tasks import vocabularies

    source = os.path.expanduser(source)
    if source == BYTES:
        return TextFeatures(vocabularies.characters(), vocabularies.characters())
    if os.path.isfile(source) or str(source).endswith(".model"):
        return TextFeatures(*[vocabularies.sentencepiece(source)] * 2)
    found = vocabulary_files.load_features(source)
    if found is None:
        if settings is None:
            has_run = config_file(source) is not None
            settings = read(source, trust=trust) if has_run else RunSettings.unknown()
        found = _features_of_data(settings)
    if found is None:
        raise errors.UserError(
            f"vocabulary: {source} is no SentencePiece file, no model that keeps its vocabulary, "
            f"and no run whose {CONFIG_FILE} names a seqio task; name the vocabulary that the "
            "model was trained with: a SentencePiece file (--vocabulary=FILE.model), or bytes "
            f"(--vocabulary={BYTES})."
        )
    return found


def trained_features(checkpoint: str, settings: RunSettings) -> TextFeatures | None:
    """Returns the vocabularies that a model was trained with; None where they are not known.

    They lie beside it; runs of earlier versions have those of their data alone.

    Raises:
        UserError: the vocabulary cannot be read, or the data is gone.
    """
    return vocabulary_files.load_features(checkpoint) or _features_of_data(settings)


def _features_of_data(settings: RunSettings) -> TextFeatures | None:
    import seqio

    data = settings.trained_on() if settings.trained_on else settings.data
    cached = getattr(data, "vocabulary", None)
    if cached is not None:
        return TextFeatures(cached, cached)
    provider = getattr(data, "mixture", None)
    if isinstance(provider, str):
        from convt5.evaluation.registry import registered

        provider = registered(provider)
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
    """Returns how the task that a model was trained on writes its inputs; None without a task.

    Args:
        checkpoint: the model's folder, which keeps it. That of a run that was begun before it was
            kept is the one of its data.
        settings: of the run.
        name: of the task, where there are several.
        raw: whether texts are sent as they are, so that no task needs to be named.

    Raises:
        UserError: a damaged file, no task of that name, or several and no name.
    """
    kept = formats.load(checkpoint)
    found: Sequence[TaskFormat] = kept or ()
    if kept is None:
        with contextlib.suppress(errors.UserError):  # The data may be gone.
            data = settings.trained_on() if settings.trained_on else settings.data
            found = formats.of_data(data)
    names = [each.task for each in found]
    if name is not None:
        if name not in names:
            known = f"those that it was trained on: {', '.join(names)}" if names else "none"
            raise errors.UserError(
                f"format={name} is no task of {checkpoint}, which keeps {known}."
                f"{errors.suggest(name, names)}"
            )
        return found[names.index(name)]
    # Tasks that write inputs alike, as objectives of pre-training do, need not be told apart.
    different = {dataclasses.replace(each, task="") for each in found}
    if len(different) > 1 and not raw:
        raise errors.UserError(
            f"{checkpoint} was trained on several tasks, {', '.join(names)}, which write their "
            "inputs differently; name one with format, or send inputs as they are with raw."
        )
    return next(iter(found)) if len(different) == 1 else None


def answers_described(
    format: TaskFormat | None, config: PredictConfig, *, raw: bool = False
) -> str:
    """Returns a line about how inputs are written and answers are found."""
    inputs = "inputs are sent as they are"
    if format is None and not raw:
        inputs += ": the model keeps no task"
    elif format is not None and not raw:
        inputs = format.described()
    strategy = config.strategy_for(format)
    if isinstance(strategy, Rank) and format is not None:
        return f"{inputs}; answers are the likeliest of its labels {list(format.labels)}"
    return f"{inputs}; answers are generated ({type(strategy).__name__})"


def check_readable(vocabulary: Any, *, of: str, remedy: str) -> None:
    """Raises `UserError` if a file of the vocabulary is not there.

    Args:
        vocabulary: a seqio vocabulary.
        of: whose it is.
        remedy: what helps.
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
