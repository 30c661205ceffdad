"""Chips that programs can be compiled for where none is: their memory, bandwidths and devices."""

import dataclasses
from typing import Any, Literal

from convt5.ops.dispatch import Choice
from convt5.training import compilation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A generation of chips; figures are those of one jax device.

    Attributes:
        pod: chips along each dimension of the largest slice.
        hbm_bytes: memory that the compiler lets a program use.
        hbm_bandwidth: bytes per second.
        ici_bandwidth: bytes per second sent to other chips, over all links together, one way.
        cores_per_chip: jax devices of a chip.
        implementation: of operators; see `convt5.ops.dispatch.Context`.
        config: how libtpu names the way that jax uses the chip on Cloud TPUs.
        platform: what the chip is.
    """

    pod: tuple[int, ...]
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    cores_per_chip: int = 1
    implementation: Choice = "auto"
    config: str = "default"
    platform: Literal["TPU", "GPU"] = "TPU"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPUs, or GPUs.

    Attributes:
        name: such as v5e:4x4.
        chip: of its generation.
        devices: jax devices that programs can be compiled for, but not run on.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]

    @property
    def peak_flops(self) -> float | None:
        """The peak operations per second of one device in bfloat16."""
        return compilation.peak_flops(self.devices[:1])
