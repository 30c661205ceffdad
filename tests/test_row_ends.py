"""What does not fit a row is cut, and its end token stays."""

import functools
from typing import Any

import numpy as np
import pytest
import seqio
import tensorflow as tf
from convt5.tasks import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick

from convt5 import data
from convt5.data import row_ends
from convt5.data.rows import Ragged

EOS, LENGTHS = 1, {"inputs": 8, "targets": 4}
TEXTS = ["", "a", "abc", "abcd", "abcdefghijk"]
APPENDING = {
    "append_eos": [seqio.preprocessors.append_eos],
    "append_eos_after_trim": [seqio.preprocessors.append_eos_after_trim],
    "none": [],
    "partial": [functools.partial(seqio.preprocessors.append_eos_after_trim)],
    "before_another": [seqio.preprocessors.append_eos_after_trim, lambda dataset: dataset],
}


def task_of(steps, *, texts=TEXTS):
    def read(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        return tf.data.Dataset.from_tensor_slices(texts).map(
            lambda text: {"inputs": text, "targets": text}
        )

    feature = seqio.Feature(vocabularies.characters(), add_eos=True)
    return seqio.Task(
        "texts",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[seqio.preprocessors.tokenize, *steps],
        output_features={"inputs": feature, "targets": feature},
    )


def features(task, lengths):
    """Returns the features as training, reports and evaluation end them."""
    whole = row_ends.untruncated(task).get_dataset(
        lengths or None,
        "train",
        shuffle=False,
        num_epochs=1,
        try_in_mem_cache=False,
        trim_output_features=False,
    )
    examples = [
        row_ends.end_example(example, task.output_features, lengths, task=task.name)
        for example in whole.as_numpy_iterator()
    ]
    return [tuple(example[name].tolist() for name in LENGTHS) for example in examples]


def ended(text, limit):
    return [*vocabularies.characters().encode(text)[: limit - 1], EOS]


def plainly_ended(row, end_id, length):
    """Returns what `end_and_cut` makes of one sequence, and whether it lost more than padding."""
    whole = list(row)
    if end_id is not None and whole[-1:] not in ([end_id], [0]):
        whole.append(end_id)
    if length is None or len(whole) <= length:
        return whole, False
    kept = whole[:length]
    if end_id is not None and kept[-1] != 0:
        kept[-1] = end_id
    return kept, any(whole[length:])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=7), max_size=6),
    st.none() | st.integers(1, 8),
    st.booleans(),
)
def test_sequences_end_and_are_cut_as_each_would_be_alone(rows, length, add_eos):
    feature = seqio.Feature(vocabularies.characters(), add_eos=add_eos)
    values = np.array([token for row in rows for token in row], np.int32)
    before = values.copy()
    sequences = Ragged(values, np.array([len(row) for row in rows], np.int64))
    found, was_cut = row_ends.end_and_cut(sequences, feature, length)
    expected = [plainly_ended(row, EOS if add_eos else None, length) for row in rows]
    assert found.values.tolist() == [token for row, _ in expected for token in row]
    assert found.lengths.tolist() == [len(row) for row, _ in expected]
    assert was_cut.tolist() == [lost for _, lost in expected]
    assert found.values.dtype == np.int32
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize("steps", APPENDING.values(), ids=APPENDING)
def test_examples_end_with_their_end_token_whichever_steps_append_it(steps):
    task = task_of(steps)
    assert features(task, LENGTHS) == [(ended(t, 8), ended(t, 4)) for t in TEXTS]
    assert features(task, {}) == [(ended(t, 99), ended(t, 99)) for t in TEXTS]


@pytest.mark.parametrize(
    "feature",
    [
        seqio.Feature(vocabularies.characters(), add_eos=False),
        seqio.Feature(vocabularies.characters(), dtype=tf.float32),
        seqio.Feature(vocabularies.characters(), rank=2),
    ],
    ids=["no_end", "not_ids", "rank_2"],
)
def test_a_feature_without_an_end_token_gets_none(feature):
    values = np.ones((3, 2)) if feature.rank == 2 else np.arange(1, 4)
    example = row_ends.end_example(
        {"inputs": values, "other": "x"}, {"inputs": feature}, {}, task="texts"
    )
    assert example["other"] == "x"
    np.testing.assert_array_equal(example["inputs"], values)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, np.int32])
def test_ids_of_any_integer_type_end(dtype):
    feature: Any = seqio.Feature(vocabularies.characters(), dtype=dtype)
    example = row_ends.end_example(
        {"targets": np.array([5, 6])}, {"targets": feature}, {}, task="texts"
    )
    assert example["targets"].tolist() == [5, 6, EOS]


@pytest.mark.parametrize("pack", quick([False, True], chosen=[True]))
@pytest.mark.parametrize("steps", APPENDING.values(), ids=APPENDING)
def test_training_reads_targets_that_end(steps, pack):
    config = data.DataConfig(
        mixture=task_of(steps, texts=["abcdefghijk", "abcdefg"]),
        batch_size=2,
        encoder_length=8,
        decoder_length=4,
        num_epochs=1,
        pack=pack,
    )
    batch = next(config.build(process_index=0, process_count=1))
    assert batch["encoder_input_tokens"][:, -1].tolist() == [EOS] * 2
    assert batch["decoder_target_tokens"][:, -1].tolist() == [EOS] * 2
