"""Whatever a run directory is called, what is saved there is read again, or nothing is begun."""

import dataclasses
import functools
import os
import pathlib

import counting_run
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from quick import quick

from convt5 import errors
from convt5.checkpoints import checkpoint, read_back, reading
from convt5.evaluation import results
from convt5.interchange import conversion
from convt5.runtime import folders
from convt5.training import averaging, run_directory, run_log
from convt5.training.trainer import train

NAMES = [
    *["run[1]", "[1-9]", "[!a]", "a[", "a]", "a*b", "a**b", "**", "a?b", "{a}", "{a,b}", "%41"],
    *["a b", " lead", "trail ", "new\nline", "100%", "%2F", "~", "~nobody", "tilde~", "ü日", "--x"],
    *["$HOME", "`x`", "a#b", "a'b", 'a"b', "a:b", "\t", "\x01", "\x7f", "...", ".hidden", "5"],
    *["x" * 255, "file:", "ocdbt.process_0", "a.orbax-checkpoint-tmp-1", "commit_success.txt"],
]
ALL_AT_ONCE = "[1] *?{a}**'\"%41\n~ü$#--"


def settings(run_dir, **changes):
    known = {"checkpoint": checkpoint.CheckpointConfig(every_steps=2), "num_steps": 4}
    return counting_run.settings(run_dir, **known | changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    model: dict
    opt_state: dict
    step: jax.Array


def state(seed):
    kernel = jnp.asarray(np.random.default_rng(seed).normal(size=(4, 8)), jnp.float32)
    return State({"kernel": kernel}, {"m": kernel * 2}, jnp.asarray(seed, jnp.int32))


def abstract():
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0)
    )


def open_in(folder, **config):
    return checkpoint.Checkpointer(
        folder / "checkpoints", checkpoint.CheckpointConfig(**config), model_config=None
    )


def save(writer, *steps):
    for step in steps:
        writer.save(step, state(step), data=checkpoint.DataPositions(1, {0: b"position"}))
    writer.wait()


