"""The mixing kind `long`: its equation, decoding, packing, padding, meshes, costs and programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick
from test_model import VOCAB, random_tokens, shift, tiny_config
from test_train_step import ONE_DEVICE, OPTIMIZERS, assert_same_state, new_state, run_text
from test_whole_rows import direct_sums, use_small_blocks

from convt5.analysis import costs
from convt5.generation.search import reordered
from convt5.interchange import loading, portable, stablehlo
from convt5.modeling.architecture import StackConfig
from convt5.modeling.mixers.base import Reach, StackInputs
from convt5.modeling.mixers.long import Long
from convt5.modeling.model import ConvT5
from convt5.modeling.sharding import MeshConfig
from convt5.modeling.tree_paths import named_leaves

FILTER: dict[str, Any] = {"filter_scale": 12, "filter_width": 4, "filter_bands": 2}
VARIANTS = {
    "glu": {"gating": "glu", **FILTER},
    "hyena": {"gating": "hyena", "canon": "B", **FILTER},
}
RULE = {"glu": {}, "hyena": {"hide_start_token": True}}
SOURCE, TARGET = 21, 13

run = jax.jit(ConvT5.__call__)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


def config(variant: str, **overrides):
    settings = {
        "encoder": StackConfig(num_layers=1, mixing="long", **VARIANTS[variant]),
        "decoder": StackConfig(num_layers=1, mixing="long", **VARIANTS[variant]),
    }
    return tiny_config(**{**settings, **RULE[variant], **overrides})


@functools.cache
def model(variant: str) -> ConvT5:
    made = config(variant).build(jax.random.key(0))
    for stack in (made.encoder, made.decoder):
        for layer in stack.layers:
            layer.mixing.skip[...] = jnp.linspace(-1.0, 1.0, 8)
    return made


# --- The equation ---------------------------------------------------------------------------------


def taps_of(kind: Long, parameters, length: int) -> np.ndarray:
    """Taps [sides, length, embed], from the equations of the module's docstring alone."""
    t = np.arange(length) / kind.filter_scale
    waves = [w(2 * np.pi * k * t) for w in (np.cos, np.sin) for k in range(1, 3)]
    hidden = np.stack([t, *waves], axis=1)
    for i in range(kind.filter_layers):
        own = f"filter/hidden/{i}"
        hidden = np.sin(10 * (hidden @ parameters[f"{own}/kernel"] + parameters[f"{own}/bias"]))
    channels = parameters["skip"].size
    rates = np.log(100) * (1 / 0.3 + (1 / 1.5 - 1 / 0.3) * np.arange(channels) / (channels - 1))
    windows = np.exp(-t[:, None] * rates)
    everything = np.exp(-np.arange(10_000)[:, None] / kind.filter_scale * rates)
    windows /= np.sqrt(kind.sides * np.sum(everything**2, axis=0))
    return hidden @ parameters["filter/output"] * windows


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gating", ["glu", "hyena"])
def test_a_block_equals_its_equation(gating, causal):
    kind = Long(causal=causal, gating=gating, **FILTER)
    block = kind.build(config("glu"), key=jax.random.key(3))
    block.skip[...] = jnp.linspace(-1.0, 1.0, 8)
    x = np.random.default_rng(0).normal(size=(2, SOURCE, 8)).astype(np.float32)
    ids = np.array([[1] * 9 + [2] * 10 + [0] * 2, [1] * SOURCE])
    p = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(block)}
    if gating == "glu":
        gated = x @ p["input/kernel"] * sigmoid(x @ p["gate/kernel"])
    else:
        gated = x @ p["key/kernel"] * (x @ p["value/kernel"])
    taps = taps_of(kind, p, SOURCE)
    taps[0, 0] += p["skip"]
    kernel = taps[0, ::-1] if causal else np.concatenate([taps[0, ::-1], taps[1, 1:]])
    y = direct_sums("CAUSAL" if causal else "CENTERED", gated, kernel, ids, gated)[0]
    y = y * (x @ p["query/kernel"]) if gating == "hyena" else y
    found = jax.jit(lambda m: m(jnp.asarray(x), StackInputs(jnp.asarray(ids))))(block)
    np.testing.assert_allclose(found, y @ p["output/kernel"], atol=2e-5)


def test_outputs_begin_as_large_as_inputs():
    for causal in (True, False):
        block = Long(causal=causal).build(config("glu"), key=jax.random.key(0))
        taps = block.filter(2048)
        energy = np.sum(np.square(taps), axis=(0, 1))
        assert 0.1 < energy.min() < energy.max() < 1.5


# --- Properties of a model ------------------------------------------------------------------------


@jax.jit
def forced_and_stepwise(model, source, target):
    """Logits of whole rows, and of steps of two beams that change places halfway."""
    ids = (source != 0).astype(jnp.int32)
    encoded = model.encode(source, segment_ids=ids)
    half, beams = target.shape[1] // 2, jnp.repeat(target, 2, axis=0)
    beams = beams.at[1::2, 1:half].set(beams[::2, 1:half] % 7 + 1)
    state = model.init_decoding(encoded, encoder_segment_ids=ids, length=target.shape[1], copies=2)

    def step(state, tokens):
        logits, state = model.decode_step(state, tokens)
        return state, logits

    state, before = jax.lax.scan(step, state, beams[:, :half].T)
    state = reordered(state, jnp.array([[1, 0], [0, 0]]))
    kept = jnp.array([1, 0, 2, 2])
    beams = beams.at[:, :half].set(beams[kept, :half])
    _, after = jax.lax.scan(step, state, beams[:, half:].T)
    stepwise = jnp.moveaxis(jnp.concatenate([before[:, kept], after]), 0, 1)
    return model.decode(encoded, beams, encoder_segment_ids=ids), stepwise


