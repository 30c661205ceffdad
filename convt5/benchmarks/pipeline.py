"""How fast data comes: span corruption of the embedded text, packed, as training reads it."""

import time
from collections.abc import Iterator
from typing import Any

from convt5 import data

_ENCODER_LENGTH, _DECODER_LENGTH = 512, 128


def suite(*, batch_size: int, num_batches: int) -> Iterator[dict[str, Any]]:
    """Yields a record for rows of one example each, and one for packed rows."""
    # Deferred: importing it registers the tasks, which takes seconds.
    from convt5.tasks import pretraining  # pyright: ignore[reportMissingImports]

    for pack in (False, True):
        config = data.DataConfig(
            mixture=pretraining.pydoc_span_corruption(),
            batch_size=batch_size,
            pack=pack,
            encoder_length=_ENCODER_LENGTH,
            decoder_length=_DECODER_LENGTH,
        )
        yield _measure(config, num_batches)


def _measure(config: data.DataConfig, num_batches: int) -> dict[str, Any]:
    batches = config.build(process_index=0, process_count=1)
    next(batches)
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for _, batch in zip(range(num_batches), batches, strict=False):
        tokens += sum(int((batch[name] != 0).sum()) for name in batch if name.endswith("tokens"))
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "suite": "data",
        "case": "packed rows" if config.pack else "one example a row",
        "length": config.encoder_length,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }
