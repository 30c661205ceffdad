"""What training costs on TPU pods that are not here, by their compiler: tables of docs/scale.md.

`python docs/tools/pods.py` compiles an update of each model for each slice, and looks for the
longest rows that fit; hours in all. What was compiled is kept, by default beside the page that
shows it: given again, the command goes on behind it; with --report_only it prints what there is.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kept_programs import KeptPrograms, Report, write_tables

from convt5.analysis import compiled_step, inspect_command, topology
from convt5.analysis.cost_report import short_bytes
from convt5.benchmarks.sides import TARGETS
from convt5.configuration import command_line

FSDP: Mapping[str, Mapping[str, int]] = {
    "base": {"v5e": 1, "v5p": 1},
    "large": {"v5e": 16, "v5p": 16},
    # Over all 64 chips of a v5p:4x4x4 the compiler makes all-reduces of gathers: twice the bytes.
    "11b": {"v5e": 64, "v5p": 16},
}
"""How many devices share the parameters of each size of model, by generation; the rest is data."""

TABLES = ("updates", "lengths")
VARIANTS = ("dynamic", "t5")
SLICES = ("v5e:16x16", "v5p:4x4x4", "v5p:8x16x16")
LENGTH_SLICES = ("v5e:16x16", "v5p:4x4x4")
"""Slices with chips of each kind, on which the longest rows are looked for."""

FIRST_LENGTHS: Mapping[str, Mapping[str, int]] = {
    "base": {"v5e": 2**17, "v5p": 2**19},
    "large": {"v5e": 2**17, "v5p": 2**19},
    "11b": {"v5e": 2**15, "v5p": 2**18},
}
"""From where the longest rows are looked for: what does not fit is known sooner than what does."""

ROWS, LENGTH = 2048, 512
"""The update of the first table: a million encoder tokens, in rows as long as those of T5."""

SHORTEST, LONGEST = 2**14, 2**22
"""Lengths among which the longest that fits is looked for, in powers of two."""

SETTINGS = ("ConvT5Config.scan_layers=True", "ConvT5Config.remat='full'")
OUTPUT = "docs/scale"
MARK = "pods"
_FILE = "programs.jsonl"


@dataclasses.dataclass(frozen=True)
class Program:
    """An update of rows of `length` encoder tokens and a fourth of decoder tokens."""

    size: str
    variant: str
    slice: str
    rows: int
    length: int

    def compiled(self, *, count_loops: bool) -> Report:
        """Returns what the compiler says, after minutes."""
        slice_ = topology.load(self.slice)
        fsdp = FSDP[self.size][topology.parse(self.slice).generation]
        update, name = inspect_command.read_step(
            [f"gin/models/{self.variant}_{self.size}.gin"],
            [
                f"sharding.MeshConfig.fsdp={fsdp}",
                *(f"architecture.{setting}" for setting in SETTINGS),
            ],
        )
        flags = {
            "devices": len(slice_.devices),
            "batch_size": self.rows,
            "encoder_length": self.length,
            "decoder_length": self.length // TARGETS,
        }
        step = compiled_step.Step(inspect_command.make_subject(name, update, flags))
        try:
            report = compiled_step.make_report(step, slice_, count_loops=count_loops)
        except compiled_step.DoesNotFit as error:
            return {"needed": error.needed}
        return summary(report.as_json())


def summary(report: Mapping[str, Any]) -> Report:
    """Returns what is kept of a `StepReport.as_json()`."""
    sent: dict[str, float] = {}
    for collective in report["collectives"]:
        axes = "+".join(collective["axes"])
        sent[axes] = sent.get(axes, 0) + collective["sent_bytes"]
    memory, roofline = report["memory_bytes"], report["roofline_seconds"]
    return {
        "mesh": {axis: size for axis, size in report["mesh"].items() if size > 1},
        "memory_bytes": {name: memory[name] for name in ("arguments", "temporaries")},
        "flops": report["flops"],
        "bytes_accessed": report["bytes_accessed"],
        "sent_bytes": sent,
        "roofline_seconds": {name: roofline[name] for name in ("step", "bound_by")},
        "compile_seconds": report["compile_seconds"],
    }


class Programs(KeptPrograms[Program]):
    """What is known of programs: kept in a folder, compiled where it is missing."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder / _FILE, Program)

    def compiled(self, program: Program, *, count_loops: bool) -> Report:
        """Returns the report; `count_loops` as in `compiled_step.make_report`."""
        make = functools.partial(program.compiled, count_loops=count_loops)
        return self.report(program, make)

    def fits(self, program: Program) -> bool:
        return "needed" not in self.compiled(program, count_loops=False)


