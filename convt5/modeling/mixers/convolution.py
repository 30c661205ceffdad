"""The convolution block, shared by depthwise, lightweight and dynamic convolutions."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.errors import rules
from convt5.errors.rules import ruled
from convt5.modeling.canon import Along
from convt5.modeling.layers import Dense, DropoutKey, add_vector, at_least_float32, truncated_normal
from convt5.modeling.mixers import base
from convt5.modeling.mixers.base import MixerConfig, Position, Reach
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes, Size
from convt5.ops.gating import gate
from convt5.ops.geometry import Padding, pad_widths
from convt5.ops.masking import zero_unless

InputProjection = Literal["gated", "linear", "none"]


def _padding(value: object) -> str:
    is_padding = value is None or isinstance(value, str | tuple)
    return "" if is_padding else "must be 'CENTERED', 'CAUSAL' or (left, right) positions."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(MixerConfig):
    """The settings of a convolution block.

    Attributes:
        kernel_size: number of taps K.
        dilation: distance between taps; 1 means adjacent.
        num_kernels: number of kernels H, each shared by emb_dim / H neighbouring channels; None
            gives each channel its own. Depthwise convolutions always have one per channel.
        padding: "CENTERED", "CAUSAL" or explicit (left, right) positions; None means causal in a
            decoder and centered in an encoder.
        input_projection: "gated" is (X W^I) * sigmoid(X W^S), the gated linear unit of the paper;
            "linear" is X W^I; "none" is X itself.
        pointwise: adds a dense layer directly after the taps, as in a depthwise-separable
            convolution.
        output_projection: ends the block with the dense layer W^O.
        projection_bias: adds biases to these dense layers.
        predictor_bias: adds a bias to the dense layer that predicts dynamic kernels.
        conv_bias: adds a bias to the sum over the taps.
        normalize_taps: applies a softmax over the taps of lightweight and dynamic convolutions;
            without it, the (predicted) numbers are used directly.
        tap_dropout_rate: dropout of the normalised taps (DropConnect of Wu et al. 2019,
            arXiv 1901.10430), in [0, 1).
    """

    kernel_size: int = ruled(rules.count, default=7, per_layer=True)
    dilation: int = ruled(rules.count, default=1, per_layer=True)
    num_kernels: int | None = ruled(
        rules.count_or("one kernel per channel"), default=None, per_layer=True
    )
    padding: Padding | None = ruled(_padding, default=None)
    input_projection: InputProjection = ruled(rules.choice(InputProjection), default="gated")
    pointwise: bool = ruled(rules.switch, default=False)
    output_projection: bool = ruled(rules.switch, default=True)
    projection_bias: bool = ruled(rules.switch, default=False)
    predictor_bias: bool = ruled(rules.switch, default=False)
    conv_bias: bool = ruled(rules.switch, default=False)
    normalize_taps: bool = ruled(rules.switch, default=True)
    tap_dropout_rate: float = ruled(rules.share, default=0.0)

    sharding_rules = (
        Rule(r"mixing/(input|gate)/kernel$", ("fsdp", "tensor"), optional=True),
        Rule(r"mixing/(input|gate)/bias$", ("tensor",), optional=True),
        Rule(r"mixing/conv_bias$", ("tensor",), optional=True),
        Rule(r"mixing/(pointwise|output)/kernel$", ("tensor", "fsdp"), optional=True),
        Rule(r"mixing/(pointwise|output)/bias$", optional=True),
    )

    @property
    def tap_padding(self) -> Padding:
        """The padding of the taps, with None resolved."""
        return self.padding or ("CAUSAL" if self.causal else "CENTERED")

    @property
    def reach(self) -> Reach:
        return Reach(*pad_widths(self.kernel_size, self.dilation, self.tap_padding))

    @property
    def num_slots(self) -> int:
        """Inputs that decoding keeps: the newest, and earlier ones that causal taps read."""
        return (self.kernel_size - 1) * self.dilation + 1

    @property
    def tap_columns(self) -> tuple[str, str, str]:
        kernels = "1/channel" if self.num_kernels is None else str(self.num_kernels)
        return str(self.kernel_size), str(self.dilation), kernels

    @property
    def projection_names(self) -> tuple[str, ...]:
        """The dense layers before the taps, which read the input of the block."""
        return tuple(name for name in self.dense_layers if name in ("input", "gate"))

    def projections(self, sizes: ModelSizes) -> dict[str, int]:
        return dict.fromkeys(self.projection_names, sizes.emb_dim)

    @property
    def dense_layers(self) -> tuple[str, ...]:
        """The dense layers of the block, in order."""
        present = {
            "input": self.input_projection != "none",
            "gate": self.input_projection == "gated",
            "pointwise": self.pointwise,
            "output": self.output_projection,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        emb = sizes.emb_dim
        return 2 * len(self.dense_layers) * emb * emb + 2 * self.kernel_size * emb

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        # The inputs of the norm, of the first products and of the taps.
        vectors = 3
        vectors += 2 if self.input_projection == "gated" else 0  # Both factors of the gate.
        vectors += self.pointwise + self.output_projection
        return jnp.dtype(sizes.dtype).itemsize * vectors * sizes.emb_dim

    def state_size(self, sizes: ModelSizes, length: int) -> int:
        return self.num_slots * sizes.emb_dim

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        try:
            pad_widths(self.kernel_size, self.dilation, self.tap_padding)
        except ValueError as error:
            return [f"{where}: {error}"]
        if self.num_kernels and emb_dim % self.num_kernels:
            return [
                f"{where}.num_kernels={self.num_kernels} must divide emb_dim={emb_dim}: each "
                "kernel serves emb_dim / num_kernels neighbouring channels."
            ]
        return []


class ConvolutionState(NamedTuple):
    """A ring buffer of the last inputs of the taps; slot t mod size holds the input of step t."""

    inputs: Float[Array, "batch slots embed"]


class Convolution(base.Mixer):
    """The convolution block: X1 = (X W^I) * sigmoid(X W^S); X2 = conv(X1); X3 = X2 W^O.

    Tay et al. 2021, arXiv 2105.03322, section 3, after Wu et al. 2019, arXiv 1901.10430. Each part
    is optional, see `ConvolutionConfig`. Decoding keeps the last (K - 1) * dilation inputs, so the
    size of its state does not depend on the length of the output.
    """

    def __init__(self, config: ConvolutionConfig, sizes: ModelSizes, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        emb_dim = sizes.emb_dim

        def dense(name: str, key: PRNGKeyArray) -> Dense | None:
            if name not in config.dense_layers:
                return None
            canon = None
            if name in config.projection_names:
                canon = config.canon_at("B", name, cross_segments=sizes.taps_cross_segments)
            return Dense(emb_dim, emb_dim, key=key, use_bias=config.projection_bias, canon=canon)

        self.input = dense("input", keys[0])
        self.gate = dense("gate", keys[1])
        self.init_taps(config, emb_dim, key=keys[2])
        self.conv_bias = nnx.Param(jnp.zeros((emb_dim,), jnp.float32)) if config.conv_bias else None
        self.pointwise = dense("pointwise", keys[3])
        self.output = dense("output", keys[4])
        self.config = config
        self.taps_cross_segments = sizes.taps_cross_segments

    def init_taps(self, config: Any, emb_dim: int, *, key: PRNGKeyArray) -> None:
        """Creates the parameters of the taps."""
        raise NotImplementedError

    def convolve(
        self,
        inputs: Float[Array, "batch length channels"],
        gated: Float[Array, "batch length channels"],
        where: Mapping[str, Any],
        *,
        dropout_key: DropoutKey,
    ) -> Float[Array, "batch length channels"]:
        """Applies the taps.

        Args:
            inputs: the sequence that the taps read.
            gated: the same before masking, from which dynamic kernels are predicted.
            where: arguments of the operator that select the positions it reads.
            dropout_key: random key; None means deterministic.
        """
        raise NotImplementedError

    def step_taps(
        self, gated: Float[Array, "batch 1 channels"]
    ) -> Float[Array, "rows taps channels"]:
        """Returns the weight of every tap and channel at one position; one row may serve all."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: base.StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        """Mixes a whole sequence; taps read zero at padding and where `readable` is false."""
        config = self.config
        gated = self._gate_input(x, inputs)
        where = {
            "dilation": config.dilation,
            "padding": config.tap_padding,
            "segment_ids": inputs.segment_ids,
            "taps_cross_segments": self.taps_cross_segments,
        }
        read = zero_unless(inputs.readable, gated)
        return self._project(self.convolve(read, gated, where, dropout_key=dropout_key))

    def init_state(
        self, batch: Size, length: int, emb_dim: int, dtype: jnp.dtype
    ) -> ConvolutionState:
        """Returns the state before the first position: all earlier inputs are zero."""
        return ConvolutionState(jnp.zeros((batch, self.config.num_slots, emb_dim), dtype))

    def step(
        self, x: Float[Array, "batch 1 embed"], state: ConvolutionState, position: Position
    ) -> tuple[Float[Array, "batch 1 embed"], ConvolutionState]:
        """Mixes the next position of a causal convolution."""
        config, index = self.config, position.index
        slots = state.inputs.shape[1]
        gated = self._gate_input(x, position)
        # batch embed
        newest = zero_unless(position.readable, gated)[:, 0]
        rows = jnp.arange(x.shape[0])
        inputs = state.inputs.at[rows, index % slots].set(newest)
        offsets = config.dilation * jnp.arange(1 - config.kernel_size, 1)
        taken = (index[:, None] + offsets[None]) % slots
        # batch taps embed
        read = jnp.take_along_axis(inputs, taken[..., None], axis=1)
        taps = self.step_taps(gated)
        y = jnp.sum(read.astype(taps.dtype) * taps, axis=1, keepdims=True)
        return self._project(y.astype(x.dtype)), ConvolutionState(inputs)

    def _gate_input(
        self, x: Float[Array, "batch length embed"], along: Along
    ) -> Float[Array, "batch length channels"]:
        y = x if self.input is None else self.input(x, along)
        return y if self.gate is None else gate(y, self.gate(x, along))

    def _project(
        self, y: Float[Array, "batch length channels"]
    ) -> Float[Array, "batch length embed"]:
        if self.conv_bias is not None:
            y = add_vector(y, self.conv_bias[...])
        y = y if self.pointwise is None else self.pointwise(y)
        return y if self.output is None else self.output(y)


def tap_initializer(kernel_size: int) -> jax.nn.initializers.Initializer:
    """Returns the initializer of static taps: truncated normal of scale 1/sqrt(K)."""
    return truncated_normal(kernel_size**-0.5)


def channel_taps(
    logits: Float[Array, "rows taps kernels"],
    inputs: Float[Array, "batch 1 channels"],
    *,
    softmax: bool,
) -> Float[Array, "rows taps channels"]:
    """Expands kernels that groups of channels share to the taps of every channel, in float32."""
    taps = logits.astype(at_least_float32(inputs.dtype))
    if softmax:
        taps = jax.nn.softmax(taps, axis=1)
    return jnp.repeat(taps, inputs.shape[-1] // taps.shape[-1], axis=-1)
