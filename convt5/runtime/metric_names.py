"""Names and units of metrics: which are better when less, and what earlier runs recorded.

Accuracies are percentages everywhere, as T5's metrics are. Nothing is imported here.
"""

from collections.abc import Mapping
from typing import Any

_LESS = (
    *("loss", "objective", "nll", "entropy", "perplexity", "bits", "error", "errors", "mse", "mae"),
    *("wer", "cer", "distance", "invalid", "skipped", "norm", "seconds", "bytes", "wait"),
)
"""Words in names of metrics of which less is better; of all others, such as em and f1, more."""

OF_TARGETS = ("loss", "perplexity", "bits_per_byte", "objective")
"""Metrics of the targets of a task, beside those of the task's own."""

_SHARES = ("accuracy", "top_5_accuracy")
"""Metrics of batches that earlier runs recorded as shares of 1."""

PERCENT = "percent"
"""Set beside a saved value of a metric since accuracies are percentages."""


def lower_is_better(metric: str) -> bool:
    """Judges by the last part of the name, as tasks can be called anything."""
    name = metric.rsplit("/", 1)[-1]
    return "per_second" not in name and any(part in _LESS for part in name.split("_"))


def shown(metric: str, value: float) -> str:
    """Returns a value for people: four decimals of losses and the like, else four digits."""
    return f"{value:.4f}" if lower_is_better(metric) else f"{value:.4g}"


def words(metric: str) -> str:
    """Returns a name for people: `validation/token_accuracy` is "validation token accuracy"."""
    return metric.replace("/", " ").replace("_", " ")


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record under today's names, whichever version of a run wrote it.

    Those of text and images hold an `objective` beside each `loss`; without it they are of runs
    that called the objective `loss` and gave accuracies as shares of 1. Sums over records change
    alike.
    """
    changed = dict(record)
    for half in ("", "validation/", "ema/validation/"):
        if f"{half}loss" not in record or f"{half}objective" in record:
            continue
        objective = {f"{half}objective": record[f"{half}loss"]}
        if f"{half}cross_entropy" in record:  # Of text.
            changed |= objective | {f"{half}loss": record[f"{half}cross_entropy"]}
            if f"{half}accuracy" in record:
                changed[f"{half}token_accuracy"] = _percent(changed.pop(f"{half}accuracy"))
        elif f"{half}top_5_accuracy" in record:  # Of images.
            changed |= objective
            for name in _SHARES:
                changed[f"{half}{name}"] = _percent(record[f"{half}{name}"])
    return changed


def factor(saved: Mapping[str, Any], metric: str) -> float | None:
    """Returns what a saved value is multiplied by to be one of a metric; None where it is not.

    Args:
        saved: holds the name under "metric", and `PERCENT` where it was written since.
        metric: the name that is wanted.
    """
    name = saved.get("metric", metric)
    half, _, last = metric.rpartition("/")
    if not saved.get(PERCENT) and half in ("validation", "ema/validation"):
        if last == "token_accuracy":
            return 100.0 if name == f"{half}/accuracy" else None
        if last in _SHARES:
            return 100.0 if name == metric else None
    return 1.0 if name == metric else None


def _percent(share: Any) -> Any:
    """What is not finite stands in files as text."""
    return 100 * share if isinstance(share, int | float) else share
