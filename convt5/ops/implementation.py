"""Which formulation computes an operator: plain JAX anywhere, or kernels on TPU where they serve.

The choice falls when a program is lowered, by its platform and devices, whatever the process that
compiles it. Kernels are opaque to the partitioner, so that on several devices they need to be told
by `over_devices` how arrays are split, and otherwise the plain formulation stays.
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

Choice = Literal["auto", "plain", "kernels", "interpreted kernels"]
Kernels = Callable[..., Any]
"""Computes with kernels what the plain formulation computes, from the same arrays."""

_choice: contextvars.ContextVar[Choice] = contextvars.ContextVar("choice", default="auto")


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices that share an operator.

    Attributes:
        mesh: all of them.
        rows: mesh axes that split the batch.
        channels: mesh axes that split the channels.
        lengths: mesh axes that split each row of the batch into pieces of equal length.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    channels: tuple[str, ...]
    lengths: tuple[str, ...] = ()

    @property
    def split_lengths(self) -> bool:
        """Whether no device holds a whole row, so that devices must exchange parts of it."""
        return self.count(self.lengths) > 1

    def dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """Returns the axes if they can split an array axis of this size, or none of them."""
        return axes if size % self.count(axes) == 0 else ()

    def count(self, axes: tuple[str, ...]) -> int:
        sizes: Mapping[str, int] = self.mesh.shape
        return functools.reduce(lambda product, axis: product * sizes[axis], axes, 1)


_devices: contextvars.ContextVar[Devices | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def over_devices(devices: Devices | None) -> Iterator[None]:
    """Says how the arrays of operators that are traced inside are split.

    Args:
        devices: None inside of shard_map, where each device computes its own arrays.
    """
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def devices() -> Devices | None:
    """What `over_devices` said, or None where it said nothing or there is but one device."""
    found = _devices.get()
    return None if found is None or found.mesh.size == 1 else found


@contextlib.contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Sets the formulation for what is traced inside, for tests and comparisons.

    Args:
        choice: "auto": kernels on TPU. "plain": no kernels. "kernels": kernels on any platform,
            which only TPUs have. "interpreted kernels": kernels computed without a TPU, slowly.
            Each takes the plain formulation where there are no kernels. A function that jit has
            traced keeps what it was traced with.
    """
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def wanted() -> bool:
    """Whether kernels may be used; if not, they need not even be imported, which takes time."""
    choice = _choice.get()
    return choice != "plain" and (choice != "auto" or _may_meet_a_tpu())


def interpreted() -> bool:
    """Whether kernels are to be computed without a TPU."""
    return _choice.get() == "interpreted kernels"


class Offer(NamedTuple):
    """The kernels that an operator has for its arrays.

    Attributes:
        alone: for one device; None where they do not serve.
        shared: for `devices()`, by way of shard_map; None where that is not possible.
    """

    alone: Kernels | None = None
    shared: Kernels | None = None


def run(plain: Callable[..., Any], kernels: Offer, *arrays: Any) -> Any:
    """Returns what any of the formulations computes from the arrays.

    Args:
        plain: for every platform.
        kernels: which compute the same.
        arrays: the arguments.
    """
    if not wanted() or kernels == Offer():
        return plain(*arrays)
    traced, shape = jax.make_jaxpr(plain, return_shape=True)(*arrays)
    # Kernels compute what one device holds, and have no rules for types that vary over a mesh.
    types = invariant_types(arrays)
    others = [None if f is None else jax.make_jaxpr(f)(*types) for f in kernels]
    programs = [traced if program is None else program for program in (traced, *others)]
    return _bind(programs, shape, arrays, forced=_forced(kernels))


def _forced(kernels: Offer) -> int | None:
    """Returns which program is computed on any platform, or None where that is chosen by it."""
    if _choice.get() == "auto":
        return None
    return _SHARED if kernels.shared is not None else _KERNELS


def one_operation(compute: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `compute` of the arrays, as one operation of the traced program.

    For the forward rule of a `custom_vjp`. If that called the function whose rule it is, gradients
    would have no derivative in forward mode, as Hessian-vector products take it; if it computed
    without this, remat policies and scans would keep what is inside.
    """
    traced, shape = jax.make_jaxpr(compute, return_shape=True)(*arrays)
    return _bind([traced], shape, arrays)


def _bind(programs: Sequence[core.ClosedJaxpr], shape, arrays, forced: int | None = None):
    """Makes the choice between programs an operation, whose results have the form of `shape`."""
    consts = [const for program in programs for const in program.consts]
    found = _formulation.bind(
        *consts,
        *jax.tree.leaves(arrays),
        programs=tuple(program.jaxpr for program in programs),
        num_consts=tuple(len(program.consts) for program in programs),
        forced=forced,
    )
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def by_platform(
    default: Callable[[], Any],
    *,
    cpu: Callable[[], Any] | None = None,
    gpu: Callable[[], Any] | None = None,
) -> Any:
    """Returns what one of several functions of nothing computes, in plain JAX.

    Args:
        default: for TPUs, and where the others are None.
        cpu, gpu: for those. Without what compiles for GPUs theirs is not even traced.
    """
    others = {"cpu": cpu} | (dict.fromkeys(("cuda", "rocm"), gpu) if _may_meet_a_gpu() else {})
    own = {name: compute for name, compute in others.items() if compute is not None}
    return lax.platform_dependent(**own, default=default) if own else default()


@functools.cache
def has_old_tpus() -> bool:
    """Whether this process computes on TPUs whose kernels cannot multiply bfloat16 matrices."""
    return any(kind in jax.devices()[0].device_kind for kind in ("TPU v2", "TPU v3"))


@functools.cache
def _may_meet_a_tpu() -> bool:
    """Whether this process can compile for TPUs at all."""
    return importlib.util.find_spec("libtpu") is not None


@functools.cache
def _may_meet_a_gpu() -> bool:
    """Whether this process can compile for GPUs at all, which JAX does by plugins."""
    return importlib.util.find_spec("jax_plugins") is not None


# --- The choice, as an operation of a traced program ----------------------------------------------

_formulation = core.Primitive("formulation")
_formulation.multiple_results = True
_PLAIN, _KERNELS, _SHARED = range(3)


def _evaluate(which: int, *arguments, programs, num_consts, forced):
    """Computes by one of the traced programs; each has its constants before the arrays."""
    del forced
    which = which if len(programs) > 1 else _PLAIN
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
    forced = parameters["forced"]
    which = which if forced is None else forced
    if which != _PLAIN:
        same = [a.update_manual_axis_type(ManualAxisType()) for a in context.avals_in]
        context = context.replace(avals_in=same)
    lower = mlir.lower_fun(functools.partial(_evaluate, which, **parameters), multiple_results=True)
    return lower(context, *arguments)


def _batch(arguments, axes, **parameters):
    """Kernels have no rule for another axis."""
    plain = functools.partial(_evaluate, _PLAIN, **parameters)
    found = jax.vmap(plain, in_axes=axes)(*arguments)
    return found, [0] * len(found)


def _differentiate(primals, tangents, **parameters):
    """Kernels have no derivative: their gradients are operators of their own. This serves second
    derivatives."""
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
