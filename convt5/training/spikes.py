"""Skips updates with loss spikes: an outlying loss or gradient norm. Counts the skipped updates.

One bad batch, or one step too large, can set a long run back by days. Enabled by gin; without it,
nothing of this is compiled.
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
"""Name of the metric: updates skipped since the run began."""


class SpikeMemory(NamedTuple):
    """Statistics of earlier steps.

    Attributes:
        mean: running mean of the measure.
        count: number of steps in the mean.
        skipped: number of skipped updates.
        not_finite: number of consecutive last steps without a finite loss or gradient.
    """

    mean: Float[Array, ""]
    count: Int[Array, ""]
    skipped: Int[Array, ""]
    not_finite: Int[Array, ""]

    @staticmethod
    def new(state: Mapping[str, Any] | None = None) -> "SpikeMemory":
        """Returns the initial memory, or the one that `state()` described."""
        state = state or {"mean": 0.0, "count": 0, "skipped": 0}
        return SpikeMemory(
            jnp.asarray(state["mean"], jnp.float32),
            # Earlier versions included zeros; a mean of only zeros would skip everything.
            jnp.asarray(state["count"] if state["mean"] > 0 else 0, jnp.int32),
            jnp.asarray(state["skipped"], jnp.int32),
            # Earlier versions did not count these.
            jnp.asarray(state.get("not_finite", 0), jnp.int32),
        )

    def state(self) -> dict[str, Any]:
        """Returns JSON values from which `new` restores the same memory, bit for bit."""
        mean, *counts = jax.device_get(self)
        names = ("count", "skipped", "not_finite")
        return {"mean": float(mean), **dict(zip(names, map(int, counts), strict=True))}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class SkipSpikes:
    """Skips an update if a measure exceeds `factor` times its running mean.

    A spike enters the mean clipped to that limit, so a single one hardly moves it, while a lasting
    change is followed within some steps. Updates with a loss or gradient that is not finite are
    skipped too and do not enter the mean. Neither does 0, the gradient of a batch without targets.

    Attributes:
        measure: "grad_norm", before clipping, or "loss", the training objective.
        factor: the multiple of the mean above which an update is skipped; greater than 1.
        horizon_steps: steps over which the mean runs.
        after_steps: number of steps in the mean before any update is skipped, while training
            settles.
        max_not_finite: consecutive steps that may be skipped because they are not finite; one more
            ends the run, as the first does without `SkipSpikes`. 0 allows none.
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
            memory: the memory of earlier steps.
            measured: every `Measure` of the step, by name.
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
