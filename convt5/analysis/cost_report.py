"""The report of `inspect`: costs and shardings of a model, as JSON values and as text."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from convt5.analysis import costs
from convt5.modeling import sharding
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.tree_paths import named_leaves
from convt5.runtime.amounts import short_number
from convt5.training import schedule
from convt5.training.plan import Plan, check_mesh, make_plan
from convt5.training.train_state import (
    TrainState,
    abstract_state,
    num_parameters,
    parameters,
    state_shardings,
)
from convt5.training.train_step import StepConfig

_PARTS = (
    ("embeddings and output", r"^(token_embedder|position_embedder|output_head)/"),
    ("stem", r"^stem/"),
    ("Canon layers", r"[_/]canon/"),
    ("mixing", r"/mixing/|/relative_bias/"),
    ("encoder-decoder attention", r"/cross_attention/"),
    ("feed-forward", r"/mlp/"),
    ("norms", r"norm/"),
)
"""Purpose of a parameter, by the first pattern that its name matches."""

_MODEL_ORDER = (
    "token_embedder",
    "position_embedder",
    "stem",
    "encoder",
    "decoder",
    "output_head",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and update to report on.

    Attributes:
        name: name of the model.
        step: the update of a text model. Memory takes frozen parameters into account; FLOPs and
            activations are those of training all parameters.
        encoder_length, decoder_length: tokens per row.
        batch_size: rows per update, over all devices.
        packed: whether rows hold several examples.
        devices: number of devices.
        assumed: which of these settings are not given by the configuration.
    """

    name: str
    step: StepConfig
    encoder_length: int
    decoder_length: int
    batch_size: int
    packed: bool = False
    devices: int = 1
    assumed: tuple[str, ...] = ()

    @property
    def config(self) -> ConvT5Config:
        """The description of the model."""
        return cast(ConvT5Config, self.step.model)

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens per row, by the name of their setting."""
        return {"encoder_length": self.encoder_length, "decoder_length": self.decoder_length}

    @functools.cached_property
    def mesh(self) -> tuple[int, ...]:
        """Sizes of the mesh axes `sharding.AXES`."""
        return (self.step.mesh or sharding.MeshConfig()).sizes(self.devices)

    def plan(self, devices: Sequence[Any]) -> Plan:
        """Returns the plan of a run on these devices.

        Raises:
            UserError: the mesh does not divide the devices, the batch or the model.
        """
        size = self.batch_size
        return make_plan(self.step, batch_size=size, lengths=self.lengths, devices=devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """One line of the table of shardings.

    Attributes:
        name: name of the parameter.
        shape: shape of the whole array.
        spec: for each array axis a mesh axis, several, or None.
        device_shape: shape of the part on one device.
    """

    name: str
    shape: tuple[int, ...]
    spec: tuple[Any, ...]
    device_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The report of `inspect`, computed without allocating arrays.

    Attributes:
        subject: what is reported on.
        cost: costs at the subject's lengths.
        memory: memory of one update, per device.
        parameters: shardings of the parameters.
        num_trained: number of parameters that are not frozen.
    """

    subject: Subject
    cost: costs.ModelCost
    memory: costs.TrainingMemory
    parameters: tuple[ShardedParameter, ...]
    num_trained: int

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; a receptive field of null means the whole sequence."""
        subject, cost = self.subject, self.cost
        return {
            "model": subject.name,
            "encoder_length": subject.encoder_length,
            "decoder_length": subject.decoder_length,
            "batch_size": subject.batch_size,
            "assumed": list(subject.assumed),
            "parameters": cost.parameters,
            "trained_parameters": self.num_trained,
            "parameters_by_part": parameters_by_part(cost.shapes),
            "forward_flops_per_example": cost.forward_flops,
            "training_flops_per_example": cost.training_flops,
            "training_flops_per_step": cost.training_flops * subject.batch_size,
            "decoding_state_bytes_per_row": cost.decoding_bytes,
            "receptive_field": {
                "encoder": _reach_json(cost.reach("encoder")),
                "decoder": _reach_json(cost.reach("decoder")),
            },
            "encoder_positions": cost.encoder_positions,
            "stem": [_stem_json(part) for part in cost.stem],
            "layers": [_layer_json(layer) for layer in cost.layers],
            "memory_bytes_per_device": {
                **dataclasses.asdict(self.memory),
                "total": self.memory.total,
            },
            "mesh": dict(zip(sharding.AXES, subject.mesh, strict=True)),
            "sharding": [dataclasses.asdict(parameter) for parameter in self.parameters],
        }

    def as_text(self) -> str:
        """Returns the report as text."""
        return "\n\n".join(
            [
                _describe(self.subject),
                *([_stem_section(self.cost)] if self.cost.stem else []),
                _layer_section(self.cost),
                _totals_section(self),
                _memory_section(self.subject, self.memory),
                _sharding_section(self.subject, self.parameters),
            ]
        )


def make_report(subject: Subject) -> Report:
    """Returns the report on a subject.

    Raises:
        UserError: sizes are not divisible by the mesh, or rules or patterns do not fit the model.
    """
    # Abstract devices, so that a large machine can be planned for on a small one.
    abstract_mesh = AbstractMesh(
        subject.mesh, sharding.AXES, axis_types=(AxisType.Auto,) * len(subject.mesh)
    )
    mesh = cast(Mesh, abstract_mesh)
    step = subject.step
    check_mesh(step, mesh, batch_size=subject.batch_size, lengths=subject.lengths)
    # No cost depends on the learning rate.
    optimizer = step.optimizer.build(schedule.Constant(rate=1.0))
    state = abstract_state(step.model, optimizer, with_ema=step.ema is not None, frozen=step.frozen)
    shardings = state_shardings(state, mesh, step.sharding_rules)
    cost = costs.model_cost(subject.config, **subject.lengths)
    return Report(
        subject=subject,
        cost=cost,
        memory=_device_memory(subject, cost, state, shardings),
        parameters=_sharded_parameters(state, shardings),
        num_trained=num_parameters(state.model, frozen=False),
    )


def parameters_by_part(shapes: costs.Shapes) -> dict[str, int]:
    """Returns the number of parameters by purpose; includes stem and Canon layers if present."""
    counts = {part: 0 for part, _ in _PARTS}
    for name, shape in shapes.items():
        part = next(part for part, pattern in _PARTS if re.search(pattern, name))
        counts[part] += math.prod(shape)
    return {p: n for p, n in counts.items() if n or p not in ("stem", "Canon layers")}


def align(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> str:
    """Formats rows of cells as columns two spaces apart; columns in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = set(left)
    lines = (
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def short_bytes(size: float) -> str:
    """Formats a number of bytes: 312 B, 12.3 kB, 4.56 MB, 7.89 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def _device_memory(
    subject: Subject, cost: costs.ModelCost, state: TrainState, shardings: TrainState
) -> costs.TrainingMemory:
    trained = device_bytes(parameters(state.model), parameters(shardings.model))
    gathered = device_bytes(state.model, sharding.without_fsdp(shardings.model))
    axes = dict(zip(sharding.AXES, subject.mesh, strict=True))
    ways = math.prod(axes[axis] for axis in sharding.BATCH_AXES)
    rows = subject.batch_size // ways // subject.step.grad_accum_steps
    return costs.TrainingMemory(
        parameters=device_bytes(state.model, shardings.model),
        gradients=trained,
        optimizer=device_bytes(state.opt_state, shardings.opt_state),
        activations=rows * cost.activation_bytes / axes["sequence"],
        logits=2 * rows * cost.logits_bytes / (axes["sequence"] * axes["tensor"]),
        gathered=gathered if axes["fsdp"] > 1 else 0,
        average=device_bytes(state.ema, shardings.ema),
    )


def device_bytes(tree: Any, shardings: Any) -> int:
    """Returns the bytes of abstract arrays per device; `shardings` has the same structure."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf, where in pairs
    )


