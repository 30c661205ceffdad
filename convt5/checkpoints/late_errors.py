"""Suppresses errors that orbax's threads print although they are also raised.

Otherwise, a full disk prints a traceback for each array, and so does a damaged checkpoint for each
array still being read when the first one failed. They would bury the one message that matters.
"""

import logging
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

# Modules of orbax whose threads log what they also raise.
_LOGGING = ("future", "async_checkpointer", "checkpoint_manager", "checkpoint")
_NOT_AWAITED = r"coroutine '(async_serialize_|Store\.)"


def silence() -> None:
    """Suppresses orbax's duplicate messages for the rest of the process, and no others."""
    logging.getLogger("absl").addFilter(_is_news_of_orbax)
    logging.getLogger("asyncio").addFilter(_is_news_of_tasks)
    # Once one write or read has failed, orbax does not await the others.
    warnings.filterwarnings("ignore", _NOT_AWAITED, RuntimeWarning)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def _is_news_of_orbax(logged: logging.LogRecord) -> bool:
    is_raised = _is_orbax(logged.pathname) and pathlib.PurePath(logged.pathname).stem in _LOGGING
    return not (is_raised and logged.exc_info)


def _is_news_of_tasks(logged: logging.LogRecord) -> bool:
    text, error = logged.getMessage(), logged.exc_info and logged.exc_info[1]
    if error is None or "exception was never retrieved" not in text:
        return True
    # Tasks still running have names of orbax; native code has no frames.
    frames = traceback.walk_tb(error.__traceback__)
    return "orbax" not in text and not any(_is_orbax(f.f_code.co_filename) for f, _ in frames)


def _is_orbax(file: str) -> bool:
    return "orbax" in pathlib.PurePath(file).parts


class _Hook:
    """Shows unraisable errors, except those of tasks that outlive their event loop."""

    def __init__(self, show: Callable[[Any], Any]):
        self._show = show

    def __call__(self, raised: Any) -> None:
        is_reader = "_read_array" in repr(raised.object)
        if not is_reader and "Event loop is closed" not in str(raised.exc_value):
            self._show(raised)
