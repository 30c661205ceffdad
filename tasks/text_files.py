"""Local text in any common form, as documents.

Files are read once and stored as shuffled TFRecord files in a cache folder, because tf.data can
neither read .xz and JSON lines nor distribute documents to hosts and epochs in a new order. The
folder is `$XDG_CACHE_HOME/convt5/text`; it can be deleted, in part or as a whole, and is renewed
when a file changes.
"""

import codecs
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import tensorflow as tf
from absl import logging

from convt5 import errors
from convt5.runtime import atomic_files, file_locks, folders, foreign_files, local_files

Separator = Literal["auto", "line", "blank_line"]

_FORMAT = 4
_ABOUT_FILE = "about.json"
_UNFINISHED = "unfinished-"
_NUM_SHARDS = 64
_SHARD_BYTES = 2**20
_BLOCK_BYTES = 256 * 2**20
_SNIFFED_BYTES = 2**20
_FEW_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Files of text, and how they are divided into documents.

    The files are looked at once, so all epochs of a run have the same documents, even if files are
    added or changed meanwhile.

    Attributes:
        path: a path, glob or folder, or several; `**` matches local folders of any depth.
        separator: "line": each line is a document. "blank_line": blank lines separate documents.
            "auto": "blank_line" if there is a blank line inside the first file with text, else
            "line". Not used for JSON lines: .jsonl, .ndjson and .json.
        text_key: the key of the text in a line of JSON.
        holdout_every: every n-th document goes to "validation" instead of "train"; None keeps all
            in "train".
        invalid_utf8: what to do with text that is not UTF-8: "refuse" raises an error that names
            file and line, "replace" inserts U+FFFD, "skip" skips the document.
        after: other files, at which "auto" looks first.
    """

    path: local_files.Paths
    separator: Separator = "auto"
    text_key: str = "text"
    holdout_every: int | None = None
    invalid_utf8: local_files.InvalidUtf8 = "refuse"
    after: "TextFiles | None" = None

    def __post_init__(self):
        if self.separator not in ("auto", "line", "blank_line"):
            raise errors.UserError(
                f"separator={self.separator!r} must be 'auto', 'line' or 'blank_line'."
            )
        local_files.check_invalid_utf8(self.invalid_utf8)
        if not self._names:
            raise errors.UserError("text path=[] is empty; set it to a path or a glob.")

    def files(self) -> list[str]:
        """Returns the names of the files that `path` stands for, in reading order."""
        return list(self._names)

    def fingerprint(self) -> str:
        """Returns an identifier of these documents, equal for copies of the files elsewhere."""
        return self._identifier(1, [local_files.contents(name) for name in self.files()])

    def stored(self) -> dict[str, list[str]]:
        """Returns the TFRecord files of each split; writes them if they do not exist.

        Raises:
            UserError: the files have no document, contain something that is not text, or cannot be
                stored.
        """
        folder = self._folder
        atomic_files.remove_abandoned(folder.parent, f"{_UNFINISHED}*")
        try:
            if not _is_whole(folder):
                self._store(folder)
        except (OSError, tf.errors.OpError) as error:
            raise errors.UserError(
                f"the text cache {folder} cannot be written ({error}); set XDG_CACHE_HOME to a "
                "folder that can."
            ) from error
        return {
            split: sorted(str(path) for path in folder.glob(f"{split}-*"))
            for split in ("train", "validation")
        }

    def is_at_hand(self) -> bool:
        """Returns whether the documents are stored, or small."""
        sizes = (local_files.identity(name)[1] for name in self.files())
        return _is_whole(self._folder) or sum(sizes) <= _FEW_BYTES

    def check(self, num_documents: int = 20) -> None:
        """Reads the first documents of each file.

        Raises:
            UserError: they contain something that is not text, or no file has a document.
        """
        reader = self._reader()
        for name in self.files():
            for _ in itertools.islice(reader.read(name), num_documents):
                pass
        self._check_not_empty(reader.tally)

    def tally(self) -> local_files.Tally:
        """Returns the counts of reading the files, which are stored if needed."""
        self.stored()
        about = json.loads((self._folder / _ABOUT_FILE).read_text())
        return local_files.Tally(**about["tally"])

    def documents(self) -> Iterator[bytes]:
        """Yields the documents in the order of the files, as UTF-8; logs what is wrong with them.

        Whitespace at the ends of lines is kept.
        """
        return self._documents(self._reader())

    @functools.cached_property
    def _names(self) -> list[str]:
        return local_files.find(self.path)

    @functools.cached_property
    def _folder(self) -> pathlib.Path:
        # Named by the modification times of the files, so that a later start notices any change.
        about = [local_files.identity(name) for name in self.files()]
        cache = folders.needed_cache(f"text path={self.path!r} is stored")
        return cache / "text" / self._identifier(_FORMAT, about)

    @functools.cached_property
    def _divided_by(self) -> Separator:
        if self.separator != "auto":
            return self.separator
        return _guess_separator([*(self.after.files() if self.after else ()), *self.files()])

    def _reader(self) -> "_Reader":
        return _Reader(self, self._divided_by)

    def _documents(self, reader: "_Reader") -> Iterator[bytes]:
        for name in self.files():
            for document in reader.read(name):
                yield document.encode()
        if faults := reader.tally.faults():
            logging.warning("text path=%s: %s", self.path, faults)

    def _identifier(self, format_number: int, files: Sequence[object]) -> str:
        separator = self.separator
        # Where both agree, positions of runs without `after` stay valid.
        if (
            self.after
            and separator == "auto"
            and self._divided_by != _guess_separator(self.files())
        ):
            separator = self._divided_by
        about = [format_number, separator, self.text_key, self.holdout_every, *files]
        if self.invalid_utf8 != "refuse":
            about.append(self.invalid_utf8)
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    def _store(self, folder: pathlib.Path) -> None:
        logging.info("convt5 stores the text of %s once in %s", self.path, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
        held = os.open(unfinished, os.O_RDONLY)
        try:
            file_locks.lock(held)  # Until then it is too young to be removed.
            self._write(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not _is_whole(folder):  # Otherwise another process has stored the same.
                    shutil.rmtree(folder, ignore_errors=True)
                    unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            os.close(held)

    def _write(self, folder: pathlib.Path) -> None:
        writers = {split: _ShardWriter(folder / split) for split in ("train", "validation")}
        reader = self._reader()
        for count, document in enumerate(self._documents(reader)):
            held_out = self.holdout_every is not None and count % self.holdout_every == 1
            writers["validation" if held_out else "train"].add(document)
        for writer in writers.values():
            writer.close()
        tally = reader.tally
        self._check_not_empty(tally)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        about = {"tally": dataclasses.asdict(tally), "sizes": sizes}
        (folder / _ABOUT_FILE).write_text(json.dumps(about))

    def _check_not_empty(self, tally: local_files.Tally) -> None:
        if not tally.documents:
            skipped = f" ({tally.faults()})" if tally.skipped else ""
            raise errors.UserError(
                f"text path={self.path!r} holds no document: {len(self.files())} files were read "
                f"and all are empty or blank{skipped}; set it to files with text."
            )


def _is_whole(folder: pathlib.Path) -> bool:
    """Returns whether stored text has each of its files; what cleans up caches removes some."""
    about = foreign_files.find_json(folder / _ABOUT_FILE)
    if about is None:
        return False
    files = [(folder / name, size) for name, size in about["sizes"].items()]
    return all(path.exists() and path.stat().st_size == size for path, size in files)


class _ShardWriter:
    """Distributes documents to files in a fixed random order, with bounded memory."""

    def __init__(self, prefix: pathlib.Path):
        self._prefix = prefix
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._writers: list[tf.io.TFRecordWriter] = []
        self._random = np.random.default_rng(0)

    def add(self, document: bytes) -> None:
        self._waiting.append(document)
        self._waiting_bytes += len(document)
        if self._waiting_bytes > _BLOCK_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        for writer in self._writers:
            writer.close()

    def _num_shards(self) -> int:
        """Returns the number of files: enough for hosts and shuffling, few for little text."""
        enough = 1 + self._waiting_bytes // _SHARD_BYTES
        return min(enough, _NUM_SHARDS, len(self._waiting))

    def _flush(self) -> None:
        if not self._writers:
            self._writers = [
                tf.io.TFRecordWriter(f"{self._prefix}-{i:05d}.tfrecord")
                for i in range(self._num_shards())
            ]
        for i, document in enumerate(self._random.permutation(len(self._waiting))):
            self._writers[i % len(self._writers)].write(self._waiting[document])
        self._waiting, self._waiting_bytes = [], 0


def _guess_separator(names: Sequence[str]) -> Separator:
    """Guesses the separator from the start of the first plain text file that is not empty."""
    for name in names:
        if local_files.is_json_lines(name):
            continue
        with local_files.explain_errors(name), local_files.open_bytes(name) as file:
            start = file.read(_SNIFFED_BYTES).removeprefix(codecs.BOM_UTF8).strip()
        if start:
            has_blank = any(not line.strip() for line in io.BytesIO(start))
            separator = "blank_line" if has_blank else "line"
            logging.info("convt5 takes separator=%r from the start of %s", separator, name)
            return separator
    return "line"


class _Reader:
    """Reads documents from files, and counts them."""

    def __init__(self, files: TextFiles, separator: Separator):
        missing = local_files.num_missing_shards(files.files())
        self.tally = local_files.Tally(missing_shards=missing)
        self._files = files
        self._separator = separator

    def read(self, name: str) -> Iterator[str]:
        """Yields the documents of a file, none of them blank."""
        before = self.tally.documents
        with local_files.explain_errors(name), local_files.open_bytes(name) as file:
            lines = self._lines(name, file)
            if local_files.is_json_lines(name):
                documents = self._texts(name, lines)
            elif self._separator == "line":
                documents = (line for _, line in lines if line is not None)
            else:
                documents = _paragraph_groups(line for _, line in lines)
            for document in documents:
                if document.strip():
                    self.tally.documents += 1
                    self.tally.text_bytes += len(document.encode())
                    yield document
        self.tally.files += 1
        self.tally.empty_files += self.tally.documents == before

    def _lines(self, name: str, file: Iterable[bytes]) -> Iterator[tuple[int, str | None]]:
        """Yields lines with their numbers; None for a line whose document is skipped."""
        policy = self._files.invalid_utf8
        for number, line in enumerate(local_files.text_lines(file, name), start=1):
            yield number, local_files.handle_invalid(line, name, number, policy, self.tally)

    def _texts(self, name: str, lines: Iterable[tuple[int, str | None]]) -> Iterator[str]:
        for number, line in lines:
            if line is not None and line.strip():
                yield _text_of_json(line, f"text file {name!r}, line {number}", self._files)


def _paragraph_groups(lines: Iterable[str | None]) -> Iterator[str]:
    """Yields the lines between blank lines; skips groups that contain None."""
    group: list[str | None] = []
    size = 0
    for line in itertools.chain(lines, [""]):
        if line is None or line.strip():
            group.append(line)
            size += len(line or "")
            if size > foreign_files.MOST_LINE_BYTES:
                raise foreign_files.TooLargeError(
                    f"a document in it has more than {foreign_files.MOST_LINE_BYTES:,} characters "
                    "without a blank line; set separator='line', or put blank lines between "
                    "documents"
                )
            continue
        size = 0
        whole = [each for each in group if each is not None]
        if whole and len(whole) == len(group):
            yield "\n".join(whole)
        group = []


def _text_of_json(line: str, where: str, files: TextFiles) -> str:
    try:
        row = json.loads(line, object_pairs_hook=foreign_files.with_different_keys)
    except (ValueError, RecursionError) as error:
        raise errors.UserError(
            f"{where} is not JSON ({error}); files of JSON hold one object a line."
        ) from error
    text = row.get(files.text_key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = sorted(row) if isinstance(row, dict) else []
        raise errors.UserError(
            f"{where} has no string under text_key={files.text_key!r}; its keys are {keys}; set "
            "text_key to the one that holds the text."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.UserError(
            f"{where} holds half of a character ({error}); correct or remove the line."
        ) from error
    return text
