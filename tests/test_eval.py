"""Evaluation gives what seqio's evaluator gives, and counts neither padding nor cut text twice."""

import dataclasses
import json
import math
import os
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import tiny_run
from convt5.tasks import classification, generation, squad, tables, vocabularies
from etils import epath

import convt5
from convt5 import eval as evaluation
from convt5.errors import UserError
from convt5.evaluation import checkpoints, registry, run_settings, task_data
from convt5.evaluation.batching import stack
from convt5.evaluation.eval_command import TextPlan
from convt5.evaluation.evaluator import Evaluator
from convt5.evaluation.in_training import TaskEval
from convt5.evaluation.predictor import Prediction, Predictor, TargetScore
from convt5.evaluation.results import Results
from convt5.evaluation.settings import EvalConfig, PredictConfig
from convt5.modeling import sharding
from convt5.ops import shift_right
from convt5.runtime import metric_names
from convt5.text import task_format
from convt5.training import losses
from convt5.training.run_log import read_records

with warnings.catch_warnings():  # clu's imports warn.
    warnings.simplefilter("ignore")
    import seqio

BYTES = vocabularies.characters()
CONFIG = PredictConfig(max_length=6, max_input_length=24, batch_size=3)
LABELS = {"yes": 1, "no": 0}


def exact(targets, predictions):
    return {"exact": float(np.mean([t == p for t, p in zip(targets, predictions, strict=True)]))}


def mean_score(targets, scores):
    return {"mean_score": seqio.metrics.Scalar(float(np.mean(scores)))}


def confidence(targets, predictions, aux_values):
    return {"confidence": float(np.mean(aux_values["scores"]))}


def to_label(text, example=None, is_target=False):
    """Needs the example, as the postprocessors of SQuAD and of rank classification do."""
    assert example is not None
    assert isinstance(is_target, bool)
    return LABELS.get(text, -1)


def task(name="tiny_reviews", **settings):
    settings = {
        "metric_fns": [exact, mean_score, confidence],
        "postprocess_fn": to_label,
    } | settings
    return tiny_run.add_task(name, **settings)


class Known:
    """Stands for a predictor: answers "yes" to everything; what it is given is kept."""

    config = CONFIG
    spans_hosts = False

    def __init__(self):
        self.scored = []

    def score_choices(self, sources, choices, **_):
        self.scored += [target for each in choices for target in each]
        return [[TargetScore(-float(len(t)), len(t), len(t) + 1.0) for t in c] for c in choices]

    def predict_tokens(self, sources, **_):
        ids = (*BYTES.encode("yes"), 1)
        return [Prediction(("yes",), (-0.5 - i,), (ids,)) for i in range(len(sources))]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    task()
    folder = tmp_path_factory.mktemp("run")
    return tiny_run.write_run(folder, task="tiny_reviews", best=10)


@pytest.mark.slow
def test_metrics_are_those_of_seqios_evaluator():
    outcome = Evaluator(task(), "validation", CONFIG).evaluate(Known())
    theirs = seqio.Evaluator(
        "tiny_reviews",
        seqio.EncDecFeatureConverter(pack=False),
        eval_split="validation",
        sequence_length={"inputs": 64, "targets": 16},
        async_compute_metrics=False,
    )

    def with_index(values):
        return lambda dataset, *_: list(enumerate(values))

    count = len(tiny_run.REVIEWS)
    known = Known().predict_tokens([[]] * count)
    targets = [[*BYTES.encode(row["label"]), 1][:6] for row in tiny_run.REVIEWS]
    scores = [-float(len(target)) for target in targets]
    metrics, _ = theirs.evaluate(
        compute_metrics=True,
        predict_fn=with_index([list(p.tokens[0]) for p in known]),
        score_fn=with_index(scores),
        predict_with_aux_fn=lambda *_: (
            [(i, list(p.tokens[0])) for i, p in enumerate(known)],
            {"scores": [p.scores[0] for p in known]},
        ),
    )
    expected = {
        name: float(getattr(value, "value", value))
        for name, value in metrics.result()["tiny_reviews"].items()
    }
    own = {k: v for k, v in outcome.metrics.items() if k not in metric_names.OF_TARGETS}
    assert own == pytest.approx(expected)
    # Two of five are "yes"; one label is unknown, and wrong whatever is predicted.
    assert outcome.metrics["exact"] == 0.4
    assert outcome.metrics["loss"] == 1.0


def test_padding_that_a_task_adds_itself_is_not_measured():
    """Training gives it no weight either."""

    @seqio.map_over_dataset
    def padded(row):
        return row | {name: tf.pad(row[name], [[0, 60]]) for name in ("inputs", "targets")}

    plain = task()
    steps = [*plain.preprocessors, padded]
    given = (
        Evaluator(plain, "validation", CONFIG),
        Evaluator(plain.replace(name="tiny_padded", preprocessors=steps), "validation", CONFIG),
    )
    expected, found = (subject.evaluate(Known()) for subject in given)
    assert found.metrics == expected.metrics
    assert found.counts == expected.counts


