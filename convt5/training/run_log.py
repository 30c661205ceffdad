"""The log of a run: metrics.jsonl, TensorBoard, Weights & Biases, and the terminal.

The trainer passes one record for each logged step. A resumed run drops the records beyond its
checkpoint, so that every step is recorded once.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TextIO

from etils import epath

from convt5 import errors
from convt5.runtime import atomic_files, foreign_files, metric_names
from convt5.runtime.amounts import duration, short_number
from convt5.runtime.bars import Bar
from convt5.training import run_directory

Record = Mapping[str, float]

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
MACHINES_FILE = "machines.jsonl"
_AS_LAST = ("learning_rate", "skipped_updates")
_JUDGED = ("objective", "loss", "grad_norm")
_ACCURACIES = ("token_accuracy", "accuracy")
_SPEED = ("tokens_per_second",)
_MOST_OF_A_TASK = 3  # Metrics of one task in a line.


class Writer(Protocol):
    """A destination of records."""

    def write(self, step: int, record: Record) -> None: ...

    def sync(self) -> None:
        """Ensures that written records survive the process and the machine."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """A file with one JSON object per recorded step, in order: {"step": 10, "loss": 5.1, ...}.

    Args:
        path: the file; records are appended if it exists.
        last_step: drops records beyond this step, which the run will repeat.
    """

    def __init__(self, path: epath.PathLike, *, last_step: int):
        self._path = epath.Path(path)
        kept_records = [r for r in _read_steps(self._path) if r["step"] <= last_step]
        self._text = "".join(map(_line, kept_records))
        # Object stores cannot append, so each `sync` rewrites the whole file there.
        self._is_local = not atomic_files.is_remote(path)
        self._last = _line(kept_records[-1]) if kept_records else ""
        if self._is_local:
            atomic_files.replace_text(self._path, self._text)
            self._file = atomic_files.not_followed(str(self._path), os.O_WRONLY | os.O_APPEND)

    def write(self, step: int, record: Record) -> None:
        """Adds a record; merges it with the previous record if both are of the same step."""
        record_of_step = {"step": step} | {
            name: json_number(value) for name, value in record.items()
        }
        last, before = self._last, json.loads(self._last or "{}")
        if before.get("step") == step:
            self._last = _line(before | record_of_step)
            self._replace(last, self._last)
        else:
            self._last = _line(record_of_step)
            self._append(self._last)

    def _append(self, line: str) -> None:
        if not self._is_local:
            self._text += line
            return
        content = line.encode()
        while content:  # A nearly full disk accepts only a part.
            content = content[os.write(self._file, content) :]

    def _replace(self, last: str, line: str) -> None:
        if not self._is_local:
            self._text = self._text.removesuffix(last) + line
            return
        atomic_files.check_same(self._file, self._path)
        atomic_files.replace_text(self._path, self._path.read_text().removesuffix(last) + line)
        os.close(self._file)
        self._file = atomic_files.not_followed(str(self._path), os.O_WRONLY | os.O_APPEND)

    def sync(self) -> None:
        if not self._is_local:
            self._path.write_text(self._text)
            return
        os.fsync(self._file)
        atomic_files.check_same(self._file, self._path)

    def close(self) -> None:
        try:
            self.sync()
        finally:
            if self._is_local:
                os.close(self._file)


def read_metrics(run_dir: epath.PathLike) -> list[dict[str, Any]]:
    """Returns the records of a run; empty without metrics.jsonl.

    Raises:
        UserError: a line is not the record of a step; names the line.
    """
    return _read_steps(epath.Path(run_dir) / METRICS_FILE)


def _read_steps(path: epath.Path) -> list[dict[str, Any]]:
    records = [metric_names.current(record) for record in read_records(path, need=["step"])]
    for number, record in enumerate(records, start=1):
        if fault := record_fault(record):
            raise errors.UserError(
                f"{path}, line {number} is damaged ({fault}); remove the line, or restore a good "
                "copy of the file."
            )
    return records


def record_fault(record: Any) -> str | None:
    """Returns why a value is not the record of a step, or None if it is."""
    if not isinstance(record, dict) or "step" not in record:
        return f"{errors.clip(record)} is no record of a step"
    for name, value in record.items():
        if not isinstance(value, int) if name == "step" else not _is_number(value):
            return f"{name[:60]}={errors.clip(value)} is no number"
    return None


def _is_number(value: Any) -> bool:
    """Returns whether this is a number as written by `json_number`."""
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def read_records(path: epath.PathLike, *, need: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the records of a JSON lines file, without a last line cut short by a kill.

    Args:
        path: the file; one that does not exist has no records.
        need: keys that every record must have.

    Raises:
        UserError: a line is not such a record; names the line.
    """
    path = epath.Path(path)
    if not path.exists():
        return []
    remedy = "restore a good copy of the file."
    try:
        foreign_files.check_regular(path)
    except ValueError as error:  # To open a pipe waits for ever.
        raise foreign_files.unreadable(path, error, remedy) from error
    try:
        with path.open("rb") as file:
            return [
                _record(line, need, path, number)
                for number, line in enumerate(foreign_files.lines(file), start=1)
                if line.endswith(b"\n")  # Otherwise the line is incomplete.
            ]
    except (OSError, foreign_files.TooLargeError) as error:
        raise foreign_files.unreadable(path, error, remedy) from error


