"""Chooses the formulation that computes an operator: one table, one context, one decision.

An operator has a table of formulations: plain JAX for every platform, variants for CPU and GPU
where XLA computes them faster, and kernels for TPU. The choice is made when a program is lowered,
by its target platform and devices, whichever process compiles it. XLA's partitioner cannot look
into kernels: on several devices they need to know how arrays are split (`using(devices=...)`).
Without that, plain JAX computes.
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
Platform = Literal["cpu", "gpu", "tpu"]
Formulation = Callable[..., Any]
"""A function that computes an operator from arrays."""


class Table(NamedTuple):
    """The formulations of an operator, all with the same arguments and results.

    Attributes:
        default: plain JAX, for every platform.
        cpu, gpu: plain JAX that XLA computes faster there; None means `default`.
        tpu: kernels for one device; None if unsupported.
        shared_tpus: kernels for `devices()`, through shard_map; None if unsupported.
    """

    default: Formulation
    cpu: Formulation | None = None
    gpu: Formulation | None = None
    tpu: Formulation | None = None
    shared_tpus: Formulation | None = None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that share an operator.

    Attributes:
        mesh: the mesh of all devices.
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
    """What determines how operators are traced, apart from their arrays.

    Attributes:
        choice: which formulation runs; without such an entry in a table, its default.
            "auto": that of the target platform. "plain": the same without kernels.
            "default", "cpu", "gpu": that one on any platform. "kernels": the kernels on any
            platform, though only TPUs can run them. "interpreted kernels": the kernels, interpreted
            without a TPU, slowly.
        devices: how arrays are split; None on one device, and inside shard_map.
        platforms: those that programs may be lowered for; None means CPU and those whose compilers
            are installed. Each platform more takes more tracing.
    """

    choice: Choice = "auto"
    devices: Devices | None = None
    platforms: tuple[Platform, ...] | None = None


_DEFAULT = Context()
_context = contextvars.ContextVar("context", default=_DEFAULT)


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Sets fields of the `Context` for everything traced inside.

    A function that jit has already traced keeps the context of that trace.
    """
    token = _context.set(dataclasses.replace(_context.get(), **changes))
    try:
        yield
    finally:
        _context.reset(token)


def differentiable(
    num_settings: int, compute: Formulation, *, forward: Formulation, backward: Formulation
) -> Formulation:
    """Returns an operator with a gradient of its own, as `jax.custom_vjp`.

    Each function is traced once for equal settings, arrays' shapes and context: a model with many
    equal layers, of which each would be traced for each platform, starts sooner. The backward pass
    has the context of the forward pass, whenever it is traced.

    Args:
        num_settings: number of leading arguments, hashable, that are not arrays.
        compute, forward, backward: called with the settings and what `jax.custom_vjp` asks for.
    """
    settings = tuple(range(num_settings + 1))

    def traced_once(function: Formulation) -> Formulation:
        @functools.partial(jax.jit, static_argnums=settings, inline=True)
        def traced(context: Context, *arguments: Any) -> Any:
            with using(**vars(context)):
                return function(*arguments)

        return traced

    operator = jax.custom_vjp(traced_once(compute), nondiff_argnums=settings)
    operator.defvjp(traced_once(forward), traced_once(backward))

    @functools.wraps(compute)
    def call(*arguments: Any) -> Any:
        return operator(_context.get(), *arguments)

    return call


def devices() -> Devices | None:
    """Returns the devices of the context, or None if there is only one."""
    split = _context.get().devices
    return None if split is None or split.mesh.size == 1 else split


def may_use_kernels() -> bool:
    """Returns whether kernels may be chosen; if not, their slow import can be skipped."""
    choice = _context.get().choice
    is_possible = _may_meet("libtpu") and "tpu" in _platforms() and not _has_64_bits()
    return "kernels" in choice or (choice == "auto" and is_possible)


def _has_64_bits() -> bool:
    """Returns whether indices take 64 bits, which TPU kernels cannot have."""
    return jax.dtypes.canonicalize_dtype("int64").itemsize == 8


def interpreted() -> bool:
    """Returns whether kernels are interpreted without a TPU."""
    return _context.get().choice == "interpreted kernels"


def run(table: Table, *arrays: Any) -> Any:
    """Runs the formulation that context and platform select, and returns its result.

    Args:
        table: the formulations.
        arrays: their arguments.
    """
    plain = functools.partial(_plain, table)
    if not may_use_kernels() or (table.tpu is None and table.shared_tpus is None):
        return plain(*arrays)
    traced, shape = jax.make_jaxpr(plain, return_shape=True)(*arrays)
    # Kernels see the arrays of one device, and have no rules for types that vary over a mesh.
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
        return _entry(table, choice)(*arrays)
    entries: dict[Platform, Formulation] = {name: _entry(table, name) for name in _platforms()}
    if len(set(entries.values())) == 1:
        return next(iter(entries.values()))(*arrays)
    branches = {name: _on(name, entry) for name, entry in entries.items() if name != "tpu"}
    if on_gpu := branches.pop("gpu", None):
        branches |= {"cuda": on_gpu, "rocm": on_gpu}
    return lax.platform_dependent(*arrays, **branches, default=_on("tpu", table.default))