def test_padding_inside_of_targets_is_told(caplog):
    @seqio.map_over_dataset
    def padded(row):
        return row | {"targets": tf.concat([row["targets"][:1], [0], row["targets"][1:]], axis=0)}

    plain = task()
    Evaluator(plain, "validation", CONFIG)
    assert "the id 0" not in caplog.text
    steps = [*plain.preprocessors, padded]
    Evaluator(plain.replace(name="tiny_gaps", preprocessors=steps), "validation", CONFIG)
    assert "task=tiny_gaps: 5 targets hold the id 0 before their end" in caplog.text


@pytest.mark.parametrize("normalize_by", ["tokens", "positions"])
@pytest.mark.slow
def test_what_is_minimised_is_reported_beside_the_cross_entropy(normalize_by):
    """As the trainer's own loss has both, on the same targets."""
    loss = losses.TextLoss(label_smoothing=0.2, z_loss=0.01, normalize_by=normalize_by)
    subject = Evaluator(task(), "validation", CONFIG, loss=loss)
    model = tiny_run.make_model()
    found = subject.evaluate(subject.predictor(model)).metrics
    plain = Evaluator(task(), "validation", CONFIG).evaluate(subject.predictor(model)).metrics
    assert "objective" not in plain
    assert plain == {name: value for name, value in found.items() if name != "objective"}
    rows = [subject.predictor(model).fit(ids, 0).tokens for ids in subject._sources]
    targets = stack(subject._targets, CONFIG.max_length)
    batch = {
        "encoder_input_tokens": stack(rows, CONFIG.max_input_length),
        "decoder_input_tokens": np.asarray(shift_right(jnp.asarray(targets))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.float32),
        "decoder_target_bytes": vocabularies.token_bytes(BYTES)[targets],
    }
    expected = jax.jit(lambda *given: loss(*given).reported())(model, batch)
    for name in metric_names.OF_TARGETS:
        assert found[name] == pytest.approx(float(expected[name]), rel=1e-4), name


def test_a_metric_of_the_task_replaces_one_of_its_name():
    own = task("tiny_own", metric_fns=[lambda targets, predictions: {"perplexity": 7.0}])
    assert Evaluator(own, "validation", CONFIG).evaluate(Known()).metrics["perplexity"] == 7.0


def test_what_is_cut_is_counted():
    known = Known()
    outcome = Evaluator(task(), "validation", CONFIG).evaluate(known)
    assert outcome.counts == {
        "num_examples": 5,
        "num_target_tokens": 4 + 3 + 3 + 4 + 6,
        "truncated_inputs": 1,
        "truncated_targets": 1,
    }
    assert known.scored[-1] == [*BYTES.encode("maybe"), 1]
    assert outcome.records[4]["target"] == "maybe so"


def test_records_tell_texts_predictions_and_scores():
    outcome = Evaluator(task(), "validation", CONFIG).evaluate(Known())
    assert outcome.records[1] == {
        "index": 1,
        "input": "bad",
        "target": "no",
        "target_score": -3.0,
        "predictions": ["yes"],
        "scores": [-1.5],
    }


def test_an_input_that_is_not_utf_8_is_shown_with_its_bytes_replaced():
    latin = task("tiny_latin_input", rows=[{"text": b"caf\xe9", "label": "yes"}])
    (record,) = Evaluator(latin, "validation", CONFIG).evaluate(Known()).records
    assert record["input"] == "caf\ufffd"


def test_a_target_that_is_not_utf_8_is_named_before_anything_is_measured():
    rows = [{"text": "good", "label": "yes"}, {"text": "fine", "label": b"\xe9"}]
    with pytest.raises(UserError, match="the 'targets' of example 2 of split="):
        Evaluator(task("tiny_latin_target", rows=rows), "validation", CONFIG)


def test_examples_are_decoded_only_where_a_metric_or_the_user_asks():
    scored = task("tiny_scored", metric_fns=[mean_score])
    outcome = Evaluator(scored, "validation", CONFIG).evaluate(Known())
    assert "predictions" not in outcome.records[0]
    assert set(outcome.metrics) == {"loss", "perplexity", "bits_per_byte", "mean_score"}
    asked = Evaluator(scored, "validation", CONFIG, EvalConfig(predict=True, num_examples=2))
    assert [r["predictions"] for r in asked.evaluate(Known()).records] == [["yes"], ["yes"]]


def test_two_metrics_of_one_name_are_refused():
    twice = task("tiny_twice", metric_fns=[exact, exact])
    with pytest.raises(UserError, match="two metrics called 'exact'"):
        Evaluator(twice, "validation", CONFIG).evaluate(Known())


def test_padding_is_not_counted_on_any_mesh():
    """Five examples in batches of three, and of four over two devices."""
    model = tiny_run.make_model()
    scored = task("tiny_scored", metric_fns=[mean_score])
    found = []
    for batch_size, num_devices in ((3, 1), (4, 2)):
        config = PredictConfig(max_length=6, max_input_length=8, batch_size=batch_size)
        evaluator = Evaluator(scored, "validation", config)
        mesh = sharding.MeshConfig().build(jax.devices()[:num_devices])
        placed = jax.device_put(model, sharding.replicated(mesh))
        found.append(evaluator.evaluate(evaluator.predictor(placed, mesh)).metrics)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


