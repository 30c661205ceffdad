"""Early stopping: counts evaluations since the best value of the metric."""

import math
from collections.abc import Mapping
from typing import Any

from convt5.checkpoints.checkpoint import CheckpointConfig
from convt5.runtime import metric_names


class Patience:
    """Counts the evaluations since the best one.

    Args:
        config: the name of the metric, and whether lower or higher is better.
        evaluations: evaluations without a better value after which the run ends; None disables it.
        state: the result of `state()` of an interrupted run.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        evaluations: int | None,
        *,
        state: Mapping[str, Any] | None = None,
    ):
        self._config = config
        self._evaluations = evaluations
        self._best_step, self._best_value, self._since, self._evaluation = 0, math.nan, 0, ""
        # The count restarts for another metric. Older states do not name their metric.
        factor = metric_names.factor(state or {}, config.best_metric)
        if state and factor and state.get("mode", config.mode) == config.mode:
            self._best_step, self._best_value, self._since = (
                state["best_step"],
                factor * float(state["best_value"]),
                state["since"],
            )
            self._evaluation = state.get("evaluation", "")

    @property
    def best_step(self) -> int:
        """The step of the best value; 0 before the first."""
        return self._best_step

    @property
    def best_value(self) -> float:
        """The best value; NaN before the first number."""
        return self._best_value

    @property
    def is_exhausted(self) -> bool:
        return self._evaluations is not None and self._since >= self._evaluations

    def add(self, step: int, value: float, evaluation: str = "") -> str:
        """Adds the value of one evaluation; NaN is never better.

        Args:
            step: the step after which it was measured.
            value: the value.
            evaluation: identifies what the model was measured on, and how; "" if not known. The
                count restarts if it changes.

        Returns:
            A message about such a change, or "".
        """
        changed = ""
        if self._evaluation and evaluation not in ("", self._evaluation):
            changed = (
                f"{self._config.best_metric} is measured on other examples than after step "
                f"{self._best_step}, or in another way: the best step is sought from {step} on"
            )
            self._best_step, self._best_value = 0, math.nan
        self._evaluation = evaluation or self._evaluation
        is_first_number = math.isnan(self._best_value) and not math.isnan(value)
        is_better = is_first_number or self._config.is_better(value, self._best_value)
        if self._best_step == 0 or is_better:
            self._best_step, self._best_value, self._since = step, value, 0
        else:
            self._since += 1
        return changed

    def state(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        best = self._best_value
        return {
            "metric": self._config.best_metric,
            "mode": self._config.mode,
            metric_names.PERCENT: True,
            "best_step": self._best_step,
            "best_value": best if math.isfinite(best) else str(best),
            "since": self._since,
            "evaluation": self._evaluation,
        }

    def text(self) -> str:
        return (
            f"stopped early: {self._config.best_metric} has not improved in {self._since} "
            f"evaluations since step {self._best_step}, where it was {self._best_value:.4f}."
        )
