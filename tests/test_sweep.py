"""A study runs every point of its grid once, goes on where it stopped, and sums up its results."""

import dataclasses
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
from typing import ClassVar

import commands
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quick import quick

from convt5 import cache, sweep
from convt5.analysis import costs
from convt5.configuration import command_line
from convt5.errors import TrainingError, UserError
from convt5.runtime import atomic_files
from convt5.sweeps import (
    Grid,
    Pairing,
    Study,
    analysis,
    archive,
    equal_cost,
    profile,
    reading,
    report,
    running,
)
from convt5.training.interruption import Interrupted

ROOT = pathlib.Path(__file__).resolve().parents[1]


def study(folder, **changes) -> Study:
    known = {
        "output_dir": str(folder),
        "gin_files": ["gin/runs/digits.gin"],
        "bindings": {"NUM_STEPS": 4},
        "grids": [
            Grid(axes={"schedule.Cosine.peak": [0.1, 0.2], "model": {"P": "p.gin", "C": "c.gin"}})
        ],
        "seeds": [0, 1],
        "metric": "validation/accuracy",
        "perfect": 1.0,
        "rows": ["model"],
    }
    return Study(**known | changes)


class Trainer:
    """Stands in for the trainer: records what it was told, and fails where asked."""

    def __init__(self, *, fails: str = "", exit_code: int = 1, says: str = ""):
        self.calls: list[list[str]] = []
        self.fails, self.exit_code, self.says = fails, exit_code, says

    def __call__(self, arguments, log) -> int:
        self.calls.append(list(arguments))
        if self.fails and any(self.fails in argument for argument in arguments):
            log.write_text(f"step 1\nerror: {self.says}\n")
            return self.exit_code
        peak = float(next(a for a in arguments if "peak" in a).partition("=")[2])
        records = [{"step": s, "validation/accuracy": 1 - peak / s} for s in (1, 2)]
        path = pathlib.Path(log).parent / "metrics.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return 0


def test_every_combination_is_run_with_every_seed_the_first_seed_first(tmp_path):
    trainer = Trainer()
    assert running.run_all(study(tmp_path), launch=trainer) == 8
    told = [" ".join(call) for call in trainer.calls]
    assert len(set(told)) == 8
    assert [("trainer.train.seed=0" in one) for one in told] == [True] * 4 + [False] * 4
    assert all("--gin.NUM_STEPS=4" in one for one in told)
    assert sum("--gin_file=gin/runs/digits.gin --gin_file=c.gin" in one for one in told) == 4
    folders = {a for call in trainer.calls for a in call if "run_dir" in a}
    assert len(folders) == 8


def test_points_of_equal_settings_are_one_run(tmp_path):
    axes = {"schedule.Cosine.peak": [0.1, 0.2], "equal": {"parameters": {}, "flops": {}}}
    twins = study(tmp_path, grids=[Grid(axes=axes)], seeds=[0], rows=["equal"])
    trainer = Trainer()
    assert running.run_all(twins, launch=trainer) == 2
    assert len(trainer.calls) == 2
    made = running.states(twins)
    assert [one.point.labels["equal"] for one in made] == ["parameters", "flops"] * 2
    assert all(one.is_done for one in made)
    values = [running.final_value(one.folder, "validation/accuracy") for one in made]
    assert values == [0.95, 0.95, 0.9, 0.9]
    elsewhere = study(tmp_path / "b", grids=[Grid(axes=axes)], seeds=[0], rows=["equal"])
    assert archive.write(twins, tmp_path / "results.jsonl") == 2
    assert archive.read(elsewhere, tmp_path / "results.jsonl") == 2
    assert all(one.is_done for one in running.states(elsewhere))
    # There, the same runs have the names of the other value.
    half = study(tmp_path / "c", grids=[Grid(axes=axes | {"equal": {"flops": {}}})], rows=["equal"])
    running.run_all(half, launch=Trainer())
    archive.write(half, tmp_path / "half.jsonl")
    with open(tmp_path / "half.jsonl", "a") as file:
        file.write((tmp_path / "results.jsonl").read_text())
    whole = study(tmp_path / "d", grids=[Grid(axes=axes)], rows=["equal"])
    assert archive.read(whole, tmp_path / "half.jsonl") == 4
    assert all(one.is_done for one in running.states(whole))


def test_a_value_can_be_several_settings_at_once(tmp_path):
    small = {"gin_file": "gin/models/t5_tiny.gin", "DATA": "small", "NUM_STEPS": 7}
    points = list(
        study(tmp_path, grids=[Grid(axes={"model": {"small": small, "P": "p.gin"}})]).points()
    )
    assert points[0].labels == {"model": "small", "seed": "0"}
    assert points[0].gin_files == ("gin/runs/digits.gin", "gin/models/t5_tiny.gin")
    assert points[0].bindings[:2] == ("NUM_STEPS=7", "DATA='small'")
    assert points[1].gin_files == ("gin/runs/digits.gin", "p.gin")


def test_references_stay_references_inside_of_lists(tmp_path):
    settings = {"tasks": ["@a.Task()", "plain", 3], "SIZES": [1, 2], "NAME": "%OTHER"}
    settings |= {"one": ("@a.Task()",), "two": (["%A"], 1.5)}
    point, *_ = study(tmp_path, bindings=settings).points()
    assert point.bindings[:3] == ("tasks=[@a.Task(), 'plain', 3]", "SIZES=[1, 2]", "NAME=%OTHER")
    assert point.bindings[3:5] == ("one=(@a.Task(),)", "two=([%A], 1.5)")


def test_several_runs_at_a_time_are_each_made_once(tmp_path):
    both_run, trainer = threading.Barrier(2, timeout=300), Trainer()

    def launch(arguments, log):
        both_run.wait()
        return trainer(arguments, log)

    assert running.run_all(study(tmp_path), launch=launch, processes=2) == 8
    assert len({tuple(call) for call in trainer.calls}) == len(trainer.calls) == 8


def test_a_failure_ends_the_runs_beside_it(tmp_path):
    begun = threading.Event()

    def launch(arguments, log):
        if any("peak=0.2" in argument for argument in arguments):
            begun.wait(60)
            log.write_text("error: the disk is full\n")
            return 1
        begun.set()
        return Trainer()(arguments, log)

    axes = {"schedule.Cosine.peak": [0.2, 0.1]}
    chosen = study(
        tmp_path, grids=[Grid(axes=axes)], seeds=[*range(20)], rows=["schedule.Cosine.peak"]
    )
    with pytest.raises(UserError, match="the disk is full"):
        running.run_all(chosen, launch=launch, processes=2)
    assert sum(made.status is None for made in running.states(chosen)) > 30


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are not bound here")
@given(st.integers(1, 9))
def test_runs_share_the_cores(count):
    shares = running._shares_of_cores(count)
    assert len(shares) == count
    assert all(shares)
    assert set.union(*shares) == os.sched_getaffinity(0)
    if count <= len(os.sched_getaffinity(0)):
        assert sum(map(len, shares)) == len(os.sched_getaffinity(0))


def test_runs_that_are_done_are_not_made_again(tmp_path):
    first, second = Trainer(), Trainer()
    running.run_all(study(tmp_path), launch=first, most_runs=3)
    assert running.run_all(study(tmp_path), launch=second) == 5
    calls = [*first.calls, *second.calls]
    assert len({tuple(call) for call in calls}) == len(calls) == 8
    assert running.run_all(study(tmp_path), launch=second) == 0


