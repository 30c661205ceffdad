"""Checks XLA_FLAGS before XLA reads them, because it aborts the process for an invalid one."""

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
"""Flags set by launch/local.py and --deterministic."""

_READ_THEM = "import jaxlib.xla_client as client; client.CompileOptions()"
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.*(?:XLA_FLAGS|for flag).*)$", re.MULTILINE)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `UserError` for a value of XLA_FLAGS that XLA cannot parse.

    Values other than the known ones are tried in a separate process, which takes some tenths of a
    second.
    """
    text = environ.get("XLA_FLAGS", "")
    if all(map(_KNOWN.fullmatch, text.split())):
        return
    tried = subprocess.run(
        # -P: modules in the working directory must not be imported.
        [sys.executable, "-P", "-c", _READ_THEM],
        env={**environ, "TF_CPP_MIN_LOG_LEVEL": "0"},  # XLA reports errors as log lines.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    complaint = _COMPLAINT.search(tried.stderr)
    if tried.returncode and complaint:
        raise errors.UserError(
            f"XLA_FLAGS={text!r} cannot be read: {complaint.group(1).rstrip('.')}. Correct the "
            "environment variable, or unset it."
        )
