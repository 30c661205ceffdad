"""Training from a description: `train` is what gin binds and `python -m convt5.train` calls.

A run lives in its run directory. The same call on the same directory continues it, with the same
batches and the same random numbers as if it had never stopped.
"""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from convt5 import errors
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions, Restored
from convt5.checkpoints.record import describe_config
from convt5.data import counts
from convt5.data import data_shards as shards
from convt5.data.protocols import DataConfig
from convt5.modeling import sharding
from convt5.runtime import amounts, determinism
from convt5.text import task_format, vocabulary_files
from convt5.training import compilation, data_checks, run_directory, run_log
from convt5.training import result as results
from convt5.training.interruption import Interruption
from convt5.training.loop import Estimate, Intervals, Loop, Measures, StartingPoint, TaskMeasure
from convt5.training.plan import Plan, make_plan
from convt5.training.result import Result
from convt5.training.train_batches import TrainBatches
from convt5.training.train_step import StepConfig
from convt5.training.validation import Validation, check_num_batches
from convt5.training.watchdog import Watchdog


class TaskEval(Protocol):
    """A description that builds the measure of a task, such as `evaluation.TaskEval`."""

    @property
    def name(self) -> str: ...

    def build(self, model: Any, mesh: Mesh) -> TaskMeasure: ...


class StatisticsEstimate(Protocol):
    """A description that builds a measure of statistics, such as `vision.statistics.Reestimate`."""

    def build(self, plan: Plan) -> Estimate: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun(StepConfig, Intervals):
    """A run of the trainer: every setting, what can be checked of them, and the run itself.

    Attributes:
        run_dir: folder of the run. If it holds a checkpoint the run continues from there.
        train_data: the batches; `batch_size` is over all devices and hosts.
        checkpoint: when to save and what to keep; None: the defaults of `CheckpointConfig`.
        eval_data: batches for the validation loss; they must end, or set `eval_num_batches`.
        eval_num_batches: batches of one evaluation; None takes all.
        task_evals: tasks whose own metrics each evaluation measures as well, such as
            `evaluation.TaskEval`.
        statistics: measures anew, before each evaluation, what the model keeps of batches seen in
            training, such as running means; the model that is saved then has these.
        data_shards: how many shards train_data is read in; each gives an equal block of every
            batch. Batches depend on this number alone, however many hosts read them. None takes
            that of the run's first start, when it was the number of its hosts.
        init_from: parameters, or all of the training state, that a new run takes over from
            another; without effect on one that continues.
        wandb_project: also logs to this project on wandb.ai.
        report: called with the final model and `eval_data` (or `train_data`) to say more at the
            end, such as `samples.SpanSamples`; with `report_every_steps` also while the run trains.
        config_text: the settings, kept beside the checkpoints.

    Raises:
        UserError: numbers that can be none of any run.
    """

    run_dir: str
    train_data: DataConfig
    checkpoint: CheckpointConfig | None = None
    eval_data: DataConfig | None = None
    eval_num_batches: int | None = None
    task_evals: Sequence[TaskEval] = ()
    statistics: StatisticsEstimate | None = None
    data_shards: int | None = None
    init_from: StartingPoint | None = None
    wandb_project: str | None = None
    report: Callable[[nnx.Module, DataConfig], str] | None = None
    config_text: str | None = None

    def _faults(self) -> list[str]:
        faults = [*Intervals._faults(self), *StepConfig._faults(self)]
        if self.data_shards is not None and self.data_shards < 1:
            faults.append(f"data_shards={self.data_shards} must be at least 1, or None.")
        if self.report_every_steps is not None and self.report is None:
            faults.append(
                f"report_every_steps={self.report_every_steps} asks for reports, but report=None "
                "makes none; set report, such as @samples.SpanSamples(), or leave it out."
            )
        return faults

    @property
    def data(self) -> dict[str, DataConfig | None]:
        """The data by the name of its setting."""
        return {"train_data": self.train_data, "eval_data": self.eval_data}

    @property
    def checkpoints(self) -> CheckpointConfig:
        """`checkpoint`, or its defaults."""
        return self.checkpoint or CheckpointConfig()

    def check(self) -> None:
        """Checks the settings against each other; reads no data and writes nothing.

        Raises:
            UserError: a run directory that can be none, data that does not fit the model, or
                evaluations that never end or lack what the run waits for.
        """
        run_directory.check(self.run_dir)
        data_checks.check_model(self.model, *self.data.values(), self.loss, self.report)
        data_checks.check_lengths(self.model, self.data)
        self._check_measures()

    def check_data(self) -> None:
        """Checks vocabulary, labels, tasks and the first rows of files, of data that has such."""
        if self.has_vocabulary_here():
            data_checks.check_vocabulary(self.model, self.data)
            data_checks.check_labels(self.data)
            for task in self.task_evals:
                if check := getattr(task, "check", None):
                    check(self.model)
        data_checks.check_rows(self.data)

    def has_vocabulary_here(self) -> bool:
        """Whether no vocabulary file lies elsewhere, such as in a bucket, or is missing."""
        return data_checks.vocabulary_is_here(self.data)

    def plan(self, devices: Sequence[Any] | None = None) -> Plan:
        """Returns mesh, shapes, shardings and step functions; nothing is allocated or compiled.

        Args:
            devices: those to plan for, by default all of every host.

        Raises:
            UserError: sizes that the mesh does not divide, or rules or patterns that do not fit
                the model.
        """
        batch_size = self.train_data.batch_size
        lengths = data_checks.row_lengths(self.data)
        plan = make_plan(self, batch_size=batch_size, lengths=lengths, devices=devices)
        if self.data_shards is not None:
            shards.check(batch_size, self.data_shards)
        if self.eval_data is not None:
            rows = self.eval_data.batch_size
            sharding.check_rows(plan.mesh, rows, setting="eval_data.batch_size")
        return plan

    def kept_text(self) -> vocabulary_files.KeptText | None:
        """Returns what the ids of the run stand for, with the lengths it is evaluated at."""
        text = vocabulary_files.of_data(self.train_data)
        if text is None:
            return None
        data = self.eval_data or self.train_data
        lengths = {name: getattr(data, name, None) for name in ("encoder_length", "decoder_length")}
        return text._replace(**lengths)

    def train(self) -> Result:
        """Trains the model, or continues to, until it has made `num_steps` updates.

        Raises:
            UserError: a setting is wrong, or the checkpoint does not fit.
            TrainingError: the loss is no longer finite; `Interrupted`: SIGTERM, Ctrl-C or SIGHUP.
        """
        self.check()
        data_checks.check_vocabulary(self.model, self.data)
        compilation.enable_persistent_cache()
        with contextlib.ExitStack() as stack:
            return _Session(self, stack).train()

    def _check_measures(self) -> None:
        check_num_batches(self.eval_num_batches, self.eval_data)
        tasks = (task.name for task in self.task_evals)
        measured = [*["validation"] * (self.eval_data is not None), *tasks]
        best = self.checkpoints.best_metric
        metric = best.removeprefix("ema/" if self.ema is not None else "")
        if measured and metric.partition("/")[0] not in measured:
            raise errors.UserError(
                f"best_metric={best!r} is never measured; set checkpoint.CheckpointConfig."
                f"best_metric to a metric of {' or '.join(measured)}, such as {measured[0]}/loss."
            )
        if self.early_stop_evaluations and not measured:
            raise errors.UserError(
                f"early_stop_evaluations={self.early_stop_evaluations} waits for {best!r}, but "
                "nothing is evaluated; set eval_data or task_evals."
            )


