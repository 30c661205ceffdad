"""Streams of examples whose position is a few numbers: of one task, block by block, and of several.

A task is read in blocks of source examples. A block is made by itself, with seeds of its own, so
that a position says which block, and how many of its examples were taken. Nothing here knows
TensorFlow: `task_blocks` makes the blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import numpy as np

from convt5 import errors
from convt5.data.counts import Counts
from convt5.data.rows import Examples, joined

_DRAWN_AT_ONCE = 4096


class BlockPlace(NamedTuple):
    """Where a block begins.

    Attributes:
        epoch: passes over the data before it.
        number: blocks of the epoch before it.
        first: source examples of the epoch before it.
    """

    epoch: int = 0
    number: int = 0
    first: int = 0

    def after(self, num_read: int) -> "BlockPlace":
        """Returns where the next block begins; one that read nothing was beyond the epoch's end."""
        if not num_read:
            return BlockPlace(self.epoch + 1)
        return BlockPlace(self.epoch, self.number + 1, self.first + num_read)


class Block(NamedTuple):
    """Examples that are made together.

    Attributes:
        examples: in the order in which they are read.
        num_read: source examples that they were made of; 0 only beyond the end of the epoch.
    """

    examples: Examples
    num_read: int


NO_BLOCK = Block(joined([]), 0)
"""What is beyond the end of an epoch."""

MakeBlock = Callable[[BlockPlace], Block]


class TaskStream:
    """Examples of one task, epoch after epoch.

    Args:
        make: makes a block; it may run in another thread.
        executor: runs it.
        num_epochs: None never ends.

    Attributes:
        counts: of the examples that were taken since the first.
    """

    def __init__(self, make: MakeBlock, executor: Executor, num_epochs: int | None):
        self._make = make
        self._executor = executor
        self._num_epochs = num_epochs
        self._requests: dict[BlockPlace, Future[Block]] = {}
        self._place, self._taken = BlockPlace(), 0
        self.counts = Counts()

    def peek(self, count: int) -> Examples:
        """Returns the next examples without taking them: fewer than `count` only at the end."""
        parts = []
        for part in self._parts():
            parts.append(part.part(0, min(count, part.count)))
            count -= parts[-1].count
            if not count:
                break
        return joined(parts)

    def num_left(self, most: int) -> int:
        """Returns how many examples are left, or `most` where there are more."""
        if self._num_epochs is None:
            return most
        left = 0
        for part in self._parts():
            left += part.count
            if left >= most:
                break
        return min(left, most)

    def advance(self, count: int) -> None:
        """Takes examples that `peek` gave."""
        while count > 0:
            block = self._request(self._place).result()
            taken = min(count, block.examples.count - self._taken)
            flags = block.examples.flags[self._taken : self._taken + taken]
            self.counts = self.counts.plus(flags)
            self._taken += taken
            count -= taken
            if self._taken == block.examples.count:
                self._go_to(self._place.after(block.num_read))
        self._look_ahead()

    def get_state(self) -> list[int]:
        """Returns the position: epoch, block, source examples before it, examples taken of it.

        The counts of what lies before it follow.
        """
        return [*self._place, self._taken, *self.counts]

    def set_state(self, state: Sequence[int]) -> None:
        """Goes to a position."""
        epoch, number, first, taken, *counts = map(int, state)
        self._go_to(BlockPlace(epoch, number, first))
        self._taken = taken
        self.counts = Counts(*counts)  # Earlier runs have none in their positions.

    def _go_to(self, place: BlockPlace) -> None:
        self._place, self._taken = place, 0
        self._requests = {p: r for p, r in self._requests.items() if p >= place}

    def _is_over(self, place: BlockPlace) -> bool:
        return self._num_epochs is not None and place.epoch >= self._num_epochs

    def _parts(self) -> Iterator[Examples]:
        """Yields what is left of the block, and the blocks after it."""
        place, skipped = self._place, self._taken
        in_epoch = None  # Examples of the epoch so far, where it is seen from its start.
        while not self._is_over(place):
            block = self._request(place).result()
            in_epoch = 0 if not place.number else in_epoch
            if in_epoch is not None:
                in_epoch += block.examples.count
            if not block.num_read and in_epoch == 0:
                return  # A pass without a single example: so would be the next.
            yield block.examples.part(skipped, block.examples.count)
            place, skipped = place.after(block.num_read), 0

    def _look_ahead(self) -> None:
        """Has the next block made while this one is read; the end of an epoch is none."""
        request = self._requests.get(self._place)
        if request is None or not request.done() or request.exception():
            return
        block = request.result()
        if 2 * self._taken < block.examples.count:
            return
        place = self._place.after(block.num_read)
        for _ in range(2):
            if self._is_over(place):
                return
            request = self._request(place)
            if not request.done() or request.exception() or request.result().num_read:
                return
            place = place.after(request.result().num_read)

    def _request(self, place: BlockPlace) -> "Future[Block]":
        if place not in self._requests:
            self._requests[place] = self._executor.submit(self._make, place)
        return self._requests[place]


