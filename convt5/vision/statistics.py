"""Running statistics of batch normalisation measured anew, over many batches of one model.

What runs along in training is a mean over models that have changed since; evaluation wants those of
the model that is evaluated (as in the code of arXiv 2106.14881).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from convt5 import errors
from convt5.data_shards import ShardedBatches
from convt5.sharding import replicated
from convt5.training.loop import Estimate
from convt5.training.plan import Plan
from convt5.training.validation import DataConfig, place_batch
from convt5.vision.model import Statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reestimate:
    """The means over batches of their means and unbiased variances.

    Attributes:
        data: the batches, such as those of training; the same ones each time.
        num_batches: how many are taken.
    """

    data: DataConfig
    num_batches: int

    def __post_init__(self):
        if self.num_batches < 1:
            raise errors.UserError(
                f"Reestimate: num_batches={self.num_batches} must be at least 1."
            )

    def build(self, plan: Plan) -> Estimate:
        """Returns a function from a model to its statistics, on the devices of a plan."""
        where = replicated(plan.mesh)
        measure = jax.jit(
            batch_statistics,
            in_shardings=(plan.shardings.model, plan.batch_sharding),
            out_shardings=where,
        )

        def estimate(model: nnx.Module) -> Statistics:
            if not jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
                return {}  # A patchify stem normalises nothing.
            batches = ShardedBatches(self.data, plan.batch_sharding)
            found = []
            for _ in range(self.num_batches):
                placed = place_batch(next(batches), plan.batch_sharding, rows=batches.rows)
                found.append(measure(model, placed.arrays["images"]))
            return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *found)

        return estimate


def batch_statistics(model: Any, images: jax.Array) -> Statistics:
    """Returns means and unbiased variances of one batch alone, by name, of a `ViT`."""
    config = dataclasses.replace(model.config, batch_norm_momentum=1.0)
    abstract = jax.eval_shape(lambda: config.build(jax.random.key(0)))
    forgetful = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(model))
    return forgetful(images, train=True).statistics
