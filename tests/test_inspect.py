"""`python -m convt5.inspect`: the report as text and JSON, its examples and its messages."""

import dataclasses
import json
import math
import pathlib
import sys
import types

import commands
import jax
import numpy as np
import pytest
from convt5.tasks import pretraining, text_files

from convt5 import data, inspect
from convt5.analysis import cost_report, costs, inspect_command
from convt5.errors import UserError
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import AXES, MeshConfig, Rule
from convt5.training.averaging import EMA
from convt5.training.optimizer import AdamWConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]

WAVENET = """
from __gin__ import dynamic_registration
from convt5.modeling import architecture

MODEL = @architecture.ConvT5Config()
MODEL_NAME = 'little_wavenet'
architecture.ConvT5Config.vocab_size = 256
architecture.ConvT5Config.emb_dim = 16
architecture.ConvT5Config.mlp_dim = 32
architecture.ConvT5Config.num_heads = 4
architecture.ConvT5Config.head_dim = 4
architecture.ConvT5Config.encoder = @encoder/architecture.StackConfig()
architecture.ConvT5Config.decoder = @decoder/architecture.StackConfig()
architecture.StackConfig.num_layers = 3
architecture.StackConfig.mixing = 'depthwise'
architecture.StackConfig.kernel_size = 2
architecture.StackConfig.dilation = [1, 2, 4]
encoder/architecture.StackConfig.attention_layers = [-1]
"""


@pytest.fixture
def gin_file(tmp_path) -> str:
    path = tmp_path / "little_wavenet.gin"
    path.write_text(WAVENET)
    return f"--gin_file={path}"


def as_json(capsys, *argv: str) -> dict:
    assert inspect.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def little_subject(gin_file: str, **changes) -> cost_report.Subject:
    """Returns the model of a gin file with AdamW; `changes` are of the subject or of its step."""
    step, name = inspect_command.read_step([gin_file.removeprefix("--gin_file=")], [])
    of_step = {field.name for field in dataclasses.fields(step)} & changes.keys()
    step = dataclasses.replace(
        step,
        **{"optimizer": AdamWConfig(), "mesh": None, **{n: changes.pop(n) for n in of_step}},
    )
    values = {"name": name, "encoder_length": 32, "decoder_length": 16, "batch_size": 8}
    return cost_report.Subject(step=step, **{**values, **changes})


def mesh(*sizes: int) -> dict:
    """Changes of a subject whose devices make a mesh of these sizes."""
    return {"mesh": MeshConfig(**dict(zip(AXES, sizes, strict=True))), "devices": math.prod(sizes)}


def table_rows(text: str, title: str) -> list[str]:
    """The lines of the table under a title, its head left out."""
    after = text[text.index(title) :].splitlines()[2:]
    return after[: after.index("")]


def test_layer_table_shows_receptive_fields_that_double(gin_file, capsys):
    inspect.main([gin_file])
    rows = [row.split() for row in table_rows(capsys.readouterr().out, "Layers, bottom first")]
    decoder = [row for row in rows if row[0] == "decoder"]
    assert [row[1] for row in decoder] == ["0", "1", "2"]
    assert [" ".join(row[6:9]) for row in decoder] == ["-1 .. 0", "-3 .. 0", "-7 .. 0"]
    assert [row[9] for row in decoder] == ["2", "4", "8"]
    encoder = [row for row in rows if row[0] == "encoder"]
    assert encoder[-1][2:6] == ["attention", "-", "-", "-"]
    assert "all" in encoder[-1]


def test_columns_are_aligned():
    text = cost_report.align([("name", "size"), ("a", "1,000"), ("long name", "1")])
    assert text.splitlines() == ["  name        size", "  a          1,000", "  long name      1"]


def test_json_says_the_same_to_programs(gin_file, capsys):
    report = as_json(capsys, gin_file, "--encoder_length=64", "--batch_size=16", "--devices=4")
    assert report["model"] == "little_wavenet"
    assert (report["encoder_length"], report["decoder_length"]) == (64, 114)
    assert report["receptive_field"]["decoder"] == {"left": 7, "right": 0, "size": 8}
    assert report["receptive_field"]["encoder"]["size"] is None
    assert report["training_flops_per_step"] == 16 * report["training_flops_per_example"]
    assert report["parameters"] == sum(report["parameters_by_part"].values())
    held = sum(int(np.prod(parameter["shape"])) for parameter in report["sharding"])
    assert report["parameters"] == held
    assert report["mesh"] == {"data": 4, "fsdp": 1, "sequence": 1, "tensor": 1}


