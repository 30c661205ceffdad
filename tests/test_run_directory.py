"""A run directory belongs to one live process, and is given back however that process ends."""

import os
import subprocess
import sys

import commands
import pytest

from convt5 import errors
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


def test_a_folder_held_by_a_live_process_is_refused_by_name(holder, tmp_path):
    with (
        pytest.raises(errors.UserError, match=f"in use by process {holder.pid} on "),
        run_directory.hold(tmp_path / "run"),
    ):
        pass


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with (
        pytest.raises(errors.UserError, match="Permission denied"),
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
        pytest.raises(errors.UserError, match="run/lock must be a file that can be written"),
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
    assert "first 5 steps" in run_directory.write_config(tmp_path, "a = 2\n", step=5)
    assert (tmp_path / "config.before_step_5.gin").read_text() == "a = 1\n"
    assert (tmp_path / "config.gin").read_text() == "a = 2\n"
