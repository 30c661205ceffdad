"""ConvT5: tokens in, logits out; an encoder-decoder whose mixing is chosen layer by layer.

`ConvT5Config` (in `architecture`) says what is built. Training calls the model on whole
sequences, `decoding` steps it one position at a time; both compute the same function.
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
    split_key,
)
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.stem import StemOutput, TextStem, shortened

HostOrDevice = jax.Array | np.ndarray
Tokens = Int[HostOrDevice, "batch length"]


class DecoderState(NamedTuple):
    """What a model remembers between decoding steps.

    Attributes:
        layers: the state of every decoder layer.
        memory_mask: the encoder positions that may be read.
        position: the position of the next token of each row, from 0; a source may have several.
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
        # A key of its own: models without a stem keep the parameters they were initialised with.
        self.stem = TextStem(config, key=jax.random.fold_in(key, 5)) if config.stem else None
        self.encoder = Stack(config, decoder=False, key=keys[2])
        self.decoder = Stack(config, decoder=True, key=keys[3])
        self.output_head = (
            None if config.tie_output else Dense(config.emb_dim, config.vocab_size, key=keys[4])
        )
        self.config = config

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
            encoder_input_tokens: the source, 0 where padded.
            decoder_input_tokens: the target shifted right by one, starting with 0.
            encoder_segment_ids: which packed example each position belongs to, 0 for padding; by
                default one example per row and padding wherever the token is 0.
            decoder_segment_ids: likewise; by default the whole row is one example, which is exact
                for every real position because the decoder is causal.
            encoder_positions, decoder_positions: positions within each packed example; by default
                counted from the start of the row. Used by learned positions only.
            dropout_key: None for deterministic.
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
        """Returns the decoder's output, whose products with `output_table()` are the logits.

        Arguments as of a call.

        Raises:
            UserError: the encoder's stem has a stride, and rows hold several packed examples, or
                may hold them: inside of `jax.jit` given segment ids are not known.
        """
        self._check_not_packed(encoder_segment_ids)
        encoder_key, decoder_key = split_key(dropout_key, 2)
        if encoder_segment_ids is None:
            encoder_segment_ids = (jnp.asarray(encoder_input_tokens) != 0).astype(jnp.int32)
        encoded = self.encode(
            encoder_input_tokens,
            segment_ids=encoder_segment_ids,
            positions=encoder_positions,
            dropout_key=encoder_key,
        )
        return self._decoded(
            encoded,
            decoder_input_tokens,
            encoder_segment_ids=encoder_segment_ids,
            segment_ids=decoder_segment_ids,
            positions=decoder_positions,
            dropout_key=decoder_key,
        )

    def output_table(self) -> Float[Array, "vocab embed"]:
        """Returns the rows that outputs are multiplied with."""
        head = self.output_head
        return self.token_embedder.embedding[...] if head is None else head.kernel[...].T

    def encode(
        self,
        tokens: Tokens,
        *,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch positions embed"]:
        """Returns the encoder's output, zero at padding.

        Its positions are the tokens, or fewer where the encoder's stem has a stride: of segment ids
        for packed rows, each must then begin at a multiple of the stride.

        Raises:
            UserError: one does not, as far as their values are known (outside of `jax.jit`).
        """
        self._check_aligned(segment_ids)
        tokens = jnp.asarray(tokens)
        segment_ids = jnp.asarray(tokens != 0, jnp.int32) if segment_ids is None else segment_ids
        embedded = self.embed_tokens(tokens)
        x, segment_ids = self.stemmed(embedded, jnp.asarray(segment_ids), positions)
        x = self.encoder(x, StackInputs(segment_ids), dropout_key=dropout_key)
        return x * (segment_ids != 0)[..., None].astype(x.dtype)

    def stemmed(
        self,
        x: Float[Array, "batch length embed"],
        segment_ids: Int[Array, "batch length"],
        positions: Tokens | None = None,
    ) -> StemOutput:
        """Returns what the encoder's layers read of embedded tokens, and its segments.

        Learned positions are added behind the stem, and count its outputs.
        """
        stride = self.config.stem_stride
        if self.stem is not None:
            x, segment_ids = self.stem(x, segment_ids)
        if positions is not None and stride > 1:
            positions = jnp.asarray(positions)[:, ::stride] // stride
        return StemOutput(self.with_positions(x, positions), segment_ids)

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

        `encoder_segment_ids` are those of the source tokens, also where a stem shortened them.
        Several targets of one source may stand in adjacent rows: each row of `encoded` serves as
        many of them as there are for it.
        """
        outputs = self._decoded(
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
            encoded: what `encode` returned.
            encoder_segment_ids: those of the source tokens, also where a stem shortened them.
            length: the most positions that will be stepped through.
            copies: adjacent rows that continue one source each in their own way, as beams do; they
                share what is kept of it.
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
        """Feeds one token per row and returns the logits of the next one.

        Args:
            state: from `init_decoding` or an earlier step.
            tokens: the previous token of each row, 0 at the start.
            hide_start_token: overrides the config's; False repeats the original's decoding, which
                is not the function it was trained as.
        """
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
        return self._logits(self._scaled(x))[:, 0], after

    def _decoded(
        self, encoded, tokens, *, encoder_segment_ids, segment_ids, positions, dropout_key
    ) -> Float[Array, "batch target embed"]:
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        tokens, segment_ids = jnp.asarray(tokens), jnp.asarray(segment_ids)
        inputs = StackInputs(
            segment_ids,
            readable=self._readable(tokens),
            memory=encoded,
            memory_segment_ids=self._memory_ids(encoder_segment_ids),
        )
        x = self.decoder(self.embed(tokens, positions), inputs, dropout_key=dropout_key)
        return self._scaled(x)

    def embed(
        self, tokens: Tokens, positions: Tokens | None = None
    ) -> Float[Array, "batch length embed"]:
        """Returns the vectors that a stack reads: of tokens, and of learned positions."""
        return self.with_positions(self.embed_tokens(tokens), positions)

    def embed_tokens(self, tokens: Tokens) -> Float[Array, "batch length embed"]:
        """Returns the vectors of tokens alone.

        Raises:
            UserError: an id that the table has no row for, as far as values are known (outside of
                `jax.jit`, where such ids take the nearest row).
        """
        self._check_ids(tokens)
        return self.token_embedder(jnp.asarray(tokens), dtype=jnp.dtype(self.config.dtype))

    def with_positions(
        self, x: Float[Array, "batch length embed"], positions: Tokens | None = None
    ) -> Float[Array, "batch length embed"]:
        """Adds the vectors of learned positions, where the model has them.

        Raises:
            UserError: a position that the table has no row for, as far as values are known.
        """
        if self.position_embedder is None:
            return x
        if positions is None:
            self._check_length(x.shape[1])
            positions = jnp.arange(x.shape[1])[None]
        else:
            self._check_positions(positions)
        return x + self.position_embedder(jnp.asarray(positions), dtype=x.dtype)

    def _memory_ids(self, encoder_segment_ids):
        return shortened(jnp.asarray(encoder_segment_ids), self.config.stem_stride)

    def _readable(self, tokens, hide_start_token: bool | None = None):
        hide = self.config.hide_start_token if hide_start_token is None else hide_start_token
        return tokens != 0 if hide else None

    def _scaled(self, x):
        return x * self.config.emb_dim**-0.5 if self.output_head is None else x

    def _logits(self, outputs):
        if self.output_head is None:
            return self.token_embedder.attend(outputs)
        return self.output_head(outputs).astype(at_least_float32(outputs.dtype))

    def _check_ids(self, tokens) -> None:
        rows = self.config.vocab_size
        unknown = _outside(tokens, rows)
        if unknown.size:
            raise errors.UserError(
                f"token id {unknown[0]} must be in [0, vocab_size={rows}), the rows of the token "
                "table; use the vocabulary that the model was trained with."
            )

    def _check_positions(self, positions) -> None:
        rows = self.config.max_positions
        if rows and (unknown := _outside(positions, rows)).size:
            raise errors.UserError(
                f"position {unknown[0]} must be in [0, max_positions={rows}), the rows of the "
                "learned position table; count positions from 0 in each example, and shorten it or "
                "train with a larger max_positions."
            )

    def _check_not_packed(self, encoder_segment_ids) -> None:
        stride = self.config.stem_stride
        if encoder_segment_ids is None or stride == 1:
            return
        ids = _known(encoder_segment_ids)
        if ids is None or _begins(ids).any():
            raise errors.UserError(
                f"the encoder's stem has a stride of {stride}, and these rows are packed: examples "
                "that begin inside of its windows would be read differently than alone; set "
                "data.DataConfig.pack = False, or the strides of architecture.TextStemConfig to 1."
            )

    def _check_aligned(self, segment_ids) -> None:
        stride = self.config.stem_stride
        ids = None if segment_ids is None or stride == 1 else _known(segment_ids)
        if ids is None:
            return
        begins = np.flatnonzero(_begins(ids).any(axis=0))
        if np.any(begins % stride):
            raise errors.UserError(
                f"a packed example begins at position {begins[begins % stride != 0][0]}, inside of "
                f"a window of the encoder's stem; examples must begin at multiples of its stride "
                f"{stride}, or stand in rows of their own."
            )

    def _check_length(self, length: int) -> None:
        limit = self.config.max_positions
        if self.config.positions == "learned" and limit and length > limit:
            raise errors.UserError(
                f"a sequence of {length} tokens is longer than max_positions={limit}, the rows of "
                "the learned position table; shorten it or train with a larger max_positions."
            )


def _known(values: HostOrDevice) -> np.ndarray | None:
    """Returns values that can be looked at: not those of a program being traced, or far away."""
    if isinstance(values, Tracer) or not getattr(values, "is_fully_addressable", True):
        return None
    return np.asarray(values)


def _outside(indices: HostOrDevice, rows: int) -> np.ndarray:
    """Returns the indices that a table has no row for, as far as they are known."""
    known = _known(indices)
    return np.empty(0) if known is None else known[(known < 0) | (known >= rows)]


def _begins(segment_ids: np.ndarray) -> np.ndarray:
    """Returns where segments follow another one of their row, [batch, length]."""
    places = np.arange(segment_ids.shape[1])[None]
    last = np.maximum.accumulate(np.where(segment_ids != 0, places, -1), axis=1)
    before = np.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous = np.take_along_axis(segment_ids, np.maximum(before, 0), axis=1)
    return (segment_ids != 0) & (before >= 0) & (segment_ids != previous)
