"""Entry point of `python -m convt5.bench`: times operators, training steps, decoding and data.

Compared sides run in alternation in one process; results are medians.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line, gin_config
from convt5.reports import figures
from convt5.runtime import atomic_files, quiet_imports
from convt5.runtime.bars import Bar

SUITES = ("ops", "train_step", "decode", "data", "formulations", "start")
_WITHOUT_LENGTHS = frozenset({"start"})
_OF_MODELS = ("train_step", "decode")
_SERVED_BY = {
    "t5x": _OF_MODELS,
    "longest_seconds": _OF_MODELS,
    "batch_size": ("ops", *_OF_MODELS),
    "only_ours": ("ops", *_OF_MODELS),
    "channels": ("ops",),
}
"""The suites that use a flag which others do not."""
_DEFAULTS = {"batch_size": 4, "channels": 256, "longest_seconds": 20.0}
VARIANTS = ("t5", "t5_canon", "depthwise", "lightweight", "dynamic", "dynamic_canon", "long")
# Sizes of the models compared if no gin file names others.
_SIZE = {"emb_dim": 256, "mlp_dim": 1024, "num_heads": 4, "head_dim": 64, "vocab_size": 1024}
_LENGTHS = {
    "ops": (512, 2048),
    "formulations": (512, 2048),
    "train_step": (128, 512, 2048, 8192, 16384),
    "decode": (128, 512, 2048),
    "data": (256, 2048),
}
_QUICK = {
    "ops": (256,),
    "formulations": (256,),
    "train_step": (64, 128),
    "decode": (32, 64),
    "data": (256,),
}
_ROWS = {"train_step": ("encoder", "decoder"), "decode": ("decoder", "encoder")}
"""Of suites that run models: the stack with rows of the given length, and that of shorter rows."""

_FED_MODEL = "gin/models/dynamic_tiny.gin"

COMMAND = command_line.Command(
    name="bench",
    summary="Times this machine: convolution operators against a naive implementation, training "
    "steps and decoding of several models at several lengths, the data pipeline, "
    "whether each operator's default formulation is the fastest, and the start of training "
    "beside the time of importing the libraries. Writes records.jsonl, "
    "bench.md and, with the extra 'plot', plots of time, FLOPs and memory by length.",
    examples=[
        ("run everything at small sizes: a minute or two", "--quick"),
        ("time only training steps, at these lengths", "--suites=train_step --lengths=512,2048"),
        (
            "time other models",
            "--suites=train_step,decode --gin_file=gin/models/hybrid_tiny.gin "
            "--gin_file=gin/models/t5_tiny.gin --output=bench",
        ),
    ],
    flags=[
        command_line.Flag(
            "suites",
            f"suites to run, a list from {','.join(SUITES)} (default: all).",
            {"default": None},
        ),
        command_line.Flag(
            "lengths",
            "sequence lengths in tokens, such as 128,512 (default: those of each suite).",
            {"default": None},
        ),
        command_line.Flag(
            "batch_size", "rows per batch of operators and models (default: 4).", {"type": int}
        ),
        command_line.Flag(
            "channels",
            "channels of the operators, an even number (default: 256).",
            {"type": int},
        ),
        command_line.Flag(
            "repeats", "times that each implementation runs (default: 5).", {"type": int}
        ),
        command_line.Flag(
            "longest_seconds",
            "an implementation that needs more seconds than this for a step or an output is not "
            "run at greater lengths (default: 20).",
            {"type": float},
        ),
        command_line.Flag(
            "t5x",
            "a checkout of T5X: train_step and decode then also time its T5.",
            {"type": command_line.path},
        ),
        command_line.Flag(
            "only_ours",
            "times neither Hugging Face's T5 nor convolutions of PyTorch and causal-conv1d; by "
            "default they are timed if installed.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "quick",
            "uses short lengths and 2 repeats, unless these are given.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "dry_run",
            "checks flags and models, and lists what would be measured; measures nothing.",
            {"action": "store_true"},
        ),
        command_line.Flag(
            "output",
            "folder of the results (default: bench).",
            {"type": command_line.path, "default": "bench"},
        ),
        figures.SUFFIX_FLAG,
    ],
    needs_gin_file=False,
)


def main(argv: Sequence[str]) -> None:
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    _check_flags(flags)
    suites = _choose_suites(flags.suites)
    _check_served(suites, arguments)
    vars(flags).update({name: x for name, x in _DEFAULTS.items() if getattr(flags, name) is None})
    models = _models(arguments.gin_files, arguments.gin_bindings, trust=arguments.trust)
    lengths = {suite: _lengths(suite, flags) for suite in suites}
    # Deferred, so that help and usage errors are fast.
    from convt5.benchmarks import machine, report, sides, t5x

    errors.raise_all(_position_faults(models, lengths, sides.TARGETS), where="lengths")
    if flags.t5x is not None:
        t5x.check(flags.t5x)
    if flags.dry_run:
        for suite in suites:
            print(_describe(suite, models, lengths[suite]))
        return
    folder = _writable(flags.output)
    repeats = flags.repeats or (2 if flags.quick else 5)
    # Another folder does not change what is measured.
    arguments_but_folder = [text for text in argv if not text.startswith("--output=")]
    records = [machine.describe() | {"arguments": arguments_but_folder}]
    with (
        open(folder / "records.jsonl", "w", opener=atomic_files.not_followed) as file,
        Bar(sys.stderr, unit="measurement") as progress,
    ):
        print(json.dumps(records[0]), file=file, flush=True)
        for suite in suites:
            progress.tell(suite)
            for record in _run(suite, lengths[suite], flags, models, repeats, records[0]):
                print(json.dumps(record), file=file, flush=True)
                records.append(record)
                progress.update()
    table = report.text(records)
    atomic_files.replace_text(folder / "bench.md", table)
    print(table)
    written = [folder / "records.jsonl", folder / "bench.md"]
    try:
        written += report.plot(records, folder, suffix=flags.plot_suffix)
    except errors.UserError as error:  # Keep the measurements, which took long.
        print(error, file=sys.stderr)
    print(f"wrote {', '.join(map(str, written))}")


def _describe(suite: str, models: Mapping[str, Any], lengths: Sequence[int]) -> str:
    cases = ", ".join(models) if suite in _ROWS else "its own cases"
    at = f", at {', '.join(map(str, lengths))}" if lengths else ""
    return f"{suite}: {cases}{at}"


def _run(
    suite: str,
    lengths: Sequence[int],
    flags: argparse.Namespace,
    models,
    repeats: int,
    machine,
) -> Iterator[dict[str, Any]]:
    if suite == "data":
        with quiet_imports.without_tensorflow_chatter():
            from convt5.benchmarks import pipeline

        fed = gin_config.load([_FED_MODEL], [], roots=["%MODEL"]).macro("MODEL")
        num_copies = 1 if flags.quick else 8
        yield from pipeline.suite(fed, lengths, num_copies=num_copies, repeats=repeats)
        return
    if suite == "start":
        from convt5.benchmarks import start

        yield from start.suite(repeats=repeats)
        return
    if suite == "formulations":
        from convt5.benchmarks import formulations

        yield from formulations.suite(lengths, repeats=repeats)
        return
    if suite == "ops":
        from convt5.benchmarks import operators

        yield from operators.suite(
            lengths,
            batch_size=flags.batch_size,
            channels=flags.channels,
            repeats=repeats,
            copy_bytes_per_second=machine["copy_bytes_per_second"],
            with_torch=not flags.only_ours,
        )
        return
    from convt5.benchmarks import models as models_suite

    make = models_suite.decoder if suite == "decode" else models_suite.train_step
    sides = {name: functools.partial(make, config) for name, config in models.items()}
    if flags.t5x or not flags.only_ours:
        from convt5.benchmarks import peers

        like = next(iter(models.values()))
        sides |= peers.find_peers(suite, like, flags.t5x, with_hugging_face=not flags.only_ours)
    yield from models_suite.by_length(
        suite,
        sides,
        lengths,
        batch_size=flags.batch_size,
        repeats=repeats,
        longest_seconds=flags.longest_seconds,
    )


def _models(
    files: Sequence[str], bindings: Sequence[str], *, trust: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the models of the given files, or the variants at one size."""
    from convt5.modeling.architecture import ConvT5Config

    if files:
        sizes, named = list(bindings), _by_name(files)
    else:
        size = [f"architecture.ConvT5Config.{name}={value}" for name, value in _SIZE.items()]
        sizes = [*size, *bindings]
        named = {variant: f"gin/models/{variant}_tiny.gin" for variant in VARIANTS}
    models = {
        name: gin_config.load([file], sizes, roots=["%MODEL"], trusted=trust).macro("MODEL")
        for name, file in named.items()
    }
    errors.raise_all(
        (
            f"bench measures text models, and {named[name]} describes a {type(model).__name__}."
            for name, model in models.items()
            if not isinstance(model, ConvT5Config)
        ),
        where="gin files",
    )
    return models


