"""Dynamic convolution (Wu et al. 2019, arXiv 1901.10430): every position predicts its kernels."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.modeling.layers import truncated_normal
from convt5.modeling.mixers.convolution import Convolution, ConvolutionConfig, channel_taps
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes
from convt5.ops import dynamic_conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(ConvolutionConfig):
    """Kernels predicted by a linear map of the block's gated input at the output position."""

    kind = "dynamic"
    sharding_rules = (
        Rule(r"mixing/predictor/kernel$", (None, ("tensor", "fsdp")), optional=True),
        Rule(r"mixing/predictor/bias$", optional=True),
        *ConvolutionConfig.sharding_rules,
    )
    stacked_parameters = (r"mixing/predictor/(kernel|bias)$",)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> Convolution:
        return DynamicConvolution(self, sizes, key=key)

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        kernels = self.num_kernels or sizes.emb_dim
        prediction = 2 * self.kernel_size * sizes.emb_dim * kernels
        return super().flops(sizes, length) + prediction

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        weights = self.kernel_size * (self.num_kernels or sizes.emb_dim)
        return super().activation_bytes(sizes, length) + jnp.dtype(sizes.dtype).itemsize * weights


class DynamicConvolution(Convolution):
    """The convolution block with predicted taps."""

    def init_taps(self, config: Dynamic, emb_dim: int, *, key):
        self.predictor = TapPredictor(
            config.kernel_size,
            emb_dim,
            config.num_kernels or emb_dim,
            use_bias=config.predictor_bias,
            key=key,
        )

    def convolve(self, inputs, gated, where, *, dropout_key):
        return dynamic_conv(
            inputs,
            self.predictor(gated),
            softmax=self.config.normalize_taps,
            tap_dropout_rate=self.config.tap_dropout_rate,
            dropout_key=dropout_key,
            **where,
        )

    def step_taps(self, gated):
        return channel_taps(
            self.predictor(gated)[:, 0],
            gated,
            softmax=self.config.normalize_taps,
        )


class TapPredictor(nnx.Module):
    """The linear map from the features of a position to the tap logits of its kernels."""

    def __init__(
        self,
        kernel_size: int,
        emb_dim: int,
        num_kernels: int,
        *,
        use_bias: bool,
        key: PRNGKeyArray,
    ):
        # Taps come first, as K separate matrices: the optimizer keeps Adafactor statistics per tap.
        init = truncated_normal((kernel_size * emb_dim) ** -0.5)
        self.kernel = nnx.Param(init(key, (kernel_size, emb_dim, num_kernels), jnp.float32))
        self.bias = (
            nnx.Param(jnp.zeros((kernel_size, num_kernels), jnp.float32)) if use_bias else None
        )

    def __call__(
        self, x: Float[Array, "batch length embed"]
    ) -> Float[Array, "batch length taps kernels"]:
        logits = jnp.einsum("ble,keh->blkh", x, self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            logits = logits + self.bias[...].astype(x.dtype)[None, None]
        return logits
