"""Canon layers: the published equation, exact at every border, and free where there are none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import test_vision_model
from jax.sharding import NamedSharding, PartitionSpec
from quick import quick
from test_model import VOCAB, random_tokens, shift, tiny_config

from convt5.analysis import collectives, costs
from convt5.errors import UserError
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.canon import CanonConfig, canons_of
from convt5.modeling.mixers import KINDS
from convt5.modeling.model import ConvT5
from convt5.modeling.sharding import BATCH_AXES, MeshConfig, parameter_specs
from convt5.modeling.tree_paths import named_leaves
from convt5.ops import dispatch
from convt5.vision import costs as vision_costs
from convt5.vision import placement

EMBED, LENGTH = 3, 11
IDS = np.array([[1] * 5 + [2] * 4 + [0] * 2, [0, 1, 1, 0, 1, 1, 2, 2, 2, 2, 3]], np.int32)
ALL_VISIBLE = np.ones_like(IDS, bool)
SETTINGS = {
    "published": {},
    "dilated": {"canon_dilation": 3, "canon_kernel_size": 3},
    "centered": {"canon_padding": "CENTERED", "canon_bias": True},
    "activated": {"canon_activation": "silu", "canon_bias": True},
    "single tap": {"canon_kernel_size": 1},
}


def canon_layer(settings):
    """The module with biases that are not zero."""
    taps = CanonConfig(canon="A", **settings).canon_at("A", "mixing")
    canon = taps.build(EMBED, key=jax.random.key(0))
    if canon.bias is not None:
        canon.bias[...] = jnp.arange(1.0, EMBED + 1)
    return canon


def oracle(canon, x, ids, visible):
    """y[t] = h[t] + sum_j w[j] h[t - j * dilation], written out; padding gives nothing itself."""
    taps = canon.taps
    kernel = np.asarray(canon.kernel[...], np.float64)
    bias = 0 if canon.bias is None else np.asarray(canon.bias[...], np.float64)
    offsets = oracles.tap_offsets(taps.kernel_size, taps.dilation, taps.padding)
    y = np.zeros(x.shape)
    for b, t in np.ndindex(ids.shape):
        total = np.zeros(EMBED)
        for j, offset in enumerate(offsets):
            s = t + offset
            if 0 <= s < ids.shape[1] and visible[b, s] and ids[b, s] == ids[b, t] != 0:
                total += kernel[j] * x[b, s]
        total = total + bias
        y[b, t] = x[b, t] + (total / (1 + np.exp(-total)) if taps.activation == "silu" else total)
    return y


def inputs(seed=0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*IDS.shape, EMBED)), jnp.float32)


def test_settings_of_canon_layers_that_no_layer_has_are_told():
    settings = {"num_layers": 2, "canon_kernel_size": 2, "canon_bias": True}
    said = StackConfig(**settings).unused("encoder")
    assert [line.partition(" has no effect: there are no Canon")[0] for line in said] == [
        "encoder.canon_kernel_size=2",
        "encoder.canon_bias=True",
    ]
    assert StackConfig(canon=("", "A"), **settings).unused("encoder") == []
    (line,) = test_vision_model.tiny(canon_dilation=2).unused()
    assert line.startswith("canon_dilation=2 has no effect")


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_canon_layer_is_the_published_equation(settings, hidden):
    canon, x = canon_layer(SETTINGS[settings]), inputs()
    visible = np.random.default_rng(1).random(IDS.shape) < 0.7 if hidden else ALL_VISIBLE
    found = canon(x, jnp.asarray(IDS), jnp.asarray(visible) if hidden else None)
    real = IDS != 0
    np.testing.assert_allclose(found[real], oracle(canon, x, IDS, visible)[real], atol=2e-6)


@pytest.mark.parametrize("settings", sorted(SETTINGS.keys() - {"centered"}))
def test_stepping_is_the_whole_sequence(settings):
    canon, x = canon_layer(SETTINGS[settings]), inputs()
    state = canon.init_state(len(x), x.dtype)
    slots = canon.taps.dilation * (canon.taps.kernel_size - 1)
    visible = np.random.default_rng(1).random(IDS.shape) < 0.7
    outputs = []
    for t in range(LENGTH):
        assert state.shape == (len(x), slots, EMBED)
        now = slice(t, t + 1)
        y, state = canon.step(x[:, now], state, jnp.asarray(visible[:, now]))
        outputs.append(y)
    whole = canon(x, jnp.ones_like(IDS), jnp.asarray(visible))
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, atol=1e-6)


def test_packed_segments_are_those_alone_bit_for_bit():
    canon, x = canon_layer({}), inputs()
    packed = canon(x, jnp.asarray(IDS))
    for start, stop in ((0, 5), (5, 9)):
        alone = canon(x[:1, start:stop], jnp.ones((1, stop - start), jnp.int32))
        np.testing.assert_array_equal(packed[:1, start:stop], alone)


def test_without_an_activation_the_residual_costs_no_operation():
    """It is part of the current tap: the operator is called once, and nothing is added to it."""
    canon = canon_layer({})
    jaxpr = jax.make_jaxpr(lambda x: canon(x, jnp.asarray(IDS)))(inputs())
    big = [str(eqn.primitive) for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape == inputs().shape]
    assert big == ["custom_vjp_call"]


@pytest.mark.parametrize("place", quick(["A", "B"], chosen=["A"]))
def test_devices_that_share_rows_and_channels_trade_the_rows_that_taps_reach_alone(place):
    """Of A each device holds all channels, and needs them all behind it; of B it has its own."""
    taps = CanonConfig(canon=place, canon_dilation=2).canon_at(place, "any")
    canon = taps.build(8, key=jax.random.key(0))
    mesh = MeshConfig(data=2, sequence=2, tensor=2).build(jax.devices()[:8])
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4, 16, 8)).astype(np.float32)
    ids = jnp.asarray(np.repeat(1 + (np.arange(16) > 6)[None], 4, axis=0), jnp.int32)

    def gradients(canon, x, ids, dy):
        y, pull_back = jax.vjp(lambda canon, x: canon(x, ids), canon, x)
        return y, *pull_back(dy)

    expected = jax.jit(gradients)(canon, x, ids, dy)
    channels = "tensor" if taps.split else None
    rows = NamedSharding(mesh, PartitionSpec("data", "sequence", channels))
    kernels = NamedSharding(mesh, PartitionSpec(None, channels))
    tokens = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    devices = dispatch.Devices(mesh, BATCH_AXES, ("tensor",), ("sequence",))
    with dispatch.using(devices=devices):
        program = jax.jit(
            lambda *given: gradients(*given),
            in_shardings=(kernels, rows, tokens, rows),
            out_shardings=(rows, kernels, rows),
        ).lower(canon, x, ids, dy)
    program = program.compile()
    placed = jax.device_put((canon, x, ids, dy), (kernels, rows, tokens, rows))
    for found, wanted in zip(
        jax.tree.leaves(program(*placed)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    travels = {
        (c.kind, axis)
        for c in collectives.parse(program.as_text(), dict(mesh.shape))
        for axis in c.axes
    }
    assert travels == {
        ("collective-permute", "sequence"),
        ("all-reduce", "data"),
        ("all-reduce", "sequence"),
    }


# --- In models ------------------------------------------------------------------------------------

MODELS = {
    "published": {
        "encoder": StackConfig(
            num_layers=2,
            mixing=("attention", "depthwise"),
            canon="ABCD",
            canon_padding="CENTERED",
        ),
        "decoder": StackConfig(
            num_layers=2,
            mixing=("attention", "dynamic"),
            num_kernels=2,
            canon=("ABCD", "BD"),
            canon_kernel_size=(4, 3),
            canon_dilation=(1, 2),
        ),
    },
    "everything": {
        "encoder": StackConfig(
            num_layers=2,
            mixing=("depthwise", "attention"),
            canon="ABCD",
            canon_padding="CENTERED",
            canon_bias=True,
            canon_activation="silu",
        ),
        "decoder": StackConfig(
            num_layers=2,
            mixing=("lightweight", "depthwise"),
            kernel_size=3,
            canon="CADB",
            canon_bias=True,
            canon_activation="silu",
        ),
        "mlp": "gated_gelu",
        "layer_order": "post",
        "hide_start_token": True,
    },
}
# One program for each model: every test gives it two rows of this length, and their segments.
ROW = 16


@jax.jit
def run(model: ConvT5, rows: dict[str, jax.Array]) -> jax.Array:
    return model(**rows)


def config_of(name: str, **overrides) -> ConvT5Config:
    return tiny_config(**{"positions": "none", **MODELS[name], **overrides})


@functools.cache
def model_of(name: str) -> ConvT5:
    return config_of(name).build(jax.random.key(0))


def rows_of(*packs: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows of these examples, each of as many source tokens as it has target tokens."""
    tokens = {n: random_tokens(n, 2, n) for pack in packs for n in pack}

    def padded(parts):
        found = np.concatenate(parts)
        return np.pad(found, (0, ROW - len(found)))

    def of_rows(part):
        return np.stack([padded([part(i, n) for i, n in enumerate(pack)]) for pack in packs])

    ids = of_rows(lambda i, n: np.full(n, i + 1, np.int32))
    return {
        "encoder_input_tokens": of_rows(lambda i, n: tokens[n][0]),
        "decoder_input_tokens": of_rows(lambda i, n: shift(tokens[n])[1]),
        "encoder_segment_ids": ids,
        "decoder_segment_ids": ids,
    }


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


