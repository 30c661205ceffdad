"""T5X's T5 with the sizes of a convt5 model: training step, and decoding with its cache.

Contains no code of T5X: only its model and search are imported, from a checkout.
"""

import functools
import importlib
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from convt5 import errors
from convt5.benchmarks.sides import Measured, random_batch, random_source
from convt5.modeling.architecture import ConvT5Config
from convt5.training.compilation import compile_step
from convt5.training.optimizer import AdafactorConfig
from convt5.training.schedule import InverseSqrt

_MODEL = "t5x.examples.t5"


def check(checkout: pathlib.Path) -> None:
    """Checks that a folder is a checkout of T5X.

    Raises:
        UserError: it is not.
    """
    if not (checkout / _MODEL.replace(".", "/") / "network.py").is_file():
        raise errors.UserError(
            f"t5x={checkout} holds no {_MODEL.replace('.', '/')}/network.py; give the folder "
            "of a checkout of github.com/google-research/t5x."
        )


def make_model(checkout: pathlib.Path, config: ConvT5Config) -> Any:
    """Returns T5X's transformer (a Flax module) with the sizes of `config`.

    Raises:
        UserError: there is no such checkout.
    """
    network = _network(checkout)
    return network.Transformer(
        network.T5Config(
            vocab_size=config.vocab_size,
            dtype=config.dtype,
            emb_dim=config.emb_dim,
            num_heads=config.num_heads,
            num_encoder_layers=config.encoder.num_layers,
            num_decoder_layers=config.decoder.num_layers,
            head_dim=config.head_dim,
            mlp_dim=config.mlp_dim,
            mlp_activations=("relu",),
            dropout_rate=config.dropout_rate,
            logits_via_embedding=config.tie_output,
        )
    )


def cross_entropies(
    model: Any, parameters: Any, tokens: Sequence[Any], key: jax.Array | None
) -> jax.Array:
    """Returns the cross-entropy of each target, [rows, length], of three arrays of tokens.

    Args:
        model: T5X's.
        parameters: of the model.
        tokens: encoder inputs, decoder inputs and targets.
        key: of dropout; None means no dropout.
    """
    rngs = {} if key is None else {"dropout": key}
    # T5X relies on rank promotion, which convt5 forbids.
    with jax.numpy_rank_promotion("allow"):
        logits = model.apply(
            {"params": parameters}, *tokens, enable_dropout=key is not None, rngs=rngs
        )
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[2])


def loss(model: Any, parameters: Any, tokens: Sequence[Any], key: jax.Array) -> jax.Array:
    """Returns the mean of `cross_entropies` with dropout."""
    return jnp.mean(cross_entropies(model, parameters, tokens, key))


def init_parameters(model: Any, tokens: Sequence[Any]) -> Any:
    """Returns initial parameters."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with jax.numpy_rank_promotion("allow"):
        return model.init(keys, *tokens, enable_dropout=False)["params"]


def train_step(model: Any, config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a training step with the optimizer that all sides share."""
    batch = jax.device_put(random_batch(config, length, batch_size))
    tokens = [
        batch[name]
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    ]
    parameters = jax.jit(functools.partial(init_parameters, model))(tokens)
    optimizer = AdafactorConfig().build(InverseSqrt())

    def update(state: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        parameters, memory = state
        value, gradients = jax.value_and_grad(loss, argnums=1)(model, parameters, tokens, key)
        updates, memory = optimizer.update(gradients, memory, parameters)
        return (optax.apply_updates(parameters, updates), memory), {"loss": value}

    state = [(parameters, jax.jit(optimizer.init)(parameters))]
    key = jax.random.key(2)
    step = compile_step(jax.jit(update, donate_argnums=0), state[0], key)

    def run() -> jax.Array:
        state[0], metrics = step.call(state[0], key)
        return metrics["loss"]

    return run, {
        "temporary_bytes": step.call.memory_analysis().temp_size_in_bytes,
        "compile_seconds": step.seconds,
    }


def decoder(model: Any, config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Returns a greedy search by T5X's own loop, with its key-value cache."""
    search = importlib.import_module("t5x.decoding")
    source = jax.device_put(random_source(config, length, batch_size))
    outputs = jnp.zeros((batch_size, length), jnp.int32)
    parameters = jax.jit(functools.partial(init_parameters, model))([source, outputs, outputs])
    empty = jax.eval_shape(functools.partial(_empty_cache, model), parameters, source, outputs)

    def decode(parameters: Any, source: jax.Array) -> jax.Array:
        encoded = model.apply(
            {"params": parameters}, source, enable_dropout=False, method=model.encode
        )

        def step(state: Any) -> tuple[jax.Array, Any]:
            logits, variables = model.apply(
                {"params": parameters, "cache": state.cache},
                *(encoded, source, state.cur_token, state.cur_token),
                enable_dropout=False,
                decode=True,
                max_decode_length=length,
                mutable=["cache"],
                method=model.decode,
            )
            return logits[:, 0], variables["cache"]

        cache = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), empty)
        # An id that the model never generates, so every row reaches the maximum length.
        return search.temperature_sample(outputs, cache, step, eos_id=config.vocab_size)[0]

    with jax.numpy_rank_promotion("allow"):
        compiled = jax.jit(decode).lower(parameters, source).compile()
    # T5X projects the encoder output to keys and values at each step.
    encoded = jax.ShapeDtypeStruct((*source.shape, config.emb_dim), config.dtype)
    return functools.partial(compiled, parameters, source), {
        "state_bytes": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((empty, encoded))),
    }


def _empty_cache(model: Any, parameters: Any, source: jax.Array, outputs: jax.Array) -> Any:
    with jax.numpy_rank_promotion("allow"):
        variables = model.apply(
            {"params": parameters},
            *(source, outputs, outputs),
            enable_dropout=False,
            decode=True,
            mutable=["cache"],
        )[1]
    return variables["cache"]


def _network(checkout: pathlib.Path) -> types.ModuleType:
    """Imports only the model; the rest of T5X needs packages with which it no longer works."""
    check(checkout)
    parts = _MODEL.split(".")
    for depth in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(checkout.joinpath(*parts[:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{_MODEL}.network")
