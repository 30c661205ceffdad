"""Selects checkpoints of a run, waits for new ones, and loads models onto a mesh."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from convt5 import errors
from convt5.checkpoints import checkpoint, reading
from convt5.evaluation.results import read_object
from convt5.interchange import loading
from convt5.modeling import sharding
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.model import ConvT5
from convt5.modeling.placement import TEXT_RULES
from convt5.training.run_directory import CONFIG_FILE
from convt5.training.train_state import abstract_model
from convt5.vision import placement
from convt5.vision.architecture import ViTConfig

LATEST, BEST, ALL = "latest", "best", "all"


class Found(NamedTuple):
    """A model in a folder.

    Attributes:
        folder: folder of a checkpoint or of an exported model.
        step: number of updates made; None for an exported model.
        run_dir: the run that contains it; for an exported model its own folder.
    """

    folder: epath.Path
    step: int | None
    run_dir: epath.Path

    def described(self) -> dict[str, str]:
        """Returns what identifies the model, as JSON values.

        Raises:
            UserError: its checkpoint was removed, or is damaged.
        """
        identify = loading.fingerprint if self.step is None else reading.fingerprint
        return {"model": identify(self.folder)}


def select(directory: epath.PathLike, which: str = LATEST) -> list[Found]:
    """Selects checkpoints: "latest", "best", "all", or steps such as "100" or "100,200".

    The best one is the best by the run's `CheckpointConfig.best_metric` among those kept.

    Raises:
        UserError: there is no such checkpoint.
    """
    directory = os.path.expanduser(directory)
    if loading.is_exported(directory):
        if which != LATEST:
            raise errors.UserError(
                f"step={which}, but {directory} is an exported model without steps; leave it out."
            )
        return [Found(epath.Path(directory), None, epath.Path(directory))]
    newest = reading.find_checkpoint(directory)
    folder = newest.parent
    if which == LATEST:
        return [_describe_folder(newest)]
    if which == ALL:
        return [_describe_folder(folder / str(step)) for step in reading.steps_in(folder)]
    if which == BEST:
        return [_describe_folder(folder / str(_best_step(folder)))]
    try:
        steps = list(dict.fromkeys(int(step) for step in which.split(",")))
    except ValueError:
        raise errors.UserError(
            f"step={which} must be {LATEST}, {BEST}, {ALL}, or steps such as 1000 or 1000,2000."
        ) from None
    return [_describe_folder(reading.find_checkpoint(folder, step=step)) for step in steps]


def run_directory(path: epath.PathLike) -> epath.Path:
    """Returns the run directory, given that or its `checkpoints` folder.

    Raises:
        UserError: it is a single model, which gets no new checkpoints.
    """
    folder = epath.Path(os.path.expanduser(path))
    if loading.is_exported(folder) or (folder / "about").exists():
        raise errors.UserError(
            f"--follow evaluates the checkpoints of a run as they appear, but {folder} is a "
            "single model; leave out --follow, or give the run directory."
        )
    is_inside = folder.name == "checkpoints" and not (folder / CONFIG_FILE).exists()
    return folder.parent if is_inside else folder


def follow(
    directory: epath.PathLike,
    *,
    last_step: int | None,
    timeout: float,
    every: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Found]:
    """Yields the checkpoints of a run in the order of their steps, waiting for new ones.

    Args:
        directory: the run directory.
        last_step: ends after this step; None if unknown. It also ends when the `summary.json` of
            the run tells that it stopped earlier.
        timeout: ends after this many seconds without a new checkpoint.
        every: seconds between checks.
        clock, sleep: replaced in tests.
    """
    folder = epath.Path(directory) / "checkpoints"
    done = -1
    seen = clock()
    while last_step is None or done < last_step:
        coming = [step for step in _agree(reading.steps_in(folder)) if step > done]
        if coming:
            done = coming[0]
            yield _describe_folder(folder / str(done))
            seen = clock()
            continue
        if _agree([int(clock() - seen >= timeout or _has_ended(epath.Path(directory), done))])[0]:
            return
        sleep(every)


def _has_ended(run_dir: epath.Path, step: int) -> bool:
    """Returns whether a run ended with this step; a restarted run has newer settings."""
    summary, settings = run_dir / "summary.json", run_dir / CONFIG_FILE
    try:
        summary_values = read_object(summary)
        if summary_values is None or summary_values.get("step") != step:
            return False
        return not settings.exists() or settings.stat().mtime <= summary.stat().mtime
    except OSError:
        return False  # The file is being written.


def load(found: Found, mesh: Mesh, **settings: Any) -> ConvT5:
    """Loads a text model, sharded over a mesh by `placement.TEXT_RULES`.

    Args:
        found: the model.
        mesh: the devices.
        settings: arguments of `load_model`.

    Raises:
        UserError: it is not a text model.
    """
    model_config(found)
    return load_any(found, mesh, **settings)


def load_any(found: Found, mesh: Mesh, *, ema: bool = False, **settings: Any) -> Any:
    """Loads a text or vision model, sharded over a mesh by the rules of its kind.

    Args:
        found: the model.
        mesh: the devices.
        ema: loads the average over the updates.
        settings: arguments of `load_model`.
    """
    if found.step is None:
        model = loading.load_model(found.folder, ema=ema, **settings)
        return jax.device_put(model, shardings(model, mesh))
    config = loading.with_settings(loading.run_config(found.folder), settings)
    abstract = abstract_model(config)
    placed = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        abstract,
        shardings(abstract, mesh),
    )
    return reading.load_params(found.folder, placed, ema=ema)


def load_if_there(found: Found, mesh: Mesh, *, ema: bool = False) -> Any:
    """Loads a model; returns None if it vanished on any host, because its run deleted it."""
    model = None
    try:
        model = load_any(found, mesh, ema=ema)
    except Exception:  # Readers fail in many ways on files that vanish.
        if found.folder.exists():
            raise
    everywhere = multihost_utils.process_allgather(np.array(model is not None))
    return model if np.all(everywhere) else None


def any_config(found: Found) -> Any:
    """Returns the description of a text or vision model, without its parameters."""
    if found.step is None:
        return loading.exported_config(found.folder)
    return loading.run_config(found.folder)


def describe_if_there(found: Found) -> dict[str, str]:
    """Returns `found.described()`; empty if it vanished, because its run deleted it."""
    try:
        return found.described()
    except errors.UserError:
        if found.folder.exists():
            raise
        return {}


def model_config(found: Found) -> Any:
    """Returns the description of a text model.

    Raises:
        UserError: it is not a text model.
    """
    config = any_config(found)
    if not isinstance(config, ConvT5Config):
        raise errors.UserError(
            f"{found.folder} holds a {type(config).__name__}, but text tasks need a "
            "ConvT5Config; `convt5.load_model` loads the model in Python, and `eval` evaluates "
            "it on images."
        )
    return config


def shardings(model: Any, mesh: Mesh) -> Any:
    """Returns the shardings of the arrays of a model, or of its shapes."""
    is_vision = isinstance(model.config, ViTConfig)
    rules = placement.rules() if is_vision else TEXT_RULES
    return sharding.tree_shardings(model, model, mesh, rules)


def _describe_folder(folder: epath.Path) -> Found:
    parent = folder.parent
    run_dir = parent.parent if parent.name == "checkpoints" else parent
    return Found(folder, reading.step_of(folder), run_dir)


def _best_step(folder: epath.Path) -> int:
    best = checkpoint.best_step(folder)
    if best is None:
        kept = ", ".join(map(str, reading.steps_in(folder)))
        raise errors.UserError(
            f"step={BEST}: no checkpoint in {folder} (steps {kept}) was evaluated; name a step, "
            f"or use {LATEST}."
        )
    return best


def _agree(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers of the first host: hosts may list a folder at different times."""
    if jax.process_count() == 1:
        return list(numbers)
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers))))
    padded = np.zeros(count, np.int32)
    padded[: min(count, len(numbers))] = np.array(numbers, np.int32)[:count]
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tolist()
