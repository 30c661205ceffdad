#!/usr/bin/env python3
"""Starts a run of several processes on this machine, as several hosts of a pod would run it.

Each process gets emulated CPU devices, and joins the others by `jax.distributed`. This tests
without a pod what only happens with several hosts. Needs nothing but Python's own library.
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

EXAMPLES = """\
examples:
  # two hosts with four devices each; give it again to continue after any interruption
  python launch/local.py --processes=2 --devices_per_process=4 -- \\
      --gin_file=gin/runs/quickstart.gin --gin.RUN_DIR=runs/two_hosts
  # evaluation, each host with a share of the examples
  python launch/local.py --processes=2 --module=convt5.eval -- --checkpoint=runs/two_hosts

exit code:
  0 if every process ended with 0, else the highest code of those that ended by themselves; one
  killed by a signal counts as 128 plus its number. 2 after a usage error.
"""
_LAST_LINES = 20
_USAGE_ERROR = 2
_EMULATED = re.compile(r"--xla_force_host_platform_device_count=\d+")


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that ended: its index and its exit code, in the convention of shells."""

    index: int
    code: int


class Process:
    """One process of a run; forwards its output line by line, prefixed with its index.

    Args:
        index: index among the processes of the run.
        command: program and arguments.
        environment: environment variables.
        ended: queue that is notified when the process has ended and all its output is forwarded.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        ended: "queue.Queue[Ended]",
    ):
        self.index = index
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._popen = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C in a terminal reaches only the launcher, which decides what to forward.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        threading.Thread(target=self._follow, args=(ended,), daemon=True).start()

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def _follow(self, ended: "queue.Queue[Ended]") -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.last_lines.append(line.rstrip("\n"))
            say(line.rstrip("\n"), prefix=f"[{self.index}] ")
        code = self._popen.wait()
        ended.put(Ended(self.index, 128 - code if code < 0 else code))


def main(argv: Sequence[str]) -> int:
    flags, arguments = parse(argv)
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", flags.module, *arguments]
    added = [
        child_settings(index, flags.processes, flags.devices_per_process, address)
        for index in range(flags.processes)
    ]
    if flags.dry_run:
        for settings in added:
            print(" ".join(f"{k}={shlex.quote(v)}" for k, v in settings.items()), end=" ")
            print(shlex.join(command))
        return 0
    return supervise(command, added, stop_secs=flags.stop_secs)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's own flags, and the arguments of the processes, which follow `--`."""
    parser = argparse.ArgumentParser(
        prog="python launch/local.py",
        usage="%(prog)s [flags] -- ARGUMENTS_OF_EACH_PROCESS...",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=_positive, default=2, help="how many, 2")
    parser.add_argument(
        "--devices_per_process",
        type=_positive,
        default=4,
        help="emulated devices per process (default: 4)",
    )
    parser.add_argument("--module", default="convt5.train", help="what runs, convt5.train")
    parser.add_argument(
        "--stop_secs",
        type=_positive,
        default=10,
        help="once a process has failed, the others receive SIGTERM, and SIGKILL after this "
        "many seconds (default: 10)",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="prints every command; starts nothing"
    )
    own = list(argv)
    arguments: list[str] = []
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    return parser.parse_args(own), arguments


def child_settings(index: int, processes: int, devices: int, address: str) -> dict[str, str]:
    """Returns the environment variables that make a process part of a run."""
    flags = _EMULATED.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": flags,
        "JAX_COORDINATOR_ADDRESS": address,
        # Prevents processes on other machines from joining.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
        "PYTHONUNBUFFERED": "1",
    }


def supervise(
    command: Sequence[str], added: Sequence[Mapping[str, str]], *, stop_secs: float
) -> int:
    """Runs a process for each of the settings in `added` until all have ended.

    SIGTERM, Ctrl-C and a closed terminal are forwarded as SIGTERM, on which the run saves its
    state; a second signal kills. When a process fails, the others are stopped, because they would
    wait for it.

    Returns:
        The exit code.
    """
    ended: queue.Queue[Ended] = queue.Queue()
    requests: queue.Queue[signal.Signals] = queue.Queue()
    with _noted(requests):
        processes = [
            Process(index, command, os.environ | settings, ended)
            for index, settings in enumerate(added)
        ]
        running = {process.index for process in processes}
        code, is_stopping, deadline = 0, False, None
        while running:
            request = None if requests.empty() else requests.get()
            # A closing terminal may send SIGHUP twice, which is not a second request.
            if request is not None and not (is_stopping and request == signal.SIGHUP):
                _send(processes, running, signal.SIGKILL if is_stopping else signal.SIGTERM)
                is_stopping = True
            if deadline is not None and time.monotonic() >= deadline:
                say(f"killing processes that did not stop within {stop_secs} s: {_names(running)}")
                _send(processes, running, signal.SIGKILL)
                deadline = None if not running else time.monotonic() + stop_secs
            try:
                last = ended.get(timeout=0.1)
            except queue.Empty:
                continue
            running.discard(last.index)
            if deadline is None:  # Later ends follow from the stop.
                code = max(code, last.code)
            if last.code and running and not is_stopping and deadline is None:
                say(obituary(last, processes[last.index].last_lines, running))
                _send(processes, running, signal.SIGTERM)
                deadline = time.monotonic() + stop_secs
    return code


def obituary(ended: Ended, last_lines: Sequence[str], running: set[int]) -> str:
    """Returns the message about a process that failed while others ran."""
    cause = f"exit code {ended.code}"
    if ended.code > 128:
        with contextlib.suppress(ValueError):
            cause += f", {signal.Signals(ended.code - 128).name}"
    remedy = (
        "Correct the command."
        if ended.code == _USAGE_ERROR
        else "The same command resumes from the last checkpoint."
    )
    shown = [f"    {line}" for line in last_lines] or ["    (none)"]
    return "\n".join(
        [
            f"process {ended.index} of the run failed ({cause}); stopping {_names(running)}. "
            f"{remedy} The last lines of its output:",
            *shown,
        ]
    )


_output = threading.Lock()


def say(text: str, *, prefix: str = "launch: ") -> None:
    """Writes whole lines to standard error, as long as somebody reads them."""
    with _output:
        try:
            sys.stderr.write(f"{prefix}{text}\n")
            sys.stderr.flush()
        except OSError:  # For instance after `2>&1 | tee log`, where Ctrl-C also ends tee.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextlib.contextmanager
def _noted(requests: "queue.Queue[signal.Signals]") -> Iterator[None]:
    """Puts stop requests into a queue while the context lasts."""

    def note(number, _):
        requests.put(signal.Signals(number))

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it.
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(processes: Sequence[Process], running: set[int], number: signal.Signals) -> None:
    for index in running:
        processes[index].send(number)


def _names(running: set[int]) -> str:
    return f"process{'es' if len(running) > 1 else ''} {', '.join(map(str, sorted(running)))}"


def _end_with_parent() -> None:
    """Makes Linux kill this process when the launcher is killed without warning."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG.


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
