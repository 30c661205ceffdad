"""Models of equal cost: widths chosen so that parameters or FLOPs agree with those of another.

`pair` is for any program; studies use it (`sweeps.Pairing`), and `python -m convt5.inspect
--pair_with` shows what it finds.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from convt5 import errors
from convt5.modeling.architecture import ConvT5Config

Quantity = Literal["parameters", "flops"]

TOLERANCE = 0.01
"""The difference that still counts as equal, as a share of the reference."""


class Paired(NamedTuple):
    """A model whose cost is that of a reference.

    Attributes:
        config: with the widths that were found.
        cost: parameters, or FLOPs of the forward pass of an example.
        wanted: those of the reference.
    """

    config: ConvT5Config
    cost: float
    wanted: float

    @property
    def difference(self) -> float:
        """By how much the cost differs, as a share of the reference."""
        return self.cost / self.wanted - 1

    def changed(self, before: ConvT5Config) -> dict[str, int]:
        """Returns the settings of `ConvT5Config` that differ from those `before`."""
        found = {name: getattr(self.config, name) for name in ("emb_dim", "mlp_dim")}
        return {name: value for name, value in found.items() if value != getattr(before, name)}


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

    The channels of the residual stream (`emb_dim`) stay as near as possible to what they are; for
    each the feed-forward width (`mlp_dim`) comes nearest to the cost. The first that agrees is
    taken. Layers, heads and taps are not changed.

    Args:
        config: whose widths are chosen.
        reference: whose cost is met.
        by: "parameters", or "flops" of the forward pass.
        encoder_length, decoder_length: tokens at which FLOPs are counted.
        tolerance: the greatest difference, as a share of the reference.
        multiple: of both widths, but for an `emb_dim` that stays; 128 fills the lanes of a TPU.
        largest_change: factor by which a width may grow or shrink.

    Raises:
        UserError: no widths agree, and the nearest are named; or a model that is not of text.
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

    wanted = cost(reference)
    nearest: Paired | None = None
    for start in _residual_widths(config, multiple, largest_change):
        for mlp_dim in _mlp_widths(start, wanted, cost, multiple, largest_change):
            found = dataclasses.replace(start, mlp_dim=mlp_dim)
            paired = Paired(found, cost(found), wanted)
            if nearest is None or abs(paired.difference) < abs(nearest.difference):
                nearest = paired
        if nearest is not None and abs(nearest.difference) <= tolerance:
            return nearest
    raise errors.UserError(
        _impossible(config, nearest, by, wanted, tolerance, multiple, largest_change)
    )


def check_models(*models: Any) -> None:
    """Raises `UserError` unless all are models of text, whose widths can be chosen."""
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


def _residual_widths(
    config: ConvT5Config, multiple: int, largest_change: float
) -> Iterator[ConvT5Config]:
    """Yields models from the own width on, those that differ most in proportion last."""
    own = config.emb_dim
    least = math.ceil(own / largest_change / multiple)
    most = math.floor(own * largest_change / multiple)
    widths = {own, *(multiple * i for i in range(max(1, least), most + 1))}
    for width in sorted(widths, key=lambda width: abs(math.log(width / own))):
        try:
            yield dataclasses.replace(config, emb_dim=width)
        except errors.UserError:
            continue  # Groups of channels that share a kernel do not divide this width.


def _mlp_widths(
    config: ConvT5Config, wanted: float, cost, multiple: int, largest_change: float
) -> list[int]:
    """Returns the two widths around the cost: it grows by the same amount with every channel."""
    own = config.mlp_dim
    here = cost(config)
    slope = cost(dataclasses.replace(config, mlp_dim=own + 1)) - here
    exact = own + (wanted - here) / slope
    least = max(1, math.ceil(own / largest_change / multiple))
    most = math.floor(own * largest_change / multiple)
    around = {math.floor(exact / multiple), math.ceil(exact / multiple)}
    return sorted({multiple * min(max(i, least), most) for i in around}) if least <= most else []


def _impossible(
    config: ConvT5Config,
    nearest: Paired | None,
    by: Quantity,
    wanted: float,
    tolerance: float,
    multiple: int,
    largest_change: float,
) -> str:
    what = "parameters" if by == "parameters" else "FLOPs of an example"
    start = (
        f"no widths of a model with emb_dim={config.emb_dim}, mlp_dim={config.mlp_dim} and "
        f"{config.encoder.num_layers} + {config.decoder.num_layers} layers give {wanted:,.0f} "
        f"{what} within {tolerance:.1%}"
    )
    remedy = (
        "change num_layers so that the costs are closer, raise largest_change, or lower "
        f"multiple={multiple}."
    )
    if nearest is None:
        return f"{start}: {largest_change:g} times more or less holds none; {remedy}"
    return (
        f"{start}; the nearest are emb_dim={nearest.config.emb_dim}, mlp_dim="
        f"{nearest.config.mlp_dim} with {nearest.cost:,.0f} ({nearest.difference:+.1%}); {remedy}"
    )