def _record(line: bytes, need: Sequence[str], path: epath.Path, number: int) -> dict[str, Any]:
    try:
        record = foreign_files.parse_json(line, kind=dict)
        for key in need:
            record[key]
    except (ValueError, KeyError) as error:
        raise errors.UserError(
            f"{path}, line {number} is damaged ({error}); it must be a record as JSON: remove the "
            "line, or restore a good copy of the file."
        ) from error
    return record


class Notes:
    """What a run tells now and then, by step, in one file of JSON lines.

    Args:
        path: of the file; continued if it exists.
        last_step: notes of later steps, which the run is about to repeat, are dropped.
    """

    def __init__(self, path: epath.PathLike, *, last_step: int):
        self._path = epath.Path(path)
        found = read_notes(self._path)
        self._notes = {step: note for step, note in found.items() if step <= last_step}

    def add(self, step: int, note: Mapping[str, Any]) -> None:
        """Writes the note of a step, instead of one that there was."""
        self._notes[step] = dict(note)
        lines = (_line({"step": step} | note) for step, note in self._notes.items())
        atomic_files.replace_text(self._path, "".join(lines))


def read_notes(path: epath.PathLike) -> dict[int, dict[str, Any]]:
    """Returns what `Notes` has written, by step; nothing where there is no file.

    Raises:
        UserError: a line has no step; the message names it.
    """
    found = {}
    for number, record in enumerate(read_records(path, need=["step"]), start=1):
        step = record.pop("step")
        if not isinstance(step, int):
            raise errors.UserError(
                f"{path}, line {number} is damaged (step={step!r} is no number); remove the line, "
                "or restore a good copy of the file."
            )
        found[step] = record
    return found


def read_samples(run_dir: epath.PathLike) -> dict[int, str]:
    """Returns by step what a run has shown of its outputs; nothing where it has no samples.jsonl.

    Raises:
        UserError: as `read_notes`.
    """
    notes = read_notes(epath.Path(run_dir) / SAMPLES_FILE)
    return {step: str(note.get("text", "")) for step, note in notes.items()}


