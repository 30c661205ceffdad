"""Checkpoints come back exactly, on any mesh, and say what is wrong when they do not fit."""

import contextlib
import dataclasses
import errno
import importlib
import json
import os
import shutil
import sys
import types
import warnings

import commands
import fuzzing
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from quick import quick

from convt5 import errors
from convt5.checkpoints import checkpoint, reading, record
from convt5.training.optimizer import AdafactorConfig
from convt5.training.schedule import Constant

NO_DATA = checkpoint.DataPositions()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    model: dict
    opt_state: tuple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AveragedState(State):
    ema: dict


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    width: int = 8
    dilation: tuple[int, ...] = (1, 2)


def make_state(seed=0, width=8, sharding=None, optimizer=None):
    values = np.random.default_rng(seed)
    model = {
        "layers": [
            {"kernel": jnp.asarray(values.normal(size=(8, width)), jnp.float32)} for _ in range(2)
        ],
        "scale": jnp.asarray(values.normal(size=(width,)), jnp.bfloat16),
    }
    optimizer = optimizer or optax.adam(1e-3)
    state = State(jnp.asarray(seed, jnp.int32), model, optimizer.init(model))
    return jax.device_put(state, sharding) if sharding is not None else state


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.fixture
def open_run(tmp_path):
    """Opens checkpointers on one run directory, each as a new process would."""
    opened = []

    def start(*, model_config=None, **settings):
        config = checkpoint.CheckpointConfig(**settings)
        opened.append(
            checkpoint.Checkpointer(
                tmp_path / "checkpoints", config, model_config=model_config or ModelConfig()
            )
        )
        return opened[-1]

    yield start
    for checkpointer in opened:
        checkpointer.close()


def save_steps(checkpointer, *steps, losses=None):
    for index, step in enumerate(steps):
        checkpointer.save(
            step,
            make_state(step),
            data=checkpoint.DataPositions(2, {0: f"position {step}".encode(), 1: b"other"}),
            progress={"seconds": float(step)},
            best_value=losses[index] if losses else None,
        )
    checkpointer.wait()


def assert_same(state, other):
    jax.tree.map(np.testing.assert_array_equal, state, other)


