"""Sentinels: the ids that mark spans of text, which each vocabulary has of its own.

The one place that knows the id of the i-th sentinel of a vocabulary, and which sentinel an id is.
T5 appends 100 ids to its pieces and counts down from the last. SentencePiece models may hold the
marks as pieces of their own, wherever they stand. Bytes without further ids, as published
byte-level T5s (Xue et al. 2022, arXiv 2105.13626, section 3.2) read them, reuse the last 100 of
their ids, from 258 down. The first eleven of these are bytes that UTF-8 never has; the others may
be bytes of a character, and `numbers` tells the two apart.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

T5_SENTINELS = 100

MARK = re.compile(r"<extra_id_(\d{1,9})>")
"""How a sentinel is written in text."""

_SPELLINGS = ("▁<extra_id_{}>", "<extra_id_{}>", "▁extra_id_{}", "extra_id_{}")
_BYTES_SIZE, _FIRST_BYTE, _UNUSED_BYTES = 259, 3, 11
_REUSED_BYTES = 100


def mark(number: int) -> str:
    """Returns how a sentinel is written in text: <extra_id_0> is the first."""
    return f"<extra_id_{number}>"


def ids_of(vocabulary: Any) -> tuple[int, ...]:
    """Returns the ids of the sentinels of a seqio vocabulary in their order; () without any."""
    pieces = own_pieces(getattr(vocabulary, "tokenizer", None))
    if pieces:
        return pieces
    size, extra = vocabulary.vocab_size, int(vocabulary.extra_ids or 0)
    if _reuses_bytes(vocabulary):
        extra = _REUSED_BYTES
    return tuple(range(size - 1, size - 1 - extra, -1))


def never_text(vocabulary: Any) -> tuple[int, ...]:
    """Returns the ids of sentinels that stand for nothing else."""
    found = ids_of(vocabulary)
    return found[:_UNUSED_BYTES] if _reuses_bytes(vocabulary) else found


def numbers(ids: Sequence[int], vocabulary: Any) -> list[int | None]:
    """Returns which sentinel each id of a text is, counted from 0; None for those that are none.

    Where bytes are reused, one is a sentinel if it is part of no UTF-8 character, and if the
    sentinel before it, in whose order spans are marked, stands before it.
    """
    known = {sentinel: number for number, sentinel in enumerate(ids_of(vocabulary))}
    found = [known.get(one) for one in ids]
    if not _reuses_bytes(vocabulary):
        return found
    met = set()
    at = 0
    while at < len(found):
        number = found[at]
        length = 0 if number is None else _character_length(ids[at : at + 4])
        if length or (number is not None and number >= _UNUSED_BYTES and number - 1 not in met):
            found[at : at + max(length, 1)] = [None] * max(length, 1)
        elif number is not None:
            met.add(number)
        at += max(length, 1)
    return found


def own_pieces(model: Any) -> tuple[int, ...]:
    """Returns the ids of the marks that are pieces of a SentencePiece model; () for others."""
    if not hasattr(model, "PieceToId"):
        return ()

    def ids(spelling: str) -> Iterator[int]:
        for number in itertools.count():
            found = model.PieceToId(name := spelling.format(number))
            if model.IdToPiece(found) != name:  # It is the id of unknown pieces.
                return
            yield found

    return max((tuple(ids(spelling)) for spelling in _SPELLINGS), key=len)


def _reuses_bytes(vocabulary: Any) -> bool:
    """Whether ids are padding, end, unknown, and the 256 bytes, and nothing more."""
    if vocabulary.vocab_size != _BYTES_SIZE or vocabulary.extra_ids:
        return False
    return vocabulary.decode([_FIRST_BYTE + ord("a")]) == "a"


def _character_length(ids: Sequence[int]) -> int:
    """Returns how many ids, from the first, are the bytes of a character of several; 0 for none."""
    text = bytes(i - _FIRST_BYTE for i in itertools.takewhile(lambda i: i >= _FIRST_BYTE, ids))
    for length in range(2, len(text) + 1):
        with contextlib.suppress(UnicodeDecodeError):
            return length * (len(text[:length].decode()) == 1)
    return 0