@pytest.mark.parametrize(("source", "target"), [(0, 4), (3, 0)])
def test_rows_of_no_positions_have_logits_of_their_shape(source, target):
    tokens = [jax.ShapeDtypeStruct((2, size), jnp.int32) for size in (source, target)]
    assert jax.eval_shape(model("glu"), *tokens).shape == (2, target, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("variant", quick(list(VARIANTS), chosen=["hyena"]))
def test_stepping_equals_teacher_forcing(variant):
    source, target = random_tokens(0, 2, SOURCE), shift(random_tokens(1, 2, TARGET))
    forced, stepwise = forced_and_stepwise(model(variant), source, target)
    np.testing.assert_allclose(stepwise, forced, atol=2e-5 * np.abs(forced).max())


def test_the_future_and_other_examples_are_never_read_and_packed_equals_separate():
    sources = [random_tokens(i, 1, n) for i, n in enumerate((4, 9))]
    targets = [random_tokens(9 + i, 1, n) for i, n in enumerate((5, 6))]

    def packed(rows, length):
        joined = np.concatenate(rows, 1)
        return np.pad(joined, ((0, 0), (0, length - joined.shape[1]))).astype(np.int32)

    def logits(source, target):
        ids = {
            f"{stack}_segment_ids": packed(
                [np.full_like(row, i + 1) for i, row in enumerate(rows)], length
            )
            for stack, rows, length in (("encoder", source, SOURCE), ("decoder", target, TARGET))
        }
        source, target = packed(source, SOURCE), packed([shift(r) for r in target], TARGET)
        return np.asarray(run(model("hyena"), source, target, **ids))

    both = logits(sources, targets)
    for i, at in enumerate((slice(0, 5), slice(5, 11))):
        alone = logits(sources[i : i + 1], targets[i : i + 1])
        size = targets[i].shape[1]
        np.testing.assert_allclose(both[:, at], alone[:, :size], atol=2e-5 * np.abs(both).max())
    other = logits([sources[0] % 7 + 1, sources[1]], [targets[0] % 7 + 1, targets[1]])
    np.testing.assert_array_equal(other[:, 5:11], both[:, 5:11])
    later = targets[1].copy()
    later[:, 3:] = later[:, 3:] % (VOCAB - 1) + 1
    np.testing.assert_array_equal(logits(sources, [targets[0], later])[:, :9], both[:, :9])


@pytest.mark.nightly
def test_one_update_is_the_same_on_a_mesh_of_every_axis():
    changes = {"emb_dim": 16, "num_heads": 8, "head_dim": 2}
    model_config = config("hyena", **changes)
    made_by, schedule = OPTIMIZERS["sgd"]
    start = jax.device_get(new_state(model_config, made_by.build(schedule), jax.random.key(0)))
    _, expected, _ = run_text(model_config, ONE_DEVICE, start, schedule, made_by=made_by)
    mesh = MeshConfig(fsdp=2, sequence=2, tensor=2, data=1)
    _, found, _ = run_text(model_config, mesh, start, schedule, made_by=made_by)
    assert_same_state(found, expected)


@pytest.mark.slow
def test_programs_of_an_export_equal_the_model():
    source, target = random_tokens(0, 2, 5), shift(random_tokens(1, 2, 4))
    programs = stablehlo.export_programs(model("glu"), encoder_length=5, decoder_length=4)
    params = dict(named_leaves(model("glu")))
    expected = run(model("glu"), source, target)
    state = programs["start"].call(params, programs["encode"].call(params, source), source)
    for i in range(4):
        logits, state = programs["step"].call(params, state, target[:, i])
        np.testing.assert_allclose(logits, expected[:, i], atol=1e-5 * np.abs(expected).max())


def test_an_export_gives_the_same_model_back(tmp_path):
    given = dict(named_leaves(model("hyena")))
    portable.write_model(tmp_path, model("hyena").config, given)
    loaded = loading.load_model(tmp_path)
    assert loaded.config == model("hyena").config
    for name, leaf in named_leaves(loaded):
        np.testing.assert_array_equal(leaf, given.pop(name), err_msg=name)
    assert not given


# --- Descriptions ---------------------------------------------------------------------------------


def test_a_layer_reads_all_that_it_may():
    assert Long(causal=True).reach == Reach(None, 0)
    assert Long().reach == Reach(None, None)


def test_decoding_keeps_inputs_and_taps():
    made = config("glu", dtype="bfloat16")
    kept = jax.eval_shape(
        lambda m: m.decoder.layers[0].mixing.init_state(1, TARGET, 8, jnp.dtype("bfloat16")),
        model("glu"),
    )
    real = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    assert 2 * made.decoder_layers[0].state_size(made, TARGET) == real


def test_parameters_do_not_grow_with_the_row():
    made = config("glu")
    shapes = {
        n: s for n, s in costs.parameter_shapes(made).items() if "encoder/layers/0/mixing/" in n
    }
    filters = 5 * 4 + 4 + 4 * 4 + 4 + 2 * 4 * 8
    assert costs.num_parameters(shapes) == 3 * 8 * 8 + 8 + filters
