"""Loss spikes: updates whose loss or gradient stands out are left out, and counted.

One batch of garbage, or one step too far, can throw a long run back by days. Used by the train
step where gin asks for it; without, nothing of this is compiled.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convt5 import errors
from convt5.errors import checks

Measure = Literal["grad_norm", "loss"]
SKIPPED = "skipped_updates"
"""The metric: updates left out since the run began."""


class SpikeMemory(NamedTuple):
    """What is known of the steps before.

    Attributes:
        mean: of the measure, over the last steps.
        count: steps whose measure entered the mean.
        skipped: updates left out.
        not_finite: the last steps, in a row, that had no finite loss or gradient.
    """

    mean: Float[Array, ""]
    count: Int[Array, ""]
    skipped: Int[Array, ""]
    not_finite: Int[Array, ""]

    @staticmethod
    def new(state: Mapping[str, Any] | None = None) -> "SpikeMemory":
        """Returns the memory of a run that begins, or that `state()` described."""
        state = state or {"mean": 0.0, "count": 0, "skipped": 0}
        return SpikeMemory(
            jnp.asarray(state["mean"], jnp.float32),
            # Earlier versions let zeros enter; of nothing but these, the mean would be no limit.
            jnp.asarray(state["count"] if state["mean"] > 0 else 0, jnp.int32),
            jnp.asarray(state["skipped"], jnp.int32),
            # Earlier versions left out none of these.
            jnp.asarray(state.get("not_finite", 0), jnp.int32),
        )

    def state(self) -> dict[str, Any]:
        """Returns JSON values from which `new` makes the same memory, bit for bit."""
        mean, *counts = jax.device_get(self)
        names = ("count", "skipped", "not_finite")
        return {"mean": float(mean), **dict(zip(names, map(int, counts), strict=True))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSpikes:
    """Leaves out an update where a measure exceeds `factor` times its running mean.

    A measure beyond that enters the mean as if it were just that, so that one spike hardly moves
    it, and a change that lasts is followed within some steps. A loss or a gradient that is not
    finite is left out as well, and out of the mean. Nor does 0 enter the mean: the gradient of a
    batch without a target tells nothing of other batches.

    Attributes:
        measure: "grad_norm", before any clipping, or "loss", what is minimised.
        factor: how many times the mean is too much, greater than 1.
        horizon_steps: steps over which the mean reaches back.
        after_steps: no update is left out before so many steps have entered the mean, while
            training settles.
        max_not_finite: so many steps in a row may be left out for not being finite; one more ends
            the run, as any does without `SkipSpikes`. 0 leaves out none of them.
    """

    measure: Measure = "grad_norm"
    factor: float = 10.0
    horizon_steps: int = 100
    after_steps: int = 100
    max_not_finite: int = 10

    def __post_init__(self):
        faults = []
        if self.measure not in get_args(Measure):
            faults.append(f"measure={self.measure!r} must be grad_norm or loss.")
        if not self.factor > 1:
            faults.append(f"factor={self.factor} must be greater than 1.")
        for name in ("horizon_steps", "after_steps"):
            if getattr(self, name) < 1:
                faults.append(f"{name}={getattr(self, name)} must be at least 1.")
        if self.max_not_finite < 0:
            faults.append(f"max_not_finite={self.max_not_finite} must be at least 0.")
        faults += checks.step_faults(self, ["horizon_steps", "after_steps", "max_not_finite"])
        errors.raise_all(faults, where="SkipSpikes")

    def judge(
        self, memory: SpikeMemory, measured: Mapping[str, Array]
    ) -> tuple[Bool[Array, ""], SpikeMemory]:
        """Returns whether a step is a spike, and the memory after it.

        Args:
            memory: of the steps before.
            measured: every `Measure` of the step by name.
        """
        value = measured[self.measure].astype(jnp.float32)
        limit = self.factor * memory.mean
        settled = memory.count >= self.after_steps
        is_finite = jnp.stack([jnp.isfinite(x) for x in measured.values()]).all()
        is_bearable = memory.not_finite < self.max_not_finite
        is_spike = settled & jnp.where(is_finite, value > limit, is_bearable)
        enters = is_finite & (value > 0)
        entering = jnp.where(enters, jnp.where(is_spike, limit, value), memory.mean)
        weight = 1 / jnp.minimum(memory.count + 1, self.horizon_steps).astype(jnp.float32)
        after = SpikeMemory(
            memory.mean + (entering - memory.mean) * weight,
            memory.count + enters.astype(jnp.int32),
            memory.skipped + is_spike.astype(jnp.int32),
            jnp.where(is_finite, 0, memory.not_finite + 1),
        )
        return is_spike, after
