"""Checkpoints of pycls become runs that hold the same numbers, whatever file they come in."""

import functools
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from quick import quick
from safetensors.numpy import save_file

import convt5
from convt5 import convert, train
from convt5.checkpoints.reading import find_checkpoint
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.evaluation import checkpoints
from convt5.interchange import loading, pycls
from convt5.interchange.mapping import take_apart
from convt5.modeling import sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training import run_directory
from convt5.vision.architecture import ViTConfig

CONFIGS = {
    "conv": ViTConfig(
        image_size=24,
        stem="conv",
        stem_channels=(6, 6, 10, 12),
        stem_strides=(2, 1, 2, 1),
        num_layers=2,
        emb_dim=12,
        mlp_dim=20,
        num_heads=3,
        num_classes=7,
        dtype="float32",
    ),
    "patchify": ViTConfig(
        image_size=10,
        stem="patchify",
        patch_size=5,
        in_channels=1,
        num_layers=1,
        emb_dim=128,
        mlp_dim=8,
        num_heads=2,
        num_classes=3,
        pooling="mean",
        dtype="float32",
    ),
}


@functools.cache
def values(kind: str) -> dict[str, np.ndarray]:
    """Numbers for every parameter and statistic, all different."""
    shapes = jax.eval_shape(CONFIGS[kind].build, jax.random.key(0))
    draw = np.random.default_rng(7)
    return {
        name: draw.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        for name, leaf in named_leaves(shapes)
    }


def foreign(kind: str) -> dict[str, np.ndarray]:
    return take_apart(pycls.parameter_table(CONFIGS[kind]), values(kind))


def run(*flags: str) -> None:
    assert convert.main(["--from=pycls", *flags]) == 0


def import_file(path: pathlib.Path, out: pathlib.Path, kind: str, *flags: str):
    heads = f"--num_heads={CONFIGS[kind].num_heads}"
    run(f"--checkpoint={path}", f"--output_dir={out}", heads, *flags)
    return convt5.load_model(out)


def assert_holds_the_same(model, kind: str) -> None:
    assert model.config == CONFIGS[kind]
    for name, leaf in named_leaves(model):
        np.testing.assert_array_equal(leaf, values(kind)[name])


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick(list(CONFIGS), chosen=["conv"]))
def test_an_import_is_an_ordinary_run(kind, tmp_path, capsys):
    np.savez(tmp_path / "model.npz", **foreign(kind))
    assert_holds_the_same(import_file(tmp_path / "model.npz", tmp_path / "run", kind), kind)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"checkpoints", "config.gin", "model.gin", "conversion.txt"}
    assert find_checkpoint(tmp_path / "run").name == "0"
    assert "pos_embedding -> position_embedding" in capsys.readouterr().out
    described = gin_config.load([str(tmp_path / "run" / "model.gin")], roots=["%MODEL"])
    assert described.macro("MODEL") == CONFIGS[kind] == loading.run_config(tmp_path / "run")
    sizes = ("image_size", "in_channels", "num_classes")
    beside = gin_config.load(
        ["gin/runs/digits.gin", str(tmp_path / "run" / "model.gin")],
        [f"{name.upper()}={getattr(CONFIGS[kind], name)}" for name in sizes],
        roots=["%MODEL"],
    )
    assert beside.macro("MODEL") == CONFIGS[kind]


