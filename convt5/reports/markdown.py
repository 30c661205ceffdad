"""Reports as Markdown, with tables that are also aligned as plain text."""

import re
from collections.abc import Mapping, Sequence

from convt5.errors import printable
from convt5.reports.tables import Table

_NUMBER = re.compile(r"[-+]?\.?\d")


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with a header from rows with equal keys; numbers are right-aligned."""
    return _table(list(rows[0]), [list(row.values()) for row in rows])


def sections(tables: Sequence[Table]) -> str:
    """Returns a report: the heading, table and notes of each section."""
    parts: list[str] = []
    for section in tables:
        parts += [f"## {_line(section.title)}"] if section.title else []
        parts += [_table(section.columns, section.rows)] if section.columns else []
        parts += map(_line, section.notes)
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header, *cells = [[_cell(text) for text in row] for row in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(header, *cells, strict=True)]
    # The majority of a column decides, because a number may be missing or not finite.
    is_right = [
        sum(bool(_NUMBER.match(row[i])) for row in cells) * 2 > len(cells)
        for i in range(len(header))
    ]

    def line(row: Sequence[str]) -> str:
        aligned = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_right, strict=True)
        )
        return f"| {' | '.join(aligned)} |"

    rule = [
        "-" * (width - 1) + (":" if right else "-")
        for width, right in zip(widths, is_right, strict=True)
    ]
    return "\n".join(map(line, [header, rule, *cells]))


def _line(text: str) -> str:
    return printable(text).replace("\n", r"\n")


def code(text: str) -> str:
    """Returns a text as code, between more backticks than it has in a row."""
    text = printable(text).replace("\n", r"\n")
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * (len(fence) > 1)
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    """Escapes a text for a cell: a bar would begin a new cell, a line break a new row."""
    return _line(text).replace("|", r"\|")
