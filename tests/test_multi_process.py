"""Several processes train as one does, and a run goes on with more or fewer of them.

Real processes, joined by `jax.distributed`.
"""

import json
import os
import shutil
import signal
import subprocess
import time

import commands
import counting_run
import jax
import numpy as np
import pytest
import sampling_run

from convt5 import train
from convt5.checkpoints import reading, record

pytestmark = pytest.mark.slow
TIMES = {"seconds_per_step", "data_wait_share", "train_seconds", "train_cpu_seconds"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "run.gin"
    path.write_text(counting_run.SETTINGS)
    return path


def arguments(settings, run_dir, macros):
    macros = macros | {"RUN_DIR": run_dir}
    return [f"--gin_file={settings}", *(f"--gin.{name}={value}" for name, value in macros.items())]


@pytest.fixture(scope="module")
def train_here(settings):
    """Trains in this process, on its eight devices."""
    return lambda run_dir, **macros: train.main(arguments(settings, run_dir, macros))


@pytest.fixture(scope="module")
def start(settings):
    """Starts training with some processes of some devices each."""

    def call(run_dir, *, processes, devices, environment=None, **macros):
        return commands.start(
            [*counting_run.launcher(processes, devices), *arguments(settings, run_dir, macros)],
            env=counting_run.environment() | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return call


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def records(run_dir):
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if k not in TIMES and "tokens_per" not in k} for r in found]


def arrays(run_dir, step):
    return reading.load_everything(run_dir / "checkpoints" / str(step))


def assert_alike(run_dir, other, *, step=8):
    """Sums over devices are made in another order, so that floats agree to rounding alone."""
    ours, theirs = records(run_dir), records(other)
    assert [r["step"] for r in ours] == list(range(1, step + 1))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(reference, rel=1e-5)
        assert mine["order"] == reference["order"]
    saved = (record.read(folder / "checkpoints" / str(step)) for folder in (run_dir, other))
    assert len({about["best"]["evaluation"] for about in saved} - {""}) == 1
    trees = (arrays(run_dir, step), arrays(other, step))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *trees)


@pytest.fixture(scope="module")
def one_process(train_here, tmp_path_factory):
    """A run of one process with eight devices, on the data that two would read."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    train_here(run_dir, **{"trainer.train.data_shards": 2})
    return run_dir


@pytest.fixture(scope="module")
def two_processes(start, tmp_path_factory):
    """A run of two processes with four devices each, with all of its checkpoints."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    keep = {"checkpoint.CheckpointConfig.keep_last": 4}
    finish(start(run_dir, processes=2, devices=4, **keep))
    return run_dir


def test_two_processes_of_four_devices_train_as_one_of_eight(one_process, two_processes):
    assert_alike(two_processes, one_process)
    # The last of three batches holds five examples: one host has four of them, the other one.
    assert records(one_process)[-1]["validation/rows"] * 3 == pytest.approx(21)


def test_a_run_goes_on_with_other_numbers_of_processes_and_devices(
    start, train_here, one_process, two_processes, tmp_path, capfd
):
    run_dir = shutil.copytree(two_processes, tmp_path / "run")
    for step in (4, 6, 8):
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    train_here(run_dir, NUM_STEPS=4, **{"sharding.MeshConfig.fsdp": 2})
    assert "resumes from the checkpoint of step 2" in "".join(capfd.readouterr())
    for steps, processes in ((6, 1), (8, 2)):
        output = finish(start(run_dir, processes=processes, devices=1, NUM_STEPS=steps))
        assert f"resumes from the checkpoint of step {steps - 2}" in output
    reference = records(one_process)
    for mine, expected in zip(records(run_dir), reference, strict=True):
        # Stages that end evaluate, which the reference does at steps 4 and 8 alone.
        shared = mine.keys() & expected.keys()
        assert {"loss", "order"} <= shared
        assert {k: mine[k] for k in shared} == pytest.approx(
            {k: expected[k] for k in shared}, rel=1e-5
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        arrays(run_dir, 8),
        arrays(one_process, 8),
    )


@pytest.mark.nightly
def test_checksums_of_many_arrays_that_processes_share_do_not_wait_for_each_other(start, tmp_path):
    # Started together, sums of two arrays hung: each process had begun with another one.
    run_dir = tmp_path / "run"
    many = {"counting_run.TableConfig.spare": 24, "sharding.MeshConfig.fsdp": 4}
    finish(start(run_dir, processes=2, devices=2, NUM_STEPS=2, **many))
    saved = [name for name in arrays(run_dir, 2)["params"] if name.startswith("spare")]
    assert len(saved) == 24


def test_several_processes_take_over_the_rows_that_both_tables_have(start, train_here, tmp_path):
    settings = {
        "NUM_STEPS": 1,
        "counting_run.TableConfig.spare": 1,
        "sharding.MeshConfig.fsdp": 2,
        "trainer.train.optimizer": "@optimizer.SGDConfig()",  # Spare ones stay as they began.
    }
    train_here(tmp_path / "before", **settings)
    settings |= {
        "counting_run.TableConfig.spare_rows": 12,
        "trainer.train.seed": 1,
        "trainer.train.init_from": "@initialization.InitFrom()",
        "initialization.InitFrom.path": f"'{tmp_path / 'before'}'",
        "initialization.InitFrom.resize": ["spare"],
    }
    finish(start(tmp_path / "after", processes=2, devices=1, **settings))
    before, after = (
        np.asarray(arrays(tmp_path / name, 1)["params"]["spare/0"]) for name in ("before", "after")
    )
    assert after.shape == (12, 1)
    np.testing.assert_array_equal(after[:8], before)
    assert len(np.unique(after)) == 12


