"""Mesh TensorFlow's beam search, to reproduce results of the released models.

For comparison with the original only; `search.BeamSearch` is better.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convt5 import errors
from convt5.errors import checks
from convt5.generation.search import (
    Found,
    SearchInputs,
    initial_state,
    length_penalty_faults,
    reordered,
    rows_taken,
)
from convt5.modeling.layers import at_least_float32
from convt5.modeling.model import ConvT5, DecoderState

ABSENT = 1e7
"""Subtracted by the original where minus infinity would be usual."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTFBeamSearch:
    """The beam search of Mesh TensorFlow (`mesh_tensorflow/beam_search.py`, version 0.1.21).

    It differs from `search.BeamSearch` as follows; each difference is reproduced exactly:

    - A score is the sum of log-probabilities over ((5 + length) / 6) ** length_penalty (Wu et al.
      2016, arXiv 1609.08144, equation 14, without coverage).
    - Only the num_prefilter best continuations of each beam are considered. The first step has a
      single beam, so if this is two, a search starts with at most two different tokens.
    - All candidates that end compete for the results, whatever their rank. A sequence cut at the
      longest length is a result only if none of its row ended.
    - Missing sequences have a score of -1e7, not minus infinity. While there are fewer sequences
      than beams, copies of them take part, and one that ended may continue and end again.
    - All rows of a batch stop together: when in each of them every ended sequence is better than
      the best possible score of an unfinished one at the longest length.

    With `decode(..., hide_start_token=False)` the results equal the original's. The original allows
    min(1.5 * longest source + 10, length of the batch) tokens, which is max_length here.

    Attributes:
        beam_size: sequences kept.
        length_penalty: the original's alpha.
        num_prefilter: continuations considered per beam; None means all, the original's setting for
            models without a mesh layout.
    """

    beam_size: int = 4
    length_penalty: float = 0.6
    num_prefilter: int | None = 2

    def __post_init__(self):
        checks.make_plain(self)
        faults = checks.count_faults(self, ("beam_size",))
        faults += length_penalty_faults(self.length_penalty)
        if wrong := checks.count_faults(self, ("num_prefilter",), none="all"):
            faults += wrong
        elif self.num_prefilter is not None and self.num_prefilter < 2:
            faults.append(
                f"num_prefilter={self.num_prefilter} must be at least 2, so that a beam whose best "
                "continuation ends can go on; None looks at all."
            )
        errors.raise_all(faults, where="MeshTFBeamSearch")

    @property
    def num_results(self) -> int:
        """Always 1: the original returns only the best result."""
        return 1


class _Sequences(NamedTuple):
    """Sequences of each row, best first; `scores` rank them, `is_end` tells which have ended."""

    tokens: Int[Array, "batch beams length"]
    log_probs: Float[Array, "batch beams"]
    scores: Float[Array, "batch beams"]
    is_end: Bool[Array, "batch beams"]


class _Beams(NamedTuple):
    step: Int[Array, ""]
    state: DecoderState
    alive: _Sequences
    ended: _Sequences


def search(
    model: ConvT5,
    inputs: SearchInputs,
    *,
    strategy: MeshTFBeamSearch,
    end_id: int = 1,
    hide_start_token: bool | None = None,
) -> Found:
    """Encodes the sources and returns the best result of each; ignores forced prefixes."""
    step_model = functools.partial(model.decode_step, hide_start_token=hide_start_token)
    max_lengths = jnp.asarray(inputs.max_lengths)

    def goes_on(beams: _Beams):
        return jnp.any((beams.step < max_lengths) & ~_bound_is_met(beams, max_lengths, strategy))

    def body(beams: _Beams) -> _Beams:
        after = _grow(step_model, beams, strategy, end_id)
        # Rows may have their own longest lengths, unlike in the original.
        active = beams.step < max_lengths
        return after._replace(
            alive=_where(active, after.alive, beams.alive),
            ended=_where(active, after.ended, beams.ended),
        )

    beams = jax.lax.while_loop(goes_on, body, _start(model, inputs, strategy))
    return _best(beams, max_lengths, end_id)


def _start(model: ConvT5, inputs: SearchInputs, strategy: MeshTFBeamSearch) -> _Beams:
    batch, length = inputs.prefix.shape
    shape = (batch, strategy.beam_size)
    absent = jnp.full(shape, -ABSENT, at_least_float32(jnp.dtype(model.config.dtype)))
    first = absent.at[:, 0].set(0.0)
    tokens, no_end = jnp.zeros((*shape, length), jnp.int32), jnp.zeros(shape, bool)
    return _Beams(
        step=jnp.zeros((), jnp.int32),
        state=initial_state(model, inputs, strategy.beam_size),
        alive=_Sequences(tokens, first, first, no_end),
        ended=_Sequences(tokens, absent, absent, no_end),
    )


