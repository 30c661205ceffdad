"""A bar fits its terminal: what it shows is whole, and the less important is left out first."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convt5.runtime import bars
from convt5.runtime.progress import Progress

FACTS = ["loss 3.2101", "objective 3.4567", "token accuracy 24.31", "32.1k tokens/s"]
SHOWN = {
    60: " 40%  |████▊       |  120/300  loss 3.2101  1m 30s left",
    80: " 40%  |██████▍         |  120/300  loss 3.2101  1m 30s left  2 steps/s",
    200: " 40%  |████████████                  |  120/300  loss 3.2101  1m 30s left  2 steps/s  "
    "objective 3.4567  token accuracy 24.31  32.1k tokens/s",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", SHOWN)
def test_a_wider_terminal_shows_more(width):
    assert bars.line(width, done=120, total=300, rate=2.0, facts=FACTS) == SHOWN[width]


@given(
    width=st.integers(0, 250),
    done=st.integers(0, 10**6),
    more=st.none() | st.integers(0, 10**6),
    label=st.sampled_from(["", "train", "評価"]),
    rate=st.none() | st.floats(1e-4, 1e6),
    facts=st.lists(st.sampled_from(FACTS), max_size=4, unique=True),
)
def test_nothing_is_cut_and_nothing_is_wider_than_the_terminal(
    width, done, more, label, rate, facts
):
    total = None if more is None else done + more
    given_ = {"done": done, "total": total, "label": label, "rate": rate, "facts": facts}
    text = bars.line(width, **given_)
    assert bars.columns(text) <= width
    whole = re.split(r" {2,}", re.sub(r"\|.*\|", "|", bars.line(10**4, **given_)).strip())
    parts = re.split(r" {2,}", re.sub(r"\|.*\|", "|", text).strip())
    assert set(parts) - {""} <= set(whole)


def test_more_than_was_expected_is_the_whole():
    assert bars.line(60, done=7, total=5, rate=1.0) == bars.line(60, done=7, total=7, rate=1.0)
    out = io.StringIO()
    shown = Progress(5, out=out, seconds_between_lines=0)
    shown(7)
    assert "7/7 (100%)" in out.getvalue()


def test_the_bar_keeps_its_place_and_length_while_numbers_grow():
    shapes = {
        (text.index("|"), text.rindex("|"))
        for done in (0, 9, 99, 1000)
        for text in [bars.line(80, done=done, total=1000, rate=7.0, facts=["loss 3.2"])]
    }
    assert len(shapes) == 1


def drawn(out: io.StringIO) -> list[str]:
    """What the line showed, one after another, without the spaces that clear it."""
    return [text.rstrip() for text in out.getvalue().split("\r")]


def test_a_closed_bar_leaves_nothing_behind(monkeypatch):
    out = Terminal()
    with bars.Bar(out, total=3, unit="row") as bar:
        bar.write("before")
        bar.update(facts=["loss 1.0"])
        bar.write("between")
        bar.update(2)
    bar.update()
    assert out.getvalue().startswith("before\n\r")
    assert "\rbetween\n\r" in out.getvalue()
    assert out.getvalue().endswith(" \r")
    assert "3/3" in drawn(out)[-3]
    assert all(bars.columns(text) < 80 for text in out.getvalue().split("\r"))


def test_nothing_is_drawn_before_the_first_update_nor_elsewhere_than_in_a_terminal():
    for out, updates in ((Terminal(), 0), (io.StringIO(), 3)):
        with bars.Bar(out, total=3) as bar:
            for _ in range(updates):
                bar.update()
        assert out.getvalue() == ""


def test_a_terminal_without_blocks_gets_plain_signs():
    out = Terminal()
    type(out).encoding = "ascii"
    try:
        bar = bars.Bar(out, total=4)
        bar.update(3)
        assert "|###########    |" in out.getvalue()
    finally:
        del type(out).encoding