def _by_name(files: Sequence[str]) -> dict[str, str]:
    """Returns files by their stems, or by the shortest distinct part of their paths."""
    files = list(dict.fromkeys(files))
    paths = [pathlib.PurePath(file) for file in files]
    parts = [(*path.parent.parts, path.stem) for path in paths]
    for depth in range(1, 1 + max(map(len, parts))):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(files):
            return dict(zip(names, files, strict=True))
    return {file: file for file in files}  # They differ only in their suffixes.


def _check_flags(flags: argparse.Namespace) -> None:
    faults = [
        f"--{name}={value} must be at least 1."
        for name, value in (("repeats", flags.repeats), ("batch_size", flags.batch_size))
        if value is not None and value < 1
    ]
    if flags.channels is not None and (flags.channels < 2 or flags.channels % 2):
        faults.append(f"--channels={flags.channels} must be an even number of at least 2.")
    if flags.longest_seconds is not None and not flags.longest_seconds > 0:
        faults.append(f"--longest_seconds={flags.longest_seconds} must be a positive number.")
    errors.raise_all(faults, where="flags")
    if flags.plot_suffix != figures.SUFFIX:  # Measuring needs no package that draws.
        figures.check_suffix(flags.plot_suffix)


def _check_served(suites: Sequence[str], arguments: command_line.Arguments) -> None:
    """Raises `UserError` for flags that none of the suites uses."""
    given = vars(arguments.flags)
    served_by = {text: _OF_MODELS for text in arguments.settings()[:1]}
    for name, served in _SERVED_BY.items():
        if (value := given[name]) not in (None, False):
            served_by[f"--{name}" if value is True else f"--{name}={value}"] = served
    faults = [
        f"{text} applies to the suite{'s' * (len(served) > 1)} {' and '.join(served)}; add "
        f"{'one of them' if len(served) > 1 else 'it'}, or leave the flag out."
        for text, served in served_by.items()
        if not set(served) & set(suites)
    ]
    if arguments.flags.lengths is not None and _WITHOUT_LENGTHS.issuperset(suites):
        faults.append(f"--lengths does not apply to the suite {suites[0]}; leave it out.")
    errors.raise_all(faults, where="flags")


