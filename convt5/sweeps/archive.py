"""Results of runs in one small file, to continue a study elsewhere or to merge machines' results.

Each line is a finished run: its settings, its status, and the records with the study's metric.
Checkpoints, logs and the records between evaluations are not included.
"""

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from convt5 import errors
from convt5.runtime import atomic_files, metric_names
from convt5.sweeps import running
from convt5.sweeps.study import Study
from convt5.training.run_log import METRICS_FILE, read_metrics, read_records, record_fault

_CHECKPOINTS = "checkpoints"
"""Folder of a run that was started here, whether or not its status is known."""

_KEYS = ("run", "about", "records")


def write(study: Study, path: pathlib.Path) -> int:
    """Writes the results of all finished runs, replacing the file; returns their number.

    Without any, a file that is there stays as it is.

    Raises:
        UserError: the file is not writable, or a run has no value of the metric.
    """
    lines = [_line(study, made) for made in running.runs(study) if made.is_done]
    if not lines and path.exists():
        return 0
    with naming(f"--export_results={path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace_text(path, "".join(lines))
    return len(lines)


def check(what: str, path: pathlib.Path) -> None:
    """Raises `UserError` if a file that is written after the runs could not be; see `naming`."""
    with naming(what):
        atomic_files.check_replaceable(path)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Context in which a file that cannot be written is named: its flag or setting, and value."""
    try:
        yield
    except OSError as error:
        raise errors.UserError(
            f"{what} cannot be written ({error.strerror}); name another file."
        ) from error


def read(study: Study, path: pathlib.Path) -> int:
    """Imports results from a file for runs of the study that were never started here.

    Returns the number of imported runs. Runs that exist here are not changed; runs in the file that
    do not belong to the study are left out, and named on standard error.

    Raises:
        UserError: the file does not exist, a line is not a result, or a run has other settings or
            no value of the metric. Nothing is imported then.
    """
    if not path.is_file():
        raise errors.UserError(
            f"--import_results={path} is not a file; give one written by --export_results."
        )
    existing = {made.point.name: made for made in running.states(study)}
    taken: dict[pathlib.Path, tuple[Any, Any]] = {}  # Files of several machines may be joined.
    strange = []
    for number, line in enumerate(_results(path), start=1):
        where = f"{path}, line {number}"
        result = _check(line, where)
        made = existing.get(result["run"])
        if made is None:
            strange.append(result["run"])
        if made is None or made.status is not None or (made.folder / _CHECKPOINTS).exists():
            continue
        where = f"{where}: the run {result['run']}"
        about, records = result["about"], result["records"]
        running.check_settings(made.point, about, where=where)
        if about["status"] == "finished":
            running.check_metric(study.metric, records, where=where)
        taken[made.folder] = about, records
    try:
        for folder, (about, records) in taken.items():
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(record) + "\n" for record in records)
            atomic_files.replace_text(folder / METRICS_FILE, text)
            running.write_about(folder, about)
    except OSError as error:
        raise errors.UserError(
            f"output_dir={study.output_dir!r} cannot be written ({error.strerror}); choose another."
        ) from error
    if strange:
        shown = "; ".join(errors.abbreviate(strange, limit=3))
        text = f"{path}: left out {len(strange)} runs that are not of this study: {shown}"
        print(text, file=sys.stderr)
    return len(taken)


def _results(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, which must all be complete because it is written atomically."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        number = content.count(b"\n") + 1
        raise errors.UserError(
            f"--import_results={path}: line {number}, the last one, is truncated; copy the file "
            "of --export_results again."
        )
    return read_records(path, need=_KEYS)


def _check(result: dict[str, Any], where: str) -> dict[str, Any]:
    """Checks a line of the file, and converts it to the current names of metrics."""
    about, records = result["about"], result["records"]
    fault = running.about_fault(about)
    if fault is None and about["status"] == "started":
        fault = "the run is not done"
    if not isinstance(records, list):
        fault = fault or "its records are no list of records of steps"
    else:
        fault = fault or next(filter(None, map(record_fault, records)), None)
    if not isinstance(result["run"], str):
        fault = fault or f"run={errors.clip(result['run'])} is no name"
    if fault:
        raise errors.UserError(
            f"{where} is not the result of a run ({fault}); give a file written by "
            "--export_results, or remove the line."
        )
    return result | {"records": [metric_names.current(record) for record in records]}


def _line(study: Study, made: running.StudyRun) -> str:
    records = read_metrics(made.folder)
    if made.status == "finished":
        running.check_metric(study.metric, records, where=f"the run in {made.folder}")
    # The last record has the cost of the run, whether or not it is an evaluation.
    kept = [r for r in records[:-1] if study.metric in r] + records[-1:]
    result = {"run": made.point.name, "about": running.read_about(made.folder), "records": kept}
    return json.dumps(result) + "\n"