def test_canon_layers_are_named_with_their_parameters(gin_file, capsys):
    settings = ("canon=AC", "canon_dilation=2")
    flags = [gin_file, *(f"--gin.architecture.StackConfig.{value}" for value in settings)]
    inspect.main(flags)
    assert ", Canon layers at AC (K=4, dilation 2, causal)" in capsys.readouterr().out
    report = as_json(capsys, *flags)
    layers = report["layers"]
    assert {layer["canon"] for layer in layers} == {"AC"}
    emb_dim = next(p for p in report["sharding"] if p["name"].endswith("norm/scale"))["shape"][0]
    assert report["parameters_by_part"]["Canon layers"] == 2 * 4 * emb_dim * len(layers)
    # Each of a layer's two reads 3 * 2 positions to the left, and three layers 7 by themselves.
    assert report["receptive_field"]["decoder"]["left"] == 7 + 3 * 2 * 6


@pytest.mark.slow
def test_memory_per_device_shrinks_where_the_mesh_splits(gin_file):
    def report(**changes):
        return cost_report.make_report(little_subject(gin_file, **changes)).memory

    one = report()
    assert report(**mesh(4, 1, 1, 1)).parameters == one.parameters
    assert report(**mesh(4, 1, 1, 1)).activations == one.activations / 4
    assert report(grad_accum_steps=2).activations == one.activations / 2
    assert report(**mesh(1, 4, 1, 1)).parameters < 0.3 * one.parameters
    assert report(**mesh(1, 4, 1, 1)).optimizer < 0.3 * one.optimizer
    assert report(**mesh(1, 4, 1, 1)).gathered == one.parameters
    assert report(**mesh(1, 1, 1, 4)).logits == one.logits / 4
    assert report(**mesh(1, 1, 4, 1)).logits == one.logits / 4
    assert report(**mesh(1, 1, 4, 1)).activations == one.activations / 4


@pytest.mark.parametrize("more", [{}, {"frozen": ["^encoder/"], "ema": EMA()}], ids=str)
def test_memory_on_one_device_is_that_of_the_closed_form(gin_file, more):
    subject = little_subject(gin_file, **more)
    memory = cost_report.make_report(subject).memory
    expected = costs.training_memory(
        subject.config,
        AdamWConfig(),
        rows=8,
        encoder_length=32,
        decoder_length=16,
        frozen=subject.step.frozen,
        averaged="ema" in more,
    )
    # The state of training also counts its steps.
    assert memory.total == pytest.approx(expected.total, rel=1e-3)
    assert memory.activations == expected.activations
    assert (memory.gradients, memory.average) == (expected.gradients, expected.average)


def test_sharding_table_joins_equal_layers(gin_file, capsys):
    inspect.main([gin_file, "--devices=8"])
    heading = "Sharding (8 devices: data=8, fsdp=1, sequence=1, tensor=1)"
    rows = table_rows(capsys.readouterr().out, heading)
    by_name = {row.split()[0]: " ".join(row.split()[1:]) for row in rows}
    assert by_name["encoder/layers/{0-2}/mlp/wi/kernel"] == "16 x 32 fsdp, tensor 16 x 32"
    assert by_name["encoder/layers/{0-1}/mixing/kernel"] == "2 x 16 -, tensor 2 x 16"
    assert "encoder/layers/2/mixing/query/kernel" in by_name
    assert next(iter(by_name)) == "token_embedder/embedding"


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([0, 1, 2], "{0-2}"), ([0, 1, 2, 5], "{0-2,5}"), ([], "")]
)
def test_layer_numbers_are_written_as_ranges(numbers, text):
    assert cost_report._ranges(numbers) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (312, "312 B"), (999.6, "1 kB"), (12_340, "12.3 kB"), (7.891e9, "7.89 GB")],
)
def test_sizes_are_written_for_people(size, text):
    assert cost_report.short_bytes(size) == text


def test_what_the_configuration_does_not_say_is_said_to_be_assumed(gin_file, capsys):
    report = as_json(capsys, gin_file, "--encoder_length=64", "--batch_size=16")
    assert report["assumed"] == ["decoder_length 114", "Adafactor"]


