"""Entry point of `python -m convt5.train`: reads the settings, then checks them or trains.

Gin cannot bind anything here: this file runs as `__main__`, and a gin file that imports it would
bind a second copy. Bind `trainer.train`.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from convt5 import errors
from convt5.configuration import command_line, gin_config
from convt5.runtime import determinism, multi_host, stages

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

COMMAND = command_line.Command(
    name="train",
    summary="Trains the model that gin files describe. The same command resumes an interrupted "
    "run, with exactly the batches of an uninterrupted one. On SIGTERM, Ctrl-C or a "
    "closed terminal it saves at the next step and exits with code 143, 130 or 129.",
    examples=[
        (
            "train a tiny dynamic-convolution T5 on the English documentation inside Python, in "
            "minutes on a CPU",
            "--gin_file=gin/runs/quickstart.gin",
        ),
        (
            "train another model for fewer steps",
            "--gin_file=gin/runs/quickstart.gin --gin_file=gin/models/dilated_tiny.gin "
            "--gin.NUM_STEPS=100",
        ),
        (
            "train on your own text and SentencePiece vocabulary",
            "--gin_file=gin/runs/pretrain_text.gin --gin.TEXT='corpus/*.txt.gz' "
            "--gin.VOCABULARY=corpus/spm.model --gin.RUN_DIR=runs/corpus",
        ),
        (
            "check a configuration: compiles nothing, reads few rows",
            "--gin_file=gin/runs/pretrain_c4.gin --gin.RUN_DIR=/tmp/c4 --dry_run",
        ),
    ],
    flags=[
        command_line.Flag(
            "dry_run",
            "checks everything that needs no compilation: settings, files and their first rows, "
            "mesh, batch and model shapes; trains nothing.",
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
    with multi_host.join(arguments.flags):
        return _run(arguments)


def _run(arguments: command_line.Arguments) -> int:
    with stages.stage("imports"):
        config = gin_config.load(
            arguments.gin_files,
            arguments.gin_bindings,
            roots=["@trainer.train"],
            supplied=["config_text"],
            trusted=arguments.trust,
        )
        # Deferred: these import jax, for which help and usage errors need not wait.
        from convt5.text import vocabulary_files
        from convt5.training import moved_runs, trainer

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
    if arguments.flags.dry_run:
        print(dry_run(trainer.TrainRun(**settings)))
        return 0
    run = trainer.TrainRun(**settings, config_text=determinism.record(config.text))
    run.train(keep_programs=True)
    return 0


def dry_run(run: "TrainRun") -> str:
    """Checks everything that can be checked before compiling; describes what would be trained.

    Raises:
        UserError: sizes do not fit each other or the devices.
    """
    import jax

    run.check()
    run.check_data()
    plan = run.plan()
    if run.statistics is not None:
        run.statistics.build(plan)
    if _steps(run.run_dir):  # A resumed run has its own parameters.
        if run.has_vocabulary_here():
            run.check_kept_vocabulary()
    elif run.init_from is not None:
        run.init_from.check(plan.abstract.model)
        run.init_from.check_num_steps(run.num_steps)
        if run.has_vocabulary_here():
            run.init_from.check_vocabulary(run.kept_text(), plan.abstract.model)
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items())
    lengths = [
        f", {name}={length}"
        for name in ("encoder_length", "decoder_length")
        if (length := getattr(run.train_data, name, None))
    ]
    return "\n".join(
        [
            "The configuration is complete and consistent; nothing was trained.",
            f"  parameters     {plan.num_parameters():,}"
            + (f" ({plan.num_trained():,} trained)" if run.frozen else ""),
            f"  devices        {jax.device_count()} x {jax.devices()[0].device_kind} ({mesh})",
            f"  batch          {plan.batch_size} rows" + "".join(lengths),
            f"  steps          {run.num_steps:,}",
            f"  run directory  {run.run_dir}",
            *run.notes(),
        ]
    )


def _steps(run_dir: str) -> list[int]:
    """Returns the steps of a run's checkpoints."""
    from etils import epath

    from convt5.checkpoints.reading import steps_in

    return steps_in(epath.Path(run_dir).expanduser() / "checkpoints")


if __name__ == "__main__":
    command_line.run(main)
