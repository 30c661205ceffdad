"""Which formulation computes an operator: one table, one context, and one place that decides.

An operator has a table of formulations: one in plain JAX for every platform, others for CPUs and
GPUs where XLA computes them faster, and kernels for TPUs. The choice falls when a program is
lowered, by its platform and devices, whatever process compiles it. Kernels are opaque to the
partitioner: on several devices they need to know how arrays are split (`using(devices=...)`), and
otherwise plain JAX computes.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, Mesh

from convt5.ops.varying import invariant_types

Choice = Literal["auto", "plain", "default", "cpu", "gpu", "kernels", "interpreted kernels"]
Formulation = Callable[..., Any]
"""Computes an operator from arrays."""


class Table(NamedTuple):
    """The formulations of an operator, which compute the same from the same arrays.

    Attributes:
        default: plain JAX, for every platform.
        cpu, gpu: plain JAX that XLA computes faster there; None: `default`.
        tpu: kernels for one device; None where they do not serve.
        shared_tpus: kernels for `devices()`, by way of shard_map; None where not possible.
    """

    default: Formulation
    cpu: Formulation | None = None
    gpu: Formulation | None = None
    tpu: Formulation | None = None
    shared_tpus: Formulation | None = None


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that share an operator.

    Attributes:
        mesh: all of them.
        rows: mesh axes that split the batch.
        channels: mesh axes that split the channels.
        lengths: mesh axes that split each row into pieces of equal length.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    channels: tuple[str, ...]
    lengths: tuple[str, ...] = ()

    @property
    def split_lengths(self) -> bool:
        """Whether rows are split, so that devices must exchange parts of them."""
        return self.count(self.lengths) > 1

    def dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """Returns the mesh axes if they divide an array axis of this size, or ()."""
        return axes if size % self.count(axes) == 0 else ()

    def count(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along mesh axes."""
        sizes: Mapping[str, int] = self.mesh.shape
        return functools.reduce(lambda product, axis: product * sizes[axis], axes, 1)


@dataclasses.dataclass(frozen=True)
class Context:
    """What decides about operators that are traced, apart from their arrays.

    Attributes:
        choice: "auto": by the platform that is lowered for. "plain": the same without kernels.
            "default", "cpu", "gpu": that formulation on any platform. "kernels": kernels on any
            platform, which only TPUs run. "interpreted kernels": kernels run without a TPU, slowly.
            Where a table has no such entry, the default.
        devices: how arrays are split; None on one device, and inside of shard_map.
    """

    choice: Choice = "auto"
    devices: Devices | None = None


_DEFAULT = Context()
_context = contextvars.ContextVar("context", default=_DEFAULT)


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Changes fields of the `Context` of what is traced inside.

    A function that jit has traced keeps the context that it was traced in.
    """
    token = _context.set(dataclasses.replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)


def devices() -> Devices | None:
    """Returns the devices of the context, or None if there is only one."""
    given = _context.get().devices
    return None if given is None or given.mesh.size == 1 else given


def may_use_kernels() -> bool:
    """Whether kernels can be chosen. Otherwise they need not be imported, which takes time."""
    choice = _context.get().choice
    return "kernels" in choice or (choice == "auto" and _may_meet("libtpu"))


def interpreted() -> bool:
    """Whether kernels run without a TPU."""
    return _context.get().choice == "interpreted kernels"


def run(table: Table, *arrays: Any) -> Any:
    """Returns the result of one of the formulations, chosen by context and platform.

    Args:
        table: the formulations.
        arrays: their arguments.
    """
    plain = functools.partial(_plain, table)
    if not may_use_kernels() or (table.tpu is None and table.shared_tpus is None):
        return plain(*arrays)
    traced, shape = jax.make_jaxpr(plain, return_shape=True)(*arrays)
    # Kernels compute what one device holds, and have no rules for types that vary over a mesh.
    types = invariant_types(arrays)
    kernels = (
        traced if formulation is None else jax.make_jaxpr(formulation)(*types)
        for formulation in (table.tpu, table.shared_tpus)
    )
    return _bind([traced, *kernels], shape, arrays, forced=_forced(table))


def _plain(table: Table, *arrays):
    """Computes without kernels."""
    choice = _context.get().choice
    if choice in ("default", "cpu", "gpu"):
        return (getattr(table, choice) or table.default)(*arrays)
    entries = {"cpu": table.cpu}
    if _may_meet("jax_plugins"):  # Of GPUs; without them nothing is traced for GPUs.
        entries |= dict.fromkeys(("cuda", "rocm"), table.gpu)
    own = {platform: entry for platform, entry in entries.items() if entry is not None}
    if not own:
        return table.default(*arrays)
    return lax.platform_dependent(*arrays, default=table.default, **own)


def _forced(table: Table) -> int | None:
    """Returns which program is computed on any platform, or None for a choice by platform."""
    if _context.get().choice == "auto":
        return None
    return _KERNELS if table.shared_tpus is None else _SHARED


def one_operation(compute: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `compute` of the arrays, as one operation of the traced program.

    For the forward rule of a `custom_vjp`. Calling the function whose rule it is would leave
    gradients without a derivative in forward mode, which Hessian-vector products take; computing
    without this would let remat policies and scans keep intermediate results.
    """
    traced, shape = jax.make_jaxpr(compute, return_shape=True)(*arrays)
    return _bind([traced], shape, arrays)


