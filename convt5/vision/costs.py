"""Costs of a Vision Transformer by formula: parameters and multiply-adds of its parts.

Computed from `ViTConfig` alone, before anything is built. As in arXiv 2106.14881, adding a bias
counts one, and norms, softmax and activations count nothing; attention counts both products.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convt5.vision.description import ViTDescription


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Parameters, and multiply-adds of a forward pass over one image."""

    parameters: int
    multiply_adds: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            parameters=self.parameters + other.parameters,
            multiply_adds=self.multiply_adds + other.multiply_adds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTCost:
    """Costs of the parts of a model.

    Attributes:
        stem: the stem, which turns an image into patches.
        embeddings: the position table and the class token.
        block: one transformer block.
        num_blocks: number of blocks.
        head: the final norm and the output layer.
    """

    stem: Cost
    embeddings: Cost
    block: Cost
    num_blocks: int
    head: Cost

    @property
    def total(self) -> Cost:
        blocks = Cost(
            parameters=self.num_blocks * self.block.parameters,
            multiply_adds=self.num_blocks * self.block.multiply_adds,
        )
        return self.stem + self.embeddings + blocks + self.head


def model_cost(config: ViTDescription) -> ViTCost:
    """Returns the costs of a model."""
    rows = config.num_tokens + (config.pooling == "token")
    return ViTCost(
        stem=_patchify(config) if config.stem == "patchify" else _convolutions(config),
        embeddings=Cost(parameters=rows * config.emb_dim, multiply_adds=0),
        block=_block(config),
        num_blocks=config.num_layers,
        head=_norm(config.emb_dim) + _dense(config.emb_dim, config.num_classes, positions=1),
    )


def patch_field(config: ViTDescription) -> int:
    """Returns the height and width in pixels of the receptive field of one patch."""
    if config.stem == "patchify":
        return config.stride
    field, distance = 1, 1  # Receptive field, and distance between neighbours, in pixels.
    for stride in config.stem_strides[:-1]:
        field += 2 * distance  # A 3x3 convolution reads one neighbour on each side.
        distance *= stride
    return field


def as_json(config: ViTDescription) -> dict[str, Any]:
    """Returns the costs of a model as JSON values."""
    cost = model_cost(config)
    return {
        "tokens": config.num_tokens,
        "patch_stride": config.stride,
        "patch_field": patch_field(config),
        "num_blocks": cost.num_blocks,
        "parts": {part: dataclasses.asdict(value) for part, value in _parts(cost).items()},
    }


def as_text(config: ViTDescription) -> str:
    """Returns the costs of a model as a table."""
    cost = model_cost(config)
    rows = [("", "parameters", "multiply-adds")]
    rows += [
        (
            f"{cost.num_blocks} x {part}" if part == "block" else part,
            f"{value.parameters:,}",
            f"{value.multiply_adds:,}",
        )
        for part, value in _parts(cost).items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size, field = config.image_size, patch_field(config)
    return "\n".join(
        [
            f"{size}x{size} pixels become {config.num_tokens} tokens; a patch is made from "
            f"{field}x{field} pixels, every {config.stride}",
            *(
                f"  {name:<{widths[0]}}  {count:>{widths[1]}}  {work:>{widths[2]}}"
                for name, count, work in rows
            ),
        ]
    )


def _parts(cost: ViTCost) -> Mapping[str, Cost]:
    names = ("stem", "embeddings", "block", "head", "total")
    return {name: getattr(cost, name) for name in names}


def _patchify(config: ViTDescription) -> Cost:
    inputs = config.in_channels * config.stride**2
    return _dense(inputs, config.emb_dim, positions=config.grid_size**2)


def _convolutions(config: ViTDescription) -> Cost:
    total = Cost(parameters=0, multiply_adds=0)
    size, channels = config.image_size, config.in_channels
    *layers, last = zip(config.stem_channels, config.stem_strides, strict=True)
    for width, stride in layers:
        size = (size - 1) // stride + 1
        total += _dense(9 * channels, width, positions=size**2, bias=False) + _norm(width)
        channels = width
    size = (size - 1) // last[1] + 1
    return total + _dense(channels, last[0], positions=size**2)


def _block(config: ViTDescription) -> Cost:
    dim, length = config.emb_dim, config.num_tokens
    products = Cost(parameters=0, multiply_adds=2 * length**2 * dim)
    attention = _dense(dim, 3 * dim, positions=length) + _dense(dim, dim, positions=length)
    mlp = _dense(dim, config.mlp_dim, positions=length)
    mlp += _dense(config.mlp_dim, dim, positions=length)
    return attention + products + mlp + _norm(dim) + _norm(dim) + _canons(config)


def _canons(config: ViTDescription) -> Cost:
    """Returns the costs of a block's Canon layers."""
    widths = {"A": config.emb_dim, "B": 3 * config.emb_dim, "C": config.emb_dim}
    widths["D"] = config.mlp_dim
    channels = sum(widths[place] for place in config.canon)
    size = channels * (config.canon_kernel_size + config.canon_bias)
    return Cost(parameters=size, multiply_adds=config.num_tokens * size)


def _norm(dim: int) -> Cost:
    return Cost(parameters=2 * dim, multiply_adds=0)


def _dense(inputs: int, outputs: int, *, positions: int, bias: bool = True) -> Cost:
    """Returns the costs of a product with one matrix at each position, also for a convolution."""
    size = inputs * outputs + outputs * bias
    return Cost(parameters=size, multiply_adds=positions * size)
