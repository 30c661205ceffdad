"""What goes wrong around a run: damaged checkpoints, disks, clocks, data; nothing saved is lost."""

import dataclasses
import errno
import io
import itertools
import json
import logging
import math
import random
import re
import resource
import shutil
import sys
import threading
import time
import types
import warnings

import counting_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_equality
from flax import nnx
from quick import quick

from convt5 import errors
from convt5.checkpoints import checkpoint, late_errors, reading
from convt5.modeling import sharding
from convt5.runtime import amounts
from convt5.training import run_log, schedule, spikes, watchdog
from convt5.training.trainer import train

STEPS = (1, 2)


def make_state(seed):
    draw = np.random.default_rng(seed)
    model = {
        "kernel": jnp.asarray(draw.normal(size=(32, 16)), jnp.float32),
        "scale": jnp.asarray(draw.normal(size=(16,)), jnp.bfloat16),
    }
    moments = {
        "count": jnp.asarray(seed, jnp.int32),
        "kernel": jnp.asarray(draw.normal(size=(32, 16)), jnp.float32),
    }
    return State(model, moments, jnp.asarray(seed, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    model: dict
    opt_state: dict
    step: jax.Array


def shapes(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def open_checkpoints(folder, **settings):
    config = checkpoint.CheckpointConfig(**settings)
    return checkpoint.Checkpointer(folder / "checkpoints", config, model_config=None)


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """A run directory with two checkpoints."""
    folder = tmp_path_factory.mktemp("good")
    writer = open_checkpoints(folder)
    for step in STEPS:
        writer.save(
            step,
            make_state(step),
            data=checkpoint.DataPositions(1, {0: f"position {step}".encode()}),
            progress={"seconds": step / 3},
        )
    writer.close()
    return folder


def flip(path, draw):
    """Turns over one bit."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path, draw):
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def remove(path, draw):
    path.unlink()


PLACES = [
    "params/ocdbt.process_0/d/*",
    "optimizer/ocdbt.process_0/d/*",
    "params/d/*",
    "params/_METADATA",
    "params/manifest.ocdbt",
    "optimizer/array_metadatas/*",
    "about/metadata",
    "data/shard_0.json",
    "_CHECKPOINT_METADATA",
    "params/_sharding",
    "params/commit_success.txt",
    "commit_success.txt",
]


@pytest.mark.parametrize("place", quick(PLACES, chosen=PLACES[:1] + PLACES[6:8]))
@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_damage_anywhere_in_a_checkpoint_is_harmless_or_noticed(good_run, tmp_path, place, damage):
    files = sorted((good_run / "checkpoints" / "2").glob(place))
    if not files:
        pytest.skip(f"this version of orbax writes no {place}")
    draw = random.Random(place)
    for number, file in enumerate(files * 2):
        run = shutil.copytree(good_run, tmp_path / str(number))
        damage(run / file.relative_to(good_run), draw)
        reader = open_checkpoints(run)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            restored = reader.restore(shapes(make_state(0)))
        reader.close()
        jax.tree.map(np.testing.assert_array_equal, restored.state, make_state(restored.step))
        assert restored.data.by_shard == {0: f"position {restored.step}".encode()}
        assert restored.progress == {"seconds": restored.step / 3}
        # Orbax's own warnings, of a coroutine that its failure left unawaited, may come in between.
        noticed = any("step 2" in str(warning.message) for warning in told)
        assert restored.step == 2 or "commit" in place or noticed


def array_file(folder):
    """The largest file of a step: that of the parameters' numbers."""
    files = [path for path in (folder / "params").rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_one_flipped_bit_of_an_array_is_told_and_the_checkpoint_before_is_used(good_run, tmp_path):
    run = shutil.copytree(good_run, tmp_path / "run")
    flip(array_file(run / "checkpoints" / "2"), random.Random(1))
    with pytest.warns(UserWarning, match=r"step 2 in .* is damaged and is skipped: ValueError: 1"):
        restored = open_checkpoints(run).restore(shapes(make_state(0)))
    assert restored.step == 1
    assert (run / "damaged" / "2").is_dir()


def test_evaluation_of_a_damaged_checkpoint_is_refused_by_name(good_run, tmp_path):
    run = shutil.copytree(good_run, tmp_path / "run")
    flip(array_file(run / "checkpoints" / "2"), random.Random(1))
    with pytest.raises(errors.UserError, match=r"2 cannot be read: .* checksum.* another step"):
        reading.load_params(run, shapes(make_state(0)).model)
    (run / "checkpoints" / "1" / "about" / "metadata").write_text("{")
    with pytest.raises(errors.UserError, match=r"1 cannot be read: .* choose another step"):
        reading.load_params(run, shapes(make_state(0)).model, step=1)


def test_checkpoints_of_versions_without_checksums_are_read(good_run, tmp_path):
    run = shutil.copytree(good_run, tmp_path / "run")
    path = run / "checkpoints" / "2" / "about" / "metadata"
    about = json.loads(path.read_text())
    del about["sha256"], about["checksums"]
    path.write_text(json.dumps(about))
    assert open_checkpoints(run).restore(shapes(make_state(0))).step == 2


# Runs under trouble: a small problem, trained in this process.


@pytest.fixture
def run(tmp_path, shared_steps):
    """Calls `train` on a small problem; keywords replace its settings."""

    def call(folder="run", **changes):
        known = {
            "checkpoint": checkpoint.CheckpointConfig(every_steps=4),
            "num_steps": 12,
            "log_every_steps": 1,
        }
        return train(**counting_run.settings(tmp_path / folder, **known | changes))

    return call


def records(run_dir):
    return run_log.read_records(run_dir / run_log.METRICS_FILE)


def assert_ends_as_one_left_alone(run, folder):
    """The same call goes on, and ends with the numbers of a run that met no trouble."""
    run(folder.name)
    run("alone")
    assert run_equality.differences(folder, folder.parent / "alone") == []


@pytest.fixture
def small_files():
    """Lets files grow to a few bytes only, as on a full disk, once called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", quick([0, 100], chosen=[100]))
def test_a_full_disk_ends_the_run_with_one_message_and_loses_nothing_saved(
    run, tmp_path, small_files, size
):
    folder = tmp_path / "run"

    def fill():
        counting_run.wait_for(folder / "checkpoints" / "4")
        small_files(size)

    with pytest.raises(errors.TrainingError, match=r"written.*Free space") as caught:
        run(train_data=counting_run.Meddling(batch_size=8, act=fill))
    assert caught.value.exit_code == 1
    small_files(resource.RLIM_INFINITY)
    assert reading.steps_in(folder / "checkpoints") == [4]
    assert_ends_as_one_left_alone(run, folder)


@pytest.mark.slow
def test_a_checkpoint_that_finds_the_disk_full_ends_the_run_too(run, tmp_path, small_files, caplog):
    folder = tmp_path / "run"

    def fill():
        counting_run.wait_for(folder / "checkpoints" / "4")
        small_files(8_000)  # Enough for records, too little for the arrays.

    rules = (*counting_run.rules(), sharding.Rule(r"unused$"))
    settings = {"model": Wide(), "sharding_rules": rules}
    told = r"checkpoint could not be written to .*checkpoints: File too large\. Free space"
    failed = r"step 8 could not be written to .*: File too large; the next one is written instead"
    with pytest.raises(errors.TrainingError, match=told), pytest.warns(UserWarning, match=failed):
        run(train_data=counting_run.Meddling(batch_size=8, act=fill), **settings)
    assert not [said for said in caplog.records if said.exc_info]  # As the message says it all.
    small_files(resource.RLIM_INFINITY)
    assert reading.steps_in(folder / "checkpoints") == [4]
    assert run(**settings).step == 12


def test_a_checkpoint_that_fails_once_costs_no_later_one(tmp_path, small_files):
    wide = {"unused": jax.random.normal(jax.random.key(0), (64, 256))}
    states = {n: State(wide | {"step": jnp.float32(n)}, {}, jnp.int32(n)) for n in (1, 2, 3, 4)}
    writer = open_checkpoints(tmp_path)

    def save(step):
        writer.save(step, states[step], data=checkpoint.DataPositions(), best_value=1 / step)

    save(1)
    small_files(8_000)
    save(2)
    while any(thread.name == "save_finalize" for thread in threading.enumerate()):
        time.sleep(0.01)
    small_files(resource.RLIM_INFINITY)
    with pytest.warns(UserWarning, match=r"step 2 could not be written .*File too large; the next"):
        save(3)
    assert reading.steps_in(tmp_path / "checkpoints") == [1, 3]
    save(4)
    writer.close()
    assert reading.steps_in(tmp_path / "checkpoints") == [3, 4]
    restored = open_checkpoints(tmp_path).restore(shapes(states[1])).state
    jax.tree.map(np.testing.assert_array_equal, restored, states[4])


def test_errors_that_nobody_raises_are_still_shown(caplog, monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    late_errors.silence()
    late_errors.silence()
    told = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    other = types.SimpleNamespace(object=None, exc_value=RuntimeError("broken"))
    for raised in (told, other):
        sys.unraisablehook(raised)
    assert shown == [other]
    for name in ("absl", "asyncio"):
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger(name).exception("Task exception was never retrieved")
    assert [said.name for said in caplog.records] == ["absl", "asyncio"]


class WideTable(counting_run.Table):
    """With a parameter that is not used, and takes room."""

    def __init__(self, key):
        super().__init__(key)
        self.unused = nnx.Param(jax.random.normal(key, (64, 256)))


@dataclasses.dataclass(frozen=True)
class Wide:
    def build(self, key):
        return WideTable(key)


def test_a_run_directory_that_is_removed_ends_the_run_with_one_message(run, tmp_path):
    folder = tmp_path / "run"

    def remove():
        counting_run.wait_for(folder / "checkpoints" / "4")
        shutil.rmtree(folder)

    with pytest.raises(errors.TrainingError, match=r"run directory .*run cannot be written any"):
        run(train_data=counting_run.Meddling(batch_size=8, act=remove))
    assert run().step == 12


def test_a_run_directory_that_becomes_read_only_ends_the_run(run, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    writing = counting_run.Meddling(
        batch_size=8, act=lambda: monkeypatch.setattr(run_log.os, "write", refuse)
    )
    with pytest.raises(errors.TrainingError, match=r"Read-only file system.*permissions"):
        run(train_data=writing)


def test_records_damaged_in_the_middle_are_refused_by_line(run, tmp_path):
    run(num_steps=4)
    path = tmp_path / "run" / run_log.METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\x00\xff{\n", *lines[2:]]))
    with pytest.raises(errors.UserError, match=r"metrics\.jsonl, line 2 .* remove"):
        run()


def test_a_damaged_summary_of_an_ended_run_does_not_matter(run, tmp_path):
    run(num_steps=4)
    (tmp_path / "run" / "summary.json").write_text('{"step": ')
    assert run(num_steps=4).step == 4


@pytest.mark.slow
def test_clocks_that_go_back_change_no_number_and_no_time_is_negative(run, tmp_path, monkeypatch):
    back = itertools.count()
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(run_log.time, name, lambda: 1e9 - 1000.0 * next(back))
    run()
    monkeypatch.undo()
    for record in records(tmp_path / "run"):
        assert all(record[name] >= 0 for name in run_equality.CLOCK_METRICS & record.keys())
    run("alone")
    assert run_equality.differences(tmp_path / "run", tmp_path / "alone") == []


def test_times_for_people_are_never_negative():
    assert amounts.duration(-5) == "0s"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_times_that_are_no_number_are_shown_as_such(seconds):
    assert amounts.duration(seconds) == str(seconds)


# The watchdog.


@pytest.mark.slow
def test_a_source_that_hangs_is_told_with_the_phase_and_every_stack(run, capfd):
    def hang_in_the_source():
        time.sleep(2)

    data = counting_run.Meddling(batch_size=8, act=hang_in_the_source)
    assert run(train_data=data, stall_warning_secs=0.1).step == 12
    told = capfd.readouterr().err
    assert re.search(r"no progress for \ds while reading the batch of step 8", told)
    assert "thread MainThread:" in told
    assert "thread convt5-prefetch:" in told
    assert "in hang_in_the_source" in told


def test_warnings_come_at_growing_intervals_and_for_each_phase_anew():
    now, out = [0.0], io.StringIO()
    guard = watchdog.Watchdog(10.0, out=out, clock=lambda: now[0])

    def warnings_until(end):
        before = out.getvalue().count("no progress")
        while now[0] < end:
            now[0] += 1
            guard.check()
        return out.getvalue().count("no progress") - before

    assert warnings_until(50) == 0  # Nothing is waited for.
    with guard.phase("reading"):
        assert [warnings_until(end) for end in (59, 61, 69, 71, 89, 91)] == [0, 1, 0, 1, 0, 1]
        with guard.phase("opening a file"):
            assert warnings_until(101) == 1
            assert "for 10s while opening a file" in out.getvalue()
    assert warnings_until(200) == 0


def test_without_a_limit_there_is_no_watchdog():
    before = threading.active_count()
    with watchdog.Watchdog(None) as guard, guard.phase("anything"):
        guard.check()
        assert threading.active_count() == before


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_an_impossible_limit_is_refused(run, seconds):
    with pytest.raises(errors.UserError, match=r"stall_warning_secs=.* positive"):
        run(stall_warning_secs=seconds)


# Spikes.


@dataclasses.dataclass(frozen=True)
class SpikyLoss(counting_run.Loss):
    """A thousand times the loss where the first example of a batch has one of these numbers."""

    at: tuple[int, ...] = (8 * 9,)
    factor: float = 1000.0

    def __call__(self, model, batch, *, dropout_key=None):
        sums = super().__call__(model, batch, dropout_key=dropout_key)
        is_spike = jnp.isin(batch["number"][0], jnp.array(self.at))
        return sums._replace(loss_sum=sums.loss_sum * jnp.where(is_spike, self.factor, 1.0))


NOT_FINITE = [("grad_norm", "nan"), ("loss", "inf"), ("grad_norm", "inf"), ("loss", "nan")]


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(NOT_FINITE, chosen=NOT_FINITE[:1]), ids="-".join)
def test_what_is_not_finite_is_left_out_of_updates_and_means(run, tmp_path, case):
    measure, factor = case[0], float(case[1])
    loss = SpikyLoss(factor=factor)
    rate = schedule.Constant(rate=1e-9)
    skip = spikes.SkipSpikes(measure=measure, after_steps=4)
    run(loss=loss, skip_spikes=skip, schedule=rate)
    found = records(tmp_path / "run")
    assert [r["skipped_updates"] for r in found] == [0.0] * 9 + [1.0] * 3
    assert [r["step"] for r in found if "loss" not in r] == [10]
    run("means", loss=loss, skip_spikes=skip, schedule=rate, log_every_steps=6)
    *_, last = records(tmp_path / "means")
    expected = np.mean([r["loss"] for r in found[6:] if "loss" in r])
    np.testing.assert_allclose(last["loss"], expected, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_neither_parameters_nor_optimizer(run, tmp_path):
    settings = {"loss": SpikyLoss(factor=np.nan), "skip_spikes": spikes.SkipSpikes(after_steps=4)}
    for name, steps in (("before", 9), ("after", 10)):
        run(name, num_steps=steps, **settings)
    trees = [
        reading.load_everything(tmp_path / name / "checkpoints" / step)
        for name, step in (("before", "9"), ("after", "10"))
    ]
    for name in ("step", "state/3/count"):
        assert [int(tree["optimizer"].pop(name)) for tree in trees] == [9, 10]
    jax.tree.map(np.testing.assert_array_equal, *trees)


ENDS = [(4, 2, 8), (4, 0, 6), (9, 2, 6)]


@pytest.mark.parametrize("case", quick(ENDS, chosen=[(4, 2, 8), (9, 2, 6)]), ids=str)
def test_too_many_steps_that_are_not_finite_end_the_run(run, case):
    """Steps 6, 7 and 8 are broken; none is left out while training settles."""
    after, most, last = case
    loss = SpikyLoss(at=(40, 48, 56), factor=np.nan)
    skip = spikes.SkipSpikes(after_steps=after, max_not_finite=most)
    with pytest.raises(errors.TrainingError, match=f"training stopped at step {last}:"):
        run(loss=loss, skip_spikes=skip)


def test_the_memory_of_spikes_is_that_of_earlier_versions_too():
    memory = spikes.SpikeMemory.new({"mean": 0.5, "count": 3, "skipped": 1})
    assert memory.state() == {"mean": 0.5, "count": 3, "skipped": 1, "not_finite": 0}
    assert spikes.SpikeMemory.new(memory.state()).state() == memory.state()


@pytest.mark.parametrize("measure", quick(["grad_norm", "loss"], chosen=["loss"]))
def test_a_spike_is_left_out_and_counted(run, tmp_path, measure):
    skip = spikes.SkipSpikes(measure=measure, after_steps=4)
    run(loss=SpikyLoss(), skip_spikes=skip, schedule=schedule.Constant(rate=1e-9))
    found = records(tmp_path / "run")
    assert [r["skipped_updates"] for r in found] == [0.0] * 9 + [1.0] * 3
    assert found[9][measure] > 100 * found[8][measure]


def test_the_step_of_a_spike_changes_neither_parameters_nor_optimizer(run, tmp_path):
    for name, steps in (("before", 9), ("after", 10)):
        run(name, loss=SpikyLoss(), skip_spikes=spikes.SkipSpikes(after_steps=4), num_steps=steps)
    trees = [
        reading.load_everything(tmp_path / name / "checkpoints" / step)
        for name, step in (("before", "9"), ("after", "10"))
    ]
    # The learning rate follows the steps made.
    for name in ("step", "state/3/count"):
        assert [int(tree["optimizer"].pop(name)) for tree in trees] == [9, 10]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.slow
def test_a_run_without_spikes_is_the_same_whether_or_not_they_would_be_skipped(run, tmp_path):
    run("on", skip_spikes=spikes.SkipSpikes(after_steps=2))
    run("off")
    arrays = [reading.load_everything(tmp_path / n / "checkpoints" / "12") for n in ("on", "off")]
    # Two programs, which round sums in their own ways.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), *arrays)
    assert "skipped_updates" not in records(tmp_path / "off")[-1]


@pytest.mark.slow
def test_what_is_known_of_spikes_survives_a_restart_and_can_be_switched_on(run, tmp_path):
    settings = {"loss": SpikyLoss(at=(40, 72)), "skip_spikes": spikes.SkipSpikes(after_steps=4)}
    run("alone", **settings)
    for steps in (6, 12):
        run("parts", num_steps=steps, **settings)
    assert run_equality.differences(tmp_path / "parts", tmp_path / "alone") == []
    assert records(tmp_path / "parts")[-1]["skipped_updates"] == 2
    run("later", num_steps=6, loss=SpikyLoss())
    run("later", loss=SpikyLoss(), skip_spikes=spikes.SkipSpikes(after_steps=2))
    assert records(tmp_path / "later")[-1]["skipped_updates"] == 1


def test_a_change_that_lasts_is_followed():
    skip = spikes.SkipSpikes(measure="loss", factor=4.0, horizon_steps=20, after_steps=5)
    memory, left_out = spikes.SpikeMemory.new(), []
    judge = jax.jit(skip.judge)
    for value in [1.0] * 30 + [100.0] * 60:
        is_spike, memory = judge(memory, {"loss": jnp.asarray(value), "grad_norm": jnp.zeros(())})
        left_out.append(bool(is_spike))
    assert not any(left_out[:30])
    assert left_out[30]
    assert not any(left_out[60:])
    assert int(memory.skipped) == sum(left_out)


def judged(skip, values, memory=None):
    """Returns the steps that are left out, and the memory after them."""
    memory, left_out = memory or spikes.SpikeMemory.new(), []
    judge = jax.jit(skip.judge)
    for step, value in enumerate(values):
        is_spike, memory = judge(memory, dict.fromkeys(("loss", "grad_norm"), jnp.float32(value)))
        left_out += [step] if is_spike else []
    return left_out, memory.state()


def test_batches_without_a_target_tell_nothing_of_what_is_too_much():
    """Their gradient is 0. A mean of 0 would be exceeded by every step, for ever."""
    skip = spikes.SkipSpikes(factor=4.0, horizon_steps=20, after_steps=5)
    steps = [1.0, 2.0] * 10 + [100.0] + [1.0] * 9
    known, memory = judged(skip, steps)
    assert known == [20]
    assert judged(skip, [0.0] * 30 + steps) == ([50], memory)
    between = [value for step in steps for value in (step, 0.0, 0.0)]
    assert judged(skip, between) == ([60], memory)


def test_a_mean_of_zero_that_was_kept_leaves_out_nothing():
    memory = spikes.SpikeMemory.new({"mean": 0.0, "count": 200, "skipped": 100})
    left_out, after = judged(spikes.SkipSpikes(), [1.0] * 9, memory)
    assert left_out == []
    assert after == {"mean": 1.0, "count": 9, "skipped": 100, "not_finite": 0}


def test_impossible_settings_of_spikes_are_told_together():
    with pytest.raises(errors.UserError, match="has 5 faults"):
        spikes.SkipSpikes(
            measure="los", factor=1.0, horizon_steps=0, after_steps=0, max_not_finite=-1
        )


def test_spikes_that_no_step_can_have_are_refused():
    counts = dict.fromkeys(("horizon_steps", "after_steps", "max_not_finite"), 2**31)
    with pytest.raises(errors.UserError, match="has 3 faults"):
        spikes.SkipSpikes(**counts)


# Data.


@pytest.fixture
def record_files(tmp_path):
    """Batches of two records of a file, and the file."""
    tf = pytest.importorskip("tensorflow")
    import seqio
    from convt5.tasks import vocabularies

    from convt5 import data

    path = tmp_path / "rows.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(20):
            writer.write(bytes([number]) * 100)

    def read(split, shuffle_files=False, seed=None):
        rows = tf.data.TFRecordDataset(str(path))
        decoded = rows.map(lambda row: tf.cast(tf.io.decode_raw(row, tf.uint8), tf.int32))
        return decoded.map(lambda ids: {"inputs": ids, "targets": ids})

    feature = seqio.Feature(vocabularies.characters(), add_eos=False)
    task = seqio.Task(
        "rows",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
    )

    def open_batches():
        config = data.DataConfig(
            mixture=task, batch_size=2, encoder_length=100, decoder_length=100, num_epochs=1
        )
        return config.build(process_index=0, process_count=1)

    return open_batches, path


def test_data_that_ends_in_the_middle_of_a_record_is_told(record_files):
    open_batches, path = record_files
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        errors.TrainingError, match=r"'rows', split='train'.*truncated.*may be truncated"
    ):
        list(open_batches())


def test_data_that_is_gone_is_told_by_name(record_files):
    open_batches, path = record_files
    path.unlink()
    with pytest.raises(errors.TrainingError, match=r"rows\.tfrecord.*restore it"):
        next(open_batches())


def test_flipped_bits_in_a_record_are_told(record_files):
    open_batches, path = record_files
    flip(path, random.Random(3))
    with pytest.raises(errors.TrainingError, match="corrupted record"):
        list(open_batches())


def test_data_that_cannot_be_read_ends_the_run_and_is_continued_once_it_can(run, tmp_path):
    def fail():
        counting_run.wait_for(tmp_path / "run" / "checkpoints" / "4")
        raise errors.TrainingError("its data cannot be read")

    with pytest.raises(errors.TrainingError, match="its data cannot be read"):
        run(train_data=counting_run.Meddling(batch_size=8, act=fail))
    assert reading.steps_in(tmp_path / "run" / "checkpoints") == [4, 7]
    assert_ends_as_one_left_alone(run, tmp_path / "run")
