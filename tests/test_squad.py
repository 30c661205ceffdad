"""SQuAD reads as in T5, from TFDS and from local files, and is measured by its own metrics."""

import json

import pytest
import seqio
import tensorflow_datasets as tfds
from convt5.tasks import registration, squad, vocabularies
from task_examples import examples

from convt5 import errors

ROW = {
    "context": 'The film "Up" (2009) was made by Pixar.',
    "question": "Who made Up?",
    "answers": ["Pixar", "by Pixar."],
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_question_comes_first_and_the_first_answer_is_the_target(tmp_path):
    (example,) = examples(squad.squad(write(tmp_path / "train.jsonl", ROW)))
    assert example["inputs_pretokenized"].decode() == (
        'question: Who made Up ? context: The film " Up " ( 2009 ) was made by Pixar . '
    )
    assert example["targets_pretokenized"] == b"Pixar"
    assert example["answers"].tolist() == [b"Pixar", b"by Pixar . "]


def test_a_single_answer_needs_no_list(tmp_path):
    row = {**ROW, "answers": "Pixar"}
    (example,) = examples(squad.squad(write(tmp_path / "train.jsonl", row)))
    assert example["answers"].tolist() == [b"Pixar"]


def test_the_best_answer_counts(tmp_path):
    pytest.importorskip("t5.evaluation.metrics")
    task = squad.squad(write(tmp_path / "train.jsonl", ROW, {**ROW, "answers": ["Disney"]}))
    found = examples(task)
    targets = [task.postprocess_fn("", example=e, is_target=True) for e in found]
    predictions = [task.postprocess_fn(p, example={}, is_target=False) for p in ("By Pixar", "x")]
    (metric,) = task.predict_metric_fns
    assert metric(targets, predictions) == {"em": 50.0, "f1": 50.0}


class TestTfds:
    def test_the_form_is_that_of_t5(self):
        t5_preprocessors = pytest.importorskip("t5.data.preprocessors")
        task = squad.squad(vocabulary=vocabularies.characters())
        with tfds.testing.mock_data(num_examples=3):
            raw = task.source.get_dataset("validation", shuffle=False)
            expected = list(t5_preprocessors.squad(raw).as_numpy_iterator())
            found = examples(task, "validation")
        assert len(found) == 3
        for example, t5_example in zip(found, expected, strict=True):
            assert example["inputs_pretokenized"] == t5_example["inputs"]
            assert example["targets_pretokenized"] == t5_example["targets"]
            assert example["answers"].tolist() == t5_example["answers"].tolist()

    def test_it_is_registered_under_its_name(self):
        assert set(seqio.get_mixture_or_task("squad").splits) == {"train", "validation"}

    def test_the_task_that_another_project_has_under_the_name_stays(self, caplog):
        before = seqio.get_mixture_or_task("squad")
        registration.add(squad.squad())
        registration.add(seqio.Mixture("squad", [(before, 1.0)]))
        assert seqio.get_mixture_or_task("squad") is before
        assert caplog.text.count("seqio has another task 'squad', which stays") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": []}, "line 2 has nothing under 'answers'"),
        ({"answers": ["x", 3]}, r"line 2 has answers=\['x', 3\]"),
        ({"answers": {"text": ["x"]}}, "line 2 has answers="),
        ({"context": ""}, "line 2 has nothing under 'context'"),
        ({"question": None}, "line 2 has nothing under 'question'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, change, message):
    task = squad.squad(write(tmp_path / "train.jsonl", ROW, {**ROW, **change}))
    with pytest.raises(errors.UserError, match=message):
        examples(task)


def test_real_questions_are_read(shared_data):
    task = squad.squad(str(shared_data / "squad"))
    table = task.source._table("validation")
    assert len(table["question"]) == 500
    assert table["answers"].shape[0] == 500