def _sharded_parameters(state: TrainState, shardings: TrainState) -> tuple[ShardedParameter, ...]:
    leaves, places = named_leaves(state.model), jax.tree.leaves(shardings.model)
    return tuple(
        ShardedParameter(
            name=name,
            shape=tuple(leaf.shape),
            spec=tuple(where.spec),
            device_shape=tuple(where.shard_shape(leaf.shape)),
        )
        for (name, leaf), where in zip(leaves, places, strict=True)
    )


def _describe(subject: Subject) -> str:
    config = subject.config
    rows = [
        ("encoder", f"{config.encoder.num_layers} layers: {_mixing_summary(config, 'encoder')}"),
        ("decoder", f"{config.decoder.num_layers} layers: {_mixing_summary(config, 'decoder')}"),
        ("channels", f"{config.emb_dim:,} (emb_dim), feed-forward {config.mlp_dim:,} {config.mlp}"),
        ("attention heads", f"{config.num_heads} of {config.head_dim}"),
        (
            "vocabulary",
            f"{config.vocab_size:,} rows, {'tied' if config.tie_output else 'separate'} output",
        ),
        ("layer order", f"{config.layer_order}, {config.norm} norm"),
        ("positions", config.positions),
        ("computed in", config.dtype),
    ]
    text = f"Model {subject.name}\n" + align(rows, left=(0, 1))
    if not subject.assumed:
        return text
    return (
        f"{text}\n\n  This is a model, not a run. The report assumes T5's pre-training:\n  "
        f"{', '.join(subject.assumed)}. Flags change these values; see --help."
    )


