"""The device mesh, and rules that map parameter names to mesh axes.

Model code does not mention shardings. Rules apply to the abstract shapes of parameters and of
optimizer state. They are an argument of the trainer, so that other models bring their own.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from convt5 import errors
from convt5.modeling.tree_paths import named_leaves, path_name, pattern_faults

Tree = Any

AXES = ("data", "fsdp", "sequence", "tensor")
"""Mesh axes. Neighbours along the last ones, which communicate in every layer, are closest on a TPU
slice."""

BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each mesh axis; one may be -1 for all remaining devices.

    Attributes:
        data: groups of devices; each group holds all parameters and takes a part of the batch.
        fsdp: devices that split the batch and hold a part of each parameter and of its optimizer
            state, all-gathered when used (fully sharded data parallelism).
        sequence: devices that split each row of tokens. Convolutions exchange the positions that
            taps reach with their neighbours; attention all-gathers keys and values (`sharded` in
            the folders of `ops`).
        tensor: devices that split the channels of each layer (tensor parallelism).
    """

    data: int = -1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        faults = [
            f"{axis}={size!r} must be a positive integer, or -1 for all devices that remain."
            for axis, size in sizes.items()
            if not isinstance(size, int) or size == 0 or size < -1
        ]
        if list(sizes.values()).count(-1) > 1:
            faults.append(f"{self._text()}: only one axis can take the remaining devices (-1).")
        errors.raise_all(faults, where="MeshConfig")

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Builds the mesh over `devices`, by default those of all hosts.

        Raises:
            UserError: the product of the sizes is not the number of devices.
        """
        devices = list(jax.devices() if devices is None else devices)
        # Auto: the compiler shards everything between the inputs and outputs of the step.
        types = (AxisType.Auto,) * len(AXES)
        return jax.make_mesh(self.sizes(len(devices)), AXES, types, devices=devices)

    def sizes(self, num_devices: int) -> tuple[int, int, int, int]:
        """Returns the size of each of `AXES` on `num_devices` devices."""
        known = math.prod(size for size in dataclasses.astuple(self) if size != -1)
        if num_devices % known or (-1 not in dataclasses.astuple(self) and known != num_devices):
            raise errors.UserError(
                f"MeshConfig({self._text()}) needs a number of devices that is a multiple of "
                f"{known}, but there are {num_devices}; choose sizes that multiply to "
                f"{num_devices}, or -1 for one of them."
            )
        rest = num_devices // known
        data, fsdp, sequence, tensor = (rest if s == -1 else s for s in dataclasses.astuple(self))
        return data, fsdp, sequence, tensor

    def _text(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in dataclasses.asdict(self).items())


@dataclasses.dataclass(frozen=True)
class Rule:
    """One sharding rule; the first rule whose pattern matches a parameter name applies.

    Attributes:
        pattern: regular expression searched in the parameter name.
        axes: for each array axis a mesh axis, a tuple (or list) of them, or None; missing entries
            are None.
        optional: whether the rule may match nothing, which otherwise is an error.
    """

    pattern: str
    axes: tuple[str | tuple[str, ...] | None, ...] = ()
    optional: bool = False

    def __post_init__(self):
        if isinstance(self.axes, list | tuple):
            axes = tuple(tuple(a) if isinstance(a, list) else a for a in self.axes)
            object.__setattr__(self, "axes", axes)
        faults = [*pattern_faults(pattern=[self.pattern]), *_axis_faults(self.axes)]
        errors.raise_all(faults, where="Rule")


def _axis_faults(axes: object) -> list[str]:
    if not isinstance(axes, tuple):
        return [f"axes={axes!r} must be a list with an entry for each array axis."]
    groups = [a if isinstance(a, tuple) else (a,) for a in axes if a is not None]
    named = [axis for group in groups for axis in group]
    rule = f"must be one of {', '.join(AXES)}, several of these in a list, or None for no split"
    return [
        f"axes={axes!r}: {axis!r} {rule}.{errors.suggest(str(axis), AXES)}"
        for axis in named
        if axis not in AXES
    ] + [
        f"axes={axes!r} names {axis} twice; an array is split along each mesh axis at most once."
        for axis in AXES
        if named.count(axis) > 1
    ]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of values that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batches: `BATCH_AXES` split the first axis."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of [batch, length] arrays: "sequence" splits the length."""
    if mesh.shape.get("sequence", 1) == 1:
        return batch_sharding(mesh)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))


