"""Models in transformers by the PyTorch file that is written beside them: the same numbers."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import word_pieces
from quick import quick
from safetensors.numpy import load_file, save_file
from test_presets import MODELS, ROOT

import convt5
from convt5 import convert
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.evaluation import predictor
from convt5.generation.decoding import BeamSearch, Greedy, decode
from convt5.interchange import hugging_face, portable, pytorch_model
from convt5.interchange.mapping import build_model, parameter_shapes
from convt5.modeling.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.modeling.tree_paths import named_leaves
from convt5.text import sentinels, vocabulary_files
from convt5.training.losses import TextLoss

# Its first gradient makes torch look for GPUs, and it warns where there are none.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA initialization")

TOLERANCE = 2e-5
LENGTH = 12
SOURCES = np.zeros((3, 11), np.int32)
SOURCES[0, :9], SOURCES[1, :2] = [3, 9, 4, 7, 22, 31, 5, 6, 1], [5, 1]
SOURCES[2] = [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 1]
INPUTS = np.asarray([[0, 7, 2, 9, 30, 12, 7], [0, 4, 4, 8, 8, 8, 0], [0, 1, 2, 3, 4, 5, 6]])
LABELS = np.asarray([[7, 2, 9, 30, 12, 7, 1], [4, 4, 8, 8, 8, 1, 0], [1, 2, 3, 4, 5, 6, 1]])

ALL_KINDS = {
    "num_layers": 5,
    "mixing": ("dynamic", "lightweight", "depthwise", "long", "attention"),
    "kernel_size": (2, 3, 4, 7, 7),
    "dilation": (3, 2, 1, 1, 1),
    "num_kernels": (2, None, None, None, None),
    "canon": ("A", "BD", "ABCD", "B", "ABCD"),
    "filter_scale": 9,
    "filter_width": 6,
    "filter_bands": 3,
}


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="needs the extra torch")
    return pytest.importorskip("transformers", reason="needs the extra torch")


def tiny(**changes) -> ConvT5Config:
    """Every mixing kind in both stacks, and as many settings as fit that are no defaults."""
    settings = {
        **{"vocab_size": 40, "emb_dim": 12, "mlp_dim": 10, "num_heads": 2, "head_dim": 5},
        "encoder": StackConfig(**ALL_KINDS, conv_bias=True, canon_padding="CENTERED"),
        "decoder": StackConfig(**ALL_KINDS, predictor_bias=True, canon_bias=True),
        "mlp": "gated_gelu",
        "positions": "relative",
        "relative_buckets": 8,
        "relative_max_distance": 10,
        "tie_output": False,
        "dtype": "float32",
    }
    return ConvT5Config(**{**settings, **changes})


def released(**changes) -> ConvT5Config:
    """What the released models have, hyena's gates, a stem, layer norms, and no projections."""
    stack = {
        "num_layers": 2,
        "mixing": ("lightweight", "long"),
        "kernel_size": 4,
        "pointwise": True,
        "projection_bias": True,
        "conv_bias": True,
        "gating": "hyena",
        "filter_scale": 9,
        "canon": "C",
        "canon_activation": "silu",
        "canon_kernel_size": 3,
    }
    other = {"input_projection": "linear", "output_projection": False, "normalize_taps": False}
    changes = {
        "encoder": StackConfig(**stack, padding=(1, 2)),
        "decoder": StackConfig(**stack, **other, attention_layers=(-1,)),
        "stem": TextStemConfig(strides=(2, 1), channels=(8, None), norm="layer", activation="gelu"),
        "norm": "layer",
        "mlp": "relu",
        "mlp_bias": True,
        "positions": "learned",
        "max_positions": 20,
        "hide_start_token": True,
        "tie_output": True,
        **changes,
    }
    return tiny(**changes)


@functools.cache
def model(config: ConvT5Config):
    """A model whose parameters are all different, and vary the output."""
    draw = np.random.default_rng(3)
    params = {}
    for name, shape in parameter_shapes(config).items():
        scale = 1.0 if name.endswith("scale") else 0.0
        fan_in = max(1, int(np.prod(shape[:-1]))) if "embedding" not in name else 1
        params[name] = np.float32(scale + 0.5 * draw.normal(size=shape) * fan_in**-0.5)
    return build_model(config, params)


def exported(folder, config: ConvT5Config):
    pytorch_model.write_model(folder, config, dict(named_leaves(model(config))), step=3)
    return folder


def loaded(transformers, folder):
    auto = transformers.AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


