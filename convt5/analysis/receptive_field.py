"""Measured receptive fields: the gradient of an output position in each input position.

`costs` computes the field exactly, that is, the positions that *can* matter. This module measures
how much they do (the effective receptive field of Luo et al. 2016, arXiv 1701.04128), for
`inspect --measure`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convt5 import errors
from convt5.analysis import costs
from convt5.modeling.blocks import Stack
from convt5.modeling.description import StackName
from convt5.modeling.mixers.base import Reach, StackInputs
from convt5.modeling.model import ConvT5
from convt5.modeling.stem import window_segments
from convt5.reports import figures

SHARES = (0.5, 0.95, 0.99)
"""Fractions of the gradient whose distances are reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """The receptive field of an output position of one layer.

    Attributes:
        stack: "encoder" or "decoder".
        index: index of the layer, 0 at the bottom; includes all layers below it.
        position: the output position.
        mass: [length], for each input position the norm of the output's gradient in its embedding,
            normalised to a sum of 1.
        reach: the field by formula.
    """

    stack: StackName
    index: int
    position: int
    mass: np.ndarray
    reach: Reach

    @property
    def extent(self) -> Reach:
        """The extent of positions with nonzero gradient."""
        read = np.flatnonzero(self.mass)
        return Reach(int(self.position - read[0]), int(read[-1] - self.position))

    def distance(self, share: float) -> int:
        """Returns the smallest distance that contains `share` of the mass."""
        away = np.abs(np.arange(len(self.mass)) - self.position)
        within = np.cumsum(np.bincount(away, weights=self.mass))
        # Rounding makes the total slightly different from 1.
        return int(np.argmax(within >= share * within[-1]))

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        extent = self.extent
        return {
            "stack": self.stack,
            "layer": self.index,
            "position": self.position,
            "extent": {"left": extent.left, "right": extent.right},
            "distance": {f"{share:.0%}": self.distance(share) for share in SHARES},
        }


def measure(
    model: ConvT5,
    tokens: Int[Array, "batch length"],
    *,
    stack: StackName = "encoder",
    segment_ids: Int[Array, "batch length"] | None = None,
    num_draws: int = 4,
    seed: int = 0,
) -> list[Field]:
    """Returns the field of every layer of a stack, bottom first, as a mean over rows.

    Projects the output on `num_draws` random directions of its channels. The position is the middle
    of an encoder's sequence, and the end of a decoder's. The decoder reads one empty encoder
    position. After a strided stem, an output's position is that of its first token.

    Args:
        model: a model with any parameters: trained or initial.
        tokens: token ids, of one example if there are no segment ids.
        stack: encoder or decoder.
        segment_ids: packed examples; positions outside the output's example are not read.
        num_draws: number of random directions.
        seed: random seed of the directions.

    Raises:
        UserError: an output reads nothing, as at padding after a stem, or is not finite.
    """
    rows, length = tokens.shape
    ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
    stride = model.config.stem_stride if stack == "encoder" else 1
    output = length // 2 // stride if stack == "encoder" else length - 1
    position = output * stride
    inputs = StackInputs(window_segments(ids, stride))
    if stack == "decoder":
        inputs = inputs._replace(
            memory=jnp.zeros((rows, 1, model.config.emb_dim), jnp.dtype(model.config.dtype)),
            memory_segment_ids=jnp.ones((rows, 1), jnp.int32),
        )
    shape = (num_draws, rows, model.config.emb_dim)
    directions = jax.random.rademacher(jax.random.key(seed), shape, jnp.float32)
    cost = costs.model_cost(model.config, encoder_length=length, decoder_length=length)
    reaches = [layer.reach for layer in cost.layers if layer.stack == stack]
    embedded = model.embed_tokens(tokens)
    fields = []
    for index, reach in enumerate(reaches):
        lowest = getattr(model, stack).lowest(index + 1)
        norms = _gradient_norms(stack, output, model, lowest, embedded, ids, inputs, directions)
        mass = np.asarray(norms, np.float64)
        if not 0 < mass.sum() < np.inf:
            raise errors.UserError(
                f"the gradients of position {position} of {stack} layer {index} in its inputs "
                f"add up to {mass.sum():g}, which is no field; give rows without padding there, "
                "and a model whose parameters are finite."
            )
        fields.append(
            Field(stack=stack, index=index, position=position, mass=mass / mass.sum(), reach=reach)
        )
    return fields


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient_norms(
    name: StackName,
    position: int,
    model: ConvT5,
    stack: Stack,
    embedded: Float[Array, "batch length embed"],
    segment_ids: Int[Array, "batch length"],
    inputs: StackInputs,
    directions: Float[Array, "draws batch embed"],
) -> Float[Array, " length"]:
    """Returns the mean gradient norm of each input position over rows and directions."""

    def output(x):
        if name == "encoder":
            x, _ = model.run_stem(x, segment_ids)
        else:
            x = model.with_positions(x)
        return stack(x, inputs)[:, position].astype(jnp.float32)

    _, vjp = jax.vjp(output, embedded)
    (gradients,) = jax.vmap(vjp)(directions)
    return jnp.linalg.norm(gradients.astype(jnp.float32), axis=-1).mean((0, 1))


