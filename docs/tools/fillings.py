"""Shows what a pre-trained model fills in, on held-out rows that nobody chose.

`python docs/tools/fillings.py --checkpoint=exports/english --cache=runs/release/cache` takes the
first validation rows of a cache of span corruption, and has the model fill all gaps of each. It
prints the middle gap of each row with the words around it, the filling and what was removed, as
Markdown; --page writes that into a page.
"""

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from kept_programs import write_tables

import convt5
from convt5 import errors
from convt5.configuration import command_line
from convt5.data.cached_data import CachedDataConfig
from convt5.generation import samples
from convt5.modeling.model import ConvT5
from convt5.reports import markdown

MARK = "fillings"
_WORDS = 12
_SENTINEL = re.compile(r"<(\d+)>")


class Gap(NamedTuple):
    """A gap in a text.

    Attributes:
        before: the text up to the gap before it.
        filled: what the model filled in; None if it ended before.
        truth: what was removed.
        after: the text up to the next gap.
    """

    before: str
    filled: str | None
    truth: str
    after: str


def gaps(source: str, filling: str, truth: str) -> list[Gap]:
    """Returns the gaps of a row.

    Args:
        source: text with sentinels in place of the gaps, as of `samples.render`.
        filling, truth: each sentinel, and what stands in its place.
    """
    texts = _SENTINEL.split(source)
    filled, removed = (_spans(text) for text in (filling, truth))
    return [
        Gap(texts[i - 1].strip(), filled.get(texts[i]), removed[texts[i]], texts[i + 1].strip())
        for i in range(1, len(texts), 2)
    ]


def _spans(text: str) -> dict[str, str]:
    _, *parts = _SENTINEL.split(text)
    return {number: span.strip() for number, span in zip(parts[::2], parts[1::2], strict=True)}


def table(rows: Sequence[Sequence[Gap]]) -> str:
    """Returns the middle gap of each row, and how many of all gaps are filled with the truth."""
    shown = []
    for number, row in enumerate(rows, start=1):
        gap = row[len(row) // 2]
        before = " ".join(gap.before.split()[-_WORDS:])
        after = " ".join(gap.after.split()[:_WORDS])
        shown.append(
            {
                "row": str(number),
                "text": _escape(f"{before} [...] {after}"),
                "filled in": _escape(gap.filled or ""),
                "removed": _escape(gap.truth),
            }
        )
    every = [gap for row in rows for gap in row]
    equal = sum(gap.filled == gap.truth for gap in every)
    return (
        f"{markdown.table(shown)}\n\nOf all {len(every)} gaps of these rows, {equal} are filled "
        f"with exactly what was removed ({equal / len(every):.0%})."
    )


def _escape(text: str) -> str:
    """Returns text that Markdown shows as it is; tables mind their own marks."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/fillings.py", allow_abbrev=False)
    path = command_line.path
    add = parser.add_argument
    add("--checkpoint", required=True, help="a run, or its export")
    add("--cache", required=True, help="rows of span corruption, with a validation split")
    add("--num", type=int, default=20, help="of rows")
    add("--page", type=path, help=f"the page with <!-- {MARK} --> that gets the table")
    settings = parser.parse_args(argv)
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    rows = CachedDataConfig(
        path=settings.cache,
        split="validation",
        batch_size=settings.num,
        shuffle=False,
        num_epochs=1,
    ).build(process_index=0, process_count=1)
    if rows.vocabulary is None:
        raise errors.UserError(f"--cache={settings.cache} keeps no vocabulary to make text of ids.")
    model = convt5.load_model(settings.checkpoint)
    if not isinstance(model, ConvT5):
        raise errors.UserError(f"--checkpoint={settings.checkpoint} is a model of images.")
    filled = samples.filled_texts(model, next(rows), rows.vocabulary, settings.num)
    text = table([gaps(*each) for each in filled])
    print(text)
    if settings.page is not None:
        write_tables(settings.page, MARK, text)


if __name__ == "__main__":
    command_line.run(main)