def test_a_measure_of_training_is_checked_before_its_examples_are_read():
    task()
    lengths = {"max_input_length": 24, "max_length": 6}
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    TaskEval(task="tiny_reviews", **lengths).check(tiny_run.CONFIG)
    faults = {
        "split=test is none of validation": {"split": "test"},
        "num_examples=0 must be at least 1": {"num_examples": 0},
        "max_length=0 must be at least 1": {"max_length": 0},
        "task=pydoc_ul2 is a mixture; name one of its tasks: pydoc_ul2_r0": {"task": "pydoc_ul2"},
    }
    for message, settings in faults.items():
        wrong = TaskEval(**{"task": "tiny_reviews", **lengths, **settings})
        for called in (wrong.check, lambda model, own=wrong: own.build(model, mesh)):
            with pytest.raises(UserError, match=message):
                called(tiny_run.CONFIG)


def test_other_examples_and_other_ways_to_measure_them_are_told_apart():
    task()
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    lengths = {"task": "tiny_reviews", "max_input_length": 24, "max_length": 6}
    changes = [{}, {"batch_size": 3}, {"num_examples": 2}, {"max_length": 3}, {"every_nth": 2}]
    measures = [TaskEval(**lengths | change).build(tiny_run.CONFIG, mesh) for change in changes]
    first, same, *others = (measure.identity for measure in measures)
    assert first == same
    assert len({first, *others}) == 1 + len(others)


def test_a_task_without_the_split_is_refused():
    with pytest.raises(UserError, match=r"split=test is none of validation, the splits of tiny"):
        task_data.check_task(task(), "test", vocab_size=384)


def test_another_vocabulary_is_refused():
    large = task("tiny_large", vocabulary=vocabularies.characters(num_sentinels=500))
    with pytest.raises(UserError, match=r"tiny_large: the vocabulary has 759 ids.*vocab_size=384"):
        task_data.check_task(large, "validation", vocab_size=384)


def test_a_vocabulary_of_other_words_is_refused(shared_data):
    path = shared_data / "vocab" / "seqio_test.model"
    words = vocabularies.sentencepiece(str(path))
    trained = types.SimpleNamespace(inputs=words, targets=words)
    with pytest.raises(UserError, match=r"with ByteVocabulary .* trained with SentencePiece"):
        task_data.check_task(task(), "validation", vocab_size=5000, trained=trained)
    fewer = seqio.SentencePieceVocabulary(str(path), extra_ids=0)
    same = task("tiny_words", vocabulary=fewer)
    task_data.check_task(same, "validation", vocab_size=5000, trained=trained)


def labelled(folder, vocabulary):
    """Flags of a task in a file, read with a vocabulary of its own."""
    # Both vocabularies can write these labels.
    rows = [{"text": "good", "label": "on"}, {"text": "bad", "label": "no"}]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--gin_file=gin/tasks/text_classification.gin",
        f"--gin.DATA={folder}",
        "--gin.LABELS=['no', 'on']",
        f"--gin.VOCABULARY={vocabulary}",
        "--split=test",
        "--dry_run",
    ]


def test_a_task_of_another_vocabulary_than_the_runs_is_refused(
    run_dir, tmp_path, shared_data, capsys
):
    """Also where its gin file takes the place of the data of the run."""
    flags = labelled(tmp_path, shared_data / "vocab" / "seqio_test.model")
    with pytest.raises(UserError, match=r"with SentencePiece .* trained with ByteVocabulary"):
        evaluation.main([f"--checkpoint={run_dir}", *flags])
    assert "not compared" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_whose_data_is_gone_is_evaluated_on_other_tasks(tmp_path, shared_data, capsys):
    task()
    run = tiny_run.write_run(tmp_path / "run", task="tiny_gone")
    with pytest.raises(UserError, match="tiny_gone is not registered"):
        evaluation.main([f"--checkpoint={run}", "--dry_run"])
    assert evaluation.main([f"--checkpoint={run}", "--task=tiny_reviews", "--dry_run"]) == 0
    assert "vocabularies are not compared: task=tiny_gone" in capsys.readouterr().err
    flags = labelled(tmp_path, shared_data / "vocab" / "seqio_test.model")
    assert evaluation.main([f"--checkpoint={run}", *flags]) == 0


