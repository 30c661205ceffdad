"""Stems, which turn an image into patches: a patchify convolution, or a stack of small ones.

Images are [batch, height, width, channels], kernels [height, width, in, out]. Batch statistics are
returned by a call, which changes nothing.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5 import errors
from convt5.modeling.layers import add_vector, as_row, at_least_float32
from convt5.vision.description import ViTDescription


class BatchStatistics(NamedTuple):
    """Mean and variance of each channel."""

    mean: Float[Array, " channels"]
    variance: Float[Array, " channels"]


class StemOutput(NamedTuple):
    """The output of a stem.

    Attributes:
        patches: patches with the channels of the residual stream.
        statistics: the running statistics of each batch norm after the call.
    """

    patches: Float[Array, "batch rows columns embed"]
    statistics: tuple[BatchStatistics, ...] = ()


class Convolution2D(nnx.Module):
    """A two-dimensional convolution with equal padding on all four sides.

    XLA's "SAME" differs: with stride 2 it pads an even image only on the right and at the bottom.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        kernel_size: int,
        stride: int,
        padding: int,
        use_bias: bool,
        init: jax.nn.initializers.Initializer,
        key: PRNGKeyArray,
    ):
        shape = (kernel_size, kernel_size, in_dim, out_dim)
        self.kernel = nnx.Param(init(key, shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros((out_dim,), jnp.float32)) if use_bias else None
        self.stride = stride
        self.padding = padding

    def __call__(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch rows columns out"]:
        y = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            window_strides=(self.stride, self.stride),
            padding=[(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y if self.bias is None else add_vector(y, self.bias[...])


class BatchNorm(nnx.Module):
    """Batch normalisation (Ioffe and Szegedy 2015, arXiv 1502.03167), with torch's conventions.

    Normalises a batch by its mean and biased variance; the running variance uses the unbiased one.
    Under `jax.jit` with a sharded batch, statistics are those of the whole batch. Running
    statistics are `nnx.BatchStat` variables, not parameters.
    """

    def __init__(self, dim: int, *, epsilon: float, momentum: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32))
        self.mean = nnx.BatchStat(jnp.zeros((dim,), jnp.float32))
        self.variance = nnx.BatchStat(jnp.ones((dim,), jnp.float32))
        self.epsilon = epsilon
        self.momentum = momentum

    def __call__(
        self, x: Float[Array, "batch height width channels"], *, train: bool
    ) -> tuple[Float[Array, "batch height width channels"], BatchStatistics]:
        """Returns the normalised images and the running statistics after the call."""
        y = x.astype(at_least_float32(x.dtype))
        running = BatchStatistics(
            self.mean[...].astype(y.dtype), self.variance[...].astype(y.dtype)
        )
        used, after = self._batch_statistics(y, running) if train else (running, running)
        factor = self.scale[...].astype(y.dtype) * jax.lax.rsqrt(used.variance + self.epsilon)
        y = (y - as_row(used.mean, y.ndim)) * as_row(factor, y.ndim)
        return add_vector(y, self.bias[...]).astype(x.dtype), after

    def _batch_statistics(
        self, x: Float[Array, "batch height width channels"], running: BatchStatistics
    ) -> tuple[BatchStatistics, BatchStatistics]:
        count = math.prod(x.shape[:-1])
        if count < 2:
            raise errors.UserError(
                "batch normalisation needs more than one value per channel, but a batch of one "
                f"image is reduced to {x.shape[1]}x{x.shape[2]} pixels in the stem; train with "
                "larger batches or images."
            )
        mean = jnp.mean(x, axis=(0, 1, 2))
        variance = jnp.mean(jnp.square(x - as_row(mean, x.ndim)), axis=(0, 1, 2))
        newest = BatchStatistics(mean, variance * (count / (count - 1)))
        after = jax.tree.map(
            lambda old, new: (1 - self.momentum) * old + self.momentum * new,
            running,
            jax.lax.stop_gradient(newest),
        )
        return BatchStatistics(mean, variance), after


class PatchifyStem(nnx.Module):
    """One convolution whose kernel size and stride are the patch size."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        size = config.stride
        fan_in = config.in_channels * size**2
        self.patchify = Convolution2D(
            config.in_channels,
            config.emb_dim,
            kernel_size=size,
            stride=size,
            padding=0,
            use_bias=True,
            init=truncated_at_two(fan_in**-0.5),
            key=key,
        )

    def __call__(
        self, images: Float[Array, "batch height width channels"], *, train: bool = False
    ) -> StemOutput:
        del train  # There is no normalisation.
        return StemOutput(self.patchify(images))


class ConvolutionLayer(nnx.Module):
    """3x3 convolution, batch norm, ReLU."""

    def __init__(
        self, config: ViTDescription, in_dim: int, out_dim: int, *, stride: int, key: PRNGKeyArray
    ):
        self.convolution = Convolution2D(
            in_dim,
            out_dim,
            kernel_size=3,
            stride=stride,
            padding=1,
            use_bias=False,
            # The original divides by the output channels, without the area of the kernel.
            init=jax.nn.initializers.normal((2 / out_dim) ** 0.5),
            key=key,
        )
        self.norm = BatchNorm(
            out_dim, epsilon=config.batch_norm_epsilon, momentum=config.batch_norm_momentum
        )

    def __call__(
        self, x: Float[Array, "batch height width channels"], *, train: bool
    ) -> tuple[Float[Array, "batch rows columns out"], BatchStatistics]:
        y, statistics = self.norm(self.convolution(x), train=train)
        return jax.nn.relu(y), statistics


class ConvolutionStem(nnx.Module):
    """The early convolutions of arXiv 2106.14881, and a 1x1 convolution to the residual stream."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        inputs = (config.in_channels, *config.stem_channels[:-1])
        keys = jax.random.split(key, len(inputs))
        # Any: nnx.List has no element type.
        self.layers: Any = nnx.List(
            [
                ConvolutionLayer(
                    config, inputs[i], config.stem_channels[i], stride=stride, key=keys[i]
                )
                for i, stride in enumerate(config.stem_strides[:-1])
            ]
        )
        self.output = Convolution2D(
            inputs[-1],
            config.emb_dim,
            kernel_size=1,
            stride=config.stem_strides[-1],
            padding=0,
            use_bias=True,
            init=jax.nn.initializers.normal(config.emb_dim**-0.5),
            key=keys[-1],
        )

    def __call__(
        self, images: Float[Array, "batch height width channels"], *, train: bool = False
    ) -> StemOutput:
        activations, statistics = self.activations(images, train=train)
        return StemOutput(self.output(activations[-1]), statistics)

    def activations(
        self, images: Float[Array, "batch height width channels"], *, train: bool = False
    ) -> tuple[list[jax.Array], tuple[BatchStatistics, ...]]:
        """Returns the images and the output of each layer after its ReLU."""
        outputs, statistics = [images], []
        for layer in self.layers:
            y, after = layer(outputs[-1], train=train)
            outputs.append(y)
            statistics.append(after)
        return outputs, tuple(statistics)


def truncated_at_two(stddev: float) -> jax.nn.initializers.Initializer:
    """Returns torch's truncated normal: cut at -2 and 2 absolutely, which hardly ever applies."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding  # `sharding` decides where parameters live.
        limit = 2 / stddev
        return stddev * jax.random.truncated_normal(key, -limit, limit, shape, dtype)

    return init
