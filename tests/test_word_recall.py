"""Word recall masks words that the same text says elsewhere, and targets end with the last one."""

import numpy as np
import pytest
import seqio
import task_examples
import tensorflow as tf
from convt5.tasks import word_recall

from convt5 import errors
from convt5.text import sentinels

LENGTHS = {"inputs": 80, "targets": 18}


@pytest.fixture(scope="module")
def task():
    return seqio.get_mixture_or_task("pydoc_words")


@pytest.fixture(scope="module")
def vocabulary(task):
    return task.output_features["targets"].vocabulary


@pytest.fixture(scope="module")
def examples(task):
    return task_examples.examples(task, "validation", LENGTHS, seed=0)


def test_masked_words_stand_elsewhere_in_the_text_and_begin_with_their_clue(examples, vocabulary):
    assert len(examples) >= 50
    for example in examples:
        inputs, targets = example["inputs"].tolist(), example["targets"].tolist()
        assert inputs[-1] == targets[-1] == 1
        for mark, word in zip(targets[:-1:2], targets[1:-1:2], strict=True):
            assert word in inputs
            text = vocabulary.decode([word])
            assert len(text) >= 5
            assert text.startswith(vocabulary.decode([inputs[inputs.index(mark) - 1]]))


def test_targets_have_the_marks_of_the_inputs_and_end_with_a_word(examples, vocabulary):
    marks = sentinels.ids_of(vocabulary)
    for example in examples:
        found = [
            [token for token in example[name].tolist() if token in marks]
            for name in ("inputs", "targets")
        ]
        assert found[0] == found[1] == list(marks[: len(found[0])])
        assert len(found[0]) >= 2
        assert example["targets"][0] == marks[0]
        assert example["targets"][-2] not in marks


def test_texts_are_whole_again_with_their_words(examples, task, vocabulary):
    texts = [e["text"].decode() for e in task.source.get_dataset("validation").as_numpy_iterator()]
    known = {vocabulary.decode(vocabulary.encode(text)) for text in texts}
    count = 0
    for example in examples:
        targets = example["targets"][:-1].tolist()
        words = dict(zip(targets[::2], targets[1::2], strict=True))
        ids = []
        for token in example["inputs"][:-1].tolist():
            if token in words:
                ids.pop()  # The clue.
            ids.append(words.get(token, token))
        count += vocabulary.decode(ids) in known
    assert count >= 0.75 * len(examples)  # The others are parts of texts beyond the length.


@pytest.mark.slow
def test_passages_are_sentences_and_held_out_ones_are_not_trained_on(task):
    passages = word_recall.pydoc_passages()
    assert len(passages) >= 1000
    assert len(passages) - len(set(passages)) < 20
    for passage in passages:
        assert passage[0].isupper()
        assert passage[-1] in ".:"
    texts = {
        split: {e["text"].decode() for e in task.source.get_dataset(split).as_numpy_iterator()}
        for split in ("train", "validation")
    }
    assert not texts["train"] & texts["validation"]
    others = word_recall.jax_passages()
    assert len(others) >= 1000
    assert texts["train"] | texts["validation"] == {*passages, *others}
    assert not texts["validation"] & set(others)


def test_a_choice_leaves_one_of_each_word():
    clues = np.array([0, 0, 9, 9, 0])
    tables = word_recall.WordTables(clues, np.array([False, False, False, False, True]))
    tokens = tf.constant([2, 3, 3, 1, 2, 4, 3, 2, 2])  # The second 2 has a continuation.
    seen = np.zeros(9, int)
    for seed in range(50):
        mask = word_recall.choose_words(tokens, tf.constant(9), tf.constant([seed, 0]), tables)
        chosen = np.flatnonzero(mask.numpy())
        seen[chosen] += 1
        left = np.delete(tokens.numpy(), [*chosen, 4])
        assert {2, 3} <= set(left)
        few = word_recall.choose_words(tokens, tf.constant(2), tf.constant([seed, 0]), tables)
        assert few.numpy().sum() == 2
        assert set(np.flatnonzero(few.numpy())) <= set(chosen)
    assert seen[[3, 4, 5]].tolist() == [0, 0, 0]
    assert (seen[[0, 1, 2, 6, 7, 8]] > 0).all()
    none = word_recall.choose_words(tokens[:1], tf.constant(2), tf.constant([0, 0]), tables)
    assert none.numpy().tolist() == [False]


@pytest.mark.parametrize("lengths", [{"inputs": 7, "targets": 22}, {"inputs": 96, "targets": 4}])
def test_lengths_that_hold_no_words_are_refused(task, lengths):
    with pytest.raises(errors.UserError, match="set them to at least 8 and 5"):
        task.get_dataset(lengths, "validation", seed=0, shuffle=False)
