"""The table of attacks in the documentation is the one that the lists of the tests make."""

import pathlib

import pytest

pytest.importorskip("seqio")

import attacks

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_the_table_of_attacks_is_that_of_the_lists():
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert attacks.table() in text, "put what `python tests/attacks.py` prints there"