def tensor(array):
    return sys.modules["torch"].from_numpy(np.array(array)).long()


def assert_same_model(config, theirs):
    """Compares logits, and the ids of greedy search."""
    forward = jax.jit(lambda m: m(SOURCES, INPUTS))
    logits = theirs(
        input_ids=tensor(SOURCES),
        attention_mask=tensor(SOURCES > 0),  # By default, an ordinary T5 reads padding.
        decoder_input_ids=tensor(INPUTS),
    ).logits
    np.testing.assert_allclose(
        logits.detach().numpy(), forward(model(config)), rtol=0, atol=TOLERANCE
    )
    options = {"attention_mask": tensor(SOURCES > 0), "max_new_tokens": LENGTH}
    found = theirs.generate(tensor(SOURCES), **options, do_sample=False).numpy()[:, 1:]
    greedy = decode(model(config), SOURCES, max_length=LENGTH, strategy=Greedy()).tokens[:, 0]
    np.testing.assert_array_equal(found, greedy[:, : found.shape[1]])


def assert_same_beams(config, theirs):
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": LENGTH}
    options["attention_mask"] = tensor(SOURCES > 0)
    found = theirs.generate(tensor(SOURCES), **options).numpy()[:, 1:]
    ends = np.cumsum(found == 1, axis=1) - (found == 1)
    found = np.where(ends, 0, found)  # transformers fills up with ends, and we with padding.
    beams = BeamSearch(beam_size=3)
    ours = decode(model(config), SOURCES, max_length=LENGTH, strategy=beams).tokens
    np.testing.assert_array_equal(found, ours.reshape(9, -1)[:, : found.shape[1]])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(tiny, id="kinds"),
        pytest.param(released, id="released", marks=pytest.mark.slow),
    ],
)
def both(request, transformers, tmp_path_factory):
    """A config, and the model that transformers loads of it."""
    config = request.param()
    folder = exported(tmp_path_factory.mktemp("exported"), config)
    return config, loaded(transformers, folder), folder


def test_transformers_computes_what_we_do(both):
    config, theirs, _ = both
    assert_same_model(config, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["branch", "post"])
def test_every_layer_order_is_computed_by_transformers(order, transformers, tmp_path):
    stack = StackConfig(num_layers=2, mixing=("dynamic", "attention"), canon="ABCD")
    config = tiny(encoder=stack, decoder=stack, layer_order=order, norm="layer")
    assert_same_model(config, loaded(transformers, exported(tmp_path, config)))


@pytest.mark.slow
def test_beams_of_transformers_are_ours(both):
    config, theirs, _ = both
    assert_same_beams(config, theirs)


def test_training_in_pytorch_starts_at_our_loss_and_gradients(both):
    config, theirs, _ = both
    weights = (LABELS > 0).astype(np.float32)
    inputs = np.pad(LABELS, ((0, 0), (1, 0)))[:, :-1]
    batch = {
        "encoder_input_tokens": SOURCES,
        "decoder_input_tokens": inputs,
        "decoder_target_tokens": LABELS,
        "decoder_loss_weights": weights,
    }
    loss, gradients = jax.jit(jax.value_and_grad(lambda m: TextLoss()(m, batch).means()["loss"]))(
        model(config)
    )
    theirs.zero_grad()
    labels = tensor(np.where(LABELS > 0, LABELS, -100))
    found = theirs(input_ids=tensor(SOURCES), labels=labels).loss
    found.backward()
    assert float(found.detach()) == pytest.approx(float(loss), abs=TOLERANCE)
    named = dict(theirs.named_parameters())
    for path, gradient in named_leaves(gradients):
        other = named[path.replace("/", ".")].grad
        other = np.zeros(gradient.shape) if other is None else other.numpy()
        np.testing.assert_allclose(other, gradient, rtol=0, atol=TOLERANCE, err_msg=path)


def test_decoding_keeps_what_taps_reach_and_no_more(both):
    config, theirs, _ = both
    torch = sys.modules["torch"]
    encoded = theirs.encode(tensor(SOURCES))
    out = theirs(encoder_outputs=encoded, decoder_input_ids=tensor(INPUTS[:, :3]), use_cache=True)
    for i in range(3, 7):
        step = tensor(INPUTS[:, i : i + 1])
        last = theirs(encoder_outputs=encoded, decoder_input_ids=step, past=out.past).logits
    whole = theirs(encoder_outputs=encoded, decoder_input_ids=tensor(INPUTS)).logits[:, -1:]
    torch.testing.assert_close(last, whole, rtol=0, atol=TOLERANCE)
    for layer, past in zip(config.decoder_layers, out.past.layers, strict=True):
        if layer.kind in ("dynamic", "lightweight", "depthwise"):
            kept = (layer.kernel_size - 1) * layer.dilation
            assert past["mixing"].shape == (3, kept, config.emb_dim)
        for name, kept in past.items():
            if name.startswith("canon"):
                assert kept.shape[1] == layer.canon_slots


