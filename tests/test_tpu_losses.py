"""The kernels of the loss, compiled for TPUs that need not be here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from convt5.ops import linear_cross_entropy
from convt5.ops.implementation import chosen

pytestmark = pytest.mark.tpu

BATCH, LENGTH, EMBED, VOCAB = 8, 128, 768, 32128


def compiled(name, choice):
    from convt5.tpu import topology

    sharding = SingleDeviceSharding(topology.load(name).devices[0])
    shapes = [
        ((BATCH, LENGTH, EMBED), jnp.bfloat16),
        ((VOCAB, EMBED), jnp.float32),
        ((BATCH, LENGTH), jnp.int32),
        ((BATCH, LENGTH), jnp.float32),
    ]
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]

    def loss(*arrays):
        return linear_cross_entropy(*arrays).loss

    with chosen(choice):
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()


@pytest.mark.parametrize("name", ["v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1"])
def test_every_generation_compiles_the_kernels(compiler, name):
    kernels = compiled(name, "auto")
    assert kernels.as_text().count('custom_call_target="tpu_custom_call"') == 2


def test_kernels_move_the_table_and_its_gradient_once_a_pass(compiler):
    plain, kernels = (compiled("v5e:1x1", choice) for choice in ("plain", "auto"))
    table_bytes = VOCAB * EMBED * 4
    accessed = kernels.cost_analysis()["bytes accessed"]
    # The table is read forward and backward, and its gradient written; the rest is small.
    assert 3 * table_bytes <= accessed < 3.5 * table_bytes
    assert accessed < plain.cost_analysis()["bytes accessed"] / 2
    logits_bytes = BATCH * LENGTH * VOCAB * 4
    assert kernels.memory_analysis().temp_size_in_bytes < logits_bytes / 20
