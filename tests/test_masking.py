"""Masks of padded and packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convt5.ops import attention_mask, shift_right

SEGMENTS = jnp.array([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]])


def test_queries_read_their_own_segment_and_never_padding():
    mask = attention_mask(SEGMENTS, SEGMENTS, causal=False)
    expected = np.zeros((2, 6, 6), bool)
    expected[0, :2, :2] = True
    expected[0, 2:5, 2:5] = True
    expected[1, 0, 0] = True
    np.testing.assert_array_equal(mask, expected)


def test_a_causal_mask_hides_exactly_the_later_keys():
    both = attention_mask(SEGMENTS, SEGMENTS, causal=False)
    causal = attention_mask(SEGMENTS, SEGMENTS, causal=True)
    np.testing.assert_array_equal(causal, np.tril(np.asarray(both)))


def test_a_mask_of_constants_may_be_made_inside_a_program(unchecked):
    ids = np.asarray(SEGMENTS)
    found = jax.jit(lambda x: x & attention_mask(ids, ids, causal=True))(True)
    np.testing.assert_array_equal(found, attention_mask(SEGMENTS, SEGMENTS, causal=True))


def test_query_and_key_may_have_different_lengths():
    mask = attention_mask(SEGMENTS[:, :3], jnp.array([[2, 1, 1, 0], [1, 1, 1, 1]]), causal=False)
    assert mask.shape == (2, 3, 4)
    np.testing.assert_array_equal(mask[0, 2], [True, False, False, False])
    np.testing.assert_array_equal(mask[1, 0], [True] * 4)


def test_shift_right_keeps_rows_of_no_positions():
    tokens = jnp.zeros((2, 0), jnp.int32)
    assert shift_right(tokens).shape == shift_right(tokens, tokens).shape == (2, 0)


def test_shift_right_starts_every_row_with_zero():
    shifted = shift_right(jnp.array([[5, 6, 7], [8, 9, 0]]))
    np.testing.assert_array_equal(shifted, [[0, 5, 6], [0, 8, 9]])


def test_shift_right_starts_every_segment_with_zero():
    tokens = jnp.array([[5, 6, 7, 8, 9, 0], [5, 0, 0, 0, 0, 0]])
    shifted = shift_right(tokens, SEGMENTS)
    np.testing.assert_array_equal(shifted, [[0, 5, 0, 7, 8, 0], [0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("length", [1, 2])
def test_shift_right_keeps_the_shape_of_short_rows(length):
    assert shift_right(jnp.ones((1, length), jnp.int32)).tolist() == [[0] + [1] * (length - 1)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((SEGMENTS.tolist(),), "tokens has shape list, which is no array"),
        ((SEGMENTS[0],), r"tokens has shape \(6,\), but must have the axes"),
        ((SEGMENTS, SEGMENTS.tolist()), "segment_ids has shape list, which is no array"),
        ((SEGMENTS, SEGMENTS[:1]), r"segment_ids has shape \(1, 6\) but tokens has shape \(2, 6\)"),
    ],
)
def test_shift_right_refuses_what_does_not_fit(unchecked, arrays, message):
    with pytest.raises(ValueError, match=message):
        shift_right(*arrays)


def test_a_mask_is_causal_or_not(unchecked):
    with pytest.raises(ValueError, match="causal='no' must be True or False"):
        attention_mask(SEGMENTS, SEGMENTS, causal="no")
