"""What a run directory tells of its run, as the page of a report shows it: curves, settings, costs.

Runs that go on, ended early or were written by an earlier version tell less; nothing is computed.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from convt5.reports import page
from convt5.reports.tables import Table
from convt5.runtime import foreign_files, metric_names
from convt5.runtime.amounts import duration, short_number
from convt5.training import run_directory, run_log

CLOCKS = {"wall": "train_seconds", "processor": "train_cpu_seconds"}
"""What can count as training time; processor seconds suit a machine that others use too."""

_BINDING = re.compile(r"([\w./-]+) = (.*)")
_FOLDERS = re.compile(r"RUN_DIR|.*trainer\.train\.run_dir")
"""Settings that differ between all runs, and say nothing."""

_SPEED = "tokens_per_second"
_MACHINE = ("convt5", "jax", "python", "device", "devices", "hosts", "processor")


class Overview(NamedTuple):
    """What a run directory tells.

    Attributes:
        records: of `metrics.jsonl`.
        settings: of `config.gin`, as they are written there.
        samples: texts by step.
        machine: with what the last steps were made, and what a step takes; empty if unknown.
        summary: of a run that has ended; else empty.
    """

    records: Sequence[Mapping[str, Any]]
    settings: Mapping[str, str] = {}
    samples: Mapping[int, str] = {}
    machine: Mapping[str, Any] = {}
    summary: Mapping[str, Any] = {}


def read(run_dir: epath.PathLike) -> Overview:
    """Returns what a run directory tells.

    Raises:
        UserError: a file is damaged.
    """
    folder = epath.Path(run_dir)
    machines = run_log.read_notes(folder / run_log.MACHINES_FILE)
    return Overview(
        run_log.read_metrics(folder),
        _settings(folder / run_directory.CONFIG_FILE),
        run_log.read_samples(folder),
        machines[max(machines)] if machines else {},
        foreign_files.find_json(folder / run_directory.SUMMARY_FILE) or {},
    )


def page_run(name: str, overview: Overview, *, clock: str = "wall") -> page.Run:
    """Returns a run for a page: every metric that it recorded but the clocks."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    seconds = math.nan
    for record in overview.records:
        step = record["step"]
        # A record without its time has that of the one before.
        seconds = float(record.get(CLOCKS[clock], 0.0 if step == 0 else seconds))
        for metric, value in record.items():
            if metric != "step" and metric not in CLOCKS.values():
                points.setdefault(metric, []).append((step, seconds, float(value)))
    curves = {metric: page.Curve(*zip(*own, strict=True)) for metric, own in points.items()}
    return page.Run(name, curves, overview.samples)


def costs(overviews: Mapping[str, Overview]) -> Table:
    """Returns what each run took: parameters, FLOPs, times and speed."""
    rows = []
    for name, overview in overviews.items():
        machine, last = overview.machine, overview.records[-1] if overview.records else {}
        parameters = overview.summary.get("num_parameters") or machine.get("parameters")
        times = {key: _last(overview.records, key) for key in CLOCKS.values()}
        speeds = [r["tokens_per_second"] for r in overview.records if _is_number(r, _SPEED)]
        rows.append(
            [
                name,
                f"{last['step']:,}" if last else "",
                _amount(parameters),
                _amount(machine.get("flops_per_token")),
                *("" if value is None else duration(value) for value in times.values()),
                f"{statistics.median(speeds):,.0f}" if speeds else "",
            ]
        )
    columns = ["run", "steps", "parameters", "FLOPs per token", "training time"]
    notes = [
        "FLOPs per token: of a training step as it was compiled, over its source and target "
        "tokens; times: without compilation and evaluation, on the machine of the run."
    ]
    return Table("Costs", [*columns, "processor time", "tokens/s"], rows, notes)


def machines(overviews: Mapping[str, Overview]) -> Table:
    """Returns with what versions and machines the runs were made."""
    rows = [
        [name, *(str(overview.machine.get(key, "")) for key in _MACHINE)]
        for name, overview in overviews.items()
        if overview.machine
    ]
    if not rows:
        return Table("Versions and machine", notes=["The runs recorded none."])
    return Table("Versions and machine", ["run", *_MACHINE], rows)


def axes(runs: Sequence[page.Run]) -> dict[str, str]:
    """Returns the names of all metrics of runs with their units."""
    return {name: metric_names.axis(name) for run in runs for name in run.curves}


def _settings(path: epath.Path) -> dict[str, str]:
    try:
        content = foreign_files.read_bytes(path, foreign_files.MOST_JSON_BYTES)
    except (OSError, ValueError):  # Of no run of ours.
        return {}
    text = content.decode(errors="replace")
    found = (_BINDING.fullmatch(line) for line in text.splitlines())
    return {f[1]: f[2] for f in found if f and not _FOLDERS.fullmatch(f[1])}


def _last(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((r[key] for r in reversed(records) if _is_number(r, key)), None)


def _is_number(record: Mapping[str, Any], key: str) -> bool:
    """What is not finite stands there as text."""
    return isinstance(record.get(key), int | float)


def _amount(value: Any) -> str:
    return short_number(value) if isinstance(value, int | float) else ""
