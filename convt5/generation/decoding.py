"""Decoding and scoring of host arrays with any model, whatever its layers mix with.

Batch sizes and lengths are padded to buckets, so that inputs of many shapes share few compilations.
Results do not depend on the padding, apart from rounding, which differs between shapes.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, SupportsIndex, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key, UInt32

from convt5 import errors
from convt5.errors import rules
from convt5.generation import mesh_tf_search
from convt5.generation.mesh_tf_search import MeshTFBeamSearch
from convt5.generation.search import (
    BeamSearch,
    Found,
    Greedy,
    Sampling,
    SearchInputs,
    length_penalty_faults,
    results_per_row,
    search,
)
from convt5.modeling.model import ConvT5, HostOrDevice
from convt5.modeling.sharding import has_explicit_axes, with_auto_axes
from convt5.ops import shift_right, token_cross_entropy

__all__ = [
    "BeamSearch",
    "Found",
    "Greedy",
    "MeshTFBeamSearch",
    "Regularizers",
    "Sampling",
    "Scores",
    "SearchInputs",
    "SpecialTokens",
    "Strategy",
    "bucket_size",
    "decode",
    "score",
    "search",
]

Strategy = Greedy | Sampling | BeamSearch | MeshTFBeamSearch

SMALLEST_LENGTH = 8
"""The shortest length compiled for."""


class Regularizers(NamedTuple):
    """Terms that a loss adds to the cross-entropy; see `convt5.training.losses.TextLoss`."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0


NO_REGULARIZERS = Regularizers()


class Scores(NamedTuple):
    """Scores of given sequences under a model.

    Attributes:
        token_log_probs: log-probability of every token given the source and the tokens before it; 0
            for the prefix and after the end of the sequence.
        log_probs: their sum.
        scores: log_probs over the number of scored tokens ** length_penalty.
        objectives: the training objective summed over the scored tokens: cross-entropy with label
            smoothing, plus z-loss. Without both it is -log_probs.
    """

    token_log_probs: Float[HostOrDevice, "batch choices length"]
    log_probs: Float[HostOrDevice, "batch choices"]
    scores: Float[HostOrDevice, "batch choices"]
    objectives: Float[HostOrDevice, "batch choices"]


class SpecialTokens(TypedDict, total=False):
    """How the first and the last token of a result are treated.

    Attributes:
        end_id: the token that ends a result, by default 1; with an id outside the vocabulary, only
            limits end it.
        hide_start_token: overrides the config, unless it is None (default). False decodes the
            released models as the original does, which differs from the function that was trained.
    """

    end_id: int
    hide_start_token: bool | None


