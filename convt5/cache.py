"""Entry point of `python -m convt5.cache`: prepares the rows of a run once, and stores them.

Tokenises, corrupts and packs; `cached_data` then reads the stored rows directly.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from convt5 import errors
from convt5.configuration import command_line, gin_config, gin_files
from convt5.data.block_workers import BlockWorkers
from convt5.runtime import atomic_files, folders
from convt5.runtime.bars import Bar
from convt5.text import task_format

if TYPE_CHECKING:
    from convt5.training.trainer import TrainRun

_MOST_SHARDS = 99_999

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
        (
            "cache all of C4 in 1024 shards on Apache Beam, with the options after -- for Beam",
            "--gin_file=gin/runs/pretrain_c4.gin --shards=1024 --runner=DataflowRunner "
            "--output_dir=gs://bucket/c4_cache -- --project=mine --region=us-central1 "
            "--temp_location=gs://bucket/tmp --sdk_container_image=IMAGE --max_num_workers=100",
        ),
    ],
    flags=[
        command_line.Flag(
            "output_dir",
            "the folder to create, local or in an object store (gs://, s3://); it must not "
            "exist yet.",
            {"required": True},
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
        command_line.Flag(
            "shards",
            "parts into which the training data is split (default: 1). Each is made by itself, "
            "and continued if it was interrupted. The rows depend on their number.",
            {"type": int, "default": 1},
        ),
        command_line.Flag(
            "runner",
            "a runner of Apache Beam that makes the shards, such as DirectRunner, DataflowRunner, "
            "FlinkRunner or SparkRunner (needs the extra 'beam'). Arguments after -- are its "
            "pipeline options. Runners and their workers do not change the rows.",
            {"default": None},
        ),
    ],
)


class Shard(NamedTuple):
    """A part of a cache.

    Attributes:
        index: its number, from 0.
        count: number of shards of the cache.
        folder: the folder or URL to write it to.
        identity: what must be equal for unfinished rows to be continued.
    """

    index: int
    count: int
    folder: str
    identity: str


def main(argv: Sequence[str]) -> None:
    argv, pipeline_options = _split_at_dashes(argv)
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    _check_flags(flags, pipeline_options)
    from convt5.data import cache_shards, cached_data, counts
    from convt5.runtime import object_stores

    run = _run(arguments)
    _check_data(run)
    is_remote = atomic_files.is_remote(flags.output_dir)
    folder = flags.output_dir if is_remote else os.path.expanduser(flags.output_dir)
    if flags.shards == 1:
        if cache_shards.exists(folder):
            raise cached_data.exists_already(folder)
        if is_remote:  # Its files are written last.
            object_stores.Store(folder).check_writable()
    identity = _identity(run, flags)
    whole = None
    shards = [Shard(0, 1, folder, identity)]
    if flags.shards > 1:
        whole = cache_shards.ShardedCache(folder, flags.shards, identity)
        shards = [Shard(i, flags.shards, whole.shard(i), identity) for i in whole.missing()]
    started = time.perf_counter()
    if flags.runner is None:
        tokens = sum(_make(run, flags, argv, shard) for shard in shards)
    else:
        _make_on_beam(argv, shards, flags.runner, pipeline_options)
        tokens = sum(_num_tokens(cached_data.read_about(shard.folder)) for shard in shards)
    about = cached_data.read_about(folder) if whole is None else whole.join()
    for name, split in about["splits"].items():
        by_task = {task: counts.Counts(*numbers) for task, numbers in split["counts"].items()}
        print(counts.describe(f"read of {name}", by_task))
    rows = ", ".join(f"{split['rows']:,} of {name}" for name, split in about["splits"].items())
    seconds = time.perf_counter() - started
    print(
        f"wrote {rows}: {tokens:,} tokens in {seconds:.0f}s ({tokens / seconds:,.0f}/s)"
        f"{'' if is_remote else f', {_size(folder) / 1e6:,.0f} MB'}\n"
        f"train on it: python -m convt5.train --gin_file=gin/runs/pretrain_cached.gin "
        f"--gin.CACHE={flags.output_dir} --gin.RUN_DIR=..."
    )


def make_shard(argv: Sequence[str], place: tuple[int, int, str, str]) -> None:
    """Makes a shard, given as a plain tuple, in any process of the same command."""
    from convt5.data import cache_shards

    shard = Shard(*place)
    if not cache_shards.exists(shard.folder):
        arguments = command_line.parse(COMMAND, argv)
        _make(_run(arguments), arguments.flags, argv, shard)


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before and after "--"."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _check_flags(flags: argparse.Namespace, pipeline_options: Sequence[str]) -> None:
    for name in ("epochs", "rows", "processes", "shards"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise errors.UserError(f"{name}={getattr(flags, name)} must be at least 1.")
    folders.check_outside_checkpoints(flags.output_dir, what="output_dir")
    if flags.shards > _MOST_SHARDS:
        raise errors.UserError(f"shards={flags.shards} must be at most {_MOST_SHARDS}.")
    if flags.rows is not None and flags.rows < flags.shards:
        raise errors.UserError(
            f"rows={flags.rows} is fewer than shards={flags.shards}; lower --shards."
        )
    if pipeline_options and flags.runner is None:
        raise errors.UserError(
            f"{pipeline_options[0]!r} after -- is an option for Apache Beam; choose its runner, "
            "such as --runner=DirectRunner, or leave it out."
        )
    if flags.runner is not None and flags.processes > 1:
        raise errors.UserError(
            f"processes={flags.processes} does not apply to --runner={flags.runner}, which starts "
            "its own workers; leave --processes out (for DirectRunner: -- --direct_num_workers="
            f"{flags.processes} --direct_running_mode=multi_processing)."
        )


def _check_data(run: "TrainRun") -> None:
    """Raises `UserError` for data that cannot be cached."""
    from convt5 import data
    from convt5.training.validation import check_num_batches

    for config in (run.train_data, run.eval_data):
        if config is not None and not isinstance(config, data.DataConfig):
            raise errors.UserError(
                f"the gin files bind {type(config).__name__} as data, but only data.DataConfig "
                "(text from seqio) can be cached."
            )
    check_num_batches(run.eval_num_batches, run.eval_data)
    run.check_files_apart()


def _make_on_beam(
    argv: Sequence[str], shards: Sequence[Shard], runner: str, options: Sequence[str]
) -> None:
    """Makes shards on Apache Beam.

    Raises:
        UserError: Apache Beam is not installed, or cannot run them.
    """
    try:
        from convt5.data import beam_jobs
    except ImportError as error:
        raise errors.UserError(
            f"--runner={runner} needs Apache Beam, which is not installed ({error}); pip install "
            "'convt5[beam]', or leave --runner out and use --processes."
        ) from None
    # This file may run as `__main__`, which a worker could not import, nor `Shard` from it.
    make = functools.partial(importlib.import_module("convt5.cache").make_shard, list(argv))
    beam_jobs.run(make, [tuple(shard) for shard in shards], runner=runner, options=options)
    missing = [shard.index for shard in shards if not _is_made(shard)]
    if missing:
        raise errors.TrainingError(
            f"--runner={runner} ended without {len(missing)} of {len(shards)} shards, such as "
            f"{missing[0]}; its log says why. The same command continues with these."
        )


def _make(run: "TrainRun", flags: argparse.Namespace, argv: Sequence[str], shard: Shard) -> int:
    """Makes a shard; returns the tokens that were written."""
    from convt5.data import cached_data

    wanted = _plan(run, flags, shard)
    bound = {"train": run.train_data, "validation": run.eval_data}
    made_from = {name: dataclasses.asdict(config) for name, config in bound.items() if config}
    for config in made_from.values():
        config["mixture"] = getattr(config["mixture"], "name", config["mixture"])
    tokens, described = 0, {}
    writer = cached_data.Writer(shard.folder, identity=shard.identity)
    with contextlib.closing(writer):  # A traceback may keep it from being collected.
        for split, of_split in wanted.items():
            if not shard.index:
                described[split] = of_split.config.describe()
                print(described[split])
            tokens += _write(writer, split, of_split, flags, argv)
        tasks = task_format.of_data(run.train_data)
        writer.finish(made_from=made_from, tasks=tasks, described=described)
    return tokens


class _SplitPlan(NamedTuple):
    """What to read of a split: a share of `config`, or `most` rows of it."""

    config: Any
    most: int | None
    shard: Shard | None

    def share(self) -> Any:
        """Returns the share of the examples as seqio's; None if it is all of them."""
        import seqio

        return self.shard and seqio.ShardInfo(self.shard.index, self.shard.count)


