"""The pre-training tasks give span corruption of whatever text they are pointed at."""

import functools
import gzip
import json

import numpy as np
import pytest
import seqio
import task_examples
import tensorflow_datasets as tfds
from convt5.tasks import pretraining, vocabularies
from convt5.tasks.sources import PreparedTfdsSource

from convt5 import errors
from convt5.data import task_sources

LENGTHS = {"inputs": 64, "targets": 20}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examples(task, split="train", *, num=1000, **arguments):
    return task_examples.examples(task, split, LENGTHS, num=num, **{"seed": 0, **arguments})


def text_of(example, vocabulary):
    """The text with its spans back in their places."""
    first = vocabulary.vocab_size - vocabulary.extra_ids
    spans, span = {}, []
    for token in example["targets"][:-1]:
        if token >= first:
            span = spans.setdefault(int(token), [])
        else:
            span.append(int(token))
    ids = [i for t in example["inputs"][:-1] for i in (spans[t] if t >= first else [int(t)])]
    return vocabulary.decode(ids)


@pytest.mark.slow
def test_the_text_inside_python_needs_nothing():
    task = seqio.get_mixture_or_task("pydoc_span_corruption")
    found = examples(task, num=20)
    vocabulary = task.output_features["targets"].vocabulary
    assert all(len(example["inputs"]) == LENGTHS["inputs"] for example in found)
    assert all(example["inputs"][-1] == example["targets"][-1] == 1 for example in found)
    assert "".join(text_of(example, vocabulary) for example in found).isprintable() is False
    assert " the " in "".join(text_of(example, vocabulary) for example in found)


def test_validation_text_inside_python_is_not_trained_on():
    source = pretraining.pydoc_span_corruption().source
    texts = {
        split: {e["text"] for e in source.get_dataset(split).as_numpy_iterator()}
        for split in ("train", "validation")
    }
    assert not texts["train"] & texts["validation"]
    size = {split: sum(map(len, found)) for split, found in texts.items()}
    assert 0.03 < size["validation"] / sum(size.values()) < 0.2


def test_local_text_is_corrupted_and_nothing_of_it_is_lost(tmp_path):
    lines = [f"This is document number {i} of a small collection. " * (i + 1) for i in range(12)]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": line}) + "\n" for line in lines)
    task = pretraining.text_span_corruption(
        str(tmp_path / "*.gz"), validation_fraction=0, merge_documents=False
    )
    vocabulary = task.output_features["targets"].vocabulary
    found = "".join(text_of(example, vocabulary) for example in examples(task))
    # A last segment of one token is corrupted to nothing but a sentinel.
    assert sum(map(len, map(str.strip, lines))) - len(found) <= len(lines)
    assert "document number 11 of a small collection. This is document" in found


@pytest.mark.slow
def test_hosts_read_different_documents_and_together_all(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"{i:06d}" * 9 for i in range(40)))
    task = pretraining.text_span_corruption(
        str(tmp_path / "text.txt"), validation_fraction=0, merge_documents=False
    )
    vocabulary = task.output_features["targets"].vocabulary
    shares = [
        {
            text_of(example, vocabulary)[:6]
            for example in examples(task, shard_info=seqio.ShardInfo(i, 4))
        }
        for i in range(4)
    ]
    assert [len(share) for share in shares] == [10] * 4
    assert len(set.union(*shares)) == 40


def test_another_seed_gives_another_order_and_the_same_seed_the_same(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"{i:06d}" * 9 for i in range(40)))
    task = pretraining.text_span_corruption(str(tmp_path / "text.txt"), validation_fraction=0)
    task = task.replace(shuffle_buffer_size=20)
    first, second, other = (
        [e["inputs"].tolist() for e in examples(task, num=5, shuffle=True, seed=seed)]
        for seed in (0, 0, 1)
    )
    assert first == second != other


def test_each_epoch_takes_out_other_spans(tmp_path):
    (tmp_path / "text.txt").write_text("only one document of text " * 3)
    task = pretraining.text_span_corruption(
        str(tmp_path / "text.txt"), validation_fraction=0, merge_documents=False
    )
    first, again, *_ = (e["targets"] for e in examples(task, num_epochs=4)[::2])
    assert not np.array_equal(first, again)


@pytest.mark.slow
def test_validation_files_may_be_given(tmp_path):
    (tmp_path / "train.txt").write_text("training text\n" * 20)
    (tmp_path / "valid.txt").write_text("held out words\n" * 20)
    task = pretraining.text_span_corruption(
        str(tmp_path / "train.txt"), validation_path=str(tmp_path / "valid.txt")
    )
    vocabulary = task.output_features["targets"].vocabulary
    texts = [text_of(examples(task, split)[0], vocabulary) for split in task.splits]
    assert ["training" in text for text in texts] == [True, False]
    assert ["held out" in text for text in texts] == [False, True]


@pytest.mark.parametrize("held_out", ["valid.txt", "link.txt", "below/valid.txt"])
def test_validation_files_are_not_trained_on(tmp_path, held_out):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text("some text\n")
    (folder / "link.txt").symlink_to("valid.txt")
    (folder / "below").symlink_to(folder)
    with pytest.raises(errors.UserError, match=r"of split='validation' is also among the files of"):
        pretraining.text_span_corruption(str(folder), validation_path=f"{folder}/{held_out}")


