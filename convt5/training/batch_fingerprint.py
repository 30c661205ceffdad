"""A fingerprint of all elements of a batch and their positions, to compare what runs have read."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from convt5.training.train_step import Loss, LossSums


@dataclasses.dataclass(frozen=True, kw_only=True)
class FingerprintedLoss:
    """Wraps a loss and adds the metric `batch_fingerprint`, which is the same on any mesh.

    Two runs with equal fingerprints in all records, logged with `log_every_steps=1`, have read the
    same batches in the same order. Do not use it with microbatches: their fingerprints are summed.

    Attributes:
        loss: the wrapped loss.
    """

    loss: Loss

    def __call__(
        self, model, batch: Mapping[str, jax.Array], *, dropout_key: jax.Array | None = None
    ) -> LossSums:
        sums = self.loss(model, batch, dropout_key=dropout_key)
        mark = fingerprint(batch).astype(jnp.float32), jnp.ones((), jnp.float32)
        return sums._replace(metrics={**sums.metrics, "batch_fingerprint": mark})


def fingerprint(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns an integer below 2^24, which float32 represents exactly.

    Integer sums wrap around, so the order of summation does not matter.
    """
    total = jnp.zeros((), jnp.uint32)
    for name in sorted(batch):
        array = jnp.asarray(batch[name])
        if array.dtype.itemsize != 4:
            array = array.astype(jnp.float32)
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32).ravel()
        places = jnp.arange(1, bits.size + 1, dtype=jnp.uint32) * jnp.uint32(2654435761)
        mixed = (bits ^ places) * jnp.uint32(0x9E3779B1)
        total = total * jnp.uint32(31) + jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)
    return (total ^ (total >> 8)) & jnp.uint32(0xFFFFFF)
