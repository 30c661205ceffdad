"""Frozen parameters, which get no gradient, no update and no optimizer state.

Serves to fine-tune a part of a pre-trained model, or to probe what its frozen parts have learned.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from convt5 import errors
from convt5.modeling.tree_paths import matches, pattern_faults


class Frozen(nnx.Variable):
    """A parameter of the model that the optimizer does not see."""


def freeze(model: nnx.Module, patterns: Sequence[str]) -> nnx.Module:
    """Turns the parameters whose names match a pattern into `Frozen` ones.

    Args:
        model: the model, changed in place.
        patterns: regular expressions searched in names such as `encoder/layers/0/mlp/wi/kernel`.

    Raises:
        UserError: a pattern matches nothing, or no parameter is left to train.
    """
    faults = pattern_faults(frozen=patterns)
    errors.raise_all(faults, where="train")
    # A list, because the loop below changes the graph.
    parameters = [
        (path, leaf) for path, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param)
    ]
    names = ["/".join(map(str, path)) for path, _ in parameters]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            faults.append(
                f"frozen: {pattern!r} matches no parameter; correct it. There are, for example: "
                f"{', '.join(names[:: max(1, len(names) // 3)][:3])}."
            )
    if names and all(matches(name, patterns) for name in names):
        faults.append(f"frozen={list(patterns)} leaves nothing to train; name fewer parameters.")
    errors.raise_all(faults, where="train")
    for name, (path, parameter) in zip(names, parameters, strict=True):
        if matches(name, patterns):
            owner = functools.reduce(_child, path[:-1], model)
            setattr(owner, str(path[-1]), Frozen(parameter.get_value(), **parameter.get_metadata()))
    return model


def without_gradients(model: nnx.Module) -> nnx.Module:
    """Returns the model with gradients stopped at its frozen parameters."""
    graph, frozen, others = nnx.split(model, Frozen, ...)
    return nnx.merge(graph, jax.lax.stop_gradient(frozen), others)


def _child(node: Any, key: Any) -> Any:
    return node[key] if isinstance(key, int) else getattr(node, key)
