"""Searches for output sequences token by token: greedy, sampling and beam search.

All functions are traced, with one while loop that stops when every row has ended. `decoding` pads
host arrays to buckets and calls them.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from convt5 import errors
from convt5.errors import checks, rules
from convt5.modeling.layers import at_least_float32
from convt5.modeling.model import ConvT5, DecoderState, HostOrDevice

LOWEST_TEMPERATURE = 1e-30
"""Smallest temperature: dividing logits by less may overflow float32, which makes the order of the
most likely tokens arbitrary."""

LARGEST_FACTOR = 100.0
"""Largest exponent of 2 in scores: beyond it sums overflow float32, and all results are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy:
    """The most likely token at every step; one result per row."""

    @property
    def num_results(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Tokens sampled from the model's distribution, optionally sharpened and truncated.

    Attributes:
        temperature: divides the logits, which must stay finite; below 1 sharpens. Use `Greedy` for
            the limit 0.
        top_k: samples only from this many most likely tokens; None means all.
        top_p: samples only from the smallest set of most likely tokens whose total probability,
            after temperature and top_k, reaches this value (Holtzman et al. 2020, arXiv
            1904.09751); 1 means all.
        num_results: independent samples per row, in the order drawn.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    num_results: int = 1

    def __post_init__(self):
        checks.make_plain(self)
        faults = checks.count_faults(self, ("top_k",), none="every token", rule=rules.count)
        faults += checks.count_faults(self, ("num_results",))
        if not (rules.finite(self.temperature) and self.temperature >= LOWEST_TEMPERATURE):
            faults.append(
                f"temperature={self.temperature!r} must be above 0; use Greedy for its limit 0, "
                f"and below {LOWEST_TEMPERATURE}. It must be finite."
            )
        if not (rules.finite(self.top_p) and 0 < self.top_p <= 1):
            faults.append(f"top_p={self.top_p!r} must be in (0, 1]; 1 keeps every token.")
        errors.raise_all(faults, where="Sampling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """The sequences of highest score, keeping `beam_size` unfinished ones at every step.

    The score is the sum of log-probabilities over length ** length_penalty, where the length counts
    generated tokens including the end token, without a forced prefix. Each step considers the
    2 * beam_size best continuations. Of the first beam_size, those that end compete for the
    results; the best beam_size that do not end continue. These are the conventions of Hugging Face
    transformers, whose results are equal.

    Attributes:
        beam_size: sequences kept; 1 is greedy search.
        length_penalty: exponent of the length; above 0 favours longer results, 0 compares plain
            sums.
        num_results: results per row, best first; None means beam_size.
        early_stopping: when a row with beam_size results stops. True: at once. False: when its
            worst result is at least as good as the best unfinished sum, scored at its current
            length. "never": as False, but scored at the longest length if length_penalty is
            positive, so that no better result is missed.
    """

    beam_size: int = 4
    length_penalty: float = 1.0
    num_results: int | None = None
    early_stopping: bool | str = False

    def __post_init__(self):
        checks.make_plain(self)
        faults = checks.count_faults(self, ("beam_size",))
        faults += checks.count_faults(self, ("num_results",), none="beam_size")
        if not faults and self.num_results is not None and self.num_results > self.beam_size:
            faults.append(
                f"num_results={self.num_results} must be between 1 and beam_size="
                f"{self.beam_size}; a search keeps no more than beam_size results."
            )
        faults += length_penalty_faults(self.length_penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            faults.append(f"early_stopping={self.early_stopping!r} must be True, False or 'never'.")
        errors.raise_all(faults, where="BeamSearch")


Strategy = Greedy | Sampling | BeamSearch


def results_per_row(strategy: Any) -> int:
    """Returns the number of results that a strategy has for each row, set or derived."""
    return strategy.beam_size if strategy.num_results is None else strategy.num_results


def length_penalty_faults(length_penalty: float, length: int = 1) -> list[str]:
    """Returns errors in a length penalty: scores are divided by the length to this power."""
    if not rules.finite(length_penalty):
        return [
            f"length_penalty={length_penalty!r} must be a finite number; 0 compares plain sums, "
            "above 0 favours longer results."
        ]
    if abs(length_penalty) * math.log2(max(length, 1)) <= LARGEST_FACTOR:
        return []
    return [
        f"length_penalty={length_penalty} is too far from 0: scores of {length} tokens would be "
        f"divided by {length} ** {length_penalty}, which leaves float32; choose one nearer to 0."
    ]


class SearchInputs(NamedTuple):
    """The inputs of a search, by row.

    Attributes:
        encoder_input_tokens: the source, 0 at padding.
        prefix: tokens that every result starts with, up to prefix_lengths.
        prefix_lengths: length of the forced prefix; 0 means none.
        max_lengths: the longest result in tokens, including prefix and end; 0 requests none.
        keys: random key of each row, for sampling.
    """

    encoder_input_tokens: Int[HostOrDevice, "batch source"]
    prefix: Int[HostOrDevice, "batch length"]
    prefix_lengths: Int[HostOrDevice, " batch"]
    max_lengths: Int[HostOrDevice, " batch"]
    keys: Key[Array, " batch"] | None = None


class Found(NamedTuple):
    """The results of a search.

    Attributes:
        tokens: forced prefix, generated tokens, and the end token if generated; then 0.
        lengths: tokens of each result, including prefix and end; 0 for a missing result, which
            happens if fewer than num_results sequences exist.
        log_probs: log-probability of the generated tokens given the source and the prefix.
        scores: what results are ranked by: log_probs, in beam search over
            length ** length_penalty; -inf for a missing result.
        ended: whether the end token was generated; False for a result cut at its longest length.
    """

    tokens: Int[HostOrDevice, "batch results length"]
    lengths: Int[HostOrDevice, "batch results"]
    log_probs: Float[HostOrDevice, "batch results"]
    scores: Float[HostOrDevice, "batch results"]
    ended: Bool[HostOrDevice, "batch results"]


def search(
    model: ConvT5,
    inputs: SearchInputs,
    *,
    strategy: Strategy,
    end_id: int = 1,
    hide_start_token: bool | None = None,
) -> Found:
    """Encodes the sources and searches for results of at most `inputs.prefix.shape[1]` tokens.

    Rows are independent. `hide_start_token` overrides the config's, see `ConvT5.decode_step`.
    """
    step_model = functools.partial(model.decode_step, hide_start_token=hide_start_token)
    dtype = at_least_float32(jnp.dtype(model.config.dtype))
    if isinstance(strategy, BeamSearch):
        state = initial_state(model, inputs, strategy.beam_size)
        start = _no_beams(state, inputs, strategy, dtype)
        return _beam_search(step_model, start, inputs, strategy, end_id)
    state = initial_state(model, inputs, strategy.num_results)
    start = _no_draws(state, inputs, strategy, dtype)
    return _draw(step_model, start, inputs, strategy, end_id)


def initial_state(model: ConvT5, inputs: SearchInputs, copies: int) -> DecoderState:
    """Encodes; returns the state before the first step, with `copies` adjacent rows per source."""
    tokens = inputs.encoder_input_tokens
    segment_ids = (tokens != 0).astype(jnp.int32)
    return model.init_decoding(
        model.encode(tokens, segment_ids=segment_ids),
        encoder_segment_ids=segment_ids,
        length=inputs.prefix.shape[1],
        copies=copies,
    )


class _Draws(NamedTuple):
    """The sequences of greedy search or sampling, one per row."""

    step: Int[Array, ""]
    state: DecoderState
    last: Int[Array, " rows"]
    tokens: Int[Array, "rows length"]
    lengths: Int[Array, " rows"]
    log_probs: Float[Array, " rows"]
    ended: Bool[Array, " rows"]


def _no_draws(state, inputs: SearchInputs, strategy: Greedy | Sampling, dtype) -> _Draws:
    batch, length = inputs.prefix.shape
    rows = batch * strategy.num_results
    return _Draws(
        step=jnp.zeros((), jnp.int32),
        state=state,
        last=jnp.zeros((rows,), jnp.int32),
        tokens=jnp.zeros((rows, length), jnp.int32),
        lengths=jnp.zeros((rows,), jnp.int32),
        log_probs=jnp.zeros((rows,), dtype),
        ended=jnp.zeros((rows,), bool),
    )


def _draw(
    step_model, start: _Draws, inputs: SearchInputs, strategy: Greedy | Sampling, end_id: int
) -> Found:
    copies = strategy.num_results
    prefix = jnp.repeat(inputs.prefix, copies, axis=0)
    prefix_lengths = jnp.repeat(inputs.prefix_lengths, copies)
    max_lengths = jnp.repeat(inputs.max_lengths, copies)
    keys = _keys_of_copies(inputs.keys, copies)

    def active(draws: _Draws):
        return ~draws.ended & (draws.lengths < max_lengths)

    def body(draws: _Draws) -> _Draws:
        step = draws.step
        logits, state = step_model(draws.state, draws.last)
        chosen = _choose(logits, strategy, keys, step)
        forced, going_on = step < prefix_lengths, active(draws)
        token = jnp.where(forced, prefix[:, step], chosen)
        log_prob = _take(jax.nn.log_softmax(logits), token)
        token = jnp.where(going_on, token, 0)
        return _Draws(
            step=step + 1,
            state=state,
            last=token,
            tokens=draws.tokens.at[:, step].set(token),
            lengths=draws.lengths + going_on,
            log_probs=draws.log_probs + jnp.where(going_on & ~forced, log_prob, 0.0),
            ended=draws.ended | (going_on & ~forced & (token == end_id)),
        )

    end = jax.lax.while_loop(lambda draws: jnp.any(active(draws)), body, start)

    def by_row(x: Array) -> Array:
        return x.reshape(-1, copies, *x.shape[1:])

    log_probs = by_row(end.log_probs)
    lengths = by_row(end.lengths)
    scores = jnp.where(lengths > 0, log_probs, -jnp.inf)
    return Found(by_row(end.tokens), lengths, log_probs, scores, by_row(end.ended))


def _choose(
    logits: Float[Array, "rows vocab"],
    strategy: Greedy | Sampling,
    keys: Key[Array, " rows"] | None,
    step: Int[Array, ""],
) -> Int[Array, " rows"]:
    """Returns the next token of each row."""
    if isinstance(strategy, Greedy):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert keys is not None
    step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    logits = logits / strategy.temperature
    draw = jax.vmap(jax.random.categorical)
    if strategy.top_k is None and strategy.top_p == 1.0:
        return draw(step_keys, logits).astype(jnp.int32)
    # Sorted, so that ties cannot admit more than top_k tokens.
    logits, ids = jax.lax.top_k(logits, min(strategy.top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = jax.nn.softmax(logits)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The most likely token is always kept: the sum before it is 0.
    logits = jnp.where(before < strategy.top_p, logits, -jnp.inf)
    return _take(ids, draw(step_keys, logits)).astype(jnp.int32)


def _keys_of_copies(keys: Key[Array, " batch"] | None, copies: int):
    if keys is None:
        return None
    folded = jax.vmap(
        lambda key: jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(copies))
    )(keys)
    return folded.reshape(-1)


class _Beams(NamedTuple):
    """Unfinished sequences, best first, and the best results so far; -inf marks missing ones."""

    step: Int[Array, ""]
    state: DecoderState
    tokens: Int[Array, "batch beams length"]
    last: Int[Array, "batch beams"]
    log_probs: Float[Array, "batch beams"]
    results: Found
    done: Bool[Array, " batch"]


def _beam_search(
    step_model, start: _Beams, inputs: SearchInputs, strategy: BeamSearch, end_id: int
) -> Found:
    def body(beams: _Beams) -> _Beams:
        logits, state = step_model(beams.state, beams.last.reshape(-1))
        candidates = _best_continuations(beams, logits)
        results = _update_results(beams, candidates, inputs, strategy, end_id)
        chosen = _next_beams(beams, candidates, inputs, end_id)
        log_probs = chosen.log_probs
        return _Beams(
            step=beams.step + 1,
            state=reordered(state, chosen.parents),
            tokens=chosen.tokens,
            last=chosen.last,
            log_probs=log_probs,
            results=results,
            done=beams.done | _is_done(beams.step + 1, log_probs, results, inputs, strategy),
        )

    beams = jax.lax.while_loop(lambda beams: ~jnp.all(beams.done), body, start)
    return jax.tree.map(lambda x: x[:, : strategy.num_results], beams.results)


def _no_beams(state, inputs: SearchInputs, strategy: BeamSearch, dtype) -> _Beams:
    batch, length = inputs.prefix.shape
    shape = (batch, strategy.beam_size)
    absent = jnp.full(shape, -jnp.inf, dtype)
    tokens = jnp.zeros((*shape, length), jnp.int32)
    return _Beams(
        step=jnp.zeros((), jnp.int32),
        state=state,
        tokens=tokens,
        last=jnp.zeros(shape, jnp.int32),
        # All beams hold the same start token, so only one may be active.
        log_probs=absent.at[:, 0].set(0.0),
        results=Found(tokens, jnp.zeros(shape, jnp.int32), absent, absent, jnp.zeros(shape, bool)),
        done=jnp.asarray(inputs.max_lengths) <= 0,
    )


class _Candidates(NamedTuple):
    """Continuations of the beams by one token, best first."""

    parents: Int[Array, "batch candidates"]
    last: Int[Array, "batch candidates"]
    tokens: Int[Array, "batch candidates length"]
    log_probs: Float[Array, "batch candidates"]


def _best_continuations(beams: _Beams, logits: Float[Array, "rows vocab"]) -> _Candidates:
    batch, count = beams.log_probs.shape
    vocab = logits.shape[-1]
    token_log_probs = jax.nn.log_softmax(logits).reshape(batch, count, vocab)
    sums = (beams.log_probs[..., None] + token_log_probs).reshape(batch, count * vocab)
    # Twice the beams: if all the best ones end, enough remain to continue.
    log_probs, chosen = jax.lax.top_k(sums, min(2, vocab) * count)
    parents, last = chosen // vocab, chosen % vocab
    tokens = jnp.take_along_axis(beams.tokens, parents[..., None], axis=1)
    return _Candidates(parents, last, tokens.at[:, :, beams.step].set(last), log_probs)


def _update_results(
    beams: _Beams, candidates: _Candidates, inputs: SearchInputs, strategy: BeamSearch, end_id: int
) -> Found:
    """Returns the best beam_size of the results so far and of the candidates that end here."""
    length = beams.step + 1
    has_end = candidates.last == end_id
    is_first = jnp.arange(has_end.shape[1])[None] < strategy.beam_size
    generated = length - inputs.prefix_lengths
    allowed = (~beams.done & (generated > 0))[:, None]
    stops = has_end | (length >= inputs.max_lengths)[:, None]
    scores = candidates.log_probs / _length_factor(generated, strategy)[:, None]
    ending = Found(
        tokens=candidates.tokens,
        lengths=jnp.full_like(candidates.last, length),
        log_probs=candidates.log_probs,
        scores=jnp.where(stops & is_first & allowed, scores, -jnp.inf),
        ended=has_end,
    )
    merged = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), beams.results, ending)
    scores, chosen = jax.lax.top_k(merged.scores, strategy.beam_size)
    best = jax.tree.map(lambda x: rows_taken(x, chosen), merged)
    exists = scores > -jnp.inf
    # A missing result must not show the candidate that failed to fill its slot.
    return Found(
        tokens=jnp.where(exists[..., None], best.tokens, 0),
        lengths=jnp.where(exists, best.lengths, 0),
        log_probs=jnp.where(exists, best.log_probs, -jnp.inf),
        scores=scores,
        ended=exists & best.ended,
    )


def _next_beams(
    beams: _Beams, candidates: _Candidates, inputs: SearchInputs, end_id: int
) -> _Candidates:
    """Returns the beams of the next step: the best that do not end, or the forced prefix."""
    count = beams.log_probs.shape[1]
    unfinished = jnp.where(candidates.last == end_id, -jnp.inf, candidates.log_probs)
    log_probs, chosen = jax.lax.top_k(unfinished, count)
    best = jax.tree.map(lambda x: rows_taken(x, chosen), candidates)._replace(log_probs=log_probs)
    prescribed = jnp.broadcast_to(inputs.prefix[:, beams.step, None], beams.last.shape)
    forced = _Candidates(
        parents=jnp.broadcast_to(jnp.arange(count)[None], best.parents.shape),
        last=prescribed,
        tokens=beams.tokens.at[:, :, beams.step].set(prescribed),
        log_probs=beams.log_probs,
    )
    is_forced = beams.step < inputs.prefix_lengths
    return jax.tree.map(
        lambda yes, no: jnp.where(is_forced.reshape(-1, *(1,) * (no.ndim - 1)), yes, no),
        forced,
        best,
    )


def _is_done(
    length: Int[Array, ""],
    log_probs: Float[Array, "batch beams"],
    results: Found,
    inputs: SearchInputs,
    strategy: BeamSearch,
) -> Bool[Array, " batch"]:
    """Returns whether each row is complete after `length` tokens."""
    at_limit = length >= inputs.max_lengths
    worst = jnp.min(results.scores, axis=1)
    if strategy.early_stopping is True:
        return at_limit | (worst > -jnp.inf)
    to_limit = strategy.early_stopping == "never" and strategy.length_penalty > 0
    hoped_for = jnp.where(to_limit, inputs.max_lengths, length) - inputs.prefix_lengths
    bound = log_probs[:, 0] / _length_factor(hoped_for, strategy)
    # Inside a forced prefix nothing is scored yet.
    return at_limit | ((length > inputs.prefix_lengths) & (bound <= worst))


def _length_factor(generated: Int[Array, " batch"], strategy: BeamSearch) -> Float[Array, " batch"]:
    return jnp.maximum(generated, 1).astype(jnp.float32) ** strategy.length_penalty


def reordered(state: DecoderState, parents: Int[Array, "batch beams"]) -> DecoderState:
    """Returns the state in which each beam continues its parent."""
    batch, count = parents.shape
    if count == 1:
        return state
    rows = (jnp.arange(batch)[:, None] * count + parents).reshape(-1)
    return state._replace(layers=tuple(layer.rows(rows) for layer in state.layers))


def rows_taken(x: Array, chosen: Int[Array, "batch taken"]) -> Array:
    """Returns the `chosen` entries of the second axis, row by row."""
    return jnp.take_along_axis(x, chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)), axis=1)


def _take(x: Array, indices: Int[Array, " rows"]) -> Array:
    return jnp.take_along_axis(x, indices[:, None], axis=1)[:, 0]
