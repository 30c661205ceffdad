"""Tables of texts, which a report writes as Markdown and a page shows sortable."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A section of a report; without columns, its title and notes alone.

    Attributes:
        title: heading; empty for a section without one.
        columns, rows: texts.
        notes: paragraphs below the table.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


def of_rows(title: str, rows: Sequence[Mapping[str, str]], *, notes: Sequence[str] = ()) -> Table:
    """Returns a table of rows with equal keys, which name its columns."""
    return Table(title, list(rows[0]), [list(row.values()) for row in rows], notes)