def _entry(table: Table, name: str) -> Formulation:
    """Returns the formulation for a platform; that of TPU without kernels is the default."""
    return {"cpu": table.cpu, "gpu": table.gpu}.get(name) or table.default


def _on(platform: Platform, formulation: Formulation) -> Formulation:
    """Returns the formulation with the operators inside of it traced for no other platform."""

    def compute(*arrays: Any) -> Any:
        with using(platforms=(platform,)):
            return formulation(*arrays)

    return compute


def _platforms() -> tuple[Platform, ...]:
    """Returns the platforms that programs traced now may be lowered for."""
    chosen = _context.get().platforms
    if chosen is not None:
        return chosen
    compilers: dict[Platform, str] = {"gpu": "jax_plugins", "tpu": "libtpu"}
    installed: list[Platform] = [name for name in compilers if _may_meet(compilers[name])]
    return ("cpu", *installed)


def _forced(table: Table) -> int | None:
    """Returns the index of the program forced by the context, or None to choose by platform."""
    if _context.get().choice == "auto":
        return None
    return _KERNELS if table.shared_tpus is None else _SHARED


def one_operation(compute: Callable[..., Any], *arrays: Any) -> Any:
    """Computes on the arrays as one operation of the traced program.

    For the forward rule of a `custom_vjp`. If the rule called its own function, its gradients would
    have no forward-mode derivative, which Hessian-vector products need. If it computed inline,
    remat policies and scans would keep intermediate results.
    """
    traced, shape = jax.make_jaxpr(compute, return_shape=True)(*arrays)
    return _bind([traced], shape, arrays)


def _bind(programs: Sequence[core.ClosedJaxpr], shape, arrays, forced: int | None = None):
    """Binds the choice between programs as one operation with results shaped like `shape`."""
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
    """Returns whether the local TPUs are too old for kernels to multiply bfloat16 matrices."""
    return any(kind in jax.devices()[0].device_kind for kind in ("TPU v2", "TPU v3"))


@functools.cache
def _may_meet(package: str) -> bool:
    """Returns whether the compiler of an accelerator is installed, so that it may be a target."""
    return importlib.util.find_spec(package) is not None


# --- The choice, as a JAX primitive ---------------------------------------------------------------

_formulation = core.Primitive("formulation")
_formulation.multiple_results = True
_PLAIN, _KERNELS, _SHARED = range(3)


def _evaluate(which: int, *arguments, programs, num_consts, forced):
    """Runs one of the traced programs; the constants of all programs precede the arrays."""
    del forced
    first = sum(num_consts[:which])
    consts = arguments[first : first + num_consts[which]]
    program = core.ClosedJaxpr(programs[which], consts)
    return core.jaxpr_as_fun(program)(*arguments[sum(num_consts) :])


def _lower_for_tpu(context: mlir.LoweringRuleContext, *arguments, **parameters):
    where = context.module_context.axis_context
    mesh = getattr(where, "mesh", None)
    if mesh is not None:
        # Fully inside shard_map, each device computes on its own arrays.
        alone = set(getattr(where, "manual_axes", ())) == set(mesh.axis_names)
        which = _KERNELS if alone else _PLAIN
    else:
        which = _KERNELS if getattr(where, "num_devices", 0) == 1 else _SHARED
    return _lower(which, context, *arguments, **parameters)


def _lower(which: int, context: mlir.LoweringRuleContext, *arguments, **parameters):
    which = _chosen(which, parameters)
    if which != _PLAIN:
        same = [a.update_manual_axis_type(ManualAxisType()) for a in context.avals_in]
        context = context.replace(avals_in=same)
    lower = mlir.lower_fun(functools.partial(_evaluate, which, **parameters), multiple_results=True)
    return lower(context, *arguments)


def _chosen(which: int, parameters: Mapping[str, Any]) -> int:
    """Returns the index of the program that runs where a platform has that of `which`."""
    forced, is_choice = parameters["forced"], len(parameters["programs"]) > 1
    return (which if forced is None else forced) if is_choice else _PLAIN


def program_of(parameters: Mapping[str, Any], *, on_tpu: bool, is_alone: bool) -> core.Jaxpr | None:
    """Returns the program that an operation of `run` runs; None for other operations.

    Args:
        parameters: those of the operation in a traced program.
        on_tpu: whether TPUs run it.
        is_alone: whether one device runs it, or each its own inside shard_map.
    """
    if not parameters.keys() >= {"programs", "num_consts", "forced"}:
        return None
    kernels = _KERNELS if is_alone else _SHARED
    return parameters["programs"][_chosen(kernels if on_tpu else _PLAIN, parameters)]


def _batch(arguments, axes, **parameters):
    """Batches plain JAX, because kernels have no batching rule."""
    plain = functools.partial(_evaluate, _PLAIN, **parameters)
    results = jax.vmap(plain, in_axes=axes)(*arguments)
    return results, [0] * len(results)


def _differentiate(primals, tangents, **parameters):
    """Differentiates plain JAX, because kernels have no derivative.

    This serves second derivatives: the gradients of operators are operators of their own.
    """
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
