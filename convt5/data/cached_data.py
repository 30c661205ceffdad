"""Batches of rows that `python -m convt5.cache` made; reading them needs no text or TensorFlow.

Gin files bind `cached_data.CachedDataConfig` in the scopes `train/` and `eval/`. A cache is a
folder with `cache.json`, the vocabulary, and a file of integers for each split and feature.
"""

import atexit
import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

from convt5 import errors
from convt5.data import counts
from convt5.data.counts import Counts
from convt5.data.prefetching import rows_per_host
from convt5.data.row_order import Passes
from convt5.data.rows import checksums
from convt5.data.stored_rows import StoredRows, row_files
from convt5.errors import checks
from convt5.runtime import atomic_files, file_locks, folders, foreign_files, object_stores
from convt5.text import task_format, vocabulary_files

ABOUT_FILE = "cache.json"
_PROGRESS_FILE = "progress.json"
_SECONDS_BETWEEN_NOTES = 10.0
VOCABULARY_FILE = "vocabulary.model"
SIZES_FILE = "token_bytes.npy"
_VERSION, SHARDED_VERSION = 1, 2
_LONGEST_DESCRIPTION = 100_000
# The decoder's inputs are its targets again.
_COUNTED = ("encoder_input_tokens", "decoder_target_tokens")
_CHECKSUMS = "checksums"
_PER_FILE = "rows_per_file"
_FILE_BYTES = 2**27
"""Most bytes of a file of rows in an object store: it is written from memory, and whole."""
_MOST_FILES = 10**6
_FEATURE = re.compile(r"\w+", re.ASCII)
_SHORT, _LONG = _DTYPES = ("<u2", "<u4")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class CachedDataConfig:
    """The rows of a cache to read, and their order.

    Attributes:
        path: folder of the cache.
        split: "train" or "validation".
        batch_size: rows over all hosts.
        shuffle: False keeps the order of the rows; None and True shuffle anew in each epoch.
        seed: random seed of the order.
        num_epochs: passes over the rows; None never ends. The last batch of finite data is padded
            with empty rows of weight 0.
    """

    path: str
    split: str = "train"
    batch_size: int
    shuffle: bool | None = None
    seed: int = 0
    num_epochs: int | None = None

    def __post_init__(self):
        errors.raise_all(
            [
                *checks.least_faults(self, ("batch_size", "num_epochs")),
                *_seed_faults(self.seed),
            ],
            where="CachedDataConfig",
        )

    @property
    def encoder_length(self) -> int:
        """Tokens per encoder row."""
        return self._length("encoder_input_tokens")

    @property
    def decoder_length(self) -> int:
        """Tokens per decoder row."""
        return self._length("decoder_input_tokens")

    @property
    def pack(self) -> bool:
        """Whether rows hold several examples."""
        return "encoder_segment_ids" in self._about["splits"][self.split]["features"]

    @property
    def vocabulary(self) -> Any:
        """The seqio vocabulary of the rows; None if the cache has none."""
        return _vocabulary(_folder(self.path), self._about)

    def kept_text(self) -> vocabulary_files.KeptText | None:
        """Returns the text of each token id; None if the cache does not have it."""
        about = self._about["vocabulary"]
        if about is None:
            return None
        ((kind, num_sentinels),) = about.items()
        file = _folder(self.path) / VOCABULARY_FILE
        model = b""
        if kind == "sentencepiece":
            try:
                model = vocabulary_files.read_model(file)
            except (OSError, ValueError) as error:
                raise foreign_files.unreadable(file, error, "rebuild the cache.") from None
        kept = vocabulary_files.KeptVocabulary(kind, num_sentinels, model)
        formats = self.task_formats()
        return vocabulary_files.KeptText(kept, kept)._replace(
            add_eos=not any("inputs" in task.without_end for task in formats),
            encoder_length=self.encoder_length,
            decoder_length=self.decoder_length,
            holds_sentinels=any(task.makes_sentinels for task in formats),
        )

    def task_formats(self) -> tuple[task_format.TaskFormat, ...]:
        """Returns the input formats of the tasks from which the cache was made."""
        return task_format.from_json(self._about.get("tasks", []))

    def describe(self) -> str:
        """Returns a description of the rows, from counts taken when they were made."""
        split = self._about["splits"][self.split]
        lengths = f"{self.encoder_length} + {self.decoder_length} tokens"
        title = f"data {self.split} of the cache {self.path}: rows of {lengths}"
        facts = [f"{split['rows']:,} rows"]
        if tokens := split.get("tokens"):
            facts.append(f"{sum(tokens.values()):,} tokens")
            padding = [
                f"{1 - count / (split['rows'] * self._length(name)):.0%} of {what}"
                for name, what in zip(_COUNTED, ("inputs", "targets"), strict=True)
                if (count := tokens.get(name)) is not None
            ]
            facts.append(f"padding: {', '.join(padding)}")
        lines = [f"{title}{', packed' if self.pack else ''}", f"  {'; '.join(facts)}"]
        if counted := split.get("counts"):
            read = {name: Counts(*numbers) for name, numbers in counted.items()}
            lines.append(counts.describe("read when it was made", read))
        if described := split.get("described"):
            lines.append(f"made of {errors.printable(described)}")
        return "\n".join(lines)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, including sentinels."""
        return self._about["vocab_size"]

    def check_model(self, model: Any) -> None:
        """Raises `UserError` if the model reads no text, or its stem would mix packed rows."""
        checks.check_reads_text(model)
        if self.pack:
            remedy = "rebuild it with data.DataConfig.pack = False"
            checks.check_reads_packed(model, f"the cache {self.path} has", remedy)
        _token_bytes(_folder(self.path))
        self._rows()

    def build(self, *, process_index: int, process_count: int) -> "CachedBatches":
        """Returns this host's rows of each batch; the batches do not depend on the hosts.

        Raises:
            UserError: the cache or split does not exist, or a file is truncated.
        """
        rows = rows_per_host(self.batch_size, process_count)
        return CachedBatches(self, slice(process_index * rows, (process_index + 1) * rows))

    def _rows(self) -> dict[str, StoredRows]:
        """Returns the rows of each feature, after checking the sizes of local files."""
        split = self._about["splits"][self.split]
        root = _root(self.path)
        parts = list(enumerate(split.get("shards", ())))
        folders = [f"{root}/{shard_name(i, self._about['num_shards'])}" for i, _ in parts] or [root]
        counts = [rows for _, rows in parts] or [split["rows"]]
        return {
            name: StoredRows(
                [
                    file
                    for folder, rows in zip(folders, counts, strict=True)
                    for file in row_files(f"{folder}/{self.split}/{name}", rows, _per_file(split))
                ],
                feature,
                limit=_limit(name, split["features"], self._about),
                about_file=ABOUT_FILE,
            )
            for name, feature in _stored_features(split).items()
        }

    def _length(self, feature: str) -> int:
        return self._about["splits"][self.split]["features"][feature]["length"]

    @functools.cached_property
    def _about(self) -> Mapping[str, Any]:
        about = read_about(self.path)
        if self.split not in about["splits"]:
            raise errors.UserError(
                f"split={self.split!r} is none of {sorted(about['splits'])}, the splits of the "
                f"cache {self.path}."
            )
        return about


class CachedBatches:
    """Host batches with the keys of seqio's EncDecFeatureConverter, read from files.

    Attributes:
        token_bytes: number of bytes of text of each token id; None if unknown.
    """

    def __init__(self, config: CachedDataConfig, row_slice: slice):
        about = config._about
        folder = _folder(config.path)
        split = about["splits"][config.split]
        self.token_bytes = _token_bytes(folder)
        self._config = config
        self._features = config._rows()
        self._checksums = self._features.pop(_CHECKSUMS, None)
        self._passes = Passes(
            split["rows"],
            config=config,
            row_slice=row_slice,
            settings=dataclasses.asdict(config) | {"path": None, "rows": split["fingerprint"]},
            item="row",
        )

    @property
    def vocabulary(self) -> Any:
        """The seqio vocabulary of the rows; None if the cache has none."""
        return self._config.vocabulary

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns int32 arrays of [rows, length]."""
        taken = self._passes.batch()
        self._passes.advance()
        requests = [stored.request(taken.rows) for stored in self._features.values()]
        expected = self._checksums and self._checksums.request(taken.rows)
        batch = {name: rows() for name, rows in zip(self._features, requests, strict=True)}
        if expected is not None:
            self._check(taken.rows, batch, expected())
        if not taken.is_row.all():
            for values in batch.values():
                values[~taken.is_row] = 0
        return batch

    def get_state(self) -> bytes:
        """Returns the position."""
        return self._passes.get_state()

    def set_state(self, state: bytes) -> None:
        """Moves to a saved position.

        Raises:
            UserError: it belongs to other rows or settings.
        """
        self._passes.set_state(state)

    def _check(
        self, rows: np.ndarray, batch: Mapping[str, np.ndarray], expected: np.ndarray
    ) -> None:
        """Raises `UserError` if a row differs from its checksum."""
        features = self._config._about["splits"][self._config.split]["features"]
        stored = {name: values.astype(features[name]["dtype"]) for name, values in batch.items()}
        wrong = checksums(stored) != expected[:, 0].astype(_LONG)
        if wrong.any():
            raise errors.UserError(
                f"row {rows[wrong][0]} of split={self._config.split!r} of the cache "
                f"{self._config.path} differs from its checksum; the cache is damaged: rebuild it."
            )


def read_about(path: str) -> Mapping[str, Any]:
    """Returns the contents of the `cache.json` of a cache.

    Raises:
        UserError: there is none, or this version cannot read it.
    """
    file, name = _folder(path) / ABOUT_FILE, os.path.join(_root(path), ABOUT_FILE)
    if not file.exists():
        raise errors.UserError(
            f"path={path} holds no cache: there is no {ABOUT_FILE}; make one with python -m "
            "convt5.cache --gin_file=... --output_dir=DIR."
        )
    try:
        about = foreign_files.parse_json(
            foreign_files.read_bytes(file, foreign_files.MOST_JSON_BYTES)
        )
    except (OSError, ValueError) as error:
        raise foreign_files.unreadable(name, error, "rebuild the cache.") from None
    version = about.get("version") if isinstance(about, dict) else None
    if version not in (None, _VERSION, SHARDED_VERSION):
        raise errors.UserError(
            f"{name} is of version {errors.clip(version)}, and this reads up to version "
            f"{SHARDED_VERSION}; rebuild the cache."
        )
    try:
        _check_about(about)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise errors.UserError(
            f"{name} does not describe a cache ({errors.clip(error, limit=200)}); rebuild "
            "the cache."
        ) from None
    return about


class Written(NamedTuple):
    """How much of a split has been written.

    Attributes:
        num_read: rows read so far, including empty ones.
        state: the position of their reader afterwards; None before the start.
        is_complete: whether the split is complete.
    """

    num_read: int = 0
    state: bytes | None = None
    is_complete: bool = False


class Writer:
    """Writes a cache, which appears under its name only after `finish`.

    Args:
        folder: folder or URL of the cache, which must not exist. A temporary folder beside it is
            used, or one in the user's cache, from which `finish` uploads the rows.
        identity: identifies the data. If a killed process began a cache with the same identity,
            writing continues there; None starts again.

    Raises:
        UserError: the folder exists, or is not writable.
    """

    def __init__(self, folder: os.PathLike[str] | str, *, identity: str | None = None):
        self._url = os.fspath(folder) if atomic_files.is_remote(folder) else None
        if self._url:
            self._unfinished = _waiting(self._url)
        else:
            folder = self._folder = _folder(folder)
            check_absent(folder)
            self._unfinished = atomic_files.unfinished(folder, "unfinished")
        self._about: dict[str, Any] = {}
        self._token_type = _LONG
        self._lock = -1
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
            self._lock = take(self._unfinished, folder)
            self._release = weakref.finalize(self, os.close, self._lock)
            self._progress = self._begun(identity)
            if not self._progress["splits"]:
                clear(self._unfinished)
        except OSError as error:
            if self._url:
                raise errors.UserError(
                    f"rows of output_dir={folder} are made in {self._unfinished}, which cannot be "
                    f"written ({error.strerror}); set XDG_CACHE_HOME to a folder that can."
                ) from None
            raise not_writable(folder, error) from None

    def close(self) -> None:
        """Lets another writer continue what is unfinished, as the end of the process does."""
        self._release()

    def written(self, split: str) -> Written:
        """Returns how much of a split a killed process has written."""
        progress = self._progress["splits"].get(split)
        if progress is None:
            return Written()
        state = base64.b64decode(progress["state"]) if progress["state"] else None
        return Written(progress["num_read"], state, progress["is_complete"])

    def copy(
        self,
        split: str,
        batches: Any,
        *,
        most: int | None = None,
        tell: Callable[[int], Any] = lambda num_rows: None,
    ) -> int:
        """Writes the rows of a split that are missing; returns the number of tokens written.

        Args:
            split: name of the split.
            batches: a reader at the split's first row, such as `data.BatchIterator`.
            most: largest number of rows of the split; None means all.
            tell: called with the number of rows of each batch.
        """
        written = self.written(split)
        if written.state is not None:
            batches.set_state(written.state)
            most = None if most is None else most - written.num_read
        rows = _first_rows(batches, most, tell)
        reader = {"get_state": batches.get_state, "get_counts": batches.counts}
        return sum(self.write(split, rows, **reader))

    def write(
        self,
        split: str,
        batches: Iterable[Mapping[str, np.ndarray]],
        *,
        get_state: Callable[[], bytes] | None = None,
        get_counts: Callable[[], Mapping[str, Counts]] = dict,
    ) -> Iterator[int]:
        """Writes the rows of a split except empty ones; yields the number of tokens of each batch.

        Args:
            split: name of the split.
            batches: integers [rows, length], starting after what `written` returned.
            get_state: returns the position of their reader, saved periodically.
            get_counts: returns the counts by task up to that position.
        """
        folder = self._unfinished / split
        with self._naming_place():
            atomic_files.make_folder(folder)
        progress = {"rows": 0, "num_read": 0, "features": {}, "digest": "", "state": None}
        progress |= {"is_complete": False, "tokens": {}, "counts": {}}
        progress |= self._progress["splits"].get(split, {})
        files = {name: _open_to_append(folder, name, progress) for name in progress["features"]}
        noted = time.monotonic()
        try:
            for batch in batches:
                yield self._append(folder, progress, files, batch)
                if get_state is not None and time.monotonic() - noted > _SECONDS_BETWEEN_NOTES:
                    progress["state"] = base64.b64encode(get_state()).decode()
                    progress["counts"] = get_counts()
                    self._note(split, progress, files)
                    noted = time.monotonic()
            if progress["rows"]:
                progress |= {"is_complete": True, "counts": get_counts()}
                self._note(split, progress, files)
        finally:
            for file in files.values():
                file.close()
        if not progress["rows"]:
            raise errors.UserError(
                f"split={split!r} gives no row; check the data that the gin files name."
            )

    def _append(
        self,
        folder: pathlib.Path,
        progress: dict[str, Any],
        files: dict[str, Any],
        batch: Mapping[str, np.ndarray],
    ) -> int:
        """Writes a batch; returns its number of tokens."""
        counted = {name: np.asarray(batch[name]) for name in _COUNTED if name in batch}
        full = np.any([tokens.any(axis=1) for tokens in counted.values()], axis=0)
        digest = hashlib.sha256(progress["digest"].encode())
        kept = {name: np.asarray(values)[full] for name, values in batch.items()}
        for name, kept_rows in kept.items():
            if name not in files:
                length = kept_rows.shape[1]
                # Segment ids and positions are smaller than the row length.
                counts = _SHORT if length <= 2**16 else _LONG
                dtype = self._token_type if name.endswith("tokens") else counts
                progress["features"][name] = {"dtype": dtype, "length": length}
                files[name] = _open(folder / f"{name}.bin", "wb")
            kept[name] = kept_rows.astype(progress["features"][name]["dtype"])
            stored = kept[name].tobytes()
            digest.update(stored)
            files[name].write(stored)
        self._append_checksums(folder, progress, files, checksums(kept))
        progress["digest"] = digest.hexdigest()
        progress["rows"] += int(full.sum())
        progress["num_read"] += len(full)
        added = {name: int((tokens != 0).sum()) for name, tokens in counted.items()}
        for name, count in added.items():
            progress["tokens"][name] = progress["tokens"].get(name, 0) + count
        return sum(added.values())

    def _append_checksums(
        self, folder: pathlib.Path, progress: Mapping[str, Any], files: dict[str, Any], sums: Any
    ) -> None:
        """Writes the checksums of rows, unless the split was begun without them."""
        if _CHECKSUMS not in files:
            if progress["rows"]:
                return
            progress["features"][_CHECKSUMS] = {"dtype": _LONG, "length": 1}
            files[_CHECKSUMS] = _open(folder / f"{_CHECKSUMS}.bin", "wb")
        files[_CHECKSUMS].write(sums.tobytes())

    def _note(self, split: str, progress: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        """Saves how much of a split is written, so that a later process can continue."""
        for name, file in files.items():
            file.flush()
            os.fsync(file.fileno())
            with self._naming_place():
                atomic_files.check_same(file.fileno(), self._unfinished / split / f"{name}.bin")
        self._progress["splits"][split] = dict(progress)
        with self._naming_place():
            atomic_files.check_same(self._lock, self._unfinished)
            path = self._unfinished / _PROGRESS_FILE
            atomic_files.replace_text(path, json.dumps(self._progress))

    def _begun(self, identity: str | None) -> dict[str, Any]:
        """Returns what an unfinished cache of the same data has recorded."""
        new = {"identity": identity, "splits": {}}
        recorded = foreign_files.recorded_json(self._unfinished / _PROGRESS_FILE) or {}
        if identity is None or recorded.get("identity") != identity:
            return new
        try:
            _check_progress(recorded["splits"])
            _check_files(self._unfinished, recorded["splits"])
        except (LookupError, TypeError, AttributeError, ValueError):
            return new
        return recorded

    def vocabulary(
        self, vocabulary: Any, token_bytes: np.ndarray | None, *, of_inputs: Any = None
    ) -> None:
        """Records the meaning of token ids, before any row is written.

        Args:
            vocabulary: the seqio vocabulary of the targets.
            token_bytes: number of bytes of text of each of its ids, if known.
            of_inputs: the vocabulary of the inputs; None if it is the same. A cache cannot store
                two different vocabularies, and then has none.
        """
        of_inputs = vocabulary if of_inputs is None else of_inputs
        vocab_size = max(vocabulary.vocab_size, of_inputs.vocab_size)
        self._token_type = _SHORT if vocab_size <= 2**16 else _LONG
        self._about = {"vocab_size": int(vocab_size), "vocabulary": None}
        if token_bytes is not None:
            with (
                atomic_files.replacing(self._unfinished / SIZES_FILE) as partial,
                partial.open("wb") as file,
            ):
                np.save(file, token_bytes)
        if of_inputs != vocabulary:
            return
        kept = vocabulary_files.of(vocabulary)
        if kept is None:
            return
        if kept.kind == "sentencepiece":
            with atomic_files.replacing(self._unfinished / VOCABULARY_FILE) as partial:
                partial.write_bytes(kept.model)
        self._about["vocabulary"] = {kept.kind: kept.num_sentinels}

    def finish(
        self,
        *,
        made_from: Mapping[str, Any],
        tasks: Sequence[task_format.TaskFormat] = (),
        described: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Completes the cache; returns the contents of its `cache.json`.

        Args:
            made_from: the settings with which it was made.
            tasks: the input formats of its tasks.
            described: for each split, the description of the data it was made from.

        Raises:
            UserError: the cache cannot be put in its place, or another is there by now.
            TrainingError: the object store refuses or does not answer.
        """
        splits = {
            split: {
                "rows": progress["rows"],
                "features": {
                    name: feature
                    for name, feature in progress["features"].items()
                    if name != _CHECKSUMS
                },
                _CHECKSUMS: _CHECKSUMS in progress["features"],
                "fingerprint": progress["digest"][:32],
                "tokens": progress.get("tokens", {}),
                "counts": progress.get("counts", {}),
                "described": (described or {}).get(split, "")[:_LONGEST_DESCRIPTION],
            }
            for split, progress in self._progress["splits"].items()
        }
        about = {
            "version": _VERSION,
            **self._about,
            "tasks": task_format.as_json(tasks),
            "splits": splits,
            "made_from": dict(made_from),
        }
        with self._naming_place():
            atomic_files.check_same(self._lock, self._unfinished)
            _check_files(self._unfinished, self._progress["splits"])
            atomic_files.replace_text(self._unfinished / ABOUT_FILE, as_text(about))
        if self._url:
            _upload(self._unfinished, self._url, about)
            return about
        publish(self._unfinished, self._folder)
        # Only now: with it, the same command finishes a cache that could not be put there.
        (self._folder / _PROGRESS_FILE).unlink(missing_ok=True)
        return about

    @contextlib.contextmanager
    def _naming_place(self) -> Iterator[None]:
        """Turns the errors of files that are no longer in their place into a user error."""
        try:
            yield
        except (OSError, ValueError) as error:
            if errors.of_full_disk(error):
                raise
            raise errors.TrainingError(
                f"{self._unfinished} was changed while output_dir={self._folder} was being made "
                f"there ({error}); repeat the command, and let nothing else write there."
            ) from error


def check_absent(folder: os.PathLike[str] | str) -> None:
    """Raises `UserError` if a local folder is there, or a link, even one that leads nowhere."""
    if os.path.lexists(folder):
        raise exists_already(folder)


def exists_already(folder: os.PathLike[str] | str) -> errors.UserError:
    """Returns the error for the folder of a cache that already exists."""
    return errors.UserError(f"output_dir={folder} exists; remove it, or name another folder.")


def not_writable(folder: os.PathLike[str] | str, error: OSError) -> errors.UserError:
    """Returns the error for a folder in which no cache can be made."""
    return errors.UserError(
        f"output_dir={folder} cannot be written ({error.strerror}); name another folder."
    )


def clear(unfinished: pathlib.Path) -> None:
    """Empties a folder, and tells it."""
    leftovers = list(unfinished.iterdir())
    if leftovers:
        logging.warning(
            "removed what an earlier command left in %s: an unfinished cache of other data or "
            "settings, or one without a record of its rows",
            unfinished,
        )
    for leftover in leftovers:
        is_folder = atomic_files.kind(leftover) == "a folder"
        shutil.rmtree(leftover) if is_folder else leftover.unlink()


def publish(unfinished: pathlib.Path, folder: pathlib.Path) -> None:
    """Renames a complete cache to its final folder.

    Raises:
        UserError: it cannot be renamed, for instance because the folder exists by now.
    """
    try:
        unfinished.rename(folder)
    except OSError as error:
        raise errors.UserError(
            f"output_dir={folder} cannot be put there ({error.strerror}); the cache is "
            f"whole in {unfinished}: move it to where you want it."
        ) from None


def _waiting(url: str) -> pathlib.Path:
    """Returns the local folder in which the rows of a cache in an object store are made."""
    cache = folders.needed_cache(f"rows of output_dir={url} are made")
    return cache / "rows" / hashlib.sha256(_root(url).encode()).hexdigest()[:32]


def _upload(waiting: pathlib.Path, url: str, about: Mapping[str, Any]) -> None:
    """Moves a whole cache to an object store: its files of rows in parts, and `cache.json` last."""
    about = {**about, "splits": {name: _in_parts(x) for name, x in about["splits"].items()}}
    text = as_text(about).encode()
    try:
        store = object_stores.Store(url)
        if store.read(ABOUT_FILE) not in (None, text):  # Another machine's, made meanwhile.
            raise exists_already(url)
        for name in (VOCABULARY_FILE, SIZES_FILE):
            if (waiting / name).exists():
                store.write(name, (waiting / name).read_bytes())
        for name, split in about["splits"].items():
            for feature, stored in _stored_features(split).items():
                with _open(waiting / name / f"{feature}.bin", "rb") as file:
                    for part in row_files(f"{name}/{feature}", split["rows"], _per_file(split)):
                        store.write(part.path, file.read(part.rows * _row_bytes(stored)))
        store.write(ABOUT_FILE, text)
    except errors.TrainingError as error:
        raise errors.TrainingError(
            f"{error} Nothing is made again: its rows are kept in {waiting}."
        ) from None
    shutil.rmtree(waiting, ignore_errors=True)


def _in_parts(split: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the description of a split whose files fit into memory."""
    longest = max(_row_bytes(feature) for feature in _stored_features(split).values())
    per_file = max(1, _FILE_BYTES // longest)
    return split if split["rows"] <= per_file else {**split, _PER_FILE: per_file}


def _per_file(split: Mapping[str, Any]) -> int:
    return split.get(_PER_FILE, split["rows"])


def _row_bytes(feature: Mapping[str, Any]) -> int:
    return feature["length"] * np.dtype(feature["dtype"]).itemsize


def take(unfinished: pathlib.Path, folder: os.PathLike[str] | str) -> int:
    """Locks a folder that becomes `folder` against other processes, until the result is closed.

    Removes temporary files of killed processes, which would become part of the cache.

    Raises:
        UserError: another process makes it.
    """
    lock = os.open(unfinished, os.O_RDONLY | os.O_NOFOLLOW)
    if not file_locks.lock(lock):
        os.close(lock)
        raise errors.UserError(
            f"output_dir={folder} is being made by another process; wait for it to end, "
            "or name another folder."
        )
    atomic_files.remove_left_overs(unfinished)
    return lock


def _open(path: pathlib.Path, mode: str) -> IO[Any]:
    return open(path, mode, opener=atomic_files.not_followed)


def _open_to_append(folder: pathlib.Path, name: str, progress: Mapping[str, Any]) -> Any:
    """Opens a file for appending; cuts off what a killed process wrote after its last record."""
    file = _open(folder / f"{name}.bin", "r+b")
    file.truncate(progress["rows"] * _row_bytes(progress["features"][name]))
    file.seek(0, os.SEEK_END)
    return file


def _first_rows(
    batches: Iterable[Mapping[str, Any]], most: int | None, tell: Callable[[int], Any]
) -> Iterator[Mapping[str, Any]]:
    """Yields batches up to `most` rows in total, or all, and reports the size of each."""
    left = most
    for batch in batches:
        taken = {name: values[:left] for name, values in batch.items()}
        count = len(next(iter(taken.values())))
        yield taken
        tell(count)
        if left is not None:
            left -= count
            if left <= 0:
                return


def shard_name(index: int, count: int) -> str:
    """Returns the name of the folder with a shard of a cache."""
    return f"{index:05}-of-{count:05}"


def _folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the local folder of a cache; of a remote one, a copy without its rows."""
    name = os.fspath(path)
    if not atomic_files.is_remote(name):
        return pathlib.Path(os.path.expanduser(name))
    if name not in _copies:
        copy = pathlib.Path(tempfile.mkdtemp(prefix="convt5_cache"))
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        object_stores.Store(name).download([ABOUT_FILE, VOCABULARY_FILE, SIZES_FILE], copy)
        if not (copy / ABOUT_FILE).exists():
            return copy
        _copies[name] = copy
    return _copies[name]


_copies: dict[str, pathlib.Path] = {}


def _root(path: str) -> str:
    """Returns the folder or URL of a cache, to which names of files are joined by a slash."""
    # No store knows a name with two slashes for one with one.
    return path.rstrip("/") if atomic_files.is_remote(path) else os.fspath(_folder(path))


def as_text(about: Mapping[str, Any]) -> str:
    """Returns the content of `cache.json`."""
    return json.dumps(about, indent=2, default=str) + "\n"


def _stored_features(split: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the features of a split, and its checksums if it has any."""
    sums = {_CHECKSUMS: {"dtype": _LONG, "length": 1}} if split.get(_CHECKSUMS) else {}
    return {**split["features"], **sums}


def _limit(name: str, features: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    """Returns the upper bound of a feature's values: ids, segments or positions."""
    if name == _CHECKSUMS:
        return 2**32
    if name.endswith("tokens"):
        return about["vocab_size"]
    # A row has at most as many examples as encoder tokens; some may have no decoder token.
    bound = "encoder_input_tokens" if name.endswith("segment_ids") else name
    return features[bound]["length"] + 1


def _seed_faults(seed: object) -> list[str]:
    if isinstance(seed, int) and seed >= 0:
        return []
    return [f"seed={seed!r} must be an integer of at least 0."]


def _check_about(about: Any) -> None:
    """Raises errors that reading would raise if a value is missing or not as `Writer` writes it."""
    counts = [about["version"], about["vocab_size"]]
    if about["vocabulary"] is not None:
        ((kind, num_sentinels),) = about["vocabulary"].items()
        counts.append(num_sentinels)
        if kind not in ("sentencepiece", "characters"):
            raise ValueError(f"{kind!r} is no kind of vocabulary")
    task_format.from_json(about.get("tasks", []))
    for name, split in about["splits"].items():
        counts.append(split["rows"])
        if about["version"] == SHARDED_VERSION or "shards" in split:
            counts += [about["num_shards"], *split["shards"]]
            is_whole = len(split["shards"]) <= about["num_shards"]
            if not is_whole or sum(split["shards"]) != split["rows"]:
                raise ValueError(f"the shards of {name!r} do not have its rows")
        _ = split["features"]["encoder_input_tokens"], split["features"]["decoder_input_tokens"]
        if not isinstance(split["fingerprint"], str) or not split["rows"]:
            raise ValueError(f"the split {name!r} has no rows, or no fingerprint of them")
        per_file = _per_file(split)
        counts.append(per_file)
        if per_file < 1 or split["rows"] > per_file * _MOST_FILES:
            raise ValueError(f"the split {name!r} has {per_file} rows in a file")
        description = split.get("described", "")
        if not isinstance(description, str) or len(description) > _LONGEST_DESCRIPTION:
            raise ValueError(f"the split {name!r} is described by no text")
        counts += split.get("tokens", {}).values()
        for numbers in split.get("counts", {}).values():
            counts += Counts(*numbers)
        for feature_name, feature in split["features"].items():
            _check_feature(feature_name, feature)
    _check_counts(counts)


def _check_progress(splits: Any) -> None:
    """Raises errors, as `_check_about`, for progress that `Writer` did not write."""
    for progress in splits.values():
        for name, feature in progress["features"].items():
            _check_feature(name, feature)
        _check_counts([progress["rows"], progress["num_read"], *progress["tokens"].values()])
        for numbers in progress["counts"].values():
            _check_counts(Counts(*numbers))
        base64.b64decode(progress["state"] or "", validate=True)
        if not isinstance(progress["digest"], str) or type(progress["is_complete"]) is not bool:
            raise ValueError("it has no digest of its rows, or does not say whether it is complete")


def _check_files(folder: pathlib.Path, splits: Mapping[str, Any]) -> None:
    """Raises an error if a file of rows has fewer bytes than recorded, or is no file."""
    for split, progress in splits.items():
        for name, feature in progress["features"].items():
            path = folder / split / f"{name}.bin"
            kinds = [atomic_files.kind(each) for each in (path.parent, path)]
            expected = progress["rows"] * _row_bytes(feature)
            if kinds != ["a folder", "a file"] or path.stat().st_size < expected:
                raise ValueError(f"{split}/{name}.bin does not hold {expected:,} bytes")


def _check_feature(name: str, feature: Mapping[str, Any]) -> None:
    if not _FEATURE.fullmatch(name):  # It is used as a file name.
        raise ValueError(f"{name!r} is no name of a feature")
    if feature["dtype"] not in _DTYPES:
        raise ValueError(f"{feature['dtype']!r} is none of {_DTYPES}")
    _check_counts([feature["length"]])
    if not 0 < feature["length"] <= vocabulary_files.MOST_TOKENS:
        raise ValueError(f"{name!r} has {feature['length']} tokens in a row")


def _check_counts(counts: Iterable[Any]) -> None:
    for count in counts:
        if type(count) is not int or count < 0:
            raise ValueError(f"{count!r} is no count")


def _token_bytes(folder: pathlib.Path) -> np.ndarray | None:
    file = folder / SIZES_FILE
    if not file.exists():
        return None
    remedy = "rebuild the cache."
    sizes = foreign_files.read_npy(file, remedy=remedy)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (len(sizes) and sizes.min() < 0):
        raise foreign_files.unreadable(file, f"it holds {sizes.dtype} {sizes.shape}", remedy)
    return sizes


def _vocabulary(folder: pathlib.Path, about: Mapping[str, Any]) -> Any:
    if about["vocabulary"] is None:
        return None
    ((kind, num_sentinels),) = about["vocabulary"].items()
    kept = vocabulary_files.KeptVocabulary(kind, num_sentinels)
    return vocabulary_files.build_vocabulary(kept, folder / VOCABULARY_FILE)
