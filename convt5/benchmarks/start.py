"""Times the start of training, from the beginning of a process to the end of its first step.

Each start is a process of its own, with the time of importing the libraries alone beside it. A cold
start finds no compiled programs, a warm one those of the starts before it.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from convt5 import errors
from convt5.data import cached_data

LIBRARIES = "import jax, flax, optax, tensorflow, seqio"
_QUICK_START = "--gin_file=gin/runs/quickstart.gin"
_NUM_STEPS = 2
_ROWS = 64
_STAGES = ("imports", "plan", "data", "load", "trace", "compile")
_OWN_CACHE = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


class _Timing(NamedTuple):
    """The wall-clock and processor seconds of a process, and the stages of its start."""

    seconds: float
    cpu_seconds: float
    stages: Mapping[str, float]


def suite(*, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields records for cold and warm starts of the quick start, from text and from a cache.

    Raises:
        UserError: a process failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        cache = folder / "rows"
        _run(
            folder,
            "convt5.cache",
            [_QUICK_START, f"--rows={_ROWS * 16}", f"--output_dir={cache}"],
        )
        vocab_size = cached_data.read_about(str(cache))["vocab_size"]
        starts = {
            "quick start": [_QUICK_START],
            "quick start from a cache": [
                "--gin_file=gin/runs/pretrain_cached.gin",
                f"--gin.CACHE={cache}",
                f"--gin.architecture.ConvT5Config.vocab_size={vocab_size}",
                "--gin.cached_data.CachedDataConfig.batch_size=16",
            ],
        }
        yield from _starts(folder, starts, repeats)


def _starts(
    folder: pathlib.Path, starts: Mapping[str, Sequence[str]], repeats: int
) -> Iterator[dict[str, Any]]:
    cold = {case: _start(folder, settings) for case, settings in starts.items()}
    imports: list[_Timing] = []
    warm: dict[str, list[_Timing]] = {case: [] for case in starts}
    for _ in range(repeats):  # In turns, so that other load affects all alike.
        imports.append(_time(folder, [sys.executable, "-c", LIBRARIES]))
        for case, settings in starts.items():
            warm[case].append(_start(folder, settings))
    base = _median(imports)
    yield {"suite": "start", "case": LIBRARIES, "length": 0, **_whole(base)}
    for case in starts:
        for kind, timing in (("cold", cold[case]), ("warm", _median(warm[case]))):
            first = timing.stages["total"]
            yield {
                "suite": "start",
                "case": f"{case}, {kind}",
                "length": 0,
                "first_step_seconds": first,
                "times_imports": first / base.seconds,
                **{f"{stage}_seconds": timing.stages.get(stage, 0.0) for stage in _STAGES},
                **_whole(timing),
            }


def _whole(timing: _Timing) -> dict[str, float]:
    return {"seconds": timing.seconds, "cpu_seconds": timing.cpu_seconds}


def _start(folder: pathlib.Path, settings: Sequence[str]) -> _Timing:
    """Trains for two steps in a new run directory."""
    with tempfile.TemporaryDirectory(dir=folder) as run_dir:
        changes = [f"--gin.NUM_STEPS={_NUM_STEPS}", f"--gin.RUN_DIR={run_dir}/run"]
        timing = _run(folder, "convt5.train", [*settings, *changes])
        note = (pathlib.Path(run_dir) / "run" / "machines.jsonl").read_text().splitlines()[-1]
    begin, end = "start_", "_seconds"
    stages = {
        name.removeprefix(begin).removesuffix(end): value
        for name, value in json.loads(note).items()
        if name.startswith(begin)
    }
    return timing._replace(stages=stages)


def _run(folder: pathlib.Path, module: str, arguments: Sequence[str]) -> _Timing:
    return _time(folder, [sys.executable, "-m", module, *arguments])


def _time(folder: pathlib.Path, command: Sequence[str]) -> _Timing:
    environment = {k: v for k, v in os.environ.items() if k not in _OWN_CACHE}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        command,
        env=environment | {"XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise errors.UserError(
            f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr.strip()}"
        )
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Timing(seconds, cpu_seconds, {})


def _median(timings: Sequence[_Timing]) -> _Timing:
    """Returns the timing with the median seconds to the first step, or altogether."""
    middle = statistics.median_low(t.stages.get("total", t.seconds) for t in timings)
    return next(t for t in timings if t.stages.get("total", t.seconds) == middle)
