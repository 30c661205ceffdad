"""Samples with a tiny model from the rows of all processes, and writes what was found."""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from convt5.generation.decoding import Sampling, decode
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.sharding import MeshConfig, batch_sharding, replicated
from convt5.runtime import multi_host

STACK = StackConfig(num_layers=1, mixing="depthwise", kernel_size=2)
MODEL = ConvT5Config(
    vocab_size=16,
    emb_dim=8,
    mlp_dim=8,
    num_heads=1,
    head_dim=8,
    encoder=STACK,
    decoder=STACK,
    dtype="float32",
)
SOURCES = np.arange(2, 14).reshape(4, 3)


def sampled() -> list[list[int]]:
    """Returns the tokens of each row; every process of a run must call it."""
    mesh = MeshConfig().build()
    model = jax.jit(MODEL.build, out_shardings=replicated(mesh))(jax.random.key(0))
    found = decode(
        model,
        SOURCES,
        max_length=5,
        strategy=Sampling(),
        key=jax.random.key(1),
        batch_sharding=batch_sharding(mesh),
    )
    return np.asarray(found.tokens)[:, 0].tolist()


if __name__ == "__main__":
    names = ("coordinator_address", "num_processes", "process_id")
    with multi_host.join(argparse.Namespace(multi_host=False, **dict.fromkeys(names))):
        tokens = sampled()
        if jax.process_index() == 0:
            pathlib.Path(sys.argv[1]).write_text(json.dumps(tokens))
