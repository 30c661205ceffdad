"""GPUs by name, such as h100:8: devices to compile for without having them.

The compiler is part of JAX's CUDA plugin (the extra `gpu`), and needs neither a GPU nor its driver.
"""

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

import jax

from convt5 import errors
from convt5.analysis.chips import Chip, Topology

# Device properties as reported by CUDA (cudaGetDeviceProperties), in the form of XLA's
# GpuTargetConfigProto; bandwidths and clocks from NVIDIA's data sheets of A100 80GB SXM and H100
# SXM.
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
  name: "NVIDIA A100-SXM4-80GB"
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
  name: "NVIDIA H100 80GB HBM3"
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
_GIB = 2**30
# JAX uses three quarters of a device's memory by default (XLA_PYTHON_CLIENT_MEM_FRACTION). Links
# are NVLink 3 and 4: 12 and 18 links of 25 GB/s one way.
CHIPS: Mapping[str, Chip] = {
    name: Chip(
        pod=(),
        hbm_bytes=60 * _GIB,
        hbm_bandwidth=bandwidth,
        ici_bandwidth=links * 25e9,
        platform="GPU",
    )
    for name, bandwidth, links in (("a100", 2039e9, 12), ("h100", 3352e9, 18))
}
_HOST = 8
"""GPUs per host."""


def parse(name: str) -> tuple[str, int]:
    """Returns the kind and the number of GPUs of a name such as h100:8.

    Raises:
        UserError: an unknown kind, or an impossible number.
    """
    match = re.fullmatch(r"(\w+):(\d{1,4})", name)
    count = int(match[2]) if match else 0
    are_hosts = count in (1, 2, 4) or (count >= _HOST and count % _HOST == 0)
    if match is None or match[1] not in CHIPS or not are_hosts:
        raise errors.UserError(
            f"topology={name!r} is not known. GPUs are {' or '.join(CHIPS)}, and how many: 1, 2, 4 "
            f"or a multiple of {_HOST}, such as h100:1 or h100:{_HOST}."
        )
    return match[1], count


def load(name: str) -> Topology:
    """Returns GPUs; afterwards this process computes only on CPU, and uses no local GPU.

    Raises:
        UserError: a name that `parse` refuses, or JAX's CUDA plugin is not installed.
    """
    kind, count = parse(name)
    if importlib.util.find_spec("jax_plugins") is None:
        raise errors.UserError(
            f"topology={name} needs the compiler of GPUs, but JAX's plugin for CUDA is not "
            "installed; add the extra gpu: uv run --extra gpu python -m ..., or pip install "
            "'convt5[gpu]'."
        )
    jax.config.update("jax_platforms", "cpu")
    # JAX cannot load programs for absent devices from its compilation cache.
    jax.config.update("jax_enable_compilation_cache", False)
    from jax.experimental import topologies

    (label,) = re.findall(r'name: "(.*)"', _DEVICES[kind])
    config = (
        f"gpu_device_info {{ {_LIMITS} {_DEVICES[kind]} }}\n"
        f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\n'
        f'device_description_str: "{label}"'
    )
    hosts = max(1, count // _HOST)
    description = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{count // hosts}", target_config=config
    )
    return Topology(name, CHIPS[kind], tuple(description.devices))


def cost_analysis(compiled: Any) -> Mapping[str, float]:
    """Returns XLA's cost analysis of a program, which programs for absent GPUs do not provide.

    Args:
        compiled: a `jax.stages.Compiled`.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    (module,) = compiled.runtime_executable().hlo_modules()
    return _jax.hlo_module_cost_analysis(jax.local_devices(backend="cpu")[0].client, module)


def bytes_accessed(compiled: jax.stages.Compiled) -> float:
    """Returns the bytes read and written by all instructions of a program."""
    return cost_analysis(compiled)["bytes accessed"]
