"""What a user can get wrong ends in one message: the setting, its value, the rule, the remedy."""

import os
import pathlib
import sys
import types

import commands
import pytest

from convt5 import errors, inspect, train
from convt5.training import data_checks

ROOT = pathlib.Path(__file__).resolve().parents[1]

RUN = """
include 'gin/models/dynamic_tiny.gin'
from __gin__ import dynamic_registration
import rows
from convt5.modeling import architecture
from convt5.training import losses
from convt5.training import optimizer
from convt5.training import schedule
from convt5.modeling import sharding
from convt5.training import trainer

architecture.ConvT5Config.vocab_size = 384
trainer.train.run_dir = %RUN_DIR
RUN_DIR = %gin.REQUIRED
trainer.train.model = %MODEL
trainer.train.loss = @losses.TextLoss()
trainer.train.optimizer = @optimizer.AdafactorConfig()
trainer.train.schedule = @schedule.InverseSqrt()
trainer.train.mesh = @sharding.MeshConfig()
trainer.train.num_steps = %NUM_STEPS
NUM_STEPS = 2
trainer.train.train_data = @rows.Rows()
"""

ROWS = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Rows:
    batch_size: int = 8
    encoder_length: int = 16
    decoder_length: int = 16
    num_epochs: int | None = None
"""


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory):
    """Holds the module `rows`, which gin registers once for the whole process."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.py").write_text(ROWS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def run_file(rows_folder, tmp_path, monkeypatch) -> str:
    """A run on data that needs no TensorFlow."""
    (tmp_path / "run.gin").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return "run.gin"


def fault(*argv: str) -> str:
    """Returns the message with which `train --dry_run` refuses."""
    with pytest.raises(errors.UserError) as caught:
        train.main([*argv, "--dry_run"])
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_complete_configuration_passes_the_dry_run(run_file, capsys):
    assert train.main([f"--gin_file={run_file}", "--gin.RUN_DIR=/nowhere", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "nothing was trained" in printed
    assert "data=8" in printed
    assert "/nowhere" in printed
    assert not pathlib.Path("/nowhere").exists()


@pytest.mark.parametrize("command", [train, inspect], ids=["train", "inspect"])
def test_settings_that_no_layer_uses_are_told(command, run_file, capsys):
    bindings = [
        "architecture.StackConfig.mixing='depthwise'",
        "architecture.StackConfig.num_kernels=None",
        "encoder/architecture.StackConfig.tap_dropout_rate=0.1",
        "RUN_DIR=/nowhere",
    ]
    dry = ["--dry_run"] if command is train else []
    argv = [f"--gin_file={run_file}", *(f"--gin.{b}" for b in bindings), *dry]
    assert command.main(argv) == 0
    said = "".join(capsys.readouterr())
    assert "encoder.tap_dropout_rate=0.1 has no effect: no layer there has the mixing " in said
    assert "decoder.tap_dropout_rate" not in said


def test_missing_settings_are_listed_together(run_file):
    model = "gin/models/dynamic_tiny.gin"
    message = fault(f"--gin_file={model}")
    for name in ("run_dir", "loss", "train_data", "optimizer", "schedule", "num_steps"):
        assert f"--gin.trainer.train.{name}=VALUE" in message
    assert "--gin.RUN_DIR=VALUE" in fault(f"--gin_file={run_file}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["NUM_STEP=3"], ["NUM_STEP=3", "not used", "NUM_STEPS"]),
        (["architecture.ConvT5Config.emb_dims=3"], ["no parameter 'emb_dims'", "emb_dim"]),
        (["architecture.ConvT5Confi.emb_dim=3"], ["no 'ConvT5Confi'", "ConvT5Config"]),
        (["NUM_STEPS=many"], ["--gin.NUM_STEPS", "'many'", "must be an integer"]),
        (["NUM_STEPS=0"], ["num_steps=0", "at least 1"]),
        # The mesh, on the eight devices of the tests.
        (["sharding.MeshConfig.data=3"], ["data=3", "8"]),
        (["sharding.MeshConfig.tensor=3"], ["tensor=3", "8"]),
        (["rows.Rows.batch_size=12"], ["batch_size=12", "8"]),
        (
            ["sharding.MeshConfig.tensor=8", "architecture.ConvT5Config.num_heads=4"],
            ["num_heads=4", "8"],
        ),
        (["trainer.train.grad_accum_steps=3"], ["grad_accum_steps", "batch_size=8", "24"]),
        # Layers.
        (["architecture.StackConfig.kernel_size=0"], ["kernel_size=0", "at least 1"]),
        (["architecture.StackConfig.dilation=-2"], ["dilation=-2", "at least 1"]),
        (["architecture.StackConfig.kernel_size=[3, 5]"], ["kernel_size lists 2", "num_layers=4"]),
        (["encoder/architecture.StackConfig.dilation=[1]"], ["encoder.dilation lists 1"]),
        (["architecture.StackConfig.mixing=dinamic"], ["'dinamic'", "dynamic"]),
        (["architecture.StackConfig.num_kernels=3"], ["num_kernels=3", "emb_dim=128"]),
        (["decoder/architecture.StackConfig.padding=CENTERED"], ["decoder", "causal"]),
        (["encoder/architecture.StackConfig.attention_layers=[4]"], ["attention_layers", "4"]),
        # Positions.
        (
            [
                "architecture.ConvT5Config.positions=learned",
                "architecture.ConvT5Config.max_positions=8",
            ],
            ["encoder_length=16", "max_positions=8"],
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_rule(run_file, flags, words):
    message = fault(
        f"--gin_file={run_file}", "--gin.RUN_DIR=/nowhere", *(f"--gin.{flag}" for flag in flags)
    )
    assert all(word in message for word in words), message


def test_several_faults_of_a_model_are_reported_together(run_file):
    message = fault(
        f"--gin_file={run_file}",
        "--gin.RUN_DIR=/nowhere",
        "--gin.architecture.ConvT5Config.dropout_rate=1.5",
        "--gin.encoder/architecture.StackConfig.kernel_size=0",
    )
    assert "dropout_rate=1.5" in message
    assert "kernel_size=0" in message


def test_no_setting_of_a_replaced_model_remains(run_file, capsys):
    # num_kernels of the dynamic model would be an error in a depthwise one.
    flags = [f"--gin_file={run_file}", "--gin_file=gin/models/depthwise_tiny.gin"]
    assert train.main([*flags, "--gin.RUN_DIR=/nowhere", "--dry_run"]) == 0
    assert "1,763,072" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_prints_one_message_and_no_traceback(run_file, rows_folder, tmp_path):
    done = commands.run(
        [
            sys.executable,
            "-m",
            "convt5.train",
            f"--gin_file={run_file}",
            "--gin.RUN_DIR=x",
            "--gin.architecture.StackConfig.kernel_size=0",
        ],
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{rows_folder}"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ConvT5Config")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


QUICKSTART = ["--gin_file=gin/runs/quickstart.gin"]
TEXT = ["--gin_file=gin/runs/pretrain_text.gin", "--gin.RUN_DIR=/nowhere"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            [*QUICKSTART, "--gin.data.DataConfig.mixture=pydoc_span_coruption"],
            ["'pydoc_span_coruption'", "Did you mean pydoc_span_corruption"],
        ),
        ([*QUICKSTART, "--gin.data.DataConfig.mixture=7"], ["mixture=7"]),
        (
            [*QUICKSTART, "--gin.train/data.DataConfig.split=trian"],
            ["split='trian'", "Did you mean train?"],
        ),
        (
            [*TEXT, "--gin.TEXT=nothing/*.txt", "--gin.VOCABULARY=none.model"],
            ["none.model", ".model"],
        ),
        (TEXT, ["2 required values", "--gin.TEXT=VALUE", "--gin.VOCABULARY=VALUE"]),
    ],
)
def test_wrong_data_is_named_with_its_value_and_rule(argv, words):
    message = fault(*argv)
    assert all(word in message for word in words), message


def test_text_that_matches_nothing_is_named(tmp_path):
    binding = "--gin.pretraining.text_span_corruption.vocabulary=@vocabularies.characters()"
    text = tmp_path / "*.txt"
    message = fault(*TEXT, f"--gin.TEXT={text}", "--gin.VOCABULARY=unused", binding)
    assert str(text) in message
    assert "match" in message


def test_more_token_ids_than_rows_stop_the_run_before_it_begins(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(errors.UserError, match=r"4100 ids.*vocab_size=256.*at least 4100"):
        train.main(
            [
                *QUICKSTART,
                f"--gin.RUN_DIR={folder}",
                "--gin.architecture.ConvT5Config.vocab_size=256",
            ]
        )
    assert not folder.exists()


def test_the_dry_run_compares_the_vocabulary_too():
    message = fault(*QUICKSTART, "--gin.architecture.ConvT5Config.vocab_size=256")
    assert "4100 ids" in message


def test_the_dry_run_finds_the_tasks_of_evaluations(tmp_path):
    gin_file = tmp_path / "run.gin"
    gin_file.write_text(
        "include 'gin/runs/quickstart.gin'\n"
        "from __gin__ import dynamic_registration\n"
        "from convt5 import evaluation\n"
        "from convt5.training import trainer\n"
        "trainer.train.task_evals = [@evaluation.TaskEval()]\n"
        "evaluation.TaskEval.task = 'pydoc_span_corruptoin'\n"
        "evaluation.TaskEval.max_input_length = 32\n"
        "evaluation.TaskEval.max_length = 8\n"
    )
    assert "pydoc_span_corruption" in fault(f"--gin_file={gin_file}")


@pytest.mark.parametrize("half", ["train_data", "eval_data"])
def test_the_vocabulary_of_rows_from_a_cache_is_compared_too(half):
    rows, model = types.SimpleNamespace(vocab_size=359), types.SimpleNamespace(vocab_size=256)
    with pytest.raises(errors.UserError, match=rf"of {half} has 359 ids.*vocab_size=256"):
        data_checks.check_vocabulary(model, {"train_data": None, half: rows})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "loss=@convt5.training.losses.TextLoss()",
            "loss=TextLoss is one of text, and model=ViTConfig",
        ),
        ("report=@samples.SpanSamples()", "report=SpanSamples shows text, and model=ViTConfig"),
    ],
)
def test_what_is_for_text_is_refused_with_a_model_of_images(setting, message):
    file = "--gin_file=gin/runs/digits.gin"
    assert message in fault(file, f"--gin.trainer.train.{setting}")


def test_an_unwritable_run_directory_stops_the_run_before_it_compiles(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UserError, match=r"run_dir=.*file/run.*choose another run_dir"):
        train.main([*QUICKSTART, f"--gin.RUN_DIR={tmp_path}/file/run"])


@pytest.mark.parametrize("kind", ["characters", "sentencepiece"])
def test_a_number_of_sentinels_below_none_is_named(tmp_path, kind):
    (tmp_path / "a.txt").write_text("text\n")
    message = fault(
        *TEXT,
        f"--gin.TEXT={tmp_path}/a.txt",
        "--gin.VOCABULARY=unused",
        f"--gin.pretraining.text_span_corruption.vocabulary=@vocabularies.{kind}()",
        f"--gin.vocabularies.{kind}.num_sentinels=-3",
    )
    assert "num_sentinels=-3 must be" in message
