"""Collectives are read from the text of compiled programs, in every notation that XLA prints."""

import numpy as np
import pytest

from convt5.analysis import collectives
from convt5.analysis.collectives import Group, parse, traffic, varying_axes

MESH = {"data": 2, "fsdp": 4, "tensor": 1}
ROWS = "{{0,1,2,3},{4,5,6,7}}"


def program(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule jit_step\n{before}\nENTRY %main.1 (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def collective(line: str, mesh=MESH):
    (found,) = parse(program(line), mesh)
    return found


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ROWS, ("fsdp",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp")),
        ("{}", ("data", "fsdp")),
        ("[2,4]<=[8]", ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "fsdp")),
        ("mesh['a'=2,'b'=4] {'b'}", ("fsdp",)),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("data", "fsdp")),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", ("fsdp",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", ("fsdp",)),
        ("mesh['a'=8] {'a':(1)2}", ("data",)),
        ("mesh['a'=8] {'a':(2)4}", ("fsdp",)),
    ],
)
def test_groups_are_mapped_to_mesh_axes(groups, axes):
    line = (
        "%all-reduce.1 = f32[8]{0:T(128)} all-reduce(%p), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    )
    found = collective(line)
    assert found.axes == axes
    assert found.group_size == np.prod([MESH[axis] for axis in axes])


def test_collectives_of_shard_map_share_a_channel_and_are_counted_one_by_one():
    pairs = 'source_target_pairs={{0,1},{1,2},{2,3}}, metadata={op_name="ppermute"}'
    lines = [
        f"%a = f32[2,3]{{1,0}} collective-permute(%p), channel_id=1, {pairs}",
        f"%b = f32[2,5]{{1,0}} collective-permute(%q), channel_id=1, {pairs}",
    ]
    assert [c.payload_bytes for c in parse(program(*lines), MESH)] == [24, 40]


@pytest.mark.parametrize(
    ("line", "payload", "sent"),
    [
        ("%x = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), dimensions={0}", 256, 192),
        ("%x = (bf16[4,8], bf16[16,8]{1,0}) all-gather-start(%p), dimensions={0}", 256, 192),
        ("%x = f32[8]{0:T(128)} all-reduce(%p), to_apply=%add", 32, 48),
        ("%x = (f32[8], /*index=1*/s32[2]{0:T(128)}) all-reduce(%p, %q), to_apply=%add", 40, 60),
        ("%x = f32[2]{0} reduce-scatter(%p), dimensions={0}, to_apply=%add", 32, 24),
        ("%x = (f32[8]{0}, f32[2]{0}) reduce-scatter-start(%p), dimensions={0}", 32, 24),
        (
            "%x = ((f32[8], bf16[4]), (f32[2], /*index=3*/bf16[1])) reduce-scatter-start(%p, %q)",
            40,
            30,
        ),
        ("%x = f8e4m3fn[2,4]{1,0} all-to-all(%p), dimensions={0}", 8, 6),
    ],
)
def test_bytes_are_those_of_the_whole_array(line, payload, sent):
    found = collective(f"{line}, channel_id=3, replica_groups={ROWS}")
    assert (found.payload_bytes, found.sent_bytes) == (payload, sent)


@pytest.mark.parametrize(
    "result",
    [
        "bf16[3,8]{1,0} collective-permute",
        "(bf16[3,8], bf16[3,8], u32[], u32[]) collective-permute-start",
    ],
)
def test_permutation_sends_its_operand_once_along_the_axis_of_its_pairs(result):
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    found = collective(f"%x = {result}(%p), channel_id=1, source_target_pairs={pairs}")
    assert (found.kind, found.axes) == ("collective-permute", ("fsdp",))
    assert found.payload_bytes == found.sent_bytes == 48


def test_ends_of_asynchronous_collectives_and_groups_of_one_are_not_counted():
    start = "%s = f32[8] all-reduce-start(%p), channel_id=1, replica_groups={}, to_apply=%add"
    alone = "%a = f32[8] all-reduce(%p), channel_id=2, replica_groups={{0},{1},{2},{3}}"
    done = "%d = f32[8] all-reduce-done(%s)"
    assert [c.count for c in parse(program(start, done, alone), MESH)] == [1]


def test_parts_of_one_collective_share_a_channel_and_count_once():
    parts = [
        f"%async_collective_fusion.{i} (q: f32[2]) -> f32[8] {{\n  ROOT %g.{i} = f32[8] "
        f"all-gather(%q), channel_id=7, replica_groups={ROWS}, dimensions={{0}}\n}}\n"
        for i in (1, 2)
    ]
    text = program(
        "%a = f32[8] fusion(%p), kind=kCustom, calls=%async_collective_fusion.1",
        "%b = f32[8] fusion(%a), kind=kCustom, calls=%async_collective_fusion.2",
        before="".join(parts),
    )
    (found,) = parse(text, MESH)
    assert (found.kind, found.count, found.payload_bytes) == ("all-gather", 1, 32)


def test_loops_that_shard_map_has_from_one_line_are_counted_each():
    pairs = 'source_target_pairs={{0,1},{1,2},{2,3}}, metadata={op_name="ppermute"}'
    loops = "".join(
        f"%body.{i} (t: (s32[], f32[2])) -> (s32[], f32[2]) {{\n"
        f"  %a.{i} = f32[2]{{0}} collective-permute(%p), channel_id=1, {pairs}\n}}\n"
        f"%cond.{i} (t: (s32[], f32[2])) -> pred[] {{\n"
        f"  ROOT %lt.{i} = pred[] compare(%i, %n)\n}}\n"
        for i in (3, 5)
    )
    calls = [
        f"%w.{i} = (s32[], f32[2]) while(%p), condition=%cond.{i}, body=%body.{i}, "
        f'backend_config={{"known_trip_count":{{"n":"{i}"}}}}'
        for i in (3, 5)
    ]
    assert [c.count for c in parse(program(*calls, before=loops), MESH)] == [3, 5]


def test_reduce_scatter_of_tpus_is_a_fusion_of_an_all_reduce():
    fusion = (
        "%all-reduce-scatter.4.clone (q: f32[8]) -> f32[2] {\n"
        f"  %r = f32[8] all-reduce(%q), replica_groups={ROWS}, to_apply=%add\n"
        "  ROOT %s = f32[2] dynamic-slice(%r, %i), dynamic_slice_sizes={2}\n}\n"
    )
    text = program(
        "%f = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.4.clone", before=fusion
    )
    (found,) = parse(text, MESH)
    assert (found.kind, found.payload_bytes, found.sent_bytes) == ("reduce-scatter", 32, 24)


def test_reduce_scatters_of_tpus_are_counted_one_by_one():
    fusions = [
        f"%all-reduce-scatter.{i} (q: f32[8]) -> f32[2] {{\n"
        f"  %r.{i} = f32[8] all-reduce(%q), channel_id=1, replica_groups={ROWS}, to_apply=%add\n"
        f"  ROOT %s.{i} = f32[2] dynamic-slice(%r.{i}, %i), dynamic_slice_sizes={{2}}\n}}\n"
        for i in (1, 2)
    ]
    text = program(
        "%f = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        "%g = f32[2] fusion(%q), kind=kCustom, calls=%all-reduce-scatter.2",
        before="".join(fusions),
    )
    assert [c.payload_bytes for c in parse(text, MESH)] == [32, 32]


@pytest.mark.parametrize("says_so", [True, False])
def test_collectives_of_a_loop_count_as_often_as_it_runs(says_so):
    loop = (
        "%body.1 (t: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %r = f32[8] all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add\n}\n"
        "%cond.1 (t: (s32[], f32[8])) -> pred[] {\n"
        "  %limit = s32[]{:T(128)} constant(5)\n"
        "  ROOT %lt = pred[] compare(%i, %limit), direction=LT\n}\n"
    )
    known = ', backend_config={"known_trip_count":{"n":"5"}}' if says_so else ""
    line = f"%w = (s32[], f32[8]) while(%p), condition=%cond.1, body=%body.1{known}"
    (found,) = parse(program(line, before=loop), MESH)
    assert found.count == 5


def test_traffic_sums_what_is_alike():
    def one(kind, axes, payload):
        return collectives.Collective(
            kind=kind, axes=axes, group_size=4, count=2, payload_bytes=payload
        )

    gathers = one("all-gather", ("fsdp",), 40), one("all-gather", ("fsdp",), 80)
    sums = traffic((*gathers, one("all-reduce", ("data",), 160)))
    assert [(t.kind, t.count, t.payload_bytes, t.sent_bytes) for t in sums] == [
        ("all-reduce", 2, 320, 480),
        ("all-gather", 4, 240, 180),
    ]


def test_axes_that_vary_are_those_of_any_group():
    groups = [Group((0, 0)), Group((1, 5))]
    assert varying_axes(groups, MESH) == ("data",)
    assert varying_axes([Group((3,))], MESH) == ()
