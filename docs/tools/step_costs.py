"""Where the time of a training step goes: the step, each of its parts alone, and matrix products.

`python docs/tools/step_costs.py --gin_file=gin/models/dynamic_tiny.gin` prints, for each length,
the share of the step that each part takes alone (forward and backward), and how much of it exceeds
the time of its FLOPs at the speed of the machine's matrix products. All are measured in turns, in
one process. It reads models whose layers are all dynamic convolutions.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from convt5 import bench, errors
from convt5.benchmarks import machine, models
from convt5.benchmarks.sides import TARGETS
from convt5.benchmarks.timing import in_turns
from convt5.configuration import command_line
from convt5.modeling.layers import Norm
from convt5.modeling.mixers.dynamic import Dynamic
from convt5.ops import attend, dynamic_conv, linear_cross_entropy
from convt5.ops.dense import dense
from convt5.ops.gating import gate
from convt5.reports import markdown
from convt5.runtime.bars import Bar
from convt5.training.optimizer import AdafactorConfig
from convt5.training.schedule import InverseSqrt


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        name: parts of one name are added up.
        count: how often a step has it.
        flops: floating-point operations of one, forward and backward.
        run: runs it that often, without waiting in between.
    """

    name: str
    count: int
    flops: int
    run: Callable[[], Any]


def parts(config: Any, length: int, rows: int) -> Iterator[Part]:
    """Yields the parts of a step of `models.train_step`."""
    target = length // TARGETS
    yield from _stack(config, config.encoder_layers, length, rows)
    yield from _stack(config, config.decoder_layers, target, rows)
    yield from _attention(config, target, length, rows)
    for tokens in (length, target):
        ids = np.random.default_rng(0).integers(1, config.vocab_size, (rows, tokens))
        look_up = functools.partial(jnp.take, indices=jnp.asarray(ids), axis=0)
        yield _part("embedding", 1, 0, look_up, (config.vocab_size, config.emb_dim))
    ids = jnp.ones((rows, target), jnp.int32)

    def loss(x, table):
        return linear_cross_entropy(x, table, ids, ids.astype(jnp.float32)).loss

    size = rows * target * config.emb_dim * config.vocab_size
    shapes = (rows, target, config.emb_dim), (config.vocab_size, config.emb_dim)
    yield _part("cross-entropy", 1, 6 * size, loss, *shapes)
    yield _optimizer(config)


def _stack(config: Any, layers: Sequence[Any], length: int, rows: int) -> Iterator[Part]:
    """Yields the parts of an encoder, or of a decoder without attention."""
    count, layer, width = len(layers), layers[0], config.emb_dim
    taps, heads = layer.kernel_size, layer.num_kernels or width
    x = rows, length, width
    hidden = rows, length, config.mlp_dim

    def with_norm(y, norm):
        return y + norm(y)

    ids = jnp.ones((rows, length), jnp.int32)
    convolve = functools.partial(
        dynamic_conv, padding=layer.tap_padding, dilation=layer.dilation, segment_ids=ids
    )
    size = rows * length * width
    for number, (inputs, outputs) in {
        3: (width, width),  # Values and gate, and the output.
        1: (width, taps * heads),
    }.items():
        yield _dense(number * count, (rows, length, inputs), outputs)
    yield _dense(count, x, config.mlp_dim)
    yield _dense(count, hidden, width)
    logits = rows, length, taps, heads
    yield _part("convolutions", count, 6 * taps * size, convolve, x, logits)
    yield _part("gates", count, 0, gate, x, x)
    yield _part("activations", count, 0, jax.nn.relu, hidden)
    norms = 2 * count + 1 if layers is config.encoder_layers else 3 * count + 1
    yield _part("norms and residuals", norms, 0, with_norm, x, Norm(width))


def _attention(config: Any, target: int, source: int, rows: int) -> Iterator[Part]:
    count, heads, head_dim = len(config.decoder_layers), config.num_heads, config.head_dim
    width = heads * head_dim
    yield _dense(count, (rows, target, config.emb_dim), width)
    yield _dense(2 * count, (rows, source, config.emb_dim), width)
    yield _dense(count, (rows, target, width), config.emb_dim)
    ids = [jnp.ones((rows, length), jnp.int32) for length in (target, source)]

    def read(query, key, value):
        return attend(query, key, value, *ids)

    flops = 12 * rows * target * source * width
    key = rows, source, heads, head_dim
    yield _part("attention", count, flops, read, (rows, target, heads, head_dim), key, key)


