"""The training loop: update, read metrics, evaluate and save, in an order that matters.

Step n is dispatched before the metrics of step n-1 are read, so that devices never wait for the
host. The log of a step reaches the disk before its checkpoint does.
"""

import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

import convt5
from convt5 import errors
from convt5.checkpoints import reading
from convt5.checkpoints.checkpoint import Checkpointer, DataPositions, Restored
from convt5.errors import checks
from convt5.runtime import amounts, machine, stages
from convt5.training import compilation, run_log
from convt5.training.interruption import Interruption, StopAtOnce
from convt5.training.patience import Patience
from convt5.training.plan import Plan
from convt5.training.spikes import SpikeMemory
from convt5.training.train_state import TrainState
from convt5.training.train_step import ALL_FINITE, NONFINITE_INDEX, describe_nonfinite
from convt5.training.validation import PlacedBatch, Validation
from convt5.training.watchdog import Watchdog

# Weights and flags of single steps, whose means over steps are meaningless.
_NOT_LOGGED = (ALL_FINITE, NONFINITE_INDEX, "loss_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """The number of steps of a run, and what happens after which of them.

    Attributes:
        num_steps: total number of updates, including those before an interruption.
        log_every_steps: steps between log records.
        eval_every_steps: steps between evaluations; None evaluates only after the last step.
        early_stop_evaluations: ends the run after this many evaluations without a better
            `checkpoint.best_metric`; None disables early stopping. Every new best step is then
            saved, whatever `checkpoint.every_steps` is.
        report_every_steps: steps between calls of `report`, which show samples during training;
            None calls it only after the last step.
        stall_warning_secs: shows the stack of every thread when a batch, step, evaluation or
            checkpoint takes longer than this, again after twice the time, and so on; None disables
            the warning.
    """

    num_steps: int
    log_every_steps: int = 50
    eval_every_steps: int | None = None
    early_stop_evaluations: int | None = None
    report_every_steps: int | None = None
    stall_warning_secs: float | None = 600.0

    def __post_init__(self):
        errors.raise_all(self._faults(), where="train")

    def _faults(self) -> list[str]:
        counts = {"num_steps": self.num_steps, "log_every_steps": self.log_every_steps}
        optional = {
            "eval_every_steps": self.eval_every_steps,
            "early_stop_evaluations": self.early_stop_evaluations,
            "report_every_steps": self.report_every_steps,
        }
        counts |= {name: value for name, value in optional.items() if value is not None}
        faults = [
            f"{name}={value!r} must be an integer of at least 1, and below 2**31."
            for name, value in counts.items()
            if not (isinstance(value, int) and 1 <= value < checks.MOST_STEPS)
        ]
        if self.early_stop_evaluations and self.eval_every_steps is None:
            faults.append(
                f"early_stop_evaluations={self.early_stop_evaluations} counts evaluations, but "
                "eval_every_steps=None evaluates only once, after the last step; set "
                "eval_every_steps."
            )
        seconds = self.stall_warning_secs
        if seconds is not None and not 0 < seconds < math.inf:
            faults.append(
                f"stall_warning_secs={seconds!r} must be a positive number of seconds, or None "
                "for no warnings."
            )
        return faults

    def logs(self, step: int) -> bool:
        """Returns whether a record is due; the first step's shows the initial loss."""
        return (
            step in (1, self.num_steps) or step % self.log_every_steps == 0 or self.evaluates(step)
        )

    def evaluates(self, step: int) -> bool:
        return step == self.num_steps or bool(
            self.eval_every_steps and step % self.eval_every_steps == 0
        )

    def reports(self, step: int) -> bool:
        """Returns whether a report is due; the report of the last step comes at the end."""
        every = self.report_every_steps
        return every is not None and step % every == 0 and step < self.num_steps


class Batches(Protocol):
    """Batches on the devices; see `train_batches.TrainBatches`."""

    def __next__(self) -> PlacedBatch: ...

    def positions(self) -> DataPositions:
        """Returns the positions after the batches consumed so far, without prefetched ones."""
        ...


class TaskMeasure(Protocol):
    """Metrics of a task; see `evaluation.in_training.TaskMeasure`.

    An `identity` of the examples and of how they are measured is optional; values of different
    ones are not compared.
    """

    name: str

    def measure(self, model: nnx.Module) -> dict[str, float]: ...


Estimate = Callable[[nnx.Module], Mapping[str, jax.Array]]
"""Re-estimates statistics of a model, by name, such as the means of batch normalisation."""


FirstModel = Callable[[nnx.Module], nnx.Module]
"""Returns the model that a new run begins with, from its initial one."""


class Measures(NamedTuple):
    """What a run measures of its model.

    Attributes:
        validation: the loss on evaluation data; None without such data.
        tasks: tasks whose metrics each evaluation includes.
        estimate: re-estimates statistics of the model before each evaluation; None for models
            without such statistics.
        report: returns a text about the model to show; None shows nothing.
    """

    validation: Validation | None = None
    tasks: Sequence[TaskMeasure] = ()
    estimate: Estimate | None = None
    report: Callable[[nnx.Module], str] | None = None


class _Pending(NamedTuple):
    """A dispatched step whose metrics have not been read yet."""

    step: int
    metrics: dict[str, jax.Array]
    num_tokens: int
    data_wait: float


class Loop:
    """A training run in progress.

    Attributes:
        step: number of updates made.
        last_record: the last record logged; None before the first.
    """

    def __init__(
        self,
        plan: Plan,
        intervals: Intervals,
        *,
        log: run_log.RunLog,
        checkpointer: Checkpointer,
        measures: Measures,
        watchdog: Watchdog,
        restored: Restored | None,
        first_model: FirstModel | None = None,
    ):
        self._plan = plan
        self._intervals = intervals
        self._log = log
        self._checkpointer = checkpointer
        self._validation, self._task_measures, self._estimate, self._report = measures
        self._meter = run_log.Meter(
            peak_flops=compilation.peak_flops(plan.mesh.devices.flatten().tolist()),
            state=restored.progress if restored else None,
        )
        self._watchdog = watchdog
        self._state = self._first_state(first_model) if restored is None else restored.state
        if self._state.spikes is not None and restored is not None:
            memory = SpikeMemory.new(restored.progress.get("spikes"))
            placed = jax.device_put(memory, plan.shardings.spikes)
            self._state = dataclasses.replace(self._state, spikes=placed)
        self.step = restored.step if restored else 0
        # The state may come from another run.
        saved = reading.steps_in(checkpointer.directory) if self.step else []
        self._saved_step = self.step if self.step in saved else 0
        self._is_saved = True
        # Runs of versions that did not note it are taken to be evaluated.
        progress = restored.progress if restored else {}
        self._measured_step = progress.get("measured_step", self.step)
        self._compiled: compilation.CompiledStep | None = None
        self._pending: _Pending | None = None
        self._machine: tuple[int, dict[str, Any]] | None = None  # Until a step has been made on it.
        self._last_value: tuple[int, float, str] | None = None  # step, value, evaluation
        self._missing_metric = ""
        self._patience = Patience(
            checkpointer.config,
            intervals.early_stop_evaluations,
            state=progress.get("patience"),
        )
        self.last_record: dict[str, float] | None = None

    @property
    def model(self) -> nnx.Module:
        """The model with its current parameters."""
        return self._state.model

    @property
    def best(self) -> tuple[int, float] | None:
        """The best step and its value of the best metric; None before the first finite one."""
        value = self._patience.best_value
        return (self._patience.best_step, value) if math.isfinite(value) else None

    @property
    def is_complete(self) -> bool:
        """Whether all updates are made, recorded and evaluated."""
        is_made = self.step >= self._intervals.num_steps
        return is_made and not self._meter.num_steps and not self._lacks_evaluation()

    def run(
        self,
        batches: Batches,
        interruption: Interruption,
        *,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the remaining updates, until `num_steps`, the end of the data or an early stop.

        Args:
            batches: the training batches.
            interruption: tells when to stop on request.
            before_first: called before the first update; not called if no update is left, so that
                such a call leaves the settings of the run unchanged.

        Raises:
            TrainingError: a step was not finite.
            Interrupted: a stop was requested; the state is saved.
        """
        if self._meter.num_steps and self._measures(self.step):
            # The run was interrupted before the end of this evaluation.
            self._record(batches, interruption)
            self._save(batches)
            self._check_best_metric()
        while self.step < self._intervals.num_steps and not self._patience.is_exhausted:
            requested_at = time.perf_counter()
            try:
                phase = f"reading the batch of step {self.step + 1}"
                with self._watchdog.phase(phase), stages.stage("data"):
                    batch = next(batches)
            except StopIteration:
                of = f"step {self.step} of {self._intervals.num_steps}"
                self._log.message(f"the training data ends after {of}")
                break
            except Exception:
                self._save_after_failure(phase, batches)
                raise
            waited = max(0.0, time.perf_counter() - requested_at)
            if self._compiled is None:
                before_first()
                waited = 0.0  # The time of training begins after it.
            metrics = self._update(batch)
            self._read_pending()
            self._pending = _Pending(self.step, metrics, batch.num_tokens, waited)
            if interruption.requested(self.step):
                self._save_whole(batches)  # Later, a signal would end the process at once.
                raise interruption.error(self.step)
            if self._pauses():
                self._pause(batches, interruption)
        self._end(batches, interruption)
        if self._patience.is_exhausted:
            self._log.message(self._patience.text())

    def _first_state(self, first_model: FirstModel | None) -> TrainState:
        state = self._plan.init_state()
        return state.starting_with(first_model(state.model)) if first_model else state

    def _update(self, batch: PlacedBatch) -> dict[str, jax.Array]:
        if self._compiled is None:
            self._compiled = self._compile(batch)
            self._meter.start()
        self._state, metrics = self._compiled.call(self._state, batch.arrays)
        self.step += 1
        self._is_saved = False
        return metrics

    def _compile(self, batch: PlacedBatch) -> compilation.CompiledStep:
        self._log.status("compiling the training step")
        with self._watchdog.phase("compiling the training step"):
            compiled = self._plan.compile_train_step(self._state, batch.arrays)
        self._meter.flops_per_step = compiled.flops
        did = "loaded the compiled" if compiled.was_kept else "compiled the"
        facts = [f"{did} training step in {amounts.duration(compiled.seconds)}"]
        if compiled.flops:
            facts.append(f"{amounts.short_number(compiled.flops, 'FLOP')} per step")
        if compiled.temporary_bytes:
            memory = amounts.short_number(compiled.temporary_bytes, "B")
            facts.append(f"{memory} of temporary memory per device")
        self._log.message(", ".join(facts))
        self._machine = (self.step, self._costs(compiled, batch))
        self._log.machine(*self._machine)
        return compiled

    def _costs(self, compiled: compilation.CompiledStep, batch: PlacedBatch) -> dict[str, Any]:
        """Returns where the steps are made, and what one takes."""
        flops, tokens = compiled.flops, batch.num_tokens
        return machine.describe() | {
            "convt5": convt5.__version__,
            "parameters": self._plan.num_parameters(),
            "flops_per_step": flops,
            "flops_per_token": flops / tokens if flops and tokens else None,
        }

    def _read_pending(self, *, is_last: bool = False) -> None:
        """Waits for the pending step and collects its metrics; `_end` writes those of the last."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._watchdog.phase(f"computing step {pending.step}"):
            metrics = jax.device_get(pending.metrics)
        self._note_start()
        if not metrics[ALL_FINITE]:
            raise self._nonfinite(pending.step, metrics)
        shown = {name: float(value) for name, value in metrics.items() if name not in _NOT_LOGGED}
        self._meter.add_step(
            shown,
            tokens=pending.num_tokens,
            data_wait=pending.data_wait,
        )
        self._log.step(pending.step, shown)
        if is_last or self._measures(pending.step):
            return
        if self._intervals.logs(pending.step):
            self._write(pending.step, self._meter.take())

    def _note_start(self) -> None:
        """Adds the seconds of the start to the note about the machine, after the first step."""
        if self._machine is not None:
            (step, costs), self._machine = self._machine, None
            seconds = {f"start_{name}_seconds": s for name, s in stages.spent().items()}
            self._log.machine(step, costs | seconds)

    def _pauses(self) -> bool:
        """Returns whether something is due after this step that does not count as training."""
        return (
            self._intervals.evaluates(self.step)
            or self._checkpointer.is_due(self.step)
            or self._intervals.reports(self.step)
        )

    def _pause(self, batches: Batches, interruption: Interruption) -> None:
        """Evaluates, saves and reports if due; the time does not count as training."""
        self._read_pending()
        self._meter.stop()
        if self._measures(self.step):
            self._record(batches, interruption)
        if self._checkpointer.is_due(self.step) or self._is_best_so_far or self._missing_metric:
            self._save(batches)
        self._check_best_metric()
        if self._report is not None and self._intervals.reports(self.step):
            self._log.status("sampling")
            phase = f"sampling after step {self.step}"
            with self._losing_no_step(phase, batches, interruption):
                self._log.sample(self.step, f"step {self.step}\n{self._report(self.model)}")
        self._meter.start()

    def _end(self, batches: Batches, interruption: Interruption) -> None:
        """Evaluates and saves after the last step, which may be where the data ends."""
        self._read_pending(is_last=True)
        self._meter.stop()
        if self._meter.num_steps or self._lacks_evaluation():
            self._record(batches, interruption)
        self._save(batches)
        self._complete()
        self._check_best_metric()

    @contextlib.contextmanager
    def _losing_no_step(
        self, phase: str, batches: Batches, interruption: Interruption
    ) -> Iterator[None]:
        """Context of what changes no parameter: saves all steps if it fails, or a stop comes."""
        try:
            with self._watchdog.phase(phase), interruption.at_once():
                yield
        except StopAtOnce:
            self._save_whole(batches)
            raise interruption.error(self.step) from None
        except Exception:
            self._save_after_failure(phase, batches)
            raise

    def _save_after_failure(self, phase: str, batches: Batches) -> None:
        """Saves the steps made, as far as possible; the failure is for the caller to raise.

        All processes save together. They can if all have failed in the same phase, as with an
        error in a metric; otherwise the others still compute.
        """
        if self._is_saved:
            return
        resumes = f"after step {self._saved_step}" if self._saved_step else "from its start"
        try:
            self._checkpointer.wait_for_failures(phase)
            self._save_whole(batches)
        except Exception as error:
            warnings.warn(
                f"step {self.step} could not be saved ({reading.first_line(error)}); the same "
                f"command resumes {resumes}",
                stacklevel=2,
            )
        else:
            self._log.message(f"step {self.step} is saved; the same command resumes there")

    def _save_whole(self, batches: Batches) -> None:
        """Saves all steps made, completely on disk."""
        self._read_pending()
        self._save(batches)
        self._complete()

    def _complete(self) -> None:
        with self._watchdog.phase(f"completing the checkpoint of step {self.step}"):
            self._checkpointer.wait()

    def _measures(self, step: int) -> bool:
        return self._has_measures and self._intervals.evaluates(step)

    def _lacks_evaluation(self) -> bool:
        """Returns whether the current model can be evaluated and has not been."""
        return self._has_measures and self._measured_step != self.step

    @property
    def _has_measures(self) -> bool:
        return self._validation is not None or bool(self._task_measures)

    def _record(self, batches: Batches, interruption: Interruption) -> None:
        """Writes the record of this step, with validation metrics if there is evaluation data."""
        self._log.status("evaluating")
        phase = f"evaluating after step {self.step}"
        with self._losing_no_step(phase, batches, interruption):
            measured = self._measure_all()
        record = self._meter.take() | measured
        self._measured_step = self.step
        # The checkpoint of this step lacks the value and the re-estimated statistics.
        self._is_saved = False
        self._write(self.step, record)
        metric = self._checkpointer.config.best_metric
        if metric in record:
            self._last_value = (self.step, record[metric], self._evaluation(metric))
            if changed := self._patience.add(*self._last_value):
                self._log.message(changed)
        elif self._measures(self.step):
            self._missing_metric = (
                f"{self._checkpointer.config.unmeasured(record)} The {self.step} steps so far "
                "are saved; the corrected command resumes from there."
            )

    def _check_best_metric(self) -> None:
        """Raises `UserError` if an evaluation lacked the best metric, once the state is saved."""
        if self._missing_metric:
            self._complete()
            raise errors.UserError(self._missing_metric)

    @property
    def _is_best_so_far(self) -> bool:
        """Whether early stopping is on and this step is the best so far."""
        stops_early = self._intervals.early_stop_evaluations is not None
        return stops_early and self._patience.best_step == self.step

    def _measure_all(self) -> dict[str, float]:
        """Returns the metrics of the current model and, under `ema/`, of its average."""
        if self._estimate is not None:
            self._state = self._state.with_estimated(self._estimate)
        metrics = self._measured(self._state.model)
        if self._state.ema is not None:
            metrics |= {f"ema/{k}": v for k, v in self._measured(self._state.ema).items()}
        return metrics

    def _measured(self, model: nnx.Module) -> dict[str, float]:
        """Returns the validation and task metrics of a model."""
        return {
            f"{name}/{metric}": value
            for name, measure in self._measures_by_name.items()
            for metric, value in measure.measure(model).items()
        }

    def _evaluation(self, metric: str) -> str:
        """Returns what identifies the examples of a metric, and how they are measured."""
        name = metric.removeprefix("ema/").partition("/")[0]
        return getattr(self._measures_by_name.get(name), "identity", "")

    @property
    def _measures_by_name(self) -> dict[str, Any]:
        validation = {} if self._validation is None else {"validation": self._validation}
        return validation | {task.name: task for task in self._task_measures}

    def _write(self, step: int, record: dict[str, float]) -> None:
        self._log.record(step, record)
        self.last_record = record

    def _save(self, batches: Batches) -> None:
        if self._is_saved:
            return
        self._log.sync()
        measured, value, evaluation = self._last_value or (None, None, "")
        progress = self._meter.state() | {
            "patience": self._patience.state(),
            "measured_step": self._measured_step,
            "batch_size": self._plan.batch_size,
        }
        if self._state.spikes is not None:
            progress["spikes"] = self._state.spikes.state()
        with self._watchdog.phase(f"saving the checkpoint of step {self.step}"):
            self._checkpointer.save(
                self.step,
                self._state,
                data=batches.positions(),
                progress=progress,
                best_value=value if measured == self.step else None,
                evaluation=evaluation,
            )
        self._saved_step = self.step
        self._is_saved = True

    def _nonfinite(self, step: int, metrics: dict[str, Any]) -> errors.TrainingError:
        what = describe_nonfinite(metrics, self._plan.abstract.model)
        kept = (
            f"the last good checkpoint is that of step {self._saved_step}, in "
            f"{self._checkpointer.directory}"
            if self._saved_step
            else "no checkpoint was written before"
        )
        return errors.TrainingError(
            f"training stopped at step {step}: {what} is not finite (loss {metrics['loss']}); "
            f"{kept}. Lower the learning rate, warm up longer or clip gradients; if it happens at "
            "the first steps, check the data and try dtype='float32'."
        )
