"""Hugging Face's T5 1.0 and 1.1: the same numbers here, and the same files after going there."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import word_pieces
from quick import quick
from safetensors.numpy import load_file, save_file

from convt5.errors import UserError
from convt5.generation.decoding import BeamSearch, Greedy, decode
from convt5.interchange import hugging_face
from convt5.interchange.mapping import Imported, build_model, take_apart
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.attention import relative_position_bucket
from convt5.modeling.tree_paths import named_leaves
from convt5.text import vocabulary_files
from convt5.training.losses import TextLoss

VERSIONS = ["v1_0", "v1_1"]
TOLERANCE = 2e-5  # float32 on both sides; a float64 re-implementation differs by up to 9.4e-6.


@functools.cache
def imported(folder) -> Imported:
    return hugging_face.read_model(folder)


@functools.cache
def reference(folder) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "reference.npz"))


def largest(a, b, where=...) -> float:
    return float(np.abs(np.asarray(a, np.float64) - b)[where].max())


@pytest.fixture(params=quick(VERSIONS, chosen=["v1_1"]))
def folder(request, golden):
    return golden / "hf_t5" / request.param


def test_logits_and_encoder_output_equal_those_of_transformers(folder):
    ref, model = reference(folder), imported(folder).model()
    encode = jax.jit(lambda m, tokens: m.encode(tokens))
    forward = jax.jit(lambda m, *tokens, **rest: m(*tokens, **rest))
    real_source, real_target = ref["attention_mask"] > 0, ref["labels"] != -100
    encoded = encode(model, ref["input_ids"])
    assert largest(encoded, ref["encoder_last_hidden_state"], real_source) < TOLERANCE
    logits = forward(model, ref["input_ids"], ref["decoder_input_ids"])
    assert largest(logits, ref["logits"], real_target) < TOLERANCE
    mask = ref["masked_decoder_attention_mask"]
    masked = forward(
        model, ref["input_ids"], ref["decoder_input_ids"], decoder_segment_ids=mask.astype(np.int32)
    )
    assert largest(masked, ref["masked_logits"], mask > 0) < TOLERANCE
    long = forward(model, ref["long_input_ids"], ref["long_decoder_input_ids"])
    assert largest(long, ref["long_logits"]) < TOLERANCE


def loss_and_gradients(folder) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the loss, and its gradients by transformers' names."""
    ref, original = reference(folder), imported(folder)
    batch = {
        "encoder_input_tokens": ref["input_ids"],
        "decoder_input_tokens": ref["decoder_input_ids"],
        "decoder_target_tokens": np.maximum(ref["labels"], 0),
        "decoder_loss_weights": (ref["labels"] != -100).astype(np.float32),
    }
    loss, gradients = jax.jit(jax.value_and_grad(lambda m: TextLoss()(m, batch).means()["loss"]))(
        original.model()
    )
    return float(loss), take_apart(original.sources, dict(named_leaves(gradients)))


def test_loss_and_gradients_equal_those_of_transformers(folder):
    loss, gradients = loss_and_gradients(folder)
    assert loss == pytest.approx(float(reference(folder)["loss"]), abs=TOLERANCE)
    recorded = load_file(folder / "grads.safetensors")
    assert gradients.keys() == recorded.keys()
    for name, gradient in gradients.items():
        assert largest(gradient, recorded[name]) < TOLERANCE


def test_greedy_and_beam_results_equal_those_of_transformers(folder):
    ref, model = reference(folder), imported(folder).model()
    length = ref["greedy_ids"].shape[1] - 1  # Theirs begin with the start token.
    greedy = decode(model, ref["input_ids"], max_length=length, strategy=Greedy())
    np.testing.assert_array_equal(greedy.tokens[:, 0], ref["greedy_ids"][:, 1:])
    beams = decode(model, ref["input_ids"], max_length=length, strategy=BeamSearch(beam_size=4))
    width = ref["beam4_ids"].shape[-1] - 1
    np.testing.assert_array_equal(beams.tokens[:, :, :width], ref["beam4_ids"][:, :, 1:])
    assert largest(beams.scores, ref["beam4_scores"]) < TOLERANCE


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_relative_positions_are_identical(golden, bidirectional):
    ref = reference(golden / "hf_t5" / "v1_0")
    positions = jax.numpy.asarray(ref["bucket_relative_position"])
    ours = relative_position_bucket(positions, bidirectional=bidirectional)
    name = "bucket_bidirectional" if bidirectional else "bucket_causal"
    np.testing.assert_array_equal(ours, ref[name])


def test_going_there_and_back_changes_no_bit(folder, tmp_path):
    original = imported(folder)
    hugging_face.write_model(tmp_path, original.config, original.params)
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.dtype == after[name].dtype
        assert array.tobytes() == after[name].tobytes(), name
    again = hugging_face.read_model(tmp_path)
    assert again.config == original.config
    for path, value in original.params.items():
        assert value.tobytes() == again.params[path].tobytes()


