"""Compiles the training step ahead of time, reports its FLOPs, and caches compiled programs.

The trainer compiles its step once, explicitly, and reports how long it took.
"""

import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

# Dense bfloat16 FLOPs per second of one jax device, from vendors' data sheets. On TPU v2 and v3 a
# device is one of the chip's two cores.
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
    """A function compiled for fixed shapes and shardings.

    Attributes:
        call: runs the function.
        seconds: time to compile it, or to load it from the cache.
        flops: FLOPs of one call over all devices, as stated by the program before optimisation;
            None if unknown. Does not include Pallas kernels.
        temporary_bytes: memory per device beside arguments and results; None if unknown.
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
    """Returns the peak bfloat16 FLOPs per second of all devices together; None if unknown."""
    kind = devices[0].device_kind
    # The longest matching name: "TPU v5" is the v5p, but is also a prefix of "TPU v5 lite".
    names = [name for name in _PEAK_FLOPS if kind.startswith(name)]
    return _PEAK_FLOPS[max(names, key=len)] * len(devices) if names else None


def enable_persistent_cache() -> None:
    """Caches compiled programs on disk, so that the same command starts faster the next time.

    The cache is `convt5/compiled` in the user's cache folder (XDG_CACHE_HOME, by default ~/.cache).
    JAX's own settings JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false take
    precedence. If the folder is not writable, there is no cache.
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
