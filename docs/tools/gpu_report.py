"""Measures this GPU within a time limit, and writes the tables of docs/gpu.md.

`python docs/tools/gpu_report.py --page=docs/gpu.md` first compiles the programs of all parts side
by side, while tests run. The parts then run alone, one after another, each in a process of its own
with its share of the time, and load their programs. Results are kept as they come: what a part
measured before it failed or ran out of time stays, and the other parts run.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import chaos
from kept_programs import write_tables

from convt5 import errors
from convt5.benchmarks import report
from convt5.configuration import command_line
from convt5.training.run_log import read_records

MARK = "gpu"
MODELS = ("dynamic_small", "t5_small")
_ENVIRONMENT = {
    # Processes and PyTorch share the GPU, and tests, which otherwise choose the CPU, take it.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_PLATFORMS": "",
    # Otherwise XLA tries kernels for each product, and compiles a training step for minutes.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    # Keeps the programs that compile fast too: there are hundreds.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
_PREPARATION = 0.4
"""Most of the time that compiling side by side takes."""

_RESULT = "result.json"
_HALF_WRITTEN = "ignore:Error reading persistent compilation cache"


class Part(NamedTuple):
    """A command, and its share of the time."""

    arguments: Sequence[str]
    share: float


def parts(settings: argparse.Namespace, bindings: Sequence[str]) -> Mapping[str, Part]:
    """Returns what is timed, in its order; `bindings` are settings of the models."""
    ops = [f"--channels={settings.channels}"]
    models = ["--only_ours", *map(_gin_file, MODELS), *bindings]
    few = min(settings.repeats, 2)  # Decoding the longest rows takes 10 s each time.
    return {
        "ops": Part(_bench(settings, "ops", *ops), 0.25),
        "train_step": Part(_bench(settings, "train_step", *models), 0.35),
        "decode": Part(_bench(settings, "decode", *models, f"--repeats={few}"), 0.4),
    }


def preparations(
    settings: argparse.Namespace, bindings: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Returns the tests, and for each program a command that runs it once and so compiles it."""
    workers = min(4, os.cpu_count() or 1)
    # A test that reads a program while another process writes it compiles it.
    chosen = ["-m", "gpu and not slow and not nightly"]
    tests = ["pytest", f"-n{workers}", *chosen, "-W", _HALF_WRITTEN]
    commands = {"tests": [*tests, *settings.tests]}
    for length in settings.lengths.split(","):
        once = ["--only_ours", f"--lengths={length}", "--repeats=1"]
        cases: dict[str, tuple[str, ...]] = {"ops": ("ops", f"--channels={settings.channels}")}
        for name in MODELS:
            for suite in ("train_step", "decode"):
                cases[f"{suite}_{name}"] = (suite, _gin_file(name), *bindings)
        for case, (suite, *more) in cases.items():
            name = f"prepare/{case}_{length}"
            output = f"--output={settings.output / name}"
            commands[name] = _bench(settings, suite, *more, *once, output)
    return commands


def _bench(settings: argparse.Namespace, suite: str, *more: str) -> list[str]:
    """Returns a command that times a suite; `more` has precedence."""
    folder = f"--output={settings.output / suite}"
    sizes = [f"--{name}={getattr(settings, name)}" for name in ("lengths", "batch_size", "repeats")]
    return ["convt5.bench", f"--suites={suite}", folder, *sizes, *more]


def _gin_file(model: str) -> str:
    return f"--gin_file=gin/models/{model}.gin"


