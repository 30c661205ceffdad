"""Vocabularies with T5's sentinels, checked when they are named rather than when text is read.

Padding is id 0; `convt5.text.sentinels` knows the sentinel ids. Gin files use `vocabularies.named`,
`vocabularies.sentencepiece` and `vocabularies.characters`.
"""

import os
from collections.abc import Sequence

import numpy as np
import seqio

from convt5 import errors
from convt5.runtime.atomic_files import is_remote
from convt5.text import sentinels, seqio_vocabularies, vocabulary_files

DEFAULT_NUM_SENTINELS = sentinels.T5_SENTINELS
T5_VOCABULARY = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
"""T5's published vocabulary of 32,000 pieces; reading it needs the network."""


def named(source: str, num_sentinels: int = DEFAULT_NUM_SENTINELS) -> seqio.Vocabulary:
    """Returns the vocabulary named by a setting.

    If the settings of a run name one that is gone, this is the one saved with the run.

    Args:
        source: a SentencePiece .model file; the folder of a model with its vocabulary; or "bytes".
        num_sentinels: number of sentinels for files and bytes; saved vocabularies have their own.

    Raises:
        UserError: as `sentencepiece`, or the folder has no vocabulary, or two.
    """
    if source == vocabulary_files.BYTES:
        return characters(num_sentinels)
    path = os.path.expanduser(source)
    is_file = source.endswith(".model") or os.path.isfile(path)
    # A file is used itself, even if it is in the folder of a model.
    features = None if is_file else vocabulary_files.load_features(source)
    if features is not None:
        if features.inputs is not features.targets:
            raise errors.UserError(
                f"the model in {source!r} has one vocabulary of inputs and another of targets; "
                f"name the file of one of them in its folder {vocabulary_files.FOLDER!r}."
            )
        return features.inputs
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

    If the settings of a run name a file that is gone, this is the one saved with the run.

    Raises:
        UserError: as `seqio_vocabularies.from_file`.
    """
    gone = not is_remote(path) and not os.path.isfile(os.path.expanduser(path))
    kept = vocabulary_files.kept_by_run() if gone else None
    return kept or seqio_vocabularies.from_file(path, num_sentinels)


def characters(num_sentinels: int = DEFAULT_NUM_SENTINELS) -> seqio.ByteVocabulary:
    """Returns the vocabulary of the 256 bytes of UTF-8, which needs no file.

    With `num_sentinels=0` it is that of published byte-level T5s, whose sentinels are the last 100
    ids, from 258 down.

    Raises:
        UserError: num_sentinels is negative.
    """
    return seqio_vocabularies.byte_level(num_sentinels)


def published_t5() -> seqio.SentencePieceVocabulary:
    """Returns T5's own vocabulary with 100 sentinels, which is downloaded when first used."""
    return seqio.SentencePieceVocabulary(T5_VOCABULARY, extra_ids=DEFAULT_NUM_SENTINELS)


def token_bytes(vocabulary: seqio.Vocabulary) -> np.ndarray | None:
    """Returns the number of UTF-8 bytes of text of each id; None if unknown.

    Special ids and sentinels count zero, except byte ids that serve as both. An unknown piece
    counts as one byte, the minimum of its text. The space that SentencePiece puts before a text
    counts like any other.
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
    """Returns whether ids contain the unknown id, whose text cannot be restored."""
    unknown = unknown_id(vocabulary)
    return unknown is not None and unknown in ids


def unknown_id(vocabulary: seqio.Vocabulary) -> int | None:
    """Returns the id of unknown text; None if the vocabulary can represent all text."""
    return vocabulary.unk_id if isinstance(vocabulary, seqio.SentencePieceVocabulary) else None


def _piece_bytes(vocabulary: seqio.SentencePieceVocabulary, token: int) -> int:
    model = vocabulary.tokenizer
    if model.IsControl(token):
        return 0
    if model.IsByte(token) or model.IsUnknown(token):
        return 1
    return len(model.IdToPiece(token).replace("▁", " ").encode())
