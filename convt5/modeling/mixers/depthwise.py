"""Depthwise convolution: one free kernel per channel, O[i, c] = sum_j W[j, c] x[i + off_j, c]."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from convt5.modeling.layers import at_least_float32
from convt5.modeling.mixers.convolution import Convolution, ConvolutionConfig, tap_initializer
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes
from convt5.ops import depthwise_conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Depthwise(ConvolutionConfig):
    """One free kernel of `kernel_size` taps per channel."""

    kind = "depthwise"
    unused = ("predictor_bias", "normalize_taps", "tap_dropout_rate")
    sharding_rules = (
        Rule(r"mixing/kernel$", (None, "tensor"), optional=True),
        *ConvolutionConfig.sharding_rules,
    )
    stacked_parameters = (r"mixing/kernel$",)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> Convolution:
        return DepthwiseConvolution(self, sizes, key=key)

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        if self.num_kernels is not None:
            return [
                f"{where}.num_kernels={self.num_kernels!r} has no meaning for a depthwise "
                "convolution, which has one kernel per channel; remove it or choose lightweight."
            ]
        return super().faults(where, emb_dim=emb_dim)


class DepthwiseConvolution(Convolution):
    """The convolution block with unconstrained taps."""

    def init_taps(self, config: Depthwise, emb_dim: int, *, key):
        taps = config.kernel_size
        self.kernel = nnx.Param(tap_initializer(taps)(key, (taps, emb_dim), jnp.float32))

    def convolve(self, inputs, gated, where, *, dropout_key):
        return depthwise_conv(inputs, self.kernel[...], **where)

    def step_taps(self, gated):
        return self.kernel[...].astype(at_least_float32(gated.dtype))[None]
