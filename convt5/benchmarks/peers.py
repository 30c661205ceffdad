"""Training steps of other libraries' T5 at the sizes of one of ours: T5X and Hugging Face.

Nothing of theirs is copied: T5X is read from a checkout, of which the model alone is imported, and
Hugging Face's T5 (PyTorch) from what is installed.
"""

import functools
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from convt5 import errors
from convt5.architecture import ConvT5Config
from convt5.benchmarks.sides import Measured, Side, random_batch
from convt5.optimizer import AdafactorConfig
from convt5.schedule import InverseSqrt
from convt5.training.compilation import compile_step

_T5X_MODEL = "t5x.examples.t5"


def found(config: ConvT5Config, t5x: str | None, *, hugging_face: bool = True) -> dict[str, Side]:
    """Returns the peers that are here, as transformers of the sizes of `config`.

    Args:
        config: whose widths and numbers of layers they take.
        t5x: a checkout of T5X, or None.
        hugging_face: whether that is wanted, should it be installed.

    Raises:
        UserError: `t5x` names no such checkout.
    """
    sides: dict[str, Side] = {}
    if t5x is not None:
        model = t5x_model(pathlib.Path(t5x), config)
        sides["T5X"] = functools.partial(_t5x_step, model, config)
    if hugging_face and all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        sides["Hugging Face"] = functools.partial(_hugging_face_step, config)
    return sides


def _t5x_network(checkout: pathlib.Path) -> types.ModuleType:
    """Imports the model alone: the rest of T5X wants packages that it no longer works with."""
    folder = checkout / _T5X_MODEL.replace(".", "/")
    if not (folder / "network.py").is_file():
        raise errors.UserError(
            f"t5x={checkout} holds no {_T5X_MODEL.replace('.', '/')}/network.py; give the folder "
            "of a checkout of github.com/google-research/t5x."
        )
    parts = _T5X_MODEL.split(".")
    for depth in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(checkout.joinpath(*parts[:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{_T5X_MODEL}.network")


def t5x_model(checkout: pathlib.Path, config: ConvT5Config) -> Any:
    """Returns T5X's transformer (a Flax module) of the sizes of `config`.

    Raises:
        UserError: no such checkout.
    """
    network = _t5x_network(checkout)
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


def t5x_loss(model: Any, parameters: Any, tokens: Sequence[Any], key: jax.Array) -> jax.Array:
    """Returns the cross-entropy of encoder inputs, decoder inputs and targets, with dropout."""
    # It adds vectors of one axis to arrays of three, which convt5 itself does not allow.
    with jax.numpy_rank_promotion("allow"):
        logits = model.apply(
            {"params": parameters}, *tokens, enable_dropout=True, rngs={"dropout": key}
        )
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[2]))


def t5x_parameters(model: Any, tokens: Sequence[Any]) -> Any:
    """Returns initial parameters."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with jax.numpy_rank_promotion("allow"):
        return model.init(keys, *tokens, enable_dropout=False)["params"]


def _t5x_step(model: Any, config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """T5X's model with the optimizer that all sides share."""
    batch = jax.device_put(random_batch(config, length, batch_size))
    tokens = [
        batch[name]
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    ]
    parameters = jax.jit(functools.partial(t5x_parameters, model))(tokens)
    optimizer = AdafactorConfig().build(InverseSqrt())

    def loss(parameters: Any, key: jax.Array) -> jax.Array:
        return t5x_loss(model, parameters, tokens, key)

    def update(state: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        parameters, memory = state
        value, gradients = jax.value_and_grad(loss)(parameters, key)
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


def _hugging_face_step(config: ConvT5Config, length: int, batch_size: int) -> Measured:
    """Hugging Face's T5 in PyTorch on the CPU, with its own Adafactor."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers
    from transformers.optimization import Adafactor

    torch.manual_seed(0)
    sizes = {
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.encoder.num_layers,
        "num_decoder_layers": config.decoder.num_layers,
        "num_heads": config.num_heads,
        "dropout_rate": config.dropout_rate,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": config.tie_output,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).train()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True)
    arrays = random_batch(config, length, batch_size)
    batch = {name: torch.from_numpy(array).long() for name, array in arrays.items()}

    def run() -> float:
        optimizer.zero_grad()
        loss = model(
            input_ids=batch["encoder_input_tokens"],
            decoder_input_ids=batch["decoder_input_tokens"],
            labels=batch["decoder_target_tokens"],
        ).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return run, {}
