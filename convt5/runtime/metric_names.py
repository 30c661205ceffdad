"""Names and units of metrics, which of them are better when lower, and their names in older runs.

All accuracies are percentages, as T5's metrics are. This module imports nothing of convt5.
"""

import re
from collections.abc import Mapping
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_LESS = (
    *("loss", "objective", "nll", "entropy", "perplexity", "bits", "error", "errors", "mse", "mae"),
    *("wer", "cer", "distance", "invalid", "skipped", "norm", "seconds", "bytes", "wait"),
    *("rmse", "ppl", "bpb", "kl", "brier", "ece", "ter", "fid"),
)
"""Words in the names of metrics that are better when lower; others, such as f1, when higher."""

OF_TARGETS = ("loss", "perplexity", "bits_per_byte", "objective")
"""Metrics of a task's targets, beside the task's own metrics."""

_SHARES = ("accuracy", "top_5_accuracy")
"""Batch metrics that older runs recorded as fractions of 1."""

PERCENT = "percent"
"""Key beside a saved metric value, present since accuracies are percentages."""


_PERCENTAGES = ("accuracy", "em", "f1", "match")
"""Words in names of metrics that are percentages."""

TASKS = {
    "ag_news": "AG News",
    "civil_comments": "Civil Comments",
    "cogs": "COGS",
    "imdb": "IMDb",
    "mnli": "MultiNLI",
    "mrpc": "MRPC",
    "rte": "RTE",
    "sentiment140": "Sentiment140",
    "squad": "SQuAD",
    "sst2": "SST-2",
    "trec6": "TREC-6",
    "wiki_toxic": "Wikipedia toxicity",
}
"""Tasks as papers call them."""


def lower_is_better(metric: str) -> bool:
    """Returns whether lower is better, judged by the last part of the metric's name."""
    words = _WORD.findall(metric.rsplit("/", 1)[-1].lower())
    return "per_second" not in "_".join(words) and any(word in _LESS for word in words)


def format_value(metric: str, value: float) -> str:
    """Formats a value for display: losses with four decimals, others with four digits.

    So are losses of which four decimals would show nothing, or dozens of digits.
    """
    is_usual = not value or 1e-3 <= abs(value) < 1e6
    return f"{value:.4f}" if lower_is_better(metric) and is_usual else f"{value:.4g}"


def display_name(metric: str) -> str:
    """Formats a name for display: `validation/token_accuracy` is "validation token accuracy"."""
    return metric.replace("/", " ").replace("_", " ")


def axis(metric: str, *, perfect: float | None = None) -> str:
    """Returns a name with its unit for the axis of a figure: "accuracy on TREC-6, %".

    Args:
        metric: such as "trec6/accuracy".
        perfect: names the error, which is this value minus the metric; None names the metric.
    """
    *places, last = metric.split("/")
    name = display_name(last)
    is_share = any(part in _PERCENTAGES for part in last.split("_"))
    if perfect is not None:
        name = name.replace("accuracy", "error") if "accuracy" in last else f"{perfect:g} - {name}"
    places = [place for place in places if place != "task"]
    before = [place for place in places if place in ("ema", "validation")]
    tasks = [TASKS.get(place, display_name(place)) for place in places if place not in before]
    said = " ".join(["averaged" if place == "ema" else place for place in before] + [name])
    said += f" on {', '.join(tasks)}" if tasks else ""
    if is_share and perfect in (None, 100.0):
        return f"{said}, %"
    return f"{said}, nats" if last in ("loss", "objective") else said


def current(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record under the current names, whichever version of a run wrote it.

    Current records of text and images have an `objective` beside each `loss`. Records without it
    come from runs that called the objective `loss` and gave accuracies as fractions of 1. Also
    converts sums over records.
    """
    converted = dict(record)
    for half in ("", "validation/", "ema/validation/"):
        if f"{half}loss" not in record or f"{half}objective" in record:
            continue
        objective = {f"{half}objective": record[f"{half}loss"]}
        if f"{half}cross_entropy" in record:  # Of text.
            converted |= objective | {f"{half}loss": record[f"{half}cross_entropy"]}
            if f"{half}accuracy" in record:
                converted[f"{half}token_accuracy"] = _percent(converted.pop(f"{half}accuracy"))
        elif f"{half}top_5_accuracy" in record:  # Of images.
            converted |= objective
            for name in _SHARES:
                if f"{half}{name}" in record:
                    converted[f"{half}{name}"] = _percent(record[f"{half}{name}"])
    return converted


def factor(saved: Mapping[str, Any], metric: str) -> float | None:
    """Returns the factor that converts a saved value to a metric, or None if it is another metric.

    Args:
        saved: holds the name under "metric", and `PERCENT` if written by a current version.
        metric: the requested name.
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
    """Converts a fraction to a percentage; non-finite values are stored as text and stay so."""
    return 100 * share if isinstance(share, int | float) else share
