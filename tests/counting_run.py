"""A run of real processes that starts quickly: a tiny table as model, numbered examples as data.

Gin files of tests import it. Each record holds `order`, which follows from the numbers of the
examples in the batch and their places.
"""

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import commands
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convt5.data.prefetching import position, split_position
from convt5.modeling import sharding
from convt5.training import optimizer, schedule
from convt5.training.train_step import LossSums

WIDTH = 8
ROOT = pathlib.Path(__file__).resolve().parents[1]

SETTINGS = """
from __gin__ import dynamic_registration
from convt5.checkpoints import checkpoint
from convt5.interchange import initialization
from convt5.training import optimizer
from convt5.training import schedule
from convt5.modeling import sharding
from convt5.training import trainer
import counting_run

trainer.train.run_dir = %RUN_DIR
trainer.train.num_steps = %NUM_STEPS
trainer.train.model = @counting_run.TableConfig()
trainer.train.loss = @counting_run.Loss()
trainer.train.optimizer = @optimizer.AdamWConfig()
trainer.train.schedule = @schedule.Constant()
schedule.Constant.rate = 0.05
trainer.train.train_data = @train/counting_run.Numbers()
trainer.train.eval_data = @eval/counting_run.Numbers()
eval/counting_run.Numbers.num_examples = 21
counting_run.Numbers.batch_size = 8
trainer.train.sharding_rules = @counting_run.rules()
trainer.train.mesh = @sharding.MeshConfig()
trainer.train.checkpoint = @checkpoint.CheckpointConfig()
checkpoint.CheckpointConfig.every_steps = %SAVE_EVERY
trainer.train.eval_every_steps = 4
trainer.train.log_every_steps = 1
RUN_DIR = %gin.REQUIRED
NUM_STEPS = 8
SAVE_EVERY = 2
"""


def environment() -> dict[str, str]:
    """Environment variables of processes that can import this file."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "XLA_FLAGS": commands.QUICK_COMPILATION}


def launcher(processes: int, devices: int) -> list[str]:
    """The beginning of a command that starts a run of several processes."""
    script = str(ROOT / "launch" / "local.py")
    sizes = [f"--processes={processes}", f"--devices_per_process={devices}"]
    return [sys.executable, script, *sizes, "--stop_secs=3", "--"]


def rules() -> tuple[sharding.Rule, ...]:
    return (sharding.Rule(r"kernel$|spare/", ("fsdp",)),)


def settings(run_dir: object, **changes: Any) -> dict[str, Any]:
    """Returns arguments of `trainer.train` for a small problem in this process."""
    return {
        "run_dir": str(run_dir),
        "model": TableConfig(),
        "loss": Loss(),
        "train_data": Numbers(batch_size=8),
        "optimizer": optimizer.AdamWConfig(),
        "schedule": schedule.Constant(rate=0.05),
        "sharding_rules": rules(),
    } | changes


class Table(nnx.Module):
    def __init__(self, key, spare=0, spare_rows=WIDTH):
        self.kernel = nnx.Param(jax.random.normal(key, (WIDTH, WIDTH)) * 0.1)
        shapes = [(spare_rows, 1 + n) for n in range(spare)]
        self.spare = nnx.List([nnx.Param(jax.random.normal(key, shape)) for shape in shapes])


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Shape of the model.

    Attributes:
        spare: number of parameters that predict nothing, each of another shape.
        spare_rows: of each of them.
    """

    spare: int = 0
    spare_rows: int = WIDTH

    def build(self, key):
        return Table(key, self.spare, self.spare_rows)


@dataclasses.dataclass(frozen=True)
class Loss:
    """Predicts each target from the input at its place; dropout makes the step number matter."""

    def __call__(self, model, batch, *, dropout_key=None):
        x = jax.nn.one_hot(batch["encoder_input_tokens"], WIDTH)
        if dropout_key is not None:
            x = x * jax.random.bernoulli(dropout_key, 0.9, x.shape)
        log_probs = jax.nn.log_softmax(x @ model.kernel[...])
        targets = batch["decoder_target_tokens"]
        nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        weights = batch["decoder_loss_weights"]
        places = jnp.arange(1, len(batch["number"]) + 1)
        # Small enough that sums of floats are exact, in whatever order they are made.
        order = jnp.sum(batch["number"] * places % 4093).astype(jnp.float32)
        metrics = {"order": (order, jnp.ones(())), "rows": (weights[:, 0].sum(), jnp.ones(()))}
        return LossSums(jnp.sum(nll * weights), weights.sum(), metrics)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbered examples; shards of endless data take turns, and share each batch of finite data."""

    batch_size: int
    num_examples: int | None = None

    @property
    def num_epochs(self):
        return None if self.num_examples is None else 1

    def build(self, *, process_index, process_count):
        return NumbersReader(self, process_index, process_count)


class NumbersReader:
    token_bytes = None

    def __init__(self, config, shard, num_shards):
        self.config, self.shard, self.num_shards, self.count = config, shard, num_shards, 0

    def __next__(self):
        config, rows = self.config, self.config.batch_size // self.num_shards
        place = np.arange(rows)
        if config.num_examples is None:
            numbers = (self.count * rows + place) * self.num_shards + self.shard
        else:
            numbers = self.count * config.batch_size + self.shard * rows + place
            if self.count * config.batch_size >= config.num_examples:
                raise StopIteration
        self.count += 1
        real = numbers < (config.num_examples or np.inf)
        tokens = np.stack([np.random.default_rng(n).integers(1, WIDTH, 4) for n in numbers])
        return {
            "number": numbers.astype(np.int32),
            "encoder_input_tokens": tokens.astype(np.int32),
            "decoder_target_tokens": ((tokens + 1) % WIDTH).astype(np.int32),
            "decoder_loss_weights": np.float32(np.broadcast_to(real[:, None], tokens.shape)),
        }

    def get_state(self):
        return position(self.count.to_bytes(8))

    def set_state(self, state):
        snapshot, skip = split_position(state)
        self.count = int.from_bytes(snapshot) + skip


@dataclasses.dataclass(frozen=True)
class Meddling(Numbers):
    """Numbered examples; does something before one of the batches is read."""

    at: int = 7
    act: Callable[[], object] = lambda: None

    def build(self, *, process_index, process_count):
        reader = super().build(process_index=process_index, process_count=process_count)
        act, at = self.act, self.at

        class Reader(type(reader)):
            def __next__(self):
                if self.count == at:
                    act()
                return super().__next__()

        reader.__class__ = Reader
        return reader


def break_down():
    raise OSError("broken")


def break_the_first():
    if jax.process_index() == 0:
        break_down()


def wait_for(path):
    for _ in range(30_000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")
