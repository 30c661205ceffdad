"""Benchmark records as a Markdown table, and as log-log plots against the length."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from convt5.reports import figures, markdown
from convt5.runtime.amounts import short_number

Record = Mapping[str, Any]

_COLUMNS = {
    "ops": (
        "seconds",
        "naive_seconds",
        "torch_seconds",
        "causal_conv1d_seconds",
        "speedup",
        "times_copy",
    ),
    "train_step": ("seconds", "tokens_per_second", "flops", "temporary_bytes", "compile_seconds"),
    "decode": ("seconds", "tokens_per_second", "state_bytes"),
    "formulations": ("seconds", "best", "best_seconds", "times_best"),
    "start": (
        "first_step_seconds",
        "times_imports",
        "imports_seconds",
        "plan_seconds",
        "data_seconds",
        "load_seconds",
        "trace_seconds",
        "compile_seconds",
        "seconds",
        "cpu_seconds",
    ),
    "data": (
        "processes",
        "rows_per_second",
        "rows_per_cpu_second",
        "tokens_per_second",
        "tokens_per_cpu_second",
        "share_of_step",
    ),
}
_TITLES = {
    "seconds": "seconds",
    "naive_seconds": "seconds, naive sum",
    "torch_seconds": "seconds, torch conv1d",
    "causal_conv1d_seconds": "seconds, causal-conv1d",
    "speedup": "times as fast",
    "best": "fastest",
    "best_seconds": "seconds, fastest",
    "times_best": "times the fastest",
    "times_copy": "time relative to a copy of the minimal bytes",
    "tokens_per_second": "tokens/s",
    "tokens_per_cpu_second": "tokens per processor second",
    "processes": "processes",
    "rows_per_second": "rows/s",
    "rows_per_cpu_second": "rows per processor second",
    "share_of_step": "CPU time relative to a step of dynamic_tiny",
    "flops": "FLOPs of an update",
    "temporary_bytes": "temporary bytes",
    "compile_seconds": "seconds to compile",
    "state_bytes": "bytes of state",
    "first_step_seconds": "seconds to the end of step 1",
    "times_imports": "times the imports alone",
    "imports_seconds": "imports and settings",
    "plan_seconds": "shapes",
    "data_seconds": "data",
    "load_seconds": "loading programs",
    "trace_seconds": "tracing",
    "cpu_seconds": "processor seconds",
}
# The figure by which cases of a suite are compared, and whether higher is better.
_COMPARED = {"train_step": ("seconds", False), "decode": ("tokens_per_second", True)}
_PLOTS = {
    "train_step": ("seconds", "flops", "temporary_bytes"),
    "decode": ("tokens_per_second", "state_bytes"),
}


def text(records: Sequence[Record]) -> str:
    """Returns the machine and a table for each suite, as Markdown."""
    machine = next(r for r in records if r["suite"] == "machine")
    lines = [
        f"{machine['device']} ({machine['processor'] or machine['platform']}), "
        f"{machine['processors']} processors, jax {machine['jax']}; copies "
        f"{short_number(machine['copy_bytes_per_second'])}B/s, multiplies matrices at "
        f"{short_number(machine['matmul_flops'])}FLOP/s.",
    ]
    for suite, columns in _COLUMNS.items():
        of_suite = [r for r in records if r["suite"] == suite]
        if of_suite:
            rows = of_suite[0].get("batch_size")
            title = f"### {suite}" + (f", batches of {rows}" if rows else "")
            lines += ["", title, "", _table(of_suite, columns)]
        if suite in _COMPARED:
            lines += ["", *_compare(of_suite, _COMPARED[suite])]
    return "\n".join(lines) + "\n"


def plot(
    records: Sequence[Record], folder: pathlib.Path, *, suffix: str = figures.SUFFIX
) -> list[pathlib.Path]:
    """Writes an image for each suite with several lengths; returns the paths.

    Args:
        records: of a benchmark.
        folder: of the pictures.
        suffix: of their names, which chooses their format.

    Raises:
        UserError: matplotlib is not installed.
    """
    wanted = [s for s in _PLOTS if len({r["length"] for r in records if r["suite"] == s}) > 1]
    written = [_picture(suite, records, folder / f"{suite}{suffix}") for suite in wanted]
    if any(r["suite"] == "ops" for r in records):
        written.append(_roofline(records, folder / f"roofline{suffix}"))
    return written


def _compare(records: Sequence[Record], figure: tuple[str, bool]) -> list[str]:
    """Returns the ratio of each case to the first at each length, and its growth with length."""
    name, more_is_better = figure
    cases = list(dict.fromkeys(r["case"] for r in records))
    values = {(r["case"], r["length"]): r[name] for r in records}
    lines = []
    for length in dict.fromkeys(r["length"] for r in records):
        here = [case for case in cases if (case, length) in values]
        for case in here[1:] if len(here) > 1 else []:
            ratio = values[case, length] / values[here[0], length]
            ratio = ratio if more_is_better else 1 / ratio
            lines.append(f"- {length}: {case} is {ratio:.2f} times as fast as {here[0]}")
    for case in cases if not more_is_better else []:
        own = sorted(length for c, length in values if c == case)
        if len(own) > 1:
            growth = math.log(values[case, own[-1]] / values[case, own[0]])
            exponent = growth / math.log(own[-1] / own[0])
            lines.append(
                f"- {case}: from {own[0]} to {own[-1]} time grows like length^{exponent:.2f}"
            )
    return lines


def _table(records: Sequence[Record], columns: Sequence[str]) -> str:
    return markdown.table(
        [
            {"length": str(r["length"]), "case": r["case"]}
            | {_TITLES[c]: _cell(r.get(c)) for c in columns}
            for r in records
        ]
    )


def _cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.3g}" if value < 1000 else short_number(value)


def _picture(suite: str, records: Sequence[Record], path: pathlib.Path) -> pathlib.Path:
    figure_class = figures.figure_class("the plots")
    columns = _PLOTS[suite]
    figure = figure_class(figsize=(5 * len(columns), 4), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for axis, column in zip(axes, columns, strict=True):
        measured = [r for r in records if r["suite"] == suite and column in r]
        for number, case in enumerate(dict.fromkeys(r["case"] for r in measured)):
            own = [r for r in measured if r["case"] == case]
            x, y = [r["length"] for r in own], [r[column] for r in own]
            axis.plot(x, y, label=figures.text(case), **figures.style(number))
        axis.set(xlabel="length, tokens", ylabel=_TITLES[column])
        axis.set_xscale("log", base=2)
        figures.name_values(axis.xaxis, (r["length"] for r in measured))
        figures.log_values(axis, [r[column] for r in measured])
        figures.tidy(axis)
    axes[0].legend(frameon=False, fontsize=8)
    figures.save(figure, path)
    return path


def _roofline(records: Sequence[Record], path: pathlib.Path) -> pathlib.Path:
    """Plots the speed of operators below the machine's peak rates of copying and multiplying."""
    machine = next(r for r in records if r["suite"] == "machine")
    of_suite = [r for r in records if r["suite"] == "ops"]
    length = max(r["length"] for r in of_suite)
    figure = figures.figure_class("the plots")(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    bandwidth, peak = machine["copy_bytes_per_second"], machine["matmul_flops"]
    least = [r["flops"] / r["least_bytes"] for r in of_suite]
    ends = [min(least) / 2, max(*least, peak / bandwidth) * 2]
    roof = [ends[0], peak / bandwidth, ends[1]]
    axes.plot(roof, [min(peak, x * bandwidth) for x in roof], color="0.4", label="the machine")
    for number, kind in enumerate(dict.fromkeys(r["kind"] for r in of_suite)):
        own = [r for r in of_suite if r["kind"] == kind and r["length"] == length]
        x = [r["flops"] / r["least_bytes"] for r in own]
        style = figures.style(number)
        axes.plot(x, [r["flops"] / r["seconds"] for r in own], label=kind, **style)
        naive = [r["flops"] / r["naive_seconds"] for r in own]
        axes.plot(x, naive, label=f"{kind}, naive sum", **style, alpha=0.4)
    axes.set(
        xlabel="operations per byte that must be read or written",
        ylabel="operations per second",
        title=f"forward and backward, length {length:,}, by number of taps",
    )
    reached = [r["flops"] / r[name] for r in of_suite for name in ("seconds", "naive_seconds")]
    figures.log_values(axes, [*reached, peak])
    figures.log_values(axes, roof, which="x")
    figures.tidy(axes)
    figure.legend(fontsize=8, loc="outside right center", frameon=False)
    figures.save(figure, path)
    return path
