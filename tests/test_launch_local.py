"""Processes of one machine start, speak and stop together, and a death is told in one message."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import commands
import pytest

LAUNCHER = pathlib.Path(__file__).resolve().parents[1] / "launch" / "local.py"

PROGRAM = """
import os, pathlib, signal, sys, time

index = int(os.environ["JAX_PROCESS_ID"])
print(f"{sys.argv[1:]} {index} of {os.environ['JAX_NUM_PROCESSES']}, "
      f"{os.environ['JAX_NUM_CPU_DEVICES']} devices, flags {os.environ['XLA_FLAGS']!r}")

def wait():
    pathlib.Path(f"ready_{index}").touch()
    time.sleep(600)

exec(pathlib.Path("behaviour.py").read_text())
"""


@pytest.fixture
def start(tmp_path):
    """Starts two processes that do what the text says, which knows `index` and `wait`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    started = []

    def call(behaviour, *flags):
        (tmp_path / "behaviour.py").write_text(behaviour)
        started.append(
            commands.start(
                [
                    sys.executable,
                    LAUNCHER,
                    "--module=program",
                    "--stop_secs=1",
                    *flags,
                    "--",
                    "--x=1",
                ],
                cwd=tmp_path,
                env=os.environ
                | {
                    "PYTHONPATH": str(tmp_path),
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_other=1",
                },
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for(*paths):
    commands.wait_until(lambda: all(path.exists() for path in paths))


def test_processes_know_their_place_and_speak_with_their_index(start):
    code, _, text = finish(start("", "--processes=2", "--devices_per_process=3"))
    assert code == 0
    for index in range(2):
        assert f"[{index}] ['--x=1'] {index} of 2, 3 devices, flags '--xla_other=1'\n" in text


def test_a_process_that_dies_stops_the_rest_in_the_stated_time(start):
    process = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if index:\n"
        "    while not pathlib.Path('ready_0').exists(): time.sleep(0.01)\n"
        "    print('the last words'); sys.exit(7)\n"
        "wait()"
    )
    code, _, text = finish(process)
    assert code == 7
    assert text.count("process 1 of the run failed (exit code 7); stopping process 0") == 1
    assert "\n    the last words\n" in text
    assert "killing processes that did not stop within 1" in text


def test_a_killed_process_is_named_with_its_signal(start, tmp_path):
    process = start("if index: os.kill(os.getpid(), signal.SIGKILL)\nwait()")
    code, _, text = finish(process)
    assert code == 137
    assert "process 1 of the run failed (exit code 137, SIGKILL)" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_reaches_all_and_their_code_comes_back(start, tmp_path, number):
    process = start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\nwait()")
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    process.send_signal(number)
    code, _, text = finish(process)
    assert code == 143
    assert "failed" not in text


def test_a_closed_terminal_that_is_told_twice_kills_nobody(start, tmp_path):
    process = start(
        "def stop(*_): time.sleep(0.5); pathlib.Path(f'saved_{index}').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\nwait()"
    )
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    process.stderr.close()
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
    assert process.wait(timeout=300) == 143
    assert (tmp_path / "saved_0").exists()
    assert (tmp_path / "saved_1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends orphans")
def test_nothing_outlives_a_killed_launcher(start, tmp_path):
    process = start("pathlib.Path(f'pid_{index}').write_text(str(os.getpid())); wait()")
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    process.kill()
    for index in range(2):
        pid = int((tmp_path / f"pid_{index}").read_text())
        commands.wait_until(lambda pid=pid: not is_running(pid))


def test_dry_run_prints_a_command_for_each_process_and_starts_none(start):
    code, out, _ = finish(start("sys.exit(1)", "--processes=3", "--dry_run"))
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "JAX_PROCESS_ID=2" in out.splitlines()[2]
    assert out.splitlines()[2].endswith("-m program --x=1")


def test_a_wrong_flag_is_a_usage_error(start):
    code, _, text = finish(start("", "--processes=0"))
    assert code == 2
    assert "--processes" in text
