"""Where the time of a training step goes: each operation, by the code that asked for it.

`python docs/tools/step_costs.py --gin_file=gin/models/dynamic_tiny.gin` prints, for each length,
the time of each part of the model within the step, and how much of it exceeds the time of its FLOPs
at the speed of the machine's matrix products. A profile of the step gives the time of every
operation, and the compiled program says which functions each of them came from. The process keeps
to one core, on which operations follow one another, so that their times add up to the step.
"""

import argparse
import collections
import math
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from convt5 import bench, errors
from convt5.benchmarks import machine, models
from convt5.configuration import command_line
from convt5.reports import markdown
from convt5.runtime.bars import Bar

# The innermost of these functions that an operation came from names its part.
PARTS = {
    "dense": "dense layers",
    "sum_of_products": "dense layers",
    "attend": "attention",
    "Attention.attend": "attention",
    "lightweight_conv": "convolutions",
    "dynamic_conv": "convolutions",
    "depthwise_conv": "convolutions",
    "TapPredictor.__call__": "tap logits",
    "gate": "gates",
    "Mlp.__call__": "activations",
    "Norm.__call__": "norms and residuals",
    "Residual.__call__": "norms and residuals",
    "Embed.__call__": "embedding",
    "linear_cross_entropy": "cross-entropy",
    "TrainState.apply_gradients": "optimizer",
    "_finite_norms": "norms of gradients",
}
OTHER = "other operations"
BETWEEN = "between operations"


class Operation(NamedTuple):
    """An operation of a compiled program.

    Attributes:
        part: the part of the model that asked for it.
        flops: of the matrix products in it.
    """

    part: str
    flops: int


class _Instruction(NamedTuple):
    kind: str
    sizes: Sequence[int]
    rest: str
    part: str

    def called(self) -> list[str]:
        """Returns the computations that it runs."""
        named = re.findall(r"(?:calls|body|condition|to_apply)=%?([^\s,]+)", self.rest)
        branches = re.findall(r"branch_computations=\{([^}]*)\}", self.rest)
        return [*named, *(each.strip(" %") for text in branches for each in text.split(","))]


def operations(program: str) -> dict[str, Operation]:
    """Returns the operations of a program by name.

    Args:
        program: text of an HLO module, with its tables of stack frames.
    """
    computations = _computations(program, _parts_of_frames(program))
    found: dict[str, Operation] = {}
    # What calls a computation stands after it, and gives its part to what has none.
    inherited: dict[str, str] = {}
    for name, instructions in reversed(computations.items()):
        for operation, each in instructions.items():
            part = each.part if each.part != OTHER else inherited.get(name, OTHER)
            flops = _flops(each, instructions) if each.kind == "dot" else 0
            found[operation] = Operation(part, flops)
            for callee in each.called():
                inherited.setdefault(callee, part)
    for instructions in computations.values():
        for operation, each in instructions.items():
            if each.kind == "fusion":
                (callee,) = each.called()
                inside = [found[other] for other in computations[callee]]
                found[operation] = _fused(found[operation], inside)
    return found


def _fused(own: Operation, inside: Sequence[Operation]) -> Operation:
    """Returns a fusion: of the part of its matrix products, else of its own, else of any."""
    products = [each.part for each in inside if each.flops]
    parts = [each.part for each in inside]
    known = [part for part in (*products, own.part, *parts) if part != OTHER]
    return Operation(next(iter(known), OTHER), sum(each.flops for each in inside))