class MixedStream:
    """Examples of several tasks, each drawn with its rate; each task is read to its end.

    Args:
        streams: by the name of the task.
        rates: of each, in the same order; only their proportions matter.
        seed: of the draws.
    """

    def __init__(self, streams: Mapping[str, TaskStream], rates: Sequence[float], seed: int):
        self._streams = dict(streams)
        self._rates = np.asarray(rates, np.float64)
        self._draws = _Draws(seed)
        self._count = 0

    def peek(self, count: int) -> Examples:
        """Returns the next examples without taking them: fewer than `count` only at the end.

        Raises:
            UserError: one of several tasks holds no example, and is read without end.
        """
        order = self._chosen(count)
        counts = np.bincount(order, minlength=len(self._streams))
        found = [s.peek(n) for s, n in zip(self._streams.values(), counts, strict=True)]
        if len(found) == 1:
            return found[0]
        for name, part, wanted in zip(self._streams, found, counts, strict=True):
            if part.count < wanted:
                raise errors.UserError(
                    f"task {name!r} of the mixture gives no example; check its data, or leave it "
                    "out of the mixture."
                )
        # Sorted by task, the order says where the examples of each task go.
        numbers = np.empty(len(order), np.int64)
        numbers[np.argsort(order, kind="stable")] = np.arange(len(order))
        return joined(found).take(numbers)

    def advance(self, count: int) -> None:
        """Takes examples that `peek` gave."""
        counts = np.bincount(self._chosen(count), minlength=len(self._streams))
        for stream, taken in zip(self._streams.values(), counts, strict=True):
            stream.advance(int(taken))
        self._count += count

    def counts(self) -> dict[str, Counts]:
        """Returns those of each task."""
        return {name: stream.counts for name, stream in self._streams.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the position: examples taken of all tasks, and the position in each."""
        tasks = {name: stream.get_state() for name, stream in self._streams.items()}
        return {"count": self._count, "tasks": tasks}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        self._count = int(state["count"])
        for name, stream in self._streams.items():
            stream.set_state(state["tasks"][name])

    def _chosen(self, count: int) -> np.ndarray:
        """Returns which task each of the next examples is of."""
        streams = list(self._streams.values())
        left = np.array([stream.num_left(count) for stream in streams])
        if len(streams) == 1:
            return np.zeros(left[0], np.int64)
        draws = self._draws.at(self._count, count)
        order = np.zeros(0, np.int64)
        while len(order) < count and left.any():
            drawn = _choices(draws[len(order) :], self._rates * (left > 0))
            # The draws after the last example of a task are of the others.
            for task in np.flatnonzero(left):
                own = np.flatnonzero(drawn == task)
                if len(own) >= left[task]:
                    drawn = drawn[: own[left[task] - 1] + 1]
            left -= np.bincount(drawn, minlength=len(left))
            order = np.concatenate([order, drawn])
        return order


class _Draws:
    """Uniform numbers in [0, 1) that follow from the seed and their place alone."""

    def __init__(self, seed: int):
        self._seed = seed
        self._last: tuple[int, np.ndarray] = (-1, np.zeros(0))

    def at(self, first: int, count: int) -> np.ndarray:
        parts = []
        last = first + count
        for chunk in range(first // _DRAWN_AT_ONCE, -(-last // _DRAWN_AT_ONCE)):
            if self._last[0] != chunk:
                drawn = np.random.default_rng(seeds(self._seed, chunk)).random(_DRAWN_AT_ONCE)
                self._last = (chunk, drawn)
            start = chunk * _DRAWN_AT_ONCE
            parts.append(self._last[1][max(0, first - start) : last - start])
        return np.concatenate([np.zeros(0), *parts])


def _choices(draws: np.ndarray, rates: np.ndarray) -> np.ndarray:
    ends = np.cumsum(rates) / rates.sum()
    # Rounding may leave the last end below 1; a rate of 0 is never drawn.
    return np.minimum(np.searchsorted(ends, draws, side="right"), np.flatnonzero(rates)[-1])


def seeds(*numbers: int) -> np.random.SeedSequence:
    """Returns random seeds that follow from integers of any size and sign."""
    return np.random.SeedSequence([number % 2**128 for number in numbers])
