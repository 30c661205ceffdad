"""The longest rows that fit are found, and what was compiled is kept and told."""

import dataclasses

import kept_programs
import pods
import pytest
from pods import Program, Programs, longest, summary

from convt5.errors import UserError


@pytest.mark.parametrize("first", [pods.SHORTEST, 2**17, pods.LONGEST])
@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (pods.SHORTEST - 1, None),
        (pods.SHORTEST, pods.SHORTEST),
        (3 * 2**16, 2**17),
        (2**30, pods.LONGEST),
    ],
)
def test_the_longest_that_fits_is_found_from_anywhere_without_trying_twice(first, limit, found):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    assert longest(fits, first) == found
    assert len(set(tried)) == len(tried)
    assert all(pods.SHORTEST <= length <= pods.LONGEST for length in tried)


def report():
    return {
        "mesh": {"data": 4, "fsdp": 16, "sequence": 1, "tensor": 1},
        "memory_bytes": {"arguments": 1e9, "temporaries": 2e9},
        "flops": 3e12,
        "bytes_accessed": 4e9,
        "collectives": [
            {"axes": ["fsdp"], "sent_bytes": 1.5e9},
            {"axes": ["data"], "sent_bytes": 1e9},
            {"axes": ["fsdp"], "sent_bytes": 2e9},
        ],
        "roofline_seconds": {"step": 0.25, "bound_by": "memory"},
        "compile_seconds": 60.0,
    }


def test_what_was_compiled_is_kept_and_told(tmp_path, monkeypatch, capsys):
    update = pods.updates()[0]
    fitting = Program("base", "t5", "v5e:16x16", 256, 2**15)
    longer = dataclasses.replace(fitting, length=2**16)
    reports = {update: summary(report()), fitting: summary(report()), longer: {"needed": 31e9}}
    monkeypatch.setattr(Program, "compiled", lambda self, **_: reports.pop(self))
    programs = Programs(tmp_path)
    programs.compiled(update, count_loops=True)
    assert programs.fits(fitting)
    assert not programs.fits(longer)
    assert not reports
    # Another start compiles nothing again.
    again = Programs(tmp_path)
    assert again.reports == programs.reports
    page = tmp_path / "page.md"
    page.write_text("Above\n<!-- pods -->\nold\n<!-- end -->\nbelow\n")
    pods.main([f"--output={tmp_path}", "--report_only", f"--page={page}"])
    text = capsys.readouterr().out
    assert page.read_text() == f"Above\n<!-- pods -->\n{text}<!-- end -->\nbelow\n"
    assert (
        "| dynamic_base | v5e:16x16 | data 4 x fsdp 16 | 1 GB | 2 GB | 3.00 | 4.0 | "
        "3.50 fsdp, 1.00 data | 250 ms (memory) |" in text
    )
    assert "| t5_base | v5e:16x16 | 32,768 + 8,192 | 31 GB needed |" in text
    assert len(text.splitlines()) == 7


def test_a_page_without_marks_is_refused():
    with pytest.raises(UserError, match="must hold <!-- pods --> and <!-- end -->"):
        kept_programs.with_tables("a page\n<!-- pods -->\n", "pods", "tables")


def test_what_is_kept_is_damaged_or_cannot_be_written(tmp_path):
    file = tmp_path / "programs.jsonl"
    program = Program("base", "t5", "v5p:4x4x4", 64, 512)
    Programs(tmp_path).report(program, lambda: {"needed": None})
    file.write_text(file.read_text() + '{"program": {"si')
    with pytest.raises(UserError, match=r"programs.jsonl, line 2 is no report .* remove the line"):
        Programs(tmp_path)
    with pytest.raises(UserError, match=r"cannot be written .* give a folder that can"):
        Programs(file).report(program, lambda: pytest.fail("hours were spent"))


def test_a_page_is_looked_for_before_hours_are_spent(tmp_path, monkeypatch):
    monkeypatch.setattr(Program, "compiled", lambda *_, **__: pytest.fail("hours were spent"))
    with pytest.raises(UserError, match=r"nowhere\.md cannot be read and written"):
        pods.main([f"--output={tmp_path}", f"--page={tmp_path / 'nowhere.md'}"])
