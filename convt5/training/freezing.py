"""Parameters that a run leaves as they are: they get no gradient, no update and no optimizer state.

To fine-tune a part of a pre-trained model, or to ask what its frozen parts know.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from convt5 import errors
from convt5.modeling.tree_paths import matches, pattern_faults


class Frozen(nnx.Variable):
    """A parameter of the model that is none of the optimizer's."""


def freeze(model: nnx.Module, patterns: Sequence[str]) -> nnx.Module:
    """Returns the model, whose parameters with names that a pattern is found in are now `Frozen`.

    Args:
        model: changed in place.
        patterns: regular expressions that are searched in names such as
            `encoder/layers/0/mlp/wi/kernel`.

    Raises:
        UserError: a pattern that matches nothing, or nothing is left to train.
    """
    faults = pattern_faults(frozen=patterns)
    errors.raise_all(faults, where="train")
    # A list: what is iterated over is changed below.
    found = [(path, leaf) for path, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param)]
    names = ["/".join(map(str, path)) for path, _ in found]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            faults.append(
                f"frozen: {pattern!r} matches no parameter; correct it. There are, for example: "
                f"{', '.join(names[:: max(1, len(names) // 3)][:3])}."
            )
    if names and all(matches(name, patterns) for name in names):
        faults.append(f"frozen={list(patterns)} leaves nothing to train; name fewer parameters.")
    errors.raise_all(faults, where="train")
    for name, (path, parameter) in zip(names, found, strict=True):
        if matches(name, patterns):
            owner = functools.reduce(_child, path[:-1], model)
            setattr(owner, str(path[-1]), Frozen(parameter.get_value(), **parameter.get_metadata()))
    return model


def without_gradients(model: nnx.Module) -> nnx.Module:
    """Returns the model, through whose frozen parameters no gradient is computed."""
    graph, frozen, others = nnx.split(model, Frozen, ...)
    return nnx.merge(graph, jax.lax.stop_gradient(frozen), others)


def _child(node: Any, key: Any) -> Any:
    return node[key] if isinstance(key, int) else getattr(node, key)
