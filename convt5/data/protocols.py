"""Interfaces of data: a description of batches, and the reader that it builds.

Such descriptions are `data.DataConfig`, `cached_data.CachedDataConfig` and
`vision.images.ImageDataConfig`.
"""

from typing import Any, Protocol

import numpy as np


class BatchReader(Protocol):
    """Reads host batches; its position can be saved and restored.

    Attributes:
        token_bytes: number of bytes of text of each token id; None if not applicable.
    """

    token_bytes: np.ndarray | None

    def __next__(self) -> dict[str, Any]:
        """Returns arrays [rows, ...] by name."""
        ...

    def get_state(self) -> bytes:
        """Returns the position, made by `prefetching.position`."""
        ...

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Raises:
            UserError: it belongs to other data settings.
        """
        ...


class DataConfig(Protocol):
    """A description of batches; `num_epochs` is None for endless batches."""

    @property
    def batch_size(self) -> int:
        """Rows over all hosts."""
        ...

    @property
    def num_epochs(self) -> int | None: ...

    def build(self, *, process_index: int, process_count: int) -> BatchReader:
        """Builds the reader of one host, or of one shard of the data."""
        ...
