"""The inputs of `infer`: lines of text, fields of rows, standard input, or a split of a task."""

import fnmatch
import functools
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from convt5 import errors
from convt5.runtime import foreign_files, local_files
from convt5.text.task_format import FieldError, TaskFormat

STDIN = "-"


class Item(NamedTuple):
    """One input.

    Attributes:
        text: the input: a text, or the texts of a task's fields.
        tokens: its token ids, if the task has made them already.
        target: the true answer, if known.
    """

    text: str | dict[str, str]
    tokens: list[int] | None = None
    target: str | None = None


class Inputs(NamedTuple):
    """A sequence of inputs.

    Attributes:
        name: their name in messages and settings.
        total: number of inputs; None if they arrive one by one.
        read: yields them from the start.
        faults: returns warnings about what was read, such as skipped lines.
    """

    name: str
    total: int | None
    read: Callable[[], Iterator[Item]]
    faults: Callable[[], str] = str


def from_files(
    path: str,
    field: str | None = None,
    format: TaskFormat | None = None,
    *,
    invalid_utf8: str = "refuse",
    output: str | None = None,
) -> Inputs:
    """Reads the lines of text files, or fields of the rows of JSON lines and tables.

    All lines are checked first, so that an error in the last line shows before any prediction.

    Args:
        path: a file, a glob, or a folder of files at any depth. .jsonl, .ndjson and .json are JSON
            lines, and so is any text for a task with several fields; .tsv and .csv are tables with
            a header line. May additionally end in .gz, .xz or .bz2.
        field: field of the text in rows. By default the fields of the task; for plain texts
            "inputs", "input", "text" or "sentence".
        format: the input format of the task; None uses texts unchanged.
        invalid_utf8: what to do with lines that are not UTF-8, as in training: "refuse", "replace"
            or "skip".
        output: a file that will be written while these are read, and must be none of them.

    Raises:
        UserError: a file is missing or unreadable, or a line has no text; names the line.
    """
    local_files.check_invalid_utf8(invalid_utf8)
    path = os.path.expanduser(path)
    try:
        names = local_files.find(path)
    except local_files.NoFileError:
        raise _names_no_file(path) from None
    if output is not None:
        _check_apart(path, names, output)

    read = functools.partial(_read, names, field, format, invalid_utf8)
    tally = local_files.Tally(missing_shards=local_files.num_missing_shards(names))
    total = sum(1 for _ in read(tally))
    return Inputs(
        path, total, lambda: _as_many(total, read(local_files.Tally()), path), tally.faults
    )


def _read(
    names: Sequence[str],
    field: str | None,
    format: TaskFormat | None,
    invalid_utf8: str,
    tally: local_files.Tally,
) -> Iterator[Item]:
    for name in names:
        if local_files.suffix(name) in (".tsv", ".csv"):
            parse = _record_parser(field, format)
            yield from _table_items(name, parse, invalid_utf8, tally)
            continue
        is_json = local_files.is_json_lines(name)
        parse, skips_blank = _parser(field, format, is_json=is_json)
        before = tally.documents
        with local_files.explain_errors(name), local_files.open_bytes(name) as file:
            lines = _lines(file, name, invalid_utf8, tally)
            for item in _items(lines, parse, skip_blank=skips_blank):
                tally.documents += 1
                yield item
        tally.empty_files += tally.documents == before


def from_stream(
    stream: Iterable[bytes],
    field: str | None = None,
    format: TaskFormat | None = None,
    *,
    invalid_utf8: str = "refuse",
) -> Inputs:
    """Reads the lines of a stream as they arrive; they can be read only once.

    They are JSON lines if `field` is given or the task has several fields.
    """
    local_files.check_invalid_utf8(invalid_utf8)
    parse, skips_blank = _parser(field, format, is_json=False)
    tally = local_files.Tally()

    def read() -> Iterator[Item]:
        lines = _lines(stream, "standard input", invalid_utf8, tally)
        return _items(lines, parse, skip_blank=skips_blank)

    return Inputs(STDIN, None, read, tally.faults)


def from_examples(name: str, examples: Iterable[Item]) -> Inputs:
    """Wraps inputs in memory."""
    items = list(examples)
    return Inputs(name, len(items), lambda: iter(items))


def chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yields lists of `size` inputs, then the rest, even if reading ends in an error."""
    chunk: list[Item] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                full, chunk = chunk, []
                yield full
    except errors.UserError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _names_no_file(path: str) -> errors.UserError:
    return errors.UserError(
        f"input={path} names no file (working directory {os.getcwd()!r}); correct the path, or "
        f"give {STDIN} for standard input."
    )


def _as_many(total: int, items: Iterable[Item], path: str) -> Iterator[Item]:
    """Yields inputs; raises `TrainingError` if they are not as many as were counted."""
    count = 0
    for item in items:
        count += 1
        yield item
    if count != total:
        raise errors.TrainingError(
            f"input={path} holds {count} inputs, but held {total} before predictions began; "
            "leave its files unchanged while they are read, and repeat the command."
        )


def _check_apart(path: str, names: Sequence[str], output: str) -> None:
    """Raises `UserError` if `path` names the output, or will once it is there."""
    output = os.path.expanduser(output)
    read = {os.path.realpath(name) for name in names}
    pattern = os.path.realpath(path)
    if os.path.exists(pattern):
        pattern = os.path.join(glob.escape(pattern), *["**"] * os.path.isdir(pattern))
    for written in map(os.path.realpath, (output, f"{output}.settings.json")):
        if written in read or _matches(written.split(os.sep), pattern.split(os.sep)):
            raise errors.UserError(
                f"output={output} lies among the files of input={path}; write it elsewhere, or "
                "narrow --input."
            )


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the parts of a path match those of a glob, where `**` is any number."""
    if not parts or not pattern:
        return not parts and set(pattern) <= {"**"}
    (part, *rest), (first, *others) = parts, pattern
    if part.startswith(".") and not first.startswith("."):
        return first == "**" and _matches(parts, others)
    if first == "**":
        return _matches(parts, others) or _matches(rest, pattern)
    return fnmatch.fnmatchcase(part, first) and _matches(rest, others)


