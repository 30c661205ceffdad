"""Exports hold the same model: safetensors with JSON, and StableHLO programs without our code."""

import json
import sys

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_vision_model
from safetensors.numpy import load_file, save_file

import convt5
from convt5.errors import UserError
from convt5.evaluation import checkpoints
from convt5.interchange import hugging_face, portable, pytorch_model, stablehlo
from convt5.interchange.optimizer_state import import_state
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.model import ConvT5
from convt5.modeling.tree_paths import named_leaves
from convt5.training.optimizer import AdamWConfig
from convt5.training.schedule import InverseSqrt
from convt5.training.train_state import parameters

SOURCES = np.asarray([[3, 9, 4, 1, 0], [5, 1, 0, 0, 0]], np.int32)
TARGETS = np.asarray([[0, 7, 2], [0, 4, 4]], np.int32)


def hybrid(**changes) -> ConvT5Config:
    """Every mixing, per-layer settings, and every option that is not a default."""
    stack = StackConfig(
        num_layers=3,
        mixing=("dynamic", "lightweight", "depthwise"),
        kernel_size=(2, 3, 4),
        dilation=(1, 2, 1),
        num_kernels=(2, None, None),
        conv_bias=True,
        predictor_bias=True,
        canon=("A", "BD", ""),
        canon_padding="CENTERED",
    )
    settings = {
        "vocab_size": 13,
        "emb_dim": 8,
        "mlp_dim": 10,
        "num_heads": 2,
        "head_dim": 4,
        "encoder": stack,
        "decoder": StackConfig(
            num_layers=2,
            mixing="lightweight",
            kernel_size=3,
            attention_layers=(-1,),
            canon="ABCD",
            canon_kernel_size=3,
            canon_bias=True,
        ),
        "positions": "relative",
        "mlp": "gated_gelu",
        "tie_output": False,
        "dtype": "float32",
    }
    return ConvT5Config(**{**settings, **changes})


@pytest.fixture(scope="module")
def model():
    return hybrid().build(jax.random.key(1))


@pytest.fixture
def exported(model, tmp_path):
    portable.write_model(tmp_path, model.config, dict(named_leaves(model)), step=5)
    return tmp_path


def test_any_model_comes_back_bit_for_bit(model, exported):
    found = portable.read_model(exported)
    assert found.step == 5
    assert found.config == model.config
    for path, value in named_leaves(model):
        assert np.asarray(value).tobytes() == found.params[path].tobytes()


def test_load_model_reads_an_export_and_gives_equal_logits(model, exported):
    loaded = convt5.load_model(exported)
    forward = jax.jit(lambda m: m(SOURCES, TARGETS))
    np.testing.assert_array_equal(forward(loaded), forward(model))


@pytest.mark.slow
def test_a_model_of_a_program_is_saved_with_its_vocabulary_and_predicts(tmp_path):
    stack = StackConfig(num_layers=1, kernel_size=3)
    config = hybrid(encoder=stack, decoder=stack, vocab_size=384)
    model, folder = config.build(jax.random.key(0)), tmp_path / "mine"
    vocabulary = convt5.load_vocabulary("bytes")
    convt5.save_model(model, folder, vocabulary=vocabulary, step=3)
    found = portable.read_model(folder)
    assert (found.step, found.config) == (3, config)
    for path, value in named_leaves(model):
        np.testing.assert_array_equal(found.params[path], value)
    predictor = convt5.load_predictor(folder, max_length=3)
    assert predictor.vocabulary.encode("a") == vocabulary.encode("a")
    assert len(list(predictor.predict(["a"]))) == 1
    with pytest.raises(UserError, match=r"mine is in use: it holds"):
        convt5.save_model(model, folder)
    assert portable.read_model(folder).step == 3


def test_what_cannot_be_saved_leaves_nothing_behind(model, tmp_path):
    bytes_ = convt5.load_vocabulary("bytes")
    with pytest.raises(
        UserError, match=r"has \d+ ids, sentinels included, but the model's vocab_s"
    ):
        convt5.save_model(model, tmp_path / "mine", vocabulary=bytes_)
    with pytest.raises(UserError, match="vocabulary='bytes' cannot be kept; give one that"):
        convt5.save_model(model, tmp_path / "mine", vocabulary="bytes")
    image = test_vision_model.tiny().build(jax.random.key(0))
    with pytest.raises(UserError, match="vocabulary is for text models, not for a ViTConfig"):
        convt5.save_model(image, tmp_path / "mine", vocabulary=bytes_)
    for step in (-1, 2**31, 2.5, None):
        with pytest.raises(UserError, match=rf"step={step} must be an integer of at least 0"):
            convt5.save_model(image, tmp_path / "mine", step=step)
    assert not list(tmp_path.iterdir())
    convt5.save_model(image, tmp_path / "mine", step=jax.numpy.int32(4))
    assert convt5.load_model(tmp_path / "mine").config == image.config
    assert portable.read_model(tmp_path / "mine").step == 4


