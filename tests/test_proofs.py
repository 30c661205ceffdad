"""Every preset reads nothing that it must not; models that are made to leak are caught."""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5 import errors, inspect
from convt5.analysis.proofs import meshes, report, results
from convt5.analysis.proofs.results import Proof
from convt5.analysis.proofs.text import TextProofs
from convt5.configuration import gin_config
from convt5.interchange import portable
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.layers import Mlp
from convt5.modeling.mixers.base import Reach
from convt5.modeling.mixers.convolution import ConvolutionConfig
from convt5.modeling.sharding import MeshConfig
from convt5.modeling.tree_paths import named_leaves
from convt5.ops import pad_widths
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, SGDConfig
from convt5.training.schedule import Constant
from convt5.training.train_step import StepConfig
from convt5.vision import blocks
from convt5.vision.architecture import ViTConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELS = sorted(
    path.relative_to(ROOT / "gin/models").with_suffix("").as_posix()
    for path in (ROOT / "gin/models").rglob("*.gin")
    if path.parent.name in ("models", "released")
)
SIZES: dict[str, Any] = {"emb_dim": 8, "mlp_dim": 8, "num_heads": 2}
LENGTHS = (24, 16)
ADAFACTOR = AdafactorConfig()
# Any: a stack has the settings of every mixing kind.
TAPS: Any = dataclasses.replace(
    StackConfig(num_layers=2, mixing=("dynamic", "depthwise")), **{"kernel_size": (2, 3)}
)
TEXT = ConvT5Config(vocab_size=40, head_dim=4, dtype="float32", encoder=TAPS, decoder=TAPS, **SIZES)
VISION = ViTConfig(
    image_size=8, stem="patchify", patch_size=4, num_layers=2, num_classes=3, **SIZES
)


def shrunk(config):
    """The same with few channels, and of each stack the lowest and the top layer, or any."""
    if isinstance(config, ViTConfig):
        stem = {"stem_channels": (*(4,) * (len(config.stem_channels) - 1), 8)}
        less = {"num_layers": 2, "image_size": 2 * config.stride, "num_classes": 3, **SIZES}
        return dataclasses.replace(config, **less, **(stem if config.stem_channels else {}))

    def ends(stack: StackConfig) -> StackConfig:
        listed = {
            field.name: (value[0], value[-1])
            for field in dataclasses.fields(stack)
            for value in (getattr(stack, field.name),)
            if isinstance(value, tuple) and len(value) == stack.num_layers
        }
        count = 2 if listed or stack.attention_layers else 1
        return dataclasses.replace(stack, num_layers=count, **listed)

    return dataclasses.replace(
        config,
        vocab_size=40,
        head_dim=4,
        dtype="float32",
        encoder=ends(config.encoder),
        decoder=ends(config.decoder),
        **SIZES,
    )


@functools.cache
def preset(name: str):
    """Presets of several sizes are one when shrunk."""
    config = gin_config.load([f"gin/models/{name}.gin"], roots=["%MODEL"]).macro("MODEL")
    return shrunk(config)


@functools.cache
def proven(config) -> list[Proof]:
    return report.prove(results.random_model(config), *LENGTHS)


def failing(proofs: list[Proof]) -> dict[str, str | None]:
    return {proof.name: proof.layer for proof in proofs if proof.result == "fails"}


# What reads most: Canon layers, attention, taps for whole rows, images.
CHOSEN = [f"{name}_tiny" for name in (*("dynamic_canon", "hybrid", "long", "vit_c"),)]


@pytest.mark.parametrize("name", quick(MODELS, chosen=CHOSEN))
def test_every_preset_reads_nothing_that_it_must_not(name):
    config = preset(name)
    if name not in CHOSEN and config in map(preset, CHOSEN):
        return
    proofs = proven(config)
    assert failing(proofs) == {}
    assert {proof.name for proof in proofs if proof.worst is None} <= {
        f"the {stack} reads no further than its receptive field" for stack in ("encoder", "decoder")
    }


