"""Rows of local JSONL, TSV and CSV files as a seqio source; errors name file and line.

The rows are held in memory in the order of the files, so that any host can read any row, and each
epoch is shuffled anew.
"""

import collections
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from convt5 import errors
from convt5.runtime import foreign_files, local_files

from .sources import ItemSource

Path = local_files.Paths | Mapping[str, local_files.Paths]
Example = Mapping[str, str | list[str]]

SUFFIXES = (".jsonl", ".tsv", ".csv")
_SPLIT_NAMES = {
    **{name: name for name in ("train", "validation", "test")},
    **dict.fromkeys(("dev", "valid", "val", "dev_matched", "validation_matched"), "validation"),
    "dev_mismatched": "validation_mismatched",
}
"""Splits by name, in any case; MultiNLI's two validation sets are named as in TFDS."""

_VALIDATION_NAMES = [name for name, split in _SPLIT_NAMES.items() if split == "validation"]

_SHARD = re.compile(r"-\d+-of-\d+(?=\.|$)")
_QUOTED = re.compile(r'"[^"]*(?:""[^"]*)+"', re.DOTALL)
"""A field with quotes inside as the module csv and pandas write it."""


class Layout(NamedTuple):
    """How published files differ from what a task reads.

    Attributes:
        columns: fields of .tsv and .csv files without a header line. If the first line consists of
            exactly these names, it is a header all the same.
        aliases: other names of a field; the first one present is used.
        skips_malformed: skips lines with a wrong number of columns, and reports how many, like
            other readers of such files.
    """

    columns: Sequence[str] | None = None
    aliases: Mapping[str, Sequence[str]] = {}
    skips_malformed: bool = False


class NoFieldError(errors.UserError):
    """Raised for a row without a field that its task reads."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        file, line: its location; lines are counted from 1.
        values: the value of each field.
    """

    file: str
    line: int
    values: Mapping[str, Any]

    def value(self, field: str) -> Any:
        """Returns the value of a field.

        Raises:
            NoFieldError: there is no such field.
            UserError: the field is empty or NaN, or cannot be encoded in UTF-8.
        """
        if field not in self.values:
            fault = f"has no field {field!r}; its fields are {list(self.values)}; name one of these"
            raise NoFieldError(self.error(f"{fault}.{errors.suggest(field, self.values)}"))
        value = self.values[field]
        # pandas writes NaN for what is missing.
        is_missing = value is None or value == [] or value != value
        if is_missing or (isinstance(value, str) and not value.strip()):
            raise self.error(f"has nothing under {field!r}; fill it in, or remove the line.")
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"has half of a character under {field!r} ({error}); correct or remove the line."
            ) from None
        return value

    def text(self, field: str) -> str:
        """Returns the text of a field, unchanged.

        Raises:
            UserError: the field is missing, empty or not text.
        """
        value = self.value(field)
        if not isinstance(value, str | int | float) or value in (math.inf, -math.inf):
            raise self.error(f"has {value!r} under {field!r}, which is no text.")
        return str(value)

    def stripped(self, field: str) -> str:
        """Returns a name or number in a field, without surrounding spaces.

        Raises:
            UserError: as `text`.
        """
        return self.text(field).strip()

    def renamed(self, aliases: Mapping[str, Sequence[str]]) -> "Row":
        """Returns the row with missing fields taken from their aliases; see `Layout`."""
        aliased = {
            field: next((name for name in names if name in self.values), None)
            for field, names in aliases.items()
            if field not in self.values
        }
        more = {field: self.values[name] for field, name in aliased.items() if name is not None}
        return dataclasses.replace(self, values={**self.values, **more}) if more else self

    def error(self, fault: str) -> errors.UserError:
        """Returns an error that names the location of the row."""
        return errors.UserError(f"file {self.file!r}, line {self.line} {fault}")


