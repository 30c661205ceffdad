"""ViT: from images to logits and batch statistics; a call changes nothing.

`ViTConfig` (in `vision.architecture`) describes it. The specification is Xiao et al. 2021, arXiv
2106.14881, and the authors' published code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5 import errors
from convt5.modeling.layers import Dense, at_least_float32, check_dtype
from convt5.modeling.mixers.base import StackInputs
from convt5.vision.blocks import Encoder
from convt5.vision.description import ViTDescription
from convt5.vision.stems import ConvolutionStem, PatchifyStem

Images = Float[jax.Array | np.ndarray, "batch height width channels"]
Statistics = dict[str, Array]
"""Running statistics by their path in the model, such as `stem/layers/0/norm/mean`."""


class ViTOutput(NamedTuple):
    """The output of a call.

    Attributes:
        logits: logits of the classes.
        statistics: running statistics after the call: new in training, otherwise the model's own.
            `train_state.with_statistics` writes them to a model.
    """

    logits: Float[Array, "batch classes"]
    statistics: Statistics


class ViT(nnx.Module):
    """The model; as a tree it holds parameters and, with a conv stem, running statistics."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        check_dtype(config.dtype)
        stem_key, position_key, encoder_key, head_key = jax.random.split(key, 4)
        stem = PatchifyStem if config.stem == "patchify" else ConvolutionStem
        self.stem = stem(config, key=stem_key)
        token = jnp.zeros((config.emb_dim,), jnp.float32)
        self.class_token = nnx.Param(token) if config.pooling == "token" else None
        shape = (config.num_tokens, config.emb_dim)
        self.position_embedding = nnx.Param(
            0.02 * jax.random.normal(position_key, shape, jnp.float32)
        )
        self.encoder = Encoder(config, key=encoder_key)
        self.head = Dense(
            config.emb_dim,
            config.num_classes,
            key=head_key,
            use_bias=True,
            init=jax.nn.initializers.zeros,
        )
        self.config = config

    def __call__(self, images: Images, *, train: bool = False) -> ViTOutput:
        """Returns float32 logits and the running statistics.

        Args:
            images: normalised images of the config's size and channels.
            train: normalises by the statistics of this batch instead of the running ones.
        """
        patches, statistics = self.stem(self._checked(images), train=train)
        features = self.pool(self.encode(patches))
        logits = self.head(features).astype(at_least_float32(features.dtype))
        named = {
            f"stem/layers/{index}/norm/{name}": value
            for index, layer in enumerate(statistics)
            for name, value in layer._asdict().items()
        }
        return ViTOutput(logits, named)

    def encode(
        self, patches: Float[Array, "batch rows columns embed"]
    ) -> Float[Array, "batch length embed"]:
        """Returns all tokens after the final norm; patches are in row-major order."""
        batch, rows, columns, embed = patches.shape
        x = patches.reshape(batch, rows * columns, embed)
        if self.class_token is not None:
            token = self.class_token[...].astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, len(token))), x], axis=1)
        x = x + self.position_embedding[...].astype(x.dtype)[None]
        return self.encoder(x, self._neighbours(x) if self.config.canon else None)

    def _neighbours(self, x: Float[Array, "batch length embed"]) -> StackInputs:
        """Returns what Canon layers read: the class token is a segment of its own, because it has
        no position in the image."""
        first_patch = 0 if self.class_token is None else 1
        example = jnp.where(jnp.arange(x.shape[1]) < first_patch, 1, 2)
        return StackInputs(jnp.broadcast_to(example[None], x.shape[:2]))

    def pool(self, tokens: Float[Array, "batch length embed"]) -> Float[Array, "batch embed"]:
        """Returns the input of the head."""
        return jnp.mean(tokens, axis=1) if self.class_token is None else tokens[:, 0]

    def _checked(self, images: Images) -> Float[Array, "batch height width channels"]:
        config = self.config
        wanted = (config.image_size, config.image_size, config.in_channels)
        if images.shape[1:] != wanted:
            raise errors.UserError(
                f"images of shape {tuple(images.shape[1:])} (height, width, channels) do not fit "
                f"a model of image_size={config.image_size} and in_channels={config.in_channels}; "
                f"make them {wanted}."
            )
        return jnp.asarray(images, jnp.dtype(config.dtype))
