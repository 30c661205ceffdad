"""The kernels of the loss, compiled for TPUs that need not be here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from quick import quick

from convt5.ops import dispatch, linear_cross_entropy
from convt5.ops.cross_entropy import tpu as kernels

pytestmark = pytest.mark.tpu

BATCH, LENGTH, EMBED, VOCAB = 8, 128, 768, 32128


@functools.cache
def compiled(name, choice, *, x=(BATCH, LENGTH, EMBED), vocab=VOCAB, dtype=jnp.bfloat16):
    from convt5.analysis import topology

    sharding = SingleDeviceSharding(topology.load(name).devices[0])
    shapes = [
        (x, dtype),
        ((vocab, x[-1]), jnp.float32),
        (x[:-1], jnp.int32),
        (x[:-1], jnp.float32),
    ]
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]

    def loss(*arrays):
        return linear_cross_entropy(*arrays).loss

    with dispatch.using(choice=choice):
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()


GENERATIONS = ["v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1"]


@pytest.mark.parametrize("name", quick(GENERATIONS, chosen=["v5e:1x1"]))
def test_every_generation_compiles_the_kernels(compiler, name):
    found = compiled(name, "auto")
    assert found.as_text().count('custom_call_target="tpu_custom_call"') == 2


def test_kernels_move_the_table_and_its_gradient_once_a_pass(compiler):
    plain, ours = (compiled("v5e:1x1", choice) for choice in ("plain", "auto"))
    table_bytes = VOCAB * EMBED * 4
    accessed = ours.cost_analysis()["bytes accessed"]
    # The table is read forward and backward, and its gradient written; the rest is small.
    assert 3 * table_bytes <= accessed < 3.5 * table_bytes
    assert accessed < plain.cost_analysis()["bytes accessed"] / 2
    logits_bytes = BATCH * LENGTH * VOCAB * 4
    assert ours.memory_analysis().temp_size_in_bytes < logits_bytes / 20


CHUNKS = [
    ("v5e:1x1", 128, jnp.float32, 1),
    ("v4:1x1x1", 128, jnp.float32, 1),
    ("v5e:1x1", 512, jnp.float32, 2),
    ("v5e:1x1", 128, jnp.bfloat16, 1),
    ("v4:1x1x1", 768, jnp.bfloat16, 2),
    ("v5e:1x1", 2048, jnp.bfloat16, 1),
]


@pytest.mark.parametrize("case", quick(CHUNKS, chosen=CHUNKS[2:4]))
def test_the_most_tokens_of_a_chunk_fit_the_chip(compiler, case):
    name, embed, dtype, chunks = case
    tokens = kernels._most_tokens(jax.ShapeDtypeStruct((1, 1, embed), dtype), in_chunks=chunks > 1)
    found = compiled(name, "auto", x=(1, chunks * tokens, embed), vocab=3000, dtype=dtype)
    assert found.as_text().count('custom_call_target="tpu_custom_call"') == 2 * chunks


def test_chunks_add_to_one_gradient_of_the_table(compiler):
    found = compiled("v5e:1x1", "auto", x=(4, LENGTH * 8, EMBED))
    assert found.as_text().count('custom_call_target="tpu_custom_call"') >= 6
    # Each has the table and its gradient for arguments or results; nothing of their size is beside.
    assert found.memory_analysis().temp_size_in_bytes < VOCAB * EMBED * 4 / 2
