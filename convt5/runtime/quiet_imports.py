"""Imports TensorFlow without its log messages, and without the parts that reading data never uses.

TF_CPP_MIN_LOG_LEVEL has no effect before TensorFlow has initialised its logging, and a new user
would see these messages first.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from convt5.runtime import late_imports

_CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)|"
    rb"[IWE]\d{4} [\d:.]+ +\d+ (port|cudart_stub|cuda_platform|cpu_feature_guard)\.cc:"
)


@contextlib.contextmanager
def without_tensorflow_chatter() -> Iterator[None]:
    """Captures standard error, and then writes it without these messages.

    Packages that TensorFlow and seqio import needlessly are postponed; see `late_imports`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules:
        yield
        return
    with _without_chatter(), late_imports.postponed():
        yield


def hide_accelerators(tensorflow: Any) -> None:
    """Leaves GPUs and TPUs to JAX. TensorFlow looks for them here, and says that there are none."""
    with _without_chatter():
        for kind in ("GPU", "TPU"):
            tensorflow.config.set_visible_devices([], kind)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            with contextlib.suppress(OSError):  # Nobody reads it, or its disk is full.
                os.write(2, b"".join(line for line in held if not _CHATTER.match(line)))
