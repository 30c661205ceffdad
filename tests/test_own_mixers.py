"""A mixing kind outside of convt5: the module that docs/mixers.md shows, from file to export."""

import dataclasses
import importlib
import io
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_documented_commands

import convt5
from convt5 import convert
from convt5.analysis import costs
from convt5.checkpoints import record
from convt5.configuration import gin_config
from convt5.interchange import portable
from convt5.modeling import sharding
from convt5.modeling.architecture import StackConfig
from convt5.modeling.mixers import KINDS, base
from convt5.modeling.mixers.base import Mixer, MixerConfig, Reach
from convt5.modeling.mixers.dynamic import Dynamic
from convt5.modeling.placement import TEXT_RULES

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "mixers.md"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module that the page shows, imported from the working directory with its gin file."""
    test_documented_commands.write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(base, "_defined", dict(base._defined))
    yield importlib.import_module("my_mixer")
    del sys.modules["my_mixer"]


def tiny_config(*mixing):
    """A model with these mixings in both stacks."""
    stack = StackConfig(num_layers=len(mixing), mixing=mixing)
    sizes = dict.fromkeys(("vocab_size", "emb_dim", "mlp_dim", "num_heads", "head_dim"), 8)
    return convt5.ConvT5Config(encoder=stack, decoder=stack, **sizes)


def own_model(own):
    """A model with a layer of attention, and of each decay."""
    return tiny_config("attention", own.Average(decay=0.5), own.Average(decay=0.25))


def test_a_description_takes_the_place_of_the_name_of_a_kind(own):
    model = own_model(own)
    attention, half, quarter = model.decoder_layers
    assert (attention.kind, half) == ("attention", own.Average(decay=0.5, causal=True))
    assert model.encoder_layers[2] == own.Average(decay=0.25) != quarter
    assert "average" not in KINDS
    top = StackConfig(num_layers=2, mixing=own.Average(), attention_layers=[-1])
    assert [layer.kind for layer in top.layers()] == ["average", "attention"]


def test_gin_files_choose_the_kind_with_its_settings(own, tmp_path):
    layers = "['dynamic', @short/my_mixer.Average(), @my_mixer.Average(), 'dynamic']"
    config = gin_config.load(
        ["my_mixer.gin"],
        ["short/my_mixer.Average.decay=0.5", f"encoder/architecture.StackConfig.mixing={layers}"],
        roots=["%MODEL"],
    )
    model = config.macro("MODEL")
    assert model.encoder.mixing[1:3] == (own.Average(decay=0.5), own.Average(decay=0.8))
    assert type(model.decoder.mixing) is own.Average
    (kept := tmp_path / "run" / "config.gin").parent.mkdir()
    kept.write_text(config.text)
    with pytest.raises(convt5.UserError, match=r"import my_mixer\n.*--trust=my_mixer"):
        gin_config.load([str(kept)], roots=["%MODEL"])
    again = gin_config.load([str(kept)], roots=["%MODEL"], trusted=["my_mixer"])
    assert again.macro("MODEL") == model


def test_a_checkpoint_keeps_kind_and_settings_and_tells_what_to_import(own):
    model = own_model(own)
    settings = record.describe_config(model)
    assert portable.revive(settings) == model
    settings["encoder"]["mixing"][1]["settings"]["dekay"] = 1
    with pytest.raises(convt5.UserError, match=r"'dekay' is unknown. Did you mean decay"):
        portable.revive(settings)
    del base._defined["average"]
    with pytest.raises(convt5.UserError, match=r"run: the mixing kind .*--trust=my_mixer,"):
        portable.revive(settings, where="run")


def test_settings_of_the_stack_have_no_effect_on_a_description(own):
    stack = StackConfig(num_layers=2, mixing=(own.Average(), "attention"), kernel_size=5, canon="A")
    assert [layer.canon for layer in stack.layers()] == ["", "A"]
    (line,) = stack.unused("encoder")
    assert "encoder.kernel_size=5 has no effect" in line


def test_the_sharding_rules_of_a_description_are_those_of_its_layers(own):
    model = jax.eval_shape(lambda: own_model(own).build(jax.random.key(0)))
    mesh = sharding.MeshConfig(tensor=2).build()
    shardings = sharding.tree_shardings(model, model, mesh, TEXT_RULES)
    first = shardings.encoder.layers[1].mixing
    assert first.decay.get_value().spec == jax.sharding.PartitionSpec("tensor")
    with pytest.raises(convt5.UserError, match=r"no rule matches parameter .*mixing/decay"):
        sharding.parameter_specs(model, TEXT_RULES)


WRONG = {
    "decay=2": "encoder.mixing: Average.decay=2 must be in",
    "decay='a'": "Average.decay='a' must be",
    "canon=jnp.ones": "Average.canon=.* must be a number, text",
    "causal=True": "the stack decides",
}


@pytest.mark.parametrize("settings", WRONG)
def test_a_wrong_setting_of_a_description_is_told(own, settings):
    mixing = eval(f"Average({settings})", {"jnp": jnp, "Average": own.Average})
    with pytest.raises(convt5.UserError, match=WRONG[settings]):
        tiny_config(mixing)


def test_what_is_no_description_of_a_kind_is_told(own):
    class Undecorated(own.Average):
        kind = "undecorated"
        window: int = 3

    for mixing, message in {
        Undecorated(): "must be decorated",
        own.Average: "must be one of",
        MixerConfig(): "must be one of",
    }.items():
        with pytest.raises(convt5.UserError, match=message):
            tiny_config(mixing)


def test_a_kind_that_reads_the_future_is_no_part_of_a_decoder(own, monkeypatch):
    monkeypatch.setattr(own.Average, "reach", Reach(1, 1))
    with pytest.raises(convt5.UserError, match=r"decoder\[layer 0\] has the reach -1 .. \+1 \(av"):
        tiny_config(own.Average())


DEFINITIONS = {
    "kind = 'dynamic'": "'dynamic' is the name of convt5.modeling.mixers.dynamic.Dynamic",
    "kind = 'average'": "'average' is the name of my_mixer.Average; choose another",
    "": "'average' is the name of my_mixer.Average",
    "kind = 'an average'": "must be a name of letters",
    "kind = []": "must be a name of letters",
    "kind, flops = 'other', MixerConfig.flops": "must define flops",
    "kind, flops = 'other', 3": "flops=3 must be a method",
    "kind, reach = 'other', lambda self: Reach(1, 0)": "reach is a method, but must be a property",
    "kind, flops = 'other', lambda self, sizes: 3": r"takes \(self, sizes\), but must take",
    "kind, build = 'other', lambda self, sizes: None": "build takes .*, but must take .*, key",
    "kind, faults = 'other', lambda self: []": r"faults takes \(self\), but must take",
    "kind, stacked_parameters = 'other', ('mixing/decay',)": "bind `stacked` of the optimizer",
}


@pytest.mark.parametrize("body", DEFINITIONS)
def test_a_kind_that_cannot_be_used_is_refused_when_it_is_defined(own, body):
    known = dict(base._defined)
    with pytest.raises(convt5.UserError, match=DEFINITIONS[body]):
        exec(f"class Other(Average):\n    {body or 'pass'}", vars(own) | {"__name__": "other"})
    assert base._defined == known


def test_a_module_without_what_decoding_needs_is_refused_when_it_is_defined():
    with pytest.raises(convt5.UserError, match="must define init_state, step; see convt5"):

        class Whole(Mixer):
            def __call__(self, x, inputs, *, dropout_key=None):
                return x


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"init_state": lambda self, batch: 0}, r"init_state takes \(self, batch\), but must take"),
        (
            {"step": lambda self, x, state: 0},
            "step takes .*, but must take",
        ),
        ({"__call__": lambda self, x, inputs: x}, "__call__ takes .*dropout_key=None"),
        ({"step": 3}, "step=3 must be a method"),
    ],
)
def test_a_module_with_other_parameters_is_refused_when_it_is_defined(own, wrong, message):
    with pytest.raises(convt5.UserError, match=message):
        type("Other", (own.Averages,), wrong)


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        (
            "__call__",
            lambda self, x, inputs, **_: (x, x),
            "__call__ returns .*its input",
        ),
        ("__call__", lambda self, x, inputs, **_: x[:1], r"__call__ returns '\w+ \(1, 3, 8\)'"),
        ("step", lambda self, x, state, position: x, "step returns .*must return a pair"),
        (
            "step",
            lambda self, x, state, position: (x, (state, 0)),
            "step returns the state .*was",
        ),
        ("step", lambda self, x, state, position: (x[:, 0], state), "step returns .*same shape"),
        (
            "init_state",
            lambda self, *sizes: jnp.zeros(5),
            "init_state returns .*the 2 rows of",
        ),
    ],
)
def test_what_a_module_returns_is_checked(own, monkeypatch, method, wrong, message):
    model = tiny_config(own.Average()).build(jax.random.key(0))
    monkeypatch.setattr(own.Averages, method, wrong)

    def use(model):
        tokens = jnp.ones((2, 3), jnp.int32)
        encoded = model.encode(tokens)
        state = model.init_decoding(encoded, encoder_segment_ids=tokens, length=3)
        return model.decode_step(state, tokens[:, 0])

    with pytest.raises(convt5.UserError, match=f"my_mixer.Averages.{message}"):
        jax.eval_shape(use, model)


@pytest.mark.parametrize("method", ["flops", "activation_bytes", "state_size"])
def test_costs_that_are_no_numbers_are_told(own, monkeypatch, method):
    for wrong in (None, "many", float("nan"), -1):
        monkeypatch.setattr(own.Average, method, lambda self, sizes, length, wrong=wrong: wrong)
        with pytest.raises(convt5.UserError, match=rf"Average\.{method} returns .* finite number"):
            costs.model_cost(tiny_config(own.Average()), encoder_length=8, decoder_length=8)


def test_a_reach_or_a_module_that_is_none_is_told(own, monkeypatch):
    monkeypatch.setattr(own.Average, "build", lambda self, sizes, *, key: None)
    with pytest.raises(convt5.UserError, match=r"build returns None, but must return a .*Mixer"):
        tiny_config(own.Average()).build(jax.random.key(0))
    for wrong in ((1, 0), Reach(-1, 0), Reach(0.5, 0)):
        monkeypatch.setattr(own.Average, "reach", wrong)
        with pytest.raises(convt5.UserError, match=r"my_mixer.Average.reach=.* must be a Reach"):
            tiny_config(own.Average())


def test_a_wrong_kind_in_a_module_that_gin_imports_is_told_with_its_line(own):
    text = "import my_mixer\nclass Other(my_mixer.Average):\n    kind = 'dynamic'\n"
    pathlib.Path("other_mixer.py").write_text(text)
    pathlib.Path("other.gin").write_text("import other_mixer\nMODEL = 1\n")
    with pytest.raises(convt5.UserError, match=r"other_mixer.py:2 raised UserError.*Dynamic"):
        gin_config.load(["other.gin"])


def test_a_kind_may_be_defined_again(own):
    def model():
        return gin_config.load(["my_mixer.gin"], roots=["%MODEL"]).macro("MODEL")

    before = model().encoder.mixing
    importlib.reload(own)
    assert base._defined["average"] is own.Average is not type(before)
    assert type(model().encoder.mixing) is own.Average

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(Dynamic):
        kind = "extended"

    assert StackConfig(num_layers=1, mixing=Extended()).layers() == (Extended(),)


def test_settings_of_a_description_are_made_plain(own):
    assert own.Average(decay=np.float32(0.5), canon_kernel_size=np.int64(3)) == own.Average(
        decay=0.5, canon_kernel_size=3
    )


@pytest.mark.slow
def test_the_page_is_followed_with_a_mixer_of_ones_own(own, tmp_path, monkeypatch, capsys):
    """Proofs, training and answers as the page shows them, then exports of the run."""
    (notes := tmp_path / "notes").mkdir()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick b* fox\n")))
    calls = map(test_documented_commands.ours, test_documented_commands.calls(PAGE, notes))
    shown = [call for call in calls if any("my_mixer" in word for word in call)]
    for program, *argv in shown:
        name = program.removeprefix("convt5.")
        make_small = getattr(test_documented_commands, "cheap" if name == "inspect" else "small")
        assert not importlib.import_module(program).main(make_small(name, argv))
        told = capsys.readouterr().out
        if name == "inspect":
            assert told.count(" holds ") == 5
            assert " fails " not in told
    run, to = "--checkpoint=runs/quickstart/average_tiny", "--output_dir=export"
    del base._defined["average"]
    with pytest.raises(convt5.UserError, match=r"'average'.*--trust=my_mixer"):
        convert.main([run, "--to=safetensors", to])
    importlib.reload(own)
    with pytest.raises(convt5.UserError, match="description of average; write --to=safetensors"):
        convert.main([run, "--to=transformers", to, "--trust=my_mixer"])
    assert not convert.main([run, "--to=safetensors", to, "--trust=my_mixer"])
    assert convt5.load_model("export").config.described_kinds == ("average",)
    assert [call[0] for call in shown] == [f"convt5.{n}" for n in ("inspect", "train", "infer")]
