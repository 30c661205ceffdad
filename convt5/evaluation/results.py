"""Result files of evaluation and prediction: written atomically, by one writer at a time.

<output_dir>/<task>/<split>/step_<step>.json       metrics and counts
                            step_<step>.jsonl      predictions, one line for each example
<output_dir>/tensorboard/                          the metrics over steps
"""

import contextlib
import json
import os
import pathlib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from etils import epath

from convt5 import errors
from convt5.checkpoints.record import differences
from convt5.runtime import atomic_files, file_locks, folders, foreign_files
from convt5.training.run_log import TensorBoard

Model = Mapping[str, str]
_UNKNOWN: Model = {}
_UNTOLD = {
    "content",
    "loss",
    "model",
    "reestimate_data",
    "rows",
    "tasks",
    "vocabularies",
    "vocabulary_content",
}
"""Settings that an earlier version did not tell."""


class Outcome(NamedTuple):
    """The results of one model on one task.

    Attributes:
        task, split: the task and split measured.
        metrics: by name. `loss` is the cross-entropy of target tokens in nats per token (if labels
            are ranked, of the correct ones), or of image labels in nats.
        counts: numbers of examples, of target tokens in the loss, and of truncated inputs and
            targets.
        records: for each example its texts, predictions and scores, as JSON values.
    """

    task: str
    split: str
    metrics: dict[str, float]
    counts: dict[str, int]
    records: list[dict[str, Any]]


