"""The mean of the parameters of runs that were fine-tuned from one model, or of steps of one run.

It is a uniform model soup (Wortsman et al. 2022, arXiv 2203.05482): with one start, runs of
different seeds end in one valley of the loss, where their mean is often better than each of them.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from convt5 import errors
from convt5.checkpoints import reading, record
from convt5.checkpoints.checksums import checksums
from convt5.interchange import loading
from convt5.interchange.mapping import Imported
from convt5.modeling.architecture import ConvT5Config
from convt5.text import task_format, vocabulary_files
from convt5.text.vocabulary_files import KeptText

_FAR = 0.3
"""It was 0.13 for runs fine-tuned from one model; at 0.45, the mean was worse than the runs."""

_NOT_SHAPING = ("dropout_rate", "dtype")
"""Ends of the settings of a model that its parameters do not depend on."""


def read(first: Imported, runs: Sequence[str], *, step: int | None = None) -> Imported:
    """Returns a run with the mean of the parameters of several.

    Args:
        first: the first run, which the others are compared with.
        runs: the run directories, or steps in them; the first one is that of `first`.
        step: the step of each run; None means the newest.

    Raises:
        UserError: a model is there twice, or has another architecture or vocabulary; or the models
            are not for text.
    """
    if not isinstance(first.config, ConvT5Config):
        raise errors.UserError(
            f"--average is for text models, and {runs[0]} holds a {type(first.config).__name__}, "
            "whose statistics of images are those of its own parameters; leave it out."
        )
    means = {name: array.astype(np.float32) for name, array in first.params.items()}
    squares, notes = _square(means), []
    text, formats = vocabulary_files.load(runs[0]), task_format.load(runs[0]) or ()
    named = {_sums(first): runs[0]}
    for count, path in enumerate(runs[1:], start=2):
        other = loading.read_run(path, step=step)
        _check_architecture(first, other, runs[0], path)
        _check_vocabulary(text, vocabulary_files.load(path), runs[0], path)
        if (twin := named.setdefault(_sums(other), path)) is not path:
            raise errors.UserError(
                f"--average={path} is the model of {twin}, which is there twice; name each run "
                "once, or another of its steps."
            )
        notes += [
            f"{now.described()} in {path}; but in {runs[0]}, {then.described()}."
            for now, then in task_format.differences(task_format.load(path) or (), formats)
        ]
        squares += _square(other.params)
        for name, mean in means.items():
            mean += (other.params[name] - mean) / count
    # The mean of the squared distances is that of the squares less the square of the mean.
    distance = math.sqrt(max(squares / len(runs) / _square(means) - 1, 0))
    far = ", far for runs that were fine-tuned from one model: measure the mean before you use it"
    mean = _described([reading.find_checkpoint(path, step=step) for path in runs])
    notes.append(
        f"these are the means of the parameters of {mean['of']}, which lie {distance:.0%} of its "
        f"norm from the mean{far * (distance > _FAR)}."
    )
    report = dataclasses.replace(first.report, notes=[*notes, *first.report.notes])
    return first._replace(params=means, report=report, mean=mean)


def _described(folders: Sequence[epath.Path]) -> dict[str, Any]:
    """Returns what a mean is of, as JSON values: in words, and by fingerprints as `eval` tells."""
    steps = [reading.step_of(folder) for folder in folders]
    count = len({os.path.realpath(folder.parent) for folder in folders})
    words = f"{count} runs" if count > 1 else "one run"
    if count < len(folders):
        words = f"{len(folders)} checkpoints of {words}"
    if len(set(steps)) > 1:
        words += f", at steps {', '.join(map(str, steps))}"
    return {"of": words, "models": [reading.fingerprint(folder) for folder in folders]}


def _sums(model: Imported) -> tuple[int, ...]:
    """Identifies the parameters of a model, whatever path leads to them."""
    return tuple(checksums(model.params).values())


def _square(params: Mapping[str, np.ndarray]) -> float:
    return sum(float(np.vdot(array, array.astype(np.float64))) for array in params.values())


def _check_architecture(first: Imported, other: Imported, run: str, path: str) -> None:
    descriptions = map(record.describe_config, (first.config, other.config))
    changed = [
        line
        for line in record.differences(*descriptions)
        if not line.partition(":")[0].endswith(_NOT_SHAPING)
    ]
    if changed:
        raise errors.UserError(
            f"--average={path} holds another model than {run} "
            f"({'; '.join(errors.abbreviate(changed))}); name runs of one architecture."
        )


def _check_vocabulary(first: KeptText | None, other: KeptText | None, run: str, path: str) -> None:
    if first is None or other is None:
        return
    for known, given in zip(first[:2], other[:2], strict=True):
        if not given.agrees_with(known, in_sentinels=True):
            raise errors.UserError(
                f"--average={path} has another vocabulary ({given.fingerprint}) than {run} "
                f"({known.fingerprint}), so ids stand for other text; name runs of one."
            )
