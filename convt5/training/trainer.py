"""Training from a description: `train` is what gin binds and `python -m convt5.train` calls.

A run lives in its run directory. The same call on the same directory continues it, with the same
batches and the same random numbers as if it had never stopped.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from convt5 import errors
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions, Restored
from convt5.checkpoints.record import describe_config
from convt5.data import counts
from convt5.data.data_shards import own_rows
from convt5.data.protocols import DataConfig
from convt5.modeling import sharding
from convt5.modeling.placement import TEXT_RULES
from convt5.runtime import determinism, foreign_files
from convt5.text import task_format, vocabulary_files
from convt5.training import compilation, metric_names, run_directory, run_log
from convt5.training.averaging import Averaging
from convt5.training.initialization import InitFrom
from convt5.training.interruption import Interruption
from convt5.training.loop import Estimate, Intervals, Loop, TaskMeasure
from convt5.training.optimizer import OptimizerConfig
from convt5.training.plan import Plan, make_plan, row_lengths
from convt5.training.schedule import Schedule
from convt5.training.spikes import SkipSpikes
from convt5.training.train_batches import TrainBatches
from convt5.training.train_state import ModelConfig
from convt5.training.train_step import Loss
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
class Result:
    """How a run ended; also written to `summary.json`.

    Attributes:
        run_dir: where everything lies.
        step: updates made.
        num_parameters: of the model.
        train_seconds: time spent in training steps, without compiling and evaluating.
        train_loss: cross-entropy, the mean over the steps of the last record.
        validation_loss: cross-entropy after the last step; None without evaluation data.
        target_unigram_entropy: of the target tokens of the evaluation data, in nats per token: no
            model that ignores its context has a lower loss on them. None without target tokens.
        metric: the name of what the best checkpoint is chosen by, such as "trec6/accuracy".
        metric_value: of it, when last measured; None where it never was.
        best_value, best_step: the best of its evaluations, and after how many updates.
    """

    run_dir: str
    step: int
    num_parameters: int
    train_seconds: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    target_unigram_entropy: float | None = None
    metric: str | None = None
    metric_value: float | None = None
    best_value: float | None = None
    best_step: int | None = None


def train(
    *,
    run_dir: str,
    model: ModelConfig,
    loss: Loss,
    train_data: DataConfig,
    optimizer: OptimizerConfig,
    schedule: Schedule,
    num_steps: int,
    mesh: sharding.MeshConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    eval_data: DataConfig | None = None,
    eval_every_steps: int | None = None,
    eval_num_batches: int | None = None,
    task_evals: Sequence[TaskEval] = (),
    statistics: StatisticsEstimate | None = None,
    early_stop_evaluations: int | None = None,
    data_shards: int | None = None,
    init_from: InitFrom | None = None,
    log_every_steps: int = 50,
    grad_accum_steps: int = 1,
    ema: Averaging | None = None,
    skip_spikes: SkipSpikes | None = None,
    frozen: Sequence[str] = (),
    stall_warning_secs: float | None = 600.0,
    seed: int = 0,
    sharding_rules: Sequence[sharding.Rule] = TEXT_RULES,
    wandb_project: str | None = None,
    report: Callable[[nnx.Module, DataConfig], str] | None = None,
    config_text: str | None = None,
) -> Result:
    """Trains a model, or continues to, until it has made `num_steps` updates.

    Args:
        run_dir: folder of the run. If it holds a checkpoint the run continues from there.
        model: description of the model, with a method `build(key)`.
        loss: what is minimised, such as `losses.TextLoss`.
        train_data: the batches; `batch_size` is over all devices and hosts.
        optimizer: how gradients become updates.
        schedule: the learning rate of each step.
        num_steps: updates in total, those before an interruption included.
        mesh: how devices share the work; by default all split the batch.
        checkpoint: when to save and what to keep.
        eval_data: batches for the validation loss; they must end, or set `eval_num_batches`.
        eval_every_steps: steps between evaluations; None evaluates only after the last step.
        eval_num_batches: batches of one evaluation; None takes all.
        task_evals: tasks whose own metrics each evaluation measures as well, such as
            `evaluation.TaskEval`.
        statistics: measures anew, before each evaluation, what the model keeps of batches seen in
            training, such as running means; the model that is saved then has these.
        early_stop_evaluations: ends the run after so many evaluations without a better
            `checkpoint.best_metric`; None for never. Such a run saves each step that is the best
            so far, whatever `checkpoint.every_steps` is.
        data_shards: how many shards train_data is read in; each gives an equal block of every
            batch. Batches depend on this number alone, however many hosts read them. None takes
            that of the run's first start, when it was the number of its hosts.
        init_from: parameters, or all of the training state, that a new run takes over from
            another; without effect on one that continues.
        log_every_steps: steps between records.
        grad_accum_steps: microbatches that each batch is cut into, to save memory.
        ema: keeps an average of the model over its updates, such as `averaging.EMA`, saved with it
            and evaluated as it is: each metric of `validation/` and of tasks is there again under
            `ema/`. None keeps none.
        skip_spikes: leaves out updates whose loss or gradient stands out, and counts them in the
            metric `skipped_updates`; None makes every update.
        frozen: regular expressions searched in the names of parameters: those found stay as they
            are, and need neither gradients nor memory of the optimizer.
        stall_warning_secs: when a batch, a step, an evaluation or a checkpoint takes longer, the
            stack of every thread is shown, again after twice the time, and so on; None for never.
        seed: of the initial parameters and of dropout.
        sharding_rules: table of parameter names and mesh axes.
        wandb_project: also logs to this project on wandb.ai.
        report: called with the final model and `eval_data` (or `train_data`) to say more at the
            end, such as `samples.SpanSamples`.
        config_text: the settings, kept beside the checkpoints.

    Raises:
        UserError: a setting is wrong, or the checkpoint does not fit.
        TrainingError: the loss is no longer finite; `Interrupted`: SIGTERM, Ctrl-C or SIGHUP.
    """
    intervals = Intervals(
        num_steps=num_steps,
        log_every_steps=log_every_steps,
        eval_every_steps=eval_every_steps,
        early_stop_evaluations=early_stop_evaluations,
        stall_warning_secs=stall_warning_secs,
    )
    run_directory.check(run_dir)
    check_model(model, train_data, eval_data, loss, report)
    compilation.enable_persistent_cache()
    plan = make_plan(
        model=model,
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        batch_size=train_data.batch_size,
        eval_data=eval_data,
        data_shards=data_shards,
        lengths=row_lengths(train_data=train_data, eval_data=eval_data),
        mesh=mesh,
        grad_accum_steps=grad_accum_steps,
        ema=ema,
        skip_spikes=skip_spikes,
        frozen=frozen,
        seed=seed,
        sharding_rules=sharding_rules,
    )
    checkpoint = checkpoint or CheckpointConfig()
    check_measures(
        checkpoint, eval_data, eval_num_batches, task_evals, intervals, has_ema=ema is not None
    )
    validation = None
    if eval_data is not None:
        validation = Validation(
            eval_data, plan.eval_step, plan.batch_sharding, num_batches=eval_num_batches
        )
    measures = [task.build(model, plan.mesh) for task in task_evals]
    text = kept_text(train_data, eval_data)
    formats = task_format.of_data(train_data)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(stall_warning_secs))
        folder = stack.enter_context(run_directory.hold(run_dir))
        checkpointer = Checkpointer(folder / "checkpoints", checkpoint, model_config=model)
        stack.enter_context(contextlib.closing(checkpointer))
        rows = own_rows(plan.batch_sharding, train_data.batch_size)
        with watchdog.phase("reading the last checkpoint"):
            restored = checkpointer.restore(plan.abstract, shards_read=rows.shards)
        source = None
        if restored is None and init_from is not None:
            source = str(init_from.path)
            restored = _taken_over(init_from, plan, text, num_steps=num_steps)
        first_step = restored.step if restored else 0
        log = run_log.open_run_log(
            folder,
            num_steps=num_steps,
            last_step=first_step,
            is_first_process=jax.process_index() == 0,
            metric=checkpoint.best_metric,
        )
        stack.enter_context(contextlib.closing(log))
        _announce(log, plan, folder, step=first_step, num_steps=num_steps, source=source)
        loop = Loop(
            plan,
            intervals,
            log=log,
            checkpointer=checkpointer,
            validation=validation,
            restored=restored,
            init_from=init_from,
            task_measures=measures,
            estimate=statistics.build(plan) if statistics else None,
            watchdog=watchdog,
        )
        batches = None
        if not loop.is_complete:
            _check_batch_size(restored, plan.batch_size)
            if validation is not None:
                with watchdog.phase("reading the first evaluation data"):
                    validation.prepare()
                _check_validation_metric(checkpoint, validation, plan)
            with watchdog.phase("opening the training data"):
                batches = TrainBatches(
                    train_data,
                    plan,
                    num_shards=data_shards,
                    positions=restored.data if restored else DataPositions(),
                )
            stack.enter_context(contextlib.closing(batches))
            if jax.process_index() == 0:
                with watchdog.phase("measuring the data"):
                    _tell_of_data(log, train_data, measures)
        log.open_files(
            last_step=first_step,
            wandb_project=wandb_project,
            config={"model": describe_config(model)},
        )
        if batches is not None:
            write_settings = functools.partial(
                _write_settings, log, folder, text, formats, config_text, step=first_step
            )
            hosts = checkpointer if jax.process_count() > 1 else None
            with Interruption(hosts) as interruption:
                loop.run(batches, interruption, before_first=write_settings)
        result = _result(folder, plan, loop, validation, checkpoint)
        log.message(describe(result))
        if batches is not None:
            _tell_of_reading(log, batches, validation)
        if report is not None:
            log.message(f"\n{report(loop.model, eval_data or train_data)}")
        return result


def _taken_over(
    init_from: InitFrom, plan: Plan, text: vocabulary_files.KeptText | None, *, num_steps: int
) -> Restored | None:
    """Returns the training state of another run that a new one goes on with; None for none."""
    init_from.check_vocabulary(text)
    if not init_from.continue_training:
        return None
    init_from.check_num_steps(num_steps)
    return init_from.state(plan.abstract, model_config=plan.model)


def _write_settings(
    log: run_log.RunLog,
    folder: epath.Path,
    text: vocabulary_files.KeptText | None,
    formats: Sequence[task_format.TaskFormat],
    config_text: str | None,
    *,
    step: int,
) -> None:
    """Writes what a run keeps of its settings, text and tasks, at its first update."""
    if changed := run_directory.write_config(folder, config_text, step=step):
        log.message(changed)
    if text is not None:
        run_directory.write_vocabularies(folder, text)
    if formats:
        run_directory.write_task(folder, formats)


def kept_text(train_data: Any, eval_data: Any) -> vocabulary_files.KeptText | None:
    """Returns what the ids of a run stand for, with the lengths it is evaluated at."""
    text = vocabulary_files.of_data(train_data)
    if text is None:
        return None
    data = eval_data or train_data
    lengths = {name: getattr(data, name, None) for name in ("encoder_length", "decoder_length")}
    return text._replace(**lengths)


def check_model(model: ModelConfig, *parts: Any) -> None:
    """Raises `UserError` if data, loss or report do not fit the model, as far as they can tell."""
    for part in parts:
        check = getattr(part, "check_model", None)
        if check is not None:
            check(model)


def describe(result: Result) -> str:
    """Returns the last lines of a run."""
    lines = [
        f"{result.step} steps done"
        + (
            f" in {run_log.duration(result.train_seconds)} of training"
            if result.train_seconds
            else ""
        ),
        f"  run directory    {result.run_dir}",
    ]
    figures = {"train/loss": result.train_loss, "validation/loss": result.validation_loss}
    if result.metric is not None:
        figures[result.metric] = result.metric_value
    for metric, value in figures.items():
        if value is None:
            continue
        line = f"  {metric_names.words(metric):<15}  {metric_names.shown(metric, value)}"
        if metric == result.metric and result.best_value is not None:
            best = metric_names.shown(metric, result.best_value)
            line += f"  best {best} after step {result.best_step}"
        lines.append(line)
    if result.target_unigram_entropy is not None:
        lines.append(
            f"  unigram entropy  {result.target_unigram_entropy:.4f}  of the validation targets: "
            "the least loss of a model that ignores the context"
        )
    return "\n".join(lines)


def check_measures(
    checkpoint: CheckpointConfig,
    eval_data: DataConfig | None,
    eval_num_batches: int | None,
    task_evals: Sequence[TaskEval],
    intervals: Intervals,
    *,
    has_ema: bool,
) -> None:
    """Raises `UserError` for evaluations that never end, or lack what a run waits for.

    Arguments are those of `train`.
    """
    check_num_batches(eval_num_batches, eval_data)
    measured = [*["validation"] * (eval_data is not None), *(task.name for task in task_evals)]
    metric = checkpoint.best_metric.removeprefix("ema/" if has_ema else "")
    if measured and metric.partition("/")[0] not in measured:
        raise errors.UserError(
            f"best_metric={checkpoint.best_metric!r} is never measured; set checkpoint."
            f"CheckpointConfig.best_metric to a metric of {' or '.join(measured)}, such as "
            f"{measured[0]}/loss."
        )
    if intervals.early_stop_evaluations and not measured:
        raise errors.UserError(
            f"early_stop_evaluations={intervals.early_stop_evaluations} waits for "
            f"{checkpoint.best_metric!r}, but nothing is evaluated; set eval_data or task_evals."
        )


def _check_batch_size(restored: Restored | None, batch_size: int) -> None:
    """Raises `UserError` for a run that would go on with other batches, before data is read."""
    before = restored.progress.get("batch_size", batch_size) if restored else batch_size
    if before != batch_size:
        raise errors.UserError(
            f"batch_size={batch_size} of train_data differs from the {before} of the checkpoint, "
            "whose position in the data counts such batches; set it back, or start a new run_dir "
            "with init_from."
        )


def _check_validation_metric(
    checkpoint: CheckpointConfig, validation: Validation, plan: Plan
) -> None:
    """Raises `UserError` for a best metric that no evaluation will have, before the first step."""
    half, _, metric = checkpoint.best_metric.removeprefix("ema/").partition("/")
    if half != "validation" or metric == "loss":
        return  # Names of task metrics are known once they are measured; a loss is always there.
    names = validation.metric_names(plan.abstract.model)
    if metric not in names:
        raise errors.UserError(checkpoint.unmeasured([f"validation/{name}" for name in names]))


def _tell_of_data(log: run_log.RunLog, data: DataConfig, measures: Sequence[TaskMeasure]) -> None:
    """Shows the block about the data, as far as it and the measures can say something of it."""
    for part in (data, *measures):
        describe_part = getattr(part, "describe", None)
        if describe_part is not None:
            log.message(describe_part())


def _tell_of_reading(
    log: run_log.RunLog, batches: TrainBatches, validation: Validation | None
) -> None:
    """Shows what was counted of the data where it was read; all hosts must call."""
    parts = [("read in training", batches.counts())]
    if validation is not None:
        parts.append(("read in an evaluation", validation.counts()))
    for title, found in parts:
        if found:
            log.message(counts.describe(title, found))


def _announce(
    log: run_log.RunLog,
    plan: Plan,
    folder: epath.Path,
    *,
    step: int,
    num_steps: int,
    source: str | None,
) -> None:
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1)
    kind = plan.mesh.devices.flat[0].device_kind
    trained = f" ({run_log.short_number(plan.num_trained())} trained)" if plan.frozen else ""
    log.message(
        f"{run_log.short_number(plan.num_parameters())} parameters{trained} on "
        f"{plan.mesh.devices.size} x {kind}{f' ({mesh})' if mesh else ''}, run directory {folder}"
    )
    repeats = determinism.describe(plan.mesh.devices.flat[0].platform)
    if repeats:
        log.message(repeats)
    if step:
        left = f"{num_steps - step} to go" if step < num_steps else "none are left to do"
        of = f" of {source}, with other data from its start" if source else ""
        log.message(
            f"continues from the checkpoint of step {step}{of}; of {num_steps} steps {left}"
        )


def _result(
    folder: epath.Path,
    plan: Plan,
    loop: Loop,
    validation: Validation | None,
    checkpoint: CheckpointConfig,
) -> Result:
    """Returns how the run ended, from its records; writes `summary.json`."""
    path = folder / "summary.json"
    records = _records(folder)
    # An evaluation after the end of the data is recorded beside the losses of its step.
    record = (records[-1] if records else {}) | (loop.last_record or {})
    metric = checkpoint.best_metric
    measured = {int(r["step"]): r[metric] for r in records if metric in r}
    ranked = checkpoint.ranked({s: v for s, v in measured.items() if math.isfinite(v)})
    entropy = validation.target_unigram_entropy() if validation else None
    if entropy is None and path.exists():
        # Cut short by a kill, or something else: it is written anew below.
        entropy = (foreign_files.find_json(path) or {}).get("target_unigram_entropy")
    result = Result(
        run_dir=str(folder),
        step=loop.step,
        num_parameters=plan.num_parameters(),
        train_seconds=record.get("train_seconds"),
        train_loss=record.get("loss"),
        validation_loss=record.get("validation/loss"),
        target_unigram_entropy=entropy,
        metric=metric if measured else None,
        metric_value=measured[max(measured)] if measured else None,
        best_value=measured[ranked[0]] if ranked else None,
        best_step=ranked[0] if ranked else None,
    )
    if jax.process_index() == 0:
        with run_directory.writing(folder):
            values = {
                name: run_log.json_number(value) if isinstance(value, float) else value
                for name, value in dataclasses.asdict(result).items()
            }
            run_directory.replace_text(path, json.dumps(values, indent=2) + "\n")
    return result


def _records(folder: epath.Path) -> list[dict[str, float]]:
    # NaN and infinities are texts there.
    return [
        {name: float(value) for name, value in record.items()}
        for record in run_log.read_metrics(folder)
    ]
