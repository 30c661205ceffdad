"""In which order rows of finite data are read, pass after pass, as a function of the seed alone."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from convt5.data.prefetching import check_settings, position, take_apart


@dataclasses.dataclass
class RowOrder:
    """An endless sequence of row numbers in which every pass has each row once.

    Attributes:
        size: rows of the data.
        shuffle: whether each pass has an order of its own, or that of the data.
        seed: of these orders.
    """

    size: int
    shuffle: bool
    seed: int
    _drawn: tuple[int, np.ndarray] = dataclasses.field(
        default=(-1, np.zeros(0, np.int64)), repr=False, compare=False
    )

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns which rows are read as the `numbers`th, counted from 0 over all passes."""
        passes, places = np.divmod(numbers, self.size)
        if not self.shuffle:
            return places
        found = np.empty_like(places)
        for number in np.unique(passes):
            chosen = passes == number
            found[chosen] = self._order(int(number))[places[chosen]]
        return found

    def _order(self, number: int) -> np.ndarray:
        if self._drawn[0] != number:
            drawn = np.random.default_rng([self.seed, number]).permutation(self.size)
            self._drawn = (number, drawn)
        return self._drawn[1]


class PassSettings(Protocol):
    """How a description of data says in which order and how often it is read."""

    @property
    def batch_size(self) -> int: ...

    @property
    def shuffle(self) -> bool | None: ...

    @property
    def seed(self) -> int: ...

    @property
    def num_epochs(self) -> int | None: ...


class RowsOfBatch(NamedTuple):
    """One host's rows of a batch.

    Attributes:
        numbers: counted from 0 over all passes.
        rows: of the data.
        is_row: False beyond the end of the last pass, where a batch is filled up.
    """

    numbers: np.ndarray
    rows: np.ndarray
    is_row: np.ndarray


class Passes:
    """Passes over finite data in batches, with a position that can be saved and set.

    Args:
        size: rows of the data.
        config: how they are read; only `shuffle=False` keeps the order of the data.
        row_slice: this host's part of each batch; hosts agree on how many batches there are.
        settings: what must be equal for a saved position to mean the same batches.
        item: what a row is, for messages.
    """

    def __init__(
        self,
        size: int,
        *,
        config: PassSettings,
        row_slice: slice,
        settings: Mapping[str, Any],
        item: str,
    ):
        self._order = RowOrder(size, config.shuffle is not False, config.seed)
        self._total = np.inf if config.num_epochs is None else config.num_epochs * size
        self._batch_size = config.batch_size
        self._row_slice = row_slice
        self._settings = json.loads(json.dumps(settings))
        self._item = item
        self._count = 0  # Batches taken.

    def batch(self) -> RowsOfBatch:
        """Returns the rows of the next batch; it is taken only by `advance`."""
        first = self._count * self._batch_size
        if first >= self._total:
            raise StopIteration
        numbers = np.arange(first, first + self._batch_size)[self._row_slice]
        return RowsOfBatch(numbers, self._order.rows(numbers), numbers < self._total)

    def advance(self) -> None:
        """Goes on to the batch after the next one."""
        self._count += 1

    def get_state(self) -> bytes:
        """Returns the position."""
        return position(json.dumps({"count": self._count, "settings": self._settings}).encode())

    def set_state(self, state: bytes) -> None:
        """Goes to a position.

        Raises:
            UserError: it belongs to other data settings.
        """
        snapshot, skip = take_apart(state)
        saved = json.loads(snapshot)
        check_settings(self._settings, saved["settings"], item=self._item)
        self._count = saved["count"] + skip
