"""Whole training steps and decoding of several models, by length: time, operations, memory."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from convt5.analysis import costs
from convt5.architecture import ConvT5Config
from convt5.benchmarks.sides import TARGETS, Measured, Side, random_batch
from convt5.benchmarks.timing import in_turns
from convt5.generation.decoding import decode
from convt5.losses import TextLoss
from convt5.optimizer import AdafactorConfig
from convt5.schedule import InverseSqrt
from convt5.sharding import MeshConfig
from convt5.training.compilation import compile_step
from convt5.training.plan import make_plan


def side(config: ConvT5Config) -> Side:
    """Returns the training step of a model of ours."""
    return functools.partial(_compiled, config)


def train_steps(
    sides: Mapping[str, Side],
    lengths: Sequence[int],
    *,
    batch_size: int,
    repeats: int,
    longest_seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each length and side.

    A side that took longer than `longest_seconds` for a step is left out at greater lengths.
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
                "suite": "train_step",
                "case": name,
                "length": length,
                **timing.as_json(),
                **measured[name][1],
                "tokens_per_second": batch_size * (length + length // TARGETS) / timing.seconds,
            }


def decoding(
    models: Mapping[str, ConvT5Config],
    lengths: Sequence[int],
    *,
    batch_size: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yields a record of greedy decoding for each output length and model; nothing ends early."""
    for length in lengths:
        runs = {name: _decoder(config, length, batch_size) for name, config in models.items()}
        taken = in_turns(runs, repeats=repeats)
        for name, timing in taken.items():
            cost = costs.model_cost(
                models[name], encoder_length=length // TARGETS, decoder_length=length
            )
            yield {
                "suite": "decode",
                "case": name,
                "length": length,
                **timing.as_json(),
                "tokens_per_second": batch_size * length / timing.seconds,
                "state_bytes": batch_size * cost.decoding_bytes,
            }


def _compiled(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    plan = make_plan(
        model=config,
        loss=TextLoss(),
        optimizer=AdafactorConfig(),
        schedule=InverseSqrt(),
        batch_size=batch_size,
        mesh=MeshConfig(),
        devices=jax.devices()[:1],
    )
    batch = jax.device_put(random_batch(config, length, batch_size), plan.batch_sharding)
    step = compile_step(plan.train_step, plan.abstract, batch)
    state = [plan.init_state()]

    def run():
        state[0], metrics = step.call(state[0], batch)
        return metrics["loss"]

    cost = costs.model_cost(config, encoder_length=length, decoder_length=length // TARGETS)
    known = {
        "flops": batch_size * cost.training_flops,
        "temporary_bytes": step.call.memory_analysis().temp_size_in_bytes,
        "compile_seconds": step.seconds,
    }
    return run, known


def _decoder(config: ConvT5Config, length: int, batch_size: int):
    model = jax.jit(config.build)(jax.random.key(0))
    rng = np.random.default_rng(0)
    source = rng.integers(1, config.vocab_size, (batch_size, max(1, length // TARGETS)))
    # An id that no model gives, so that every row goes on to the end.
    return functools.partial(
        decode, model, source.astype(np.int32), max_length=length, end_id=config.vocab_size
    )
