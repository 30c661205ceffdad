"""XLA_FLAGS, checked before XLA reads them: it ends the process where it cannot read one."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping

from convt5 import errors

_KNOWN = re.compile(
    r"--xla_force_host_platform_device_count=[1-9]\d{0,3}"
    r"|--xla_gpu_deterministic_ops=true|--xla_gpu_autotune_level=0"
)
"""What launch/local.py and --deterministic set."""

_READ_THEM = "import jaxlib.xla_client as client; client.CompileOptions()"
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.*(?:XLA_FLAGS|for flag).*)$", re.MULTILINE)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `UserError` for a value of XLA_FLAGS that XLA cannot read.

    Other values than those known are tried in a process of its own, which takes some tenths of a
    second.
    """
    text = environ.get("XLA_FLAGS", "")
    if all(map(_KNOWN.fullmatch, text.split())):
        return
    tried = subprocess.run(
        # -P: what lies in the working directory is none of the modules.
        [sys.executable, "-P", "-c", _READ_THEM],
        env={**environ, "TF_CPP_MIN_LOG_LEVEL": "0"},  # Its complaints are log lines.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    found = _COMPLAINT.search(tried.stderr)
    if tried.returncode and found:
        raise errors.UserError(
            f"XLA_FLAGS={text!r} cannot be read: {found.group(1).rstrip('.')}. Correct the "
            "environment variable, or unset it."
        )
