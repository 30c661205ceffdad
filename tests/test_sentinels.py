"""Sentinels are those of the vocabulary, wherever it has them, in every part that meets them."""

import json
from typing import Any

import numpy as np
import pytest
import seqio
import tensorflow as tf
import word_pieces
from convt5.tasks import vocabularies
from convt5.tasks.span_corruption import span_corruption
from hypothesis import given
from hypothesis import strategies as st
from quick import quick
from sentencepiece import sentencepiece_model_pb2

import convt5
from convt5 import data, errors
from convt5.evaluation import predictor, task_data
from convt5.generation import samples
from convt5.text import sentinels, vocabulary_files
from convt5.training import data_checks

MARKS = [f"<extra_id_{i}>" for i in range(4)]


def pieces_with(marks, **options):
    return word_pieces.trained_model(
        user_defined_symbols=marks, vocab_size=24 + len(marks), **options
    )


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """Vocabularies by name."""
    folder = tmp_path_factory.mktemp("vocabularies")

    def file(name, content):
        (folder / name).write_bytes(content)
        return str(folder / name)

    plain = file("plain.model", word_pieces.trained_model())
    mixed = pieces_with(MARKS[::2] + MARKS[1::2])
    counting_up = file("up.model", pieces_with(MARKS))
    return {
        "t5": vocabularies.sentencepiece(plain, 4),
        "up": vocabularies.sentencepiece(counting_up, 4),
        "up_of_seqio": seqio.SentencePieceVocabulary(counting_up, extra_ids=0),
        "mixed": vocabularies.sentencepiece(file("mixed.model", mixed), 4),
        "added": vocabularies.sentencepiece(
            file("added.model", seqio.SentencePieceVocabulary(plain, extra_ids=4).sp_model), 4
        ),
        "reversed": seqio.SentencePieceVocabulary(plain, 4, reverse_extra_ids=False),
        "bytes": vocabularies.characters(4),
        "byt5": seqio.ByteVocabulary(),
    }


EXPECTED = {
    "t5": range(28, 24, -1),
    "up": range(3, 7),
    "up_of_seqio": range(3, 7),
    "mixed": [3, 5, 4, 6],
    "added": range(28, 24, -1),
    "reversed": range(25, 29),
    "bytes": range(262, 258, -1),
    "byt5": range(258, 158, -1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_vocabulary_has_its_own_sentinels(vocabulary, name):
    assert sentinels.ids_of(vocabulary[name]) == tuple(EXPECTED[name])
    ids = [*EXPECTED[name], 0, 1]
    assert sentinels.numbers(ids, vocabulary[name]) == [*range(len(ids) - 2), None, None]


@pytest.mark.parametrize("name", EXPECTED)
def test_marks_in_text_become_sentinels_and_come_back(vocabulary, name):
    own, first = vocabulary[name], tuple(EXPECTED[name])
    ids = predictor.encode_text(own, "<extra_id_0> cat <extra_id_3>")
    assert (ids[0], ids[-1]) == (first[0], first[3])
    assert predictor.decode_text(own, ids).split() == ["<extra_id_0>", "cat", "<extra_id_3>"]
    assert "<1>" in samples.render(np.array(ids), own)
    assert "<4>" in samples.render(np.array(ids), own)
    absent = f"<extra_id_{len(first)}>"
    assert not set(predictor.encode_text(own, absent)) & set(first)


@pytest.mark.parametrize("name", quick(list(EXPECTED), chosen=list(EXPECTED)[:3]))
def test_span_corruption_takes_the_sentinels_of_the_vocabulary(vocabulary, name):
    own, ids = vocabulary[name], tuple(EXPECTED[name])
    text = own.encode("the cat sat on the mat and the dog lay")
    feature = seqio.Feature(own, add_eos=True)
    lengths = {"inputs": 18, "targets": 12}
    (example, *_) = span_corruption(
        tf.data.Dataset.from_tensor_slices({"targets": [text]}),
        lengths,
        {"inputs": feature, "targets": feature},
        mean_span_length=1.0,
    ).as_numpy_iterator()
    for half in ("inputs", "targets"):
        marks = [i for i in example[half].tolist() if i in ids]
        assert marks == list(ids[: len(marks)])
        assert len(marks) >= 2


def test_bytes_of_characters_are_no_sentinels_of_byte_level_t5s(vocabulary):
    own = vocabulary["byt5"]
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000, 97))))
    assert not set(own.encode(every)) & set(sentinels.never_text(own))
    assert set(sentinels.numbers(own.encode(every), own)) == {None}
    assert predictor.decode_text(own, own.encode("naïve 日本 🎉")) == "naïve 日本 🎉"
    sizes = vocabularies.token_bytes(own)
    assert sizes[:3].sum() == sizes[list(sentinels.never_text(own))].sum() == 0
    assert sizes[own.encode(every)].all()


