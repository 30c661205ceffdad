"""The loss on held-out batches, and placement of host batches on devices.

The trainer measures it periodically; the unigram entropy of the targets puts it in context.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from convt5 import errors
from convt5.data import data_shards
from convt5.data.counts import Counts
from convt5.data.protocols import DataConfig
from convt5.data.rows import checksums
from convt5.training.train_step import LossSums

_COUNTED_TOKENS = ("encoder_input_tokens", "decoder_target_tokens")

HostBatch = Mapping[str, np.ndarray]


class PlacedBatch(NamedTuple):
    """A global batch on the devices.

    Attributes:
        arrays: arrays by name, split over the devices of all hosts.
        num_tokens: source and target tokens without padding, over all hosts.
        counts: this host's counts of the examples read up to this batch, by task.
    """

    arrays: dict[str, jax.Array]
    num_tokens: int
    counts: Mapping[str, Counts] = {}


def place_batch(
    batch: HostBatch,
    batch_sharding: NamedSharding,
    *,
    rows: data_shards.HostRows | None = None,
    token_bytes: np.ndarray | None = None,
) -> PlacedBatch:
    """Puts this host's rows on its devices, as part of the global batch.

    Args:
        batch: arrays by name.
        batch_sharding: sharding of the global batch.
        rows: which rows of the global batch these are; None means all.
        token_bytes: number of bytes of text of each token id.
    """
    batch = dict(batch)
    if token_bytes is not None and "decoder_target_tokens" in batch:
        batch["decoder_target_bytes"] = token_bytes[batch["decoder_target_tokens"]]
    if rows is None:
        size = len(next(iter(batch.values())))
        rows = data_shards.HostRows(np.arange(size), size)
    arrays = {name: _place(np.asarray(a), batch_sharding, rows) for name, a in batch.items()}
    local = sum(np.count_nonzero(batch[name]) for name in _COUNTED_TOKENS if name in batch)
    # Hosts read equal shares, so this host's count is representative.
    return PlacedBatch(arrays, round(local * rows.batch_size / len(rows.numbers)))


def _place(
    array: np.ndarray, batch_sharding: NamedSharding, rows: data_shards.HostRows
) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        rows_wanted = np.arange(rows.batch_size)[index[0]]
        first = np.searchsorted(rows.numbers, rows_wanted[0])
        return array[(slice(first, first + len(rows_wanted)), *index[1:])]

    shape = (rows.batch_size, *array.shape[1:])
    return jax.make_array_from_callback(shape, batch_sharding, part)


class TargetCounts:
    """Counts how often each target token occurs."""

    def __init__(self):
        self._counts = np.zeros(0, np.int64)

    def add(self, batch: HostBatch) -> None:
        """Counts the targets of positive weight; ignores batches without targets."""
        if "decoder_target_tokens" not in batch:
            return
        tokens = batch["decoder_target_tokens"][batch["decoder_loss_weights"] > 0]
        longer = max(len(self._counts), int(tokens.max(initial=-1)) + 1)
        counts = np.bincount(tokens.ravel(), minlength=longer)
        counts[: len(self._counts)] += self._counts
        self._counts = counts

    def over_all_hosts(self) -> "TargetCounts":
        """Returns the sum over hosts; all of them must call it."""
        if jax.process_count() == 1:
            return self
        longest = int(multihost_utils.process_allgather(np.array(len(self._counts))).max())
        padded = np.pad(self._counts, (0, longest - len(self._counts)))
        total = TargetCounts()
        total._counts = np.asarray(multihost_utils.process_allgather(padded)).sum(axis=0)
        return total

    def entropy(self) -> float | None:
        """Returns the unigram entropy in nats per token; None if nothing was counted."""
        total = self._counts.sum()
        if not total:
            return None
        shares = self._counts[self._counts > 0] / total
        return float(-(shares * np.log(shares)).sum())


class RowSum:
    """A sum over rows that identifies them, in any order; rows of zeros add nothing."""

    def __init__(self):
        self._sum = self._num_rows = self._num_batches = 0

    def add(self, batch: HostBatch) -> None:
        """Adds this host's rows of a batch."""
        self._num_batches += 1
        rows = {name: array.reshape(len(array), -1) for name, array in batch.items()}
        sums = checksums(rows)
        empty = checksums({name: np.zeros_like(array[:1]) for name, array in rows.items()})
        self._num_rows += len(sums)
        self._sum += int(sums[sums != empty].sum(dtype=np.int64))

    def over_all_hosts(self, batch_size: int) -> str:
        """Returns the sum over the rows of all hosts; all of them must call it.

        Args:
            batch_size: rows of a batch over all hosts, which may hold some of them together.
        """
        if jax.process_count() == 1:
            return f"{self._sum:x}"
        halves = np.array([*divmod(self._sum, 2**32), self._num_rows], np.uint32)
        upper, lower, num_rows = np.asarray(multihost_utils.process_allgather(halves)).T.tolist()
        total = sum(upper) * 2**32 + sum(lower)
        return f"{total // (sum(num_rows) // (self._num_batches * batch_size)):x}"


