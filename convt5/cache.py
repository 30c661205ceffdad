"""Entry point of `python -m convt5.cache`: prepares the rows of a run once, and stores them.

Tokenises, corrupts and packs; `cached_data` then reads the stored rows directly.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convt5 import errors
from convt5.configuration import command_line, gin_config, gin_files
from convt5.data.block_workers import BlockWorkers
from convt5.runtime.bars import Bar
from convt5.text import task_format

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

COMMAND = command_line.Command(
    name="cache",
    summary="Tokenises, corrupts and packs the data of a run once, and stores the rows. "
    "Training then reads them at file speed and needs no TensorFlow.",
    examples=[
        (
            "cache two epochs of your own text, with different masks",
            "--gin_file=gin/runs/pretrain_text.gin --gin.TEXT='corpus/*.txt.gz' "
            "--gin.VOCABULARY=corpus/spm.model --epochs=2 --output_dir=corpus/cache",
        ),
        (
            "cache the first million rows of C4 with 16 processes; repeat the command to resume",
            "--gin_file=gin/runs/pretrain_c4.gin --rows=1000000 --processes=16 "
            "--output_dir=c4_cache",
        ),
    ],
    flags=[
        command_line.Flag(
            "output_dir", "the folder to create; it must not exist yet.", {"required": True}
        ),
        command_line.Flag(
            "epochs",
            "epochs of the training data (default: 1); each has new corruption.",
            {"type": int, "default": 1},
        ),
        command_line.Flag(
            "processes",
            "worker processes (default: 1); their number does not change the rows.",
            {"type": int, "default": 1},
        ),
        command_line.Flag(
            "rows",
            "largest number of training rows (default: all).",
            {"type": int, "default": None},
        ),
    ],
)


def main(argv: Sequence[str]) -> None:
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    for name in ("epochs", "rows", "processes"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise errors.UserError(f"{name}={getattr(flags, name)} must be at least 1.")
    from convt5 import data
    from convt5.data import cached_data, counts
    from convt5.training.validation import check_num_batches

    run = _run(arguments)
    configs = {"train": run.train_data, "validation": run.eval_data}
    for config in configs.values():
        if config is not None and not isinstance(config, data.DataConfig):
            raise errors.UserError(
                f"the gin files bind {type(config).__name__} as data, but only data.DataConfig "
                "(text from seqio) can be cached."
            )
    check_num_batches(run.eval_num_batches, run.eval_data)
    output_dir = os.path.expanduser(flags.output_dir)
    wanted = {
        split: _plan_split(split, config, flags, run)
        for split, config in configs.items()
        if config is not None
    }
    writer = cached_data.Writer(pathlib.Path(output_dir), identity=_identity(wanted, flags))
    started, tokens, described = time.perf_counter(), 0, {}
    for split, of_split in wanted.items():
        described[split] = of_split.config.describe()
        print(described[split])
        tokens += _write(writer, split, of_split, flags, argv)
    made_from = {name: dataclasses.asdict(c) for name, c in configs.items() if c is not None}
    for config in made_from.values():
        config["mixture"] = getattr(config["mixture"], "name", config["mixture"])
    about = writer.finish(
        made_from=made_from, tasks=task_format.of_data(configs["train"]), described=described
    )
    for name, split in about["splits"].items():
        by_task = {task: counts.Counts(*numbers) for task, numbers in split["counts"].items()}
        print(counts.describe(f"read of {name}", by_task))
    rows = ", ".join(f"{split['rows']:,} of {name}" for name, split in about["splits"].items())
    seconds = time.perf_counter() - started
    print(
        f"wrote {rows}: {tokens:,} tokens in {seconds:.0f}s ({tokens / seconds:,.0f}/s), "
        f"{_size(output_dir) / 1e6:,.0f} MB\n"
        f"train on it: python -m convt5.train --gin_file=gin/runs/pretrain_cached.gin "
        f"--gin.CACHE={flags.output_dir} --gin.RUN_DIR=..."
    )


class _SplitPlan(NamedTuple):
    """What to read of a split: everything of `config`, or `most` rows."""

    config: Any
    most: int | None


def _plan_split(split: str, config: Any, flags: argparse.Namespace, run: "TrainRun") -> _SplitPlan:
    if split == "train":
        config = dataclasses.replace(config, num_epochs=flags.epochs, shuffle=True)
        return _SplitPlan(config, flags.rows)
    num_batches = run.eval_num_batches
    return _SplitPlan(config, num_batches and num_batches * config.batch_size)


def _identity(wanted: Mapping[str, _SplitPlan], flags: argparse.Namespace) -> str:
    """Returns what must be equal for an unfinished cache to be continued."""
    about = {split: [each.config.identity(), each.most] for split, each in wanted.items()}
    return hashlib.sha256(json.dumps([about, flags.epochs]).encode()).hexdigest()


def _write(
    writer: Any, split: str, wanted: _SplitPlan, flags: argparse.Namespace, argv: Sequence[str]
) -> int:
    """Writes the missing rows of a split; returns its number of tokens."""
    written, tokens = writer.written(split), 0
    with contextlib.ExitStack() as stack:
        maker = None
        if flags.processes > 1 and not written.is_complete:
            load = functools.partial(load_blocks, list(argv), split)
            maker = stack.enter_context(BlockWorkers(flags.processes, load)).maker
        batches = wanted.config.build(process_index=0, process_count=1, maker=maker)
        if split == "train":
            of_inputs = wanted.config.provider().output_features["inputs"].vocabulary
            writer.vocabulary(batches.vocabulary, batches.token_bytes, of_inputs=of_inputs)
        if written.is_complete:
            return 0
        left = wanted.most
        if written.state is not None:
            batches.set_state(written.state)
            left = None if left is None else left - written.num_read
            print(f"{split}: resumes after {written.num_read:,} rows", flush=True)
        progress = stack.enter_context(
            Bar(sys.stderr, total=wanted.most, done=written.num_read, label=split, unit="row")
        )
        tell = _Estimate(progress, wanted, batches)
        rows = _first_rows(batches, left, tell)
        for num_tokens in writer.write(
            split, rows, get_state=batches.get_state, get_counts=batches.counts
        ):
            tokens += num_tokens
    return tokens


class _Estimate:
    """Updates a progress bar with the number of rows, and their estimated total.

    Args:
        progress: the bar.
        wanted: what to make.
        batches: the source of the rows.
    """

    def __init__(self, progress: Bar, wanted: _SplitPlan, batches: Any):
        self._progress = progress
        self._most, self._epochs = wanted.most, wanted.config.num_epochs
        self._batches = batches
        self._counts = wanted.config.num_examples() if progress.is_shown else None

    def __call__(self, num_rows: int) -> None:
        self._progress.update(num_rows)
        if self._counts is None or self._epochs is None:
            return
        read = self._batches.num_read()
        done = sum(epoch * self._counts[name] + first for name, (epoch, first) in read.items())
        if done:
            total = int(self._progress.done * self._epochs * sum(self._counts.values()) / done)
            total = max(total, self._progress.done)
            self._progress.total = total if self._most is None else min(total, self._most)


def load_blocks(argv: list[str], split: str) -> Any:
    """Returns the blocks of a split, in another process of the same command."""
    arguments = command_line.parse(COMMAND, argv)
    run = _run(arguments)
    config = run.train_data if split == "train" else run.eval_data
    return _plan_split(split, config, arguments.flags, run).config.task_blocks()


def _first_rows(
    batches: Iterable[Mapping[str, Any]], most: int | None, tell: Callable[[int], Any]
) -> Iterator[Mapping[str, Any]]:
    """Yields batches up to `most` rows in total, or all, and reports the size of each."""
    left = most
    for batch in batches:
        taken = {name: values[:left] for name, values in batch.items()}
        count = len(next(iter(taken.values())))
        yield taken
        tell(count)
        if left is not None:
            left -= count
            if left <= 0:
                return


def _run(arguments: command_line.Arguments) -> "TrainRun":
    """Returns the run of the gin files; a cache needs no run directory."""
    statements = gin_files.read_all(arguments.gin_files)
    unneeded = ["RUN_DIR='unused'"] if gin_files.is_required(statements, "RUN_DIR") else []
    bindings = [*unneeded, *arguments.gin_bindings]
    config = gin_config.load(
        arguments.gin_files,
        bindings,
        roots=["@trainer.train"],
        supplied=["config_text"],
        trusted=arguments.trust,
    )
    from convt5.training import trainer

    return trainer.TrainRun(**config.arguments(trainer.train))


def _size(folder: str) -> int:
    paths: Iterator[pathlib.Path] = pathlib.Path(folder).rglob("*")
    return sum(os.path.getsize(path) for path in paths if path.is_file())


if __name__ == "__main__":
    command_line.run(main)