@pytest.mark.slow
@given(st.lists(st.text(max_size=3), max_size=101))
def test_published_byte_level_t5s_mark_a_hundred_spans_between_any_texts(texts):
    """As in a target of span corruption: each text after its sentinel, in order."""
    own = seqio.ByteVocabulary()
    texts = [text.strip("\x00\x01\x02").replace("<", "") for text in texts[:100]]
    ids = [i for n, text in enumerate(texts) for i in (258 - n, *own.encode(text))]
    expected = "".join(f"<extra_id_{n}>{text}" for n, text in enumerate(texts))
    found = sentinels.numbers(ids, own)
    assert [n for n in found if n is not None] == list(range(len(texts)))
    assert predictor.decode_text(own, ids) == expected
    assert predictor.encode_text(own, expected) == ids


def test_a_character_that_is_cut_is_no_sentinel(vocabulary):
    own = vocabulary["byt5"]
    cut = own.encode("日")[:1]
    assert sentinels.numbers([258, *cut], own) == [0, None]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "reversed"])
def test_a_kept_vocabulary_keeps_its_sentinels(vocabulary, name, tmp_path):
    kept = vocabulary_files.of(vocabulary[name])
    vocabulary_files.write(tmp_path / "vocabulary", vocabulary_files.KeptText(kept, kept))
    found = convt5.load_vocabulary(tmp_path)
    assert sentinels.ids_of(found) == tuple(EXPECTED[name])
    assert kept.first_sentinel == next(iter(EXPECTED[name]), None)
    assert found.encode("the cat") == vocabulary[name].encode("the cat")


def keep_bytes(folder, num_sentinels):
    """Writes the vocabulary of a model of bytes."""
    kept = vocabulary_files.of(vocabularies.characters(num_sentinels))
    vocabulary_files.write(folder / vocabulary_files.FOLDER, vocabulary_files.KeptText(kept, kept))


def of_bytes(task, num_sentinels):
    feature = seqio.Feature(vocabularies.characters(num_sentinels))
    features = dict.fromkeys(("inputs", "targets"), feature)
    return seqio.get_mixture_or_task(task).replace(output_features=features)


def rows_of_bytes(task, num_sentinels):
    return data.DataConfig(
        mixture=of_bytes(task, num_sentinels), batch_size=1, encoder_length=64, decoder_length=32
    )


def test_spans_measure_a_run_with_the_sentinels_of_its_training():
    same, other = (rows_of_bytes("pydoc_span_corruption", count) for count in (7, 9))
    data_checks.check_same_vocabulary(same, {"eval_data": same, "none": None})
    data_checks.check_same_vocabulary(same, {"eval_data": rows_of_bytes("gap_copy", 9)})
    with pytest.raises(errors.UserError, match=r"eval_data: .*, 9 sentinels.*, 7 sentinels"):
        data_checks.check_same_vocabulary(same, {"eval_data": other})


@pytest.mark.parametrize(
    ("task", "num_sentinels", "told"),
    [("gap_copy", 7, 0), ("pydoc_span_corruption", 0, 0), ("pydoc_prefix_lm", 7, 2)],
)
def test_training_on_spans_tells_of_other_sentinels_than_the_models(
    tmp_path, caplog, task, num_sentinels, told
):
    keep_bytes(tmp_path, 0)
    rows = rows_of_bytes(task, num_sentinels)
    vocabulary_files.check_same_ids(rows.kept_text(), tmp_path, where="InitFrom", remedy="")
    assert caplog.text.count("as id 258, but it is 265 in this run") == told


