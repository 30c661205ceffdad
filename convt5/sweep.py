"""Entry point of `python -m convt5.sweep`: runs a study of settings and seeds, and reports."""

import argparse
import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from convt5 import errors
from convt5.configuration import command_line
from convt5.reports import figures
from convt5.sweeps.paper import Paper

if TYPE_CHECKING:
    from convt5.sweeps.study import Study

COMMAND = command_line.Command(
    name="sweep",
    summary="Trains the runs of a study: a grid over settings and seeds. The same command "
    "resumes an interrupted study. At its end, or at any time with --report_only, it "
    "writes report.md, report.html (a page for the browser that needs no network), plots and "
    "results.json: error distributions over the grid, the best settings, differences, and the "
    "steps needed to reach a given error. A gin file that binds sweeps.Paper instead of "
    "sweeps.Study runs several studies, and answers its questions on one page.",
    examples=[
        (
            "compare ViT_P and ViT_C with AdamW and SGD over learning rates and weight decays",
            "--gin_file=gin/studies/early_convolutions.gin",
        ),
        ("check every axis and list the runs", "--gin_file=STUDY.gin --dry_run"),
        (
            "train only the next ten runs, in a folder of your own",
            "--gin_file=gin/studies/early_convolutions.gin --gin.OUTPUT_DIR=runs/study "
            "--most_runs=10",
        ),
        ("train four runs at a time", "--gin_file=STUDY.gin --processes=4"),
        ("report the runs so far", "--gin_file=STUDY.gin --report_only"),
        (
            "merge the results of two machines, each with its own seeds, into one report",
            "--gin_file=STUDY.gin --import_results=other.jsonl --report_only",
        ),
        (
            "answer the questions of the paper from recorded results",
            "--gin_file=gin/studies/paper.gin --import_results=docs/results --report_only",
        ),
    ],
    flags=[
        command_line.Flag(
            "dry_run",
            "checks every value of every axis, and lists the runs; trains nothing.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "report_only",
            "writes the report of existing runs; trains nothing.",
            {"action": "store_true"},
        ),
        command_line.Flag("most_runs", "ends after this many runs.", {"type": int}),
        command_line.Flag(
            "processes",
            "runs trained at the same time, each on its share of the CPU cores (default: 1). "
            "Small models train faster on one core each. An accelerator serves one run at a "
            "time.",
            {"type": int, "default": 1},
        ),
        command_line.Flag(
            "import_results",
            "first imports results from this file, for runs that were not started here; of a "
            "paper, from the files <study>.jsonl of this folder.",
            {"type": command_line.path, "metavar": "FILE"},
        ),
        command_line.Flag(
            "export_results",
            "writes the results of all finished runs to this file at the end, or when the study "
            "is interrupted: one JSON line per run, without checkpoints; of a paper, to this "
            "folder.",
            {"type": command_line.path, "metavar": "FILE"},
        ),
        figures.SUFFIX_FLAG,
    ],
)


def main(argv: Sequence[str]) -> int:
    """Runs a study according to the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    for name in ("most_runs", "processes"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise errors.UserError(f"--{name}={value} must be at least 1.")
    if flags.dry_run:
        errors.raise_all(
            [
                f"--{name}={value} and --dry_run: a dry run reads and writes no results; leave out "
                "one of the two."
                for name in ("import_results", "export_results")
                for value in [getattr(flags, name)]
                if value is not None
            ],
            where="flags",
        )
    of_runs = {
        "--dry_run": flags.dry_run,
        f"--most_runs={flags.most_runs}": flags.most_runs is not None,
    }
    for flag, is_given in of_runs.items():
        if flags.report_only and is_given:
            raise errors.UserError(
                f"--report_only and {flag}: a report starts and checks no run; leave out one of "
                "the two."
            )
    if flags.plot_suffix != figures.SUFFIX:
        figures.check_suffix(flags.plot_suffix)
    from convt5.sweeps import reading

    study = reading.read(arguments.gin_files, arguments.gin_bindings, arguments.trust)
    if isinstance(study, Paper):
        _answer(study, flags, arguments.trust)
        return 0
    # Deferred: they are slow to import.
    from convt5.sweeps import archive, report, running

    if flags.dry_run:
        running.check(study)
        print(describe(study))
        return 0
    # Before the export, which may replace the same file: a file that is refused stays.
    if flags.import_results is not None:
        count = archive.read(study, flags.import_results)
        print(f"imported the results of {count} runs from {flags.import_results}", file=sys.stderr)
    if (path := flags.export_results) is not None:
        archive.check(f"--export_results={path}", path)
    with _exporting(flags.export_results, functools.partial(archive.write, study)):
        if not flags.report_only:
            running.check(study)
            running.run_all(study, most_runs=flags.most_runs, processes=flags.processes)
        print(report.write(study, suffix=flags.plot_suffix))
    return 0


def _answer(paper: Paper, flags: argparse.Namespace, trust: Sequence[str]) -> None:
    """Answers the questions of a paper: makes the runs of its studies, and writes its page."""
    from convt5.sweeps import archive, paper_page, paper_runs, reading

    studies = reading.studies_of(paper, trust)
    if flags.dry_run:
        paper_runs.check_costs(paper)
        print(paper_runs.describe(paper, studies))
        return
    if flags.import_results is not None:
        for name, count in paper_runs.read_results(studies, flags.import_results).items():
            print(f"imported the results of {count} runs of {name}", file=sys.stderr)
    archive.check(f"page={paper.page!r}", paper.path)
    if (folder := flags.export_results) is not None:
        archive.check(f"--export_results={folder}", folder / "study.jsonl")
    with _exporting(flags.export_results, functools.partial(paper_runs.write_results, studies)):
        if not flags.report_only:
            paper_runs.check_costs(paper)
            paper_runs.run_all(paper, studies, most_runs=flags.most_runs, processes=flags.processes)
    print(paper_page.write(paper, studies, suffix=flags.plot_suffix))
    print(f"wrote {paper.path}")


@contextlib.contextmanager
def _exporting(path: pathlib.Path | None, write: Callable[[pathlib.Path], int]) -> Iterator[None]:
    """Context that exports the results at its end, also after an error.

    Args:
        path: the file or folder of --export_results, or None.
        write: writes them and returns the number of runs.
    """
    try:
        yield
    finally:
        if path is not None:
            count = write(path)
            print(f"wrote the results of {count} runs to {path}", file=sys.stderr)


def describe(study: "Study") -> str:
    """Lists the runs of a study, and which of them are done."""
    from convt5.sweeps import running

    every = running.runs(study)
    lines = [
        f"{len(every)} runs in {study.folder / running.RUNS_FOLDER}, "
        f"{sum(made.is_done for made in every)} of them made; nothing was trained."
    ]
    return "\n".join([*lines, *(f"  {made.point.name}  {made.status or ''}" for made in every)])


if __name__ == "__main__":
    command_line.run(main)