def run(
    commands: Mapping[str, Sequence[str]], output: pathlib.Path, seconds: float
) -> Iterator[str]:
    """Runs commands side by side; yields and keeps how each ended. Their output goes to logs."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(_started(arguments, output, output / name))
            for name, arguments in commands.items()
        }
        while running:
            time.sleep(0.05)
            for name, process in list(running.items()):
                code, taken = process.poll(), time.monotonic() - began
                if code is None and taken < seconds:
                    continue
                chaos.kill(running.pop(name))  # Also what it started, which would disturb others.
                end = "complete" if not code else f"failed with code {code}"
                end = f"stopped after its {seconds:.0f} s" if code is None else end
                yield _kept(name, f"{name}: {end}, {taken:.0f} s", output / name)


@contextlib.contextmanager
def _started(
    arguments: Sequence[str], output: pathlib.Path, folder: pathlib.Path
) -> Iterator[subprocess.Popen]:
    """Starts a module of Python in a process group of its own, which ends with the context."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = {"JAX_COMPILATION_CACHE_DIR": str(output.absolute() / "programs")}
    command = [sys.executable, "-m", *arguments]
    with (
        open(folder / "log.txt", "w") as log,
        chaos.started(command, log, {**_ENVIRONMENT, **programs, **os.environ}) as process,
    ):
        yield process


def _kept(name: str, told: str, folder: pathlib.Path) -> str:
    """Keeps how a command ended; where there is no result, adds the last line of its log."""
    if ": complete," not in told or not (folder / "records.jsonl").exists():
        told += f"; {_last_line(folder)}"
    (folder / _RESULT).write_text(json.dumps(told))
    return told


def text(folder: pathlib.Path, names: Sequence[str]) -> str:
    """Returns the tables of what was measured, and how each part ended."""
    records, ends = [], []
    for name in names:
        result = folder / name / _RESULT
        if result.exists():
            ends.append(f"- {json.loads(result.read_text())}")
        # Programs were compiled before: that time would be the time to load them.
        records += [
            {key: value for key, value in record.items() if key != "compile_seconds"}
            for record in read_records(folder / name / "records.jsonl")
        ]
    shown = report.text(records) if any(r["suite"] == "machine" for r in records) else ""
    return "\n".join([shown, *ends]) + "\n"


def _last_line(folder: pathlib.Path) -> str:
    lines = (folder / "log.txt").read_text(errors="replace").split("\n")
    told = [line for line in lines if re.search(r"\w", line)]
    return errors.clip(told[-1].strip(), limit=200) if told else "no output"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python docs/tools/gpu_report.py",
        allow_abbrev=False,
        epilog="Flags --gin.NAME=VALUE are settings of the models.",
    )
    parser.add_argument("--output", type=command_line.path, default=pathlib.Path("gpu"))
    parser.add_argument("--page", type=command_line.path, help="writes the tables into this page")
    parser.add_argument("--minutes", type=float, default=9.5, help="limit of all parts together")
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--batch_size", type=int, default=8, help="rows")
    parser.add_argument("--channels", type=int, default=1024, help="channels of the operators")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tests", nargs="*", default=[], help="files of tests (default: marked ones)"
    )
    settings, bindings = parser.parse_known_args(argv)
    unknown = [each for each in bindings if not each.startswith("--gin.")]
    if unknown:
        raise errors.UserError(f"{unknown[0]} is no flag of this command; --help lists them.")
    if not settings.minutes > 0:
        raise errors.UserError(f"--minutes={settings.minutes} must be a positive number.")
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    measure(settings, bindings)


def measure(settings: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Compiles side by side, then runs the parts alone; writes the tables after each."""
    prepared, timed = preparations(settings, bindings), parts(settings, bindings)
    shares = sum(part.share for part in timed.values())
    stages = [(prepared, _PREPARATION)]
    for name, part in timed.items():
        stages.append(({name: part.arguments}, part.share / shares))
        shares -= part.share
    left = 60 * settings.minutes
    for commands, share in stages:
        began = time.monotonic()
        for told in run(commands, settings.output, left * share):
            print(told, flush=True)
        # What a stage does not need is for those after it.
        left -= time.monotonic() - began
        tables = text(settings.output, [*timed, "tests"])
        (settings.output / "gpu.md").write_text(tables)
        if settings.page is not None:
            write_tables(settings.page, MARK, tables)


if __name__ == "__main__":
    command_line.run(main)
