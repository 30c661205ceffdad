"""Files that evaluation and prediction write: complete or absent, and one writer at a time.

<output_dir>/<task>/<split>/step_<step>.json       metrics and counts
                            step_<step>.jsonl      predictions, one line for each example
<output_dir>/tensorboard/                          the metrics over steps
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from etils import epath

from convt5 import errors
from convt5.checkpoints.record import differences
from convt5.runtime import file_locks, foreign_files, whole_files
from convt5.training.run_directory import replace_text
from convt5.training.run_log import TensorBoard


class Outcome(NamedTuple):
    """What was found for one model and one task.

    Attributes:
        task, split: what was measured.
        metrics: by name; `loss` is the cross-entropy of target tokens in nats per token (where
            labels are ranked, of the right ones), or that of labels of images in nats.
        counts: examples, target tokens that the loss is of, and inputs and targets that were cut.
        records: for each example its texts, predictions and scores, as JSON values.
    """

    task: str
    split: str
    metrics: dict[str, float]
    counts: dict[str, int]
    records: list[dict[str, Any]]


class Results:
    """The results of one command; only the first host of a run makes one.

    Args:
        folder: made when something is written.
        settings: JSON values that the results depend on; part of each file.
    """

    def __init__(self, folder: epath.PathLike, settings: Mapping[str, Any]):
        self.folder = epath.Path(folder)
        self._settings = json.loads(json.dumps(settings))
        self._tensorboard: TensorBoard | None = None

    def path(self, task: str, split: str, step: int | None) -> epath.Path:
        name = "model" if step is None else f"step_{step}"
        return self.folder / _file_name(task) / _file_name(split) / f"{name}.json"

    def exists(self, task: str, split: str, step: int | None) -> bool:
        """Whether there are results of the same settings; a damaged file is none.

        Raises:
            UserError: `write` could not write them.
        """
        path = self.path(task, split, step)
        self._check_writable(path)
        found = read_object(path)
        return found is not None and found.get("settings") == self._settings

    def write(self, outcome: Outcome, step: int | None) -> epath.Path:
        """Writes all files of one task and step; returns the path of the metrics.

        Raises:
            UserError: the folder cannot be written.
        """
        path = self.path(outcome.task, outcome.split, step)
        summary = {
            "task": outcome.task,
            "split": outcome.split,
            "step": step,
            "metrics": outcome.metrics,
            **outcome.counts,
            "settings": self._settings,
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path.with_suffix(".jsonl"), "".join(map(json_line, outcome.records)))
            # Last, so that where it is, everything is.
            replace_text(path, json.dumps(_plain(summary), indent=2) + "\n")
        except OSError as error:
            raise errors.UserError(
                f"output_dir={str(self.folder)!r} must be a folder that can be written, but: "
                f"{error.strerror}; choose another with --output_dir."
            ) from error
        if step is not None:
            self._write_tensorboard(outcome, step)
        return path

    def _check_writable(self, path: epath.Path) -> None:
        """Finds out before anything is measured, which may take hours."""
        if whole_files.is_remote(path):
            return
        folders = [self.folder / "tensorboard", path.parent, path.parent.parent]
        wanted = [(p, "a folder") for p in folders]
        wanted += [(p, "a file") for p in (path, path.with_suffix(".jsonl"))]
        faults = [
            f"{p} is {found}, where {want} must be"
            for p, want in wanted
            if (found := whole_files.kind(p)) not in (None, want)
        ]
        places = [path.parent, *path.parent.parents]
        nearest = next(p for p in places if os.path.lexists(p))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            faults.append(f"{nearest} is no folder that can be written")
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
            self._tensorboard = TensorBoard(self.folder / "tensorboard", last_step=0)
        prefix = f"{outcome.task}/{outcome.split}"
        self._tensorboard.write(
            step, {f"{prefix}/{name}": value for name, value in outcome.metrics.items()}
        )
        self._tensorboard.sync()


class ResumableLines:
    """A JSONL file that a killed command continues after its last complete line.

    Settings lie beside it, in FILE.settings.json: lines of other settings are not mixed.

    Attributes:
        num_done: complete lines, whose records `done` yields.
    """

    def __init__(self, path: epath.PathLike, settings: Mapping[str, Any]):
        """Opens the file, cutting a last line that was not completed.

        Raises:
            UserError: another process writes it, it was made with other settings, or it cannot be
                written.
        """
        self.path = os.path.expanduser(os.fspath(path))
        settings = json.loads(json.dumps(settings))
        try:
            if folder := os.path.dirname(self.path):
                os.makedirs(folder, exist_ok=True)
            if os.path.exists(self.path) and not os.path.isfile(self.path):
                raise OSError(0, "it is no regular file, which alone can be continued")
            self._file: BinaryIO = open(self.path, "a+b")  # noqa: SIM115  # Closed by `close`.
        except OSError as error:
            raise errors.UserError(
                f"output={self.path} must be a file that can be written, but: {error.strerror}."
            ) from error
        try:
            self._lock()
            self._check_settings(settings)
            self.num_done = self._cut_torn_line()
        except BaseException:
            self._file.close()
            raise

    def done(self) -> Iterator[dict[str, Any]]:
        """Yields the records that were there when the file was opened."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file):
                if number == self.num_done:
                    return
                record = _object(line)
                if record is None:
                    raise errors.UserError(
                        f"output={self.path}: line {number + 1} is no JSON object, so that the "
                        "command cannot continue there; choose another output, or remove the file."
                    )
                yield record

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records; they outlast the process and the machine when it returns."""
        self._file.write("".join(map(json_line, records)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        if not file_locks.lock(self._file):
            raise errors.UserError(
                f"output={self.path} is being written by another process; wait for it to end, or "
                "choose another output."
            )

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        beside = epath.Path(f"{self.path}.settings.json")
        has_lines = os.path.getsize(self.path) > 0
        if not has_lines:
            replace_text(beside, json.dumps(settings, indent=2) + "\n")
            return
        before = read_object(beside)
        if before is None:
            found = (
                f"was made with settings that are not known: {beside.name} beside it is damaged"
                if beside.exists()
                else f"holds something else: there is no {beside.name} beside it"
            )
            raise errors.UserError(
                f"output={self.path} {found}; choose another output, or remove the file."
            )
        changed = differences(before, settings)
        if changed:
            raise errors.UserError(
                f"output={self.path} was made with other settings ({'; '.join(changed)}), so that "
                "it cannot be continued; set them back, choose another output, or remove the file."
            )

    def _cut_torn_line(self) -> int:
        """Returns the number of complete lines; only those remain."""
        self._file.seek(0)
        lines = end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return lines


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
    """Returns the JSON object in a file; None where there is no file, or no such object in it."""
    return foreign_files.find_json(path)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        return foreign_files.parse_json(text, kind=dict)
    except ValueError:
        return None


def _file_name(name: str) -> str:
    """Splits may be slices such as train[:10%], and names of tasks may hold colons."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: those become strings, as in metrics.jsonl."""
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
