"""Which host reads which part of the data, so that any number of hosts reads the same batches.

The data is cut into shards, each of which gives an equal block of rows of every batch. A host reads
those shards whose rows its devices hold. Positions are kept for each shard, so that a run goes on
exactly on more or fewer hosts. The trainer, the validation loss and checkpoints use this.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from convt5 import errors
from convt5.data.counts import Counts
from convt5.data.prefetching import position, take_apart
from convt5.data.protocols import DataConfig


class HostRows(NamedTuple):
    """The rows of each batch that the devices of one host hold.

    Attributes:
        numbers: in the batch of all hosts, ascending.
        batch_size: rows over all hosts.
    """

    numbers: np.ndarray
    batch_size: int

    def shards(self, num_shards: int) -> list[int]:
        """Returns the shards that hold these rows.

        Raises:
            UserError: shards cannot give equal blocks of a batch.
        """
        check(self.batch_size, num_shards)
        return np.unique(self.numbers // (self.batch_size // num_shards)).tolist()

    def default_num_shards(self) -> int:
        """Returns how many hosts, or groups of hosts with the same rows, share a batch."""
        return self.batch_size // len(self.numbers)


def host_rows(batch_sharding: NamedSharding, batch_size: int, process_index: int) -> HostRows:
    """Returns the rows of a host; hosts that split other axes than the batch share rows."""
    rows = _rows_by_process(batch_sharding, batch_size)[process_index]
    return HostRows(np.array(sorted(rows)), batch_size)


def own_rows(batch_sharding: NamedSharding, batch_size: int) -> HostRows:
    """Returns the rows of this host."""
    return host_rows(batch_sharding, batch_size, jax.process_index())


def shards_to_save(
    batch_sharding: NamedSharding, batch_size: int, num_shards: int, process_index: int
) -> list[int]:
    """Returns the shards whose position a host saves: each is saved by exactly one."""
    by_process = _rows_by_process(batch_sharding, batch_size)
    size = batch_size // num_shards
    return [
        shard
        for shard in range(num_shards)
        if process_index == min(p for p, rows in by_process.items() if shard * size in rows)
    ]


class ShardedBatches:
    """This host's rows of each batch, from the shards that hold them.

    Args:
        config: the batches.
        batch_sharding: where they go.
        num_shards: how many the data is cut into; None for as many as there are hosts. The batches
            depend on it, and not on the hosts.

    Attributes:
        rows: which those are.
        num_shards: into how many the data is cut.
        token_bytes: as `data.BatchIterator` has it.

    Raises:
        UserError: shards cannot give equally many rows, or the data cannot be read.
    """

    def __init__(
        self, config: DataConfig, batch_sharding: NamedSharding, *, num_shards: int | None = None
    ):
        self.rows = own_rows(batch_sharding, config.batch_size)
        self._is_finite = config.num_epochs is not None
        self.num_shards = num_shards or self.rows.default_num_shards()
        check(config.batch_size, self.num_shards)
        self._readers = {
            shard: config.build(process_index=shard, process_count=self.num_shards)
            for shard in self.rows.shards(self.num_shards)
        }
        self._saved = shards_to_save(
            batch_sharding, config.batch_size, self.num_shards, jax.process_index()
        )
        self.token_bytes = next(iter(self._readers.values())).token_bytes
        size = config.batch_size // self.num_shards
        read = np.concatenate([np.arange(size) + shard * size for shard in self._readers])
        self._wanted = np.searchsorted(read, self.rows.numbers)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns arrays whose first axis is `rows.numbers`."""
        parts = [next(reader) for reader in self._readers.values()]
        return {
            name: np.concatenate([part[name] for part in parts])[self._wanted] for name in parts[0]
        }

    def get_state(self) -> bytes:
        """Returns the positions of all shards that this host reads, in one."""
        return joined({shard: reader.get_state() for shard, reader in self._readers.items()})

    def set_state(self, state: bytes) -> None:
        """Goes to the positions from `get_state`, or from `joined` of what was saved.

        Raises:
            UserError: they belong to other data settings.
        """
        positions = split(state)
        for shard, reader in self._readers.items():
            reader.set_state(positions[shard])

    def counts(self) -> dict[str, Counts]:
        """Returns what this host adds to the counts of the examples that were read, by task.

        Finite data is read whole by each shard, so that the first host's count is that of all.
        Images have none.
        """
        found = {s: getattr(reader, "counts", dict)() for s, reader in self._readers.items()}
        if self._is_finite:
            counts = next(iter(found.values()))
            return counts if not jax.process_index() else dict.fromkeys(counts, Counts())
        total = {name: Counts() for name in next(iter(found.values()))}
        for shard in self._saved:
            for name, counts in found[shard].items():
                total[name] = Counts(*map(sum, zip(total[name], counts, strict=True)))
        return total

    def to_save(self, state: bytes) -> dict[int, bytes]:
        """Returns, from a position, that of each shard which this host saves."""
        positions = split(state)
        return {shard: positions[shard] for shard in self._saved}


def over_all_hosts(counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Returns the sums over hosts, all of which must call it with the same tasks."""
    if jax.process_count() == 1 or not counts:
        return dict(counts)
    own = np.array(list(counts.values()), np.int64)
    total = np.asarray(multihost_utils.process_allgather(own)).sum(axis=0)
    return {name: Counts(*row) for name, row in zip(counts, total.tolist(), strict=True)}


def check(batch_size: int, num_shards: int) -> None:
    """Raises `UserError` if shards cannot give equal blocks of a batch."""
    if num_shards < 1 or batch_size % num_shards:
        raise errors.UserError(
            f"data_shards={num_shards} must divide batch_size={batch_size}, as each shard gives an "
            "equal block of every batch; change one of them."
        )


def joined(positions: Mapping[int, bytes]) -> bytes:
    """Returns the positions of several shards as one; `prefetching.position` can add to it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for shard, state in positions.items():
            archive.writestr(str(shard), state)
    return position(buffer.getvalue())


def split(state: bytes) -> dict[int, bytes]:
    """Returns the positions that `joined` was given, with what was added since.

    Raises:
        UserError: the bytes are no such position.
    """
    snapshot, added = take_apart(state)
    with zipfile.ZipFile(io.BytesIO(snapshot)) as archive:
        return {int(name): _later(archive.read(name), added) for name in archive.namelist()}


def _later(state: bytes, batches: int) -> bytes:
    if not batches:
        return state
    snapshot, skip = take_apart(state)
    return position(snapshot, skip + batches)


def _rows_by_process(batch_sharding: NamedSharding, batch_size: int) -> dict[int, set[int]]:
    # Axes beyond the first do not matter here; each is long enough to be split.
    others = (batch_sharding.mesh.size,) * (len(batch_sharding.spec) - 1)
    found: dict[int, set[int]] = {}
    places = batch_sharding.devices_indices_map((batch_size, *others))
    for device, index in places.items():
        found.setdefault(device.process_index, set()).update(range(*index[0].indices(batch_size)))
    return found
