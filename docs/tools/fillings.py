"""Shows what a pre-trained model fills in, on examples that a rule chooses.

`python docs/tools/fillings.py --checkpoint=exports/english --text=valid.txt.xz` takes the first
documents of a text. Of each, the first paragraph of at least 30 words gives its first 30, of which
the middle three are hidden. It prints a table of text, filling and truth as Markdown; --page writes
it into a page.
"""

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from convt5.tasks import local_files
from kept_programs import write_tables

import convt5
from convt5 import errors
from convt5.configuration import command_line
from convt5.reports import markdown

MARK = "fillings"
_WORDS, _HIDDEN = 30, slice(14, 17)


class Gap(NamedTuple):
    """Words of which some are hidden.

    Attributes:
        before: the words before those.
        truth: what is hidden.
        after: the words after.
    """

    before: str
    truth: str
    after: str

    def source(self) -> str:
        """Returns the input of a model."""
        return f"{self.before} <extra_id_0> {self.after}"


def gaps(lines: Iterable[str]) -> Iterator[Gap]:
    """Yields a gap for each document that has a paragraph of enough words.

    Args:
        lines: paragraphs; empty ones separate documents.
    """
    is_done = False
    for line in lines:
        words = line.split()
        if not words:
            is_done = False
        elif len(words) >= _WORDS and not is_done:
            is_done = True
            shown = words[:_WORDS]
            before, truth, after = (
                " ".join(shown[part])
                for part in (slice(_HIDDEN.start), _HIDDEN, slice(_HIDDEN.stop, None))
            )
            yield Gap(before, truth, after)


def _lines(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        with local_files.explain_errors(name), local_files.open_bytes(name) as file:
            yield from local_files.text_lines(file)
        yield ""


def filling(prediction: str) -> str:
    """Returns the text of the first span of a prediction, empty if there is none."""
    _, _, rest = prediction.partition("<extra_id_0>")
    return re.split(r"<extra_id_\d+>|</s>", rest)[0].strip()


def table(chosen: Sequence[Gap], filled: Sequence[str]) -> str:
    """Returns texts, fillings and truths, and how many are equal."""
    rows = [
        {
            "": str(number),
            "text": _escape(f"{gap.before} … {gap.after}"),
            "filled in": _escape(text),
            "hidden": _escape(gap.truth),
        }
        for number, (gap, text) in enumerate(zip(chosen, filled, strict=True), start=1)
    ]
    equal = sum(text == gap.truth for gap, text in zip(chosen, filled, strict=True))
    return f"{markdown.table(rows)}\n\nEqual to what was hidden: {equal} of {len(rows)}."


def _escape(text: str) -> str:
    """Returns text that Markdown shows as it is; tables mind their own marks."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/fillings.py", allow_abbrev=False)
    path = command_line.path
    add = parser.add_argument
    add("--checkpoint", required=True, help="a run that span corruption trained, or its export")
    add("--text", required=True, help="paragraphs in lines; empty lines end documents")
    add("--num", type=int, default=20, help="of fillings")
    add("--page", type=path, help=f"the page with <!-- {MARK} --> that gets the table")
    settings = parser.parse_args(argv)
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    names = local_files.find(settings.text)
    chosen = list(itertools.islice(gaps(_lines(names)), settings.num))
    if len(chosen) < settings.num:
        raise errors.UserError(
            f"--text={settings.text} has {len(chosen)} documents with a paragraph of {_WORDS} "
            f"words; --num={settings.num} takes more. Give another text or a smaller number."
        )
    predictor = convt5.load_predictor(settings.checkpoint)
    filled = [filling(p.texts[0]) for p in predictor.predict([gap.source() for gap in chosen])]
    text = table(chosen, filled)
    print(text)
    if settings.page is not None:
        write_tables(settings.page, MARK, text)


if __name__ == "__main__":
    command_line.run(main)