def parameter_specs(parameters: Tree, rules: Sequence[Rule]) -> dict[str, PartitionSpec]:
    """Returns the spec of every parameter by name, one entry per array axis.

    Raises:
        UserError: a parameter without a matching rule, a rule that is not optional and applies to
            nothing, or a rule with more axes than its parameter. Lists them all.
    """
    specs, faults, used = {}, [], set()
    for name, leaf in named_leaves(parameters):
        rule = next((rule for rule in rules if re.search(rule.pattern, name)), None)
        if rule is None:
            faults.append(f"no rule matches parameter {name} {tuple(leaf.shape)}; add one for it.")
            continue
        used.add(rule)
        if len(rule.axes) > len(leaf.shape):
            faults.append(
                f"rule {rule.pattern!r} names {len(rule.axes)} axes, but parameter {name} has "
                f"shape {tuple(leaf.shape)}; give at most one entry per array axis."
            )
            continue
        missing = len(leaf.shape) - len(rule.axes)
        specs[name] = PartitionSpec(*rule.axes, *(None,) * missing)
    faults += [
        f"rule {rule.pattern!r} applies to no parameter; correct its pattern or its place in "
        "the list, or mark it optional."
        for rule in rules
        if rule not in used and not rule.optional
    ]
    errors.raise_all(faults, where="sharding rules")
    return specs


def tree_shardings(tree: Tree, parameters: Tree, mesh: Mesh, rules: Sequence[Rule]) -> Tree:
    """Returns a `NamedSharding` for every leaf of `tree`, which may be abstract.

    A leaf whose name contains that of a parameter, as in optimizer state, is sharded like it,
    except along axes of length 1 (averaged statistics). Scalars are replicated. Rules that the
    model declares itself, in its attribute `sharding_rules`, come before the others.

    Raises:
        UserError: as for `parameter_specs`, or an array axis is not divisible by its mesh axes.
    """
    specs = parameter_specs(parameters, (*getattr(parameters, "sharding_rules", ()), *rules))
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(parameters)}
    faults = []

    def place(path, leaf) -> NamedSharding:
        name = path_name(path)
        owner = _owner(name, shapes)
        if owner is None or len(leaf.shape) != len(shapes[owner]):
            if leaf.shape:
                faults.append(
                    f"{name} {tuple(leaf.shape)} is neither a scalar nor shaped like a parameter, "
                    "so no rule applies to it."
                )
            return replicated(mesh)
        spec = _spec_of_state(tuple(leaf.shape), shapes[owner], specs[owner])
        faults.extend(_division_faults(name, tuple(leaf.shape), spec, mesh))
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(place, tree)
    errors.raise_all(faults, where=f"mesh {dict(mesh.shape)}")
    return shardings


