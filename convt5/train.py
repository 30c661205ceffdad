"""Entry point of `python -m convt5.train`: reads the settings, then checks them or trains.

Nothing here can be bound by gin: this file runs as `__main__`, and a gin file that imported it
would bind a second copy. Bind `trainer.train`.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line, gin_config
from convt5.runtime import determinism, multi_host

COMMAND = command_line.Command(
    name="train",
    summary="Trains a model as gin files describe it. The same command continues a run that was "
    "interrupted, with the same batches as if it had never stopped. Asked to stop by SIGTERM it "
    "saves at the next step and exits with 143, by Ctrl-C with 130, by a closed terminal with 129.",
    examples=[
        (
            "a tiny dynamic-convolution T5 on the English text inside Python, in minutes on a CPU",
            "--gin_file=gin/runs/quickstart.gin",
        ),
        (
            "the same run with another model, and fewer steps",
            "--gin_file=gin/runs/quickstart.gin --gin_file=gin/models/dilated_tiny.gin "
            "--gin.NUM_STEPS=100",
        ),
        (
            "your own text and SentencePiece vocabulary",
            "--gin_file=gin/runs/pretrain_text.gin --gin.TEXT='corpus/*.txt.gz' "
            "--gin.VOCABULARY=corpus/spm.model --gin.RUN_DIR=runs/corpus",
        ),
        (
            "is anything missing or inconsistent? Nothing is compiled, few rows are read",
            "--gin_file=gin/runs/pretrain_c4.gin --gin.RUN_DIR=/tmp/c4 --dry_run",
        ),
    ],
    flags=[
        command_line.Flag(
            "dry_run",
            "checks everything that can be checked before compiling: missing settings, "
            "files and their first rows, mesh, batch and model shapes; trains nothing.",
            {"action": "store_true"},
        ),
        determinism.FLAG,
        *multi_host.FLAGS,
    ],
)


def main(argv: Sequence[str]) -> int:
    """Trains with the settings of the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    if arguments.flags.deterministic:
        determinism.require()
    with multi_host.joined(arguments.flags):
        return _run(arguments)


def _run(arguments: command_line.Arguments) -> int:
    config = gin_config.load(
        arguments.gin_files,
        arguments.gin_bindings,
        roots=["@trainer.train"],
        supplied=["config_text"],
        trusted=arguments.trust,
    )
    # These import jax, which help and misspelt flags need not wait for.
    from convt5.configuration import moved_runs
    from convt5.text import vocabulary_files
    from convt5.training import trainer

    run_dir = moved_runs.run_dir(
        trainer.train, config, arguments.gin_files, arguments.gin_bindings, arguments.trust
    )
    settings: dict[str, Any] = config.arguments(trainer.train, leave_out=moved_runs.DATA_ARGUMENTS)
    if run_dir:
        settings["run_dir"] = os.path.expanduser(run_dir)
    try:
        with vocabulary_files.of_run(settings.get("run_dir")):
            settings |= config.arguments(trainer.train, only=moved_runs.DATA_ARGUMENTS)
    except errors.UserError as error:
        steps = _steps(settings["run_dir"]) if run_dir else []
        if not steps:
            raise
        if steps[-1] < settings["num_steps"]:
            raise moved_runs.data_is_gone(error, settings["run_dir"]) from None
        print(f"{steps[-1]} steps done\n  run directory    {settings['run_dir']}")
        return 0
    check_lengths(settings)
    if arguments.flags.dry_run:
        print(dry_run(settings))
        return 0
    check_vocabulary(settings)
    trainer.train(**settings, config_text=determinism.record(config.text))
    return 0


