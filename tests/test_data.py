"""Batches have seqio's form, and a saved position gives back exactly what followed it."""

import functools
import os
import shutil

import numpy as np
import pytest
import seqio
import tensorflow as tf
from convt5.tasks import pretraining, synthetic, text_files

from convt5 import data, errors

NAMES = {
    "encoder_input_tokens",
    "decoder_input_tokens",
    "decoder_target_tokens",
    "decoder_loss_weights",
}
PACKED_NAMES = NAMES | {
    f"{side}_{kind}" for side in ("encoder", "decoder") for kind in ("segment_ids", "positions")
}


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Span corruption of forty short documents."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [f"Document {i} has {i * i} words in it, or so. " * (1 + i % 3) for i in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return task_of(tmp_path / "text.txt")


def task_of(path):
    task = pretraining.text_span_corruption(
        str(path), validation_fraction=0.1, merge_documents=False
    )
    return task.replace(shuffle_buffer_size=50)


def config(mixture, **arguments):
    return data.DataConfig(
        mixture=mixture,
        **{"batch_size": 4, "encoder_length": 64, "decoder_length": 20, **arguments},
    )


def build(mixture, *, process_index=0, process_count=1, **arguments):
    return config(mixture, **arguments).build(
        process_index=process_index, process_count=process_count
    )


def take(batches, num):
    return [next(batches) for _ in range(num)]


