"""Metrics of a run are the same, whether its model computes beside the task or elsewhere."""

import json
import pathlib

import pytest
import remote_evaluation
import tiny_run

import convt5
from convt5 import errors

ROWS = {
    "sst2": [{"text": "good", "label": "positive"}, {"text": "so bad", "label": "negative"}],
    "cogs": [{"text": "A cat ran .", "target": "cat ( x )", "category": "a"}],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tiny_run.write_run(tmp_path_factory.mktemp("run"), task="tiny_reviews")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sst2", "cogs"])
def test_metrics_are_those_of_a_model_beside_the_task(task, run_dir, tmp_path, capsys, monkeypatch):
    """One task ranks labels, the other generates."""
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    settings = [
        f"--gin_file=gin/finetune/{task}.gin",
        f"--file={tmp_path}/{task}.json",
        *(f"--gin.{name}={value}" for name, value in {"RUN_DIR": "none", "DATA": tmp_path}.items()),
        *("--gin.INIT_FROM=bytes", "--gin.evaluation.TaskEval.max_length=16"),
    ]
    asked = []
    make = remote_evaluation.evaluator
    monkeypatch.setattr(
        remote_evaluation, "evaluator", lambda *given: asked.append(make(*given)) or asked[-1]
    )
    remote_evaluation.main(["ask", *settings])
    answers = tmp_path / "answers.jsonl"
    remote_evaluation.main(
        ["answer", f"--file={tmp_path}/{task}.json", f"--output={answers}", str(run_dir)]
    )
    with answers.open("a") as file:
        file.write('{"run": "trained by runs_together.py", "loss": [1.0]}\n')
    capsys.readouterr()
    remote_evaluation.main(["measure", *settings, f"--answers={answers}"])
    measured = json.loads(capsys.readouterr().out)
    beside = asked[0].evaluate(asked[0].predictor(convt5.load_model(run_dir))).metrics
    assert (measured.pop("run"), measured.pop("split")) == (pathlib.Path(run_dir).name, "test")
    assert measured == pytest.approx(beside, rel=1e-6)


def test_answers_that_stand_in_their_input_are_counted(tmp_path, capsys):
    asked = {"sources": [[5, 6, 7, 1], [5, 7, 8, 1], [9, 9, 1]], "vocabulary": [10, 1]}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    answers = {"run": "a", "file": "asked.json", "tokens": [[6, 7, 1], [5, 8, 1], []]}
    lines = [answers, answers | {"file": "others.json"}, {"run": "a", "loss": [1.0]}]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = [f"--file={tmp_path}/asked.json", f"--answers={tmp_path}/answers.jsonl"]
    remote_evaluation.main(["copied", *files])
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "run": "a",
        "answers": 3,
        "its_input": pytest.approx(100 / 3),
        "another_input": 0,
    }


@pytest.mark.parametrize("command", [["answer", "--output=b", "run"], ["copied", "--answers=b"]])
@pytest.mark.parametrize("flag", ["--gin.A=1", "--steps=2"])
def test_wrong_flags_are_told(command, flag):
    with pytest.raises(errors.UserError, match="is no flag of this command"):
        remote_evaluation.main([*command, "--file=a", flag])