def test_a_run_that_diverged_is_a_result_and_any_other_failure_ends_the_study(tmp_path):
    nan = Trainer(fails="peak=0.2", says="training stopped at step 3: the loss is not finite")
    assert running.run_all(study(tmp_path / "a"), launch=nan) == 8
    found = analysis.results(study(tmp_path / "a"))
    assert sum(math.isinf(result.error) for result in found) == 4
    noisy = Trainer(fails="peak=0.2", says="the loss is not finite\nthread 3 has ended")
    assert running.run_all(study(tmp_path / "d"), launch=noisy) == 8
    full = Trainer(fails="peak=0.2", says="a checkpoint could not be written")
    told = r"exit code 1: error: a checkpoint could not(.|\n)*output"
    with pytest.raises(TrainingError, match=told):
        running.run_all(study(tmp_path / "b"), launch=full)
    refused = Trainer(fails="peak=0.2", exit_code=2, says="peak=0.2 is too much\nand more")
    with pytest.raises(UserError, match=r"exit code 2: error: peak=0.2 is too much\n") as caught:
        running.run_all(study(tmp_path / "e"), launch=refused)
    assert caught.value.exit_code == 2
    killed = Trainer(fails="peak=0.2", exit_code=-9)
    with pytest.raises(UserError, match="killed by signal 9"):
        running.run_all(study(tmp_path / "c"), launch=killed)
    assert running.run_all(study(tmp_path / "c"), launch=Trainer()) == 6


def test_a_run_that_cannot_say_why_it_failed_has_its_disk_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(running.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
    with pytest.raises(TrainingError, match="it said nothing, as no room is left on its disk"):
        running.run_all(study(tmp_path), launch=lambda *_: 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_study_after_the_runs_in_progress(tmp_path, number):
    """Whenever it comes, and however often at once, as `timeout` sends it twice."""
    ended = []

    def launch(arguments, log):
        for _ in range(2):
            os.kill(os.getpid(), number)
        time.sleep(3 * running._LOOK_SECS)
        ended.append(Trainer()(arguments, log))
        return 0

    with pytest.raises(Interrupted, match=f"stopped by {number.name}") as caught:
        running.run_all(study(tmp_path), launch=launch)
    assert caught.value.exit_code == 128 + number
    assert ended == [0]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_the_run_of_a_study_that_is_gone_stops(tmp_path):
    """Its standard input ends with the study, however that does; in a test it has ended before."""
    settings = ["--gin_file=gin/runs/resume_check.gin", f"--gin.RUN_DIR={tmp_path / 'run'}"]
    done = commands.run([sys.executable, "-m", "convt5.sweeps.train_run", *settings], cwd=ROOT)
    assert done.returncode in (-signal.SIGTERM, 143), done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_is_written_through_no_link_and_waits_for_no_pipe(tmp_path):
    chosen, mine = study(tmp_path / "study"), tmp_path / "mine"
    running.run_all(chosen, launch=Trainer())
    written = [report.REPORT_FILE, report.RESULTS_FILE, "distributions.png"]
    mine.write_text("mine")
    for name in written:
        (chosen.folder / name).symlink_to(mine)
    os.mkfifo(chosen.folder / "convergence.png")
    report.write(chosen)
    assert mine.read_text() == "mine"
    for name in [*written, "convergence.png"]:
        assert atomic_files.kind(chosen.folder / name) == "a file"
    (made, *_) = running.runs(chosen)
    metrics = made.folder / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(it is no regular file"):
        report.write(chosen)


def test_a_folder_of_other_settings_is_refused(tmp_path):
    running.run_all(study(tmp_path), launch=Trainer(), most_runs=1)
    with pytest.raises(UserError, match="holds a run of other settings"):
        running.run_all(study(tmp_path, bindings={"NUM_STEPS": 5}), launch=Trainer())


def test_results_go_on_on_another_machine_and_report_the_same(tmp_path):
    here, there = study(tmp_path / "here"), study(tmp_path / "there")
    file = tmp_path / "results" / "study.jsonl"
    running.run_all(here, launch=Trainer(fails="peak=0.2", says="the loss is not finite"))
    assert archive.write(here, file) == 8
    lines = file.read_text().splitlines(keepends=True)
    # A run that is here already stays as it is.
    running.run_all(there, launch=Trainer(), most_runs=1)
    file.write_text("".join(lines[:5]))
    assert archive.read(there, file) == 4
    assert running.run_all(there, launch=Trainer(fails="0.2", says="it is not finite")) == 3
    assert analysis.results(there) == analysis.results(here)
    assert archive.read(there, file) == 0
    third = study(tmp_path / "third")
    for end in ('{"run": ', "\x80"):
        file.write_bytes("".join(lines).encode() + end.encode("latin-1"))
        with pytest.raises(UserError, match="line 9, the last one, is truncated"):
            archive.read(third, file)
    assert not any(made.is_done for made in running.states(third))


def test_results_replace_no_run_that_was_started_and_need_a_folder_that_can_be_written(tmp_path):
    running.run_all(study(tmp_path / "a"), launch=Trainer())
    assert archive.write(study(tmp_path / "a"), tmp_path / "results.jsonl") == 8
    here = study(tmp_path / "b")
    begun = running.states(here)[0].folder  # Its status was removed, or lost.
    (begun / "checkpoints" / "50").mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 50}\n')
    assert archive.read(here, tmp_path / "results.jsonl") == 7
    assert (begun / "metrics.jsonl").read_text() == '{"step": 50}\n'
    (tmp_path / "c").write_text("a file")
    with pytest.raises(UserError, match=r"output_dir=.*/c' cannot be written \(Not a directory\)"):
        archive.read(study(tmp_path / "c"), tmp_path / "results.jsonl")


def test_results_that_are_of_no_run_of_the_study_are_named(tmp_path, capsys):
    file = tmp_path / "study.jsonl"
    here = study(tmp_path / "here")
    running.run_all(here, launch=Trainer())
    archive.write(here, file)
    fewer = study(tmp_path / "there", seeds=here.seeds[:1])
    assert archive.read(fewer, file) == 4
    message = capsys.readouterr().err
    assert f"{file}: left out 4 runs that are not of this study: " in message
    assert f"seed={here.seeds[1]}" in message
    assert archive.read(fewer, file) == 0


def test_results_under_earlier_names_of_metrics_are_taken_over(tmp_path):
    """Those of text, kept while accuracies were shares of 1, are in docs/."""
    here, there = (
        study(tmp_path / name, metric=metric, perfect=perfect)
        for name, metric, perfect in (
            ("here", "validation/accuracy", 1.0),
            ("there", "validation/token_accuracy", 100.0),
        )
    )
    file = tmp_path / "study.jsonl"
    running.run_all(here, launch=Trainer())
    archive.write(here, file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for record in line["records"]:
            record |= {"validation/loss": 1.0, "validation/cross_entropy": 1.0}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert archive.read(there, file) == len(lines)
    found, expected = ([r.error for r in analysis.results(s)] for s in (there, here))
    assert found == pytest.approx([100 * error for error in expected])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"about": {"status": "finished"}}, "line 2 is not the result of a run .it lacks settings"),
        ({"about": None}, "line 2 is not the result of a run .it holds None"),
        ({"records": 3}, "its records are no list"),
        ({"records": []}, r"the run schedule.* recorded no validation/accuracy.*nothing"),
        ({"run": ["a"]}, "is no name"),
        ({"records": [{"step": "1"}]}, "step='1' is no number"),
        ({"records": [{"loss": 1.0}]}, "is no record of a step"),
        ({"records": [{"step": 1, "validation/accuracy": [0.5]}]}, "is no number"),
        (
            {"about": {"settings": {}, "status": "diverged", "message": ["a"]}},
            r"message=\['a'\] is no text",
        ),
    ],
)
def test_a_line_that_is_no_result_is_named_and_nothing_taken_over(change, message, tmp_path):
    here, there = study(tmp_path / "here"), study(tmp_path / "there")
    file = tmp_path / "study.jsonl"
    running.run_all(here, launch=Trainer(), most_runs=2)
    archive.write(here, file)
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(first + json.dumps(json.loads(second) | change) + "\n")
    with pytest.raises(UserError, match=message):
        archive.read(there, file)
    assert not any(made.is_done for made in running.states(there))