@pytest.mark.parametrize("kind", ["portable", "transformers", "t5"])
def test_a_folder_is_described_without_its_weights(kind, model, tmp_path):
    config, params = model.config, dict(named_leaves(model))
    if kind == "t5":
        stack = StackConfig(num_layers=1, mixing="attention")
        config = hybrid(encoder=stack, decoder=stack)
        params = dict(named_leaves(config.build(jax.random.key(0))))
    writer = {"portable": portable, "transformers": pytorch_model, "t5": hugging_face}[kind]
    writer.write_model(tmp_path, config, params)
    (tmp_path / "model.safetensors").unlink()
    (found,) = checkpoints.select(tmp_path)
    assert checkpoints.model_config(found) == config


def test_settings_can_be_changed_when_a_model_is_loaded(exported):
    loaded = convt5.load_model(str(exported), taps_cross_segments=True)
    assert loaded.config.taps_cross_segments
    with pytest.raises(UserError, match=r"'tap_cross_segments' is unknown\. Did you mean taps_cr"):
        convt5.load_model(exported, tap_cross_segments=True)


def test_an_export_has_no_steps_to_choose_from(exported):
    with pytest.raises(UserError, match=r"step=4, but .* is an exported model without steps"):
        convt5.load_model(exported, step=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp_dim": 12}, r"mlp/wi_0/kernel \(8, 12\) is needed, but there is \(8, 10\)"),
        ({"norm": "layer"}, r"final_norm/bias \(8,\) is needed, but there is none"),
        ({"tie_output": True}, "parameter output_head/kernel belongs to no part"),
    ],
)
def test_settings_that_do_not_fit_the_parameters_are_refused(exported, settings, message):
    with pytest.raises(UserError, match=message):
        convt5.load_model(exported, **settings)


def test_arrays_are_named_by_parameter_path_for_readers_without_convt5(model, exported):
    arrays = load_file(exported / "model.safetensors")
    assert arrays.keys() == {name for name, _ in named_leaves(model)}
    assert json.loads((exported / "convt5.json").read_text())["model"]["emb_dim"] == 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.pop("token_embedder/embedding"), "token_embedder/embedding is missing"),
        (lambda a: a.update(extra=np.zeros(2, np.float32)), "extra .* belongs to no part"),
        (lambda a: a.update({"output_head/kernel": np.zeros((8, 14), np.float32)}), "expected"),
        (lambda a: a.update({"output_head/kernel": np.zeros((8, 13), np.int32)}), "stored as I32"),
    ],
)
def test_arrays_that_do_not_fit_the_description_are_named(exported, damage, message):
    arrays = load_file(exported / "model.safetensors")
    damage(arrays)
    save_file(arrays, exported / "model.safetensors")
    with pytest.raises(UserError, match=message):
        portable.read_model(exported)


