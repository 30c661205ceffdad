"""Every step is recorded once, whatever happens, and people can read the numbers."""

import io
import json
import math
import struct
import sys
import types

import pytest
from tensorboardX.proto import event_pb2

from convt5 import errors
from convt5.evaluation.results import Outcome, Results, closing_results
from convt5.training import run_log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told."""
    now = [0.0]
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(run_log.time, "process_time", lambda: 2 * now[0])
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def write_steps(path, steps, *, last_step=0):
    writer = run_log.JsonLines(path, last_step=last_step)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    writer.close()


def test_each_record_is_one_line_of_json(path):
    write_steps(path, [1, 2])
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
    ]


def test_records_are_readable_before_the_file_is_closed(path):
    writer = run_log.JsonLines(path, last_step=0)
    writer.write(1, {"loss": 1.0})
    assert len(run_log.read_records(path)) == 1
    writer.close()


def test_a_run_that_continues_repeats_no_step(path):
    write_steps(path, [1, 2, 3, 4])
    write_steps(path, [3, 4, 5], last_step=2)
    assert [r["step"] for r in run_log.read_records(path)] == [1, 2, 3, 4, 5]


def test_a_line_cut_short_by_a_kill_is_dropped(path):
    write_steps(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [r["step"] for r in run_log.read_records(path)] == [1, 2]
    write_steps(path, [3], last_step=2)
    assert [r["step"] for r in run_log.read_records(path)] == [1, 2, 3]


def test_numbers_that_json_lacks_become_strings(path):
    writer = run_log.JsonLines(path, last_step=0)
    writer.write(1, {"loss": math.nan, "other": math.inf})
    writer.close()
    assert json.loads(path.read_text()) == {"step": 1, "loss": "nan", "other": "inf"}


def read_events(path):
    content = path.read_bytes()
    while content:  # Of each its length, a checksum, itself and another checksum.
        (length,) = struct.unpack("<Q", content[:8])
        yield event_pb2.Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]


@pytest.mark.parametrize("scheme", ["", "gs", "az"])
def test_tensorboard_files_are_written_to_disks_and_buckets(bucket, scheme):
    writer = run_log.TensorBoard(f"{scheme}://bucket" if scheme else bucket, last_step=0)
    writer.write(1, {"loss": 1.0, "validation/loss": 2.0})
    writer.sync()
    writer.write(2, {"loss": 0.5})
    writer.close()
    (path,) = bucket.iterdir()
    found = [(e.step, v.tag, v.simple_value) for e in read_events(path) for v in e.summary.value]
    first = [(1, "train/loss", 1.0), (1, "validation/loss", 2.0)]
    assert found == [*first, (2, "train/loss", 0.5)]


@pytest.mark.parametrize("last_step", [0, 2])
def test_tensorboard_hides_what_a_killed_process_logged_beyond_the_checkpoint(tmp_path, last_step):
    for _ in range(2):
        run_log.TensorBoard(tmp_path, last_step=last_step).close()
    starts = [
        [e.step for e in read_events(path) if e.session_log.status == event_pb2.SessionLog.START]
        for path in tmp_path.iterdir()
    ]
    assert starts == [[last_step + 1]] * 2


def test_results_of_one_evaluation_hide_none_of_another(tmp_path):
    for step in (200, 100):
        with closing_results(Results(tmp_path, {})) as results:
            results.write(Outcome("a", "test", {"accuracy": 50.0}, {}, []), step)
    files = [list(read_events(path)) for path in (tmp_path / "tensorboard").iterdir()]
    assert len(files) == 2
    assert not any(event.HasField("session_log") for events in files for event in events)


def test_wandb_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(errors.UserError, match=r"pip install 'convt5\[wandb\]'"):
        run_log.WeightsAndBiases(tmp_path, project="p", config={})


class WandbError(Exception):
    pass


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package; what `failing` names raises the error given there."""
    failing, logged = {}, []

    def call(name, *args):
        if name in failing:
            raise failing[name]
        logged.append((name, *args))

    run = types.SimpleNamespace(
        define_metric=lambda *_, **__: call("define_metric"),
        log=lambda record: call("log", record),
        finish=lambda: call("finish"),
    )
    module = types.SimpleNamespace(
        errors=types.SimpleNamespace(Error=WandbError), init=lambda **_: call("init") or run
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return types.SimpleNamespace(failing=failing, logged=logged)


def test_wandb_without_a_login_is_told_with_what_to_do(tmp_path, wandb):
    wandb.failing["init"] = WandbError("api_key not configured (no-tty)")
    with pytest.raises(errors.UserError, match=r"api_key not .*`wandb login`, set WANDB_MODE"):
        run_log.WeightsAndBiases(tmp_path, project="p", config={})


@pytest.mark.parametrize("failing", ["define_metric", "log", "finish"])
def test_wandb_that_fails_later_ends_no_run(tmp_path, wandb, failing):
    def use():
        log = run_log.WeightsAndBiases(tmp_path, project="p", config={})
        log.write(1, {"loss": 2.0})
        log.close()

    wandb.failing[failing] = BrokenPipeError("gone")
    with pytest.warns(UserWarning, match=r"wandb failed \(BrokenPipeError: gone\); the run goes"):
        use()
    expected = [("init",), ("define_metric",), ("log", {"step": 1, "loss": 2.0})]
    assert wandb.logged == expected[: 1 + ["define_metric", "log", "finish"].index(failing)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"step": "4", "loss": 1.0}', "step='4' is no number"),
        ('{"step": 4, "loss": null}', "loss=None is no number"),
        ('{"step": 4, "note": "abc"}', "note='abc' is no number"),
    ],
)
def test_a_record_without_numbers_is_named(tmp_path, line, fault):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 2, "loss": "nan"}}\n{line}\n')
    with pytest.raises(errors.UserError, match=rf"metrics\.jsonl, line 2 is damaged \({fault}\)"):
        run_log.read_metrics(tmp_path)


