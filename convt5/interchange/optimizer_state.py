"""Optimizer state of an imported run, so that training continues instead of restarting."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from convt5 import errors
from convt5.interchange.mapping import Arrays, Imported
from convt5.modeling.tree_paths import named_leaves
from convt5.training.optimizer import SecondMomentState
from convt5.training.train_state import TrainState, parameters


def import_state(
    imported: Imported,
    optimizer: optax.GradientTransformation,
    moments: Mapping[str, Arrays] | None = None,
) -> TrainState:
    """Returns the training state at the step of the import.

    Args:
        imported: the model; its parameters are moved into the state.
        optimizer: the result of `build` of its description.
        moments: Adafactor's moments by parameter. Without them the optimizer starts anew, but the
            learning rate continues from the step of the import.

    Raises:
        UserError: moments have other shapes than those of this optimizer.
    """
    model = imported.take_model()
    opt_state = tuple(
        _part(part, imported.step, moments)
        for part in jax.eval_shape(optimizer.init, parameters(model))
    )
    return TrainState(jnp.asarray(imported.step, jnp.int32), model, opt_state)


def of_sum(moments: Mapping[str, Arrays], divisor: float) -> dict[str, Arrays]:
    """Returns Adafactor's moments of a loss that is a sum, from those of this sum / divisor.

    Updates are then the same, because they do not depend on the scale of the loss.
    """
    factor = divisor**2
    return {
        path: {kind: array * factor for kind, array in kinds.items()}
        for path, kinds in moments.items()
    }


def _part(abstract: Any, step: int, moments: Mapping[str, Arrays] | None) -> Any:
    """Returns the state of one of the chained transformations."""
    if isinstance(abstract, SecondMomentState) and moments is not None:
        return SecondMomentState(jnp.asarray(step, jnp.int32), _fill(abstract.moments, moments))
    empty = jax.tree.map(_zeros, abstract)
    if isinstance(abstract, optax.ScaleByScheduleState):
        return empty._replace(count=jnp.asarray(step, jnp.int32))
    # Empty moments must count from 0, or the first updates would be divided by almost zero.
    return empty


def _fill(abstract: Any, moments: Mapping[str, Arrays]) -> Any:
    given = {
        f"{path}/{kind}": array for path, kinds in moments.items() for kind, array in kinds.items()
    }
    wanted = named_leaves(abstract)
    faults = [
        f"{name} is kept with shape {tuple(leaf.shape)}, the checkpoint has "
        f"{tuple(given[name].shape) if name in given else 'it otherwise'}."
        for name, leaf in wanted
        if name not in given or given[name].shape != tuple(leaf.shape)
    ]
    if faults:
        raise errors.UserError(
            "the optimizer state in the checkpoint is factored differently than "
            f"AdafactorConfig.min_dim_to_factor says: {faults[0]} Pass the operative config of "
            "the checkpoint, or leave --optimizer out."
        )
    return jax.tree.unflatten(
        jax.tree.structure(abstract), [jnp.asarray(given[name]) for name, _ in wanted]
    )


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, leaf.dtype)
