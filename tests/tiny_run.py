"""A run directory as training leaves it, with a tiny untrained model of bytes; and tiny tasks."""

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import seqio
import tensorflow as tf
from convt5.tasks import vocabularies

from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.model import ConvT5
from convt5.training.train_state import abstract_model

VOCAB = 384
ENCODER_LENGTH, DECODER_LENGTH = 24, 6
STACK = StackConfig(num_layers=1, mixing="depthwise", kernel_size=3)
CONFIG = ConvT5Config(
    vocab_size=VOCAB,
    emb_dim=8,
    mlp_dim=16,
    num_heads=2,
    head_dim=4,
    dtype="float32",
    positions="none",
    encoder=STACK,
    decoder=STACK,
)
REVIEWS = [
    {"text": "good good", "label": "yes"},
    {"text": "bad", "label": "no"},
    {"text": "a dull and long film", "label": "no"},
    {"text": "fine", "label": "yes"},
    {"text": "so much longer than what the model reads", "label": "maybe so"},
]
GIN = """
from __gin__ import dynamic_registration
from convt5.modeling import architecture
from convt5 import data
from convt5.training import losses
from convt5.training import optimizer
from convt5.training import schedule
from convt5.training import trainer

MODEL = @architecture.ConvT5Config()
architecture.ConvT5Config.vocab_size = {vocab}
architecture.ConvT5Config.emb_dim = 8
architecture.ConvT5Config.mlp_dim = 16
architecture.ConvT5Config.num_heads = 2
architecture.ConvT5Config.head_dim = 4
architecture.ConvT5Config.encoder = @architecture.StackConfig()
architecture.ConvT5Config.decoder = @architecture.StackConfig()
architecture.StackConfig.num_layers = 1
architecture.StackConfig.mixing = 'depthwise'
architecture.StackConfig.kernel_size = 3
trainer.train.run_dir = {run_dir!r}
trainer.train.model = %MODEL
trainer.train.loss = @losses.TextLoss()
trainer.train.optimizer = @optimizer.AdafactorConfig()
trainer.train.schedule = @schedule.InverseSqrt()
trainer.train.num_steps = 20
trainer.train.train_data = @data.DataConfig()
data.DataConfig.mixture = '{task}'
data.DataConfig.split = 'validation'
data.DataConfig.batch_size = 4
data.DataConfig.encoder_length = {encoder_length}
data.DataConfig.decoder_length = {decoder_length}
"""


def make_model(seed: int = 0, **settings) -> ConvT5:
    """A model of random parameters, large enough to make it answer inputs differently."""
    config = dataclasses.replace(CONFIG, **settings)
    abstract = abstract_model(config)
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), abstract)


def write_run(
    folder: pathlib.Path,
    *,
    steps=(10, 20),
    task: str,
    best: int | None = None,
    average: int | None = None,
) -> str:
    """Writes checkpoints of different models, and settings that name `task`.

    The average of each is the model of step `average`, where that is given.
    """
    checkpointer = Checkpointer(
        folder / "checkpoints", CheckpointConfig(keep_last=len(steps)), model_config=CONFIG
    )
    for step in steps:
        state = SimpleNamespace(
            model=make_model(step),
            opt_state={},
            step=jnp.asarray(step, jnp.int32),
            ema=None if average is None else make_model(average),
        )
        value = None if best is None else abs(step - best) + 0.5
        checkpointer.save(step, state, data=DataPositions(), best_value=value)
    checkpointer.wait()
    checkpointer.close()
    text = GIN.format(
        vocab=VOCAB,
        run_dir=str(folder),
        task=task,
        encoder_length=ENCODER_LENGTH,
        decoder_length=DECODER_LENGTH,
    )
    (folder / "config.gin").write_text(text)
    return str(folder)


def add_task(name: str, *, vocabulary=None, rows=REVIEWS, splits=("validation",), **settings):
    """Registers a task of reviews once; metrics and the like in `settings`."""
    if name in seqio.TaskRegistry.names():
        return seqio.TaskRegistry.get(name)
    feature = seqio.Feature(vocabulary or vocabularies.characters(), add_eos=True)

    def read(split, shuffle_files, seed=None):
        columns = {
            key: tf.constant([row[key] for row in rows], tf.string) for key in ("text", "label")
        }
        return tf.data.Dataset.from_tensor_slices(columns)

    def rename(dataset):
        return dataset.map(lambda row: {"inputs": row["text"], "targets": row["label"]})

    return seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(read, splits=splits),
        preprocessors=[rename, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": feature, "targets": feature},
        **settings,
    )
