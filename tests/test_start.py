"""The benchmark of starts: what it starts, and what it makes of the seconds."""

import sys

import pytest

from convt5 import errors
from convt5.benchmarks import report, start

MACHINE = {
    "suite": "machine",
    "device": "cpu",
    "processor": "one",
    "processors": 2,
    "jax": "0",
    "copy_bytes_per_second": 1e9,
    "matmul_flops": 1e9,
}


@pytest.fixture
def started(monkeypatch):
    """The commands that were started; those that import libraries take 2, 4, 6 ... seconds."""
    commands = []

    def note(folder, command):
        commands.append(command)
        if command[1] == "-c":
            return start._Timing(2.0 * sum(c[1] == "-c" for c in commands), 1.0, {})
        if "convt5.train" in command:
            run_dir = next(a for a in command if a.startswith("--gin.RUN_DIR="))[14:]
            start.pathlib.Path(run_dir).mkdir()
            cold = sum("convt5.train" in c for c in commands) <= 2
            note = {"step": 0, "start_total_seconds": 30 if cold else 5, "start_trace_seconds": 1}
            (start.pathlib.Path(run_dir) / "machines.jsonl").write_text(start.json.dumps(note))
        return start._Timing(40.0, 8.0, {})

    monkeypatch.setattr(start, "_time", note)
    monkeypatch.setattr(start.cached_data, "read_about", lambda path: {"vocab_size": 77})
    return commands


def test_cold_and_warm_starts_are_compared_with_imports_in_the_same_rounds(started):
    records = list(start.suite(repeats=3))
    modules = [command[2] for command in started]
    train, libraries = "convt5.train", start.LIBRARIES
    assert modules == ["convt5.cache", train, train, *[libraries, train, train] * 3]
    own = "--gin.architecture.ConvT5Config.vocab_size=77"
    assert [own in command for command in started if train in command] == [False, True] * 4
    assert [record["case"] for record in records] == [
        libraries,
        "quick start, cold",
        "quick start, warm",
        "quick start from a cache, cold",
        "quick start from a cache, warm",
    ]
    warm = records[2]
    assert (warm["first_step_seconds"], warm["times_imports"]) == (5, 5 / 4)
    assert (warm["trace_seconds"], warm["compile_seconds"]) == (1, 0)
    assert "times the imports alone" in report.text([MACHINE, *records])


def test_a_start_that_fails_is_told(tmp_path):
    with pytest.raises(errors.UserError, match=r"ended with exit code 3: broken"):
        start._time(
            tmp_path,
            [sys.executable, "-c", "import sys; print('broken', file=sys.stderr); sys.exit(3)"],
        )


def test_each_start_counts_its_own_processor_time(tmp_path):
    timing = start._time(tmp_path, [sys.executable, "-c", "sum(range(10**6))"])
    assert timing.cpu_seconds > 0
    assert timing.stages == {}