class TestLeaks:
    """What must not be read, is: however little of it reaches an output."""

    def test_a_tap_too_far_is_caught_and_its_layer_named(self, monkeypatch):
        aligned = ConvolutionConfig.__dict__["tap_padding"].fget

        def widths(config):
            return pad_widths(config.kernel_size, config.dilation, aligned(config))

        def one_too_far(config):
            left, right = widths(config)
            return (left - 1, right + 1) if config.kernel_size == 3 else (left, right)

        monkeypatch.setattr(ConvolutionConfig, "reach", property(lambda c: Reach(*widths(c))))
        monkeypatch.setattr(ConvolutionConfig, "tap_padding", property(one_too_far))
        # A description of its own: what was compiled for others knows nothing of the leak.
        config = dataclasses.replace(TEXT, vocab_size=41)
        proofs = report.prove(results.random_model(config), *LENGTHS)
        assert failing(proofs) == {
            "no output depends on its own target or a later one": "decoder layer 1 (depthwise)",
            "step-by-step decoding equals teacher forcing": "decoder layer 1 (depthwise)",
            "the encoder reads no further than its receptive field": "encoder layer 1 (depthwise)",
        }

    @pytest.mark.slow
    def test_means_over_rows_and_batches_are_caught(self, monkeypatch):
        alone: Any = Mlp.__call__

        def together(self, x, *arguments, **settings):
            mean = jnp.mean(x, axis=(0, 1), keepdims=True)
            return alone(self, x, *arguments, **settings) + 1e-9 * mean

        monkeypatch.setattr(Mlp, "__call__", together)
        config = dataclasses.replace(TEXT, vocab_size=42)
        proofs = report.prove(results.random_model(config), *LENGTHS)
        found = failing(proofs)
        assert found["nothing depends on other rows of the batch"] == "encoder layer 0 (dynamic)"
        assert found["no packed example depends on another"] == "encoder layer 0 (dynamic)"
        later = found["no output depends on its own target or a later one"]
        assert later == "decoder layer 0 (dynamic)"
        # Padding is no zero in the middle of a layer.
        assert "nothing depends on the content of padding" in found

    def test_taps_that_cross_segments_by_choice_are_told(self):
        config = dataclasses.replace(TEXT, taps_cross_segments=True)
        found = failing(report.prove(results.random_model(config), *LENGTHS))
        assert found == {"no packed example depends on another": "encoder layer 0 (dynamic)"}

    def test_images_that_see_each_other_are_caught(self, monkeypatch):
        assert failing(report.prove(results.random_model(VISION))) == {}
        alone: Any = blocks.Mlp.__call__

        def together(self, x, *arguments):
            return alone(self, x, *arguments) + 1e-9 * x[::-1]

        monkeypatch.setattr(blocks.Mlp, "__call__", together)
        config = dataclasses.replace(VISION, num_classes=4)
        (proof,) = report.prove(results.random_model(config))
        assert (proof.result, proof.layer) == ("fails", "block 0")


class TestNothingIsShown:
    """A model that computes nothing would pass every proof."""

    @pytest.mark.parametrize(
        ("value", "note"), [(0.0, "no output changed"), (np.nan, "not finite")]
    )
    def test_outputs_that_never_change_prove_nothing(self, value, note):
        model = jax.tree.map(lambda x: jnp.full_like(x, value), results.random_model(TEXT))
        proofs = report.prove(model, *LENGTHS)
        assert proofs[0].result == "fails"
        assert note in proofs[0].note

    def test_rows_too_short_to_pack_are_refused(self):
        with pytest.raises(errors.UserError, match="--decoder_length=3 gives rows of 3 positions"):
            report.prove(results.random_model(TEXT), 24, 3)

    @pytest.mark.parametrize("vocab_size", [1, 2])
    def test_ids_too_few_to_exchange_are_refused(self, vocab_size):
        model = results.random_model(dataclasses.replace(TEXT, vocab_size=vocab_size))
        with pytest.raises(errors.UserError, match=f"vocab_size={vocab_size} must be at least 3"):
            report.prove(model, *LENGTHS)


def test_proofs_that_take_long_say_so_and_what_takes_less(capsys, monkeypatch):
    monkeypatch.setattr(report, "LONG_FLOPS", 1e3)
    monkeypatch.setattr(TextProofs, "all", lambda proofs: [])
    report.prove(results.random_model(TEXT), 24, 16)
    told = capsys.readouterr().err
    assert "shorter rows than 24 + 16 tokens take less (--encoder_length, --decoder_length)" in told
    monkeypatch.undo()
    monkeypatch.setattr(TextProofs, "all", lambda proofs: [])
    report.prove(results.random_model(TEXT), 24, 16)
    assert not capsys.readouterr().err


