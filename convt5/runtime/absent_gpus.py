"""JAX's plugin for CUDA where no GPU is, as on a machine that only compiles for GPUs."""

import importlib.metadata
import importlib.util
import os
import pathlib

_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Of NVIDIA's driver, of containers, and of Windows' Linux; jax looks for the same."""


def leave_out() -> None:
    """Has JAX compute on the CPU where its plugin for CUDA is installed, but no driver.

    jax 0.10 asks each library for its version, and CUPTI's ends the process without a driver. What
    the environment variable JAX_PLATFORMS says stays, and so does everything where TPUs may be. It
    must be called before JAX is imported.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is not None:
        return
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    is_cuda_alone = bool(plugins) and all(name.startswith("xla_cuda") for name in plugins)
    if is_cuda_alone and not any(pathlib.Path(device).exists() for device in _DEVICES):
        os.environ["JAX_PLATFORMS"] = "cpu"
