"""Keeps what TensorFlow's native code says while it is imported off the terminal.

TF_CPP_MIN_LOG_LEVEL does not govern the lines that are written before TensorFlow has set up its
logging, and they are the first that a newcomer would read.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)|"
    rb"[IWE]\d{4} [\d:.]+ +\d+ (port|cudart_stub|cuda_platform|cpu_feature_guard)\.cc:"
)


@contextlib.contextmanager
def without_tensorflow_chatter() -> Iterator[None]:
    """Holds back the process's standard error, and writes it afterwards without those lines."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules:
        yield
        return
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
            os.write(2, b"".join(line for line in held if not _CHATTER.match(line)))