def test_other_inputs_than_in_training_are_noted(run_dir, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    flags = [f"--checkpoint={run}", *labelled(tmp_path, "bytes")]
    same = task_format.of_template("text_classification", "text_classification text: {text}")
    marked = dataclasses.replace(same, mark_shared=True)
    others = [dataclasses.replace(each, task=f"other_{i}") for i, each in enumerate((marked, same))]
    for trained, is_noted in (
        ([same], False),
        (others, False),
        (others[:1], True),
        ([marked], True),
    ):
        task_format.write(run, trained)
        assert evaluation.main([*flags, "--dry_run"]) == 0
        notes = capsys.readouterr().err
        assert ("but in the training of" in notes) == is_noted
    assert "with * before words that a field shares with an earlier one, the format of" in notes


def test_two_tasks_of_one_name_are_refused(tmp_path):
    one, two = (
        classification.text_classification(_reviews(tmp_path / name), ["no", "yes"])
        for name in ("one", "two")
    )
    assert task_data.find_tasks([one, one]) == [one]
    with pytest.raises(UserError, match="two different ones are called 'text_classification'"):
        task_data.find_tasks([one, two])


@pytest.mark.parametrize(
    ("num_examples", "every_nth", "expected"),
    [(None, 2, [0, 2, 4]), (2, 2, [0, 2]), (9, 3, [0, 3]), (1, 9, [0])],
)
def test_every_nth_example_reaches_all_parts_of_a_sorted_file(num_examples, every_nth, expected):
    config = EvalConfig(num_examples=num_examples, every_nth=every_nth)
    found = Evaluator(task(), "validation", CONFIG, config).examples
    everything = Evaluator(task(), "validation", CONFIG).examples
    texts = [example["inputs_pretokenized"] for example in everything]
    assert [example["inputs_pretokenized"] for example in found] == [texts[i] for i in expected]


def test_every_nth_example_must_be_at_least_the_first():
    with pytest.raises(UserError, match="EvalConfig: every_nth=0 must be at least 1"):
        EvalConfig(every_nth=0)


def test_a_task_alone_is_a_list_of_it():
    assert list(EvalConfig(tasks=task()).tasks) == [task()]
    assert list(EvalConfig(tasks="tiny_reviews").tasks) == ["tiny_reviews"]


def test_lengths_that_a_task_refuses_are_called_as_they_are_set():
    argv = {"max_input_length": 16, "max_length": 4}
    copying = registry.find_registered("gap_copy")
    message = r"encoder_length is max_input_length=16, and decoder_length is max_length=4"
    with pytest.raises(UserError, match=message):
        Evaluator(copying, "validation", PredictConfig(**argv))


def test_metrics_that_are_not_measured_are_told(caplog):
    legacy = seqio.metrics.PassthroughLegacyMetric.from_metric_fn(exact)
    with caplog.at_level("WARNING", logger="absl"):
        Evaluator(task(), "validation", CONFIG)
        assert not caplog.records
        wrapped = task("tiny_objects", metric_fns=[exact], metric_objs=[legacy.empty()])
        Evaluator(wrapped, "validation", CONFIG)
    assert "task=tiny_objects has 1 metric_objs, which convt5 does not evaluate" in caplog.text


def test_the_first_examples_of_a_ranking_are_rows(tmp_path):
    """Each of them is an example for every label."""
    ranked = classification.text_classification(
        _reviews(tmp_path / "data"), ["no", "yes", "maybe"], rank=True, validation_fraction=0
    )

    def counted(num_examples, every_nth=1):
        known = EvalConfig(num_examples=num_examples, every_nth=every_nth)
        evaluator = Evaluator(ranked, "train", CONFIG, known)
        return len(evaluator.examples), evaluator.evaluate(Known()).counts

    num_computed, counts = counted(2, every_nth=2)
    assert num_computed == 6
    assert counts["num_examples"] == 2
    assert counted(1, every_nth=2)[0] == 3

    assert counted(2)[0] == 6
    num_computed, counts = counted(None)
    assert num_computed == 9
    assert counts["num_examples"] == 3
    assert counts["truncated_inputs"] == 3


def test_the_loss_of_a_ranking_is_that_of_the_right_labels(tmp_path):
    labels = ["no", "yes", "maybe"]
    folder = _reviews(tmp_path / "data")
    answered, ranked = (
        classification.text_classification(folder, labels, rank=rank, validation_fraction=0)
        for rank in (False, True)
    )
    found = [Evaluator(task, "train", CONFIG).evaluate(Known()) for task in (answered, ranked)]
    assert found[0].metrics["loss"] == found[1].metrics["loss"] == 1.0
    for name in ("num_target_tokens", "num_examples"):
        assert found[0].counts[name] == found[1].counts[name]

    class Sure(Known):
        """Finds wrong labels unthinkable."""

        def score_choices(self, sources, choices, **_):
            right = [*BYTES.encode("yes"), 1]
            return [
                [
                    TargetScore(-0.5 if t == right else -99.0, len(t), 1.5 + 9 * (t != right))
                    for t in c
                ]
                for c in choices
            ]

    loss = losses.TextLoss(label_smoothing=0.1)
    measured = Evaluator(ranked, "train", CONFIG, loss=loss).evaluate(Sure()).metrics
    assert measured["loss"] == 0.5 / 4
    assert measured["objective"] == 1.5 / 4
    assert measured["accuracy"] == 100


def test_labels_are_ranked_alike_in_evaluation_and_in_prediction(tmp_path):
    """To the bit, so that a near tie goes one way in both."""
    labels = ["no", "yes", "maybe"]
    texts = ["good good", "bad", "a dull and long film", "so much longer than the model reads"]
    folder = _reviews(tmp_path / "data", [{"text": t, "label": "yes"} for t in texts])
    ranked = classification.text_classification(folder, labels, rank=True, validation_fraction=0)
    subject = Evaluator(ranked, "train", CONFIG)
    model = tiny_run.make_model()
    outcome = subject.evaluate(subject.predictor(model))
    predictor = Predictor(model, BYTES, CONFIG, format=task_data.find_format(ranked))
    scores = {(r["input"], r["target"]): r["target_score"] for r in outcome.records}
    found = predictor.predict(texts)
    for text, prediction in zip(texts, found, strict=True):
        written = f"text_classification text: {text}"
        assert prediction.scores == tuple(scores[written, label] for label in prediction.texts)
    right = sum(prediction.label == "yes" for prediction in found)
    assert outcome.metrics["accuracy"] == 100 * right / len(texts)


def _reviews(folder, rows=None):
    rows = rows or [{"text": "a film as long as the whole of its name", "label": "yes"}] * 3
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_an_unknown_task_names_those_that_are_registered():
    task()
    with pytest.raises(UserError, match=r"task=tiny_review is not .* Did you mean tiny_reviews"):
        task_data.find_tasks(["tiny_review"])


def test_a_split_without_examples_is_refused():
    empty = task("tiny_empty", rows=[])
    with pytest.raises(UserError, match="split=validation of task=tiny_empty holds no example"):
        Evaluator(empty, "validation", CONFIG)


@pytest.mark.parametrize(
    ("which", "steps"),
    [("latest", [20]), ("best", [10]), ("all", [10, 20]), ("20,10,20", [20, 10]), ("10", [10])],
)
def test_checkpoints_are_chosen_by_name(run_dir, which, steps):
    found = checkpoints.select(run_dir, which)
    assert [each.step for each in found] == steps
    assert {str(each.run_dir) for each in found} == {run_dir}


@pytest.mark.parametrize(
    ("which", "message"),
    [("15", r"step=15 is not among .* 10, 20"), ("last", "step=last must be latest, best, all")],
)
def test_an_unknown_checkpoint_is_a_clear_error(run_dir, which, message):
    with pytest.raises(UserError, match=message):
        checkpoints.select(run_dir, which)


def test_one_step_of_a_run_can_be_named_by_its_folder(run_dir):
    (found,) = checkpoints.select(f"{run_dir}/checkpoints/10")
    assert (found.step, str(found.run_dir)) == (10, run_dir)


def test_a_copied_checkpoint_keeps_its_step(run_dir, tmp_path):
    shutil.copytree(f"{run_dir}/checkpoints/10", tmp_path / "good")
    (found,) = checkpoints.select(tmp_path / "good")
    assert found.step == 10


def test_following_yields_checkpoints_as_they_appear(tmp_path):
    """Time passes only in `sleep`; each sleep brings the next checkpoint."""
    coming = [5, None, 7, 9]
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        step = coming.pop(0) if coming else None
        if step is not None:
            (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)

    def followed(**settings):
        found = checkpoints.follow(tmp_path, every=10, clock=lambda: now, sleep=sleep, **settings)
        return [each.step for each in found]

    assert followed(last_step=7, timeout=100) == [5, 7]
    assert followed(last_step=None, timeout=35) == [5, 7, 9]
    # Nothing came for 35 seconds after the last.
    assert now == 30 + 10 + 40


def test_following_ends_with_a_run_that_stopped_early(tmp_path):
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    settings, summary = tmp_path / "config.gin", tmp_path / "summary.json"
    waited = []

    def followed():
        waited.clear()
        now = lambda: float(sum(waited))  # noqa: E731
        found = checkpoints.follow(
            tmp_path, last_step=9, timeout=35, every=10, clock=now, sleep=waited.append
        )
        return [each.step for each in found], len(waited)

    for text in ('{"step": 3}', '{"ste', "[]"):
        summary.write_text(text)
        assert followed() == ([5], 4)
    summary.write_text('{"step": 5}')
    settings.write_text("")
    os.utime(settings, (1, 1))
    assert followed() == ([5], 0)
    # The run was begun again since.
    os.utime(summary, (0, 0))
    assert followed() == ([5], 4)


def test_a_checkpoint_that_its_run_removed_is_no_fault(run_dir, tmp_path):
    mesh = sharding.MeshConfig().build(jax.devices()[:1])
    gone = checkpoints.Found(epath.Path(tmp_path / "30"), 30, epath.Path(tmp_path))
    assert checkpoints.load_if_there(gone, mesh) is None
    there = checkpoints.select(run_dir)[0]
    model = checkpoints.load_if_there(there, mesh)
    expected = tiny_run.make_model(20).token_embedder.embedding[...]
    np.testing.assert_array_equal(model.token_embedder.embedding[...], expected)


def files_of(folder) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_command_writes_metrics_predictions_and_scalars(run_dir, tmp_path, capsys):
    argv = [f"--checkpoint={run_dir}", "--step=all", f"--output_dir={tmp_path / 'one'}"]
    assert evaluation.main(argv) == 0
    printed = capsys.readouterr().out
    assert "step 10  tiny_reviews/validation  loss" in printed
    assert "1 inputs cut, 1 targets cut" in printed
    folder = tmp_path / "one" / "tiny_reviews" / "validation"
    summary = json.loads((folder / "step_20.json").read_text())
    assert summary["num_examples"] == 5
    measured = summary["metrics"]
    assert set(measured) == {*metric_names.OF_TARGETS, "exact", "mean_score", "confidence"}
    # The run has no regularisers.
    assert measured["objective"] == pytest.approx(measured["loss"])
    assert measured["loss"] > 0
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
    assert summary["settings"]["max_input_length"] == tiny_run.ENCODER_LENGTH
    records = read_records(folder / "step_20.jsonl")
    assert [record["input"] for record in records] == [row["text"] for row in tiny_run.REVIEWS]
    total = math.fsum(record["target_score"] for record in records)
    assert summary["metrics"]["loss"] == pytest.approx(-total / summary["num_target_tokens"])
    assert os.listdir(tmp_path / "one" / "tensorboard")

    # The same command gives the same bytes.
    argv[-1] = f"--output_dir={tmp_path / 'two'}"
    assert evaluation.main(argv) == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_a_followed_run_that_is_done_ends_and_nothing_is_done_twice(run_dir, tmp_path, capsys):
    argv = [f"--checkpoint={run_dir}", "--follow", f"--output_dir={tmp_path}"]
    assert evaluation.main(argv) == 0
    assert capsys.readouterr().out.count("tiny_reviews/validation") == 4  # Names and paths.
    assert evaluation.main(argv) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_results_of_another_run_do_not_count_as_done(run_dir, tmp_path, capsys):
    for name in ("moved", "other"):
        shutil.copytree(run_dir, tmp_path / name)
    (tmp_path / "other/checkpoints/10").rename(tmp_path / "10")
    (tmp_path / "other/checkpoints/20").rename(tmp_path / "other/checkpoints/10")
    (tmp_path / "10").rename(tmp_path / "other/checkpoints/20")
    argv = ["--follow", f"--output_dir={tmp_path}/results"]
    for name, shown in ((run_dir, 4), (tmp_path / "moved", 0), (tmp_path / "other", 4)):
        assert evaluation.main([f"--checkpoint={name}", *argv]) == 0
        assert capsys.readouterr().out.count("tiny_reviews/validation") == shown
    argv = [f"--checkpoint={run_dir}", "--dry_run", *argv[1:]]
    assert evaluation.main(argv) == 0
    assert "holds results of other settings (model: " in capsys.readouterr().err


def test_the_checkpoints_of_a_run_are_followed_and_a_single_model_is_not(run_dir, tmp_path, capsys):
    argv = ["--follow", "--timeout=0.01", f"--output_dir={tmp_path}"]
    assert evaluation.main([f"--checkpoint={run_dir}/checkpoints", *argv]) == 0
    assert "step 20  tiny_reviews/validation" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"evaluates the checkpoints .*checkpoints/20 is a single"):
        evaluation.main([f"--checkpoint={run_dir}/checkpoints/20", *argv])


