"""A watchdog that reports what a stalled run is waiting for; it only warns.

A slow disk, a hanging data source and an unresponsive host look alike from outside.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TextIO

import jax

from convt5.runtime.amounts import duration

_LONGEST_POLL_SECS = 1.0


class Watchdog:
    """Context that shows the stack of every thread when a phase of a run takes long.

    Args:
        after_secs: duration of a phase before the first warning; the time doubles for each next
            one. None disables warnings.
        out: where warnings go, by default standard error.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        after_secs: float | None,
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._after_secs = after_secs
        self._out = out
        self._clock = clock
        self._phase: tuple[str, float] | None = None  # Its name and start time.
        self._warn_at = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="convt5-watchdog", daemon=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names the current phase, such as "reading a batch"; an inner phase replaces it."""
        outer = self._phase
        self._begin((name, self._clock()))
        try:
            yield
        finally:
            self._begin(outer)

    def check(self) -> None:
        """Warns if a warning is due."""
        with self._lock:
            if self._phase is None or self._after_secs is None:
                return
            name, began = self._phase
            waited = self._clock() - began
            if waited < self._warn_at:
                return
            self._warn_at = 2 * waited
        print(_warning(name, waited), file=self._out or sys.stderr, flush=True)

    def __enter__(self) -> "Watchdog":
        if self._after_secs is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _begin(self, phase: tuple[str, float] | None) -> None:
        with self._lock:
            self._phase = phase
            self._warn_at = self._after_secs or 0.0

    def _run(self) -> None:
        assert self._after_secs is not None
        while not self._stopped.wait(min(_LONGEST_POLL_SECS, self._after_secs / 4)):
            self.check()


def _warning(phase: str, waited: float) -> str:
    process = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
    lines = [
        f"{process}no progress for {duration(waited)} while {phase}; the run keeps waiting. Its "
        "threads:"
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():
        if identity != threading.get_ident():
            lines.append(f"thread {names.get(identity, identity)}:")
            lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return "\n".join(lines)