@pytest.mark.parametrize("text", ["", "{", "null", '{"settings": {}, "status": "ended"}'])
def test_a_damaged_file_about_a_run_is_named(text, tmp_path):
    here = study(tmp_path)
    running.run_all(here, launch=Trainer(), most_runs=1)
    (file,) = tmp_path.glob("runs/*/sweep.json")
    file.write_text(text)
    with pytest.raises(UserError, match=r"sweep\.json is damaged .*; remove it"):
        running.run_all(here, launch=Trainer())
    file.unlink()
    assert running.run_all(here, launch=Trainer()) == 8


@pytest.mark.parametrize("flag", ["export_results", "import_results"])
def test_a_dry_run_refuses_results(flag):
    with pytest.raises(UserError, match=f"--{flag}=a.jsonl and --dry_run"):
        sweep.main(["--gin_file=study.gin", "--dry_run", f"--{flag}=a.jsonl"])


@pytest.mark.parametrize("flag", ["--dry_run", "--most_runs=2"])
def test_a_report_alone_refuses_what_is_about_runs_to_be_made(flag):
    with pytest.raises(UserError, match=f"--report_only and {flag}: .* leave out one of the two"):
        sweep.main(["--gin_file=study.gin", "--report_only", flag])


def test_results_that_cannot_be_taken_over_are_named(tmp_path):
    here, file = study(tmp_path / "here"), tmp_path / "study.jsonl"
    with pytest.raises(UserError, match="is not a file"):
        archive.read(here, file)
    running.run_all(here, launch=Trainer(), most_runs=1)
    archive.write(here, file)
    with pytest.raises(UserError, match="holds a run of other settings"):
        archive.read(study(tmp_path / "other", bindings={"NUM_STEPS": 5}), file)
    file.write_text("{}\n")
    with pytest.raises(UserError, match=r"line 1|study\.jsonl:1"):
        archive.read(here, file)
    with pytest.raises(UserError, match="cannot be written"):
        archive.write(here, tmp_path / "study.jsonl" / "below")