class Results:
    """The result files of one command; only the first host of a run has them.

    Args:
        folder: created when something is written.
        settings: JSON values that the results depend on, written to each file.
    """

    def __init__(self, folder: epath.PathLike, settings: Mapping[str, Any]):
        self.folder = epath.Path(folder)
        self._place = os.path.realpath(folder)
        self._settings = json.loads(json.dumps(settings))
        self._tensorboard: TensorBoard | None = None

    def path(self, task: str, split: str, step: int | None) -> epath.Path:
        name = "model" if step is None else f"step_{step}"
        return self.folder / _file_name(task) / _file_name(split) / f"{name}.json"

    def exists(self, task: str, split: str, step: int | None, model: Model = _UNKNOWN) -> bool:
        """Returns whether there are results with the same settings; damaged files do not count.

        Args:
            task, split, step: what was measured.
            model: what identifies the model, as `write` got it.

        Raises:
            UserError: `write` could not write them.
        """
        path = self.path(task, split, step)
        self.check_writable(task, split, step)
        content = read_object(path)
        return content is not None and not self._changes(content, model)

    def replaced(self, task: str, split: str, step: int | None, model: Model = _UNKNOWN) -> str:
        """Returns a sentence if `write` will replace results of other settings; else ""."""
        path = self.path(task, split, step)
        content = read_object(path)
        if content is None or not (changes := self._changes(content, model)):
            return ""
        return (
            f"{path} holds results of other settings ({'; '.join(changes)}), which will be "
            "replaced; to keep both, name a folder with --output_dir."
        )

    def _changes(self, content: Mapping[str, Any], model: Model) -> list[str]:
        """Returns how the settings of results differ."""
        before, now = content.get("settings"), {**self._settings, **model}
        if not isinstance(before, dict):
            return ["unknown"]
        return _told_differences(before, now)

    def write(self, outcome: Outcome, step: int | None, model: Model = _UNKNOWN) -> epath.Path:
        """Writes all files of one task and step; returns the path of the metrics.

        Args:
            outcome: the results.
            step: the step of the model; None for an exported one.
            model: what identifies the model, written to the settings.

        Raises:
            UserError: the folder is not writable.
        """
        path = self.path(outcome.task, outcome.split, step)
        self.check_writable(outcome.task, outcome.split, step)
        summary = {
            "task": outcome.task,
            "split": outcome.split,
            "step": step,
            "metrics": outcome.metrics,
            **outcome.counts,
            "settings": {**self._settings, **model},
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.replace_text(
                path.with_suffix(".jsonl"), "".join(map(json_line, outcome.records))
            )
            # Written last, so that its presence means that all files are complete.
            atomic_files.replace_text(path, json.dumps(_plain(summary), indent=2) + "\n")
        except OSError as error:
            raise errors.UserError(
                f"output_dir={str(self.folder)!r} must be a folder that can be written, but: "
                f"{error.strerror}; choose another with --output_dir."
            ) from error
        if step is not None:
            self._write_tensorboard(outcome, step)
        return path

    def check_writable(self, task: str, split: str, step: int | None) -> None:
        """Checks that files can be written: early, because measuring may take hours, and again.

        Raises:
            UserError: something is in their way, or the folder is not writable.
        """
        path = self.path(task, split, step)
        if atomic_files.is_remote(path):
            return
        directories = [self.folder / "tensorboard", path.parent, path.parent.parent]
        expected_kinds = [(p, "a folder") for p in directories]
        expected_kinds += [(p, "a file") for p in (path, path.with_suffix(".jsonl"))]
        faults = [
            f"{p} is {kind}, where {want} must be"
            for p, want in expected_kinds
            if (kind := atomic_files.kind(p)) not in (None, want)
        ]
        places = [path.parent, *path.parent.parents]
        nearest = next(p for p in places if os.path.lexists(p))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            faults.append(f"{nearest} is no folder that can be written")
        if os.path.realpath(self.folder) != self._place:
            faults.append(f"it led to {self._place} when the command began")
        if faults:
            raise errors.UserError(
                f"output_dir={str(self.folder)!r} must be a folder that can be written, but "
                f"{'; '.join(faults)}; remove that, or choose another with --output_dir."
            )

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_tensorboard(self, outcome: Outcome, step: int) -> None:
        if self._tensorboard is None:
            self._tensorboard = TensorBoard(self.folder / "tensorboard", last_step=None)
        prefix = f"{outcome.task}/{outcome.split}"
        self._tensorboard.write(
            step, {f"{prefix}/{name}": value for name, value in outcome.metrics.items()}
        )
        self._tensorboard.sync()


class ResumableLines:
    """A JSONL file that a command resumes after its last complete line.

    FILE.settings.json holds its settings: lines with different settings are not mixed.

    Attributes:
        num_done: number of complete lines, whose records `done` yields.
    """

    def __init__(self, path: epath.PathLike, settings: Mapping[str, Any]):
        """Opens the file and removes an incomplete last line.

        Raises:
            UserError: another process is writing it, it has other settings, or it is not writable.
        """
        self.path = os.path.expanduser(os.fspath(path))
        settings = json.loads(json.dumps(settings))
        _check_name(self.path)
        try:
            if folder := os.path.dirname(self.path):
                os.makedirs(folder, exist_ok=True)
            if os.path.exists(self.path) and not os.path.isfile(self.path):
                raise OSError(0, "it is not a regular file, so it cannot be resumed")
            self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115  # Closed by `close`.
        except OSError as error:
            raise _unwritable(self.path, error.strerror) from error
        try:
            self._lock()
            if os.path.getsize(self.path):
                _check_settings(self.path, settings)
            else:
                beside = epath.Path(f"{self.path}.settings.json")
                atomic_files.replace_text(beside, json.dumps(settings, indent=2) + "\n")
            self.num_done = self._cut_torn_line()
        except BaseException:
            self._file.close()
            raise

    def done(self) -> Iterator[dict[str, Any]]:
        """Yields the records that existed when the file was opened."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if number == self.num_done:
                    return
                record = _object(line)
                if record is None:
                    raise errors.UserError(
                        f"output={self.path}: line {number + 1} is not a JSON object, so the "
                        "command cannot resume there; choose another output, or remove the file."
                    )
                yield record

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records; on return they survive the process and the machine."""
        self._file.write("".join(map(json_line, records)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._check_place()

    def close(self) -> None:
        self._file.close()

    def _check_place(self) -> None:
        """Raises `TrainingError` if the path no longer names the file, which nobody would find."""
        try:
            atomic_files.check_same(self._file.fileno(), os.path.realpath(self.path))
        except OSError as error:
            raise errors.TrainingError(
                f"output={self.path} was removed or replaced while it was being written "
                f"({error.strerror}); repeat the command, and leave the file in its place."
            ) from error

    def _lock(self) -> None:
        if not file_locks.lock(self._file):
            raise errors.UserError(
                f"output={self.path} is being written by another process; wait for it to end, or "
                "choose another output."
            )

    def _cut_torn_line(self) -> int:
        """Removes an incomplete last line; returns the number of complete lines."""
        self._file.seek(0)
        lines = end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return lines


def check_resumable(path: epath.PathLike, settings: Mapping[str, Any]) -> None:
    """Checks, without writing, that `ResumableLines` can be opened.

    Raises:
        UserError: the file has other settings, or cannot be written.
    """
    path = os.path.expanduser(os.fspath(path))
    _check_name(path)
    file = pathlib.Path(os.path.abspath(path))
    nearest, fault = next(place for place in (file, *file.parents) if os.path.exists(place)), None
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # Such as a name that is too long.
        raise _unwritable(file, error.strerror) from error
    if nearest == file and not file.is_file():
        fault = "it is not a regular file, so it cannot be resumed"
    elif nearest != file and not nearest.is_dir():
        fault = f"{nearest} is no folder"
    elif not os.access(nearest, os.W_OK):
        fault = f"{nearest} may not be written"
    if fault:
        raise _unwritable(file, fault)
    if nearest == file and file.stat().st_size:
        _check_settings(str(file), json.loads(json.dumps(settings)))


def _check_name(path: str) -> None:
    if atomic_files.is_remote(path):
        raise errors.UserError(
            f"output={path} must be a local file; copy it to the bucket afterwards, with gcloud "
            "storage cp."
        )
    if path.endswith(os.sep):
        raise _unwritable(path, "its name ends as that of a folder")
    folders.check_outside_checkpoints(path, what="output")


def _unwritable(path: epath.PathLike, reason: str | None) -> errors.UserError:
    return errors.UserError(f"output={path} must be a file that can be written, but: {reason}.")


def _check_settings(path: str, settings: Mapping[str, Any]) -> None:
    """Raises `UserError` unless the lines of a file were made with these settings."""
    beside = epath.Path(f"{path}.settings.json")
    before = read_object(beside)
    if before is None:
        conflict = (
            f"was made with unknown settings: {beside.name} beside it is damaged"
            if beside.exists()
            else f"holds something else: there is no {beside.name} beside it"
        )
        raise errors.UserError(
            f"output={path} {conflict}; choose another output, or remove the file."
        )
    if changes := _told_differences(before, settings):
        raise errors.UserError(
            f"output={path} was made with other settings ({'; '.join(changes)}), so it "
            "cannot be resumed; restore these settings, choose another output, or remove "
            "the file."
        )


def _told_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns `record.differences`, except in what an earlier version did not tell."""
    untold = _UNTOLD - before.keys()
    return differences(before, {name: now[name] for name in now.keys() - untold})


def json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), ensure_ascii=False) + "\n"


@contextlib.contextmanager
def closing_results(results: Results | None) -> Iterator[Results | None]:
    """Closes the results of the first host; other hosts have none."""
    try:
        yield results
    finally:
        if results is not None:
            results.close()


def read_object(path: epath.Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if it does not exist or holds no object."""
    return foreign_files.find_json(path)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        return foreign_files.parse_json(text, kind=dict)
    except ValueError:
        return None


def _file_name(name: str) -> str:
    """Escapes a name, such as task:a or train[:10%], as in URLs: other names have other files."""
    return "".join(c if c.isalnum() else urllib.parse.quote(c, safe="") for c in name)


def _plain(value: Any) -> Any:
    """Returns JSON values; NaN and infinities, not in JSON, become strings as in metrics.jsonl."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
