"""Every file of gin/ describes something that can be built, of the size that its header states."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import gin
import jax
import numpy as np
import pytest
from convt5.tasks import vocabularies  # pyright: ignore[reportMissingImports]
from quick import quick

from convt5 import train
from convt5.analysis import costs
from convt5.configuration import gin_config
from convt5.data import cached_data
from convt5.modeling.architecture import ConvT5Config
from convt5.training import trainer
from convt5.training.train_state import parameters

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("gin/models", "gin/models/released")
    for path in (ROOT / folder).glob("*.gin")
)
VARIANTS = (
    *("t5", "depthwise", "lightweight", "dynamic", "dilated", "wavenet", "hybrid", "long"),
    *("t5_canon", "t5_canon_nope", "dynamic_canon"),
)
SIZES = ("tiny", "small", "base", "large")


BYTES = "pretraining.text_span_corruption.vocabulary=@vocabularies.characters()"


def gin_files_of(name: str) -> str:
    """The text of a file and of the runs that it includes."""
    text = (ROOT / name).read_text()
    included = re.findall(r"^include '(gin/(?:runs|finetune)/.*)'$", text, re.MULTILINE)
    return "\n".join([text, *map(gin_files_of, included)])


def model(name: str, *bindings: str):
    return gin_config.load([name], bindings, roots=["%MODEL"]).macro("MODEL")


@functools.cache
def num_parameters(name: str) -> int:
    config = model(name)
    if isinstance(config, ConvT5Config):
        # `test_costs` compares these shapes with those of whole models.
        return costs.num_parameters(costs.parameter_shapes(config))
    shapes = parameters(jax.eval_shape(config.build, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_comes_in_every_size(variant, size):
    assert f"gin/models/{variant}_{size}.gin" in MODELS


# Of models with Canon layers, which are others with as many parameters more, the tiny ones.
EACH_COMMIT = [name for name in MODELS if "canon" not in name or "tiny" in name]
SOME_SLOWLY = [
    param if param.marks or "tiny" in name else pytest.param(name, marks=pytest.mark.slow)
    for name, param in zip(MODELS, quick(MODELS, chosen=EACH_COMMIT), strict=True)
]


@pytest.mark.parametrize("name", SOME_SLOWLY)
def test_a_model_file_builds_and_states_its_parameters(name):
    stated = re.match(r"# .*: ([\d,]+) parameters\.", (ROOT / name).read_text())
    assert stated is not None
    assert f"{num_parameters(name):,}" == stated[1]
    assert not getattr(model(name), "unused", list)()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_file_is_named_as_its_macro_says(name):
    stem = name.removeprefix("gin/models/").removesuffix(".gin").replace("/", "_")
    assert gin_config.load([name], roots=["%MODEL"]).macro("MODEL_NAME") == stem


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # T5 1.0 with vocabulary 32128, and the released models, as counted in the original.
        ("t5_small", 60_506_624),
        ("t5_base", 222_903_552),
        ("t5_large", 737_668_096),
        ("t5_11b", 11_307_321_344),
        ("released/lconv_small", 60_854_272),
        ("released/lconv_base", 223_554_048),
        ("released/lconv_large", 738_879_488),
        ("released/dconv_small", 89_165_824),
        ("released/dconv_base", 350_956_032),
        ("released/dconv_large", 1_191_864_320),
    ],
)
def test_parameters_are_as_many_as_in_the_original(name, count):
    assert num_parameters(f"gin/models/{name}.gin") == count


@pytest.mark.parametrize("name", ["gin/models/dynamic_tiny.gin", "gin/models/dilated_base.gin"])
def test_gin_itself_reads_the_files(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    gin.clear_config()
    gin.parse_config_file(name)
    assert gin.query_parameter("MODEL_NAME/gin.macro.value") == pathlib.Path(name).stem


@pytest.mark.parametrize("variant", ["depthwise", "lightweight", "dynamic"])
def test_convolutions_have_the_window_and_kernels_of_the_paper(variant):
    config = model(f"gin/models/{variant}_base.gin")
    layers = (*config.encoder_layers, *config.decoder_layers)
    kernels = None if variant == "depthwise" else 2
    assert {(layer.kind, layer.kernel_size, layer.dilation) for layer in layers} == {
        (variant, 7, 1)
    }
    assert {layer.num_kernels for layer in layers} == {kernels}


def test_the_dilated_base_model_has_the_filters_of_the_paper():
    sizes = [layer.kernel_size for layer in model("gin/models/dilated_base.gin").encoder_layers]
    assert sizes[:11] == [4, 4, 7, 7, 15, 15, 15, 15, 31, 31, 31]
    assert sizes[11:] == [31]


@pytest.mark.parametrize("size", SIZES)
def test_the_field_of_wavenet_doubles_with_every_layer(size):
    config = model(f"gin/models/wavenet_{size}.gin")
    cycle = min(config.decoder.num_layers, 12)
    left = sum(layer.reach[0] for layer in config.decoder_layers[:cycle])
    assert left + 1 == 2**cycle
    encoder = [sum(layer.reach[side] for layer in config.encoder_layers[:cycle]) for side in (0, 1)]
    assert encoder == [left, left]


@pytest.mark.parametrize("size", SIZES)
def test_the_hybrid_has_attention_in_the_top_encoder_layer_alone(size):
    config = model(f"gin/models/hybrid_{size}.gin")
    kinds = [layer.kind for layer in config.encoder_layers]
    assert kinds == ["dynamic"] * (len(kinds) - 1) + ["attention"]
    assert {layer.kind for layer in config.decoder_layers} == {"dynamic"}


@pytest.mark.parametrize("name", ["t5_canon_nope", "t5_canon", "dynamic_canon"])
def test_canon_presets_are_their_variant_with_canon_layers_at_every_place(name):
    config = model(f"gin/models/{name}_tiny.gin")
    plain = model(f"gin/models/{name.split('_')[0]}_tiny.gin")
    stack = dataclasses.replace(plain.encoder, canon="ABCD")
    positions = "none" if name == "t5_canon_nope" else plain.positions
    assert config == dataclasses.replace(plain, encoder=stack, decoder=stack, positions=positions)
    assert {layer.canon_reach for layer in config.decoder_layers} == {(12, 0)}


@pytest.mark.parametrize("name", ["lconv", "dconv"])
def test_released_models_read_four_positions_to_each_side(name):
    config = model(f"gin/models/released/{name}_base.gin")
    assert {layer.reach for layer in config.encoder_layers} == {(4, 4)}
    assert {layer.reach for layer in config.decoder_layers} == {(8, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "gin/runs").glob("*.gin"))])
def test_every_run_passes_the_dry_run(name, tmp_path, capsys):
    document = "One document of the folder has a sentence of some words. " * 3
    (tmp_path / "text.txt").write_text(f"{document}\n\n{document} Another one.\n")
    file = f"gin/runs/{name}"
    bindings = [f"RUN_DIR={tmp_path}/run"]
    for macro in ("TEXT", "VALIDATION_TEXT"):
        if f"\n{macro} = " in gin_files_of(file):
            bindings.append(f"{macro}={tmp_path}/text.txt")
    if "\nVOCABULARY = " in gin_files_of(file):
        bindings += ["VOCABULARY=none", BYTES]
    if "\nCACHE = " in gin_files_of(file):
        bindings.append(f"CACHE={small_cache(tmp_path / 'cache')}")
    if "\nINIT_FROM = " in gin_files_of(file):
        bindings += ["INIT_FROM=unused", "trainer.train.init_from=None"]
    assert train.main([f"--gin_file={file}", *(f"--gin.{b}" for b in bindings), "--dry_run"]) == 0
    assert "nothing was trained" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def small_cache(folder: pathlib.Path) -> pathlib.Path:
    writer = cached_data.Writer(folder)
    writer.vocabulary(vocabularies.characters(), None)
    rows = {f"{half}_input_tokens": np.ones((2, 4), np.int32) for half in ("encoder", "decoder")}
    for split in ("train", "validation"):
        list(writer.write(split, [rows]))
    writer.finish(made_from={})
    return folder


FINETUNE = sorted(
    path.stem for path in (ROOT / "gin/finetune").glob("*.gin") if path.stem != "common"
)


# One of each kind of task, with a row of its data.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("sst2", {"text": "x", "label": "positive"}),
        ("cogs", {"text": "x", "target": "y", "category": "z"}),
        ("squad", {"context": "x", "question": "y", "answers": ["x"]}),
        ("text_classification", {"text": "x", "label": "bad"}),
        ("stsb", {"sentence1": "x", "sentence2": "y", "label": 2.5}),
        ("summarization", {"document": "x", "summary": "y"}),
    ],
)
def test_fine_tuning_passes_the_dry_run(name, row, tmp_path, capsys):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = next(m for m in re.findall(r"(\w+\.\w+)\.path = %DATA", gin_task(name)))
    bindings = [
        f"RUN_DIR={tmp_path}/run",
        f"INIT_FROM={tmp_path}/pretrained",  # Not there, so that it is left out again.
        "trainer.train.init_from=None",
        f"DATA={tmp_path}",
        "VOCABULARY=none",
        f"{task}.vocabulary=@vocabularies.characters()",
        *(["LABELS=['bad', 'good']"] if name == "text_classification" else []),
    ]
    command = [f"--gin_file=gin/finetune/{name}.gin", *(f"--gin.{b}" for b in bindings)]
    assert train.main([*command, "--dry_run"]) == 0
    assert "nothing was trained" in capsys.readouterr().out


def test_the_seed_of_a_fine_tuning_is_also_that_of_the_order_of_its_data(tmp_path):
    """From given parameters, without dropout, nothing else makes runs differ."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    bindings = {
        "RUN_DIR": f"'{tmp_path}/run'",
        "INIT_FROM": f"'{tmp_path}/pretrained'",
        "DATA": f"'{tmp_path}'",
        "VOCABULARY": "'none'",
        "classification.paper_task.vocabulary": "@vocabularies.characters()",
        "SEED": "3",
    }
    settings = gin_config.load(
        ["gin/finetune/sst2.gin"],
        [f"{name}={value}" for name, value in bindings.items()],
        roots=["@trainer.train"],
        supplied=["config_text"],
    ).arguments(trainer.train)
    assert (settings["seed"], settings["train_data"].seed, settings["eval_data"].seed) == (3, 3, 0)
    assert "Study.seed_name = 'SEED'" in (ROOT / "gin/studies/finetuning.gin").read_text()


@pytest.mark.parametrize("name", FINETUNE)
def test_a_fine_tuning_measures_the_lengths_it_trains_on(name):
    text = (ROOT / "gin/finetune" / f"{name}.gin").read_text()
    measured = re.findall(r"^evaluation.TaskEval.max_(?:input_)?length = (\d+)$", text, re.M)
    assert measured == re.findall(r"coder_length = (\d+)$", gin_task(name), re.M)
    assert f"best_metric = '{name}/" in text


def gin_task(name: str) -> str:
    return (ROOT / "gin/tasks" / f"{name}.gin").read_text()


def test_every_gin_file_travels_with_a_header():
    files = list((ROOT / "gin").rglob("*.gin"))
    assert files
    assert all(path.read_text().startswith("# ") for path in files)
