"""What does not fit a row is cut, and its end token stays."""

import functools

import pytest
import seqio
import tensorflow as tf
from convt5.tasks import vocabularies

from convt5 import data
from convt5.data import row_ends

EOS, LENGTHS = 1, {"inputs": 8, "targets": 4}
TEXTS = ["", "a", "abc", "abcd", "abcdefghijk"]
APPENDING = {
    "append_eos": [seqio.preprocessors.append_eos],
    "append_eos_after_trim": [seqio.preprocessors.append_eos_after_trim],
    "none": [],
    "partial": [functools.partial(seqio.preprocessors.append_eos_after_trim)],
    "before_another": [seqio.preprocessors.append_eos_after_trim, lambda dataset: dataset],
}


def task_of(steps, *, add_eos=True, name="texts", texts=TEXTS):
    def read(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        return tf.data.Dataset.from_tensor_slices(texts).map(
            lambda text: {"inputs": text, "targets": text}
        )

    feature = seqio.Feature(vocabularies.characters(), add_eos=add_eos)
    return seqio.Task(
        name,
        source=seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[seqio.preprocessors.tokenize, *steps],
        output_features={"inputs": feature, "targets": feature},
    )


def features(provider, lengths=LENGTHS, **settings):
    dataset = provider.get_dataset(
        lengths, "train", shuffle=False, num_epochs=1, try_in_mem_cache=False, **settings
    )
    return [
        tuple(example[name].tolist() for name in ("inputs", "targets"))
        for example in dataset.as_numpy_iterator()
    ]


def ended(text, limit):
    return [*vocabularies.characters().encode(text)[: limit - 1], EOS]


@pytest.mark.parametrize("steps", APPENDING.values(), ids=APPENDING)
def test_every_row_ends_with_its_end_token_whichever_steps_append_it(steps):
    task = task_of(steps)
    assert features(row_ends.keep_end_tokens(task)) == [(ended(t, 8), ended(t, 4)) for t in TEXTS]
    whole = features(row_ends.without_truncation(task), trim_output_features=False)
    assert whole == [(ended(t, 99), ended(t, 99)) for t in TEXTS]
    assert features(row_ends.keep_end_tokens(task), lengths=None) == whole


def test_a_feature_without_an_end_token_is_cut_as_it_is():
    encode = vocabularies.characters().encode
    found = features(row_ends.keep_end_tokens(task_of([], add_eos=False)))
    assert found == [(encode(t)[:8], encode(t)[:4]) for t in TEXTS]


@pytest.mark.parametrize("ids", [[5, 6, 1, 0, 0], [5, 1, 0, 0, 0], [5, 6, 7, 0, 0, 0]])
def test_padding_of_the_task_itself_is_no_text_that_lacks_an_end(ids):
    pad = tf.data.Dataset.from_tensors({"targets": tf.constant(ids)})
    features = {"targets": seqio.Feature(vocabularies.characters(), add_eos=True)}
    (example,) = row_ends.end_and_cut(pad, features, {"targets": 4}).as_numpy_iterator()
    assert example["targets"].tolist() == ids[:4]


def test_the_tasks_of_a_mixture_end_alike_and_keep_their_rates():
    task = task_of(APPENDING["append_eos"])
    inner = seqio.Mixture("inner", [(task, 1)])
    mixture = seqio.Mixture("outer", [(inner, 3), (task, lambda task: 1 + len(task.name))])
    fitted = row_ends.keep_end_tokens(mixture)
    assert [t.name for t in fitted.tasks] == ["texts"]
    assert fitted.get_rate(fitted.tasks[0]) == mixture.get_rate(task) == 9
    assert [row[1][-1] for row in features(fitted)] == [EOS] * len(features(mixture))
    assert mixture.tasks == [task]
    assert task.preprocessors[-1] is seqio.preprocessors.append_eos


@pytest.mark.parametrize("pack", [False, True])
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
