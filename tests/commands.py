"""How tests start commands: alike, however the tests themselves were started.

`settle` makes this process, whose settings its children inherit, independent of the shell, the
terminal, the user's home and the service that started it; `run` and `start` are the only
way in which tests start processes.
"""

import atexit
import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What ends or stops a process. `nohup`, `&` in a script and some services start what they start
# with some of these ignored or blocked, which would be handed on from process to process.
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGALRM)
QUICK_COMPILATION = " ".join(
    [
        "--xla_backend_optimization_level=0",
        # The older code generator takes half the time.
        "--xla_cpu_use_fusion_emitters=false",
        # Parts of a program that are compiled side by side take a third more time in all.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
"""Flags of XLA for tests, which compile many small programs and run each a few times."""


def compiled_programs() -> pathlib.Path:
    """Returns a folder of the user's cache for what tests compile for this kind of processor.

    Programs of more than a month ago are removed. A program for one processor may have
    instructions that another lacks.
    """
    processor = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        processor += sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256("\n".join(processor).encode()).hexdigest()[:16]
    folder = pathlib.Path(base, "convt5", "tests", name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.stat().st_mtime < time.time() - 30 * 24 * 3600:
                path.unlink()
    except OSError:  # A home that cannot be written, or another run that removes the same files.
        folder = folder if os.access(folder, os.W_OK) else ROOT / ".pytest_cache" / "jax"
    return folder


# Variables that change what commands print, or make them part of a run of several processes.
_PRINTING = ("COLUMNS", "LINES", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "NO_COLOR", "FORCE_COLOR")
_JOINING = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_FAMILIES = ("CONVT5_", "SLURM_", "OMPI_", "XDG_")


def settle() -> None:
    """Makes signals, environment, home and permissions what tests and their children rely on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    for number in _ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            # Still without effect here, but what is started has the default: a handler, unlike
            # SIG_IGN, does not outlive exec. Python's own of Ctrl-C is what tests rely on.
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else _nothing)
    os.umask(0o022)
    for name in list(os.environ):
        if name in (*_PRINTING, *_JOINING) or name.startswith(_FAMILIES):
            del os.environ[name]
    os.environ["LC_ALL"] = "C.UTF-8"
    home = tempfile.mkdtemp(prefix="home")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = home


def keep_to_one_core(number: int) -> None:
    """Keeps this process and those it starts to one of its cores: where the system lets it.

    Threads of TensorFlow and XLA take turns more than they work side by side, and wake one another
    quicker on one core: tests take a fifth less time.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def run(
    command: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str | None = None,
    stdout: IO[Any] | int = subprocess.PIPE,
    stderr: IO[Any] | int = subprocess.PIPE,
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, without input; returns its exit code and output as text.

    Args:
        command: program and arguments.
        env: its environment; None is that of the tests.
        cwd: its working directory; None is that of the tests.
        stdout, stderr: where its output goes; by default into what is returned.
        timeout: seconds after which it is killed and the test fails.
        check: whether the test fails, with the output, where the exit code is not 0.
    """
    process = start(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    assert not (check and done.returncode), f"{done.args}: {done.returncode}\n{out}\n{err}"
    return done


def start(
    command: Sequence[Any],
    *,
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str | None = None,
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
) -> subprocess.Popen[str]:
    """Starts a command, without input, whose output is text; arguments as of `run`."""
    return subprocess.Popen(
        [os.fspath(part) if isinstance(part, os.PathLike) else part for part in command],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def wait_until(
    condition: Callable[[], bool], *processes: subprocess.Popen[str], secs: float = 300
) -> None:
    """Waits for a condition; the test fails where a process ends before, or time is over."""
    deadline = time.monotonic() + secs
    while not condition():
        for process in processes:
            assert process.poll() is None, f"{process.args}: {process.communicate()}"
        assert time.monotonic() < deadline, f"{secs} s passed"
        time.sleep(0.005)


def _nothing(*_: Any) -> None:
    """Handles a signal that is to have no effect."""
