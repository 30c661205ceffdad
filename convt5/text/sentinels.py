"""Sentinels: the ids that mark spans of text, which differ between vocabularies.

This is the only place that maps sentinels to ids and back. T5 appends 100 ids to its pieces and
counts down from the last. SentencePiece models may have the marks as pieces of their own, anywhere.
Plain byte vocabularies, as used by published byte-level T5s (Xue et al. 2022, arXiv 2105.13626,
section 3.2), reuse their last 100 ids, from 258 down. The first eleven of these are bytes that
never occur in UTF-8. The others may also be bytes of a character; `numbers` distinguishes them.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from convt5 import errors

T5_SENTINELS = 100

MARK = re.compile(r"<extra_id_(\d{1,9})>")
"""The text form of a sentinel."""

_SPELLINGS = ("▁<extra_id_{}>", "<extra_id_{}>", "▁extra_id_{}", "extra_id_{}")
_BYTES_SIZE, _FIRST_BYTE, _UNUSED_BYTES = 259, 3, 11
_REUSED_BYTES = 100

LAST_BYTE = _BYTES_SIZE - 1
"""The last id of the vocabulary of bytes, before sentinels of its own."""


def mark(number: int) -> str:
    """Returns the text form of a sentinel: <extra_id_0> is the first."""
    return f"<extra_id_{number}>"


def ids_of(vocabulary: Any) -> tuple[int, ...]:
    """Returns the sentinel ids of a seqio vocabulary in order; () if it has none."""
    pieces = own_pieces(getattr(vocabulary, "tokenizer", None))
    if pieces:
        return pieces
    size, extra = vocabulary.vocab_size, int(vocabulary.extra_ids or 0)
    if _reuses_bytes(vocabulary):
        extra = _REUSED_BYTES
    return tuple(range(size - 1, size - 1 - extra, -1))


def never_text(vocabulary: Any) -> tuple[int, ...]:
    """Returns the sentinel ids that never represent text."""
    ids = ids_of(vocabulary)
    return ids[:_UNUSED_BYTES] if _reuses_bytes(vocabulary) else ids


def numbers(ids: Sequence[int], vocabulary: Any) -> list[int | None]:
    """Returns the index of the sentinel that each id is, or None for ids that are not.

    If bytes are reused, an id is a sentinel if it is not part of a UTF-8 character and the previous
    sentinel occurs before it, since spans are marked in order.
    """
    known = {sentinel: number for number, sentinel in enumerate(ids_of(vocabulary))}
    candidates = [known.get(one) for one in ids]
    if not _reuses_bytes(vocabulary):
        return candidates
    met = set()
    at = 0
    while at < len(candidates):
        number = candidates[at]
        length = 0 if number is None else _character_length(ids[at : at + 4])
        if length or (number is not None and number >= _UNUSED_BYTES and number - 1 not in met):
            candidates[at : at + max(length, 1)] = [None] * max(length, 1)
        elif number is not None:
            met.add(number)
        at += max(length, 1)
    return candidates


def own_pieces(model: Any) -> tuple[int, ...]:
    """Returns the ids of sentinels that are pieces of a SentencePiece model; () for others."""
    if not hasattr(model, "PieceToId"):
        return ()

    def ids(spelling: str) -> Iterator[int]:
        for number in itertools.count():
            piece_id = model.PieceToId(name := spelling.format(number))
            if model.IdToPiece(piece_id) != name:  # The id of unknown pieces.
                return
            yield piece_id

    return max((tuple(ids(spelling)) for spelling in _SPELLINGS), key=len)


def num_own_pieces(model: Any, num_sentinels: int, path: str) -> int:
    """Returns how many sentinels are pieces of a SentencePiece model.

    Raises:
        UserError: id 0 is not padding, there is no end piece, or the model has sentinels, but fewer
            than num_sentinels.
    """
    faults = []
    padding = model.pad_id()
    if padding not in (0, -1) or (padding == -1 and not model.IsControl(0)):
        faults.append(
            f"id 0 is the piece {model.IdToPiece(0)!r}, but id 0 is padding; train the model "
            "with --pad_id=0 --eos_id=1 --unk_id=2."
        )
    if model.eos_id() < 0:
        faults.append("it has no end piece; train the model with --eos_id=1.")
    own = len(own_pieces(model))
    if 0 < own < num_sentinels:
        faults.append(
            f"it holds {own} sentinel pieces, fewer than num_sentinels={num_sentinels}; lower "
            "num_sentinels, or use a model without them."
        )
    errors.raise_all(faults, where=f"vocabulary path={path!r}")
    return own


def _reuses_bytes(vocabulary: Any) -> bool:
    """Returns whether the ids are just padding, end, unknown, and the 256 bytes."""
    if vocabulary.vocab_size != _BYTES_SIZE or vocabulary.extra_ids:
        return False
    return vocabulary.decode([_FIRST_BYTE + ord("a")]) == "a"


def _character_length(ids: Sequence[int]) -> int:
    """Returns how many leading ids are the bytes of one multi-byte character; 0 if none."""
    text = bytes(i - _FIRST_BYTE for i in itertools.takewhile(lambda i: i >= _FIRST_BYTE, ids))
    for length in range(2, len(text) + 1):
        with contextlib.suppress(UnicodeDecodeError):
            return length * (len(text[:length].decode()) == 1)
    return 0
