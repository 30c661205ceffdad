"""Models of equal cost: chooses widths so that parameters or FLOPs equal those of a reference.

`pair` can be called by any program. Studies use it (`sweeps.Pairing`), and `python -m
convt5.inspect --pair_with` shows its result.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from convt5 import errors
from convt5.modeling.architecture import ConvT5Config

Quantity = Literal["parameters", "flops"]

TOLERANCE = 0.01
"""Largest difference that counts as equal, as a fraction of the reference."""

_FEW = 4
"""Residual widths to try before asking whether any can have the cost."""


class Paired(NamedTuple):
    """A model with the cost of a reference.

    Attributes:
        config: the model with the chosen widths.
        cost: its parameters, or FLOPs of the forward pass of an example.
        wanted: the cost of the reference.
    """

    config: ConvT5Config
    cost: float
    wanted: float

    @property
    def difference(self) -> float:
        """The difference in cost, as a fraction of the reference."""
        return self.cost / self.wanted - 1

    def changed(self, before: ConvT5Config) -> dict[str, int]:
        """Returns the settings of `ConvT5Config` that differ from those of `before`."""
        widths = {name: getattr(self.config, name) for name in ("emb_dim", "mlp_dim")}
        return {name: value for name, value in widths.items() if value != getattr(before, name)}


def pair(
    config: ConvT5Config,
    reference: ConvT5Config,
    *,
    by: Quantity,
    encoder_length: int,
    decoder_length: int,
    tolerance: float = TOLERANCE,
    multiple: int = 8,
    largest_change: float = 4.0,
) -> Paired:
    """Returns a model like `config` with the cost of `reference`.

    Tries residual widths (`emb_dim`) in order of their distance from the current one, each with the
    feed-forward widths (`mlp_dim`) nearest to the cost, and returns the first that agrees. Layers,
    heads and taps do not change.

    Args:
        config: the model whose widths are chosen.
        reference: the model whose cost is matched.
        by: "parameters", or "flops" of the forward pass.
        encoder_length, decoder_length: lengths in tokens at which FLOPs are counted.
        tolerance: largest difference, as a fraction of the reference.
        multiple: both widths are multiples of this, except an unchanged `emb_dim`; 128 fills the
            lanes of a TPU.
        largest_change: largest factor by which a width grows or shrinks.

    Raises:
        UserError: no widths agree (the message names the nearest), or a model is not a text model.
    """
    check_models(config, reference)
    faults = []
    if by not in get_args(Quantity):
        faults.append(f"by={by!r} must be one of {', '.join(get_args(Quantity))}.")
    if tolerance <= 0:
        faults.append(f"tolerance={tolerance} must be above 0, such as 0.01.")
    if multiple < 1:
        faults.append(f"multiple={multiple} must be at least 1.")
    if largest_change < 1:
        faults.append(f"largest_change={largest_change} must be at least 1.")
    errors.raise_all(faults, where="pairing")

    def cost(model: ConvT5Config) -> float:
        return _cost(model, by, encoder_length, decoder_length)

    target = cost(reference)
    nearest: Paired | None = None
    for start in _candidates(config, target, tolerance, cost, multiple, largest_change):
        for mlp_dim in _mlp_widths(start, target, cost, multiple, largest_change):
            candidate = dataclasses.replace(start, mlp_dim=mlp_dim)
            paired = Paired(candidate, cost(candidate), target)
            if nearest is None or abs(paired.difference) < abs(nearest.difference):
                nearest = paired
        if nearest is not None and abs(nearest.difference) <= tolerance:
            return nearest
    raise errors.UserError(
        _impossible(config, nearest, by, target, tolerance, multiple, largest_change)
    )


def check_models(*models: Any) -> None:
    """Raises `UserError` unless all are text models, whose widths can be chosen."""
    for model in models:
        if not isinstance(model, ConvT5Config):
            raise errors.UserError(
                f"pairing: {type(model).__name__} is not a ConvT5Config; pairing finds widths "
                "of text models only."
            )


def _cost(config: ConvT5Config, by: Quantity, encoder_length: int, decoder_length: int) -> float:
    from convt5.analysis import costs  # Descriptions are read without jax.

    if by == "parameters":
        return costs.num_parameters(costs.parameter_shapes(config))
    return costs.forward_flops(config, encoder_length=encoder_length, decoder_length=decoder_length)


def _candidates(
    config: ConvT5Config,
    target: float,
    tolerance: float,
    cost: Callable[[ConvT5Config], float],
    multiple: int,
    largest_change: float,
) -> Iterator[ConvT5Config]:
    """Yields models by residual width, from the current one to the most different.

    After the first few, only the last on the side of the target if no widths reach it.
    """
    current = config.emb_dim
    least = math.ceil(current / largest_change / multiple)
    most = math.floor(current * largest_change / multiple)
    widths = {current, *(multiple * i for i in range(max(1, least), most + 1))}
    nearest_first = sorted(widths, key=lambda width: abs(math.log(width / current)))
    ends = _mlp_ends(config, multiple, largest_change)
    if ends[0] > ends[1]:
        return
    yield from _of_widths(config, nearest_first[:_FEW])
    # Costs grow with both widths. For a deep model, each takes a third of a second.
    for sign, mlp_dim in zip((1, -1), ends, strict=True):
        end = next(_of_widths(config, sorted(widths)[::sign]), config)
        difference = cost(dataclasses.replace(end, mlp_dim=mlp_dim)) / target - 1
        if sign * difference > tolerance:
            yield end
            return
    yield from _of_widths(config, nearest_first[_FEW:])


def _of_widths(config: ConvT5Config, widths: Sequence[int]) -> Iterator[ConvT5Config]:
    """Yields the model with each residual width that it can have."""
    for width in widths:
        try:
            yield dataclasses.replace(config, emb_dim=width)
        except errors.UserError:
            continue  # The kernels do not divide this width into groups of channels.


def _mlp_ends(config: ConvT5Config, multiple: int, largest_change: float) -> tuple[int, int]:
    """Returns the least and the largest feed-forward width; the first is larger if none is."""
    least = max(1, math.ceil(config.mlp_dim / largest_change / multiple))
    return multiple * least, multiple * math.floor(config.mlp_dim * largest_change / multiple)


def _mlp_widths(
    config: ConvT5Config, target: float, cost, multiple: int, largest_change: float
) -> list[int]:
    """Returns the two widths around the cost, which is linear in the number of channels."""
    current = config.mlp_dim
    current_cost = cost(config)
    slope = cost(dataclasses.replace(config, mlp_dim=current + 1)) - current_cost
    exact = current + (target - current_cost) / slope
    least, most = _mlp_ends(config, multiple, largest_change)
    around = {multiple * math.floor(exact / multiple), multiple * math.ceil(exact / multiple)}
    return sorted({min(max(width, least), most) for width in around})


def _impossible(
    config: ConvT5Config,
    nearest: Paired | None,
    by: Quantity,
    target: float,
    tolerance: float,
    multiple: int,
    largest_change: float,
) -> str:
    what = "parameters" if by == "parameters" else "FLOPs of an example"
    start = (
        f"no widths of a model with emb_dim={config.emb_dim}, mlp_dim={config.mlp_dim} and "
        f"{config.encoder.num_layers} + {config.decoder.num_layers} layers give {target:,.0f} "
        f"{what} within {tolerance:.1%}"
    )
    remedy = (
        f"change num_layers so that the costs are closer, or lower multiple={multiple} (in a "
        "study, largest_change may be raised too)."
    )
    if nearest is None:
        return f"{start}: {largest_change:g} times more or less holds none; {remedy}"
    return (
        f"{start}; the nearest are emb_dim={nearest.config.emb_dim}, mlp_dim="
        f"{nearest.config.mlp_dim} with {nearest.cost:,.0f} ({nearest.difference:+.1%}); {remedy}"
    )
