"""Description of a Vision Transformer without arrays: its stem, blocks and head.

Gin files set these values, `vision.model` builds modules from them, and `vision.costs` computes
costs. All rules are checked here, before anything is allocated.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from convt5 import errors
from convt5.errors import checks, rules
from convt5.errors.rules import ruled
from convt5.modeling.canon import CanonConfig, without_places

StemKind = Literal["patchify", "conv"]
Pooling = Literal["token", "mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTDescription(CanonConfig):
    """A Vision Transformer: ViT_P with a patchify stem, ViT_C with an early-convolution stem.

    Pre-norm transformer blocks with biases and exact GELU, learned positions, one linear head
    (Xiao et al. 2021, arXiv 2106.14881). ViT_C has one block fewer than ViT_P at equal cost.

    Canon layers (`canon`) convolve along the patches, row by row. The class token is not their
    neighbour, and reads only itself.

    Attributes:
        image_size: height and width of the images in pixels.
        stem: "patchify" is one convolution of `patch_size` with the same stride and a bias. "conv"
            is a stack of 3x3 convolutions without bias, padded by 1 on all sides, each followed by
            batch norm and ReLU, and a final 1x1 convolution with bias only.
        patch_size: pixels of a patch along each axis; patchify only.
        stem_channels: output channels of each convolution of a conv stem; the last is `emb_dim`.
        stem_strides: stride of each convolution of a conv stem.
        num_layers: transformer blocks.
        emb_dim, mlp_dim: channels of the residual stream, and of the feed-forward layers.
        num_heads: attention heads, each of emb_dim / num_heads channels.
        num_classes: number of classes.
        pooling: "token" classifies by a learned token before the patches, "mean" by the mean of all
            patches after the final norm.
        in_channels: channels of the images: 3 for colour, 1 for grey.
        dtype: dtype of activations, "bfloat16" or "float32". Parameters are float32; softmax, norms
            and logits are computed in at least float32.
        norm_epsilon: epsilon of the layer norms.
        batch_norm_epsilon: epsilon of the batch norms.
        batch_norm_momentum: weight of the newest batch in the running statistics, in (0, 1].
    """

    image_size: int = ruled(rules.count)
    stem: StemKind = ruled(rules.choice(StemKind))
    patch_size: int | None = None
    stem_channels: Sequence[int] = ()
    stem_strides: Sequence[int] = ()
    num_layers: int = ruled(rules.count)
    emb_dim: int = ruled(rules.count)
    mlp_dim: int = ruled(rules.count)
    num_heads: int = ruled(rules.count)
    num_classes: int = ruled(rules.count)
    pooling: Pooling = ruled(rules.choice(Pooling), default="token")
    in_channels: int = ruled(rules.count, default=3)
    dtype: str = ruled(rules.choice("bfloat16", "float32", "float64"), default="bfloat16")
    norm_epsilon: float = ruled(rules.positive, default=1e-6)
    batch_norm_epsilon: float = ruled(rules.positive, default=1e-5)
    batch_norm_momentum: float = 0.1

    def __post_init__(self):
        checks.make_plain(self)
        errors.raise_all(self._faults(), where="ViTConfig")

    @property
    def stride(self) -> int:
        """Pixels between neighbouring patches along each axis."""
        return self.patch_size or math.prod(self.stem_strides)

    @property
    def grid_size(self) -> int:
        """Patches along each axis."""
        return self.image_size // self.stride

    @property
    def num_tokens(self) -> int:
        """The length of the token sequence of the blocks."""
        return self.grid_size**2 + (self.pooling == "token")

    def _faults(self) -> list[str]:
        faults = rules.faults(self)
        if not rules.count(self.num_layers):
            faults += checks.layer_faults(self.num_layers)
        momentum = self.batch_norm_momentum
        if not (isinstance(momentum, int | float) and 0 < momentum <= 1):
            faults.append(f"batch_norm_momentum={momentum!r} must be in (0, 1].")
        faults += [
            f"{name}={getattr(self, name)!r} must list one integer for each convolution."
            for name in ("stem_channels", "stem_strides")
            if not isinstance(getattr(self, name), tuple)
        ]
        if faults:
            return faults
        faults = self._patchify_faults() if self.stem == "patchify" else self._conv_faults()
        if self.emb_dim % self.num_heads:
            faults.append(
                f"num_heads={self.num_heads} must divide emb_dim={self.emb_dim}: all heads have "
                "equally many channels."
            )
        if not faults and self.image_size % self.stride:
            nearest = max(1, round(self.image_size / self.stride)) * self.stride
            faults.append(
                f"image_size={self.image_size} must be a multiple of the stem's stride of "
                f"{self.stride} pixels; resize the images to {nearest}, or choose another stem."
            )
        return faults

    def unused(self) -> list[str]:
        """Returns a sentence for each setting that is changed, and that no layer uses."""
        return without_places(self, "")

    def _patchify_faults(self) -> list[str]:
        faults = [
            f"{name}={getattr(self, name)} is for stem='conv'; remove it, or choose that stem."
            for name in ("stem_channels", "stem_strides")
            if getattr(self, name)
        ]
        if rules.count(self.patch_size):
            faults.append(
                f"patch_size={self.patch_size!r} must be the pixels of a patch, at least 1, when "
                "stem='patchify'."
            )
        return faults

    def _conv_faults(self) -> list[str]:
        faults = []
        if self.patch_size is not None:
            faults.append(
                f"patch_size={self.patch_size} is for stem='patchify'; remove it: the stride of a "
                "convolution stem is the product of stem_strides."
            )
        for name in ("stem_channels", "stem_strides"):
            values = getattr(self, name)
            if not values or any(map(rules.count, values)):
                faults.append(
                    f"{name}={values} must be integers of at least 1, one for each convolution of "
                    "the stem."
                )
        if faults:
            return faults
        if len(self.stem_channels) != len(self.stem_strides):
            faults.append(
                f"stem_channels names {len(self.stem_channels)} convolutions and stem_strides "
                f"{len(self.stem_strides)}; give both one value for each."
            )
        if self.stem_channels[-1] != self.emb_dim:
            faults.append(
                f"stem_channels ends with {self.stem_channels[-1]}, but must end with emb_dim="
                f"{self.emb_dim}, the width that the blocks read."
            )
        return faults