def check_num_batches(num_batches: int | None, config: DataConfig | None) -> None:
    """Raises `UserError` for an evaluation without batches, or without an end.

    Args:
        num_batches: batches per evaluation; None means all.
        config: the batches, or None.
    """
    if num_batches is not None and num_batches < 1:
        raise errors.UserError(
            f"eval_num_batches={num_batches} must be at least 1, or None for all batches."
        )
    if num_batches is None and config is not None and config.num_epochs is None:
        raise errors.UserError(
            "eval_num_batches=None reads every batch of eval_data, but eval_data with "
            "num_epochs=None never ends; set eval_num_batches, or num_epochs=1."
        )


class Validation:
    """Measures the loss on the same held-out batches each time.

    Args:
        config: the batches.
        eval_step: the result of `train_step.make_eval_step`.
        batch_sharding: sharding of the batches.
        num_batches: number of batches per evaluation; None means all.

    Raises:
        UserError: the batches never end and `num_batches` is None, or it is below 1.
    """

    def __init__(
        self,
        config: DataConfig,
        eval_step: Callable[[nnx.Module, Any], LossSums],
        batch_sharding: NamedSharding,
        *,
        num_batches: int | None,
    ):
        check_num_batches(num_batches, config)
        self._config = config
        self._eval_step = eval_step
        self._batch_sharding = batch_sharding
        self._num_batches = math.inf if num_batches is None else num_batches
        self._batches: data_shards.ShardedBatches | None = None
        self._start = b""
        self._counts: TargetCounts | None = None
        self._identity = ""

    def prepare(self) -> None:
        """Reads one batch, so that invalid data is found before training.

        Raises:
            UserError: the data cannot be read, or holds no batch.
        """
        next(self._from_the_start())

    @property
    def class_names(self) -> Sequence[str]:
        """Names of the labels of images, if they have names; known once prepared."""
        return self._batches.class_names if self._batches else ()

    @property
    def identity(self) -> str:
        """Identifies the rows measured, in any order and on any hosts; known once measured."""
        return self._identity

    def metric_names(self, model: nnx.Module) -> list[str]:
        """Returns the names of the metrics that `measure` returns; abstract shapes suffice."""
        batch = self._place(next(self._from_the_start()))
        means = jax.eval_shape(lambda *args: self._eval_step(*args).reported(), model, batch.arrays)
        return sorted(means)

    def measure(self, model: nnx.Module) -> dict[str, float]:
        """Returns the metrics of the loss over all batches, as `LossSums.reported`.

        Raises:
            UserError: there is no batch.
        """
        counts = TargetCounts()
        rows = None if self._identity else RowSum()
        total = None
        dispatched = None
        for batch in self._from_the_start():
            counts.add(batch)
            if rows is not None:
                rows.add(batch)
            placed = self._place(batch)
            # Reads results one batch behind, so devices do not wait and batches do not pile up.
            total = _add(total, dispatched)
            dispatched = self._eval_step(model, placed.arrays)
        self._counts = counts.over_all_hosts()
        if rows is not None:
            self._identity = rows.over_all_hosts(self._config.batch_size)
        means = _add(total, dispatched).reported()
        return {name: float(value) for name, value in means.items()}

    def _place(self, batch: HostBatch) -> PlacedBatch:
        assert self._batches is not None
        return place_batch(
            batch,
            self._batch_sharding,
            rows=self._batches.rows,
            token_bytes=self._batches.token_bytes,
        )

    def counts(self) -> dict[str, Counts]:
        """Returns the counts of the last evaluation, by task; all hosts must call it."""
        return data_shards.over_all_hosts(self._batches.counts() if self._batches else {})

    def target_unigram_entropy(self) -> float | None:
        """Returns the unigram entropy of the targets last measured, in nats per token."""
        return self._counts.entropy() if self._counts else None

    def _from_the_start(self) -> Iterator[dict[str, np.ndarray]]:
        if self._batches is None:
            # Endless batches depend on the number of shards: the same number for any hosts.
            self._batches = data_shards.ShardedBatches(
                self._config,
                self._batch_sharding,
                num_shards=1 if self._config.num_epochs is None else None,
            )
            self._start = self._batches.get_state()
        else:
            self._batches.set_state(self._start)
        taken = 0
        while taken < self._num_batches:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            yield batch
            taken += 1
        if not taken:
            raise errors.UserError(
                "eval_data holds no batch; check its split, or set batch_size to fewer rows."
            )


def _add(total: Any, sums: LossSums | None) -> Any:
    """Adds in float64 on the host: a float32 sum stops counting tokens at 16 million."""
    if sums is None:
        return total
    read = jax.tree.map(np.float64, jax.device_get(sums))
    return read if total is None else jax.tree.map(np.add, total, read)
