"""Vocabularies follow T5's conventions and are checked when they are named."""

import numpy as np
import pytest
import seqio
from convt5.tasks import vocabularies
from word_pieces import trained_model

from convt5 import errors
from convt5.text import plain_vocabularies, sentinels, seqio_vocabularies, vocabulary_files


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "words.model"
    path.write_bytes(trained_model())
    return str(path)


def test_sentinels_follow_the_pieces_and_the_last_id_is_the_first_sentinel(model_path):
    vocabulary = vocabularies.sentencepiece(model_path, num_sentinels=10)
    assert vocabulary.vocab_size == 35
    assert vocabulary.extra_ids == 10
    assert vocabulary.tokenizer.IdToPiece(34) == "▁<extra_id_0>"


def test_text_goes_through_a_vocabulary_and_back(model_path):
    vocabulary = vocabularies.sentencepiece(model_path)
    assert (
        vocabulary.decode(vocabulary.encode("the cat sat on the log")) == "the cat sat on the log"
    )


def test_bytes_of_text_are_counted_by_token(model_path):
    vocabulary = vocabularies.sentencepiece(model_path)
    sizes = vocabularies.token_bytes(vocabulary)
    text = "the dogs and the cats"
    # SentencePiece puts a space before the text.
    assert sizes[vocabulary.encode(text)].sum() == len(text) + 1
    assert sizes.shape == (vocabulary.vocab_size,)


def test_special_ids_and_sentinels_stand_for_no_text(model_path):
    sizes = vocabularies.token_bytes(vocabularies.sentencepiece(model_path))
    np.testing.assert_array_equal(sizes[:2], 0)
    np.testing.assert_array_equal(sizes[-100:], 0)


def test_a_byte_token_stands_for_one_byte():
    vocabulary = vocabularies.characters()
    sizes = vocabularies.token_bytes(vocabulary)
    assert sizes.sum() == 256
    text = "déjà vu"
    assert sizes[vocabulary.encode(text)].sum() == len(text.encode())


def test_a_model_that_ends_in_sentinels_keeps_them(tmp_path, model_path):
    path = tmp_path / "with_sentinels.model"
    path.write_bytes(seqio.SentencePieceVocabulary(model_path, extra_ids=5).sp_model)
    vocabulary = vocabularies.sentencepiece(str(path), num_sentinels=5)
    assert (vocabulary.vocab_size, vocabulary.extra_ids) == (30, 5)
    assert vocabularies.token_bytes(vocabulary)[-5:].sum() == 0


def test_too_few_own_sentinels_are_an_error(tmp_path, model_path):
    model = seqio.SentencePieceVocabulary(model_path, extra_ids=5).sp_model
    path = tmp_path / "five.model"
    path.write_bytes(model)
    with pytest.raises(errors.UserError, match=r"holds 5 sentinel pieces.* num_sentinels=100"):
        vocabularies.sentencepiece(str(path))


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(errors.UserError, match=r"absent\.model' names no file"):
        vocabularies.sentencepiece(str(tmp_path / "absent.model"))


def test_a_file_that_is_no_vocabulary_is_named(tmp_path):
    path = tmp_path / "notes.model"
    path.write_text("not a model " * 50)
    with pytest.raises(errors.UserError, match=r"notes\.model' cannot be read as a SentencePiece"):
        vocabularies.sentencepiece(str(path))


def test_a_model_without_padding_at_zero_is_an_error(tmp_path):
    path = tmp_path / "default.model"
    path.write_bytes(trained_model(pad_id=-1, unk_id=0, bos_id=1, eos_id=2))
    with pytest.raises(errors.UserError, match=r"id 0 is the piece '<unk>', but id 0 is padding"):
        vocabularies.sentencepiece(str(path))


def test_t5s_vocabulary_gives_the_published_ids(shared_data):
    vocabulary = vocabularies.sentencepiece(str(shared_data / "vocab" / "t5_cc_all_32000.model"))
    assert vocabulary.vocab_size == 32_100
    assert vocabulary.encode("translate English to German: ") == [13959, 1566, 12, 2968, 10]


def test_a_stored_model_with_a_hundred_sentinels_keeps_them(shared_data):
    path = shared_data / "vocab" / "t5_cc_all_32000_100extra.model"
    vocabulary = vocabularies.sentencepiece(str(path))
    assert (vocabulary.vocab_size, vocabulary.extra_ids) == (32_101, 100)
    assert vocabulary.unk_id == 3


@pytest.mark.parametrize("num_sentinels", [0, 7])
@pytest.mark.parametrize("kind", ["bytes", "pieces", "pieces with sentinels"])
def test_vocabularies_of_predictions_are_those_of_seqio(kind, num_sentinels, model_path, tmp_path):
    path = tmp_path / "pieces.model"
    own = 9 if kind == "pieces with sentinels" else 0
    path.write_bytes(seqio.SentencePieceVocabulary(model_path, extra_ids=own).sp_model)
    theirs = seqio_vocabularies.from_file(str(path), num_sentinels)
    if kind == "bytes":
        theirs = seqio_vocabularies.byte_level(num_sentinels)
    kept = vocabulary_files.of(theirs)
    assert kept is not None
    ours, targets, _ = plain_vocabularies.features(vocabulary_files.KeptText(kept, kept), "here")
    assert targets is ours
    for name in ("vocab_size", "extra_ids", "eos_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert sentinels.ids_of(ours) == sentinels.ids_of(theirs)
    for text in ("", "the cats", " the  dog ", "déjà vu", "a <extra_id_1> log <extra_id_0>"):
        assert ours.encode(text) == theirs.encode(text)
    every = np.arange(theirs.vocab_size + 3)
    for ids in ([], [5, 1, 6], every[::-1], every[2:], np.random.default_rng(0).permutation(every)):
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_saved_vocabulary_without_padding_at_zero_is_an_error():
    model = trained_model(pad_id=-1, unk_id=0, bos_id=1, eos_id=2)
    kept = vocabulary_files.KeptVocabulary("sentencepiece", 100, model)
    with pytest.raises(errors.UserError, match=r"'here': id 0 is the piece '<unk>', but id 0 is"):
        plain_vocabularies.features(vocabulary_files.KeptText(kept, kept), "here")
