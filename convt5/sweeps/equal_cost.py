"""Studies with models of equal cost: `convt5.analysis.pairing` chooses widths for each run.

Imports nothing heavy before widths are needed.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, get_args

from convt5 import errors
from convt5.analysis.pairing import TOLERANCE, Quantity, check_models, pair
from convt5.errors import checks

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

NOT_PAIRED = "none"


class Described(Protocol):
    """The settings of a run, such as `study.Point`."""

    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def gin_files(self) -> tuple[str, ...]: ...
    @property
    def bindings(self) -> tuple[str, ...]: ...
    @property
    def trust(self) -> tuple[str, ...]: ...
    @property
    def is_own(self) -> bool: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Pairing:
    """Which models of a study get the cost of which reference, and in what quantity.

    Widths are chosen for every run at its own lengths: for equal FLOPs, they depend on the length
    of rows.

    Attributes:
        axis: the axis whose values are models.
        reference: the value of that axis that is not changed.
        by: "parameters" or "flops"; or an axis whose values are these, or "none" to leave models
            unchanged.
        tolerance, multiple, largest_change: as in `pairing.pair`.
    """

    axis: str
    reference: str
    by: str
    tolerance: float = TOLERANCE
    multiple: int = 4
    largest_change: float = 8.0

    def quantity(self, labels: Mapping[str, str]) -> Quantity | None:
        """Returns the quantity to equalise in a run with these labels; None for nothing.

        Raises:
            UserError: an unknown quantity.
        """
        value = labels.get(self.by, self.by)
        if value == NOT_PAIRED:
            return None
        for known in get_args(Quantity):
            if value == known:
                return known
        raise errors.UserError(
            f"Pairing: by={self.by!r} gives {value!r}; it must be one of "
            f"{', '.join((*get_args(Quantity), NOT_PAIRED))}, or an axis with such values."
        )

    def widths(self, point: Described, reference: Described) -> dict[str, int]:
        """Returns the settings that give the model of a run the cost of the reference's.

        Raises:
            UserError: a model is not a text model, or no widths agree.
        """
        by = self.quantity(point.labels)
        if by is None or point.labels[self.axis] == self.reference:
            return {}
        own_run: Any
        reference_run: Any
        own_run, reference_run = map(describe, (point, reference))
        check_models(own_run.model, reference_run.model)
        paired = pair(
            own_run.model,
            reference_run.model,
            by=by,
            tolerance=self.tolerance,
            multiple=self.multiple,
            largest_change=self.largest_change,
            **lengths(own_run),
        )
        return {
            f"architecture.ConvT5Config.{name}": value
            for name, value in paired.changed(own_run.model).items()
        }


def describe(point: Described) -> "TrainRun":
    """Returns a run of a study, with a placeholder for directory and seed, which cost nothing.

    Raises:
        UserError: settings that the trainer does not have.
    """
    # These do not affect the cost.
    idle = ("trainer.train.run_dir=", "trainer.train.seed=")
    kept = tuple(b for b in point.bindings if not b.startswith(idle))
    placed = (*kept, "trainer.train.run_dir='unused'")
    return train_run(point.gin_files, placed, point.trust, point.is_own)


@functools.cache
def train_run(
    gin_files: tuple[str, ...], bindings: tuple[str, ...], trust: tuple[str, ...], is_own: bool
) -> "TrainRun":
    """Returns the run that gin files and bindings describe.

    Raises:
        UserError: settings that the trainer does not have.
    """
    from convt5.configuration import gin_config
    from convt5.training import trainer

    config = gin_config.load(
        gin_files,
        bindings,
        roots=["@trainer.train"],
        supplied=["config_text"],
        trusted=trust,
        own_bindings=is_own,
    )
    return trainer.TrainRun(**config.arguments(trainer.train))


def lengths(run: "TrainRun") -> dict[str, int]:
    """Returns the tokens per row of text, as keyword arguments of cost functions."""
    data: Any = run.train_data
    return {name: getattr(data, name) for name in ("encoder_length", "decoder_length")}
