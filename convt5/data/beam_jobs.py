"""Runs independent work on Apache Beam, which only this module imports."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from convt5 import errors

# Otherwise Beam's direct runner would first download another program, and run that.
_IN_PYTHON = "--allow_unsafe_triggers"
_OWN_MESSAGE = re.compile(r"convt5\.errors\.\w+: (.*?)(?: \[while running|\n\n|\Z)", re.DOTALL)


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
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(flags))
    except (ImportError, SystemExit, ValueError) as error:
        raise errors.UserError(
            f"--runner={runner} cannot be used with {list(options)} ({error}); correct the options "
            "after --, or install what the runner needs, such as apache-beam[gcp]."
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
        own = _OWN_MESSAGE.search(str(error))
        if isinstance(error, errors.UserError) or own:
            raise errors.UserError(own.group(1) if own else str(error)) from None
        raise errors.TrainingError(
            f"--runner={runner} failed ({errors.clip(str(error), limit=2000)})."
        ) from error


def _call(work: Callable[[Any], Any], item: Any) -> None:
    work(item)
