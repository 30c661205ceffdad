"""Bit-reproducible programs on GPUs, which XLA compiles only on request.

By default, XLA on GPU uses atomic additions in arbitrary order, and autotunes kernels by timing
them. On CPU and TPU, programs are always deterministic.
"""

import os
from collections.abc import MutableMapping

from convt5 import errors
from convt5.runtime.flags import Flag

FLAG = Flag(
    "deterministic",
    "GPUs: compiles programs that compute the same bits in every run, as bit-identical "
    "resumption requires; they may be slower. CPUs and TPUs do not need it. Adds "
    "--xla_gpu_deterministic_ops=true and --xla_gpu_autotune_level=0 to XLA_FLAGS.",
    {"action": "store_true"},
)
_OPS = "--xla_gpu_deterministic_ops"
_WANTED = {_OPS: "true", "--xla_gpu_autotune_level": "0"}
_NAMES_OF_TRUE = ("true", "1", "")


def require(environ: MutableMapping[str, str] = os.environ) -> None:
    """Adds flags for deterministic GPU programs to XLA_FLAGS.

    JAX reads the variable once, so this must be called before it computes anything.

    Raises:
        UserError: XLA_FLAGS requests the opposite, or names a file of flags.
    """
    text = environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        raise errors.UserError(
            f"XLA_FLAGS={text} names a file, to which --deterministic cannot add; write "
            f"{' and '.join(f'{name}={value}' for name, value in _WANTED.items())} there."
        )
    given = _parse(environ)
    for name, value in _WANTED.items():
        current = given.get(name, value)
        if current != value and not (name == _OPS and current in _NAMES_OF_TRUE):
            raise errors.UserError(
                f"--deterministic needs {name}={value}, but XLA_FLAGS has {name}={current}; remove "
                "one of the two."
            )
    missing = [f"{name}={value}" for name, value in _WANTED.items() if name not in given]
    environ["XLA_FLAGS"] = " ".join([*text.split(), *missing])


def is_required(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Returns whether XLA_FLAGS requests deterministic GPU programs, whoever set it."""
    return _parse(environ).get(_OPS, "false") in _NAMES_OF_TRUE


def describe(platform: str, environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Returns the line about determinism for the log of a run, or None."""
    if platform != "gpu":
        return None
    if is_required(environ):
        return "programs are deterministic: this run resumes bit for bit"
    return "without --deterministic, a run on GPUs resumes up to rounding, not bit for bit"


def record(config_text: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Adds a comment to the settings of a run if its GPU programs are deterministic."""
    return f"# {_OPS}\n{config_text}" if is_required(environ) else config_text


def _parse(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Parses XLA_FLAGS; the last flag of a name counts."""
    parts = (flag.partition("=") for flag in environ.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in parts}
