"""Exports a model as StableHLO programs (`jax.export`), which run without convt5.

A folder has `encode.bin`, `start.bin` and `step.bin`, each one serialized program, the parameters
as `model.safetensors`, and `programs.json`, which names inputs and outputs. The first input of
every program is the dictionary of parameters. Load them with:

    program = jax.export.deserialize(bytearray(path.read_bytes()))
    parameters = safetensors.numpy.load_file(folder / "model.safetensors")
    encoded = program.call(parameters, encoder_input_tokens)

`start` takes (parameters, encoded, encoder_input_tokens) and returns the state before the first
step. `step` takes (parameters, state, tokens) and returns logits [batch, vocab] and the next state,
a flat dictionary of arrays. The batch size is symbolic; the lengths are fixed. After as many steps
as attention has room for, or learned positions reach, logits are NaN.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convt5 import errors
from convt5.interchange import safetensors_files
from convt5.modeling.model import ConvT5
from convt5.modeling.tree_paths import named_leaves
from convt5.ops import dispatch

PLATFORMS = ("cpu", "cuda", "tpu")
DESCRIPTION = "programs.json"
_LONGEST = 2**31 - 1  # Positions have 32 bits.

Arrays = Mapping[str, Any]


def write_programs(
    path: str | pathlib.Path,
    model: ConvT5,
    *,
    encoder_length: int | None = None,
    decoder_length: int | None = None,
) -> None:
    """Writes parameters and programs into an existing folder.

    Args:
        path: the folder.
        model: the model.
        encoder_length: tokens per source, padded with 0; None means 512, or what its learned
            positions reach.
        decoder_length: maximum number of decoding steps; None means 114, or what they reach.

    Raises:
        UserError: a length that is not positive, or more than the model's positions reach.
    """
    first, second = model.config.most_tokens("encoder"), model.config.most_tokens("decoder")
    encoder_length = min(512, first or 512) if encoder_length is None else encoder_length
    decoder_length = min(114, second or 114) if decoder_length is None else decoder_length
    lengths = (("encoder", encoder_length, first), ("decoder", decoder_length, second))
    errors.raise_all(
        [
            f"{stack}_length={value} must be at least 1, and at most {limit or _LONGEST}"
            + (", which the model's positions reach." if limit else ".")
            for stack, value, limit in lengths
            if not 1 <= value <= (limit or _LONGEST)
        ],
        where="stablehlo",
    )
    folder = pathlib.Path(path)
    params = {name: np.asarray(leaf) for name, leaf in named_leaves(model)}
    programs = export_programs(model, encoder_length=encoder_length, decoder_length=decoder_length)
    safetensors_files.write(folder / safetensors_files.WHOLE, params, metadata={"format": "convt5"})
    for name, program in programs.items():
        (folder / f"{name}.bin").write_bytes(program.serialize())
    about = {
        "encoder_length": encoder_length,
        "decoder_length": decoder_length,
        "platforms": PLATFORMS,
        "programs": {
            "encode": ["parameters", "encoder_input_tokens int32 [batch, encoder_length]"],
            "start": ["parameters", "encoded", "encoder_input_tokens"],
            "step": ["parameters", "state", "tokens int32 [batch]"],
        },
    }
    (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n")


def export_programs(
    model: ConvT5, *, encoder_length: int, decoder_length: int
) -> dict[str, jax.export.Exported]:
    """Returns the programs `encode`, `start` and `step`; parameters are their first input."""
    treedef = jax.tree.structure(model)
    names = [name for name, _ in named_leaves(model)]

    def revived(params: Arrays) -> ConvT5:
        return jax.tree.unflatten(treedef, [params[name] for name in names])

    def encode(params: Arrays, tokens):
        return revived(params).encode(tokens)

    def start(params: Arrays, encoded, tokens):
        segments = (tokens != 0).astype(jnp.int32)
        state = revived(params).init_decoding(
            encoded, encoder_segment_ids=segments, length=decoder_length
        )
        return _flat(state)

    def step(params: Arrays, state: Arrays, tokens):
        whole = jax.tree.unflatten(state_def, [state[name] for name in state_names])
        logits, after = revived(params).decode_step(whole, tokens)
        if room is not None:
            logits = jnp.where((whole.position < room)[:, None], logits, jnp.nan)
        return logits, _flat(after)

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = {name: _shape(leaf) for name, leaf in named_leaves(model)}
    source = jax.ShapeDtypeStruct((batch, encoder_length), jnp.int32)
    encoded = jax.eval_shape(encode, shapes, source)
    abstract = jax.eval_shape(
        lambda p, e, t: revived(p).init_decoding(e, encoder_segment_ids=t, length=decoder_length),
        shapes,
        encoded,
        source,
    )
    state_def, state_names = jax.tree.structure(abstract), list(_flat(abstract))
    room = model.decoder.room(abstract.layers) or model.config.most_tokens("decoder")
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return {
        "encode": _export(encode, shapes, source),
        "start": _export(start, shapes, encoded, source),
        "step": _export(step, shapes, _flat(abstract), token),
    }


def _export(function, *arguments) -> jax.export.Exported:
    with dispatch.using(platforms=("cpu", "gpu", "tpu")):
        return jax.export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)


def _flat(tree: Any) -> dict[str, Any]:
    """Returns leaves by name in a plain dictionary, which can be read without convt5."""
    return dict(named_leaves(tree))


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
