"""Selects the CPU for JAX on machines without accelerators, such as those that only compile."""

import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import traceback

from convt5 import errors

_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device files of the NVIDIA driver, also in containers and WSL; jax checks the same ones."""

_TPU = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
_PCI = "/sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
"""PCI ids of TPUs, and of some network cards in Google's clouds, which are mistaken for TPUs."""

_LOOKS_FOR_DEVICES = os.path.join("jax", "_src", "xla_bridge.py")
_FORCED = ("JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH")


def leave_out() -> None:
    """Makes JAX compute on the CPU if it could use accelerators but none is present.

    With libtpu installed, JAX would try to start a TPU each time, which takes seconds and prints
    errors. With its CUDA plugin, jax 0.10 queries the version of each library, and CUPTI's kills
    the process if there is no driver. The environment variable JAX_PLATFORMS takes precedence, and
    in doubt nothing changes. Must be called before JAX looks for devices.
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
    if "jax" in sys.modules:  # It reads the variable when it is imported.
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def of_devices(error: BaseException) -> errors.UserError | None:
    """Returns the user error for JAX errors about missing devices; None for other errors."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_code.co_filename.endswith(_LOOKS_FOR_DEVICES) for frame, _ in frames):
        return None
    if not isinstance(error, RuntimeError | AssertionError):
        return None
    names = [name for name in ("JAX_PLATFORMS", "XLA_FLAGS") if os.environ.get(name)]
    asked = " and ".join(f"{name}={os.environ[name]!r}" for name in names)
    reason = str(error).strip().partition("\n")[0].partition(" (set JAX_PLATFORMS")[0][:300]
    return errors.UserError(
        f"JAX finds no usable devices{f' with {asked}' if asked else ''}: "
        f"{reason.rstrip('.') or 'the library of that platform is not installed'}. Set "
        "JAX_PLATFORMS=cpu to compute on the CPU, or unset the variable to use the devices of "
        "this machine."
    )


def _may_have_tpus() -> bool:
    bus = pathlib.Path(_PCI)
    return (
        any(name in os.environ for name in _FORCED)
        or _any_exists(_TPU)
        # A small virtual machine has a bus without devices; without a bus, nothing is known.
        or not bus.exists()
        or _GOOGLE in [path.read_text().strip() for path in bus.glob("*/vendor")]
    )


def _any_exists(patterns: tuple[str, ...]) -> bool:
    return any(glob.glob(pattern) for pattern in patterns)
