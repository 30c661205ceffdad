"""The gradients of T5X's T5 as the TPU compiler makes them, beside those of `inspect --topology`.

`python -m convt5.tpu.peer_costs --t5x=CHECKOUT` prints a row for each length: operations, bytes
accessed, temporaries and the time to compile, for 4,096 encoder and 1,024 decoder tokens.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from convt5 import gin_config
from convt5.benchmarks import t5x
from convt5.benchmarks.sides import TARGETS
from convt5.tpu import topology

TOKENS = 4096


def row(checkout: pathlib.Path, model_file: str, device, length: int) -> str:
    """Returns the line of a Markdown table for rows of `length` encoder tokens."""
    config = gin_config.load([model_file], roots=["%MODEL"]).macro("MODEL")
    model = t5x.make_model(checkout, config)
    sharding = SingleDeviceSharding(device)
    rows = TOKENS // length
    shapes = [(rows, length), (rows, length // TARGETS), (rows, length // TARGETS)]
    tokens = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes]
    parameters = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        jax.eval_shape(functools.partial(t5x.init_parameters, model), tokens),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding)
    loss = functools.partial(t5x.loss, model)
    start = time.process_time(), time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(loss)).lower(parameters, tokens, key)
    compiled = lowered.compile()
    cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None or memory is None:
        raise RuntimeError("the compiler says nothing of what the program costs")
    cells = (
        length,
        f"{cost['flops'] / 1e12:.2f} TFLOP",
        f"{cost['bytes accessed'] / 1e9:.1f} GB",
        f"{memory.temp_size_in_bytes / 1e9:.2f} GB of temporaries",
        f"{wall:.0f} s to compile",
        f"{cpu:.0f} s of processors",
    )
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m convt5.tpu.peer_costs")
    parser.add_argument("--t5x", required=True, help="a checkout of github.com/google-research/t5x")
    parser.add_argument("--topology", default="v5p:1x1x1", help="a name of convt5.tpu.topology")
    parser.add_argument("--gin_file", default="gin/models/t5_base.gin", help="whose sizes it takes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    settings = parser.parse_args(argv)
    device = topology.load(settings.topology).devices[0]
    for length in settings.lengths:
        print(row(pathlib.Path(settings.t5x), settings.gin_file, device, length), flush=True)


if __name__ == "__main__":
    main()
