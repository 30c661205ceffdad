"""What is compared: a side makes something for a length, which can then be timed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convt5.modeling.architecture import ConvT5Config

TARGETS = 4  # A target is this much shorter than its source.

Measured = tuple[Callable[[], Any], Mapping[str, Any]]
"""What is to be timed as a function of nothing, and what is known of it without running it."""

Side = Callable[[int, int], Measured]
"""Makes that for a number of rows of a length: a source's for updates, an output's for decoding."""


def random_batch(config: ConvT5Config, length: int, batch_size: int) -> dict[str, np.ndarray]:
    """Returns random ids under the names of seqio's EncDecFeatureConverter, nothing padded."""
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
    """Returns random ids, nothing padded, to decode `length` tokens from."""
    rng = np.random.default_rng(0)
    shape = batch_size, max(1, length // TARGETS)
    return rng.integers(1, config.vocab_size, shape, dtype=np.int32)
