"""Training steps and decoding of several models by length: time, FLOPs, memory."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from convt5.analysis import costs
from convt5.benchmarks.sides import TARGETS, Measured, Side, random_batch, random_source
from convt5.benchmarks.timing import in_turns
from convt5.generation.decoding import decode
from convt5.modeling.architecture import ConvT5Config
from convt5.training.compilation import CompiledStep, compile_step
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig
from convt5.training.plan import make_plan
from convt5.training.schedule import InverseSqrt
from convt5.training.train_step import StepConfig

_TOKENS_OF_ROW = {
    "train_step": lambda length: length + length // TARGETS,
    "decode": lambda length: length,
}


def by_length(
    suite: str,
    sides: Mapping[str, Side],
    lengths: Sequence[int],
    *,
    batch_size: int,
    repeats: int,
    longest_seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yields a record of "train_step" or "decode" for each length and side.

    A side that took longer than `longest_seconds` is skipped at greater lengths.
    """
    slow: set[str] = set()
    for length in lengths:
        measured = {
            name: make(length, batch_size) for name, make in sides.items() if name not in slow
        }
        taken = in_turns({name: run for name, (run, _) in measured.items()}, repeats=repeats)
        for name, timing in taken.items():
            if timing.seconds > longest_seconds:
                slow.add(name)
            yield {
                "suite": suite,
                "case": name,
                "length": length,
                "batch_size": batch_size,
                **timing.as_json(),
                **measured[name][1],
                "tokens_per_second": batch_size * _TOKENS_OF_ROW[suite](length) / timing.seconds,
            }


def train_step(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a training step of a convt5 model: loss, gradients and Adafactor."""
    run, step = compiled_step(config, length, batch_size)
    cost = costs.model_cost(config, encoder_length=length, decoder_length=length // TARGETS)
    known = {
        "flops": batch_size * cost.training_flops,
        "temporary_bytes": step.call.memory_analysis().temp_size_in_bytes,
        "compile_seconds": step.seconds,
    }
    return run, known


def compiled_step(
    config: ConvT5Config, length: int, batch_size: int
) -> tuple[Callable[[], Any], CompiledStep]:
    """Returns a function that makes one training step on a random batch, and its program."""
    update = StepConfig(
        model=config, loss=TextLoss(), optimizer=AdafactorConfig(), schedule=InverseSqrt()
    )
    plan = make_plan(update, batch_size=batch_size, devices=jax.devices()[:1])
    batch = jax.device_put(random_batch(config, length, batch_size), plan.batch_sharding)
    step = compile_step(plan.train_step, plan.abstract, batch)
    state = [plan.init_state()]

    def run():
        state[0], metrics = step.call(state[0], batch)
        return metrics["loss"]

    return run, step


def decoder(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a greedy search of a convt5 model, without early ends."""
    model = jax.jit(config.build)(jax.random.key(0))
    source = random_source(config, length, batch_size)
    # An id that the model never generates, so every row reaches the maximum length.
    run = functools.partial(decode, model, source, max_length=length, end_id=config.vocab_size)
    cost = costs.model_cost(config, encoder_length=source.shape[1], decoder_length=length)
    return run, {"state_bytes": batch_size * cost.decoding_bytes}
