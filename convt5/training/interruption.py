"""Stopping a run on request: the state is saved after the step in progress, then the run ends."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Protocol

from convt5 import errors


class Interrupted(errors.TrainingError):
    """The run was asked to stop and has saved its state; the same command continues it.

    The exit code is 128 plus the signal's number, as shells have it: 143 after SIGTERM, 130 after
    Ctrl-C, 129 after the terminal was closed (SIGHUP).
    """

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask for an end: SIGTERM, Ctrl-C, and that the terminal was closed.

    The last is none of them where it is ignored, as `nohup` has it.
    """
    asked = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asked.append(signal.SIGHUP)
    return asked


_ONE_REQUEST_SECS = 1.0
"""Signals that come closer together are one request: `timeout` sends two."""


class PreemptionNotice(Protocol):
    """How the hosts of a run agree on the step to stop at; `checkpoint.Checkpointer` is one."""

    def reached_preemption(self, step: int) -> bool: ...


class Interruption:
    """Takes note of `stop_signals` while the context lasts; one that comes later ends at once.

    Args:
        hosts: in a run of several hosts these must all stop at one step, so that jax takes note of
            SIGTERM instead, and is asked through this; None in a run of one host.
    """

    def __init__(self, hosts: PreemptionNotice | None = None):
        self._hosts = hosts
        self._before: dict[signal.Signals, Any] = {}
        self._noted_at = 0.0
        self.received: signal.Signals | None = None

    def requested(self, step: int) -> bool:
        """Whether the run should stop after this step; call after every step."""
        if self._hosts is not None and self._hosts.reached_preemption(step):
            self.received = signal.SIGTERM
        return self.received is not None

    def error(self, step: int) -> Interrupted:
        """Returns what to raise once the state is saved."""
        received = self.received or signal.SIGTERM
        return Interrupted(
            f"stopped by {received.name} after step {step}, which is saved; give the same command "
            "again to continue.",
            signal_number=received,
        )

    def __enter__(self) -> "Interruption":
        # Python delivers signals to the main thread only.
        if self._hosts is None and threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._noted_at = signal.Signals(number), now
        # A terminal that closes is no second request, however often it says so.
        elif number != signal.SIGHUP and now - self._noted_at > _ONE_REQUEST_SECS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
