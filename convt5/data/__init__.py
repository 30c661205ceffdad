"""Batches of rows, from seqio tasks or from a cache, with an exactly resumable position.

`DataConfig` needs TensorFlow and seqio; `cached_data.CachedDataConfig` does not.
"""

import importlib
from typing import TYPE_CHECKING

from convt5.runtime import quiet_imports

_LAZY = {
    "DataConfig": "convt5.data.seqio_batches",
}


if TYPE_CHECKING:
    from convt5.data.seqio_batches import DataConfig as DataConfig
else:

    def __getattr__(name: str):
        if name in _LAZY:
            with quiet_imports.without_tensorflow_chatter():
                return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