def _computations(program: str, part_of: Mapping[int, str]) -> dict[str, dict[str, _Instruction]]:
    """Returns the instructions of each computation by name."""
    computations: dict[str, dict[str, _Instruction]] = {}
    name = ""
    for line in program.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?(\S+) \(.*\{$", line):
            name = opened[1]
        known = re.match(r"\s+(?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\((.*)", line)
        if known:
            operation, shape, kind, rest = known.groups()
            sizes = re.findall(r"\[([\d,]*)\]", shape)[:1]
            frame = re.search(r"stack_frame_id=(\d+)", rest)
            computations.setdefault(name, {})[operation] = _Instruction(
                kind, _numbers(*sizes), rest, part_of[int(frame[1])] if frame else OTHER
            )
    return computations


def _numbers(text: str = "") -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _flops(product: _Instruction, instructions: Mapping[str, _Instruction]) -> int:
    """Returns the FLOPs of a matrix product."""
    left = re.findall(r"%?([^\s,)]+)", product.rest)[0]
    contracted = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", product.rest)[0]
    sizes = [instructions[left].sizes[axis] for axis in _numbers(contracted)]
    return 2 * math.prod(product.sizes) * math.prod(sizes)


def _parts_of_frames(program: str) -> dict[int, str]:
    """Returns the part of each stack frame."""
    functions, locations, frames = (
        program.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
        for name in ("FunctionNames", "FileLocations", "StackFrames")
    )
    names = [line.split('"')[1] for line in functions]
    parts = {0: OTHER}
    for number, line in enumerate(frames, start=1):
        location, caller = (int(each) for each in re.findall(r"_id=(\d+)", line))
        function = int(re.findall(r"function_name_id=(\d+)", locations[location - 1])[0])
        # The text counts callers from 1, for none, and a caller stands before what it calls.
        parts[number] = PARTS.get(names[function - 1], parts[caller - 1])
    return parts


def measured(run: Any, repeats: int) -> tuple[float, dict[str, list[float]]]:
    """Returns the seconds of a step, and those of each run of each operation, from a profile.

    An operation that contains others, such as a loop, has the time that these leave.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            began = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(run())
            seconds = time.perf_counter() - began
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    taken: dict[str, list[float]] = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            for name, nanoseconds in _alone(line.events):
                taken[name].append(nanoseconds / 1e9)
    return seconds / repeats, taken


def _alone(events: Any) -> Iterator[tuple[str, float]]:
    """Yields operations with their nanoseconds without those of what ran inside of them."""
    timed = [each for each in events if "hlo_op" in dict(each.stats)]
    timed.sort(key=lambda each: (each.start_ns, -each.duration_ns))
    # Name, end, and the time that is left of each operation that has not ended.
    within: list[list[Any]] = []
    for each in timed:
        while within and within[-1][1] <= each.start_ns:
            yield within[-1][0], within.pop()[2]
        if within:
            within[-1][2] -= each.duration_ns
        within.append([each.name, each.start_ns + each.duration_ns, each.duration_ns])
    yield from ((name, left) for name, _, left in within)


def table(config: Any, length: int, rows: int, repeats: int) -> str:
    """Measures a length; returns its table as Markdown."""
    run, step = models.compiled_step(config, length, rows)
    known = operations(step.call.as_text())
    before = machine.describe()["matmul_flops"]
    whole, taken = measured(run, repeats)
    speed = max(before, machine.describe()["matmul_flops"])
    sums: dict[str, list[float]] = {}
    for name, seconds in taken.items():
        part, flops = known.get(name, Operation(OTHER, 0))
        total = sums.setdefault(part, [0.0, 0.0])
        total[0] += flops * len(seconds) / repeats
        total[1] += sum(seconds) / repeats
    ranked = dict(sorted(sums.items(), key=lambda item: -item[1][1]))
    ranked[BETWEEN] = [0.0, whole - sum(seconds for _, seconds in sums.values())]
    ranked["step"] = [sum(flops for flops, _ in sums.values()), whole]
    title = (
        f"{rows} rows of {length:,} tokens: {whole:.3f} s, {ranked['step'][0] / whole / 1e9:.0f} "
        f"of {speed / 1e9:.0f} GFLOP/s"
    )
    shown = [
        {
            "part": part,
            "GFLOP": f"{flops / 1e9:.1f}",
            "ms": f"{1e3 * seconds:.1f}",
            "of the step": f"{seconds / whole:.1%}",
            "its FLOPs at full speed": f"{flops / speed / whole:.1%}",
            "beyond": f"{(seconds - flops / speed) / whole:.1%}",
        }
        for part, (flops, seconds) in ranked.items()
    ]
    return f"{title}\n\n{markdown.table(shown)}"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/step_costs.py", allow_abbrev=False)
    parser.add_argument("--gin_file", required=True, help="a model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=11)
    settings, bindings = parser.parse_known_args(argv)
    unknown = [each for each in bindings if not each.startswith("--gin.")]
    if unknown:
        raise errors.UserError(f"{unknown[0]} is no flag of this command; --help lists them.")
    named = bench._models([settings.gin_file], [each.removeprefix("--gin.") for each in bindings])
    (config,) = named.values()
    tables = []
    with Bar(sys.stderr, total=len(settings.lengths), unit="length") as progress:
        for length in settings.lengths:
            tables.append(table(config, length, settings.batch_size, settings.repeats))
            progress.update()
    print("\n\n".join(tables))


if __name__ == "__main__":
    if not hasattr(os, "sched_setaffinity"):
        sys.exit("step_costs.py keeps to one core, which this system has no call for; use Linux.")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    command_line.run(main)