def train(**settings: Any) -> Result:
    """Makes or continues a run; returns how it ended.

    Args:
        settings: the fields of `TrainRun`, which gin binds as `trainer.train.FIELD`.

    Raises:
        UserError, TrainingError, Interrupted: as `TrainRun.train`.
    """
    return TrainRun(**settings).train()


# What gin and lists of settings read of them: types, defaults and meanings.
vars(train).update(__signature__=inspect.signature(TrainRun), __wrapped__=TrainRun)
train.__annotations__ = {**typing.get_type_hints(TrainRun), "return": Result}


class _Session:
    """A run in progress, with everything that it holds open.

    Args:
        run: whose settings fit each other.
        stack: closes what is opened.
    """

    def __init__(self, run: TrainRun, stack: contextlib.ExitStack):
        self._run, self._stack, self._plan = run, stack, run.plan()
        self._validation = None
        if run.eval_data is not None:
            self._validation = Validation(
                run.eval_data,
                self._plan.eval_step,
                self._plan.batch_sharding,
                num_batches=run.eval_num_batches,
            )
        self._tasks = [task.build(run.model, self._plan.mesh) for task in run.task_evals]
        self._text = run.kept_text()
        self._formats = task_format.of_data(run.train_data)
        self._watchdog = stack.enter_context(Watchdog(run.stall_warning_secs))
        self._folder = stack.enter_context(run_directory.hold(run.run_dir))
        self._checkpointer = Checkpointer(
            self._folder / "checkpoints", run.checkpoints, model_config=run.model
        )
        stack.enter_context(contextlib.closing(self._checkpointer))
        self._source: str | None = None
        self._restored = self._restore()
        self._first_step = self._restored.step if self._restored else 0
        self._log = run_log.open_run_log(
            self._folder,
            num_steps=run.num_steps,
            last_step=self._first_step,
            is_first_process=jax.process_index() == 0,
            metric=run.checkpoints.best_metric,
        )
        stack.enter_context(contextlib.closing(self._log))

    def train(self) -> Result:
        """Makes the updates that are left, and writes how the run ended."""
        run, log = self._run, self._log
        self._announce()
        loop = Loop(
            self._plan,
            run,
            log=log,
            checkpointer=self._checkpointer,
            measures=self._measures(),
            watchdog=self._watchdog,
            restored=self._restored,
            init_from=run.init_from,
        )
        batches = None if loop.is_complete else self._open_data()
        log.open_files(
            last_step=self._first_step,
            wandb_project=run.wandb_project,
            config={"model": describe_config(run.model)},
        )
        if batches is not None:
            hosts = self._checkpointer if jax.process_count() > 1 else None
            with Interruption(hosts) as interruption:
                loop.run(batches, interruption, before_first=self._write_settings)
        log.end_progress()
        result = results.write(self._folder, self._plan, loop, self._validation, run.checkpoints)
        log.message(results.describe(result))
        if batches is not None:
            self._tell_of_reading(batches)
        if run.report is not None:
            log.sample(loop.step, self._report(loop.model))
        return result

    def _report(self, model: nnx.Module) -> str:
        run = self._run
        assert run.report is not None
        return run.report(model, run.eval_data or run.train_data)

    def _restore(self) -> Restored | None:
        """Returns the last checkpoint, or the state of another run that this new one goes on with;
        None for a run that begins."""
        run, plan = self._run, self._plan
        rows = shards.own_rows(plan.batch_sharding, run.train_data.batch_size)
        with self._watchdog.phase("reading the last checkpoint"):
            restored = self._checkpointer.restore(plan.abstract, shards_read=rows.shards)
        if restored is not None or run.init_from is None:
            return restored
        self._source = str(run.init_from.path)
        run.init_from.check_vocabulary(self._text)
        if not run.init_from.continue_training:
            return None
        run.init_from.check_num_steps(run.num_steps)
        return run.init_from.state(plan.abstract, model_config=run.model)

    def _measures(self) -> Measures:
        statistics = self._run.statistics
        estimate = statistics.build(self._plan) if statistics else None
        report = self._report if self._run.report is not None else None
        return Measures(self._validation, self._tasks, estimate, report)

    def _open_data(self) -> TrainBatches:
        """Opens the data of a run that has updates left, and tells of it."""
        self._check_batch_size()
        if self._validation is not None:
            with self._watchdog.phase("reading the first evaluation data"):
                self._validation.prepare()
            self._check_validation_metric(self._validation)
        with self._watchdog.phase("opening the training data"):
            batches = TrainBatches(
                self._run.train_data,
                self._plan,
                num_shards=self._run.data_shards,
                positions=self._restored.data if self._restored else DataPositions(),
            )
        self._stack.enter_context(contextlib.closing(batches))
        if jax.process_index() == 0:
            with self._watchdog.phase("measuring the data"):
                for part in (self._run.train_data, *self._tasks):
                    if describe := getattr(part, "describe", None):
                        self._log.message(describe())
        return batches

    def _check_batch_size(self) -> None:
        """Raises `UserError` for a run that would go on with other batches, before data is read."""
        batch_size = self._plan.batch_size
        progress = self._restored.progress if self._restored else {}
        before = progress.get("batch_size", batch_size)
        if before != batch_size:
            raise errors.UserError(
                f"batch_size={batch_size} of train_data differs from the {before} of the "
                "checkpoint, whose position in the data counts such batches; set it back, or start "
                "a new run_dir with init_from."
            )

    def _check_validation_metric(self, validation: Validation) -> None:
        """Raises `UserError` for a best metric that no evaluation has, before the first step."""
        checkpoint = self._run.checkpoints
        half, _, metric = checkpoint.best_metric.removeprefix("ema/").partition("/")
        if half != "validation" or metric == "loss":
            return  # Names of task metrics are known once measured; a loss is always there.
        names = validation.metric_names(self._plan.abstract.model)
        if metric not in names:
            raise errors.UserError(checkpoint.unmeasured([f"validation/{name}" for name in names]))

    def _tell_of_reading(self, batches: TrainBatches) -> None:
        """Shows what was counted of the data where it was read; all hosts must call."""
        parts = [("read in training", batches.counts())]
        if self._validation is not None:
            parts.append(("read in an evaluation", self._validation.counts()))
        for title, found in parts:
            if found:
                self._log.message(counts.describe(title, found))

    def _write_settings(self) -> None:
        """Writes what a run keeps of its settings, text and tasks, at its first update."""
        text = self._run.config_text
        if changed := run_directory.write_config(self._folder, text, step=self._first_step):
            self._log.message(changed)
        if self._text is not None:
            run_directory.write_vocabularies(self._folder, self._text)
        if self._formats:
            run_directory.write_task(self._folder, self._formats)

    def _announce(self) -> None:
        """Shows the size of the model, the devices, and from where the run goes on."""
        run, plan, step = self._run, self._plan, self._first_step
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
        device = plan.mesh.devices.flat[0]
        trained = f" ({amounts.short_number(plan.num_trained())} trained)" if run.frozen else ""
        self._log.message(
            f"{amounts.short_number(plan.num_parameters())} parameters{trained} on "
            f"{plan.mesh.devices.size} x {device.device_kind}{f' ({mesh})' if mesh else ''}, run "
            f"directory {self._folder}"
        )
        if repeats := determinism.describe(device.platform):
            self._log.message(repeats)
        if step:
            left = run.num_steps - step
            to_do = f"{left} to go" if left > 0 else "none are left to do"
            of = f" of {self._source}, with other data from its start" if self._source else ""
            self._log.message(
                f"continues from the checkpoint of step {step}{of}; of {run.num_steps} steps "
                f"{to_do}"
            )
