"""The result of a run: its final figures, which the trainer returns, shows and saves."""

import dataclasses
import json
from collections.abc import Collection

import jax
from etils import epath

from convt5.checkpoints.checkpoint import CheckpointConfig
from convt5.runtime import amounts, atomic_files, foreign_files, metric_names
from convt5.training import run_directory, run_log
from convt5.training.loop import Loop
from convt5.training.plan import Plan
from convt5.training.validation import Validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run; also written to `summary.json`.

    Attributes:
        run_dir: the run directory.
        step: number of updates made.
        num_parameters: number of parameters of the model.
        train_seconds: time spent in training steps, without compilation and evaluation.
        train_loss: mean cross-entropy over the steps of the last record.
        validation_loss: cross-entropy after the last step; None without evaluation data.
        target_unigram_entropy: entropy of the target tokens of the evaluation data, in nats per
            token: the lowest loss of a model without context. None without target tokens.
        metric: the metric that selects the best checkpoint, such as "trec6/accuracy".
        metric_value, metric_step: its last value, None if never measured, and the step of that.
        best_value, best_step: its best value, and the step of that.
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
    metric_step: int | None = None
    best_value: float | None = None
    best_step: int | None = None


def describe(result: Result, *, saved: Collection[int]) -> str:
    """Returns the final lines that a run prints; `saved` holds the steps of its checkpoints."""
    lines = [
        f"{result.step} steps done"
        + (
            f" in {amounts.duration(result.train_seconds)} of training"
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
        line = (
            f"  {metric_names.display_name(metric):<15}  {metric_names.format_value(metric, value)}"
        )
        if metric == result.metric and result.best_value is not None:
            best = metric_names.format_value(metric, result.best_value)
            line += f"  best {best} after step {result.best_step}"
            line += "" if result.best_step in saved else ", which has no checkpoint"
        lines.append(line)
    if result.target_unigram_entropy is not None:
        lines.append(
            f"  unigram entropy  {result.target_unigram_entropy:.4f}  of the validation targets: "
            "the least loss of a model that ignores the context"
        )
    return "\n".join(lines)


def write(
    folder: epath.Path,
    plan: Plan,
    loop: Loop,
    validation: Validation | None,
    checkpoint: CheckpointConfig,
) -> Result:
    """Returns the result of the run in `folder`, from its records; writes `summary.json`."""
    path = folder / run_directory.SUMMARY_FILE
    records = _records(folder)
    # An evaluation after the end of the data is logged at the same step as the last losses.
    record = (records[-1] if records else {}) | (loop.last_record or {})
    metric = checkpoint.best_metric
    measured = {int(r["step"]): r[metric] for r in records if metric in r}
    last = max(measured, default=None)
    best_step, best_value = loop.best or (None, None)
    entropy = validation.target_unigram_entropy() if validation else None
    if entropy is None and path.exists():
        # The file may be cut short by a kill, or be another file; it is rewritten below.
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
        metric_value=None if last is None else measured[last],
        metric_step=last,
        best_value=best_value,
        best_step=best_step,
    )
    if jax.process_index() == 0:
        with run_directory.writing(folder):
            values = {
                name: run_log.json_number(value) if isinstance(value, float) else value
                for name, value in dataclasses.asdict(result).items()
            }
            atomic_files.replace_text(path, json.dumps(values, indent=2) + "\n")
    return result


def _records(folder: epath.Path) -> list[dict[str, float]]:
    # NaN and infinities are stored as text.
    return [
        {name: float(value) for name, value in record.items()}
        for record in run_log.read_metrics(folder)
    ]
