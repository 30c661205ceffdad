"""A label that answers could never equal is refused before anything is trained or measured."""

import functools

import numpy as np
import pytest
import word_pieces
from convt5.tasks import label_checks, metrics, vocabularies
from convt5.tasks.classification import text_classification

from convt5 import data, errors, evaluation, train
from convt5.modeling.architecture import ConvT5Config, StackConfig

LONG = ["MeanOfTransportation", "MeanOfTransportatives", "Film"]


@pytest.fixture
def words(tmp_path):
    (tmp_path / "words.model").write_bytes(
        word_pieces.trained_model(normalization_rule_name="nfkc_cf")
    )
    return vocabularies.sentencepiece(str(tmp_path / "words.model"))


def task_of(folder, labels, **settings):
    rows = "".join(f'{{"text": "thing", "label": "{label}"}}\n' for label in labels)
    (folder / "train.jsonl").write_text(rows)
    return text_classification(str(folder), labels, validation_fraction=0, **settings)


@pytest.mark.parametrize("rank", [False, True])
def test_labels_are_those_of_the_metrics(tmp_path, rank):
    task = task_of(tmp_path, LONG, rank=rank)
    assert label_checks.labels_of(task) == LONG
    other = task.replace(name="other", metric_fns=[metrics.accuracy])
    assert label_checks.labels_of(other) == []


@pytest.mark.parametrize("limit", [4, 16, 21])
def test_a_label_that_is_cut_is_refused_with_all_that_mends_it(tmp_path, limit):
    task = task_of(tmp_path, LONG)
    config = data.DataConfig(mixture=task, batch_size=2, encoder_length=64, decoder_length=limit)
    message = (
        rf"takes 22 tokens, .* decoder_length={limit} leaves .* at least 22.*'MeanOfTransporta"
    )
    for check in (
        config.check_labels,
        functools.partial(config.build, process_index=0, process_count=1),
    ):
        with pytest.raises(errors.UserError, match=message) as raised:
            check()
        assert ("as of 'MeanOfTransportation'" in str(raised.value)) == (limit < 21)
        assert ("'Film'" in str(raised.value)) == (limit < 5)
    label_checks.check_lengths(task, 22, "decoder_length")


def test_rows_are_as_long_as_the_longest_label(tmp_path):
    task = task_of(tmp_path, LONG)
    config = data.DataConfig(mixture=task, batch_size=2, encoder_length=64)
    assert config.decoder_length == label_checks.longest(task) == 22
    config.check_labels()
    batch = next(config.build(process_index=0, process_count=1))
    assert batch["decoder_target_tokens"].shape == (2, 22)
    assert np.all(batch["decoder_target_tokens"].max(axis=1) > 1)


@pytest.mark.parametrize(
    ("labels", "pack", "message"),
    [
        (None, False, "decoder_length=None .* 'other' has none; set decoder_length"),
        (LONG, True, "decoder_length=None .* pack=True .* set decoder_length"),
    ],
)
def test_rows_without_a_length_need_labels_and_no_packing(tmp_path, labels, pack, message):
    task = task_of(tmp_path, LONG)
    if labels is None:
        task = task.replace(name="other", metric_fns=[metrics.accuracy])
    with pytest.raises(errors.UserError, match=message):
        data.DataConfig(mixture=task, batch_size=2, encoder_length=64, pack=pack)


@pytest.mark.parametrize("rank", [False, True])
def test_evaluation_refuses_labels_that_it_would_cut(tmp_path, rank):
    stack = StackConfig(num_layers=1, mixing="dynamic", kernel_size=3, num_kernels=2)
    model = ConvT5Config(
        vocab_size=384, emb_dim=8, mlp_dim=8, num_heads=2, head_dim=4, encoder=stack, decoder=stack
    )
    task = task_of(tmp_path, LONG, rank=rank)
    measure = evaluation.TaskEval(task=task, split="train", max_input_length=64, max_length=16)
    with pytest.raises(errors.UserError, match="max_length=16 leaves"):
        measure.check(model)
    evaluation.TaskEval(task=task, split="train", max_input_length=64).check(model)


@pytest.mark.parametrize(
    ("label", "back"),
    [("vim", r" ⁇ im"), ("Cat", "cat"), ("the  cat", "the cat"), ("ﬁ", r" ⁇ i")],
)
def test_a_label_that_does_not_come_back_is_refused(tmp_path, words, label, back):
    message = rf"label '{label}' of .* decodes with the vocabulary .*words\.model to '{back}'"
    with pytest.raises(errors.UserError, match=message.replace("⁇", ".")):
        task_of(tmp_path, ["the", label], vocabulary=words)
    assert task_of(tmp_path, ["the", label])
    assert task_of(tmp_path, ["the", "cat"], vocabulary=words)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("TEXT_FIELD='body'", r"train\.jsonl', line 1 has no field 'body'"),
        ("LABELS=['good', 'worse']", r"line 1 has the unknown label 'bad'"),
        ("LABELS=['bad', 'MeanOfTransportation']", r"decoder_length=16 leaves"),
    ],
)
def test_a_dry_run_reads_the_first_rows_of_each_file(tmp_path, binding, message):
    for name, label in (("train", "good"), ("dev", "bad")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "a", "label": "{label}"}}\n')
    command = [
        "--gin_file=gin/finetune/text_classification.gin",
        f"--gin.DATA={tmp_path}",
        "--gin.LABELS=['good', 'bad']",
        "--gin.VOCABULARY=bytes",
        "--gin.trainer.train.init_from=None",
        "--gin.data.DataConfig.decoder_length=16",
        f"--gin.RUN_DIR={tmp_path}/run",
        f"--gin.{binding}",
        "--dry_run",
    ]
    with pytest.raises(errors.UserError, match=message):
        train.main(command)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_tells_how_long_the_longest_label_is(tmp_path, capsys):
    task_of(tmp_path, LONG)
    (tmp_path / "train.jsonl").rename(tmp_path / "dev.jsonl")
    task_of(tmp_path, LONG)
    command = [
        "--gin_file=gin/finetune/text_classification.gin",
        f"--gin.DATA={tmp_path}",
        f"--gin.LABELS={LONG}",
        "--gin.VOCABULARY=bytes",
        "--gin.trainer.train.init_from=None",
        f"--gin.RUN_DIR={tmp_path}/run",
        "--dry_run",
    ]
    train.main(command)
    assert "64 rows, encoder_length=256, decoder_length=22\n" in capsys.readouterr().out
