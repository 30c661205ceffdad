"""Throughput of data as training reads it, and its share of a training step."""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import pydoc_data.topics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import seqio
import tensorflow_datasets as tfds

from convt5 import data
from convt5.benchmarks import models, timing
from convt5.data import block_workers, cached_data, vocabulary
from convt5.data.task_blocks import TaskBlocks
from convt5.modeling.architecture import ConvT5Config
from convt5.tasks import pretraining, span_corruption, vocabularies

_TOKENS_OF_BATCH = 16 * 256  # Of its encoder rows.
_PIECES, _SENTINELS = 4_000, 200
_MIXED_TASKS = 8
_MOCK_DOCUMENTS = 2_000
_TEXT, _VOCABULARY = "text.txt", "pieces.model"
# How documents become rows; of C4, a mock of TFDS makes the documents.
_CASES = {
    "text, one document a row": {"merge_documents": False},
    "text, joined": {},
    "text, packed": {"merge_documents": False, "pack": True},
    f"text, mixture of {_MIXED_TASKS} tasks": {"num_tasks": _MIXED_TASKS},
    "TFDS mock, joined": {"is_mock": True},
}
_CACHED = ("text, joined", "text, packed")


def suite(
    model: ConvT5Config, lengths: Sequence[int], *, num_copies: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields records of every case at every length, with 1 and 2 processes, and from a cache.

    Args:
        model: the model whose training step the data is compared with; its vocabulary is replaced.
        lengths: tokens of an encoder row.
        num_copies: copies of the text that are read for each record. Opening the text anew, as each
            epoch does, takes as long as 200 rows: a single copy shows that, a corpus does not.
        repeats: number of training steps.
    """
    with tempfile.TemporaryDirectory() as folder, _mock():
        model = dataclasses.replace(model, vocab_size=_prepare(pathlib.Path(folder), num_copies))
        for length in lengths:
            rows = max(1, _TOKENS_OF_BATCH // length)
            run, _ = models.train_step(model, length, rows)
            step = timing.in_turns({"step": run}, repeats=repeats)["step"].cpu_seconds / rows
            read = functools.partial(_records, folder, length)
            for record in itertools.chain.from_iterable(read(case) for case in _CASES):
                record["share_of_step"] = record["cpu_seconds"] / record["rows"] / step
                yield record


def _prepare(folder: pathlib.Path, num_copies: int) -> int:
    """Writes text and a vocabulary trained on it; returns the number of its ids."""
    text = "\n".join(" ".join(topic.split()) for topic in pydoc_data.topics.topics.values())
    (folder / _TEXT).write_text(text)
    flags = [f"--text={folder / _TEXT}", f"--output={folder / _VOCABULARY}", f"--size={_PIECES}"]
    with contextlib.redirect_stdout(io.StringIO()):
        vocabulary.main(flags)
    (folder / _TEXT).write_text("\n".join([text] * num_copies))
    return _vocabulary(folder).vocab_size


def _records(folder: str, length: int, case: str) -> Iterator[dict[str, Any]]:
    config = _config(folder, length, case)
    _measure(case, _built(config), length)  # The first pass optimises what was traced.
    yield _measure(case, _built(config), length)
    load = functools.partial(load_blocks, folder, length, case)
    with block_workers.BlockWorkers(2, load) as workers:
        _measure(case, _built(config, maker=workers.maker), length)
        yield _measure(case, _built(config, maker=workers.maker), length, workers)
    if case in _CACHED:
        with tempfile.TemporaryDirectory() as parent:
            cache = pathlib.Path(parent, "cache")
            _write(cache, _built(config))
            cached = cached_data.CachedDataConfig(
                path=str(cache), batch_size=config.batch_size, num_epochs=1
            )
            yield _measure(case.replace("text", "cache"), _built(cached), length)


def _built(config: Any, **how: Any) -> Any:
    """Returns the batches of a single host."""
    return config.build(process_index=0, process_count=1, **how)


def load_blocks(folder: str, length: int, case: str) -> Mapping[str, TaskBlocks]:
    """Returns the blocks of a case, in another process."""
    _mocked.enter_context(_mock())
    return _config(folder, length, case).task_blocks()


_mocked = contextlib.ExitStack()


def _mock() -> Any:
    return tfds.testing.mock_data(num_examples=_MOCK_DOCUMENTS)


def _config(folder: str, length: int, case: str) -> data.DataConfig:
    settings = dict(_CASES[case])
    num_tasks, pack = settings.pop("num_tasks", 1), bool(settings.pop("pack", False))
    ids = _vocabulary(pathlib.Path(folder))
    make = functools.partial(pretraining.text_span_corruption, os.path.join(folder, _TEXT))
    if settings.pop("is_mock", False):
        make = pretraining.c4_span_corruption
    tasks = [make(vocabulary=ids, name=f"task_{i}", **settings) for i in range(num_tasks)]
    return data.DataConfig(
        mixture=seqio.Mixture("mixture", [(t, 1.0) for t in tasks]) if tasks[1:] else tasks[0],
        batch_size=max(1, _TOKENS_OF_BATCH // length),
        pack=pack,
        num_epochs=1,
        encoder_length=length,
        decoder_length=span_corruption.segment_sizes(length).targets,
    )


def _vocabulary(folder: pathlib.Path) -> seqio.SentencePieceVocabulary:
    return vocabularies.sentencepiece(str(folder / _VOCABULARY), _SENTINELS)


def _write(folder: pathlib.Path, batches: Any) -> None:
    """Writes a cache."""
    writer = cached_data.Writer(folder)
    writer.vocabulary(batches.vocabulary, batches.token_bytes)
    writer.copy("train", batches)
    writer.finish(made_from={})


def _measure(
    case: str, batches: Any, length: int, workers: block_workers.BlockWorkers | None = None
) -> dict[str, Any]:
    """Reads all batches, and so makes each block once; what is traced is traced already."""
    others = workers.cpu_seconds if workers else float
    cpu, wall, rows, tokens = time.process_time() + others(), time.perf_counter(), 0, 0
    for batch in batches:
        rows += len(batch["encoder_input_tokens"])
        tokens += sum(int((batch[name] != 0).sum()) for name in batch if name.endswith("tokens"))
    seconds = time.perf_counter() - wall
    cpu_seconds = time.process_time() + others() - cpu
    return {
        "suite": "data",
        "case": case,
        "processes": workers.num_processes if workers else 1,
        "length": length,
        "rows": rows,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rows_per_second": rows / seconds,
        "rows_per_cpu_second": rows / cpu_seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
    }