def test_a_model_changed_in_pytorch_comes_back_bit_for_bit(both, tmp_path):
    config, theirs, folder = both
    before = pytorch_model.read_model(folder)
    assert before.config == config
    assert before.step == 3
    for path, value in named_leaves(model(config)):
        assert np.asarray(value).tobytes() == before.params[path].tobytes()
    torch = sys.modules["torch"]
    with torch.no_grad():
        originals = [p.clone() for p in theirs.parameters()]
        for p in theirs.parameters():
            p.mul_(1.1)
    theirs.save_pretrained(tmp_path)
    after = pytorch_model.read_model(tmp_path)
    assert after.config == config
    for path, value in theirs.named_parameters():
        name = path.replace(".", "/")
        assert value.detach().numpy().tobytes() == after.params[name].tobytes()
    with torch.no_grad():
        for p, original in zip(theirs.parameters(), originals, strict=True):
            p.copy_(original)
    assert (tmp_path / pytorch_model.CODE).is_file()


def small(name: str) -> ConvT5Config:
    """A preset with few channels and pieces, and two layers where all layers are alike."""
    config = gin_config.load([name], roots=["%MODEL"]).macro("MODEL")
    sizes = {"vocab_size": 40, "emb_dim": 16, "mlp_dim": 12, "num_heads": 2, "head_dim": 6}
    sizes |= {name: shortened(getattr(config, name)) for name in ("encoder", "decoder")}
    return dataclasses.replace(config, **sizes, dropout_rate=0.0, dtype="float32", scan_layers=True)


def shortened(stack: StackConfig) -> StackConfig:
    values = (getattr(stack, field.name) for field in dataclasses.fields(stack))
    is_alike = not any(isinstance(v, tuple) and len(v) == stack.num_layers for v in values)
    return dataclasses.replace(stack, num_layers=2) if is_alike else stack


PRESETS = [name for name in MODELS if "/vit_" not in name]
COMPARED: set[ConvT5Config] = set()


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_computed_by_transformers(name, transformers, tmp_path):
    config = small(name)
    if config in COMPARED:
        return  # Sizes of a preset that differ in the number of layers alone.
    COMPARED.add(config)
    if hugging_face.is_t5(config):
        hugging_face.write_model(tmp_path, config, dict(named_leaves(model(config))))
    else:
        exported(tmp_path, config)
    theirs = loaded(transformers, tmp_path)
    assert_same_model(config, theirs)
    assert_same_beams(config, theirs)


def test_token_dropout_is_in_training_alone(transformers, tmp_path):
    config = tiny(token_dropout_rate=0.5)
    theirs = loaded(transformers, exported(tmp_path, config))
    assert_same_model(config, theirs)
    ids = tensor(SOURCES)
    whole = theirs.encode(ids).last_hidden_state
    once, again = (theirs.train().encode(ids).last_hidden_state for _ in range(2))
    assert not once.equal(again)
    assert not once.equal(whole)


def test_options_that_other_models_have_are_refused(transformers, tmp_path):
    theirs = loaded(transformers, exported(tmp_path, tiny()))
    ids = tensor([[3, 4, 1]])
    given = {"input_ids": ids, "labels": ids}
    assert theirs(**given, return_dict=True).loss == theirs(**given).loss
    with pytest.raises(TypeError, match="output_attentions"):
        theirs(**given, output_attentions=True)
    # The Trainer gives losses their number of items where a model takes any option.
    assert not theirs.accepts_loss_kwargs


def test_the_pytorch_file_is_short_and_needs_nothing_of_ours():
    text = (ROOT / "convt5" / "interchange" / pytorch_model.CODE).read_text()
    assert text.count("\n") <= 500
    assert not re.search(r"^\s*(from|import) convt5", text, re.MULTILINE)


# Reading


