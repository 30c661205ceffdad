"""Rows of local JSONL, TSV and CSV files as a seqio source; faults are named by file and line.

The rows are held in memory, in the order of the files, so that any host reads any of them and each
epoch has an order of its own.
"""

import csv
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from convt5 import errors
from convt5.runtime import foreign_files

from . import local_files
from .sources import ItemSource

Path = local_files.Paths | Mapping[str, local_files.Paths]
Example = Mapping[str, str | list[str]]

SUFFIXES = (".jsonl", ".tsv", ".csv")
_SPLIT_NAMES = {
    **dict.fromkeys(("dev", "valid", "val", "dev_matched", "validation_matched"), "validation"),
    "dev_mismatched": "validation_mismatched",
}
"""Of files; MultiNLI's two halves of what is held out are called as TFDS calls them."""


class Layout(NamedTuple):
    """How published files differ from what a task reads.

    Attributes:
        columns: fields of .tsv and .csv files without a header line. A first line that holds
            nothing but these names is one all the same.
        aliases: for a field, what it is called in other files; the first that is there counts.
        skips_malformed: leaves out lines with another number of columns, and says how many, as
            other readers of such files do.
    """

    columns: Sequence[str] | None = None
    aliases: Mapping[str, Sequence[str]] = {}
    skips_malformed: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        file, line: where it stands; lines are counted from 1.
        values: what stands under each field.
    """

    file: str
    line: int
    values: Mapping[str, Any]

    def value(self, field: str) -> Any:
        """Returns what stands under a field.

        Raises:
            UserError: there is no such field, nothing in it, or something that UTF-8 lacks.
        """
        if field not in self.values:
            raise self.error(
                f"has no field {field!r}; its fields are {list(self.values)}; name one of these."
                f"{errors.suggest(field, self.values)}"
            )
        value = self.values[field]
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            raise self.error(f"has nothing under {field!r}; fill it in, or remove the line.")
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"has half of a character under {field!r} ({error}); correct or remove the line."
            ) from None
        return value

    def text(self, field: str) -> str:
        """Returns what stands under a field as text, as it is in the file.

        Raises:
            UserError: there is no such field, nothing in it, or no text.
        """
        value = self.value(field)
        if not isinstance(value, str | int | float):
            raise self.error(f"has {value!r} under {field!r}, which is no text.")
        return str(value)

    def stripped(self, field: str) -> str:
        """Returns what stands under a field as a name or number, without blanks around it.

        Raises:
            UserError: as `text`.
        """
        return self.text(field).strip()

    def renamed(self, aliases: Mapping[str, Sequence[str]]) -> "Row":
        """Returns the row with fields that it lacks taken from others; see `Layout`."""
        found = {
            field: next((name for name in names if name in self.values), None)
            for field, names in aliases.items()
            if field not in self.values
        }
        more = {field: self.values[name] for field, name in found.items() if name is not None}
        return dataclasses.replace(self, values={**self.values, **more}) if more else self

    def error(self, fault: str) -> errors.UserError:
        """Returns an error that says where the fault is."""
        return errors.UserError(f"file {self.file!r}, line {self.line} {fault}")


def find_splits(path: Path) -> dict[str, list[str]]:
    """Returns the files of each split.

    Args:
        path: a folder, whose files, and folders of files, are the splits of their names, where
            "dev" and "valid" mean "validation"; or a file, a glob or several, which are "train"; or
            all of these by split.

    Raises:
        UserError: no file is there, or one both compressed and not.
    """
    if isinstance(path, Mapping):
        if not path:
            raise errors.UserError(
                "path={} names no split; set it to a folder, or to files by split, such as "
                "{'train': 'train.jsonl', 'validation': 'dev.jsonl'}."
            )
        return {split: local_files.find(files) for split, files in path.items()}
    if isinstance(path, str | os.PathLike) and os.path.isdir(os.path.expanduser(path)):
        return _splits_of_folder(pathlib.Path(path).expanduser())
    return {"train": local_files.find(path)}


def _splits_of_folder(folder: pathlib.Path) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    contents: dict[str, str] = {}
    # A name with a dot in front is no data, such as what macOS writes beside a file.
    files = [
        file.relative_to(folder)
        for file in sorted(folder.rglob("*"))
        if _suffix(str(file)) and file.is_file()
    ]
    for file in files:
        if any(part.startswith(".") for part in file.parts):
            continue
        other = contents.setdefault(local_files.uncompressed(str(file)), str(file))
        if other != str(file):
            raise errors.UserError(
                f"path={str(folder)!r} holds {other} and {file}, which are the same rows by their "
                "names and would be read twice; remove or rename one."
            )
        name = file.parts[0].partition(".")[0]
        splits.setdefault(_SPLIT_NAMES.get(name, name), []).append(str(folder / file))
    if not splits:
        raise errors.UserError(
            f"path={str(folder)!r} is a folder without a {', '.join(SUFFIXES)} file, also "
            "compressed; set it to a folder with files such as train.jsonl and dev.jsonl."
        )
    return splits


def read_rows(
    file: str,
    columns: Sequence[str] | None = None,
    *,
    layout: Layout | None = None,
    invalid_utf8: local_files.InvalidUtf8 = "refuse",
    tally: local_files.Tally | None = None,
) -> Iterator[Row]:
    """Yields the rows of a file; empty lines are none.

    Args:
        file: .jsonl, .tsv or .csv, and .gz, .xz or .bz2 after that.
        columns: fields of .tsv and .csv files without a header line; None takes those of layout.
        layout: how the file differs from what is read.
        invalid_utf8: what becomes of rows with bytes that are no UTF-8, as in `TextFiles`.
        tally: counts what is met.

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
        return local_files.readable(text, file, line, invalid_utf8, tally)

    with local_files.explained(file), local_files.open_bytes(file) as raw:
        lines = local_files.text_lines(raw)
        if suffix == ".jsonl":
            rows = _json_rows(file, lines, readable)
        else:
            cells = _csv_cells(file, lines) if suffix == ".csv" else _tsv_cells(lines)
            rows = _table_rows(file, _readable_cells(cells, readable), layout)
        for row in rows:
            tally.documents += 1
            yield row.renamed(layout.aliases)
    tally.files += 1
    tally.empty_files += tally.documents == before


