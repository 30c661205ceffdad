"""The terminal shows what matters when TensorFlow is imported."""

import subprocess
import sys

import commands
import pytest

LINES = """
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795185697.561595    2608 port.cc:153] oneDNN custom operations are on.
E0000 00:00:1795185728.220944    2608 cuda_platform.cc:52] failed call to cuInit
a warning of the user's own module
"""


def run(code: str) -> subprocess.CompletedProcess:
    head = (
        f"import os, sys\nfrom convt5.runtime.quiet_imports import *\nlines = {LINES.lstrip()!r}\n"
    )
    return commands.run([sys.executable, "-c", head + code])


def test_only_the_chatter_is_held_back():
    done = run("with without_tensorflow_chatter(): os.write(2, lines.encode())")
    assert done.stderr == "a warning of the user's own module\n"


def test_standard_error_comes_back_after_an_exception():
    done = run("with without_tensorflow_chatter(): raise ValueError('broken')")
    assert "ValueError: broken" in done.stderr


def test_nothing_is_held_back_once_tensorflow_is_loaded():
    done = run(
        "sys.modules['tensorflow'] = sys\n"
        "with without_tensorflow_chatter(): os.write(2, lines.encode())"
    )
    assert done.stderr == LINES.lstrip()


def test_tensorflow_that_is_there_already_looks_for_accelerators_in_silence():
    code = (
        "import types\n"
        "def look(devices, kind): os.write(2, lines.encode())\n"
        "hide_accelerators(types.SimpleNamespace(config=types.SimpleNamespace("
        "set_visible_devices=look)))"
    )
    assert run(code).stderr == 2 * "a warning of the user's own module\n"


@pytest.mark.slow
def test_a_prediction_says_only_what_is_wrong(tmp_path):
    done = commands.run([sys.executable, "-m", "convt5.infer", f"--checkpoint={tmp_path}"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: no checkpoint in")


@pytest.mark.slow
def test_a_study_begins_in_silence(tmp_path):
    command = ["convt5.sweep", "--gin_file=gin/studies/mixers_small.gin", "--dry_run"]
    done = commands.run(
        [sys.executable, "-m", *command, f"--gin.OUTPUT_DIR={tmp_path}"], cwd=commands.ROOT
    )
    assert done.returncode == 0
    assert done.stderr == ""
