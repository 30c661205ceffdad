"""Trains one run of a study, in a process that stops with the study; started by `running`."""

import os
import runpy
import signal
import threading

_STUDY = 0
"""File descriptor of standard input; the study holds the other end."""


def _stop_with_study() -> None:
    """Makes the run save and end when the study closes standard input or dies."""
    os.read(_STUDY, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_study, daemon=True).start()
    runpy.run_module("convt5.train", run_name="__main__", alter_sys=True)
