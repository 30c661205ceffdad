"""Makes the runs of a study, one or several at a time, each in a resumable process.

A finished run is not repeated; a killed one resumes from its last checkpoint.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TextIO, get_args

from convt5 import errors
from convt5.configuration import gin_files
from convt5.runtime import atomic_files, cores, foreign_files
from convt5.runtime.amounts import duration
from convt5.runtime.bars import Bar
from convt5.sweeps.equal_cost import train_run
from convt5.sweeps.study import Point, Study
from convt5.training import interruption
from convt5.training.run_log import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

RUNS_FOLDER = "runs"
FIRST_STAGES_FOLDER = "first_stages"
STATUS_FILE = "sweep.json"
LOG_FILE = "output.txt"

Status = Literal["started", "finished", "diverged"]
Launch = Callable[[Sequence[str], pathlib.Path], int]
"""Runs `python -m convt5.train` with arguments, its output to a file; returns the exit code."""

_LOOK_SECS = 0.2  # Interval of checks for signals.
_LEAST_ROOM = 4096  # Fewer free bytes than this mean that the disk is full.
_NOT_FINITE = "is not finite"  # Part of the trainer's message about a diverged run.


class StudyRun(NamedTuple):
    """A run of a study, with its current status.

    Attributes:
        point: the settings of the run.
        folder: its run directory, shared by points of equal settings.
        status: its status; None if never started.
        message: the message of a diverged run.
        first: the run from which it starts, or None.
    """

    point: Point
    folder: pathlib.Path
    status: Status | None
    message: str = ""
    first: "StudyRun | None" = None

    @property
    def is_done(self) -> bool:
        return self.status in ("finished", "diverged")


def check(study: Study) -> None:
    """Reads the configuration of a few runs that together use every value of every axis.

    Raises:
        UserError: an axis, a setting or a file is unknown to the trainer.
    """
    for point in study.samples():
        run = StudyRun(point, _folder(study, RUNS_FOLDER, point), None)
        if point.first is not None:
            first = StudyRun(point.first, _folder(study, FIRST_STAGES_FOLDER, point), None)
            _check_configuration(first, f"the first stage of the run {point.name}")
            run = run._replace(first=first)
        _check_configuration(run, f"the run {point.name}")


def _check_configuration(run: StudyRun, name: str) -> None:
    try:
        describe(run).check()
    except errors.UserError as error:
        raise errors.UserError(f"{name} cannot be made: {error}") from error


def describe(run: StudyRun) -> "TrainRun":
    """Returns the settings of a run, in its run directory.

    Raises:
        UserError: settings that the trainer does not have.
    """
    point = run.point
    return train_run(point.gin_files, tuple(_bindings(run)), point.trust, point.is_own)


def states(study: Study) -> list[StudyRun]:
    """Returns every point of a study with the status of its run.

    Raises:
        UserError: a folder holds a run with other settings.
    """
    folders: dict[tuple, pathlib.Path] = {}

    def state(name: str, point: Point, like: Point) -> StudyRun:
        settings = (name, like.gin_files, like.bindings)
        return _state(like, folders.setdefault(settings, _folder(study, name, point)))

    runs = []
    for point in study.points():
        made = state(RUNS_FOLDER, point, point)
        if point.first is not None:
            made = made._replace(first=state(FIRST_STAGES_FOLDER, point, point.first))
        runs.append(made)
    return runs


def runs(study: Study) -> list[StudyRun]:
    """Returns the runs of `states`, with points of equal settings once."""
    by_folder: dict[pathlib.Path, StudyRun] = {}
    for made in states(study):
        by_folder.setdefault(made.folder, made)
    return list(by_folder.values())


def run_all(
    study: Study,
    *,
    launch: Launch | None = None,
    most_runs: int | None = None,
    processes: int = 1,
    out: TextIO | None = None,
) -> int:
    """Makes the missing runs; returns their number.

    A run with a loss that is no longer finite is a result. Any other failure ends the study, after
    the other runs have saved their state.

    Args:
        study: the study.
        launch: replaced in tests.
        most_runs: stops after this many runs; None makes all.
        processes: number of concurrent runs, which share the cores equally.
        out: where progress is shown; standard error by default.

    Raises:
        UserError: a run was refused, or the folder of the study cannot be created.
        TrainingError: a run failed for another reason than divergence.
        Interrupted: a signal requested the end.
    """
    try:
        study.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.UserError(
            f"output_dir={study.output_dir!r} cannot be made ({error.strerror}); choose another."
        ) from error
    every = runs(study)
    missing = [made for made in every if not made.is_done]
    done, missing = len(every) - len(missing), missing[:most_runs]
    with (
        interruption.Interruption() as stop,
        contextlib.closing(
            _Progress(len(every), done, missing=len(missing), processes=processes, out=out)
        ) as progress,
        futures.ThreadPoolExecutor(processes) as pool,
        contextlib.closing(_Trainers(processes)) as trainers,
    ):
        maker = _Maker(study, missing, launch or trainers)
        begun = {pool.submit(maker.make, made): made for made in missing}
        try:
            for one in _as_completed(begun, stop):
                seconds = one.result()
                if seconds is not None:
                    made = begun[one]
                    progress.add(_state(made.point, made.folder), seconds, study.metric)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return len(missing)


def _as_completed(
    begun: Iterable[futures.Future], stop: interruption.Interruption
) -> Iterator[futures.Future]:
    """Yields completed futures; raises `Interrupted` soon after a signal."""
    waiting = set(begun)
    while waiting:
        done, waiting = futures.wait(waiting, _LOOK_SECS, return_when=futures.FIRST_COMPLETED)
        if stop.received is not None:
            raise interruption.Interrupted(
                f"stopped by {stop.received.name}; what the runs in progress have done is saved. "
                "The same command resumes the study.",
                signal_number=stop.received,
            )
        yield from done


class _Maker:
    """Makes runs of a study in several threads, until one of them fails."""

    def __init__(self, study: Study, missing: Sequence[StudyRun], launch: Launch):
        self._study, self._launch = study, launch
        self._has_failed = threading.Event()
        self._firsts = {made.first.folder: threading.Lock() for made in missing if made.first}

    def make(self, made: StudyRun) -> float | None:
        """Makes a run after its first stage; returns its seconds, or None after a failure."""
        if self._has_failed.is_set():
            return None
        started = time.monotonic()
        try:
            if made.first is not None:
                with self._firsts[made.first.folder]:
                    first = _finish(self._study, made.first, self._launch)
                made = made._replace(first=first)
            _run(self._study, made, self._launch)
            return time.monotonic() - started
        except BaseException:
            self._has_failed.set()
            raise


class _Trainers:
    """Trains in processes, each on its share of the cores.

    Args:
        most: number of concurrent processes; a single one has all cores.
    """

    def __init__(self, most: int):
        self._cores: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        for share in _shares_of_cores(most):
            self._cores.put(share)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen] = set()
        self._is_open = True

    def __call__(self, arguments: Sequence[str], log: pathlib.Path) -> int:
        """Returns the exit code of `python -m convt5.train` with these arguments."""
        share = self._cores.get()
        try:
            with open(log, "ab", opener=atomic_files.not_followed) as file:
                process = self._start(arguments, file)
            with process:
                if share:
                    os.sched_setaffinity(process.pid, share)
                code = process.wait()
            self._running.discard(process)
            return code
        finally:
            self._cores.put(share)

    def _start(self, arguments: Sequence[str], file: BinaryIO) -> subprocess.Popen:
        with self._lock:
            if not self._is_open:
                raise errors.UserError("the study was stopped.")
            process = subprocess.Popen(
                [sys.executable, "-m", "convt5.sweeps.train_run", *arguments],
                stdin=subprocess.PIPE,  # Closing it, also by the death of this process, stops it.
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the study.
            )
            self._running.add(process)
            return process

    def close(self) -> None:
        """Stops running processes, after they have saved their state."""
        with self._lock:
            self._is_open = False
            remaining = list(self._running)
        for process in remaining:
            assert process.stdin is not None
            process.stdin.close()
        for process in remaining:
            process.wait()


def final_value(folder: pathlib.Path, metric: str) -> float | None:
    """Returns the last recorded value of a metric of a run."""
    values = values_of(folder, metric)
    return values[-1][1] if values else None


def values_of(folder: pathlib.Path, metric: str) -> list[tuple[int, float]]:
    """Returns the steps and recorded values of a metric of a run, in order."""
    return [(r["step"], float(r[metric])) for r in read_metrics(folder) if metric in r]


def check_metric(metric: str, records: Sequence[Mapping[str, Any]], *, where: str) -> None:
    """Checks that a finished run recorded the metric that its study compares.

    Raises:
        UserError: it did not.
    """
    if any(metric in record for record in records):
        return
    held = sorted({name for record in records for name in record} - {"step"})
    hint = errors.suggest(metric, held) or f" It records: {', '.join(held) or 'nothing'}."
    raise errors.UserError(
        f"{where} recorded no {metric}, which the study compares; set sweeps.Study.metric to a "
        f"name in its {METRICS_FILE}, and evaluate in the run.{hint}"
    )


def _shares_of_cores(count: int) -> list[set[int]]:
    """Returns the cores of each process; empty if the system does not support affinity."""
    shares = [set(share) for share in cores.shares(count)]
    # Processes share cores if there are more processes than cores.
    used = [share for share in shares if share]
    return [share or used[i % len(used)] for i, share in enumerate(shares)] if used else shares


def _finish(study: Study, first: StudyRun, launch: Launch) -> StudyRun:
    """Returns a first stage after making it, unless another run has made it already."""
    now = _state(first.point, first.folder)
    return now if now.is_done else _run(study, now, launch)


def _run(study: Study, made: StudyRun, launch: Launch) -> StudyRun:
    """Makes a run whose first stage is finished; returns it with its status."""
    made.folder.mkdir(parents=True, exist_ok=True)
    # Once: while the run is made, its gin files may change.
    write = functools.partial(write_status, made, contents=_contents(made.point))
    if made.first is not None and made.first.status == "diverged":
        return write("diverged", f"its first stage diverged: {made.first.message}")
    write("started")
    arguments = [f"--gin_file={name}" for name in made.point.gin_files]
    arguments += [f"--gin.{binding}" for binding in _bindings(made)]
    arguments += [f"--trust={module}" for module in made.point.trust]
    log = made.folder / LOG_FILE
    length = log.stat().st_size if log.exists() else 0  # Output of earlier attempts.
    code = launch(arguments, log)
    if code == 0:
        where = f"the run in {made.folder}"
        check_metric(study.metric, read_metrics(made.folder), where=where)
        return write("finished")
    output = _lines(log, after=length)
    # Threads and libraries may print something after the trainer's error.
    diverged = [line for line in output if line.startswith("error:") and _NOT_FINITE in line]
    if code == errors.TrainingError.exit_code and diverged:
        return write("diverged", diverged[-1])
    what = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    kind = errors.UserError if code == errors.UserError.exit_code else errors.TrainingError
    raise kind(
        f"the run in {made.folder} {what}: {_reason(output, made.folder)}\nIts output is in {log}. "
        "The same command resumes the study."
    )


def _reason(output: Sequence[str], folder: pathlib.Path) -> str:
    """Returns the most informative line of a failed run's output."""
    of_errors = [line for line in output if line.startswith("error:")]
    if of_errors or output:
        return (of_errors or output)[-1]
    is_full = shutil.disk_usage(folder).free < _LEAST_ROOM
    return "it said nothing" + (", as no room is left on its disk" if is_full else "")


