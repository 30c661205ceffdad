"""Operations of a training step belong to the functions that they came from, and add up to it."""

import jax
import jax.numpy as jnp
import pytest
import step_costs

from convt5 import bench, errors
from convt5.analysis import costs
from convt5.benchmarks import models
from convt5.ops import dense, linear_cross_entropy

TINY = [
    f"architecture.ConvT5Config.{name}={value}"
    for name, value in {
        **{"emb_dim": 32, "mlp_dim": 64, "num_heads": 2, "head_dim": 8, "vocab_size": 48},
    }.items()
]


@pytest.fixture(autouse=True)
def sources():
    """Programs tell where in the source each operation comes from, as outside of tests."""
    name = "jax_traceback_in_locations_limit"
    usual = jax.config.values[name]
    jax.config.update(name, 10)
    yield
    jax.config.update(name, usual)


def test_products_have_their_flops_and_the_part_of_their_function():
    ids = jnp.ones((2, 8), jnp.int32)

    def loss(x, kernel, table):
        x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(dense.dense(x, kernel)), x)
        return linear_cross_entropy(x, table, ids, jnp.ones((2, 8))).loss.sum() + (x @ x.mT).sum()

    shapes = [(2, 8, 16), (16, 16), (32, 16)]
    compiled = jax.jit(loss).lower(*map(jnp.ones, shapes)).compile()
    flops = {}
    for operation in step_costs.operations(compiled.as_text()).values():
        flops.setdefault(operation.part, []).append(operation.flops)
    # A loop has its operations once; fusions have those of what is in them.
    assert max(flops["dense layers"]) == 2 * 2 * 8 * 16 * 16
    assert max(flops["cross-entropy"]) == 2 * 2 * 8 * 16 * 32
    assert max(flops[step_costs.OTHER]) == 2 * 2 * 8 * 8 * 16


@pytest.mark.nightly
def test_operations_that_ran_have_the_flops_and_the_time_of_the_step():
    settings = [*TINY, "architecture.StackConfig.num_layers=1"]
    (config,) = bench._models(["gin/models/dynamic_tiny.gin"], settings).values()
    run, step = models.compiled_step(config, 64, 3)
    known = step_costs.operations(step.call.as_text())
    seconds, taken = step_costs.measured(run, 2)
    flops = sum(known[name].flops * len(runs) for name, runs in taken.items()) / 2
    cost = costs.model_cost(config, encoder_length=64, decoder_length=16)
    # Softmaxes and norms are no products.
    assert flops == pytest.approx(3 * 3 * cost.forward_flops, rel=0.05)
    assert min(map(min, taken.values())) >= 0
    parts = {known[name].part for name in taken}
    assert {"dense layers", "convolutions", "attention", "norms and residuals"} < parts
    assert 0 < max(map(max, taken.values())) <= 2 * seconds


@pytest.mark.nightly
def test_parts_add_up_to_the_step(capsys):
    bindings = [f"--gin.{each}" for each in [*TINY, "architecture.StackConfig.num_layers=1"]]
    flags = ["--lengths", "8", "--repeats=1", "--batch_size=1"]
    step_costs.main(["--gin_file=gin/models/hybrid_tiny.gin", *flags, *bindings])
    _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    milliseconds = {row[0]: float(row[2]) for row in cells if "-" not in row[0][:1]}
    step = milliseconds.pop("step")
    assert sum(milliseconds.values()) == pytest.approx(step, abs=0.1 * len(milliseconds))


def test_unknown_flags_are_refused():
    with pytest.raises(errors.UserError, match="--nonsense is no flag of this command"):
        step_costs.main(["--gin_file=gin/models/t5_tiny.gin", "--nonsense"])
