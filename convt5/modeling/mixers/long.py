"""Long convolution (Poli et al. 2023, arXiv 2302.10866): filters as long as the row.

A small network computes the filters. The tap of channel c at distance t is h_c(t) = window_c(t) *
FFN(features(t))_c, where the window decays with distance. A layer reads the whole row, and the
number of parameters does not depend on its length.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.errors import rules
from convt5.errors.rules import ruled
from convt5.modeling.canon import Along
from convt5.modeling.layers import Dense, DropoutKey, at_least_float32, truncated_normal
from convt5.modeling.mixers import base
from convt5.modeling.mixers.base import MixerConfig, Position, Reach, Shared
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes, Size
from convt5.ops import long_conv
from convt5.ops.convolution.whole_rows import flops as convolution_flops
from convt5.ops.gating import gate
from convt5.ops.masking import zero_unless

Gating = Literal["glu", "hyena"]

_SINE_FREQUENCY = 10.0
"""Frequency of the sine activations of the filter network, as in the original's configurations."""

_END_OF_WINDOW = 0.01
_FASTEST, _SLOWEST = 0.3, 1.5
"""Distances, relative to `filter_scale`, at which the windows of the first and the last channel
have decayed to 1 %."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Long(MixerConfig):
    """A filter for the whole row: causal in a decoder, two-sided in an encoder.

    Attributes:
        gating: "glu" is the block of the other convolutions: X1 = (X W^I) * sigmoid(X W^S), X2 =
            conv(X1), X3 = X2 W^O. "hyena" is Hyena of order 2: X1 = (X W^K) * (X W^V), X3 = ((X
            W^Q) * X2) W^O; add Canon layers at B for the original's short convolutions of the
            projections.
        filter_scale: the unit of distance for features and windows, in tokens; the original uses
            the row length. Windows decay to 1 % at 0.3 to 1.5 times this distance.
        filter_width: hidden units of the filter network.
        filter_layers: hidden layers of the filter network.
        filter_bands: number of frequencies among its features: 1 to this many periods within
            `filter_scale`.
    """

    gating: Gating = ruled(rules.choice(Gating), default="glu")
    filter_scale: int = ruled(rules.count, default=512, per_layer=True)
    filter_width: int = ruled(rules.count, default=64)
    filter_layers: int = ruled(rules.count, default=2)
    filter_bands: int = ruled(rules.count, default=16)

    kind = "long"
    sharding_rules = (
        Rule(r"mixing/(input|gate|query|key|value)/kernel$", ("fsdp", "tensor"), optional=True),
        Rule(r"mixing/output/kernel$", ("tensor", "fsdp"), optional=True),
        Rule(r"mixing/skip$", ("tensor",), optional=True),
        Rule(r"mixing/filter/hidden/\d+/(kernel|bias)$", optional=True),
        Rule(r"mixing/filter/output$", (None, None, ("tensor", "fsdp")), optional=True),
    )
    stacked_parameters = (r"mixing/filter/output$",)

    @property
    def reach(self) -> Reach:
        return Reach(None, 0 if self.causal else None)

    @property
    def sides(self) -> int:
        """Number of directions that taps reach: back, or back and ahead."""
        return 1 if self.causal else 2

    @property
    def tap_columns(self) -> tuple[str, str, str]:
        return "row", "1", "1/channel"

    @property
    def projection_names(self) -> tuple[str, ...]:
        """The dense layers that read the input of the block."""
        return ("input", "gate") if self.gating == "glu" else ("query", "key", "value")

    def projections(self, sizes: ModelSizes) -> dict[str, int]:
        return dict.fromkeys(self.projection_names, sizes.emb_dim)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> "LongConvolution":
        return LongConvolution(self, sizes, key=key)

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        emb, width = sizes.emb_dim, self.filter_width
        dense = 2 * (len(self.projection_names) + 1) * emb * emb
        taps = (2 * self.filter_bands + 1) * width + (self.filter_layers - 1) * width * width
        taps += self.sides * width * emb
        return dense + convolution_flops(length, sides=self.sides) * emb / length + 2 * taps

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        # The inputs of the norm, of the first products and of the taps; the factors of the gates
        # before and after the taps; the input of the last product.
        vectors = 6 if self.gating == "glu" else 8
        return jnp.dtype(sizes.dtype).itemsize * vectors * sizes.emb_dim

    def state_size(self, sizes: ModelSizes, length: int) -> int:
        dtype = jnp.dtype(sizes.dtype)
        wider = at_least_float32(dtype).itemsize // dtype.itemsize
        return (length + wider * (2 * length - 1)) * sizes.emb_dim


class LongState(NamedTuple):
    """The inputs so far, and the taps for all distances.

    Attributes:
        inputs: inputs of the convolution, zero at positions not yet decoded.
        taps: float32, furthest first, followed by length - 1 zeros for positions not yet decoded.
    """

    inputs: Float[Array, "batch length embed"]
    taps: Shared


class LongConvolution(base.Mixer):
    """The convolution block with a filter for the whole row; see `Long.gating`.
    Decoding sums over all earlier inputs: a step takes 2 * length * emb_dim operations, and reads
    as many numbers as attention reads keys and values.
    """

    def __init__(self, config: Long, sizes: ModelSizes, *, key: PRNGKeyArray):
        emb_dim, names = sizes.emb_dim, config.projection_names
        keys = jax.random.split(key, len(names) + 2)
        for name, own_key in zip(names, keys[2:], strict=True):
            canon = config.canon_at("B", name, cross_segments=sizes.taps_cross_segments)
            setattr(self, name, Dense(emb_dim, emb_dim, key=own_key, canon=canon))
        self.filter = FilterNetwork(config, emb_dim, key=keys[0])
        self.skip = nnx.Param(jnp.zeros((emb_dim,), jnp.float32))
        self.output = Dense(emb_dim, emb_dim, key=keys[1])
        self.config = config
        self.taps_cross_segments = sizes.taps_cross_segments

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: base.StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        """Mixes a whole sequence; taps read zero at padding and where `readable` is false."""
        gated, query = self._gate_input(x, inputs)
        gated = zero_unless(inputs.readable, gated)
        # At least one tap, also for rows without positions.
        behind, *ahead = self._taps(max(1, x.shape[1]), at_least_float32(x.dtype))
        y = long_conv(
            gated,
            jnp.concatenate([behind[::-1], *(taps[1:] for taps in ahead)]),
            padding="CENTERED" if ahead else "CAUSAL",
            segment_ids=inputs.segment_ids,
            taps_cross_segments=self.taps_cross_segments,
        )
        return self._project(y, query)

    def init_state(self, batch: Size, length: int, emb_dim: int, dtype: jnp.dtype) -> LongState:
        """Returns the state before the first position; computes the taps once."""
        (taps,) = self._taps(length, at_least_float32(dtype))
        taps = jnp.pad(taps[::-1], ((0, max(0, length - 1)), (0, 0)))
        return LongState(jnp.zeros((batch, length, emb_dim), dtype), Shared(taps))

    def step(
        self, x: Float[Array, "batch 1 embed"], state: LongState, position: Position
    ) -> tuple[Float[Array, "batch 1 embed"], LongState]:
        """Mixes the next position."""
        gated, query = self._gate_input(x, position)
        newest = zero_unless(position.readable, gated)[:, 0]
        inputs = state.inputs.at[jnp.arange(x.shape[0]), position.index].set(newest)
        taps, length = state.taps.value, inputs.shape[1]

        def taps_from(index):
            return jax.lax.dynamic_slice_in_dim(taps, length - 1 - index, length)

        weighted = inputs.astype(taps.dtype) * jax.vmap(taps_from)(position.index)
        y = jnp.sum(weighted, axis=1, keepdims=True).astype(x.dtype)
        return self._project(y, query), LongState(inputs, state.taps)

    def room(self, state: LongState) -> int:
        return state.inputs.shape[1]

    def _taps(self, length: int, dtype: jnp.dtype) -> Float[Array, "sides length embed"]:
        """Returns the taps for distances 0 to length - 1, back and ahead.

        The original's skip connection D x[t] is part of the tap at distance 0.
        """
        taps = self.filter(length).astype(dtype)
        return taps.at[0, :1].add(self.skip[...].astype(dtype)[None])

    def _gate_input(
        self, x: Float[Array, "batch length embed"], along: Along
    ) -> tuple[Float[Array, "batch length embed"], Float[Array, "batch length embed"] | None]:
        """Returns the input of the taps, and the factor of their output."""
        projected = [getattr(self, name)(x, along) for name in self.config.projection_names]
        if self.config.gating == "glu":
            return gate(*projected), None
        query, key, value = projected
        return key * value, query

    def _project(self, y, query) -> Float[Array, "batch length embed"]:
        return self.output(y if query is None else query * y)


class FilterNetwork(nnx.Module):
    """Computes the taps of every channel from the distance, in float32.

    As in the original: features t, cos(2 pi k t), sin(2 pi k t), with t in units of `filter_scale`;
    hidden layers with sine activations; a linear layer without bias; windows exp(-a_c t) with a_c
    spread evenly. Departures: features and windows are relative to a setting rather than to the row
    length, so that taps do not depend on it; windows decay to zero; and windows are scaled to a sum
    of squares of 1, so that outputs start as large as inputs.
    """

    def __init__(self, config: Long, emb_dim: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, config.filter_layers + 1)
        sizes = [2 * config.filter_bands + 1, *[config.filter_width] * config.filter_layers]
        # Any: nnx.List has no element type.
        self.hidden: Any = nnx.List(
            [
                Dense(in_dim, config.filter_width, key=keys[i], use_bias=True)
                for i, in_dim in enumerate(sizes[:-1])
            ]
        )
        shape = (config.sides, config.filter_width, emb_dim)
        init = truncated_normal(config.filter_width**-0.5)
        self.output = nnx.Param(init(keys[-1], shape, jnp.float32))
        self.config = config

    def __call__(self, length: int) -> Float[Array, "sides length embed"]:
        config, table = self.config, self.output[...]
        distances = np.arange(length) / config.filter_scale
        angles = 2 * np.pi * distances[:, None] * np.arange(1, config.filter_bands + 1)
        features = np.concatenate([distances[:, None], np.cos(angles), np.sin(angles)], axis=1)
        hidden = jnp.asarray(features, jnp.float32)
        for layer in self.hidden:
            hidden = jnp.sin(_SINE_FREQUENCY * layer(hidden))
        windows = jnp.asarray(self._windows(distances, table.shape[2]), jnp.float32)
        return jnp.einsum("lw,swe->sle", hidden, table) * windows[None]

    def _windows(self, distances: np.ndarray, channels: int) -> np.ndarray:
        fall = -math.log(_END_OF_WINDOW)
        rates = np.linspace(fall / _FASTEST, fall / _SLOWEST, channels)
        squares = self.config.sides / -np.expm1(-2 * rates / self.config.filter_scale)
        return np.exp(-distances[:, None] * rates) / np.sqrt(squares)
