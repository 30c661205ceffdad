"""Measures this GPU within a time limit, and writes the tables of docs/gpu.md.

`python docs/tools/gpu_report.py --page=docs/gpu.md` runs each part in a process of its own, with
its share of the time. Results are kept as they come: what a part measured before it failed or ran
out of time stays, and the other parts run.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kept_programs import write_tables

from convt5 import errors
from convt5.benchmarks import report
from convt5.configuration import command_line
from convt5.training.run_log import read_records

MARK = "gpu"
MODELS = ("dynamic_small", "t5_small")
_ENVIRONMENT = {
    # PyTorch shares the GPU, and tests, which otherwise choose the CPU, take it.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_PLATFORMS": "",
    # Otherwise XLA tries kernels for each product, and compiles a training step for minutes.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
_RESULT = "result.json"


class Part(NamedTuple):
    """A command, and its share of the time."""

    arguments: Sequence[str]
    share: float


def parts(settings: argparse.Namespace, bindings: Sequence[str]) -> Mapping[str, Part]:
    """Returns the parts in their order; `bindings` are settings of the models."""

    def bench(suite: str, *more: str) -> list[str]:
        folder = f"--output={settings.output / suite}"
        sizes = [f"--lengths={settings.lengths}", f"--repeats={settings.repeats}"]
        return ["convt5.bench", f"--suites={suite}", folder, *sizes, *more]

    files = [f"--gin_file=gin/models/{name}.gin" for name in MODELS]
    rows = f"--batch_size={settings.batch_size}"
    workers = min(4, os.cpu_count() or 1)
    tests = ["pytest", f"-n{workers}", "-m", "gpu and not slow", *settings.tests]
    return {
        "ops": Part(bench("ops", f"--channels={settings.channels}", rows), 0.2),
        "train_step": Part(bench("train_step", rows, "--only_ours", *files, *bindings), 0.35),
        "decode": Part(bench("decode", rows, "--only_ours", *files, *bindings), 0.25),
        "tests": Part(tests, 0.2),
    }


def run(name: str, part: Part, folder: pathlib.Path, seconds: float) -> str:
    """Runs a part; returns and keeps how it ended. Its output goes to a log."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with open(folder / "log.txt", "w") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *part.arguments],
                env={**_ENVIRONMENT, **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
            end = "complete" if not done.returncode else f"failed with code {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"stopped after its {seconds:.0f} s"
    told = f"{name}: {end}, {time.monotonic() - began:.0f} s"
    if end != "complete" or not (folder / "records.jsonl").exists():
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
        records += read_records(folder / name / "records.jsonl")
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
    chosen = parts(settings, bindings)
    left, shares = 60 * settings.minutes, sum(part.share for part in chosen.values())
    for name, part in chosen.items():
        began = time.monotonic()
        # What a part does not need is for those after it.
        print(run(name, part, settings.output / name, left * part.share / shares), flush=True)
        left -= time.monotonic() - began
        shares -= part.share
        tables = text(settings.output, list(chosen))
        (settings.output / "gpu.md").write_text(tables)
        if settings.page is not None:
            write_tables(settings.page, MARK, tables)


if __name__ == "__main__":
    command_line.run(main)
