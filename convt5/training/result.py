"""How a run ended: its last figures, as the trainer returns, shows and keeps them."""

import dataclasses
import json
import math

import jax
from etils import epath

from convt5.checkpoints.checkpoint import CheckpointConfig
from convt5.runtime import amounts, foreign_files, metric_names
from convt5.training import run_directory, run_log
from convt5.training.loop import Loop
from convt5.training.plan import Plan
from convt5.training.validation import Validation


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


def describe(result: Result) -> str:
    """Returns the last lines of a run."""
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


def write(
    folder: epath.Path,
    plan: Plan,
    loop: Loop,
    validation: Validation | None,
    checkpoint: CheckpointConfig,
) -> Result:
    """Returns how the run in `folder` ended, from its records; writes `summary.json`."""
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
