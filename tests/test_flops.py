"""The FLOPs of a step are those of all its loops and devices, as if it had none."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from quick import quick

from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.sharding import MeshConfig
from convt5.training import compilation, losses, optimizer, plan, schedule
from convt5.training.train_step import StepConfig

ROWS, LENGTH = 8, 32
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
PRODUCT = 2 * 64**3


def flops(function, *args):
    return compilation.compile_step(jax.jit(function), *args).flops


def test_every_step_of_a_loop_counts():
    def power(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=10)[0]

    assert flops(power, SQUARE, SQUARE) == pytest.approx(10 * PRODUCT, rel=0.01)


@pytest.mark.parametrize("length", [64, 100])
def test_a_fourier_transform_in_a_loop_counts_as_outside(length):
    def filtered(x):
        return jnp.fft.irfft(jnp.fft.rfft(x), length)

    def twice(x):
        return jax.lax.scan(lambda x, _: (filtered(x), None), x, None, length=2)[0]

    x = jax.ShapeDtypeStruct((8, length), jnp.float32)
    assert flops(twice, x) == pytest.approx(2 * flops(filtered, x), rel=0.01)


def test_every_device_of_a_part_for_each_counts():
    mesh = jax.make_mesh((4,), ("rows",), (jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("rows"), PartitionSpec()
    product = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    assert flops(product, SQUARE, SQUARE) == pytest.approx(PRODUCT, rel=0.01)


def test_what_nothing_reads_does_not_count():
    def second(x, w):
        first = jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=10)[0]
        return (first, x @ w)[1]

    assert flops(second, SQUARE, SQUARE) == PRODUCT


@functools.cache
def plain_flops():
    return step_flops()


def step_flops(*, devices=1, scan_layers=False, **settings):
    model = ConvT5Config(
        vocab_size=512,
        emb_dim=64,
        mlp_dim=128,
        num_heads=4,
        head_dim=16,
        dtype="float32",
        encoder=StackConfig(num_layers=2, mixing="attention"),
        decoder=StackConfig(num_layers=2, mixing="dynamic"),
        scan_layers=scan_layers,
    )
    config = StepConfig(
        model=model,
        loss=losses.TextLoss(),
        optimizer=optimizer.SGDConfig(),
        schedule=schedule.Constant(rate=0.1),
        **settings,
    )
    made = plan.make_plan(config, batch_size=ROWS, devices=jax.devices()[:devices])
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(names, jnp.int32) | {"decoder_loss_weights": jnp.float32}
    place = made.batch_sharding
    arrays = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=place)
        for name, dtype in batch.items()
    }
    return made.compile_train_step(made.abstract, arrays).flops


WAYS = [
    {"grad_accum_steps": 4},
    {"scan_layers": True},
    {"devices": 4, "mesh": MeshConfig(data=2, fsdp=2)},
]
# Of 8 rows on 4 devices there are two microbatches.
TOGETHER = {name: value for way in WAYS for name, value in way.items()} | {"grad_accum_steps": 2}


@pytest.mark.parametrize("way", quick([TOGETHER, *WAYS], chosen=[TOGETHER]), ids=str)
@pytest.mark.slow
def test_a_step_counts_the_same_in_microbatches_in_a_loop_over_layers_and_on_more_devices(way):
    assert step_flops(**way) == pytest.approx(plain_flops(), rel=0.02)
