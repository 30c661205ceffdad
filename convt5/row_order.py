"""In which order rows of finite data are read, pass after pass, as a function of the seed alone."""

import dataclasses

import numpy as np


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
