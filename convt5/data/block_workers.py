"""Makes blocks of examples in several processes; the blocks are those of a single process.

Used by `python -m convt5.cache --processes=N`. Each process reads the whole source, which is fast,
and makes every N-th block.
"""

import concurrent.futures
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TYPE_CHECKING

from convt5 import errors
from convt5.data.mixing import NO_BLOCK, Block, BlockPlace, MakeBlock
from convt5.runtime import cores, quiet_imports

if TYPE_CHECKING:
    from convt5.data.task_blocks import TaskBlocks

_BLOCKS_AHEAD = 2  # Prefetched by each process.

Load = Callable[[], Mapping[str, "TaskBlocks"]]
"""Returns the blocks of each task. Called in every process, so it must be picklable."""


class BlockWorkers:
    """Context with processes that make blocks.

    Args:
        num_processes: number of processes.
        load: returns the blocks of each task.

    Attributes:
        num_processes: number of processes.
    """

    def __init__(self, num_processes: int, load: Load):
        self.num_processes = num_processes
        # A forked copy of a process that runs TensorFlow can deadlock.
        context = multiprocessing.get_context("spawn")
        self._load = load
        self._pools = [
            concurrent.futures.ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(share,)
            )
            for share in _shares_of_cores(num_processes)
        ]

    def maker(self, task: str) -> MakeBlock:
        """Returns a function that makes the blocks of a task in the order of the requests.

        It raises `TrainingError` if a process has ended.
        """
        return _Requests(self._pools, self._load, task).make

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the processes have used, after what they do now."""
        return sum(pool.submit(time.process_time).result() for pool in self._pools)

    def __enter__(self) -> "BlockWorkers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()  # Otherwise the command ends only after the blocks being made.


class _Requests:
    """Requested blocks of one task, some of them prefetched."""

    def __init__(self, pools: list[concurrent.futures.ProcessPoolExecutor], load: Load, task: str):
        self._pools = pools
        self._load = load
        self._task = task
        self._made: dict[tuple[int, int], concurrent.futures.Future[Block]] = {}

    def make(self, place: BlockPlace) -> Block:
        try:
            return self._make_ahead(place)
        except BrokenProcessPool as error:
            raise errors.TrainingError(
                f"one of the {len(self._pools)} processes ended before its work was done; it may "
                "have been killed for lack of memory. Repeat the command, which resumes, perhaps "
                "with fewer --processes."
            ) from error

    def _make_ahead(self, place: BlockPlace) -> Block:
        last = place.number + _BLOCKS_AHEAD * len(self._pools)
        for number in range(place.number, last):
            if (place.epoch, number) not in self._made:
                self._made[place.epoch, number] = self._submit(place.epoch, number)
        self._made = {at: made for at, made in self._made.items() if at >= place[:2]}
        return self._made[place[:2]].result()

    def _submit(self, epoch: int, number: int) -> concurrent.futures.Future[Block]:
        pool = self._pools[number % len(self._pools)]
        # The process, which this may start, does not get Ctrl-C: it ends with the command.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return pool.submit(_make, self._load, self._task, epoch, number)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Found:
    """The blocks of a task by number; skipped ones are read but not made."""

    def __init__(self, blocks: "TaskBlocks"):
        self._blocks = blocks
        self._place = BlockPlace()

    def make(self, epoch: int, number: int) -> Block:
        if self._place.epoch != epoch or self._place.number > number:
            self._place = BlockPlace(epoch)
        while self._place.number < number:
            num_read = self._blocks.pass_over(self._place)
            if not num_read:
                return NO_BLOCK
            self._place = self._place.after(num_read)
        block = self._blocks.make(self._place)
        if block.num_read:
            self._place = self._place.after(block.num_read)
        return block


_found: dict[str, _Found] = {}


def _shares_of_cores(num_processes: int) -> list[list[int]]:
    """Returns the cores of each process; none where there are fewer than processes."""
    shares = cores.shares(num_processes)
    return shares if all(shares) else [[] for _ in shares]


def _begin(share: Sequence[int]) -> None:
    """Prepares a process, before it receives a `Load`, whose modules need TensorFlow.

    Args:
        share: cores to run on. TensorFlow has a thread for each core that it sees, and threads that
            pass examples between cores take a third more time than one on its own.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if share:
        os.sched_setaffinity(0, share)
    with quiet_imports.without_tensorflow_chatter():
        importlib.import_module("convt5.data.task_blocks")


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, however it did."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(load: Load, task: str, epoch: int, number: int) -> Block:
    if not _found:
        _found.update({name: _Found(blocks) for name, blocks in load().items()})
    return _found[task].make(epoch, number)