EACH = quick(list(MODELS), chosen=["published"])


@pytest.mark.parametrize("name", EACH)
def test_no_output_of_the_decoder_depends_on_a_later_target(name):
    rows = rows_of((16,), (16,))
    changed = rows["decoder_input_tokens"].copy()
    changed[:, 9:] = (changed[:, 9:] + 5) % (VOCAB - 1) + 1
    before = run(model_of(name), rows)
    after = run(model_of(name), {**rows, "decoder_input_tokens": changed})
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert not np.array_equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", EACH)
def test_packed_and_padded_examples_are_those_alone(name):
    packed = run(model_of(name), rows_of((5, 7), (7, 5)))
    alone = run(model_of(name), rows_of((5,), (7,)))
    for row, first, then in ((0, 5, 7), (1, 7, 5)):
        found = packed[row]
        examples = {5: alone[0], 7: alone[1]}
        np.testing.assert_allclose(found[:first], examples[first][:first], atol=2e-5)
        np.testing.assert_allclose(found[first : first + then], examples[then][:then], atol=2e-5)


@pytest.mark.parametrize("name", EACH)
def test_decoding_is_teacher_forcing(name):
    rows = rows_of((16,), (16,))

    @jax.jit
    def step_through(model, source, ids, tokens):
        state = model.init_decoding(
            model.encode(source, segment_ids=ids), encoder_segment_ids=ids, length=ROW
        )
        return jax.lax.scan(lambda s, t: model.decode_step(s, t)[::-1], state, tokens.T)[1]

    ids = rows["encoder_segment_ids"]
    tokens = rows["decoder_input_tokens"]
    stepped = step_through(model_of(name), rows["encoder_input_tokens"], ids, tokens)
    np.testing.assert_allclose(stepped.swapaxes(0, 1), run(model_of(name), rows), atol=2e-5)