def find_splits(path: Path) -> dict[str, list[str]]:
    """Returns the files of each split.

    Args:
        path: a folder that has a file, numbered files such as train-00000-of-00002.jsonl, or a
            folder of files for each split under its name ("dev" and "valid" mean "validation"); or
            a file, a glob or a list of these for "train" alone;
            or a mapping from splits to these.

    Raises:
        UserError: there is no file, or as `local_files.find`.
    """
    if isinstance(path, Mapping):
        if not path:
            raise errors.UserError(
                "path={} names no split; set it to a folder, or to files by split, such as "
                "{'train': 'train.jsonl', 'validation': 'dev.jsonl'}."
            )
        splits = {_split(name): local_files.find(files) for name, files in path.items()}
        if len(splits) < len(path):
            raise errors.UserError(
                f"path={dict(path)} names a split twice; the names of 'validation' are "
                f"{_VALIDATION_NAMES}, in any case."
            )
        return splits
    if isinstance(path, str | os.PathLike):
        found = local_files.in_folder(path)
        if found is not None:
            return _splits_of_folder(os.path.expanduser(os.fspath(path)), found)
    return {"train": local_files.find(path)}


def _splits_of_folder(folder: str, found: list[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    found = sorted(found, key=lambda file: file.split(os.sep))
    files = [file for file in found if _suffix(file)]
    local_files.check(files)
    places = {file: _place(file, folder) for file in files}
    if same := local_files.same_rows(places):
        (split, _), _ = places[same[0]]
        raise errors.UserError(
            f"files {same[0]!r} and {same[1]!r} hold the same rows of split={split!r} by "
            "their names, which would be read twice; remove one, or put both into a folder "
            f"{split!r} under different names."
        )
    for file, ((split, _), _) in places.items():
        splits.setdefault(split, []).append(file)
    splits = {split: local_files.distinct(names) for split, names in splits.items()}
    if not splits:
        raise errors.UserError(
            f"path={folder!r} is a folder without a {', '.join(SUFFIXES)} file, also "
            "compressed; set it to a folder with files such as train.jsonl and dev.jsonl."
        )
    unread = [
        (file, split)
        for file in found
        if not _suffix(file) and (split := _place(file, folder)[0][0]) in {"validation", *splits}
    ]
    for file, split in unread:
        if split not in splits:  # Rows of "train" would be held out in its place.
            raise errors.UserError(
                f"file {file!r} is of split={split!r} by its name, but of no known kind; "
                f"convert it to one of {', '.join(SUFFIXES)}, or put it elsewhere."
            )
    if unread:
        logging.warning(
            "path=%r: %d files are not read, such as %r of split=%r: their names do not end in %s",
            *(folder, len(unread), *unread[0], ", ".join(SUFFIXES)),
        )
    return splits


def _split(name: str) -> str:
    return _SPLIT_NAMES.get(name.lower(), name)


def _check_names(splits: Collection[str]) -> None:
    """Raises `UserError` if a split is named much like "validation", which is to be made."""
    names = (*_VALIDATION_NAMES, "eval", "evaluation")
    alike = [s for s in splits if re.split(r"[^a-z]", s.lower())[0] in names]
    if alike:
        raise errors.UserError(
            f"there are files of split={alike[0]!r}, but none of split='validation', for which "
            "rows of 'train' would be held out; name the files dev or validation, or set "
            "validation_fraction=0 to hold out none."
        )


def _place(file: str, folder: str) -> tuple[tuple[str, str], str]:
    """Returns the split of a file in a folder, which part of it, and of a numbered set which."""
    path = file.removeprefix(folder).lstrip(os.sep)
    shards = "".join(_SHARD.findall(path))
    below = local_files.without_compression(_SHARD.sub("", path))
    name, _, rest = below.removesuffix(pathlib.PurePath(below).suffix).partition(os.sep)
    name, _, part = name.partition(".")
    return (_split(name), f"{part}/{rest}"), shards


def read_rows(
    file: str,
    columns: Sequence[str] | None = None,
    *,
    layout: Layout | None = None,
    invalid_utf8: local_files.InvalidUtf8 = "refuse",
    tally: local_files.Tally | None = None,
    check_header: Callable[[Row], Any] | None = None,
) -> Iterator[Row]:
    """Yields the rows of a file, skipping empty lines.

    Quotes are text in .tsv files, as GLUE publishes them; only tabs and lines separate fields. Rows
    with a field that is quoted like one of .csv, with doubled quotes inside, are counted.

    Args:
        file: a .jsonl, .tsv or .csv file, optionally compressed: .gz, .xz or .bz2.
        columns: fields of .tsv and .csv files without a header line; None means those of layout.
        layout: how the file differs from what is read.
        invalid_utf8: what to do with rows that are not UTF-8, as in `TextFiles`.
        tally: counts what is read.
        check_header: called with the header line, as a row of its own names, of a .tsv or .csv file
            without other rows: it may be the only row of a file without a header.

    Raises:
        UserError: the file cannot be read, or a line is malformed.
    """
    layout = layout or Layout()
    if columns is not None:
        layout = layout._replace(columns=columns)
    suffix = _suffix(file)
    if suffix is None:
        raise errors.UserError(
            f"file {file!r} is of no known kind: its name must end in {', '.join(SUFFIXES)}, and "
            "may then have .gz, .xz or .bz2."
        )
    tally = local_files.Tally() if tally is None else tally
    before = tally.documents

    def readable(text: str, line: int) -> str | None:
        return local_files.handle_invalid(text, file, line, invalid_utf8, tally)

    with local_files.explain_errors(file), local_files.open_bytes(file) as raw:
        lines = local_files.text_lines(raw, file)
        if suffix == ".jsonl":
            rows = _json_rows(file, lines, readable)
        else:
            cells = _csv_cells(file, lines) if suffix == ".csv" else _tsv_cells(lines, tally)
            rows = _table_rows(file, _handle_invalid_cells(cells, readable), layout, check_header)
        for row in rows:
            tally.documents += 1
            yield row.renamed(layout.aliases)
    tally.files += 1
    tally.empty_files += tally.documents == before


class TableSource(ItemSource):
    """Rows of local files as examples.

    Args:
        path: see `find_splits`.
        parse: converts a row to an example of strings and lists of strings; None skips the row.
        columns: see `read_rows`.
        layout: see `read_rows`.
        validation_fraction: fraction of the "train" rows held out if there are no files for
            "validation", in [0, 0.5]: every n-th row, where n is 1 / validation_fraction rounded.
        invalid_utf8: see `read_rows`.
        balance: a field of the examples: rows of "train" are repeated until each of its values is
            as frequent as the most frequent one.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[Row], Example | None],
        *,
        columns: Sequence[str] | None = None,
        layout: Layout | None = None,
        validation_fraction: float = 0.0,
        invalid_utf8: local_files.InvalidUtf8 = "refuse",
        balance: str | None = None,
    ):
        local_files.check_invalid_utf8(invalid_utf8)
        holdout_every = local_files.holdout_every(validation_fraction)
        self._files = find_splits(path)
        local_files.check_apart(self._files)
        self._parse = parse
        self._columns = columns
        self._invalid_utf8: local_files.InvalidUtf8 = invalid_utf8
        self._tallies: dict[str, local_files.Tally] = {}
        self._layout = layout
        self._balance = balance
        divides = "train" in self._files and "validation" not in self._files
        self._holdout_every = holdout_every if divides else None
        if self._holdout_every:
            _check_names(self._files)
        self._tables: dict[str, dict[str, Any]] = {}
        splits = [*self._files, *(["validation"] if self._holdout_every else [])]
        super().__init__(splits)

    def fingerprint(self) -> str:
        """Returns an identifier of the rows, compared when a run resumes."""
        files = [(s, [local_files.contents(f) for f in fs]) for s, fs in self._files.items()]
        about = [files, self._columns, self._holdout_every]
        if self._invalid_utf8 != "refuse":
            about.append(self._invalid_utf8)
        if self._balance is not None:
            about.append({"balance": self._balance})
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    def reading(self) -> dict[str, Any]:
        """Returns how rows become examples, as JSON values: the settings of `parse`."""
        settings = self._parse.keywords if isinstance(self._parse, functools.partial) else {}
        return {"layout": self._layout and self._layout._asdict(), **settings}

    def files(self, split: str) -> list[str]:
        """Returns the files of a split; none for rows held out of those of another."""
        return self._files.get(split, [])

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        if self._balance is not None and split == "train":
            rows = self._balanced_rows
            return tf.data.Dataset.from_tensor_slices(rows), len(rows)
        num_rows = len(next(iter(self._table(split).values())))
        return tf.data.Dataset.range(num_rows), num_rows

    def examples(self, split: str, items: tf.data.Dataset) -> tf.data.Dataset:
        table = self._table(split)
        return items.map(lambda item: {name: values[item] for name, values in table.items()})

    @functools.cached_property
    def _balanced_rows(self) -> np.ndarray:
        """All rows of "train", and then those of rarer values again, until all are as frequent."""
        assert self._balance is not None
        values = self._table("train")[self._balance].numpy()
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        missing = counts.max() - counts
        again = [np.resize(np.flatnonzero(places == place), n) for place, n in enumerate(missing)]
        return np.concatenate([np.arange(len(values)), *again])

    def tally(self, split: str) -> local_files.Tally:
        """Returns the counts of reading a split, which is read if needed."""
        self._table(split)
        return self._tallies[split]

    def check_rows(self, split: str, num_rows: int = 20) -> None:
        """Reads the first rows of each file of a split; others may be for other uses.

        Raises:
            UserError: a row lacks a field or is otherwise invalid, or no file has a row.
        """
        files = self._files_of(split)
        num_found = 0
        for file in files:
            for row in itertools.islice(self._rows(file), num_rows):
                self._parse(row)
                num_found += 1
        if not num_found:
            raise errors.UserError(f"split={split!r} has no row: {files} were read.")

    def _files_of(self, split: str) -> list[str]:
        """Returns the files of a split; rows that are held out are in those of "train"."""
        return self._files.get(split, self._files.get("train", []))

    def _table(self, split: str) -> dict[str, Any]:
        """Returns the examples of a split, one tensor per field; files are read once."""
        if split not in self.splits:
            raise errors.UserError(
                f"split={split!r} is none of {sorted(self.splits)}, the splits of these files."
                f"{errors.suggest(split, self.splits)}"
            )
        if split not in self._tables:
            examples = self._examples(split)
            if not examples:
                raise errors.UserError(
                    f"split={split!r} has no row: {self._files_of(split)} were read."
                )
            self._tables[split] = {
                name: _tensor([example[name] for example in examples]) for name in examples[0]
            }
        return self._tables[split]

    def _examples(self, split: str) -> list[Example]:
        files = self._files_of(split)
        tally = local_files.Tally(missing_shards=local_files.num_missing_shards(files))
        self._tallies[split] = tally
        rows = (row for file in files for row in self._rows(file, tally))
        examples = [example for row in rows if (example := self._parse(row)) is not None]
        if tally.faults():
            logging.warning("split=%s of %s: %s", split, ", ".join(files), tally.faults())
        every = self._holdout_every
        if every and split == "train":
            del examples[1::every]
        elif every and split == "validation":
            held_out = examples[1::every]
            _warn_of_missing(examples, held_out, every)
            return held_out
        return examples

    def _rows(self, file: str, tally: local_files.Tally | None = None) -> Iterator[Row]:
        return read_rows(
            file,
            self._columns,
            layout=self._layout,
            invalid_utf8=self._invalid_utf8,
            tally=tally,
            check_header=self._check_header,
        )

    def _check_header(self, header: Row) -> None:
        """Raises `UserError` if the columns of a table without rows lack a field."""
        try:
            self._parse(header)
        except NoFieldError:
            raise
        except errors.UserError:
            return  # Names of columns are no values.


def _suffix(file: str) -> str | None:
    suffix = local_files.suffix(file)
    return suffix if suffix in SUFFIXES else None


_Readable = Callable[[str, int], str | None]
"""Applies `local_files.handle_invalid` to a text and its line number."""


def _json_rows(file: str, lines: Iterator[str], readable: _Readable) -> Iterator[Row]:
    for number, text in enumerate(lines, start=1):
        line = readable(text, number)
        if line is None or not line.strip():
            continue
        try:
            values = json.loads(line, object_pairs_hook=foreign_files.with_different_keys)
        except (ValueError, RecursionError) as error:
            raise errors.UserError(
                f"file {file!r}, line {number} is not JSON ({error}); .jsonl files hold one object "
                "a line."
            ) from error
        if not isinstance(values, dict):
            raise errors.UserError(
                f"file {file!r}, line {number} is no JSON object; each line is one, such as "
                '{"text": "...", "label": "..."}.'
            )
        yield Row(file, number, values)


def _csv_cells(file: str, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(foreign_files.MOST_LINE_BYTES)
    reader = csv.reader((f"{line}\n" for line in lines), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise errors.UserError(
            f"file {file!r}, line {reader.line_num} is not CSV ({error}); correct its quotes, and "
            "write the file in UTF-8."
        ) from error


def _tsv_cells(lines: Iterator[str], tally: local_files.Tally) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        cells = line.split("\t") if line else []
        tally.quoted += any(map(_QUOTED.fullmatch, cells))
        yield number, cells


def _handle_invalid_cells(
    cells: Iterator[tuple[int, list[str]]], readable: _Readable
) -> Iterator[tuple[int, list[str]]]:
    """Yields rows; those that are not UTF-8 may be replaced or skipped."""
    for number, values in cells:
        joined = "".join(values)
        whole = readable(joined, number)
        if whole == joined:
            yield number, values
        elif whole is not None:
            yield number, [local_files.replace_invalid(value) for value in values]


def _table_rows(
    file: str,
    cells: Iterator[tuple[int, list[str]]],
    layout: Layout,
    check_header: Callable[[Row], Any] | None,
) -> Iterator[Row]:
    columns = [] if layout.columns is None else list(layout.columns)
    is_first, malformed = True, []
    header: Row | None = None
    _check_different(columns, f"file {file!r}: the setting columns")
    for number, values in cells:
        if not values:
            continue
        if is_first and (not columns or set(values) <= set(columns)):
            columns = values
            _check_different(columns, f"file {file!r}, line {number}")
            header = Row(file, number, dict(zip(columns, columns, strict=True)))
        elif len(values) != len(columns):
            if layout.skips_malformed:
                malformed.append(number)
                continue
            raise errors.UserError(
                f"file {file!r}, line {number} has {len(values)} columns, not {len(columns)}: "
                f"{columns}; correct the line, or set columns."
            )
        else:
            header = None
            yield Row(file, number, dict(zip(columns, values, strict=True)))
        is_first = False
    if header is not None and check_header is not None:
        check_header(header.renamed(layout.aliases))
    if malformed:
        logging.warning(
            "file %r: %d lines are left out for another number of columns than %d; the first is "
            "line %d",
            *(file, len(malformed), len(columns), malformed[0]),
        )


def _warn_of_missing(rows: Sequence[Example], held_out: Sequence[Example], every: int) -> None:
    """Warns if values that many rows have are in none of those held out: the rows alternate."""
    first = rows[0] if rows else {}
    for field in [name for name, value in first.items() if isinstance(value, str)]:
        counts = collections.Counter(str(row[field]) for row in rows)
        found = {str(row[field]) for row in held_out}
        # Were the rows in random order, one value in 40,000 would be missing.
        missing = [value for value, n in counts.items() if n >= 10 * every and value not in found]
        if missing:
            logging.warning(
                "split='validation' is every %dth row of 'train', and holds none of the %d with "
                "%s=%r: the rows are in a regular order, so that its metrics mislead; shuffle the "
                "lines of the file, or name files for validation.",
                every,
                counts[missing[0]],
                field,
                missing[0],
            )


def _check_different(columns: Sequence[str], where: str) -> None:
    """Raises `UserError` if a column is named twice; one without a name is not read."""
    twice = [name for name, count in collections.Counter(columns).items() if name and count > 1]
    if twice:
        raise errors.UserError(
            f"{where} names the column {twice[0]!r} twice: {columns}; rename one of them."
        )


def _tensor(values: list[Any]) -> Any:
    return tf.ragged.constant(values) if isinstance(values[0], list) else tf.constant(values)