def test_the_same_file_may_be_for_training_and_validation(tmp_path):
    (tmp_path / "text.txt").write_text("some text\n")
    path = str(tmp_path / "text.txt")
    assert pretraining.text_span_corruption(path, validation_path=path).splits


def test_too_few_documents_to_hold_any_out_are_an_error(tmp_path):
    (tmp_path / "text.txt").write_text("only one document")
    task = pretraining.text_span_corruption(str(tmp_path / "text.txt"))
    with pytest.raises(errors.UserError, match=r"split='validation' .* set validation_path"):
        examples(task, "validation")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("noise_density", 1.0),
        ("mean_span_length", 0.5),
        ("mean_span_length", float("nan")),
        ("validation_fraction", 0.9),
    ],
)
def test_values_out_of_range_are_named(tmp_path, setting, value):
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(errors.UserError, match=f"{setting}={value} must be"):
        pretraining.text_span_corruption(str(tmp_path / "text.txt"), **{setting: value})


class TestC4:
    @pytest.fixture
    def task(self):
        return pretraining.c4_span_corruption(vocabularies.characters())

    @pytest.mark.parametrize("split", ["train", "validation"])
    def test_documents_of_the_published_data_set_are_corrupted(self, task, split):
        with tfds.testing.mock_data(num_examples=20):
            found = examples(task, split, num=3)
        assert len(found) == 3
        assert {len(example["inputs"]) for example in found} == {LENGTHS["inputs"]}

    def test_it_is_registered_under_its_name(self):
        task = seqio.get_mixture_or_task("c4_span_corruption")
        assert "c4/en:3.1.0" in str(task.source)

    def test_data_that_was_not_prepared_is_named_and_never_downloaded(self, tmp_path):
        task = pretraining.c4_span_corruption(
            vocabularies.characters(), data_dir=str(tmp_path / "absent")
        )
        with pytest.raises(errors.UserError, match=r"'c4/en:3\.1\.0' is not prepared.*tfds build"):
            examples(task)
        assert not (tmp_path / "absent").exists()

    def test_a_name_without_version_is_an_error(self):
        with pytest.raises(errors.UserError, match="tfds_name='c4' has no version"):
            pretraining.c4_span_corruption(tfds_name="c4")


class OnlyTrain(tfds.core.GeneratorBasedBuilder):
    """A data set without a validation split, prepared by the test below."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "n": np.int64})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(20):
            yield i, {"text": f"document number {i} of some words", "n": i}


def test_a_data_set_without_validation_is_told_and_can_be_divided(tmp_path):
    OnlyTrain(data_dir=str(tmp_path)).download_and_prepare()
    make = functools.partial(
        pretraining.c4_span_corruption,
        vocabularies.characters(),
        tfds_name="only_train:1.0.0",
        data_dir=str(tmp_path),
    )
    with pytest.raises(errors.UserError, match=r"'validation' of TFDS, which has \['train'\]"):
        examples(make(), "validation")
    divided = make(splits={"train": "train[:90%]", "validation": "train[90%:]"})
    text = b"".join(e["targets"].tobytes() for e in examples(divided, "validation"))
    assert text
    whole = make(splits={"train": "train"}, name="whole")
    with pytest.raises(errors.UserError, match="'train' of another task is 'train', which has"):
        task_sources.check_apart([divided, whole], [divided], "validation")
    task_sources.check_apart([divided], [divided, whole], "validation")
    for slices in (
        {"train": "train", "validation": "train[90%:]"},
        {"train": "train[:95%]", "validation": "train[:10%]+train[99%:]"},
    ):
        with pytest.raises(errors.UserError, match=r"'validation' of .* some of its examples"):
            examples(make(splits=slices), "validation")
        source = seqio.TfdsDataSource(
            "only_train:1.0.0", tfds_data_dir=str(tmp_path), splits=slices
        )
        with pytest.raises(errors.UserError, match=r"'validation' of .* some of its examples"):
            task_sources.check_files(make(), source, "validation")
    with pytest.raises(errors.UserError, match=r"has no feature 'body', but \['n', 'text'\]"):
        PreparedTfdsSource("only_train:1.0.0", str(tmp_path), fields=("body",)).get_dataset("train")


@pytest.mark.parametrize("name", ["pydoc_span_corruption", "pydoc_prefix_lm", "pydoc_ul2"])
def test_lengths_are_needed(name):
    with pytest.raises(errors.UserError, match="sequence_length=None lacks the lengths"):
        seqio.get_mixture_or_task(name).get_dataset(None, "validation", shuffle=False)


def test_real_text_and_vocabulary_give_full_rows(shared_data):
    vocabulary = vocabularies.sentencepiece(str(shared_data / "vocab" / "t5_cc_all_32000.model"))
    task = pretraining.text_span_corruption(
        str(shared_data / "pretrain" / "valid.txt.xz"), vocabulary
    )
    found = list(
        task.get_dataset({"inputs": 512, "targets": 114}, "train", shuffle=False)
        .take(50)
        .as_numpy_iterator()
    )
    assert {len(example["inputs"]) for example in found} == {512}
    assert {len(example["targets"]) for example in found} == {114}
    assert " the " in text_of(found[0], vocabulary)