def _plan(run: "TrainRun", flags: argparse.Namespace, shard: Shard | None) -> dict[str, _SplitPlan]:
    """Returns what to read for a shard, or for all of them; the first has all of the validation."""
    is_first = shard is None or not shard.index
    splits = ["train", "validation"] if is_first and run.eval_data is not None else ["train"]
    return {split: _plan_split(split, run, flags, shard) for split in splits}


def _plan_split(
    split: str, run: "TrainRun", flags: argparse.Namespace, shard: Shard | None
) -> _SplitPlan:
    config: Any = run.train_data if split == "train" else run.eval_data
    if split == "train":
        config = dataclasses.replace(config, num_epochs=flags.epochs, shuffle=True)
        if shard is None or shard.count == 1:
            return _SplitPlan(config, flags.rows, None)
        most = flags.rows and (flags.rows + shard.count - 1 - shard.index) // shard.count
        return _SplitPlan(config, most, shard)
    num_batches = run.eval_num_batches
    return _SplitPlan(config, num_batches and num_batches * config.batch_size, None)


def _identity(run: "TrainRun", flags: argparse.Namespace) -> str:
    """Returns what must be equal for an unfinished cache, or shard of it, to be continued."""
    wanted = _plan(run, flags, None)
    about = {split: [each.config.identity(), each.most] for split, each in wanted.items()}
    shards = [] if flags.shards == 1 else [flags.shards]
    return hashlib.sha256(json.dumps([about, flags.epochs, *shards]).encode()).hexdigest()


