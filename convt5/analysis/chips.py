"""Chips to compile for without having them: their memory, bandwidths and devices."""

import dataclasses
from typing import Any, Literal

from convt5.ops.dispatch import Choice
from convt5.training import compilation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A generation of chips; figures are per jax device.

    Attributes:
        pod: chips along each dimension of the largest slice.
        hbm_bytes: memory that the compiler allows a program to use.
        hbm_bandwidth: bytes per second.
        ici_bandwidth: bytes per second sent to other chips, one way, over all links together.
        cores_per_chip: jax devices per chip.
        implementation: choice of operators; see `convt5.ops.dispatch.Context`.
        config: libtpu's name of the way that jax uses the chip on Cloud TPUs.
        platform: platform of the chip.
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
    """A slice of TPUs, or several GPUs.

    Attributes:
        name: a name such as v5e:4x4.
        chip: the chips.
        devices: jax devices for which programs can be compiled, but not run.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]

    @property
    def peak_flops(self) -> float | None:
        """The peak bfloat16 FLOPs per second of one device."""
        return compilation.peak_flops(self.devices[:1])