class TensorBoard:
    """Scalars for `tensorboard --logdir`; a name with a slash is put in a section of its own.

    Written here rather than by tensorboardX's SummaryWriter, whose thread dies on a full disk and
    blocks the run.

    Args:
        folder: created if needed; its files are shown together.
        last_step: hides what other files hold beyond this step, which the run will repeat; None
            hides nothing.
    """

    def __init__(self, folder: epath.PathLike, *, last_step: int | None):
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        epath.Path(folder).mkdir(parents=True, exist_ok=True)
        # The random part prevents links planted under the name: events_pb2 opens by name.
        unique = f"{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
        path = os.path.join(os.fspath(folder), f"events.out.tfevents.{unique}")
        if atomic_files.is_remote(path):  # tensorboardX needs packages for these, or has no writer.
            scheme = path.partition(":")[0]
            record_writer.register_writer_factory(scheme, SimpleNamespace(open=_WholeFile))
        self._file = record_writer.RecordWriter(path)
        self._made: Any = event_pb2  # Its contents are generated at import.
        self._add(0, file_version="brain.Event:2")
        if last_step is not None:
            status = self._made.SessionLog.START
            self._add(last_step + 1, session_log=self._made.SessionLog(status=status))

    def write(self, step: int, record: Record) -> None:
        from tensorboardX import summary

        for name, value in record.items():
            tag = name if "/" in name else f"train/{name}"
            self._add(step, summary=summary.scalar(tag, value))

    def sync(self) -> None:
        self._file.flush()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._made.Event(wall_time=time.time(), step=step, **content)
        self._file.write(event.SerializeToString())


class _WholeFile:
    """A file in an object store, which cannot append: each `flush` writes all of it."""

    def __init__(self, path: str):
        self._path, self._content = epath.Path(path), bytearray()

    def write(self, content: bytes) -> None:
        self._content += content

    def flush(self) -> None:
        self._path.write_bytes(bytes(self._content))

    def close(self) -> None:
        pass


class WeightsAndBiases:
    """Scalars for wandb.ai; requires the extra `wandb`.

    A resumed run finds its id in the run directory and continues the same page. If wandb fails
    later, the run goes on without it.

    Raises:
        UserError: the package is missing, or wandb refuses the run, for instance without a login.
    """

    def __init__(self, run_dir: epath.PathLike, *, project: str, config: Mapping[str, Any]):
        try:
            import wandb  # An optional dependency.
        except ImportError as error:
            raise errors.UserError(
                f"wandb_project={project!r} needs the package wandb, which is not installed; "
                "pip install 'convt5[wandb]', or leave wandb_project unset."
            ) from error
        id_file = epath.Path(run_dir) / "wandb_id"
        if not id_file.exists():
            atomic_files.replace_text(id_file, uuid.uuid4().hex)
        try:
            self._run: Any = wandb.init(
                project=project,
                id=id_file.read_text(),
                resume="allow",
                name=epath.Path(run_dir).name,
                config=dict(config),
            )
        except wandb.errors.Error as error:
            raise errors.UserError(
                f"wandb_project={project!r} cannot be opened ({error}); log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave wandb_project unset."
            ) from error
        # A step axis of our own, because wandb's refuses steps that are repeated after a kill.
        self._call("define_metric", "*", step_metric="step")

    def write(self, step: int, record: Record) -> None:
        self._call("log", {"step": step, **record})

    def sync(self) -> None:
        pass

    def close(self) -> None:
        self._call("finish")

    def _call(self, name: str, *args: Any, **settings: Any) -> None:
        """Calls a method of the run on wandb.ai, until one has failed."""
        if self._run is None:
            return
        try:
            getattr(self._run, name)(*args, **settings)
        except Exception as error:  # Its service fails in many ways, and no step depends on it.
            self._run = None
            warnings.warn(
                f"wandb failed ({type(error).__name__}: {error}); the run goes on without it, and "
                f"{METRICS_FILE} has every record.",
                stacklevel=2,
            )


