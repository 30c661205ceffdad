"""Compares finished or running runs: a table, a page and a plot of a metric over steps and time.

`python -m convt5.compare RUN_DIR ... --output=DIR` reads the metrics.jsonl of each run directory
and writes `comparison.md`, `comparison.html` and `comparison.png`.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from convt5 import errors
from convt5.configuration import command_line
from convt5.reports import figures, markdown, page, tables
from convt5.reports.tables import Table
from convt5.runtime import atomic_files, foreign_files, metric_names
from convt5.runtime.amounts import PREFIXES, short_number
from convt5.text import vocabulary_files
from convt5.training import run_overview
from convt5.training.run_directory import SUMMARY_FILE
from convt5.training.run_log import METRICS_FILE, read_metrics
from convt5.training.run_overview import CLOCKS

DEFAULT_METRIC = "validation/loss"

_PER_TOKEN = ("loss", "objective", "perplexity", "token_accuracy")
"""Metrics per token, which compare models of one vocabulary only."""

_MOST_SHOWN = 120  # Characters of names side by side in a legend.
_INFINITE = 1e300  # Differences of larger values overflow.

_DESCRIPTION = """\
Compares one metric of several runs against training steps, and against training time or FLOPs.
Writes a table (comparison.md, also printed), a page for the browser (comparison.html, one file
that needs no network: curves to zoom and read off, settings that differ, costs, samples) and a
plot (comparison.png, needs the extra 'plot'). Runs of different vocabularies are ranked by bits per
byte, with a warning."""

_EXAMPLES = """\
examples:
  # compare two runs, named by their directories
  python -m convt5.compare runs/t5_tiny runs/dynamic_tiny --output=comparison

  # name the runs, and compare another metric
  python -m convt5.compare attention=runs/a convolution=runs/b --metric=validation/token_accuracy

exit code:
  0 success, 2 a usage error or a directory that holds no run."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A recorded value of the compared metric.

    Attributes:
        step: the step of the record.
        spent: what training took up to then, by the clock; NaN if not recorded.
        value: the value.
    """

    step: int
    spent: float
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The data of one run.

    Attributes:
        name: the name to show.
        points: values of the compared metric, by step; empty if it was never finite, or not
            recorded yet.
        tokens_per_second: median over the run by wall clock; None if not recorded.
        bits_per_byte: last validation value; None if not recorded.
        diverged: whether the last recorded value is not finite; `points` are those before.
        rank: value that ranks the run where the metric does not compare runs, lower is better;
            None: the last value of the metric.
    """

    name: str
    points: tuple[Point, ...]
    tokens_per_second: float | None
    bits_per_byte: float | None
    diverged: bool = False
    rank: float | None = None

    @property
    def last(self) -> Point | None:
        return self.points[-1] if self.points else None

    @property
    def spent(self) -> float | None:
        """What training took up to the last value; None if not recorded."""
        known = self.last is not None and math.isfinite(self.last.spent)
        return self.last.spent if self.last and known else None

    def at_spent(self, spent: float) -> float | None:
        """Returns the last value for which training took at most so much, or None."""
        return next((p.value for p in reversed(self.points) if p.spent <= spent), None)

    def at_step(self, step: int) -> float | None:
        """Returns the last value within `step` steps, or None."""
        return next((p.value for p in reversed(self.points) if p.step <= step), None)


