"""The run directory of a run whose settings come from its own folder, even if it was moved."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import gin_config, gin_files
from convt5.training.run_directory import CONFIG_FILE

TRAIN = "@convt5.training.trainer.train"
DATA_ARGUMENTS = ("train_data", "eval_data", "task_evals", "statistics")
"""Arguments of `trainer.train` whose data must exist when they are built."""


def folder_of(files: Sequence[str]) -> str | None:
    """Returns the run directory whose config.gin is among the gin files, or None."""
    for file in files:
        folder, name = os.path.split(os.path.abspath(os.path.expanduser(file)))
        if name == CONFIG_FILE and os.path.isdir(os.path.join(folder, "checkpoints")):
            return folder
    return None


def run_dir(
    train: Callable[..., Any],
    config: gin_config.Config,
    files: Sequence[str],
    bindings: Sequence[str],
    trusted: Sequence[str] = (),
) -> str | None:
    """Returns the run directory that the settings name, or None.

    A run that was moved, or is resumed from another working directory, is in the folder of the
    given config.gin, unless other settings name a folder.

    Args:
        train: `trainer.train`.
        config: the configuration of all files and bindings.
        files: gin files, in order.
        bindings: bindings of the command line.
        trusted: as in `gin_config.load`.
    """
    named = config.arguments(train, only=("run_dir",)).get("run_dir")
    folder = folder_of(files)
    if named is None or folder is None or _same(named, folder) or _is_set(files, bindings):
        return named
    own = gin_config.load(
        [os.path.join(folder, CONFIG_FILE)],
        roots=[TRAIN],
        supplied=["config_text"],
        trusted=trusted,
    )
    if own.arguments(train, only=("run_dir",)).get("run_dir") != named:
        return named
    print(
        f"run_dir is {folder}, where {CONFIG_FILE} lies; it names {named!r}, the folder before "
        "the run was moved. --gin.RUN_DIR=FOLDER names another.",
        file=sys.stderr,
    )
    return folder


def data_is_gone(error: errors.UserError, folder: str) -> errors.UserError:
    """Returns the error for a complete run whose data is missing."""
    return errors.UserError(
        f"the data of the run {folder} cannot be read: {error} Give its new location, such as "
        "--gin.DATA=FOLDER, or other data."
    )


def _is_set(files: Sequence[str], bindings: Sequence[str]) -> bool:
    """Returns whether the command line, or another gin file, names a run directory."""
    names = [binding.partition("=")[0].strip() for binding in bindings]
    others = [file for file in files if folder_of([file]) is None]
    for statement in gin_files.read_all(others):
        if isinstance(statement, gin_files.Binding):
            names.append(statement.parameter if statement.parameter else statement.selector)
    return any(name == "RUN_DIR" or name.rpartition(".")[2] == "run_dir" for name in names)


def _same(named: str, folder: str) -> bool:
    path = os.path.expanduser(named)
    return "://" in named or os.path.realpath(path) == os.path.realpath(folder)
