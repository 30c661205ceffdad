"""Vocabularies with T5's sentinels, checked when they are named rather than when text is read.

Padding is id 0; `convt5.text.sentinels` knows which ids are sentinels. Gin files name
`vocabularies.named`, `vocabularies.sentencepiece` and `vocabularies.characters`.
"""

import os
from collections.abc import Sequence

import numpy as np
import seqio
import tensorflow as tf
from google.protobuf import message

from convt5 import errors
from convt5.runtime.whole_files import is_remote
from convt5.text import sentinels, vocabulary_files

DEFAULT_NUM_SENTINELS = vocabulary_files.T5_SENTINELS
T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
"""Where T5 publishes its vocabulary of 32,000 pieces; reading it needs the network."""


class _OwnSentinels(seqio.SentencePieceVocabulary):
    """A SentencePiece model that holds its sentinels as pieces."""

    def __init__(self, path: str, num_sentinels: int):
        super().__init__(path, extra_ids=0)
        self._num_sentinels = num_sentinels

    @property
    def extra_ids(self) -> int:
        return self._num_sentinels


def named(source: str, num_sentinels: int = DEFAULT_NUM_SENTINELS) -> seqio.Vocabulary:
    """Returns the vocabulary that a setting names.

    Where the settings of a run name one that is gone, it is the one that the run keeps.

    Args:
        source: a SentencePiece .model file; the folder of a model, which keeps its vocabulary; or
            "bytes".
        num_sentinels: of files and bytes; what a model keeps has its own.

    Raises:
        UserError: what `sentencepiece` raises, or a folder that keeps none, or two.
    """
    if source == vocabulary_files.BYTES:
        return characters(num_sentinels)
    path = os.path.expanduser(source)
    is_file = source.endswith(".model") or os.path.isfile(path)
    # A file is meant itself, also where it lies in the folder of a model.
    found = None if is_file else vocabulary_files.load_features(source)
    if found is not None:
        if found.inputs is not found.targets:
            raise errors.UserError(
                f"the model in {source!r} has one vocabulary of inputs and another of targets; "
                f"name the file of one of them in its folder {vocabulary_files.FOLDER!r}."
            )
        return found.inputs
    if not is_remote(path) and not os.path.isfile(path):
        if kept := vocabulary_files.kept_by_run():
            return kept
        has = "keeps no vocabulary" if os.path.isdir(path) else "is not there"
        raise errors.UserError(
            f"vocabulary: {source!r} {has} (working directory {os.getcwd()!r}); set it to a "
            "SentencePiece .model file, to the folder of a model that keeps its vocabulary (a run "
            "of this version, or what convt5.convert made with --vocabulary), or to bytes."
        )
    return sentencepiece(source, num_sentinels)


def sentencepiece(
    path: str, num_sentinels: int = DEFAULT_NUM_SENTINELS
) -> seqio.SentencePieceVocabulary:
    """Returns the SentencePiece model at `path` with sentinels after its last piece.

    A model that holds `extra_id` pieces keeps those as its sentinels, wherever they stand.

    Raises:
        UserError: no file at `path`, no SentencePiece model in it, one that does not keep id 0 for
            padding or has no end piece, or one that brings fewer sentinels than asked for, which
            must be at least 0.
    """
    _check_count(num_sentinels)
    path = os.path.expanduser(path)
    if not is_remote(path) and not os.path.isfile(path):
        if kept := vocabulary_files.kept_by_run():
            return kept
        raise errors.UserError(
            f"vocabulary path={path!r} names no file (working directory {os.getcwd()!r}); set it "
            "to a SentencePiece .model file."
        )
    if not is_remote(path) and os.path.getsize(path) > vocabulary_files.MOST_MODEL_BYTES:
        raise errors.UserError(
            f"vocabulary path={path!r} has {os.path.getsize(path):,} bytes, more than the "
            f"{vocabulary_files.MOST_MODEL_BYTES:,} of any SentencePiece model; set it to a .model "
            "file made by sentencepiece."
        )
    vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=0)
    try:
        _ = vocabulary.tokenizer
    except (tf.errors.OpError, OSError, RuntimeError, message.DecodeError) as error:
        raise errors.UserError(
            f"vocabulary path={path!r} cannot be read as a SentencePiece model ({error}); "
            "set it to a .model file made by sentencepiece."
        ) from error
    _check_special_pieces(vocabulary, path)
    own = len(sentinels.ids_of(vocabulary))
    if not own:
        return seqio.SentencePieceVocabulary(path, extra_ids=num_sentinels)
    if own < num_sentinels:
        raise errors.UserError(
            f"vocabulary path={path!r} holds {own} sentinel pieces, fewer than "
            f"num_sentinels={num_sentinels}; lower num_sentinels, or use a model without them."
        )
    return _OwnSentinels(path, own)


