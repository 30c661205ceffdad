"""TPU slices by name, such as v5e:4x4: devices to compile for without having them, and chip data.

Names of GPUs, such as h100:8, are passed to `gpu_target`.

The compiler is part of libtpu (the extra `tpu`) and needs no TPU; `compiled_step` uses it.
"""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping

import jax

from convt5 import errors
from convt5.analysis import gpu_target
from convt5.analysis.chips import Chip, Topology

_GIB = 2**30

# Read once, when libtpu is loaded. Otherwise libtpu queries the metadata server of a cloud machine,
# lets only one process compile at a time, and writes its log to the terminal and to /tmp.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


# Memory is what libtpu 0.0.42 reports as available when a program needs too much. Bandwidths are
# from "TPU architecture" (cloud.google.com/tpu/docs/v3 to tpu7x), which gives those of links for
# both directions together; for v3 and v4, from number and speed of the links: 4 of 656 Gbit/s
# (Jouppi et al. 2020, CACM 63(7), table 3) and 6 of 50 GB/s (Jouppi et al. 2023, arXiv 2304.01433,
# table 4). A v3 device is one of two cores of a chip and has half of everything; likewise a TPU7x
# device, one of two chiplets.
CHIPS: Mapping[str, Chip] = {
    "v3": Chip(
        pod=(32, 32),
        hbm_bytes=int(15.48 * _GIB),
        hbm_bandwidth=450e9,
        ici_bandwidth=164e9,
        cores_per_chip=2,
        # Pallas kernels for v2 and v3 cannot multiply bfloat16 matrices.
        implementation="plain",
    ),
    "v4": Chip(
        pod=(16, 16, 16),
        hbm_bytes=int(30.75 * _GIB),
        hbm_bandwidth=1200e9,
        ici_bandwidth=300e9,
        config="megacore",
    ),
    "v5e": Chip(
        pod=(16, 16), hbm_bytes=int(15.75 * _GIB), hbm_bandwidth=819e9, ici_bandwidth=200e9
    ),
    "v5p": Chip(
        pod=(16, 16, 24), hbm_bytes=int(95.74 * _GIB), hbm_bandwidth=2765e9, ici_bandwidth=600e9
    ),
    "v6e": Chip(
        pod=(16, 16), hbm_bytes=int(31.25 * _GIB), hbm_bandwidth=1638e9, ici_bandwidth=400e9
    ),
    "tpu7x": Chip(
        pod=(16, 16, 36),
        hbm_bytes=int(94.75 * _GIB),
        hbm_bandwidth=3690e9,
        ici_bandwidth=300e9,
        cores_per_chip=2,
    ),
}


@dataclasses.dataclass(frozen=True)
class TopologyName:
    """A valid name: a generation of `CHIPS`, and chips along each dimension."""

    generation: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    def __str__(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"


def parse(name: str) -> TopologyName:
    """Parses a name such as v5e:4x4 or v5p:2x2x1.

    Raises:
        UserError: an unknown generation, or an impossible shape.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    if match is None or match[1] not in CHIPS:
        raise errors.UserError(f"topology={name!r} is not known. {_valid()}")
    shape = tuple(map(int, match[2].split("x")))
    pod = CHIPS[match[1]].pod
    is_slice = (
        len(shape) == len(pod)
        and all(size % 2 == 0 for size in shape[:2])
        and all(1 <= size <= limit for size, limit in zip(shape, pod, strict=True))
    )
    if not is_slice and shape != (1,) * len(pod):
        raise errors.UserError(f"topology={name!r} is not a slice of {match[1]}. {_valid()}")
    return TopologyName(match[1], shape)


def load(name: str) -> Topology:
    """Returns the devices of a slice, or GPUs; afterwards this process computes only on CPU.

    Local TPUs, if any, are not used.

    Raises:
        UserError: a name that `parse` refuses, or libtpu is not installed.
    """
    if name.partition(":")[0] in gpu_target.CHIPS:
        return gpu_target.load(name)
    parsed = parse(name)
    if importlib.util.find_spec("libtpu") is None:
        raise errors.UserError(
            f"topology={name} needs the TPU compiler, but libtpu is not installed; add the extra "
            "tpu: uv run --extra tpu python -m convt5.inspect ..., or pip install 'convt5[tpu]'."
        )
    jax.config.update("jax_platforms", "cpu")
    # JAX cannot load programs for absent devices from its compilation cache.
    jax.config.update("jax_enable_compilation_cache", False)
    for variable, value in _LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # Deferred until the environment of libtpu is set.
    from jax.experimental import topologies

    # A host has 2 x 2 chips, except for a single chip.
    single = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(parsed.shape) == 1 else {}
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=str(parsed), chip_config_name=parsed.chip.config, **single
    )
    return Topology(str(parsed), parsed.chip, tuple(description.devices))


def _valid() -> str:
    generations = ", ".join(
        f"{generation}:{'x'.join(map(str, chip.pod))}" for generation, chip in CHIPS.items()
    )
    return (
        f"A name gives a generation and its chips along each dimension, at most {generations}, "
        "such as v5e:2x2, v5e:4x4, v6e:8x16, v4:2x2x1 or v5p:4x4x8; the first two dimensions "
        "are even, except for a single chip: v5e:1x1, v5p:1x1x1. For GPUs it gives a kind and a "
        "number: h100:8."
    )