def test_an_exported_config_says_what_the_original_said(folder, tmp_path):
    original = imported(folder)
    hugging_face.write_model(tmp_path, original.config, original.params)
    theirs = json.loads((folder / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    ignored = {"transformers_version", "classifier_dropout"}
    assert {k: v for k, v in theirs.items() if k not in ignored and ours.get(k) != v} == {}


def test_transformers_loads_an_export_with_equal_logits(folder, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra torch")
    ref, original = reference(folder), imported(folder)
    hugging_face.write_model(tmp_path, original.config, original.params)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    inputs = {
        name: torch.tensor(ref[name])
        for name in ("input_ids", "attention_mask", "decoder_input_ids")
    }
    with torch.no_grad():
        logits = model(**inputs).logits.numpy()
    assert largest(logits, ref["logits"]) < TOLERANCE


def tiny(**changes) -> ConvT5Config:
    stack = StackConfig(num_layers=1, mixing="attention")
    settings = {
        "vocab_size": 11,
        "emb_dim": 6,
        "mlp_dim": 10,
        "num_heads": 3,
        "head_dim": 4,
        "encoder": dataclasses.replace(stack, num_layers=2),
        "decoder": stack,
        "positions": "relative",
        "dtype": "float32",
    }
    return ConvT5Config(**{**settings, **changes})


def written(path, config: ConvT5Config):
    params = dict(named_leaves(config.build(jax.random.key(0))))
    hugging_face.write_model(path, config, params)
    return params


@pytest.mark.slow
def test_other_sizes_and_unequal_stacks_survive(tmp_path):
    config = tiny(mlp="gated_gelu", tie_output=False, relative_buckets=8)
    params = written(tmp_path, config)
    found = hugging_face.read_model(tmp_path)
    assert found.config == config
    forward = jax.jit(lambda m: m(np.asarray([[3, 1]]), np.asarray([[0, 5]])))
    expected = forward(build_model(config, params))
    np.testing.assert_array_equal(forward(found.model()), expected)


@pytest.mark.slow
def test_copies_of_the_token_table_are_skipped_or_refused(tmp_path):
    written(tmp_path, tiny())
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["lm_head.weight"] = arrays["shared.weight"].copy()
    save_file(arrays, tmp_path / "model.safetensors")
    report = hugging_face.read_model(tmp_path).report
    assert [name for name, _ in report.skipped] == ["lm_head.weight"]
    arrays["lm_head.weight"] += 1
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight differs from shared\.weight"):
        hugging_face.read_model(tmp_path)


def test_an_untied_output_is_recognised_in_what_transformers_5_writes(tmp_path):
    written(tmp_path, tiny(tie_output=False))
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert not hugging_face.read_model(tmp_path).config.tie_output


@pytest.mark.parametrize(
    ("version", "is_tied", "expected"),
    [
        ("4.44.2", True, True),
        ("4.44.2", False, False),
        ("4.44.2", None, False),
        ("5.2", True, False),
    ],
)
def test_the_output_of_mt5_is_scaled_where_transformers_4_has_tied_it(version, is_tied, expected):
    settings = hugging_face.as_settings(tiny()) | {"model_type": "mt5"}
    settings |= {"transformers_version": version, "tie_word_embeddings": is_tied}
    if is_tied is None:
        del settings["tie_word_embeddings"]
    assert hugging_face.architecture(settings).tie_output == expected


def test_a_separate_output_is_not_taken_for_a_token_table_under_another_name(tmp_path):
    written(tmp_path, tiny(tie_output=False))
    arrays = load_file(tmp_path / "model.safetensors")
    table = arrays["decoder.embed_tokens.weight"] = arrays.pop("shared.weight")
    save_file(arrays, tmp_path / "model.safetensors")
    found = hugging_face.read_model(tmp_path)
    np.testing.assert_array_equal(found.params["token_embedder/embedding"], table)
    np.testing.assert_array_equal(
        found.params["output_head/kernel"], arrays["lm_head.weight"].T, strict=True
    )


def test_added_tokens_that_are_not_read_are_noted(tmp_path):
    written(tmp_path, tiny())
    (tmp_path / "spiece.model").write_bytes(word_pieces.trained_model())
    assert not hugging_face.read_model(tmp_path).report.notes
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<sep>": 125}))
    (note,) = hugging_face.read_model(tmp_path).report.notes
    assert "read as letters: '<sep>'" in note


def test_no_name_of_an_array_passes_for_something_else_in_a_report(tmp_path):
    written(tmp_path, tiny())
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["\x1b[2J\nmapped    a -> b"] = np.zeros(1, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    report = hugging_face.read_model(tmp_path, allow_unmapped=True).report
    assert report.variables().splitlines()[-1] == r"unmapped  \x1b[2J\nmapped    a -> b"


def test_shards_are_read_and_a_missing_one_is_named(tmp_path):
    written(tmp_path, tiny())
    arrays = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(arrays)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: arrays[name] for name in held}, tmp_path / file)
    index = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = hugging_face.read_model(tmp_path)
    np.testing.assert_array_equal(found.params["token_embedder/embedding"], arrays["shared.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks b\.safetensors"):
        hugging_face.read_model(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_type", "bart", "unknown architecture"),
        ("feed_forward_proj", "gated-tanh", "feed_forward_proj='gated-tanh' is unknown"),
        ("d_ff", 11, "expected"),
        ("num_heads", None, "num_heads"),
        ("feed_forward_proj", ["relu"], r"feed_forward_proj=\['relu'\] is unknown"),
        ("dropout_rate", None, "dropout_rate=None must be in"),
        ("layer_norm_epsilon", "1e-6", "config.json: .*norm_epsilon='1e-6' must be positive"),
        ("dense_act_fn", "gelu", "dense_act_fn='gelu' .* feed_forward_proj=relu"),
        ("is_gated_act", True, "is_gated_act=True take the place"),
        ("decoder_start_token_id", 2, "decoder_start_token_id=2 must be 0"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path, setting, value, message):
    written(tmp_path, tiny())
    settings = json.loads((tmp_path / "config.json").read_text())
    settings[setting] = value
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=message):
        hugging_face.read_model(tmp_path)


def test_the_tokens_with_which_transformers_generates_are_those_of_t5(tmp_path):
    written(tmp_path, tiny())
    (tmp_path / "spiece.model").write_bytes(word_pieces.trained_model())
    generation = {"decoder_start_token_id": 0, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (note,) = hugging_face.read_model(tmp_path).report.notes
    assert "eos_token_id=2 of generation_config.json is not kept" in note
    generation["decoder_start_token_id"] = 5
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(UserError, match=r": generation_config\.json: decoder_start_token_id=5"):
        hugging_face.read_model(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    written(tmp_path, tiny())
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["decoder.final_layer_norm.weight"][3] = value
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"decoder\.final_layer_norm\.weight, .* not finite"):
        hugging_face.read_model(tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_weights_of_any_precision_are_read(tmp_path, dtype):
    written(tmp_path, tiny())
    arrays = {n: a.astype(dtype) for n, a in load_file(tmp_path / "model.safetensors").items()}
    save_file(arrays, tmp_path / "model.safetensors")
    found = hugging_face.read_model(tmp_path)
    table = arrays["shared.weight"].astype(np.float32)
    np.testing.assert_array_equal(found.params["token_embedder/embedding"], table, strict=True)


def test_truncated_weights_are_named(folder, tmp_path):
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="truncated"):
        hugging_face.read_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "spiece.model"])
def test_a_pointer_of_git_lfs_is_named(name, tmp_path):
    written(tmp_path, tiny())
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    (tmp_path / name).write_text(pointer)
    read = vocabulary_files.load if name == "spiece.model" else hugging_face.read_model
    with pytest.raises(UserError, match=rf"{name} is a pointer of Git LFS .* run git lfs pull"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ({"mixing": "dynamic"}, r"mixing=dynamic.*--to=transformers"),
        ({"mixing": "attention", "canon": "AC"}, r"Canon layers, and T5 has none.*transformers"),
    ],
)
def test_a_convolutional_model_is_refused_by_name(stack, message, tmp_path):
    config = tiny(encoder=StackConfig(num_layers=1, **stack))
    with pytest.raises(UserError, match=message):
        hugging_face.write_model(tmp_path, config, {})
    assert list(tmp_path.iterdir()) == []


# What transformers itself makes of the configs of T5's relatives, at small sizes.
SMALL = {
    **{"vocab_size": 40, "d_model": 8, "d_kv": 3, "d_ff": 12, "num_layers": 2, "num_heads": 2},
    **{"num_decoder_layers": 1, "dropout_rate": 0.1, "initializer_factor": 1.0},
}
RELATIVES = {
    "t5": ("T5", {}),
    "flan_t5": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "byt5": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "ul2": ("T5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("separate", [False, True], ids=["as made", "separate output"])
@pytest.mark.parametrize("name", quick(list(RELATIVES), chosen=["mt5", "ul2"]))
def test_relatives_of_t5_have_the_logits_that_transformers_gives(name, separate, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    transformers = pytest.importorskip("transformers", reason="needs the extra torch")
    family, changes = RELATIVES[name]
    if separate and not changes:
        pytest.skip("T5 1.0 has no output layer of its own")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **changes)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    if separate:  # As the published weights have it.
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
    theirs.save_pretrained(tmp_path)
    if separate and "lm_head.weight" not in load_file(tmp_path / "model.safetensors"):
        pytest.skip("this version of transformers saves no separate output layer")
    sources, inputs = np.asarray([[3, 9, 4, 1, 0]]), np.asarray([[0, 7, 2]])
    with torch.no_grad():
        wanted = theirs(
            input_ids=torch.from_numpy(sources),
            attention_mask=torch.from_numpy(sources != 0).long(),
            decoder_input_ids=torch.from_numpy(inputs),
        ).logits.numpy()
    found = hugging_face.read_model(tmp_path)
    logits = jax.jit(lambda m: m(sources, inputs))(found.model())
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE)
    hugging_face.write_model(tmp_path, found.config, found.params)
    again = hugging_face.read_model(tmp_path)
    assert again.config == found.config