class ThreeRows:
    """Stands for a data iterator: one packed batch of byte-like ids, then the end."""

    vocabulary = types.SimpleNamespace(
        vocab_size=20, extra_ids=2, eos_id=1, decode=lambda ids: "".join(chr(95 + i) for i in ids)
    )

    def __init__(self):
        self._batches = iter(
            [
                {
                    "encoder_input_tokens": np.array([[2, 3, 19, 1, 4, 19], [5, 6, 19, 1, 0, 0]]),
                    "decoder_target_tokens": np.array([[19, 7, 1, 19, 8, 1], [19, 9, 1, 0, 0, 0]]),
                    "encoder_segment_ids": np.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 0, 0]]),
                    "decoder_segment_ids": np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 0, 0, 0]]),
                }
            ]
        )

    def __next__(self):
        return next(self._batches)


def test_memory_leaves_out_what_frozen_parameters_do_not_need(gin_file):
    whole = cost_report.make_report(little_subject(gin_file))
    report = cost_report.make_report(little_subject(gin_file, frozen=("^encoder/",)))
    encoder = sum(
        4 * math.prod(p.shape) for p in report.parameters if p.name.startswith("encoder/")
    )
    assert report.memory.parameters == whole.memory.parameters
    assert report.memory.gradients == whole.memory.gradients - encoder
    assert report.memory.optimizer == whole.memory.optimizer - 2 * encoder  # AdamW's two moments.
    assert report.num_trained == whole.num_trained - encoder // 4


def test_an_average_of_the_model_takes_as_much_memory_again(gin_file):
    memory = cost_report.make_report(little_subject(gin_file, ema=EMA(decay=0.5))).memory
    without = cost_report.make_report(little_subject(gin_file)).memory
    assert memory.average == memory.parameters
    assert memory.total == without.total + memory.parameters


def test_the_step_that_is_compiled_is_that_of_the_run():
    bindings = [
        "trainer.train.ema=@averaging.EMA()",
        "averaging.EMA.decay=0.99",
        "trainer.train.skip_spikes=@spikes.SkipSpikes()",
        "trainer.train.frozen=['^encoder/']",
    ]
    run, name = inspect_command.read_step(["gin/runs/quickstart.gin"], bindings)
    plan = inspect_command.make_subject(name, run, {}).plan(jax.devices()[:1])
    assert plan.abstract.ema is not None
    assert plan.abstract.spikes is not None
    assert plan.num_trained() < plan.num_parameters()


@pytest.mark.slow
def test_costs_in_closed_form_say_that_they_leave_out_what_is_frozen(capsys):
    argv = ["--gin_file=gin/runs/quickstart.gin"]
    assert inspect.main([*argv, "--gin.trainer.train.frozen=['^encoder/']"]) == 0
    said = capsys.readouterr()
    assert "frozen=['^encoder/']: closed-form FLOPs and activations" in said.err
    assert "the others are frozen" in said.out
    assert inspect.main(argv) == 0
    assert "frozen" not in capsys.readouterr().err


def test_examples_are_decoded_and_taken_out_of_packed_rows():
    data = types.SimpleNamespace(build=lambda process_index, process_count: ThreeRows())
    examples = inspect_command.decode_examples(data, 5)
    assert [(e["source"], e["target"]) for e in examples] == [
        ("ab<1>", "<1>f"),
        ("c<1>", "<1>g"),
        ("de<1>", "<1>h"),
    ]
    assert examples[1]["source_ids"] == [4, 19]
    assert len(inspect_command.decode_examples(data, 1)) == 1


@pytest.mark.slow
def test_run_gives_lengths_batch_model_and_examples(capsys):
    report = as_json(
        capsys,
        "--gin_file=gin/runs/quickstart.gin",
        "--gin_file=gin/models/wavenet_tiny.gin",
        "--gin.data.DataConfig.encoder_length=64",
        "--gin.data.DataConfig.decoder_length=32",
        "--examples=2",
        "--devices=2",
    )
    assert report["model"] == "wavenet_tiny"
    assert report["assumed"] == []
    assert (report["encoder_length"], report["decoder_length"]) == (64, 32)
    assert len(report["examples"]) == 2
    for example in report["examples"]:
        assert "<1>" in example["source"]
        assert example["target"].startswith("<1>")
        assert len(example["source_ids"]) <= 64


def test_run_directory_that_a_run_requires_need_not_be_given(tmp_path):
    run = tmp_path / "run.gin"
    text = (ROOT / "gin" / "runs" / "quickstart.gin").read_text()
    run.write_text(f"{text}\nRUN_DIR = %gin.REQUIRED\n")
    step, name = inspect_command.read_step([str(run)], [])
    assert (name, step.run_dir) == ("dynamic_tiny", "unused")
    step, _ = inspect_command.read_step([str(run)], ["RUN_DIR=mine"])
    assert step.run_dir == "mine"