class Progress:
    """A progress bar with the remaining time in a terminal, plain lines elsewhere.

    Args:
        num_steps: steps of the whole run.
        first_step: steps made before this process started.
        out: where lines and the bar go; standard error by default.
        seconds_between_lines: plain lines that follow sooner are dropped, except the first, the
            last, and those with an evaluation.
        seconds_between_steps: after this time without a line, a step that is not recorded gets one.
        metric: the metric that selects the best checkpoint; shown first among those of its task.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int,
        out: TextIO | None = None,
        seconds_between_lines: float = 5.0,
        seconds_between_steps: float = 30.0,
        metric: str = "",
    ):
        self._metric = metric
        num_steps = max(num_steps, first_step)  # It may have been lowered below the steps made.
        self._num_steps = num_steps
        self._intervals = seconds_between_lines, seconds_between_steps
        self._last_line = -math.inf
        self._begun: tuple[int, float] | None = None  # The first step made here, and when.
        self._speed: dict[str, float] = {}
        self._bar = Bar(out or sys.stderr, total=num_steps, done=first_step)

    def step(self, step: int, metrics: Record) -> None:
        """Shows the metrics of a step: in the bar, or as a line if the last one is long ago."""
        if self._bar.is_shown:
            facts = _facts({**metrics, **self._speed})
            self._bar.update(step - self._bar.done, facts=facts)
            return
        now = time.monotonic()
        if self._begun is None:
            self._begun = step, now
        first, began = self._begun
        # The first step of a new run is always recorded, that of a resumed run perhaps not.
        if step > 1 and now - self._last_line >= self._intervals[1]:
            seconds = (now - began) / max(step - first, 1)
            self.record(step, {**metrics, "seconds_per_step": seconds})

    def record(self, step: int, record: Record) -> None:
        """Shows the metrics of a logged step."""
        evaluation = _brief_evaluation(record, self._metric)
        if self._bar.is_shown:
            self._speed = {name: record[name] for name in _SPEED if name in record}
            if "loss" in record:
                self._bar.update(0, facts=_facts(record))
            if evaluation:
                self.message(f"step {step}  {evaluation}")
            return
        now = time.monotonic()
        is_soon = now - self._last_line < self._intervals[0]
        if is_soon and not evaluation and step != self._num_steps:
            return
        self._last_line = now
        share = f"{100 * step / self._num_steps:.0f}%"
        parts = [f"step {step}/{self._num_steps} ({share})", *_facts(record), evaluation]
        if record.get("seconds_per_step"):
            seconds_left = (self._num_steps - step) * record["seconds_per_step"]
            parts.append(f"{record['seconds_per_step']:.3g} s/step  ETA {duration(seconds_left)}")
        self.message("  ".join(filter(None, parts)))

    def status(self, text: str) -> None:
        """Shows in the bar what the run does between steps; the next step replaces it."""
        self._bar.update(0, facts=[text])

    def message(self, text: str) -> None:
        self._bar.write(text)

    def close(self) -> None:
        self._bar.close()


class RunLog:
    """All log writers of one process; only the first process of a run has any.

    Each method raises `TrainingError` if the run directory is no longer writable.
    """

    def __init__(
        self, writers: list[Writer], progress: Progress | None, run_dir: epath.PathLike = ""
    ):
        self._writers = writers
        self._progress = progress
        self._run_dir = run_dir
        self._samples: Notes | None = None
        self._machines: Notes | None = None

    def open_files(
        self, *, last_step: int, wandb_project: str | None, config: Mapping[str, Any]
    ) -> None:
        """Creates the log files of the run, or continues them after `last_step`."""
        if self._progress is None:
            return
        folder = epath.Path(self._run_dir)
        with run_directory.writing(folder):
            self._writers += [
                JsonLines(folder / METRICS_FILE, last_step=last_step),
                TensorBoard(folder / "tensorboard", last_step=last_step),
            ]
            self._samples = Notes(folder / SAMPLES_FILE, last_step=last_step)
            self._machines = Notes(folder / MACHINES_FILE, last_step=last_step)
            if wandb_project:
                self._writers += [WeightsAndBiases(folder, project=wandb_project, config=config)]

    def step(self, step: int, metrics: Record) -> None:
        """Shows the metrics of a step, whether or not they are recorded."""
        if self._progress:
            self._progress.step(step, metrics)

    def status(self, text: str) -> None:
        """Shows in the terminal's bar what the run does between steps, such as "evaluating"."""
        if self._progress:
            self._progress.status(text)

    def record(self, step: int, record: Record) -> None:
        """Writes the metrics of one step to all writers; a second record of a step is merged."""
        with run_directory.writing(self._run_dir):
            for writer in self._writers:
                writer.write(step, record)
        if self._progress:
            self._progress.record(step, record)

    def message(self, text: str) -> None:
        """Shows a line in the terminal, above the bar."""
        if self._progress:
            self._progress.message(text)

    def sample(self, step: int, text: str) -> None:
        """Shows and keeps what the model of a step puts out."""
        self.message(f"\n{text}")
        if self._samples:
            with run_directory.writing(self._run_dir):
                self._samples.add(step, {"text": text})

    def machine(self, step: int, about: Mapping[str, Any]) -> None:
        """Keeps with what versions, where and at what cost the run computes after a step."""
        if self._machines:
            with run_directory.writing(self._run_dir):
                self._machines.add(step, about)

    def end_progress(self) -> None:
        """Clears the bar: no step is to come."""
        if self._progress:
            self._progress.close()

    def sync(self) -> None:
        with run_directory.writing(self._run_dir):
            for writer in self._writers:
                writer.sync()

    def close(self) -> None:
        self.end_progress()
        with run_directory.writing(self._run_dir), contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def open_run_log(
    run_dir: epath.PathLike,
    *,
    num_steps: int,
    last_step: int,
    is_first_process: bool,
    metric: str = "",
) -> RunLog:
    """Returns the log of a run that starts, or resumes, after `last_step`.

    It only displays records; nothing is written before `RunLog.open_files`.
    """
    progress = None
    if is_first_process:
        progress = Progress(num_steps=num_steps, first_step=last_step, metric=metric)
    return RunLog([], progress, run_dir)


