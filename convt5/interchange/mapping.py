"""Maps arrays of a foreign checkpoint to the parameters of a model, and reports on the mapping.

A table of `Source` values describes a format completely: import, export and the import of optimizer
state use the same table.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from convt5 import errors
from convt5.modeling.tree_paths import named_leaves
from convt5.training.train_state import ModelConfig, abstract_model

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The foreign arrays of one parameter.

    Attributes:
        path: the parameter, such as `encoder/layers/0/mlp/wi/kernel`.
        names: the foreign array; several are stacked along a new first axis.
        stacked: whether to add the first axis even for a single name.
        transposed: whether the foreign arrays are matrices with swapped axes.
    """

    path: str
    names: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False

    def shapes(self, shape: Shape) -> Shape:
        """Returns the shape that each foreign array must have, given the shape of the parameter."""
        one = shape[1:] if self.stacked else shape
        return one[::-1] if self.transposed else one

    def assemble(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns the parameter in float32, reading one foreign array at a time."""
        if not self.stacked:
            return np.ascontiguousarray(self._turn(read(self.names[0])), dtype=np.float32)
        first = self._turn(read(self.names[0]))
        whole = np.empty((len(self.names), *first.shape), np.float32)
        whole[0] = first
        for index, name in enumerate(self.names[1:], start=1):
            whole[index] = self._turn(read(name))
        return whole

    def take_apart(self, value: np.ndarray) -> Arrays:
        """Returns the foreign arrays of a parameter, or of its gradient."""
        if not self.stacked:
            return {self.names[0]: np.ascontiguousarray(self._turn(value))}
        return {name: self._turn(part) for name, part in zip(self.names, value, strict=True)}

    def _turn(self, array: np.ndarray) -> np.ndarray:
        return array.T if self.transposed else array


def take_apart(sources: Iterable[Source], values: Mapping[str, np.ndarray]) -> Arrays:
    """Converts parameters by path, or their gradients, to the arrays of the foreign format."""
    return {
        name: array
        for source in sources
        for name, array in source.take_apart(np.asarray(values[source.path])).items()
    }


def build_model(config: ModelConfig, params: Mapping[str, np.ndarray]) -> Any:
    """Builds a model with `params`, given by path, without random initialisation.

    Raises:
        UserError: parameters are missing, or have other shapes than the model's.
    """
    abstract = abstract_model(config)
    wanted = _shapes(abstract)
    faults = [
        f"parameter {name} {shape} is needed, but there is "
        f"{tuple(params[name].shape) if name in params else 'none'}."
        for name, shape in wanted.items()
        if name not in params or tuple(params[name].shape) != shape
    ]
    faults += [
        f"parameter {name} belongs to no part of it." for name in sorted(params.keys() - wanted)
    ]
    errors.raise_all(errors.abbreviate(faults), where="the model of these settings")
    leaves = [jnp.asarray(params[name]) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shape of every parameter of a model by path; allocates nothing."""
    return _shapes(abstract_model(config))


def _shapes(model: Any) -> dict[str, Shape]:
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(model)}


@dataclasses.dataclass
class Report:
    """What happened to each array of a foreign checkpoint.

    Attributes:
        mapped: pairs of foreign name and parameter path.
        skipped: pairs of foreign name and reason.
        unmapped: unknown foreign names.
        missing: pairs of parameter path and expected foreign name.
        notes: assumptions where the checkpoint is silent.
    """

    mapped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unmapped: list[str] = dataclasses.field(default_factory=list)
    missing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        return (
            f"{len(self.mapped)} variables mapped, {len(self.skipped)} skipped, "
            f"{len(self.unmapped)} unmapped, {len(self.missing)} missing"
        )

    def overview(self) -> str:
        """Returns the summary and the notes."""
        return _lines([self.summary(), *(f"note: {note}" for note in self.notes)])

    def variables(self) -> str:
        """Returns one line for every variable."""
        lines = [f"mapped    {name} -> {path}" for name, path in self.mapped]
        lines += [f"skipped   {name}: {why}" for name, why in self.skipped]
        lines += [f"unmapped  {name}" for name in self.unmapped]
        lines += [f"missing   {name}, wanted by {path}" for path, name in self.missing]
        return _lines(lines)


def _lines(lines: Sequence[str]) -> str:
    # Names in files of others may move the cursor of a terminal, or pass for further lines.
    shown = (errors.printable(line).replace("\n", r"\n") for line in lines)
    return "".join(f"{line}\n" for line in shown)


