"""Decoding: stepping equals teacher forcing, searches equal their definitions, rows stay apart."""

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick

from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.generation import decoding, search
from convt5.generation.decoding import BeamSearch, Greedy, Sampling, bucket_size, decode, score
from convt5.interchange import hugging_face
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.model import ConvT5

VOCAB = 16
END = 1

# Compiling is what these tests spend their time on: few layers, and the same shapes wherever
# possible, so that tests share compilations.
ENCODER = StackConfig(num_layers=1, mixing="lightweight", kernel_size=3)
DECODERS = {
    "attention": {"num_layers": 1, "mixing": "attention"},
    "depthwise": {"num_layers": 1, "mixing": "depthwise", "kernel_size": 4},
    "lightweight": {"num_layers": 1, "mixing": "lightweight", "num_kernels": 2},
    "dynamic": {"num_layers": 1, "mixing": "dynamic", "num_kernels": 2, "kernel_size": 3},
    "dilated": {
        "num_layers": 2,
        "mixing": "depthwise",
        "kernel_size": (2, 3),
        "dilation": (1, 4),
    },
    "hybrid": {"num_layers": 2, "mixing": ("attention", "dynamic"), "num_kernels": 4},
    "released": {
        "num_layers": 1,
        "mixing": "dynamic",
        "kernel_size": 5,
        "pointwise": True,
        "projection_bias": True,
        "predictor_bias": True,
        "conv_bias": True,
    },
}


STRATEGIES = {
    "greedy": Greedy(),
    "sampling": Sampling(temperature=0.8, top_k=8, top_p=0.95, num_results=2),
    "beam": BeamSearch(beam_size=3),
}


@functools.cache
def tiny_model(variant: str = "hybrid", *, seed: int = 0, **overrides) -> ConvT5:
    settings = {
        "vocab_size": VOCAB,
        "emb_dim": 8,
        "mlp_dim": 16,
        "num_heads": 2,
        "head_dim": 4,
        "encoder": ENCODER,
        "decoder": StackConfig(**DECODERS[variant]),
        "dtype": "float32",
        "tie_output": False,
        "positions": "relative" if variant in ("attention", "hybrid") else "none",
    }
    return ConvT5Config(**{**settings, **overrides}).build(jax.random.key(seed))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Half the time of this file went into optimising programs that run for milliseconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def sources(seed: int = 0, batch: int = 3, length: int = 7, vocab: int = VOCAB) -> np.ndarray:
    """Rows of random tokens, each shorter than the one before."""
    tokens = np.random.default_rng(seed).integers(2, vocab, (batch, length), dtype=np.int32)
    return np.where(np.arange(length)[None] < length - np.arange(batch)[:, None], tokens, 0)


def shifted(targets: np.ndarray) -> np.ndarray:
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)))


teacher_forced = jax.jit(ConvT5.__call__)
encode = jax.jit(ConvT5.encode)
decode_all = jax.jit(ConvT5.decode)


@jax.jit
def forced_and_stepwise_logits(model, source, decoder_inputs):
    segment_ids = (source != 0).astype(jnp.int32)
    state = model.init_decoding(
        model.encode(source, segment_ids=segment_ids),
        encoder_segment_ids=segment_ids,
        length=decoder_inputs.shape[1],
    )

    def step(state, tokens):
        logits, state = model.decode_step(state, tokens)
        return state, logits

    stepwise = jnp.moveaxis(jax.lax.scan(step, state, decoder_inputs.T)[1], 0, 1)
    return model(source, decoder_inputs), stepwise


SINGLE_LAYER = st.fixed_dictionaries(
    {
        "mixing": st.sampled_from(["attention", "depthwise", "lightweight", "dynamic", "long"]),
        "kernel_size": st.integers(1, 6),
        "dilation": st.sampled_from([1, 2, 5]),
        "heads": st.sampled_from([None, 1, 4]),
        "canon": st.sampled_from(["", "AC", "BD", "ABCD"]),
    }
)


