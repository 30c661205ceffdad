"""Makes the evidence of a paper: the runs of its studies in order, and its benchmark."""

import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.sweeps import archive, evidence, running
from convt5.sweeps.paper import CostClaim, Paper
from convt5.sweeps.study import Study
from convt5.training.run_log import read_records

Bench = Callable[[Sequence[str]], int]
"""Runs `python -m convt5.bench` with arguments; returns the exit code."""


def run_all(
    paper: Paper,
    studies: Mapping[str, Study],
    *,
    most_runs: int | None = None,
    processes: int = 1,
    launch: running.Launch | None = None,
    bench: Bench | None = None,
) -> None:
    """Makes missing runs, study by study, and then measures missing costs.

    A study is checked just before its runs: it may start from models of a study before it.

    Args:
        paper: the questions.
        studies: the studies by their names.
        most_runs: stops after this many runs of all studies together, and before the benchmark;
            None makes all.
        processes: number of concurrent runs.
        launch, bench: replaced in tests.

    Raises:
        UserError: a setting is wrong, or the benchmark failed.
        TrainingError: a run failed.
        Interrupted: a signal requested the end.
    """
    read_costs(paper)  # Refuses those of other settings before hours of training.
    for name, study in studies.items():
        if all(made.is_done for made in running.runs(study)):
            continue
        print(f"study {name}", file=sys.stderr)
        running.check(study)
        num_made = running.run_all(study, launch=launch, most_runs=most_runs, processes=processes)
        if most_runs is not None:
            most_runs -= num_made
            if most_runs <= 0:
                return
    if missing_costs(paper):
        _measure(paper, bench or _bench)


def missing_costs(paper: Paper) -> list[CostClaim]:
    """Returns the claims on costs for which there are no records."""
    claims = [claim for claim in paper.claims if isinstance(claim, CostClaim)]
    records = read_costs(paper) if claims else []
    return [claim for claim in claims if not evidence.of_costs(claim, records).lines]


def read_costs(paper: Paper) -> list[dict[str, Any]]:
    """Returns the records of the benchmark; empty if it was not run.

    Raises:
        UserError: they were measured with other flags than `Paper.bench` has.
    """
    records = read_records(paper.records)
    about = next((record for record in records if record.get("suite") == "machine"), {})
    # Earlier versions recorded none.
    then, now = about.get("arguments"), _arguments(paper)
    if paper.has_costs and isinstance(then, list) and sorted(map(str, then)) != sorted(now):
        raise errors.UserError(
            f"Paper.bench: {paper.records} was measured with {errors.clip(then, limit=2000)}, now "
            f"{now}; restore the settings of bench, or choose another bench_dir."
        )
    return records


def read_results(studies: Mapping[str, Study], folder: pathlib.Path) -> dict[str, int]:
    """Imports results of studies from `<name>.jsonl` in a folder; returns the numbers of runs.

    Raises:
        UserError: the folder has no such file, or a file cannot be imported.
    """
    found = {name: folder / f"{name}.jsonl" for name in studies}
    there = {name: path for name, path in found.items() if path.is_file()}
    if not there:
        raise errors.UserError(
            f"--import_results={folder} has none of {', '.join(p.name for p in found.values())}; "
            "give the folder of --export_results."
        )
    return {name: archive.read(studies[name], path) for name, path in there.items()}


def write_results(studies: Mapping[str, Study], folder: pathlib.Path) -> int:
    """Exports the results of studies with finished runs; returns the number of runs."""
    started = {
        name: study
        for name, study in studies.items()
        if any(made.is_done for made in running.runs(study))
    }
    return sum(archive.write(study, folder / f"{name}.jsonl") for name, study in started.items())


def describe(paper: Paper, studies: Mapping[str, Study]) -> str:
    """Lists the studies of a paper, and how many of their runs are done."""
    lines = [
        f"{len(paper.questions)} questions, to be answered in {paper.path}; nothing was trained."
    ]
    for name, study in studies.items():
        every = running.runs(study)
        done = sum(made.is_done for made in every)
        lines.append(f"  {name}: {len(every)} runs in {study.output_dir}, {done} of them made")
    if paper.has_costs:
        state = "to be measured" if missing_costs(paper) else "measured"
        lines.append(f"  costs: {state}, in {paper.bench_dir}")
    return "\n".join(lines)


def check_costs(paper: Paper) -> None:
    """Checks the flags of a benchmark that is still to be run, before hours of training.

    Raises:
        UserError: the benchmark refuses them.
    """
    if missing_costs(paper):
        _raise_failed(_bench([*_arguments(paper), "--dry_run"]))


def _measure(paper: Paper, bench: Bench) -> None:
    folder = paper.records.parent
    # Measurements that were stopped in between would pass for all.
    unfinished = folder / "unfinished"
    print("costs", file=sys.stderr)
    _raise_failed(bench([*_arguments(paper), f"--output={unfinished}"]))
    for path in unfinished.iterdir():
        path.replace(folder / path.name)
    unfinished.rmdir()
    errors.raise_all(
        [
            f"the benchmark measured no {claim.quantity} of {claim.first} and {claim.second} "
            "at one length; bench must have both cases, and lengths."
            for claim in missing_costs(paper)
        ],
        where="Paper.bench",
    )


def _raise_failed(code: int) -> None:
    """Raises the error of a benchmark that ended with this exit code, unless it is 0."""
    if code != 0:
        kind = errors.UserError if code == errors.UserError.exit_code else errors.TrainingError
        raise kind(
            f"python -m convt5.bench of the paper ended with exit code {code}; its message is "
            "above."
        )


def _arguments(paper: Paper) -> list[str]:
    """Returns the arguments of the benchmark but its folder."""
    flags = {"suites": "train_step", **paper.bench}
    flags.pop("output", None)
    return [flag for name, value in flags.items() for flag in _flags(name, value)]


def _flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] * value
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{name}={one}" for one in values]


def _bench(arguments: Sequence[str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", "convt5.bench", *arguments], stdin=subprocess.DEVNULL, check=False
    ).returncode
