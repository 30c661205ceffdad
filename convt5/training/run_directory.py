"""The folder of one run: made, checked to be writable, and held by one process at a time.

checkpoints/<step>/  parameters, optimizer state, position in the data
damaged/<step>/      checkpoints that could not be read
replaced/<step>/     one that is being saved anew, until it is; put back after a kill
config.gin           the settings, which give the same run again
metrics.jsonl        one line for each logged step
summary.json         the result, once the run has ended
tensorboard/
"""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator

import jax
from etils import epath

from convt5 import errors

_LOCK_FILE = "lock"
CONFIG_FILE = "config.gin"


@contextlib.contextmanager
def hold(run_dir: epath.PathLike) -> Iterator[epath.Path]:
    """Makes the folder and keeps other processes out until the context ends.

    The lock vanishes with the process, however that ends. In a run of several hosts the first one
    holds it for all. Folders of an object store are not locked.

    Raises:
        UserError: the folder cannot be written, or a live process uses it.
    """
    folder = epath.Path(run_dir)
    if "://" in str(run_dir):
        _check_writable(folder)
        yield folder
        return
    folder = folder.expanduser().absolute()
    _check_writable(folder)
    if jax.process_index():
        yield folder
        return
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(lock, folder)
        yield folder
    finally:
        os.close(lock)


@contextlib.contextmanager
def writing(folder: epath.PathLike) -> Iterator[None]:
    """Turns what goes wrong with the disk under a run that has begun into the user's error.

    Raises:
        TrainingError: the folder is full, read-only or removed.
    """
    try:
        yield
    except OSError as error:
        raise errors.TrainingError(
            f"the run directory {folder} cannot be written any more: {error.strerror or error}. "
            "Make room there, or see to its permissions; the same command then continues from the "
            "last complete checkpoint."
        ) from error


def write_config(folder: epath.Path, text: str | None, *, step: int) -> str | None:
    """Writes the settings of the run; returns what to tell the user if they have changed.

    Args:
        folder: the run directory.
        text: the settings; None writes nothing.
        step: where the run continues. Settings that differ from those before are kept in
            `config.before_step_<step>.gin`.
    """
    if text is None or jax.process_index():
        return None
    path = folder / CONFIG_FILE
    before = path.read_bytes().decode(errors="replace") if path.exists() else text
    with writing(folder):
        path.write_text(text)
        if before == text or not step:
            return None
        kept = folder / f"config.before_step_{step}.gin"
        kept.write_text(before)
    return f"the settings differ from those of the first {step} steps, which are kept in {kept}"


def _check_writable(folder: epath.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if "://" not in str(folder):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise errors.UserError(
            f"run_dir={str(folder)!r} must be a folder that can be written, but: {error.strerror}; "
            "choose another run_dir, or change its permissions."
        ) from error


def _lock(lock: int, folder: epath.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(lock)
        raise errors.UserError(
            f"run_dir={str(folder)!r} is in use by {holder}; wait for it to end, stop it, or "
            "choose another run_dir."
        ) from None
    except OSError:
        return  # A file system without locks: nothing can be checked.
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    os.ftruncate(lock, 0)
    os.pwrite(lock, about.encode(), 0)


def _holder(lock: int) -> str:
    try:
        about = json.loads(os.pread(lock, 1000, 0))
        return f"process {about['pid']} on {about['host']}"
    except (ValueError, KeyError):
        return "another process"