def wait_until(process, is_so):
    while not is_so():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def wait_for_records(process, run_dir, count):
    wait_until(process, lambda: len(records(run_dir)) >= count)


def test_a_death_ends_the_run_the_next_start_goes_on_and_all_stop_at_one_step(start, tmp_path):
    run_dir = tmp_path / "run"
    endless = {"processes": 2, "devices": 1, "NUM_STEPS": 100_000}
    # A step that is evaluated has its record afterwards, which a run that is stopped writes later.
    endless["trainer.train.eval_every_steps"] = 100_000
    process = start(run_dir, **endless, SAVE_EVERY=2)
    # One to lose, and one to go on from; they are written while the run trains on.
    wait_until(process, lambda: len(reading.steps_in(run_dir / "checkpoints")) > 1)
    os.kill(child_of(process.pid, index=1), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 137
    assert output.count("process 1 of the run failed (exit code 137, SIGKILL)") == 1

    # A bit of what one of the hosts saved turns over: both take the checkpoint before.
    newest = max(reading.steps_in(run_dir / "checkpoints"))
    before = len(records(run_dir))
    flip_a_bit(run_dir / "checkpoints" / str(newest))
    process = start(run_dir, **endless, SAVE_EVERY=100_000)
    wait_for_records(process, run_dir, before + 5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert f"the checkpoint of step {newest} in" in output
    assert "resumes from the checkpoint of step" in output
    assert "repeat the command to resume" in output
    saved = max(reading.steps_in(run_dir / "checkpoints"))
    assert f"stopped by SIGTERM after step {saved}" in output
    assert [r["step"] for r in records(run_dir)] == list(range(1, saved + 1))


def test_steps_before_a_failure_of_all_are_saved_and_those_before_one_of_some_are_told(
    start, two_processes, tmp_path
):
    data = {"trainer.train.train_data": "@train/counting_run.Meddling()", "SAVE_EVERY": 100}
    data["train/counting_run.Meddling.batch_size"] = 8
    name = "counting_run.Meddling.act"
    failing = {name: "@counting_run.break_down"}, {name: "@counting_run.break_the_first"}
    started = [
        start(tmp_path / str(n), processes=2, devices=4, **data | failing[n]) for n in range(2)
    ]
    all_failed, _ = started[0].communicate(timeout=300)
    assert started[0].returncode == 1
    assert "step 7 is saved; the same command resumes there" in all_failed
    assert reading.steps_in(tmp_path / "0" / "checkpoints") == [7]
    # Meanwhile the other still waits for its second process to fail.
    assert "resumes from the checkpoint of step 7" in finish(
        start(tmp_path / "0", processes=2, devices=4)
    )
    one_failed, _ = started[1].communicate(timeout=300)
    assert started[1].returncode == 1
    assert "step 7 could not be saved" in one_failed
    assert "resumes from its start" in one_failed
    assert reading.steps_in(tmp_path / "1" / "checkpoints") == []
    assert_alike(tmp_path / "0", two_processes)


def flip_a_bit(folder):
    """Turns over a bit of the parameters' numbers."""
    files = [path for path in (folder / "params").rglob("d/*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_hosts_with_different_numbers_of_examples_evaluate_as_one(tmp_path):
    pytest.importorskip("seqio")
    import tiny_reviews
    import tiny_run

    from convt5 import eval as evaluate

    folder = tmp_path / "run"
    tiny_run.write_run(folder, steps=(10,), task=tiny_reviews.NAME)
    config = (folder / "config.gin").read_text()
    (folder / "config.gin").write_text(
        config.replace("convt5 import data", "convt5 import data\nimport tiny_reviews")
    )
    assert len(tiny_run.REVIEWS) % 2  # One host has an example more than the other.
    command = counting_run.launcher(2, 1)
    command.insert(-1, "--module=convt5.eval")
    flags = [f"--checkpoint={folder}", "--trust=tiny_reviews"]
    commands.run(
        [*command, *flags, f"--output_dir={tmp_path / 'two'}"],
        env=counting_run.environment(),
        check=True,
    )
    assert evaluate.main([*flags, f"--output_dir={tmp_path / 'one'}"]) == 0
    two, one = (
        json.loads(next((tmp_path / n).rglob("step_10.json")).read_text()) for n in ("two", "one")
    )
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert two["num_examples"] == len(tiny_run.REVIEWS)
    texts = [next((tmp_path / n).rglob("step_10.jsonl")).read_text() for n in ("two", "one")]
    predictions = [[json.loads(line)["predictions"] for line in t.splitlines()] for t in texts]
    assert predictions[0] == predictions[1]


def test_rows_of_several_processes_are_sampled_as_those_of_one(tmp_path):
    command = counting_run.launcher(2, 1)
    command.insert(-1, "--module=sampling_run")
    file = tmp_path / "tokens.json"
    commands.run([*command, str(file)], env=counting_run.environment(), check=True)
    assert json.loads(file.read_text()) == sampling_run.sampled()


def child_of(pid, *, index):
    """Finds a process of the launcher by its place in the run."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/environ") as environ:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == pid and f"JAX_PROCESS_ID={index}\0" in environ.read():
                    return int(name)
        except OSError:
            continue
    raise AssertionError(f"process {index} is not running")