def test_a_tilde_is_the_home_folder_of_runs_and_results(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer, chosen = Trainer(), study("~/study")
    running.run_all(chosen, launch=trainer, most_runs=1)
    (made,) = [made for made in running.runs(chosen) if made.is_done]
    assert made.folder.parent == tmp_path / "study" / "runs"
    assert f"--gin.trainer.train.run_dir={str(made.folder)!r}" in trainer.calls[0]
    flags = command_line.parse(
        sweep.COMMAND, ["--gin_file=study.gin", "--export_results=~/a.jsonl"]
    ).flags
    assert flags.export_results == tmp_path / "a.jsonl"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output_dir=.*file/study' cannot be made"):
        running.run_all(study(tmp_path / "file" / "study"), launch=Trainer())


def test_results_are_exported_also_when_a_study_is_stopped(tmp_path, monkeypatch):
    chosen, file = study(tmp_path / "a"), tmp_path / "study.jsonl"
    monkeypatch.setattr(reading, "read", lambda *_: chosen)
    monkeypatch.setattr(running, "check", lambda _: None)

    def stopped(study, **_):
        make(study, launch=Trainer(), most_runs=3)
        raise KeyboardInterrupt

    make = running.run_all
    monkeypatch.setattr(running, "run_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        sweep.main(["--gin_file=study.gin", f"--export_results={file}"])
    assert len(file.read_text().splitlines()) == 3
    again = study(tmp_path / "b")
    monkeypatch.setattr(reading, "read", lambda *_: again)
    sweep.main(["--gin_file=study.gin", f"--import_results={file}", "--report_only"])
    assert analysis.results(again) == analysis.results(chosen)


def test_runs_of_a_gin_file_that_was_changed_are_not_taken_for_runs_of_what_it_holds_now(tmp_path):
    own, part = tmp_path / "own.gin", tmp_path / "part.gin"
    own.write_text("include 'gin/runs/digits.gin'\ninclude 'part.gin'\nNUM_STEPS = 3\n")
    part.write_text("LEVEL = 1\n")
    files = {"gin_files": [str(own)], "grids": [Grid(axes={"schedule.Cosine.peak": [0.1]})]}
    chosen = study(tmp_path / "s", **files, rows=["schedule.Cosine.peak"], seeds=[0])
    running.run_all(chosen, launch=Trainer())
    more = dataclasses.replace(chosen, seeds=[0, 1])
    part.write_text("# A comment.\nLEVEL  =  1\n")
    assert [made.is_done for made in running.runs(more)] == [True, False]
    part.write_text("LEVEL = 2\n")
    results = tmp_path / "results.jsonl"
    with pytest.raises(UserError, match=r"own\.gin as they were before they were changed"):
        running.run_all(more, launch=Trainer())
    part.write_text("LEVEL = 1\n")
    archive.write(chosen, results)
    part.write_text("LEVEL = 2\n")
    with pytest.raises(UserError, match="before they were changed"):
        archive.read(dataclasses.replace(chosen, output_dir=str(tmp_path / "t")), results)
    # Nor is one whose file changed while it was made.
    part.write_text("LEVEL = 1\n")
    trainer = Trainer()

    def changes_while_training(arguments, log):
        part.write_text("LEVEL = 2\n")
        return trainer(arguments, log)

    during = dataclasses.replace(chosen, output_dir=str(tmp_path / "v"))
    with pytest.raises(UserError, match="before they were changed"):
        running.run_all(during, launch=changes_while_training)
    # A run that failed goes on with what was mended.
    again = dataclasses.replace(chosen, output_dir=str(tmp_path / "u"))
    with pytest.raises(TrainingError):
        running.run_all(again, launch=Trainer(fails="peak"))
    part.write_text("LEVEL = 3\n")
    assert running.run_all(again, launch=Trainer()) == 1


def test_a_file_of_results_is_replaced_neither_after_a_failed_import_nor_by_nothing(
    tmp_path, monkeypatch
):
    chosen, file = study(tmp_path / "a"), tmp_path / "study.jsonl"
    running.run_all(chosen, launch=Trainer())
    monkeypatch.setattr(reading, "read", lambda *_: chosen)
    sweep.main(["--gin_file=study.gin", f"--export_results={file}", "--report_only"])
    whole = file.read_text()
    monkeypatch.setattr(reading, "read", lambda *_: study(tmp_path / "b"))
    with pytest.raises(UserError, match="no run of the study"):
        sweep.main(["--gin_file=study.gin", f"--export_results={file}", "--report_only"])
    assert file.read_text() == whole
    cut = whole[: len(whole) - 5]
    file.write_text(cut)
    for found in (chosen, study(tmp_path / "b")):
        monkeypatch.setattr(reading, "read", lambda *_, found=found: found)
        flags = [f"--{name}_results={file}" for name in ("import", "export")]
        with pytest.raises(UserError, match="truncated"):
            sweep.main(["--gin_file=study.gin", *flags])
        assert file.read_text() == cut


def test_a_file_of_results_that_cannot_be_written_is_named_before_any_run(tmp_path, monkeypatch):
    chosen, calls = study(tmp_path / "a"), []
    monkeypatch.setattr(reading, "read", lambda *_: chosen)
    monkeypatch.setattr(running, "run_all", lambda *_, **__: calls.append(1))
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "study.jsonl"):
        with pytest.raises(UserError, match=f"--export_results={path} cannot be written"):
            sweep.main(["--gin_file=study.gin", f"--export_results={path}"])
    assert not calls


def first_stages(calls) -> list[list[str]]:
    return [
        call
        for call in calls
        if any(f"/{running.FIRST_STAGES_FOLDER}/" in a and "run_dir" in a for a in call)
    ]


def test_a_run_starts_from_its_first_stage(tmp_path):
    trainer = Trainer()
    staged = study(tmp_path, first_stage={"NUM_STEPS": 9, "DATA": "easy"})
    assert running.run_all(staged, launch=trainer) == 8
    assert len(first_stages(trainer.calls)) == 8
    for first, own in zip(trainer.calls[::2], trainer.calls[1::2], strict=True):
        assert {"--gin.NUM_STEPS=9", "--gin.DATA='easy'"} < set(first)
        assert "--gin.NUM_STEPS=4" in own
        assert not any("init_from" in a for a in first)
        assert not any("DATA" in a for a in own)
        *shared, run_dir = first
        assert {a for a in shared if "NUM_STEPS" not in a and "DATA" not in a} < set(own)
        path = run_dir.partition("=")[2]
        assert own[-2:] == [
            "--gin.trainer.train.init_from=@initialization.InitFrom()",
            f"--gin.initialization.InitFrom.path={path}",
        ]
    assert running.run_all(staged, launch=trainer) == 0
    with pytest.raises(UserError, match="holds a run of other settings"):
        running.run_all(study(tmp_path, first_stage={"NUM_STEPS": 8}), launch=trainer)


@pytest.mark.parametrize("processes", [1, 2])
def test_equal_first_stages_are_made_once(processes, tmp_path):
    axes = {"NUM_STEPS": [4, 5, 6], "schedule.Cosine.peak": [0.1, 0.2]}
    trainer, again = Trainer(), Trainer()
    chosen = {"grids": [Grid(axes=axes)], "seeds": [0], "rows": ["NUM_STEPS"]}
    staged = study(tmp_path / "a", first_stage={"NUM_STEPS": 9}, **chosen)
    running.run_all(staged, launch=trainer, most_runs=3, processes=processes)
    assert running.run_all(staged, launch=again, processes=processes) == 3
    assert len(first_stages(trainer.calls)) == 2
    assert first_stages(again.calls) == []
    # Who takes over the results needs no first stage.
    assert archive.write(staged, tmp_path / "results.jsonl") == 6
    elsewhere = study(tmp_path / "b", first_stage={"NUM_STEPS": 9}, **chosen)
    assert archive.read(elsewhere, tmp_path / "results.jsonl") == 6
    assert running.run_all(elsewhere, launch=again) == 0


def test_nothing_starts_from_a_first_stage_that_diverged(tmp_path):
    nan = Trainer(fails="first_stages", says="training stopped at step 3: the loss is not finite")
    staged = study(tmp_path, first_stage={"NUM_STEPS": 9})
    assert running.run_all(staged, launch=nan) == 8
    assert len(nan.calls) == 8
    for made in running.states(staged):
        assert made.status == "diverged"
        assert made.message.startswith("its first stage diverged")
        assert "not finite" in made.message


def test_the_model_of_a_first_stage_has_the_widths_of_the_run(tmp_path):
    """Though another length would give it others."""
    lengths = {"data.DataConfig.encoder_length": 1040, "data.DataConfig.decoder_length": 8}
    models = {"t5": "gin/models/t5_tiny.gin", "dynamic": "gin/models/dynamic_tiny.gin"}

    def widths(point) -> set[str]:
        return {b for b in point.bindings if b.startswith("architecture.ConvT5Config.")}

    def last(settings, **changes):
        paired = Study(
            output_dir=str(tmp_path),
            gin_files=["gin/runs/gaps.gin"],
            bindings=settings,
            grids=[Grid(axes={"model": models})],
            rows=["model"],
            pairing=Pairing(axis="model", reference="t5", by="flops"),
            **changes,
        )
        return list(paired.points())[-1]

    shorter = {"data.DataConfig.encoder_length": 272}
    point = last(lengths, first_stage=shorter)
    assert "data.DataConfig.encoder_length=272" in point.first.bindings
    assert widths(point.first) == widths(point) != widths(last(lengths | shorter))


def test_a_first_stage_that_the_trainer_does_not_know_is_refused_before_any_run(tmp_path):
    staged = study(
        tmp_path,
        grids=[Grid(axes={"schedule.Cosine.peak": [0.1]})],
        rows=["schedule.Cosine.peak"],
        first_stage={"STEPS": 9},
    )
    with pytest.raises(UserError, match=r"first stage of the run .*macro STEPS=9 is not used"):
        running.check(staged)


def test_a_run_whose_name_is_too_long_for_a_folder_has_a_shorter_one(tmp_path):
    axes = {f"axis_{i}": ["ä" * 20, "b" * 30] for i in range(8)}
    chosen = study(tmp_path, grids=[Grid(axes=axes)], rows=["axis_0"], seeds=[0])
    names = [point.name for point in chosen.points()]
    assert len(set(names)) == len(names) == 2**8
    assert {len(name.encode()) > 250 for name in names} == {True}
    for name in names[:1]:
        (tmp_path / name).mkdir()
    assert names == [point.name for point in chosen.points()]
    longest = Grid(axes={"a": ["b" * (255 - len("a=,seed=0"))]})
    (point,) = study(tmp_path, grids=[longest], rows=["a"], seeds=[0]).points()
    assert point.name == f"a={'b' * 246},seed=0"


def test_results_are_json_also_where_values_are_no_numbers(tmp_path):
    def launch(arguments, log):
        records = [{"step": s, "validation/accuracy": v} for s, v in ((1, "inf"), (2, "nan"))]
        path = pathlib.Path(log).parent / "metrics.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return 0

    running.run_all(study(tmp_path), launch=launch)
    report.write(study(tmp_path))
    text = (tmp_path / "results.json").read_text()
    saved = json.loads(text, parse_constant=pytest.fail)
    assert saved["runs"][0]["curve"] == [[1, "inf"], [2, "inf"]]


def test_a_run_without_the_metric_is_refused(tmp_path):
    with pytest.raises(UserError, match="recorded no validation/f1"):
        running.run_all(study(tmp_path, metric="validation/f1"), launch=Trainer())


def test_a_metric_that_a_finished_run_lacks_is_no_divergence(tmp_path):
    here, file = study(tmp_path), tmp_path / "study.jsonl"
    running.run_all(here, launch=Trainer())
    archive.write(here, file)
    wrong = {"metric": "validation/acuracy"}
    message = "recorded no validation/acuracy.* Did you mean validation/accuracy"
    with pytest.raises(UserError, match=f"peak=0.1,model=P,seed=0 {message}"):
        report.write(study(tmp_path, **wrong))
    with pytest.raises(UserError, match=f"line 1: the run schedule.* {message}"):
        archive.read(study(tmp_path / "there", **wrong), file)
    exported = file.read_text()
    with pytest.raises(UserError, match=message):
        archive.write(study(tmp_path, **wrong), file)
    assert file.read_text() == exported


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ["modle"]}, "rows='modle' is none of the axes .*Did you mean model"),
        (
            {"versus": "schedule.Cosine.peak"},
            "must be one of rows=.*, or set --gin.sweeps.Study.versus=None",
        ),
        (
            {"grids": [Grid(axes={"model": [1, 2, 3]})], "versus": "model"},
            "versus='model' must have two values, but has 1, 2, 3; give the axis two, or set "
            "--gin.sweeps.Study.versus=None",
        ),
        ({"seeds": []}, "seeds=.* must hold at least one"),
        ({"seeds": [1, 1]}, "must differ"),
        ({"grids": [Grid(axes={"A": [1]}), Grid(axes={"B": [1]})]}, "same axes"),
        ({"grids": [Grid(axes={"model": [1]})] * 2}, "two runs are called"),
        ({"perfect": None}, "metric='validation/accuracy' is better when higher"),
        ({"perfect": None, "metric": "task/bleu"}, "metric='task/bleu' is better when higher"),
        ({"metric": "validation/loss"}, "metric='validation/loss' is better when lower"),
        (
            {"bindings": {"trainer.train.seed": 7}},
            r"bindings\['trainer.train.seed'\]=7 would have no effect, as seeds gives every run "
            "its own; leave it out, and set sweeps.Study.seeds",
        ),
        ({"bindings": {"SEED": 7}, "seed_name": "SEED"}, r"\['SEED'\]=7 would have no effect"),
        (
            {"grids": [Grid(axes={"model": {"P": {"convt5.training.trainer.train.seed": 7}}})]},
            r"\['model'\]\['P'\]\['convt5.training.trainer.train.seed'\]=7 would have no effect",
        ),
        (
            {"bindings": {"trainer.train.run_dir": "here"}},
            "run_dir.*'here' would have no effect, as output_dir",
        ),
        (
            {
                "grids": [Grid(axes={"model": {"P": {"trainer.train.init_from": None}}})],
                "first_stage": {"NUM_STEPS": 2},
            },
            "init_from.*None would have no effect, as first_stage",
        ),
    ],
)
def test_studies_that_cannot_be_are_named(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        study(tmp_path, **changes)


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"A": []},
        {"A": 3},
        {"seed": [1]},
        {"A": [0.1, 0.1]},
        {"A": [1, "1"]},
        {"A": {1: 2, "1": 3}},
    ],
)
def test_grids_that_cannot_be_are_named(axes):
    with pytest.raises(UserError, match="axes"):
        Grid(axes=axes)