def _choose_suites(suites: str | None) -> Sequence[str]:
    if suites is None:
        return SUITES
    names = list(dict.fromkeys(suites.split(",")))
    for name in names:
        if name not in SUITES:
            raise errors.UserError(
                f"suites={suites!r} holds {name!r}, which is none of {', '.join(SUITES)}."
                f"{errors.suggest(name, SUITES)}"
            )
    return names


def _lengths(suite: str, flags: argparse.Namespace) -> Sequence[int]:
    if flags.lengths is None or suite in _WITHOUT_LENGTHS:
        return (_QUICK if flags.quick else _LENGTHS).get(suite, [])
    try:
        # Ascending, because slow cases are skipped at greater lengths.
        lengths = sorted({int(length) for length in flags.lengths.split(",")})
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 4:
        raise errors.UserError(
            f"lengths={flags.lengths!r} must be integers of at least 4 with commas between them, "
            "such as 128,512."
        )
    return lengths


def _position_faults(
    models: Mapping[str, Any], lengths: Mapping[str, Sequence[int]], shorter_by: int
) -> Iterator[str]:
    """Yields lengths that exceed the learned positions of a model, before any is measured."""
    for suite, (longer, shorter) in _ROWS.items():
        for name, model in models.items():
            most = model.most_tokens(longer)
            if most is None:
                continue
            limit = min(most, shorter_by * model.most_tokens(shorter))
            if any(length > limit for length in lengths.get(suite, ())):
                yield (
                    f"{suite} of {name} at {max(lengths[suite])} tokens exceeds its learned "
                    f"positions; give --lengths up to {limit}, or leave out the model."
                )


def _writable(folder: pathlib.Path) -> pathlib.Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "records.jsonl").touch()
    except OSError as error:
        raise errors.UserError(
            f"output={folder} cannot be written ({error.strerror}); give a folder that can, with "
            "--output=DIR."
        ) from error
    return folder


if __name__ == "__main__":
    command_line.run(main)