def _mixing_summary(config: ConvT5Config, stack: str) -> str:
    layers = config.encoder_layers if stack == "encoder" else config.decoder_layers
    kinds = [layer.kind for layer in layers]
    mixing = ", ".join(f"{kind} x {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    canons = dict.fromkeys(layer.canon_summary for layer in layers if layer.canon)
    return f"{mixing}, Canon layers at {'; '.join(canons)}" if canons else mixing


def _stem_section(cost: costs.ModelCost) -> str:
    head = ("convolution", "K", "stride", "channels", "reads so far", "parameters", "FLOPs/output")
    rows = [
        (
            str(part.index) if part.layer else "dense",
            str(part.layer.kernel_size) if part.layer else "-",
            str(part.layer.stride) if part.layer else "-",
            f"{part.layer.in_dim:,} to {part.layer.out_dim:,}" if part.layer else "-",
            str(part.reach),
            f"{part.parameters:,}",
            short_number(part.flops_per_position),
        )
        for part in cost.stem
    ]
    return (
        f"Stem of the encoder, bottom first ({cost.encoder_length:,} tokens become "
        f"{cost.encoder_positions:,} positions)\n"
        + align([head, *rows])
        + "\n\n  receptive field: in tokens, relative to the first token of an output's window."
    )


def _layer_section(cost: costs.ModelCost) -> str:
    head = (
        "stack",
        "layer",
        "mixing",
        "K",
        "dilation",
        "kernels",
        "reads so far",
        "receptive field",
        "parameters",
        "FLOPs/token",
    )
    rows = [_layer_row(layer) for layer in cost.layers]
    shorter = f" in {cost.encoder_positions:,} positions" if cost.stem else ""
    lengths = (
        f"encoder {cost.encoder_length:,} tokens{shorter}, decoder {cost.decoder_length:,} tokens"
    )
    return (
        f"Layers, bottom first ({lengths})\n"
        + align([head, *rows], left=(0, 2))
        + "\n\n"
        + "  K: taps; dilation: positions between taps; kernels: shared by groups of channels.\n"
        "  reads so far, receptive field: the positions of its own sequence that a position\n"
        "  depends on, through this layer and those below it. Decoder layers also attend to the\n"
        "  whole output of the encoder.\n"
        "  FLOPs/token: forward pass, two per multiply-add, for each token of the stack."
    )


def _layer_row(layer: costs.LayerCost) -> tuple[str, ...]:
    size = layer.reach.size
    return (
        layer.stack,
        str(layer.index),
        layer.mixing.kind,
        *layer.mixing.tap_columns,
        str(layer.reach),
        "all" if size is None else f"{size:,}",
        f"{layer.parameters:,}",
        short_number(layer.flops_per_token),
    )


def _totals_section(report: Report) -> str:
    subject, cost = report.subject, report.cost
    rows = [("parameters", f"{cost.parameters:,}", "")]
    if report.num_trained < cost.parameters:
        share = f"{100 * report.num_trained / cost.parameters:.1f} %"
        rows.append(("  trained", f"{report.num_trained:,}", f"{share}, the others are frozen"))
    for part, count in parameters_by_part(cost.shapes).items():
        rows.append((f"  {part}", f"{count:,}", f"{100 * count / cost.parameters:.1f} %"))
    for stack in ("encoder", "decoder"):
        reach = cost.reach(stack)
        size = "all" if reach.size is None else f"{reach.size:,}"
        rows.append((f"receptive field of the {stack}", size, f"{reach}"))
    step_flops = cost.training_flops * subject.batch_size
    rows += [
        ("FLOPs of an example, forward", short_number(cost.forward_flops), ""),
        ("FLOPs of an example, training", short_number(cost.training_flops), "3 x forward"),
        ("FLOPs of an update", short_number(step_flops), f"batch {subject.batch_size:,}"),
        ("state while decoding, per row", short_bytes(cost.decoding_bytes), ""),
    ]
    return "Totals\n" + align(rows, left=(0, 2))


def _memory_section(subject: Subject, memory: costs.TrainingMemory) -> str:
    rows = [
        ("parameters", short_bytes(memory.parameters), "float32"),
        ("gradients", short_bytes(memory.gradients), "float32"),
        ("optimizer state", short_bytes(memory.optimizer), type(subject.step.optimizer).__name__),
        (
            "average",
            short_bytes(memory.average),
            "exponential moving average of the parameters, float32",
        ),
        ("activations", short_bytes(memory.activations), "estimate, kept for the backward pass"),
        ("logits", short_bytes(memory.logits), "estimate, with their gradient"),
        ("gathered", short_bytes(memory.gathered), "parameters all-gathered over fsdp, at most"),
        ("total", short_bytes(memory.total), ""),
    ]
    rows = [row for row in rows if row[1] != short_bytes(0)]
    parts = subject.step.grad_accum_steps
    accumulated = f" in {parts} parts" if parts > 1 else ""
    return (
        f"Memory of an update on each device (batch {subject.batch_size:,}{accumulated}, "
        f"{_mesh_text(subject)})\n" + align(rows, left=(0, 2))
    )


def _sharding_section(subject: Subject, parameters: Sequence[ShardedParameter]) -> str:
    rows = [("parameter", "shape", "split over", "on each device")]
    for name, parameter in _group(parameters):
        rows.append(
            (
                name,
                _shape_text(parameter.shape),
                _spec_text(parameter.spec),
                _shape_text(parameter.device_shape),
            )
        )
    return (
        f"Sharding ({_mesh_text(subject)})\n"
        + align(rows, left=range(4))
        + "\n\n  split over: the mesh axis that shards each array axis, or - for none.\n  {0-3} "
        "stands for the layers 0 to 3."
    )


def _group(parameters: Sequence[ShardedParameter]) -> list[tuple[str, ShardedParameter]]:
    """Joins equal lines of several layers into one whose name lists the layers."""
    groups: dict[Any, list[int]] = {}
    firsts: dict[Any, ShardedParameter] = {}
    for parameter in parameters:
        match = re.match(r"(.*/layers/)(\d+)(/.*)", parameter.name)
        prefix, layer, suffix = match.groups() if match else (parameter.name, None, "")
        key = (prefix, suffix, parameter.shape, parameter.spec)
        firsts.setdefault(key, parameter)
        groups.setdefault(key, []).extend([] if layer is None else [int(layer)])
    keys = sorted(groups, key=lambda key: _MODEL_ORDER.index(key[0].split("/")[0]))
    return [(f"{key[0]}{_ranges(groups[key])}{key[1]}", firsts[key]) for key in keys]


def _ranges(numbers: Sequence[int]) -> str:
    """Formats 0, 1, 2, 5 as {0-2,5}; a single number is not changed."""
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{{{','.join(texts)}}}"


def _mesh_text(subject: Subject) -> str:
    sizes = ", ".join(f"{a}={n}" for a, n in zip(sharding.AXES, subject.mesh, strict=True))
    count = math.prod(subject.mesh)
    return f"{count} device{'s' if count > 1 else ''}: {sizes}"


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _spec_text(spec: Sequence[Any]) -> str:
    return ", ".join("-" if a is None else a if isinstance(a, str) else "+".join(a) for a in spec)


def _stem_json(part: costs.StemCost) -> dict[str, Any]:
    return {
        "kernel_size": part.layer.kernel_size if part.layer else None,
        "stride": part.layer.stride if part.layer else 1,
        "tokens_per_output": part.stride,
        "receptive_field": _reach_json(part.reach),
        "parameters": part.parameters,
        "forward_flops_per_output": part.flops_per_position,
        "activation_bytes_per_output": part.activation_bytes,
    }


def _layer_json(layer: costs.LayerCost) -> dict[str, Any]:
    mixing = layer.mixing
    return {
        "stack": layer.stack,
        "layer": layer.index,
        "mixing": mixing.kind,
        "canon": mixing.canon,
        "kernel_size": getattr(mixing, "kernel_size", None),
        "dilation": getattr(mixing, "dilation", None),
        "num_kernels": getattr(mixing, "num_kernels", None),
        "receptive_field": _reach_json(layer.reach),
        "parameters": layer.parameters,
        "forward_flops_per_token": layer.flops_per_token,
        "activation_bytes_per_token": layer.activation_bytes,
    }


def _reach_json(reach: costs.Reach) -> dict[str, int | None]:
    return {"left": reach.left, "right": reach.right, "size": reach.size}
