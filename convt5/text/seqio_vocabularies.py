"""seqio vocabularies with T5's sentinels, from a SentencePiece file or of bytes.

Padding is id 0; `sentinels` knows the sentinel ids.
"""

import os

import seqio
import tensorflow as tf
from google.protobuf import message

from convt5 import errors
from convt5.runtime.atomic_files import is_remote
from convt5.runtime.foreign_files import MOST_VOCABULARY_BYTES
from convt5.text import sentinels
from convt5.text.sentinels import T5_SENTINELS


class _OwnSentinels(seqio.SentencePieceVocabulary):
    """A SentencePiece model whose sentinels are its own pieces."""

    def __init__(self, path: str, num_sentinels: int):
        super().__init__(path, extra_ids=0)
        self._num_sentinels = num_sentinels

    @property
    def extra_ids(self) -> int:
        return self._num_sentinels


def from_file(path: str, num_sentinels: int = T5_SENTINELS) -> seqio.SentencePieceVocabulary:
    """Returns the SentencePiece model at `path` with sentinels after its last piece.

    If the model has `extra_id` pieces, these are its sentinels, wherever they are.

    Raises:
        UserError: the file is missing or not a SentencePiece model, id 0 is not padding, there is
            no end piece, or the model has fewer sentinels than num_sentinels, which must be at
            least 0.
    """
    _check_count(num_sentinels)
    path = os.path.expanduser(path)
    if not is_remote(path):
        _check_file(path)
    vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=0)
    try:
        _ = vocabulary.tokenizer
    except (tf.errors.OpError, OSError, RuntimeError, message.DecodeError) as error:
        raise errors.UserError(
            f"vocabulary path={path!r} cannot be read as a SentencePiece model ({error}); "
            "set it to a .model file made by sentencepiece."
        ) from error
    own = sentinels.num_own_pieces(vocabulary.tokenizer, num_sentinels, path)
    if not own:
        return seqio.SentencePieceVocabulary(path, extra_ids=num_sentinels)
    return _OwnSentinels(path, own)


def byte_level(num_sentinels: int = T5_SENTINELS) -> seqio.ByteVocabulary:
    """Returns the vocabulary of the 256 bytes of UTF-8, which needs no file.

    With `num_sentinels=0` it is that of published byte-level T5s, whose sentinels are the last 100
    ids, from 258 down.

    Raises:
        UserError: num_sentinels is negative.
    """
    _check_count(num_sentinels)
    return seqio.ByteVocabulary(extra_ids=num_sentinels)


def _check_count(num_sentinels: int) -> None:
    if not isinstance(num_sentinels, int) or num_sentinels < 0:
        raise errors.UserError(
            f"num_sentinels={num_sentinels!r} must be an integer of at least 0; T5 has "
            f"{T5_SENTINELS}."
        )


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise errors.UserError(
            f"vocabulary path={path!r} names no file (working directory {os.getcwd()!r}); set it "
            "to a SentencePiece .model file."
        )
    if os.path.getsize(path) > MOST_VOCABULARY_BYTES:
        raise errors.UserError(
            f"vocabulary path={path!r} has {os.path.getsize(path):,} bytes, more than the "
            f"{MOST_VOCABULARY_BYTES:,} of any SentencePiece model; set it to a .model file made "
            "by sentencepiece."
        )
