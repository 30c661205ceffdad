"""The collectives of a compiled program: their number, bytes, and mesh axes.

Parsed from the text of the optimised HLO that XLA prints; `compiled_step` sums them up.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_PARTS = ("async_collective_fusion", "fused_computation")
"""Prefixes of the names of computations that may contain a part of a collective."""

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LINE = re.compile(
    rf"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})"
    r"(?P<start>-start)?\("
)
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLS = re.compile(r"\b(?:calls|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_WHILE = re.compile(r" while\(.*\bcondition=%?(?P<condition>[\w.\-]+), body=%?(?P<body>[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = r"\[(?P<{0}sizes>[\d,]+)\](?:T\((?P<{0}order>[\d,]+)\))?"
_TILED = re.compile(
    r"replica_groups=\[(?P<tile>[\d,]+)\]<=" + _IOTA.format("")  # [groups, members]<=[ids]T(order)
)
_MESHED = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?:" + _IOTA.format("") + r"|(?P<ids>[\d,]+))\))?\s*\{(?P<over>[^}]*)\}"
)


class Group(NamedTuple):
    """Devices that exchange data, as flat positions in the mesh (last axis fastest)."""

    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation of a program, in which all devices take part.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes along which the members of a group differ.
        group_size: devices per group.
        count: executions per run of the program, with loops unrolled.
        payload_bytes: bytes of one execution on one device: the whole array where it is largest
            (after gathering, or before scattering).
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: float

    @property
    def sent_bytes(self) -> float:
        """Bytes sent per device and execution, by the algorithm that sends the fewest.

        To gather, scatter or exchange among n devices, each sends (n-1)/n of the payload; to
        all-reduce, twice that; a permutation or broadcast sends the payload once.
        """
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1, "collective-broadcast": 1}
        return factor.get(self.kind, share) * self.payload_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind along the same mesh axes; bytes are per device."""

    kind: str
    axes: tuple[str, ...]
    count: int
    payload_bytes: float
    sent_bytes: float


def traffic(collectives: tuple[Collective, ...]) -> tuple[Traffic, ...]:
    """Sums collectives of equal kind and axes; those that send most come first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    sums = (
        Traffic(
            kind=kind,
            axes=axes,
            count=sum(c.count for c in group),
            payload_bytes=sum(c.count * c.payload_bytes for c in group),
            sent_bytes=sum(c.count * c.sent_bytes for c in group),
        )
        for (kind, axes), group in groups.items()
    )
    return tuple(sorted(sums, key=lambda t: -t.sent_bytes))


def parse(hlo: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Returns the collectives of a program that is partitioned over a mesh.

    Args:
        hlo: the optimised program, from `compiled.as_text()`.
        mesh: sizes of the mesh axes in order; partition i is the i-th device of the mesh. Groups of
            one device communicate nothing and are skipped.
    """
    instructions, executions, callers = _read(hlo)
    collectives = []
    for parts in _collectives(instructions, callers):
        groups = _groups(parts[0].line, math.prod(mesh.values()))
        size = 2 if parts[0].kind == "collective-permute" else len(groups[0].members)
        axes = varying_axes(groups, mesh)
        if not axes:
            continue
        kind = parts[0].kind
        collectives.append(
            Collective(
                kind=kind,
                axes=axes,
                group_size=size,
                count=max(executions.get(part.computation, 0) for part in parts),
                payload_bytes=max(_payload(part, size) for part in parts),
            )
        )
    return tuple(c for c in collectives if c.count)


def varying_axes(groups: list[Group], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which members of a group differ."""
    names, sizes = list(mesh), tuple(mesh.values())
    varying = np.zeros(len(names), bool)
    for group in groups:
        # axes members
        places = np.stack(np.unravel_index(np.array(group.members), sizes))
        varying |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, varies in zip(names, varying, strict=True) if varies)


def _collectives(
    instructions: list["_Instruction"], callers: Mapping[str, list[tuple[str, int]]]
) -> list[list["_Instruction"]]:
    """Returns the instructions that make up each collective.

    The TPU compiler splits a collective over several fusions, to overlap it with other work. The
    parts share its channel, its origin and the computation that calls the fusions. All collectives
    of jax.shard_map also share a channel and possibly an origin, but are consecutive in one
    computation, or in several. The same holds for reduce-scatters, each in a fusion of its own.
    """

    def place(computation: str) -> str:
        is_part = computation.startswith(_PARTS) and len(callers.get(computation, [])) == 1
        return place(callers[computation][0][0]) if is_part else computation

    parts: dict[tuple[Any, ...], list[_Instruction]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for instruction in instructions:
        origin = re.search(r"\bmetadata=\{([^}]*)\}", instruction.line)
        key = (instruction.channel, instruction.kind, origin[1] if origin else "")
        group_key = (instruction.computation, *key)
        seen[group_key] = seen.get(group_key, 0) + 1
        parts.setdefault((place(instruction.computation), *key, seen[group_key]), []).append(
            instruction
        )
    return list(parts.values())


class _Instruction(NamedTuple):
    kind: str
    start: bool
    result: str
    channel: str
    computation: str
    line: str


_Callers = dict[str, list[tuple[str, int]]]
"""The callers of each computation, and how often each call runs it."""


def _read(hlo: str) -> tuple[list[_Instruction], dict[str, int], _Callers]:
    """Returns the collective instructions, loop counts of computations, and their callers."""
    instructions: list[_Instruction] = []
    callers: _Callers = {}
    loops: list[tuple[str, str, str, int | None]] = []
    constants: dict[str, list[int]] = {}
    computation = entry = ""
    for line in hlo.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            computation = header["name"] if header else ""
            entry = computation if header and header["entry"] else entry
            continue
        if constant := _CONSTANT.search(line):
            constants.setdefault(computation, []).append(int(constant[1]))
        if loop := _WHILE.search(line):
            trips = _TRIPS.search(line)
            loops.append(
                (computation, loop["condition"], loop["body"], int(trips[1]) if trips else None)
            )
        for listed, single in _CALLS.findall(line):
            for callee in (listed or single).split(","):
                callers.setdefault(callee.strip().lstrip("%"), []).append((computation, 1))
        match = _LINE.match(line)
        if match is None:
            continue
        channel = re.search(r"\bchannel_id=(\d+)", line)
        instructions.append(
            _Instruction(
                kind=_kind(match["kind"], computation),
                start=bool(match["start"]),
                result=match["type"],
                channel=channel[1] if channel else match["name"],
                computation=computation,
                line=line,
            )
        )
    for caller, condition, body, trips in loops:
        # If the compiler does not state the trip count: jax counts from 0 up to a constant.
        limits = constants.get(condition, [])
        times = trips or (limits[0] if len(limits) == 1 else 1)
        callers.setdefault(body, []).append((caller, times))
    return instructions, _executions(callers, entry), callers


def _kind(kind: str, computation: str) -> str:
    # The TPU compiler writes a reduce-scatter as a fusion of an all-reduce and a slice.
    is_scatter = kind == "all-reduce" and computation.startswith("all-reduce-scatter")
    return "reduce-scatter" if is_scatter else kind


def _executions(callers: Mapping[str, list[tuple[str, int]]], entry: str) -> dict[str, int]:
    counts = {entry: 1}

    def count(computation: str) -> int:
        if computation not in counts:
            counts[computation] = sum(
                trips * count(caller) for caller, trips in callers.get(computation, ())
            )
        return counts[computation]

    for computation in callers:
        count(computation)
    return counts


def _payload(instruction: _Instruction, group_size: int) -> float:
    """Returns the bytes of the whole array, from the type of the result."""
    sizes = [_array_bytes(*array) for array in _ARRAY.findall(instruction.result)]
    if instruction.kind == "collective-permute":
        # An asynchronous start returns operand, result and two counters.
        return sizes[0] if instruction.start else sum(sizes)
    if instruction.kind == "all-gather" and instruction.start:
        # An asynchronous start returns the operands, then the results.
        return sum(sizes[len(sizes) // 2 :])
    if instruction.kind == "reduce-scatter" and instruction.start:
        return sum(sizes[: len(sizes) // 2])
    is_part = instruction.kind == "reduce-scatter" and " reduce-scatter" in instruction.line
    return sum(sizes) * (group_size if is_part else 1)


def _array_bytes(dtype: str, sizes: str) -> float:
    bits = _ITEM_BITS.get(dtype)
    if bits is None:
        width = re.search(r"\d+", dtype)  # bf16, f32, s8, f8e4m3fn: the first number.
        bits = int(width[0]) if width else 0
    return bits / 8 * math.prod(int(size) for size in sizes.split(",") if size)


def _groups(line: str, num_devices: int) -> list[Group]:
    """Parses the groups of an instruction in any HLO notation, or the pairs of a permutation."""
    if match := _LISTED.search(line):
        groups = [
            Group(tuple(map(int, members.split(","))))
            for members in re.findall(r"\{([\d,]+)\}", match[1])
        ]
        return groups or [Group(tuple(range(num_devices)))]
    if match := _TILED.search(line):
        return _rows(_iota(match).reshape(_numbers(match["tile"])))
    if match := _MESHED.search(line):
        return list(_mesh_groups(match, num_devices))
    return [Group(tuple(range(num_devices)))]


def _mesh_groups(match: re.Match[str], num_devices: int) -> Iterator[Group]:
    """Yields groups over axes of the compiler's own mesh: mesh['a'=2,'b'=4], ... {'b':(1)2}.

    'b':(m)k is a sub-axis of b with k positions, of which m are slower.
    """
    axes = dict(re.findall(r"'([^']*)'=(\d+)", match["axes"]))
    ids = np.arange(num_devices)
    if match["ids"]:
        ids = np.array(_numbers(match["ids"]))
    elif match["sizes"]:
        ids = _iota(match)
    over = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match["over"])
    shape: list[int] = []
    chosen: list[int] = []
    for name, size in axes.items():
        parts = [(int(before), int(part)) for axis, before, part in over if axis == name and part]
        whole = any(axis == name and not part for axis, _, part in over)
        if not parts:
            chosen += [len(shape)] * whole
            shape.append(int(size))
        done = 1
        for before, part in sorted(parts):
            shape += [before // done, part]
            chosen.append(len(shape) - 1)
            done = before * part
        if parts:
            shape.append(int(size) // done)
    grid = ids.reshape(shape)
    rest = [axis for axis in range(len(shape)) if axis not in chosen]
    members = math.prod(shape[axis] for axis in chosen)
    yield from _rows(grid.transpose([*rest, *chosen]).reshape(-1, members))


def _iota(match: re.Match[str]) -> np.ndarray:
    """Parses [2,4]T(1,0): consecutive numbers in an array of this shape, transposed, flattened."""
    sizes = _numbers(match["sizes"])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(match["order"])).ravel() if match["order"] else ids.ravel()


def _rows(ids: np.ndarray) -> list[Group]:
    return [Group(tuple(map(int, row))) for row in ids]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