def damage(folder, name="d"):
    """Cuts every array file of a checkpoint in half, as a full disk or a bad copy would."""
    files = [path for path in folder.rglob(f"{name}/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_everything_saved_comes_back_bit_for_bit(open_run):
    save_steps(open_run(), 5)
    restored = open_run().restore(abstract(make_state()))
    assert_same(restored.state, make_state(5))
    assert restored.step == 5
    assert restored.data == checkpoint.DataPositions(2, {0: b"position 5", 1: b"other"})
    assert restored.progress == {"seconds": 5.0}


def test_only_the_positions_a_host_reads_are_read(open_run):
    save_steps(open_run(), 5)
    restored = open_run().restore(abstract(make_state()), shards_read=lambda count: [count - 1])
    assert restored.data == checkpoint.DataPositions(2, {1: b"other"})


def test_a_model_that_was_imported_has_no_positions(open_run):
    checkpointer = open_run()
    checkpointer.save(5, make_state(5), data=checkpoint.DataPositions())
    checkpointer.wait()

    def refuse(count):
        raise AssertionError(f"a host was asked which of {count} shards it reads")

    restored = open_run().restore(abstract(make_state()), shards_read=refuse)
    assert restored.data == checkpoint.DataPositions()


def test_a_run_without_checkpoints_restores_nothing(open_run):
    assert open_run().restore(abstract(make_state())) is None


def test_the_state_may_be_donated_as_soon_as_save_returns(open_run):
    checkpointer = open_run()
    state = make_state(1)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    checkpointer.save(1, state, data=NO_DATA)
    jax.block_until_ready(overwrite(state))
    checkpointer.wait()
    assert_same(checkpointer.restore(abstract(make_state())).state, make_state(1))


def test_a_checkpoint_is_restored_onto_another_mesh(open_run):
    devices = np.array(jax.devices())
    eight = NamedSharding(Mesh(devices.reshape(8), ("data",)), P("data"))
    four = Mesh(devices.reshape(2, 4), ("data", "tensor"))

    def place(state, spec_of):
        return jax.tree.map(lambda x: jax.device_put(x, spec_of(x)), state)

    saved = place(make_state(3), lambda x: eight if x.ndim else NamedSharding(eight.mesh, P()))
    checkpointer = open_run()
    checkpointer.save(3, saved, data=NO_DATA)
    wanted = place(
        make_state(0), lambda x: NamedSharding(four, P("tensor", "data") if x.ndim == 2 else P())
    )
    restored = checkpointer.restore(abstract(wanted)).state
    assert_same(restored, make_state(3))
    kernel = restored.model["layers"][0]["kernel"]
    assert kernel.sharding.spec == P("tensor", "data")


def stored_arrays(folder):
    """The store that holds the parameters of a checkpoint."""
    import tensorstore

    base = {"driver": "file", "path": f"{folder}/params/"}
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()


@pytest.mark.parametrize(("smallest", "rows"), [(None, 8), (32, 1)])
def test_devices_that_hold_the_same_write_parts_of_what_is_large(
    open_run, tmp_path, monkeypatch, smallest, rows
):
    writing = importlib.import_module("convt5.checkpoints.writing")
    if smallest is not None:
        monkeypatch.setattr(writing, "_MIN_SLICE_BYTES", smallest)
    replicated = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P())
    checkpointer = open_run()
    checkpointer.save(3, make_state(3, sharding=replicated), data=NO_DATA)
    checkpointer.wait()
    state = checkpointer.restore(abstract(make_state(sharding=replicated))).state
    assert_same(state, make_state(3))
    store = stored_arrays(tmp_path / "checkpoints" / "3")
    assert json.loads(store["layers.0.kernel/.zarray"])["chunks"] == [rows, 8]
    assert json.loads(store["scale/.zarray"])["chunks"] == [8]


def test_the_last_and_the_best_checkpoints_are_kept(open_run, tmp_path):
    checkpointer = open_run(keep_last=2, keep_best=1)
    save_steps(checkpointer, 1, 2, 3, 4, 5, losses=[3.0, 1.0, 2.0, 2.5, 2.2])
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == [
        "2",
        "4",
        "5",
    ]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_when_the_run_goes_on(open_run, tmp_path):
    save_steps(open_run(keep_last=1), 1, 2, 3, losses=[1.0, 3.0, 2.0])
    save_steps(open_run(keep_last=1), 4, 5, losses=[5.0, 4.0])
    assert reading.steps_in(tmp_path / "checkpoints") == [1, 5]
    assert checkpoint.best_step(tmp_path / "checkpoints") == 1


def test_checkpoints_without_a_validation_loss_are_not_the_best(open_run, tmp_path):
    save_steps(open_run(keep_last=1, keep_best=2), 1, 2, 3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["3"]


def test_a_validation_loss_that_is_not_finite_is_not_the_best(open_run, tmp_path):
    save_steps(open_run(keep_last=1), 1, 2, 3, losses=[2.0, float("nan"), 3.0])
    kept = {p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {"1", "3"}


def test_a_file_in_the_place_of_the_folder_is_told_with_what_to_do(open_run, tmp_path):
    checkpointer = open_run()
    (tmp_path / "checkpoints").write_text("no folder any more")
    with pytest.raises(errors.TrainingError, match=r"could not be written to .* Free space"):
        save_steps(checkpointer, 1)


def test_a_folder_that_vanished_is_told_with_what_to_do(open_run, tmp_path):
    checkpointer = open_run()
    save_steps(checkpointer, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("no folder any more")
    with pytest.raises(errors.TrainingError, match=r"could not be written to .* Free space"):
        save_steps(checkpointer, 2)


@pytest.mark.slow
def test_a_new_run_imports_orbax_only_to_write(tmp_path):
    code = (
        "import sys\nfrom convt5.training import trainer\n"
        "from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer\n"
        f"run = Checkpointer({str(tmp_path)!r}, CheckpointConfig(), model_config=None)\n"
        "print(run.restore({}))\nrun.close()\n"
        "print([name for name in ('orbax', 'tensorflow', 'seqio') if name in sys.modules])"
    )
    done = commands.run([sys.executable, "-c", code], check=True)
    assert done.stdout.splitlines() == ["None", "[]"]


def test_a_full_disk_is_noticed_before_writing(open_run, monkeypatch):
    checkpointer = open_run()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=1000))
    with pytest.raises(errors.TrainingError, match=r"0\.00159 MB are needed, but 0\.001 MB"):
        save_steps(checkpointer, 1)


def test_room_is_looked_for_once_the_checkpoint_before_is_complete(open_run, monkeypatch):
    found = []

    def disk_usage(folder):
        found.append(sorted(os.listdir(folder)))
        return types.SimpleNamespace(free=2**30)

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", disk_usage)
    save_steps(open_run(keep_last=1), 1, 2, 3, 4)
    assert found == [[], ["1"], ["2"], ["3"]]


def test_every_multiple_asked_for_is_kept(open_run, tmp_path):
    save_steps(open_run(keep_last=1, keep_best=0, keep_every_steps=2), 1, 2, 3, 4, 5)
    kept = {p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()}
    assert kept == {"2", "4", "5"}


def test_another_architecture_is_refused_and_the_parameters_are_named(open_run):
    save_steps(open_run(), 1)
    with pytest.raises(errors.UserError) as caught:
        open_run().restore(abstract(make_state(width=16)))
    message = str(caught.value)
    assert "another architecture; 3 of its parameters differ" in message
    assert "layers/0/kernel: float32[8,8] in the checkpoint, float32[8,16] in this model" in message


def test_parameters_missing_on_either_side_are_named(open_run):
    save_steps(open_run(), 1)
    state = make_state()
    model = {"layers": state.model["layers"], "bias": state.model["scale"]}
    other = dataclasses.replace(state, model=model)
    with pytest.raises(errors.UserError) as caught:
        open_run().restore(abstract(other))
    assert "bias: missing in the checkpoint" in str(caught.value)
    assert "scale: not in this model" in str(caught.value)


def test_a_name_with_a_number_of_any_length_is_that_of_no_part():
    long = f"state/{'9' * 5000}/x"
    assert record.saved_names(["state/3/x", long], ["state/1/x", long]) == {
        "state/1/x": "state/3/x",
        long: long,
    }


def test_another_optimizer_is_refused(open_run):
    save_steps(open_run(), 1)
    with pytest.raises(errors.UserError, match="another optimizer"):
        open_run().restore(abstract(make_state(optimizer=optax.sgd(1e-3, momentum=0.9))))


@pytest.mark.parametrize("change", [{"weight_decay": 0.1}, {"clipping_threshold": None}])
@pytest.mark.parametrize("is_added", [True, False])
def test_parts_without_arrays_may_join_and_leave_an_optimizer(open_run, change, is_added):
    pair = [AdafactorConfig(**kept).build(Constant(rate=1.0)) for kept in ({}, change)]
    before, now = pair if is_added else pair[::-1]
    state = make_state(1, optimizer=before)
    numbers = iter(range(1, 100))
    moments = jax.tree.map(lambda leaf: leaf + next(numbers), state.opt_state)
    checkpointer = open_run()
    checkpointer.save(1, dataclasses.replace(state, opt_state=moments), data=NO_DATA)
    checkpointer.wait()
    restored = open_run().restore(abstract(make_state(optimizer=now))).state
    assert_same(jax.tree.leaves(restored.opt_state), jax.tree.leaves(moments))
    assert_same(restored.model, state.model)


def test_a_setting_that_changes_no_shape_is_reported(open_run):
    save_steps(open_run(), 1)
    with pytest.warns(UserWarning, match=r"dilation: \[1, 2\] -> \[1, 4\]"):
        open_run(model_config=ModelConfig(dilation=(1, 4))).restore(abstract(make_state()))


@pytest.mark.parametrize(
    "part", quick(["params", "optimizer", "about", "data"], chosen=["params", "data"])
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(open_run, tmp_path, part):
    save_steps(open_run(), 1, 2)
    newest = tmp_path / "checkpoints" / "2"
    damage(newest / part, "d" if part in ("params", "optimizer") else ".")
    with pytest.warns(UserWarning, match="step 2 .* is damaged and is skipped"):
        restored = open_run().restore(abstract(make_state()))
    assert restored.step == 1
    assert_same(restored.state, make_state(1))
    assert (tmp_path / "damaged" / "2").is_dir()


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(open_run, tmp_path):
    save_steps(open_run(), 1, 2)
    damage(tmp_path / "checkpoints" / "2")
    checkpointer = open_run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpointer.restore(abstract(make_state()))
    save_steps(checkpointer, 2)
    assert open_run().restore(abstract(make_state())).step == 2


def test_a_run_never_starts_over_silently_when_all_checkpoints_are_damaged(open_run, tmp_path):
    save_steps(open_run(), 1)
    damage(tmp_path / "checkpoints" / "1")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(errors.UserError, match="none of the checkpoints"),
    ):
        open_run().restore(abstract(make_state()))
    assert (tmp_path / "checkpoints" / "1").is_dir()


OF_THE_PROCESS = [
    PermissionError(errno.EACCES, os.strerror(errno.EACCES), "about"),
    ValueError("PERMISSION_DENIED: Error opening 'zarr' driver"),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    MemoryError(),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes."),
]


@pytest.mark.parametrize("failure", OF_THE_PROCESS, ids=repr)
def test_a_checkpoint_that_only_this_process_cannot_read_is_not_damaged(
    open_run, tmp_path, monkeypatch, failure
):
    def fail(folder, *_):
        raise failure

    save_steps(open_run(), 1, 2)
    checkpointer = open_run()
    for place in ("_check_files", "_check_arrays"):
        with monkeypatch.context() as patch:
            patch.setattr(reading, place, fail)
            with pytest.raises(errors.TrainingError, match=r"cannot be read .* may be whole"):
                checkpointer.restore(abstract(make_state()))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_check_positions", fail)
        with pytest.raises(errors.TrainingError, match=r"cannot be read .* may be whole"):
            save_steps(checkpointer, 3)
    assert not (tmp_path / "damaged").exists()
    assert open_run().restore(abstract(make_state())).step == 3


@pytest.mark.parametrize(("other", "kind"), [(1, ValueError), (2, errors.TrainingError)])
def test_all_hosts_take_a_checkpoint_for_what_it_is_to_one(monkeypatch, other, kind):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        reading.multihost_utils, "process_allgather", lambda own: np.array([own, other])
    )
    with pytest.raises(kind, match="by process 1") as caught:
        reading.on_all_hosts(lambda: None)
    assert type(caught.value) is kind


def test_no_value_is_forgotten_because_a_checkpoint_may_not_be_read(
    open_run, tmp_path, monkeypatch
):
    def fail(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    save_steps(open_run(), 1, 2, losses=[1.0, 2.0])
    monkeypatch.setattr(record, "read", fail)
    with pytest.raises(errors.TrainingError, match=r"cannot be read .* may be whole"):
        open_run()


def test_half_written_checkpoints_are_not_seen_and_are_removed(open_run, tmp_path):
    save_steps(open_run(), 1)
    partial = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    partial.mkdir()
    (partial / "half").write_text("")
    assert open_run().restore(abstract(make_state())).step == 1
    assert not partial.exists()


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/2"])
def test_parameters_alone_are_read_from_a_run_or_a_step(open_run, tmp_path, inside):
    save_steps(open_run(), 1, 2)
    model = reading.load_params(tmp_path / inside, abstract(make_state()).model)
    assert_same(model, make_state(2).model)


def test_parameters_of_a_chosen_step_are_read(open_run, tmp_path):
    save_steps(open_run(), 1, 2)
    shapes = jax.eval_shape(lambda: make_state().model)
    assert_same(reading.load_params(tmp_path, shapes, step=1), make_state(1).model)


def test_a_missing_checkpoint_is_a_clear_error(open_run, tmp_path):
    with pytest.raises(errors.UserError, match="no checkpoint in"):
        reading.find_checkpoint(tmp_path / "nowhere")
    save_steps(open_run(), 1, 2)
    with pytest.raises(errors.UserError, match=r"step=7 is not among the checkpoints .*: 1, 2"):
        reading.find_checkpoint(tmp_path, step=7)


def test_impossible_settings_are_reported_together():
    with pytest.raises(errors.UserError, match="has 3 faults") as caught:
        checkpoint.CheckpointConfig(every_steps=0, keep_last=0, keep_every_steps=0)
    assert "keep_last=0 must be at least 1" in str(caught.value)


def test_a_checkpoint_that_is_there_is_replaced(open_run, tmp_path):
    checkpointer = open_run(keep_last=1, best_mode="max")
    save_steps(checkpointer, 4)
    checkpointer.save(4, make_state(5), data=NO_DATA, best_value=2.0)
    save_steps(checkpointer, 8, losses=[1.0])
    assert reading.steps_in(tmp_path / "checkpoints") == [4, 8]
    assert checkpoint.best_step(tmp_path / "checkpoints") == 4
    saved = reading.load_everything(tmp_path / "checkpoints" / "4")
    np.testing.assert_array_equal(saved["params"]["scale"], make_state(5).model["scale"])
    assert not (tmp_path / "replaced").exists()


@pytest.mark.parametrize(("evaluation", "best"), [("a", 2), ("b", 6), ("", 2)])
def test_the_best_step_is_among_values_of_one_evaluation(open_run, tmp_path, evaluation, best):
    checkpointer = open_run(keep_last=1)
    values = {2: (0.1, "a"), 4: (0.2, "a"), 6: (0.3, evaluation), 8: (0.4, evaluation)}
    for step, (value, of) in values.items():
        checkpointer.save(step, make_state(), data=NO_DATA, best_value=value, evaluation=of)
    checkpointer.wait()
    assert checkpoint.best_step(tmp_path / "checkpoints") == best
    kept = {2, best, 8}
    assert {*reading.steps_in(tmp_path / "checkpoints")} == kept
    save_steps(open_run(keep_last=1), 10)
    assert {*reading.steps_in(tmp_path / "checkpoints")} == {2, best, 10}
    assert checkpoint.best_step(tmp_path / "checkpoints") == best


@pytest.mark.parametrize(("first", "last", "told"), [("", "a", 1), ("a", "a", 0), ("", "", 0)])
def test_a_best_value_of_unknown_examples_is_told(open_run, tmp_path, first, last, told):
    checkpointer = open_run()
    for step, value, of in ((2, 0.1, first), (4, 0.2, last)):
        checkpointer.save(step, make_state(), data=NO_DATA, best_value=value, evaluation=of)
    checkpointer.wait()
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert checkpoint.best_step(tmp_path / "checkpoints") == 2
    messages = [str(each.message) for each in caught]
    assert len(messages) == told
    assert all("the best step, 2, was saved by an earlier version" in each for each in messages)


@pytest.mark.parametrize("was_complete", [False, True])
def test_a_checkpoint_survives_a_kill_while_it_is_replaced(open_run, tmp_path, was_complete):
    save_steps(open_run(), 4)
    folder, aside = tmp_path / "checkpoints" / "4", tmp_path / "replaced" / "4"
    if was_complete:
        shutil.copytree(folder, aside)
        (aside / "about" / "metadata").write_text("old")
    else:
        aside.parent.mkdir()
        folder.rename(aside)
    restored = open_run().restore(abstract(make_state()))
    assert_same(restored.state, make_state(4))
    assert not aside.parent.exists()


def run_in_bucket():
    return checkpoint.Checkpointer(
        "gs://bucket/checkpoints", checkpoint.CheckpointConfig(), model_config=ModelConfig()
    )


def test_a_checkpoint_half_written_to_a_bucket_counts_for_none(bucket):
    with contextlib.closing(run_in_bucket()) as checkpointer:
        save_steps(checkpointer, 4, 8)
    # Killed while 8 was replaced: orbax writes it under its name, and this file last.
    shutil.copytree(bucket / "checkpoints" / "8", bucket / "replaced" / "8")
    (bucket / "checkpoints" / "8" / "commit_success.txt").unlink()
    shutil.rmtree(bucket / "checkpoints" / "8" / "params")
    assert reading.steps_in("gs://bucket/checkpoints") == [4]
    assert reading.find_checkpoint("gs://bucket").name == "4"
    with contextlib.closing(run_in_bucket()) as checkpointer:
        assert_same(checkpointer.restore(abstract(make_state())).state, make_state(8))
    assert not (bucket / "replaced").exists()


class Killed(BaseException):
    """The end of a process, in the middle of an operation."""


def kill_after(monkeypatch, num_files):
    """Lets a store copy and remove so many files, one by one as it does, and then kills."""
    left = iter(range(num_files))
    path = type(epath.Path("gs://bucket"))
    copy, unlink, rmtree = path.copy, path.unlink, path.rmtree

    def count():
        if next(left, None) is None:
            raise Killed

    def counted_copy(self, *args, **settings):
        count()
        return copy(self, *args, **settings)

    def counted_unlink(self, **settings):
        count()
        unlink(self, **settings)

    def files_of(folder):
        for child in sorted(folder.iterdir()):
            yield from files_of(child) if child.is_dir() else (child,)

    def remove_one_by_one(self, **settings):
        for file in files_of(self) if self.exists() else ():
            file.unlink()
        rmtree(self, **settings)

    def move_one_by_one(self, target):
        for file in files_of(self):
            copied = target / file.relative_to(self)
            copied.parent.mkdir(parents=True, exist_ok=True)
            file.copy(copied)
            file.unlink()
        rmtree(self)

    for name, function in {
        "copy": counted_copy,
        "unlink": counted_unlink,
        "rmtree": remove_one_by_one,
        "rename": move_one_by_one,
    }.items():
        monkeypatch.setattr(path, name, function)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["aside", "back"])
def test_a_checkpoint_in_a_bucket_survives_a_kill_while_it_is_moved(bucket, monkeypatch, way):
    with contextlib.closing(run_in_bucket()) as run:
        save_steps(run, 4)
    folder = bucket / "checkpoints" / "4"
    num_files = sum(len(names) for _, _, names in os.walk(folder))
    for killed_after in range(0, 2 * num_files, 3):
        if way == "back":
            (bucket / "replaced").mkdir()
            shutil.move(folder, bucket / "replaced")
        with contextlib.ExitStack() as stack:
            run = None
            if way == "aside":
                run = stack.enter_context(contextlib.closing(run_in_bucket()))
            kill_after(stack.enter_context(monkeypatch.context()), killed_after)
            with pytest.raises(Killed):
                run.save(4, make_state(5), data=NO_DATA) if run else run_in_bucket()
        with contextlib.closing(run_in_bucket()) as run:
            assert reading.steps_in("gs://bucket/checkpoints") == [4]
            assert not (bucket / "replaced").exists()
    with contextlib.closing(run_in_bucket()) as run:
        assert_same(run.restore(abstract(make_state())).state, make_state(4))


def test_a_copy_under_another_number_keeps_its_step(open_run, tmp_path):
    save_steps(open_run(), 7)
    shutil.copytree(tmp_path / "checkpoints" / "7", tmp_path / "3")
    assert reading.step_of(tmp_path / "3") == 7
    state = make_state()
    read = checkpoint.read_state(tmp_path / "3", abstract(state), model_config=ModelConfig())
    assert read.step == 7


def test_a_single_checkpoint_is_not_taken_for_another_step(open_run, tmp_path, monkeypatch):
    save_steps(open_run(), 4)
    folder = tmp_path / "checkpoints" / "4"
    assert reading.find_checkpoint(folder, step=4) == folder
    with pytest.raises(
        errors.UserError, match=r"step=8 selects .* is a single checkpoint; leave out"
    ):
        reading.find_checkpoint(folder, step=8)
    monkeypatch.chdir(folder)
    assert reading.find_checkpoint(".", step=4)


@pytest.mark.parametrize("has", [False, True])
def test_an_average_on_one_side_only_is_named(open_run, has):
    plain = make_state(4)
    averaged = AveragedState(plain.step, plain.model, plain.opt_state, plain.model)
    saved, wanted = (averaged, plain) if has else (plain, averaged)
    checkpointer = open_run()
    checkpointer.save(4, saved, data=NO_DATA)
    message = r"with ema, .* without ema; restore" if has else r"made without ema.*; leave"
    with pytest.raises(errors.UserError, match=message + r".* trainer\.train\.ema"):
        checkpointer.restore(abstract(wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint to copy."""
    folder = tmp_path_factory.mktemp("saved")
    checkpointer = checkpoint.Checkpointer(
        folder, checkpoint.CheckpointConfig(), model_config=ModelConfig()
    )
    save_steps(checkpointer, 5)
    checkpointer.close()
    return folder / "5"


def pipe(pattern):
    def put(folder):
        (file, *_) = folder.glob(pattern)
        file.unlink()
        os.mkfifo(file)

    return put


def grow(name):
    return lambda folder: os.truncate(folder / "params" / name, 2**40)


def declare(compressed=None, **changes):
    """Changes what an array says of itself, and perhaps its only piece."""

    def put(folder):
        store = stored_arrays(folder)
        about = json.loads(store["scale/.zarray"])
        store["scale/.zarray"] = json.dumps(about | changes).encode()
        if compressed is not None:
            store["scale/0"] = compressed

    return put


def zarr3(folder):
    (file,) = folder.glob("params/_METADATA")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_zarr3": True}))


ARRAY_FILES = {
    **{
        f"pipe {pattern}": (pipe(pattern), "is no regular file")
        for pattern in (
            *("params/_METADATA", "params/manifest.ocdbt", "params/d/*", "optimizer/_sharding"),
            *("params/array_metadatas/*", "params/ocdbt.process_0/d/*", "_CHECKPOINT_METADATA"),
        )
    },
    "metadata of a terabyte": (grow("_METADATA"), "has 1,099,511,627,776 bytes"),
    "manifest of a terabyte": (grow("manifest.ocdbt"), "has 1,099,511,627,776 bytes"),
    "deep metadata": (
        lambda f: (f / "params/_METADATA").write_text("[" * 10**6),
        "nested too deeply",
    ),
    "a piece of 2 GB": (declare(chunks=[2**30]), "unpacks to 2,147,483,648"),
    "a piece of 2 PB": (declare(b"", chunks=[2**50]), "unpacks to"),
    "blosc": (
        declare(compressor={"id": "blosc", "cname": "zstd", "clevel": 5, "shuffle": 0}),
        "compressed by blosc",
    ),
    "another shape": (declare(shape=[10**12], chunks=[8]), "cannot be read"),
    "a negative shape": (declare(shape=[-8]), "cannot be read"),
    "records": (declare(dtype=[["a", "<f4"], ["b", "<f4", [1000, 1000]]]), "cannot be read"),
    "objects": (declare(dtype="|O"), "cannot be read"),
    "huge items": (declare(dtype="|V1000000000"), "cannot be read"),
    "complex": (declare(dtype="<c8"), "cannot be read"),
    "another format": (zarr3, "cannot be read"),
}
"""Files of arrays that no run writes, and what is said of them."""


@pytest.mark.parametrize(("put", "words"), ARRAY_FILES.values(), ids=ARRAY_FILES)
def test_files_of_arrays_that_no_run_writes_are_refused_before_they_are_read(
    saved, tmp_path, put, words
):
    folder = tmp_path / "5"
    shutil.copytree(saved, folder)
    put(folder)
    with fuzzing.limited(fuzzing.LIMIT_SECS), pytest.raises(errors.UserError, match=words):
        reading.load_everything(folder)
