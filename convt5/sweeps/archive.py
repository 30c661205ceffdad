"""Results of runs in one small file: a study goes on elsewhere, or is shared among machines.

A line is one run that is done: its settings, how it ended, and the records with the study's metric.
Checkpoints, logs and the records between evaluations stay where they are.
"""

import json
import pathlib

from convt5 import errors
from convt5.sweeps import running
from convt5.sweeps.study import Study
from convt5.training.run_log import METRICS_FILE, read_metrics, read_records, replace_text

_KEYS = ("run", "about", "records")


def write(study: Study, path: pathlib.Path) -> int:
    """Writes the results of all runs that are done, instead of what the file held.

    Returns how many runs these are.

    Raises:
        UserError: the file cannot be written.
    """
    lines = [_line(study, made) for made in running.runs(study) if made.is_done]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(lines))
    except OSError as error:
        raise errors.UserError(
            f"--export_results={path} cannot be written ({error.strerror}); name another file."
        ) from error
    return len(lines)


def read(study: Study, path: pathlib.Path) -> int:
    """Takes over the results in a file for runs of the study that were never begun here.

    Returns how many runs it took over. Those that are here already stay as they are, and so do
    those of the file that are none of the study's.

    Raises:
        UserError: there is no such file, a line is no result, or a run had other settings.
    """
    if not path.is_file():
        raise errors.UserError(
            f"--import_results={path} is no file; give one that --export_results has written."
        )
    here = {made.point.name: made for made in running.runs(study)}
    taken = 0
    for result in read_records(path, need=_KEYS):
        made = here.get(result["run"])
        if made is None or made.status is not None:
            continue
        running.check_settings(made.point, result["about"]["settings"], where=f"{path}: the run")
        made.folder.mkdir(parents=True, exist_ok=True)
        records = [json.dumps(record) + "\n" for record in result["records"]]
        (made.folder / METRICS_FILE).write_text("".join(records))
        running.write_about(made.folder, result["about"])
        taken += 1
    return taken


def _line(study: Study, made: running.Made) -> str:
    records = read_metrics(made.folder)
    # The last record holds what the run took, whether or not it was an evaluation.
    kept = [r for r in records[:-1] if study.metric in r] + records[-1:]
    result = {"run": made.point.name, "about": running.read_about(made.folder), "records": kept}
    return json.dumps(result) + "\n"