@pytest.mark.parametrize(("num_sentinels", "first"), [(0, 258), (50, 308), (100, None)])
def test_evaluation_on_spans_refuses_other_sentinels_than_the_models(num_sentinels, first):
    trained = vocabulary_files.TextFeatures(*[vocabularies.characters()] * 2)
    settings = {"vocab_size": 384, "trained": trained}
    task_data.check_task(of_bytes("gap_copy", num_sentinels), "validation", **settings)
    spans = of_bytes("pydoc_span_corruption", num_sentinels)
    if first is None:
        task_data.check_task(spans, "validation", **settings)
        return
    with pytest.raises(errors.UserError, match=rf"is id {first}, but .* with 100, .* id 358"):
        task_data.check_task(spans, "validation", **settings)


def test_a_vocabulary_named_for_a_model_with_other_sentinels_is_told(tmp_path):
    keep_bytes(tmp_path, 0)
    none, some = (vocabulary_files.of(vocabularies.characters(count)) for count in (0, 100))
    assert vocabulary_files.replacement("bytes", none, tmp_path) is None
    note = vocabulary_files.replacement("bytes", some, tmp_path)
    assert note
    assert "100 sentinels) replaces the vocabulary of" in note


@pytest.mark.parametrize("name", ["t5", "up", "added", "byt5", "bytes"])
def test_folders_of_hugging_face_keep_them_both_ways(vocabulary, name, tmp_path):
    kept = vocabulary_files.of(vocabulary[name])
    text = vocabulary_files.KeptText(kept, kept)
    vocabulary_files.write_for_hugging_face(tmp_path, text)
    assert vocabulary_files.load(tmp_path) == text
    assert sentinels.ids_of(convt5.load_vocabulary(tmp_path)) == tuple(EXPECTED[name])


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_published_byte_level_t5_brings_its_vocabulary(tmp_path, file):
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    found = convt5.load_vocabulary(tmp_path)
    assert (found.vocab_size, sentinels.ids_of(found)[0]) == (259, 258)


def test_what_transformers_has_no_tokenizer_of_is_not_written(vocabulary, tmp_path):
    one, other = (vocabulary_files.of(vocabulary[name]) for name in ("bytes", "t5"))
    kept = [vocabulary_files.KeptText(one, other)]
    # transformers ends each text with the end token.
    kept += [vocabulary_files.KeptText(each, each, add_eos=False) for each in (one, other)]
    for text in kept:
        assert not vocabulary_files.write_for_hugging_face(tmp_path, text)
    assert not list(tmp_path.iterdir())


def with_an_unused_piece(model: bytes) -> bytes:
    messages: Any = sentencepiece_model_pb2  # Its contents are generated at import.
    proto = messages.ModelProto.FromString(model)
    next(piece for piece in proto.pieces if piece.piece == "▁cat").type = 5
    return proto.SerializeToString()


@pytest.mark.parametrize(
    "model",
    [
        word_pieces.trained_model(vocab_size=27, model_type="bpe"),
        word_pieces.trained_model(vocab_size=27, user_defined_symbols=["<sep>"]),
        word_pieces.trained_model(vocab_size=27, treat_whitespace_as_suffix=True),
        with_an_unused_piece(word_pieces.trained_model()),
    ],
)
def test_what_transformers_would_split_into_other_ids_is_not_written(model, tmp_path):
    kept = vocabulary_files.KeptVocabulary("sentencepiece", 7, model)
    text = vocabulary_files.KeptText(kept, kept)
    assert not vocabulary_files.write_for_hugging_face(tmp_path, text)
    assert not list(tmp_path.iterdir())


def test_ids_of_special_pieces_are_those_of_the_pieces_not_of_the_training(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    messages: Any = sentencepiece_model_pb2  # Its contents are generated at import.
    model = messages.ModelProto.FromString(word_pieces.trained_model())
    model.pieces.insert(2, model.pieces[1])
    model.pieces[2].piece = "<s>"  # As in T5's model with 100 sentinels.
    kept = vocabulary_files.KeptVocabulary("sentencepiece", 7, model.SerializeToString())
    assert model.trainer_spec.unk_id == 2
    assert vocabulary_files.write_for_hugging_face(tmp_path, vocabulary_files.KeptText(kept, kept))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = vocabulary_files.build_vocabulary(kept, tmp_path / "spiece.model")
    assert 3 in ours.encode("the Ж cat")
    assert tokenizer.encode("the Ж cat").ids == [*ours.encode("the Ж cat"), 1]
