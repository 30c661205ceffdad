"""The command that measures a GPU: what was measured stays, and every part runs on any machine."""

import functools
import json
import os
import re

import commands
import gpu_report
import pytest
from gpu_report import Part

from convt5 import bench, errors
from convt5.benchmarks import machine

TINY = [
    *("--lengths=8", "--batch_size=2", "--channels=8", "--repeats=1"),
    "--tests=tests/test_attention.py::test_nothing_reaches_across_segments_or_from_padding",
    *(
        f"--gin.architecture.ConvT5Config.{name}={value}"
        for name, value in {"emb_dim": 16, "mlp_dim": 16, "head_dim": 4, "vocab_size": 32}.items()
    ),
    "--gin.architecture.StackConfig.num_layers=1",
]
MACHINE = {
    **{"suite": "machine", "device": "gpu 1", "processor": "p", "platform": "gpu", "jax": "1"},
    **{"processors": 2, "copy_bytes_per_second": 1e9, "matmul_flops": 1e11},
}


@pytest.fixture
def page(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text("before\n<!-- gpu -->\n<!-- end -->\nafter\n")
    return page


@pytest.mark.nightly
def test_every_part_runs_to_its_end_on_a_cpu(tmp_path, page, monkeypatch):
    in_processes, called = gpu_report.run, []

    def run(commands, output, seconds):
        """Calls benchmarks in this process, which has imported all; tests need one of their own."""
        for name, (module, *arguments) in commands.items():
            if module == "pytest":
                yield from in_processes({name: [module, *arguments, "-n0"]}, output, seconds)
                continue
            bench.main(arguments)
            called.append(name)
            yield gpu_report._kept(name, f"{name}: complete, 0 s", output / name)

    monkeypatch.setattr(gpu_report, "run", run)
    monkeypatch.setattr(machine, "describe", functools.cache(machine.describe))
    gpu_report.main([*TINY, f"--output={tmp_path}/gpu", f"--page={page}"])
    text = page.read_text()
    for name in ("ops", "train_step", "decode", "tests"):
        assert f"- {name}: complete" in text
    for case in ("depthwise K=3", "dynamic_small", "t5_small"):
        assert f"| {case} " in text
    # All that is timed was compiled before.
    models = [f"{suite}_{name}" for name in gpu_report.MODELS for suite in ("train_step", "decode")]
    compiled = [f"prepare/{case}_8" for case in ("ops", *models)]
    assert called == [*compiled, "ops", "train_step", "decode"]


def test_parts_that_fail_or_take_too_long_keep_what_they_measured(tmp_path, page, monkeypatch):
    def parts(settings, bindings):
        assert (settings.channels, bindings) == (1024, ["--gin.MODEL_NAME='m'"])
        sleep = ["timeit", "-n1", "-r1", "import time; time.sleep(600)"]
        return {"ops": Part(sleep, 0.001), "decode": Part(["no_such_module"], 1.0)}

    commands = {"tests": ["no_such_tests"], "prepare/ops": ["no_such_suite"]}
    monkeypatch.setattr(gpu_report, "preparations", lambda *_: commands)
    monkeypatch.setattr(gpu_report, "parts", parts)
    (folder := tmp_path / "gpu" / "ops").mkdir(parents=True)
    row = {"suite": "decode", "case": "a", "length": 8, "seconds": 1.5, "tokens_per_second": 12.0}
    lines = [json.dumps(MACHINE), json.dumps(row), '{"suite": "dec']
    (folder / "records.jsonl").write_text("\n".join(lines))
    gpu_report.main([f"--output={tmp_path}/gpu", f"--page={page}", "--gin.MODEL_NAME='m'"])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "gpu 1" in text
    (row,) = (line for line in text.splitlines() if re.match(r"\| +8 ", line))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["8", "a", "1.5", "12", "-"]
    assert "- ops: stopped after its 1 s" in text
    assert "- decode: failed with code 1" in text
    assert "No module named no_such_module" in text
    assert "- tests: failed with code 1" in text
    assert "prepare" not in text
    assert "no_such_suite" in (tmp_path / "gpu" / "prepare" / "ops" / "log.txt").read_text()


def test_commands_run_side_by_side_and_end_with_what_they_started(tmp_path):
    begin = f"import os, pathlib, subprocess, time; here = pathlib.Path({str(tmp_path)!r})"
    meet = "while len(list(here.glob('*.begun'))) < 2: time.sleep(0.01)"  # The other one too.
    write = "print(child.pid, os.environ['JAX_COMPILATION_CACHE_DIR'], flush=True); child.wait()"
    command = ["timeit", "-n1", "-r1", begin, "(here / f'{os.getpid()}.begun').touch()", meet]
    command += ["child = subprocess.Popen(['sleep', '600'])", write]
    ends = list(gpu_report.run({"a": command, "b/c": command}, tmp_path, 2.0))
    assert [end[: end.index(",")] for end in ends] == [
        f"{name}: stopped after its 2 s" for name in ("a", "b/c")
    ]
    for name in ("a", "b/c"):
        pid, programs = (tmp_path / name / "log.txt").read_text().split()
        assert programs == os.environ["JAX_COMPILATION_CACHE_DIR"]
        # The system ends it a moment after the signal.
        commands.wait_until(functools.partial(_has_ended, int(pid)))


def _has_ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--minutes=0", "--minutes=0.0 must be a positive number"),
        ("--length=8", "--length=8 is no flag"),
        ("--page=nowhere.md", "--page=nowhere.md cannot be read"),
    ],
)
def test_wrong_flags_are_told(flag, message):
    with pytest.raises(errors.UserError, match=message):
        gpu_report.main([flag])