@st.composite
def configs(draw) -> Callable[[], ConvT5Config]:
    """Models whose two decoder layers differ in everything a layer may choose.

    They are made by the tests: the checks of array types draw random numbers of their own.
    """
    layers = draw(st.lists(SINGLE_LAYER, min_size=2, max_size=2))
    convolved_projections = any("B" in layer["canon"] for layer in layers)
    projections = ["gated", "linear", *([] if convolved_projections else ["none"])]
    decoder = StackConfig(
        num_layers=2,
        mixing=[layer["mixing"] for layer in layers],
        kernel_size=[layer["kernel_size"] for layer in layers],
        dilation=[layer["dilation"] for layer in layers],
        num_kernels=[
            None if layer["mixing"] == "depthwise" else layer["heads"] for layer in layers
        ],
        input_projection=draw(st.sampled_from(projections)),
        canon=[layer["canon"] for layer in layers],
        canon_activation=draw(st.sampled_from(["none", "silu"])),
        pointwise=draw(st.booleans()),
        output_projection=draw(st.booleans()),
        projection_bias=draw(st.booleans()),
        conv_bias=draw(st.booleans()),
    )
    return functools.partial(
        ConvT5Config,
        vocab_size=VOCAB,
        emb_dim=8,
        mlp_dim=8,
        num_heads=2,
        head_dim=4,
        encoder=ENCODER,
        decoder=decoder,
        dtype="float32",
        layer_order=draw(st.sampled_from(["pre", "branch", "post"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        mlp=draw(st.sampled_from(["relu", "gated_gelu"])),
        tie_output=draw(st.booleans()),
        positions=draw(st.sampled_from(["none", "learned", "relative"])),
        max_positions=12,
        hide_start_token=draw(st.booleans()),
    )


@functools.cache
def check_stepping(config: ConvT5Config) -> None:
    model = config.build(jax.random.key(1))
    source = sources()
    decoder_inputs = shifted(np.random.default_rng(2).integers(0, VOCAB, (3, 11), dtype=np.int32))
    forced, stepwise = forced_and_stepwise_logits(model, source, decoder_inputs)
    scale = max(1.0, float(np.abs(forced).max()))
    np.testing.assert_allclose(stepwise, forced, atol=2e-5 * scale)


@pytest.mark.slow
@hypothesis.settings(max_examples=3, deadline=None, derandomize=True)
@hypothesis.given(configs())
def test_stepping_equals_teacher_forcing_for_drawn_models(make_config):
    check_stepping(make_config())


@pytest.mark.nightly
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(configs())
def test_stepping_equals_teacher_forcing_for_many_drawn_models(make_config):
    check_stepping(make_config())


ROOT = pathlib.Path(__file__).resolve().parents[1]
PRESETS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("gin/models", "gin/models/released")
    for path in (ROOT / folder).glob("*.gin")
    if not path.name.startswith("vit_")  # They decode nothing.
)


QUICK_PRESETS = [f"gin/models/{name}_tiny.gin" for name in ("hybrid", "wavenet")]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", quick(PRESETS, chosen=QUICK_PRESETS))
def test_stepping_equals_teacher_forcing_for_every_preset(preset):
    config = shrunk(preset)
    # Presets of several sizes are one when shrunk.
    if preset in QUICK_PRESETS or config not in map(shrunk, QUICK_PRESETS):
        check_stepping(config)


@functools.cache
def shrunk(preset: str) -> ConvT5Config:
    """The preset's layers, with fewer channels; both ways read the same output of the encoder."""
    config = gin_config.load([preset], roots=["%MODEL"]).macro("MODEL")
    return dataclasses.replace(
        config,
        vocab_size=VOCAB,
        emb_dim=16,
        mlp_dim=16,
        num_heads=2,
        head_dim=4,
        dropout_rate=0.0,
        dtype="float32",
        encoder=few_layers(config.encoder, most=1),
        decoder=few_layers(config.decoder, most=4),
    )


def few_layers(stack: StackConfig, *, most: int) -> StackConfig:
    """The first layer of each kind where settings are listed by layer, otherwise two.

    Of wavenet these are dilations up to 8: a larger one reads none of 11 positions.
    """
    listed = {
        field.name: value
        for field in dataclasses.fields(stack)
        for value in (getattr(stack, field.name),)
        if isinstance(value, tuple) and len(value) == stack.num_layers
    }
    if not listed:
        return dataclasses.replace(stack, num_layers=min(2, most))
    kept = list(dict.fromkeys(zip(*listed.values(), strict=True)))[:most]
    columns = zip(*kept, strict=True)
    return dataclasses.replace(
        stack, num_layers=len(kept), **dict(zip(listed, columns, strict=True))
    )


@pytest.mark.parametrize("variant", quick(["dilated", "hybrid"], chosen=["hybrid"]))
def test_packed_teacher_forcing_equals_stepping_each_example(variant):
    model = tiny_model(variant)
    source, target = sources(batch=2), sources(1, batch=2, length=6)
    segments = np.array([1] * 7 + [2] * 6, np.int32)[None]
    target_segments = np.array([1] * 6 + [2] * 5, np.int32)[None]
    packed = teacher_forced(
        model,
        np.concatenate([source[:1], source[1:, :6]], axis=1),
        np.concatenate([shifted(target[:1]), shifted(target[1:, :5])], axis=1),
        encoder_segment_ids=segments,
        decoder_segment_ids=target_segments,
    )
    _, stepped = forced_and_stepwise_logits(model, source, shifted(target))
    np.testing.assert_allclose(packed[0, :6], stepped[0], atol=2e-5)
    np.testing.assert_allclose(packed[0, 6:], stepped[1, :5], atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "variant",
    quick(["attention", "depthwise", "lightweight", "dynamic"], chosen=["dynamic"]),
)
def test_greedy_takes_the_likeliest_token_of_teacher_forcing(variant):
    model, source = tiny_model(variant), sources()
    found = decode(model, source, max_length=9)
    logits = teacher_forced(model, source, shifted(found.tokens[:, 0]))
    for row, length in enumerate(found.lengths[:, 0]):
        best = np.argmax(logits[row], axis=-1)
        np.testing.assert_array_equal(found.tokens[row, 0, :length], best[:length])
        np.testing.assert_array_equal(found.tokens[row, 0, length:], 0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", quick(["dilated", "released", "hybrid"], chosen=["hybrid"]))
def test_beam_scores_are_those_of_scoring_the_results(variant):
    model, source = tiny_model(variant), sources()
    found = decode(model, source, max_length=9, strategy=STRATEGIES["beam"])
    again = score(model, source, found.tokens, lengths=found.lengths, length_penalty=1.0)
    np.testing.assert_allclose(found.scores, again.scores, atol=2e-5)
    np.testing.assert_allclose(found.log_probs, again.log_probs, atol=1e-4)
    assert np.all(np.diff(found.scores, axis=1) <= 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", quick(["greedy", "sampling"], chosen=["sampling"]))
def test_drawn_scores_are_those_of_scoring_the_results(strategy):
    model, source = tiny_model(), sources()
    settings = {"strategy": STRATEGIES[strategy], "key": jax.random.key(3)}
    found = decode(model, source, max_length=9, **settings)
    again = score(model, source, found.tokens, lengths=found.lengths)
    np.testing.assert_allclose(found.scores, again.scores, atol=1e-4)


@pytest.mark.nightly
def test_double_precision_scores_agree_to_double_precision(x64):
    model, source = tiny_model("dynamic", dtype="float64"), sources()
    found = decode(model, source, max_length=5, strategy=BeamSearch(beam_size=2))
    again = score(model, source, found.tokens, lengths=found.lengths, length_penalty=1.0)
    assert found.scores.dtype == np.float64
    # Parameters and lengths are float32; what is computed from them is not.
    np.testing.assert_allclose(found.scores, again.scores, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_is_greedy_search(seed):
    model, source = tiny_model(seed=seed), sources(seed)
    greedy = decode(model, source, max_length=9)
    beam = decode(model, source, max_length=9, strategy=BeamSearch(beam_size=1))
    np.testing.assert_array_equal(beam.tokens, greedy.tokens)
    np.testing.assert_array_equal(beam.lengths, greedy.lengths)
    np.testing.assert_array_equal(beam.ended, greedy.ended)
    np.testing.assert_allclose(beam.log_probs, greedy.log_probs, atol=1e-5)


def all_sequences(vocab: int, length: int):
    """Every sequence that ends, or is cut at `length`."""
    others = [token for token in range(vocab) if token != END]
    for inner in range(length):
        for start in itertools.product(others, repeat=inner):
            yield (*start, END)
    yield from itertools.product(others, repeat=length)


@pytest.mark.parametrize("length_penalty", quick([0.0, 1.5], chosen=[1.5]))
def test_a_wide_beam_finds_the_best_of_all_sequences(length_penalty):
    model, source = tiny_model(vocab_size=5), sources(vocab=5, batch=1)
    every = list(all_sequences(5, 3))
    targets = np.array([[s + (0,) * (3 - len(s)) for s in every]], np.int32)
    lengths = np.array([[len(s) for s in every]], np.int32)
    scores = score(model, source, targets, lengths=lengths, length_penalty=length_penalty).scores
    order = np.argsort(-scores[0])[:10]
    # As many beams as unfinished sequences exist, so that nothing is ever dropped.
    found = decode(
        model,
        source,
        max_length=3,
        strategy=BeamSearch(
            beam_size=64, num_results=10, length_penalty=length_penalty, early_stopping="never"
        ),
    )
    np.testing.assert_allclose(found.scores[0], scores[0, order], atol=1e-5)
    np.testing.assert_array_equal(found.tokens[0], targets[0, order])


def test_absent_results_are_empty():
    model, source = tiny_model(vocab_size=3), sources(vocab=3, batch=1)
    found = decode(model, source, max_length=1, strategy=BeamSearch(beam_size=5))
    np.testing.assert_array_equal(np.isfinite(found.scores[0]), [True, True, True, False, False])
    np.testing.assert_array_equal(found.lengths[0], [1, 1, 1, 0, 0])
    assert sorted(found.tokens[0, :3, 0]) == [0, 1, 2]
    assert not found.tokens[0, 3:].any()


@pytest.mark.parametrize("strategy", quick(list(STRATEGIES), chosen=["sampling", "beam"]))
def test_a_row_depends_neither_on_its_neighbours_nor_on_padding(strategy):
    model, source = tiny_model(), sources()
    keys = jax.random.split(jax.random.key(0), 3)
    settings = {"max_length": 9, "strategy": STRATEGIES[strategy]}
    together = decode(model, source, key=keys, **settings)
    alone = decode(model, np.pad(source[2:3], ((0, 0), (0, 30))), key=keys[2:3], **settings)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])
    np.testing.assert_array_equal(alone.lengths[0], together.lengths[2])
    np.testing.assert_allclose(alone.scores[0], together.scores[2], atol=1e-5)


def test_max_length_only_cuts_a_greedy_result():
    model, source = tiny_model(), sources()
    long = decode(model, source, max_length=9)
    short = decode(model, source, max_length=5)
    np.testing.assert_array_equal(short.tokens, long.tokens[:, :, :5])
    np.testing.assert_array_equal(short.ended, long.ended & (long.lengths <= 5))


def test_an_end_outside_the_vocabulary_ends_nothing():
    found = [
        decode(tiny_model(), sources(), max_length=4, end_id=end_id)
        for end_id in (-1, VOCAB, 2**31, -(2**40))
    ]
    for other in found:
        np.testing.assert_array_equal(other.lengths, 4)
        np.testing.assert_array_equal(other.tokens, found[0].tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_row_keeps_its_own_maximum_length(strategy):
    model, source = tiny_model(), sources()
    settings = {"max_length": 9, "strategy": STRATEGIES[strategy], "key": jax.random.key(0)}
    limits = np.array([0, 2, 9])
    found = decode(model, source, max_lengths=limits, **settings)
    assert np.all(found.lengths <= limits[:, None])
    assert not np.any(found.ended[0])
    assert np.all(found.scores[0] == -np.inf)
    unlimited = decode(model, source, **settings)
    np.testing.assert_array_equal(found.tokens[2], unlimited.tokens[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forced_prefix_begins_every_result_and_is_not_scored(strategy):
    model, source = tiny_model(), sources()
    prefix = np.array([[5, 6, 7], [0, 0, 0], [9, 0, 0]], np.int32)
    lengths = np.array([3, 0, 1], np.int32)
    chosen = STRATEGIES[strategy]
    settings = {"strategy": chosen, "key": jax.random.key(0)}
    found = decode(model, source, max_length=9, prefix=prefix, **settings)
    for row, length in enumerate(lengths):
        want = np.broadcast_to(prefix[row, :length], (found.tokens.shape[1], length))
        np.testing.assert_array_equal(found.tokens[row, :, :length], want)
    again = score(
        model,
        source,
        found.tokens,
        lengths=found.lengths,
        prefix_lengths=lengths,
        length_penalty=getattr(chosen, "length_penalty", 0.0),
    )
    np.testing.assert_allclose(found.scores, again.scores, atol=1e-4)
    free = decode(model, source, max_length=9, **settings)
    np.testing.assert_array_equal(found.tokens[1], free.tokens[1])


def test_forcing_what_greedy_chooses_changes_nothing():
    model, source = tiny_model(), sources()
    free = decode(model, source, max_length=9)
    before_end = np.minimum(2, free.lengths - free.ended)
    prefix = np.where(np.arange(9)[None] < before_end, free.tokens[:, 0], 0)
    assert prefix.any()
    forced = decode(model, source, max_length=9, prefix=prefix)
    np.testing.assert_array_equal(forced.tokens, free.tokens)


class CountingModel(ConvT5):
    """Calls back once for every decoding step that runs."""

    def decode_step(self, state, tokens, *, hide_start_token=None):
        jax.debug.callback(lambda: self.steps.append(1))
        return super().decode_step(state, tokens, hide_start_token=hide_start_token)

    steps: list = []  # noqa: RUF012


STOPPING = [Greedy(), BeamSearch(beam_size=2, early_stopping=True)]


@pytest.mark.parametrize("strategy", quick(STOPPING, chosen=STOPPING[1:]))
def test_decoding_stops_when_all_rows_have_ended(strategy):
    config = tiny_model().config
    model = CountingModel(config, key=jax.random.key(0))
    source = sources()
    CountingModel.steps.clear()
    limits = np.array([2, 4, 3])
    decode(model, source, max_length=64, max_lengths=limits, strategy=strategy, end_id=VOCAB - 1)
    jax.effects_barrier()
    assert 1 <= len(CountingModel.steps) <= 4


def test_shapes_share_bounded_compilations():
    model = tiny_model("lightweight")
    compiled = decoding._search._cache_size()
    for batch, length, longest in itertools.product((5, 6), (9, 11, 12), (13, 16)):
        decode(model, sources(batch=batch, length=length), max_length=longest)
    assert decoding._search._cache_size() - compiled == 1


@hypothesis.given(st.integers(0, 10**6))
def test_buckets_hold_their_counts_and_are_few(count):
    size = bucket_size(count)
    assert count <= size <= max(1, 1.5 * count)
    assert bucket_size(size) == size


def test_buckets_grow_with_the_logarithm():
    assert sorted({bucket_size(n) for n in range(1, 25)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert len({bucket_size(n) for n in range(1, 4097)}) == 24


def test_learned_positions_bound_the_buckets():
    model = tiny_model(positions="learned", max_positions=10)
    found = decode(model, sources(length=10), max_length=10)
    assert found.tokens.shape == (3, 1, 10)
    with pytest.raises(UserError, match=r"11 tokens is longer than max_positions=10"):
        decode(model, sources(length=10), max_length=11)
    with pytest.raises(UserError, match=r"11 tokens is longer than max_positions=10"):
        decode(model, sources(length=11), max_length=10)


def test_sampling_among_one_token_is_greedy():
    model, source = tiny_model(), sources()
    strategy = Sampling(top_k=5, top_p=1e-6)
    drawn = decode(model, source, max_length=9, strategy=strategy, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn.tokens, decode(model, source, max_length=9).tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "allowed"),
    [
        (Sampling(num_results=2048, temperature=0.5), lambda p: np.ones_like(p, bool)),
        (Sampling(num_results=2048, top_k=4), lambda p: np.argsort(np.argsort(-p)) < 4),
        (
            Sampling(num_results=2048, top_p=0.5),
            lambda p: np.array([p[p > x].sum() < 0.5 for x in p]),
        ),
    ],
)
def test_samples_follow_the_distribution_that_was_asked_for(strategy, allowed):
    model, source = tiny_model("dynamic"), sources(batch=1)
    start = np.zeros((1, 1), np.int32)
    logits = np.asarray(teacher_forced(model, source, start))[0, 0] / strategy.temperature
    probabilities = np.asarray(jax.nn.softmax(logits))
    kept = allowed(probabilities)
    wanted = np.where(kept, probabilities, 0) / probabilities[kept].sum()
    drawn = decode(model, source, max_length=1, strategy=strategy, key=jax.random.key(7))
    counts = np.bincount(drawn.tokens[0, :, 0], minlength=VOCAB)
    assert not counts[~kept].any()
    # Five standard deviations of a frequency among 2048 draws.
    np.testing.assert_allclose(counts / 2048, wanted, atol=5 * 0.5 / np.sqrt(2048))


def test_the_same_key_draws_the_same_and_another_key_does_not():
    model, source = tiny_model(), sources()

    def draw(seed):
        key = jax.random.key(seed)
        return decode(model, source, max_length=9, strategy=STRATEGIES["sampling"], key=key).tokens

    np.testing.assert_array_equal(draw(0), draw(0))
    assert not np.array_equal(draw(0), draw(1))


@pytest.mark.slow
def test_hide_start_token_can_be_overridden():
    hiding = tiny_model("released", hide_start_token=True, seed=3)
    graph, _ = nnx.split(tiny_model("released", hide_start_token=False))
    showing = nnx.merge(graph, nnx.state(hiding))
    settings = {"max_length": 9}
    original = decode(hiding, sources(), hide_start_token=False, **settings)
    np.testing.assert_array_equal(original.scores, decode(showing, sources(), **settings).scores)
    assert not np.array_equal(original.scores, decode(hiding, sources(), **settings).scores)


@pytest.mark.slow
def test_bfloat16_models_decode_with_float32_scores():
    found = decode(tiny_model(dtype="bfloat16"), sources(), max_length=9, strategy=BeamSearch())
    assert found.scores.dtype == np.float32
    assert np.all(np.isfinite(found.scores))


AXIS_TYPES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]
"""Of a mesh of `jax.sharding.Mesh`, and of one of `jax.make_mesh`."""


@pytest.mark.parametrize("axes", quick(AXIS_TYPES, chosen=AXIS_TYPES[1:]))
@pytest.mark.parametrize("strategy", quick(["sampling", "beam"], chosen=["beam"]))
def test_rows_spread_over_devices_decode_alike(strategy, axes):
    model, source = tiny_model(), sources()
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (axes,) * 2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    settings = {"max_length": 9, "strategy": STRATEGIES[strategy], "key": jax.random.key(0)}
    spread = decode(jax.device_put(model, whole), source, batch_sharding=rows, **settings)
    one = decode(model, source, **settings)
    np.testing.assert_array_equal(spread.tokens, one.tokens)
    np.testing.assert_allclose(spread.scores, one.scores, atol=1e-5)


@pytest.mark.parametrize("axes", quick(AXIS_TYPES, chosen=AXIS_TYPES[1:]))
def test_rows_spread_over_devices_score_alike(axes):
    model, source = tiny_model(), sources()
    targets = np.stack([sources(seed, length=9) for seed in (1, 2, 3)], axis=1)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (axes,) * 2)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with jax.set_mesh(mesh):
        spread = score(model, source, targets, batch_sharding=rows)
    np.testing.assert_allclose(spread.scores, score(model, source, targets).scores, atol=1e-4)


@functools.partial(jax.jit, static_argnames="copies")
def stepwise_logits(model, source, tokens, copies):
    """Logits of each row of tokens, of which `copies` adjacent ones read one row of the source."""
    segment_ids = (source != 0).astype(jnp.int32)
    encoded = model.encode(source, segment_ids=segment_ids)
    start = model.init_decoding(
        encoded, encoder_segment_ids=segment_ids, length=tokens.shape[1], copies=copies
    )

    def step(state, column):
        logits, state = model.decode_step(state, column)
        return state, logits

    return jnp.moveaxis(jax.lax.scan(step, start, tokens.T)[1], 0, 1)


@pytest.mark.parametrize("batch", quick([1, 2], chosen=[2]))
@pytest.mark.parametrize("variant", quick(["dynamic", "attention"], chosen=["attention"]))
def test_copies_of_a_source_decode_like_rows_of_their_own(variant, batch):
    model, source = tiny_model(variant), sources(batch=batch)
    tokens = np.random.default_rng(3).integers(2, VOCAB, (3 * batch, 6), dtype=np.int32)
    shared = stepwise_logits(model, source, tokens, copies=3)
    apart = stepwise_logits(model, np.repeat(source, 3, axis=0), tokens, copies=1)
    np.testing.assert_allclose(shared, apart, atol=2e-5)


@pytest.mark.parametrize("variant", quick(["dynamic", "attention"], chosen=["attention"]))
def test_targets_of_one_source_are_decoded_like_rows_of_their_own(variant):
    model, source = tiny_model(variant), sources(batch=2)
    tokens = np.random.default_rng(3).integers(2, VOCAB, (6, 5), dtype=np.int32)
    encoded, ids = encode(model, source), (source != 0).astype(np.int32)
    shared = decode_all(model, encoded, tokens, encoder_segment_ids=ids)
    each, each_ids = (np.repeat(x, 3, axis=0) for x in (encoded, ids))
    apart = decode_all(model, each, tokens, encoder_segment_ids=each_ids)
    np.testing.assert_allclose(shared, apart, atol=2e-5)
    with pytest.raises(ValueError, match="5 rows cannot share 2 rows of memory evenly"):
        decode_all(model, encoded, tokens[:5], encoder_segment_ids=ids)


def test_a_search_keeps_each_source_once():
    model, source = tiny_model(), sources(batch=2)
    inputs = search.SearchInputs(source, np.zeros((2, 5), np.int32), *[np.zeros(2, np.int32)] * 2)
    copies = 3
    state = jax.eval_shape(lambda: search.initial_state(model, inputs, copies))
    assert state.position.shape == (2 * copies,)
    for layer in state.layers:
        assert {leaf.shape[0] for leaf in jax.tree.leaves(layer.mixing)} == {2 * copies}
        assert {leaf.shape[0] for leaf in jax.tree.leaves(layer.memory)} == {2}


@pytest.mark.parametrize("rows", quick([1, 2], chosen=[2]))
def test_no_step_copies_what_attention_remembers(rows):
    length, head_dim = 64, 4
    given = {"prefix": np.zeros((rows, length), np.int32)}
    given |= {name: np.full(rows, length, np.int32) for name in ("prefix_lengths", "max_lengths")}
    inputs = search.SearchInputs(encoder_input_tokens=sources(batch=rows), keys=None, **given)
    settings = {"strategy": Greedy(), "end_id": END, "hide_start_token": None}
    program = decoding._search.lower(tiny_model("attention"), inputs, **settings).compile()
    loop, _, _ = (program.as_text() or "").partition("\nENTRY ")
    cache = rf"f32\[(?:\d+,)*(?:{length},{head_dim}|{head_dim},{length})\]"
    assert re.search(rf"= {cache}\S* fusion\(", loop)
    assert not re.search(rf"= {cache}\S* copy\(", loop)


def test_an_empty_batch_has_no_results():
    found = decode(tiny_model(), np.zeros((0, 4), np.int32), max_length=3)
    assert found.tokens.shape == (0, 1, 3)
    scores = score(tiny_model(), np.zeros((0, 4), np.int32), found.tokens)
    assert scores.scores.shape == (0, 1)


def test_an_empty_source_decodes_like_any_other():
    model = tiny_model()
    found = decode(model, np.zeros((2, 0), np.int32), max_length=3)
    padded = decode(model, np.zeros((2, 40), np.int32), max_length=3)
    np.testing.assert_array_equal(found.tokens, padded.tokens)


EVERY_STRATEGY = [*STRATEGIES.values(), decoding.MeshTFBeamSearch()]


@pytest.mark.parametrize("strategy", quick(EVERY_STRATEGY, chosen=[STRATEGIES["beam"]]))
def test_a_vocabulary_of_one_token_has_one_result(strategy):
    model, source = tiny_model(vocab_size=1), np.zeros((1, 3), np.int32)
    found = decode(model, source, max_length=2, strategy=strategy, key=jax.random.key(0))
    np.testing.assert_array_equal(found.lengths[0, 0], 2)
    np.testing.assert_allclose(found.scores[0, 0], 0, atol=1e-6)
    assert not found.ended.any()


def test_padding_of_a_prefix_is_no_end_token():
    prefix = np.array([[5, 6], [5, 0], [0, 0]])
    found = decode(tiny_model(), sources(), max_length=4, prefix=prefix, end_id=0)
    np.testing.assert_array_equal(found.tokens[:2, 0, 0], 5)


def test_scoring_ranks_labels_of_a_row():
    model, source = tiny_model(), sources(batch=2)
    labels = np.broadcast_to(np.array([[5, 1, 0], [6, 7, 1], [8, 1, 0]]), (2, 3, 3))
    scores = score(model, source, labels)
    for choice in range(3):
        alone = score(model, source, labels[:, choice : choice + 1])
        np.testing.assert_allclose(scores.scores[:, choice], alone.scores[:, 0], atol=1e-5)
    np.testing.assert_array_equal(scores.token_log_probs[:, [0, 2], 2], 0)
    assert np.all(scores.token_log_probs[:, 1] < 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be above 0; use Greedy"),
        ({"top_k": 0}, "top_k=0 must be an integer of at least 1, or None for every token"),
        ({"top_k": 2.0}, "top_k=2.0 must be an integer of at least 1"),
        ({"temperature": "1"}, "temperature='1' must be above 0"),
        ({"temperature": 10**400}, "It must be finite"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"num_results": 0}, "num_results=0 must be an integer of at least 1"),
        ({"num_results": 2.5}, "num_results=2.5 must be an integer"),
        ({"top_k": 0, "top_p": 2.0}, "2 faults"),
        ({"num_results": 10**9}, "num_results=1000000000 must be at most 16,777,216"),
    ],
)
def test_faulty_sampling_is_refused(unchecked, settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_size": 0}, "beam_size=0 must be an integer of at least 1"),
        ({"beam_size": 2.0}, "beam_size=2.0 must be an integer of at least 1"),
        ({"beam_size": 10**9}, "beam_size=1000000000 must be at most 16,777,216"),
        ({"num_results": 0}, "num_results=0 must be an integer of at least 1, or None for beam_si"),
        ({"length_penalty": "0"}, "length_penalty='0' must be a finite number"),
        ({"beam_size": 2, "num_results": 3}, "num_results=3 must be between 1 and beam_size=2"),
        ({"early_stopping": "often"}, "early_stopping='often' must be True, False or 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
        ({"length_penalty": float("inf")}, "length_penalty=inf must be a finite number"),
    ],
)
def test_faulty_beam_search_is_refused(unchecked, settings, message):
    with pytest.raises(UserError, match=message):
        BeamSearch(**settings)


def test_the_original_beam_search_needs_a_finite_length_penalty_too():
    with pytest.raises(UserError, match="length_penalty=nan must be a finite number"):
        decoding.MeshTFBeamSearch(length_penalty=float("nan"))


@pytest.mark.parametrize("settings", [{"beam_size": 0}, {"num_prefilter": 1}, {"num_prefilter": 0}])
def test_faults_of_the_original_beam_search_are_named(settings):
    ((name, value),) = settings.items()
    with pytest.raises(UserError, match=f"{name}={value} must be .*at least"):
        decoding.MeshTFBeamSearch(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 0}, "max_length=0 must be at least 1 token"),
        ({"max_lengths": np.array([1, 2, 9])}, "max_lengths runs from 1 to 9"),
        ({"prefix": np.full((3, 4), 5)}, "prefix of row 0 has 4 tokens, which leaves nothing"),
        ({"prefix": np.array([[0, 5]] * 3)}, "holds padding"),
        ({"prefix": np.array([[END]] * 3)}, "prefix holds the end token 1"),
        ({"prefix": np.array([[VOCAB]] * 3)}, "prefix holds the id 16"),
        ({"strategy": Sampling()}, "key=None with Sampling"),
        (
            {"strategy": Sampling(), "key": jax.random.split(jax.random.key(0), 2)},
            r"key has shape \(2,\) for 3 rows",
        ),
        ({"strategy": Sampling(), "key": 0}, "key=0 is no random key"),
        ({"strategy": "greedy"}, r"strategy='greedy' must be Greedy\(\), Sampling"),
        ({"strategy": BeamSearch}, r"strategy=BeamSearch must be Greedy\(\)"),
        ({"strategy": BeamSearch(length_penalty=-1000.0)}, "length_penalty=-1000.0 is too far"),
        ({"max_length": 4.0}, "max_length=4.0 must be an integer"),
        ({"max_length": 10**9}, "max_length=1000000000 must be at most 16,777,216"),
        ({"max_length": 10**20}, "max_length=100000000000000000000 must be at most"),
        (
            {"max_length": 2**20, "strategy": BeamSearch(beam_size=2**10)},
            r"rows=3, results of each=1024, max_length=1048576 are .* must be below 2 \*\* 31",
        ),
        ({"end_id": None}, "end_id=None must be an integer"),
        ({"end_id": 1.5}, "end_id=1.5 must be an integer"),
        ({"max_lengths": np.array([1.5, 2, 2])}, "max_lengths has dtype float64, but must hold"),
        ({"prefix": np.full((3, 1), 4.5)}, "prefix has dtype float64, but must hold integers"),
        ({"encoder_input_tokens": np.full((3, 2), 0.7)}, "encoder_input_tokens has dtype float64"),
        ({"encoder_input_tokens": [[5, 1], [5]]}, "encoder_input_tokens has rows of different"),
        ({"prefix": [[5], [5, 6], [5]]}, "prefix has rows of different lengths; pad them with 0"),
        ({"hide_start_token": "no"}, "hide_start_token='no' must be True, False or None"),
    ],
)
def test_contradictory_requests_are_refused(unchecked, settings, message):
    given = {"encoder_input_tokens": sources(), "max_length": 4, **settings}
    source = given.pop("encoder_input_tokens")
    with pytest.raises(UserError, match=message):
        decode(tiny_model(), source, **given)