class Meter:
    """Means of step metrics between two records, and throughput.

    Time counts only while the meter runs, so compilation, evaluation and checkpoints do not count
    as training.

    Args:
        flops_per_step: FLOPs of a training step over all devices; None if unknown.
        peak_flops: FLOPs per second of all devices; None if unknown.
        state: the result of `state()` of an interrupted run, whose window is continued.
    """

    def __init__(
        self,
        *,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        self._started: float | None = None
        self._cpu_started = 0.0
        self._total_seconds = 0.0
        self._cpu_seconds = 0.0
        self._window: dict[str, float] = {}
        self._last: dict[str, float] = {}
        if state:
            self._total_seconds = state["total_seconds"]
            self._cpu_seconds = state.get("cpu_seconds", 0.0)
            self._window = metric_names.current(state["window"])
            self._last = dict(state["last"])

    @property
    def num_steps(self) -> int:
        """Number of steps since the last record."""
        return int(self._window.get("_steps", 0))

    def start(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()
            self._cpu_started = time.process_time()

    def stop(self) -> None:
        if self._started is not None:
            # Clocks of migrated virtual machines can go back.
            elapsed = max(0.0, time.perf_counter() - self._started)
            self._started = None
            self._add("_seconds", elapsed)
            self._total_seconds += elapsed
            self._cpu_seconds += max(0.0, time.process_time() - self._cpu_started)

    def add_step(self, metrics: Record, *, tokens: float, data_wait: float) -> None:
        """Counts one step; `data_wait` is the time in seconds spent waiting for its batch."""
        self._add("_steps", 1)
        self._add("_tokens", tokens)
        self._add("_data_wait", data_wait)
        if all(math.isfinite(metrics.get(name, 0.0)) for name in _JUDGED):
            for name, value in metrics.items():
                if name not in _AS_LAST:
                    self._add(name, value)
        else:
            # A skipped update must not enter the means.
            self._add("_left_out", 1)
        self._last = {name: metrics[name] for name in _AS_LAST if name in metrics}

    def take(self) -> dict[str, float]:
        """Returns the record of the window, and starts the next one.

        Contains the means over the steps since the last record, except skipped updates that were
        not finite; learning rate and counts are those of the last step. Adds `tokens_per_second`,
        `seconds_per_step`, `data_wait_share` in [0, 1], `train_seconds` and `train_cpu_seconds`
        (all threads of this host) since the start of the run, and `flops_utilization` in [0, 1] if
        the peak is known.
        """
        running = self._started is not None
        self.stop()
        window, self._window = self._window, {}
        if running:
            self.start()
        steps = window.get("_steps", 0)
        if not steps:
            return {}  # An evaluation without steps.
        seconds = max(window.get("_seconds", 0.0), 1e-9)
        measured = steps - window.get("_left_out", 0)
        means = {k: v / measured for k, v in window.items() if not k.startswith("_")}
        record = means | self._last
        record["seconds_per_step"] = seconds / steps
        record["data_wait_share"] = min(1.0, window["_data_wait"] / seconds)
        record["train_seconds"] = self._total_seconds
        record["train_cpu_seconds"] = self._cpu_seconds
        if window["_tokens"]:
            record["tokens_per_second"] = window["_tokens"] / seconds
        if self.flops_per_step and self.peak_flops:
            record["flops_utilization"] = self.flops_per_step * steps / seconds / self.peak_flops
        return record

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values; stops the meter."""
        self.stop()
        return {
            "total_seconds": self._total_seconds,
            "cpu_seconds": self._cpu_seconds,
            "window": dict(self._window),
            "last": dict(self._last),
        }

    def _add(self, name: str, value: float) -> None:
        self._window[name] = self._window.get(name, 0.0) + value


def _facts(record: Record) -> list[str]:
    """Formats the parts of a record for a line, the most important first."""
    parts = [f"loss {record['loss']:.4f}"] if "loss" in record else []
    # Without regularisation the two are equal except for rounding.
    if "objective" in record and not math.isclose(
        record["objective"], record["loss"], rel_tol=1e-4
    ):
        parts.append(f"objective {record['objective']:.4f}")
    parts += [
        f"{metric_names.display_name(name)} {record[name]:.2f}"
        for name in _ACCURACIES
        if name in record
    ]
    if "tokens_per_second" in record:
        parts.append(f"{short_number(record['tokens_per_second'])} tokens/s")
    return parts


def _brief_evaluation(record: Record, metric: str) -> str:
    """Formats the metrics of an evaluation: the validation loss, then those of each task."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in record.items():
        half, _, rest = name.rpartition("/") if name == metric else name.partition("/")
        if rest:
            groups.setdefault(half, {})[rest] = value
    parts = []
    if metrics := groups.pop("validation", None):
        bits = metrics.get("bits_per_byte")
        parts = ["  ".join(_facts(metrics))] + (
            [] if bits is None else [f"bits per byte {bits:.4f}"]
        )
        parts[0] = f"validation {parts[0]}"
    for half, metrics in groups.items():
        names = [
            name
            for name in metrics
            if f"{half}/{name}" == metric or not ("/" in name or name in metric_names.OF_TARGETS)
        ]
        names.sort(key=lambda name, half=half: f"{half}/{name}" != metric)
        shown = [
            f"{name.replace('_', ' ')} {metric_names.format_value(name, metrics[name])}"
            for name in names[:_MOST_OF_A_TASK]
        ]
        if shown:
            parts.append(f"{half} {'  '.join(shown)}")
    return "  ".join(parts)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def json_number(value: float) -> float | int | str:
    """Returns a JSON value: numbers unchanged, NaN and infinities (not in JSON) as strings."""
    return value if math.isfinite(value) else str(value)