def decode(
    model: ConvT5,
    encoder_input_tokens: Int[HostOrDevice, "batch source"],
    *,
    max_length: int,
    strategy: Strategy | None = None,
    max_lengths: Int[HostOrDevice, " batch"] | None = None,
    prefix: Int[HostOrDevice, "batch prefix"] | None = None,
    key: Key[Array, "..."] | UInt32[Array, "... 2"] | None = None,
    batch_sharding: jax.sharding.Sharding | None = None,
    **special: Unpack[SpecialTokens],
) -> Found:
    """Decodes each source; the result of a row depends only on that row.

    Args:
        model: the model; its parameters may be sharded over a mesh.
        encoder_input_tokens: sources, 0 at padding.
        max_length: the longest result in tokens, including forced prefix and end token.
        strategy: how tokens are chosen; `Greedy()` by default.
        max_lengths: a limit for each row, at most `max_length`; 0 requests no result.
        prefix: tokens that every result of a row starts with, padded with 0 on the right. They are
            given, not predicted, and so not scored.
        key: for sampling, one key, of which row i uses fold_in(key, i), or one key per row. Accepts
            `jax.random.key` and the older `jax.random.PRNGKey`.
        batch_sharding: spreads rows over devices; None follows the sharding of the model.
        special: end_id and hide_start_token; see `SpecialTokens`.

    Returns:
        Host arrays with the rows of `encoder_input_tokens` and `max_length` positions.

    Raises:
        UserError: tokens are outside the vocabulary, limits are contradictory, or axes, rows or
            dtypes of the arrays are wrong.
    """
    _check_untraced("decode", (model, encoder_input_tokens, max_length, max_lengths, prefix, key))
    strategy = Greedy() if strategy is None else strategy
    max_length = _integer("max_length", max_length)
    end_id, hide_start_token = _special_tokens(special, model.config.vocab_size)
    _check_settings(strategy, max_length)
    sources = _array("decode", "encoder_input_tokens", encoder_input_tokens)
    _check_axes("decode", "encoder_input_tokens", sources, "batch source")
    batch = sources.shape[0]
    sizes = {"rows": batch, "results of each": results_per_row(strategy), "max_length": max_length}
    _check_sizes("decode", sizes)
    prefix = _array("decode", "prefix", np.zeros((batch, 0), int) if prefix is None else prefix)
    limits = np.full((batch,), max_length) if max_lengths is None else np.asarray(max_lengths)
    prefix = _check_prefix(model, sources, prefix, limits, strategy)
    _check_limits(max_length, limits, prefix, end_id)
    keys = _row_keys(key, batch, strategy)
    if batch == 0:
        return _nothing(results_per_row(strategy), max_length)
    shape = (_row_bucket(batch, batch_sharding), _length_bucket(model, max_length))
    settings = {"strategy": strategy, "end_id": end_id, "hide_start_token": hide_start_token}
    with _naming_sizes("decode", sizes):
        # Only rows that request no result can have a longer prefix.
        inputs = _pad_inputs(model, sources, prefix[:, :max_length], limits, keys, shape=shape)
        results = _on_devices(batch_sharding, _search, model, inputs, **settings)
        results = jax.tree.map(lambda x: _on_host(x)[:batch], results)
    return results._replace(tokens=results.tokens[:, :, :max_length])


def _check_prefix(
    model: ConvT5,
    sources: np.ndarray,
    prefix: np.ndarray,
    limits: np.ndarray,
    strategy: Strategy,
) -> np.ndarray:
    """Checks axes, rows and tokens of the arguments of `decode`; returns the trimmed prefix."""
    _check_axes("decode", "prefix", prefix, "batch prefix")
    _check_axes("decode", "max_lengths", limits, "batch")
    arrays = {"prefix": prefix, "max_lengths": limits}
    _check_rows("decode", {"encoder_input_tokens": sources}, arrays)
    prefix = _trim(prefix)
    _check_tokens(model, "encoder_input_tokens", sources)
    _check_tokens(model, "prefix", prefix)
    if isinstance(strategy, MeshTFBeamSearch) and prefix.size:
        raise errors.UserError(
            "decode: prefix is given, but MeshTFBeamSearch forces none, as the original; use "
            "BeamSearch."
        )
    return prefix


def _pad_inputs(
    model: ConvT5,
    sources: np.ndarray,
    prefix: np.ndarray,
    limits: np.ndarray,
    keys: jax.Array | None,
    *,
    shape: tuple[int, int],
) -> SearchInputs:
    """Returns the inputs of a search, padded to `shape`: rows and positions of results."""
    rows, _ = shape
    return SearchInputs(
        encoder_input_tokens=_pad_sources(model, sources, rows),
        prefix=_pad(prefix, shape),
        prefix_lengths=_pad(_lengths(prefix), (rows,)),
        max_lengths=_pad(limits, (rows,)),
        # Padding rows use a copy of the last key and are dropped.
        keys=None if keys is None else keys[np.minimum(np.arange(rows), len(sources) - 1)],
    )


