"""Early convolutions for text, between the token embeddings and the encoder.

`architecture.TextStemConfig` describes them; `model` runs them before the encoder's layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convt5.modeling.description import ModelDescription, StemActivation, StemLayer
from convt5.modeling.layers import Dense, Norm, at_least_float32, truncated_normal


class StemOutput(NamedTuple):
    """The output of a stem.

    Attributes:
        features: features of the shortened sequence, zero at padding.
        segment_ids: segment ids of the shortened sequence.
    """

    features: Float[Array, "batch positions embed"]
    segment_ids: Int[Array, "batch positions"]


class StemConvolution(nnx.Module):
    """Convolution over all channels, norm and activation.

    Output o represents inputs o * stride to o * stride + stride - 1, and has their segment. Taps
    read zero in other segments, at padding and outside the row; outputs at padding are zero.
    """

    def __init__(self, config: ModelDescription, layer: StemLayer, *, key: PRNGKeyArray):
        assert config.stem is not None
        shape = (layer.kernel_size, layer.in_dim, layer.out_dim)
        init = truncated_normal((layer.kernel_size * layer.in_dim) ** -0.5)
        self.kernel = nnx.Param(init(key, shape, jnp.float32))
        kind = config.stem.norm
        self.norm = (
            None if kind == "none" else Norm(layer.out_dim, kind=kind, epsilon=config.norm_epsilon)
        )
        self.activation: StemActivation = config.stem.activation
        self.layer = layer

    def __call__(
        self, x: Float[Array, "batch length channels"], segment_ids: Int[Array, "batch length"]
    ) -> StemOutput:
        ids = window_segments(segment_ids, self.layer.stride)
        y = self._convolve(x, segment_ids, ids)
        if self.norm is not None:
            y = self.norm(y)
        if self.activation != "none":
            y = jax.nn.relu(y) if self.activation == "relu" else jax.nn.gelu(y, approximate=True)
        # The bias of a layer norm also reaches padding, which the next taps must read as zero.
        return StemOutput(y * (ids != 0)[..., None].astype(y.dtype), ids)

    def _convolve(self, x, segment_ids, ids) -> Float[Array, "batch positions out"]:
        """Convolves by one product with concatenated windows, which accumulates in float32."""
        size, stride = self.layer.kernel_size, self.layer.stride
        left, _ = self.layer.reach
        positions = ids.shape[1]
        if positions == 0:
            return jnp.zeros((*ids.shape, self.layer.out_dim), x.dtype)
        behind = (positions - 1) * stride + size - left - x.shape[1]
        rows = jnp.pad(x, ((0, 0), (left, behind), (0, 0)))
        segments = jnp.pad(segment_ids, ((0, 0), (left, behind)))
        windows = []
        for tap in range(size):
            at = slice(tap, tap + (positions - 1) * stride + 1, stride)
            same_segment = (segments[:, at] == ids) & (ids != 0)
            windows.append(rows[:, at] * same_segment[..., None].astype(x.dtype))
        kernel = self.kernel[...].astype(x.dtype)
        y = jnp.dot(
            jnp.concatenate(windows, axis=-1),
            kernel.reshape(-1, kernel.shape[-1]),
            preferred_element_type=at_least_float32(x.dtype),
        )
        return y.astype(x.dtype)


class TextStem(nnx.Module):
    """The convolutions of `TextStemConfig`, and a dense layer to the residual stream."""

    def __init__(self, config: ModelDescription, *, key: PRNGKeyArray):
        assert config.stem is not None
        layers = config.stem.layers(config.emb_dim)
        keys = jax.random.split(key, len(layers) + 1)
        # Any: nnx.List has no element type.
        self.layers: Any = nnx.List(
            [StemConvolution(config, layer, key=keys[i]) for i, layer in enumerate(layers)]
        )
        self.output = (
            Dense(layers[-1].out_dim, config.emb_dim, key=keys[-1])
            if config.stem.projection
            else None
        )

    def __call__(
        self, x: Float[Array, "batch length embed"], segment_ids: Int[Array, "batch length"]
    ) -> StemOutput:
        """Returns the features that the encoder reads, and their segment ids.

        Args:
            x: the embeddings.
            segment_ids: the packed example of each position, 0 for padding. With a stride, each
                must begin at a multiple of it; others are read differently than alone, or not at
                all.
        """
        output = StemOutput(x, segment_ids)
        for layer in self.layers:
            output = layer(output.features, output.segment_ids)
        if self.output is None:
            return output
        return output._replace(features=self.output(output.features))


def window_segments(ids: Int[Array, "batch length"], stride: int) -> Int[Array, "batch positions"]:
    """Returns the segment of each window of `stride` positions, that of any of its tokens.

    Example: [1, 1, 1, 0, 0] with stride 2 is [1, 1, 0].
    """
    if stride == 1:
        return ids
    positions = -(-ids.shape[1] // stride)
    padded = jnp.pad(ids, ((0, 0), (0, positions * stride - ids.shape[1])))
    return jnp.max(jnp.stack([padded[:, i::stride] for i in range(stride)]), axis=0)
