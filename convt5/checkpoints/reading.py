"""Reads checkpoints outside the run that wrote them: evaluation, inference, fine-tuning, export.

A checkpoint is a folder named after its step; incomplete ones have other names, or in gs:// lack
the file that is written last.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from convt5 import errors
from convt5.checkpoints import array_files, late_errors, named_arrays, record
from convt5.checkpoints.checksums import find_mismatches
from convt5.runtime import atomic_files, folders, foreign_files

COMMITTED = "commit_success.txt"
"""The file that completes a checkpoint in gs://, where orbax writes it last."""
EMA = "ema"
"""Name of the model average, in the state and beside the optimizer state on disk."""

T = TypeVar("T")

_OF_PROCESS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REFUSALS = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", *map(os.strerror, _OF_PROCESS))


def find_checkpoint(path: epath.PathLike, *, step: int | None = None) -> epath.Path:
    """Returns the folder of one checkpoint, given a run directory or any path inside it.

    Raises:
        UserError: there is no checkpoint, or `path` is one of another step.
    """
    path = folders.literal(path)
    if (path / "about").exists():
        if step is not None and path.name != str(step):
            raise errors.UserError(
                f"step={step} selects a checkpoint of a run, but {path} is a single checkpoint; "
                "leave out step, or give the run directory."
            )
        return path
    for folder in (path / "checkpoints", path):
        steps = steps_in(folder)
        if steps and (step is None or step in steps):
            return folder / str(max(steps) if step is None else step)
        if steps:
            raise errors.UserError(
                f"step={step} is not among the checkpoints in {folder}: "
                f"{', '.join(map(str, steps))}; choose one of these."
            )
    raise errors.UserError(
        f"no checkpoint in {path}: expected a run directory that holds checkpoints/<step>, or one "
        "such step; check the path, or train first."
    )


def steps_in(folder: epath.PathLike) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, which need not exist."""
    folder = epath.Path(folder)
    if not folder.is_dir():
        return []
    steps = (child for child in folder.iterdir() if _is_step(child.name))
    return sorted(int(step.name) for step in steps if _is_complete(step))


def _is_complete(step: epath.Path) -> bool:
    # Elsewhere, orbax renames the folder of a complete checkpoint.
    return not os.fspath(step).startswith("gs://") or (step / COMMITTED).exists()


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()  # Digits of other scripts name no step.


def read_description(folder: epath.PathLike) -> Any:
    """Returns the `describe_config` of the model in one checkpoint from `find_checkpoint`."""
    with _naming_read_errors(folder):
        return record.read(folder)["model"]


def fingerprint(folder: epath.PathLike) -> str:
    """Returns what identifies model and arrays of one checkpoint, wherever it lies."""
    about = _about(folder)
    text = json.dumps([about["model"], about.get("checksums")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_params(
    path: epath.PathLike, abstract_model: Any, *, step: int | None = None, ema: bool = False
) -> Any:
    """Reads only the parameters of a model, without optimizer state and data position.

    Args:
        path: a run directory, its `checkpoints` folder, or the folder of one step.
        abstract_model: the shapes of the model, for instance from `jax.eval_shape`. Leaves may have
            shardings; otherwise they are placed on the default device.
        step: the step to read; None means the newest.
        ema: reads the average of the model instead.

    Raises:
        UserError: there is no checkpoint, it has another architecture, or it has no average.
    """
    folder = find_checkpoint(path, step=step)
    about = _about(folder)
    params = named_arrays.by_path(abstract_model)
    record.check_shapes(
        about["params"], record.shapes(params), what="parameters", where=str(folder)
    )
    if ema:
        check_average(folder)
        shapes = {f"{EMA}/{name}": leaf for name, leaf in params.items()}
        return named_arrays.fill(
            abstract_model, named_arrays.nest(load_named(folder, shapes, part="optimizer"))[EMA]
        )
    return named_arrays.fill(abstract_model, named_arrays.nest(load_named(folder, params)))


def has_average(folder: epath.PathLike) -> bool:
    """Returns whether one checkpoint from `find_checkpoint` has an average of the model."""
    return any(name.startswith(f"{EMA}/") for name in _about(folder)["optimizer"])


def check_average(folder: epath.PathLike) -> None:
    """Raises `UserError` if one checkpoint from `find_checkpoint` has no average of the model."""
    if not has_average(folder):
        raise errors.UserError(
            f"{folder} holds no moving average of the parameters, because its run was trained "
            "without one; leave out ema, or train with trainer.train.ema=@averaging.EMA()."
        )


def step_of(folder: epath.PathLike) -> int:
    """Returns the step of a checkpoint, even if its folder was renamed or copied."""
    folder = epath.Path(folder)
    # Elsewhere a number may be any name, such as that of the third model.
    is_in_run = folder.parent.name == "checkpoints" or not (folder / "optimizer").exists()
    if _is_step(folder.name) and is_in_run:
        return int(folder.name)
    shapes = {"step": record.parse_shape("int32[]")}
    return int(load_named(folder, shapes, part="optimizer")["step"])


def load_named(
    folder: epath.PathLike, wanted: Mapping[str, jax.ShapeDtypeStruct], *, part: str = "params"
) -> dict[str, jax.Array]:
    """Reads some parameters of one checkpoint from `find_checkpoint`, by name.

    Args:
        folder: the checkpoint.
        wanted: their saved shapes, with shardings, or without to place them on a device of this
            host.
        part: "optimizer" reads optimizer state instead.
    """
    if not wanted:
        return {}
    # The first of all devices belongs to another host, except on the first host.
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    leaves = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default
        )
        for name, leaf in wanted.items()
    }
    folder = folders.literal(folder)
    about = _about(folder)
    with _naming_read_errors(folder):
        return read_arrays(folder, part, leaves, about)


def load_everything(folder: epath.PathLike) -> dict[str, dict[str, jax.Array]]:
    """Reads parameters and optimizer state of one checkpoint by name, onto local devices.

    The result has the keys "params" and "optimizer".
    """
    about = _about(folder)
    parts = ("params", "optimizer")
    shapes = {
        part: {name: record.parse_shape(text) for name, text in about[part].items()}
        for part in parts
    }
    return {part: load_named(folder, shapes[part], part=part) for part in parts}


def saved_params(folder: epath.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the parameters in one checkpoint from `find_checkpoint`."""
    with _naming_read_errors(folder):
        params = record.read(folder)["params"]
        return {name: record.parse_shape(text) for name, text in params.items()}


