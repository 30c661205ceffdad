"""Runs independent work on Apache Beam, which only this module imports."""

import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from convt5 import errors

# Otherwise Beam's direct runner would first download another program, and run that.
_IN_PYTHON = "--allow_unsafe_triggers"
# Job servers of other runners may know more options than Beam itself.
_WITHOUT_JOB_SERVER = ("DirectRunner", "DataflowRunner")
_OWN_MESSAGE = re.compile(r"convt5\.errors\.\w+: (.*?)(?:\n\n|\Z)", re.DOTALL)
_STEP = re.compile(r" \[while running '[^']*'\]")
_FRAMES = re.compile(r"^ .*\n", re.MULTILINE)
"""Lines of a traceback, behind the last of which is what went wrong."""


def run(
    work: Callable[[Any], Any], items: Sequence[Any], *, runner: str, options: Sequence[str]
) -> None:
    """Calls `work` for every item, on the workers of a runner, and waits.

    Args:
        work: a function of a module that workers can import; items of work must be picklable.
        items: what to call it for.
        runner: name of a runner, such as "DirectRunner".
        options: pipeline options, such as "--direct_num_workers=2".

    Raises:
        UserError: Beam knows no such runner or option, or `work` raised it.
        TrainingError: the pipeline failed.
    """
    flags = [f"--runner={runner}", *options]
    if runner == "DirectRunner":
        flags.append(_IN_PYTHON)
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            unknown = _unknown_options(flags)
            if unknown and runner in _WITHOUT_JOB_SERVER:
                raise ValueError(f"unknown option {unknown[0]!r}")
        pipeline = beam.Pipeline(options=PipelineOptions(flags))
    except (ImportError, SystemExit, ValueError) as error:
        reason = usage.getvalue().splitlines()[-1:] or [str(error)]
        raise errors.UserError(
            f"--runner={runner} cannot be used with {list(options)} ({reason[0]}); correct the "
            "options after --, or install what the runner needs, such as apache-beam[gcp]."
        ) from None
    _ = (
        pipeline
        | "items" >> beam.Create(list(items))
        | "to all workers" >> beam.Reshuffle()
        | "make" >> beam.Map(functools.partial(_call, work))
    )
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:  # Runners raise errors of their own, with those of workers as text.
        text = _STEP.sub("", str(error)).rstrip()
        own = _OWN_MESSAGE.search(text)
        if isinstance(error, errors.UserError) or own:
            raise errors.UserError(own.group(1) if own else text) from None
        reason = _FRAMES.split(text)[-1]
        raise errors.TrainingError(
            f"--runner={runner} failed ({errors.clip(reason, limit=2000)})."
        ) from error


def _unknown_options(flags: Sequence[str]) -> list[str]:
    """Returns the arguments that Beam would discard; exits for a value of the wrong type."""
    parsers: list[Any] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    return parsers[0].parse_known_args(flags)[1]


def _call(work: Callable[[Any], Any], item: Any) -> None:
    work(item)
