"""Masks for padded and packed rows."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def check_axes(name: str, array, axes: str) -> None:
    """Raises ValueError for what is no array of these axes, such as "batch length"."""
    names = axes.split()
    if getattr(array, "ndim", None) != len(names):
        found = getattr(array, "shape", f"{type(array).__name__}, which is no array")
        raise ValueError(f"{name} has shape {found}, but must have the axes [{', '.join(names)}].")


def check_are_arrays(**arrays) -> None:
    """Raises ValueError for what is no array, such as a list."""
    for name, array in arrays.items():
        if not hasattr(array, "dtype"):
            raise ValueError(f"{name} is a {type(array).__name__}; give an array.")


def checked_flag(name: str, value) -> bool:
    """Returns a flag as Python's own, which is a static part of a program.

    Raises:
        ValueError: it is neither True nor False, or a value known only when the program runs.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False.")
    return bool(value)


def checked_segments(name: str, segment_ids) -> Int[Array, "batch length"]:
    """Returns segment ids in the dtype that kernels compare, int32.

    Raises:
        ValueError: they are not an array of integers, [batch, length], or take more than 32 bits.
    """
    check_axes(name, segment_ids, "batch length")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{name} has dtype {segment_ids.dtype}, but numbers packed examples; give integers, 0 "
            "for padding."
        )
    if isinstance(segment_ids, np.ndarray) and np.any(segment_ids != segment_ids.astype(np.int32)):
        raise ValueError(
            f"{name} holds ids of more than 32 bits, which would be cut to others; number the "
            "examples of a row from 1."
        )
    return jnp.asarray(segment_ids, jnp.int32)


def attention_mask(
    query_segment_ids: Int[Array, "batch target"],
    key_segment_ids: Int[Array, "batch source"],
    *,
    causal: bool,
) -> Bool[Array, "batch target source"]:
    """Returns which keys each query may read: those of its own segment.

    Segment 0 is padding: it reads nothing and nothing reads it.

    Args:
        query_segment_ids: segment of each query position.
        key_segment_ids: segment of each key position.
        causal: also hides the keys after the query's own position.
    """
    query = checked_segments("query_segment_ids", query_segment_ids)[:, :, None]
    key = checked_segments("key_segment_ids", key_segment_ids)[:, None, :]
    mask = (query == key) & (key != 0)
    if checked_flag("causal", causal):
        query_index = jnp.arange(query.shape[1])[None, :, None]
        key_index = jnp.arange(key.shape[2])[None, None, :]
        mask &= key_index <= query_index
    return mask


def zero_unless(
    readable: Bool[Array, "batch length"] | None, x: Float[Array, "batch length channels"]
) -> Float[Array, "batch length channels"]:
    """Returns x with zeros at the positions that are not readable; None: all are."""
    return x if readable is None else x * readable[..., None].astype(x.dtype)


def shift_right(
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
) -> Int[Array, "batch length"]:
    """Returns the decoder inputs for target `tokens`: each position holds the token before it.

    The first position of each row, and of each segment if ids are given, holds 0.

    Raises:
        ValueError: the arrays are not of one shape, [batch, length].
    """
    check_axes("tokens", tokens, "batch length")
    shifted = _after_zero(tokens)
    if segment_ids is None:
        return shifted
    check_axes("segment_ids", segment_ids, "batch length")
    if segment_ids.shape != tokens.shape:
        raise ValueError(
            f"segment_ids has shape {segment_ids.shape} but tokens has shape {tokens.shape}; give "
            "one id for each token."
        )
    return jnp.where(segment_ids == _after_zero(segment_ids), shifted, 0)


def _after_zero(a):
    return jnp.pad(a, ((0, 0), (1, 0)))[:, :-1]
