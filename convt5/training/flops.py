"""FLOPs of a traced program whose loops and whose parts of devices XLA counts once.

XLA's count of a program before it is optimised takes the body of a loop once, however often it
runs, and the body of a `jax.shard_map` for one device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from convt5.ops import dispatch

_MOVES = frozenset(
    {
        *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice"),
        *("gather", "iota", "optimization_barrier", "pad", "pvary", "reshape", "rev", "slice"),
        *("sharding_constraint", "split", "squeeze", "transpose"),
    }
)
_TRANSCENDENTAL = frozenset(
    {
        *("cbrt", "cos", "erf", "exp", "expm1", "log", "log1p", "logistic", "pow", "rsqrt"),
        *("sin", "sqrt", "tan", "tanh"),
    }
)
"""Functions that XLA counts apart."""


_ALIASES = {"gpu": ("cuda", "rocm")}


class _Target(NamedTuple):
    """What runs a program, which may select a part of it.

    Attributes:
        platforms: names of the platform.
        is_alone: whether it runs on one device, or on each separately.
    """

    platforms: Sequence[str]
    is_alone: bool


def uncounted(traced: ClosedJaxpr, devices: Sequence[Any]) -> float:
    """Returns the FLOPs of a traced program that XLA's count of it leaves out.

    Kernels in Pallas count nothing, as in XLA's count. Loops of unknown length count once.

    Args:
        traced: the program.
        devices: the devices that run it.
    """
    platform = devices[0].platform
    target = _Target((platform, *_ALIASES.get(platform, ())), len(devices) == 1)
    # As JAX does before XLA sees it.
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    counted, once = _count(jaxpr, target)
    return float(counted - once)


def _count(program: Jaxpr | ClosedJaxpr, target: _Target) -> np.ndarray:
    """Returns the FLOPs of a program, with its loops and devices counted, and once each."""
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    total = np.zeros(2)
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inside = target._replace(is_alone=True) if name == "shard_map" else target
        inner = [_count(part, inside) for part in _parts(params, target)]
        if not inner:
            total += _of_operation(equation)
        elif "branches" in params:
            total += np.max(inner, axis=0)  # One of them runs.
        else:
            total += np.sum(inner, axis=0) * (_times(name, params), 1)
    return total


def _parts(params: Mapping[str, Any], target: _Target) -> list[Jaxpr | ClosedJaxpr]:
    """Returns the programs that an equation may run."""
    on_tpu = "tpu" in target.platforms
    if chosen := dispatch.program_of(params, on_tpu=on_tpu, is_alone=target.is_alone):
        return [chosen]
    if of_branches := params.get("branches_platforms"):
        found = [named and not {*named}.isdisjoint(target.platforms) for named in of_branches]
        # A branch without platforms, the last one, is for all others.
        return [params["branches"][found.index(True) if True in found else -1]]
    leaves = jax.tree.leaves(list(params.values()), is_leaf=_is_program)
    return [leaf for leaf in leaves if _is_program(leaf)]


def _is_program(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def _times(name: str, params: Mapping[str, Any]) -> int:
    """Returns how often an equation runs its program: steps of a loop, or devices."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _of_operation(equation: Any) -> float:
    """Returns the FLOPs of one operation, about as XLA counts them."""
    name = equation.primitive.name
    if name in _MOVES or name in _TRANSCENDENTAL or name == "pallas_call":
        return 0.0
    sizes = [math.prod(variable.aval.shape) for variable in equation.outvars]
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * sizes[0] * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * sizes[0] * math.prod(kernel) / outputs
    if name == "fft":
        doublings = math.prod(length.bit_length() - 1 for length in equation.params["fft_lengths"])
        return 8.0 * math.prod(equation.invars[0].aval.shape) * doublings
    if name.startswith(("reduce", "arg")):
        return float(math.prod(equation.invars[0].aval.shape))
    return float(sum(sizes))
