"""Encoder and decoder layers and the stacks of them: residual, norm, mixing, attention, MLP."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5.architecture import ConvT5Config, LayerOrder, MixingConfig
from convt5.layers import DropoutKey, Mlp, Norm, dropout, split_key
from convt5.mixing import (
    Attention,
    AttentionState,
    Convolution,
    ConvolutionState,
    RelativeBias,
)
from convt5.ops import attention_mask

MixingState = ConvolutionState | AttentionState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """How a branch f joins the residual stream; see `ConvT5Config.layer_order`."""

    order: LayerOrder
    dropout_rate: float

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        branch: Callable[[jax.Array], jax.Array],
        norm: Norm,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        if self.order == "pre":
            return x + dropout(branch(norm(x)), self.dropout_rate, dropout_key)
        y = dropout(branch(x), self.dropout_rate, dropout_key)
        return x + norm(y) if self.order == "branch" else norm(x + y)


class StackInputs(NamedTuple):
    """What every layer of a stack is told about its sequence, computed once.

    Attributes:
        segment_ids: packed examples, 0 is padding.
        readable: where convolution taps may read; None for everywhere.
        mask: self-attention's mask; None if no layer attends.
        bias: self-attention's relative bias; None without one.
        memory: the encoder's output, for a decoder.
        memory_mask: decoder positions against encoder positions.
    """

    segment_ids: Int[Array, "batch length"]
    readable: Bool[Array, "batch length"] | None = None
    mask: Bool[Array, "batch length length"] | None = None
    bias: Float[Array, "1 heads length length"] | None = None
    memory: Float[Array, "batch source embed"] | None = None
    memory_mask: Bool[Array, "batch length source"] | None = None


class LayerState(NamedTuple):
    """What one decoder layer remembers while decoding."""

    mixing: MixingState
    memory: AttentionState


class Layer(nnx.Module):
    """One layer: sequence mixing, attention to the encoder (decoder only), feed-forward."""

    def __init__(
        self, config: ConvT5Config, mixing: MixingConfig, *, decoder: bool, key: PRNGKeyArray
    ):
        keys = jax.random.split(key, 3)
        self.mixing_norm = _norm(config)
        self.mixing: Attention | Convolution = (
            Attention(config, key=keys[0])
            if mixing.kind == "attention"
            else Convolution(mixing, config.emb_dim, key=keys[0])
        )
        self.cross_norm = _norm(config) if decoder else None
        self.cross_attention = Attention(config, key=keys[1]) if decoder else None
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            config.emb_dim,
            config.mlp_dim,
            kind=config.mlp,
            use_bias=config.mlp_bias,
            dropout_rate=config.dropout_rate,
            key=keys[2],
        )
        self.residual = Residual(order=config.layer_order, dropout_rate=config.dropout_rate)
        self.taps_cross_segments = config.taps_cross_segments

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        keys = split_key(dropout_key, 6)
        x = self.residual(
            x,
            lambda y: self._mix(y, inputs, dropout_key=keys[0]),
            self.mixing_norm,
            dropout_key=keys[1],
        )
        if self.cross_attention is not None:
            attend = self.cross_attention
            x = self.residual(
                x,
                lambda y: attend(y, inputs.memory, inputs.memory_mask, dropout_key=keys[2]),
                self.cross_norm,
                dropout_key=keys[3],
            )
        return self.residual(
            x,
            lambda y: self.mlp(y, dropout_key=keys[4]),
            self.mlp_norm,
            dropout_key=keys[5],
        )

    def init_state(self, memory: Float[Array, "batch source embed"], *, length: int) -> LayerState:
        """Returns the state of a decoder layer before the first of at most `length` steps."""
        batch, _, emb_dim = memory.shape
        if isinstance(self.mixing, Attention):
            mixing = self.mixing.init_state(batch, length, memory.dtype)
        else:
            mixing = self.mixing.init_state(batch, emb_dim, memory.dtype)
        return LayerState(mixing, self.cross_attention.memory_state(memory))

    def step(
        self,
        x: Float[Array, "batch 1 embed"],
        state: LayerState,
        position: Int[Array, " batch"],
        *,
        memory_mask: Bool[Array, "batch 1 source"],
        bias: Float[Array, "rows heads 1 length"] | None,
        readable: Bool[Array, "batch 1"] | None,
    ) -> tuple[Float[Array, "batch 1 embed"], LayerState]:
        """Runs one decoder position and returns the state that includes it."""
        mixed = []

        def mix(y):
            if isinstance(self.mixing, Attention):
                y, after = self.mixing.step(y, state.mixing, position, bias=bias)
            else:
                y, after = self.mixing.step(y, state.mixing, position, readable=readable)
            mixed.append(after)
            return y

        x = self.residual(x, mix, self.mixing_norm)
        x = self.residual(
            x,
            lambda y: self.cross_attention.attend(y, state.memory, memory_mask),
            self.cross_norm,
        )
        x = self.residual(x, self.mlp, self.mlp_norm)
        return x, state._replace(mixing=mixed[0])

    def _mix(self, x, inputs: StackInputs, *, dropout_key: DropoutKey):
        if isinstance(self.mixing, Attention):
            return self.mixing(x, x, inputs.mask, bias=inputs.bias, dropout_key=dropout_key)
        return self.mixing(
            x,
            inputs.segment_ids,
            readable=inputs.readable,
            taps_cross_segments=self.taps_cross_segments,
            dropout_key=dropout_key,
        )


class Stack(nnx.Module):
    """The layers of an encoder or a decoder, with the norm that ends them."""

    def __init__(self, config: ConvT5Config, *, decoder: bool, key: PRNGKeyArray):
        mixings = config.decoder_layers if decoder else config.encoder_layers
        key, bias_key = jax.random.split(key)
        keys = jax.random.split(key, len(mixings))
        self.layers = nnx.List(
            [
                Layer(config, mixing, decoder=decoder, key=keys[i])
                for i, mixing in enumerate(mixings)
            ]
        )
        self.attends = any(mixing.kind == "attention" for mixing in mixings)
        self.relative_bias = (
            RelativeBias(config, bidirectional=not decoder, key=bias_key)
            if self.attends and config.positions == "relative"
            else None
        )
        # After "post" every layer ends in a norm already.
        self.final_norm = _norm(config) if config.layer_order != "post" else None
        self.causal = decoder
        self.dropout_rate = config.dropout_rate

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        keys = split_key(dropout_key, len(self.layers) + 2)
        if self.attends:
            segments = inputs.segment_ids
            inputs = inputs._replace(
                mask=attention_mask(segments, segments, causal=self.causal),
                bias=self._bias(x.shape[1]),
            )
        x = dropout(x, self.dropout_rate, keys[0])
        for layer, layer_key in zip(self.layers, keys[2:], strict=True):
            x = layer(x, inputs, dropout_key=layer_key)
        return dropout(self._finish(x), self.dropout_rate, keys[1])

    def init_state(
        self, memory: Float[Array, "batch source embed"], *, length: int
    ) -> tuple[LayerState, ...]:
        """Returns the decoding state of every layer, for at most `length` positions."""
        return tuple(layer.init_state(memory, length=length) for layer in self.layers)

    def step(
        self,
        x: Float[Array, "batch 1 embed"],
        states: tuple[LayerState, ...],
        position: Int[Array, " batch"],
        *,
        memory_mask: Bool[Array, "batch 1 source"],
        readable: Bool[Array, "batch 1"] | None,
    ) -> tuple[Float[Array, "batch 1 embed"], tuple[LayerState, ...]]:
        """Runs one position of every row through the stack."""
        bias = None
        if self.relative_bias is not None:
            length = next(
                s.mixing.keys.shape[1] for s in states if isinstance(s.mixing, AttentionState)
            )
            bias = self.relative_bias(position[:, None], jnp.arange(length))
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer.step(
                x, state, position, memory_mask=memory_mask, bias=bias, readable=readable
            )
            after.append(state)
        return self._finish(x), tuple(after)

    def _bias(self, length: int):
        if self.relative_bias is None:
            return None
        positions = jnp.arange(length)
        return self.relative_bias(positions[None], positions)

    def _finish(self, x):
        return x if self.final_norm is None else self.final_norm(x)


def _norm(config: ConvT5Config) -> Norm:
    return Norm(config.emb_dim, kind=config.norm, epsilon=config.norm_epsilon)