def test_a_run_tells_what_its_data_is_or_why_not(capsys, tmp_path):
    argv = ["--gin_file=gin/finetune/trec6.gin", "--gin_file=gin/models/dynamic_tiny.gin"]
    argv += ["--gin.INIT_FROM=unused", "--gin.vocabularies.named.source=bytes"]
    rows = '{"text": "How tall is it ?", "label": "number"}\n' * 3
    (tmp_path / "train.jsonl").write_text(rows)
    argv.append(f"--gin.DATA={tmp_path}")
    assert inspect.main(argv) == 0
    block = capsys.readouterr().out.split("\n\n")[-1]
    assert "trec6: 2 documents" in block  # One of three is held out.
    assert "cut: 0.0% of inputs" in block
    (tmp_path / "train.jsonl").write_text('{"label": "number"}\n' * 3)
    assert inspect.main([*argv, "--json"]) == 0
    assert "not measured: file" in json.loads(capsys.readouterr().out)["data"]


@pytest.mark.slow
def test_much_text_is_not_read_to_inspect_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a line of text\n" * 30)
    task = pretraining.text_span_corruption(str(tmp_path / "text.txt"))
    config = data.DataConfig(mixture=task, batch_size=2, encoder_length=32, decoder_length=12)
    monkeypatch.setattr(text_files, "_FEW_BYTES", 100)
    assert "text was not read before" in inspect_command._describe_data(config, is_read=False)
    assert not (tmp_path / "cache").exists()
    assert "text_span_corruption: " in inspect_command._describe_data(config, is_read=True)
    assert "text_span_corruption: " in inspect_command._describe_data(config, is_read=False)


def test_examples_without_data_say_what_to_give(gin_file):
    with pytest.raises(UserError, match=r"examples=2 needs training data.*quickstart\.gin"):
        inspect.main([gin_file, "--examples=2"])


def test_mesh_that_does_not_divide_heads_is_refused(gin_file):
    with pytest.raises(UserError, match="num_heads=4 must be a multiple of tensor=8"):
        inspect.main([gin_file, "--devices=8", "--gin.sharding.MeshConfig.tensor=8"])


def test_model_alone_takes_optimizer_and_mesh_from_the_command_line(gin_file):
    step, _ = inspect_command.read_step(
        [gin_file.removeprefix("--gin_file=")],
        ["OPTIMIZER=@optimizer.AdamWConfig()", "sharding.MeshConfig.fsdp=4"],
    )
    assert step.optimizer == AdamWConfig()
    assert step.mesh.fsdp == 4
    subject = inspect_command.make_subject("little", step, {"devices": 8})
    assert subject.mesh == (2, 4, 1, 1)
    assert subject.assumed[-1] == "AdamW"


def test_rule_that_matches_nothing_is_refused(gin_file):
    subject = little_subject(gin_file, sharding_rules=[Rule("no_such_parameter"), *TEXT_RULES])
    with pytest.raises(UserError, match="no_such_parameter"):
        cost_report.make_report(subject)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--encoder_length=0"], "--encoder_length=0 must be at least 1"),
        (["--devices=-1"], "--devices=-1 must be at least 1"),
        (["--devices=4", "--topology=v5e:2x2"], "both set the number of devices"),
        (["--gradients_only"], "needs --topology"),
        (["--topology=v9:2x2"], "'v9:2x2' is not known.*v5e:2x2"),
        (["--topology=v5e:3x3"], "not a slice of v5e"),
        (["--example=3"], "Did you mean"),
        (["--gin.architecture.ConvT5Config.emb_dims=3"], "emb_dim"),
    ],
)
def test_wrong_arguments_are_explained(gin_file, argv, message):
    with pytest.raises(UserError, match=message):
        inspect.main([gin_file, *argv])


def test_rows_longer_than_learned_positions_are_refused(gin_file):
    learned = [
        "--gin.architecture.ConvT5Config.positions=learned",
        "--gin.architecture.ConvT5Config.max_positions=256",
    ]
    with pytest.raises(UserError, match="encoder_length=512 is longer than max_positions=256"):
        inspect.main([gin_file, *learned])
    assert inspect.main([gin_file, *learned, "--encoder_length=256", "--batch_size=512"]) == 0


