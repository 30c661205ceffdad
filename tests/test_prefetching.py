"""The background thread delivers in order, and its position is that of the consumer."""

import gc
import queue
import threading
import time

import pytest

from convt5 import errors
from convt5.data import prefetching
from convt5.data.prefetching import Prefetcher, position, split_position


class Counter:
    """Batches 0, 1, ... with a position; ends before `end`."""

    def __init__(self, end=1000, *, fails_at=None):
        self.next_value = 0
        self.end = end
        self.fails_at = fails_at
        self.num_snapshots = 0

    def __next__(self):
        if self.next_value == self.fails_at:
            raise errors.UserError("this batch is broken")
        if self.next_value >= self.end:
            raise StopIteration
        self.next_value += 1
        return {"value": self.next_value - 1}

    def get_state(self):
        self.num_snapshots += 1
        return position(str(self.next_value).encode())

    def set_state(self, state):
        snapshot, skip = split_position(state)
        self.next_value = int(snapshot) + skip


def value_of(batch):
    return batch["value"]


@pytest.fixture
def prefetched():
    """Makes prefetchers and closes them after the test."""
    made = []

    def make(iterator, place=value_of, depth=2):
        made.append(Prefetcher(iterator, place, depth))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def test_batches_come_placed_and_in_order(prefetched):
    assert list(prefetched(Counter(20))) == list(range(20))


def test_the_end_is_told_again_and_again(prefetched):
    batches = prefetched(Counter(1))
    next(batches)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("taken", [0, 1, 7, 300])
def test_the_position_counts_what_was_taken_and_not_what_was_made_ready(prefetched, taken):
    batches = prefetched(Counter(), depth=5)
    for _ in range(taken):
        next(batches)
    resumed = Counter()
    resumed.set_state(batches.get_state())
    assert next(resumed) == {"value": taken}


def test_a_resumed_prefetcher_gives_positions_that_resume_again(prefetched):
    first = prefetched(Counter())
    for _ in range(5):
        next(first)
    iterator = Counter()
    iterator.set_state(first.get_state())
    second = prefetched(iterator)
    assert [next(second) for _ in range(3)] == [5, 6, 7]
    third = Counter()
    third.set_state(second.get_state())
    assert next(third) == {"value": 8}


def test_a_restart_repeats_a_bounded_number_of_batches(prefetched):
    batches = prefetched(Counter())
    for _ in range(900):
        next(batches)
    _, skip = split_position(batches.get_state())
    assert skip < prefetching.MOST_SKIPPED


def test_slow_snapshots_are_taken_rarely(prefetched):
    class Slow(Counter):
        def get_state(self):
            time.sleep(0.2)
            return super().get_state()

    iterator = Slow(200)
    assert len(list(prefetched(iterator))) == 200
    assert iterator.num_snapshots <= 2


def test_errors_of_the_data_reach_the_consumer_at_their_place(prefetched):
    batches = prefetched(Counter(fails_at=2))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(errors.UserError, match="this batch is broken"):
        next(batches)


def test_errors_of_placing_reach_the_consumer(prefetched):
    def place(batch):
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        next(prefetched(Counter(), place))


def test_batches_are_made_while_the_consumer_works(prefetched):
    made = queue.Queue()

    def slowly(batch):
        time.sleep(0.05)
        made.put(batch["value"])
        return batch["value"]

    batches = prefetched(Counter(), slowly)
    next(batches)
    assert batches.wait_secs > 0.03
    # Nobody asks for these.
    assert [made.get(timeout=60) for _ in range(3)] == [0, 1, 2]


def test_no_more_than_depth_batches_wait(prefetched):
    iterator = Counter()
    batches = prefetched(iterator, depth=3)
    next(batches)
    # One taken, three waiting, one placed that finds no room.
    while iterator.next_value < 5:
        time.sleep(0.01)
    time.sleep(0.3)
    assert iterator.next_value == 5


def test_a_prefetcher_that_nobody_holds_ends_its_thread():
    batches = Prefetcher(Counter(), value_of)
    thread = batches._feed._thread
    assert thread in threading.enumerate()
    del batches
    gc.collect()
    assert not thread.is_alive()


def test_a_closed_prefetcher_gives_nothing():
    batches = Prefetcher(Counter(), value_of)
    batches.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


@pytest.mark.parametrize("state", [b"", b"something else that is long enough"])
def test_bytes_that_are_no_position_are_an_error(state):
    with pytest.raises(errors.UserError, match="this version cannot read the data position"):
        split_position(state)
