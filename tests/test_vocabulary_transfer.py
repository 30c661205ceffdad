"""A model goes on in another vocabulary with the meaning that its tokens have."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import word_pieces

from convt5 import errors
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.interchange.initialization import InitFrom
from convt5.text import plain_vocabularies, tokenizer_files, vocabulary_transfer
from convt5.text.vocabulary_files import FOLDER, KeptText, KeptVocabulary, write
from convt5.training.train_state import TrainState

BYTES = KeptVocabulary("characters", 100)
TEXT = "the cat sat on the mat and the dog lay on the log while it rained cats and dogs"


def pieces(num_sentinels=100, **options):
    model = word_pieces.trained_model(**options)
    return KeptVocabulary("sentencepiece", num_sentinels, model)


def spell(new, old):
    return vocabulary_transfer.spell(new, old, "the data")


def processor(kept):
    return plain_vocabularies.features(KeptText(kept, kept), "the data").inputs


WORDS = pieces()
OTHER = pieces(text=TEXT[::-1], vocab_size=28)
WITH_BYTES = pieces(vocab_size=280, byte_fallback=True)
BPE = pieces(vocab_size=45, model_type="bpe")
VOCABULARIES = {
    "words": WORDS,
    "other": OTHER,
    "bytes": BYTES,
    "byte pieces": WITH_BYTES,
    "bpe": BPE,
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_spells_itself_token_for_token(name):
    same = spell(VOCABULARIES[name], VOCABULARIES[name])
    assert same == [[token] for token in range(processor(VOCABULARIES[name]).vocab_size)]


@pytest.mark.parametrize("new", VOCABULARIES)
@pytest.mark.parametrize("old", VOCABULARIES)
def test_what_a_token_is_spelled_with_has_its_text(new, old):
    spelled = spell(VOCABULARIES[new], VOCABULARIES[old])
    own, other = processor(VOCABULARIES[new]), processor(VOCABULARIES[old])
    assert len(spelled) == own.vocab_size
    ids = own.encode(TEXT)
    assert other.decode([i for token in ids for i in spelled[token]]).strip() == TEXT
    assert spelled[0] == [0]
    assert spelled[own.eos_id] == [other.eos_id]


def test_sentinels_keep_their_number_and_bytes_their_value():
    few = WORDS._replace(num_sentinels=3)
    assert spell(few, WORDS)[-3:] == [[token] for token in (122, 123, 124)]
    assert spell(WORDS, few)[-4:] == [[], [25], [26], [27]]
    assert spell(WITH_BYTES, BYTES)[3:259] == spell(BYTES, BYTES)[3:259]
    assert spell(BYTES, WITH_BYTES)[3 + 0xFF] == [3 + 0xFF]
    assert spell(BYTES, WORDS)[3 + ord("t")] == [processor(WORDS).tokenizer.PieceToId("t")]


def shuffled(kept):
    """The same pieces, which have other ids."""
    proto = tokenizer_files.parse(kept.model)
    order = [0, 1, 2, *range(len(proto.pieces) - 1, 2, -1)]
    moved = [proto.SentencePiece.FromString(proto.pieces[i].SerializeToString()) for i in order]
    del proto.pieces[:]
    proto.pieces.extend(moved)
    return kept._replace(model=proto.SerializeToString())


def trained(folder, kept, **settings):
    """Writes a run of random parameters, and returns its model."""
    model = tiny_run.make_model(vocab_size=128, **settings)
    config = dataclasses.replace(tiny_run.CONFIG, vocab_size=128, **settings)
    writer = Checkpointer(folder / "checkpoints", CheckpointConfig(), model_config=config)
    writer.save(7, TrainState(jnp.int32(7), model, {}), data=DataPositions())
    writer.wait()
    writer.close()
    write(folder / FOLDER, KeptText(kept, kept))
    return model


def start(folder, kept, **settings):
    fresh = tiny_run.make_model(seed=1, **settings)
    source = InitFrom(path=str(folder), vocabulary_transfer=True)
    source.check_vocabulary(KeptText(kept, kept), fresh)
    return source.apply(fresh, KeptText(kept, kept))


@pytest.mark.parametrize("tie_output", [True, False])
def test_a_model_reads_and_writes_the_same_in_another_order_of_ids(tmp_path, tie_output):
    old = trained(tmp_path, WORDS, tie_output=tie_output)
    new, report = start(tmp_path, shuffled(WORDS), vocab_size=130, tie_output=tie_output)
    before, after = processor(WORDS), processor(shuffled(WORDS))
    ids = [token for (token,) in spell(shuffled(WORDS), WORDS)]
    assert ids != sorted(ids)

    def logits(model, vocabulary):
        source, target = (np.array([vocabulary.encode(text)]) for text in ("the cat", "a dog"))
        return np.asarray(model(source, target))[..., : len(ids)]

    # Matrix products of other widths add in another order.
    np.testing.assert_allclose(logits(new, after), logits(old, before)[..., ids], atol=1e-6)
    tables = ["token_embedder/embedding"] + ["output_head/kernel"] * (not tie_output)
    assert sorted(report.transferred) == sorted(tables)
    assert "the row of one token for 125 tokens, the mean of several for 0" in report.text("a")


def test_a_token_that_was_not_there_has_the_mean_of_what_it_was_cut_into(tmp_path):
    old = trained(tmp_path, WORDS)
    new, _ = start(tmp_path, BPE, vocab_size=160)
    table, mean = (np.asarray(m.token_embedder.embedding[...]) for m in (new, old))
    (token,) = (i for i in [processor(BPE).encode("the")[0]] if i not in (0, 1, 2))
    parts = processor(WORDS).encode("the")
    assert len(parts) > 1
    np.testing.assert_allclose(table[token], mean[parts].mean(0), rtol=1e-6)
    fresh = tiny_run.make_model(seed=1, vocab_size=160)
    np.testing.assert_array_equal(table[145:], fresh.token_embedder.embedding[145:])


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (None, {}, "needs one vocabulary .* the run's data has no known one"),
        (KeptText(WORDS, BYTES), {}, "the run's data has two"),
        (KeptText(BPE, BPE), {"exclude": ["token_embedder"]}, "changes no table"),
        (KeptText(BPE, BPE), {"continue_training": True}, "or continue_training"),
    ],
)
def test_what_cannot_be_transferred_is_refused(tmp_path, text, settings, message):
    model = trained(tmp_path, WORDS)
    with pytest.raises(errors.UserError, match=message):
        InitFrom(path=str(tmp_path), vocabulary_transfer=True, **settings).apply(model, text)


def test_a_checkpoint_of_fewer_rows_than_its_vocabulary_has_ids_is_refused(tmp_path):
    trained(tmp_path, WORDS._replace(num_sentinels=200))
    with pytest.raises(errors.UserError, match="has 128 rows, but its vocabulary has the id 224"):
        start(tmp_path, BPE._replace(num_sentinels=200), vocab_size=260)
