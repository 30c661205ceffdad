"""Tests start commands in one way, whatever shell, terminal or service started the tests."""

import ast
import os
import pathlib
import sys

import commands
import pytest

FOLDER = pathlib.Path(__file__).parent
ENDING = ("SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGPIPE")
# Ignores and blocks signals as nohup, `&` and some services do; then starts a command as tests do.
HOSTILE = f"""
import os, signal, sys
sys.path.insert(0, {str(FOLDER)!r})
for name in {ENDING}:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGTERM])
os.umask(0o777)
os.close(0)
import commands
commands.settle()
print(commands.run([sys.executable, "-c", sys.argv[1]]).stdout)
os.kill(os.getpid(), signal.SIGHUP)
print("survives")
"""
SHOWN = f"""
import os, signal, sys
print([n for n in {ENDING} if signal.getsignal(getattr(signal, n)) == signal.SIG_IGN])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0), repr(sys.stdin.read()))
print(sorted(set(os.environ) & {{"COLUMNS", "SLURM_JOB_ID", "JAX_NUM_PROCESSES"}}))
print(os.access(os.path.expanduser("~"), os.W_OK), sys.getfilesystemencoding())
"""


def test_what_tests_start_has_the_signals_and_settings_of_a_plain_shell():
    hostile = {"HOME": "/nonexistent", "COLUMNS": "20", "LC_ALL": "C", "SLURM_JOB_ID": "7"}
    environment = os.environ | hostile | {"JAX_NUM_PROCESSES": "2"}
    done = commands.run([sys.executable, "-c", HOSTILE, SHOWN], env=environment, check=True)
    lines = done.stdout.split("\n")
    # Python itself ignores SIGPIPE.
    assert lines[:4] == ["['SIGPIPE']", f"set() {0o022} ''", "[]", "True utf-8"]
    assert lines[-2] == "survives"


def test_a_test_that_waits_for_a_process_that_ended_fails_at_once():
    process = commands.start([sys.executable, "-c", "raise SystemExit('over')"], stderr=-1)
    with pytest.raises(AssertionError, match="over"):
        commands.wait_until(lambda: False, process)


def test_nothing_else_starts_processes():
    starting = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_output")}
    starting |= {"os.system", "os.fork", "os.popen", "os.posix_spawn"}
    others = {}
    for path in FOLDER.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        if found := called & starting:
            others[path.name] = found
    assert others == {"commands.py": {"subprocess.Popen"}}
