"""Studies: a grid of settings, in which each point is one run of the trainer, with several seeds.

Gin files bind `sweeps.Study` and `sweeps.Grid`; `python -m convt5.sweep` makes the runs. Imports
nothing heavy.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from convt5 import errors
from convt5.errors import checks
from convt5.runtime import metric_names
from convt5.sweeps.equal_cost import Pairing

Values = Mapping[str, Any]

SEED = "seed"

GREATEST = 1e300
"""What is as large counts as infinite: sums of a few such numbers, and plots, overflow."""

_RUN_DIR = "trainer.train.run_dir"
_STARTS = ("trainer.train.init_from", "initialization.InitFrom.path")

_MOST_BYTES = 255  # Longest file name on nearly every file system.


class Point(NamedTuple):
    """One run of a study.

    Attributes:
        labels: its value on each axis as shown in tables, with the seed last.
        gin_files: gin files of the run, in order.
        bindings: NAME=VALUE as after `--gin.`.
        first: the run from whose last parameters it starts, or None.
        trust: modules that gin files of a model may name; not a setting of the run.
        is_own: whether the user wrote the study, or it came with a model.
    """

    labels: dict[str, str]
    gin_files: tuple[str, ...]
    bindings: tuple[str, ...]
    first: "Point | None" = None
    trust: tuple[str, ...] = ()
    is_own: bool = True

    @property
    def name(self) -> str:
        """Name of the folder of the run."""
        name = ",".join(f"{_plain(k)}={_plain(v)}" for k, v in self.labels.items())
        encoded = name.encode()
        if len(encoded) <= _MOST_BYTES:
            return name
        digest = f"-{hashlib.sha256(encoded).hexdigest()[:12]}"
        return encoded[: _MOST_BYTES - len(digest)].decode(errors="ignore") + digest


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Grid:
    """All combinations of the values of some axes.

    Attributes:
        axes: for each axis its values: a list, or a dictionary from labels to values. The name of
            an axis is what follows `--gin.` on the command line: a macro or a parameter. An axis
            whose values are gin files can have any name; so can one whose values are dictionaries
            of several settings, in which `gin_file` names a file.
    """

    axes: Mapping[str, Any]

    def __post_init__(self):
        faults = [
            f"axes[{name!r}]={values!r} must be a list of values, or a dictionary from labels to "
            "values, and hold at least one."
            for name, values in self.axes.items()
            if not (isinstance(values, Mapping | list | tuple) and values)
        ]
        if not self.axes:
            faults.append("axes={} has no axis; give at least one.")
        if SEED in self.axes:
            faults.append(f"axes has {SEED!r}; give seeds to the Study.")
        faults += [
            f"axes[{name!r}]={values!r} has two values called {label}; leave out one, or give a "
            "dictionary from labels that differ."
            for name, values in self.axes.items()
            if isinstance(values, Mapping | list | tuple)
            for label, count in Counter(map(str, values)).items()
            if count > 1
        ]
        errors.raise_all(faults, where="Grid")
        axes = list(self.axes)
        faults = [
            f"{place}={value!r} would replace the values of the axis {name!r} before it; put that "
            f"axis after {axis!r}, or leave one of the two out."
            for axis in axes
            for place, name, value in self._settings_of(axis)
            if name in axes[: axes.index(axis)]
        ]
        errors.raise_all(faults, where="Grid")

    def values(self, axis: str) -> dict[str, Any]:
        """Returns the values of an axis by their labels."""
        values = self.axes[axis]
        if isinstance(values, Mapping):
            return {str(label): value for label, value in values.items()}
        return {str(value): value for value in values}

    def settings(self) -> Iterator[tuple[str, str, Any]]:
        """Yields what the values of all axes set: where it stands, its name and its value."""
        for axis in self.axes:
            yield from self._settings_of(axis)

    def _settings_of(self, axis: str) -> Iterator[tuple[str, str, Any]]:
        for label, value in self.values(axis).items():
            place = f"axes[{axis!r}][{label!r}]"
            if isinstance(value, Mapping):
                yield from ((f"{place}[{name!r}]", name, one) for name, one in value.items())
            else:
                yield place, axis, value

    def combinations(self) -> Iterator[dict[str, str]]:
        """Yields a label for each axis, the last axis changing fastest."""
        for labels in product(*(self.values(axis) for axis in self.axes)):
            yield dict(zip(self.axes, labels, strict=True))

    def one_at_a_time(self) -> Iterator[dict[str, str]]:
        """Yields a few combinations that together use every value of every axis, for checks."""
        first = {axis: next(iter(self.values(axis))) for axis in self.axes}
        yield first
        for axis in self.axes:
            for label in list(self.values(axis))[1:]:
                yield first | {axis: label}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Study:
    """The runs of a grid, and how their results are shown.

    Points with equal settings, such as the reference of a pairing by several costs, are one run.

    Attributes:
        output_dir: folder of the study, with a folder for each run and the report.
        gin_files: gin files of every run, such as one of gin/runs; files of an axis follow them.
        bindings: settings of every run, by name; an axis of the same name takes precedence.
        grids: the grids to run, all with the same axes.
        seeds: each point is run once with each seed; all points of the first seed come first.
        seed_name: the setting of the seed.
        metric: the metric to compare, as named in `metrics.jsonl`.
        perfect: the value of the metric without error, 100 for accuracies; then `perfect - metric`
            is compared. None for metrics that are errors themselves, by their names better when
            lower (`metric_names.lower_is_better`).
        rows: axes whose values are compared, at most three: the last one as lines, those before it
            as panels. Distributions are over all other axes and the seeds.
        versus: one of `rows` with two values, whose difference is shown, or None.
        over: an axis other than `rows`, of numbers or names. The report then shows the metric
            against it, with a line for each value of the last of `rows`, instead of distributions.
            None for distributions.
        pairing: equalises the costs of models on an axis; None leaves models unchanged.
        first_stage: settings of a run before each run, from whose last parameters it starts; other
            settings are those of the run. Runs with equal first stages share one. Empty for none.
        names: names of axes, values and the metric in figures; others are named by the last words
            of what they are called.
        trust: modules that gin files of a model may name, as with `--trust`, whatever a gin file
            says.
        is_own: whether the user wrote it; settings of a study that came with a model may name no
            more than those of its other files. Whatever a gin file says.
    """

    output_dir: str
    gin_files: Sequence[str]
    bindings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grids: Sequence[Grid]
    seeds: Sequence[int] = (0,)
    seed_name: str = "trainer.train.seed"
    metric: str = "validation/loss"
    perfect: float | None = None
    rows: Sequence[str]
    versus: str | None = None
    over: str | None = None
    pairing: Pairing | None = None
    first_stage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trust: Sequence[str] = ()
    is_own: bool = True

    def __post_init__(self):
        faults = [
            f"{name}={getattr(self, name)!r} must hold at least one."
            for name in ("gin_files", "grids", "seeds", "rows")
            if not getattr(self, name)
        ]
        axes = list(self.grids[0].axes) if self.grids else []
        if any(list(grid.axes) != axes for grid in self.grids):
            faults.append(
                f"grids must all have the same axes in one order: {', '.join(axes)}; give an axis "
                "of one value to the grid that lacks it."
            )
        faults += [
            f"{name}={axis!r} is none of the axes {', '.join(axes)}; name one of them"
            f"{'' if name == 'rows' else _or_none(name)}.{errors.suggest(axis, axes)}"
            for name, wanted in (
                ("rows", self.rows),
                ("versus", [self.versus]),
                ("over", [self.over]),
                ("pairing.axis", [self.pairing.axis if self.pairing else None]),
            )
            for axis in wanted
            if axis is not None and axis not in axes
        ]
        if len(self.rows) > 3:
            faults.append(f"rows={list(self.rows)} must be at most three axes.")
        if self.versus is not None and self.versus not in self.rows:
            faults.append(
                f"versus={self.versus!r} must be one of rows={list(self.rows)}; name one of them"
                f"{_or_none('versus')}."
            )
        elif self.versus in axes and len(self.labels(self.versus)) != 2:
            faults.append(
                f"versus={self.versus!r} must have two values, but has "
                f"{', '.join(self.labels(self.versus))}; give the axis two{_or_none('versus')}."
            )
        if len(set(self.seeds)) < len(self.seeds):
            faults.append(f"seeds={list(self.seeds)} must differ from each other.")
        if self.over in self.rows:
            faults.append(
                f"over={self.over!r} must be none of rows={list(self.rows)}; name another axis"
                f"{_or_none('over')}."
            )
        faults += [*self._metric_faults(), *self._replaced_settings()]
        errors.raise_all(faults, where="Study")
        names = [point.name for point in self._unpaired()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise errors.UserError(
                f"Study: two runs are called {twice}; grids must not share a point, and labels "
                "must differ in letters or digits."
            )

    def _metric_faults(self) -> Iterator[str]:
        """Yields a setting of `perfect` with which the worst run would count as the best."""
        is_error = metric_names.lower_is_better(self.metric)
        if is_error and self.perfect is not None:
            yield (
                f"perfect={self.perfect!r} is for metrics that are better when higher, but "
                f"metric={self.metric!r} is better when lower; set sweeps.Study.perfect to None."
            )
        if not is_error and self.perfect is None:
            yield (
                f"perfect=None is for metrics that are better when lower, but metric="
                f"{self.metric!r} is better when higher, as its name has no word such as loss or "
                "error; set sweeps.Study.perfect to its best value, 100 for a percentage."
            )

    def _replaced_settings(self) -> Iterator[str]:
        """Yields settings that the study would replace by its own in every run."""
        made = {self.seed_name: "seeds", _RUN_DIR: "output_dir"}
        starts = dict.fromkeys(_STARTS, "first_stage") if self.first_stage else {}
        given = [(f"bindings[{name!r}]", name, value) for name, value in self.bindings.items()]
        for place, name, value in [*given, *(s for grid in self.grids for s in grid.settings())]:
            yield from _replaced(place, name, value, made | starts)
        for name, value in self.first_stage.items():
            yield from _replaced(f"first_stage[{name!r}]", name, value, {_RUN_DIR: "output_dir"})

    @property
    def folder(self) -> pathlib.Path:
        """`output_dir`, with `~` expanded as by the trainer."""
        return pathlib.Path(os.path.expanduser(self.output_dir))

    @property
    def axes(self) -> list[str]:
        return list(self.grids[0].axes)

    def labels(self, axis: str) -> list[str]:
        """Returns the values of an axis in all grids: numbers ascending, names in their order."""
        labels = dict.fromkeys(label for grid in self.grids for label in grid.values(axis))
        return sorted(labels, key=float) if self.is_numeric(axis) else list(labels)

    def is_numeric(self, axis: str) -> bool:
        """Returns whether all values of an axis are numbers that a logarithmic scale can show."""
        try:
            values = [float(label) for grid in self.grids for label in grid.values(axis)]
        except ValueError:
            return False
        return all(0 < value < GREATEST for value in values)

    def word(self, name: str) -> str:
        """Returns an axis or a value as figures name it: by `names`, or its last words."""
        if name in self.names:
            return self.names[name]
        last = name.rsplit("/", 1)[-1].removesuffix(".gin")
        if name not in self.axes:
            return metric_names.TASKS.get(last, last)
        last = last.rsplit(".", 1)[-1].replace("_", " ")
        return last.lower() if last.isupper() else last

    def metric_axis(self, *, is_error: bool = True) -> str:
        """Returns the metric with its unit, for an axis of a figure; as the error, if there is one.

        Args:
            is_error: False: the metric itself.
        """
        perfect = self.perfect if is_error else None
        return self.names.get(self.metric) or metric_names.axis(self.metric, perfect=perfect)

    def points(self) -> Iterator[Point]:
        """Yields every run, all points of the first seed before those of the second."""
        return map(self._complete, self._unpaired())

    def _unpaired(self) -> Iterator[Point]:
        for seed in self.seeds:
            for grid in self.grids:
                for labels in grid.combinations():
                    yield self._point(grid, labels, seed)

    def samples(self) -> Iterator[Point]:
        """Yields a few runs that together use every value of every axis, for checks."""
        for grid in self.grids:
            for labels in grid.one_at_a_time():
                yield self._complete(self._point(grid, labels, self.seeds[0]))

    def _complete(self, point: Point) -> Point:
        """Adds the widths of its model, and the run from which it starts."""
        point = self._paired(point)
        if not self.first_stage:
            return point
        # Replaced rather than appended, so that equal first stages compare equal.
        bindings = dict(binding.split("=", 1) for binding in point.bindings)
        bindings |= {name: gin_text(value) for name, value in self.first_stage.items()}
        first = tuple(f"{name}={value}" for name, value in bindings.items())
        return point._replace(first=point._replace(bindings=first))

    def _paired(self, point: Point) -> Point:
        """Adds the widths that give its model the cost of the reference."""
        pairing = self.pairing
        if pairing is None:
            return point
        # The reference: the same run with another value on this axis.
        grid = next(g for g in self.grids if all(point.labels[a] in g.values(a) for a in g.axes))
        if pairing.reference not in grid.values(pairing.axis):
            raise errors.UserError(
                f"Pairing: reference={pairing.reference!r} is no value of {pairing.axis}, whose "
                f"values are {', '.join(grid.values(pairing.axis))}; give the axis this value, "
                f"name another reference{_or_none('pairing')}."
            )
        labels = {axis: point.labels[axis] for axis in grid.axes}
        other = self._point(grid, labels | {pairing.axis: pairing.reference}, self.seeds[0])
        widths = pairing.widths(point, other)
        return point._replace(
            bindings=(*point.bindings, *(f"{name}={value}" for name, value in widths.items()))
        )

    def _point(self, grid: Grid, labels: dict[str, str], seed: int) -> Point:
        files, settings = list(self.gin_files), dict(self.bindings)
        for axis, label in labels.items():
            value = grid.values(axis)[label]
            is_file = isinstance(value, str) and value.endswith(".gin")
            if not isinstance(value, Mapping):
                value = {"gin_file" if is_file else axis: value}
            settings |= value
            if "gin_file" in value:
                files.append(settings.pop("gin_file"))
        settings[self.seed_name] = seed
        return Point(
            labels | {SEED: str(seed)},
            tuple(files),
            tuple(f"{name}={gin_text(value)}" for name, value in settings.items()),
            trust=tuple(self.trust),
            is_own=self.is_own,
        )


def gin_text(value: Any) -> str:
    """Formats a value for gin; text that starts with @ or % is a reference."""
    if isinstance(value, str) and value[:1] in ("@", "%"):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(gin_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(gin_text, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _replaced(place: str, name: str, value: Any, made: Mapping[str, str]) -> Iterator[str]:
    """Yields what to do about a setting, where it is one of those that a study makes itself.

    Args:
        place: where the setting stands.
        name: of the setting.
        value: of the setting.
        made: by their names, the fields of the study that the others follow from.
    """
    for other, field in made.items():
        # Names of parameters may have more of their module before them.
        if name == other or ("." in other and name.endswith(f".{other}")):
            yield (
                f"{place}={value!r} would have no effect, as {field} gives every run its own; "
                f"leave it out, and set sweeps.Study.{field}."
            )


def _or_none(name: str) -> str:
    """Returns the end of a remedy: to do without a setting of the study, or a field of it."""
    return f", or set --gin.sweeps.Study.{name.partition('.')[0]}=None"


def _plain(text: str) -> str:
    """Removes what file names should not contain, and the module of a setting."""
    return re.sub(r"[^\w.+-]+", "_", text.rsplit("/", 1)[-1].removesuffix(".gin"))
