"""Training losses: functions from a model and a batch to weighted sums."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from convt5 import errors
from convt5.errors import checks
from convt5.modeling.layers import DropoutKey, at_least_float32
from convt5.modeling.model import ConvT5
from convt5.ops import linear_cross_entropy
from convt5.training.train_step import CROSS_ENTROPY, PERPLEXITY, LossSums


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class TextLoss:
    """Token cross-entropy with teacher forcing on a seqio encoder-decoder batch.

    Attributes:
        z_loss: coefficient of logsumexp(logits)^2, which keeps the softmax normaliser near 1.
        label_smoothing: probability spread over the whole vocabulary, in [0, 1).
        normalize_by: "tokens" divides by the weighted number of target tokens; "positions" by the
            number of target positions including padding, as Mesh TensorFlow does; "nothing"
            minimises the sum over the batch, as T5X does (with `grad_accum_steps`, the mean of the
            sums of its parts).
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    normalize_by: str = "tokens"

    def __post_init__(self):
        faults = []
        if not self.z_loss >= 0:
            faults.append(f"z_loss={self.z_loss} must be at least 0.")
        if not 0 <= self.label_smoothing < 1:
            faults.append(f"label_smoothing={self.label_smoothing} must be in [0, 1).")
        if self.normalize_by not in (known := ("tokens", "positions", "nothing")):
            faults.append(f"normalize_by={self.normalize_by!r} must be one of {known}.")
        errors.raise_all(faults, where="TextLoss")

    def check_model(self, model: object) -> None:
        """Raises `UserError` if the described model does not read text."""
        checks.check_reads_text(model, "loss=TextLoss is one of")

    def __call__(
        self, model: ConvT5, batch: Mapping[str, jax.Array], *, dropout_key: DropoutKey = None
    ) -> LossSums:
        """Returns sums over the batch; `batch` has the keys of seqio's EncDecFeatureConverter.

        `cross_entropy` (nats per target token), `token_accuracy` (percent), `bits_per_byte` and, in
        evaluation, `perplexity` are those of the plain targets, without `z_loss` and
        `label_smoothing`. The optional key `decoder_target_bytes`, the bytes of text of each
        target, adds bits per byte.
        """
        outputs = model.outputs(
            batch["encoder_input_tokens"],
            batch["decoder_input_tokens"],
            encoder_segment_ids=batch.get("encoder_segment_ids"),
            decoder_segment_ids=batch.get("decoder_segment_ids"),
            encoder_positions=batch.get("encoder_positions"),
            decoder_positions=batch.get("decoder_positions"),
            dropout_key=dropout_key,
        )
        targets = jnp.asarray(batch["decoder_target_tokens"])
        weights = jnp.asarray(batch["decoder_loss_weights"], at_least_float32(outputs.dtype))
        sums = linear_cross_entropy(
            outputs,
            model.output_table(),
            targets,
            weights,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
        )
        weight = jnp.sum(weights)
        metrics = {
            CROSS_ENTROPY: (sums.cross_entropy, weight),
            "token_accuracy": (100 * sums.right, weight),
            "z_loss": (sums.z_term, weight),
        }
        if dropout_key is None:
            metrics[PERPLEXITY] = metrics[CROSS_ENTROPY]  # A mean over training steps has none.
        if "decoder_target_bytes" in batch:
            size = jnp.asarray(batch["decoder_target_bytes"], weights.dtype)
            bits = sums.cross_entropy / jnp.log(2.0)
            metrics["bits_per_byte"] = (bits, jnp.sum(size * weights))
        constants = {"positions": targets.size, "nothing": 1}
        return LossSums(
            loss_sum=sums.loss,
            weight_sum=(
                weight
                if self.normalize_by == "tokens"
                else jnp.asarray(constants[self.normalize_by], weights.dtype)
            ),
            metrics=metrics,
        )
