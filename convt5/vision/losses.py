"""The loss of an image classifier: soft cross-entropy, with top-1 and top-5 accuracy."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convt5 import errors
from convt5.errors import checks
from convt5.modeling.layers import DropoutKey
from convt5.training.train_step import CROSS_ENTROPY, LossSums
from convt5.vision.description import ViTDescription
from convt5.vision.model import ViT

Logits = Float[Array, "batch classes"]
Labels = Int[Array, " batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class VisionLoss:
    """Soft cross-entropy of the classes.

    Batch normalisation uses batch statistics in training and running statistics in evaluation.

    Attributes:
        label_smoothing: probability spread over all classes, in [0, 1): with n classes the label
            has 1 - s + s / n and every other class s / n.
    """

    label_smoothing: float = 0.0

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise errors.UserError(
                f"VisionLoss: label_smoothing={self.label_smoothing} must be in [0, 1)."
            )

    def check_model(self, model: object) -> None:
        """Raises `UserError` if the described model does not read images."""
        if not isinstance(model, ViTDescription):
            raise errors.UserError(
                "configuration: loss=VisionLoss is for image models, but "
                f"model={type(model).__name__} is not one; set loss=@losses.TextLoss() of "
                "convt5, or choose an image model."
            )

    def __call__(
        self, model: ViT, batch: Mapping[str, jax.Array], *, dropout_key: DropoutKey = None
    ) -> LossSums:
        """Returns sums over the batch and, in training, the new running statistics.

        `cross_entropy` (nats) excludes label smoothing; that of a mixed image is divided between
        its labels. `accuracy` (top-1) and `top_5_accuracy` are percentages.

        Args:
            model: the classifier.
            batch: `images` [batch, height, width, channels], `labels` [batch] and `weights`
                [batch], 0 for padding rows. With the optional `other_labels` and `label_share`
                [batch], the probability is divided between two labels.
            dropout_key: None in evaluation.
        """
        train = dropout_key is not None
        output = model(batch["images"], train=train)
        logits, labels = output.logits, jnp.asarray(batch["labels"])
        targets = one_hot(labels, logits)
        if "other_labels" in batch:
            share = jnp.asarray(batch["label_share"], logits.dtype)[:, None]
            other = one_hot(jnp.asarray(batch["other_labels"]), logits)
            targets = share * targets + (1 - share) * other
        weights = jnp.asarray(batch["weights"], logits.dtype)
        weight = jnp.sum(weights)
        total, own = (
            jnp.sum(weights * soft_cross_entropy(logits, targets, smoothing))
            for smoothing in (self.label_smoothing, 0.0)
        )
        ranks = label_ranks(logits, labels)
        metrics = {CROSS_ENTROPY: (own, weight)} | {
            name: (100 * jnp.sum(weights * (ranks < limit)), weight)
            for name, limit in (("accuracy", 1), ("top_5_accuracy", 5))
        }
        return LossSums(total, weight, metrics, output.statistics if train else {})


def one_hot(labels: Labels, logits: Logits) -> Logits:
    # An 8-bit label cannot be compared with a larger number of classes.
    return jax.nn.one_hot(jnp.asarray(labels, jnp.int32), logits.shape[-1], dtype=logits.dtype)


def soft_cross_entropy(
    logits: Logits, targets: Logits, label_smoothing: float
) -> Float[Array, " batch"]:
    """Returns the cross-entropy of each row with smoothed probabilities, in nats."""
    smoothed = (1 - label_smoothing) * targets + label_smoothing / logits.shape[-1]
    return -jnp.sum(smoothed * jax.nn.log_softmax(logits), axis=-1)


def label_ranks(logits: Logits, labels: Labels) -> Int[Array, " batch"]:
    """Returns the rank of the label among the classes; ties are won by lower indices.

    A row with NaN has the largest integer, so that it is always wrong.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)
    is_lower = jnp.arange(logits.shape[1])[None] < labels[:, None]
    before = (logits > own) | ((logits == own) & is_lower)
    ranks = jnp.sum(before, axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(jnp.isnan(logits), axis=1), jnp.iinfo(jnp.int32).max, ranks)