def score(
    model: ConvT5,
    encoder_input_tokens: Int[HostOrDevice, "batch source"],
    targets: Int[HostOrDevice, "batch choices length"],
    *,
    lengths: Int[HostOrDevice, "batch choices"] | None = None,
    prefix_lengths: Int[HostOrDevice, " batch"] | None = None,
    length_penalty: float = 0.0,
    regularizers: Regularizers = NO_REGULARIZERS,
    batch_sharding: jax.sharding.Sharding | None = None,
) -> Scores:
    """Scores given results by teacher forcing; equals the scores that `decode` returns.

    This is the function that was trained. Results of `decode` with another hide_start_token than
    the config's, and of `MeshTFBeamSearch`, have different scores.

    Args:
        model: as in `decode`.
        encoder_input_tokens: sources, 0 at padding.
        targets: candidate results for each source, such as `Found.tokens` or the labels of a
            classification task. Include the end token if it should be scored.
        lengths: tokens of each target, at most the positions of `targets`; by default up to the
            last one that is not 0.
        prefix_lengths: number of leading tokens per row that are given and not scored.
        length_penalty: as in `BeamSearch`; 0 compares plain sums.
        regularizers: terms that training adds to the cross-entropy; affect only `objectives`.
        batch_sharding: as in `decode`.

    Raises:
        UserError: tokens are outside the vocabulary, axes, rows or dtypes of the arrays are wrong,
            or lengths exceed the targets.
    """
    _check_untraced("score", (model, encoder_input_tokens, targets, lengths, prefix_lengths))
    sources = _array("score", "encoder_input_tokens", encoder_input_tokens)
    targets = _array("score", "targets", targets)
    _check_axes("score", "encoder_input_tokens", sources, "batch source")
    _check_axes("score", "targets", targets, "batch choices length")
    batch, choices, longest = targets.shape
    errors.raise_all(length_penalty_faults(length_penalty, longest), where="score")
    lengths = _lengths(targets) if lengths is None else np.asarray(lengths)
    starts = np.zeros((batch,), np.int32) if prefix_lengths is None else np.asarray(prefix_lengths)
    _check_targets(model, sources, targets, lengths=lengths, prefix_lengths=starts)
    if targets.size == 0:
        empty = np.zeros((batch, choices), np.float32)
        return Scores(np.zeros(targets.shape, np.float32), empty, empty, empty)
    rows, columns = _row_bucket(batch, batch_sharding), bucket_size(choices)
    inputs = (
        _pad_sources(model, sources, rows),
        _pad(targets, (rows, columns, _length_bucket(model, longest))),
        _pad(lengths, (rows, columns)),
        _pad(starts, (rows,)),
    )
    settings = {"regularizers": regularizers}
    with _naming_sizes("score", {"rows": batch, "choices of each": choices, "tokens": longest}):
        parts = _on_devices(batch_sharding, _score_tokens, model, *inputs, **settings)
        token_log_probs, token_objectives = (_on_host(x)[:batch, :choices, :longest] for x in parts)
    log_probs = token_log_probs.sum(axis=-1)
    scored = np.maximum(lengths - starts[:, None], 1).astype(np.float32)
    scores = log_probs / scored**length_penalty
    return Scores(token_log_probs, log_probs, scores, token_objectives.sum(axis=-1))


def bucket_size(count: int, *, smallest: int = 1) -> int:
    """Returns the first of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least both arguments.

    There are two sizes per doubling: at most half of the work is added, and the number of sizes,
    and so of compilations, grows with the logarithm of the largest one.
    """
    count = max(count, smallest, 1)
    power = 1 << (count - 1).bit_length()
    return power if count > power * 3 // 4 or power < 4 else power * 3 // 4


@functools.partial(jax.jit, static_argnames=("strategy", "end_id", "hide_start_token"))
def _search(model, inputs, *, strategy, end_id, hide_start_token):
    settings = {"end_id": end_id, "hide_start_token": hide_start_token}
    if isinstance(strategy, MeshTFBeamSearch):
        return mesh_tf_search.search(model, inputs, strategy=strategy, **settings)
    return search(model, inputs, strategy=strategy, **settings)


