"""Lightweight convolution (Wu et al. 2019, arXiv 1901.10430): softmax over taps, shared kernels."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from convt5.modeling.layers import at_least_float32
from convt5.modeling.mixers.convolution import (
    Convolution,
    ConvolutionConfig,
    channel_taps,
    tap_initializer,
)
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes
from convt5.ops import lightweight_conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lightweight(ConvolutionConfig):
    """Kernels normalised by a softmax over their taps, shared by groups of channels."""

    kind = "lightweight"
    unused = ("predictor_bias",)
    sharding_rules = (
        # There may be fewer kernels than devices, and they are small.
        Rule(r"mixing/kernel_logits$", optional=True),
        *ConvolutionConfig.sharding_rules,
    )
    stacked_parameters = (r"mixing/kernel_logits$",)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> Convolution:
        return LightweightConvolution(self, sizes, key=key)


class LightweightConvolution(Convolution):
    """The convolution block with static, normalised taps."""

    def init_taps(self, config: Lightweight, emb_dim: int, *, key):
        shape = (config.kernel_size, config.num_kernels or emb_dim)
        self.kernel_logits = nnx.Param(tap_initializer(config.kernel_size)(key, shape, jnp.float32))

    def convolve(self, inputs, gated, where, *, dropout_key):
        return lightweight_conv(
            inputs,
            self.kernel_logits[...].astype(at_least_float32(inputs.dtype)),
            softmax=self.config.normalize_taps,
            tap_dropout_rate=self.config.tap_dropout_rate,
            dropout_key=dropout_key,
            **where,
        )

    def step_taps(self, gated):
        return channel_taps(
            self.kernel_logits[...][None],
            gated,
            softmax=self.config.normalize_taps,
        )