def test_a_lack_of_memory_names_the_sizes(monkeypatch):
    def fill_memory(*arguments, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")

    monkeypatch.setattr(decoding, "_search", fill_memory)
    with pytest.raises(UserError, match=r"too little memory .* rows=3, .*max_length=9") as caught:
        decode(tiny_model(), sources(), max_length=9)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "transformed",
    [
        lambda use: jax.jit(lambda x: use(tiny_model(), x))(sources()),
        lambda use: jax.jit(lambda model: use(model, sources()))(tiny_model()),
        lambda use: jax.jit(lambda: use(tiny_model(), sources()))(),
        lambda use: jax.vmap(lambda x: use(tiny_model(), x))(sources()[None]),
        lambda use: jax.grad(lambda model: use(model, sources()))(tiny_model()),
    ],
)
def test_a_call_inside_of_a_transformation_names_what_to_call_there(transformed):
    with pytest.raises(UserError, match=r"decode is called inside of jax.jit .* use search of"):
        transformed(lambda model, x: decode(model, x, max_length=4).scores.sum())
    with pytest.raises(UserError, match=r"score is called inside .*convt5.ops.token_cross_entro"):
        transformed(lambda model, x: score(model, x, np.full((3, 1, 3), 5)).scores.sum())


def test_a_misspelt_request_is_named():
    with pytest.raises(TypeError, match=r"decode\(\) got .* keyword argument 'endid'"):
        decode(tiny_model(), sources(), max_length=4, endid=2)