@functools.partial(jax.jit, static_argnames="regularizers")
def _score_tokens(
    model: ConvT5,
    sources: Int[Array, "batch source"],
    targets: Int[Array, "batch choices length"],
    lengths: Int[Array, "batch choices"],
    starts: Int[Array, " batch"],
    *,
    regularizers: Regularizers,
) -> tuple[Float[Array, "batch choices length"], Float[Array, "batch choices length"]]:
    """Returns log-probabilities and objectives of tokens."""
    segment_ids = (sources != 0).astype(jnp.int32)
    encoded = model.encode(sources, segment_ids=segment_ids)
    # All choices share a source, whose keys and values are computed once.
    flat = targets.reshape(-1, targets.shape[2])
    logits = model.decode(encoded, shift_right(flat), encoder_segment_ids=segment_ids)
    negative, _ = token_cross_entropy(logits, flat)
    objective = negative
    if regularizers != NO_REGULARIZERS:
        cross_entropy, z_loss = token_cross_entropy(logits, flat, **regularizers._asdict())
        objective = cross_entropy + z_loss
    at = jnp.arange(targets.shape[2])[None, None]
    is_scored = (at >= starts[:, None, None]) & (at < lengths[..., None])

    def scored(values: Array) -> Array:
        return jnp.where(is_scored, values.reshape(targets.shape), 0.0)

    return scored(-negative), scored(objective)