def _grow(step_model, beams: _Beams, strategy: MeshTFBeamSearch, end_id: int) -> _Beams:
    """Returns all sequences after one more token."""
    _, count, length = beams.alive.tokens.shape
    # Before the first step, the last token is the start token 0.
    before = jnp.arange(length)[None, None] == beams.step - 1
    last = jnp.sum(beams.alive.tokens * before, axis=-1)
    logits, state = step_model(beams.state, last.reshape(-1))
    parents, candidates = _candidates(beams, logits, strategy, end_id)
    unfinished = candidates.scores - ABSENT * candidates.is_end
    _, kept = jax.lax.top_k(unfinished, count)
    finished = candidates._replace(scores=candidates.scores - ABSENT * ~candidates.is_end)
    merged = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), beams.ended, finished)
    _, best = jax.lax.top_k(merged.scores, count)
    return _Beams(
        step=beams.step + 1,
        state=reordered(state, jnp.take_along_axis(parents, kept, axis=1)),
        alive=jax.tree.map(lambda x: rows_taken(x, kept), candidates),
        ended=jax.tree.map(lambda x: rows_taken(x, best), merged),
    )


def _candidates(
    beams: _Beams, logits: Float[Array, "rows vocab"], strategy: MeshTFBeamSearch, end_id: int
) -> tuple[Int[Array, "batch candidates"], _Sequences]:
    """Returns the 2 * beam_size best continuations, and the beam of each."""
    batch, count = beams.alive.scores.shape
    vocab = logits.shape[-1]
    offered = min(strategy.num_prefilter or 2 * count, vocab)
    factor = _length_factor(beams.step + 1, strategy)
    token_log_probs = jax.nn.log_softmax(logits).reshape(batch, count, vocab)
    scores = (beams.alive.log_probs[..., None] + token_log_probs) / factor
    # batch beams vocab -> batch beams offered -> batch candidates
    scores, tokens = jax.lax.top_k(scores, offered)
    scores, chosen = jax.lax.top_k(scores.reshape(batch, -1), min(2, offered) * count)
    parents = chosen // offered
    tokens = jnp.take_along_axis(tokens.reshape(batch, -1), chosen, axis=1)
    grown = rows_taken(beams.alive.tokens, parents).at[:, :, beams.step].set(tokens)
    return parents, _Sequences(grown, scores * factor, scores, tokens == end_id)


def _bound_is_met(
    beams: _Beams, max_lengths: Int[Array, " batch"], strategy: MeshTFBeamSearch
) -> Bool[Array, " batch"]:
    """Returns whether no unfinished sequence of a row can still beat those that ended."""
    bound = beams.alive.log_probs[:, 0] / _length_factor(max_lengths, strategy)
    # Scores are negative; sequences that have not ended count as 0, so they are not the lowest.
    lowest = jnp.min(beams.ended.scores * beams.ended.is_end, axis=1)
    return jnp.any(beams.ended.is_end, axis=1) & (lowest > bound)


def _best(beams: _Beams, max_lengths: Int[Array, " batch"], end_id: int) -> Found:
    """Returns the best result of each row, cut after its first end token."""
    has_ended = jnp.any(beams.ended.is_end, axis=1)
    # The original ranks unfinished sequences by their plain sums.
    unfinished = beams.alive._replace(scores=beams.alive.log_probs)
    result = jax.tree.map(lambda x: x[:, :1], _where(has_ended, beams.ended, unfinished))
    positions = jnp.arange(result.tokens.shape[-1])[None, None]
    is_end = result.tokens == end_id
    cut = jnp.where(jnp.any(is_end, axis=-1), jnp.argmax(is_end, axis=-1) + 1, max_lengths[:, None])
    exists = (max_lengths > 0)[:, None]
    return Found(
        tokens=jnp.where(positions < cut[..., None], result.tokens, 0),
        lengths=cut.astype(jnp.int32),
        log_probs=jnp.where(exists, result.log_probs, -jnp.inf),
        scores=jnp.where(exists, result.scores, -jnp.inf),
        ended=jnp.any(is_end, axis=-1) & exists,
    )


def _length_factor(length: Int[Array, "..."], strategy: MeshTFBeamSearch) -> Float[Array, "..."]:
    return ((5.0 + length.astype(jnp.float32)) / 6.0) ** strategy.length_penalty


def _where(rows: Bool[Array, " batch"], yes: _Sequences, no: _Sequences) -> _Sequences:
    return jax.tree.map(
        lambda a, b: jnp.where(rows.reshape(-1, *(1,) * (a.ndim - 1)), a, b), yes, no
    )
