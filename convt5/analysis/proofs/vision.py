"""The proof of a vision model: the images of a batch are independent."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from convt5.analysis.proofs.results import Proof, Stage, first_failing
from convt5.vision.model import ViT


def neighbours(model: ViT, random: np.random.Generator) -> Proof:
    """Proves that in evaluation, no image of a batch affects another.

    In training, batch normalisation makes each image depend on all of them.
    """
    config = model.config
    shape = (4, config.image_size, config.image_size, config.in_channels)
    before, changed_images = random.standard_normal((2, *shape))
    even = np.arange(len(before))[:, None, None, None] % 2 == 0
    after = np.where(even, before, changed_images)

    def worst(model: ViT) -> float:
        apart = np.abs(np.asarray(_features(model, before)) - np.asarray(_features(model, after)))
        return float(np.where(np.isnan(apart), np.inf, apart)[::2].max())

    name = "nothing depends on other images of the batch"
    violation = worst(model)
    if violation == 0:
        return Proof(name=name, worst=0.0, note="in evaluation")
    stages: list[Stage] = [("the stem", functools.partial(_lowest_blocks, model, 0))]
    stages += [
        (f"block {i}", functools.partial(_lowest_blocks, model, i + 1))
        for i in range(config.num_layers)
    ]
    first = first_failing(len(stages), lambda i: worst(stages[i][1]()) > 0)
    return Proof(name=name, worst=violation, layer=stages[first][0], note="in evaluation")


@jax.jit
def _features(
    model: ViT, images: Float[Array, "batch height width channels"]
) -> Float[Array, "batch features"]:
    """Returns the logits and all tokens before them, because a zero head hides what it reads."""
    tokens = model.encode(model.stem(images).patches)
    rows = [tokens.reshape(len(tokens), -1), model(images).logits]
    return jnp.concatenate(rows, axis=1)


def _lowest_blocks(model: ViT, count: int) -> ViT:
    other = copy.copy(model)
    other.encoder = copy.copy(model.encoder)
    other.encoder.layers = nnx.List(model.encoder.layers[:count])
    return other
