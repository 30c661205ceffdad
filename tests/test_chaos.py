"""A run killed again and again ends as one left alone, and what differs would be found."""

import json
import os
import random
import sys
import types

import chaos
import commands
import counting_run
import jax.numpy as jnp
import pytest
import run_equality

from convt5 import errors
from convt5.checkpoints import checkpoint
from convt5.configuration import command_line


def write_run(folder, records, *, kernel=1.0, step=4):
    """Writes what a run of one parameter leaves."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    state = types.SimpleNamespace(
        model={"kernel": jnp.full(3, kernel)}, opt_state={}, step=jnp.asarray(step, jnp.int32)
    )
    config = checkpoint.CheckpointConfig()
    writer = checkpoint.Checkpointer(folder / "checkpoints", config, model_config=None)
    writer.save(step, state, data=checkpoint.DataPositions())
    writer.close()
    return folder


RECORDS = [{"step": step, "loss": 1 / step, "train_seconds": 0.5} for step in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("reference") / "run", RECORDS)


def test_runs_that_took_other_times_are_the_same(reference, tmp_path):
    slower = [record | {"train_seconds": 7.0, "tokens_per_second": 3.0} for record in RECORDS]
    assert run_equality.differences(write_run(tmp_path / "run", slower), reference) == []


@pytest.mark.parametrize(
    ("records", "found"),
    [
        (RECORDS[:2] + RECORDS[3:], "missing [3], twice [], too many []"),
        (RECORDS[:2] + RECORDS[1:], "missing [], twice [2], too many []"),
        ([*RECORDS, {"step": 5}], "missing [], twice [], too many [5]"),
        ([*RECORDS[:3], RECORDS[3] | {"loss": 0.26}], "step 4: loss is 0.26, not 0.25"),
        ([*RECORDS[:3], {"step": 4}], "step 4: loss is None, not 0.25"),
    ],
    ids=["missing", "twice", "too many", "value", "metric"],
)
def test_records_that_differ_are_named(reference, tmp_path, records, found):
    (line,) = run_equality.differences(write_run(tmp_path / "run", records), reference)
    assert found in line


def test_the_least_difference_of_an_array_is_named(reference, tmp_path):
    near = write_run(tmp_path / "near", RECORDS, kernel=1 + 2**-23)
    (line,) = run_equality.differences(near, reference)
    assert line == "params/kernel differs in 3 of 3 numbers"


def test_another_last_step_is_named(reference, tmp_path):
    other = write_run(tmp_path / "run", RECORDS, step=3)
    assert run_equality.differences(other, reference) == ["the last checkpoint is of step 3, not 4"]


def test_kills_are_spread_over_the_run_and_of_every_kind():
    timeline = chaos.Timeline(steps=range(1, 301), seconds=range(300), evaluated=[100, 200, 300])
    moments = chaos.plan(timeline, 30, random.Random(0))
    targets = [target for _, target in moments]
    assert len(moments) == 30
    assert targets == sorted(targets)
    assert targets[0] < 60 < 140 < targets[-1] <= 200
    assert {moment for moment, _ in moments} == set(chaos.MOMENTS)


# Five steps at a time, as a watcher that gets no processor sees them; no checkpoint is ever seen.
LEAPS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
folder.mkdir(exist_ok=True)
path = folder / "metrics.jsonl"
done = path.read_text().count("\\n") if path.exists() else 0
for step in range(done + 1, 101):
    record = {"step": step} | ({"validation/loss": 0.0} if step % 10 == 8 else {})
    with path.open("a") as file:
        file.write(json.dumps(record) + "\\n")
    if step % 5 == 0:
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_moment_that_is_not_seen_costs_no_kill(tmp_path):
    command = [sys.executable, "-c", LEAPS]
    timeline = chaos.observe(chaos.Run(command, tmp_path / "alone"), 60)
    run = chaos.Run(command, tmp_path / "killed")
    kills = chaos.under_fire(run, timeline, 4, random.Random(0), 60)
    assert {kill.moment for kill in kills} == set(chaos.MOMENTS)
    assert len(kills) == 4
    assert run.last_step() == timeline.steps[-1] == 100


@pytest.mark.parametrize("last", [1, 2])
def test_the_shortest_runs_are_killed_too(last):
    timeline = chaos.Timeline(steps=range(1, last + 1), seconds=range(last), evaluated=[last])
    assert [step for _, step in chaos.plan(timeline, 3, random.Random(0))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kills=3"], "--output_dir must name a folder"),
        (["--output_dir={file}"], "--output_dir={file} is a file"),
        (["--output_dir={file}/below"], "--output_dir={file}/below cannot be used"),
        (["--output_dir=x", "--kills=0"], "--kills=0 must be at least 1"),
        (["--output_dir=x", "--timeout=0"], "--timeout=0.0 must be a positive number"),
        (["--output_dir=x", "--train='python"], "--train='python is no command"),
        (["--output_dir=x", "--train=pythn -m"], "'pythn' is no program here"),
    ],
)
def test_a_wrong_call_is_told(tmp_path, flags, message):
    file = tmp_path / "file"
    file.touch()
    given = [flag.format(file=file) for flag in flags]
    with pytest.raises(errors.UserError) as caught:
        chaos.main(["--gin_file=gin/runs/resume_check.gin", *given])
    assert message.format(file=file) in str(caught.value)


def test_settings_that_training_refuses_are_refused(tmp_path):
    run = chaos.Run([sys.executable, "-c", "raise SystemExit(2)"], tmp_path / "alone")
    with pytest.raises(errors.UserError, match="exit code 2") as caught:
        chaos.observe(run, 60)
    assert caught.value.exit_code == 2


def test_help_shows_how():
    text = chaos.COMMAND.help()
    assert "--kills" in text
    assert command_line.parse(chaos.COMMAND, ["--gin_file=a"]).flags.kills == 30


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_killed_three_times_ends_as_one_left_alone(tmp_path):
    settings = tmp_path / "run.gin"
    settings.write_text(counting_run.SETTINGS)
    output = tmp_path / "chaos"
    done = commands.run(
        [
            *(sys.executable, chaos.__file__, f"--gin_file={settings}", "--kills=3"),
            *(f"--output_dir={output}", "--gin.NUM_STEPS=200", "--gin.SAVE_EVERY=8"),
            "--seed=1",
        ],
        env=counting_run.environment() | {"JAX_PLATFORMS": "cpu"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((output / "report.json").read_text())
    assert report["kills"] == 3
    # Each start but those killed at once gets further than the one before.
    steps = [k["step"] for k in report["each"] if k["moment"] != "starting"]
    assert steps == sorted(set(steps))
    assert report["differences"] == []
    assert sorted(os.listdir(output)) == [
        *("alone", "alone.log", "killed", "killed.log", "report.json"),
    ]
