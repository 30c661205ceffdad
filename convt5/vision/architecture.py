"""The Vision Transformer as gin files configure it: `ViTConfig`."""

import dataclasses

from jaxtyping import PRNGKeyArray

from convt5.vision import model
from convt5.vision.description import ViTDescription


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ViTDescription):
    __doc__ = ViTDescription.__doc__

    def build(self, key: PRNGKeyArray) -> model.ViT:
        """Builds the model; under `jax.eval_shape` this allocates nothing."""
        return model.ViT(self, key=key)
