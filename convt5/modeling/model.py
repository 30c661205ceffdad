"""ConvT5: an encoder-decoder from tokens to logits with a choice of mixing for each layer.

`ConvT5Config` (in `architecture`) describes it. Training calls the model on whole sequences;
`decoding` runs it one position at a time. Both compute the same function.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5 import errors
from convt5.modeling.blocks import LayerState, Stack
from convt5.modeling.description import ModelDescription
from convt5.modeling.layers import (
    Dense,
    DropoutKey,
    Embed,
    at_least_float32,
    check_dtype,
    drop_tokens,
    split_key,
)
from convt5.modeling.mixers import KINDS
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.sharding import Rule
from convt5.modeling.stem import StemOutput, TextStem, window_segments
from convt5.ops.explicit import partitioned
from convt5.ops.masking import checked_segments

HostOrDevice = jax.Array | np.ndarray
Tokens = Int[HostOrDevice, "batch length"]


class DecoderState(NamedTuple):
    """The state of the model between decoding steps.

    Attributes:
        layers: the state of every decoder layer.
        memory_mask: the encoder positions that may be read.
        position: the position of each row's next token, from 0; a source may have several rows.
    """

    layers: tuple[LayerState, ...]
    memory_mask: Bool[Array, "batch 1 source"]
    position: Int[Array, " rows"]


class ConvT5(nnx.Module):
    """The model; `python -m convt5.inspect` lists its parameters by path."""

    def __init__(self, config: ModelDescription, *, key: PRNGKeyArray):
        check_dtype(config.dtype)
        keys = jax.random.split(key, 5)
        self.token_embedder = Embed(config.vocab_size, config.emb_dim, key=keys[0])
        self.position_embedder = (
            Embed(config.max_positions, config.emb_dim, key=keys[1])
            if config.positions == "learned" and config.max_positions
            else None
        )
        # A separate key: models without a stem keep their initial parameters.
        self.stem = TextStem(config, key=jax.random.fold_in(key, 5)) if config.stem else None
        self.encoder = Stack(config, decoder=False, key=keys[2])
        self.decoder = Stack(config, decoder=True, key=keys[3])
        self.output_head = (
            None if config.tie_output else Dense(config.emb_dim, config.vocab_size, key=keys[4])
        )
        self.config = config

    @property
    def sharding_rules(self) -> tuple[Rule, ...]:
        """The rules of mixing kinds that `placement.TEXT_RULES` does not know."""
        layers = (*self.config.encoder_layers, *self.config.decoder_layers)
        others = [layer for layer in layers if type(layer) not in KINDS.values()]
        return tuple(dict.fromkeys(rule for layer in others for rule in layer.sharding_rules))

    @partitioned(2, like="decoder_input_tokens")
    def __call__(
        self,
        encoder_input_tokens: Int[HostOrDevice, "batch source"],
        decoder_input_tokens: Int[HostOrDevice, "batch target"],
        *,
        encoder_segment_ids: Int[HostOrDevice, "batch source"] | None = None,
        decoder_segment_ids: Int[HostOrDevice, "batch target"] | None = None,
        encoder_positions: Int[HostOrDevice, "batch source"] | None = None,
        decoder_positions: Int[HostOrDevice, "batch target"] | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch target vocab"]:
        """Returns float32 logits for every decoder position.

        Args:
            encoder_input_tokens: the source, 0 at padding.
            decoder_input_tokens: the target shifted right by one, starting with 0.
            encoder_segment_ids: the packed example of each position, 0 for padding. By default each
                row is one example, and token 0 is padding.
            decoder_segment_ids: likewise. By default each row is one example; padding at its end
                does not affect other positions, because the decoder is causal.
            encoder_positions, decoder_positions: positions within each packed example, used only by
                learned positions. By default counted from the start of the row.
            dropout_key: random key; None means deterministic.
        """
        return self._logits(
            self.outputs(
                encoder_input_tokens,
                decoder_input_tokens,
                encoder_segment_ids=encoder_segment_ids,
                decoder_segment_ids=decoder_segment_ids,
                encoder_positions=encoder_positions,
                decoder_positions=decoder_positions,
                dropout_key=dropout_key,
            )
        )

    @partitioned(2, like="decoder_input_tokens")
    def outputs(
        self,
        encoder_input_tokens: Int[HostOrDevice, "batch source"],
        decoder_input_tokens: Int[HostOrDevice, "batch target"],
        *,
        encoder_segment_ids: Int[HostOrDevice, "batch source"] | None = None,
        decoder_segment_ids: Int[HostOrDevice, "batch target"] | None = None,
        encoder_positions: Int[HostOrDevice, "batch source"] | None = None,
        decoder_positions: Int[HostOrDevice, "batch target"] | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch target embed"]:
        """Returns the decoder's output; its products with `output_table()` are the logits.

        The arguments are those of a call.

        Raises:
            UserError: the stem has a stride, and rows hold several packed examples, or might:
                inside `jax.jit` the values of segment ids are unknown. Or only one side has
                segment ids of several examples.
        """
        self._check_not_packed(encoder_segment_ids)
        _check_both_packed(encoder_segment_ids, decoder_segment_ids)
        encoder_key, decoder_key = split_key(dropout_key, 2)
        if encoder_segment_ids is None:
            encoder_segment_ids = (jnp.asarray(encoder_input_tokens) != 0).astype(jnp.int32)
        encoded = self.encode(
            encoder_input_tokens,
            segment_ids=encoder_segment_ids,
            positions=encoder_positions,
            dropout_key=encoder_key,
        )
        return self._run_decoder(
            encoded,
            decoder_input_tokens,
            encoder_segment_ids=encoder_segment_ids,
            segment_ids=decoder_segment_ids,
            positions=decoder_positions,
            dropout_key=decoder_key,
        )

    def output_table(self) -> Float[Array, "vocab embed"]:
        """Returns the table whose products with the outputs are the logits."""
        head = self.output_head
        return self.token_embedder.embedding[...] if head is None else head.kernel[...].T

    @partitioned(1, like="tokens")
    def encode(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch positions embed"]:
        """Returns the encoder's output, zero at padding.

        There is one position per token, or fewer if the stem has a stride. Packed examples must
        then begin at multiples of the stride.

        Raises:
            UserError: a packed example begins elsewhere. Not checked inside `jax.jit`, where values
                are unknown.
        """
        self._check_aligned(segment_ids)
        embedded = self.embed_tokens(tokens)
        if rate := self.config.token_dropout_rate:
            token_key, dropout_key = split_key(dropout_key, 2)
            embedded = drop_tokens(embedded, rate, token_key)
        if segment_ids is None:
            segment_ids = (jnp.asarray(tokens) != 0).astype(jnp.int32)
        x, segment_ids = self.run_stem(embedded, _segments(segment_ids, embedded), positions)
        x = self.encoder(x, StackInputs(segment_ids), dropout_key=dropout_key)
        return x * (segment_ids != 0)[..., None].astype(x.dtype)

    def run_stem(
        self,
        x: Float[Array, "batch length embed"],
        segment_ids: Int[Array, "batch length"],
        positions: Tokens | None = None,
    ) -> StemOutput:
        """Returns the input of the encoder's layers for embedded tokens, and its segment ids.

        Learned positions are added after the stem, and count its outputs.
        """
        stride = self.config.stem_stride
        if self.stem is not None:
            x, segment_ids = self.stem(x, segment_ids)
        if positions is not None and stride > 1:
            positions = jnp.asarray(positions)[:, ::stride] // stride
        return StemOutput(self.with_positions(x, positions), segment_ids)

    @partitioned(2, like="tokens")
    def decode(
        self,
        encoded: Float[Array, "batch positions embed"],
        tokens: Int[HostOrDevice, "rows target"],
        *,
        encoder_segment_ids: Int[HostOrDevice, "batch source"],
        segment_ids: Int[HostOrDevice, "rows target"] | None = None,
        positions: Int[HostOrDevice, "rows target"] | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "rows target vocab"]:
        """Returns logits for shifted target tokens, all positions at once.

        `encoder_segment_ids` are those of the source tokens, even if a stem shortens them. Several
        adjacent rows may hold targets of one source: each row of `encoded` then serves an equal
        number of rows.
        """
        outputs = self._run_decoder(
            encoded,
            tokens,
            encoder_segment_ids=encoder_segment_ids,
            segment_ids=segment_ids,
            positions=positions,
            dropout_key=dropout_key,
        )
        return self._logits(outputs)

    def init_decoding(
        self,
        encoded: Float[Array, "batch positions embed"],
        *,
        encoder_segment_ids: Int[HostOrDevice, "batch source"],
        length: int,
        copies: int = 1,
    ) -> DecoderState:
        """Returns the state before the first of at most `length` decoding steps.

        Args:
            encoded: the result of `encode`.
            encoder_segment_ids: those of the source tokens, even if a stem shortens them.
            length: the maximum number of decoding steps.
            copies: adjacent rows that decode one source differently, as beams do; they share the
                keys and values of its encoder output.
        """
        self._check_length(length)
        return DecoderState(
            layers=self.decoder.init_state(encoded, length=length, copies=copies),
            memory_mask=(self._memory_ids(encoder_segment_ids) != 0)[:, None],
            position=jnp.zeros((encoded.shape[0] * copies,), jnp.int32),
        )

    def decode_step(
        self,
        state: DecoderState,
        tokens: Int[HostOrDevice, " rows"],
        *,
        hide_start_token: bool | None = None,
    ) -> tuple[Float[Array, "rows vocab"], DecoderState]:
        """Feeds one token per row, and returns the logits of the next one.

        Args:
            state: from `init_decoding` or an earlier step.
            tokens: the previous token of each row, 0 at the start.
            hide_start_token: overrides the config. False reproduces the decoding of the original,
                which differs from the function that was trained.

        Raises:
            UserError: more steps than `init_decoding` made room for. Not checked inside `jax.jit`,
                where their number is unknown.
        """
        self._check_room(state)
        tokens = jnp.asarray(tokens)[:, None]
        x = self.embed(tokens, state.position[:, None])
        x, layers = self.decoder.step(
            x,
            state.layers,
            state.position,
            memory_mask=state.memory_mask,
            readable=self._readable(tokens, hide_start_token),
        )
        after = state._replace(layers=layers, position=state.position + 1)
        return self._logits(self._scale_output(x))[:, 0], after

    def _run_decoder(
        self, encoded, tokens, *, encoder_segment_ids, segment_ids, positions, dropout_key
    ) -> Float[Array, "batch target embed"]:
        embedded, tokens = self.embed(tokens, positions), jnp.asarray(tokens)
        inputs = StackInputs(
            _segments(jnp.ones_like(tokens) if segment_ids is None else segment_ids, embedded),
            readable=self._readable(tokens),
            memory=encoded,
            memory_segment_ids=self._memory_ids(encoder_segment_ids),
        )
        x = self.decoder(embedded, inputs, dropout_key=dropout_key)
        return self._scale_output(x)

    def embed(
        self, tokens: Tokens, positions: Tokens | None = None
    ) -> Float[Array, "batch length embed"]:
        """Returns the input of a stack: token embeddings plus learned positions."""
        return self.with_positions(self.embed_tokens(tokens), positions)

    def embed_tokens(self, tokens: Tokens) -> Float[Array, "batch length embed"]:
        """Returns the token embeddings.

        Raises:
            UserError: the ids are no integers, or not [batch, length], or one is not below
                `vocab_size`. The latter is not checked inside `jax.jit`, where such ids take the
                last row.
        """
        self._check_ids(tokens)
        return self.token_embedder(jnp.asarray(tokens), dtype=jnp.dtype(self.config.dtype))

    def with_positions(
        self, x: Float[Array, "batch length embed"], positions: Tokens | None = None
    ) -> Float[Array, "batch length embed"]:
        """Adds the learned positions, if the model has them.

        Raises:
            UserError: positions are no integers, or not one for each token, or one is not below
                `max_positions`. The latter is not checked inside `jax.jit`.
        """
        if self.position_embedder is None:
            return x
        if positions is None:
            self._check_length(x.shape[1])
            positions = jnp.arange(x.shape[1])[None]
        else:
            self._check_positions(positions, x.shape[:2])
        return x + self.position_embedder(jnp.asarray(positions), dtype=x.dtype)

    def _memory_ids(self, encoder_segment_ids):
        return window_segments(_segments(encoder_segment_ids), self.config.stem_stride)

    def _readable(self, tokens, hide_start_token: bool | None = None):
        hide = self.config.hide_start_token if hide_start_token is None else hide_start_token
        return tokens != 0 if hide else None

    def _scale_output(self, x):
        return x * self.config.emb_dim**-0.5 if self.output_head is None else x

    def _logits(self, outputs):
        if self.output_head is None:
            return self.token_embedder.attend(outputs)
        return self.output_head(outputs).astype(at_least_float32(outputs.dtype))

    def _check_ids(self, tokens) -> None:
        rows = self.config.vocab_size
        if jnp.ndim(tokens) != 2:
            raise errors.UserError(
                f"tokens have shape {jnp.shape(tokens)}, but must have the axes [batch, length]; a "
                "single row is a batch of one."
            )
        if not jnp.issubdtype(jnp.asarray(tokens).dtype, jnp.integer):
            raise errors.UserError(
                f"tokens have dtype {jnp.asarray(tokens).dtype}, but must be ids of the "
                "vocabulary; give integers."
            )
        unknown = _outside(tokens, rows)
        if unknown.size:
            raise errors.UserError(
                f"token id {unknown[0]} must be in [0, vocab_size={rows}), the rows of the token "
                "table; use the vocabulary that the model was trained with."
            )

    def _check_positions(self, positions, shape: tuple[int, ...]) -> None:
        rows = self.config.max_positions
        found, dtype = jnp.shape(positions), jnp.asarray(positions).dtype
        if found != shape or not jnp.issubdtype(dtype, jnp.integer):
            raise errors.UserError(
                f"positions are {dtype} {found}, but must be integers {shape}, one for each token."
            )
        if rows and (unknown := _outside(positions, rows)).size:
            raise errors.UserError(
                f"position {unknown[0]} must be in [0, max_positions={rows}), the rows of the "
                "learned position table; count positions from 0 in each example, and shorten it or "
                "train with a larger max_positions."
            )

    def _check_room(self, state: DecoderState) -> None:
        room = self.decoder.room(state.layers)
        positions = None if room is None else _known(state.position)
        if positions is not None and positions.max(initial=0) >= room:
            raise errors.UserError(
                f"step {positions.max() + 1} is one more than length={room} of init_decoding, for "
                "which attention has room; make a state of more steps."
            )

    def _check_not_packed(self, encoder_segment_ids) -> None:
        stride = self.config.stem_stride
        if encoder_segment_ids is None or stride == 1:
            return
        ids = _known(encoder_segment_ids)
        if ids is None or _begins(ids).any():
            raise errors.UserError(
                f"the encoder's stem has a stride of {stride}, and these rows are packed: an "
                "example that begins inside a window would be read differently than alone; set "
                "data.DataConfig.pack = False, or the strides of architecture.TextStemConfig to "
                "1."
            )

    def _check_aligned(self, segment_ids) -> None:
        stride = self.config.stem_stride
        ids = None if segment_ids is None or stride == 1 else _known(segment_ids)
        if ids is None:
            return
        begins = np.flatnonzero(_begins(ids).any(axis=0))
        if np.any(begins % stride):
            raise errors.UserError(
                f"a packed example begins at position {begins[begins % stride != 0][0]}, inside "
                "a window of the encoder's stem; examples must begin at multiples of its stride "
                f"{stride}, or have rows of their own."
            )

    def _check_length(self, length: int) -> None:
        limit = self.config.max_positions
        if self.config.positions == "learned" and limit and length > limit:
            raise errors.UserError(
                f"a sequence of {length} tokens is longer than max_positions={limit}, the rows of "
                "the learned position table; shorten it or train with a larger max_positions."
            )


def _check_both_packed(encoder_ids, decoder_ids) -> None:
    """Raises `UserError` for segments on one side only, which would read nothing of the other."""
    sides = {"encoder": (encoder_ids, decoder_ids), "decoder": (decoder_ids, encoder_ids)}
    for side, (given, other) in sides.items():
        ids = None if given is None or other is not None else _known(given)
        if ids is not None and ids.max(initial=0) > 1:
            raise errors.UserError(
                f"{side}_segment_ids holds the segment {ids.max()}, but the other side has no "
                "segment ids and is segment 1; give encoder_segment_ids and decoder_segment_ids."
            )


def _segments(
    segment_ids: HostOrDevice, x: Float[Array, "batch length embed"] | None = None
) -> Int[Array, "batch length"]:
    """Returns segment ids as an array, one for each position of `x`."""
    given = segment_ids if hasattr(segment_ids, "dtype") else np.asarray(segment_ids)
    ids = checked_segments("segment_ids", given)
    if x is not None and ids.shape != x.shape[:2]:
        raise errors.UserError(
            f"segment_ids have shape {ids.shape}, but tokens {x.shape[:2]}; give one id for each "
            "token."
        )
    return ids


def _known(values: HostOrDevice) -> np.ndarray | None:
    """Returns concrete values as NumPy; None if traced, or not all on this host."""
    if isinstance(values, Tracer) or not getattr(values, "is_fully_addressable", True):
        return None
    return np.asarray(values)


def _outside(indices: HostOrDevice, rows: int) -> np.ndarray:
    """Returns the indices outside a table of `rows` rows; none if values are unknown."""
    known = _known(indices)
    return np.empty(0) if known is None else known[(known < 0) | (known >= rows)]


def _begins(segment_ids: np.ndarray) -> np.ndarray:
    """Returns where a segment begins that is not the first of its row, [batch, length]."""
    places = np.arange(segment_ids.shape[1])[None]
    last = np.maximum.accumulate(np.where(segment_ids != 0, places, -1), axis=1)
    before = np.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous = np.take_along_axis(segment_ids, np.maximum(before, 0), axis=1)
    return (segment_ids != 0) & (before >= 0) & (segment_ids != previous)