def test_learned_positions_behind_a_stem_are_those_of_the_shortened_rows():
    learned = ["architecture.ConvT5Config.positions=learned"]
    learned += ["architecture.ConvT5Config.max_positions=16"]
    step, name = inspect_command.read_step(["gin/models/stem_dynamic_tiny.gin"], learned)
    flags = {"decoder_length": 16, "batch_size": 2, "devices": 1}
    stride = step.model.stem_stride
    assert stride > 1
    subject = inspect_command.make_subject(name, step, {**flags, "encoder_length": 16 * stride})
    assert subject.encoder_length == 16 * stride
    message = f"encoder_length={16 * stride + 1} is longer than max_positions=16, .*{stride} tokens"
    with pytest.raises(UserError, match=message):
        inspect_command.make_subject(name, step, {**flags, "encoder_length": 16 * stride + 1})


@pytest.mark.slow
def test_command_runs_without_tensorflow_and_exits_with_zero(gin_file):
    refuse = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('tensorflow', 'seqio', 't5', 'tensorflow_datasets'):\n"
        "            raise ImportError('refused: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import runpy\n"
        f"sys.argv = ['inspect', {gin_file!r}]\n"
        "runpy.run_module('convt5.inspect', run_name='__main__')\n"
    )
    done = commands.run([sys.executable, "-c", refuse], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Model little_wavenet" in done.stdout


VIT = "gin/models/vit_c_tiny.gin"


@pytest.mark.slow
def test_a_model_of_few_ids_is_measured(gin_file, capsys):
    few = "--gin.architecture.ConvT5Config.vocab_size=2"
    lengths = ("--encoder_length=4", "--decoder_length=4", "--batch_size=8")
    stack = "--gin.architecture.StackConfig"
    layers = (f"{stack}.num_layers=2", f"{stack}.dilation=[1, 2]")
    report = as_json(capsys, gin_file, "--measure", few, *layers, *lengths)
    assert len(report["measured_receptive_field"]) == len(report["layers"])


@pytest.mark.parametrize("flag", ["--batch_size=4", "--devices=3", "--measure"])
def test_flags_of_text_models_are_refused_for_a_vision_model(flag):
    message = f"{flag.partition('=')[0]} is for text models, and vit_c_tiny is a vision model"
    with pytest.raises(UserError, match=message):
        inspect.main([f"--gin_file={VIT}", flag])


def test_a_vision_model_is_no_pair_of_a_text_model(gin_file):
    with pytest.raises(UserError, match="ViTConfig is not a ConvT5Config"):
        inspect.main([gin_file, f"--pair_with={VIT}"])


@pytest.mark.parametrize(
    ("own", "other", "flag"),
    [("text", VIT, "--measure"), ("text", VIT, "--prove"), (VIT, "text", "--prove")],
)
def test_a_checkpoint_of_the_other_kind_of_model_is_refused(
    gin_file, monkeypatch, own, other, flag
):
    text = gin_file.removeprefix("--gin_file=")
    own, other = (text if name == "text" else name for name in (own, other))
    model = types.SimpleNamespace(config=inspect_command.read_step([other], [])[0].model)
    monkeypatch.setattr("convt5.interchange.loading.load_model", lambda _: model)
    with pytest.raises(UserError, match=r"--checkpoint=runs/other holds a .* gin files describe"):
        inspect.main([f"--gin_file={own}", flag, "--checkpoint=runs/other"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/x.png", "cannot be written; name a file in a folder that can"),
        ("x.foo", r"must end in one of .*\.png"),
    ],
)
def test_where_to_draw_is_checked_before_anything_is_measured(
    gin_file, tmp_path, monkeypatch, name, message
):
    monkeypatch.setattr(inspect_command, "_measure", lambda *_: pytest.fail("measured already"))
    with pytest.raises(UserError, match=message):
        inspect.main([gin_file, "--measure", f"--plot={tmp_path}/{name}"])


def test_widths_of_equal_cost_are_shown(capsys):
    flags = ["--gin_file=gin/models/dynamic_tiny.gin", "--pair_with=gin/models/t5_tiny.gin"]
    assert inspect.main([*flags, "--json"]) == 0
    paired = json.loads(capsys.readouterr().out)["equal_cost"]
    for by in ("parameters", "flops"):
        assert paired[by]["cost"] == pytest.approx(paired[by]["wanted"], rel=0.01)
    assert inspect.main([*flags, "--multiple=4"]) == 0
    assert "Widths of dynamic_tiny at the cost of t5_tiny" in capsys.readouterr().out
    with pytest.raises(UserError, match="--multiple=4 is for --pair_with"):
        inspect.main([flags[0], "--multiple=4"])
