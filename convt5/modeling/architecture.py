"""The text model as gin files configure it: `ConvT5Config` and its two stacks."""

import dataclasses

from jaxtyping import PRNGKeyArray

from convt5.modeling import model
from convt5.modeling.description import ModelDescription, StackConfig, TextStemConfig

__all__ = ["ConvT5Config", "StackConfig", "TextStemConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvT5Config(ModelDescription):
    __doc__ = ModelDescription.__doc__

    def build(self, key: PRNGKeyArray) -> model.ConvT5:
        """Builds the model; under `jax.eval_shape` this allocates nothing."""
        return model.ConvT5(self, key=key)
