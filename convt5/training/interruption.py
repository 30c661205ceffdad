"""Stopping a run on request: the state is saved after the step in progress, then the run ends."""

import signal
import threading
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


class PreemptionNotice(Protocol):
    """How the hosts of a run agree on the step to stop at; `checkpoint.Checkpointer` is one."""

    def reached_preemption(self, step: int) -> bool: ...


class Interruption:
    """Takes note of `stop_signals` while the context lasts; a second one ends at once.

    Args:
        hosts: in a run of several hosts these must all stop at one step, so that jax takes note of
            SIGTERM instead, and is asked through this; None in a run of one host.
    """

    def __init__(self, hosts: PreemptionNotice | None = None):
        self._hosts = hosts
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None

    def requested(self, step: int) -> bool:
        """Whether the run should stop after this step; call after every step."""
        if self._hosts is not None and self._hosts.reached_preemption(step):
            self._received = signal.SIGTERM
        return self._received is not None

    def error(self, step: int) -> Interrupted:
        """Returns what to raise once the state is saved."""
        received = self._received or signal.SIGTERM
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
        self._restore(*self._before)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._received = self._received or signal.Signals(number)
        # A terminal that closes may say so twice, and is no second request.
        self._restore(*(number for number in self._before if number != signal.SIGHUP))

    def _restore(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            signal.signal(number, self._before.pop(number))