def test_values_of_an_axis_that_a_later_one_would_replace_are_named():
    with pytest.raises(UserError, match=r"\['P'\]\['PEAK'\]=3 would replace .* 'PEAK' before it"):
        Grid(axes={"PEAK": [1, 2], "model": {"P": {"PEAK": 3}}})
    assert Grid(axes={"model": {"P": {"PEAK": 3}}, "PEAK": [1, 2]}).values("PEAK")  # For all of it.


def test_a_run_is_known_whether_its_study_states_a_macro_or_its_value(tmp_path):
    stated = study(tmp_path, bindings={"NUM_STEPS": 4, "schedule.Cosine.total_steps": 4})
    running.run_all(stated, launch=Trainer())
    named = {"NUM_STEPS": 4, "schedule.Cosine.total_steps": "%NUM_STEPS"}
    assert all(made.is_done for made in running.states(study(tmp_path, bindings=named)))
    for other in (named | {"NUM_STEPS": 5}, named | {"schedule.Cosine.total_steps": "%PEAK"}):
        with pytest.raises(UserError, match="other settings"):
            running.states(study(tmp_path, bindings=other))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"PEEK": [0.1]}, "macro PEEK=0.1 is not used by anything.*PEAK"),
        ({"schedule.Cosine.peek": [0.1]}, "no parameter 'peek'.*Did you mean peak"),
        ({"PEAK": [0.1, -1.0]}, "PEAK=-1.0.*peak=-1.0 must be a positive"),
        ({"model": ["gin/models/vit_q_micro.gin"]}, "vit_q_micro"),
    ],
)
def test_an_axis_that_the_trainer_does_not_know_is_refused_before_any_run(axes, message, tmp_path):
    chosen = study(
        tmp_path,
        gin_files=["gin/runs/images.gin"],
        grids=[Grid(axes=axes)],
        bindings={},
        rows=[*axes],
    )
    with pytest.raises(UserError, match=message):
        running.check(chosen)


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory):
    """A cache of a few rows, which studies of pre-training look at before they begin."""
    tmp_path = tmp_path_factory.mktemp("rows")
    (tmp_path / "text.txt").write_text("".join(f"text number {i}\n" for i in range(50)))
    vocabulary = "pretraining.text_span_corruption.vocabulary=@vocabularies.characters()"
    cache.main(
        [
            "--gin_file=gin/runs/pretrain_text.gin",
            f"--gin.TEXT={tmp_path}/text.txt",
            "--gin.VOCABULARY=unused",
            f"--gin.{vocabulary}",
            "--rows=10",
            f"--output_dir={tmp_path}/cache",
        ]
    )
    return tmp_path / "cache"


# tests/test_paper.py checks the studies of papers, which have no grid of their own.
STUDIES = [
    f"gin/studies/{path.name}"
    for path in sorted((ROOT / "gin/studies").glob("*.gin"))
    if path.stem not in ("paper", "paper_budget")
]


@pytest.mark.parametrize(
    "name", quick(STUDIES, chosen=["gin/studies/early_convolutions_digits.gin"])
)
def test_every_study_of_the_package_can_be_made(name, request, capsys, tmp_path):
    required = []
    if any(f"/{study}" in name for study in ("pretraining", "recipes")):
        required = [f"--gin.CACHE={request.getfixturevalue('tiny_cache')}"]
    if "/finetuning" in name:
        # The fixture skips where the data of these studies is absent.
        data = request.getfixturevalue("shared_data")
        required = [f"--gin.VOCABULARY={data}/vocab/t5_cc_all_32000.model"]
    if "/finetuning_cached" in name:
        task = {"CACHE": str(request.getfixturevalue("tiny_cache")), "NUM_STEPS": 100}
        required = [f"--gin.TASKS={ {'trec6': task} }"]
    arguments = [f"--gin_file={name}", f"--gin.OUTPUT_DIR={tmp_path}", "--dry_run", *required]
    assert sweep.main(arguments) == 0
    assert "0 of them made" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pretraining", "pretraining_budget", "pretraining_rates"])
def test_the_schedule_of_a_study_ends_with_the_steps_that_an_axis_gives(name):
    axes = {"NUM_STEPS": [700], "model": {"t5": {"schedule.Cosine.peak": 0.1}}}
    bindings = ["CACHE=c", f"sweeps.Grid.axes={axes}", "sweeps.Study.pairing=None"]
    bindings += ["sweeps.Study.rows=['model']", "sweeps.Study.versus=None"]
    (point,) = reading.read([f"gin/studies/{name}.gin"], bindings).points()
    files = [ROOT / file for file in (*point.gin_files, "gin/models/t5_tiny.gin")]
    run = equal_cost.train_run(
        tuple(map(str, files)), (*point.bindings, "RUN_DIR=r"), (), point.is_own
    )
    assert run.num_steps == run.schedule.total_steps == 700


