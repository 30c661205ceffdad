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


class Clock(NamedTuple):
    """What training takes besides steps.

    Attributes:
        name: as tables and pages call it.
        key: of it in records.
        unit: "s" or "FLOP".
    """

    name: str
    key: str
    unit: str = "s"

    def text(self, value: float) -> str:
        """Returns an amount as it is shown."""
        return duration(value) if self.unit == "s" else short_number(value, self.unit)


CLOCKS = {
    "wall": Clock("training time", "train_seconds"),
    "processor": Clock("processor time", "train_cpu_seconds"),
    "flops": Clock("training FLOPs", "train_flops", "FLOP"),
}
"""What runs can be compared at; processor seconds suit a machine that others use too."""

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
        machine: versions, devices and costs of the last steps; empty if unknown.
        summary: final figures of a run that has ended; else empty.
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
        _with_flops(run_log.read_metrics(folder), machines),
        _settings(folder / run_directory.CONFIG_FILE),
        run_log.read_samples(folder),
        machines[max(machines)] if machines else {},
        foreign_files.find_json(folder / run_directory.SUMMARY_FILE) or {},
    )


def records(run_dir: epath.PathLike) -> list[dict[str, Any]]:
    """Returns the records of a run with the FLOPs until then; NaN if those of a step are unknown.

    Raises:
        UserError: a file is damaged.
    """
    folder = epath.Path(run_dir)
    machines = run_log.read_notes(folder / run_log.MACHINES_FILE)
    return _with_flops(run_log.read_metrics(folder), machines)


def _with_flops(
    records: Sequence[Mapping[str, Any]], machines: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Adds FLOPs, those of steps as they were compiled, which a run that goes on does anew; or NaN.

    Args:
        records: of a run.
        machines: what its steps take, by the step after which that holds.
    """
    starts = sorted(machines)

    def until(step: int) -> float:
        # Of steps before the first note, and of those without a count, nothing is known.
        total = 0.0 if starts and starts[0] == 0 else math.nan
        for start, end in zip(starts, [*starts[1:], math.inf], strict=False):
            if step > start:
                note = machines[start]
                known = _is_number(note, "flops_per_step")
                total += (min(step, end) - start) * (note["flops_per_step"] if known else math.nan)
        return total

    return [{**record, CLOCKS["flops"].key: until(record["step"])} for record in records]


def page_run(name: str, overview: Overview, *, clock: str = "wall") -> page.Run:
    """Returns a run for a page: every metric that it recorded but the clocks."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    keys = {"step", *(each.key for each in CLOCKS.values())}
    spent = math.nan
    for record in overview.records:
        step = record["step"]
        # A record without its time has that of the one before.
        spent = float(record.get(CLOCKS[clock].key, 0.0 if step == 0 else spent))
        for metric, value in record.items():
            if metric not in keys:
                points.setdefault(metric, []).append((step, spent, float(value)))
    curves = {metric: page.Curve(*zip(*own, strict=True)) for metric, own in points.items()}
    return page.Run(name, curves, overview.samples)


def costs(overviews: Mapping[str, Overview]) -> Table:
    """Returns what each run took: parameters, FLOPs, times and speed."""
    rows = []
    for name, overview in overviews.items():
        machine, last = overview.machine, overview.records[-1] if overview.records else {}
        parameters = overview.summary.get("num_parameters") or machine.get("parameters")
        spent = {c: _last(overview.records, c.key) for c in CLOCKS.values()}
        speeds = [r["tokens_per_second"] for r in overview.records if _is_number(r, _SPEED)]
        rows.append(
            [
                name,
                f"{last['step']:,}" if last else "",
                _amount(parameters),
                _amount(machine.get("flops_per_token")),
                *("" if value is None else clock.text(value) for clock, value in spent.items()),
                f"{statistics.median(speeds):,.0f}" if speeds else "",
            ]
        )
    columns = ["run", "steps", "parameters", "FLOPs per token"]
    columns += [*(clock.name for clock in CLOCKS.values()), "tokens/s"]
    notes = [
        "FLOPs: of training steps as they were compiled, over source and target tokens; times: "
        "without compilation and evaluation, on the machine of the run."
    ]
    return Table("Costs", columns, rows, notes)


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
    """Returns whether a value is a finite number; others may stand there as text."""
    value = record.get(key)
    return isinstance(value, int | float) and math.isfinite(value)


def _amount(value: Any) -> str:
    return short_number(value) if isinstance(value, int | float) else ""