@pytest.mark.parametrize("name", quick(NAMES, chosen=["run[1]", "a**b", "new\nline", "x" * 255]))
def test_whatever_the_folder_is_called_what_is_saved_is_read(tmp_path, name):
    writer = open_in(tmp_path / name)
    save(writer, 1, 2)
    writer.close()
    reader = open_in(tmp_path / name)
    restored = reader.restore(abstract())
    reader.close()
    assert restored.step == 2
    jax.tree.map(np.testing.assert_array_equal, restored.state, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


REFUSED = {
    "back\\slash": "backslash",
    "\\": "backslash",
    "a\udcffb": "no UTF-8",
    "gs:": "Google Cloud Storage",
    "zero\0": "zero character",
    "x" * 256: "a part longer than 255 bytes",
    "/".join(["x" * 250] * 16): "too long",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_cannot_be_read_back_is_refused_before_anything_is_made(tmp_path, name):
    with pytest.raises(errors.UserError, match=REFUSED[name]) as caught:
        train(**settings(f"{tmp_path}/{name}/run"))
    assert "run_dir=" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.UserError, match=REFUSED[name]):
        reading.find_checkpoint(f"{tmp_path}/{name}/run")


@pytest.mark.parametrize("name", ["/gs/run", "/s3/run", "weird://run", "runs/a://b"])
def test_a_name_that_another_library_takes_for_a_bucket_is_refused(name):
    with pytest.raises(errors.UserError, match="choose another folder"):
        run_directory.check(name)


def test_a_home_that_is_unknown_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run_directory.hold("~nobody_of_that_name/run") as folder:
        assert os.fspath(folder) == f"{tmp_path}/~nobody_of_that_name/run"


def test_a_folder_above_a_link_is_that_of_its_target(tmp_path):
    (tmp_path / "target" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "target" / "inner")
    folder = folders.literal(f"{tmp_path}/link/../run")
    assert os.fspath(folder) == os.path.realpath(tmp_path / "target" / "run")


@pytest.mark.slow
def test_a_run_of_any_name_goes_on_and_its_average_is_read(tmp_path):
    run_dir = tmp_path / ALL_AT_ONCE / "run[2]"
    for num_steps in (2, 4):
        result = train(**settings(run_dir, num_steps=num_steps, ema=averaging.EMA()))
        assert result.step == num_steps
    steps = [record["step"] for record in run_log.read_metrics(run_dir)]
    assert steps == [1, 2, 4]
    model = jax.eval_shape(lambda: counting_run.TableConfig().build(jax.random.key(0)))
    found = [reading.load_params(run_dir, model, ema=ema) for ema in (False, True)]
    assert not np.array_equal(*(jax.tree.leaves(params)[0] for params in found))


# What was written is opened again before a run relies on it.


def finds_nothing(folder, pattern):
    """How a library loses the list of arrays whose folder's name it misreads."""
    return iter(())


def test_a_first_checkpoint_that_cannot_be_read_ends_the_run_and_older_ones_stay(
    tmp_path, monkeypatch
):
    writer = open_in(tmp_path, keep_last=1, keep_best=0)
    save(writer, 1)
    writer.close()
    with monkeypatch.context() as patched:
        patched.setattr(folders._LocalFolder, "glob", finds_nothing)
        writer = open_in(tmp_path, keep_last=1, keep_best=0)
        with pytest.raises(errors.TrainingError, match=r"step 2 .* cannot be read back") as caught:
            save(writer, 2)
    assert caught.value.exit_code == 1
    assert reading.steps_in(tmp_path / "checkpoints") == [1]
    assert (tmp_path / "damaged" / "2").is_dir()
    assert open_in(tmp_path).restore(abstract()).step == 1


def damage_on_completion(monkeypatch, writer, step, *, when=lambda: True):
    """Cuts the files of a step as soon as it is complete."""
    wait = writer._manager.wait_until_finished

    def wait_and_damage():
        wait()
        files = pathlib.Path(writer.directory / str(step)).rglob("d/*")
        for path in files if when() else ():
            path.write_bytes(path.read_bytes()[:10])

    monkeypatch.setattr(writer._manager, "wait_until_finished", wait_and_damage)


def test_a_last_checkpoint_that_cannot_be_read_ends_the_run(tmp_path, monkeypatch):
    writer = open_in(tmp_path)
    damage_on_completion(monkeypatch, writer, 3)
    with pytest.raises(errors.TrainingError, match=r"step 3 .* cannot be read back"):
        save(writer, 1, 2, 3)
    assert open_in(tmp_path).restore(abstract()).step == 2


def test_a_checkpoint_that_was_to_be_replaced_stays_if_the_new_one_cannot_be_read(
    tmp_path, monkeypatch
):
    writer = open_in(tmp_path)
    save(writer, 1, 2)
    damage_on_completion(monkeypatch, writer, 2, when=(tmp_path / "replaced").exists)
    with pytest.raises(errors.TrainingError, match=r"step 2 .* cannot be read back"):
        save(writer, 2)
    assert open_in(tmp_path).restore(abstract()).step == 2


@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_arrays_that_are_missing_or_of_another_shape_are_noticed(tmp_path, part):
    writer = open_in(tmp_path)
    save(writer, 1)
    folder = folders.literal(tmp_path / "checkpoints" / "1")
    about = reading.record.read(folder)
    read_back.check(folder, about, {part: {}})
    for changed in (about[part] | {"more": "float32[2]"}, {}):
        with pytest.raises(ValueError, match=f"{part} does not hold what was saved"):
            read_back.check(folder, about | {part: changed}, {part: {}})


def test_a_process_that_saves_once_still_keeps_no_more_than_asked(tmp_path):
    for step in (1, 2, 3):
        writer = open_in(tmp_path, keep_last=1, keep_best=0)
        save(writer, step)
        writer.close()
    assert reading.steps_in(tmp_path / "checkpoints") == [3]


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("run", "run"),
        ("run/checkpoints", "run"),
        ("run/checkpoints/5", "run"),
        ("run/checkpoints/5/params", None),
        ("run/exports", None),
        ("run/exports/one", None),
        ("", None),
    ],
)
def test_what_a_run_keeps_belongs_to_its_checkpoints_alone(model, found, tmp_path):
    for folder in ("run/checkpoints/5/params", "run/exports/one"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / "kept.json").write_text("{}")
    assert folders.run_folder(tmp_path / model, "kept.json") == (found and tmp_path / found)


def test_a_run_in_an_object_store_is_found(monkeypatch):
    kept = "gs://bucket/run/kept.json"
    monkeypatch.setattr(type(epath.Path(kept)), "exists", lambda path: str(path) == kept)
    for model in ("gs://bucket/run", "gs://bucket/run/checkpoints/5"):
        assert str(folders.run_folder(model, "kept.json")) == "gs://bucket/run"


@pytest.mark.parametrize("inside", ["7000", "10/exported", "link/8", "."])
def test_nothing_else_is_written_among_the_checkpoints_of_a_run(inside, tmp_path):
    steps = tmp_path / "run" / "checkpoints"
    (steps / "10").mkdir(parents=True)
    (steps / "10" / "about").mkdir()
    (steps / "link").symlink_to(steps)
    output = str(steps / inside)
    pattern = r"=.* lies in '.*/run/checkpoints', which holds the checkpoints of a run"
    for setting, check in {
        "output_dir": conversion.check_destination,
        "run_dir": run_directory.check,
        "output": functools.partial(results.check_resumable, settings={}),
    }.items():
        with pytest.raises(errors.UserError, match=setting + pattern):
            check(output)


def test_a_folder_called_checkpoints_may_hold_outputs_if_it_is_not_that_of_a_run(tmp_path):
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    for name in ("checkpoints/t5", "checkpoints/20", "elsewhere/20"):
        folders.check_outside_checkpoints(tmp_path / name, what="output_dir")
