"""The order of rows of finite data in each epoch, as a function of the seed alone."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from convt5 import errors
from convt5.data.prefetching import check_settings, naming_damage, position, split_position
from convt5.runtime import foreign_files

_MOST_BATCHES = 2**40


@dataclasses.dataclass
class RowOrder:
    """An endless sequence of row indices; each epoch contains every row once.

    Attributes:
        size: number of rows.
        shuffle: whether each epoch is shuffled anew, or in the order of the data.
        seed: random seed of the shuffling.
    """

    size: int
    shuffle: bool
    seed: int
    _drawn: tuple[int, np.ndarray] = dataclasses.field(
        default=(-1, np.zeros(0, np.int64)), repr=False, compare=False
    )

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the row at each of these indices, counted from 0 over all epochs."""
        passes, places = np.divmod(numbers, self.size)
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for number in np.unique(passes):
            chosen = passes == number
            rows[chosen] = self._order(int(number))[places[chosen]]
        return rows

    def _order(self, number: int) -> np.ndarray:
        if self._drawn[0] != number:
            drawn = np.random.default_rng([self.seed, number]).permutation(self.size)
            self._drawn = (number, drawn)
        return self._drawn[1]


class PassSettings(Protocol):
    """The settings of a data description that determine order and repetition."""

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
        numbers: indices counted from 0 over all epochs.
        rows: row indices in the data.
        is_row: False for padding rows after the end of the last epoch.
    """

    numbers: np.ndarray
    rows: np.ndarray
    is_row: np.ndarray


class Passes:
    """Epochs over finite data in batches; the position can be saved and restored.

    Args:
        size: number of rows.
        config: order and repetition; only `shuffle=False` keeps the order of the data.
        row_slice: this host's part of each batch; hosts agree on the number of batches.
        settings: the settings that must be equal for a saved position to mean the same batches.
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
        self._count = 0  # Batches consumed.

    def batch(self) -> RowsOfBatch:
        """Returns the rows of the next batch; only `advance` consumes it."""
        first = self._count * self._batch_size
        if first >= self._total:
            raise StopIteration
        numbers = np.arange(first, first + self._batch_size)[self._row_slice]
        return RowsOfBatch(numbers, self._order.rows(numbers), numbers < self._total)

    def advance(self) -> None:
        """Consumes the next batch."""
        self._count += 1

    def get_state(self) -> bytes:
        """Returns the position."""
        return position(json.dumps({"count": self._count, "settings": self._settings}).encode())

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Raises:
            UserError: it belongs to other data settings, or is damaged.
        """
        snapshot, skip = split_position(state)
        with naming_damage():
            saved = foreign_files.parse_json(snapshot, kind=dict)
            settings, count = dict(saved["settings"]), saved["count"]
            if type(count) is not int or not 0 <= count + skip < _MOST_BATCHES:
                raise ValueError(f"count={errors.clip(count)}, and {skip} more batches")
        # Positions of earlier versions do not tell the content of images.
        untold = {"content"} - settings.keys()
        now = {name: value for name, value in self._settings.items() if name not in untold}
        check_settings(now, settings, item=self._item)
        self._count = count + skip