def test_following_what_never_comes_is_a_fault(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "follow", lambda *_, **__: iter(()))
    with pytest.raises(UserError, match=r"no checkpoint in .* was evaluated"):
        evaluation.main([f"--checkpoint={run_dir}", "--follow", f"--output_dir={tmp_path}"])


def test_a_tilde_is_the_home_folder_everywhere(run_dir, tmp_path, monkeypatch, capsys):
    run = epath.Path(run_dir)
    monkeypatch.setenv("HOME", str(run.parent))
    name = f"~/{run.name}"
    assert evaluation.main([f"--checkpoint={name}", "--step=20", "--output_dir=~/results"]) == 0
    assert f"{run.parent}/results/tiny_reviews" in capsys.readouterr().out
    assert convt5.load_model(name).config == tiny_run.CONFIG
    assert isinstance(convt5.load_vocabulary(name), seqio.ByteVocabulary)


def test_waiting_for_a_run_that_has_not_begun_is_told(tmp_path, capsys):
    with pytest.raises(UserError, match="no checkpoint in"):
        evaluation.main([f"--checkpoint={tmp_path}/not_here", "--follow", "--timeout=0.01"])
    told = capsys.readouterr().err
    assert f"waiting for the run directory {tmp_path}/not_here, at most 0.01 seconds" in told


