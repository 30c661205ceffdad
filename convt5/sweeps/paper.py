"""Papers: questions, the claims that answer them, and the studies whose runs are the evidence.

A gin file binds `sweeps.Paper`; `python -m convt5.sweep` makes the runs of all its studies and
writes one page. Imports nothing heavy.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.errors import checks
from convt5.sweeps.study import SEED, Study

QUANTITIES = ("seconds", "flops", "temporary_bytes")

_HARMLESS_FLAGS = (
    "batch_size",
    "channels",
    "gin_file",
    "lengths",
    "longest_seconds",
    "only_ours",
    "quick",
    "repeats",
    "suites",
)
"""Flags of `convt5.bench` that neither import modules nor trust any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Claim:
    """An expected difference between runs of studies.

    Attributes:
        text: the claim, as a sentence.
        studies: names of the studies that have the runs, out of `Paper.studies`.
        contrast: one axis, or two, each with two values. With one axis, the claim is that the
            metric is better at the second value than at the first. With two axes, it is that this
            difference is larger at the second value of the other axis than at its first.
        where: for other axes, the values that count; of axes not named here, all do. Differences
            are means over them, but for the lines below.
        lines: the axis whose values are the lines of the evidence. None: `Study.over`, or without
            it one line for each study.
        least: a line counts only if the metric at one of its ends is this or better: below, no
            model has learned anything that could differ. None: all lines count.
    """

    text: str
    studies: Sequence[str]
    contrast: Mapping[str, Any]
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lines: str | None = None
    least: float | None = None

    def __post_init__(self):
        faults = [
            f"{name}[{axis!r}]={errors.clip(values)} must be a list of values."
            for name in ("contrast", "where")
            for axis, values in getattr(self, name).items()
            if not isinstance(values, list | tuple)
        ]
        errors.raise_all(faults, where=f"Claim {self.text!r}")
        for name in ("contrast", "where"):
            # As `Grid.values` names them.
            labels = {
                axis: [str(v) for v in values] for axis, values in getattr(self, name).items()
            }
            object.__setattr__(self, name, labels)
        if not self.studies:
            faults.append("studies=[] must name at least one study.")
        if len(self.contrast) not in (1, 2):
            faults.append(f"contrast={dict(self.contrast)!r} must have one axis or two.")
        faults += [
            f"contrast[{axis!r}]={list(values)!r} must be two different values."
            for axis, values in self.contrast.items()
            if len(set(values)) != 2 or len(values) != 2
        ]
        faults += [
            f"{axis!r} is an axis of both contrast and where; leave it out of one."
            for axis in self.where
            if axis in self.contrast
        ]
        if SEED in (*self.contrast, *self.where):
            faults.append(f"{SEED!r} is no axis of a claim: differences are paired by seed.")
        errors.raise_all(faults, where=f"Claim {self.text!r}")

    def check(self, study: Study, name: str) -> None:
        """Checks that a study has the axes and values of the claim.

        Raises:
            UserError: it has not.
        """
        named = [
            (axis, list(values)) for axis, values in (*self.contrast.items(), *self.where.items())
        ]
        named += [] if self.lines is None else [(self.lines, [])]
        faults = []
        for axis, values in named:
            if axis not in study.axes:
                known = errors.suggest(axis, study.axes)
                faults.append(f"{axis!r} is none of the axes {', '.join(study.axes)}.{known}")
                continue
            labels = study.labels(axis)
            faults += [
                f"{axis}={value!r} is none of {', '.join(labels)}.{errors.suggest(value, labels)}"
                for value in values
                if value not in labels
            ]
        errors.raise_all(faults, where=f"Claim {self.text!r}, study {name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class CostClaim:
    """A claim that a model costs less than another at every length, measured by `convt5.bench`.

    Attributes:
        text: the claim, as a sentence.
        first, second: cases of the benchmark: the second is said to cost less.
        quantity: seconds or FLOPs of a training step, or its temporary bytes.
    """

    text: str
    first: str
    second: str
    quantity: str = "seconds"

    def __post_init__(self):
        if self.quantity not in QUANTITIES:
            raise errors.UserError(
                f"CostClaim {self.text!r}: quantity={self.quantity!r} must be one of "
                f"{', '.join(QUANTITIES)}.{errors.suggest(self.quantity, QUANTITIES)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a paper.

    Attributes:
        title: the question; a heading of the page.
        claims: the claims that answer it: `Claim`s, and `CostClaim`s.
        text: paragraphs below the heading, as Markdown.
    """

    title: str
    claims: Sequence[Claim | CostClaim]
    text: Sequence[str] = ()

    def __post_init__(self):
        faults = [] if self.claims else ["claims=[] must hold at least one."]
        faults += [
            f"claims holds {errors.clip(claim)}, which is neither a Claim nor a CostClaim."
            for claim in self.claims
            if not isinstance(claim, Claim | CostClaim)
        ]
        errors.raise_all(faults, where=f"Question {self.title!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Paper:
    """Questions that studies answer, on one page.

    Attributes:
        page: the page, a Markdown file; pictures lie in the folder beside it of the same stem.
        title: of the page.
        text: paragraphs below the title, as Markdown.
        studies: the settings of each study, by a name of letters, digits and underscores:
            `gin_file`, and others by the names that follow `--gin.`. They run in this order, so
            that a study can start from the models of one before it.
        questions: the questions, in order.
        bench: flags of `python -m convt5.bench` for the `CostClaim`s, by name without dashes; a
            list gives a flag several times, True gives it without a value, False leaves it out.
        bench_dir: folder of its records; measurements that it holds are not repeated.
        is_own: whether the user wrote it, or it came with a model. Whatever a gin file says.
    """

    page: str
    title: str
    text: Sequence[str] = ()
    studies: Mapping[str, Mapping[str, Any]]
    questions: Sequence[Question]
    bench: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bench_dir: str = "runs/paper_bench"
    is_own: bool = True

    def __post_init__(self):
        faults = [
            f"studies[{name!r}] must be settings with a gin_file."
            for name, settings in self.studies.items()
            if not (isinstance(settings, Mapping) and settings.get("gin_file"))
        ]
        faults += [
            f"studies has the name {name!r}; it must be letters, digits and underscores."
            for name in self.studies
            if not name.isidentifier()
        ]
        faults += [
            f"the claim {claim.text!r} names the study {name!r}, which is none of "
            f"{', '.join(self.studies)}.{errors.suggest(name, self.studies)}"
            for claim in self.claims
            if isinstance(claim, Claim)
            for name in claim.studies
            if name not in self.studies
        ]
        if pathlib.PurePath(self.page).suffix != ".md":
            faults.append(f"page={self.page!r} must end in .md.")
        if not self.questions:
            faults.append("questions=[] must hold at least one.")
        if not self.is_own:
            faults += [
                f"bench has {name!r}, but a paper that came with a model may set only "
                f"{', '.join(_HARMLESS_FLAGS)}: others could run code. If you trust it, copy the "
                "file into a folder of your own."
                for name in self.bench
                if name not in _HARMLESS_FLAGS
            ]
        errors.raise_all(faults, where="Paper")

    @property
    def claims(self) -> list[Claim | CostClaim]:
        return [claim for question in self.questions for claim in question.claims]

    @property
    def has_costs(self) -> bool:
        return any(isinstance(claim, CostClaim) for claim in self.claims)

    @property
    def records(self) -> pathlib.Path:
        """The file of the benchmark's records."""
        return pathlib.Path(os.path.expanduser(self.bench_dir)) / "records.jsonl"

    @property
    def path(self) -> pathlib.Path:
        """`page`, with `~` expanded."""
        return pathlib.Path(os.path.expanduser(self.page))
