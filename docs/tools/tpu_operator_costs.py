"""What the TPU compiler makes of the convolutions: bytes moved against the least possible.

`python docs/tools/tpu_operator_costs.py` prints the table of docs/performance.md.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from convt5 import errors
from convt5.analysis import topology
from convt5.configuration import command_line
from convt5.ops import Padding, depthwise_conv, dispatch, dynamic_conv, lightweight_conv

CONVOLUTIONS = {
    "depthwise": depthwise_conv,
    "lightweight": lightweight_conv,
    "dynamic": dynamic_conv,
}

KINDS = (
    ("depthwise", 768),
    ("lightweight", 2),
    ("lightweight", 16),
    ("dynamic", 2),
    ("dynamic", 16),
    ("dynamic", 768),
)
"""Operators of the table, and their kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A convolution of packed rows in bfloat16; kernels of depthwise and lightweight in float32.

    Attributes:
        kind: a key of `CONVOLUTIONS`.
        taps, heads, dilation, padding: of the kernels; heads mean nothing to depthwise.
        batch, length, embed: of the rows.
    """

    kind: str
    taps: int
    heads: int
    dilation: int = 1
    padding: Padding = "CENTERED"
    batch: int = 8
    length: int = 512
    embed: int = 768

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The rows, the weights or logits, and the segment ids."""
        shape = (self.taps, self.embed if self.kind == "depthwise" else self.heads)
        weights = jax.ShapeDtypeStruct(shape, jnp.float32)
        if self.kind == "dynamic":
            weights = jax.ShapeDtypeStruct((self.batch, self.length, *shape), jnp.bfloat16)
        rows = (self.batch, self.length)
        x = jax.ShapeDtypeStruct((*rows, self.embed), jnp.bfloat16)
        return x, weights, jax.ShapeDtypeStruct(rows, jnp.int32)

    def forward(self, x, weights, ids):
        convolve = CONVOLUTIONS[self.kind]
        return convolve(x, weights, dilation=self.dilation, padding=self.padding, segment_ids=ids)

    def both(self, x, weights, ids, cotangent):
        """The output and the gradients."""
        y, vjp = jax.vjp(functools.partial(self.forward, ids=ids), x, weights)
        return y, *vjp(cotangent)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes of one compiled program.

    Attributes:
        accessed: by all of its instructions, as the compiler counts them. Of kernels it knows what
            they state: every block that is fetched or written, as often as that happens.
        least: arguments once and results once.
        temporaries: what it needs beside both.
        kernels: calls of kernels.
    """

    accessed: float
    least: int
    temporaries: int
    kernels: int

    @property
    def ratio(self) -> float:
        return self.accessed / self.least


def _accessed(compiled: Compiled) -> float:
    return (compiled.cost_analysis() or {})["bytes accessed"]


def measure(
    case: Case, device: Any, *, accessed: Callable[[Compiled], float] = _accessed
) -> tuple[Cost, Cost]:
    """Returns the cost of the forward pass, and of forward and backward pass together.

    Args:
        case: the operator.
        device: to compile for.
        accessed: returns the bytes that a program accesses.
    """
    x, *others = case.arrays
    return (
        _compiled(case.forward, (x, *others), device, accessed),
        _compiled(case.both, (x, *others, x), device, accessed),
    )


def _compiled(function, arrays, device, accessed) -> Cost:
    where = SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in arrays]
    # A function of its own: jit keeps what it has traced, whatever formulation was chosen.
    compiled = jax.jit(lambda *given: function(*given)).lower(*placed).compile()
    results = jax.tree.leaves(jax.eval_shape(function, *arrays))
    memory = compiled.memory_analysis()
    assert memory is not None
    return Cost(
        accessed=accessed(compiled),
        least=sum(a.size * a.dtype.itemsize for a in (*arrays, *results)),
        temporaries=memory.temp_size_in_bytes,
        kernels=(compiled.as_text() or "").count('custom_call_target="tpu_custom_call"'),
    )


def rows(device: Any, taps: Sequence[int], dilations: Sequence[int]) -> Iterator[str]:
    """Yields lines of a Markdown table of ratios, each the larger of the two paddings."""
    yield "| operator | H | K | dilation | forward | both | plain: forward | plain: both |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for (kind, heads), count, dilation in itertools.product(KINDS, taps, dilations):
        cells = [kind, heads, count, dilation]
        cases = [
            Case(kind=kind, taps=count, heads=heads, dilation=dilation, padding=padding)
            for padding in ("CENTERED", "CAUSAL")
        ]
        for choice in ("auto", "plain"):
            with dispatch.using(choice=choice):
                costs = [measure(case, device) for case in cases]
            cells += [f"{max(c.ratio for c in column):.2f}" for column in zip(*costs, strict=True)]
        yield f"| {' | '.join(map(str, cells))} |"


def add_case_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--taps", type=int, nargs="+", default=[3, 7, 31])
    parser.add_argument("--dilations", type=int, nargs="+", default=[1, 8])


def check_case_flags(settings: argparse.Namespace) -> None:
    """Raises `UserError` for taps or dilations that no convolution has."""
    errors.raise_all(
        (
            f"--{name}={value} must be at least 1."
            for name in ("taps", "dilations")
            for value in getattr(settings, name)
            if value < 1
        ),
        where="flags",
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/tpu_operator_costs.py")
    parser.add_argument("--topology", default="v5e:2x2", help="a name of convt5.analysis.topology")
    add_case_flags(parser)
    settings = parser.parse_args(argv)
    check_case_flags(settings)
    device = topology.load(settings.topology).devices[0]
    for row in rows(device, settings.taps, settings.dilations):
        print(row, flush=True)


if __name__ == "__main__":
    command_line.run(main)
