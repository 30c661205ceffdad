"""Markdown tables that are also aligned as plain text."""

import re
from collections.abc import Mapping, Sequence

from convt5.errors import printable

_NUMBER = re.compile(r"[-+]?\.?\d")


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns a table with a header from rows with equal keys; numbers are right-aligned."""
    rows = [{_cell(name): _cell(value) for name, value in row.items()} for row in rows]
    names = list(rows[0])
    widths = {name: max(len(name), 3, *(len(row[name]) for row in rows)) for name in names}
    # The majority of a column decides, because a number may be missing or not finite.
    right = {n for n in names if sum(bool(_NUMBER.match(row[n])) for row in rows) * 2 > len(rows)}

    def line(cells: Mapping[str, str]) -> str:
        aligned = (
            cells[name].rjust(widths[name]) if name in right else cells[name].ljust(widths[name])
            for name in names
        )
        return f"| {' | '.join(aligned)} |"

    rule = {name: "-" * (widths[name] - 1) + (":" if name in right else "-") for name in names}
    return "\n".join([line({name: name for name in names}), line(rule), *map(line, rows)])


def _cell(text: str) -> str:
    """Escapes a text for a cell: a bar would begin a new cell, a line break a new row."""
    return printable(text).replace("|", r"\|").replace("\n", r"\n")
