"""Batches have seqio's form, and a saved position gives back exactly what followed it."""

import concurrent.futures
import functools
import gzip
import io
import json
import os
import shutil
import sys
import zipfile

import commands
import numpy as np
import pytest
import seqio
import tensorflow as tf
from convt5.tasks import (
    classification,
    pretraining,
    sources,
    synthetic,
    tables,
    text_files,
    vocabularies,
    word_recall,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick

from convt5 import data, errors
from convt5.data import mixing, prefetching, seqio_batches, task_blocks
from convt5.evaluation import TaskEval, task_data
from convt5.training import data_checks

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


def task_of(path, **settings):
    task = pretraining.text_span_corruption(
        str(path), validation_fraction=0.1, merge_documents=False, **settings
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


POSITIONS = [(False, 0), (False, 12), (True, 12)]


@pytest.mark.parametrize("place", quick(POSITIONS, chosen=POSITIONS[2:]), ids=str)
def test_a_saved_position_gives_back_the_batches_that_followed(task, place):
    pack, before = place
    batches = build(task, pack=pack)
    take(batches, before)  # 12 are in the second epoch of 36 examples.
    state = batches.get_state()
    expected = take(batches, 8)
    resumed = build(task, pack=pack)
    resumed.set_state(state)
    assert_equal_batches(take(resumed, 8), expected)


@pytest.mark.slow
def test_a_position_can_be_set_on_the_iterator_that_gave_it(task):
    batches = build(task)
    start = batches.get_state()
    expected = take(batches, 3)
    batches.set_state(start)
    assert_equal_batches(take(batches, 3), expected)


@pytest.mark.slow
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


def test_a_position_is_a_few_numbers(task):
    batches = build(task, pack=True)
    sizes = []
    for _ in range(3):
        take(batches, 10)
        sizes.append(len(batches.get_state()))
    assert max(sizes) < 700


def test_a_prefetcher_saves_the_position_of_what_was_taken(task):
    prefetcher = seqio_batches.Prefetcher(build(task), lambda batch: batch, depth=3)
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


@pytest.mark.slow
def test_changed_settings_of_a_task_are_told_when_a_run_goes_on(task, tmp_path):
    batches = build(task)
    take(batches, 2)
    resumed = build(task_of(tmp_path / "text.txt", noise_density=0.1))
    resumed.set_state(batches.get_state())
    with pytest.warns(UserWarning, match="its settings, its functions or a library have changed"):
        next(resumed)


@pytest.mark.slow
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


@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("ab é\n🙂"), min_size=1, max_size=60),
    most=st.integers(4, 12),
)
def test_pieces_of_a_long_document_are_its_text(text, most):
    document = text.encode()
    found = sources.pieces(document, most)
    assert b"".join(found) == document
    assert max(map(len, found)) <= most
    for piece in found:
        piece.decode()  # No character is cut.
    for piece in found[:-1]:
        assert piece[-1:] in b" \n" or not {*b" \n"} & {*piece}


def test_a_long_document_has_the_tokens_that_it_has_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = " ".join(f"word{i}" for i in range(20))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setattr(sources, "_PIECE_BYTES", 16)
    task = pretraining.text_span_corruption(
        str(tmp_path / "text.txt"), validation_fraction=0.0, separator="line"
    )
    pieces = list(task.source.get_dataset("train", shuffle=False).as_numpy_iterator())
    assert len(pieces) > 5
    assert b"".join(piece["text"] for piece in pieces).decode() == text
    assert task.num_input_examples("train") == 1


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


