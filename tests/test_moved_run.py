"""A run is whole by itself: moved, its parent and its data gone, in another working directory."""

import json
import shutil

import pytest
import tiny_run
from convt5.tasks import vocabularies

import convt5
from convt5 import convert, errors, infer, inspect, train
from convt5 import eval as convt5_eval
from convt5.checkpoints.reading import steps_in
from convt5.text import task_format, vocabulary_files
from convt5.text.vocabulary_files import KeptText

pytestmark = pytest.mark.slow

ROWS = [{"text": "good", "label": "positive"}, {"text": "bad", "label": "negative"}] * 4
GIN = """
from convt5 import evaluation
from convt5.interchange import initialization
from convt5.tasks import classification
from convt5.tasks import vocabularies
DATA = 'data'
INIT_FROM = %gin.REQUIRED
classification.paper_task.name = 'sst2'
classification.paper_task.path = %DATA
classification.paper_task.vocabulary = @vocabularies.named()
rank/classification.paper_task.rank = True
vocabularies.named.source = %INIT_FROM
trainer.train.init_from = @initialization.InitFrom()
initialization.InitFrom.path = %INIT_FROM
evaluation.EvalConfig.tasks = [@classification.paper_task(), @rank/classification.paper_task()]
"""


def write_data(folder):
    folder.mkdir(parents=True)
    for name in ("train", "dev"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A fine-tuned run in another folder than it was made in, and its answer there."""
    start = tmp_path_factory.mktemp("start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(start)
        write_data(start / "data")
        tiny_run.write_run(start / "parent", steps=(10,), task="tiny_moved")
        kept = vocabulary_files.of(vocabularies.characters())
        vocabulary_files.write(start / "parent" / "vocabulary", KeptText(kept, kept))
        settings = tiny_run.GIN.format(
            vocab=384, run_dir="runs/tuned", task="sst2", encoder_length=40, decoder_length=10
        )
        settings = settings.replace("'sst2'", "@classification.paper_task()") + GIN
        (start / "tuned.gin").write_text(settings)
        argv = ["--gin_file=tuned.gin", "--gin.INIT_FROM=parent", "--gin.trainer.train.num_steps=2"]
        assert train.main([*argv, "--gin.data.DataConfig.batch_size=8"]) == 0
        answers = convt5.load_predictor("runs/tuned").predict(["good", "bad"])
    moved = tmp_path_factory.mktemp("elsewhere") / "moved"
    shutil.move(start / "runs" / "tuned", moved)
    shutil.rmtree(start)
    return moved, answers


@pytest.fixture
def moved(made, tmp_path, monkeypatch):
    """A copy of the run, in a working directory that has nothing."""
    run = shutil.copytree(made[0], tmp_path / "copy")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return run


def test_it_answers_as_before(made, moved, tmp_path, capsys):
    assert convt5.load_predictor(moved).predict(["good", "bad"]) == made[1]
    (tmp_path / "in.txt").write_text("good\nbad\n")
    capsys.readouterr()
    assert infer.main([f"--checkpoint={moved}", f"--input={tmp_path / 'in.txt'}"]) == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [r["label"] for r in records] == [p.label for p in made[1]]
    assert "inputs are written as 'sst2 sentence: {text}'" in captured.err
    assert "left out" not in captured.err
    assert task_format.load(moved) == task_format.load(moved / "checkpoints" / "2")


def test_what_is_made_of_it_is_asked_alike(made, moved, tmp_path):
    export = tmp_path / "export"
    argv = [f"--checkpoint={moved}", f"--output_dir={export}", "--to=safetensors"]
    assert convert.main(argv) == 0
    lengths = {"max_input_length": 40, "max_length": 10}
    found = convt5.load_predictor(export, **lengths).predict(["good", "bad"])
    assert [p.label for p in found] == [p.label for p in made[1]]


def test_its_data_is_all_that_an_evaluation_needs(moved, tmp_path, capsys):
    argv = [f"--checkpoint={moved}", "--split=validation"]
    with pytest.raises(
        errors.UserError, match=r"data of the run .*copy cannot be read: .*gin.DATA"
    ):
        convt5_eval.main(argv)
    write_data(tmp_path / "found")
    assert convt5_eval.main([*argv, f"--gin.DATA={tmp_path / 'found'}"]) == 0
    assert "8 examples" in capsys.readouterr().out
    tiny_run.add_task("tiny_moved")
    assert convt5_eval.main([*argv, "--task=tiny_moved", "--max_length=10"]) == 0


def test_it_is_inspected_without_its_data(moved, capsys):
    assert inspect.main([f"--gin_file={moved / 'config.gin'}", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["encoder_length"] == 40
    assert "the run's data is left out" in captured.err


def test_it_goes_on_where_it_lies(moved, tmp_path, capsys):
    argv = [f"--gin_file={moved / 'config.gin'}"]
    assert train.main(argv) == 0  # It is complete, and needs nothing.
    assert "2 steps done" in capsys.readouterr().out
    more = [*argv, "--gin.trainer.train.num_steps=3"]
    with pytest.raises(errors.UserError, match=r"data of the run .*copy cannot be read"):
        train.main(more)
    write_data(tmp_path / "found")
    more.append(f"--gin.DATA={tmp_path / 'found'}")
    assert train.main([*more, "--dry_run"]) == 0
    assert train.main(more) == 0
    captured = capsys.readouterr()
    assert "it names 'runs/tuned'" in captured.err
    # Of the three steps, of which two were made before.
    assert "read in training\n  sst2: 24 examples; cut: 0 (0.0%) of inputs" in captured.err
    assert steps_in(moved / "checkpoints")[-1] == 3
    assert not list((tmp_path / "cwd").iterdir())


def test_a_run_directory_that_is_named_wins(moved, tmp_path):
    argv = [
        f"--gin_file={moved / 'config.gin'}",
        f"--gin.trainer.train.run_dir={tmp_path / 'other'}",
    ]
    with pytest.raises(errors.UserError, match=r"matches no file|'parent' is not there"):
        train.main(argv)
    assert not (tmp_path / "other").exists()