def with_auto_axes(sharding: Any) -> Any:
    """Returns a sharding over a mesh that leaves intermediate results to the compiler.

    On a mesh of `jax.make_mesh`, whose axes are explicit by default, JAX would derive their
    shardings from rules, which are ambiguous for a model. Other values are returned unchanged.
    """
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(mesh, Mesh) or not has_explicit_axes(mesh):
        return sharding
    automatic = Mesh(
        np.asarray(mesh.devices), mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim
    )
    return NamedSharding(automatic, sharding.spec, memory_kind=sharding.memory_kind)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether types of arrays hold their shardings over this mesh."""
    return AxisType.Explicit in mesh.axis_types


def without_fsdp(shardings: Tree) -> Tree:
    """Returns the shardings of parameters while they are used, with "fsdp" removed."""

    def remove(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        axes = (axes,) if isinstance(axes, str) else axes or ()
        return tuple(axis for axis in axes if axis != "fsdp")

    return jax.tree.map(
        lambda s: NamedSharding(s.mesh, PartitionSpec(*map(remove, s.spec))), shardings
    )


def check_mesh(
    mesh: Mesh,
    *,
    batch_size: int,
    grad_accum_steps: int = 1,
    tensor_divides: Mapping[str, int] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> None:
    """Checks the sizes that parameter shapes do not show.

    Args:
        mesh: from `MeshConfig.build`.
        batch_size: rows of the global batch.
        grad_accum_steps: microbatches per batch.
        tensor_divides: sizes that must be divisible by the axis "tensor", by the name of their
            setting, such as {"num_heads": 12}.
        lengths: tokens per row, by the name of their setting, which must be divisible by the axis
            "sequence"; None if batches hold no tokens, so that nothing can be split.

    Raises:
        UserError: lists every size that is not divisible.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    faults = []
    if grad_accum_steps < 1:
        faults.append(f"grad_accum_steps={grad_accum_steps} must be at least 1.")
    elif batch_size < 1 or batch_size % (ways * grad_accum_steps):
        faults.append(
            f"batch_size={batch_size} must be a multiple of data * fsdp * grad_accum_steps = "
            f"{mesh.shape['data']} * {mesh.shape['fsdp']} * {grad_accum_steps} = "
            f"{ways * grad_accum_steps}: every device takes equally many rows of each microbatch."
        )
    faults += [
        f"{name}={size} must be a multiple of tensor={mesh.shape['tensor']}; set MeshConfig.tensor "
        f"to a divisor of {size}."
        for name, size in (tensor_divides or {}).items()
        if size % mesh.shape["tensor"]
    ]
    errors.raise_all(faults + _length_faults(mesh, lengths), where=f"mesh {dict(mesh.shape)}")


def check_rows(mesh: Mesh | AbstractMesh, batch_size: int, *, setting: str) -> None:
    """Raises `UserError`, naming the setting, if the batch is not divisible among the devices."""
    data, fsdp = (mesh.shape[axis] for axis in BATCH_AXES)
    if batch_size < 1 or batch_size % (data * fsdp):
        raise errors.UserError(
            f"{setting}={batch_size} must be a multiple of data * fsdp = {data} * {fsdp} = "
            f"{data * fsdp}: every device takes equally many rows of a batch."
        )


def _length_faults(mesh: Mesh, lengths: Mapping[str, int] | None) -> list[str]:
    ways = mesh.shape["sequence"]
    if lengths is None and ways > 1:
        return [
            f"sequence={ways} splits rows of tokens, but these batches hold none; set "
            "MeshConfig.sequence to 1."
        ]
    return [
        f"{name}={length} must be a multiple of sequence={ways}: every device holds equally many "
        f"tokens of a row; set {name} to {-(-length // ways) * ways}, or MeshConfig.sequence to a "
        f"divisor of {length}."
        for name, length in (lengths or {}).items()
        if length % ways
    ]


def _owner(name: str, parameters: Mapping[str, Any]) -> str | None:
    """Returns the longest parameter name that occurs in `name` as whole components, or None."""
    parts = name.split("/")
    runs = (
        "/".join(parts[start : start + length])
        for length in range(len(parts), 0, -1)
        for start in range(len(parts) - length + 1)
    )
    return next((run for run in runs if run in parameters), None)


def _spec_of_state(
    shape: tuple[int, ...], owner_shape: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    """Returns the parameter's spec without the axes over which the state is averaged."""
    return PartitionSpec(
        *(
            axes if size == owner_size else None
            for size, owner_size, axes in zip(shape, owner_shape, spec, strict=True)
        )
    )


def _division_faults(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> list[str]:
    faults = []
    for size, axes in zip(shape, spec, strict=True):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            split = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            faults.append(
                f"{name} {shape} has an axis of {size} that {split} must divide; choose other mesh "
                "sizes or change the model's size."
            )
    return faults
