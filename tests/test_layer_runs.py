"""How layers are run: rematerialised or scanned, with the same updates, and less to keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick
from test_model import tiny_config
from test_train_step import (
    ADAFACTOR,
    ONE_DEVICE,
    MeshConfig,
    assert_same_state,
    build_mesh,
    run_text,
    text_batch,
    text_config,
)

from convt5.analysis import collectives
from convt5.errors import UserError
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.blocks import Stack
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import batch_sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training.losses import TextLoss
from convt5.training.schedule import InverseSqrt
from convt5.training.train_state import abstract_state, new_state, state_shardings
from convt5.training.train_step import differentiate

HYBRID = {"mixing": "dynamic", "kernel_size": 3, "num_kernels": 2, "attention_layers": (-1,)}


def deep_config(**settings) -> ConvT5Config:
    return text_config(
        encoder=StackConfig(num_layers=3, **HYBRID),
        decoder=StackConfig(num_layers=1, mixing="lightweight", kernel_size=3, num_kernels=2),
        dropout_rate=0.1,
        **settings,
    )


@functools.cache
def start():
    config = deep_config()
    state = new_state(config, ADAFACTOR.build(InverseSqrt()), jax.random.key(0))
    # Layers of different scale: a rule that took their stack for one parameter would show.
    scales = {"encoder/layers/0": 3.0, "encoder/layers/1": 0.03}
    leaves = [
        leaf * next((s for part, s in scales.items() if f"{part}/mixing" in name), 1.0)
        for name, leaf in named_leaves(state.model)
    ]
    model = jax.tree.unflatten(jax.tree.structure(state.model), leaves)
    return jax.device_get(dataclasses.replace(state, model=model))


def with_settings(state, config: ConvT5Config):
    """The same arrays in the state of a model that runs its layers in another way."""
    optimizer = ADAFACTOR.build(InverseSqrt())
    like = jax.eval_shape(lambda: new_state(config, optimizer, jax.random.key(0)))
    names = [name for name, _ in named_leaves(like)]
    assert names == [name for name, _ in named_leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state))


@functools.cache
def updated(mesh: MeshConfig = ONE_DEVICE, **settings):
    config = deep_config(**settings)
    _, state, metrics = run_text(config, mesh, with_settings(start(), config), InverseSqrt())
    return state, metrics[0]


def assert_same_update(found, expected):
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, err_msg=name)
    assert_same_state(found[0], expected[0])


# Layers one by one and in a loop are wrapped alike: each policy is compiled in one of the two.
@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["full", "dots_with_no_batch_dims_saveable"])
def test_rematerialised_layers_make_the_same_update(remat):
    assert_same_update(updated(remat=remat), updated())


@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["none", "full", "dots_saveable"])
def test_scanned_layers_make_the_same_update_and_keep_the_same_statistics(remat):
    assert_same_update(updated(scan_layers=True, remat=remat), updated())


SCANNED_ON_A_MESH = [
    ("full", MeshConfig(data=1, fsdp=2, sequence=2, tensor=2)),
    ("none", MeshConfig(data=2, fsdp=2, tensor=2)),
    ("full", MeshConfig(data=2, fsdp=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(SCANNED_ON_A_MESH, chosen=SCANNED_ON_A_MESH[:1]))
def test_scanned_layers_make_the_same_update_on_a_mesh(case):
    remat, mesh = case
    assert_same_update(updated(mesh, remat=remat, scan_layers=True), updated())


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", quick([True, False], chosen=[True]))
def test_parameters_that_devices_split_are_gathered_layer_by_layer(scan_layers):
    # Alike, without dropout: what is gathered and when is that of any layers.
    convolutions = {"mixing": "depthwise", "kernel_size": 3}
    config = text_config(
        encoder=StackConfig(num_layers=3, **convolutions),
        decoder=StackConfig(num_layers=1, **convolutions),
        remat="full",
        scan_layers=scan_layers,
    )
    mesh = build_mesh(MeshConfig(data=1, fsdp=4))
    state = abstract_state(config, ADAFACTOR.build(InverseSqrt()))
    shardings = state_shardings(state, mesh, TEXT_RULES)
    gradients = differentiate(TextLoss(), shardings.model)
    compiled = (
        jax.jit(gradients, in_shardings=(shardings.model, batch_sharding(mesh), None))
        .lower(state.model, text_batch(), jax.random.key(0))
        .compile()
    )
    found = collectives.parse(compiled.as_text(), dict(mesh.shape))
    gathers = [c for c in found if c.kind == "all-gather"]
    leaves = named_leaves(state.model)
    largest = max(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    # A stack of three layers would be larger.
    assert max(c.payload_bytes for c in gathers) <= largest
    # Forward, and again backward, what the rematerialised layers read.
    split = sum(
        leaf.size * leaf.dtype.itemsize
        for (name, leaf), where in zip(leaves, jax.tree.leaves(shardings.model), strict=True)
        if "fsdp" in str(where.spec) and "/layers/" in name
    )
    assert sum(c.count * c.payload_bytes for c in gathers) >= 1.9 * split


def temporaries(remat: str, **settings) -> int:
    """Bytes that the gradients of a stack need in between, by the compiler's own count."""
    stack = StackConfig(num_layers=4, mixing="dynamic", kernel_size=3, num_kernels=2)
    config = tiny_config(remat=remat, encoder=stack, emb_dim=16, mlp_dim=64, **settings)
    model = jax.eval_shape(lambda: Stack(config, decoder=False, key=jax.random.key(0)))
    x, ids = (
        jax.ShapeDtypeStruct((4, 512, 16), jnp.float32),
        jax.ShapeDtypeStruct((4, 512), jnp.int32),
    )

    def loss(model, x, ids):
        return jnp.sum(jnp.square(model(x, StackInputs(ids))))

    compiled = jax.jit(jax.grad(loss)).lower(model, x, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_the_less_is_kept_the_smaller_are_the_temporaries():
    # As a loop: XLA:CPU orders unrolled layers without regard to memory, and computes early again.
    sizes = [temporaries(r, scan_layers=True) for r in ("full", "dots_saveable", "none")]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.5 * sizes[2]


def test_layers_of_one_form_are_one_loop():
    config = deep_config(scan_layers=True)
    model = jax.eval_shape(lambda: config.build(jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    text = str(jax.make_jaxpr(lambda model, a: model(a, a))(model, tokens))
    # Two dynamic layers below one of attention; one layer alone.
    assert text.count(" length=2\n") == 1


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match=r"remat='all' must be one of none, full, dots_saveable"):
        tiny_config(remat="all")