def test_a_timeout_without_following_is_refused(run_dir):
    with pytest.raises(UserError, match=r"--timeout=0\.5 is for --follow; leave it out"):
        evaluation.main([f"--checkpoint={run_dir}", "--timeout=0.5", "--dry_run"])


@pytest.mark.parametrize("timeout", ["nan", "-1"])
def test_a_timeout_that_is_no_time_is_refused(run_dir, timeout):
    with pytest.raises(UserError, match=rf"--timeout={timeout} must be at least 0"):
        evaluation.main([f"--checkpoint={run_dir}", "--follow", f"--timeout={timeout}"])


def test_the_dry_run_computes_nothing(run_dir, capsys):
    assert evaluation.main([f"--checkpoint={run_dir}", "--step=all", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "steps        10, 20" in printed
    assert "strategy     Greedy()" in printed
    assert "lengths      24 tokens in, 6 out" in printed
    with pytest.raises(UserError, match="holds no moving average of the parameters"):
        evaluation.main([f"--checkpoint={run_dir}", "--ema", "--dry_run"])
    assert not (epath.Path(run_dir) / "evaluation").exists()


def test_gin_sets_what_flags_set(run_dir, tmp_path, capsys):
    (tmp_path / "beam.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from convt5 import evaluation\n"
        "from convt5.generation import search\n"
        "evaluation.PredictConfig.strategy = @search.BeamSearch()\n"
        "search.BeamSearch.beam_size = 3\n"
        "evaluation.EvalConfig.num_examples = 2\n"
    )
    argv = [
        f"--checkpoint={run_dir}",
        f"--gin_file={tmp_path / 'beam.gin'}",
        "--gin.evaluation.PredictConfig.max_length=4",
        "--length_penalty=0.5",
        "--dry_run",
    ]
    assert evaluation.main(argv) == 0
    printed = capsys.readouterr().out
    assert "BeamSearch(beam_size=3, length_penalty=0.5" in printed
    assert "24 tokens in, 4 out" in printed


def test_tasks_themselves_say_what_they_rank(run_dir, tmp_path):
    (tmp_path / "rank.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from convt5 import evaluation\n"
        "from convt5.evaluation import settings\n"
        "evaluation.PredictConfig.strategy = @settings.Rank()\n"
    )
    argv = [f"--checkpoint={run_dir}", f"--gin_file={tmp_path / 'rank.gin'}", "--dry_run"]
    with pytest.raises(UserError, match="strategy=rank chooses among the labels of the task"):
        evaluation.main(argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--checkpoint is missing"),
        (["--checkpoint=/nowhere"], "no checkpoint in /nowhere"),
        (["--checkpoint={run}", "--split=test"], "split=test is none of validation"),
        (["--checkpoint={run}", "--task=nothing"], "task=nothing is not registered"),
        (["--checkpoint={run}", "--follow", "--step=10"], "leave out --step=10"),
        (["--checkpoint={run}", "--num_examples=0"], "num_examples=0 must be at least 1"),
        (["--checkpoint={run}", "--stepp=10"], "unknown flag --stepp. Did you mean --step"),
        (["--checkpoint={run}", "--long_inputs=refuse"], "input 5 has 41 tokens"),
    ],
)
def test_what_a_user_can_get_wrong_ends_in_one_message(run_dir, tmp_path, argv, message):
    argv = [part.format(run=run_dir) for part in argv]
    with pytest.raises(UserError, match=message):
        evaluation.main([*argv, f"--output_dir={tmp_path}"] if argv else argv)


def test_results_of_other_settings_count_as_absent(tmp_path):
    outcome = Evaluator(task(), "validation", CONFIG).evaluate(Known())
    results = Results(tmp_path, {"max_length": 6})
    assert not results.exists("tiny_reviews", "validation", None)
    assert results.write(outcome, None).name == "model.json"
    assert results.exists("tiny_reviews", "validation", None)
    assert not results.replaced("tiny_reviews", "validation", None)
    other = Results(tmp_path, {"max_length": 7})
    assert not other.exists("tiny_reviews", "validation", None)
    assert "max_length: 6 -> 7" in other.replaced("tiny_reviews", "validation", None)


def test_each_task_and_split_has_its_own_file(tmp_path):
    results = Results(tmp_path, {})
    names = ["a_b", "a:b", "a#b", "a/b", "a%3Ab", "train[:10%]", "train[10:%]", "train_10__"]
    paths = [results.path(name, name, 1) for name in names]
    assert len(set(paths)) == len(names)
    assert {path.parent.parent.parent for path in paths} == {results.folder}
    assert paths[0].relative_to(results.folder).as_posix() == "a_b/a_b/step_1.json"


def told(task, **settings):
    """What results of a task tell, with the settings of a run."""
    settings = run_settings.RunSettings.unknown()._replace(train=settings)
    plan = TextPlan(checkpoint="", tasks=[task], split="train", settings=settings, predict=CONFIG)
    return json.loads(json.dumps(plan.described()))


def test_results_tell_the_data_that_they_are_of(tmp_path):
    def described(name, text):
        folder = _reviews(tmp_path / name, [{"text": text, "label": "yes"}] * 3)
        labels = ["no", "yes"]
        return told(classification.text_classification(folder, labels, validation_fraction=0))

    before = described("before", "good")
    assert described("copy", "good") == before
    results = Results(tmp_path, before)
    results.write(Evaluator(task(), "validation", CONFIG).evaluate(Known()), None)
    assert results.exists("tiny_reviews", "validation", None)
    other = Results(tmp_path, described("other", "bad"))
    assert not other.exists("tiny_reviews", "validation", None)
    assert "content.text_classification: " in other.replaced("tiny_reviews", "validation", None)
    asked = {"question": "who", "context": "he", "answers": ["he"]}
    (tmp_path / "train.jsonl").write_text(json.dumps(asked))
    for marks in (True, False):
        task_of_questions = squad.squad(tmp_path, vocabularies.characters(), mark_shared=marks)
        assert told(task_of_questions).get("mark_shared", []) == ["squad"] * marks
        assert told(task_of_questions)["tasks"][0].get("mark_shared", False) == marks
    # So are labels, and how inputs are written.
    folder = str(tmp_path / "before")
    for settings in ({"prompt": "is it {text}"}, {"labels": ["yes", "no"]}):
        settings = {"labels": ["no", "yes"], "validation_fraction": 0, **settings}
        again = Results(tmp_path, told(classification.text_classification(folder, **settings)))
        assert not again.exists("tiny_reviews", "validation", None)
    # Of results before, which do not tell, nothing else is known.
    path = results.path("tiny_reviews", "validation", None)
    path.write_text(json.dumps({"settings": {k: v for k, v in before.items() if k != "content"}}))
    assert other.exists("tiny_reviews", "validation", None)


def test_results_tell_how_rows_were_read(tmp_path):
    rows = [{"text": "good", "label": "0.4", "other": "0.6", "summary": "good"}] * 3
    folder = _reviews(tmp_path / "rows", rows)

    def described(labels=("no", "yes"), **settings):
        return told(classification.text_classification(folder, labels, **settings))

    before = described({"0.4": "no", "0.6": "yes"})
    assert before["rows"]["text_classification"] == {
        "layout": None,
        "text_fields": ["text"],
        "label_field": "label",
        "names": {"0.4": "no", "0.6": "yes"},
        "labels": ["no", "yes"],
        "threshold": None,
    }
    Results(tmp_path, before).write(Evaluator(task(), "validation", CONFIG).evaluate(Known()), None)
    numbers = {"0.4": "no", "0.6": "yes"}
    for change, other in (
        ("names.0.4: no -> yes", described({"0.6": "no", "0.4": "yes"})),
        ("label_field: label -> other", described(numbers, label_field="other")),
        ("threshold: None -> 0.5", described(numbers, threshold=0.5)),
        (
            "layout: None -> ",
            described(numbers, layout=tables.Layout(aliases={"label": ["other"]})),
        ),
    ):
        assert change in Results(tmp_path, other).replaced("tiny_reviews", "validation", None)
    # Results of earlier versions do not tell, so that nothing is known of them.
    known = {name: value for name, value in before.items() if name != "rows"}
    path = Results(tmp_path, before).path("tiny_reviews", "validation", None)
    path.write_text(json.dumps({"settings": known}))
    assert Results(tmp_path, before).exists("tiny_reviews", "validation", None)
    summaries = [
        told(generation.summarization(folder, document_field="text", summary_field=field))
        for field in ("summary", "label")
    ]
    fields = [each["rows"]["summarization"]["summary_field"] for each in summaries]
    assert fields == ["summary", "label"]


def test_results_tell_the_vocabulary_of_their_task():
    for count in (100, 90):
        name = f"sentinels_{count}"
        other = tiny_run.add_task(name, vocabulary=vocabularies.characters(count))
        found = told(other)["vocabularies"][name]
        assert [text.split(", ")[1] for text in found] == [f"{count} sentinels"] * 2


def test_results_tell_of_which_loss_the_objective_is(tmp_path):
    before, other = (
        told(task(), loss=losses.TextLoss(label_smoothing=value)) for value in (0.0, 0.1)
    )
    outcome = Evaluator(task(), "validation", CONFIG, loss=losses.TextLoss()).evaluate(Known())
    assert "objective" in outcome.metrics
    Results(tmp_path, before).write(outcome, None)
    replaced = Results(tmp_path, other).replaced("tiny_reviews", "validation", None)
    assert "loss.label_smoothing: 0.0 -> 0.1" in replaced
    assert "loss" not in told(task())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("t/validation/step_1.json", os.mkdir),
        ("t/validation/step_1.jsonl", os.mkfifo),
        ("t/validation", lambda path: path.symlink_to("/")),
        ("t", lambda path: path.write_text("")),
        ("tensorboard", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_what_is_in_the_way_of_results_is_found_before_anything_is_measured(tmp_path, name, make):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    with pytest.raises(UserError, match=rf"{name} is a \w+, where a .*--output_dir"):
        Results(tmp_path, {}).exists("t", "validation", 1)


@pytest.mark.parametrize("flags", [["--step=all"], ["--dry_run"], ["--follow", "--dry_run"]])
@pytest.mark.parametrize("name", ["", "tiny_reviews", "tiny_reviews/validation/step_20.json"])
def test_the_command_finds_what_is_in_the_way_of_results_before_it_loads_a_model(
    run_dir, tmp_path, monkeypatch, name, flags
):
    path = tmp_path / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    monkeypatch.setattr(checkpoints, "load_if_there", None)
    with pytest.raises(UserError, match=rf"output_dir=.* must be a folder .*{name} is .*--output_"):
        evaluation.main([f"--checkpoint={run_dir}", f"--output_dir={tmp_path}/results", *flags])


def test_nothing_is_written_where_the_results_of_a_run_are_a_link(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    (run / "evaluation").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"evaluation is a link, .*--output_dir"):
        evaluation.main([f"--checkpoint={run}", "--step=20"])
