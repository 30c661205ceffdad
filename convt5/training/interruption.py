"""Stops a run on request: saves the state after the current step, then ends."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

from convt5 import errors


class Interrupted(errors.TrainingError):
    """Raised when a run was asked to stop and has saved its state; the same command resumes it.

    The exit code is 128 plus the signal's number, the convention of shells: 143 after SIGTERM, 130
    after Ctrl-C, 129 after SIGHUP (the terminal was closed).
    """

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopAtOnce(BaseException):
    """Raised by a request to stop in the context `Interruption.at_once`.

    It is no `Exception`, like KeyboardInterrupt, so that few handlers of errors catch it. Where one
    does, the run stops after the next step.
    """


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a run: SIGTERM, SIGINT (Ctrl-C) and SIGHUP (closed terminal).

    SIGHUP is omitted if the process ignores it, as `nohup` arranges.
    """
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


_ONE_REQUEST_SECS = 1.0
"""Signals that come closer together are one request: `timeout` sends two."""


class PreemptionNotice(Protocol):
    """Lets the hosts of a run agree on the step to stop at; see `checkpoint.Checkpointer`."""

    def reached_preemption(self, step: int) -> bool: ...


class Interruption:
    """Context that records `stop_signals`; a later one ends the process at once.

    Args:
        hosts: in a run of several hosts, all must stop at the same step. jax then handles SIGTERM,
            and this object tells when to stop. None in a run of one host.
    """

    def __init__(self, hosts: PreemptionNotice | None = None):
        self._hosts = hosts
        self._before: dict[signal.Signals, Any] = {}
        self._noted_at = 0.0
        self._is_at_once = False
        self.received: signal.Signals | None = None

    def requested(self, step: int) -> bool:
        """Returns whether the run should stop after this step; call it after every step."""
        if self._hosts is not None and self._hosts.reached_preemption(step):
            self.received = signal.SIGTERM
        return self.received is not None

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Context that a request ends with `StopAtOnce`, if this object handles the signals."""
        self._is_at_once = True
        try:
            if self.received is not None:
                raise StopAtOnce
            yield
        finally:
            self._is_at_once = False

    def error(self, step: int) -> Interrupted:
        """Returns the error to raise once the state is saved."""
        received = self.received or signal.SIGTERM
        return Interrupted(
            f"stopped by {received.name} after step {step}, which is saved; repeat the command "
            "to resume.",
            signal_number=received,
        )

    def __enter__(self) -> "Interruption":
        # Python delivers signals only to the main thread.
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
            if self._is_at_once:
                raise StopAtOnce
        # A closing terminal may send SIGHUP several times, which is not a second request.
        elif number != signal.SIGHUP and now - self._noted_at > _ONE_REQUEST_SECS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