def main(argv: Sequence[str]) -> None:
    parser = _parser()
    command_line.check_filled(parser, argv, ["output", "metric", "clock", figures.SUFFIX_FLAG.name])
    arguments = parser.parse_args(argv)
    if arguments.plot_suffix != figures.SUFFIX:
        figures.check_suffix(arguments.plot_suffix)
    clock = arguments.clock
    metric = arguments.metric or common_metric(arguments.runs)
    metric, rank, warning = _comparable(arguments.runs, metric, is_asked=bool(arguments.metric))
    runs = read_runs(arguments.runs, metric=metric, clock=clock)
    if rank is not None:
        ranks = read_runs(arguments.runs, metric=rank)
        runs = [
            dataclasses.replace(run, rank=ranked.last.value if ranked.last else math.inf)
            for run, ranked in zip(runs, ranks, strict=True)
        ]
    table = comparison(runs, metric=metric, clock=clock)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    text = markdown.sections([*([Table("", notes=[warning])] if warning else []), table])
    print(text, end="")
    output = arguments.output
    written = [output / "comparison.md", output / "comparison.html"]
    written.append(output / f"comparison{arguments.plot_suffix}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_text(written[0], text)
        page.write(written[1], _page(arguments.runs, table, metric, clock, warning))
        plot(runs, written[2], metric=metric, clock=clock)
    except OSError as error:
        raise errors.UserError(
            f"output={arguments.output} cannot be written ({error.strerror}); give a folder that "
            "can, with --output=DIR."
        ) from error
    print(f"\nwrote {', '.join(map(str, written))}")


def _page(names: Sequence[str], table: Table, metric: str, clock: str, warning: str) -> page.Page:
    """Returns the page of runs, the table of the comparison above the others."""
    overviews = {name: run_overview.read(folder) for name, folder in _name_runs(names)}
    runs = [run_overview.page_run(name, found, clock=clock) for name, found in overviews.items()]
    axes = run_overview.axes(runs)
    return page.Page(
        title=f"{len(runs)} run{'s' * (len(runs) > 1)}: {metric_names.display_name(metric)}",
        runs=runs,
        tables=[
            table._replace(title="Comparison"),
            page.differing({name: found.settings for name, found in overviews.items()}),
            run_overview.costs(overviews),
            run_overview.machines(overviews),
        ],
        metric=metric,
        axes=axes,
        falling=[name for name in axes if metric_names.lower_is_better(name)],
        clock=CLOCKS[clock].name,
        unit=CLOCKS[clock].unit,
        warnings=[warning] if warning else [],
    )


def _comparable(
    names: Sequence[str], metric: str, *, is_asked: bool
) -> tuple[str, str | None, str]:
    """Returns the metric to show, by which other one runs are ranked, and what to warn of.

    Nothing changes where all runs have one vocabulary, or the metric counts no tokens.
    """
    folders = [folder for _, folder in _name_runs(names)]
    kept = [vocabulary_files.load(folder) if folder.is_dir() else None for folder in folders]
    differ = len({text.targets.fingerprint for text in kept if text is not None}) > 1
    place, _, last = metric.rpartition("/")
    if not differ or last not in _PER_TOKEN:
        return metric, None, ""
    bits = f"{place or 'validation'}/bits_per_byte"
    warning = f"The runs have different vocabularies, so that {metric}, of tokens, compares nothing"
    if not all(bits in names for names in _recorded_by_each(folders)):
        return metric, None, f"{warning}; not all of them recorded {bits}, which would."
    warning = f"{warning}: they are ranked by {bits}."
    return (metric, bits, warning) if is_asked else (bits, None, warning)


def common_metric(names: Sequence[str]) -> str:
    """Returns the default metric for comparing runs, which are given as to `read_runs`.

    If all runs have ended and selected their best checkpoints by the same metric, it is that one;
    else the first task metric that all recorded; else the validation loss.
    """
    folders = [folder for _, folder in _name_runs(names)]
    chosen = {_chosen_metric(folder) for folder in folders} - {None}
    recorded = _recorded_by_each(folders)
    common = [name for name in recorded[0] if all(name in other for other in recorded)]
    candidates = [name for name in chosen if len(chosen) == 1 and name in common]
    candidates += [
        name
        for name in common
        if name.count("/") == 1 and not (name.startswith("validation/") or name.endswith("/loss"))
    ]
    return candidates[0] if candidates else DEFAULT_METRIC


def _chosen_metric(folder: pathlib.Path) -> str | None:
    """Returns the metric of the best checkpoint; None if a run has not ended."""
    metric = (foreign_files.find_json(folder / SUMMARY_FILE) or {}).get("metric")
    return metric if isinstance(metric, str) else None


def _recorded_by_each(folders: Sequence[pathlib.Path]) -> list[dict[str, None]]:
    """Returns the recorded names of each run that was evaluated; of all runs if none was."""
    recorded = [_recorded_names(folder) for folder in folders]
    return [names for names in recorded if any("/" in name for name in names)] or recorded


def _recorded_names(folder: pathlib.Path) -> dict[str, None]:
    """Returns the names of a run's recorded metrics, in order."""
    return dict.fromkeys(name for record in read_metrics(folder) for name in record)


def read_runs(
    names: Sequence[str], *, metric: str = DEFAULT_METRIC, clock: str = "wall"
) -> list[Run]:
    """Reads run directories, each given as `DIR` or `NAME=DIR`, in the given order.

    Raises:
        UserError: listing each directory that is no run; or no run recorded the metric, or what the
            clock counts.
    """
    runs, faults = [], []
    named = _name_runs(names)
    for name, folder in named:
        run_or_fault = _read_run(name, folder, metric, CLOCKS[clock].key)
        if isinstance(run_or_fault, Run):
            runs.append(run_or_fault)
        else:
            faults.append(run_or_fault)
    if not any(run.points or run.diverged for run in runs):
        faults += [_unrecorded(folder, metric) for _, folder in named if not faults]
    errors.raise_all(faults, where="compare")
    if clock != "wall" and all(run.spent is None for run in runs):
        needed = "flops_per_step" if clock == "flops" else CLOCKS[clock].key
        raise errors.UserError(
            f"--clock={clock} needs {needed}, which none of the runs recorded; leave it out."
        )
    return runs


def comparison(runs: Sequence[Run], *, metric: str = DEFAULT_METRIC, clock: str = "wall") -> Table:
    """Returns a table of the runs, best last value first, with values at equal steps and costs.

    Equal steps and equal costs by the clock are the maxima that all runs with values have reached.
    """
    counted = CLOCKS[clock]
    steps = min((run.last.step for run in runs if run.last), default=0)
    spent = min((run.spent for run in runs if run.spent is not None), default=0.0)
    better = min if metric_names.lower_is_better(metric) else max
    rows = []
    for run in _best_first(runs, metric):
        best = better((point.value for point in run.points), default=None)
        row = {"run": run.name, "steps": "", counted.name: "", f"{counted.unit}/step": ""}
        if run.last is not None:
            row["steps"] = f"{run.last.step:,}"
        if run.last is not None and run.spent is not None:
            row[counted.name] = counted.text(run.spent)
            per_step = run.spent / max(run.last.step, 1)
            in_seconds = counted.unit == "s"
            row[f"{counted.unit}/step"] = (
                f"{per_step:.2f}" if in_seconds else short_number(per_step)
            )
        row |= {
            f"last {metric}": _last_value(run, metric),
            f"best {metric}": _number(metric, best),
            f"at step {steps:,}": _number(metric, run.at_step(steps)),
            f"at {counted.text(spent)}": _number(metric, run.at_spent(spent)),
            "bits per byte": _number("bits_per_byte", run.bits_per_byte),
        }
        if clock == "wall":
            speed = run.tokens_per_second
            row["tokens/s"] = "" if speed is None else f"{speed:,.0f}"
        rows.append(row)
    filled = [name for name in rows[0] if any(row[name] for row in rows)]
    return tables.of_rows("", [{name: row[name] for name in filled} for row in rows])


def plot(
    runs: Sequence[Run],
    path: pathlib.Path,
    *,
    metric: str = DEFAULT_METRIC,
    clock: str = "wall",
) -> None:
    """Plots the metric of all runs against steps (left) and what they took by the clock (right).

    Raises:
        UserError: matplotlib is not installed.
    """
    figure_class = figures.figure_class("the plot")
    # The legend is below, because names can be long and runs many.
    num_columns = max(1, min(4, _MOST_SHOWN // max(len(_label(run, metric)) for run in runs)))
    height = 4.7 + 0.18 * math.ceil(len(runs) / num_columns)
    figure = figure_class(figsize=(11, height), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    unit, size = _unit(CLOCKS[clock].unit, max(run.spent or 0.0 for run in runs))
    ordered = _best_first(runs, metric)
    for number, run in enumerate(ordered):
        values = [point.value for point in run.points]
        style = figures.style(number, points=len(values))
        by_step.plot([point.step for point in run.points], values, **style)
        by_time.plot([point.spent / size for point in run.points], values, **style)
    for axes, name in ((by_step, "training steps"), (by_time, f"{CLOCKS[clock].name} in {unit}")):
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
        figures.tidy(axes)
    if all(run.spent is None for run in runs):
        by_time.text(0.5, 0.5, "not recorded", ha="center", transform=by_time.transAxes)
    by_step.set_ylabel(figures.text(metric_names.axis(metric)))
    _leave_out_the_start(by_step, runs, metric)
    figure.legend(
        by_time.get_lines(),
        [_label(run, metric) for run in ordered],
        loc="outside lower center",
        ncols=num_columns,
        fontsize=8,
        frameon=False,
        title="run (last value)",
    )
    figures.save(figure, path)


def _label(run: Run, metric: str) -> str:
    """Returns the label of a run in the legend; long names are shortened in the middle."""
    name = run.name
    if len(name) > _MOST_SHOWN:
        name = f"{name[: _MOST_SHOWN // 2]}...{name[-_MOST_SHOWN // 2 :]}"
    return f"{figures.text(name)} ({_last_value(run, metric)})"


def _best_first(runs: Sequence[Run], metric: str) -> list[Run]:
    """Returns the runs sorted by their last values; diverged runs come last."""
    sign = 1 if metric_names.lower_is_better(metric) else -1
    worst = math.inf  # For runs without a finite value.

    def rank(run: Run) -> float:
        if run.rank is not None:
            return run.rank
        return sign * run.last.value if run.last else worst

    return sorted(runs, key=lambda run: (run.diverged, rank(run)))


def _last_value(run: Run, metric: str) -> str:
    if run.diverged:
        return "not finite"
    return "none" if run.last is None else _number(metric, run.last.value)


def _name_runs(names: Sequence[str]) -> list[tuple[str, pathlib.Path]]:
    """Splits NAME=DIR; a directory alone is named by the shortest distinct part of its path.

    Runs of a study, such as "model=t5,seed=0", are named by what differs between them.

    Raises:
        UserError: two runs have one name.
    """
    given = [_split(name) for name in names]
    folders = [command_line.path(folder) for _, folder in given]
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    own = _without_shared(["/".join(part[-depth:]) for part in parts])
    found = [name or short for (name, _), short in zip(given, own, strict=True)]
    errors.raise_all(
        [
            f"{found.count(name)} runs are called {name!r}; give each a name of its own, NAME=DIR."
            for name in dict.fromkeys(found)
            if found.count(name) > 1
        ],
        where="compare",
    )
    return list(zip(found, folders, strict=True))


def _without_shared(names: Sequence[str]) -> Sequence[str]:
    """Returns names of comma-separated settings without those that all of them have."""
    settings = [name.split(",") for name in names]
    shared = set.intersection(*map(set, settings))
    short = [",".join(part for part in own if part not in shared) for own in settings]
    return short if all(short) else names


def _split(given: str) -> tuple[str, str]:
    """Splits NAME=DIR at the first = before a directory, because names of studies contain =.

    Returns an empty name for a directory alone.
    """
    parts = given.split("=")
    splits = [("=".join(parts[:i]), "=".join(parts[i:])) for i in range(len(parts))]
    first = splits[min(1, len(splits) - 1)]
    return next((split for split in splits if command_line.path(split[1]).is_dir()), first)


def _read_run(name: str, folder: pathlib.Path, metric: str, time_key: str) -> Run | str:
    """Returns the run, or an error about its directory."""
    if not folder.is_dir():
        return f"{folder} is no directory; give the run_dir of a run."
    if not (folder / METRICS_FILE).exists():
        return f"{folder} holds no {METRICS_FILE}, so it is no run directory; give run_dir itself."
    records = run_overview.records(folder)
    finite = [_is_finite(record[metric]) for record in records if metric in record]
    points = tuple(
        Point(record["step"], record.get(time_key, math.nan), record[metric])
        for record in _with_time(records, time_key)
        if _is_finite(record.get(metric))
    )
    speeds = _numbers(records, "tokens_per_second")
    bits = _numbers(records, "validation/bits_per_byte")
    return Run(
        name=name,
        points=points,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        bits_per_byte=bits[-1] if bits else None,
        diverged=bool(finite) and not finite[-1],
    )


def _unrecorded(folder: pathlib.Path, metric: str) -> str:
    held = sorted(_recorded_names(folder).keys() - {"step"})
    hint = errors.suggest(metric, held) or f" It records: {', '.join(held) or 'nothing yet'}."
    return f"{folder} has no record of {metric!r}; choose another with --metric.{hint}"


def _is_finite(value: Any) -> bool:
    """Returns whether a recorded value can be drawn; others may be recorded as text."""
    return isinstance(value, (int, float)) and abs(value) < _INFINITE


def _numbers(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Returns the recorded numbers; non-finite ones may be recorded as text."""
    return [r[key] for r in records if isinstance(r.get(key), (int, float))]


def _with_time(records: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Fills missing training times from the record before; NaN if there is none.

    Before the first step, the time is zero.
    """
    filled, seconds = [], math.nan
    for record in records:
        # Text, where it is not finite.
        seconds = float(record.get(key, 0.0 if record["step"] == 0 else seconds))
        filled.append({**record, key: seconds})
    return filled


def _leave_out_the_start(axes: Any, runs: Sequence[Run], metric: str) -> None:
    """Limits the value axis to the part after the first tenth, in which losses fall most."""
    if not metric_names.lower_is_better(metric):
        return
    later = [p.value for r in runs for p in r.points if r.last and p.step >= r.last.step / 10]
    if not later:
        return
    low, high = min(later), max(later)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _unit(unit: str, most: float) -> tuple[str, float]:
    """Returns the name and the size of the unit in which an axis up to `most` is readable."""
    times = [("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)]
    counts = [*((f"{prefix}{unit}", size) for size, prefix in PREFIXES), (unit, 1.0)]
    units = times if unit == "s" else counts
    return next((each for each in units if most >= 3 * each[1]), units[-1])


def _number(metric: str, value: float | None) -> str:
    return "" if value is None else metric_names.format_value(metric, value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise errors.UserError(f"{message}. See python -m convt5.compare --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m convt5.compare",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run directory, or NAME=DIR")
    parser.add_argument(
        "--output",
        type=command_line.path,
        default=".",
        metavar="DIR",
        help="output folder (default: the working directory)",
    )
    parser.add_argument(
        "--metric",
        help=f"a name in {METRICS_FILE} (default: the best_metric of the runs, or a task metric "
        f"that they share, or {DEFAULT_METRIC})",
    )
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="what is counted besides steps: wall-clock or processor seconds of training, or the "
        "FLOPs of its steps as they were compiled (default: wall)",
    )
    parser.add_argument(
        f"--{figures.SUFFIX_FLAG.name}",
        help=figures.SUFFIX_FLAG.help,
        **figures.SUFFIX_FLAG.options,
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