@pytest.mark.slow
def test_the_run_file_of_an_import_needs_images_alone(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    import_file(tmp_path / "a.npz", tmp_path / "run", "conv")
    file = f"--gin_file={tmp_path}/run/config.gin"
    with pytest.raises(UserError, match="DATA"):
        train.main([file, "--dry_run"])
    assert train.main([file, "--gin.DATA='images/{split}'", "--dry_run"]) == 0


def save_with_prefix(path, arrays):
    other = {"images": np.zeros((2, 3, 24, 24)), "eval.logits": np.zeros((2, 7))}
    np.savez(path, **{f"param.{name}": x for name, x in arrays.items()}, **other)


def save_safetensors(path, arrays):
    counters = {"stem.cstem0_bn.num_batches_tracked": np.array(7)}
    save_file({**arrays, **counters}, path)


@pytest.mark.parametrize(
    ("name", "save"), [("a.npz", save_with_prefix), ("a.safetensors", save_safetensors)]
)
@pytest.mark.slow
def test_other_containers_and_names_hold_the_same(name, save, tmp_path, capsys):
    save(tmp_path / name, foreign("conv"))
    assert_holds_the_same(import_file(tmp_path / name, tmp_path / "run", "conv"), "conv")
    assert "skipped   " in (tmp_path / "run" / "conversion.txt").read_text()


def checkpoint(state):
    return {"model_state": state, "ema_state": {}, "epoch": 3, "cfg": "text"}


@pytest.mark.parametrize("wrap", [lambda state: state, checkpoint])
def test_files_of_torch_hold_a_state_or_a_dict_with_one(wrap, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    state = {f"module.{name}": torch.tensor(array) for name, array in foreign("conv").items()}
    state["module.stem.cstem0_bn.num_batches_tracked"] = torch.tensor(7)
    torch.save(wrap(state), tmp_path / "a.pyth")
    assert_holds_the_same(import_file(tmp_path / "a.pyth", tmp_path / "run", "conv"), "conv")
    assert ("ema_state is ignored" in capsys.readouterr().out) == (wrap is checkpoint)


# As yacs writes it; lists stand in one line or in several.
CFG = """BN:
  EPS: 0.002
  MOM: 0.2
LN:
  EPS: 1.0e-05
MODEL:
  TYPE: vit
VIT:
  C_STEM_STRIDES:
  - 1
  - 3
  - 1
  - 1
  NUM_HEADS: 2
"""


@pytest.mark.parametrize(
    "text", [CFG, CFG.replace("\n  - 1\n  - 3\n  - 1\n  - 1", " [1, 3, 1, 1]")]
)
def test_settings_in_a_file_of_torch_are_those_of_the_model(text, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    state = {name: torch.tensor(array) for name, array in foreign("conv").items()}
    torch.save({"model_state": state, "cfg": text}, tmp_path / "a.pyth")
    found = pycls.read_model(tmp_path / "a.pyth")
    assert (found.config.num_heads, found.config.stem_strides) == (2, (1, 3, 1, 1))
    assert (found.config.norm_epsilon, found.config.batch_norm_epsilon) == (1e-5, 0.002)
    assert found.config.batch_norm_momentum == 0.2
    assert len(found.report.notes) == 1
    assert pycls.read_model(tmp_path / "a.pyth", num_heads=3).config.num_heads == 3


def test_files_of_torch_without_torch_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "a.pth").write_bytes(b"")
    with pytest.raises(UserError, match=r"PyTorch, which is not installed; .*\.safetensors"):
        pycls.read_model(tmp_path / "a.pth")


def test_heads_of_64_channels_and_the_strides_of_the_paper_are_inferred():
    found = {name: array.shape for name, array in foreign("patchify").items()}
    assert pycls.architecture(found) == CONFIGS["patchify"]
    assert pycls.published_strides(3, [24, 48, 96, 192, 192]) == [2, 2, 2, 2, 1]
    assert pycls.published_strides(3, [64, 128, 128, 256, 256, 512, 768]) == [2, 2, 1, 2, 1, 2, 1]


def test_strides_and_image_size_can_be_given(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    flags = ["--stem_strides=1,3,1,1", "--image_size=18"]
    model = import_file(tmp_path / "a.npz", tmp_path / "run", "conv", *flags)
    assert model.config.stem_strides == (1, 3, 1, 1)
    assert (model.config.image_size, model.config.grid_size) == (18, 6)


@pytest.mark.slow
def test_a_vision_model_goes_through_safetensors_unchanged(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    import_file(tmp_path / "a.npz", tmp_path / "run", "conv")
    out = f"--output_dir={tmp_path}/plain"
    assert convert.main(["--to=safetensors", f"--checkpoint={tmp_path}/run", out]) == 0
    assert_holds_the_same(convt5.load_model(tmp_path / "plain"), "conv")
    again = f"--output_dir={tmp_path}/again"
    assert convert.main(["--from=safetensors", f"--checkpoint={tmp_path}/plain", again]) == 0
    assert_holds_the_same(convt5.load_model(tmp_path / "again"), "conv")
    settings = [(tmp_path / run / "config.gin").read_text() for run in ("run", "again")]
    assert all("ImageDataConfig.channel_order = 'bgr'" in text for text in settings)


@pytest.mark.slow
def test_an_export_tells_how_images_were_normalised(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    import_file(tmp_path / "a.npz", tmp_path / "run", "conv")
    settings = tmp_path / "run" / "config.gin"
    bgr, rgb = (f"images.ImageDataConfig.channel_order = {order!r}" for order in ("bgr", "rgb"))
    settings.write_text(settings.read_text().replace(bgr, rgb))
    (tmp_path / "run" / "classes.json").write_text('{"classes": ["cat", "dog"]}')

    def convert_to(name, *flags):
        assert convert.main([*flags, f"--output_dir={tmp_path / name}"]) == 0
        return tmp_path / name

    capsys.readouterr()
    export = convert_to("export", "--to=safetensors", f"--checkpoint={tmp_path}/run")
    assert "mapped    " not in capsys.readouterr().out
    flags = ["--from=safetensors", f"--checkpoint={export}"]
    back = convert_to("back", *flags)
    text = (back / "config.gin").read_text()
    assert rgb in text
    assert "ImageDataConfig.mean = [0.485, " in text
    assert run_directory.find_class_names(back) == ["cat", "dog"]
    about = json.loads((export / "convt5.json").read_text())
    del about["normalisation"]
    (export / "convt5.json").write_text(json.dumps(about))
    unknown = convert_to("unknown", *flags)
    assert "how images were normalised is unknown" in capsys.readouterr().out
    assert "channel_order" not in (unknown / "config.gin").read_text()
    about["normalisation"] = {"mean": "@f"}
    (export / "convt5.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"normalisation=.* must hold channel_order, mean, stddev"):
        convert_to("wrong", *flags)


@pytest.mark.parametrize("target", ["hf", "stablehlo"])
def test_formats_of_text_models_refuse_it(target, tmp_path):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    with pytest.raises(UserError, match=r"is for text models, .* --to=safetensors"):
        import_file(tmp_path / "a.npz", tmp_path / "run", "conv", f"--to={target}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_embedding": None}, "variable pos_embedding is missing"),
        ({"head.head_fc.bias": None}, "variable head.head_fc.bias is missing"),
        ({"mystery": np.zeros(3)}, r"mystery \(3,\) belongs to no part"),
        ({"encoder.ln.weight": np.zeros(13)}, r"has shape \(13,\), expected \(12,\)"),
        ({"encoder.ln.weight": np.array(["a"])}, "expected numbers"),
        ({"encoder.ln.weight": np.ones(12, np.int8)}, "encoder.ln.weight' is stored as int8"),
        ({"pos_embedding": np.zeros((36, 1, 12))}, "35 patches, which do not form a square"),
        ({"pos_embedding": np.zeros((37, 12))}, r"has shape \(37, 12\)"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(changes, message, tmp_path):
    arrays = {**foreign("conv"), **changes}
    np.savez(tmp_path / "a.npz", **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(UserError, match=message):
        import_file(tmp_path / "a.npz", tmp_path / "run", "conv")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("name", ["stem.cstem{}_conv.weight", "encoder.block_{}.ln_1.weight"])
@pytest.mark.parametrize("number", ["9999999999", "9" * 5000])
def test_layers_are_counted_only_as_far_as_there_may_be_some(name, number, tmp_path):
    arrays = foreign("conv")
    save_file(
        arrays | {name.format(number): arrays["encoder.ln.weight"]}, tmp_path / "a.safetensors"
    )
    with pytest.raises(UserError, match="belongs to no part"):
        pycls.read_model(tmp_path / "a.safetensors", num_heads=3)


@pytest.mark.parametrize("shape", [(128, 1, 0, 0), (128, 1, 5, 4)])
def test_patches_that_are_no_squares_are_named(shape):
    found = {name: array.shape for name, array in foreign("patchify").items()}
    with pytest.raises(UserError, match=r"patchify.weight has shape .* no squares"):
        pycls.architecture(found | {"stem.patchify.weight": shape})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stem_strides=2,2"], "names 2 strides, but the stem has 4"),
        (["--stem_strides=2,x"], "numbers with commas"),
        (["--stem_strides=" + "9" * 5000], "numbers with commas"),
        (["--stem_strides=2,1,0,1", "--image_size=24"], "stem_strides=2,1,0,1 must be at least 1"),
        (["--image_size=40"], "pass --image_size=24"),
        (["--num_heads=0"], "num_heads=0 must be at least 1"),
        (["--num_heads=5"], "num_heads=5 must divide emb_dim=12"),
        (["--optimizer"], "is for --from=mesh_tf"),
    ],
)
def test_flags_that_do_not_fit_are_named(flags, message, tmp_path):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    with pytest.raises(UserError, match=message):
        import_file(tmp_path / "a.npz", tmp_path / "run", "conv", *flags)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", b"PK\x03\x04half", "cannot be read .*truncated"),
        ("a.safetensors", b"half", "cannot be read .*truncated"),
        ("a.bin", b"", "must be a file that ends in .npz"),
        (None, b"", "does not exist"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, message, tmp_path):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        pycls.read_model(tmp_path / (name or "missing.npz"))


def test_heads_of_another_width_must_be_given():
    found = {name: array.shape for name, array in foreign("conv").items()}
    with pytest.raises(UserError, match="12 channels make no heads of 64; pass --num_heads"):
        pycls.architecture(found)


CASES = ["vit_p_token", "vit_p_pooled", "vit_c_token", "vit_c_pooled_deep"]


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(CASES, chosen=["vit_p_token", "vit_c_pooled_deep"]))
def test_imports_give_the_logits_of_the_original(golden, case, tmp_path, capsys):
    described = json.loads((golden / "vitc" / "configs.json").read_text())[case]["config"]
    path = golden / "vitc" / f"{case}.npz"
    heads = f"--num_heads={described['n_heads']}"
    run(f"--checkpoint={path}", f"--output_dir={tmp_path}/run", heads)
    model = convt5.load_model(tmp_path / "run")
    assert model.config.stem_strides == tuple(described["c_stem_strides"])
    assert model.config.image_size == described["image_size"]
    with np.load(path) as data:
        logits = jax.jit(lambda m, x: m(x).logits)(model, np.moveaxis(data["images"], 1, -1))
        expected = data["eval.logits"]
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("exported", quick([False, True], chosen=[True]))
def test_commands_for_text_say_that_it_is_a_vision_model(exported, tmp_path, capsys):
    np.savez(tmp_path / "a.npz", **foreign("conv"))
    import_file(tmp_path / "a.npz", tmp_path / "run", "conv", *["--to=safetensors"] * exported)
    (found,) = checkpoints.select(tmp_path / "run")
    mesh = sharding.MeshConfig().build()
    for call in (lambda: checkpoints.model_config(found), lambda: checkpoints.load(found, mesh)):
        with pytest.raises(UserError, match="holds a ViTConfig, but text tasks need"):
            call()
