"""The directory of one run: created, checked to be writable, and locked by one process at a time.

checkpoints/<step>/  parameters, optimizer state, data position
damaged/<step>/      checkpoints that could not be read
replaced/<step>/     a checkpoint while it is saved again; restored after a kill
classes.json         the names of the labels of images
config.gin           the settings, which reproduce the run
machines.jsonl       versions, devices and the cost of a step, for each start of the run
metrics.jsonl        one line for each logged step
samples.jsonl        what the model put out, by step, where the run shows samples
summary.json         the result, once the run has ended
task.json            the input formats of its tasks
vocabulary/          the text of each token id
tensorboard/
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence

import jax
from etils import epath

from convt5 import errors
from convt5.checkpoints import record
from convt5.runtime import atomic_files, file_locks, folders, foreign_files
from convt5.text import task_format, vocabulary_files

_LOCK_FILE = "lock"
CLASSES = "classes.json"
CONFIG_FILE = "config.gin"
SUMMARY_FILE = "summary.json"

_MOST_SHOWN = 160
"""Letters of a change of settings that a message shows; of longer ones it names the setting."""

_FILES = (
    _LOCK_FILE,
    CLASSES,
    CONFIG_FILE,
    "machines.jsonl",
    "metrics.jsonl",
    "samples.jsonl",
    SUMMARY_FILE,
    "task.json",
    "wandb_id",
)
_OF_STEPS = ("checkpoints", "damaged", "replaced")
_FOLDERS = (*_OF_STEPS, vocabulary_files.FOLDER, "tensorboard")


@contextlib.contextmanager
def hold(run_dir: epath.PathLike, *, what: str = "run_dir") -> Iterator[epath.Path]:
    """Creates the run directory and locks out other processes until the context ends.

    The lock ends with the process, however it ends. In a run of several hosts, the first holds it
    for all. Directories in an object store are not locked. A new directory in which nothing was
    written before an error is removed.

    Args:
        run_dir: the directory.
        what: the setting to name in messages.

    Raises:
        UserError: the directory is not writable, or another process uses it.
    """
    check(run_dir, what=what)
    folder = folders.literal(run_dir)
    if atomic_files.is_remote(folder):
        _check_writable(folder, what)
        yield folder
        return
    is_new = not folder.exists()
    _check_writable(folder, what)
    if jax.process_index():
        yield folder
        return
    lock = _open_lock(folder)
    try:
        _lock(lock, folder, what)
        atomic_files.remove_left_overs(folder)
        yield folder
    except errors.UserError:
        if is_new:
            _remove_if_empty(folder)
        raise
    finally:
        os.close(lock)


def check(run_dir: epath.PathLike, *, what: str = "run_dir") -> None:
    """Raises `UserError` for a path that cannot be a run directory; creates nothing.

    Args:
        run_dir: the path.
        what: the setting to name in messages.
    """
    if not str(run_dir):
        raise errors.UserError(f"{what}='' must name a folder; `.` is the working directory.")
    folders.check(run_dir, what=what)
    folders.check_outside_checkpoints(run_dir, what=what)
    if atomic_files.is_remote(run_dir):
        return
    folder = pathlib.Path(folders.literal(run_dir))
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        kind = atomic_files.kind(nearest)
        raise _unwritable(folder, what, f" {nearest} is {kind}{' to none' * nearest.is_symlink()}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _unwritable(folder, what, f" {nearest} may not be written")
    if nearest == folder and (faults := list(_in_the_way(folder))):
        raise errors.UserError(
            f"{what}={str(folder)!r} cannot be used: {'; '.join(errors.abbreviate(faults))}. A "
            "run directory is not written through links, and nothing in it is overwritten by a "
            f"different kind of file: remove the obstacle, or choose another {what}."
        )


def _in_the_way(folder: pathlib.Path) -> Iterator[str]:
    """Yields existing files or folders of the wrong kind under the names that a run writes."""
    vocabularies = folder / vocabulary_files.FOLDER
    steps = [path for name in _OF_STEPS for path in _children(folder / name)]
    files = [*[folder / name for name in _FILES], *folder.glob("config.before_step_*.gin")]
    for path in [*files, *_children(vocabularies)]:
        if (kind := atomic_files.kind(path)) not in (None, "a file"):
            yield f"{path} is {kind} where a file must be"
    for path in [*[folder / name for name in _FOLDERS], *steps]:
        if (kind := atomic_files.kind(path)) not in (None, "a folder"):
            yield f"{path} is {kind} where a folder must be"


def _children(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.iterdir()) if atomic_files.kind(folder) == "a folder" else []


@contextlib.contextmanager
def writing(folder: epath.PathLike) -> Iterator[None]:
    """Turns disk errors in a running run into user errors.

    Raises:
        TrainingError: the directory is full, read-only or removed.
    """
    try:
        yield
    except OSError as error:
        raise errors.TrainingError(
            f"the run directory {folder} cannot be written any more: "
            f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}. "
            f"{atomic_files.to_write_again(folder)}; the same command then resumes from the last "
            "complete checkpoint."
        ) from error


def write_config(folder: epath.Path, text: str | None, *, step: int) -> str | None:
    """Writes the settings of the run; returns a message for the user if they changed.

    Args:
        folder: the run directory.
        text: the settings; None writes nothing.
        step: where the run resumes. The settings before it are kept in
            `config.before_step_<step>.gin` if they differ; after two changes at the same step, that
            file still holds the settings of the steps before it.
    """
    if text is None or jax.process_index():
        return None
    path = folder / CONFIG_FILE
    saved_before = folder / f"config.before_step_{step}.gin"
    with writing(folder):
        earlier = [p for p in (saved_before, path) if step and p.exists()]
        before = earlier[0].read_bytes().decode(errors="replace") if earlier else text
        if before != text:
            atomic_files.replace_text(saved_before, before)
        atomic_files.replace_text(path, text)
        if before == text:
            return None
    changes = record.differences(_statements(before), _statements(text))
    short = [line if len(line) <= _MOST_SHOWN else line.split(":")[0] for line in changes]
    told = f" ({'; '.join(errors.abbreviate(short))})" if changes else ""
    return (
        f"the settings differ from those of the first {step} steps{told}, which are kept in "
        f"{saved_before}"
    )


def _statements(text: str) -> dict[str, str]:
    """Returns the value of each setting as it is written; it may go on over indented lines."""
    statements = re.findall(r"^(\S+) = *(.*(?:\n[^\S\n].*)*)", text, re.MULTILINE)
    return {name: " ".join(value.replace("\\\n", "").split()) for name, value in statements}


def write_vocabularies(folder: epath.Path, text: vocabulary_files.KeptText) -> None:
    """Saves the text of each token id, so that the run can be used without its data."""
    if not jax.process_index():
        with writing(folder):
            vocabulary_files.write(folder / vocabulary_files.FOLDER, text)


def write_task(folder: epath.Path, formats: Sequence[task_format.TaskFormat]) -> None:
    """Saves the input formats of the tasks, so that predictions use the same ones."""
    if not jax.process_index():
        with writing(folder):
            task_format.write(folder, formats)


def write_class_names(folder: epath.Path, names: Sequence[str]) -> None:
    """Saves the names of the labels of images, so that others are refused in evaluation."""
    if not jax.process_index():
        with writing(folder):
            text = json.dumps({"classes": list(names)}) + "\n"
            atomic_files.replace_text(folder / CLASSES, text)


def find_class_names(model: epath.PathLike) -> Sequence[str]:
    """Returns the names saved with a run or one of its steps; empty if there are none."""
    folder = folders.run_folder(model, CLASSES)
    kept = foreign_files.find_json(folder / CLASSES) if folder else None
    names = (kept or {}).get("classes")
    return names if isinstance(names, list) else ()


def _remove_if_empty(folder: epath.Path) -> None:
    """Removes a run directory that holds only its lock and empty folders."""
    files = {name for _, _, names in os.walk(folder) for name in names}
    if files <= {_LOCK_FILE}:
        shutil.rmtree(folder, ignore_errors=True)


def _open_lock(folder: epath.Path) -> int:
    path = folder / _LOCK_FILE
    try:
        # Other users of a shared folder may lock it too, as far as the umask allows.
        return atomic_files.not_followed(os.fspath(path), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise errors.UserError(
            f"{path} must be a file that can be written, but: {error.strerror}; remove it, or "
            "change its permissions."
        ) from error


def _check_writable(folder: epath.Path, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not atomic_files.is_remote(folder):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise _unwritable(folder, what, f": {error.strerror}") from error


def _unwritable(folder: os.PathLike, what: str, reason: str) -> errors.UserError:
    return errors.UserError(
        f"{what}={str(folder)!r} must be a folder that can be written, but{reason}; choose "
        f"another {what}, or change its permissions."
    )


def _lock(lock: int, folder: epath.Path, what: str) -> None:
    if not file_locks.lock(lock):
        raise errors.UserError(
            f"{what}={str(folder)!r} is in use by {_holder(lock)}; wait for it to end, stop it, "
            f"or choose another {what}."
        )
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    os.ftruncate(lock, 0)
    os.pwrite(lock, about.encode(), 0)


def _holder(lock: int) -> str:
    try:
        about = foreign_files.parse_json(os.pread(lock, 1000, 0), kind=dict)
        return f"process {about['pid']} on {about['host']}"
    except (ValueError, KeyError):
        return "another process"