def test_a_folder_is_data_and_its_code_is_never_run(tmp_path):
    folder = exported(tmp_path, tiny())
    (folder / pytorch_model.CODE).write_text("raise SystemExit")
    loaded = convt5.load_model(folder)
    assert loaded.config == tiny()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"convt5": None}, "the model is None; it must map settings to values"),
        ({"convt5": {"vocab_size": 7}}, "encoder is missing"),
        ({"step": -1}, "step=-1"),
        ({"step": 2**31}, "step=2147483648"),
        ({"step": "3"}, "step='3'"),
        ({"decoder_start_token_id": 2}, "decoder_start_token_id=2 must be 0"),
    ],
)
def test_a_config_that_does_not_fit_is_one_message(tmp_path, change, message):
    exported(tmp_path, tiny())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(UserError, match=message):
        pytorch_model.read_model(tmp_path)


def test_arrays_that_do_not_fit_are_listed(tmp_path):
    exported(tmp_path, tiny())
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["more"] = arrays.pop("output_head.kernel")
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"output_head\.kernel is missing") as caught:
        pytorch_model.read_model(tmp_path)
    assert "variable more" in str(caught.value)


# The command


@pytest.mark.parametrize("count", [0, 7])
def test_bytes_have_the_ids_of_the_vocabulary_they_were_trained_with(transformers, count, tmp_path):
    pytest.importorskip("tensorflow", reason="vocabularies are those of seqio")
    kept = vocabulary_files.KeptVocabulary("characters", count)
    vocabulary_files.write_for_hugging_face(tmp_path, vocabulary_files.KeptText(kept, kept))
    settings = {"model_type": "convt5", "auto_map": {"AutoConfig": "modeling_convt5.ConvT5Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = vocabulary_files.build_vocabulary(kept, None)
    text = "Grüße, 1"
    assert tokenizer(text).input_ids == [*ours.encode(text), 1]
    if count:
        found = tokenizer("<extra_id_0><extra_id_6>", add_special_tokens=False).input_ids
        assert found == [sentinels.ids_of(ours)[i] for i in (0, 6)]


TEXTS = ["", " ", "Grüße, 1", "Return the  value of the object.", "▁ a", "\u00a0a\u200bb\r\nc"]
TEXTS.append(" It's\n\ta “test”: ﬁne… 中文 🙂")


@pytest.mark.parametrize("num_sentinels", [100, 7])
def test_pieces_have_the_ids_of_the_vocabulary_they_were_trained_with(
    transformers, num_sentinels, tmp_path
):
    word_recall = pytest.importorskip("convt5.tasks.word_recall")
    content = pathlib.Path(word_recall.VOCABULARY_FILE).read_bytes()
    kept = vocabulary_files.KeptVocabulary("sentencepiece", num_sentinels, content)
    vocabulary_files.write_for_hugging_face(tmp_path, vocabulary_files.KeptText(kept, kept))
    settings = {"model_type": "convt5", "auto_map": {"AutoConfig": "modeling_convt5.ConvT5Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    ours = vocabulary_files.build_vocabulary(kept, tmp_path / "spiece.model")
    for text in TEXTS:
        ids = predictor.encode_text(ours, text)
        assert tokenizer(text).input_ids == [*ids, 1], text
        assert tokenizer.decode(ids) == ours.decode(ids), text
    marked = "The <extra_id_0> of the<extra_id_6>."
    found = tokenizer(marked, add_special_tokens=False).input_ids
    assert found == predictor.encode_text(ours, marked)
    assert len(tokenizer) == ours.vocab_size


@pytest.fixture
def portable_folder(tmp_path):
    config = tiny()
    folder = tmp_path / "portable"
    folder.mkdir()
    portable.write_model(folder, config, dict(named_leaves(model(config))), step=5)
    return folder


def run(*flags: str) -> None:
    assert convert.main(flags) == 0


@pytest.mark.slow
def test_the_command_goes_there_and_back(portable_folder, tmp_path):
    out, back = tmp_path / "out", tmp_path / "back"
    run(
        *("--from=safetensors", "--to=transformers", "--license=mit"),
        *(f"--checkpoint={portable_folder}", f"--output_dir={out}"),
    )
    card = (out / "README.md").read_text()
    assert 'license: "mit"' in card
    assert "5 updates" in card
    assert "trust_remote_code=True" in card
    run(
        *("--from=transformers", "--to=safetensors"),
        *(f"--checkpoint={out}", f"--output_dir={back}"),
    )
    for name in ("model.safetensors", "convt5.json"):
        assert (back / name).read_bytes() == (portable_folder / name).read_bytes()


TARGETS = ["transformers", "hf", "safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("target", quick(TARGETS, chosen=["safetensors"]))
def test_weights_of_half_the_bytes_are_the_rounded_ones(target, tmp_path):
    config = tiny()
    if target == "hf":
        stack = StackConfig(num_layers=1, mixing="attention")
        config = tiny(encoder=stack, decoder=stack)
    params = {path: np.asarray(value) for path, value in named_leaves(model(config))}
    (tmp_path / "in").mkdir()
    portable.write_model(tmp_path / "in", config, params)
    given = [f"--checkpoint={tmp_path / 'in'}", "--from=safetensors", f"--to={target}"]
    run(*given, f"--output_dir={tmp_path / 'whole'}")
    run(*given, f"--output_dir={tmp_path / 'half'}", "--weights=bfloat16")
    for name, kind in (("whole", "float32"), ("half", "bfloat16")):
        stored = load_file(tmp_path / name / "model.safetensors")
        assert {array.dtype.name for array in stored.values()} == {kind}
    back = convt5.load_model(tmp_path / "half")
    for path, value in named_leaves(back):
        rounded = params[path].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(value, rounded, strict=True)


def test_a_published_model_is_the_same_in_pytorch(transformers, tmp_path):
    config = tiny()
    (tmp_path / "in").mkdir()
    portable.write_model(tmp_path / "in", config, dict(named_leaves(model(config))))
    run(
        *("--from=safetensors", "--to=transformers", "--weights=bfloat16"),
        *(f"--checkpoint={tmp_path / 'in'}", f"--output_dir={tmp_path / 'out'}"),
    )
    ours = jax.jit(lambda m: m(SOURCES, INPUTS))(convt5.load_model(tmp_path / "out"))
    theirs = loaded(transformers, tmp_path / "out")
    found = theirs(input_ids=tensor(SOURCES), decoder_input_ids=tensor(INPUTS)).logits
    np.testing.assert_allclose(found.detach().numpy(), ours, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to=safetensors", "--weights=float64"], "must be one of float32, bfloat16"),
        (["--to=stablehlo", "--weights=bfloat16"], "--to=stablehlo keeps float32"),
    ],
)
def test_weights_of_another_kind_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        run(*flags, "--checkpoint=runs/none", "--output_dir=out")


@pytest.mark.slow
@pytest.mark.parametrize("target", quick(TARGETS[:2], chosen=["transformers"]))
def test_generation_stops_at_the_end_and_length_of_the_models_own_texts(capsys, target, tmp_path):
    stack = StackConfig(num_layers=1, mixing="attention")
    config = tiny() if target == "transformers" else tiny(encoder=stack, decoder=stack)
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    portable.write_model(source, config, dict(named_leaves(model(config))))
    pieces = word_pieces.trained_model(eos_id=3, unk_id=1, bos_id=2)
    kept = vocabulary_files.KeptVocabulary("sentencepiece", 0, pieces)
    text = vocabulary_files.KeptText(kept, kept, decoder_length=114)
    vocabulary_files.write(source / "vocabulary", text)
    convert_to = [f"--to={target}", f"--checkpoint={source}", f"--output_dir={out}"]
    run("--from=safetensors", *convert_to)
    for name in ("config.json", "generation_config.json"):
        told = json.loads((out / name).read_text())
        assert (told["eos_token_id"], told["pad_token_id"]) == (3, 0)
    assert told["max_length"] == 115  # With the token that the decoder starts with.
    back = [f"--from={target}", "--to=safetensors", f"--checkpoint={out}"]
    run(*back, f"--output_dir={tmp_path / 'back'}")
    assert "eos_token_id" not in capsys.readouterr().out
    shutil.rmtree(out / "vocabulary")
    (out / "spiece.model").unlink()
    run(*back, f"--output_dir={tmp_path / 'bare'}")
    assert "eos_token_id=3" in capsys.readouterr().out


def test_a_plain_transformer_stays_an_ordinary_t5(tmp_path):
    stack = StackConfig(num_layers=1, mixing="attention")
    config = tiny(encoder=stack, decoder=stack)
    (tmp_path / "in").mkdir()
    portable.write_model(tmp_path / "in", config, dict(named_leaves(model(config))))
    run(
        *("--from=safetensors", "--to=transformers"),
        *(f"--checkpoint={tmp_path / 'in'}", f"--output_dir={tmp_path / 'out'}"),
    )
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["model_type"] == "t5"
    assert not (tmp_path / "out" / pytorch_model.CODE).exists()
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()
    assert hugging_face.read_model(tmp_path / "out").config == config
