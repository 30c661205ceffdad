"""Streams of examples of one task, or of a mixture, whose position is a few integers.

A task is read in blocks of source examples. Each block is made independently, with its own seed, so
a position consists of the block and the number of examples taken from it. This module does not
depend on TensorFlow; `task_blocks` makes the blocks.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import numpy as np

from convt5 import errors
from convt5.data.counts import Counts
from convt5.data.rows import Examples, concatenate

_DRAWN_AT_ONCE = 4096
_MOST_COUNTED = 2**62


class BlockPlace(NamedTuple):
    """The position of a block.

    Attributes:
        epoch: number of earlier passes over the data.
        number: number of earlier blocks of the epoch.
        first: number of source examples in those blocks.
    """

    epoch: int = 0
    number: int = 0
    first: int = 0

    def after(self, num_read: int) -> "BlockPlace":
        """Returns the position of the next block; it starts an epoch if `num_read` is 0."""
        if not num_read:
            return BlockPlace(self.epoch + 1)
        return BlockPlace(self.epoch, self.number + 1, self.first + num_read)


class Block(NamedTuple):
    """Examples that are made together.

    Attributes:
        examples: the examples, in reading order.
        num_read: source examples they were made from; 0 only beyond the end of the epoch.
    """

    examples: Examples
    num_read: int


NO_BLOCK = Block(concatenate([]), 0)
"""The block beyond the end of an epoch."""

MakeBlock = Callable[[BlockPlace], Block]


class TaskStream:
    """The examples of one task, epoch after epoch.

    Args:
        make: makes a block; may run in another thread.
        executor: runs it.
        num_epochs: number of epochs; None never ends.
        name: the name of the task, for messages.

    Attributes:
        counts: counts of the examples taken since the first.
    """

    def __init__(self, make: MakeBlock, executor: Executor, num_epochs: int | None, name: str = ""):
        self._make = make
        self._executor = executor
        self._num_epochs = num_epochs
        self._name = name
        self._requests: dict[BlockPlace, Future[Block]] = {}
        self._place, self._taken = BlockPlace(), 0
        self._saved_digest = 0  # Of the block at a saved position, until it is made again.
        self.counts = Counts()

    def peek(self, count: int) -> Examples:
        """Returns the next examples without consuming them: fewer than `count` only at the end."""
        parts = []
        for examples, taken in self._parts():
            parts.append(examples.part(taken, min(taken + count, examples.count)))
            count -= parts[-1].count
            if not count:
                break
        return concatenate(parts)

    def num_left(self, most: int) -> int:
        """Returns the number of remaining examples, at most `most`."""
        if self._num_epochs is None:
            return most
        remaining = 0
        for examples, taken in self._parts():
            remaining += examples.count - taken
            if remaining >= most:
                break
        return min(remaining, most)

    def advance(self, count: int) -> None:
        """Consumes examples returned by `peek`."""
        while count > 0:
            block = self._block(self._place)
            taken = max(0, min(count, block.examples.count - self._taken))
            flags = block.examples.flags[self._taken : self._taken + taken]
            self.counts = self.counts.plus(flags)
            self._taken += taken
            count -= taken
            if self._taken >= block.examples.count:
                self._go_to(self._place.after(block.num_read))
        self._look_ahead()

    def get_state(self) -> list[int]:
        """Returns the position: epoch, block, source examples before it, examples taken from it.

        Then follow the counts of the examples before it, and the digest of a block that was begun.
        """
        digest = self._saved_digest
        if self._taken and not digest:
            digest = self._block(self._place).examples.digest()
        return [*self._place, self._taken, *self.counts, digest]

    def set_state(self, state: Sequence[int]) -> None:
        """Moves to a position; raises `ValueError` for one that no stream has.

        Warns when the block of the position is made, if it has other examples than it had.
        """
        epoch, number, first, taken, *others = map(int, state)
        if not all(0 <= n < _MOST_COUNTED for n in (epoch, number, first, taken, *others)):
            raise ValueError(f"a task is at {errors.clip(list(state))}")
        self._go_to(BlockPlace(epoch, number, first))
        self._taken = taken
        # Positions of earlier runs have no counts, or no digest.
        self.counts = Counts(*others[: len(Counts._fields)])
        self._saved_digest = others[-1] if len(others) > len(Counts._fields) else 0

    def _go_to(self, place: BlockPlace) -> None:
        self._place, self._taken, self._saved_digest = place, 0, 0
        self._requests = {p: r for p, r in self._requests.items() if p >= place}

    def _is_over(self, place: BlockPlace) -> bool:
        return self._num_epochs is not None and place.epoch >= self._num_epochs

    def _parts(self) -> Iterator[tuple[Examples, int]]:
        """Yields the examples of the block and the number of those taken, then later blocks."""
        place, skipped = self._place, self._taken
        in_epoch = None  # Examples so far in the epoch; None if its start was not seen.
        while not self._is_over(place):
            block = self._block(place)
            in_epoch = 0 if not place.number else in_epoch
            if in_epoch is not None:
                in_epoch += block.examples.count
            if not block.num_read and in_epoch == 0:
                return  # An epoch without examples: so would be every next one.
            yield block.examples, skipped
            place, skipped = place.after(block.num_read), 0

    def _look_ahead(self) -> None:
        """Prefetches the next block while this one is read, except at the end of an epoch."""
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

    def _block(self, place: BlockPlace) -> Block:
        block = self._request(place).result()
        if place == self._place and self._saved_digest:
            saved, self._saved_digest = self._saved_digest, 0
            if block.examples.digest() != saved:
                warnings.warn(
                    f"task {self._name!r} gives other examples at the position of the checkpoint "
                    "than it gave before: its settings, its functions or a library have changed, "
                    "or they draw at random; training goes on with the new ones",
                    stacklevel=2,
                )
        return block

    def _request(self, place: BlockPlace) -> "Future[Block]":
        if place not in self._requests:
            self._requests[place] = self._executor.submit(self._make, place)
        return self._requests[place]


class MixedStream:
    """Examples of several tasks, drawn at given rates; each task is read in order.

    Args:
        streams: streams by the name of their task.
        rates: the rate of each, in the same order; only their proportions matter.
        seed: random seed of the draws.
    """

    def __init__(self, streams: Mapping[str, TaskStream], rates: Sequence[float], seed: int):
        self._streams = dict(streams)
        self._rates = np.asarray(rates, np.float64)
        self._draws = _Draws(seed)
        self._count = 0
        self._order = np.zeros(0, np.int64)  # Of the next examples, as far as it is known.

    def peek(self, count: int) -> Examples:
        """Returns the next examples without consuming them: fewer than `count` only at the end.

        Raises:
            UserError: one of several endless tasks has no example.
        """
        order = self._chosen(count)
        counts = np.bincount(order, minlength=len(self._streams))
        parts = [s.peek(n) for s, n in zip(self._streams.values(), counts, strict=True)]
        if len(parts) == 1:
            return parts[0]
        for name, part, num_wanted in zip(self._streams, parts, counts, strict=True):
            if part.count < num_wanted:
                raise errors.UserError(
                    f"task {name!r} of the mixture gives no example; check its data, or leave it "
                    "out of the mixture."
                )
        # Sorting by task tells where the examples of each task go.
        numbers = np.empty(len(order), np.int64)
        numbers[np.argsort(order, kind="stable")] = np.arange(len(order))
        return concatenate(parts).take(numbers)

    def advance(self, count: int) -> None:
        """Consumes examples returned by `peek`."""
        counts = np.bincount(self._chosen(count), minlength=len(self._streams))
        for stream, taken in zip(self._streams.values(), counts, strict=True):
            stream.advance(int(taken))
        self._count += count
        self._order = self._order[count:]

    def counts(self) -> dict[str, Counts]:
        """Returns the counts of each task."""
        return {name: stream.counts for name, stream in self._streams.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the position: total examples taken, and the position in each task."""
        tasks = {name: stream.get_state() for name, stream in self._streams.items()}
        return {"count": self._count, "tasks": tasks}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position."""
        self._count = int(state["count"])
        self._order = self._order[:0]
        for name, stream in self._streams.items():
            stream.set_state(state["tasks"][name])

    def _chosen(self, count: int) -> np.ndarray:
        """Returns the task index of each of the next examples."""
        if len(self._order) < count:
            self._order = self._draw(count)
        return self._order[:count]

    def _draw(self, count: int) -> np.ndarray:
        streams = list(self._streams.values())
        remaining = np.array([stream.num_left(count) for stream in streams])
        if len(streams) == 1:
            return np.zeros(remaining[0], np.int64)
        draws = self._draws.at(self._count, count)
        order = np.zeros(0, np.int64)
        while len(order) < count and remaining.any():
            drawn = _choices(draws[len(order) :], self._rates * (remaining > 0))
            # After the last example of a task, draws are among the other tasks.
            for task in np.flatnonzero(remaining):
                of_task = np.flatnonzero(drawn == task)
                if len(of_task) >= remaining[task]:
                    drawn = drawn[: of_task[remaining[task] - 1] + 1]
            remaining -= np.bincount(drawn, minlength=len(remaining))
            order = np.concatenate([order, drawn])
        return order


class _Draws:
    """Uniform numbers in [0, 1) that depend only on the seed and their index."""

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
    # Rounding may leave the last boundary below 1; a rate of 0 must never be drawn.
    return np.minimum(np.searchsorted(ends, draws, side="right"), np.flatnonzero(rates)[-1])


def seeds(*numbers: int) -> np.random.SeedSequence:
    """Returns a seed sequence derived from integers of any size and sign."""
    return np.random.SeedSequence([number % 2**128 for number in numbers])