def _optimizer(config: Any) -> Part:
    parameters = nnx.to_pure_dict(nnx.state(jax.jit(config.build)(jax.random.key(0))))
    update = AdafactorConfig().build(InverseSqrt())

    @jax.jit
    def apply(gradients, state, parameters):
        changes, state = update.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state

    state = update.init(parameters)
    return Part("optimizer", 1, 0, lambda: apply(parameters, state, parameters))


def _dense(count: int, shape: tuple[int, ...], outputs: int) -> Part:
    flops = 6 * int(np.prod(shape)) * outputs
    return _part("dense layers", count, flops, dense, shape, (shape[-1], outputs))


def _part(name: str, count: int, flops: int, function: Callable[..., Any], *shapes: Any) -> Part:
    """Returns the forward and backward pass of a function of random arrays, and of modules."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=shape), jnp.float32) if isinstance(shape, tuple) else shape
        for shape in shapes
    ]
    out = jax.eval_shape(function, *arrays)
    slope = jnp.asarray(rng.normal(size=out.shape), out.dtype)

    @jax.jit
    def both(slope, *arrays):
        y, pull = jax.vjp(function, *arrays)
        return y, pull(slope)

    return Part(name, count, flops, lambda: [both(slope, *arrays) for _ in range(count)])


def table(config: Any, length: int, rows: int, repeats: int) -> str:
    """Measures a length; returns its table as Markdown."""
    step, known = models.train_step(config, length, rows)
    found = list(parts(config, length, rows))
    sides = {"step": step} | {str(i): part.run for i, part in enumerate(found)}
    before = machine.describe()["matmul_flops"]
    taken = in_turns(sides, repeats=repeats)
    speed = max(before, machine.describe()["matmul_flops"])
    whole = taken["step"].seconds
    sums: dict[str, list[float]] = {}
    for i, part in enumerate(found):
        flops, seconds = sums.setdefault(part.name, [0.0, 0.0])
        sums[part.name] = [flops + part.count * part.flops, seconds + taken[str(i)].seconds]
    flops, seconds = (sum(each) for each in zip(*sums.values(), strict=True))
    sums["the rest"] = [known["flops"] - flops, whole - seconds]
    sums["step"] = [known["flops"], whole]
    title = (
        f"{rows} rows of {length:,} tokens: {whole:.3f} s, {known['flops'] / whole / 1e9:.0f} of "
        f"{speed / 1e9:.0f} GFLOP/s"
    )
    shown = [
        {
            "part": name,
            "GFLOP": f"{flops / 1e9:.1f}",
            "ms": f"{1e3 * seconds:.1f}",
            "of the step": f"{seconds / whole:.1%}",
            "its FLOPs at full speed": f"{flops / speed / whole:.1%}",
            "beyond": f"{(seconds - flops / speed) / whole:.1%}",
        }
        for name, (flops, seconds) in sums.items()
    ]
    return f"{title}\n\n{markdown.table(shown)}"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/step_costs.py", allow_abbrev=False)
    parser.add_argument("--gin_file", required=True, help="a model of dynamic convolutions")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=11)
    settings, bindings = parser.parse_known_args(argv)
    unknown = [each for each in bindings if not each.startswith("--gin.")]
    if unknown:
        raise errors.UserError(f"{unknown[0]} is no flag of this command; --help lists them.")
    named = bench._models([settings.gin_file], [each.removeprefix("--gin.") for each in bindings])
    (config,) = named.values()
    layers = [*config.encoder_layers, *config.decoder_layers]
    if not all(isinstance(layer, Dynamic) for layer in layers) or config.mlp != "relu":
        raise errors.UserError(
            f"--gin_file={settings.gin_file} has other layers than dynamic convolutions and relu; "
            "name one such as gin/models/dynamic_tiny.gin."
        )
    tables = []
    with Bar(sys.stderr, total=len(settings.lengths), unit="length") as progress:
        for length in settings.lengths:
            tables.append(table(config, length, settings.batch_size, settings.repeats))
            progress.update()
    print("\n\n".join(tables))


if __name__ == "__main__":
    command_line.run(main)