def dry_run(settings: Mapping[str, Any]) -> str:
    """Checks the arguments of `trainer.train` without compiling; returns what would be trained.

    Raises:
        UserError: sizes that do not fit each other or the devices.
    """
    import jax

    from convt5.training import plan, run_directory, trainer

    call = inspect.signature(trainer.train).bind(**settings)
    call.apply_defaults()
    values = dict(call.arguments)
    _check_data(settings, values)
    parts = ("train_data", "eval_data", "loss", "report")
    trainer.check_model(values["model"], *(values[part] for part in parts))
    values["batch_size"] = values["train_data"].batch_size
    values["lengths"] = plan.row_lengths(
        train_data=values["train_data"], eval_data=values["eval_data"]
    )
    intervals = trainer.Intervals(**_accepted(trainer.Intervals, values))
    run_directory.check(values["run_dir"])
    trainer.check_measures(
        values["checkpoint"] or trainer.CheckpointConfig(),
        values["eval_data"],
        values["eval_num_batches"],
        values["task_evals"],
        intervals,
        has_ema=values["ema"] is not None,
    )
    planned = plan.make_plan(**_accepted(plan.make_plan, values))
    if values["statistics"] is not None:
        values["statistics"].build(planned)
    # A run that goes on has its own parameters, and needs no others.
    if values["init_from"] is not None and not _steps(values["run_dir"]):
        values["init_from"].check(planned.abstract.model)
        values["init_from"].check_num_steps(values["num_steps"])
        if _vocabulary_is_here(settings):
            text = trainer.kept_text(values["train_data"], values["eval_data"])
            values["init_from"].check_vocabulary(text)
    mesh = ", ".join(f"{axis}={size}" for axis, size in planned.mesh.shape.items())
    return "\n".join(
        [
            "The configuration is complete and consistent; nothing was trained.",
            f"  parameters     {planned.num_parameters():,}"
            + (f" ({planned.num_trained():,} trained)" if planned.frozen else ""),
            f"  devices        {jax.device_count()} x {jax.devices()[0].device_kind} ({mesh})",
            f"  batch          {values['batch_size']} rows",
            f"  steps          {values['num_steps']:,}",
            f"  run directory  {values['run_dir']}",
        ]
    )


def _check_data(settings: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Checks vocabulary, labels, tasks and the first rows of files, of data that has such.

    Args:
        settings: of the run.
        values: the same with defaults.
    """
    both = (values["train_data"], values["eval_data"])
    if _vocabulary_is_here(settings):
        check_vocabulary(settings)
        for data in both:
            if hasattr(data, "check_labels"):
                data.check_labels()
        for task in values["task_evals"]:
            if hasattr(task, "check"):
                task.check(values["model"])
    for data in both:
        if hasattr(data, "provider"):
            data.provider()
        if hasattr(data, "check_rows"):
            data.check_rows()


def _steps(run_dir: str) -> list[int]:
    """Returns the steps of which a run has checkpoints."""
    from etils import epath

    from convt5.checkpoints.reading import steps_in

    return steps_in(epath.Path(run_dir).expanduser() / "checkpoints")


def check_lengths(settings: Mapping[str, Any]) -> None:
    """Raises `UserError` if the data has rows longer than the model's table of positions."""
    model = settings["model"]
    if not hasattr(model, "most_tokens"):
        return
    faults = [
        f"{data}.{stack}_length={length} is longer than {limit}, the tokens that the model's "
        f"max_positions={model.max_positions} learned positions reach; lower {stack}_length or "
        "raise max_positions."
        for data in ("train_data", "eval_data")
        for stack in ("encoder", "decoder")
        if (limit := model.most_tokens(stack))
        and (length := getattr(settings.get(data), f"{stack}_length", None) or 0) > limit
    ]
    errors.raise_all(faults, where="configuration")


def check_vocabulary(settings: Mapping[str, Any]) -> None:
    """Raises `UserError` if the data has more token ids than the model has embeddings."""
    limit = getattr(settings["model"], "vocab_size", None)
    if limit is None:
        return  # No text: nothing to compare.
    for data in ("train_data", "eval_data"):
        for name, size in _vocabulary_sizes(settings.get(data)).items():
            if size > limit:
                raise errors.UserError(
                    f"the vocabulary of {name!r} of {data} has {size} ids, sentinels included, but "
                    f"vocab_size={limit} rows are in the model's token table; set --gin."
                    f"architecture.ConvT5Config.vocab_size to at least {size}."
                )


def _vocabulary_sizes(data: Any) -> dict[str, int]:
    """Returns how many ids each feature of some batches may have; none for other than text."""
    if hasattr(data, "provider"):
        features = data.provider().output_features.items()
        return {name: feature.vocabulary.vocab_size for name, feature in features}
    size = getattr(data, "vocab_size", None)  # Rows of a cache keep no more of their vocabulary.
    return {} if size is None else {"targets": size}


def _vocabulary_is_here(settings: Mapping[str, Any]) -> bool:
    """Whether no vocabulary file lies elsewhere, such as in a bucket, or is missing."""
    providers = [getattr(settings.get(d), "provider", None) for d in ("train_data", "eval_data")]
    features = [f for find in providers if find for f in find().output_features.values()]
    files = [getattr(f.vocabulary, "sentencepiece_model_file", None) for f in features]
    return all(file is None or os.path.isfile(file) for file in files)


def _accepted(function: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: values[name] for name in parameters if name in values}


if __name__ == "__main__":
    command_line.run(main)