class TableSource(ItemSource):
    """Rows of local files as examples.

    Args:
        path: see `find_splits`.
        parse: from a row to an example of strings and lists of strings; None leaves the row out.
        columns: see `read_rows`.
        layout: see `read_rows`.
        validation_fraction: of the rows of "train" that become "validation" where there are no
            files for it, in [0, 0.5]: every n-th, where n is 1 / validation_fraction rounded.
        invalid_utf8: see `read_rows`.
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
    ):
        local_files.check_invalid_utf8(invalid_utf8)
        if not 0 <= validation_fraction <= 0.5:
            raise errors.UserError(
                f"validation_fraction={validation_fraction} must be in [0, 0.5]; 0.1 holds out "
                "one row of ten."
            )
        self._files = find_splits(path)
        self._parse = parse
        self._columns = columns
        self._invalid_utf8: local_files.InvalidUtf8 = invalid_utf8
        self._tallies: dict[str, local_files.Tally] = {}
        self._layout = layout
        self._holdout_every = None
        if validation_fraction and "train" in self._files and "validation" not in self._files:
            self._holdout_every = round(1 / validation_fraction)
        self._tables: dict[str, dict[str, Any]] = {}
        splits = [*self._files, *(["validation"] if self._holdout_every else [])]
        super().__init__(splits)

    def fingerprint(self) -> str:
        """Returns what identifies the rows, to be compared when a run goes on."""
        files = [(s, [local_files.contents(f) for f in fs]) for s, fs in self._files.items()]
        about = [files, self._columns, self._holdout_every]
        if self._invalid_utf8 != "refuse":
            about.append(self._invalid_utf8)
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]

    def items(self, split: str) -> tuple[tf.data.Dataset, int]:
        num_rows = len(next(iter(self._table(split).values())))
        return tf.data.Dataset.range(num_rows), num_rows

    def make_example(self, split: str, item: tf.Tensor) -> dict[str, tf.Tensor]:
        return {name: values[item] for name, values in self._table(split).items()}

    def tally(self, split: str) -> local_files.Tally:
        """Returns what was met when the files of a split were read, which are read if need be."""
        self._table(split)
        return self._tallies[split]

    def check_rows(self, num_rows: int = 20) -> None:
        """Reads the first rows of each file.

        Raises:
            UserError: one of them lacks a field, or is otherwise wrong; or no file has a row.
        """
        for split, files in self._files.items():
            found = 0
            for file in files:
                rows = read_rows(
                    file, self._columns, layout=self._layout, invalid_utf8=self._invalid_utf8
                )
                for row in itertools.islice(rows, num_rows):
                    self._parse(row)
                    found += 1
            if not found:
                raise errors.UserError(f"split={split!r} has no row: {files} were read.")

    def _table(self, split: str) -> dict[str, Any]:
        """Returns the examples of a split, one tensor a field; files are read once."""
        if split not in self.splits:
            raise errors.UserError(
                f"split={split!r} is none of {sorted(self.splits)}, the splits of these files."
                f"{errors.suggest(split, self.splits)}"
            )
        if split not in self._tables:
            examples = self._examples(split)
            if not examples:
                raise errors.UserError(
                    f"split={split!r} has no row: {self._files.get(split, self._files)} were read."
                )
            self._tables[split] = {
                name: _tensor([example[name] for example in examples]) for name in examples[0]
            }
        return self._tables[split]

    def _examples(self, split: str) -> list[Example]:
        files = self._files.get(split, self._files.get("train", []))
        tally = self._tallies[split] = local_files.Tally()
        settings = {"layout": self._layout, "invalid_utf8": self._invalid_utf8, "tally": tally}
        rows = (row for file in files for row in read_rows(file, self._columns, **settings))
        examples = [example for row in rows if (example := self._parse(row)) is not None]
        if tally.faults():
            logging.warning("split=%s of %s: %s", split, ", ".join(files), tally.faults())
        every = self._holdout_every
        if every and split in ("train", "validation"):
            held_out = split == "validation"
            examples = [e for i, e in enumerate(examples) if (i % every == 1) == held_out]
        return examples


def _suffix(file: str) -> str | None:
    suffix = local_files.suffix(file)
    return suffix if suffix in SUFFIXES else None


_Readable = Callable[[str, int], str | None]
"""A text and its line, as `local_files.readable` gives it back."""


def _json_rows(file: str, lines: Iterator[str], readable: _Readable) -> Iterator[Row]:
    for number, text in enumerate(lines, start=1):
        line = readable(text, number)
        if line is None or not line.strip():
            continue
        try:
            values = json.loads(line)
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
            f"file {file!r}, line {reader.line_num} is not CSV ({error})."
        ) from error


def _tsv_cells(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, start=1):
        yield number, line.split("\t") if line else []


def _readable_cells(
    cells: Iterator[tuple[int, list[str]]], readable: _Readable
) -> Iterator[tuple[int, list[str]]]:
    """Yields rows, of which one with bytes that are no UTF-8 may be replaced or left out."""
    for number, values in cells:
        joined = "".join(values)
        whole = readable(joined, number)
        if whole == joined:
            yield number, values
        elif whole is not None:
            yield number, [local_files.replaced(value) for value in values]


def _table_rows(file: str, cells: Iterator[tuple[int, list[str]]], layout: Layout) -> Iterator[Row]:
    columns = [] if layout.columns is None else list(layout.columns)
    is_first, malformed = True, []
    for number, values in cells:
        if not values:
            continue
        if is_first and (not columns or set(values) <= set(columns)):
            columns = values
            twice = [name for name in columns if name and columns.count(name) > 1]
            if twice:
                raise errors.UserError(
                    f"file {file!r}, line {number} names the column {twice[0]!r} twice: "
                    f"{columns}; rename one of them."
                )
        elif len(values) != len(columns):
            if layout.skips_malformed:
                malformed.append(number)
                continue
            raise errors.UserError(
                f"file {file!r}, line {number} has {len(values)} columns, not {len(columns)}: "
                f"{columns}; correct the line, or set columns."
            )
        else:
            yield Row(file, number, dict(zip(columns, values, strict=True)))
        is_first = False
    if malformed:
        logging.warning(
            "file %r: %d lines are left out for another number of columns than %d; the first is "
            "line %d",
            *(file, len(malformed), len(columns), malformed[0]),
        )


def _tensor(values: list[Any]) -> Any:
    return tf.ragged.constant(values) if isinstance(values[0], list) else tf.constant(values)
