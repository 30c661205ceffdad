"""Learning-rate schedules: functions from the number of updates made to a rate.

Each schedule is a frozen description, called inside the jitted step; gin selects one.
"""

import dataclasses
import math
from typing import Protocol

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from convt5 import errors
from convt5.errors import checks, rules

Rate = Float[Array, ""]


class Schedule(Protocol):
    """The interface of schedules."""

    def __call__(self, step: ArrayLike) -> Rate: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Constant:
    """One rate for all steps, as in T5 fine-tuning."""

    rate: float

    def __post_init__(self):
        errors.raise_all(_faults(rate=self.rate), where="Constant")

    def __call__(self, step: ArrayLike) -> Rate:
        return jnp.full_like(_as_float(step), self.rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class InverseSqrt:
    """multiplier / sqrt(max(step, warmup_steps)): T5's pre-training schedule.

    Raffel et al. 2020, arXiv 1910.10683, section 3.1.2. During warm-up the rate does not rise; it
    is constant at multiplier / sqrt(warmup_steps), 0.01 by default.

    Attributes:
        multiplier: scale of the schedule. With a parameter-scaled optimizer (Adafactor) the rate is
            relative to the size of each parameter, so T5's 1.0 suits all model sizes.
        warmup_steps: steps before the rate decays.
        linear_warmup: rises linearly to the constant rate instead, for optimizers that are unstable
            in the first steps; not used by T5.
    """

    multiplier: float = 1.0
    warmup_steps: int = 10_000
    linear_warmup: bool = False

    def __post_init__(self):
        faults = _faults(multiplier=self.multiplier)
        if self.warmup_steps < 1:
            faults.append(
                f"warmup_steps={self.warmup_steps} must be at least 1: the first rate is "
                "multiplier / sqrt(warmup_steps)."
            )
        faults += checks.step_faults(self, ["warmup_steps"])
        errors.raise_all(faults, where="InverseSqrt")

    def __call__(self, step: ArrayLike) -> Rate:
        step = _as_float(step)
        rate = self.multiplier / jnp.sqrt(jnp.maximum(step, self.warmup_steps))
        return rate * _warmup(step, self.warmup_steps) if self.linear_warmup else rate


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Cosine:
    """A linear rise to `peak`, then half a cosine down to `final_fraction` of it.

    Attributes:
        peak: the highest rate, reached after `warmup_steps`.
        total_steps: the end of the decay, including warm-up; later the rate is constant.
        warmup_steps: steps of the rise; 0 starts at the peak.
        final_fraction: the last rate as a fraction of the peak, in [0, 1].
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self):
        errors.raise_all(_decay_faults(self), where="Cosine")

    def __call__(self, step: ArrayLike) -> Rate:
        step = _as_float(step)
        fall = 0.5 * (1.0 + jnp.cos(math.pi * _progress(step, self)))
        fraction = self.final_fraction + (1.0 - self.final_fraction) * fall
        return self.peak * fraction * _warmup(step, self.warmup_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class EpochCosine:
    """Half a cosine that changes once per epoch, as in arXiv 2106.14881.

    In epoch e of E, from 0, the rate is peak * (f + (1 - f) * (1 + cos(pi * e / E)) / 2) with the
    `final_fraction` f. During a warm-up of W epochs it is multiplied by w * (1 - e / W) + e / W,
    with the `warmup_factor` w.

    Attributes:
        peak: the rate at which the cosine starts.
        num_epochs: E.
        steps_per_epoch: updates with the same rate.
        warmup_epochs: W; 0 means no warm-up.
        warmup_factor: w, the first rate as a fraction of the peak, in [0, 1].
        final_fraction: f, the last rate as a fraction of the peak, in [0, 1].
    """

    peak: float
    num_epochs: int
    steps_per_epoch: int
    warmup_epochs: int = 5
    warmup_factor: float = 0.1
    final_fraction: float = 0.005

    def __post_init__(self):
        faults = _faults(peak=self.peak)
        for name, least in (("num_epochs", 1), ("steps_per_epoch", 1), ("warmup_epochs", 0)):
            if getattr(self, name) < least:
                faults.append(f"{name}={getattr(self, name)} must be at least {least}.")
        faults += [
            f"{name}={getattr(self, name)} must be in [0, 1]."
            for name in ("warmup_factor", "final_fraction")
            if not 0 <= getattr(self, name) <= 1
        ]
        faults += checks.step_faults(self, ["num_epochs", "steps_per_epoch", "warmup_epochs"])
        errors.raise_all(faults, where="EpochCosine")

    def __call__(self, step: ArrayLike) -> Rate:
        last = self.num_epochs - 1
        # Steps beyond the last epoch keep its rate.
        epoch = _as_float(jnp.minimum(jnp.asarray(step) // self.steps_per_epoch, last))
        fall = 0.5 * (1.0 + jnp.cos(math.pi * epoch / self.num_epochs))
        fraction = self.final_fraction + (1.0 - self.final_fraction) * fall
        rate = self.peak * fraction
        if not self.warmup_epochs:
            return rate
        risen = jnp.minimum(1.0, epoch / self.warmup_epochs)
        return rate * (self.warmup_factor * (1.0 - risen) + risen)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Linear:
    """A linear rise to `peak`, then a linear fall to `final_fraction` of it; fields as `Cosine`."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self):
        errors.raise_all(_decay_faults(self), where="Linear")

    def __call__(self, step: ArrayLike) -> Rate:
        step = _as_float(step)
        fraction = 1.0 - (1.0 - self.final_fraction) * _progress(step, self)
        return self.peak * fraction * _warmup(step, self.warmup_steps)


def _as_float(step: ArrayLike) -> Rate:
    return jnp.asarray(step).astype(jnp.float32)


def _warmup(step: Rate, warmup_steps: int) -> Rate:
    # The first update, at step 0, has a rate above zero, which would waste its batch.
    return jnp.minimum(1.0, (step + 1.0) / max(warmup_steps, 1))


def _progress(step: Rate, schedule: Cosine | Linear) -> Rate:
    """Returns the fraction of the decay that is over, from 0 at the end of warm-up to 1."""
    fall_steps = schedule.total_steps - schedule.warmup_steps
    return jnp.clip((step - schedule.warmup_steps) / fall_steps, 0.0, 1.0)


def _faults(**rates: float) -> list[str]:
    return [
        f"{name}={rate} must be a positive finite number."
        for name, rate in rates.items()
        if rules.positive(rate)
    ]


def _decay_faults(schedule: Cosine | Linear) -> list[str]:
    faults = _faults(peak=schedule.peak)
    if schedule.warmup_steps < 0:
        faults.append(f"warmup_steps={schedule.warmup_steps} must be at least 0.")
    if schedule.total_steps <= schedule.warmup_steps:
        faults.append(
            f"total_steps={schedule.total_steps} must be greater than warmup_steps="
            f"{schedule.warmup_steps}: it counts the warm-up too."
        )
    if not 0 <= schedule.final_fraction <= 1:
        faults.append(f"final_fraction={schedule.final_fraction} must be in [0, 1].")
    # Ensures warmup_steps < total_steps.
    return faults + checks.step_faults(schedule, ["total_steps"])
