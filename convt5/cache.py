"""Entry point of `python -m convt5.cache`: makes the rows that a run reads once, and keeps them.

Tokenising, corrupting and packing are done here; `cached_data` reads the rows as they lie in files.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from convt5 import errors, gin_config, task_format
from convt5.configuration import command_line, gin_files
from convt5.runtime import quiet_imports

COMMAND = command_line.Command(
    name="cache",
    summary="Makes the rows of a run's data once, tokenised, corrupted and packed, so that "
    "training reads them at the speed of files and needs no TensorFlow to start.",
    examples=[
        (
            "your own text, twice over with different masks",
            "--gin_file=gin/runs/pretrain_text.gin --gin.TEXT='corpus/*.txt.gz' "
            "--gin.VOCABULARY=corpus/spm.model --epochs=2 --output_dir=corpus/cache",
        ),
        (
            "the first million rows of C4",
            "--gin_file=gin/runs/pretrain_c4.gin --rows=1000000 --output_dir=c4_cache",
        ),
    ],
    flags=[
        command_line.Flag("output_dir", "a folder that does not exist yet.", {"required": True}),
        command_line.Flag(
            "epochs",
            "passes over the training data, 1; each corrupts it anew.",
            {"type": int, "default": 1},
        ),
        command_line.Flag(
            "rows", "training rows, at most; all by default.", {"type": int, "default": None}
        ),
    ],
)


def main(argv: Sequence[str]) -> None:
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    for name in ("epochs", "rows"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise errors.UserError(f"{name}={getattr(flags, name)} must be at least 1.")
    with quiet_imports.without_tensorflow_chatter():
        from convt5 import cached_data, data
        from convt5.training.validation import check_num_batches

    settings = _settings(arguments)
    configs = {"train": settings["train_data"], "validation": settings.get("eval_data")}
    for config in configs.values():
        if config is not None and not isinstance(config, data.DataConfig):
            raise errors.UserError(
                f"the gin files bind {type(config).__name__} as data; a cache is made of "
                "data.DataConfig, text from seqio."
            )
    check_num_batches(settings.get("eval_num_batches"), configs["validation"])
    output_dir = os.path.expanduser(flags.output_dir)
    writer = cached_data.Writer(pathlib.Path(output_dir))
    started, tokens = time.perf_counter(), 0
    for split, config in configs.items():
        if config is None:
            continue
        batches, most = _batches(split, config, flags, settings)
        if split == "train":
            of_inputs = config.provider().output_features["inputs"].vocabulary
            writer.vocabulary(batches.vocabulary, batches.token_bytes, of_inputs=of_inputs)
        with tqdm(
            total=most,
            desc=split,
            unit=" rows",
            unit_scale=True,
            file=sys.stderr,
            disable=None,
        ) as progress:
            for found in writer.write(split, _first_rows(batches, most, progress.update)):
                tokens += found
    made_from = {name: dataclasses.asdict(c) for name, c in configs.items() if c is not None}
    for config in made_from.values():
        config["mixture"] = getattr(config["mixture"], "name", config["mixture"])
    about = writer.finish(made_from=made_from, tasks=task_format.of_data(configs["train"]))
    rows = ", ".join(f"{split['rows']:,} of {name}" for name, split in about["splits"].items())
    seconds = time.perf_counter() - started
    print(
        f"wrote {rows}: {tokens:,} tokens in {seconds:.0f}s ({tokens / seconds:,.0f}/s), "
        f"{_size(output_dir) / 1e6:,.0f} MB\n"
        f"train on it: python -m convt5.train --gin_file=gin/runs/pretrain_cached.gin "
        f"--gin.CACHE={flags.output_dir} --gin.RUN_DIR=..."
    )


def _batches(
    split: str, config: Any, flags: argparse.Namespace, settings: Mapping[str, Any]
) -> tuple[Any, int | None]:
    """Returns one host's batches of everything, and how many rows are wanted at most."""
    if split == "train":
        config = dataclasses.replace(config, num_epochs=flags.epochs, shuffle=True)
        most = flags.rows
    else:
        num_batches = settings.get("eval_num_batches")
        most = num_batches and num_batches * config.batch_size
    return config.build(process_index=0, process_count=1), most


def _first_rows(
    batches: Iterable[Mapping[str, Any]], most: int | None, tell: Callable[[int], Any]
) -> Iterator[Mapping[str, Any]]:
    """Yields batches of `most` rows in all, or of everything, telling how many each has."""
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


def _settings(arguments: command_line.Arguments) -> Mapping[str, Any]:
    """Returns the arguments of `trainer.train`; a cache needs no run directory."""
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
    from convt5 import trainer

    return config.arguments(trainer.train)


def _size(folder: str) -> int:
    paths: Iterator[pathlib.Path] = pathlib.Path(folder).rglob("*")
    return sum(os.path.getsize(path) for path in paths if path.is_file())


if __name__ == "__main__":
    command_line.run(main)
