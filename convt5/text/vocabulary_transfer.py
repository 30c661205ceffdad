"""Spells the tokens of one vocabulary in another, to make a table of embeddings from a trained one.

Fast vocabulary transfer (Gee et al. 2022, arXiv 2402.09977, section 3): a token that both have
keeps its row; any other gets the mean of the rows of the tokens into which the old one cuts it.
"""

from collections.abc import Callable, Sequence

from convt5.text import plain_vocabularies, sentinels, tokenizer_files
from convt5.text.vocabulary_files import (
    SENTINEL_PIECE,
    KeptText,
    KeptVocabulary,
    processor_of,
)

_SPACE = "▁"
_UNKNOWN, _FIRST_BYTE = 2, 3  # Of bytes.

_Text = str | bytes  # Of a token; bytes if it is one byte.


def spell(new: KeptVocabulary, old: KeptVocabulary, where: str) -> list[list[int]]:
    """Returns the ids of `old` that have the text of each id of `new`.

    Ids without text, such as a sentinel whose number `old` does not reach, have no such ids.

    Args:
        new, old: the vocabularies.
        where: names the new one in messages.

    Raises:
        UserError: as `sentinels.num_own_pieces`.
    """
    spell_text = _spell_in_pieces(old) if old.model else _spell_in_bytes
    spelled = [[] if text is None else spell_text(text) for text in _texts(new)]
    new_one, old_one = (
        plain_vocabularies.features(KeptText(kept, kept), where).inputs for kept in (new, old)
    )
    spelled += [[] for _ in range(len(spelled), new_one.vocab_size)]
    marks = zip(sentinels.never_text(new_one), sentinels.ids_of(old_one), strict=False)
    same = [(0, 0), (new.end_id, old.end_id), (_unknown_id(new), _unknown_id(old)), *marks]
    for own, other in same:
        spelled[own] = [other]
    return spelled


def _texts(kept: KeptVocabulary) -> Sequence[_Text | None]:
    """Returns the text of each id without the sentinels behind them; None if it has none."""
    if not kept.model:
        return [None] * _FIRST_BYTE + [bytes([byte]) for byte in range(256)]
    processor = processor_of(kept.model)

    def text(token: int) -> _Text | None:
        piece = processor.IdToPiece(token)
        if processor.IsByte(token):
            return bytes([int(piece[1:-1], 16)])  # <0x41>
        has_none = processor.IsControl(token) or processor.IsUnused(token)
        return None if has_none or SENTINEL_PIECE.fullmatch(piece) else piece

    return [text(token) for token in range(processor.GetPieceSize())]


def _spell_in_bytes(text: _Text) -> list[int]:
    content = text if isinstance(text, bytes) else text.replace(_SPACE, " ").encode()
    return [_FIRST_BYTE + byte for byte in content]


def _spell_in_pieces(kept: KeptVocabulary) -> Callable[[_Text], list[int]]:
    proto = tokenizer_files.parse(kept.model)
    # A piece may be the end of a word, before which no space may be put.
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    processor = processor_of(proto.SerializeToString())

    def spell_text(text: _Text) -> list[int]:
        piece = f"<0x{text[0]:02X}>" if isinstance(text, bytes) else text
        token = processor.PieceToId(piece)
        if processor.IdToPiece(token) == piece:
            return [token]
        if isinstance(text, bytes):
            piece = text.decode(errors="ignore")
        return processor.EncodeAsIds(piece.replace(_SPACE, " "))

    return spell_text


def _unknown_id(kept: KeptVocabulary) -> int:
    return processor_of(kept.model).unk_id() if kept.model else _UNKNOWN