def _row_keys(key, batch: int, strategy: Strategy):
    if not isinstance(strategy, Sampling):
        return None
    if key is None:
        raise errors.UserError(
            "decode: key=None with Sampling, which draws at random; pass key=jax.random.key(seed)."
        )
    key = _to_typed_keys(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise errors.UserError(
            f"decode: key has shape {key.shape} for {batch} rows; pass one key, or one per row."
        )
    return key


def _to_typed_keys(key):
    """Converts keys to new-style typed keys."""
    if not hasattr(key, "dtype"):
        raise errors.UserError(
            f"decode: key={key!r} is no random key; pass key=jax.random.key(seed)."
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    try:
        return jax.random.wrap_key_data(jnp.asarray(key))
    except (TypeError, ValueError) as error:
        raise errors.UserError(
            f"decode: key has shape {key.shape} and dtype {key.dtype}, which is no random key; "
            "pass key=jax.random.key(seed)."
        ) from error


_INSIDE_OF_JIT = {
    "decode": "search of convt5.generation.decoding",
    "score": "the model and convt5.ops.token_cross_entropy",
}


def _check_untraced(where: str, given: Any) -> None:
    """Raises `UserError` inside of a transformation of JAX, where arrays have no values."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((jnp.zeros(()), given))):
        raise errors.UserError(
            f"{where} is called inside of jax.jit or another transformation of JAX, but it takes "
            "and returns host arrays, and compiles by itself; call it outside, or use "
            f"{_INSIDE_OF_JIT[where]} inside."
        )


def _check_sizes(where: str, sizes: dict[str, int]) -> None:
    """Raises `UserError` for results that no memory holds: all of them together, as integers."""
    total = math.prod(sizes.values())
    faults = [f"{name}={n} {rules.size(n)}" for name, n in sizes.items() if n > rules.MOST]
    if not faults and total >= 2**31:
        named = ", ".join(f"{name}={n}" for name, n in sizes.items())
        faults = [f"{named} are {total:,} tokens, but must be below 2 ** 31; lower one of them."]
    errors.raise_all(faults, where=where)


@contextlib.contextmanager
def _naming_sizes(where: str, sizes: dict[str, int]) -> Iterator[None]:
    """Names the sizes in an error about a lack of memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        named = ", ".join(f"{name}={n}" for name, n in sizes.items())
        if known := errors.of_memory(error, about=f"one of the sizes of {where}, {named}"):
            raise known from error
        raise


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise errors.UserError(f"decode: {name}={value!r} must be an integer.") from None


def _array(where: str, name: str, tokens: HostOrDevice) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except ValueError:
        raise errors.UserError(
            f"{where}: {name} has rows of different lengths; pad them with 0 on the right."
        ) from None


def _special_tokens(given: SpecialTokens, vocab_size: int) -> tuple[int, bool | None]:
    """Returns end_id, or -1 outside the vocabulary, and hide_start_token of `decode`."""
    for name in given.keys() - SpecialTokens.__annotations__.keys():
        raise TypeError(f"decode() got an unexpected keyword argument {name!r}")
    end_id, hide = _integer("end_id", given.get("end_id", 1)), given.get("hide_start_token")
    if not isinstance(hide, bool | np.bool_ | None):
        raise errors.UserError(f"decode: hide_start_token={hide!r} must be True, False or None.")
    return end_id if 0 <= end_id < vocab_size else -1, hide  # An id of 32 bits.


def _check_settings(strategy: Strategy, max_length: int) -> None:
    if not isinstance(strategy, Strategy):
        shown = strategy.__name__ if isinstance(strategy, type) else repr(strategy)
        raise errors.UserError(
            f"decode: strategy={shown} must be Greedy(), Sampling(...), BeamSearch(...) or "
            "MeshTFBeamSearch(...) of convt5.generation.decoding."
        )
    length_penalty = getattr(strategy, "length_penalty", 0.0)
    errors.raise_all(length_penalty_faults(length_penalty, max_length), where="decode")


def _check_axes(where: str, name: str, array: np.ndarray, axes: str) -> None:
    expected = axes.split()
    if array.ndim != len(expected):
        raise errors.UserError(
            f"{where}: {name} has shape {array.shape}, but must have the axes "
            f"[{', '.join(expected)}]; a single row is a batch of one."
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise errors.UserError(
            f"{where}: {name} has dtype {array.dtype}, but must hold integers, which it would be "
            "cut to."
        )


def _check_rows(
    where: str, first: dict[str, np.ndarray], others: dict[str, np.ndarray], *, axes: int = 1
) -> None:
    """Checks that arrays have equal rows, because padding to a bucket would hide differences."""
    ((name, array),) = first.items()
    faults = [
        f"{other} has shape {value.shape}, but {name} has shape {array.shape}; both must have the "
        f"same {'rows' if axes == 1 else 'rows and choices'}."
        for other, value in others.items()
        if value.shape[:axes] != array.shape[:axes]
    ]
    errors.raise_all(faults, where=where)


def _check_tokens(model: ConvT5, name: str, tokens: np.ndarray) -> None:
    vocab_size = model.config.vocab_size
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise errors.UserError(
            f"{name} holds the id {wrong[0]}, but the model's vocab_size={vocab_size} allows 0 to "
            f"{vocab_size - 1}; encode the text with the vocabulary the model was trained with."
        )


def _check_targets(
    model: ConvT5,
    sources: np.ndarray,
    targets: np.ndarray,
    *,
    lengths: np.ndarray,
    prefix_lengths: np.ndarray,
) -> None:
    """Raises `UserError` for arrays that `score` cannot read."""
    _check_axes("score", "lengths", lengths, "batch choices")
    _check_axes("score", "prefix_lengths", prefix_lengths, "batch")
    arrays = {"targets": targets, "prefix_lengths": prefix_lengths}
    _check_rows("score", {"encoder_input_tokens": sources}, arrays)
    _check_rows("score", {"targets": targets}, {"lengths": lengths}, axes=2)
    _check_tokens(model, "encoder_input_tokens", sources)
    _check_tokens(model, "targets", targets)
    _check_spans({"lengths": lengths, "prefix_lengths": prefix_lengths}, targets.shape[-1])


def _check_spans(arrays: dict[str, np.ndarray], longest: int) -> None:
    """Checks that lengths and prefixes fit, because scores are divided by their difference."""
    faults = [
        f"{name} runs from {value.min()} to {value.max()}, but must lie between 0 and {longest}, "
        "the positions of targets."
        for name, value in arrays.items()
        if value.size and (value.min() < 0 or value.max() > longest)
    ]
    errors.raise_all(faults, where="score")


def _check_limits(max_length: int, limits: np.ndarray, prefix: np.ndarray, end_id: int) -> None:
    faults = []
    if max_length < 1:
        faults.append(f"max_length={max_length} must be at least 1 token.")
    if limits.size and (limits.min() < 0 or limits.max() > max_length):
        faults.append(
            f"max_lengths runs from {limits.min()} to {limits.max()}, but must lie between 0 and "
            f"max_length={max_length}; raise max_length or lower the limits of the rows."
        )
    lengths = _lengths(prefix)
    too_long = np.flatnonzero((lengths >= limits) & (lengths > 0) & (limits > 0))
    if too_long.size:
        row = too_long[0]
        faults.append(
            f"prefix of row {row} has {lengths[row]} tokens, which leaves nothing to generate "
            f"within its limit of {limits[row]}; shorten it or raise max_length."
        )
    prefix_tokens = prefix[np.arange(prefix.shape[1])[None] < lengths[:, None]]
    if np.any(prefix_tokens == 0):
        faults.append("prefix holds padding (0) between tokens; pad it on the right.")
    elif np.any(prefix_tokens == end_id):
        faults.append(f"prefix holds the end token {end_id}, after which nothing can follow.")
    errors.raise_all(faults, where="decode")


def _row_bucket(batch: int, sharding: jax.sharding.Sharding | None) -> int:
    if sharding is None:
        return bucket_size(batch)
    devices = sharding.num_devices
    shards = devices // sharding.shard_shape((devices,))[0]
    return shards * bucket_size(-(-batch // shards))


def _length_bucket(model: ConvT5, length: int, *, stride: int = 1) -> int:
    """Returns the bucket of a length, limited to the positions that the model has."""
    size = bucket_size(length, smallest=SMALLEST_LENGTH)
    limit = model.config.max_positions if model.config.positions == "learned" else None
    return size if limit is None else max(length, min(size, limit * stride))


def _pad_sources(model: ConvT5, sources: np.ndarray, rows: int) -> np.ndarray:
    sources = _trim(sources)
    length = _length_bucket(model, sources.shape[1], stride=model.config.stem_stride)
    return _pad(sources, (rows, length))


def _trim(tokens: np.ndarray) -> np.ndarray:
    """Drops trailing columns that contain only padding."""
    return tokens[:, : _lengths(tokens).max(initial=0)]


def _lengths(tokens: np.ndarray) -> np.ndarray:
    """Returns the number of positions up to the last token that is not 0."""
    places = np.arange(1, tokens.shape[-1] + 1).reshape((1,) * (tokens.ndim - 1) + (-1,))
    return np.max(np.where(tokens != 0, places, 0), axis=-1, initial=0).astype(np.int32)


def _pad(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads with zeros to `shape`."""
    widths = [(0, size - now) for size, now in zip(shape, x.shape, strict=True)]
    return np.pad(x, widths).astype(np.int32)


def _on_host(x: Array) -> np.ndarray:
    """Returns the whole array, even if its rows are on several hosts, which must all call it."""
    whole = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(whole)


def _on_devices(batch_sharding, compute, model: ConvT5, *inputs, **settings):
    """Runs a program with inputs placed on the devices of the batch, on a mesh of any axes."""

    def move(a):
        kept = getattr(a, "sharding", None)
        automatic = with_auto_axes(kept)
        return a if automatic is kept else jax.device_put(a, automatic)

    model, sharding = jax.tree.map(move, model), with_auto_axes(batch_sharding)
    used = [sharding, *(getattr(a, "sharding", None) for a in jax.tree.leaves(model))]
    meshes = [s.mesh for s in used if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)]
    context = contextlib.nullcontext()
    if meshes and has_explicit_axes(jax.sharding.get_abstract_mesh()):
        context = jax.set_mesh(meshes[0])
    with context:
        return compute(model, *_place(inputs, sharding), **settings)


def _place(inputs, sharding: jax.sharding.Sharding | None):
    if sharding is None:
        return inputs

    def place(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(x, sharding)
        # Unlike keys, their data can be put on devices of other hosts.
        numbers = jax.device_put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))

    return jax.tree.map(place, inputs)


def _nothing(num_results: int, max_length: int) -> Found:
    shape = (0, num_results)
    numbers = np.zeros(shape, np.float32)
    return Found(
        np.zeros((*shape, max_length), np.int32),
        np.zeros(shape, np.int32),
        numbers,
        numbers,
        np.zeros(shape, bool),
    )
