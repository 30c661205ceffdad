"""Writes checkpoints with orbax, in the background; `checkpoint.Checkpointer` uses it.

Only the first write imports this module, because orbax takes a second to import.
"""

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import multihost
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

# Asking whether a bucket has folders takes google-cloud-storage, and a permission that training
# does not need. Steps are found by their files, with or without folders.
with contextlib.suppress(ImportError):  # The module is private to orbax.
    _gcs_utils: Any = importlib.import_module("orbax.checkpoint._src.path.gcs_utils")
    _gcs_utils.is_hierarchical_namespace_enabled = lambda path: False


_MIN_SLICE_BYTES = 2**20
"""Least bytes of a part of an array that a device writes beside its replicas: taking smaller parts
from the devices costs more than writing the array at once."""


class Manager(ocp.CheckpointManager):
    """The checkpoints in a folder.

    Args:
        directory: the folder; created if needed.
        kept: returns which of given steps are kept. (orbax's own policies forget the best ones at a
            restart.)
    """

    def __init__(self, directory: epath.Path, kept: Callable[[Sequence[int]], set[int]]):
        super().__init__(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Kept(kept),
                # Removes what a killed process left incomplete under a temporary name.
                cleanup_tmp_directories=True,
            ),
            item_handlers={
                "params": _array_handler(),
                "optimizer": _array_handler(),
                "about": ocp.JsonCheckpointHandler(),
                "data": _PositionsHandler(),
            },
        )

    def write(
        self,
        step: int,
        *,
        params: Any,
        optimizer: Any,
        about: Mapping[str, Any],
        positions: Mapping[int, str],
    ) -> None:
        """Copies arrays off the devices, and writes a checkpoint in the background.

        Args:
            step: the name of the checkpoint.
            params, optimizer: nested dicts of arrays.
            about: JSON values.
            positions: the content of the file of each data shard that this process writes.
        """
        self.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.PyTreeSave(params),
                optimizer=ocp.args.PyTreeSave(optimizer),
                about=ocp.args.JsonSave(about),
                data=_SavePositions(positions),
            ),
            force=True,
        )

    def wait_for_failures(self, phase: str) -> None:
        """See `Checkpointer.wait_for_failures`."""
        try:
            multihost.get_barrier_sync_fn()(key=phase, timeout_ms=30_000)
        except jax.errors.JaxRuntimeError as error:
            raise TimeoutError(f"other processes have not failed while {phase}") from error


def _array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns what writes the arrays of one part of a checkpoint."""
    arrays: Any = copy.copy(ocp.type_handlers.get_type_handler(jax.Array))
    # Private to orbax, whose constructor would leave out the metadata of arrays.
    arrays._min_slice_bytes_for_replica_parallel = _MIN_SLICE_BYTES
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _Kept(PreservationPolicy):
    """Keeps the checkpoints that a function of their steps selects."""

    def __init__(self, kept: Callable[[Sequence[int]], set[int]]):
        self._kept = kept

    def should_preserve(self, checkpoints, *, context):
        steps = [info.step for info in checkpoints]
        kept = self._kept(steps)
        return [step in kept for step in steps]


class _PositionsHandler(ocp.CheckpointHandler):
    """Writes one file per data shard with its position."""

    def save(self, directory: epath.Path, *args, **kwargs) -> None:
        (saving,) = [*args, *kwargs.values()]
        for shard, content in saving.by_shard.items():
            (directory / f"shard_{shard}.json").write_text(content)

    def restore(self, directory: epath.Path, *args, **kwargs) -> None:
        raise NotImplementedError("positions are read by checkpoint._read_positions")


@ocp.args.register_with_handler(_PositionsHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SavePositions(ocp.args.CheckpointArgs):
    by_shard: Mapping[int, str]