def test_tokens_of_another_vocabulary_are_refused():
    source = sources()
    source[1, 2] = 99
    with pytest.raises(UserError, match=r"encoder_input_tokens holds the id 99.*allows 0 to 15"):
        decode(tiny_model(), source, max_length=4)


@pytest.mark.slow
@pytest.mark.parametrize("version", quick(["v1_0", "v1_1"], chosen=["v1_1"]))
def test_a_beam_search_of_transformers_that_stops_early_is_repeated(golden, version):
    folder = golden / "hf_t5" / version
    reference = np.load(folder / "reference.npz")
    found = decode(
        hugging_face.read_model(folder).model(),
        reference["input_ids"],
        max_length=16,
        strategy=BeamSearch(beam_size=4, length_penalty=0.6, early_stopping=True),
    )
    np.testing.assert_array_equal(found.tokens, reference["beam4_lp0.6_early_ids"][:, :, 1:])
    np.testing.assert_allclose(found.scores, reference["beam4_lp0.6_early_scores"], atol=1e-5)


# --- Arrays that do not belong together -----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": np.array([[5]])}, r"prefix has shape \(1, 1\), but encoder_input_tokens has"),
        ({"prefix": np.full((4, 1), 5)}, r"prefix has shape \(4, 1\), but encoder_input_tokens"),
        ({"max_lengths": np.array([3])}, r"max_lengths has shape \(1,\), but encoder_input_tokens"),
        ({"max_lengths": np.full(4, 3)}, r"max_lengths has shape \(4,\), but encoder_input_tokens"),
        ({"strategy": Sampling(), "key": jnp.zeros(3)}, r"key has shape \(3,\) and dtype float32"),
        ({"prefix": np.full(3, 5)}, r"prefix has shape \(3,\), but .* \[batch, prefix\]"),
        ({"max_lengths": np.full((3, 1), 2)}, r"max_lengths has shape \(3, 1\), but .* \[batch\]"),
    ],
)
def test_rows_that_are_not_those_of_the_sources_are_refused(unchecked, settings, message):
    with pytest.raises(UserError, match=message):
        decode(tiny_model(), sources(), **{"max_length": 4, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": np.full((2, 1, 3), 5)}, r"targets has shape \(2, 1, 3\), but encoder_input"),
        ({"prefix_lengths": np.ones(1, int)}, r"prefix_lengths has shape \(1,\), but encoder_inp"),
        ({"lengths": np.ones((3, 2), int)}, r"lengths has shape \(3, 2\), but targets has"),
        ({"targets": np.full((3, 3), 5)}, r"targets has shape \(3, 3\).* \[batch, choices, length"),
        ({"lengths": np.full((3, 1), 4)}, "lengths runs from 4 to 4, .* between 0 and 3"),
        ({"lengths": np.full((3, 1), -1)}, "lengths runs from -1 to -1"),
        ({"prefix_lengths": np.array([0, 9, 0])}, "prefix_lengths runs from 0 to 9"),
        ({"prefix_lengths": np.ones((3, 1), int)}, r"prefix_lengths has shape \(3, 1\), but must"),
        ({"lengths": np.full((3, 1), 1.5)}, "lengths has dtype float64"),
        ({"targets": np.full((3, 1, 3), 5.0)}, "targets has dtype float64"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
        ({"length_penalty": 1000.0}, "length_penalty=1000.0 is too far from 0"),
        ({"targets": [[[5, 1]], [[5]], [[5]]]}, "targets has rows of different lengths"),
    ],
)
def test_scoring_refuses_rows_that_are_not_those_of_the_sources(unchecked, settings, message):
    with pytest.raises(UserError, match=message):
        score(tiny_model(), sources(), **{"targets": np.full((3, 1, 3), 5), **settings})


@pytest.mark.parametrize("function", [decode, score])
def test_a_source_alone_is_no_batch(unchecked, function):
    settings = {"max_length": 4} if function is decode else {"targets": np.full((1, 1, 3), 5)}
    message = r"encoder_input_tokens has shape \(7,\).* \[batch, source\]; a single row is a batch"
    with pytest.raises(UserError, match=message):
        function(tiny_model(), sources()[0], **settings)


def test_a_row_that_asks_for_no_result_may_have_any_prefix():
    prefix = np.zeros((3, 12), np.int32)
    prefix[0], prefix[1, 0] = 5, 7
    limits = np.array([0, 4, 4])
    found = decode(tiny_model(), sources(), max_length=9, max_lengths=limits, prefix=prefix)
    assert found.lengths[0, 0] == 0
    assert found.tokens[1, 0, 0] == 7


@pytest.mark.parametrize("of_rows", [False, True])
def test_old_and_new_random_keys_draw_the_same(of_rows):
    key = jax.random.split(jax.random.key(3), 3) if of_rows else jax.random.key(3)
    drawn = [
        decode(tiny_model(), sources(), max_length=9, strategy=STRATEGIES["sampling"], key=k)
        for k in (key, jax.random.key_data(key))
    ]
    np.testing.assert_array_equal(drawn[0].tokens, drawn[1].tokens)


def test_the_lowest_temperature_is_greedy_and_lower_ones_are_refused():
    model = jax.tree.map(lambda a: 8 * a, tiny_model())
    lowest = Sampling(temperature=search.LOWEST_TEMPERATURE)
    drawn = decode(model, sources(), max_length=9, strategy=lowest, key=jax.random.key(0))
    np.testing.assert_array_equal(drawn.tokens, decode(model, sources(), max_length=9).tokens)
    with pytest.raises(UserError, match=r"temperature=1e-38 .* use Greedy .* below 1e-30"):
        Sampling(temperature=1e-38)


def test_a_number_is_no_way_to_stop_early(unchecked):
    with pytest.raises(UserError, match="early_stopping=1 must be True, False or 'never'"):
        BeamSearch(early_stopping=1)
