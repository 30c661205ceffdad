"""The training step as the TPU compiler compiles it: cost, memory and communication per device.

`inspect --topology` prints it. The step is exactly that of training, compiled for a slice of TPUs
that need not be present.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from convt5 import errors
from convt5.analysis import collectives, costs, gpu_target
from convt5.analysis.cost_report import Subject, align, device_bytes, short_bytes
from convt5.analysis.topology import Topology
from convt5.modeling import sharding
from convt5.modeling.tree_paths import matches
from convt5.ops import dispatch
from convt5.runtime.amounts import short_number
from convt5.runtime.progress import elapsed
from convt5.training import compilation
from convt5.training.plan import Plan
from convt5.training.train_step import StepConfig, differentiate

_LAYER = re.compile(r"/layers/(\d+)/")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Step(NamedTuple):
    """The step to compile.

    Attributes:
        subject: the update, its batch and its name.
        gradients_only: computes only the loss and gradients of one microbatch.
    """

    subject: Subject
    gradients_only: bool = False

    @property
    def config(self) -> StepConfig:
        return self.subject.step

    @property
    def rows(self) -> int:
        """Rows of the compiled step, over all devices."""
        parts = self.config.grad_accum_steps if self.gradients_only else 1
        return self.subject.batch_size // parts

    @property
    def loops(self) -> int:
        """Number of iterations of the compiled program's loop over microbatches."""
        return 1 if self.gradients_only else self.config.grad_accum_steps

    def changed(self, **changes: Any) -> "Step":
        """Returns the step with changes to its `StepConfig`."""
        config = dataclasses.replace(self.config, **changes)
        return self._replace(subject=dataclasses.replace(self.subject, step=config))

    def abstract_batch(self, where: jax.sharding.NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch as `data` makes it and `place_batch` places it."""
        subject = self.subject
        lengths = {"encoder": subject.encoder_length, "decoder": subject.decoder_length}
        names = ["encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"]
        names += ["decoder_loss_weights", "decoder_target_bytes"]
        if subject.packed:
            names += [
                f"{stack}_{kind}" for stack in lengths for kind in ("segment_ids", "positions")
            ]
        return {
            name: jax.ShapeDtypeStruct(
                (self.rows, lengths[name.partition("_")[0]]), jnp.int32, sharding=where
            )
            for name in names
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        parameters, optimizer, average: as sharded, without the padding of layouts.
        arguments: state and batch, in the layouts of the device.
        results: results that do not reuse the memory of an argument.
        temporaries: everything else that the step needs, not all of it at the same time.
        code: the program.
        available: memory that the compiler allows a program to use.
    """

    parameters: int
    optimizer: int
    average: int
    arguments: int
    results: int
    temporaries: int
    code: int
    available: int

    @property
    def total(self) -> int:
        """Arguments, results, temporaries and code; more than is held at any one time."""
        return self.arguments + self.results + self.temporaries + self.code

    @property
    def left(self) -> int:
        """Minimum of free memory; a step that does not fit is not compiled."""
        return max(0, self.available - self.total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Lower bounds of the step time in seconds, if one limit of a device were the only one.

    Attributes:
        compute: FLOPs over the bfloat16 peak.
        memory: bytes accessed over HBM bandwidth.
        communication: bytes sent over the bandwidth of all links to other chips.
    """

    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        """The minimum step time, if all three overlap completely."""
        return max(dataclasses.astuple(self))

    @property
    def bound_by(self) -> str:
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the compiler reports on one step; all figures are per device.

    Attributes:
        step, topology: what was compiled.
        mesh: sizes of the mesh axes.
        flops: FLOPs of the compiled program, with Pallas kernels as they state them.
        bytes_accessed: bytes read and written by all instructions. The compiler counts the body of
            a loop once. With microbatches both figures are multiplied by their number, which also
            multiplies the update; for scanned layers see `loops_counted`.
        memory: use of memory.
        traffic: collectives by kind and mesh axes.
        compile_seconds: time of tracing and compiling on this machine.
        num_parameters: number of parameters of the whole model.
        loops_counted: whether scanned layers are fully counted in FLOPs and bytes. If they are all
            alike, both figures are extrapolated from models of one and of two layers without scan;
            otherwise (they differ, perhaps in what is frozen) a loop's body counts only once.
    """

    step: Step
    topology: Topology
    mesh: Mapping[str, int]
    flops: float
    bytes_accessed: float
    memory: Memory
    traffic: tuple[collectives.Traffic, ...]
    compile_seconds: float
    num_parameters: int
    loops_counted: bool = True

    @functools.cached_property
    def model_flops(self) -> float:
        """FLOPs of forward and backward pass by formula, divided by the number of devices."""
        subject = self.step.subject
        cost = costs.model_cost(subject.config, **subject.lengths)
        return cost.training_flops * self.step.rows / math.prod(self.mesh.values())

    @functools.cached_property
    def roofline(self) -> Roofline:
        chip = self.topology.chip
        return Roofline(
            compute=self.flops / (self.topology.peak_flops or math.inf),
            memory=self.bytes_accessed / chip.hbm_bandwidth,
            communication=sum(t.sent_bytes for t in self.traffic) / chip.ici_bandwidth,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; bytes and FLOPs are per device."""
        subject, memory, roofline = self.step.subject, self.memory, self.roofline
        return {
            "model": subject.name,
            "parameters": self.num_parameters,
            "topology": self.topology.name,
            "devices": len(self.topology.devices),
            "mesh": dict(self.mesh),
            "batch_size": subject.batch_size,
            **subject.lengths,
            "grad_accum_steps": subject.step.grad_accum_steps,
            "gradients_only": self.step.gradients_only,
            "flops": self.flops,
            "loops_counted": self.loops_counted,
            "model_flops": self.model_flops,
            "bytes_accessed": self.bytes_accessed,
            "memory_bytes": {
                **dataclasses.asdict(memory),
                "total": memory.total,
                "left": memory.left,
            },
            "collectives": [dataclasses.asdict(traffic) for traffic in self.traffic],
            "roofline_seconds": {
                **dataclasses.asdict(roofline),
                "step": roofline.seconds,
                "bound_by": roofline.bound_by,
            },
            "compile_seconds": self.compile_seconds,
        }

    def as_text(self) -> str:
        """Returns the report as text."""
        return "\n\n".join(
            [
                self._heading(),
                "Work of each device\n" + align(self._step_rows(), left=(0, 2)),
                "Memory of each device\n" + align(self._memory_rows(), left=(0, 2)),
                self._traffic_section(),
                "Lower bounds of the step time\n" + align(self._roofline_rows(), left=(0, 2)),
            ]
        )

    def _heading(self) -> str:
        step, subject = self.step, self.step.subject
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = f", {step.loops} microbatches" if step.loops > 1 else ""
        rows = [
            ("devices", f"{len(self.topology.devices)} of {self.topology.name}, mesh {mesh}"),
            (
                "batch",
                f"{step.rows:,} rows of {subject.encoder_length:,} + {subject.decoder_length:,} "
                f"tokens{', packed' if subject.packed else ''}{parts}",
            ),
            ("compiled in", f"{self.compile_seconds:.1f} s on this machine"),
        ]
        what = "Loss and gradients" if step.gradients_only else "Training step"
        platform = self.topology.chip.platform
        return f"{what} of {subject.name}, compiled for {platform}\n" + align(rows, left=(0, 1))

    def _step_rows(self) -> list[tuple[str, ...]]:
        ratio = f"{self.flops / self.model_flops:.2f} x the closed-form estimate"
        intensity = f"{self.flops / self.bytes_accessed:.0f} FLOPs per byte"
        if not self.loops_counted:
            ratio += "; each loop of scanned layers is counted as one layer"
        return [
            ("operations", short_number(self.flops, "FLOP"), ratio),
            ("bytes accessed", short_bytes(self.bytes_accessed), intensity),
        ]

    def _memory_rows(self) -> list[tuple[str, ...]]:
        memory = self.memory
        verdict = (
            f"fits, {short_bytes(memory.left)} to spare"
            if memory.left
            else "fits, because not all of it is live at the same time"
        )
        return [
            ("arguments", short_bytes(memory.arguments), "state and batch, of which"),
            ("  parameters", short_bytes(memory.parameters), ""),
            ("  optimizer state", short_bytes(memory.optimizer), ""),
            *([("  average", short_bytes(memory.average), "")] if memory.average else []),
            (
                "results",
                short_bytes(memory.results),
                "besides those that reuse the memory of arguments",
            ),
            ("temporaries", short_bytes(memory.temporaries), ""),
            ("program", short_bytes(memory.code), ""),
            ("total", short_bytes(memory.total), f"of {short_bytes(memory.available)}: {verdict}"),
        ]

    def _traffic_section(self) -> str:
        if not self.traffic:
            return "Collectives: none"
        head = ("collective", "mesh axes", "count", "payload", "sent by a device")
        rows = [
            (
                t.kind,
                "+".join(t.axes),
                f"{t.count:,}",
                short_bytes(t.payload_bytes),
                short_bytes(t.sent_bytes),
            )
            for t in self.traffic
        ]
        return "Collectives\n" + align([head, *rows], left=(0, 1))

    def _roofline_rows(self) -> list[tuple[str, ...]]:
        chip, roofline = self.topology.chip, self.roofline
        peaks = {
            "compute": (self.topology.peak_flops or math.nan, "FLOP/s", "in bfloat16"),
            "memory": (chip.hbm_bandwidth, "B/s", "of HBM"),
            "communication": (chip.ici_bandwidth, "B/s", "over all links"),
        }
        return [
            (
                name,
                _milliseconds(getattr(roofline, name)),
                f"at {short_number(peak, unit)} {of_what}"
                + (", the bottleneck" if name == roofline.bound_by else ""),
            )
            for name, (peak, unit, of_what) in peaks.items()
        ]


class DoesNotFit(errors.UserError):
    """Raised for a step that needs more memory than the devices have.

    Attributes:
        needed: bytes needed on each device, if the compiler states it.
    """

    def __init__(self, message: str, needed: float | None):
        super().__init__(message)
        self.needed = needed


def make_report(step: Step, topology: Topology, *, count_loops: bool = True) -> StepReport:
    """Compiles the step for a slice and reports on it.

    Args:
        step: the step.
        topology: the slice.
        count_loops: if layers are scanned, also compiles one and two layers, so that FLOPs and
            bytes include all layers.

    Raises:
        UserError: the mesh does not divide the devices, the batch or the model.
        DoesNotFit: the step needs more memory than the devices have.
    """
    plan = step.subject.plan(topology.devices)
    waiting = f"compiling {step.subject.name} for {topology.name}, which takes minutes"
    try:
        compiled = _compile(step, plan, topology, waiting)
    except jax.errors.JaxRuntimeError as error:
        raise _explain(error, step, topology) from None
    cost = _cost(compiled)
    whole: np.ndarray | None = cost
    if step.subject.config.scan_layers:
        whole = _cost_of_all_layers(step, topology) if count_loops else None
    flops, bytes_accessed = step.loops * (cost if whole is None else whole)
    memory = compiled.call.memory_analysis()
    _check_fits(memory, step, topology)
    mesh = dict(plan.mesh.shape)
    updated = 0 if step.gradients_only else 1
    return StepReport(
        step=step,
        topology=topology,
        mesh=mesh,
        flops=float(flops),
        bytes_accessed=float(bytes_accessed),
        memory=Memory(
            parameters=device_bytes(plan.abstract.model, plan.shardings.model),
            optimizer=updated * device_bytes(plan.abstract.opt_state, plan.shardings.opt_state),
            average=updated * device_bytes(plan.abstract.ema, plan.shardings.ema),
            arguments=memory.argument_size_in_bytes,
            results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            code=memory.generated_code_size_in_bytes,
            available=topology.chip.hbm_bytes,
        ),
        traffic=collectives.traffic(collectives.parse(compiled.call.as_text(), mesh)),
        compile_seconds=compiled.seconds,
        num_parameters=plan.num_parameters(),
        loops_counted=whole is not None,
    )


def _cost(compiled: compilation.CompiledStep) -> np.ndarray:
    """Returns FLOPs and bytes accessed."""
    cost = compiled.call.cost_analysis() or gpu_target.cost_analysis(compiled.call)
    return np.array([cost["flops"], cost["bytes accessed"]])


def _cost_of_all_layers(step: Step, topology: Topology) -> np.ndarray | None:
    """Returns FLOPs and bytes accessed of the step without scan over layers.

    If all layers are alike, each adds the same amount, so models of one and two layers suffice.
    Returns None if they, or their frozen parameters, differ.
    """
    config = step.subject.config
    stacks = config.encoder, config.decoder
    count = config.encoder.num_layers
    listed = [v for stack in stacks for v in vars(stack).values() if isinstance(v, tuple | list)]
    if config.decoder.num_layers != count or any(listed):
        return None
    frozen = _frozen_if_equal(step)
    if frozen is None:
        return None

    def with_layers(number: int) -> np.ndarray:
        model = dataclasses.replace(
            config,
            scan_layers=False,
            encoder=dataclasses.replace(config.encoder, num_layers=number),
            decoder=dataclasses.replace(config.decoder, num_layers=number),
        )
        held = [name for name in frozen if _layer_number(name) < number]
        exactly = tuple(f"^{re.escape(name)}$" for name in held)
        few = step.changed(model=model, frozen=exactly)
        waiting = f"compiling {number} of its {count} layers, to count operations"
        return _cost(_compile(few, few.subject.plan(topology.devices), topology, waiting))

    one = with_layers(1)
    return one + (count - 1) * (with_layers(2) - one)


def _frozen_if_equal(step: Step) -> list[str] | None:
    """Returns the names of all frozen parameters; None if the layers of a stack differ in them."""
    shapes = costs.model_cost(step.subject.config, **step.subject.lengths).shapes
    frozen = [name for name in shapes if matches(name, step.config.frozen)]
    kinds = {_LAYER.sub("/layers/*/", name) for name in frozen}
    is_alike = all(name in frozen for name in shapes if _LAYER.sub("/layers/*/", name) in kinds)
    return frozen if is_alike else None


def _layer_number(name: str) -> int:
    """Returns the index of the layer of a parameter; -1 if it is in none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def _compile(step: Step, plan: Plan, topology: Topology, waiting: str) -> compilation.CompiledStep:
    """Compiles a step; a terminal shows `waiting` meanwhile."""
    with elapsed(waiting), dispatch.using(choice=topology.chip.implementation):
        return _compile_here(step, plan)


def _compile_here(step: Step, plan: Plan) -> compilation.CompiledStep:
    batch = step.abstract_batch(plan.batch_sharding)
    if not step.gradients_only:
        return compilation.compile_step(plan.train_step, plan.abstract, batch)
    key = jax.random.key(step.config.seed)
    gradients = differentiate(step.config.loss, plan.shardings.model)
    jitted = jax.jit(
        lambda model, batch: gradients(model, batch, key),
        in_shardings=(plan.shardings.model, plan.batch_sharding),
        out_shardings=(sharding.replicated(plan.mesh), plan.shardings.model),
    )
    return compilation.compile_step(jitted, plan.abstract.model, batch)


def _check_fits(memory: Any, step: Step, topology: Topology) -> None:
    """Raises `DoesNotFit` if a step needs too much memory, which the GPU compiler accepts."""
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes
    used += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    if topology.chip.platform == "GPU" and used > topology.chip.hbm_bytes:
        raise _does_not_fit(step, topology, used, topology.chip.hbm_bytes)


def _explain(error: Exception, step: Step, topology: Topology) -> Exception:
    """Returns `DoesNotFit` for errors of a step that does not fit, and others unchanged."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text or "memory space vmem" in text:
        return error  # On-chip memory depends on a kernel, not on settings.
    size = r"([\d.]+)([KMGT]?)"
    excess = re.search(rf"Used {size} of {size} hbm", text)
    excess = excess or re.search(rf"\({size}\) exceeds available HBM \({size}\)", text)
    if excess is None:
        return _does_not_fit(step, topology)
    used, available = (
        float(number) * _UNITS[unit] for number, unit in np.reshape(excess.groups(), (2, 2))
    )
    return _does_not_fit(step, topology, used, available)


def _does_not_fit(
    step: Step, topology: Topology, used: float | None = None, available: float = 0.0
) -> DoesNotFit:
    how_much = ""
    if used is not None:
        how_much = (
            f": it needs {short_bytes(used)} of {short_bytes(available)}, "
            f"{short_bytes(used - available)} too much"
        )
    batch_size, parts = step.subject.batch_size, step.config.grad_accum_steps
    return DoesNotFit(
        f"the step does not fit a device of {topology.name}{how_much}; lower batch_size="
        f"{batch_size}, split more by --gin.sharding.MeshConfig.fsdp or .tensor, raise "
        f"grad_accum_steps={parts}, or take more or larger chips.",
        used,
    )


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