def _write(
    writer: Any, split: str, wanted: _SplitPlan, flags: argparse.Namespace, argv: Sequence[str]
) -> int:
    """Writes the missing rows of a split; returns its number of tokens."""
    written = writer.written(split)
    label = split if wanted.shard is None else f"{split} {wanted.shard.index}/{wanted.shard.count}"
    with contextlib.ExitStack() as stack:
        maker = None
        if flags.processes > 1 and not written.is_complete:
            load = functools.partial(load_blocks, list(argv), split, wanted.shard)
            maker = stack.enter_context(BlockWorkers(flags.processes, load)).maker
        share = wanted.share()
        batches = wanted.config.build(process_index=0, process_count=1, maker=maker, share=share)
        if split == "train":
            of_inputs = wanted.config.provider().output_features["inputs"].vocabulary
            writer.vocabulary(batches.vocabulary, batches.token_bytes, of_inputs=of_inputs)
        if written.is_complete:
            return 0
        if written.state is not None:
            print(f"{label}: resumes after {written.num_read:,} rows", flush=True)
        progress = stack.enter_context(
            Bar(sys.stderr, total=wanted.most, done=written.num_read, label=label, unit="row")
        )
        tell = _Estimate(progress, wanted, batches)
        return writer.copy(split, batches, most=wanted.most, tell=tell)


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
        self._num_shards = wanted.shard.count if wanted.shard else 1

    def __call__(self, num_rows: int) -> None:
        self._progress.update(num_rows)
        if self._counts is None or self._epochs is None:
            return
        read = self._batches.num_read()
        done = sum(epoch * self._counts[name] + first for name, (epoch, first) in read.items())
        if done:
            wanted = self._epochs * sum(self._counts.values()) / self._num_shards
            total = int(self._progress.done * wanted / done)
            total = max(total, self._progress.done)
            self._progress.total = total if self._most is None else min(total, self._most)


def load_blocks(argv: list[str], split: str, shard: Shard | None) -> Any:
    """Returns the blocks of a split, in another process of the same command."""
    arguments = command_line.parse(COMMAND, argv)
    plan = _plan_split(split, _run(arguments), arguments.flags, shard)
    return plan.config.task_blocks(plan.share())


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


def _is_made(shard: Shard) -> bool:
    from convt5.data import cache_shards

    return cache_shards.exists(shard.folder)


def _num_tokens(about: Mapping[str, Any]) -> int:
    return sum(sum(split["tokens"].values()) for split in about["splits"].values())


def _size(folder: str) -> int:
    paths: Iterator[pathlib.Path] = pathlib.Path(folder).rglob("*")
    return sum(os.path.getsize(path) for path in paths if path.is_file())


if __name__ == "__main__":
    command_line.run(main)
