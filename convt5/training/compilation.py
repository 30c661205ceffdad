"""Compiles the training step ahead of time, reports its FLOPs, and caches compiled programs.

The trainer compiles its step once, explicitly, and reports how long it took.
"""

import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from convt5.runtime import folders, stages
from convt5.training import flops
from convt5.training.programs import Kept, Program, found_by_jax, is_own

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
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "Tesla V100": 125e12,
    "Tesla T4": 65e12,
}


class CompiledStep(NamedTuple):
    """A function compiled for fixed shapes and shardings.

    Attributes:
        call: runs the function.
        seconds: time to compile it, or to load it from the cache.
        flops: FLOPs of one call over all devices, as stated by the program before optimisation,
            with every step of its loops; None if unknown. Does not include Pallas kernels.
        temporary_bytes: memory per device beside arguments and results; None if unknown.
        was_kept: whether an earlier process compiled it.
    """

    call: Callable[..., Any]
    seconds: float
    flops: float | None
    temporary_bytes: int | None
    was_kept: bool = False


def compile_step(jitted: Any, *args: Any, kept: Kept | None = None) -> CompiledStep:
    """Compiles a jitted function for arguments like `args`, which may be abstract.

    Args:
        jitted: the function.
        args: its arguments.
        kept: where an earlier process may have kept the program; None always compiles it.
    """
    start = time.perf_counter()
    with stages.stage("load"):
        program = None if kept is None else kept.load(args)
    if program is not None:
        return _loaded(program, start)
    with stages.stage("trace"):
        traced = jitted.trace(*args)
        lowered = traced.lower()
    with stages.stage("load"):
        program = None if kept is None else kept.load(args, lowered)
    if program is not None:
        return _loaded(program, start)
    with stages.stage("compile"), found_by_jax() as was_found:
        compiled = lowered.compile()
    seconds = time.perf_counter() - start
    costs = lowered.cost_analysis()
    memory = compiled.memory_analysis()
    facts = {
        "flops": _flops(traced, costs, args),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
    }
    if kept is not None and not was_found():
        kept.save(args, lowered, compiled, facts)
    return CompiledStep(compiled, seconds, **facts)


def _flops(traced: Any, costs: Any, args: Sequence[Any]) -> float | None:
    """Returns the FLOPs of a program, with all steps of its loops and all devices; or None."""
    counted = costs.get("flops") if isinstance(costs, dict) else None
    if counted is None:
        return None
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    devices = next((list(s.device_set) for s in shardings if s), jax.local_devices()[:1])
    return counted + flops.uncounted(traced.jaxpr, devices)


def _loaded(program: Program, start: float) -> CompiledStep:
    seconds = time.perf_counter() - start
    return CompiledStep(program.call, seconds, **program.facts, was_kept=True)


class KeptFunction:
    """A jitted function whose compiled programs are kept.

    Args:
        jitted: the function.
        kept: where its programs are kept.
    """

    def __init__(self, jitted: Callable[..., Any], kept: Kept):
        self._jitted = jitted
        self._kept = kept
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._jitted(*args)
        key = (structure, *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        if key not in self._programs:
            self._programs[key] = compile_step(self._jitted, *args, kept=self._kept).call
        return self._programs[key](*args)


def peak_flops(devices: Sequence[Any]) -> float | None:
    """Returns the peak bfloat16 FLOPs per second of all devices together; None if unknown."""
    kind = devices[0].device_kind
    # The longest matching name: "TPU v5" is the v5p, but is also a prefix of "TPU v5 lite". Whole
    # words: an "NVIDIA L40S" is no "NVIDIA L4". A part of a GPU has a part of its peak.
    names = [name for name in _PEAK_FLOPS if re.match(rf"{name}\b(?!.* MIG )", kind)]
    return _PEAK_FLOPS[max(names, key=len)] * len(devices) if names else None


def enable_persistent_cache() -> pathlib.Path | None:
    """Caches compiled programs on disk, so that the same command starts faster the next time.

    The cache is `convt5/compiled` in the user's cache folder (XDG_CACHE_HOME, by default ~/.cache).
    JAX's own settings JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=false take
    precedence. If the folder is not writable, or another user can write it, there is no cache: its
    programs are run as they are.

    Returns:
        The folder beside it for whole programs (`programs.Kept`); None without this cache.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return None
    cache = folders.user_cache()
    if cache is None:
        return None
    folder = cache / "compiled"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        programs = folder.with_name("programs")
        for each in (folder, programs):
            each.mkdir(mode=0o700, exist_ok=True)
        if not (is_own(folder.stat()) and os.access(folder, os.W_OK)):
            return None
    except OSError:
        return None
    # A full disk slows later starts down, and changes no result.
    warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return programs
