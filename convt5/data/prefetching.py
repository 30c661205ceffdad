"""Prefetches batches in a background thread, with a position that counts consumed batches.

`data` provides host batches, the trainer takes placed ones. This module does not depend on
TensorFlow.
"""

import collections
import contextlib
import queue
import struct
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from convt5 import errors
from convt5.data.protocols import BatchReader

Placed = TypeVar("Placed")

# Snapshots take at most this share of the thread's time; a restart repeats few batches.
_SNAPSHOT_SHARE = 0.01
MOST_SKIPPED = 256
"""Most batches between a snapshot and the position of a consumer."""

_POLL_SECONDS = 0.1
_STOP_SECONDS = 10.0
_POSITION = struct.Struct("<8sQ")
_MAGIC = b"convt5-1"
_PLACES = ("path", "data_dir")


def position(snapshot: bytes, skip: int = 0) -> bytes:
    """Returns the position `skip` batches after the one that `snapshot` holds."""
    return _POSITION.pack(_MAGIC, skip) + snapshot


def rows_per_host(batch_size: int, process_count: int) -> int:
    """Returns the number of rows of each batch per host.

    Raises:
        UserError: the batch size is not divisible by the number of hosts.
    """
    if batch_size % process_count:
        raise errors.UserError(
            f"batch_size={batch_size} cannot be split evenly over {process_count} hosts; set it "
            f"to a multiple of {process_count}."
        )
    return batch_size // process_count


def told_by_sources(tasks: Iterable[Any], method: str) -> dict[str, Any]:
    """Returns what a method of each seqio task's source returns, by task; others lack it."""
    methods = {task.name: getattr(task.source, method, None) for task in tasks}
    return {name: tell() for name, tell in methods.items() if tell}


def check_settings(current: Mapping[str, Any], saved: Mapping[str, Any], *, item: str) -> None:
    """Checks that a saved position means the same batches, by comparing data settings.

    Args:
        current: the current settings, as JSON values.
        saved: the settings saved with the position.
        item: what a position counts, for the message.

    Raises:
        UserError: settings differ; names each of them.
    """
    current, saved = _without_paths(current), _without_paths(saved)
    names = [name for name in current | saved if current.get(name) != saved.get(name)]
    if names:
        changes = ", ".join(f"{n}: {saved.get(n)!r} -> {current.get(n)!r}" for n in names)
        raise errors.UserError(
            f"the data of the run changed since its checkpoint ({changes}), so it cannot resume "
            f"at the same {item}; restore the data, or continue with other data in a new "
            "run_dir: trainer.train.init_from = @initialization.InitFrom(), "
            "initialization.InitFrom.path = this run, and "
            "initialization.InitFrom.continue_training = True to keep the optimizer, the step "
            "and the schedule as well as the parameters."
        )


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the paths of data, which may differ between machines, but not its identity."""
    return {
        name: _without_paths(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in _PLACES
    }


@contextlib.contextmanager
def naming_damage() -> Iterator[None]:
    """Converts the errors of a damaged position into one `UserError`."""
    try:
        yield
    except (zipfile.BadZipFile, LookupError, TypeError, ValueError, AttributeError) as error:
        raise errors.UserError(
            f"the data position in the checkpoint is damaged ({type(error).__name__}: {error}); "
            "start a new run_dir."
        ) from None


def split_position(state: bytes) -> tuple[bytes, int]:
    """Splits a position into the arguments of `position`.

    Raises:
        UserError: the bytes are not a position.
    """
    magic, skip = _POSITION.unpack_from(state) if len(state) >= _POSITION.size else (b"", 0)
    if magic != _MAGIC:
        raise errors.UserError(
            "this version cannot read the data position in the checkpoint; start a new run_dir."
        )
    return state[_POSITION.size :], skip


class Prefetcher(Generic[Placed]):
    """Places batches ahead of their use, so that training steps do not wait for them.

    Attributes:
        wait_secs: total time that `next` has waited for a batch, in seconds.
    """

    def __init__(
        self,
        iterator: BatchReader,
        place: Callable[[dict[str, Any]], Placed],
        depth: int = 2,
    ):
        """Starts the thread; up to `depth` placed batches are prefetched."""
        self.wait_secs = 0.0
        self._taken = 0
        self._end: BaseException | None = None
        self._feed = _Feed(iterator, place, depth)
        # Runs when this object is collected, and before the interpreter exits: TensorFlow must be
        # idle by then.
        self._stop = weakref.finalize(self, self._feed.stop)

    def __iter__(self) -> "Prefetcher[Placed]":
        return self

    def __next__(self) -> Placed:
        """Returns the next placed batch; raises what the iterator or `place` raised."""
        if self._end is None:
            started = time.perf_counter()
            item = self._feed.ready.get()
            self.wait_secs += max(0.0, time.perf_counter() - started)
            if not isinstance(item, _Failure):
                self._taken += 1
                self._feed.forget_before(self._taken)
                return item
            self._end = item.error
        raise self._end

    def get_state(self) -> bytes:
        """Returns the position after the consumed batches, without waiting."""
        return self._feed.position_after(self._taken)

    def close(self) -> None:
        """Stops the thread; afterwards no batch can be taken."""
        self._stop()
        self._end = RuntimeError("this Prefetcher is closed")


class _Snapshot(NamedTuple):
    """The position after the first `made` batches."""

    made: int
    state: bytes


class _Failure(NamedTuple):
    error: BaseException


class _Feed:
    """State shared by the background thread and the consumer."""

    def __init__(self, iterator: BatchReader, place: Callable[[Any], Any], depth: int):
        self.ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._iterator = iterator
        self._place = place
        self._snapshots: collections.deque[_Snapshot] = collections.deque()
        self._snapshot_is_due = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._take_snapshot(0)
        self._thread = threading.Thread(target=self._run, name="convt5-prefetch", daemon=True)
        self._thread.start()

    def position_after(self, taken: int) -> bytes:
        with self._lock:
            # Older snapshots are dropped, so the first is the latest one before `taken`.
            snapshot = self._snapshots[0]
        state, skip = split_position(snapshot.state)
        return position(state, skip + taken - snapshot.made)

    def forget_before(self, taken: int) -> None:
        """Drops snapshots that no later position needs."""
        with self._lock:
            while len(self._snapshots) > 1 and self._snapshots[1].made <= taken:
                self._snapshots.popleft()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        made = 0
        try:
            while not self._stopped.is_set():
                batch = next(self._iterator)
                made += 1
                if made % MOST_SKIPPED == 0 or time.monotonic() >= self._snapshot_is_due:
                    self._take_snapshot(made)
                self._put(self._place(batch))
        except BaseException as error:
            self._put(_Failure(error))

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self.ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def _take_snapshot(self, made: int) -> None:
        started = time.monotonic()
        snapshot = _Snapshot(made, self._iterator.get_state())
        with self._lock:
            self._snapshots.append(snapshot)
        ended = time.monotonic()
        self._snapshot_is_due = ended + (ended - started) / _SNAPSHOT_SHARE
