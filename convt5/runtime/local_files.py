"""Finds and opens local or remote files, plain or compressed, with errors that name the file."""

import bz2
import codecs
import collections
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import lzma
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from convt5 import errors
from convt5.runtime import atomic_files, foreign_files, quiet_imports
from convt5.runtime.atomic_files import is_remote

OPENERS: Mapping[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".xz": lambda file: foreign_files.Streams(file, lzma.LZMADecompressor),
    ".bz2": lambda file: foreign_files.Streams(file, bz2.BZ2Decompressor),
}
"""The function that opens files with each suffix."""

COMPRESSION_RULE = f"Of compressed files those are read whose names end in {', '.join(OPENERS)}."

_UTF_16 = tuple(
    mark.decode("utf-8", "surrogateescape") for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
)
_SHARD = re.compile(r"-\d+-of-\d+$")
_SHARD_OF_SET = re.compile(r"(.*)(-\d+-of-(\d+))(.*)", re.DOTALL)
_WHOLE_BYTES = 2**24
_NUM_BLOCKS = 64
_BLOCK_BYTES = 2**16

InvalidUtf8 = Literal["refuse", "replace", "skip"]
"""What to do with text that is not UTF-8, such as UTF-16: raise an error that names file and line,
insert U+FFFD, or skip the document or row."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path or glob, or several of them."""


class NoFileError(errors.UserError):
    """Raised for a path that stands for no file."""


def find(paths: Paths) -> list[str]:
    """Returns the files of one or several paths, globs or folders, in order, without duplicates.

    Links to a file count as that file. An existing file or folder of exactly that name precedes its
    matches as a glob; `**` matches local folders of any depth. A folder means all files in it, at
    any depth, and where links lead, except those of run directories inside of it. Names that begin
    with a dot match only globs that begin with a dot.

    Raises:
        NoFileError: a path matches no file.
        UserError: a folder cannot be read, or as `check`.
    """
    patterns = [paths] if isinstance(paths, str | os.PathLike) else paths
    names = [name for pattern in patterns for name in _matches(os.fspath(pattern))]
    files = distinct(names)
    check(name if is_remote(name) else os.path.abspath(name) for name in files)
    return files


def check(names: Iterable[str]) -> None:
    """Checks that files can be read, and hold different rows.

    Args:
        names: remote files, and absolute paths of local ones.

    Raises:
        UserError: one is no regular file or an archive of others, or two hold the same rows by
            their names: compressed and not, or of two numbered sets of other sizes.
    """
    names = list(names)
    for name in names:
        if not is_remote(name) and not os.path.isfile(name):
            kind = atomic_files.kind(pathlib.Path(name))
            raise errors.UserError(
                f"file {name!r} is {kind}, not a regular file or a link to one; fetch the content "
                "of a link (`git annex get`, `dvc pull`), write that of a pipe to a file (`infer "
                "--input=-` reads standard input), or leave it out of the path."
            )
        if suffix(name) == ".tar":
            raise errors.UserError(
                f"file {name!r} is an archive of other files, whose headers are no text; unpack it "
                "(tar -xf), or leave it out of the path."
            )
    check_once(names)


def check_once(names: Iterable[str]) -> None:
    """Raises `UserError` if two files hold the same rows by their names."""
    places = {}
    for name in names:
        plain = without_compression(name)
        found = _SHARD_OF_SET.fullmatch(plain)
        places[name] = (found[1] + found[4], found[2]) if found else (plain, "")
    if same := same_rows(places):
        raise errors.UserError(
            f"files {same[0]!r} and {same[1]!r} hold the same rows by their names, which would be "
            "read twice; remove one, or rename it."
        )


def same_rows(places: Mapping[str, tuple[Hashable, str]]) -> tuple[str, str] | None:
    """Returns two files that hold the same rows by their names; None without such.

    Writers of numbered files leave those of an earlier set of another size where they are.

    Args:
        places: of each file, what it holds, and its number in a set, such as -00000-of-00002; ""
            for the whole.
    """
    parts: dict[Hashable, dict[str, str]] = {}
    for name, (rows, part) in places.items():
        kept = parts.setdefault(rows, {part: name})
        first = next(iter(kept))
        other = kept.setdefault(part, name)
        if other == name and first.rpartition("-")[2] != part.rpartition("-")[2]:
            other = kept[first]
        if other != name:
            return other, name
    return None


def distinct(names: Iterable[str]) -> list[str]:
    """Returns names of files, in order, without further links to the same files."""
    return list(_by_place(names).values())


def check_apart(splits: Mapping[str, Sequence[str]]) -> None:
    """Checks that the files that measure a model are not among those that it is trained on.

    The same files for both are let be: somebody wants to see whether a model learns them.

    Args:
        splits: names of the files of each split.

    Raises:
        UserError: some files of a split are also in "train", but not all, or others are.
    """
    for split in splits.keys() - {"train"}:
        _check_held_out(splits.get("train", []), splits[split], split)


def _check_held_out(train: Sequence[str], held_out: Sequence[str], split: str) -> None:
    both = common(train, held_out)
    if both and _by_content(train).keys() != _by_content(held_out).keys():
        raise errors.UserError(
            f"file {both[0]!r} of split={split!r} is also among the files of 'train', so what "
            "measures the model would be trained on; leave it out of one of the two paths, for "
            "instance by a glob that matches only one of them."
        )


def num_missing_shards(names: Iterable[str]) -> int:
    """Returns how many files are absent from sets with names like part-00000-of-00002.txt."""
    places = map(_SHARD_OF_SET.fullmatch, map(without_compression, _by_place(names)))
    sets = collections.Counter(place.group(1, 3, 4) for place in places if place)
    return sum(max(0, int(total) - found) for (_, total, _), found in sets.items())


def common(train: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Returns the names among `held_out` of files that are also in `train`."""
    ours = _by_content(train)
    return [name for place, name in _by_content(held_out).items() if place in ours]


def _by_content(names: Iterable[str]) -> dict[str, str]:
    return {without_compression(place): name for place, name in _by_place(names).items()}


def _by_place(names: Iterable[str]) -> dict[str, str]:
    """Returns the first of the names of each file, by the name that links to it lead to."""
    files: dict[str, str] = {}
    folders: dict[str, str] = {}  # Each is resolved once, as there may be very many files.
    for name in names:
        place = name
        if not is_remote(name):
            folder, base = os.path.split(name)
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            place = os.path.join(folders[folder], base)
            place = os.path.realpath(place) if os.path.islink(place) else place
        files.setdefault(place, name)
    return files


def in_folder(path: str | os.PathLike[str]) -> list[str] | None:
    """Returns the files in a local or remote folder as `find`, unchecked; None for another path.

    Raises:
        UserError: the folder cannot be read.
    """
    name = os.path.expanduser(os.fspath(path))
    with _explain_listing(name):
        if not _is_folder(name):
            return None
        return sorted(_remote_files(name) if is_remote(name) else foreign_files.files_below(name))


def _matches(pattern: str) -> list[str]:
    with _explain_listing(pattern):
        return _names(os.path.expanduser(pattern))


@contextlib.contextmanager
def _explain_listing(pattern: str) -> Iterator[None]:
    try:
        yield
    except _remote_errors(pattern) as error:
        is_unknown = type(error).__name__ == "UnimplementedError"  # The kind of URL.
        reason = getattr(error, "message", error)
        raise (None if is_unknown else errors.of_files(error)) or errors.UserError(
            f"text path={pattern!r} cannot be listed ({reason}); copy the files to a local or "
            "mounted disk, or to Google Cloud Storage (gs://)."
        ) from error


def _names(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    below = in_folder(pattern)
    if below:
        return below
    if below is not None:
        raise NoFileError(
            f"text path={pattern!r} is a folder without files; set it to files with text."
        )
    if is_remote(pattern) and "**" in pattern:
        raise errors.UserError(
            f"text path={pattern!r}: in a store, ** does not match folders of any depth; name the "
            "folder, which stands for all files in it, or one glob for each depth."
        )
    if is_remote(pattern):
        matched = _tensorflow().io.gfile.glob(pattern)
    else:
        _check_readable(pattern)
        matched = glob.glob(pattern, recursive=True)
    names = [name for name in matched if not _is_folder(name)]
    if not os.path.basename(pattern).startswith("."):
        names = [name for name in names if not os.path.basename(name).startswith(".")]
    if names:
        return sorted(names)
    folder, name = os.path.split(pattern)
    siblings = []
    with contextlib.suppress(OSError, ValueError):  # One may enter folders that one may not list.
        siblings = os.listdir(folder or ".")
    raise NoFileError(
        f"text path={pattern!r} matches no file; set it to a path or a glob of text files "
        f"(working directory {os.getcwd()!r}).{errors.suggest(name, siblings)}"
    )


def _is_folder(name: str) -> bool:
    return (_tensorflow().io.gfile if is_remote(name) else os.path).isdir(name)


def _check_readable(pattern: str) -> None:
    """Raises `UserError` for a folder that `glob` would list, but skips as it cannot be read."""
    head, tail = os.path.split(pattern)
    if head not in ("", pattern):
        _check_readable(head)
    if not glob.has_magic(tail):
        return
    listed = os.path.join(head or ".", "**" if tail == "**" else "", "")
    for folder in glob.iglob(listed, recursive=True):
        try:
            os.scandir(folder).close()
        except OSError as error:
            raise errors.UserError(
                f"text path={pattern!r} matches in folder {folder!r}, which cannot be read "
                f"({error.strerror}); change its permissions, or leave it out of the path."
            ) from error


def _remote_files(folder: str) -> Iterator[str]:
    def refuse(error: Exception) -> NoReturn:
        raise error

    for parent, folders, names in _tensorflow().io.gfile.walk(folder, onerror=refuse):
        held = {name.rstrip("/") for name in (*folders, *names)}
        if parent.rstrip("/") != folder.rstrip("/") and foreign_files.is_run(held):
            folders[:] = names[:] = []
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


@dataclasses.dataclass
class Tally:
    """Counts of what was read from files.

    Attributes:
        files, empty_files: number of files read, and of those that were empty.
        documents, text_bytes: number of documents or rows, and bytes of their text.
        replaced, skipped: documents or rows that are not UTF-8, by how they were handled.
        quoted: rows of .tsv files with a field that is quoted as in .csv files.
        missing_shards: as `num_missing_shards`.
    """

    files: int = 0
    empty_files: int = 0
    documents: int = 0
    text_bytes: int = 0
    replaced: int = 0
    skipped: int = 0
    quoted: int = 0
    missing_shards: int = 0

    def faults(self) -> str:
        """Returns a warning for the user, or an empty text."""
        counts = {
            "empty files": self.empty_files,
            "documents with bytes that are no UTF-8, which were replaced": self.replaced,
            "documents left out for bytes that are no UTF-8": self.skipped,
            "rows of .tsv quoted like .csv, as pandas does, whose quotes are kept as text (write "
            "the file with csv.QUOTE_NONE, or as .csv)": self.quoted,
            "files missing from numbered sets such as part-00000-of-00002": self.missing_shards,
        }
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def holdout_every(validation_fraction: float) -> int | None:
    """Returns n if one row or document of n is held out, and None for none.

    Raises:
        UserError: the fraction is out of range.
    """
    if not 0 <= validation_fraction <= 0.5:
        raise errors.UserError(
            f"validation_fraction={validation_fraction} must be in [0, 0.5]; 0.1 holds out one row "
            "or document of ten."
        )
    # 1 over a number below the minimum is infinite.
    return round(1 / max(validation_fraction, sys.float_info.min)) if validation_fraction else None


def check_invalid_utf8(policy: str) -> None:
    """Raises `UserError` for a value that `InvalidUtf8` does not include."""
    if policy not in ("refuse", "replace", "skip"):
        raise errors.UserError(
            f"invalid_utf8={policy!r} must be 'refuse', 'replace' or 'skip': an error, U+FFFD in "
            "place of the bytes, or leaving out what holds them."
        )


def text_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Yields lines without their end: a line feed, optionally after a carriage return.

    Nothing else ends a line: a lone carriage return, a form feed, U+0085 and U+2028 are text. An
    initial byte order mark is removed. Invalid bytes become surrogates; see `handle_invalid`.

    Args:
        file: the lines with their ends.
        name: name of the file, for the message.

    Raises:
        UserError: carriage returns stand between texts, and there is no line feed.
    """
    for number, line in enumerate(file):
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
            if b"\r" in line.rstrip(b"\r") and not line.endswith(b"\n"):
                raise errors.UserError(
                    f"file {name!r} has carriage returns and no line feed, so all of it would be "
                    "one line; convert it (tr '\\r' '\\n')."
                )
        if line.endswith(b"\n"):
            line = line[:-1].removesuffix(b"\r")
        yield line.decode("utf-8", "surrogateescape")


def handle_invalid(
    text: str, name: str, line: int, policy: InvalidUtf8, tally: Tally
) -> str | None:
    """Handles text that is not UTF-8 according to `policy`; returns None to skip it.

    Args:
        text: a line from `text_lines`.
        name: name of the file.
        line: line number, from 1.
        policy: what to do with invalid text.
        tally: counts it.

    Raises:
        UserError: the text is invalid and the policy is "refuse".
    """
    at = _invalid_place(text)
    if at is None:
        return text
    if policy == "refuse":
        raise errors.UserError(
            f"file {name!r}, line {line} is not UTF-8 (byte 0x{ord(text[at]) & 0xFF:02x} after "
            f"{text[:at][-20:]!r}); convert the file ({_conversion(text, at, line)}), "
            "leave it out of the path, or set invalid_utf8 to 'replace' or 'skip'. "
            f"{COMPRESSION_RULE}"
        )
    if policy == "skip":
        tally.skipped += 1
        return None
    tally.replaced += 1
    return replace_invalid(text)


def replace_invalid(text: str) -> str:
    """Replaces invalid bytes in text from `text_lines` by U+FFFD, and NUL in UTF-16."""
    whole = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return whole.replace("\0", "\ufffd") if _is_a_quarter_nul(text) else whole


def check_no_utf_16(name: str) -> None:
    """Raises `UserError` if a file is UTF-16 by its first line, for readers of lines of bytes."""
    with explain_errors(name), open_bytes(name) as file:
        text = file.readline(_BLOCK_BYTES).decode("utf-8", "surrogateescape")
    if text.startswith(_UTF_16) or _is_a_quarter_nul(text):
        raise errors.UserError(
            f"file {name!r} is UTF-16, of which lines of bytes are no text; convert it "
            f"({_conversion(text, 0, 1)})."
        )


def _invalid_place(text: str) -> int | None:
    """Returns the index of the first character that is not UTF-8; None without one.

    In text that is a quarter NUL, or more, it is the first NUL: half of ASCII in UTF-16 is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return text.index("\0") if _is_a_quarter_nul(text) else None


def _is_a_quarter_nul(text: str) -> bool:
    return 4 * text.count("\0") >= len(text) > 0


def _conversion(text: str, at: int, line: int) -> str:
    """Returns the command that probably makes UTF-8 of a file whose line is invalid at `at`."""
    if line == 1 and text.startswith(_UTF_16):
        return "iconv -f utf-16 -t utf-8"
    if line == 1 and "\0" in text:
        # Every second byte of ASCII in UTF-16 is NUL.
        before = text[: text.index("\0")].encode("utf-8", "surrogateescape")
        return f"iconv -f utf-16{'le' if len(before) % 2 else 'be'} -t utf-8"
    return "tr -d '\\000'" if text[at] == "\0" else "iconv -f latin1 -t utf-8"


def identity(name: str) -> tuple[str, int, int]:
    """Returns a file's absolute name, size and time of modification, which differ for a copy."""
    if is_remote(name):
        stat = _tensorflow().io.gfile.stat(name)
        return name, stat.length, stat.mtime_nsec
    stat = os.stat(name)
    return os.path.abspath(name), stat.st_size, stat.st_mtime_ns


def contents(name: str) -> tuple[str, int, str | int]:
    """Returns values that stay equal when a file is copied to another folder or machine.

    These are its base name, its size, and a digest of its bytes: of all of them up to 16 MiB, of 64
    evenly spaced blocks of a larger file. Remote files are not read; their time of modification
    replaces the digest.
    """
    if is_remote(name):
        _, size, modified = identity(name)
        return os.path.basename(name), size, modified
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for i in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return os.path.basename(name), size, digest.hexdigest()


def without_compression(name: str) -> str:
    """Returns a file's name without the suffix of its compression."""
    suffix = pathlib.PurePath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in OPENERS else name


def suffix(name: str) -> str:
    """Returns the suffix of a file's name before that of its compression, such as `.txt`.

    It is in lower case, and without the number of a shard.
    """
    return pathlib.PurePath(_SHARD.sub("", without_compression(name))).suffix.lower()


def is_json_lines(name: str) -> bool:
    """Returns whether a file has a JSON value per line, judged by its name; .json counts too."""
    suffixes = pathlib.PurePath(_SHARD.sub("", name.lower())).suffixes
    return ".jsonl" in suffixes or suffix(name) in (".ndjson", ".json")


def open_bytes(name: str) -> Any:
    """Opens a file for reading bytes, decompressed according to its name.

    The sizes of its contents and of its lines are bounded as in `foreign_files.Text`.
    """
    suffix = pathlib.PurePath(name).suffix.lower()
    stored = identity(name)[1] if suffix in OPENERS else None
    file: Any = _tensorflow().io.gfile.GFile(name, "rb") if is_remote(name) else name
    if suffix in OPENERS:
        file = OPENERS[suffix](file)
    elif file is name:
        file = io.FileIO(name)
    return io.BufferedReader(foreign_files.Text(file, stored), _BLOCK_BYTES)


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Turns errors in reading a file into user errors."""
    try:
        yield
    except (
        *(EOFError, lzma.LZMAError, zlib.error, OSError, foreign_files.TooLargeError),
        *_remote_errors(name),
    ) as error:
        raise errors.UserError(
            f"text file {name!r} cannot be read ({error}); is it complete?"
        ) from error


def _remote_errors(name: str) -> tuple[type[Exception], ...]:
    """Returns what TensorFlow raises for a file, if it reads it."""
    return (_tensorflow().errors.OpError,) if is_remote(name) else ()


def _tensorflow() -> Any:
    # Deferred: only remote files need it.
    with quiet_imports.without_tensorflow_chatter():
        import tensorflow
    return tensorflow
