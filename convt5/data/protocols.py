"""What every source of batches is: a description, and the reader of batches that it builds.

`data.DataConfig`, `cached_data.CachedDataConfig` and `vision.images.ImageDataConfig` are such
descriptions.
"""

from typing import Any, Protocol

import numpy as np


class BatchReader(Protocol):
    """Host batches with a position that can be saved and set.

    Attributes:
        token_bytes: bytes of text that each token id stands for; None where that has no meaning.
    """

    token_bytes: np.ndarray | None

    def __next__(self) -> dict[str, Any]:
        """Returns arrays [rows, ...] by name."""
        ...

    def get_state(self) -> bytes:
        """Returns the position, made by `prefetching.position`."""
        ...

    def set_state(self, state: bytes) -> None:
        """Goes to a position.

        Raises:
            UserError: it belongs to other data settings.
        """
        ...


class DataConfig(Protocol):
    """A description of batches; `num_epochs` is None for batches without end."""

    @property
    def batch_size(self) -> int:
        """Rows over all hosts."""
        ...

    @property
    def num_epochs(self) -> int | None: ...

    def build(self, *, process_index: int, process_count: int) -> BatchReader:
        """Returns the batches of one host, or of one shard of the data."""
        ...