def test_later_processes_of_a_run_write_nothing(tmp_path):
    log = run_log.open_run_log(tmp_path, num_steps=2, last_step=0, is_first_process=False)
    log.open_files(last_step=0, wandb_project=None, config={})
    log.record(1, {"loss": 1.0})
    log.close()
    assert not list(tmp_path.iterdir())


def test_plain_lines_show_step_loss_speed_and_time_left(clock):
    out = io.StringIO()
    progress = run_log.Progress(num_steps=200, first_step=0, out=out)
    progress.record(
        50, {"loss": 3.25, "token_accuracy": 50, "tokens_per_second": 12345, "seconds_per_step": 2}
    )
    assert out.getvalue() == (
        "step 50/200 (25%)  loss 3.2500  token accuracy 50.00  12.3k tokens/s  2 s/step  "
        "ETA 5m 00s\n"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_of_more_steps_than_it_is_to_have_shows_those(clock, terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal
    progress = run_log.Progress(num_steps=10, first_step=20, out=out)
    progress.record(20, {"loss": 3.25, "seconds_per_step": 2, "validation/loss": 3.0})
    assert ("|  20/20" if terminal else "step 20/20 (100%)") in out.getvalue()
    assert "10" not in out.getvalue().replace("100%", "")


def test_what_is_minimised_is_shown_where_it_is_not_the_loss(clock):
    out = io.StringIO()
    progress = run_log.Progress(num_steps=2, first_step=0, out=out)
    same, other = {"loss": 1.5, "objective": 1.5}, {"loss": 1.5, "objective": 2.0}
    progress.record(1, same | {f"validation/{name}": value for name, value in other.items()})
    assert out.getvalue() == (
        "step 1/2 (50%)  loss 1.5000  validation loss 1.5000  objective 2.0000\n"
    )


def test_an_evaluation_shows_the_metrics_of_each_task_that_of_the_best_checkpoint_first(clock):
    out = io.StringIO()
    progress = run_log.Progress(num_steps=2, first_step=0, out=out, metric="mrpc/f1")
    found = {"loss": 0.25, "accuracy": 57.4123, "invalid": 0.5, "f1": 66.6667, "macro_f1": 1.0}
    record = {f"mrpc/{name}": value for name, value in found.items()}
    progress.record(1, record | {"cogs/exact_match": 50.0, "cogs/exact_match/structural": 0.0})
    assert out.getvalue() == (
        "step 1/2 (50%)  mrpc f1 66.67  accuracy 57.41  invalid 0.5000  cogs exact match 50\n"
    )


def test_plain_lines_come_at_intervals_except_evaluations_and_the_last(clock):
    out = io.StringIO()
    progress = run_log.Progress(num_steps=9, first_step=0, out=out, seconds_between_lines=5)
    for step, record in enumerate([{}, {}, {"validation/loss": 1.5}, {}, {}, {}, {}, {}, {}], 1):
        progress.record(step, {"loss": 2.0, **record})
        clock(2)
    shown = [line.split("/")[0] for line in out.getvalue().splitlines()]
    assert shown == ["step 1", "step 3", "step 6", "step 9"]
    assert "validation loss 1.5000" in out.getvalue()


def test_a_terminal_shows_a_bar_with_loss_and_time_left():
    out = Terminal()
    progress = run_log.Progress(num_steps=10, first_step=4, out=out)
    progress.status("compiling")
    progress.step(5, {"loss": 3.5})
    progress.record(5, {"loss": 3.25, "tokens_per_second": 999.0})
    progress.message("hello")
    progress.step(10, {"loss": 3.0})
    progress.record(10, {"loss": 3.0, "validation/loss": 4.0})
    progress.close()
    progress.message("the end")
    shown = [text.rstrip(" ") for text in out.getvalue().split("\r")]
    assert shown[1].endswith(" 4/10  compiling")
    assert any(text.endswith(" 5/10  loss 3.2500  999 tokens/s") for text in shown)
    assert "hello\n" in shown
    assert any(text.endswith("10/10  loss 3.0000  999 tokens/s") for text in shown)
    assert "step 10  validation loss 4.0000\n" in shown
    assert shown[-1] == "the end\n"


def test_every_step_shows_its_loss_in_a_terminal_before_the_first_record(clock):
    out = Terminal()
    progress = run_log.Progress(num_steps=100_000, first_step=0, out=out)
    for step in (1, 2, 3):
        clock(4)
        progress.step(step, {"loss": 10.0 - step})
    assert " 3/100000  loss 7.0000  4d 15h left" in out.getvalue()


@pytest.mark.parametrize("first_step", [0, 500])
def test_a_long_run_shows_numbers_between_its_records(clock, first_step):
    out = io.StringIO()
    progress = run_log.Progress(num_steps=1000, first_step=first_step, out=out)
    for step in range(first_step + 1, first_step + 9):
        clock(9)
        progress.step(step, {"loss": 2.0})
        if step == 1:
            progress.record(step, {"loss": 2.0, "seconds_per_step": 9.0})
    shown = [line.split("/")[0] for line in out.getvalue().splitlines()]
    assert shown == [f"step {first_step + step}" for step in (1, 5)]
    assert "loss 2.0000  9 s/step  ETA 2h 29m" in out.getvalue() or first_step


def test_means_and_rates_are_over_the_steps_since_the_last_record(clock):
    meter = run_log.Meter(flops_per_step=100.0, peak_flops=1000.0)
    meter.start()
    for loss in (1.0, 2.0):
        clock(0.5)
        meter.add_step({"loss": loss, "learning_rate": loss}, tokens=30, data_wait=0.1)
    assert meter.take() == pytest.approx(
        {
            "loss": 1.5,
            "learning_rate": 2.0,
            "seconds_per_step": 0.5,
            "data_wait_share": 0.2,
            "train_seconds": 1.0,
            "train_cpu_seconds": 2.0,
            "tokens_per_second": 60.0,
            "flops_utilization": 0.2,
        }
    )
    assert meter.take() == {}


def test_time_counts_only_while_the_meter_runs(clock):
    meter = run_log.Meter()
    clock(10)
    meter.start()
    clock(1)
    meter.stop()
    clock(10)
    meter.add_step({}, tokens=0, data_wait=0)
    assert meter.take()["train_seconds"] == 1.0


def test_an_interrupted_window_is_continued(clock):
    meter = run_log.Meter()
    meter.start()
    clock(1)
    meter.add_step({"loss": 1.0}, tokens=10, data_wait=0)
    again = run_log.Meter(state=json.loads(json.dumps(meter.state())))
    assert again.num_steps == 1
    again.start()
    clock(1)
    again.add_step({"loss": 3.0}, tokens=10, data_wait=0)
    record = again.take()
    assert record["loss"] == 2.0
    assert record["train_seconds"] == 2.0


def test_a_count_that_a_window_began_with_is_not_recorded_once_it_is_gone():
    """`skipped_updates`, where a run goes on without `skip_spikes`."""
    meter = run_log.Meter()
    meter.add_step({"loss": 1.0, "skipped_updates": 3.0}, tokens=1, data_wait=0)
    again = run_log.Meter(state=meter.state())
    again.add_step({"loss": 3.0}, tokens=1, data_wait=0)
    assert "skipped_updates" not in again.take()


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.4, "8s"), (185, "3m 05s"), (7620, "2h 07m"), (356400, "4d 03h")]
)
def test_durations_are_readable(seconds, text):
    assert run_log.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (312, "", "312"),
        (12345, "", "12.3k"),
        (7.89e9, "B", "7.89 GB"),
        (5, "B", "5 B"),
        (2e17, "FLOP", "200 PFLOP"),
    ],
)
def test_counts_are_readable(value, unit, text):
    assert run_log.short_number(value, unit) == text


@pytest.mark.parametrize("reopens", [False, True])
def test_more_of_the_last_step_joins_its_record(path, reopens):
    write_steps(path, [1, 2])
    writer = run_log.JsonLines(path, last_step=2)
    if not reopens:
        writer.write(3, {"loss": 0.25})
    last = 2 if reopens else 3
    writer.write(last, {"validation/loss": math.nan})
    writer.write(last + 1, {"loss": 0.125})
    writer.close()
    records = run_log.read_records(path)
    assert [r["step"] for r in records] == [*range(1, last + 2)]
    assert records[-2].keys() == {"step", "loss", "validation/loss"}
    assert records[-1] == {"step": last + 1, "loss": 0.125}
