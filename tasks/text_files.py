"""Local text in any common form, as documents.

Files are read once and stored as shuffled TFRecord files in a cache folder, because tf.data can
neither read .xz and JSON lines nor deal documents to hosts or epochs in a new order. The folder
is `$XDG_CACHE_HOME/convt5/text`; it is safe to delete, and renewed when a file changes.
"""

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import tensorflow as tf
from absl import logging

from convt5 import errors

from . import local_files

Separator = Literal["auto", "line", "blank_line"]

_FORMAT = 1
_NUM_SHARDS = 64
_SHARD_BYTES = 2**20
_BLOCK_BYTES = 256 * 2**20
_SNIFFED_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Files of text and how documents stand in them.

    Attributes:
        path: a path or glob, or several; `**` matches folders of any depth.
        separator: "line": each line is a document. "blank_line": blank lines separate documents.
            "auto": "blank_line" where a blank line stands inside the first file, else "line".
            Without meaning for files of JSON lines: .jsonl, .ndjson and .json.
        text_key: what holds the text of a line of JSON.
        holdout_every: every n-th document goes to "validation" rather than "train"; None keeps
            all in "train".
    """

    path: local_files.Paths
    separator: Separator = "auto"
    text_key: str = "text"
    holdout_every: int | None = None

    def __post_init__(self):
        if self.separator not in ("auto", "line", "blank_line"):
            raise errors.UserError(
                f"separator={self.separator!r} must be 'auto', 'line' or 'blank_line'."
            )
        self.matches()

    def matches(self) -> list[str]:
        """Returns the files, in order.

        Raises:
            UserError: a path that matches no file.
        """
        names = local_files.find(self.path)
        if not names:
            raise errors.UserError("text path=[] is empty; set it to a path or a glob.")
        return names

    def fingerprint(self) -> str:
        """Returns a name of these documents, the same for copies of the files elsewhere."""
        return self._name([local_files.contents(name) for name in self.matches()])

    def stored(self) -> dict[str, list[str]]:
        """Returns the TFRecord files of each split, which are written when they do not exist.

        Raises:
            UserError: the files hold no document, or something that is not text; or they cannot be
                stored.
        """
        names = self.matches()
        # Named by the dates of the files, so that no change of their bytes goes unseen.
        about = [local_files.identity(name) for name in names]
        # Earlier versions stored these as plain text, under what stands above alone.
        about += [local_files.suffix(name) for name in names if _was_plain_text(name)]
        folder = cache_folder() / self._name(about)
        try:
            if not folder.exists():
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

    def documents(self) -> Iterator[bytes]:
        """Yields the documents in the order of the files, as UTF-8 without surrounding blanks."""
        names = self.matches()
        separator = self.separator
        if separator == "auto":
            separator = _guess_separator(names[0])
        for name in names:
            if local_files.is_json_lines(name):
                documents = _json_lines(name, self.text_key)
            else:
                documents = _lines(name) if separator == "line" else _paragraph_groups(name)
            with local_files.explained(name):
                yield from documents

    def _name(self, files: Sequence[object]) -> str:
        about = [_FORMAT, self.separator, self.text_key, self.holdout_every, *files]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    def _store(self, folder: pathlib.Path) -> None:
        logging.info("convt5 stores the text of %s once in %s", self.path, folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = pathlib.Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
        try:
            self._write(unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.exists():  # Else another process was faster with the same.
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _write(self, folder: pathlib.Path) -> None:
        writers = {split: _ShardWriter(folder / split) for split in ("train", "validation")}
        count = 0
        for document in self.documents():
            held_out = self.holdout_every is not None and count % self.holdout_every == 1
            writers["validation" if held_out else "train"].add(document)
            count += 1
        for writer in writers.values():
            writer.close()
        if not count:
            raise errors.UserError(
                f"text path={self.path!r} holds no document: {len(self.matches())} files were read "
                "and all are empty or blank; set it to files with text."
            )


def _was_plain_text(name: str) -> bool:
    """Whether a file of JSON was none to earlier versions, by its name."""
    is_known = ".jsonl" in pathlib.PurePath(name).suffixes
    is_other = local_files.suffix(name) in (".ndjson", ".json")
    return is_other or (local_files.is_json_lines(name) and not is_known)


def cache_folder() -> pathlib.Path:
    """Returns where text is stored, which `XDG_CACHE_HOME` moves."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(home) / "convt5" / "text"


class _ShardWriter:
    """Deals documents to files in random order, the same each time, in bounded memory."""

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
        """Files to deal to hosts and to shuffle; opening many for little text takes long."""
        wanted = 1 + self._waiting_bytes // _SHARD_BYTES
        return min(wanted, _NUM_SHARDS, len(self._waiting))

    def _flush(self) -> None:
        if not self._writers:
            self._writers = [
                tf.io.TFRecordWriter(f"{self._prefix}-{i:05d}.tfrecord")
                for i in range(self._num_shards())
            ]
        for i, document in enumerate(self._random.permutation(len(self._waiting))):
            self._writers[i % len(self._writers)].write(self._waiting[document])
        self._waiting, self._waiting_bytes = [], 0


def _guess_separator(name: str) -> Separator:
    with local_files.explained(name), local_files.open_bytes(name) as file:
        start = file.read(_SNIFFED_BYTES)
    lines = [line.strip() for line in io.BytesIO(start.strip())]
    separator = "blank_line" if b"" in lines else "line"
    logging.info("convt5 takes separator=%r from the start of %s", separator, name)
    return separator


def _text_lines(name: str) -> Iterator[bytes]:
    """Yields lines without surrounding blanks."""
    with local_files.open_bytes(name) as file:
        for i, line in enumerate(file):
            text = line.decode("utf-8-sig" if i == 0 else "utf-8")
            yield text.strip().encode()


def _lines(name: str) -> Iterator[bytes]:
    return (line for line in _text_lines(name) if line)


def _paragraph_groups(name: str) -> Iterator[bytes]:
    group = []
    for line in _text_lines(name):
        if line:
            group.append(line)
        elif group:
            yield b"\n".join(group)
            group = []
    if group:
        yield b"\n".join(group)


def _json_lines(name: str, text_key: str) -> Iterator[bytes]:
    for number, line in enumerate(_text_lines(name), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise errors.UserError(
                f"text file {name!r}, line {number} is not JSON ({error}); files of JSON hold "
                "one object a line."
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
            keys = sorted(row) if isinstance(row, dict) else []
            raise errors.UserError(
                f"text file {name!r}, line {number} has no string under text_key={text_key!r}; "
                f"its keys are {keys}; set text_key to the one that holds the text."
            )
        try:
            text = row[text_key].strip().encode()
        except UnicodeEncodeError as error:
            raise errors.UserError(
                f"text file {name!r}, line {number} holds half of a character ({error}); correct "
                "or remove the line."
            ) from error
        if text:
            yield text
