"""A run directory belongs to one live process, and is given back however that process ends."""

import os
import subprocess
import sys

import commands
import pytest

from convt5 import errors
from convt5.runtime import atomic_files
from convt5.training import run_directory

HOLD_FOREVER = """
import sys, time
from convt5.training import run_directory
with run_directory.hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = commands.start(
        [sys.executable, "-c", HOLD_FOREVER, tmp_path / "run"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_a_folder_held_by_a_live_process_is_refused_by_name(holder, tmp_path):
    with (
        pytest.raises(errors.UserError, match=f"in use by process {holder.pid} on "),
        run_directory.hold(tmp_path / "run"),
    ):
        pass


@pytest.mark.slow
def test_a_folder_held_by_a_killed_process_is_free(holder, tmp_path):
    holder.kill()
    holder.wait()
    with run_directory.hold(tmp_path / "run") as folder:
        assert os.fspath(folder) == str(tmp_path / "run")


def test_a_folder_is_free_after_its_context(tmp_path):
    for _ in range(2):
        with run_directory.hold(tmp_path / "a" / "run") as folder:
            assert folder.is_dir()


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(errors.UserError, match=r"file/run' must be .*/file is a file; choose"),
        run_directory.hold(tmp_path / "file" / "run"),
    ):
        pass


def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("permissions do not bind this user, as they do not bind root")
    with (
        pytest.raises(errors.UserError, match=r"may not be written; .* change its permissions"),
        run_directory.hold(tmp_path / "run"),
    ):
        pass


def test_no_name_is_no_run_directory():
    with pytest.raises(errors.UserError, match="run_dir='' must name a folder"):
        run_directory.check("")


def fail_in(run_dir, make):
    """Calls `make` with the folder of a run that then ends in an error."""
    with run_directory.hold(run_dir) as folder:
        make(folder)
        raise errors.UserError("wrong")


@pytest.mark.parametrize(
    ("make", "stays"),
    [
        (lambda folder: (folder / "checkpoints").mkdir(), False),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), True),
    ],
)
def test_a_new_folder_is_removed_if_nothing_was_written_before_an_error(tmp_path, make, stays):
    with pytest.raises(errors.UserError, match="wrong"):
        fail_in(tmp_path / "run", make)
    assert (tmp_path / "run").exists() == stays


def test_a_lock_that_is_no_file_is_named(tmp_path):
    (tmp_path / "run" / "lock").mkdir(parents=True)
    with (
        pytest.raises(errors.UserError, match="run/lock is a folder where a file must be"),
        run_directory.hold(tmp_path / "run"),
    ):
        pass


def test_settings_that_change_twice_at_a_step_leave_those_of_the_steps_before(tmp_path):
    run_directory.write_config(tmp_path, "a = 1\n", step=0)
    run_directory.write_config(tmp_path, "a = 2\n", step=5)
    run_directory.write_config(tmp_path, "a = 3\n", step=5)
    assert (tmp_path / "config.before_step_5.gin").read_text() == "a = 1\n"
    assert (tmp_path / "config.gin").read_text() == "a = 3\n"
    assert run_directory.write_config(tmp_path, "a = 1\n", step=5) is None
    assert (tmp_path / "config.gin").read_text() == "a = 1\n"


def test_a_config_that_is_a_folder_is_told(tmp_path):
    (tmp_path / "config.gin").mkdir()
    with pytest.raises(errors.TrainingError, match=r"Is a directory .*config\.gin"):
        run_directory.write_config(tmp_path, "a = 1\n", step=5)


def test_settings_are_written_and_changes_reported(tmp_path):
    assert run_directory.write_config(tmp_path, "a = 1\n", step=0) is None
    assert run_directory.write_config(tmp_path, "a = 1\n", step=5) is None
    message = run_directory.write_config(tmp_path, "a = 2\n", step=5)
    assert "first 5 steps (a: 1 -> 2), which" in message
    assert (tmp_path / "config.before_step_5.gin").read_text() == "a = 1\n"
    assert (tmp_path / "config.gin").read_text() == "a = 2\n"


def test_changed_settings_are_named_and_long_values_left_out(tmp_path):
    same = "# Two.\nimport x\n\nsame = [1,\n    2]\nb/m.f.prompt = \\\n    '{}'\nlong = '{}'\n"
    run_directory.write_config(tmp_path, same.format("a: {x}", "x" * 200), step=0)
    text = same.format("b: {x}", "x" * 200 + "y") + "new = 3\n"
    message = run_directory.write_config(tmp_path, text, step=5)
    assert "(b/m.f.prompt: 'a: {x}' -> 'b: {x}'; long; new: None -> 3)" in message
    many = "".join(f"a{n} = 1\n" for n in range(20))
    assert "and 16 more)" in run_directory.write_config(tmp_path, many, step=7)


FILES = ["lock", "config.gin", "metrics.jsonl", "summary.json", "config.before_step_3.gin"]
FOLDERS = ["checkpoints", "checkpoints/5", "damaged", "replaced/7", "vocabulary", "tensorboard"]
WRONG = {
    "link": lambda path, target: path.symlink_to(target),
    "dangling link": lambda path, target: path.symlink_to(target / "nowhere"),
    "pipe": lambda path, target: os.mkfifo(path),
    "folder": lambda path, target: path.mkdir(),
    "file": lambda path, target: path.write_text("mine"),
}


IN_THE_WAY = [
    (name, wrong)
    for names, right in (([*FILES, "vocabulary/inputs.model"], "file"), (FOLDERS, "folder"))
    for name in names
    for wrong in WRONG
    if wrong != right
]


@pytest.mark.parametrize(("name", "wrong"), IN_THE_WAY)
def test_what_is_in_the_way_is_found_before_anything_begins(tmp_path, name, wrong):
    path, target = tmp_path / "run" / name, tmp_path / "target"
    path.parent.mkdir(parents=True)
    target.mkdir()
    WRONG[wrong](path, target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(errors.UserError, match=rf"{name} is a {wrong.split()[-1]} where a f"):
        run_directory.check(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("wrong", ["dangling link", "pipe", "file"])
def test_a_run_directory_that_is_something_else_is_refused(tmp_path, wrong):
    WRONG[wrong](tmp_path / "run", tmp_path)
    with pytest.raises(errors.UserError, match=rf"run is a {wrong.split()[-1]}.*choose another"):
        run_directory.check(tmp_path / "run")


def test_a_run_directory_may_itself_be_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "far")
    with run_directory.hold(tmp_path / "run"):
        assert (tmp_path / "far" / "lock").is_file()


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_no_file_is_written_through_a_link(tmp_path, make):
    (tmp_path / "mine").write_text("mine")
    make(tmp_path / "mine", tmp_path / "lock")
    make(tmp_path / "mine", tmp_path / "config.gin")
    with pytest.raises(errors.UserError, match="lock"), run_directory.hold(tmp_path):
        pass
    run_directory.write_config(tmp_path, "a = 1\n", step=0)
    assert (tmp_path / "config.gin").read_text() == "a = 1\n"
    assert not (tmp_path / "config.gin").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


def test_files_that_are_written_have_names_that_nobody_foresees(tmp_path, monkeypatch):
    path = tmp_path / ("x" * 255)
    with atomic_files.replacing(path) as first, atomic_files.replacing(path) as second:
        assert first != second
        assert path.name not in first.name
    monkeypatch.setattr(atomic_files.secrets, "token_hex", lambda count: "0" * 16)
    (tmp_path / f".{'0' * 16}.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError), atomic_files.replacing(path):
        pass
    assert not (tmp_path / "mine").exists()


def test_what_a_kill_leaves_half_written_is_removed_by_the_next_start(tmp_path):
    left, other = tmp_path / f".{'0a' * 8}.partial", tmp_path / ".my.partial"
    left.write_text("")
    other.write_text("")
    with run_directory.hold(tmp_path):
        assert (left.exists(), other.exists()) == (False, True)


def test_what_a_kill_leaves_half_written_beside_other_files_is_removed_by_later_writes(tmp_path):
    left, young, other = (tmp_path / f".{n}.partial" for n in ("0a" * 8, "1b" * 8, "my"))
    link = tmp_path / f".{'2c' * 8}.partial"
    link.symlink_to(other)
    with atomic_files.replacing(tmp_path / "first") as held:
        for path in (left, young, other, held):
            path.write_text("half")
        for path in (left, other, held):
            os.utime(path, (10**9, 10**9))
        atomic_files.replace_text(tmp_path / "second", "whole")
        assert {*tmp_path.iterdir()} == {young, other, link, held, tmp_path / "second"}
    assert (tmp_path / "first").read_text() == "half"


def test_contents_are_on_the_disk_before_their_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []

    def fsync(file):
        synced.append((os.fstat(file).st_ino, os.fstat(file).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_files.replace_text(path, "whole")
    assert synced == [(path.stat().st_ino, 5, False)]


def test_a_removed_folder_is_not_called_full(tmp_path):
    folder = tmp_path / "run"
    told = (
        f"the run directory {folder} cannot be written any more: .* put it back; the same command"
    )
    with pytest.raises(errors.TrainingError, match=told), run_directory.writing(folder):
        (folder / "metrics.jsonl").write_text("")
    folder.write_text("no folder")
    with pytest.raises(errors.TrainingError, match="Free space"), run_directory.writing(folder):
        (folder / "metrics.jsonl").write_text("")


def write_half(path):
    with atomic_files.replacing(path) as partial:
        partial.write_text("half")
        raise errors.UserError("wrong")


def test_a_failure_leaves_nothing_half_written(tmp_path):
    with pytest.raises(errors.UserError):
        write_half(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["s3", "az", "hf"])
def test_a_store_to_which_no_checkpoint_can_be_written_is_refused(scheme):
    with pytest.raises(
        errors.UserError, match=rf"run_dir='{scheme}://bucket/run' .* begin with gs://;"
    ):
        run_directory.check(f"{scheme}://bucket/run")
    run_directory.check("gs://bucket/run")
