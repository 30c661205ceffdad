"""Rows hold each pair of inputs and targets, packed or not, whatever the two hold."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5.data.rows import Examples, Ragged, RowLayout, concatenate

ENCODER, DECODER = 7, 5

sequences = st.lists(st.integers(0, 9), max_size=9)
pairs = st.lists(st.tuples(sequences, sequences), max_size=12)


def ragged(rows):
    values = np.array([token for row in rows for token in row], np.int32)
    return Ragged(values, np.array([len(row) for row in rows], np.int64))


def examples_of(rows):
    flags = np.zeros((len(rows), 3), bool)
    return Examples(ragged([a for a, _ in rows]), ragged([b for _, b in rows]), flags)


def lists(sequences):
    ends = np.cumsum(sequences.lengths)
    return [part.tolist() for part in np.split(sequences.values, ends[:-1])] if len(ends) else []


def laid_out(rows, *, pack):
    examples = examples_of(rows)
    layout = RowLayout(ENCODER, DECODER, pack)
    ends = layout.row_ends(examples.inputs.lengths, examples.targets.lengths)
    return layout.batch(examples, ends, len(ends) + 1), ends


@settings(deadline=None)
@given(pairs)
def test_a_packed_row_holds_the_pairs_of_unpacked_rows(rows):
    packed, ends = laid_out(rows, pack=True)
    expected = [(a[:ENCODER], b[:DECODER]) for a, b in rows]
    found = []
    for row, in_row in enumerate(np.diff(ends, prepend=0).tolist()):
        for segment in range(1, in_row + 1):
            found.append(
                tuple(
                    packed[f"{side}_{tokens}_tokens"][row][
                        packed[f"{side}_segment_ids"][row] == segment
                    ].tolist()
                    for side, tokens in (("encoder", "input"), ("decoder", "target"))
                )
            )
    assert found == expected
    for array in packed.values():
        assert not array[-1].any()  # Rows beyond the last are empty.


@settings(deadline=None)
@given(pairs)
def test_each_packed_example_is_read_as_if_it_were_alone(rows):
    packed, ends = laid_out(rows, pack=True)
    alone, _ = laid_out(rows, pack=False)
    example = 0
    for row, in_row in enumerate(np.diff(ends, prepend=0).tolist()):
        for segment in range(1, in_row + 1):
            own = packed["decoder_segment_ids"][row] == segment
            length = int(own.sum())
            assert packed["decoder_positions"][row][own].tolist() == list(range(length))
            for name in ("decoder_input_tokens", "decoder_loss_weights"):
                np.testing.assert_array_equal(packed[name][row][own], alone[name][example][:length])
            example += 1


@settings(deadline=None)
@given(pairs)
def test_no_row_has_room_for_the_next_example(rows):
    _, ends = laid_out(rows, pack=True)
    starts = [0, *ends.tolist()]
    for first, last in itertools.pairwise(starts[:-1]):
        sides = zip(*rows[first : last + 1], strict=True)
        sizes = [
            sum(min(len(x), most) for x in side)
            for side, most in zip(sides, (ENCODER, DECODER), strict=True)
        ]
        assert sizes[0] > ENCODER or sizes[1] > DECODER or last - first == ENCODER


@settings(deadline=None)
@given(pairs, st.data())
def test_sequences_can_be_taken_cut_and_joined(rows, data):
    examples = examples_of(rows)
    first = data.draw(st.integers(0, len(rows)))
    order = data.draw(st.permutations(range(len(rows))))
    assert lists(examples.take(np.array(order, int)).inputs) == [rows[i][0] for i in order]
    assert lists(examples.targets.cut(3)) == [b[:3] for _, b in rows]
    whole = concatenate([examples.part(0, first), examples.part(first, len(rows))])
    assert lists(whole.inputs) == [a for a, _ in rows]
    assert lists(whole.targets) == [b for _, b in rows]


@pytest.mark.parametrize("pack", [False, True])
def test_no_example_makes_no_row(pack):
    batch, ends = laid_out([], pack=pack)
    assert not len(ends)
    assert all(array.shape[0] == 1 and not array.any() for array in batch.values())
