"""Re-estimates running statistics of batch normalisation over many batches with one model.

The statistics of training average over models that have changed since; evaluation needs those of
the evaluated model (as in the code of arXiv 2106.14881).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from convt5 import errors
from convt5.data.data_shards import ShardedBatches
from convt5.data.protocols import DataConfig
from convt5.errors import checks
from convt5.modeling.sharding import check_rows, replicated
from convt5.training.loop import Estimate
from convt5.training.plan import Plan
from convt5.training.train_state import abstract_model
from convt5.training.validation import place_batch
from convt5.vision.images import ImageDataConfig
from convt5.vision.model import Statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class Reestimate:
    """Averages means and unbiased variances over batches.

    Attributes:
        data: the batches, such as those of training; always the same ones, on any number of hosts.
            Without mixup and CutMix, because mixed images vary less than those evaluated.
        num_batches: number of batches.
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
        return self.on_devices(plan.shardings.model, plan.batch_sharding)

    def on_devices(self, model_shardings: nnx.Module, batch_sharding: NamedSharding) -> Estimate:
        """Returns a function from a model with these shardings to its statistics."""
        return Measurement(self, model_shardings, batch_sharding)


class Measurement:
    """Measures statistics on the same batches each time; opens the data once.

    Raises:
        UserError: the batch is not divisible among the devices.
    """

    def __init__(
        self, config: Reestimate, model_shardings: nnx.Module, batch_sharding: NamedSharding
    ):
        # A patchify stem has no statistics.
        self._has_any = bool(jax.tree.leaves(nnx.state(model_shardings, nnx.BatchStat)))
        if self._has_any:
            check_rows(
                batch_sharding.mesh, config.data.batch_size, setting="Reestimate: data.batch_size"
            )
        self._config = config
        self._batch_sharding = batch_sharding
        self._measure = jax.jit(
            batch_statistics,
            in_shardings=(model_shardings, batch_sharding),
            out_shardings=replicated(batch_sharding.mesh),
        )
        self._batches: ShardedBatches | None = None
        self._start = b""

    def __call__(self, model: nnx.Module) -> Statistics:
        """Returns the statistics by name; empty for a model without batch normalisation."""
        if not self._has_any:
            return {}  # Reads no images.
        batches = self._from_the_start()
        per_batch = []
        for _ in range(self._config.num_batches):
            try:
                batch = next(batches)
            except StopIteration:
                raise errors.UserError(
                    f"Reestimate: data ends after {len(per_batch)} of num_batches="
                    f"{self._config.num_batches}; set num_batches lower, or num_epochs=None of "
                    "data."
                ) from None
            placed = place_batch(batch, self._batch_sharding, rows=batches.rows)
            per_batch.append(self._measure(model, placed.arrays["images"]))
        return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *per_batch)

    def _from_the_start(self) -> ShardedBatches:
        if self._batches is None:
            data = _without_mixing(self._config.data)
            # Endless batches depend on the number of shards: the same number for any hosts.
            is_endless = getattr(data, "num_epochs", None) is None
            self._batches = ShardedBatches(
                data, self._batch_sharding, num_shards=1 if is_endless else None
            )
            self._start = self._batches.get_state()
        else:
            self._batches.set_state(self._start)
        return self._batches


def _without_mixing(data: DataConfig) -> DataConfig:
    if isinstance(data, ImageDataConfig) and data.augmentation is not None:
        return dataclasses.replace(data, augmentation=data.augmentation.without_mixing())
    return data


def batch_statistics(model: Any, images: jax.Array) -> Statistics:
    """Returns means and unbiased variances of a `ViT` on a single batch, by name."""
    config = dataclasses.replace(model.config, batch_norm_momentum=1.0)
    abstract = abstract_model(config)
    forgetful = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(model))
    return forgetful(images, train=True).statistics