def test_a_description_of_another_version_is_named(exported):
    about = json.loads((exported / "convt5.json").read_text())
    about["model"]["emb_dimension"] = 8
    (exported / "convt5.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"'emb_dimension' is unknown\. Did you mean emb_dim"):
        portable.read_model(exported)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(step="ten"), "step='ten' must be an integer"),
        (lambda about: about.update(step=-1), "step=-1 must be an integer"),
        (lambda about: about.update(step=2**31), "step=2147483648 must be .* below 2147483648"),
        (lambda about: about.update(model=["dynamic"]), "must map settings to values"),
        (lambda about: about["model"].update(stem="conv"), "stem='conv' must hold the settings"),
    ],
)
def test_a_damaged_description_is_named(exported, change, message):
    about = json.loads((exported / "convt5.json").read_text())
    change(about)
    (exported / "convt5.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=message):
        portable.read_model(exported)


@pytest.mark.slow
def test_the_optimizer_of_an_import_begins_anew_where_the_rate_goes_on(exported):
    """Counted on, Adam would take its empty means for those of many steps: steps too large."""
    rate = InverseSqrt(warmup_steps=1)
    optimizer = AdamWConfig(weight_decay=0.0, max_grad_norm=None).build(rate)
    state = import_state(portable.read_model(exported), optimizer)
    gradients = jax.tree.map(jnp.ones_like, parameters(state.model))
    updates, _ = optimizer.update(gradients, state.opt_state, parameters(state.model))
    for update in jax.tree.leaves(updates):
        np.testing.assert_allclose(update, -rate(5), rtol=1e-5)


READER = """
import pathlib, sys
import jax, numpy as np
from safetensors.numpy import load_file
folder = pathlib.Path(sys.argv[1])
read = lambda name: jax.export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
parameters = load_file(folder / "model.safetensors")
given = np.load(folder / "given.npz")
encoded = read("encode").call(parameters, given["sources"])
state = read("start").call(parameters, encoded, given["sources"])
step, logits = read("step"), []
for tokens in given["targets"].T:
    now, state = step.call(parameters, state, tokens)
    logits.append(np.asarray(now))
np.savez(folder / "found.npz", encoded=encoded, logits=np.stack(logits, axis=1))
assert "convt5" not in sys.modules and "flax" not in sys.modules
"""


@pytest.mark.slow
def test_programs_run_without_our_code_and_equal_the_model(model, tmp_path):
    stablehlo.write_programs(tmp_path, model, encoder_length=5, decoder_length=4)
    np.savez(tmp_path / "given.npz", sources=SOURCES, targets=TARGETS)
    done = commands.run([sys.executable, "-c", READER, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as file:
        found = dict(file)
    forward = jax.jit(lambda m: (m.encode(SOURCES), m(SOURCES, TARGETS)))
    encoded, logits = forward(model)
    # Two compilations may order float32 sums differently.
    np.testing.assert_allclose(found["encoded"], encoded, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "programs.json").read_text())["decoder_length"] == 4


@pytest.mark.slow
def test_programs_with_attention_in_the_encoder_take_any_batch():
    stack = StackConfig(num_layers=2, mixing=("attention", "dynamic"), kernel_size=3)
    model = hybrid(encoder=stack, decoder=stack).build(jax.random.key(1))
    programs = stablehlo.export_programs(model, encoder_length=5, decoder_length=4)
    params = dict(named_leaves(model))
    step = jax.jit(ConvT5.decode_step)
    for sources in (SOURCES, np.tile(SOURCES, (2, 1))[:3]):
        encoded = jax.jit(ConvT5.encode)(model, sources)
        found = programs["encode"].call(params, sources)
        np.testing.assert_allclose(found, encoded, rtol=0, atol=2e-6)
        segment_ids = (sources != 0).astype(np.int32)
        expected = model.init_decoding(encoded, encoder_segment_ids=segment_ids, length=4)
        state = programs["start"].call(params, found, sources)
        for tokens in (np.zeros(len(sources), np.int32), np.full(len(sources), 7, np.int32)):
            logits, expected = step(model, expected, tokens)
            now, state = programs["step"].call(params, state, tokens)
            np.testing.assert_allclose(now, logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mixing", ["attention", "dynamic"])
def test_programs_have_no_logits_where_attention_has_no_room(mixing):
    stack = StackConfig(num_layers=1, mixing=mixing, kernel_size=2)
    model = hybrid(encoder=stack, decoder=stack).build(jax.random.key(1))
    programs = stablehlo.export_programs(model, encoder_length=5, decoder_length=2)
    params = dict(named_leaves(model))
    state = programs["start"].call(params, programs["encode"].call(params, SOURCES), SOURCES)
    expected = jax.jit(ConvT5.__call__)(model, SOURCES, TARGETS)
    for step, tokens in enumerate(TARGETS.T):
        logits, state = programs["step"].call(params, state, tokens)
        if mixing == "attention" and step >= 2:
            assert np.isnan(logits).all()
        else:
            np.testing.assert_allclose(logits, expected[:, step], rtol=0, atol=1e-5)


def test_lengths_of_programs_are_checked(model, tmp_path):
    with pytest.raises(UserError, match="encoder_length=0 must be at least 1"):
        stablehlo.write_programs(tmp_path, model, encoder_length=0, decoder_length=4)
    with pytest.raises(UserError, match="2147483648 must be at least 1, and at most"):
        stablehlo.write_programs(tmp_path, model, encoder_length=2**31, decoder_length=4)
    stack = StackConfig(num_layers=1, mixing="depthwise", kernel_size=2)
    config = hybrid(encoder=stack, decoder=stack, positions="learned", max_positions=6)
    learned = config.build(jax.random.key(1))
    with pytest.raises(UserError, match="decoder_length=7 must be at least 1, and at most 6"):
        stablehlo.write_programs(tmp_path, learned, decoder_length=7)
    stablehlo.write_programs(tmp_path, learned)
    about = json.loads((tmp_path / "programs.json").read_text())
    assert (about["encoder_length"], about["decoder_length"]) == (6, 6)