def _bind(programs: Sequence[core.ClosedJaxpr], shape, arrays, forced: int | None = None):
    """Binds the choice between programs as one operation with results of the form of `shape`."""
    consts = [const for program in programs for const in program.consts]
    results = _formulation.bind(
        *consts,
        *jax.tree.leaves(arrays),
        programs=tuple(program.jaxpr for program in programs),
        num_consts=tuple(len(program.consts) for program in programs),
        forced=forced,
    )
    return jax.tree.unflatten(jax.tree.structure(shape), results)


@functools.cache
def has_old_tpus() -> bool:
    """Whether this process computes on TPUs whose kernels cannot multiply bfloat16 matrices."""
    return any(kind in jax.devices()[0].device_kind for kind in ("TPU v2", "TPU v3"))


@functools.cache
def _may_meet(package: str) -> bool:
    """Whether this process can compile for a kind of accelerator: its package is installed."""
    return importlib.util.find_spec(package) is not None


# --- The choice, as an operation of a traced program ----------------------------------------------

_formulation = core.Primitive("formulation")
_formulation.multiple_results = True
_PLAIN, _KERNELS, _SHARED = range(3)


def _evaluate(which: int, *arguments, programs, num_consts, forced):
    """Computes by one of the traced programs; each has its constants before the arrays."""
    del forced
    first = sum(num_consts[:which])
    consts = arguments[first : first + num_consts[which]]
    program = core.ClosedJaxpr(programs[which], consts)
    return core.jaxpr_as_fun(program)(*arguments[sum(num_consts) :])


def _lower_for_tpu(context: mlir.LoweringRuleContext, *arguments, **parameters):
    where = context.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    if mesh is not None:
        # Inside shard_map each device computes its own arrays.
        alone = set(getattr(where, "manual_axes", ())) == set(mesh.axis_names)
        which = _KERNELS if alone else _PLAIN
    else:
        which = _KERNELS if getattr(where, "num_devices", 0) == 1 else _SHARED
    return _lower(which, context, *arguments, **parameters)


def _lower(which: int, context: mlir.LoweringRuleContext, *arguments, **parameters):
    forced, is_choice = parameters["forced"], len(parameters["programs"]) > 1
    which = (which if forced is None else forced) if is_choice else _PLAIN
    if which != _PLAIN:
        same = [a.update_manual_axis_type(ManualAxisType()) for a in context.avals_in]
        context = context.replace(avals_in=same)
    lower = mlir.lower_fun(functools.partial(_evaluate, which, **parameters), multiple_results=True)
    return lower(context, *arguments)


def _batch(arguments, axes, **parameters):
    """Computes plainly: kernels have no rule for another axis."""
    plain = functools.partial(_evaluate, _PLAIN, **parameters)
    results = jax.vmap(plain, in_axes=axes)(*arguments)
    return results, [0] * len(results)


def _differentiate(primals, tangents, **parameters):
    """Differentiates plain JAX: kernels have no derivative. This serves second derivatives, as the
    gradients of operators are operators of their own."""
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def plain(*moved):
        arguments = list(primals)
        for i, argument in zip(moving, moved, strict=True):
            arguments[i] = argument
        return _evaluate(_PLAIN, *arguments, **parameters)

    return jax.jvp(plain, [primals[i] for i in moving], [tangents[i] for i in moving])


def _compute(*arguments, **parameters):
    return _evaluate(parameters["forced"] or _PLAIN, *arguments, **parameters)


_formulation.def_impl(_compute)
_formulation.def_abstract_eval(
    lambda *arguments, programs, **parameters: [v.aval for v in programs[_PLAIN].outvars]
)
mlir.register_lowering(_formulation, functools.partial(_lower, _PLAIN))
mlir.register_lowering(_formulation, _lower_for_tpu, platform="tpu")
batching.primitive_batchers[_formulation] = _batch
ad.primitive_jvps[_formulation] = _differentiate
