"""A run of a study, in a process that stops when the study does; `running` starts it."""

import os
import runpy
import signal
import threading

_STUDY = 0
"""Standard input, of which the study has the other end."""


def _stop_with_study() -> None:
    """Has the run save and end once the study closes its end of standard input, or is gone."""
    os.read(_STUDY, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_study, daemon=True).start()
    runpy.run_module("convt5.train", run_name="__main__", alter_sys=True)
