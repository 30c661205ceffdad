"""Tests of tables in Markdown."""

from convt5.reports import markdown, tables
from convt5.reports.tables import Table


def test_numbers_stand_to_the_right_and_a_bar_begins_no_other_cell():
    rows = [
        {"model": "a|b", "loss": "1.5", "said": "-"},
        {"model": "t5", "loss": "-12", "said": "not finite"},
        {"model": "7", "loss": "", "said": "3"},
    ]
    assert markdown.table(rows).splitlines() == [
        r"| model | loss | said       |",
        r"| ----- | ---: | ---------- |",
        r"| a\|b  |  1.5 | -          |",
        r"| t5    |  -12 | not finite |",
        r"| 7     |      | 3          |",
    ]


def test_a_report_has_the_heading_table_and_notes_of_each_section():
    sections = [
        Table("", notes=["first\nline"]),
        tables.of_rows("Next", [{"a": "1"}], notes=["a note"]),
        Table("Last", notes=["none"]),
    ]
    table = "|   a |\n| --: |\n|   1 |"
    parts = [r"first\nline", "## Next", table, "a note", "## Last", "none"]
    assert markdown.sections(sections) == "\n\n".join(parts) + "\n"
