"""Sentinels: the ids that mark spans of text, which each vocabulary has of its own.

The one place that knows the id of the i-th sentinel of a vocabulary, and which sentinel an id is.
T5 appends 100 ids to its pieces and counts down from the last. SentencePiece models may hold the
marks as pieces of their own, wherever they stand. Bytes without further ids, as published
byte-level T5s (Xue et al. 2022, arXiv 2105.13626) read them, count down from 258: the last eleven
are bytes that UTF-8 never has, so that no text is mistaken for a sentinel.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

MARK = re.compile(r"<extra_id_(\d{1,9})>")
"""How a sentinel is written in text."""

_SPELLINGS = ("▁<extra_id_{}>", "<extra_id_{}>", "▁extra_id_{}", "extra_id_{}")
_BYTES_SIZE, _FIRST_BYTE, _UNUSED_BYTES = 259, 3, 11


def mark(number: int) -> str:
    """Returns how a sentinel is written in text: <extra_id_0> is the first."""
    return f"<extra_id_{number}>"


def ids_of(vocabulary: Any) -> tuple[int, ...]:
    """Returns the ids of the sentinels of a seqio vocabulary in their order; () without any."""
    pieces = own_pieces(getattr(vocabulary, "tokenizer", None))
    if pieces:
        return pieces
    size, extra = vocabulary.vocab_size, int(vocabulary.extra_ids or 0)
    if not extra and _is_bytes(vocabulary):
        extra = _UNUSED_BYTES
    return tuple(range(size - 1, size - 1 - extra, -1))


def numbers_of(vocabulary: Any) -> dict[int, int]:
    """Returns which sentinel each of their ids is, counted from 0."""
    return {sentinel: number for number, sentinel in enumerate(ids_of(vocabulary))}


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


def _is_bytes(vocabulary: Any) -> bool:
    """Whether ids are padding, end, unknown, and the 256 bytes."""
    if vocabulary.vocab_size != _BYTES_SIZE:
        return False
    return vocabulary.decode([_FIRST_BYTE + ord("a")]) == "a"
