"""Assigns shards of the data to hosts, so that any number of hosts reads the same batches.

The data is cut into shards, each of which provides an equal block of rows of every batch. A host
reads the shards whose rows its devices hold. Positions are saved per shard, so a run resumes
exactly on more or fewer hosts. Used by the trainer, the validation loss and checkpoints.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from convt5 import errors
from convt5.data.counts import Counts
from convt5.data.prefetching import position, split_position
from convt5.data.protocols import DataConfig


class HostRows(NamedTuple):
    """The rows of each batch on the devices of one host.

    Attributes:
        numbers: row indices in the global batch, ascending.
        batch_size: rows over all hosts.
    """

    numbers: np.ndarray
    batch_size: int

    def shards(self, num_shards: int) -> list[int]:
        """Returns the indices of the shards that contain these rows.

        Raises:
            UserError: the shards cannot provide equal blocks of a batch.
        """
        check(self.batch_size, num_shards)
        return np.unique(self.numbers // (self.batch_size // num_shards)).tolist()

    def default_num_shards(self) -> int:
        """Returns the number of hosts that share a batch; hosts with the same rows count once."""
        return self.batch_size // len(self.numbers)


def host_rows(batch_sharding: NamedSharding, batch_size: int, process_index: int) -> HostRows:
    """Returns the rows of a host; hosts may share rows if other axes are split."""
    rows = _rows_by_process(batch_sharding, batch_size)[process_index]
    return HostRows(np.array(sorted(rows)), batch_size)


def own_rows(batch_sharding: NamedSharding, batch_size: int) -> HostRows:
    """Returns the rows of this host."""
    return host_rows(batch_sharding, batch_size, jax.process_index())


def shards_to_save(
    batch_sharding: NamedSharding, batch_size: int, num_shards: int, process_index: int
) -> list[int]:
    """Returns the shards whose position a host saves; each is saved by exactly one host."""
    by_process = _rows_by_process(batch_sharding, batch_size)
    size = batch_size // num_shards
    return [
        shard
        for shard in range(num_shards)
        if process_index == min(p for p, rows in by_process.items() if shard * size in rows)
    ]


class ShardedBatches:
    """This host's rows of each batch, read from the shards that contain them.

    Args:
        config: the description of the batches.
        batch_sharding: sharding of the global batch.
        num_shards: number of data shards; None means the number of hosts. The batches depend on it,
            not on the hosts.

    Attributes:
        rows: the rows of this host.
        num_shards: number of data shards.
        token_bytes: as in `data.BatchIterator`.
        class_names: names of the labels of images, if they have names.

    Raises:
        UserError: the shards cannot provide equal blocks, or the data cannot be read.
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
        first = next(iter(self._readers.values()))
        self.token_bytes = first.token_bytes
        self.class_names: Sequence[str] = getattr(first, "class_names", ())
        size = config.batch_size // self.num_shards
        read = np.concatenate([np.arange(size) + shard * size for shard in self._readers])
        self._wanted = np.searchsorted(read, self.rows.numbers)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns arrays whose first axis corresponds to `rows.numbers`."""
        parts = [next(reader) for reader in self._readers.values()]
        return {
            name: np.concatenate([part[name] for part in parts])[self._wanted] for name in parts[0]
        }

    def get_state(self) -> bytes:
        """Returns the joint position of all shards that this host reads."""
        return join_positions(
            {shard: reader.get_state() for shard, reader in self._readers.items()}
        )

    def set_state(self, state: bytes) -> None:
        """Moves to a position from `get_state`, or from `join_positions` of saved positions.

        Raises:
            UserError: it belongs to other data settings.
        """
        positions = split_positions(state)
        for shard, reader in self._readers.items():
            reader.set_state(positions[shard])

    def counts(self) -> dict[str, Counts]:
        """Returns this host's contribution to the counts of the examples read, by task.

        Every shard of finite data reads all of it, so only the first host counts. Images have no
        counts.
        """
        by_shard = {s: getattr(reader, "counts", dict)() for s, reader in self._readers.items()}
        if self._is_finite:
            counts = next(iter(by_shard.values()))
            return counts if not jax.process_index() else dict.fromkeys(counts, Counts())
        total = {name: Counts() for name in next(iter(by_shard.values()))}
        for shard in self._saved:
            for name, counts in by_shard[shard].items():
                total[name] = Counts(*map(sum, zip(total[name], counts, strict=True)))
        return total

    def to_save(self, state: bytes) -> dict[int, bytes]:
        """Splits a position into those of the shards that this host saves."""
        positions = split_positions(state)
        return {shard: positions[shard] for shard in self._saved}


def over_all_hosts(counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Returns the sums over hosts; all of them must call it with the same tasks."""
    if jax.process_count() == 1 or not counts:
        return dict(counts)
    local = np.array(list(counts.values()), np.int64)
    total = np.asarray(multihost_utils.process_allgather(local)).sum(axis=0)
    return {name: Counts(*row) for name, row in zip(counts, total.tolist(), strict=True)}


def check(batch_size: int, num_shards: int) -> None:
    """Raises `UserError` if shards cannot give equal blocks of a batch."""
    if num_shards < 1 or batch_size % num_shards:
        raise errors.UserError(
            f"data_shards={num_shards} must divide batch_size={batch_size}, because each shard "
            "reads an equal part of every batch; change one of them."
        )


def join_positions(positions: Mapping[int, bytes]) -> bytes:
    """Joins the positions of several shards; `prefetching.position` can add to the result."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for shard, state in positions.items():
            archive.writestr(str(shard), state)
    return position(buffer.getvalue())


def split_positions(state: bytes) -> dict[int, bytes]:
    """Splits a position made by `join_positions`, including what was added since.

    Raises:
        UserError: the bytes are not such a position.
    """
    snapshot, added = split_position(state)
    with zipfile.ZipFile(io.BytesIO(snapshot)) as archive:
        return {int(name): _skip_batches(archive.read(name), added) for name in archive.namelist()}


def _skip_batches(state: bytes, batches: int) -> bytes:
    if not batches:
        return state
    snapshot, skip = split_position(state)
    return position(snapshot, skip + batches)


def _rows_by_process(batch_sharding: NamedSharding, batch_size: int) -> dict[int, set[int]]:
    # Only the first axis matters here; the others are long enough to be split.
    other_sizes = (batch_sharding.mesh.size,) * (len(batch_sharding.spec) - 1)
    by_process: dict[int, set[int]] = {}
    places = batch_sharding.devices_indices_map((batch_size, *other_sizes))
    for device, index in places.items():
        by_process.setdefault(device.process_index, set()).update(
            range(*index[0].indices(batch_size))
        )
    return by_process
