"""The whole model: causality, padding, packing, decoding steps, and where its parameters live."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from quick import quick
from second_derivatives import hessian_products

from convt5.checkpoints import record
from convt5.errors import UserError
from convt5.interchange import portable
from convt5.modeling import placement, sharding
from convt5.modeling.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.modeling.attention import relative_position_bucket
from convt5.modeling.layers import drop_tokens, seed_key
from convt5.modeling.model import ConvT5
from convt5.ops import masking
from convt5.training.losses import TextLoss

VOCAB = 32

# Compiled whole: computing one operation after another compiles each for each shape.
run = jax.jit(ConvT5.__call__)
encode = jax.jit(ConvT5.encode)

VARIANTS = {
    "attention": {"mixing": "attention"},
    "depthwise": {"mixing": "depthwise", "kernel_size": 4},
    "lightweight": {"mixing": "lightweight", "num_kernels": 2, "kernel_size": 3},
    "dynamic": {"mixing": "dynamic", "num_kernels": 2, "kernel_size": 3},
    "dilated": {"mixing": "depthwise", "kernel_size": (2, 3), "dilation": (1, 3)},
    "long": {"mixing": "long", "filter_scale": (4, 8), "filter_width": 4, "filter_bands": 2},
    "hybrid": {"mixing": "dynamic", "num_kernels": 4, "attention_layers": (-1,)},
    "released": {
        "mixing": "dynamic",
        "kernel_size": 5,
        "pointwise": True,
        "projection_bias": True,
        "predictor_bias": True,
        "conv_bias": True,
    },
}
EACH = quick(list(VARIANTS), chosen=["dynamic", "hybrid"])


def stack(**settings) -> StackConfig:
    return StackConfig(num_layers=2, **settings)


def tiny_config(variant: str = "dynamic", **overrides) -> ConvT5Config:
    both = stack(**VARIANTS[variant])
    settings = {
        "vocab_size": VOCAB,
        "emb_dim": 8,
        "mlp_dim": 16,
        "num_heads": 2,
        "head_dim": 4,
        "encoder": both,
        "decoder": both,
        "dtype": "float32",
        "positions": "relative" if variant in ("attention", "hybrid") else "none",
    }
    return ConvT5Config(**{**settings, **overrides})


@functools.cache
def tiny_model(variant: str = "dynamic", **overrides):
    return tiny_config(variant, **overrides).build(jax.random.key(0))


def random_tokens(seed: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, (batch, length), dtype=np.int32)


def shift(targets: np.ndarray) -> np.ndarray:
    return np.pad(targets[:, :-1], ((0, 0), (1, 0)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"relative_buckets": 8}, ["relative_buckets=8 has no effect: positions='none'"]),
        ({"max_positions": 9, "variant": "hybrid", "positions": "relative"}, ["max_positions=9"]),
        ({"positions": "relative"}, ["positions='relative' has no effect"]),
        ({"positions": "relative", "variant": "hybrid", "relative_buckets": 8}, []),
    ],
)
def test_settings_of_other_positions_are_told(settings, told):
    said = tiny_config(**{"positions": "none", **settings}).unused()
    assert [line[: len(begin)] for line, begin in zip(said, told, strict=True)] == told


def test_shapes_in_annotations_are_checked_while_tests_run():
    model = tiny_model()
    for tokens in (np.ones((2, 7, 1), np.int32), np.ones((2, 7), np.float32)):
        with pytest.raises(jaxtyping.TypeCheckError):
            model.encode(tokens)
    with pytest.raises(jaxtyping.TypeCheckError):
        masking.attention_mask(jnp.ones((2, 7), int), jnp.ones((3, 7), int), causal=False)


@pytest.mark.parametrize("variant", EACH)
def test_logits_are_float32_and_finite(variant):
    source, target = random_tokens(0, 2, 7), random_tokens(1, 2, 5)
    logits = run(tiny_model(variant, dtype="bfloat16"), source, shift(target))
    assert logits.shape == (2, 5, VOCAB)
    assert logits.dtype == jnp.float32
    assert jnp.all(jnp.isfinite(logits))


@pytest.mark.parametrize("variant", EACH)
def test_decoder_never_reads_the_future(variant):
    model = tiny_model(variant)
    source, target = random_tokens(0, 2, 7), random_tokens(1, 2, 5)
    changed = target.copy()
    changed[:, 3:] = (changed[:, 3:] + 5) % (VOCAB - 1) + 1
    before, after = run(model, source, target), run(model, source, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert not np.array_equal(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("variant", EACH)
def test_longer_padding_changes_nothing(variant):
    model = tiny_model(variant)
    source, target = random_tokens(0, 2, 7), shift(random_tokens(1, 2, 5))
    padded = run(model, np.pad(source, ((0, 0), (0, 4))), np.pad(target, ((0, 0), (0, 3))))
    np.testing.assert_allclose(padded[:, :5], run(model, source, target), atol=2e-5)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        *(pytest.param(*v.values, {}, marks=v.marks) for v in EACH),
        ("dynamic", {"positions": "learned", "max_positions": 16}),
    ],
)
def test_packed_examples_equal_separate_ones(variant, changes):
    model = tiny_model(variant, **changes)
    sources = [random_tokens(i, 1, n) for i, n in enumerate((4, 6))]
    targets = [random_tokens(9 + i, 1, n) for i, n in enumerate((5, 3))]

    def pack(rows):
        return np.pad(np.concatenate(rows, 1), ((0, 0), (0, 2))).astype(np.int32)

    def segments(rows):
        return pack([np.full_like(row, i + 1) for i, row in enumerate(rows)])

    def counted(rows):
        return pack([np.arange(row.shape[1])[None] for row in rows])

    packed = run(
        model,
        pack(sources),
        pack([shift(t) for t in targets]),
        encoder_segment_ids=segments(sources),
        decoder_segment_ids=segments(targets),
        encoder_positions=counted(sources),
        decoder_positions=counted(targets),
    )
    # In rows of the shape of the tests above, whose padding changes nothing.
    alone = run(
        model,
        np.concatenate([np.pad(row, ((0, 0), (0, 7 - row.shape[1]))) for row in sources]),
        np.concatenate([np.pad(shift(row), ((0, 0), (0, 5 - row.shape[1]))) for row in targets]),
    )
    start = 0
    for row, target in zip(alone, targets, strict=True):
        size = target.shape[1]
        np.testing.assert_allclose(packed[0, start : start + size], row[:size], atol=2e-5)
        start += size


def test_convolution_state_does_not_grow_with_length():
    model = tiny_model("dynamic")
    encoded = encode(model, random_tokens(0, 1, 4))
    segments = np.ones((1, 4), np.int32)

    def state_shapes(length):
        state = model.init_decoding(encoded, encoder_segment_ids=segments, length=length)
        return [layer.mixing.inputs.shape for layer in state.layers]

    assert state_shapes(8) == state_shapes(4096)


def test_no_parameter_is_owned_twice():
    model = tiny_model("released", positions="learned", max_positions=8)
    owners = [id(value) for _, value in nnx.to_flat_state(nnx.state(model))]
    assert len(owners) == len(set(owners))


def test_dropout_needs_a_key_and_follows_it():
    model = tiny_model(dropout_rate=0.5)
    source, target = random_tokens(0, 1, 7), shift(random_tokens(1, 1, 5))
    plain = run(model, source, target)
    np.testing.assert_array_equal(plain, run(model, source, target))
    once = run(model, source, target, dropout_key=jax.random.key(1))
    np.testing.assert_array_equal(once, run(model, source, target, dropout_key=jax.random.key(1)))
    assert not np.array_equal(once, run(model, source, target, dropout_key=jax.random.key(2)))
    assert not np.array_equal(once, plain)


def test_token_dropout_drops_whole_tokens_of_the_encoder_in_training_alone():
    model, plain = tiny_model(token_dropout_rate=0.3), tiny_model()
    source, target = random_tokens(0, 4, 50), shift(random_tokens(1, 4, 5))
    np.testing.assert_array_equal(run(model, source, target), run(plain, source, target))
    key = jax.random.key(1)
    once, whole = model.encode(source, dropout_key=key), np.ones_like(source)
    assert not np.array_equal(once, plain.encode(source))
    np.testing.assert_array_equal(once, model.encode(source, dropout_key=key))
    np.testing.assert_array_equal(  # Targets are read as they are.
        model.decode(once, target, encoder_segment_ids=whole, dropout_key=key),
        plain.decode(once, target, encoder_segment_ids=whole),
    )
    x = model.embed_tokens(source)
    kept = np.asarray(drop_tokens(x, 0.3, key))
    is_kept = kept.any(-1)
    np.testing.assert_array_equal(kept, np.where(is_kept[..., None], x, 0))
    assert 0.6 < is_kept.mean() < 0.8


ORDERS = [("pre", "layer"), ("branch", "rms"), ("post", "rms")]


@pytest.mark.parametrize(
    "order", quick(ORDERS, chosen=[("pre", "layer"), ("post", "rms")]), ids=str
)
def test_both_norms_work_in_every_layer_order(order):
    layer_order, norm = order
    model = tiny_model(layer_order=layer_order, norm=norm, mlp="gated_gelu", tie_output=False)
    logits = run(model, random_tokens(0, 2, 7), shift(random_tokens(1, 2, 5)))
    assert jnp.all(jnp.isfinite(logits))
    assert (model.decoder.final_norm is None) == (layer_order == "post")


def random_batch(rows, length):
    target = random_tokens(1, rows, length)
    return {
        "encoder_input_tokens": random_tokens(0, rows, length),
        "decoder_input_tokens": shift(target),
        "decoder_target_tokens": target,
        "decoder_loss_weights": np.ones_like(target),
    }


def test_first_loss_is_near_the_log_of_the_vocabulary():
    config = tiny_config(emb_dim=64, vocab_size=512)
    model = config.build(jax.random.key(1))
    batch = random_batch(8, 16)
    sums = jax.jit(TextLoss())(model, batch)
    # A tied unit-variance embedding adds about half a nat of noise to a uniform guess.
    assert abs(sums.loss_sum / sums.weight_sum - np.log(512)) < 0.8


@pytest.mark.slow
def test_the_loss_on_a_mesh_with_explicit_axes_is_that_of_one_device():
    encoder = StackConfig(num_layers=1, **VARIANTS["dynamic"])
    decoder = StackConfig(num_layers=1, **VARIANTS["attention"])
    model, batch = tiny_model(encoder=encoder, decoder=decoder), random_batch(4, 6)
    mesh = jax.make_mesh((4, 1, 1, 2), sharding.AXES)  # Its axes are explicit by default.
    split = sharding.tree_shardings(model, model, mesh, placement.TEXT_RULES)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    compute = jax.jit(jax.value_and_grad(lambda model, batch: TextLoss()(model, batch).loss_sum))
    loss, gradients = compute(jax.device_put(model, split), jax.device_put(batch, rows))
    expected, expected_gradients = compute(model, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (gradients, expected_gradients)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_padding_targets_do_not_count_in_the_loss():
    model = tiny_model()
    target = random_tokens(1, 2, 6)
    weights = np.ones_like(target)
    weights[:, 4:] = 0
    batch = {
        "encoder_input_tokens": random_tokens(0, 2, 6),
        "decoder_input_tokens": shift(target),
        "decoder_target_tokens": target,
        "decoder_loss_weights": weights,
    }
    other = dict(batch, decoder_target_tokens=np.where(weights, target, 3).astype(np.int32))
    loss = jax.jit(TextLoss())
    assert loss(model, batch).weight_sum == 8
    assert loss(model, batch).loss_sum == loss(model, other).loss_sum
    assert jax.jit(TextLoss(normalize_by="positions"))(model, batch).weight_sum == 12


@pytest.mark.parametrize(("batch", "source", "target"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("variant", quick(["dynamic", "attention"], chosen=["attention"]))
def test_no_rows_and_no_positions_have_logits_of_their_shape(variant, batch, source, target):
    model = tiny_model(variant, **({"stem": TextStemConfig()} if variant == "attention" else {}))
    tokens = [jax.ShapeDtypeStruct((batch, size), jnp.int32) for size in (source, target)]
    assert jax.eval_shape(model, *tokens).shape == (batch, target, VOCAB)
    if batch == 0:
        assert run(model, *(jnp.zeros(a.shape, a.dtype) for a in tokens)).size == 0


def test_a_loss_without_rows_is_zero():
    sums = jax.jit(TextLoss())(tiny_model(), random_batch(0, 4))
    np.testing.assert_array_equal([sums.loss_sum, sums.weight_sum], 0)


def test_decoding_steps_without_rows_or_source_have_logits():
    model = tiny_model("hybrid")
    for batch, source in ((0, 3), (2, 0)):
        state = model.init_decoding(
            jnp.zeros((batch, source, 8)),
            encoder_segment_ids=jnp.ones((batch, source), int),
            length=4,
        )
        logits, _ = jax.eval_shape(model.decode_step, state, jnp.zeros((batch,), int))
        assert logits.shape == (batch, VOCAB)


def test_more_decoding_steps_than_attention_has_room_for_are_refused():
    def start(model):
        ids = jnp.ones((2, 3), int)
        return model.init_decoding(jnp.zeros((2, 3, 8)), encoder_segment_ids=ids, length=4)

    convolution, model = tiny_model("dynamic"), tiny_model("hybrid")
    assert convolution.decoder.room(start(convolution).layers) is None
    full = start(model)._replace(position=jnp.full((2,), 4))
    with pytest.raises(UserError, match="step 5 is one more than length=4 of init_decoding"):
        model.decode_step(full, jnp.zeros((2,), int))


def test_sequence_longer_than_the_position_table_is_refused():
    model = tiny_model(positions="learned", max_positions=6)
    with pytest.raises(UserError, match="7 tokens is longer than max_positions=6"):
        run(model, random_tokens(0, 1, 7), random_tokens(1, 1, 3))


@pytest.mark.parametrize("unknown", [-1, 6])
def test_positions_without_a_row_are_refused(unknown):
    model, tokens = tiny_model(positions="learned", max_positions=6), random_tokens(0, 1, 3)
    with pytest.raises(UserError, match=rf"position {unknown} must be in \[0, max_positions=6\)"):
        model.embed(tokens, np.array([[0, unknown, 1]]))


@pytest.mark.parametrize("unknown", [-1, VOCAB])
def test_token_ids_without_a_row_are_refused(unknown):
    model, tokens = tiny_model(), random_tokens(0, 1, 3)
    with pytest.raises(UserError, match=rf"id {unknown} must be in \[0, vocab_size={VOCAB}\)"):
        model.embed(np.where(tokens == tokens[0, 1], unknown, tokens))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_token_ids_of_any_integers_are_the_same_ids(unchecked, dtype):
    model, tokens = tiny_model(vocab_size=300), random_tokens(0, 1, 3)
    np.testing.assert_array_equal(model.embed(tokens.astype(dtype)), model.embed(tokens))


def test_float64_is_refused_where_jax_would_compute_in_float32():
    with pytest.raises(UserError, match="dtype='float64' needs numbers of 64 bits"):
        tiny_config(dtype="float64").build(jax.random.key(0))


RELATIVE = {
    "encoder": stack(**VARIANTS["attention"]),
    "decoder": stack(**VARIANTS["attention"]),
    "positions": "relative",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder": stack(kernel_size=(3, 5, 7))}, "encoder.kernel_size lists 3"),
        ({"encoder": stack(dilation=0)}, "dilation=0 must be an integer of"),
        ({"encoder": stack(kernel_size=0)}, "kernel_size=0 must be an integer"),
        ({"encoder": stack(pointwise="False")}, "encoder.pointwise='False' must be True or False"),
        ({"encoder": stack(attention_layers=(True,))}, "attention_layers holds True"),
        ({"tie_output": "no"}, "tie_output='no' must be True or False"),
        ({"scan_layers": None}, "scan_layers=None must be True or False"),
        ({"relative_buckets": "a"}, "relative_buckets='a' must be an integer"),
        ({"encoder": stack(num_kernels=3)}, "num_kernels=3 must divide emb_dim=8"),
        ({"decoder": stack(padding="CENTERED")}, "must be causal"),
        ({"encoder": stack(mixing="dynmic")}, "Did you mean dynamic"),
        ({"encoder": stack(mixing={})}, "encoder.mixing={} must be one of"),
        ({"encoder": stack(attention_layers=(2,))}, "attention_layers holds 2"),
        ({"positions": "learned"}, "max_positions=None must be the longest"),
        ({"max_positions": -4}, "max_positions=-4 must be an integer of at least 1"),
        ({"encoder": stack(attention_layers=1)}, "attention_layers=1 must be a list of layers"),
        ({"encoder": stack(padding=3)}, "padding=3 must be 'CENTERED'"),
        ({"encoder": stack(tap_dropout_rate="0.1")}, "tap_dropout_rate='0.1' must be in"),
        ({"dropout_rate": 1.0}, r"dropout_rate=1.0 must be in \[0, 1\)"),
        ({"dropout_rate": None}, "dropout_rate=None must be in"),
        ({"emb_dim": 0}, "emb_dim=0 must be an integer"),
        ({"encoder": None}, "encoder=None must be a StackConfig"),
        ({"stem": {"strides": (2,)}}, "must be a TextStemConfig"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 must be positive"),
        ({"norm_epsilon": -1.0}, "norm_epsilon=-1.0 must be positive"),
        ({"norm_epsilon": "small"}, "norm_epsilon='small' must be positive"),
        ({**RELATIVE, "relative_buckets": -3}, "relative_buckets=-3 must be an integer"),
        ({**RELATIVE, "relative_buckets": 2}, "relative_buckets=2 must be at least 4 .* encoder"),
        (
            {**RELATIVE, "relative_max_distance": 16},
            "relative_max_distance=16 must be above 16: .* in the decoder",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_value(change, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**change)


def test_several_faults_are_reported_together():
    with pytest.raises(UserError, match="2 faults") as caught:
        tiny_config(dropout_rate=2.0, dtype="float8")
    assert "dropout_rate" in str(caught.value)
    assert "dtype" in str(caught.value)


def test_numbers_and_sequences_of_any_kind_describe_the_same_model():
    given = StackConfig(
        num_layers=np.int64(3),
        kernel_size=range(3, 6),
        attention_layers=range(1, 3),
        padding=None,
        tap_dropout_rate=np.float32(0.5),
    )
    plain = StackConfig(
        num_layers=3, kernel_size=(3, 4, 5), attention_layers=(1, 2), tap_dropout_rate=0.5
    )
    explicit = stack(kernel_size=3, padding=(np.int64(1), np.int64(1)))
    config = tiny_config(encoder=given, decoder=plain, dropout_rate=np.float32(0.25))
    assert config.encoder == config.decoder
    for written in (config, tiny_config(encoder=explicit)):
        assert portable.revive(record.describe_config(written)) == written


def test_configs_from_gin_lists_are_hashable():
    listed = stack(kernel_size=[3, 5], attention_layers=[-1])
    assert hash(dataclasses.replace(listed, pointwise=True)) != hash(listed)


@pytest.mark.parametrize(("bidirectional", "fewest"), [(True, 4), (False, 2)])
def test_every_allowed_number_of_buckets_tells_distances_apart(bidirectional, fewest):
    distances = jnp.arange(-40, 41)
    for num_buckets in range(fewest, 34):
        alone = num_buckets // (4 if bidirectional else 2)
        for max_distance in (alone + 1, alone + 2, 3 * alone, 128):
            found = np.asarray(
                relative_position_bucket(
                    distances,
                    bidirectional=bidirectional,
                    num_buckets=num_buckets,
                    max_distance=max_distance,
                )
            )
            assert found.min() == 0
            assert found.max() < num_buckets
            behind = found[:41][::-1]  # By distance, 0 first.
            np.testing.assert_array_equal(behind[:alone], np.arange(alone))
            assert np.all(np.diff(behind) >= 0)
            if bidirectional:
                np.testing.assert_array_equal(found[41:], behind[1:] + num_buckets // 2)
            elif max_distance < len(behind):
                assert behind[max_distance] == num_buckets - 1


@functools.cache
def bucket_in_whole_numbers(distance: int, num_buckets: int, max_distance: int) -> int:
    """The largest exact + k with (distance / exact) ** m >= (max_distance / exact) ** k."""
    exact = num_buckets // 2
    if distance < exact:
        return distance
    m, k = num_buckets - exact, 0
    while k < m - 1 and distance**m * exact ** (k + 1) >= max_distance ** (k + 1) * exact**m:
        k += 1
    return exact + k


@pytest.mark.parametrize("jit", [True, False])
def test_buckets_are_those_of_whole_numbers(jit):
    settings = [
        {"num_buckets": num_buckets, "max_distance": max_distance}
        for num_buckets in (2, 3, 4, 7, 8, 16, 17, 32, 64)
        for max_distance in (33, 40, 64, 100, 108, 128, 200, 256, 400)
    ]

    def buckets(positions):
        return [relative_position_bucket(positions, bidirectional=False, **x) for x in settings]

    distances = range(601)
    found = (jax.jit(buckets) if jit else buckets)(-jnp.asarray(distances))
    for some, buckets_of in zip(settings, found, strict=True):
        expected = [bucket_in_whole_numbers(distance, **some) for distance in distances]
        np.testing.assert_array_equal(buckets_of, expected, err_msg=str(some))


def test_buckets_may_reach_farther_than_any_distance():
    settings = {"bidirectional": False, "num_buckets": 8, "max_distance": 2**40}
    assert relative_position_bucket(jnp.asarray([-4, -(2**30)]), **settings).tolist() == [4, 6]


@pytest.mark.parametrize("settings", [{"num_buckets": 2}, {"max_distance": 8}])
def test_buckets_that_cannot_tell_distances_apart_are_refused(settings):
    with pytest.raises(ValueError, match="must be above the"):
        relative_position_bucket(jnp.arange(3), bidirectional=True, **settings)


def test_buckets_are_those_of_the_stacks_that_attend():
    """An encoder halves the buckets for either direction, so 16 positions are far for it."""
    alone = {**RELATIVE, "decoder": stack(mixing="depthwise"), "relative_max_distance": 16}
    assert tiny_config(**alone).relative_max_distance == 16
    assert tiny_config(relative_buckets=1).relative_buckets == 1


@pytest.mark.nightly
@pytest.mark.parametrize("variant", quick(["dynamic", "released"], chosen=["dynamic"]))
def test_hessian_vector_products_of_a_model_are_the_same_in_either_mode(variant):
    # Second derivatives of each layer compile for seconds: one that convolves, one that attends.
    convolution = StackConfig(num_layers=1, **VARIANTS[variant])
    attention = StackConfig(num_layers=1, **VARIANTS["attention"])
    model = tiny_model(encoder=convolution, decoder=attention, positions="relative")
    batch = random_batch(2, 6)
    leaves, form = jax.tree.flatten(model)

    def loss(*leaves):
        return TextLoss()(jax.tree.unflatten(form, leaves), batch).loss_sum

    for a, b in zip(*hessian_products(loss, leaves), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.max(jnp.abs(a))))


def test_tokens_and_segments_that_mix_examples_up_are_refused(unchecked):
    model = tiny_config("depthwise").build(jax.random.key(0))
    tokens = jnp.array([[3, 4, 5, 6]])
    for wrong in (tokens.astype(float), tokens > 3):
        with pytest.raises(UserError, match=r"tokens have dtype .*; give integers"):
            model.embed(wrong)
    packed = jnp.array([[1, 1, 2, 2]])
    for side in ("encoder", "decoder"):
        with pytest.raises(UserError, match=f"{side}_segment_ids holds the segment 2"):
            model(tokens, tokens, **{f"{side}_segment_ids": packed})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"encoder_input_tokens": [3, 4]}, r"shape \(2,\), but must have the axes \[batch, length"),
        ({"encoder_input_tokens": [[2**32 + 3, 4]]}, "token id 4294967299 must be in"),
        ({"decoder_input_tokens": [[2**32, 4]]}, "token id 4294967296 must be in"),
        ({"encoder_segment_ids": [[2**32, 1]]}, "ids of more than 32 bits"),
        ({"decoder_segment_ids": [[2**32, 1]]}, "ids of more than 32 bits"),
        ({"encoder_segment_ids": [[1]]}, r"shape \(1, 1\), but tokens \(1, 2\)"),
        ({"decoder_positions": [[0]]}, r"int32 \(1, 1\), but must be integers \(1, 2\)"),
        ({"encoder_positions": [[0.0, 1.0]]}, r"float\d\d \(1, 2\), but must be integers"),
    ],
)
def test_inputs_that_would_be_cut_or_stretched_are_refused(unchecked, inputs, message):
    model = tiny_model("attention", positions="learned", max_positions=6)
    known = dict.fromkeys(("encoder_input_tokens", "decoder_input_tokens"), np.array([[3, 4]]))
    segments = {f"{side}_segment_ids": np.array([[1, 1]]) for side in ("encoder", "decoder")}
    given = {name: np.array(values) for name, values in inputs.items()}
    with pytest.raises((UserError, ValueError), match=message):
        model(**known | segments | given)


def test_each_seed_of_64_bits_has_a_key_of_its_own():
    seeds = (0, 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**63))
    keys = {tuple(jax.random.key_data(seed_key(seed)).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
    assert seed_key(5) == jax.random.key(5)