def characters(num_sentinels: int = DEFAULT_NUM_SENTINELS) -> seqio.ByteVocabulary:
    """Returns the vocabulary of the 256 bytes of UTF-8, which needs no file.

    With `num_sentinels=0` it is that of published byte-level T5s, whose sentinels are the last 100
    bytes, from id 258 down.

    Raises:
        UserError: fewer sentinels than none.
    """
    _check_count(num_sentinels)
    return seqio.ByteVocabulary(extra_ids=num_sentinels)


def published_t5() -> seqio.SentencePieceVocabulary:
    """Returns T5's own vocabulary with 100 sentinels; it is downloaded when first used."""
    return seqio.SentencePieceVocabulary(T5_VOCABULARY, extra_ids=DEFAULT_NUM_SENTINELS)


def token_bytes(vocabulary: seqio.Vocabulary) -> np.ndarray | None:
    """Returns the UTF-8 bytes of text that each id stands for; None where that is not known.

    Special ids and sentinels stand for none, but for bytes that may be both. An unknown piece
    counts as one byte, the least it can stand for, so that bits per byte are never flattered.
    """
    if isinstance(vocabulary, seqio.ByteVocabulary):
        sizes = np.zeros(vocabulary.vocab_size, np.int32)
        sizes[vocabulary.vocab_size - vocabulary.extra_ids - 256 :] = 1
        sizes[list(sentinels.never_text(vocabulary))] = 0
        return sizes
    if isinstance(vocabulary, seqio.SentencePieceVocabulary):
        sizes = np.array(
            [_piece_bytes(vocabulary, i) for i in range(vocabulary.vocab_size)], np.int32
        )
        sizes[list(sentinels.never_text(vocabulary))] = 0
        return sizes
    return None


def has_unknown(vocabulary: seqio.Vocabulary, ids: Sequence[int]) -> bool:
    """Whether ids stand for text that the vocabulary lacks, which nothing gives back."""
    unknown = unknown_id(vocabulary)
    return unknown is not None and unknown in ids


def unknown_id(vocabulary: seqio.Vocabulary) -> int | None:
    """Returns the id of text that the vocabulary lacks; None where it lacks none."""
    return vocabulary.unk_id if isinstance(vocabulary, seqio.SentencePieceVocabulary) else None


def _check_count(num_sentinels: int) -> None:
    if not isinstance(num_sentinels, int) or num_sentinels < 0:
        raise errors.UserError(
            f"num_sentinels={num_sentinels!r} must be an integer of at least 0; T5 has "
            f"{DEFAULT_NUM_SENTINELS}."
        )


def _piece_bytes(vocabulary: seqio.SentencePieceVocabulary, token: int) -> int:
    model = vocabulary.tokenizer
    if model.IsControl(token):
        return 0
    if model.IsByte(token) or model.IsUnknown(token):
        return 1
    return len(model.IdToPiece(token).replace("▁", " ").encode())


def _check_special_pieces(vocabulary: seqio.SentencePieceVocabulary, path: str) -> None:
    model = vocabulary.tokenizer
    faults = []
    if model.pad_id() not in (0, -1) or (model.pad_id() == -1 and not model.IsControl(0)):
        faults.append(
            f"id 0 is the piece {model.IdToPiece(0)!r}, but id 0 is padding; train the model with "
            "--pad_id=0 --eos_id=1 --unk_id=2."
        )
    if model.eos_id() < 0:
        faults.append("it has no end piece; train the model with --eos_id=1.")
    errors.raise_all(faults, where=f"vocabulary path={path!r}")
