"""The training batches of a run: read, prefetched to the devices, with positions to save."""

from convt5 import errors
from convt5.checkpoints.checkpoint import DataPositions
from convt5.data.counts import Counts
from convt5.data.data_shards import ShardedBatches, join_positions, over_all_hosts
from convt5.data.prefetching import Prefetcher
from convt5.data.protocols import DataConfig
from convt5.training.plan import Plan
from convt5.training.validation import HostBatch, PlacedBatch, place_batch

_PREFETCHED = 2  # Batches prepared while a step runs.


class TrainBatches:
    """Batches of a run on the devices, prepared in the background.

    Args:
        data: the description of the batches.
        plan: the plan of the run.
        num_shards: number of data shards; None means that of the checkpoint, or one that suits the
            number of hosts.
        positions: where to start, from a checkpoint; empty means from the beginning.

    Raises:
        UserError: the data cannot be read in this number of shards, or the checkpoint has another.
    """

    def __init__(
        self, data: DataConfig, plan: Plan, *, num_shards: int | None, positions: DataPositions
    ):
        if positions.num_shards and num_shards not in (None, positions.num_shards):
            raise errors.UserError(
                f"data_shards={num_shards}, but the run reads its data in "
                f"{positions.num_shards} shards; leave data_shards unset to resume, or start a "
                "new run_dir."
            )
        self._sharded = ShardedBatches(
            data, plan.batch_sharding, num_shards=positions.num_shards or num_shards
        )
        self.num_shards = self._sharded.num_shards
        self.class_names = self._sharded.class_names
        if positions.by_shard:  # Empty for an imported model: its data starts from the beginning.
            self._sharded.set_state(join_positions(positions.by_shard))
        self._counts = self._sharded.counts()
        self._batch_sharding = plan.batch_sharding
        self._ready = Prefetcher(self._sharded, self._place, depth=_PREFETCHED)

    def __next__(self) -> PlacedBatch:
        batch = next(self._ready)
        self._counts = batch.counts
        return batch

    def _place(self, batch: HostBatch) -> PlacedBatch:
        """Places a batch right after it is read, before the next one is."""
        placed = place_batch(
            batch,
            self._batch_sharding,
            rows=self._sharded.rows,
            token_bytes=self._sharded.token_bytes,
        )
        return placed._replace(counts=self._sharded.counts())

    def counts(self) -> dict[str, Counts]:
        """Returns the counts by task over the batches consumed; all hosts must call it."""
        return over_all_hosts(self._counts)

    def positions(self) -> DataPositions:
        """Returns the positions of this host's shards after the batches consumed."""
        by_shard = self._sharded.to_save(self._ready.get_state())
        return DataPositions(self.num_shards, by_shard)

    def close(self) -> None:
        self._ready.close()