def updates() -> list[Program]:
    """Returns the programs of the first table."""
    return [
        Program(size, variant, slice_, ROWS, LENGTH)
        for size in FSDP
        for slice_ in SLICES
        for variant in VARIANTS
    ]


def try_lengths(programs: Programs, size: str, variant: str, slice_: str) -> None:
    """Compiles what tells the longest rows that fit, one on each device."""
    devices = len(topology.load(slice_).devices)
    first = FIRST_LENGTHS[size][topology.parse(slice_).generation]

    def fits(length: int) -> bool:
        return programs.fits(Program(size, variant, slice_, devices, length))

    longest(fits, first)


def longest(fits: Callable[[int], bool], first: int) -> int | None:
    """Returns the largest power of two that fits, from `SHORTEST` to `LONGEST`, or None.

    Args:
        fits: whether a length does; what is longer than one that does not, does not either.
        first: the power of two to try first.
    """
    length = first
    while length >= SHORTEST and not fits(length):
        length //= 2
    if length < SHORTEST:
        return None
    while first <= length < LONGEST and fits(2 * length):
        length *= 2
    return length


def tables(programs: Programs) -> Iterator[str]:
    """Yields the lines of two Markdown tables of what was compiled."""
    yield (
        "| model | slice | mesh | state | temporaries | TFLOP | GB accessed | GB sent, along | "
        "at least |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for program in updates():
        if program in programs.reports:
            cells = _update_cells(programs.reports[program])
            yield _row(program.size, program.slice, program.variant, *cells)
    yield ""
    yield "| model | slice | longest rows that fit | twice as long |"
    yield "| --- | --- | --- | --- |"
    for size, slice_, variant in itertools.product(FSDP, LENGTH_SLICES, VARIANTS):
        tried = {
            program.length: report
            for program, report in programs.reports.items()
            if (program.size, program.slice, program.variant) == (size, slice_, variant)
            and program.length != LENGTH
        }
        fitting = [length for length, report in tried.items() if "needed" not in report]
        if fitting:
            length = max(fitting)
            after = tried.get(2 * length)
            needed = "not tried" if after is None else _needed(after)
            yield _row(size, slice_, variant, f"{length:,} + {length // TARGETS:,}", needed)


def _update_cells(report: Report) -> Sequence[str]:
    if "needed" in report:
        return ("", "", _needed(report), "", "", "", "")
    memory, least = report["memory_bytes"], report["roofline_seconds"]
    return (
        " x ".join(f"{axis} {size}" for axis, size in report["mesh"].items()),
        short_bytes(memory["arguments"]),
        short_bytes(memory["temporaries"]),
        f"{report['flops'] / 1e12:.2f}",
        f"{report['bytes_accessed'] / 1e9:.1f}",
        ", ".join(f"{size / 1e9:.2f} {axes}" for axes, size in report["sent_bytes"].items()),
        f"{1e3 * least['step']:.0f} ms ({least['bound_by']})",
    )


def _needed(report: Report) -> str:
    return "does not fit" if report["needed"] is None else f"{short_bytes(report['needed'])} needed"


def _row(size: str, slice_: str, variant: str, *cells: str) -> str:
    return f"| {' | '.join((f'{variant}_{size}', slice_, *cells))} |"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/pods.py")
    parser.add_argument(
        "--output", type=command_line.path, default=OUTPUT, help="the folder of what was compiled"
    )
    parser.add_argument("--sizes", nargs="+", default=list(FSDP), choices=list(FSDP))
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument(
        "--page", type=command_line.path, help="also writes the tables into this page"
    )
    parser.add_argument("--report_only", action="store_true", help="compiles nothing")
    settings = parser.parse_args(argv)
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    programs = Programs(settings.output)
    wanted = () if settings.report_only else settings.tables
    if "updates" in wanted:
        for program in updates():
            if program.size in settings.sizes:
                programs.compiled(program, count_loops=True)
    if "lengths" in wanted:
        for size, slice_, variant in itertools.product(settings.sizes, LENGTH_SLICES, VARIANTS):
            try_lengths(programs, size, variant, slice_)
    text = "\n".join(tables(programs))
    print(text)
    if settings.page is not None:
        write_tables(settings.page, MARK, text)


if __name__ == "__main__":
    command_line.run(main)
