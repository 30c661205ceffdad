"""Exponential moving averages (EMA) of a model's parameters and batch statistics.

An averaged model is often better than the last one. The average is part of the train state, so a
resumed run continues it exactly. It does not affect training.
"""

import dataclasses
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convt5 import errors
from convt5.errors import checks

Tree = TypeVar("Tree")


class Averaging(Protocol):
    """A description of an average over updates."""

    def after(self, update: Int[Array, ""], average: Tree, model: Tree) -> Tree: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class EMA:
    """The exponential moving average of every array of a model, batch statistics included.

    Attributes:
        decay: weight of the old average at each update, in [0, 1).
        every_steps: steps between changes of the average. Each change counts for all of them: it
            keeps decay ** every_steps of the old average. The first step changes it too.
        warmup_steps: during these steps, each change replaces the average by the model.
    """

    decay: float = 0.9999
    every_steps: int = 1
    warmup_steps: int = 0

    def __post_init__(self):
        faults = _count_faults(
            every_steps=(self.every_steps, 1), warmup_steps=(self.warmup_steps, 0)
        )
        faults += checks.step_faults(self, ["every_steps", "warmup_steps"])
        if not 0 <= self.decay < 1:
            faults.append(f"decay={self.decay} must be in [0, 1).")
        errors.raise_all(faults, where="EMA")

    def after(self, update: Int[Array, ""], average: Tree, model: Tree) -> Tree:
        """Returns the average after one more update of the model.

        Args:
            update: number of the update, from 0.
            average: the average before the update.
            model: the model after the update.
        """
        return _update(self, update, average, model, share=1 - self.decay**self.every_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class ScaledEMA:
    """An `EMA` whose decay follows from the size of the run, as in arXiv 2106.14881.

    Each change gives the model the weight min(1, factor * batch_size / num_epochs * every_steps).
    The original restarts the count of `every_steps` in each epoch.

    Attributes:
        factor: factor of the weight; 1e-5 in the original.
        batch_size: batch size of training, over all hosts.
        num_epochs: epochs of the whole run.
        every_steps, warmup_steps: as in `EMA`; 32 and five epochs in the original.
    """

    factor: float = 1e-5
    batch_size: int
    num_epochs: int
    every_steps: int = 32
    warmup_steps: int = 0

    def __post_init__(self):
        faults = _count_faults(
            every_steps=(self.every_steps, 1),
            batch_size=(self.batch_size, 1),
            num_epochs=(self.num_epochs, 1),
            warmup_steps=(self.warmup_steps, 0),
        )
        faults += checks.step_faults(self, ["every_steps", "warmup_steps"])
        if not self.factor > 0:
            faults.append(f"factor={self.factor} must be positive.")
        errors.raise_all(faults, where="ScaledEMA")

    @property
    def share(self) -> float:
        """The weight of the model at each change of the average, in (0, 1]."""
        return min(1.0, self.factor * self.batch_size / self.num_epochs * self.every_steps)

    def after(self, update: Int[Array, ""], average: Tree, model: Tree) -> Tree:
        """As in `EMA`."""
        return _update(self, update, average, model, share=self.share)


def _update(
    config: EMA | ScaledEMA, update: Int[Array, ""], average: Tree, model: Tree, *, share: float
) -> Tree:
    newest = jnp.where(update < config.warmup_steps, 1.0, share)

    def move(average: Tree, model: Tree) -> Tree:
        return jax.tree.map(lambda old, new: _interpolate(old, new, newest), average, model)

    if config.every_steps == 1:
        return move(average, model)
    is_due = update % config.every_steps == 0
    return jax.lax.cond(is_due, move, lambda average, model: average, average, model)


def _interpolate(old: Array, new: Array, newest: Float[Array, ""]) -> Array:
    # Not old + newest * (new - old): a weight of 1 must give the model itself, bit for bit. Nor
    # (1 - newest) * old + newest * new: rounded, the weights add up to less than 1, or to more,
    # and the average of many updates is too small or large by that divided by `newest`.
    return (new + (1 - newest) * (old - new)).astype(old.dtype)


def _count_faults(**counts: tuple[int, int]) -> list[str]:
    return [
        f"{name}={value} must be an integer of at least {least}."
        for name, (value, least) in counts.items()
        if not (isinstance(value, int) and value >= least)
    ]