def table(fields: Sequence[Field]) -> str:
    """Returns a line for each layer: the field by formula, the measured one, and distances."""
    header = ["layer", "can read", "gradient not 0", *(f"{s:.0%} within" for s in SHARES)]
    rows = [
        [
            f"{field.stack} {field.index}",
            str(field.reach),
            str(field.extent),
            *(f"{field.distance(share):,}" for share in SHARES),
        ]
        for field in fields
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in [header, *rows]]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def draw(fields: Mapping[str, Sequence[Field]], path: pathlib.Path) -> None:
    """Plots gradient against distance, and distances against depth, for several models.

    Args:
        fields: fields of each model, of the same stack, bottom first.
        path: path of the image.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = figures.figure_class("the plot")(figsize=(13, 4.2), layout="constrained")
    by_distance, by_depth = figure.subplots(1, 2)
    distances = []
    for number, (name, own) in enumerate(fields.items()):
        color, name = f"C{number}", figures.text(name)
        top = own[-1]
        offsets = np.arange(len(top.mass)) - top.position
        shown = top.mass > 0
        style = figures.style(number) | {"markersize": 4}
        every = figures.style(number, points=int(shown.sum()))["markevery"]
        line = style | {"linewidth": 1.2, "markevery": every}
        by_distance.plot(offsets[shown], top.mass[shown], label=f"{name} {top.index}", **line)
        depth = [field.index for field in own]
        for share, dashes in zip(SHARES, (":", "--", "-"), strict=True):
            found = [field.distance(share) for field in own]
            line = style | {"linestyle": dashes, "label": f"{share:.0%} of the gradient, {name}"}
            by_depth.plot(depth, found, **line)
            distances += found
        reach = [
            max(f.reach.left or 0, f.reach.right or 0) for f in own if f.reach.size is not None
        ]
        if reach:
            by_depth.plot(
                depth[: len(reach)],
                reach,
                color=color,
                linewidth=4,
                alpha=0.25,
                label=f"receptive field, {name}",
            )
            distances += reach
    by_distance.set(xlabel="input position relative to the output", ylabel="share of the gradient")
    tops = [own[-1].mass for own in fields.values()]
    figures.log_values(by_distance, [float(mass) for top in tops for mass in top[top > 0]])
    by_distance.set_title("top layers", fontsize=10)
    by_depth.set(xlabel="layer", ylabel="distance, tokens")
    figures.log_values(by_depth, [*distances, 0])
    by_depth.set_ylim(bottom=-0.15)
    by_depth.xaxis.get_major_locator().set_params(integer=True)
    for axes in (by_distance, by_depth):
        figures.tidy(axes)
    by_distance.legend(frameon=False, fontsize=8)
    # Beside the lines, which may be anywhere.
    by_depth.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figures.save(figure, path)
