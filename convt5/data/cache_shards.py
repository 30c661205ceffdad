"""A cache made in shards, each of which is a whole cache of its own share of the examples.

Any process of any machine can make a shard: in a folder that all of them see, or in an object
store. `join` then describes all of them in one `cache.json`.
"""

import hashlib
import json
import os
import pathlib
import shutil
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.data import cached_data
from convt5.data.cached_data import ABOUT_FILE, SIZES_FILE, VOCABULARY_FILE, shard_name
from convt5.runtime import atomic_files, foreign_files, object_stores

_IDENTITY_FILE = "shards.json"


class ShardedCache:
    """The unfinished shards of a cache.

    Args:
        folder: local folder or URL of the cache, which must not exist.
        num_shards: number of shards.
        identity: identifies the data. Shards of the same data that exist already are kept.

    Raises:
        UserError: the cache exists, or shards of other data are at its URL.
    """

    def __init__(self, folder: str, num_shards: int, identity: str):
        self._folder, self._num_shards = folder, num_shards
        self._is_remote = atomic_files.is_remote(folder)
        self._identity = json.dumps({"identity": identity})
        if self._is_remote:
            self._root = folder.rstrip("/")
            self._begin_remote()
        else:
            self._root = os.fspath(self._begin_local(pathlib.Path(folder)))

    def shard(self, index: int) -> str:
        """Returns the folder or URL of a shard."""
        return f"{self._root}/{shard_name(index, self._num_shards)}"

    def missing(self) -> list[int]:
        """Returns the shards that are still to be made."""
        return [i for i in range(self._num_shards) if not exists(self.shard(i))]

    def join(self) -> Mapping[str, Any]:
        """Completes the cache; returns its `cache.json`."""
        shards = [cached_data.read_about(self.shard(i)) for i in range(self._num_shards)]
        about = _join(shards)
        text = cached_data.as_text(about)
        if self._is_remote:
            store = object_stores.Store(self._root)
            for name in (VOCABULARY_FILE, SIZES_FILE):
                content = store.read(f"{shard_name(0, self._num_shards)}/{name}")
                if content is not None:
                    store.write(name, content)
            store.write(ABOUT_FILE, text.encode())
            return about
        root, first = pathlib.Path(self._root), pathlib.Path(self.shard(0))
        for name in (VOCABULARY_FILE, SIZES_FILE):
            if (first / name).exists():
                with atomic_files.replacing(root / name) as partial:
                    shutil.copyfile(first / name, partial)
        atomic_files.replace_text(root / ABOUT_FILE, text)
        cached_data.publish(root, pathlib.Path(self._folder))
        (pathlib.Path(self._folder) / _IDENTITY_FILE).unlink()
        return about

    def _begin_local(self, folder: pathlib.Path) -> pathlib.Path:
        cached_data.check_absent(folder)
        unfinished = atomic_files.unfinished(folder, "unfinished")
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            weakref.finalize(self, os.close, cached_data.take(unfinished, folder))
            identity = unfinished / _IDENTITY_FILE
            if foreign_files.recorded_json(identity) != json.loads(self._identity):
                cached_data.clear(unfinished)
                atomic_files.replace_text(identity, self._identity)
        except OSError as error:
            raise cached_data.not_writable(folder, error) from None
        return unfinished

    def _begin_remote(self) -> None:
        if exists(self._root):
            raise cached_data.exists_already(self._root)
        store = object_stores.Store(self._root)
        found = store.read(_IDENTITY_FILE)
        if found is not None and found != self._identity.encode():
            raise errors.UserError(
                f"output_dir={self._folder} holds an unfinished cache of other data or settings; "
                "remove it, or name another folder."
            )
        store.write(_IDENTITY_FILE, self._identity.encode())


def exists(folder: str) -> bool:
    """Returns whether a folder or URL holds a whole cache."""
    if atomic_files.is_remote(folder):
        return object_stores.Store(folder).read(ABOUT_FILE) is not None
    return (pathlib.Path(folder) / ABOUT_FILE).exists()


def _join(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the `cache.json` of shards from theirs; only the first has splits but the first."""
    first = shards[0]
    return {
        **first,
        "version": cached_data.SHARDED_VERSION,
        "num_shards": len(shards),
        "splits": {
            name: _join_split([each["splits"][name] for each in shards if name in each["splits"]])
            for name in first["splits"]
        },
    }


def _join_split(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the description of a split from those of its shards."""
    fingerprints = "".join(part["fingerprint"] for part in parts)
    return {
        # Of the first, but for the rows of a file, which only long shards have.
        **{key: value for part in reversed(parts) for key, value in part.items()},
        "rows": sum(part["rows"] for part in parts),
        "checksums": all(part.get("checksums") for part in parts),
        "shards": [part["rows"] for part in parts],
        "fingerprint": hashlib.sha256(fingerprints.encode()).hexdigest()[:32],
        "tokens": {name: sum(p["tokens"][name] for p in parts) for name in parts[0]["tokens"]},
        "counts": {
            task: [sum(values) for values in zip(*(p["counts"][task] for p in parts), strict=True)]
            for task in parts[0]["counts"]
        },
    }