@pytest.mark.parametrize("over", [None, "schedule.Cosine.peak"])
def test_values_near_the_largest_float_count_as_diverged(tmp_path, over):
    axes = {"schedule.Cosine.peak": [1e308, 1.7e308], "model": {"P": "p.gin", "C": "c.gin"}}
    loss = {"metric": "validation/loss", "perfect": None, "over": over}
    huge = study(tmp_path, grids=[Grid(axes=axes)], **loss)

    def train(arguments, log):
        value = 1.7e308 if "--gin_file=p.gin" in arguments else 2.0
        record = {"step": 2, "validation/loss": value}
        log.with_name("metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 0

    assert running.run_all(huge, launch=train) == 8
    assert "diverged" in report.write(huge)


def test_a_report_holds_distributions_best_settings_differences_and_steps(tmp_path):
    axes = {
        "schedule.Cosine.peak": [0.1, 0.4],
        "optimizer": ["adamw.gin", "sgd.gin"],
        "m": ["p.gin"],
    }
    chosen = study(tmp_path, grids=[Grid(axes=axes)], rows=["m", "optimizer"], versus="optimizer")
    running.run_all(chosen, launch=Trainer(fails="sgd.gin", says="the loss is not finite"))
    with pytest.raises(UserError, match=r"no run of the study in .* is done"):
        report.write(study(tmp_path / "empty"))
    text = report.write(chosen)
    adamw, sgd = (next(x for x in text.splitlines() if f"{n}.gin" in x) for n in ("adamw", "sgd"))
    assert [cell.strip() for cell in adamw.split("|")[3:-1]] == [
        *("4", "0"),  # Two rates and two seeds.
        *("0.0500", "0.0500", "0.1250", "0.2000", "0.2000"),
    ]
    assert [cell.strip() for cell in sgd.split("|")[3:5]] == ["4", "4"]
    for name in (
        "report.md",
        "report.html",
        "results.json",
        "distributions.png",
        "convergence.png",
    ):
        assert (tmp_path / name).stat().st_size > 100
    saved = json.loads((tmp_path / "results.json").read_text())
    assert len(saved["runs"]) == 8


def row_of(text: str, title: str, *first: str) -> list[str]:
    """The cells of the row of the table under a title that begins with these."""
    lines = text[text.index(f"## {title}") :].splitlines()
    rows = ([c.strip() for c in line.split("|")] for line in lines)
    return next(row for row in rows if row[1 : 1 + len(first)] == [*first])


def test_a_line_that_diverged_is_compared_with_nothing(tmp_path):
    chosen = study(tmp_path, versus="model")
    running.run_all(chosen, launch=Trainer(fails="c.gin", says="the loss is not finite"))
    text = report.write(chosen)
    assert row_of(text, "C minus P", "0.0500") == ["", "0.0500", "diverged", "-", ""]
    title = "Steps of the best settings to an error that all reach, but for those that diverged"
    assert row_of(text, title, "P") == ["", "P", "0.0500", "2", ""]
    assert row_of(text, title, "C") == ["", "C", "-", "-", ""]


@pytest.mark.parametrize(("seeds", "found"), [("01", [((), 0.25, 0.1)]), ("12", [])])
def test_a_difference_is_over_the_seeds_that_both_have(seeds, found, tmp_path):
    chosen = study(tmp_path, versus="model")
    first = analysis.Best({}, 0.45, (0.25, 0.65), (), ("0", "3"))
    second = analysis.Best({}, 0.2, (0.1, 0.3), (), tuple(seeds))
    assert list(analysis.differences(chosen, {("P",): first, ("C",): second})) == found


@pytest.mark.parametrize("over", [None, "clip"])
def test_an_infinite_value_of_an_axis_stands_beside_the_others(over, tmp_path):
    axes = {"clip": {"1": 1.0, "inf": None}, "schedule.Cosine.peak": [0.1], "model": ["p.gin"]}
    chosen = study(tmp_path, grids=[Grid(axes=axes)], over=over)
    running.run_all(chosen, launch=Trainer())
    assert "inf" in report.write(chosen)
    assert chosen.is_numeric("schedule.Cosine.peak")
    assert not chosen.is_numeric("clip")


class TestPlots:
    """What is drawn, without looking at it."""

    STUDY = study("unused")

    def axes(self):
        pytest.importorskip("matplotlib")
        from matplotlib.figure import Figure

        return Figure().subplots()

    def best(self, *values, errors=None):
        curve = tuple(enumerate(values, start=1))
        errors = errors or (values[-1],)
        return analysis.Best({}, sum(errors) / len(errors), errors, curve)

    def test_an_error_of_zero_stands_where_it_is(self):
        from convt5.sweeps import plots

        axes = self.axes()
        plots._convergence(
            self.STUDY, axes, {"P": self.best(0.5, 0.01, 0.0), "C": self.best(0.9, 0.2)}
        )
        heights = axes.transData.transform([(1, y) for y in (0.0, 0.01, 0.2)])[:, 1]
        assert 0 < heights[0] < heights[1] < heights[2]
        assert heights[1] - heights[0] < heights[2] - heights[1]

    def test_errors_above_zero_have_a_logarithmic_axis(self):
        from convt5.sweeps import plots

        axes = self.axes()
        plots._convergence(self.STUDY, axes, {"P": self.best(0.5, 0.01)})
        assert axes.get_yscale() == "log"

    def test_what_diverged_is_named(self):
        from convt5.sweeps import plots

        axes, inf = self.axes(), math.inf
        lines = {"P": self.best(0.5), "C": self.best(inf), "D": self.best(inf, errors=(inf, 0.1))}
        plots._convergence(self.STUDY, axes, lines)
        assert axes.get_legend_handles_labels()[1] == ["P", "C (diverged)", "D (1 of 2 diverged)"]

    @pytest.mark.parametrize("errors_found", [[-3.0, -1.0], [0.0], [2.0, 4.0], [-2.0]])
    def test_distributions_end_to_the_right_of_all_errors(self, errors_found):
        from convt5.sweeps import plots

        axes = self.axes()
        plots._distributions(self.STUDY, axes, {"P": [result(error) for error in errors_found]})
        assert max(axes.get_lines()[0].get_xdata()) > max(errors_found)


def result(error: float, *, seed: int = 0, **labels: str) -> analysis.Result:
    curve = ((1, 2 * error), (2, error))
    return analysis.Result({"model": "P", **labels, "seed": str(seed)}, curve, error)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(errors_found, share):
    found = analysis.distribution([result(error) for error in errors_found])
    assert found.quantile(share) == pytest.approx(np.quantile(errors_found, share), abs=1e-12)
    assert found.quantile(0.5) == pytest.approx(statistics.median(errors_found))


@pytest.mark.parametrize(
    ("errors_found", "quartiles"),
    [
        ([1.0, math.inf], [math.inf, math.inf, math.inf]),
        ([1.0, 2.0, math.inf], [1.5, 2.0, math.inf]),
        ([1.0, 1.0, 1.0, math.inf, math.inf], [1.0, 1.0, math.inf]),
        ([math.inf] * 2, [math.inf] * 3),
    ],
)
def test_quantiles_beside_runs_that_diverged_are_infinite(errors_found, quartiles):
    found = analysis.distribution([result(error) for error in errors_found])
    assert [found.quantile(share) for share in (0.25, 0.5, 0.75)] == quartiles


def test_differences_are_paired_by_seed_with_students_intervals():
    def best(errors, seeds):
        return analysis.Best({}, statistics.fmean(errors), errors, (), seeds)

    first = best((10.0, 20.0, math.inf, 5.0), ("0", "1", "2", "3"))
    gains = analysis.paired(first, best((23.0, 11.0, 1.0), ("1", "0", "2")))
    assert gains == [3.0, 1.0]
    # Student's t of one degree of freedom: 12.706 times the standard error of 1.
    assert analysis.half_interval(gains) == pytest.approx(12.706, rel=1e-4)
    assert analysis.half_interval([4.0]) is None


class TestDifferences:
    """What one value of an axis adds over the other, in one panel."""

    GAINS: ClassVar = {"a": (1.0, 2.0, 3.0), "b": (-2.0, -2.0, -2.0)}

    def study(self, folder) -> Study:
        axes = {"task": ["a", "b"], "model": ["m.gin", "trec6"], "start": ["scratch", "new"]}
        return study(
            folder,
            grids=[Grid(axes=axes)],
            seeds=[0, 1, 2],
            metric="task/accuracy",
            perfect=100.0,
            rows=["model", "start"],
            versus="start",
            over="task",
        )

    def profiles(self, asked) -> dict:
        found = [
            analysis.Result(
                {"task": task, "model": model, "start": start, "seed": str(seed)}, (), error
            )
            for task, gains in self.GAINS.items()
            for model in ("m.gin", "trec6")
            for seed, gain in enumerate(gains)
            for start, error in (("scratch", 50.0 + seed), ("new", 50.0 + seed - gain))
        ]
        return profile.lines(asked, found)

    def test_gains_of_the_metric_are_positive_where_errors_fall(self, tmp_path):
        asked = self.study(tmp_path)
        found = profile.differences(asked, self.profiles(asked))
        assert found == {(m,): {t: [*g] for t, g in self.GAINS.items()} for m in ("m.gin", "trec6")}
        (table,) = profile._difference_table(asked, self.profiles(asked))
        assert table.title == "task/accuracy: new minus scratch"
        assert [row[1:] for row in table.rows] == [["+2.0 ± 2.5", "-2.0 ± 0.0"]] * 2

    def test_one_panel_shows_zero_means_and_intervals(self, tmp_path):
        pytest.importorskip("matplotlib")
        from matplotlib.figure import Figure

        asked, axes = self.study(tmp_path), Figure().subplots()
        profile.draw_differences(asked, axes, self.profiles(asked))
        assert axes.get_ylabel() == "accuracy, percentage points\nnew minus scratch"
        assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
        assert axes.get_legend_handles_labels()[1] == ["m", "TREC-6"]
        assert any(set(line.get_ydata()) == {0} for line in axes.get_lines())
        low, high = axes.get_ylim()
        assert low < -2
        assert high > 4.4  # 2 and its interval.


def test_the_best_setting_is_by_the_mean_over_all_seeds(tmp_path):
    chosen = study(tmp_path)
    axis = "schedule.Cosine.peak"
    found = analysis.best(
        chosen,
        [
            result(0.3, seed=0, **{axis: "0.1"}),
            result(0.3, seed=1, **{axis: "0.1"}),
            result(0.1, seed=0, **{axis: "0.2"}),
            result(0.7, seed=1, **{axis: "0.2"}),
            result(0.0, seed=0, **{axis: "0.4"}),  # Its other seed is not done.
        ],
    )
    assert found.labels == {axis: "0.1"}
    assert found.errors == (0.3, 0.3)
    assert found.curve == ((1, 0.6), (2, 0.3))


@pytest.mark.parametrize(
    ("curve", "error", "steps"),
    [
        (((10, 0.5), (20, 0.3)), 0.4, 15.0),
        (((10, 0.5), (20, 0.3)), 0.5, 10.0),
        (((10, 0.5), (20, 0.3)), 0.2, None),
        (((10, math.inf), (20, 0.3)), 0.3, 20.0),
        ((), 0.3, None),
    ],
)
def test_steps_to_an_error_are_linear_between_evaluations(curve, error, steps):
    assert analysis.steps_to(curve, error) == (pytest.approx(steps) if steps else steps)


def test_the_common_error_is_that_of_the_slower_line():
    def best(error):
        return analysis.Best({}, error, (error,), ((1, 0.9), (2, error)))

    bests = {("d", "P"): best(0.2), ("d", "C"): best(0.1), ("e", "P"): best(0.5)}
    assert analysis.common_errors(bests) == {("d",): 0.2, ("e",): 0.5}
    diverged = analysis.Best({}, math.inf, (math.inf,), ((1, 0.9), (2, math.inf)))
    assert analysis.common_errors(bests | {("e", "C"): diverged}) == {("d",): 0.2, ("e",): 0.5}
    assert analysis.common_errors({("e", "C"): diverged}) == {}


STUDY = """# A study of two runs.
from __gin__ import dynamic_registration
from convt5 import sweeps
sweeps.Study.output_dir = '{folder}'
sweeps.Study.gin_files = ['gin/runs/digits.gin']
sweeps.Study.bindings = {{
    'NUM_STEPS': 80,
    'images.ImageDataConfig.batch_size': 16,
    'trainer.train.log_every_steps': 1,
    'trainer.train.statistics': None,
    'architecture.ViTConfig.num_layers': 1}}
sweeps.Study.grids = [@sweeps.Grid()]
sweeps.Study.seeds = [0]
sweeps.Study.metric = 'validation/accuracy'
sweeps.Study.perfect = 100.0
sweeps.Study.rows = ['model']
sweeps.Grid.axes = {{
    'schedule.Cosine.peak': [0.001, 1e30], 'model': ['gin/models/vit_p_micro.gin']}}
"""


@pytest.mark.slow
def test_a_study_that_is_stopped_goes_on_in_the_middle_of_a_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    file, folder = tmp_path / "study.gin", tmp_path / "study"
    file.write_text(STUDY.format(folder=folder))
    arguments = [f"--gin_file={file}", "--processes=2"]
    monkeypatch.setenv("XLA_FLAGS", commands.QUICK_COMPILATION)  # One device.
    command = [sys.executable, "-m", "convt5.sweep", *arguments]
    first = commands.start(command, cwd=ROOT, stderr=subprocess.PIPE)

    def outputs():
        return [*folder.glob("runs/*peak=0.001*/output.txt")]

    commands.wait_until(lambda: any("step 1/" in o.read_text() for o in outputs()), first, secs=600)
    first.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM; what the runs in progress" in first.communicate(timeout=600)[1]
    assert first.returncode == 143
    (output,) = outputs()
    assert "stopped by SIGTERM" in output.read_text()
    assert sweep.main(arguments) == 0
    assert "resumes from the checkpoint" in output.read_text()
    # The other run may have been quicker than the signal, which is then all that is told.
    (other,) = folder.glob("runs/*peak=1e+30*/output.txt")
    assert "is not finite" in other.read_text()
    assert "2 of 2 runs are done" in capsys.readouterr().out


class TestOverAnAxis:
    """The metric against an axis of numbers, at equal costs."""

    def study(self, folder, **changes) -> Study:
        known = {
            "output_dir": str(folder),
            "gin_files": ["gin/runs/gaps.gin"],
            "bindings": {
                "NUM_STEPS": 60,
                "architecture.ConvT5Config.emb_dim": 32,
                "architecture.ConvT5Config.mlp_dim": 64,
                "architecture.StackConfig.num_layers": 1,
            },
            "grids": [
                Grid(
                    axes={
                        "equal": {"parameters": {}, "flops": {}},
                        "gap": {
                            "8": {"GAP": 8, "ENCODER_LENGTH": 24},
                            "64": {"GAP": 64, "ENCODER_LENGTH": 80},
                        },
                        "model": {
                            "dynamic": "gin/models/dynamic_tiny.gin",
                            "t5": "gin/models/t5_tiny.gin",
                        },
                    }
                )
            ],
            "metric": "validation/accuracy",
            "perfect": 1.0,
            "rows": ["equal", "model"],
            "over": "gap",
            "pairing": Pairing(axis="model", reference="t5", by="equal"),
        }
        return Study(**known | changes)

    @pytest.mark.slow
    def test_every_run_has_the_cost_of_the_reference_at_its_own_length(self, tmp_path):
        costs_of = {}
        for point in self.study(tmp_path).points():
            run = equal_cost.describe(point)
            cost = costs.model_cost(run.model, **equal_cost.lengths(run))
            labels = point.labels
            found = cost.parameters if labels["equal"] == "parameters" else cost.forward_flops
            costs_of[labels["equal"], labels["gap"], labels["model"]] = found
        assert len(costs_of) == 8
        for (equal, gap, _), cost in costs_of.items():
            assert cost == pytest.approx(costs_of[equal, gap, "t5"], rel=0.01)

    def test_the_report_shows_the_metric_against_the_axis(self, tmp_path):
        def launch(arguments, log):
            path = pathlib.Path(log).parent / "metrics.jsonl"
            record = {"step": 4, "validation/accuracy": 0.5 if "GAP=8" in str(arguments) else 0.25}
            path.write_text(json.dumps(record | {"train_seconds": 7.0}) + "\n")
            return 0

        asked = self.study(tmp_path)
        # Of eight points, as those of t5 are the same at both costs.
        assert running.run_all(asked, launch=launch, most_runs=5) == 5
        pytest.importorskip("matplotlib")
        text = report.write(asked)
        assert "5 of 6 runs are done" in text
        head, _, first, *_ = (line for line in text.splitlines() if line.startswith("|"))
        assert [cell.strip() for cell in head.split("|")[1:-1]] == ["equal", "model", "8", "64"]
        cells = [cell.strip() for cell in first.split("|")[1:-1]]
        assert cells == ["parameters", "dynamic", "0.500", "0.250"]
        assert row_of(text, "Costs", "parameters", "dynamic")[8] == "7"
        assert (tmp_path / "profiles.png").stat().st_size > 10_000

    def test_a_model_has_one_colour_in_all_panels(self, tmp_path):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        asked = self.study(tmp_path)
        line = {"8": analysis.Best({}, 0.5, (0.5,), ())}

        def colours(*names):
            axes = figure.add_subplot()
            profile.draw_on(asked, axes, dict.fromkeys(names, line))
            return dict(zip(names, (drawn.get_color() for drawn in axes.lines[::2]), strict=True))

        both = colours("dynamic", "t5")
        assert both["dynamic"] != both["t5"]
        assert colours("t5")["t5"] == both["t5"]

    def test_values_below_zero_and_above_perfect_can_be_seen_in_all_panels(self, tmp_path):
        figure = pytest.importorskip("matplotlib.figure").Figure()
        asked = self.study(tmp_path)
        panels = figure.subplots(1, 4, sharey=True)
        for axes, error in zip(panels, (1.2, -0.8, 0.5, math.inf), strict=True):
            line = {"8": analysis.Best({}, error, (error,), ())}
            profile.draw_on(asked, axes, {"t5": line})
            low, high = axes.get_ylim()
        assert low < -0.2
        assert high > 1.8

    def test_points_that_diverged_are_named_and_cost_nothing(self, tmp_path):
        def launch(arguments, log):
            told, path = str(arguments), pathlib.Path(log).parent / "metrics.jsonl"
            record = {"step": 4, "validation/accuracy": 0.65, "train_seconds": 7.0}
            if "GAP=64" in told and ("seed=1" in told or "dynamic" in told):
                path.write_text(json.dumps(record | {"train_seconds": 1.0}) + "\n")
                log.write_text("error: the loss is not finite\n")
                return 1
            path.write_text(json.dumps(record) + "\n")
            return 0

        asked = self.study(tmp_path, seeds=[0, 1], pairing=None)
        running.run_all(asked, launch=launch)
        text = report.write(asked)
        title = "validation/accuracy against gap"
        first = row_of(text, title, "parameters", "dynamic")
        assert first[3:5] == ["0.650 (0.650..0.650)", "diverged"]
        assert row_of(text, title, "parameters", "t5")[4] == "1 of 2 diverged (0.650)"
        assert row_of(text, "Costs", "parameters", "dynamic", "64")[8] == "-"
        assert row_of(text, "Costs", "parameters", "t5", "64")[8] == "7"

    @pytest.mark.parametrize(
        "parts", [{"trainer.train.grad_accum_steps": 4}, {"trainer.train.frozen": ["^encoder/"]}]
    )
    def test_an_update_in_parts_takes_less_memory(self, parts, tmp_path):
        whole, split = (
            self.study(tmp_path, bindings=self.study(tmp_path).bindings | more, pairing=None)
            for more in ({}, parts)
        )
        memory = [
            profile._text_cost(equal_cost.describe(point))[2]
            for point in (next(whole.points()), next(split.points()))
        ]
        assert memory[1] < memory[0]

    def test_the_axis_can_be_one_of_names(self, tmp_path):
        asked = self.study(tmp_path, over="equal", rows=["gap", "model"], seeds=[0, 1])
        assert asked.labels("equal") == ["parameters", "flops"]
        assert asked.labels("gap") == ["8", "64"]

        def launch(arguments, log):
            path = pathlib.Path(log).parent / "metrics.jsonl"
            accuracy = 0.5 if "seed=1" in str(arguments) else 0.25
            path.write_text(json.dumps({"step": 4, "validation/accuracy": accuracy}) + "\n")
            return 0

        running.run_all(asked, launch=launch)
        pytest.importorskip("matplotlib")
        text = report.write(asked)
        head, _, first, *_ = (line for line in text.splitlines() if line.startswith("|"))
        assert [cell.strip() for cell in head.split("|")[3:-1]] == ["parameters", "flops"]
        assert [cell.strip() for cell in first.split("|")[3:-1]] == ["0.375 (0.250..0.500)"] * 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"over": "model"},
                "over='model' must be none of rows.*, or set --gin.sweeps.Study.over=None",
            ),
            ({"over": "gaps"}, "over='gaps' is none of the axes .*over=None. Did you mean gap"),
            (
                {"pairing": Pairing(axis="models", reference="t5", by="equal")},
                "pairing.axis='models' is none of the axes .*or set .*.Study.pairing=None",
            ),
        ],
    )
    def test_wrong_settings_are_named(self, changes, message, tmp_path):
        with pytest.raises(UserError, match=message):
            self.study(tmp_path, **changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"reference": "T5"},
                "reference='T5' is no value of model, .* or set --gin.sweeps.Study.pairing=None",
            ),
            ({"by": "seconds"}, "by='seconds' gives 'seconds'; it must be one of"),
        ],
    )
    def test_a_pairing_that_cannot_be_is_refused(self, changes, message, tmp_path):
        known = {"axis": "model", "reference": "t5", "by": "equal"}
        wrong = self.study(tmp_path, pairing=Pairing(**known | changes))
        with pytest.raises(UserError, match=message):
            list(wrong.points())
