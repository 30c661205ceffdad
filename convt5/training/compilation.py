"""Compiling ahead of the first step: what it costs, how fast it could run, and not doing it twice.

The trainer compiles its step once, explicitly, and tells how long that took.
"""

import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

# Dense bfloat16 operations per second of one jax device, from the makers' data sheets. A TPU v2 or
# v3 device is one of the chip's two cores.
_PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,  # A device is one of the two chiplets of a chip.
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
}


class CompiledStep(NamedTuple):
    """A function compiled for one set of shapes and shardings.

    Attributes:
        call: runs it.
        seconds: how long compiling took, or loading from the cache.
        flops: floating-point operations of one call over all devices, as the program states them
            before optimisation; None where unknown. Operations inside Pallas kernels are not
            counted.
        temporary_bytes: memory needed beside arguments and results on one device; None where
            unknown.
    """

    call: Callable[..., Any]
    seconds: float
    flops: float | None
    temporary_bytes: int | None


def compile_step(jitted: Any, *args: Any) -> CompiledStep:
    """Compiles a jitted function for arguments like `args`, which may be abstract."""
    start = time.perf_counter()
    lowered = jitted.lower(*args)
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    costs = lowered.cost_analysis()
    memory = compiled.memory_analysis()
    return CompiledStep(
        call=compiled,
        seconds=seconds,
        flops=costs.get("flops") if isinstance(costs, dict) else None,
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
    )


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Returns the peak operations per second of all devices in bfloat16; None where unknown."""
    kind = devices[0].device_kind
    # The longest name that fits: "TPU v5" is the v5p, but also begins "TPU v5 lite".
    names = [name for name in _PEAK_FLOPS if kind.startswith(name)]
    return _PEAK_FLOPS[max(names, key=len)] * len(devices) if names else None


def enable_persistent_cache() -> None:
    """Keeps compiled programs on disk, so that the same command starts faster the next time.

    They go to `convt5/compiled` in the user's cache folder (XDG_CACHE_HOME, by default ~/.cache).
    jax's own settings win: JAX_COMPILATION_CACHE_DIR, or JAX_ENABLE_COMPILATION_CACHE=false. Where
    the folder cannot be written the cache stays off.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "convt5" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
