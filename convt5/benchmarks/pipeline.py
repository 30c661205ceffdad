"""Throughput of data: span corruption of the embedded text, as training reads it, and cached."""

import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from convt5 import data
from convt5.data import cached_data, seqio_batches

_ENCODER_LENGTH, _DECODER_LENGTH = 512, 128


def suite(*, batch_size: int, num_batches: int) -> Iterator[dict[str, Any]]:
    """Yields records for rows of one example, packed rows, and packed rows from a cache."""
    # Deferred: importing it registers the tasks, which takes seconds.
    from convt5.tasks import pretraining

    for pack in (False, True):
        config = data.DataConfig(
            mixture=pretraining.pydoc_span_corruption(),
            batch_size=batch_size,
            pack=pack,
            encoder_length=_ENCODER_LENGTH,
            decoder_length=_DECODER_LENGTH,
        )
        batches = config.build(process_index=0, process_count=1)
        case = "packed rows" if pack else "one example a row"
        yield _measure(case, batches, num_batches)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "cache"
        writer = cached_data.Writer(path)
        writer.vocabulary(batches.vocabulary, batches.token_bytes)
        for _ in writer.write("train", itertools.islice(batches, num_batches)):
            pass
        writer.finish(made_from={})
        cached = cached_data.CachedDataConfig(path=str(path), batch_size=batch_size)
        rows = cached.build(process_index=0, process_count=1)
        yield _measure("packed rows, cached", rows, num_batches)


def _measure(
    case: str, batches: seqio_batches.BatchIterator | cached_data.CachedBatches, num_batches: int
) -> dict[str, Any]:
    next(batches)
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for _, batch in zip(range(num_batches), batches, strict=False):
        tokens += sum(int((batch[name] != 0).sum()) for name in batch if name.endswith("tokens"))
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "suite": "data",
        "case": case,
        "length": _ENCODER_LENGTH,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }
