"""Checkpoints of a run: parameters, optimizer state and data position, as plain trees of arrays.

`Checkpointer` writes them in the background and restores the newest readable one, for the trainer;
others read them with `checkpoints.reading`. A checkpoint is a folder named after its step, which
counts only when complete (`reading.steps_in`).
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import jax
from etils import epath
from jax.experimental import multihost_utils

from convt5 import errors
from convt5.checkpoints import late_errors, named_arrays, read_back, reading, record
from convt5.checkpoints.checksums import checksums
from convt5.checkpoints.reading import EMA
from convt5.errors import checks
from convt5.runtime import atomic_files, folders, foreign_files, metric_names

if TYPE_CHECKING:
    from convt5.checkpoints.writing import Manager

BestMode = Literal["min", "max"]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class CheckpointConfig:
    """When checkpoints are written, and which are kept.

    Attributes:
        every_steps: steps between checkpoints; the last step is always saved.
        keep_last: number of newest checkpoints kept, at least 1. With two, a run can resume when
            the newest is damaged.
        keep_best: number of checkpoints with the best `best_metric` kept as well.
        best_metric: a metric of evaluations, as named in `metrics.jsonl`.
        best_mode: whether the lowest ("min") or the highest value ("max") is the best; None judges
            by the metric's name: the lowest of a loss, perplexity or error, the highest of others.
        keep_every_steps: keeps every checkpoint whose step is a multiple forever; None disables it.
    """

    every_steps: int = 1000
    keep_last: int = 2
    keep_best: int = 1
    best_metric: str = "validation/loss"
    best_mode: BestMode | None = None
    keep_every_steps: int | None = None

    def __post_init__(self):
        faults = []
        for name, least in (("every_steps", 1), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, name) < least:
                faults.append(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            faults.append(
                f"keep_every_steps={self.keep_every_steps} must be at least 1, or None for none."
            )
        if self.best_mode not in (*get_args(BestMode), None):
            faults.append(f"best_mode={self.best_mode!r} must be min or max, or None.")
        errors.raise_all(faults, where="CheckpointConfig")

    @property
    def mode(self) -> BestMode:
        """`best_mode`, or what the name of the metric tells."""
        falls = metric_names.lower_is_better(self.best_metric)
        return self.best_mode or ("min" if falls else "max")

    def ranked(self, values: Mapping[int, float]) -> list[int]:
        """Returns steps sorted by their value of `best_metric`, best first."""
        return sorted(values, key=values.__getitem__, reverse=self.mode == "max")

    def kept(self, steps: Sequence[int], values: Mapping[int, float]) -> set[int]:
        """Returns which of these checkpoints are kept, given the values of the measured ones."""
        newest = sorted(steps)[-self.keep_last :]
        best = self.ranked({step: values[step] for step in steps if step in values})
        every = self.keep_every_steps
        multiples = [step for step in steps if every and step % every == 0]
        return {*newest, *best[: self.keep_best], *multiples}

    def is_better(self, value: float, than: float) -> bool:
        """Returns whether one value of `best_metric` is better than another."""
        return value > than if self.mode == "max" else value < than

    def unmeasured(self, measured: Iterable[str]) -> str:
        """Returns the message for evaluations that lack `best_metric`."""
        names = sorted(measured)
        return (
            f"best_metric={self.best_metric!r} is not among the metrics of an evaluation; set "
            "checkpoint.CheckpointConfig.best_metric to one of these, or correct it."
            f"{errors.suggest(self.best_metric, names)} There are: {', '.join(names)}."
        )


@dataclasses.dataclass(frozen=True)
class DataPositions:
    """How much of the data has been read.

    Attributes:
        num_shards: number of data shards; 0 if no data was read.
        by_shard: the positions of some shards: those that a process saves, or reads.
    """

    num_shards: int = 0
    by_shard: Mapping[int, bytes] = dataclasses.field(default_factory=dict)


class Restored(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        step: number of updates made.
        state: the training state, sharded as requested.
        data: data positions of the shards that this process reads.
        progress: a small record of the trainer.
    """

    step: int
    state: Any
    data: DataPositions
    progress: dict[str, Any]


class _Unread(NamedTuple):
    """A written checkpoint that has not been read back yet, and its expected contents."""

    step: int
    about: Mapping[str, Any]
    data: DataPositions
    params: read_back.Shapes
    optimizer: read_back.Shapes


ShardsRead = Callable[[int], Sequence[int]]
"""Returns the shards that this process reads, given their number."""


class Checkpointer:
    """Writes and restores the checkpoints of one run.

    Args:
        directory: folder of the checkpoints; created at the first save.
        config: when to save and what to keep.
        model_config: the dataclass from which the model is built; saved, and compared on restore.
    """

    def __init__(self, directory: epath.PathLike, config: CheckpointConfig, *, model_config: Any):
        self.directory = folders.literal(directory)
        self.config = config
        self._description = record.describe_config(model_config)
        late_errors.silence()
        _put_back(self.directory)
        self._measured = _read_measured(self.directory)
        # Until one has been read back, at the start and after a failure, none is deleted.
        self._keeps_all = True
        self._unread: _Unread | None = None

    def is_due(self, step: int) -> bool:
        return step % self.config.every_steps == 0

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: DataPositions,
        progress: Mapping[str, Any] | None = None,
        best_value: float | None = None,
        evaluation: str = "",
    ) -> None:
        """Copies the state off the devices, then writes it in the background.

        The next call warns of an error of the background. An existing checkpoint of this step is
        replaced before this returns; if killed meanwhile, the run resumes from the one before.

        The first checkpoint of a process, and one after a failure, is complete and has been read
        back when this returns; until then, no older one is deleted.

        Args:
            step: number of updates made; the name of the checkpoint.
            state: has the attributes `model`, `opt_state` and `step`; may be donated on return.
            data: positions after `step` batches, of the shards that this process saves. Each shard
                must be saved by one process.
            progress: small JSON values of the trainer.
            best_value: the value of `best_metric`, which decides what is kept, or None.
            evaluation: identifies how it was measured; only values of the same are compared.

        Raises:
            TrainingError: this checkpoint could not be written or read back; in a run of several
                processes, also if that was so of the one before.
        """
        params, optimizer = _split(state)
        if best_value is not None and math.isfinite(best_value):
            self._measured[step] = self._measurement(best_value, evaluation)
        about = self._about(step, params, optimizer) | {
            "data_shards": data.num_shards,
            "progress": dict(progress or {}),
        }
        with self._naming_write_errors():
            self._forget_failed()
            self._check_room(params | optimizer)
            replaces = step in self._manager.all_steps()
            if replaces:
                self._move_aside(step)
            self._manager.write(
                step,
                params=named_arrays.nest(params),
                optimizer=named_arrays.nest(optimizer),
                about=record.seal(about),
                positions={shard: _stored(content) for shard, content in data.by_shard.items()},
            )
            self._unread = _Unread(step, about, data, *map(read_back.smallest, (params, optimizer)))
        if replaces or self._keeps_all:
            self.wait()
        with self._naming_write_errors():
            if replaces:
                _remove_aside(self.directory)
            if self._keeps_all:
                self._keeps_all = False
                self._delete_old()

    def _about(
        self, step: int, params: Mapping[str, Any], optimizer: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the record of the arrays and of their value of `best_metric`."""
        return {
            "format": record.FORMAT,
            "params": record.shapes(params),
            "optimizer": record.shapes(optimizer),
            "checksums": {"params": checksums(params), "optimizer": checksums(optimizer)},
            "model": self._description,
            "best": self._measured.get(step, self._measurement(None, "")),
        }

    def _measurement(self, value: float | None, evaluation: str) -> dict[str, Any]:
        """Returns the record of a value of `best_metric`."""
        return {
            "metric": self.config.best_metric,
            "mode": self.config.mode,
            metric_names.PERCENT: True,
            "value": value,
            "evaluation": evaluation,
        }

    def restore(self, abstract_state: Any, *, shards_read: ShardsRead = range) -> Restored | None:
        """Restores the newest readable checkpoint; returns None if none was ever written.

        An unreadable checkpoint, for instance a truncated one, is moved to `damaged/` with a
        warning, and the one before it is restored.

        Args:
            abstract_state: shapes, dtypes and shardings of the state; shardings may differ from
                those of the saved state.
            shards_read: selects the shards whose data positions are needed; by default all.

        Raises:
            UserError: it belongs to another architecture or optimizer, or none is readable.
            TrainingError: this process lacks memory or the permission to read it.
        """
        self.wait()  # A checkpoint that is still being written is listed, but incomplete.
        if jax.process_count() == 1 and not reading.steps_in(self.directory):
            return None
        return self._restore_newest(abstract_state, shards_read)

    def wait(self) -> None:
        """Waits until all checkpoints are complete on disk and the newest has been read back.

        Raises:
            TrainingError: it could not be written or read back.
        """
        if "_manager" in vars(self):
            with self._naming_write_errors():
                self._manager.wait_until_finished()
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read_back(unread)

    def close(self) -> None:
        if "_manager" in vars(self):
            with self._naming_write_errors():
                self._manager.close()

    def reached_preemption(self, step: int) -> bool:
        """Returns whether the hosts of a run have agreed to stop at this step."""
        return self._manager.reached_preemption(step)

    def wait_for_failures(self, phase: str) -> None:
        """Waits until all processes of the run have failed in this phase, and can save together.

        Raises:
            TimeoutError: some have not failed within half a minute; they may wait for this one.
        """
        self._manager.wait_for_failures(phase)

    @functools.cached_property
    def _manager(self) -> "Manager":
        # Deferred: importing orbax takes a second, for which the first step need not wait.
        from convt5.checkpoints.writing import Manager

        return Manager(self.directory, self._kept)

    def _kept(self, steps: Sequence[int]) -> set[int]:
        if self._keeps_all:
            return {*steps}
        # The best of earlier evaluations is kept too: which of them is wanted cannot be known.
        evaluations = {best.get("evaluation", "") for best in self._measured.values()} or {""}
        metric = self.config.best_metric
        by_evaluation = (_values(self._measured, metric, each) for each in evaluations)
        return {step for values in by_evaluation for step in self.config.kept(steps, values)}

    @contextlib.contextmanager
    def _naming_write_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Writers fail in many ways on full or vanished disks.
            reason = errors.lack_of_room(error) or reading.first_line(error)
            raise errors.TrainingError(
                f"a checkpoint could not be written to {self.directory}: {reason}. "
                f"{atomic_files.to_write_again(self.directory)}; then repeat the command: it goes "
                "on from the last complete checkpoint, if there is one."
            ) from error

    def _forget_failed(self) -> None:
        """Warns if the checkpoint before could not be written, as the next one may be.

        With several processes it raises the error, of which the others may not know.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # Writers fail in many ways, some of them only once.
            if self._unread is None or jax.process_count() > 1:
                raise
            step, self._unread = self._unread.step, None
            self._measured.pop(step, None)
            self._manager.reload()
            self._keeps_all = True
            reason = errors.lack_of_room(error) or reading.first_line(error)
            warnings.warn(
                f"the checkpoint of step {step} could not be written to {self.directory}: "
                f"{reason}; the next one is written instead.",
                stacklevel=4,
            )

    def _read_back(self, saved: _Unread) -> None:
        """Reads a checkpoint as a later start would; moves it aside if that fails."""
        folder = self.directory / str(saved.step)
        parts = {"params": saved.params, "optimizer": saved.optimizer}
        try:
            read_back.check(folder, saved.about, parts)
            reading.on_all_hosts(lambda: _check_positions(folder, saved.data))
        except errors.TrainingError:  # It may be whole.
            raise
        except Exception as error:  # Readers fail in many ways on damaged files.
            with self._naming_write_errors():
                self._set_aside([saved.step])
            raise errors.TrainingError(
                f"the checkpoint of step {saved.step} was written to {self.directory}, but "
                f"cannot be read back: {reading.first_line(error)}. It was moved to damaged/, "
                "and older ones are kept; check that disk, or choose another run_dir."
            ) from error

    def _delete_old(self) -> None:
        steps = self._manager.all_steps()
        for step in sorted({*steps} - self._kept(steps)):
            self._manager.delete(step)

    def _move_aside(self, step: int) -> None:
        """Keeps a checkpoint, perhaps the only one, until its replacement is complete."""
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            aside = _aside(self.directory)
            atomic_files.make_folder(aside)
            _move(self.directory / str(step), aside / str(step))
        _wait_for_all("a checkpoint is moved aside")
        self._manager.reload()

    def _check_room(self, leaves: Mapping[str, Any]) -> None:
        """Checks free space early: the writer takes minutes to fail, in the background.

        The checkpoint before must be complete, so that those that it replaced are deleted.
        """
        if atomic_files.is_remote(self.directory):
            return
        atomic_files.make_folder(self.directory)
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(f"{needed / 1e6:.3g} MB are needed, but {free / 1e6:.3g} MB are free")

    def _restore_newest(self, abstract_state: Any, shards_read: ShardsRead) -> Restored | None:
        steps = sorted(self._manager.all_steps(), reverse=True)
        failures: dict[int, str] = {}
        for step in steps:
            try:
                restored = self._restore_step(step, abstract_state, shards_read)
            except errors.UserError:
                raise
            except Exception as error:  # Readers fail in many ways on damaged files.
                failures[step] = reading.first_line(error)
            else:
                self._set_aside(failures)
                return restored
            warnings.warn(
                f"the checkpoint of step {step} in {self.directory} is damaged and is skipped: "
                f"{failures[step]}",
                stacklevel=4,
            )
        if not failures:
            return None
        step, failure = next(iter(failures.items()))
        raise errors.UserError(
            f"none of the checkpoints in {self.directory} can be read (steps "
            f"{', '.join(map(str, failures))}); the newest, {step}, fails with: {failure}. "
            "Restore a good copy, or choose another run_dir to start a new run."
        )

    def _restore_step(self, step: int, abstract_state: Any, shards_read: ShardsRead) -> Restored:
        folder = self.directory / str(step)
        return _read(folder, abstract_state, shards_read, description=self._description)

    def _set_aside(self, steps: Iterable[int]) -> None:
        steps = list(steps)
        if not steps:
            return
        if jax.process_index() == 0:
            aside = self.directory.parent / "damaged"
            atomic_files.make_folder(aside)
            for step in steps:
                target = aside / str(step)
                if target.exists():
                    target.rmtree()
                _move(self.directory / str(step), target)
        _wait_for_all("damaged checkpoints are set aside")
        self._manager.reload()


def read_state(folder: epath.Path, abstract_state: Any, *, model_config: Any) -> Restored:
    """Returns the state in a checkpoint of another run, without data positions and progress.

    Args:
        folder: one step of a run.
        abstract_state: shapes, dtypes and shardings of the state.
        model_config: the dataclass from which the model is built; differences are reported.

    Raises:
        UserError: it belongs to another architecture or optimizer.
    """
    description = record.describe_config(model_config)
    restored = _read(folder, abstract_state, lambda _: [], description=description)
    return restored._replace(data=DataPositions(), progress={})


def _read(
    folder: epath.Path, abstract_state: Any, shards_read: ShardsRead, *, description: Any
) -> Restored:
    about, data = reading.on_all_hosts(lambda: _read_small_files(folder, shards_read))
    params, optimizer = _split(abstract_state)
    where = f"the checkpoint of step {folder.name} in {folder.parent}"
    record.check_shapes(about["params"], record.shapes(params), what="parameters", where=where)
    _check_ema(about["optimizer"], optimizer, where=where)
    saved = record.saved_names(about["optimizer"], optimizer)
    optimizer = {saved[name]: leaf for name, leaf in optimizer.items()}
    record.check_shapes(
        about["optimizer"], record.shapes(optimizer), what="optimizer state", where=where
    )
    read_params, read_optimizer = (
        reading.read_arrays(folder, part, leaves, about)
        for part, leaves in (("params", params), ("optimizer", optimizer))
    )
    for line in record.differences(about["model"], description):
        warnings.warn(f"the model's settings differ from {where}: {line}", stacklevel=4)
    return Restored(
        step=reading.step_of(folder),
        state=_join(
            abstract_state,
            named_arrays.nest(read_params),
            named_arrays.nest({name: read_optimizer[saved[name]] for name in saved}),
        ),
        data=data,
        progress=about["progress"],
    )


def best_step(directory: epath.PathLike) -> int | None:
    """Returns the best of the checkpoints in a folder by the metric that the run selected.

    Only values measured like the last one count: on the same examples, in the same way. Those of
    earlier versions, which did not record that, count too, since most runs go on as they began; a
    warning tells it of the best one.

    Returns None if none of them was measured.
    """
    measured = _read_measured(epath.Path(directory))
    if not measured:
        return None
    last = measured[max(measured)]  # A resumed run may select another metric.
    config = CheckpointConfig(best_metric=last["metric"], best_mode=last["mode"])
    evaluation = last.get("evaluation", "")
    best = config.ranked(_values(measured, config.best_metric, evaluation))[0]
    if evaluation and not measured[best].get("evaluation"):
        warnings.warn(
            f"the best step, {best}, was saved by an earlier version of convt5, which did not "
            f"record on which examples it measured {config.best_metric}; if they have changed "
            f"since, compare it with step {max(measured)} by eval --step={best},{max(measured)}.",
            stacklevel=2,
        )
    return best


def _aside(directory: epath.Path) -> epath.Path:
    return directory.parent / "replaced"


def _put_back(directory: epath.Path) -> None:
    """Restores a checkpoint whose replacement was not completed before a kill."""
    aside = _aside(directory)
    if jax.process_index() == 0 and aside.exists():
        for step in set(reading.steps_in(aside)) - set(reading.steps_in(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / str(step)).rmtree(missing_ok=True)  # Its replacement, if incomplete.
            _move(aside / str(step), directory / str(step))
        aside.rmtree()
    _wait_for_all("checkpoints that were moved aside are put back")


def _move(folder: epath.Path, target: epath.Path) -> None:
    """Moves a checkpoint; whenever the process is killed, one of the two is complete."""
    if not atomic_files.is_remote(folder):
        folder.rename(target)
        return
    # A store would move file after file. What makes the folder count is copied last, removed first.
    mark = folder / reading.COMMITTED
    for file in [*(file for file in _files(folder) if file != mark), mark]:
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        file.copy(copy, overwrite=True)
    mark.unlink()
    folder.rmtree()


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for child in folder.iterdir():
        yield from _files(child) if child.is_dir() else (child,)


def _remove_aside(directory: epath.Path) -> None:
    if jax.process_index() == 0:
        _aside(directory).rmtree()


def _wait_for_all(what: str) -> None:
    """Waits for the first host, which moves folders; others must not list them earlier."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _read_small_files(
    folder: epath.Path, shards_read: ShardsRead
) -> tuple[dict[str, Any], DataPositions]:
    about = record.read(folder)
    # Before shards existed there was one file per process, which is read the same way.
    of_processes = "data_shards" not in about
    count = about["num_processes"] if of_processes else about["data_shards"]
    name = "process" if of_processes else "shard"
    read = shards_read(count) if count else []  # An imported model has no data positions.
    paths = {shard: folder / "data" / f"{name}_{shard}.json" for shard in read}
    by_shard = {shard: _read_position(path) for shard, path in paths.items()}
    return about, DataPositions(count, {s: state for s, state in by_shard.items() if state})


def _check_positions(folder: epath.Path, saved: DataPositions) -> None:
    _, positions = _read_small_files(folder, lambda _: list(saved.by_shard))
    if positions != saved:
        raise ValueError(f"{folder / 'data'} does not hold the positions that were saved")


def _stored(position: bytes) -> str:
    """Returns the content of the file with a data position."""
    digest = hashlib.sha256(position).hexdigest()
    return json.dumps({"sha256": digest, "base64": base64.b64encode(position).decode()})


def _read_position(path: epath.Path) -> bytes:
    stored = foreign_files.read_bytes(path, _MOST_POSITION_BYTES)
    record = foreign_files.parse_json(stored, kind=dict)
    content = base64.b64decode(record["base64"])
    if hashlib.sha256(content).hexdigest() != record["sha256"]:
        raise ValueError(f"{path} does not match its checksum")
    return content


_MOST_POSITION_BYTES = 2**26

T = TypeVar("T")


def _split(state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters, and the rest of a training state, by path."""
    return named_arrays.by_path(state.model), named_arrays.by_path(_beside_parameters(state))


def _join(like: Any, params: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Any:
    rest = named_arrays.fill(_beside_parameters(like), optimizer)
    return dataclasses.replace(
        like,
        model=named_arrays.fill(like.model, params),
        step=rest["step"],
        opt_state=rest["state"],
        **{name: value for name, value in rest.items() if name == EMA},
    )


def _beside_parameters(state: Any) -> dict[str, Any]:
    """Returns what is saved with the optimizer state; a disabled average is left out."""
    ema = getattr(state, EMA, None)
    return {"step": state.step, "state": state.opt_state} | ({} if ema is None else {EMA: ema})


def _check_ema(saved: Mapping[str, str], expected: Mapping[str, Any], *, where: str) -> None:
    """Raises `UserError` if only one of checkpoint and run has an average."""
    has, wants = (any(name.startswith(f"{EMA}/") for name in names) for names in (saved, expected))
    if has == wants:
        return
    with_or_not = {True: "with ema, an average of the parameters", False: "without ema"}
    remedy = "restore the setting trainer.train.ema" if has else "leave trainer.train.ema unset"
    raise errors.UserError(
        f"{where} was made {with_or_not[has]}, but the run now continues {with_or_not[wants]}; "
        f"{remedy}, or use another run_dir, with init_from to start from its parameters."
    )


def _read_measured(directory: epath.Path) -> dict[int, dict[str, Any]]:
    """Returns metric, mode, value and evaluation of each measured checkpoint."""
    by_step = {step: _best(directory / str(step)) for step in reading.steps_in(directory)}
    return {step: best for step, best in by_step.items() if best}


def _values(
    measured: Mapping[int, Mapping[str, Any]], metric: str, evaluation: str
) -> dict[int, float]:
    """Returns the values of a metric from one evaluation; earlier versions did not name theirs."""
    with_factors = {
        step: (best, metric_names.factor(best, metric))
        for step, best in measured.items()
        if not evaluation or best.get("evaluation", "") in ("", evaluation)
    }
    return {step: factor * best["value"] for step, (best, factor) in with_factors.items() if factor}


def _best(folder: epath.Path) -> dict[str, Any]:
    """Returns what a checkpoint records of its metric; empty if not measured, or damaged."""
    try:
        best = record.read(folder).get("best")
    except (OSError, ValueError, KeyError) as error:
        if refused := reading.of_process(error):
            raise refused from error  # A value that is forgotten lets the best one be deleted.
        return {}
    if isinstance(best, dict) and isinstance(best.get("value"), int | float):
        return best if isinstance(best.get("evaluation", ""), str) else {}
    return {}