def _state(point: Point, folder: pathlib.Path) -> StudyRun:
    about = read_about(folder)
    if about is None:
        return StudyRun(point, folder, None)
    check_settings(point, about, where=str(folder))
    return StudyRun(point, folder, about["status"], about["message"])


def check_settings(point: Point, about: Mapping[str, Any], *, where: str) -> None:
    """Checks that a run has the settings of this point, as its `read_about` tells.

    Raises:
        UserError: it has other settings; or it is done, and a gin file has changed since.
    """
    recorded, settings = about["settings"], _settings(point)
    if recorded != settings and _resolved(recorded) != _resolved(settings):
        raise errors.UserError(
            f"{where} holds a run of other settings ({errors.clip(recorded, limit=2000)}, now "
            f"{settings}); restore the study's settings, or choose another output_dir."
        )
    # Earlier versions recorded none; a run that is not done goes on with what is changed.
    of_run = about.get("contents")
    if about["status"] != "started" and of_run and _contents(point) not in (of_run, None):
        raise errors.UserError(
            f"{where} holds a run of {', '.join(point.gin_files)} as they were before they were "
            "changed; restore the files, or choose another output_dir."
        )


def _contents(point: Point) -> str | None:
    """Returns a digest of the user's own gin files of a run; None if one cannot be read."""
    try:
        lines = gin_files.lines_of_users(point.gin_files)
    except errors.UserError:
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_about(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns settings, status and message of the run in a folder; None if not started.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / STATUS_FILE
    if not path.exists():
        return None
    try:
        content = foreign_files.read_bytes(path, foreign_files.MOST_JSON_BYTES)
        about = foreign_files.parse_json(content)
        fault = about_fault(about)
    except (OSError, ValueError) as error:
        about, fault = None, str(error)
    if fault:
        raise errors.UserError(
            f"{path} is damaged ({fault}); remove it, and the run resumes from its last "
            "checkpoint, if any."
        )
    return about


def about_fault(about: Any) -> str | None:
    """Returns why a value is not a result of `read_about`, or None if it is."""
    if not isinstance(about, dict):
        return f"it holds {errors.clip(about)}"
    missing = [name for name in ("settings", "status", "message") if name not in about]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if about["status"] not in get_args(Status):
        named = errors.clip(about["status"])
        return f"status={named} must be one of {', '.join(get_args(Status))}"
    if not isinstance(about["message"], str):
        return f"message={errors.clip(about['message'])} is no text"
    return None


def write_about(folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Writes the values for `read_about`, atomically."""
    atomic_files.replace_text(folder / STATUS_FILE, json.dumps(about, indent=2) + "\n")


def write_status(
    made: StudyRun, status: Status, message: str = "", *, contents: str | None = None
) -> StudyRun:
    """Notes the status of a run in its folder, and returns the run with it.

    Args:
        made: the run.
        status: its status.
        message: the message of a diverged run.
        contents: a digest of the gin files that it was made with; None if unknown.
    """
    about = {
        "settings": _settings(made.point),
        "contents": contents,
        "status": status,
        "message": message,
    }
    write_about(made.folder, about)
    return made._replace(status=status, message=message)


def _settings(point: Point) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "gin_files": list(point.gin_files),
        "bindings": list(point.bindings),
    }
    # Without a first stage, the description is that of earlier versions.
    return settings | ({"first": _settings(point.first)} if point.first else {})


def _resolved(settings: Any) -> Any:
    """Returns settings with the value of each macro that they set where its name stands.

    So that a run is recognised whose study stated a value then, and states the macro now, or the
    other way round. What is no settings is returned as it is.
    """
    try:
        values = dict(binding.split("=", 1) for binding in settings["bindings"])
        named = {
            name: values.get(value[1:], value) if value.startswith("%") else value
            for name, value in values.items()
        }
        first = {"first": _resolved(settings["first"])} if "first" in settings else {}
        return settings | {"bindings": named} | first
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return settings


def _folder(study: Study, name: str, point: Point) -> pathlib.Path:
    return study.folder / name / point.name


def _bindings(made: StudyRun) -> list[str]:
    bindings = [*made.point.bindings, f"trainer.train.run_dir={str(made.folder)!r}"]
    if made.first is not None:
        bindings += [
            "trainer.train.init_from=@initialization.InitFrom()",
            f"initialization.InitFrom.path={str(made.first.folder)!r}",
        ]
    return bindings


def _lines(log: pathlib.Path, *, after: int) -> list[str]:
    """Returns the lines of a file after the given number of bytes."""
    content = log.read_bytes()[after:] if log.exists() else b""
    return content.decode(errors="replace").strip().splitlines()


class _Progress:
    """A bar in a terminal, and a line for each run that ends.

    Args:
        total: number of runs of the study.
        done: runs finished before this command.
        missing: runs to make now.
        processes: number of concurrent processes.
        out: standard error by default.
    """

    def __init__(self, total: int, done: int, *, missing: int, processes: int, out: TextIO | None):
        self._left = missing
        self._processes = processes
        self._seconds: list[float] = []
        self._bar = Bar(out or sys.stderr, total=total, done=done, unit="run")
        self._bar.write(f"{total} runs, {missing} of them to be made")

    def add(self, made: StudyRun, seconds: float, metric: str) -> None:
        """Shows a run that has ended, and the estimated time for the others."""
        self._left -= 1
        self._seconds.append(seconds)
        value = final_value(made.folder, metric)
        result = "diverged" if made.status == "diverged" else f"{metric} {value:.4f}"
        seconds_left = self._left * sum(self._seconds) / len(self._seconds) / self._processes
        labels = "  ".join(f"{axis}={label}" for axis, label in made.point.labels.items())
        self._bar.write(
            f"[{self._bar.done + 1}/{self._bar.total}] {labels}  {result}  {duration(seconds)}"
            f"  ETA {duration(seconds_left)}"
        )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