_FIELDS = ("inputs", "input", "text", "sentence")


def _parser(
    field: str | None, format: TaskFormat | None, *, is_json: bool
) -> tuple[Callable[[str], Any], bool]:
    """Returns a function that parses a line, and whether blank lines are skipped."""
    several = format if format is not None and len(format.fields) > 1 else None
    parse_record = _record_parser(field, format)
    if not (several or is_json or field is not None):
        return format.read if format else _checked_alone, False
    return lambda line: parse_record(_json_object(line, several)), True


def _record_parser(
    field: str | None, format: TaskFormat | None
) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that extracts an input from the fields of a row."""
    several = format if format is not None and len(format.fields) > 1 else None
    if several and field is not None:
        raise errors.UserError(
            f"field={field} names one field, but task={several.task} writes an input from "
            f"{' and '.join(several.fields)}; leave out --field, or send the texts of one field as "
            "they are with --raw."
        )
    check = format.read if format else _checked_alone

    def parse(record: Mapping[str, Any]) -> Any:
        if several:
            return check(record)
        names = [field] if field else [*(format.fields if format else ())]
        if not field and (format is None or format.is_plain):
            names += _FIELDS
        name = next((name for name in names if name in record), None)
        if name is None:
            raise FieldError(
                f"has no field {' or '.join(dict.fromkeys(names))!r}, but {sorted(record)}; name "
                f"the field with --field.{errors.suggest(names[0], record)}"
            )
        if not isinstance(record[name], str) and format is None:
            raise FieldError(f"has {record[name]!r} in the field {name!r}, which must be text")
        return check({format.fields[0] if format and format.fields else "inputs": record[name]})

    return parse


def _checked_alone(given: Any) -> str:
    return given if isinstance(given, str) else given["inputs"]


def _json_object(line: str, format: TaskFormat | None) -> dict[str, Any]:
    """Parses a line as a JSON object; `format` is that of a task with several fields."""
    expected = (
        f"; task={format.task} writes an input from {' and '.join(format.fields)}: give JSON "
        f"lines such as {format.example()}, or pass texts unchanged with --raw"
        if format
        else ""
    )
    try:
        record = foreign_files.parse_json(line)
    except ValueError as error:
        raise FieldError(f"is not JSON ({error}){expected}") from None
    if not isinstance(record, dict):
        raise FieldError(f"is no JSON object but {line[:40]!r}{expected}")
    return record


class _Line(NamedTuple):
    """A line, or the fields of a row, with its location."""

    content: str | Mapping[str, Any]
    where: str


def _lines(file: Iterable[bytes], name: str, invalid_utf8: Any, tally: Any) -> Iterator[_Line]:
    """Yields the lines of a file as training reads them."""
    for number, line in enumerate(local_files.text_lines(file, name), start=1):
        text = local_files.handle_invalid(line, name, number, invalid_utf8, tally)
        if text is not None:
            yield _Line(text, f"{name}, line {number}")


def _table_items(
    name: str, parse: Callable[[Any], Any], invalid_utf8: Any, tally: local_files.Tally
) -> Iterator[Item]:
    # Deferred: imports TensorFlow, which other inputs do not need.
    from convt5.tasks import tables

    def items(rows: Iterable[Any]) -> Iterator[Item]:
        lines = (_Line(row.values, f"{row.file}, line {row.line}") for row in rows)
        return _items(lines, parse, skip_blank=False)

    def check_header(header: Any) -> None:
        list(items([header]))

    settings = {"invalid_utf8": invalid_utf8, "tally": tally, "check_header": check_header}
    return items(tables.read_rows(name, **settings))


def _items(
    lines: Iterable[_Line], parse: Callable[[Any], Any], *, skip_blank: bool
) -> Iterator[Item]:
    """Yields inputs; a blank line is an error in text, and skipped in JSON."""
    for line in lines:
        if skip_blank and isinstance(line.content, str) and not line.content.strip():
            continue
        try:
            parsed = parse(line.content)
            for text in parsed.values() if isinstance(parsed, dict) else [parsed]:
                if not text.strip():
                    raise FieldError("is empty: there is nothing to predict from; leave it out")
                text.encode()  # Raises for unpaired surrogates, which JSON can express.
        except UnicodeEncodeError as error:
            raise errors.UserError(f"{line.where} is not UTF-8 ({error}); correct it.") from None
        except FieldError as error:
            raise error.at(line.where) from None
        yield Item(parsed)
