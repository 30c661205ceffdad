"""Batches of rows: from seqio tasks or from a cache, in an order that a few numbers describe.

`DataConfig` needs TensorFlow and seqio; `cached_data.CachedDataConfig` does not.
"""

import importlib

_LAZY = {
    "DataConfig": "convt5.data.seqio_batches",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