def assert_equal_batches(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


def make_task(rows):
    """A task of given token ids."""

    def read(split, shuffle_files, seed=None):
        del split, shuffle_files, seed
        ragged = {name: tf.ragged.constant(ids, tf.int32) for name, ids in rows.items()}
        return tf.data.Dataset.from_tensor_slices(ragged).map(lambda row: {**row})

    vocabulary = seqio.ByteVocabulary(extra_ids=100)
    return seqio.Task(
        "given_ids",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[],
        output_features={name: seqio.Feature(vocabulary, add_eos=False) for name in rows},
    )


@pytest.mark.parametrize(("pack", "names"), [(False, NAMES), (True, PACKED_NAMES)])
def test_batches_have_the_names_and_shapes_of_seqio(task, pack, names):
    batch = next(build(task, pack=pack))
    assert batch.keys() == names
    lengths = {"encoder": 64, "decoder": 20}
    assert all(rows.shape == (4, lengths[name.split("_")[0]]) for name, rows in batch.items())
    assert all(isinstance(rows, np.ndarray) for rows in batch.values())


def test_the_decoder_reads_its_targets_one_later():
    batch = next(
        build(make_task({"inputs": [[5, 6]], "targets": [[7, 8, 1]]}), batch_size=1, num_epochs=1)
    )
    assert batch["decoder_input_tokens"][0, :4].tolist() == [0, 7, 8, 1]
    assert batch["decoder_target_tokens"][0, :4].tolist() == [7, 8, 1, 0]
    assert batch["decoder_loss_weights"][0, :4].tolist() == [1, 1, 1, 0]


def test_packed_examples_share_a_row_and_keep_apart():
    rows = {"inputs": [[5, 6, 1], [7, 1]], "targets": [[8, 1], [9, 9, 1]]}
    batch = next(build(make_task(rows), batch_size=1, num_epochs=1, pack=True))
    assert batch["encoder_input_tokens"][0, :6].tolist() == [5, 6, 1, 7, 1, 0]
    assert batch["encoder_segment_ids"][0, :6].tolist() == [1, 1, 1, 2, 2, 0]
    assert batch["encoder_positions"][0, :6].tolist() == [0, 1, 2, 0, 1, 0]
    assert batch["decoder_segment_ids"][0, :6].tolist() == [1, 1, 2, 2, 2, 0]
    assert batch["decoder_input_tokens"][0, :6].tolist() == [0, 8, 0, 9, 9, 0]


@pytest.mark.parametrize(("pack", "before"), [(False, 0), (False, 30), (True, 30)])
def test_a_saved_position_gives_back_the_batches_that_followed(task, pack, before):
    batches = build(task, pack=pack)
    take(batches, before)
    state = batches.get_state()
    expected = take(batches, 8)
    resumed = build(task, pack=pack)
    resumed.set_state(state)
    assert_equal_batches(take(resumed, 8), expected)


def test_a_position_can_be_set_on_the_iterator_that_gave_it(task):
    batches = build(task)
    start = batches.get_state()
    expected = take(batches, 3)
    batches.set_state(start)
    assert_equal_batches(take(batches, 3), expected)


def test_positions_of_mixtures_are_exact(task):
    names = ["data_test_text", "data_test_ids"]
    other = make_task({"inputs": [[5, 6, 1]] * 3, "targets": [[8, 1]] * 3})
    for name, part in zip(names, (task, other), strict=True):
        seqio.TaskRegistry.add_provider(name, part.replace(name=name))
    try:
        mixed = seqio.Mixture("data_test_mixture", names, default_rate=1.0)
        batches = build(mixed)
        take(batches, 5)
        state = batches.get_state()
        expected = take(batches, 5)
        resumed = build(mixed)
        resumed.set_state(state)
        assert_equal_batches(take(resumed, 5), expected)
    finally:
        for name in names:
            seqio.TaskRegistry.remove(name)


def test_the_size_of_a_position_does_not_grow_with_the_batches(task):
    batches = build(task)

    def some_sizes():
        sizes = []
        for _ in range(5):
            take(batches, 10)
            sizes.append(len(batches.get_state()))
        return sizes

    early = some_sizes()
    passed = sum(array.nbytes for batch in take(batches, 2000) for array in batch.values())
    # Buffers of parallel stages are now fuller, now emptier, whatever came before: tens of kB.
    # A position that kept what has passed, or a byte of 32, would be larger than that.
    assert passed > 3_000_000
    assert min(some_sizes()) - max(early) < passed / 32


def test_a_prefetcher_saves_the_position_of_what_was_taken(task):
    prefetcher = data.Prefetcher(build(task), lambda batch: batch, depth=3)
    take(prefetcher, 5)
    state = prefetcher.get_state()
    expected = take(prefetcher, 5)
    prefetcher.close()
    resumed = build(task)
    resumed.set_state(state)
    assert_equal_batches(take(resumed, 5), expected)


def test_changed_settings_are_named_when_a_run_goes_on(task):
    state = build(task, seed=1).get_state()
    with pytest.raises(errors.UserError, match=r"changed .*\(batch_size: 4 -> 8, seed: 1 -> 0\)"):
        build(task, batch_size=8).set_state(state)


def test_changed_text_is_named_when_a_run_goes_on(task, tmp_path):
    state = build(task).get_state()
    (tmp_path / "text.txt").write_text("other text\n" * 50)
    with pytest.raises(errors.UserError, match=r"changed since its checkpoint \(content: "):
        build(task).set_state(state)


def test_a_run_goes_on_where_its_text_was_copied_to(task, tmp_path, monkeypatch):
    """A machine that takes a preempted one's place has the files anew, with other dates."""
    monkeypatch.setattr(text_files, "_SHARD_BYTES", 100)  # So that files wait to be shuffled.
    batches = build(task)
    take(batches, 7)
    state = batches.get_state()
    expected = take(batches, 30)
    (tmp_path / "other").mkdir()
    copied = shutil.move(tmp_path / "text.txt", tmp_path / "other")
    os.utime(copied, (1e9, 1e9))
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other" / "cache"))
    resumed = build(task_of(copied))
    resumed.set_state(state)
    assert_equal_batches(take(resumed, 30), expected)


def test_finite_data_ends_with_a_batch_filled_up_with_weight_zero():
    rows = {"inputs": [[5, 1]] * 6, "targets": [[i, 1] for i in range(3, 9)]}
    batches = list(build(make_task(rows), num_epochs=1))
    assert [batch["decoder_loss_weights"].sum(axis=1).tolist() for batch in batches] == [
        [2, 2, 2, 2],
        [2, 2, 0, 0],
    ]
    assert {batch["encoder_input_tokens"].shape for batch in batches} == {(4, 64)}


def test_hosts_share_each_batch_of_finite_data():
    rows = {"inputs": [[5, 1]] * 6, "targets": [[i, 1] for i in range(3, 9)]}
    whole = list(build(make_task(rows), num_epochs=1))
    hosts = [
        list(build(make_task(rows), num_epochs=1, process_index=i, process_count=2))
        for i in range(2)
    ]
    joined = [
        {name: np.concatenate([a[name], b[name]]) for name in a}
        for a, b in zip(*hosts, strict=True)
    ]
    assert_equal_batches(joined, whole)


def test_hosts_read_different_endless_data(task):
    hosts = [build(task, process_index=i, process_count=2) for i in range(2)]
    batches = [next(host) for host in hosts]
    assert [batch["encoder_input_tokens"].shape[0] for batch in batches] == [2, 2]
    assert not np.array_equal(*(batch["encoder_input_tokens"] for batch in batches))


def test_endless_data_is_shuffled_and_finite_data_is_not(task):
    shuffled = next(build(task))
    in_order = next(build(task, shuffle=False))
    assert not np.array_equal(shuffled["encoder_input_tokens"], in_order["encoder_input_tokens"])
    finite = next(build(task, num_epochs=1))
    assert_equal_batches([finite], [next(build(task, num_epochs=1, shuffle=False))])


def test_bytes_of_the_targets_are_known(task):
    batches = build(task)
    batch = next(batches)
    sizes = batches.token_bytes[batch["decoder_target_tokens"]]
    text = [batches.vocabulary.decode(row.tolist()) for row in batch["decoder_target_tokens"]]
    assert sizes.sum(axis=1).tolist() == [len(line.encode()) for line in text]


def test_no_thread_tunes_the_pipeline(task):
    """One that does is now and then waited for, up to a minute, when an iterator is dropped."""
    examples = config(task)._examples(task, shard_info=None)
    assert examples.options().autotune.enabled is False
    assert examples.options().deterministic is True


def test_unigram_entropy_of_equally_frequent_tokens_is_the_logarithm_of_their_number():
    rows = {"inputs": [[5, 1]] * 4, "targets": [[3, 4, 5, 6], [5, 6, 3, 4]] * 2}
    batches = build(make_task(rows), batch_size=2, num_epochs=None, shuffle=False)
    assert data.unigram_entropy(batches, 10) == pytest.approx(np.log(4))


def test_unigram_entropy_leaves_padding_out():
    rows = {"inputs": [[5, 1]], "targets": [[3]]}
    assert data.unigram_entropy(build(make_task(rows), num_epochs=1), 5) == 0


def test_tensorflow_leaves_accelerators_alone():
    assert tf.config.get_visible_devices("GPU") == []


class TestMistakes:
    def test_an_unknown_mixture_is_answered_with_close_names(self):
        with pytest.raises(errors.UserError, match=r"Did you mean pydoc_span_corruption"):
            build("pydoc_span_coruption")

    def test_something_that_is_no_mixture_is_an_error(self):
        with pytest.raises(errors.UserError, match="mixture=3 is no seqio task or mixture"):
            build(3)

    def test_an_unknown_split_is_answered_with_the_splits(self, task):
        with pytest.raises(errors.UserError, match=r"\['train', 'validation'\].*mean validation"):
            build(task, split="validate")

    def test_a_mixture_without_inputs_is_an_error(self):
        with pytest.raises(errors.UserError, match="'given_ids' has no feature inputs"):
            build(make_task({"targets": [[3]]}))

    @pytest.mark.parametrize("mixed", [False, True])
    def test_a_task_that_ranks_labels_is_no_data_to_train_on(self, mixed):
        ranking = synthetic.listops(rank=True)
        with pytest.raises(errors.UserError, match=r"'listops_rank' holds each text with every la"):
            build(seqio.Mixture("ranked", [(ranking, 1.0)]) if mixed else ranking)

    @pytest.mark.parametrize(("mode", "refused"), [("eval", True), ("train", False)])
    def test_a_task_that_t5_ranks_is_data_with_its_right_labels_alone(self, mode, refused):
        preprocessors = pytest.importorskip("t5.data.preprocessors")
        step = functools.partial(preprocessors.rank_classification_formatter, mode=mode)
        assert data._makes_every_label(step) == refused

    @pytest.mark.parametrize("feature", ["inputs", "targets"])
    def test_a_vocabulary_that_is_gone_is_named(self, feature):
        task = seqio.get_mixture_or_task("pydoc_span_corruption")
        gone = seqio.Feature(seqio.SentencePieceVocabulary("gone.model"))
        features = {**task.output_features, feature: gone}
        with pytest.raises(errors.UserError, match=r"the vocabulary 'gone\.model' cannot be read"):
            build(task.replace(output_features=features))

    def test_data_without_an_example_is_an_error(self):
        empty = make_task({"inputs": [[]], "targets": [[]]})
        empty = empty.replace(preprocessors=[lambda dataset: dataset.filter(lambda _: False)])
        for epochs in (1, 2):
            with pytest.raises(errors.UserError, match="gives no batch of batch_size=4"):
                next(build(empty, num_epochs=epochs))

    def test_a_batch_that_hosts_cannot_share_is_an_error(self, task):
        with pytest.raises(errors.UserError, match=r"batch_size=4 .* 3 hosts .* multiple of 3"):
            build(task, process_count=3)

    @pytest.mark.parametrize("name", ["batch_size", "encoder_length", "num_epochs"])
    def test_sizes_below_one_are_named(self, name):
        with pytest.raises(errors.UserError, match=f"{name}=0 must be at least 1"):
            config("pydoc_span_corruption", **{name: 0})

    def test_a_vocabulary_that_cannot_be_read_is_named(self, tmp_path):
        vocabulary = seqio.SentencePieceVocabulary(str(tmp_path / "gone.model"), extra_ids=100)
        with pytest.raises(errors.UserError, match=r"gone\.model' cannot be read"):
            build(pretraining.pydoc_span_corruption(vocabulary))

    def test_a_decoder_too_short_for_the_spans_is_an_error(self, task):
        with pytest.raises(errors.UserError, match="decoder_length=10 is too short"):
            build(task, decoder_length=10)
