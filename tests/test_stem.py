"""The stem for text: what it computes, what padding and packing do to it, and models behind one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick
from test_model import VOCAB, random_tokens, shift, stack, tiny_config

from convt5 import data, inspect
from convt5.analysis import costs, receptive_field
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.generation import decoding
from convt5.generation.decoding import Greedy, decode, score
from convt5.interchange import hugging_face, portable, run_files
from convt5.modeling.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.modeling.model import ConvT5
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import MeshConfig, token_sharding
from convt5.modeling.stem import TextStem, window_segments
from convt5.modeling.tree_paths import named_leaves
from convt5.training.losses import TextLoss
from convt5.training.optimizer import SGDConfig
from convt5.training.schedule import Constant
from convt5.training.train_state import (
    abstract_state,
    make_init_state,
    new_state,
    state_shardings,
)
from convt5.training.train_step import StepConfig, make_train_step

STEMS = {
    "halves": TextStemConfig(strides=(2,), kernel_size=3),
    "quarters": TextStemConfig(strides=(2, 2), kernel_size=(4, 3), channels=(12, None)),
    "keeps": TextStemConfig(strides=(1, 1), kernel_size=(3, 4), norm="layer", activation="gelu"),
    "patches": TextStemConfig(
        strides=(3,), kernel_size=3, norm="none", activation="none", projection=False
    ),
}
run = jax.jit(ConvT5.__call__)
encode = jax.jit(ConvT5.encode)


def config(stem: str | None, variant: str = "dynamic", **changes) -> ConvT5Config:
    return tiny_config(variant, stem=STEMS[stem] if stem else None, **changes)


@functools.cache
def model(stem: str | None, variant: str = "dynamic", **changes) -> ConvT5:
    return config(stem, variant, **changes).build(jax.random.key(0))


def oracle(stem: TextStem, about: TextStemConfig, x, ids):
    """The stem of one row in loops: [length, embed] and its segment ids."""
    x, ids = np.asarray(x, np.float64), list(ids)
    for layer, stride in zip(stem.layers, about.strides, strict=True):
        kernel = np.asarray(layer.kernel[...], np.float64)
        size = len(kernel)
        # The taps beside the block are shared by both sides, an odd one is on the left.
        left = (size - stride + 1) // 2
        rows, segments = [], []
        for o in range(math.ceil(len(x) / stride)):
            segment = max(ids[o * stride : (o + 1) * stride])
            y = np.zeros(kernel.shape[2])
            for j in range(size):
                i = o * stride - left + j
                if 0 <= i < len(x) and segment and ids[i] == segment:
                    y += x[i] @ kernel[j]
            if about.norm == "layer":
                y = y - y.mean()
            if about.norm != "none":
                y = y / np.sqrt((y**2).mean() + 1e-6) * np.asarray(layer.norm.scale[...])
            if about.norm == "layer":
                y = y + np.asarray(layer.norm.bias[...])
            if about.activation == "relu":
                y = np.maximum(y, 0)
            if about.activation == "gelu":
                y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            rows.append(y if segment else np.zeros_like(y))
            segments.append(segment)
        x, ids = np.array(rows), segments
    if stem.output is not None:
        x = x @ np.asarray(stem.output.kernel[...], np.float64)
    return x, ids


@pytest.mark.parametrize("name", quick(list(STEMS), chosen=["quarters", "keeps"]))
@pytest.mark.parametrize("ids", [[1] * 9 + [0, 0], [1] * 12, [1] * 6 + [2] * 6], ids=str)
def test_a_stem_is_what_the_equations_say(name, ids):
    stem = TextStem(config(name), key=jax.random.key(1))
    for layer in stem.layers:
        if layer.norm is not None and layer.norm.bias is not None:
            layer.norm.bias[...] = jnp.linspace(-1, 1, len(layer.norm.bias[...]))
    x = jax.random.normal(jax.random.key(2), (1, len(ids), 8))
    found = jax.jit(TextStem.__call__)(stem, x, jnp.array([ids]))
    expected, expected_ids = oracle(stem, STEMS[name], x[0], ids)
    np.testing.assert_allclose(found.features[0], expected, atol=2e-5)
    assert found.segment_ids[0].tolist() == expected_ids
    assert found.features.shape[1] == config(name).encoder_positions(len(ids))


def test_windows_belong_to_the_tokens_in_them():
    ids = jnp.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    assert window_segments(ids, 2).tolist() == [[1, 1, 0], [1, 0, 0]]
    assert window_segments(ids, 1) is ids


def test_a_stem_that_copies_changes_nothing():
    """Stride 1, one tap at the position itself with the identity, no norm and no activation."""
    plain = model(None)
    copying = TextStemConfig(
        strides=(1,), kernel_size=3, norm="none", activation="none", projection=False
    )
    stemmed = tiny_config(stem=copying).build(jax.random.key(0))
    assert stemmed.stem is not None
    stemmed.stem.layers[0].kernel[...] = jnp.zeros((3, 8, 8)).at[1].set(jnp.eye(8))
    source, target = random_tokens(0, 2, 7), shift(random_tokens(1, 2, 5))
    np.testing.assert_allclose(run(stemmed, source, target), run(plain, source, target), atol=1e-6)


def test_models_without_a_stem_are_initialised_as_before():
    names = dict(named_leaves(model(None)))
    others = dict(named_leaves(model("halves")))
    assert {name for name in others if name not in names} == {
        "stem/layers/0/kernel",
        "stem/layers/0/norm/scale",
        "stem/output/kernel",
    }
    for name, value in names.items():
        np.testing.assert_array_equal(value, others[name])


@pytest.mark.parametrize("variant", quick(["dynamic", "attention"], chosen=["dynamic"]))
@pytest.mark.parametrize("name", quick(list(STEMS), chosen=["quarters"]))
def test_longer_padding_changes_nothing(name, variant):
    # Rows of 5, 6 and 7 tokens end anywhere in a window; 7 positions fill whole windows of no stem.
    source, target = random_tokens(0, 3, 7), shift(random_tokens(1, 3, 5))
    source = np.where(np.arange(7) < np.array([[5], [6], [7]]), source, 0)
    alone = run(model(name, variant), source, target)
    padded = run(model(name, variant), np.pad(source, ((0, 0), (0, 7))), target)
    np.testing.assert_allclose(padded, alone, atol=2e-5)


@pytest.mark.parametrize("name", quick(list(STEMS), chosen=["quarters", "patches"]))
def test_every_token_is_read_and_padding_is_not(name):
    built, length = model(name), 7
    stem = built.stem
    assert stem is not None
    ids = jnp.array([[1] * length + [0] * 3])
    x = jax.random.normal(jax.random.key(2), (1, 10, 8))
    weights = jax.random.normal(jax.random.key(3), (8,))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(stem(x, ids).features @ weights)))
    read = jnp.any(gradient(x) != 0, axis=-1)[0]
    assert read.tolist() == [True] * length + [False] * 3


@pytest.mark.parametrize("positions", quick(["none", "learned"], chosen=["learned"]))
def test_packed_examples_equal_separate_ones_at_stride_1(positions):
    built = model("keeps", positions=positions, max_positions=16)
    sources = [random_tokens(i, 1, n) for i, n in enumerate((4, 6))]
    row = np.concatenate([*sources, np.zeros((1, 2), np.int32)], axis=1)
    ids = np.array([[1] * 4 + [2] * 6 + [0] * 2], np.int32)
    at = np.array([[*range(4), *range(6), 0, 0]], np.int32)
    packed = encode(built, row, segment_ids=ids, positions=at)
    for source, where in zip(sources, (slice(0, 4), slice(4, 10)), strict=True):
        np.testing.assert_allclose(packed[:, where], encode(built, source), atol=2e-5)


@pytest.mark.parametrize("positions", quick(["none", "learned"], chosen=["learned"]))
def test_examples_that_begin_at_a_multiple_of_the_stride_equal_separate_ones(positions):
    built = model("quarters", positions=positions, max_positions=16)
    first, second = random_tokens(0, 1, 8), random_tokens(1, 1, 7)
    row = np.concatenate([first, second, np.zeros((1, 1), np.int32)], axis=1)
    ids = np.array([[1] * 8 + [2] * 7 + [0]], np.int32)
    at = np.array([[*range(8), *range(7), 0]], np.int32)
    packed = encode(built, row, segment_ids=ids, positions=at)
    np.testing.assert_allclose(packed[:, :2], encode(built, first), atol=2e-5)
    np.testing.assert_allclose(packed[:, 2:], encode(built, second), atol=2e-5)


@pytest.mark.parametrize("ids", [[1] * 8, [3] * 5 + [0] * 3, [0] * 8])
def test_rows_of_a_single_segment_are_not_packed(ids):
    source, target = random_tokens(0, 1, 8), shift(random_tokens(1, 1, 5))
    given = np.array([ids], np.int32)
    both = {"encoder_segment_ids": given, "decoder_segment_ids": np.full((1, 5), max(ids))}
    row = jax.eval_shape(lambda: model("halves").outputs(source, target, **both))
    assert row.shape[:2] == (1, 5)


def test_packed_rows_are_refused_where_the_stem_has_a_stride():
    source, target = random_tokens(0, 1, 8), shift(random_tokens(1, 1, 5))
    ids = np.array([[1] * 4 + [2] * 4], np.int32)
    with pytest.raises(UserError, match=r"stride of 2, and these rows are packed.*pack = False"):
        model("halves")(source, target, encoder_segment_ids=ids)
    for ids in ([1] * 3 + [2] * 5, [2] * 3 + [1] * 5, [2] * 2 + [0] + [1] * 5):
        with pytest.raises(
            UserError, match=r"begins at position 3, inside a window.*multiples of its stride 2"
        ):
            model("halves").encode(source, segment_ids=np.array([ids], np.int32))
    rows = {"mixture": "t", "batch_size": 1, "encoder_length": 8, "decoder_length": 8}
    packed = data.DataConfig(**rows, pack=True)
    with pytest.raises(UserError, match=r"pack=True puts several .* stride of 4"):
        packed.check_model(config("quarters"))
    packed.check_model(config("keeps"))
    packed.check_model(config(None))
    data.DataConfig(**rows).check_model(config("quarters"))


DECODED = [
    ("quarters", {}),
    ("halves", {"variant": "hybrid"}),
    ("keeps", {"positions": "learned", "max_positions": 16}),
]


@pytest.mark.parametrize("case", quick(DECODED, chosen=DECODED[1:2]), ids=lambda case: case[0])
def test_decoding_is_the_function_that_was_trained(case):
    name, changes = case
    built = model(name, **changes)
    source = np.pad(random_tokens(0, 2, 9), ((0, 0), (0, 2)))
    source[1, 6:] = 0
    target = shift(random_tokens(1, 2, 6))
    expected = run(built, source, target)
    ids = (source != 0).astype(np.int32)
    state = built.init_decoding(encode(built, source), encoder_segment_ids=ids, length=6)
    step = jax.jit(ConvT5.decode_step)
    for i in range(6):
        logits, state = step(built, state, target[:, i])
        np.testing.assert_allclose(logits, expected[:, i], atol=2e-5)


@pytest.mark.slow
def test_decoded_sequences_have_the_scores_of_teacher_forcing():
    built, source = model("quarters"), random_tokens(0, 2, 9)
    found = decode(built, source, strategy=Greedy(), max_length=5)
    scores = score(built, source, found.tokens, lengths=found.lengths)
    np.testing.assert_allclose(found.scores, scores.scores, atol=2e-5)
    padded = decode(built, np.pad(source, ((0, 0), (0, 5))), strategy=Greedy(), max_length=5)
    np.testing.assert_array_equal(padded.tokens, found.tokens)


def test_sources_longer_than_the_positions_behind_a_stem_share_bounded_compilations():
    built = model("halves", positions="learned", max_positions=12)
    compiled = decoding._search._cache_size()
    for length in range(17, 25):  # At most 12 positions, though more than 12 tokens.
        decode(built, random_tokens(0, 2, length), max_length=5)
    assert decoding._search._cache_size() - compiled == 1
    with pytest.raises(UserError, match=r"13 tokens is longer than max_positions=12"):
        decode(built, random_tokens(0, 2, 25), max_length=5)


@pytest.mark.parametrize("name", STEMS)
def test_parameters_and_flops_are_those_of_the_model(name):
    about = config(name)
    abstract = jax.eval_shape(about.build, jax.random.key(0))
    real = {name: leaf.shape for name, leaf in named_leaves(abstract)}
    assert costs.parameter_shapes(about) == real
    cost = costs.model_cost(about, encoder_length=24, decoder_length=6)
    stem = sum(math.prod(shape) for n, shape in real.items() if n.startswith("stem/"))
    assert sum(part.parameters for part in cost.stem) == stem
    assert cost.encoder_positions == 24 // about.stem_stride


def test_flops_are_those_of_the_program_within_one_percent():
    stem = TextStemConfig(strides=(2, 2))
    about = tiny_config(
        stem=stem, emb_dim=256, mlp_dim=512, num_heads=4, head_dim=64, vocab_size=512
    )
    cost = costs.model_cost(about, encoder_length=64, decoder_length=16)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2, 16), jnp.int32)
    abstract = jax.eval_shape(about.build, jax.random.key(0))
    program = jax.jit(ConvT5.__call__).lower(abstract, *tokens)
    counted = program.cost_analysis()
    assert counted is not None
    assert 2 * cost.forward_flops == pytest.approx(counted["flops"], rel=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(list(STEMS), chosen=["quarters"]))
def test_the_measured_field_is_that_of_the_closed_form(name):
    convolutions = stack(mixing="depthwise", kernel_size=3, dilation=2)
    built = model(name, encoder=convolutions, decoder=convolutions)
    tokens = jax.random.randint(jax.random.key(1), (4, 96), 1, VOCAB)
    for field in receptive_field.measure(built, tokens, num_draws=8):
        assert field.extent == field.reach


@pytest.mark.parametrize(
    ("about", "left", "right"),
    [
        (TextStemConfig(strides=(2,), kernel_size=3), 1, 1),
        (TextStemConfig(strides=(2, 2), kernel_size=3), 3, 3),
        (TextStemConfig(strides=(4,), kernel_size=4), 0, 3),
        (TextStemConfig(strides=(1, 2, 2), kernel_size=(4, 2, 5)), 2 + 0 + 2 * 2, 1 + 1 + 2 * 2),
    ],
)
def test_the_field_of_a_stem_follows_from_kernels_and_strides(about, left, right):
    cost = costs.model_cost(tiny_config(stem=about), encoder_length=32, decoder_length=4)
    assert (cost.stem[-1].reach.left, cost.stem[-1].reach.right) == (left, right)


def test_descriptions_come_back_and_name_what_they_do_not_know():
    for name in STEMS:
        about = config(name)
        assert portable.revive(portable.describe(about)) == about
    assert portable.revive(portable.describe(config(None))) == config(None)
    wrong = portable.describe(config("halves"))
    wrong["stem"]["stride"] = 3
    with pytest.raises(UserError, match=r"setting 'stem\.stride' is unknown.*strides"):
        portable.revive(wrong)


@pytest.mark.parametrize("name", STEMS)
def test_a_model_written_as_a_gin_file_is_read_as_the_same(name, tmp_path):
    path = tmp_path / "model.gin"
    path.write_text(run_files.model_gin(config(name), origin="a test"))
    assert gin_config.load([str(path)], roots=["%MODEL"]).macro("MODEL") == config(name)


def test_transformers_has_no_stem():
    with pytest.raises(UserError, match=r"stem=TextStemConfig.* but T5 has None"):
        hugging_face.as_settings(config("halves", "attention"))


MESHES = {
    "fsdp_tensor": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence": MeshConfig(data=2, sequence=2, tensor=2),
}


@functools.cache
def updated(mesh: MeshConfig, count: int) -> dict[str, np.ndarray]:
    """The parameters after an update on so many devices, by name."""
    layers = StackConfig(num_layers=1, mixing="depthwise", kernel_size=3)
    about = config("halves", emb_dim=16, num_heads=4, encoder=layers, decoder=layers)
    rng = np.random.default_rng(0)
    source = rng.integers(1, VOCAB, (16, 16), dtype=np.int32)
    source[::3, 9:] = 0
    target = rng.integers(1, VOCAB, (16, 8), dtype=np.int32)
    batch = {
        "encoder_input_tokens": source,
        "decoder_input_tokens": shift(target),
        "decoder_target_tokens": target,
        "decoder_loss_weights": np.ones_like(target),
    }
    update = StepConfig(
        model=about,
        loss=TextLoss(),
        optimizer=SGDConfig(),
        schedule=Constant(rate=1.0),
    )
    optimizer = update.optimizer.build(update.schedule)
    placed = mesh.build(jax.devices()[:count])
    shardings = state_shardings(abstract_state(about, optimizer), placed, TEXT_RULES)
    tokens = token_sharding(placed)
    make = functools.partial(new_state, about, optimizer)
    state = make_init_state(make, shardings)(jax.random.key(0))
    step = make_train_step(update, optimizer, shardings, tokens, seed_key=jax.random.key(1))
    state, _ = step(state, jax.device_put(batch, tokens))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state.model)}


@pytest.mark.parametrize("mesh", quick(list(MESHES), chosen=[]))
def test_an_update_is_the_same_on_every_mesh(mesh):
    alone, shared = updated(MeshConfig(), 1), updated(MESHES[mesh], 8)
    for name, value in alone.items():
        np.testing.assert_allclose(shared[name], value, atol=2e-5, err_msg=name)


def test_lengths_that_a_mesh_cannot_split_behind_the_stem_are_refused(capsys):
    flags = ["--gin_file=gin/models/stem_dynamic_tiny.gin", "--devices=2"]
    split = ["--gin.sharding.MeshConfig.sequence=2", "--gin.sharding.MeshConfig.data=1"]
    with pytest.raises(UserError, match=r"stem's stride\)=9 must be a multiple of sequence=2"):
        inspect.main([*flags, *split, "--encoder_length=36"])
    assert inspect.main([*flags, *split, "--encoder_length=40"]) == 0
    shown = capsys.readouterr().out
    assert "40 tokens become 10 positions" in shown
    assert "stem/layers/{0-1}/kernel" in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strides": ()}, r"stem.strides=\(\) must list the stride"),
        ({"strides": 2}, "stem.strides=2 must list the stride"),
        ({"strides": (2, 0)}, "stem.strides holds 0; it must hold integers of at least 1"),
        ({"kernel_size": (3, 3, 3)}, "stem.kernel_size lists 3 values for 2 strides"),
        ({"kernel_size": 1}, "kernel_size=1 must be at least its stride 2"),
        ({"channels": (0, None)}, "stem.channels holds 0"),
        ({"channels": 12, "projection": False}, "projection=False needs emb_dim=8 channels"),
        ({"norm": "batch"}, "norm='batch' must be one of rms, layer, none"),
        ({"activation": "silu"}, "activation='silu' must be one of relu, gelu, none"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(stem=TextStemConfig(**changes))


def test_a_stack_alone_is_unchanged_by_the_field_of_a_stem():
    plain = StackConfig(num_layers=3, mixing="depthwise", kernel_size=(2, 3, 3))
    assert costs.stack_reaches(plain.layers())[-1] == costs.Reach(3, 2)
