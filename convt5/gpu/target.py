"""GPUs by name, such as h100: devices to compile for, where none is.

The compiler comes with JAX's plugin for CUDA (the extra `gpu`), and needs neither a GPU nor its
driver.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import jax

from convt5 import errors

# What CUDA tells of a device (cudaGetDeviceProperties), in the words of XLA's GpuTargetConfigProto;
# bandwidths and clocks are those of NVIDIA's data sheets for A100 80GB SXM and H100 SXM.
_LIMITS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
"""
_DEVICES: Mapping[str, str] = {
    "a100": """
  cuda_compute_capability { major: 8 }
  core_count: 108
  fpus_per_core: 64
  clock_rate_ghz: 1.41
  memory_bandwidth: 2039000000000
  device_memory_size: 85899345920
  l2_cache_size: 41943040
  shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912
""",
    "h100": """
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352000000000
  device_memory_size: 85899345920
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
""",
}
NAMES = tuple(_DEVICES)


def load(name: str) -> Any:
    """Returns a device that programs can be compiled for, but not run on.

    From then on this process computes on the CPU only, and no GPU is looked for.

    Raises:
        UserError: a name that is not known, or JAX's plugin for CUDA is not installed.
    """
    if name not in _DEVICES:
        raise errors.UserError(
            f"gpu={name!r} is none of {', '.join(NAMES)}.{errors.suggest(name, NAMES)}"
        )
    if importlib.util.find_spec("jax_plugins") is None:
        raise errors.UserError(
            f"gpu={name} needs the compiler of GPUs, but JAX's plugin for CUDA is not installed; "
            "add the extra gpu: uv run --extra gpu python -m ..., or pip install 'convt5[gpu]'."
        )
    jax.config.update("jax_platforms", "cpu")
    # Programs for absent devices cannot be read back from JAX's compilation cache.
    jax.config.update("jax_enable_compilation_cache", False)
    from jax.experimental import topologies

    config = (
        f"gpu_device_info {{ {_LIMITS} {_DEVICES[name]} }}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\n'
        f'device_description_str: "{name}"'
    )
    description = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=config
    )
    return description.devices[0]


def bytes_accessed(compiled: jax.stages.Compiled) -> float:
    """Returns the bytes that all instructions of a program read and write, as XLA counts them.

    Programs for absent GPUs do not tell it themselves.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    executable = compiled.runtime_executable()
    assert executable is not None
    (module,) = executable.hlo_modules()
    client = jax.local_devices(backend="cpu")[0].client
    return _jax.hlo_module_cost_analysis(client, module)["bytes accessed"]
