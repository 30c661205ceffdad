"""Streams of examples: each block is made from its place alone, and a position is a few numbers."""

import concurrent.futures
import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convt5 import errors
from convt5.data import block_workers
from convt5.data.counts import Counts
from convt5.data.mixing import Block, MixedStream, TaskStream
from convt5.data.rows import Examples, Ragged


class Now(concurrent.futures.Executor):
    """Makes blocks at once."""

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def flags(rows):
    """Of examples (task, epoch, n): those of even n are cut, and all of task 1 are unknown."""
    task, _, n = rows.reshape(-1, 3).T
    return np.stack([n % 2 == 0, n < 0, task == 1], axis=1)


def stream(size, *, block=3, epochs=None, task=0, empty=()):
    """Source example n becomes the example (task, epoch, n); those of `empty` become none."""

    def make(place):
        numbers = range(place.first, min(place.first + block, size))
        kept = [n for n in numbers if n not in empty]
        rows = np.array([(task, place.epoch, n) for n in kept], np.int32).reshape(-1)
        tokens = Ragged(rows, np.full(len(kept), 3))
        return Block(Examples(tokens, tokens, flags(rows)), len(numbers))

    return TaskStream(make, Now(), epochs)


def take(source, count):
    found = source.peek(count)
    source.advance(found.count)
    return [tuple(row) for row in found.inputs.values.reshape(-1, 3).tolist()]


def mixed(sizes, rates, *, epochs=None, seed=0):
    streams = {f"t{i}": stream(n, epochs=epochs, task=i) for i, n in enumerate(sizes)}
    return MixedStream(streams, rates, seed)


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(1, 9),
    block=st.integers(1, 4),
    asked=st.lists(st.integers(0, 7), max_size=6),
)
def test_a_task_gives_each_example_once_an_epoch(size, block, asked):
    source = stream(size, block=block)
    found = [row for count in asked for row in take(source, count)]
    every = [(0, epoch, n) for epoch in range(50) for n in range(size)]
    assert found == every[: sum(asked)]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    epochs=st.integers(1, 3),
    asked=st.integers(1, 7),
    seed=st.integers(-5, 2**40),
)
def test_a_mixture_read_a_number_of_times_gives_every_example_of_every_task(
    sizes, epochs, asked, seed
):
    source = mixed(sizes, [1.0, 5.0, 0.1][: len(sizes)], epochs=epochs, seed=seed)
    found = []
    while rows := take(source, asked):
        found += rows
    every = [(t, e, n) for t, size in enumerate(sizes) for e in range(epochs) for n in range(size)]
    assert sorted(found) == every


@settings(deadline=None, max_examples=30)
@given(
    epochs=st.sampled_from([None, 1, 2]),
    before=st.integers(0, 25),
    asked=st.integers(1, 6),
)
def test_a_position_gives_back_what_followed_however_much_is_asked_at_once(epochs, before, asked):
    source = mixed([4, 11], [1.0, 2.0], epochs=epochs)
    take(source, before)
    state = json.loads(json.dumps(source.get_state()))
    expected = take(source, 12)
    other = mixed([4, 11], [1.0, 2.0], epochs=epochs)
    other.set_state(state)
    found = []
    while len(found) < len(expected):
        found += take(other, min(asked, len(expected) - len(found)))
    assert found == expected


@pytest.mark.parametrize("before", [0, 3, 17])
def test_what_was_taken_is_counted_and_a_position_counts_on(before):
    source = mixed([4, 11], [1.0, 2.0], epochs=2)
    take(source, before)
    other = mixed([4, 11], [1.0, 2.0], epochs=2)
    other.set_state(json.loads(json.dumps(source.get_state())))
    assert other.counts() == source.counts()
    assert sum(each.examples for each in other.counts().values()) == before
    other.peek(5)  # Nothing is taken so.
    take(other, 50)
    # Of each epoch of eleven, those of an even number: 0 to 10.
    assert other.counts() == {"t0": Counts(8, 4, 0, 0), "t1": Counts(22, 12, 0, 22)}


def test_a_position_without_counts_counts_from_there():
    source = stream(5)
    source.set_state([0, 1, 3, 1])
    take(source, 1)
    assert source.counts == Counts(1, 1, 0, 0)


@pytest.mark.parametrize(("taken", "is_told"), [(4, True), (3, False)])
def test_a_position_in_a_block_that_is_another_by_now_is_told(taken, is_told):
    before, now = stream(5, task=1), stream(5, task=2)
    take(before, taken)
    position = before.get_state()
    now.set_state(position)
    assert now.get_state() == position
    with pytest.warns(UserWarning, match="other examples") if is_told else contextlib.nullcontext():
        take(now, 1)
    take(now, 1)  # Told once.


@pytest.mark.slow
def test_tasks_are_drawn_by_their_rates():
    source = mixed([7, 7, 7], [1.0, 3.0, 0.0])
    tasks = np.array(take(source, 9000))[:, 0]
    counts = np.bincount(tasks, minlength=3) / len(tasks)
    np.testing.assert_allclose(counts, [0.25, 0.75, 0.0], atol=0.02)


def test_blocks_and_epochs_without_examples_are_passed_over_or_end_the_data():
    assert take(stream(5, block=1, empty=(0, 2, 3)), 3) == [(0, 0, 1), (0, 0, 4), (0, 1, 1)]
    for epochs in (None, 3):
        assert take(stream(2, empty=(0, 1), epochs=epochs), 4) == []
    with pytest.raises(errors.UserError, match="'t1' of the mixture gives no example"):
        mixed([3, 0], [1.0, 1.0]).peek(20)


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_blocks_that_processes_make_are_those_of_one(monkeypatch, num_processes):
    class Blocks:
        """Of 1, 2 and 3 of ten examples in turn."""

        def __init__(self):
            self.num_made = 0

        def pass_over(self, place):
            return min(1 + place.number % 3, 10 - place.first)

        def make(self, place):
            self.num_made += 1
            numbers = range(place.first, place.first + self.pass_over(place))
            rows = np.array([(0, place.epoch, n) for n in numbers], np.int32).reshape(-1)
            tokens = Ragged(rows, np.full(len(numbers), 3))
            return Block(Examples(tokens, tokens, flags(rows)), len(numbers))

    own = [block_workers._Found(Blocks()) for _ in range(num_processes)]

    class Pool(Now):
        def __init__(self, blocks):
            self.blocks = blocks

        def submit(self, fn, /, load, task, epoch, number):
            return super().submit(self.blocks.make, epoch, number)

    requests = block_workers._Requests([Pool(blocks) for blocks in own], dict, "t")
    source = TaskStream(requests.make, Now(), 2)
    expected = [(0, epoch, n) for epoch in range(2) for n in range(10)]
    assert take(source, 30) == expected
    assert sum(blocks._blocks.num_made for blocks in own) < 20


def test_the_next_block_is_made_while_one_is_read():
    source = stream(9)
    made = []
    make = source._make
    source._make = lambda place: made.append(place.number) or make(place)
    take(source, 1)
    assert made == [0]
    take(source, 1)
    assert made == [0, 1]
