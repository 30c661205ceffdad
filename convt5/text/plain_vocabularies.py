"""Vocabularies saved with models, with the ids and texts of seqio's, whose import takes seconds.

They serve predictions; data and tasks need those of `seqio_vocabularies`.
"""

from collections.abc import Iterable, Sequence

from convt5.text import sentinels, tokenizer_files
from convt5.text.vocabulary_files import KeptText, KeptVocabulary, TextFeatures, processor_of

_END, _FIRST_BYTE = 1, 3  # Of bytes.


class ByteVocabulary:
    """The 256 bytes of UTF-8 with sentinels, as `seqio.ByteVocabulary`."""

    eos_id = _END

    def __init__(self, num_sentinels: int):
        self.extra_ids = num_sentinels
        self.vocab_size = sentinels.LAST_BYTE + 1 + num_sentinels

    def encode(self, text: str, /) -> list[int]:
        return [_FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, ids: Iterable[int], /) -> str:
        known = (i for i in _until(ids, _END) if _FIRST_BYTE <= i <= sentinels.LAST_BYTE)
        return bytes(i - _FIRST_BYTE for i in known).decode(errors="ignore")


class SentencePieceVocabulary:
    """A SentencePiece model with sentinels, as `seqio_vocabularies.from_file` returns it.

    Args:
        model: contents of the model file.
        num_sentinels: number of sentinels after the last piece, unless the model has its own.
        where: name of the file or its folder, for messages.

    Raises:
        UserError: as `sentinels.num_own_pieces`.
    """

    def __init__(self, model: bytes, num_sentinels: int, *, where: str):
        own = sentinels.num_own_pieces(processor_of(model), num_sentinels, where)
        pieces = tokenizer_files.parse(model)
        for number in reversed(range(0 if own else num_sentinels)):
            mark = f"▁{sentinels.mark(number)}"
            pieces.pieces.add(piece=mark, score=0.0, type=pieces.SentencePiece.USER_DEFINED)
        self.tokenizer = processor_of(pieces.SerializeToString())
        self.extra_ids = own or num_sentinels
        self.vocab_size: int = self.tokenizer.GetPieceSize()
        self.eos_id: int = self.tokenizer.eos_id()

    def encode(self, text: str, /) -> list[int]:
        return self.tokenizer.EncodeAsIds(text)

    def decode(self, ids: Iterable[int], /) -> str:
        unknown = self.tokenizer.unk_id()
        known = [int(i) if i < self.vocab_size else unknown for i in _until(ids, self.eos_id)]
        return self.tokenizer.DecodeIds(known)


def features(text: KeptText, where: str) -> TextFeatures:
    """Returns the vocabularies saved with a model; `where` names it in messages."""
    inputs = targets = _build(text.inputs, where)
    if text.targets != text.inputs:
        targets = _build(text.targets, where)
    return TextFeatures(inputs, targets, text.add_eos)


def _build(kept: KeptVocabulary, where: str) -> ByteVocabulary | SentencePieceVocabulary:
    if kept.kind == "characters":
        return ByteVocabulary(kept.num_sentinels)
    return SentencePieceVocabulary(kept.model, kept.num_sentinels, where=where)


def _until(ids: Iterable[int], end: int) -> Sequence[int]:
    """Returns the ids up to the first end, included."""
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids
