"""Where `infer` reads: lines of text, fields of JSON lines, standard input, or a task's split."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

from convt5 import errors

STDIN = "-"


class Item(NamedTuple):
    """One input.

    Attributes:
        text: what is predicted from.
        tokens: its ids, where the task has made them already.
        target: the true answer, where it is known.
    """

    text: str
    tokens: list[int] | None = None
    target: str | None = None


class Inputs(NamedTuple):
    """Inputs that can be read from the start.

    Attributes:
        name: what they are called in messages and settings.
        total: how many; None where they come one by one.
        read: yields them.
    """

    name: str
    total: int | None
    read: Callable[[], Iterator[Item]]


def from_file(path: str, field: str | None = None) -> Inputs:
    """Returns the lines of a text file, or a field of each line of a file of JSON lines.

    All of the file is checked at once: a fault in its last line is better known before the first
    is predicted.

    Args:
        path: .jsonl, .ndjson and .json are JSON lines; may end in .gz, .xz or .bz2 after that.
        field: of JSON objects; by default "inputs" or "input", "text" or "sentence".

    Raises:
        UserError: no such file, one that cannot be read, or a line without text; the message has
            its number.
    """
    # Deferred: it imports TensorFlow, which predictions of texts in memory do not need.
    from convt5.tasks import local_files  # pyright: ignore[reportMissingImports]

    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise errors.UserError(
            f"input={path} names no file (working directory {os.getcwd()!r}); correct the path, "
            f"or give {STDIN} for standard input."
        )
    is_json = local_files.is_json_lines(path)
    parse = _parser(field, is_json=is_json)

    def read() -> Iterator[Item]:
        with local_files.explained(path), local_files.open_bytes(path) as file:
            yield from _items(file, path, parse, skip_blank=is_json or field is not None)

    return Inputs(path, sum(1 for _ in read()), read)


def from_stream(stream: Iterable[bytes], field: str | None = None) -> Inputs:
    """Returns the lines of a stream, which are read as they come, and once."""
    parse = _parser(field, is_json=False)
    skip_blank = field is not None
    return Inputs(
        STDIN, None, lambda: _items(stream, "standard input", parse, skip_blank=skip_blank)
    )


def from_examples(name: str, examples: Iterable[Item]) -> Inputs:
    """Returns inputs that are in memory."""
    items = list(examples)
    return Inputs(name, len(items), lambda: iter(items))


def chunks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yields `size` inputs at a time, and the rest, also of inputs that end in a fault."""
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


_FIELDS = ("inputs", "input", "text", "sentence")


def _parser(field: str | None, *, is_json: bool) -> Callable[[str], str]:
    if field is None and not is_json:
        return lambda line: line

    def parse(line: str) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise errors.UserError(f"is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise errors.UserError(f"is no JSON object but {line[:40]!r}")
        name = field or next((name for name in _FIELDS if name in record), None)
        if name is None or name not in record:
            raise errors.UserError(
                f"has no field {name or ' or '.join(_FIELDS)!r}, but {sorted(record)}; name the "
                f"field with --field{errors.suggest(name or '', record)}"
            )
        value: Any = record[name]
        if not isinstance(value, str):
            raise errors.UserError(f"has {value!r} in the field {name!r}, which must be text")
        return value

    return parse


def _items(
    file: IO[bytes] | Iterable[bytes],
    name: str,
    parse: Callable[[str], str],
    *,
    skip_blank: bool,
) -> Iterator[Item]:
    """Yields inputs; blank lines are a fault in text, whose lines are counted, and none in JSON."""
    for number, line in enumerate(file, start=1):
        try:
            decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if skip_blank and not decoded.strip():
                continue
            text = parse(decoded.rstrip("\r\n"))
            if not text.strip():
                raise errors.UserError("is empty: there is nothing to predict from; leave it out")
            text.encode()  # JSON can express halves of characters, which no vocabulary has.
        except UnicodeError as error:
            # JSON that is well-formed cannot be compressed.
            is_bytes = isinstance(error, UnicodeDecodeError)
            named = " (compressed files must be named .gz, .xz or .bz2)" if is_bytes else ""
            raise errors.UserError(
                f"{name}, line {number} is not UTF-8 ({error}); convert it{named}."
            ) from None
        except errors.UserError as error:
            raise errors.UserError(f"{name}, line {number} {error}.") from None
        yield Item(text)
