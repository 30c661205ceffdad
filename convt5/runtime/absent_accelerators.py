"""What JAX computes with where no accelerator is, as on a machine that only compiles for them."""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import sys

_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Of the driver, of containers, and of Windows' Linux; jax looks for the same."""

_TPU = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
"""Of TPUs, and of some network cards in Google's clouds, which are taken for TPUs here."""

_FORCED = ("JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH")


def leave_out() -> None:
    """Has JAX compute on the CPU where it could use accelerators, but none is there.

    With libtpu installed it would try each time to start a TPU, which takes seconds and writes
    errors. With its plugin for CUDA jax 0.10 asks each library for its version, and CUPTI's ends
    the process without a driver. What the environment variable JAX_PLATFORMS says stays, and so
    does everything in doubt. It must be called before JAX looks for devices.
    """
    if "JAX_PLATFORMS" in os.environ:
        return
    names = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    has_libtpu = importlib.util.find_spec("libtpu") is not None
    if not (names or has_libtpu) or not all(name.startswith("xla_cuda") for name in names):
        return
    if (names and _any_exists(_NVIDIA)) or (has_libtpu and _may_have_tpus()):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # It read the variable as it was imported.
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _may_have_tpus() -> bool:
    bus = pathlib.Path(_PCI)
    return (
        any(name in os.environ for name in _FORCED)
        or _any_exists(_TPU)
        # A small virtual machine has a bus without devices; without a bus nothing is known.
        or not bus.exists()
        or _GOOGLE in [path.read_text().strip() for path in bus.glob("*/vendor")]
    )


def _any_exists(patterns: tuple[str, ...]) -> bool:
    return any(glob.glob(pattern) for pattern in patterns)
