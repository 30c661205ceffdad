"""Interface of the sides of a comparison: each makes a timed function for a given length."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convt5.modeling.architecture import ConvT5Config

TARGETS = 4  # Targets are shorter than sources by this factor.

Measured = tuple[Callable[[], Any], Mapping[str, Any]]
"""A zero-argument function to time, and facts that are known without running it."""

Side = Callable[[int, int], Measured]
"""Makes this for a length and a batch size; the length is that of the source, or of the output."""


def random_batch(config: ConvT5Config, length: int, batch_size: int) -> dict[str, np.ndarray]:
    """Returns random ids with the keys of seqio's EncDecFeatureConverter, without padding."""
    rng = np.random.default_rng(0)
    source = rng.integers(1, config.vocab_size, (batch_size, length), dtype=np.int32)
    target = rng.integers(1, config.vocab_size, (batch_size, length // TARGETS), dtype=np.int32)
    return {
        "encoder_input_tokens": source,
        "decoder_input_tokens": np.pad(target[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": target,
        "decoder_loss_weights": np.ones_like(target),
    }


def random_source(config: ConvT5Config, length: int, batch_size: int) -> np.ndarray:
    """Returns random source ids without padding, for decoding `length` tokens."""
    rng = np.random.default_rng(0)
    shape = batch_size, max(1, length // TARGETS)
    return rng.integers(1, config.vocab_size, shape, dtype=np.int32)
