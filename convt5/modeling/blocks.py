"""Encoder and decoder layers, and stacks of them: residual, norm, mixing, attention, MLP."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5.modeling import fsdp
from convt5.modeling.attention import Attention, AttentionState, RelativeBias
from convt5.modeling.canon import Along, Canon, apply_canon, canons_of
from convt5.modeling.description import LayerOrder, ModelDescription, Remat
from convt5.modeling.layers import DropoutKey, Mlp, Norm, build_layers, dropout, split_key
from convt5.modeling.mixers import results
from convt5.modeling.mixers.base import MixerConfig, Position, StackInputs, State, select_rows

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """Adds a branch f to the residual stream, in the order of `ConvT5Config.layer_order`."""

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


class LayerState(NamedTuple):
    """The decoding state of one decoder layer."""

    mixing: State
    memory: AttentionState
    canons: dict[str, Array]

    def rows(self, chosen: Int[Array, " rows"]) -> "LayerState":
        """Returns the state of the chosen rows; all rows keep reading the same encoder output."""
        mixing, canons = select_rows((self.mixing, self.canons), chosen)
        return LayerState(mixing, self.memory, canons)


class EncoderLayer(nnx.Module):
    """Sequence mixing, then feed-forward, each as a residual branch."""

    gathers_itself = True

    def __init__(self, config: ModelDescription, mixing: MixerConfig, *, key: PRNGKeyArray):
        mixing_key, mlp_key = jax.random.split(key)
        self.mixing_norm = _norm(config)
        self.mixing = results.build_mixer(mixing, config, key=mixing_key)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(
            config.emb_dim,
            config.mlp_dim,
            kind=config.mlp,
            use_bias=config.mlp_bias,
            dropout_rate=config.dropout_rate,
            canon=mixing,
            cross_segments=config.taps_cross_segments,
            key=mlp_key,
        )
        self.mixing_canon = _canon(config, mixing, "A", "mixing", key=mixing_key)
        self.mlp_canon = _canon(config, mixing, "C", "mlp", key=mlp_key)
        self.residual = Residual(order=config.layer_order, dropout_rate=config.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        mixing_key, mlp_key = split_key(dropout_key, 2)
        x = self._mix(x, inputs, dropout_key=mixing_key)
        return self._feed_forward(x, inputs, dropout_key=mlp_key)

    def _mix(self, x, inputs: StackInputs, *, dropout_key: DropoutKey):
        branch_key, residual_key = split_key(dropout_key, 2)

        def mix(y):
            y = apply_canon(self.mixing_canon, y, inputs)
            mixed = self.mixing(y, inputs, dropout_key=branch_key)
            return results.checked_output(self.mixing, "__call__", mixed, y)

        return self.residual(x, mix, self.mixing_norm, dropout_key=residual_key)

    def _feed_forward(self, x, along: Along, *, dropout_key: DropoutKey = None):
        branch_key, residual_key = split_key(dropout_key, 2)

        def transform(y):
            y = apply_canon(self.mlp_canon, y, along)
            return self.mlp(y, along, dropout_key=branch_key)

        return self.residual(x, transform, self.mlp_norm, dropout_key=residual_key)


class DecoderLayer(EncoderLayer):
    """An encoder layer with encoder-decoder attention between mixing and feed-forward."""

    def __init__(self, config: ModelDescription, mixing: MixerConfig, *, key: PRNGKeyArray):
        own_key, cross_key = jax.random.split(key)
        super().__init__(config, mixing, key=own_key)
        self.cross_norm = _norm(config)
        self.cross_attention = Attention(config, key=cross_key)

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        mixing_key, branch_key, residual_key, mlp_key = split_key(dropout_key, 4)
        memory, memory_ids = _required(inputs.memory), _required(inputs.memory_segment_ids)
        x = self._mix(x, inputs, dropout_key=mixing_key)
        x = self.residual(
            x,
            lambda y: self.cross_attention.attend(
                y, memory, inputs.segment_ids, memory_ids, dropout_key=branch_key
            ),
            self.cross_norm,
            dropout_key=residual_key,
        )
        return self._feed_forward(x, inputs, dropout_key=mlp_key)

    def init_state(
        self, memory: Float[Array, "batch source embed"], *, length: int, copies: int = 1
    ) -> LayerState:
        """Returns the state before the first of at most `length` steps; see `Stack.init_state`."""
        batch, _, emb_dim = memory.shape
        rows = batch * copies
        mixing = self.mixing.init_state(rows, length, emb_dim, memory.dtype)
        mixing = results.checked_state(self.mixing, mixing, rows)
        canons = {
            name: canon.init_state(rows, memory.dtype) for name, canon in canons_of(self).items()
        }
        return LayerState(mixing, self.cross_attention.memory_state(memory), canons)

    def step(
        self,
        x: Float[Array, "rows 1 embed"],
        state: LayerState,
        position: Position,
        *,
        memory_mask: Bool[Array, "batch 1 source"],
    ) -> tuple[Float[Array, "rows 1 embed"], LayerState]:
        """Decodes one position; returns its features and the next state."""
        mixed: list[State] = []
        canons = dict(state.canons)
        position = position._replace(canons=canons)

        def mix(y):
            y = apply_canon(self.mixing_canon, y, position)
            result = self.mixing.step(y, state.mixing, position)
            y, after = results.checked_step(self.mixing, result, y, state.mixing)
            mixed.append(after)
            return y

        x = self.residual(x, mix, self.mixing_norm)
        x = self.residual(
            x,
            lambda y: self.cross_attention.read(y, state.memory, memory_mask),
            self.cross_norm,
        )
        x = self._feed_forward(x, position)
        return x, state._replace(mixing=mixed[0], canons=canons)


class Stack(nnx.Module):
    """The layers of an encoder or a decoder, and the final norm."""

    def __init__(self, config: ModelDescription, *, decoder: bool, key: PRNGKeyArray):
        mixings = config.decoder_layers if decoder else config.encoder_layers
        key, bias_key = jax.random.split(key)
        kind = DecoderLayer if decoder else EncoderLayer
        # Any: nnx.List has no element type, and only decoder layers have `step`.
        self.layers: Any = build_layers(
            lambda mixing, key: kind(config, mixing, key=key), mixings, key
        )
        reads_distances = any(mixing.reads_distances for mixing in mixings)
        self.relative_bias = (
            RelativeBias(
                buckets=config.relative_buckets,
                heads=config.num_heads,
                max_distance=config.relative_max_distance,
                bidirectional=not decoder,
                key=bias_key,
            )
            if reads_distances and config.positions == "relative"
            else None
        )
        # With layer_order "post", every layer already ends in a norm.
        self.final_norm = _norm(config) if config.layer_order != "post" else None
        self.dropout_rate = config.dropout_rate
        self.remat: Remat = config.remat
        self.scan_layers = config.scan_layers

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        keys = split_key(dropout_key, len(self.layers) + 2)
        if self.relative_bias is not None:
            length = x.shape[1]
            inputs = inputs._replace(distance_bias=self.relative_bias.by_distance(length, length))
        x = dropout(x, self.dropout_rate, keys[0])
        run = _with_remat(self.remat)
        start = 0
        for layers in _group_equal(self.layers) if self.scan_layers else [[a] for a in self.layers]:
            layer_keys = keys[start + 2 : start + 2 + len(layers)]
            start += len(layers)
            if len(layers) == 1:
                x = run(layers[0], x, inputs, layer_keys[0])
            else:
                x = _scan_layers(run, layers, x, inputs, layer_keys)
        return dropout(self._finish(x), self.dropout_rate, keys[1])

    def init_state(
        self, memory: Float[Array, "batch source embed"], *, length: int, copies: int = 1
    ) -> tuple[LayerState, ...]:
        """Returns the decoding state of every layer, for at most `length` positions.

        Each row of memory serves `copies` adjacent rows, which share its keys and values.
        """
        return tuple(
            layer.init_state(memory, length=length, copies=copies) for layer in self.layers
        )

    def step(
        self,
        x: Float[Array, "rows 1 embed"],
        states: tuple[LayerState, ...],
        index: Int[Array, " rows"],
        *,
        memory_mask: Bool[Array, "batch 1 source"],
        readable: Bool[Array, "rows 1"] | None,
    ) -> tuple[Float[Array, "rows 1 embed"], tuple[LayerState, ...]]:
        """Decodes position `index` of every row through all layers."""
        bias = None
        length = self.room(states)
        if self.relative_bias is not None and length is not None:
            bias = self.relative_bias(index[:, None], jnp.arange(length))
        position = Position(index, readable=readable, bias=bias)
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer.step(x, state, position, memory_mask=memory_mask)
            after.append(state)
        return self._finish(x), tuple(after)

    def room(self, states: tuple[LayerState, ...]) -> int | None:
        """Returns how many positions the states have room for; None if none of them grows."""
        rooms = (
            layer.mixing.room(state.mixing)
            for layer, state in zip(self.layers, states, strict=True)
        )
        return next((room for room in rooms if room is not None), None)

    def lowest(self, count: int) -> "Stack":
        """Returns a stack of the `count` lowest layers, which share their parameters with it."""
        other = copy.copy(self)
        other.layers = nnx.List(self.layers[:count])
        return other

    def _finish(self, x):
        return x if self.final_norm is None else self.final_norm(x)


Run = Callable[[EncoderLayer, jax.Array, StackInputs, DropoutKey], jax.Array]


def _run(layer: EncoderLayer, x: jax.Array, inputs: StackInputs, key: DropoutKey) -> jax.Array:
    return fsdp.gather(layer)(x, inputs, dropout_key=key)


def _with_remat(remat: Remat) -> Run:
    """Returns a function that runs a layer, with `remat` applied."""
    if remat == "none":
        return _run
    policy = None if remat == "full" else getattr(jax.checkpoint_policies, remat)
    return jax.checkpoint(_run, policy=policy)


def _group_equal(layers: Iterable[EncoderLayer]) -> list[list[EncoderLayer]]:
    """Groups neighbouring layers that differ only in the values of their parameters."""

    def form(layer: EncoderLayer):
        leaves, structure = jax.tree.flatten(layer)
        return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]

    runs: list[list[EncoderLayer]] = []
    for layer in layers:
        if runs and form(runs[-1][0]) == form(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _scan_layers(
    run: Run,
    layers: Sequence[EncoderLayer],
    x: jax.Array,
    inputs: StackInputs,
    keys: Sequence[DropoutKey],
) -> jax.Array:
    """Runs equal layers, bottom first, as a scan that compiles one of them.

    Stacks their parameters inside the step. Outside it each layer has its own, so checkpoints and
    optimizer statistics do not depend on how layers are run.
    """

    def step(x, layer_and_key):
        layer, key = layer_and_key
        return run(layer, x, inputs, key), None

    stacked = fsdp.stack(list(zip(layers, keys, strict=True)))
    return jax.lax.scan(step, x, stacked)[0]


def _required(value: T | None) -> T:
    """Asserts for the type checker that an input which this kind of stack always has is given."""
    if value is None:
        raise ValueError("the inputs of this stack lack what one of its layers reads")
    return value


def _norm(config: ModelDescription) -> Norm:
    return Norm(config.emb_dim, kind=config.norm, epsilon=config.norm_epsilon)


def _canon(
    config: ModelDescription, mixing: MixerConfig, place: str, name: str, *, key: PRNGKeyArray
) -> Canon | None:
    taps = mixing.canon_at(place, name, cross_segments=config.taps_cross_segments)
    return None if taps is None else taps.build(config.emb_dim, key=key)