def read_arrays(
    folder: epath.Path,
    part: str,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    about: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint by name, with the requested shardings.

    All hosts must call it; all succeed, or all raise. Checkpoints of versions without checksums are
    not verified.
    """
    late_errors.silence()
    item = named_arrays.nest(leaves)
    # Deferred: importing orbax takes a second, for which a new run need not wait.
    import orbax.checkpoint as ocp

    # The bare handler: orbax's readers wait for all hosts, even for one that has failed.
    reader = ocp.PyTreeCheckpointHandler()
    arguments = ocp.args.PyTreeRestore(
        item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
    )

    def restore() -> Any:
        _check_files(folder, part, leaves)
        return reader.restore(folder / part, args=arguments)

    try:
        nested = on_all_hosts(restore)
    finally:
        reader.close()
    arrays = named_arrays.by_path(nested)
    expected = about.get("checksums", {}).get(part, {})
    on_all_hosts(lambda: _check_arrays(arrays, expected, folder))
    return arrays


def _check_files(folder: epath.Path, part: str, leaves: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises `ValueError` for files that cannot hold arrays of these shapes, or hold far more."""
    if atomic_files.is_remote(folder):
        return
    stored = array_files.check_files(pathlib.Path(folder))
    told = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    foreign_files.check_expansion(told, stored)
    shapes = {name.replace("/", "."): leaf.shape for name, leaf in leaves.items()}
    array_files.check_pieces(pathlib.Path(folder, part), shapes)


def _check_arrays(
    arrays: Mapping[str, jax.Array], expected: Mapping[str, int], folder: epath.Path
) -> None:
    if names := find_mismatches(arrays, expected):
        raise ValueError(
            f"{len(names)} arrays do not match their checksum, {names[0]} among them, in {folder}"
        )


def on_all_hosts(read: Callable[[], T]) -> T:
    """Calls `read`, and raises on all hosts if it fails on one.

    A file may be damaged for one host only, but all hosts must use the same checkpoint.

    Raises:
        TrainingError: as `of_process`.
    """
    result, failure = None, None
    try:
        result = read()
    except errors.UserError:
        raise
    except Exception as error:  # Damaged files raise many kinds of errors.
        failure = of_process(error) or error
    if jax.process_count() > 1:
        # 0: it was read; 1: it is damaged; 2: it may be whole.
        own = int(failure is not None) + isinstance(failure, errors.TrainingError)
        found = np.asarray(multihost_utils.process_allgather(np.array(own)))
        if found.max() > own:
            hosts = ", ".join(map(str, np.flatnonzero(found == found.max())))
            kind = errors.TrainingError if found.max() == 2 else ValueError
            failure = kind(f"a checkpoint cannot be read by process {hosts}")
    if failure is not None:
        raise failure
    return cast(T, result)


def of_process(error: Exception) -> errors.TrainingError | None:
    """Returns the user error for what this process lacks to read a checkpoint; None for damage."""
    is_refused = isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_PROCESS
    if not is_refused and not any(refusal in str(error) for refusal in _REFUSALS):
        return None
    return errors.TrainingError(
        f"a checkpoint cannot be read ({first_line(error)}), though it may be whole; change its "
        "permissions, free memory, or raise the number of open files (`ulimit -n`), then repeat "
        "the command."
    )


def _about(folder: epath.PathLike) -> dict[str, Any]:
    """Returns `record.read`; damage becomes a user error."""
    with _naming_read_errors(folder):
        return record.read(folder)


@contextlib.contextmanager
def _naming_read_errors(folder: epath.PathLike) -> Iterator[None]:
    try:
        yield
    except errors.UserError:
        raise
    except Exception as error:  # Readers fail in many ways on damaged files.
        raise of_process(error) or errors.UserError(
            f"{folder} cannot be read: {first_line(error)}. It is damaged, or was removed; "
            "choose another step, or restore a good copy."
        ) from error


def first_line(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
