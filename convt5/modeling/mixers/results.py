"""Checks of what the methods of a mixing kind return, while a program is traced.

Kinds may be files of users. Otherwise a wrong result would be broadcast silently, or end in an
error far from its cause.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from convt5 import errors
from convt5.errors import rules
from convt5.modeling.mixers.base import Mixer, MixerConfig, Reach, Shared, State, full_name
from convt5.modeling.sizes import ModelSizes, Size


def reach_faults(config: MixerConfig) -> list[str]:
    """Returns a sentence if the reach of a kind is none."""
    reach: Any = config.reach
    sides = reach if isinstance(reach, Reach) else ("",)
    if all(side is None or not rules.count(side) or side == 0 for side in sides):
        return []
    return [
        f"{full_name(type(config))}.reach={errors.clip(reach)} must be a Reach(left, right) of "
        "integers of at least 0, or None for all positions."
    ]


def number_of(config: MixerConfig, method: str, sizes: ModelSizes, length: int) -> Any:
    """Returns what a method such as `flops` says of a row of `length` tokens.

    Raises:
        UserError: it is no finite number of at least 0.
    """
    value = getattr(config, method)(sizes, length)
    if not (rules.finite(value) and value >= 0):
        raise errors.UserError(
            f"{full_name(type(config))}.{method} returns {errors.clip(value)}, but must return a "
            "finite number of at least 0."
        )
    return value


def build_mixer(config: MixerConfig, sizes: ModelSizes, *, key: PRNGKeyArray) -> Mixer:
    """Returns the module of a description.

    Raises:
        UserError: it builds something else.
    """
    mixer: Any = config.build(sizes, key=key)
    if isinstance(mixer, Mixer):
        return mixer
    raise errors.UserError(
        f"{full_name(type(config))}.build returns {errors.clip(mixer)}, but must return a "
        f"{full_name(Mixer)}."
    )


def checked_output(mixer: Mixer, method: str, y: Any, x: jax.Array) -> jax.Array:
    """Returns the output `y` of a method for the input `x`.

    Raises:
        UserError: it is no array of the input's shape; others would be broadcast silently.
    """
    if getattr(y, "shape", None) == x.shape:
        return y
    raise errors.UserError(
        f"{full_name(type(mixer))}.{method} returns {_shown(y)}, but its input is "
        f"{_shown(x)}, and its output must have the same shape."
    )


def checked_step(mixer: Mixer, result: Any, x: jax.Array, state: State) -> tuple[jax.Array, State]:
    """Returns the output and the next state of a step from `state`.

    Raises:
        UserError: it is no such pair, or the state is unlike the one before.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise errors.UserError(
            f"{full_name(type(mixer))}.step returns {_shown(result)}, but must return a pair: the "
            "output and the next state."
        )
    y, after = result
    if _layout(after) != _layout(state):
        raise errors.UserError(
            f"{full_name(type(mixer))}.step returns the state {_shown(after)}, but was given "
            f"{_shown(state)}; shapes and dtypes must stay those of init_state."
        )
    return checked_output(mixer, "step", y, x), after


def checked_state(mixer: Mixer, state: State, rows: Size) -> State:
    """Returns the first decoding state.

    Raises:
        UserError: an array in it has other rows than the batch.
    """
    if isinstance(rows, int) and rows == 1:
        return state  # A single row is never selected, and attention has no axis for it.
    for part in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Shared)):
        if not isinstance(part, Shared) and getattr(part, "shape", ())[:1] != (rows,):
            raise errors.UserError(
                f"{full_name(type(mixer))}.init_state returns {_shown(part)}, but each array must "
                f"have the {rows} rows of the batch as its first axis; wrap what all rows share in "
                "Shared."
            )
    return state


def _layout(value: Any) -> tuple[Any, ...]:
    """Returns the structure, the shapes and the dtypes of the arrays in a value."""
    leaves, structure = jax.tree.flatten(value)
    return structure, *((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _shown(value: Any) -> str:
    """Returns shapes and dtypes of the arrays in a value."""

    def show(leaf: Any) -> Any:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        return leaf if shape is None else f"{dtype} {tuple(shape)}"

    return errors.clip(jax.tree.map(show, value), limit=300)