def test_a_model_without_canon_layers_has_the_parameters_of_one_with_them():
    bare = {half: StackConfig(num_layers=2, mixing="attention") for half in ("encoder", "decoder")}
    plain = dict(named_leaves(tiny_config(**bare).build(jax.random.key(0))))
    with_canon = {
        half: StackConfig(num_layers=2, mixing="attention", canon="ABCD") for half in bare
    }
    found = dict(named_leaves(tiny_config(**with_canon).build(jax.random.key(0))))
    for name, leaf in plain.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)
    own = {name: leaf.shape for name, leaf in found.items() if name not in plain}
    assert {name: shape for name, shape in own.items() if "encoder/layers/1/" in name} == {
        f"encoder/layers/1/{name}/kernel": (4, channels)
        for name, channels in {
            "mixing_canon": 8,
            "mixing/query/canon": 8,
            "mixing/key/canon": 8,
            "mixing/value/canon": 8,
            "mlp_canon": 8,
            "mlp/wi/canon": 16,
        }.items()
    }
    kernels = np.concatenate([np.ravel(found[name]) for name in own])
    assert np.abs(kernels).max() <= 0.5
    assert np.std(kernels) == pytest.approx(0.5 / np.sqrt(3), rel=0.05)


def test_the_receptive_field_grows_by_that_of_each_place():
    """That it is the measured one, tests of the receptive field show."""
    both = StackConfig(
        num_layers=2,
        mixing="depthwise",
        kernel_size=(3, 2),
        canon=("AD", "BCD"),
        canon_kernel_size=(3, 4),
        canon_dilation=(2, 1),
    )
    assert [tuple(reach) for reach in costs.stack_reaches(both.layers(causal=True))] == [
        (2 + 2 * 4, 0),
        (10 + 1 + 3 * 3, 0),
    ]
    centered = dataclasses.replace(both, canon_padding="CENTERED")
    assert [tuple(reach) for reach in costs.stack_reaches(centered.layers())] == [
        (1 + 2 * 2, 1 + 2 * 2),
        (5 + 1 + 3 * 2, 5 + 0 + 3 * 1),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_costs_in_closed_form_are_those_of_the_model(name):
    config = config_of(name)
    bare = {
        half: dataclasses.replace(MODELS[name][half], canon="") for half in ("encoder", "decoder")
    }
    lengths = {"encoder_length": 12, "decoder_length": 12}
    cost = costs.model_cost(config, **lengths)
    without = costs.model_cost(config_of(name, **bare), **lengths)
    kernels = {n: s for n, s in cost.shapes.items() if n.endswith("canon/kernel")}
    assert cost.forward_flops - without.forward_flops == 2 * 12 * costs.num_parameters(kernels)
    model = jax.eval_shape(config.build, jax.random.key(0))
    source = jax.ShapeDtypeStruct((1, 12), jnp.int32)
    state = jax.eval_shape(
        lambda model, source: (
            model.init_decoding(model.encode(source), encoder_segment_ids=source, length=12).layers
        ),
        *(model, source),
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert cost.decoding_bytes == size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canon": "ABE"}, r"encoder.canon='ABE' must name places among A, B, C and D"),
        ({"canon": "AA"}, r"canon='AA' must name places .* each once"),
        ({"canon": True}, r"canon=True must name places"),
        ({"canon": ("A", "x")}, r"encoder\[layer 1\].canon='x' must name places"),
        ({"canon_kernel_size": 0}, r"canon_kernel_size=0 must be an integer of at least 1"),
        ({"canon_dilation": (1, 0)}, r"\[layer 1\].canon_dilation=0 must be an integer"),
        ({"canon_padding": (1, 2)}, r"canon_padding=\(1, 2\) must be one of CAUSAL, CENTERED"),
        ({"canon_activation": "relu"}, r"canon_activation='relu' must be one of none, silu"),
        ({"canon_bias": 1}, r"canon_bias=1 must be True or False"),
        (
            {"canon": "AB", "input_projection": "none"},
            r"canon='AB' has a Canon layer at B, .* but mixing='dynamic' has none there; remove B",
        ),
    ],
)
def test_settings_without_meaning_are_told(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(encoder=StackConfig(num_layers=2, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_convolves_the_projections_that_it_states(kind):
    """Or states none, and B is refused: it never goes unnoticed."""
    stack = StackConfig(num_layers=1, mixing=kind, canon="B")
    config = tiny_config(encoder=dataclasses.replace(stack, canon=""), num_heads=3)
    stated = stack.layers()[0].projections(config)
    if not stated:
        with pytest.raises(UserError, match="remove B"):
            tiny_config(encoder=stack)
        return
    mixing = stack.layers()[0].build(config, key=jax.random.key(0))
    found = {name: canon.kernel.shape[1] for name, canon in canons_of(mixing).items()}
    assert found == stated


def test_a_decoder_must_not_read_the_future_through_canon_layers():
    stack = StackConfig(num_layers=2, canon="C", canon_padding="CENTERED")
    assert tiny_config(encoder=stack).encoder_layers[0].canon_reach == (2, 1)
    with pytest.raises(
        UserError, match=r"decoder\.canon_padding='CENTERED' reads future positions"
    ):
        tiny_config(decoder=stack)


# --- In vision blocks -----------------------------------------------------------------------------


def vision_model(**settings):
    return test_vision_model.tiny(stem="patchify", num_layers=1, **settings)


WIDTHS = {"CAUSAL": (3, 0), "CENTERED": (2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("padding", quick(list(WIDTHS), chosen=["CENTERED"]))
def test_patches_read_patches_alone_and_the_class_token_itself(padding):
    model = vision_model(canon="ABCD", canon_padding=padding).build(jax.random.key(0))
    output = model.encoder.layers[0].attention.output
    output.kernel[...] = jnp.zeros_like(output.kernel[...])  # Tokens meet nowhere else.
    model.class_token[...] = jnp.ones_like(model.class_token[...])
    patches = jax.random.normal(jax.random.key(1), (1, 4, 4, 8))

    @jax.jit
    def slopes(model, patches):
        def tokens(model, patches):
            return jnp.sum(model.encode(patches)[0] ** 3, axis=-1)

        by_model, by_patch = jax.jacrev(tokens, argnums=(0, 1))(model, patches)
        return by_model.class_token[...], by_patch

    by_token, by_patch = slopes(model, patches)
    # The encoder's places C and D read one after the other.
    left, right = (2 * width for width in WIDTHS[padding])
    reads = np.abs(by_patch[:, 0]).max(-1).reshape(17, 16) > 0
    distance = np.arange(16)[None] - np.arange(16)[:, None]
    np.testing.assert_array_equal(reads[1:], (-left <= distance) & (distance <= right))
    assert not reads[0].any()
    assert np.abs(by_token[0]).max() > 0
    assert not np.abs(by_token[1:]).any()


def test_costs_and_places_of_vision_models_are_those_of_the_model():
    config = vision_model(canon="ABCD", canon_bias=True)
    abstract = jax.eval_shape(config.build, jax.random.key(0))
    total = vision_costs.model_cost(config).total
    assert total.parameters == sum(leaf.size for leaf in jax.tree.leaves(abstract))
    without = vision_costs.model_cost(vision_model()).total
    own = [leaf.size for name, leaf in named_leaves(abstract) if "canon/" in name]
    assert len(own) == 2 * 6
    assert total.multiply_adds - without.multiply_adds == config.num_tokens * sum(own)
    specs = parameter_specs(abstract, placement.rules())
    block = "encoder/layers/0"
    assert specs[f"{block}/attention_canon/kernel"] == PartitionSpec(None, None)
    assert specs[f"{block}/attention/input/canon/2/kernel"] == PartitionSpec(None, "tensor")
    assert specs[f"{block}/mlp/wi/canon/bias"] == PartitionSpec("tensor")