class Imported(NamedTuple):
    """A model read from a foreign format.

    Attributes:
        config: the description of the model; Any, because callers use settings of text models.
        params: float32 parameters by path, and running statistics if the model has them.
        sources: the table by which they were read.
        report: what happened to each foreign array.
        step: number of updates made.
        normalisation: the settings of `ImageDataConfig` that normalised the images of a vision
            model; empty if unknown.
        mean: what the parameters are the mean of, as JSON values; empty for those of one model.
    """

    config: Any
    params: Arrays
    sources: tuple[Source, ...]
    report: Report
    step: int = 0
    normalisation: Mapping[str, Any] = {}
    mean: Mapping[str, Any] = {}

    def model(self) -> Any:
        return build_model(self.config, self.params)

    def take_model(self) -> Any:
        """Builds the model and empties `params`, so that a large one is never held twice."""
        abstract = abstract_model(self.config)
        leaves = [jnp.asarray(self.params.pop(name)) for name, _ in named_leaves(abstract)]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def import_named(
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    name: Callable[[str], str] = str,
    *,
    step: int = 0,
    allow_unmapped: bool = False,
    where: str,
) -> Imported:
    """Reads a model whose arrays are its parameters under the names that `name` gives their paths.

    Raises:
        UserError: as `check_layers` and `check`, or files are damaged.
    """
    check_layers(config, shapes, where=where)
    table = [Source(path=path, names=(name(path),)) for path in parameter_shapes(config)]
    imported = import_arrays(
        table,
        config,
        shapes,
        read,
        allow_unmapped=allow_unmapped,
        # A run of ours that diverged can be looked at, and proofs find it.
        check_finite=False,
        where=where,
    )
    return imported._replace(step=step)


def import_arrays(
    table: Iterable[Source],
    config: ModelConfig,
    shapes: Mapping[str, Shape],
    read: Callable[[str], np.ndarray],
    *,
    skipped: Mapping[str, str] | None = None,
    allow_unmapped: bool = False,
    check_finite: bool = True,
    where: str,
) -> Imported:
    """Reads the parameters of a model after checking that all arrays fit; arguments as `check`.

    Raises:
        UserError: as `check`, files are damaged, or with `check_finite` a value is NaN or infinite.
    """
    table = tuple(table)
    report = check(
        table,
        config,
        shapes,
        skipped=skipped or {},
        allow_unmapped=allow_unmapped,
        where=where,
    )
    assemble = functools.partial(_finite, where=where) if check_finite else Source.assemble
    params = {source.path: assemble(source, read) for source in table}
    return Imported(config=config, params=params, sources=table, report=report)


def _finite(source: Source, read: Callable[[str], np.ndarray], where: str) -> np.ndarray:
    """Assembles a parameter; raises `UserError` for NaN or infinity, of which answers would be."""
    value = source.assemble(read)
    if value.size and not (np.isfinite(value.min()) and np.isfinite(value.max())):
        raise errors.UserError(
            f"{where}: {source.path}, made from {source.names[0]}, has values that are not "
            "finite; copy the model again, or take one that did not diverge."
        )
    return value


def check_layers(config: Any, found: Mapping[str, Shape], *, where: str) -> None:
    """Raises `UserError` for more layers than arrays, before computing the shapes of all layers."""
    stacks = [config.encoder, config.decoder] if hasattr(config, "encoder") else [config]
    layers = sum(stack.num_layers for stack in stacks)
    if layers > len(found):
        raise errors.UserError(
            f"{where}: the model is described with {layers} layers, but there are {len(found)} "
            "arrays, and each layer needs several; copy the model again."
        )


def check(
    sources: Sequence[Source],
    config: ModelConfig,
    found: Mapping[str, Shape],
    *,
    skipped: Mapping[str, str],
    allow_unmapped: bool,
    where: str,
) -> Report:
    """Compares a table with the arrays of a checkpoint and with the parameters of the model.

    Args:
        sources: the table of the format for this model.
        config: the model.
        found: shape of every array of the checkpoint.
        skipped: known arrays to ignore, with the reason.
        allow_unmapped: whether to report unknown arrays instead of failing.
        where: name of the checkpoint for messages.

    Raises:
        UserError: lists missing arrays, unknown arrays and wrong shapes together.
    """
    wanted = parameter_shapes(config)
    report, faults = Report(), []
    report.skipped = [(name, why) for name, why in skipped.items() if name in found]
    for source in sources:
        shape = source.shapes(wanted[source.path])
        for name in source.names:
            if name not in found:
                report.missing.append((source.path, name))
                faults.append(f"variable {name} is missing; {source.path} is made from it.")
                continue
            report.mapped.append((name, source.path))
            if tuple(found[name]) != shape:
                faults.append(f"variable {name} has shape {tuple(found[name])}, expected {shape}.")
    without = wanted.keys() - {source.path for source in sources}
    faults += [f"no variable maps to parameter {path}." for path in sorted(without)]
    known = {name for name, _ in report.mapped} | set(skipped)
    report.unmapped = [name for name in found if name not in known]
    if not allow_unmapped:
        faults += [
            f"variable {name} {tuple(found[name])} belongs to no part of this architecture; pass "
            "--allow_unmapped to leave such variables out."
            for name in report.unmapped
        ]
    errors.raise_all(errors.abbreviate(faults, limit=20), where=where)
    return report