@pytest.mark.parametrize("num_epochs", quick([None, 1], chosen=[None]))
def test_data_is_shuffled_unless_it_is_said_not_to_be(num_epochs):
    rows = {"inputs": [[5, 1]] * 600, "targets": [[3 + i // 300, 1] for i in range(600)]}
    task = make_task(rows)  # Sorted by label, as files often are.
    shuffled = next(build(task, num_epochs=num_epochs, batch_size=64))
    labels = shuffled["decoder_target_tokens"][:, 0]
    assert 16 < np.count_nonzero(labels == 3) < 48
    in_order = next(build(task, num_epochs=num_epochs, batch_size=64, shuffle=False))
    assert set(in_order["decoder_target_tokens"][:, 0].tolist()) == {3}


def test_bytes_of_the_targets_are_known(task):
    batches = build(task)
    batch = next(batches)
    sizes = batches.token_bytes[batch["decoder_target_tokens"]]
    text = [batches.vocabulary.decode(row.tolist()) for row in batch["decoder_target_tokens"]]
    assert sizes.sum(axis=1).tolist() == [len(line.encode()) for line in text]


def test_no_thread_tunes_the_pipeline():
    """One that does is now and then waited for, up to a minute, when an iterator is dropped."""
    assert task_blocks.options().autotune.enabled is False
    assert task_blocks.options().deterministic is True


def assert_resumes(mixture, *, before=3, **arguments):
    batches = build(mixture, **arguments)
    take(batches, before)
    state = batches.get_state()
    assert len(state) < 1000
    expected = take(batches, 4)
    resumed = build(mixture, **arguments)
    resumed.set_state(state)
    assert_equal_batches(take(resumed, 4), expected)
    return expected


def text_task(read, steps=()):
    feature = seqio.Feature(seqio.ByteVocabulary(extra_ids=100), add_eos=True)
    return seqio.Task(
        "texts",
        source=seqio.FunctionDataSource(read, splits=["train"]),
        preprocessors=[
            *steps,
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={"inputs": feature, "targets": feature},
    )


def some_texts(split, shuffle_files, seed=None):
    texts = [f"{i:02d}" for i in range(30)]
    return tf.data.Dataset.from_tensor_slices({"inputs": texts, "targets": texts})


def some_generated(split, shuffle_files, seed=None):
    def rows():
        for i in range(30):
            yield {"inputs": f"{i:02d}", "targets": f"{i:02d}"}

    spec = tf.TensorSpec([], tf.string)
    return tf.data.Dataset.from_generator(rows, output_signature={"inputs": spec, "targets": spec})


def doubled(dataset):
    """A function of Python, which TensorFlow takes to have a state."""

    def double(text):
        return tf.ensure_shape(tf.numpy_function(lambda t: t + t, [text], tf.string), [])

    return dataset.map(lambda x: {**x, "targets": double(x["targets"])})


def with_random_numbers(dataset):
    """Numbers that only the global seed of TensorFlow makes repeat themselves."""

    def add(example):
        number = tf.strings.as_string(tf.random.uniform([], 0, 10**6, tf.int32))
        return {**example, "targets": number}

    return dataset.map(add, num_parallel_calls=tf.data.AUTOTUNE).shuffle(7)


def looked_at(dataset):
    """Counts its examples while it is built."""
    count = len(list(dataset.as_numpy_iterator()))
    return dataset.map(lambda x: {**x, "targets": tf.constant(str(count))})


@pytest.mark.parametrize(
    "mixture",
    [
        text_task(some_generated),
        text_task(some_texts, [doubled]),
        text_task(some_texts, [with_random_numbers]),
        text_task(some_texts, [looked_at]),
    ],
    ids=["generator", "python function", "stateful random numbers", "looked at"],
)
def test_tasks_of_any_kind_go_on_exactly(mixture):
    batches = assert_resumes(mixture, encoder_length=8, decoder_length=8)
    targets = {tuple(row) for batch in batches for row in batch["decoder_target_tokens"].tolist()}
    if mixture.preprocessors[0] is with_random_numbers:
        assert len(targets) == 16


def test_random_numbers_differ_from_block_to_block_and_epoch_to_epoch(monkeypatch):
    @seqio.map_over_dataset(num_seeds=1)
    def draw(example, seed):
        number = tf.random.stateless_uniform([], seed, 3, 250, tf.int32)
        return {**example, "targets": number[None]}

    monkeypatch.setattr(task_blocks, "_WIDEST_WINDOW", 2)
    monkeypatch.setattr(task_blocks, "_MOST_EXAMPLES", 4)
    task = make_task({"inputs": [[5]] * 8, "targets": [[3]] * 8}).replace(preprocessors=[draw])
    drawn = [b["decoder_target_tokens"][:, 0].tolist() for b in take(build(task), 6)]
    assert len({tuple(sorted(numbers)) for numbers in drawn}) == 6


def block_digests(blocks, places):
    examples = [blocks.make(place).examples for place in places]
    return [[each.inputs.values.tobytes(), each.targets.values.tobytes()] for each in examples]


@pytest.mark.slow
def test_threads_make_the_blocks_that_one_makes(monkeypatch):
    monkeypatch.setattr(task_blocks, "_WIDEST_WINDOW", 2)
    monkeypatch.setattr(task_blocks, "_MOST_EXAMPLES", 4)
    places = [mixing.BlockPlace(epoch, n, 4 * n) for epoch in range(2) for n in range(6)]
    task = text_task(some_texts, [doubled])
    expected = block_digests(config(task).task_blocks()["texts"], places)
    copies = [config(task).task_blocks()["texts"] for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        made = list(executor.map(lambda blocks: block_digests(blocks, places), copies))
    assert made == [expected] * 4
    assert len({str(digest) for digest in expected}) == len(places)


@pytest.mark.slow
def test_any_number_of_cores_makes_the_same_blocks(monkeypatch):
    places, digests, threads = [mixing.BlockPlace(epoch) for epoch in range(2)], [], []
    for count in (1, 7, 32):
        monkeypatch.setattr(task_blocks.cores, "shares", lambda _, n=count: [list(range(n))])
        blocks = config(text_task(some_texts, [doubled])).task_blocks()["texts"]
        digests.append(block_digests(blocks, places))
        threads.append(task_blocks.options().threading.private_threadpool_size)
    assert digests == digests[:1] * 3
    assert threads == [1, 1, 8]


@pytest.mark.slow
def test_a_block_that_failed_leaves_the_next_ones_as_they_are():
    is_broken = [False]

    def fails_if_broken(text):
        if is_broken[0] and text == b"17":
            raise ValueError("broken")
        return text

    def checked(dataset):
        def check(example):
            text = tf.numpy_function(fails_if_broken, [example["targets"]], tf.string)
            return {**example, "targets": tf.ensure_shape(text, [])}

        return dataset.map(check)

    blocks = config(text_task(some_texts, [checked])).task_blocks()["texts"]
    places = [mixing.BlockPlace(epoch) for epoch in range(3)]
    expected = block_digests(blocks, places)
    is_broken[0] = True
    with pytest.raises(tf.errors.OpError, match="broken"):
        blocks.make(places[1])
    is_broken[0] = False
    assert block_digests(blocks, places) == expected


LEAVES_WHILE_READING_AHEAD = """
import time
import seqio
import tensorflow as tf
from convt5.data import mixing, task_blocks

def slow(number):
    time.sleep(0.02)
    return b"%d" % number * 2**14

def read(split, shuffle_files=False, seed=None):
    numbers = tf.data.Dataset.range(10_000)
    return numbers.map(lambda n: {"targets": tf.numpy_function(slow, [n], tf.string)}).map(shaped)

def shaped(example):
    text = tf.ensure_shape(example["targets"], [])
    return {"inputs": text, "targets": text}

feature = seqio.Feature(seqio.ByteVocabulary())
task = seqio.Task(
    "slow",
    seqio.FunctionDataSource(read, splits=["train"]),
    {"inputs": feature, "targets": feature},
    [seqio.preprocessors.tokenize],
)
task_blocks._MOST_EXAMPLES = 8
blocks = task_blocks.TaskBlocks(
    task, "train", {"inputs": 8, "targets": 8}, shuffle=False, seed=0, share=None, cached=False
)
print(blocks.make(mixing.BlockPlace()).num_read)
"""


@pytest.mark.slow
def test_a_process_ends_while_python_functions_of_its_source_read_ahead():
    done = commands.run([sys.executable, "-c", LEAVES_WHILE_READING_AHEAD], timeout=60, check=True)
    assert int(done.stdout) >= 8


def test_a_mixture_read_once_gives_every_row_of_every_task():
    parts = {"few": (5, 3), "many": (40, 4)}
    tasks = [
        make_task({"inputs": [[9]] * n, "targets": [[token]] * n}).replace(name=name)
        for name, (n, token) in parts.items()
    ]
    mixture = seqio.Mixture("both", [(task, 1.0) for task in tasks])
    rows = np.concatenate([b["decoder_target_tokens"] for b in build(mixture, num_epochs=1)])
    assert np.bincount(rows[:, 0], minlength=5)[3:].tolist() == [5, 40]


def test_a_task_of_a_mixture_that_lacks_the_split_is_left_out(task, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one", "label": "very much too long"}\n' * 9)
    only_train = [
        pretraining.text_span_corruption(
            str(tmp_path / "text.txt"), validation_fraction=0, name="text"
        ),
        classification.text_classification(
            str(tmp_path / "rows.jsonl"),
            ["no", "very much too long"],
            validation_fraction=0,
            name="rows",
        ),
    ]
    mixture = seqio.Mixture("some", [(each, 1.0) for each in (task, *only_train)])
    held_out = config(mixture, split="validation", num_epochs=1, decoder_length=14)
    held_out.check_labels()
    held_out.check_rows()
    assert held_out.is_at_hand()
    assert held_out.num_examples() == {task.name: 4}
    assert "  rows:" not in held_out.describe()
    with pytest.raises(errors.UserError, match="label 'very much too long' takes 19 tokens"):
        config(mixture, decoder_length=14).check_labels()


@pytest.mark.slow
def test_what_makes_other_rows_is_of_another_identity(task, tmp_path):
    path = tmp_path / "text.txt"

    def identity(mixture):
        return json.dumps(config(mixture).identity())

    gaps = functools.partial(synthetic.gap_copy, num_train=50)

    def mixed(rate):
        return seqio.Mixture("both", [(task, rate), (gaps(), 1.0)])

    alone, both = identity(task), identity(mixed(1.0))
    assert alone == identity(task_of(path))
    assert both == identity(mixed(1.0))
    others = [
        pretraining.text_span_corruption(str(path), validation_fraction=0.1, noise_density=0.1),
        mixed(1.01),
        gaps(gap=3),
        gaps(gap=4),
    ]
    assert len({alone, both, *map(identity, others)}) == 2 + len(others)


@pytest.fixture
def no_caches():
    yield
    seqio.set_global_cache_dirs([])


def make_cache(folder, rows):
    """Writes a task's examples into a folder, as seqio's own tool does."""
    folder.mkdir()
    with tf.io.TFRecordWriter(str(folder / "train.tfrecord-00000-of-00001")) as writer:
        for row in rows:
            writer.write(seqio.utils.dict_to_tfexample(row).SerializeToString())
    info = {
        "num_shards": 1,
        "features": {n: {"shape": [None], "dtype": "int32"} for n in ("inputs", "targets")},
        "seqio_version": seqio.__version__,
    }
    (folder / "info.train.json").write_text(json.dumps(info))
    (folder / "stats.train.json").write_text(json.dumps({"examples": len(rows)}))
    (folder / "COMPLETED").write_text("")


ROWS = [{"inputs": np.array([i, 5]), "targets": np.array([i])} for i in range(3, 9)]


@pytest.mark.usefixtures("no_caches")
def test_a_task_is_read_from_where_seqio_cached_it(tmp_path):
    def first_only(dataset):
        raise AssertionError("this was done when the cache was made")

    task = text_task(some_texts, [first_only, seqio.CacheDatasetPlaceholder(required=True)])
    with pytest.raises(errors.UserError, match=r"'texts' can only be read .*cache_tasks_main --ta"):
        build(task)
    make_cache(tmp_path / "texts", ROWS)
    cached = [task.preprocessors[1], seqio.preprocessors.append_eos_after_trim]
    task = task.replace(preprocessors=[first_only, *cached])
    batches = build(task, cache_dirs=[str(tmp_path)], num_epochs=1)
    tokens = np.concatenate([batch["encoder_input_tokens"] for batch in batches])
    assert sorted(tokens[:6, :3].tolist()) == [[i, 5, 1] for i in range(3, 9)]


@pytest.mark.usefixtures("no_caches")
def test_a_cached_task_needs_no_source(tmp_path):
    source = seqio.TfdsDataSource("glue/cola:2.0.0", tfds_data_dir=str(tmp_path / "tfds"))
    steps = [
        seqio.CacheDatasetPlaceholder(required=True),
        seqio.preprocessors.append_eos_after_trim,
    ]
    task = text_task(some_texts).replace(source=source, preprocessors=steps)
    unprepared = (
        rf"'texts': its data set 'glue/cola:2\.0\.0' of TFDS is not prepared in {tmp_path}/tf"
    )
    with pytest.raises(errors.UserError, match=unprepared):
        build(task)
    with pytest.raises(errors.UserError, match=unprepared):
        task_data.check_split(task, "train")
    make_cache(tmp_path / "texts", ROWS)
    mixture = seqio.Mixture("all", [task], default_rate=seqio.mixing_rate_num_examples)
    cached = config(mixture, cache_dirs=str(tmp_path), num_epochs=1)
    cached.check_rows()
    assert cached._rates() == {task: len(ROWS)}
    assert cached.num_examples() is None
    assert "texts: an unknown number of documents" in cached.describe()
    tokens = next(cached.build(process_index=0, process_count=1))["encoder_input_tokens"]
    assert tokens.shape == (4, 64)
    with pytest.raises(errors.UserError, match=r"split='test' is none of \['train'\]"):
        config(task, split="test").provider()
    task_data.check_split(task, "train")
    examples = task_data.read_examples(task, "train", lengths={"inputs": 64, "targets": 20})
    assert [example["inputs"].tolist() for example in examples] == [[i, 5, 1] for i in range(3, 9)]


def test_files_that_are_not_there_are_named(tmp_path):
    source = seqio.TextLineDataSource({"train": str(tmp_path / "gone*.txt")})
    task = text_task(some_texts).replace(source=source)
    for read in (
        build,
        lambda task: config(task).describe(),
        lambda task: config(task).check_rows(),
        lambda task: task_data.read_examples(task, "train", lengths={}),
    ):
        with pytest.raises(errors.UserError, match=r"'texts', split='train': no .*gone\*\.txt"):
            read(task)


def ways_to_read(task):
    """Yields how training, reports and evaluation read a task."""
    yield lambda: next(build(task))
    yield lambda: config(task).describe()
    yield lambda: task_data.read_examples(task, "train", lengths={"inputs": 64, "targets": 20})


@pytest.mark.parametrize("feature", ["inputs", "targets"])
@pytest.mark.parametrize("token", quick([-100, 359, 70_000], chosen=[-100, 359]))
def test_ids_that_the_vocabulary_does_not_have_are_refused(feature, token):
    rows = {"inputs": [[5, 6], [7]], "targets": [[8], [9, 10]]}
    rows[feature][1].append(token)
    message = rf"'given_ids': its '{feature}' hold the id {token}, .* the ids 0 to 358; "
    for read in ways_to_read(make_task(rows)):
        with pytest.raises(errors.UserError, match=message):
            read()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: {**x, "targets": "text"}, r"'targets' string of rank 0, .* int32 of rank 1; .*"),
        (lambda x: {"inputs": x["inputs"]}, r"no feature 'targets', but \['inputs'\]; "),
        (lambda x: {**x, "inputs": [x["inputs"]]}, r"'inputs' int32 of rank 2, but .* of rank 1; "),
    ],
    ids=["text", "none", "rank"],
)
def test_features_that_are_not_as_their_task_says_are_named(step, message):
    task = make_task({"inputs": [[5, 6], [7]], "targets": [[8], [9, 10]]})
    task = task.replace(preprocessors=[lambda dataset: dataset.map(step)])
    for read in ways_to_read(task):
        with pytest.raises(errors.UserError, match=rf"task 'given_ids': .* make {message}"):
            read()


def test_features_that_are_no_token_ids_are_refused():
    task = make_task({"inputs": [[5, 6], [7]], "targets": [[8], [9, 10]]})
    floats = seqio.ContinuousFeature(dtype=tf.float32)
    to_floats = seqio.map_over_dataset(lambda x: x | {"inputs": tf.cast(x["inputs"], tf.float32)})
    task = task.replace(
        preprocessors=[to_floats], output_features={**task.output_features, "inputs": floats}
    )
    for read in ways_to_read(task):
        with pytest.raises(errors.UserError, match="'inputs' are float32 of rank 1, but models of"):
            read()


def test_files_to_measure_a_task_of_lines_are_not_trained_on(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("a\n")
    files = {"train": f"{tmp_path}/*.txt", "validation": f"{tmp_path}/two.txt"}
    task = text_task(some_texts).replace(source=seqio.TextLineDataSource(files))
    with pytest.raises(errors.UserError, match=r"two\.txt' of split='validation' is also among"):
        build(task, split="validation")


@pytest.fixture
def shared_lines(tmp_path):
    """Returns a function that makes tasks of lines of the files a, b and c, by their letters."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")

    def make(name, train, validation):
        splits = {"train": train, "validation": validation}
        files = {s: [f"{tmp_path}/{letter}.txt" for letter in ls] for s, ls in splits.items() if ls}
        source = seqio.TextLineDataSource(files)
        if name == "text":
            parts = {split: (text_files.TextFiles(path=f), "train") for split, f in files.items()}
            source = sources.TextFilesSource(parts)
        elif name == "rows":
            source = tables.TableSource(files, lambda row: {})
        return text_task(some_texts).replace(name=name, source=source)

    return make


def mixture_of(tasks):
    return seqio.Mixture("mixed", [(task, 1.0) for task in tasks])


@pytest.mark.parametrize("kind", ["text", "lines", "rows"])
def test_files_to_measure_one_task_are_not_those_of_another(shared_lines, kind):
    one, other = shared_lines(kind, "a", None), shared_lines("other", "b", "a")
    train = config(mixture_of([one, other]))
    held_out = [config(task, split="validation") for task in (mixture_of([one, other]), other)]
    held_out.append(TaskEval(task=other, max_input_length=8, max_length=8))
    for measured in held_out:
        with pytest.raises(errors.UserError, match=r"a\.txt' of split='validation' is also among"):
            data_checks.check_files_apart(train, None, measured)


def test_files_that_tasks_share_on_purpose_are_let_be(shared_lines, tmp_path):
    denoisers = [shared_lines(name, "a", "a") for name in ("text", "lines")]
    mixed = [*denoisers, shared_lines("other", "b", "c")]
    train = config(mixture_of(mixed))
    config(mixture_of(mixed), split="validation").check_apart(train)
    config(shared_lines("other", "ab", None)).check_apart(train)
    config(shared_lines("lines", None, "ab"), split="validation").check_apart(train)
    divided = text_files.TextFiles(path=f"{tmp_path}/[ab].txt", holdout_every=2)
    parts = {split: (divided, split) for split in ("train", "validation")}
    held_out = shared_lines("text", "a", None).replace(source=sources.TextFilesSource(parts))
    train = config(mixture_of([held_out, shared_lines("other", "c", None)]))
    config(held_out, split="validation").check_apart(train)


@pytest.mark.parametrize("again", ["*e.txt", "link.text"])
def test_lines_of_a_file_are_not_read_twice(tmp_path, again):
    (tmp_path / "one.txt").write_text("a\n")
    (tmp_path / "link.text").symlink_to(tmp_path / "one.txt")
    source = seqio.TextLineDataSource({"train": [f"{tmp_path}/*.txt", f"{tmp_path}/{again}"]})
    for read in ways_to_read(text_task(some_texts).replace(source=source)):
        with pytest.raises(errors.UserError, match=r"'texts', split='train': .* match .* twice"):
            read()


def test_lines_of_a_set_of_files_are_not_read_beside_those_of_another(tmp_path):
    for name in ("a-0-of-1", "a-0-of-2", "a-1-of-2"):
        (tmp_path / f"{name}.txt").write_text("a\n")
    source = seqio.TextLineDataSource({"train": f"{tmp_path}/*.txt"})
    for read in ways_to_read(text_task(some_texts).replace(source=source)):
        with pytest.raises(errors.UserError, match=r"a-0-of-1.txt' and .*2.txt' hold .* twice"):
            read()


def test_lines_of_compressed_files_are_not_read_as_they_are(tmp_path):
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    source = seqio.TextLineDataSource({"train": f"{tmp_path}/*.gz"})
    for read in ways_to_read(text_task(some_texts).replace(source=source)):
        with pytest.raises(errors.UserError, match=r"'texts', .* reads .*gz' as it is, compressed"):
            read()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_lines_of_utf_16_are_not_read_as_bytes(tmp_path, encoding):
    (tmp_path / "one.txt").write_text("één\n", "utf-8")
    (tmp_path / "two.txt").write_text("één\ntwee\n", encoding)
    source = seqio.TextLineDataSource({"train": f"{tmp_path}/*.txt"})
    for read in ways_to_read(text_task(some_texts).replace(source=source)):
        with pytest.raises(errors.UserError, match=r"two\.txt' is UTF-16, .* \(iconv -f utf-16"):
            read()


@pytest.mark.parametrize("source", quick(["memory", "files"], chosen=["files"]))
@pytest.mark.slow
def test_tasks_that_share_documents_read_them_in_orders_of_their_own(tmp_path, monkeypatch, source):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(task_blocks, "_WIDEST_WINDOW", 2)
    monkeypatch.setattr(task_blocks, "_MOST_EXAMPLES", 8)
    documents = [f"{i:03d}" for i in range(1000)]
    (tmp_path / "text.txt").write_text("\n".join(documents))
    if source == "memory":
        source = sources.EmbeddedTextSource({"train": documents})
    else:
        files = text_files.TextFiles(path=tmp_path / "text.txt")
        source = sources.TextFilesSource({"train": (files, "train")})
    steps = [
        lambda dataset: dataset.map(lambda x: {"inputs": x["text"], "targets": x["text"]}),
        seqio.preprocessors.tokenize,
    ]
    task = text_task(some_texts).replace(source=source, preprocessors=steps)
    both = seqio.Mixture("both", [(task.replace(name=name), 1.0) for name in ("one", "two")])

    def first_documents(mixture, **settings):
        blocks = config(mixture, **settings).task_blocks().values()
        made = (block.make(mixing.BlockPlace()).examples.targets for block in blocks)
        return [{tuple(row) for row in each.values.reshape(-1, 4).tolist()} for each in made]

    one, two = first_documents(both)
    assert len(one) == len(two) < 100
    assert len(one & two) < len(one) / 4
    assert first_documents(both) == [one, two]
    assert first_documents(both, seed=1) != [one, two]
    alone = seqio.Mixture("alone", [(task, 1.0)])
    assert first_documents(alone) == first_documents(task)


@pytest.mark.slow
def test_a_position_of_an_earlier_version_goes_on_with_a_new_pass(task):
    batches = build(task)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as parts:
        parts.writestr("settings.json", json.dumps({**batches._settings, "shuffle": None}))
    state = prefetching.position(archive.getvalue())
    with pytest.warns(UserWarning, match="saved by an earlier version.*new pass"):
        batches.set_state(state)
    assert_equal_batches(take(batches, 2), take(build(task), 2))
    with pytest.raises(errors.UserError, match="batch_size: 4 -> 8"):
        build(task, batch_size=8).set_state(state)


def test_tensorflow_leaves_accelerators_alone():
    assert tf.config.get_visible_devices("GPU") == []


class TestMistakes:
    def test_a_rate_that_needs_a_number_of_examples_that_nobody_knows_is_named(self):
        mixture = seqio.Mixture(
            "rated", [text_task(some_generated)], default_rate=seqio.mixing_rate_num_examples
        )
        with pytest.raises(errors.UserError, match=r"'rated': the rate of task 'texts' .*number"):
            build(mixture)

    @pytest.mark.parametrize("rate", [1e308, 10**400, float("nan"), -1.0])
    def test_rates_that_no_task_can_be_drawn_by_are_refused(self, task, rate):
        mixture = seqio.Mixture("rated", [(task, rate), (task.replace(name="other"), 1e308)])
        with pytest.raises(errors.UserError, match=r"'rated'.* the rate"):
            build(mixture)

    def test_a_mixture_that_draws_in_a_way_of_its_own_is_refused(self):
        mixture = seqio.Mixture(
            "own", [(text_task(some_texts), 1.0)], sample_fn=lambda parts, rates, seed: parts[0]
        )
        with pytest.raises(errors.UserError, match=r"'own' has a custom sample_fn"):
            build(mixture)

    def test_tasks_of_one_name_are_refused_in_a_mixture(self, task):
        mixture = seqio.Mixture("twins", [(task, 1.0), (task_of("README.md"), 1.0)])
        with pytest.raises(errors.UserError, match=r"'twins' has two .* called 'text_span_corrupt"):
            build(mixture)
        again = seqio.Mixture("again", [(task, 1.0), (task, 2.0)])
        assert_equal_batches(take(build(again), 2), take(build(task), 2))

    def test_tasks_whose_ids_mean_other_texts_are_refused_in_a_mixture(self, task, tmp_path):
        fewer = vocabularies.characters(10)
        features = dict.fromkeys(("inputs", "targets"), seqio.Feature(fewer, add_eos=True))
        other = task.replace(name="other", output_features=features)
        mixture = seqio.Mixture("babel", [(task, 1.0), (other, 1.0)])
        message = (
            r"'babel': the inputs of 'other' have the vocabulary ByteVocabulary with 10 sentinels, "
            r"and those of 'text_span_corruption' have ByteVocabulary with 100 sentinels"
        )
        for check in (build, lambda mixture: config(mixture).check_vocabularies()):
            with pytest.raises(errors.UserError, match=message):
                check(mixture)

    def test_copies_of_a_vocabulary_are_the_same(self, tmp_path):
        copy = shutil.copy(word_recall.VOCABULARY_FILE, tmp_path)
        one, other = (
            pretraining.pydoc_span_corruption(vocabularies.sentencepiece(path), name=f"of_{i}")
            for i, path in enumerate([word_recall.VOCABULARY_FILE, copy])
        )
        config(seqio.Mixture("copies", [(one, 1.0), (other, 1.0)])).check_vocabularies()

    def test_an_unknown_mixture_is_answered_with_close_names(self):
        with pytest.raises(errors.UserError, match=r"Did you mean pydoc_span_corruption"):
            build("pydoc_span_coruption")

    def test_something_that_is_no_mixture_is_an_error(self):
        with pytest.raises(errors.UserError, match="mixture=3 is not a seqio task or mixture"):
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
        with pytest.raises(errors.UserError, match=r"'listops_rank' pairs each text with every la"):
            build(seqio.Mixture("ranked", [(ranking, 1.0)]) if mixed else ranking)

    @pytest.mark.parametrize(("mode", "refused"), [("eval", True), ("train", False)])
    def test_a_task_that_t5_ranks_is_data_with_its_right_labels_alone(self, mode, refused):
        preprocessors = pytest.importorskip("t5.data.preprocessors")
        step = functools.partial(preprocessors.rank_classification_formatter, mode=mode)
        assert seqio_batches._makes_every_label(step) == refused

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
        with pytest.raises(errors.UserError, match=r"batch_size=4 .* 3 hosts; .* multiple of 3"):
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