class TestMeshes:
    @pytest.mark.nightly
    def test_an_update_is_the_same_on_meshes(self):
        sizes = ["data=2, fsdp=2, tensor=2", "data=2, sequence=4"]
        layers: Any = [{"num_layers": 1, "mixing": kind} for kind in ("dynamic", "depthwise")]
        encoder, decoder = (StackConfig(kernel_size=3, **one) for one in layers)
        small = dataclasses.replace(TEXT, encoder=encoder, decoder=decoder)
        proofs = prove_on(small, *sizes)
        assert [proof.result for proof in proofs] == ["holds"] * 2
        assert [proof.name for proof in proofs] == [f"the update is the same on {s}" for s in sizes]

    @pytest.mark.slow
    def test_an_update_of_a_vision_model_is_the_same_on_a_mesh(self):
        assert failing(prove_on(VISION, "data=2,fsdp=2,tensor=2", optimizer=SGDConfig())) == {}

    def test_a_parameter_that_is_updated_otherwise_is_named(self):
        before = {"a": np.zeros(3), "b": np.ones(2), "frozen": np.ones(2)}
        after = before | {"a": before["a"] + 1e-3, "b": before["b"] + 1e-3}
        alone = meshes._Update(2.0, before, after)
        other = alone._replace(after=after | {"b": after["b"] + [0, 1e-5]})
        exact = {name: np.zeros(value.shape, bool) for name, value in before.items()}
        proof = meshes._compare(MeshConfig(data=1, fsdp=4), other, alone, exact)
        assert (proof.result, proof.layer) == ("fails", "b")
        assert proof.worst == pytest.approx(1e-2, rel=0.1)
        moved = alone._replace(after=after | {"frozen": before["frozen"] + 1e-3})
        assert meshes._compare(MeshConfig(data=2), moved, alone, exact).worst == math.inf
        assert meshes._compare(MeshConfig(data=2), alone, alone, exact).result == "holds"
        noise = exact | {"b": np.ones(2, bool)}
        assert meshes._compare(MeshConfig(data=2), other, alone, noise).result == "holds"

    def test_meshes_are_read_from_the_command_line(self):
        assert meshes.parse(["data=2, tensor=4"]) == [MeshConfig(data=2, tensor=4)]
        assert meshes.num_devices(MeshConfig(data=2, tensor=4)) == 8
        for text in ("rows=2", "data", "data=0", "data=-1", "data=2,data=2", ""):
            with pytest.raises(errors.UserError, match="must be an axis"):
                meshes.parse([text])

    def test_more_devices_than_are_emulated_are_refused(self):
        with pytest.raises(errors.UserError, match="--mesh needs 16 devices"):
            meshes.emulate_devices(16)


def prove_on(config, *texts: str, optimizer=ADAFACTOR) -> list[Proof]:
    step = StepConfig(
        model=config,
        loss=TextLoss(),
        optimizer=optimizer,
        schedule=Constant(rate=1.0),
    )
    lengths = () if isinstance(config, ViTConfig) else LENGTHS
    model = results.random_model(config)
    return meshes.prove(step, model, meshes.parse(texts), lengths=lengths)


class TestInspect:
    GIN = """
from __gin__ import dynamic_registration
from convt5.modeling import architecture

MODEL = @architecture.ConvT5Config()
architecture.ConvT5Config.vocab_size = 40
architecture.ConvT5Config.emb_dim = 8
architecture.ConvT5Config.mlp_dim = 8
architecture.ConvT5Config.num_heads = 2
architecture.ConvT5Config.head_dim = 4
architecture.ConvT5Config.dtype = 'float32'
architecture.ConvT5Config.encoder = @encoder/architecture.StackConfig()
architecture.ConvT5Config.decoder = @decoder/architecture.StackConfig()
architecture.StackConfig.num_layers = 2
architecture.StackConfig.mixing = ['dynamic', 'depthwise']
architecture.StackConfig.kernel_size = [2, 3]
"""

    @pytest.fixture
    def flags(self, tmp_path):
        (tmp_path / "model.gin").write_text(self.GIN)
        lengths = zip(("encoder", "decoder"), LENGTHS, strict=True)
        return [f"--gin_file={tmp_path}/model.gin", *(f"--{h}_length={n}" for h, n in lengths)]

    def test_a_proof_is_a_table_and_an_exit_code(self, flags, capsys):
        assert inspect.main([*flags, "--prove"]) == 0
        text = capsys.readouterr().out
        assert "with random parameters, on random rows of 24 + 16 tokens" in text
        assert len([line for line in text.splitlines() if "  holds  " in line]) == 7

    @pytest.mark.slow
    def test_parameters_of_a_checkpoint_are_proven_and_a_failure_is_exit_code_1(
        self, flags, tmp_path, capsys
    ):
        named = named_leaves(results.random_model(TEXT))
        broken = {name: np.full(leaf.shape, np.nan, np.float32) for name, leaf in named}
        (tmp_path / "export").mkdir()
        portable.write_model(tmp_path / "export", TEXT, broken)
        command = [*flags, "--prove", f"--checkpoint={tmp_path}/export", "--json"]
        assert inspect.main(command) == 1
        found = json.loads(capsys.readouterr().out)["proofs"]
        assert found[0]["result"] == "fails"
        assert found[0]["worst_violation"] == "nan"

    @pytest.mark.slow
    def test_a_checkpoint_that_differs_from_the_gin_files_is_told_of(self, flags, tmp_path, capsys):
        other = dataclasses.replace(TEXT, vocab_size=TEXT.vocab_size + 8)
        named = dict(named_leaves(results.random_model(other)))
        (tmp_path / "export").mkdir()
        portable.write_model(tmp_path / "export", other, named)
        assert inspect.main([*flags, "--prove", f"--checkpoint={tmp_path}/export"]) == 0
        told = capsys.readouterr()
        assert (
            "export holds a model that differs from that of the gin files in vocab_size" in told.err
        )
        assert f"Proofs of {tmp_path}/export, with trained parameters" in told.out

    @pytest.mark.parametrize("flag", ["--mesh=data=2", "--checkpoint=runs/a"])
    def test_flags_of_a_proof_alone_are_named(self, flags, flag):
        with pytest.raises(errors.UserError, match=r"is for --(prove|measure or --prove); add it"):
            inspect.main([*flags, flag])
