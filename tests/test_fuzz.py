"""Whatever a user gets wrong ends in success or one message: no traceback, no hang, no debris."""

import contextlib
import importlib
import shutil

import fuzzing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convt5 import errors

pytest.importorskip("seqio")

SLOW_CASES, QUICK_CASES = 80, 8  # Of each of the commands.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with checkpoints."""
    import tiny_reviews
    import tiny_run

    folder = tmp_path_factory.mktemp("trained") / "run"
    tiny_run.write_run(folder, steps=(10,), task=tiny_reviews.NAME)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, where no command goes on to compile, time or tokenise."""
    from convt5 import cache
    from convt5.benchmarks import machine

    def accept(*_, **__):
        raise fuzzing.Accepted

    monkeypatch.setattr(machine, "describe", accept)
    monkeypatch.setattr(cache, "_write", accept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def emptied(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check(command, argv, files, folder):
    emptied(folder)
    for name, text in files.items():
        with contextlib.suppress(UnicodeEncodeError):
            (folder / name).write_text(text, errors="surrogateescape")
    told = fuzzing.outcome(command, argv)
    assert told in ("success", "error"), told
    if command in fuzzing.DRY or told == "error":
        left = {path.name for path in folder.iterdir()} - files.keys()
        assert not left


RESUME, DIGITS = "gin/runs/resume_check.gin", "gin/runs/digits.gin"


@pytest.mark.parametrize(
    ("command", "file", "binding", "words"),
    [
        # What the search has found.
        ("train", DIGITS, "MODEL=1000000000000", "model=1000000000000 must be a reference"),
        ("train", DIGITS, "trainer.train.optimizer=[]", "optimizer=[] must be a reference"),
        ("train", DIGITS, "trainer.train.train_data=x", "train_data='x' must be a reference"),
        ("train", DIGITS, "trainer.train.schedule=0.1", "schedule=0.1 must be a reference"),
        ("train", RESUME, "trainer.train.seed=" + "9" * 40, "must be an integer of 64 bits"),
        ("train", RESUME, "architecture.StackConfig.num_layers=10000000", "at most 1000"),
        ("train", DIGITS, "architecture.ViTConfig.num_layers=10000000", "at most 1000"),
        (
            "train",
            RESUME,
            "architecture.StackConfig.num_kernels=@architecture.StackConfig()",
            "refers to itself",
        ),
        ("train", RESUME, "optimizer.AdafactorConfig.epsilon=1e400", "must be a finite number"),
        ("cache", RESUME, "NUM_STEPS=1e400", "must be a finite number"),
        (
            "cache",
            RESUME,
            "NUM_STEPS=" + "9" * 400,
            r"NUM_STEPS=9{60}\.\.\. must be a finite number",
        ),
        (
            "train",
            RESUME,
            "schedule.InverseSqrt.warmup_steps=@optimizer.AdamWConfig()",
            "must be an integer",
        ),
        ("train", "gin/runs/quickstart.gin", "MODEL_NAME=0.5", "must be a list of text"),
        ("train", RESUME, "RUN_DIR=%RUN_DIR", "refers to itself"),
    ],
)
def test_mistakes_that_once_ended_in_a_traceback(command, file, binding, words, place):
    argv = [f"--gin_file={file}", f"--gin.{binding}"]
    argv += ["--dry_run"] if command == "train" else ["--output_dir=out"]
    with pytest.raises(errors.UserError, match=words.replace("[", r"\[")):
        importlib.import_module(f"convt5.{command}").main(argv)
    assert not list(place.iterdir())


@pytest.mark.parametrize("wrong", ["--gin_file=no.gin", "--t5x="])
def test_a_benchmark_that_is_wrong_leaves_no_folder(wrong, place):
    check("bench", ["--gin_file=gin/models/t5_tiny.gin", wrong], {}, place)


def fuzz(command, place, trained, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(st.data())
    def search(data):
        argv, files = data.draw(fuzzing.arguments(command, str(trained)))
        check(command, argv, files, place)

    search()


@pytest.mark.parametrize("command", fuzzing.COMMANDS)
def test_a_few_mistakes_end_in_one_message(command, place, trained):
    fuzz(command, place, trained, QUICK_CASES)


@pytest.mark.nightly
@pytest.mark.parametrize("command", fuzzing.COMMANDS)
def test_many_mistakes_end_in_one_message(command, place, trained):
    fuzz(command, place, trained, SLOW_CASES)
