"""Trains a described run: gin binds `train`, and `python -m convt5.train` calls it.

A run lives in its run directory. The same call with the same directory resumes it, with the same
batches and random numbers as if it had never stopped.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

from convt5 import errors
from convt5.checkpoints import reading
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions, Restored
from convt5.checkpoints.record import describe_config
from convt5.data import counts
from convt5.data import data_shards as shards
from convt5.data.protocols import DataConfig
from convt5.errors import checks
from convt5.modeling import sharding
from convt5.runtime import amounts, descriptions, determinism, stages
from convt5.text import task_format, vocabulary_files
from convt5.training import compilation, data_checks, run_directory, run_log
from convt5.training import result as results
from convt5.training.interruption import Interruption
from convt5.training.loop import Estimate, Intervals, Loop, Measures, TaskMeasure
from convt5.training.plan import Plan, make_plan
from convt5.training.result import Result
from convt5.training.train_batches import TrainBatches
from convt5.training.train_state import TrainState
from convt5.training.train_step import StepConfig
from convt5.training.validation import Validation, check_num_batches
from convt5.training.watchdog import Watchdog


class TaskEval(Protocol):
    """A description that builds the metrics of a task; see `evaluation.TaskEval`."""

    @property
    def name(self) -> str: ...

    def build(self, model: Any, mesh: Mesh) -> TaskMeasure: ...


class StartingPoint(Protocol):
    """What a new run takes over from another; `initialization.InitFrom` is one."""

    @property
    def path(self) -> str: ...

    @property
    def continue_training(self) -> bool: ...

    def check(self, model: nnx.Module) -> None: ...

    def check_vocabulary(self, text: vocabulary_files.KeptText | None, model: Any) -> None: ...

    def check_num_steps(self, num_steps: int) -> None: ...

    def apply(
        self, model: nnx.Module, text: vocabulary_files.KeptText | None = None
    ) -> tuple[nnx.Module, Any]: ...

    def state(self, abstract_state: TrainState, *, model_config: Any) -> Restored: ...


class StatisticsEstimate(Protocol):
    """A description of how statistics are re-estimated; see `vision.statistics.Reestimate`."""

    def build(self, plan: Plan) -> Estimate: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun(StepConfig, Intervals):
    """A training run: its settings, their checks, and `train`.

    Attributes:
        run_dir: directory of the run. If it holds a checkpoint, the run resumes from it.
        train_data: the training batches; `batch_size` is over all devices and hosts.
        checkpoint: when to save and what to keep; None means the defaults of `CheckpointConfig`.
        eval_data: batches for the validation loss; they must end, or `eval_num_batches` be set.
        eval_num_batches: batches per evaluation; None means all.
        task_evals: tasks whose own metrics are part of each evaluation, such as
            `evaluation.TaskEval`.
        statistics: re-estimates the statistics of the model, such as running means, before each
            evaluation; the saved model has them too.
        data_shards: number of shards in which train_data is read; each gives an equal block of
            every batch. Batches depend only on this number, however many hosts read them. None
            means the number of hosts at the first start of the run.
        init_from: parameters, or the whole training state, that a new run copies from another; a
            resumed run ignores it.
        wandb_project: also logs to this project on wandb.ai.
        report: called with the model and `eval_data` (or `train_data`) at the end, and every
            `report_every_steps` steps, to show more, such as `samples.SpanSamples`.
        config_text: the settings, saved beside the checkpoints.

    Raises:
        UserError: settings that no run can have.
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
        """The data, by the name of its setting."""
        return {"train_data": self.train_data, "eval_data": self.eval_data}

    @property
    def checkpoints(self) -> CheckpointConfig:
        """`checkpoint`, or its defaults."""
        return self.checkpoint or CheckpointConfig()

    def check(self) -> None:
        """Checks the settings against each other; reads no data and writes nothing.

        Raises:
            UserError: an impossible run directory, data that does not fit the model, or evaluations
                that never end or lack the metric that early stopping needs.
        """
        errors.raise_all(checks.type_faults(self), where="trainer.train")
        run_directory.check(self.run_dir)
        data_checks.check_model(self.model, *self.data.values(), self.loss, self.report)
        data_checks.check_lengths(self.model, self.data)
        data_checks.check_images_apart(self.train_data, self.eval_data)
        self._check_measures()

    def check_data(self) -> None:
        """Checks vocabulary, labels, tasks and the first rows of files, where the data has them."""
        if self.has_vocabulary_here():
            data_checks.check_vocabulary(self.model, self.data)
            data_checks.check_labels(self.data)
            for task in self.task_evals:
                if check := getattr(task, "check", None):
                    check(self.model)
            self.check_same_vocabulary()
        self.check_files_apart()
        data_checks.check_rows(self.data)

    def check_files_apart(self) -> None:
        """Raises `UserError` if files of an evaluation are among those that are trained on."""
        data_checks.check_files_apart(self.train_data, self.eval_data, *self.task_evals)

    def check_same_vocabulary(self) -> None:
        """Raises `UserError` if an evaluation has another vocabulary than the training data."""
        measured: dict[str, Any] = {f"task_evals {task.name!r}": task for task in self.task_evals}
        measured["eval_data"] = self.eval_data
        data_checks.check_same_vocabulary(self.train_data, measured)

    def has_vocabulary_here(self) -> bool:
        """Returns whether all vocabulary files exist on this machine, none in a bucket."""
        return data_checks.vocabulary_is_here(self.data)

    def notes(self) -> list[str]:
        """Returns a sentence for each setting that no layer uses, and for others to look at."""
        sentences = getattr(self.model, "unused", list)()
        end = getattr(self.schedule, "total_steps", self.num_steps)
        if end < self.num_steps and not getattr(self.schedule, "final_fraction", 1):
            sentences.append(
                f"the learning rate is 0 after step {end}, the total_steps of "
                f"{type(self.schedule).__name__}: the steps from there to num_steps="
                f"{self.num_steps} change no parameter; raise total_steps, or final_fraction."
            )
        measured = (self.eval_data, *self.task_evals)
        used = dict.fromkeys(one for each in measured for one in task_format.of_data(each))
        trained = task_format.of_data(self.train_data)
        for now, then in task_format.differences(used, trained):
            sentences.append(
                f"in evaluation, {now.described()}; but in training, {then.described()}."
            )
        return sentences

    def plan(self, devices: Sequence[Any] | None = None) -> Plan:
        """Returns mesh, shapes, shardings and step functions; allocates and compiles nothing.

        Args:
            devices: devices to plan for, by default those of all hosts.

        Raises:
            UserError: sizes are not divisible by the mesh, or rules or patterns do not fit the
                model.
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
        """Returns the text of each token id, with the lengths used in evaluation."""
        text = vocabulary_files.of_data(self.train_data)
        if text is None:
            return None
        data = self.eval_data or self.train_data
        lengths = {name: getattr(data, name, None) for name in ("encoder_length", "decoder_length")}
        return text._replace(**lengths)

    def check_kept_vocabulary(self) -> None:
        """Raises `UserError` if the run directory has another vocabulary than the data.

        The position of a run that has read data says so too; a model that was imported has none.
        """
        remedy = "start a new run_dir with init_from"
        vocabulary_files.check_same_ids(
            self.kept_text(), self.run_dir, where="run_dir", remedy=remedy
        )

    def train(self, *, keep_programs: bool = False) -> Result:
        """Trains the model, or resumes training, up to `num_steps` updates.

        Args:
            keep_programs: keeps compiled programs in the user's cache by their settings, and loads
                those of earlier processes without tracing them. Only for processes in which
                functions of convt5 are what its files say.

        Raises:
            UserError: a setting is wrong, or the checkpoint does not fit.
            TrainingError: the loss is no longer finite; `Interrupted` on SIGTERM, Ctrl-C or SIGHUP.
        """
        self.check()
        data_checks.check_vocabulary(self.model, self.data)
        self.check_files_apart()
        programs = compilation.enable_persistent_cache()
        with stages.stage("plan"):
            plan = self.plan().keeping_programs(programs if keep_programs else None)
        with contextlib.ExitStack() as stack:
            return _Session(self, plan, stack).train()

    def _check_measures(self) -> None:
        check_num_batches(self.eval_num_batches, self.eval_data)
        tasks = [task.name for task in self.task_evals]
        others = {"validation": "those of eval_data"}
        if self.ema is not None:
            others["ema"] = "those of ema"
        for name, count in collections.Counter([*others, *tasks]).items():
            if count > 1:
                raise errors.UserError(
                    f"task_evals has {'a task' if name in others else 'two tasks'} named {name!r}, "
                    f"whose metrics would replace {others.get(name, 'each other')}; set another "
                    "evaluation.TaskEval.name."
                )
        measured = [*["validation"] * (self.eval_data is not None), *tasks]
        best = self.checkpoints.best_metric
        metric = best.removeprefix("ema/" if self.ema is not None else "")
        if measured and metric.partition("/")[0] not in measured:
            raise errors.UserError(
                f"best_metric={best!r} is never recorded; set "
                "checkpoint.CheckpointConfig.best_metric to a metric of "
                f"{' or '.join(measured)}, such as {measured[0]}/loss."
            )
        if self.early_stop_evaluations and not measured:
            raise errors.UserError(
                f"early_stop_evaluations={self.early_stop_evaluations} waits for {best!r}, but "
                "nothing is evaluated; set eval_data or task_evals."
            )


train = descriptions.function("train", TrainRun, TrainRun.train)
"""Starts or resumes a run, and returns its result; gin binds `trainer.train.FIELD`."""


class _Session:
    """A run in progress, with everything that it holds open.

    Args:
        run: a run whose settings are checked.
        plan: its plan.
        stack: closes what is opened.
    """

    def __init__(self, run: TrainRun, plan: Plan, stack: contextlib.ExitStack):
        self._run, self._plan, self._stack = run, plan, stack
        self._validation = None
        if run.eval_data is not None:
            self._validation = Validation(
                run.eval_data,
                self._plan.eval_step,
                self._plan.batch_sharding,
                num_batches=run.eval_num_batches,
            )
        self._tasks = [task.build(run.model, self._plan.mesh) for task in run.task_evals]
        run.check_same_vocabulary()
        self._text = run.kept_text()
        self._formats = task_format.of_data(run.train_data)
        self._class_names: Sequence[str] = ()
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
        """Makes the remaining updates, and writes the result."""
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
            first_model=self._copy_parameters if run.init_from else None,
        )
        with stages.stage("data"):
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
        saved = reading.steps_in(self._checkpointer.directory)
        log.message(results.describe(result, saved=saved))
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
        """Returns the last checkpoint, or the training state that a new run continues, or None."""
        run, plan = self._run, self._plan
        rows = shards.own_rows(plan.batch_sharding, run.train_data.batch_size)
        with self._watchdog.phase("reading the last checkpoint"):
            restored = self._checkpointer.restore(plan.abstract, shards_read=rows.shards)
        if restored is not None and not restored.data.num_shards:
            run.check_kept_vocabulary()
        if restored is not None or run.init_from is None:
            return restored
        self._source = str(run.init_from.path)
        run.init_from.check_vocabulary(self._text, plan.abstract.model)
        if not run.init_from.continue_training:
            return None
        run.init_from.check_num_steps(run.num_steps)
        return run.init_from.state(plan.abstract, model_config=run.model)

    def _copy_parameters(self, model: nnx.Module) -> nnx.Module:
        """Returns the model with the parameters of the run that this one starts from."""
        source = self._run.init_from
        assert source is not None
        model, report = source.apply(model, self._text)
        self._log.message(report.text(source.path))
        return model

    def _measures(self) -> Measures:
        statistics = self._run.statistics
        estimate = statistics.build(self._plan) if statistics else None
        report = self._report if self._run.report is not None else None
        return Measures(self._validation, self._tasks, estimate, report)

    def _open_data(self) -> TrainBatches:
        """Opens the data of a run with updates left, and shows what was read."""
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
        self._class_names = batches.class_names
        if self._validation is not None:
            data_checks.check_class_names(
                self._validation.class_names, self._class_names, where="eval_data"
            )
        if jax.process_index() == 0:
            with self._watchdog.phase("measuring the data"):
                for part in (self._run.train_data, *self._tasks):
                    if describe := getattr(part, "describe", None):
                        self._log.message(describe())
        return batches

    def _check_batch_size(self) -> None:
        """Raises `UserError` if a resumed run has another batch size, before reading any data."""
        batch_size = self._plan.batch_size
        progress = self._restored.progress if self._restored else {}
        before = progress.get("batch_size", batch_size)
        if before != batch_size:
            raise errors.UserError(
                f"batch_size={batch_size} of train_data differs from the {before} of the "
                "checkpoint, whose data position counts batches of that size; restore it, or "
                "start a new run_dir with init_from."
            )

    def _check_validation_metric(self, validation: Validation) -> None:
        """Raises `UserError` if no evaluation has the best metric, before the first step."""
        checkpoint = self._run.checkpoints
        half, _, metric = checkpoint.best_metric.removeprefix("ema/").partition("/")
        if half != "validation" or metric == "loss":
            return  # Task metrics are known only once measured; a loss always exists.
        names = validation.metric_names(self._plan.abstract.model)
        if metric not in names:
            raise errors.UserError(checkpoint.unmeasured([f"validation/{name}" for name in names]))

    def _tell_of_reading(self, batches: TrainBatches) -> None:
        """Shows what was counted while the data was read; all hosts must call it."""
        parts = [("read in training", batches.counts())]
        if self._validation is not None:
            parts.append(("read in an evaluation", self._validation.counts()))
        for title, read in parts:
            if read:
                self._log.message(counts.describe(title, read))

    def _write_settings(self) -> None:
        """Writes settings, vocabulary, task formats and class names, at the first update."""
        text = self._run.config_text
        if message := run_directory.write_config(self._folder, text, step=self._first_step):
            self._log.message(message)
        if self._text is not None:
            run_directory.write_vocabularies(self._folder, self._text)
        if self._formats:
            run_directory.write_task(self._folder, self._formats)
        if self._class_names:
            run_directory.write_class_names(self._folder, self._class_names)

    def _announce(self) -> None:
        """Shows the size of the model, the devices, and where the run resumes."""
        run, plan, step = self._run, self._plan, self._first_step
        mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
        device = plan.mesh.devices.flat[0]
        trained = f" ({amounts.short_number(plan.num_trained())} trained)" if run.frozen else ""
        self._log.message(
            f"{amounts.short_number(plan.num_parameters())} parameters{trained} on "
            f"{plan.mesh.devices.size} x {device.device_kind}{f' ({mesh})' if mesh else ''}, run "
            f"directory {self._folder}"
        )
        for sentence in run.notes():
            self._log.message(sentence)
        if repeats := determinism.describe(device.platform):
            self._log.message(repeats)
        if step:
            steps_left = run.num_steps - step
            to_do = f"{steps_left} to go" if steps_left > 0 else "none are left to do"
            of = f" of {self._source}, with other data from its start" if self._source else ""
            self._log.message(
                f"resumes from the checkpoint of step {step}{of}; of {run.num_steps} steps {to_do}"
            )
