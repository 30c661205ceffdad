"""The block about the data: what is counted is what the rows are."""

import dataclasses

import numpy as np
import pytest
import seqio
import tensorflow as tf
import word_pieces
from convt5.tasks import pretraining, vocabularies
from quick import quick

from convt5 import data, errors
from convt5.data import counts, data_report
from convt5.data.counts import Counts
from convt5.evaluation import task_data

TEXTS = ["the cat sat", "on the mat", "the dog lay on the log", "vim"] * 3


def task_of(vocabulary, texts=TEXTS, name="texts", **settings):
    def read(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        return tf.data.Dataset.from_tensor_slices(texts)

    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        name,
        source=seqio.FunctionDataSource(read, splits=["train"], **settings),
        preprocessors=[
            lambda texts: texts.map(lambda text: {"inputs": text, "targets": text}),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
    )


def config(task, **settings):
    lengths = {"encoder_length": 24, "decoder_length": 11}
    return data.DataConfig(mixture=task, batch_size=2, **(lengths | settings))


def test_counts_are_those_of_the_text():
    (found,) = data_report.measure(config(task_of(vocabularies.characters())))
    sizes = np.array([len(text) for text in TEXTS])
    assert found.is_whole
    assert found.documents == found.measured_documents == found.rows == len(TEXTS)
    assert found.text_bytes == sizes.sum()
    assert found.tokens == 2 * (sizes + 1).sum()
    assert found.bytes_per_token == 1
    assert found.tokens_per_word == pytest.approx(
        sizes.sum() / sum(len(text.split()) for text in TEXTS)
    )
    assert (found.cut_inputs, found.cut_targets) == (0, np.mean(sizes + 1 > 11))
    assert found.padding_inputs == pytest.approx(1 - (sizes + 1).mean() / 24)
    assert found.padding_targets == pytest.approx(1 - np.minimum(sizes + 1, 11).mean() / 11)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("pads", quick([False, True], chosen=[True]))
def test_what_is_read_is_counted_to_the_example(tmp_path, pack, pads):
    """Of all that was read, where the block at the start has a sample."""
    (tmp_path / "words.model").write_bytes(word_pieces.trained_model())
    words = vocabularies.sentencepiece(str(tmp_path / "words.model"))
    task = task_of(words)
    if pads:  # Padding that is cut is no text.
        task = task.replace(preprocessors=[*task.preprocessors[:2], end_and_pad])
    read = config(task, pack=pack, encoder_length=12, decoder_length=5, num_epochs=2)
    batches = read.build(process_index=0, process_count=1)
    assert batches.counts() == {"texts": Counts()}
    list(batches)
    sizes = np.array([len(words.encode(text)) + 1 for text in TEXTS])
    shown = [words.encode(text)[: 5 - 1] for text in TEXTS]
    expected = Counts(
        examples=2 * len(TEXTS),
        cut_inputs=2 * (sizes > 12).sum(),
        cut_targets=2 * (sizes > 5).sum(),
        unknown_targets=2 * sum(words.unk_id in ids for ids in shown),
    )
    assert batches.counts() == {"texts": expected}
    assert 0 < expected.cut_inputs < expected.cut_targets
    assert expected.unknown_targets
    told = counts.describe("read", batches.counts())
    assert f"texts: 24 examples; cut: {expected.cut_inputs} (" in told


@seqio.map_over_dataset
def end_and_pad(example):
    return {n: tf.concat([example[n], [1], [0] * 9], 0) for n in ("inputs", "targets")}


def test_packed_rows_are_fewer():
    task = task_of(vocabularies.characters())
    (found,) = data_report.measure(config(task, pack=True, encoder_length=64, decoder_length=64))
    batches = config(
        task, pack=True, encoder_length=64, decoder_length=64, num_epochs=1, shuffle=False
    ).build(process_index=0, process_count=1)
    rows = [row for batch in batches for row in batch["encoder_input_tokens"] if row.any()]
    assert found.rows == len(rows)
    assert found.padding_inputs == pytest.approx(np.mean([row == 0 for row in rows]))


def test_targets_that_the_vocabulary_cannot_give_back_are_counted(tmp_path):
    (tmp_path / "words.model").write_bytes(word_pieces.trained_model())
    words = vocabularies.sentencepiece(str(tmp_path / "words.model"))
    (found,) = data_report.measure(config(task_of(words)))
    assert found.unknown_targets == 0.25
    assert "targets with unknown pieces: 25.0%" in found.as_text()


def test_a_sample_is_bounded_and_says_so():
    texts = ["word " * 100_000] * 5 + ["a"] * 1000
    (found,) = data_report.measure(config(task_of(vocabularies.characters(), texts)))
    assert (found.measured_documents, found.documents, found.rows) == (1, None, None)
    assert "an unknown number of documents" in found.as_text()
    assert "of the first 1 documents" in found.as_text()
    counted = task_of(
        vocabularies.characters(), ["abcd"] * 1000, num_input_examples={"train": 1000}
    )
    (found,) = data_report.measure(config(counted))
    assert (found.documents, found.text_bytes, found.tokens, found.rows) == (
        1000,
        4000,
        10000,
        1000,
    )
    assert "1,000 documents, about 4,000 bytes, about 10,000 tokens" in found.as_text()


def test_totals_of_a_sample_with_too_many_examples_are_unknown(monkeypatch):
    task = task_of(vocabularies.characters(), ["abcd"] * 50)
    for most, rows in ((50, 50), (49, None)):
        monkeypatch.setattr(data_report, "_MOST_EXAMPLES", most)
        (found,) = data_report.measure(config(task))
        assert (found.documents, found.text_bytes, found.rows) == (50, 200, rows)
    assert "200 bytes, an unknown number of tokens, an unknown number of rows" in found.as_text()


def test_each_task_of_a_mixture_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words in a line\n" * 50)
    spans = pretraining.text_span_corruption(str(tmp_path / "text.txt"), validation_fraction=0)
    mixture = seqio.Mixture("both", [(task_of(vocabularies.characters()), 1), (spans, 1)])
    found = data_report.measure(config(mixture))
    assert [report.name for report in found] == ["text_span_corruption", "texts"]
    block = data_report.describe("data", found)
    assert "text_span_corruption:" in block
    assert all(dataclasses.asdict(report) for report in found)


def test_a_task_without_an_example_is_an_error():
    nothing = task_of(vocabularies.characters()).replace(
        name="nothing",
        preprocessors=[
            lambda texts: texts.filter(lambda _: False).map(
                lambda text: {"inputs": text, "targets": text}
            ),
            seqio.preprocessors.tokenize,
        ],
    )
    with pytest.raises(errors.UserError, match="task 'nothing', split='train', gives no example"):
        data_report.measure(config(nothing))


def config_of_cut(read, step):
    """Rows of 4 tokens of a task whose source or step needs AutoGraph."""
    feature = seqio.Feature(vocabularies.characters(), add_eos=False)
    task = seqio.Task(
        "cut",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        output_features={"inputs": feature, "targets": feature},
        preprocessors=[seqio.preprocessors.tokenize, step],
    )
    return config(task, encoder_length=4, decoder_length=4)


def test_functions_that_need_autograph_are_read_too():
    def cut(tokens, most):
        if tf.size(tokens) > most:
            tokens = tokens[:most]
        return tokens

    @seqio.map_over_dataset
    def cut_tokens(example):
        tokens = cut(example["inputs"], 3)
        return {"inputs": tokens, "targets": tokens}

    def read(split, shuffle_files, seed=None):
        texts = tf.data.Dataset.from_tensor_slices([["a", "b"], ["c", "d"]])
        return texts.map(lambda words: {"inputs": tf.strings.reduce_join(cut(words, 1)) + "yz"})

    cut_config = config_of_cut(read, cut_tokens)
    (report,) = data_report.measure(cut_config)
    assert report.tokens == 2 * (3 + 3)
    lengths = {"inputs": 4, "targets": 4}
    measured = task_data.read_examples(cut_config.mixture, "train", lengths=lengths)
    letters = ["".join(map(chr, example["targets"] - 3)) for example in measured]
    assert letters == ["ayz", "cyz"]
    (batch,) = dataclasses.replace(cut_config, num_epochs=1).build(process_index=0, process_count=1)
    assert sorted(batch["decoder_target_tokens"][:, :3].tolist()) == [
        [ord(letter) + 3 for letter in text] for text in letters
    ]


def test_steps_that_need_autograph_are_measured_too():
    @seqio.map_over_dataset
    def cut(example):
        tokens = example["inputs"]
        if tf.size(tokens) > 3:
            tokens = tokens[:3]
        return {"inputs": tokens, "targets": tokens}

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({"inputs": ["abcdef", "gh"]})

    (report,) = data_report.measure(config_of_cut(read, cut))
    assert report.tokens == 2 * (3 + 2)
