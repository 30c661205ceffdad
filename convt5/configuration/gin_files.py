"""Finds and reads gin files: the statements they hold, each with its file and line.

Reading imports no module that a file names, so that mistakes in files are reported at once.
`gin_config` checks what was read and hands it to gin. What is read may come from anybody, so it is
bounded: far beyond what anyone writes, and far below what a computer cannot hold.
"""

import dataclasses
import itertools
import os
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gin import config_parser

from convt5 import errors

MODEL_MARKER = "MODEL_NAME"
"""A file that binds this macro describes a model, see `read_all`."""

REQUIRED = "gin.REQUIRED"
DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"
PACKAGE = pathlib.Path(__file__).resolve().parents[1]

MOST_BYTES = 2**20  # Of one file.
MOST_STATEMENTS = 5_000  # Of all files.
MOST_INCLUDES = 20  # In one another.
MOST_NESTING = 40  # Of lists, macros and objects in one another.
_MOST_FILES = 200
_LONGEST_NAME = 500
_LONGEST_SHOWN = 200
_MOST_LINKS = 40  # As many as Linux follows.
_MOST_PARTS = 30  # Of a name, its scopes counted in.

_MODEL_FILES = (
    "config.gin",
    "convt5.json",
    "metrics.jsonl",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "sweep.json",
)
"""Any of these makes a folder that of a model, and all that lies below it."""
_BESIDE_MODELS = (*_MODEL_FILES, "cache.json", "checkpoints", "conversion.txt", "summary.json")
"""Any of these shows that what lies beside it may have come with a model."""


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a statement stands.

    Attributes:
        source: the file, or how else it was given.
        line: in the file; 0 elsewhere.
        is_own: whether the user wrote it; False for a file that came with a model.
    """

    source: str
    line: int = 0
    is_own: bool = True

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


COMMAND_LINE = Location("the command line")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A value `@scope/module.Name` or, if `call`, `@scope/module.Name()`."""

    scopes: tuple[str, ...]
    selector: str
    call: bool

    def __repr__(self) -> str:
        return f"@{'/'.join((*self.scopes, self.selector))}{'()' if self.call else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """A value `%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Import:
    """`import module` or `from package import name`; `name` is what the file calls it."""

    text: str
    module: str
    name: str
    location: Location


@dataclasses.dataclass(frozen=True)
class Binding:
    """`scope/module.Name.parameter = value`, or `MACRO = value` without a parameter."""

    scope: str
    selector: str
    parameter: str
    value: Any
    location: Location

    @property
    def is_macro(self) -> bool:
        return not self.parameter

    @property
    def name(self) -> str:
        prefix = f"{self.scope}/" if self.scope else ""
        return f"{prefix}{self.selector}{'.' if self.parameter else ''}{self.parameter}"


@dataclasses.dataclass(frozen=True)
class Include:
    """`include 'file'`."""

    path: str
    location: Location


Statement = Import | Binding | Include


@dataclasses.dataclass(frozen=True)
class GinFile:
    """One file: how it was named, where it is, what it says, and whether the user wrote it."""

    name: str
    path: pathlib.Path
    statements: tuple[Statement, ...]
    is_own: bool

    @property
    def is_model(self) -> bool:
        return any(isinstance(s, Binding) and s.name == MODEL_MARKER for s in self.statements)


def model_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the nearest folder of a model that a folder is or lies in, if there is one."""
    around = (folder, *folder.parents)
    return next((f for f in around if any(_exists(f / name) for name in _MODEL_FILES)), None)


def came_with_model(file: pathlib.Path) -> bool:
    """Whether a file lies in a run directory or beside an exported model, by any of its names.

    Such a file may be anybody's: models are copied with all that lies around them, links included.
    """
    for path in _led_through(file):
        if any(_exists(path.parent / name) for name in _BESIDE_MODELS):
            return True
        if model_folder(path.parent) is not None:
            return True
    return False


def _led_through(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields every path that symbolic links lead through from a name to the file itself."""
    path = pathlib.Path(os.path.abspath(file))
    yield path
    for _ in range(_MOST_LINKS):
        link = next((p for p in (*reversed(path.parents), path) if p.is_symlink()), None)
        if link is None:
            break
        path = pathlib.Path(os.path.abspath(link.parent / link.readlink()), path.relative_to(link))
        yield path
    yield file.resolve()


def _exists(path: pathlib.Path) -> bool:
    return os.path.lexists(path)


def is_required(statements: Iterable[Any], macro: str) -> bool:
    """Whether statements demand a macro, `%gin.REQUIRED`, that none of them gives after that."""
    values = {s.selector: s.value for s in statements if isinstance(s, Binding) and s.is_macro}
    return values.get(macro) == Macro(REQUIRED)


def read_all(names: Sequence[str]) -> list[Import | Binding]:
    """Returns the statements of all files in order, includes put in their place.

    A model file (one that binds MODEL_NAME) among `names` takes the place of the model file that
    another one includes, so that a run's own settings still come after it and nothing of the
    replaced model remains. Elsewhere later statements override earlier ones, as gin does.

    A file that came with a model, and what such a file includes, has statements whose location is
    not `is_own`.

    Raises:
        UserError: a file is missing, cannot be parsed, includes itself, or is larger than anyone
            writes; all are listed.
    """
    reader = _Reader()
    files = [file for name in names if (file := reader.read(name, None))]
    models = [file for file in files if file.is_model]
    if len(models) > 1:
        reader.faults.append(
            f"{' and '.join(file.name for file in models)} are all model files (each binds "
            f"{MODEL_MARKER}), but a run has one model; give one of them."
        )
    errors.raise_all(reader.faults, where="configuration")
    model = models[0] if models else None
    statements = list(reader.expand(files, model, ()))
    if model and model.path not in reader.used:
        statements = [*reader.expand([model], None, ()), *statements]
    errors.raise_all(reader.faults, where="configuration")
    return statements


class _Reader:
    """Reads files and what they include, and counts what it has read."""

    def __init__(self):
        self.faults: list[str] = []
        self.used: set[pathlib.Path] = set()
        self._num_files = 0
        self._num_statements = 0

    def expand(
        self, files: Iterable[GinFile], model: GinFile | None, parents: tuple[pathlib.Path, ...]
    ) -> Iterator[Import | Binding]:
        for file in files:
            if not parents and file is model:
                continue  # It stands where a run file includes a model, or before all others.
            self.used.add(file.path)
            chain = (*parents, file.path)
            for statement in file.statements:
                if not isinstance(statement, Include):
                    yield statement
                    continue
                included = self.read(statement.path, statement.location, inside=file)
                if included is None:
                    continue
                if included.path in chain:
                    self.faults.append(f"{statement.location}: {statement.path} includes itself.")
                    continue
                if len(chain) > MOST_INCLUDES:
                    raise _too_many(statement.location, f"{MOST_INCLUDES} files in one another")
                inside = model
                if model and included.is_model:
                    # What the chosen model includes itself is part of it.
                    included, inside = model, None
                yield from self.expand([included], inside, chain)

    def read(
        self, name: str, where: Location | None, inside: GinFile | None = None
    ) -> GinFile | None:
        found = _find(name, inside.path.parent if inside else None)
        prefix = f"{where}: " if where else ""
        if found is None:
            self.faults.append(f"{prefix}gin file {name!r} {_missing(name)}")
            return None
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise _too_many(where or name, f"{_MOST_FILES} files")
        is_own = (inside is None or inside.is_own) and not came_with_model(found)
        try:
            parsed = _parse_text(_text(found), name=name, is_own=is_own)
            statements = tuple(itertools.islice(parsed, MOST_STATEMENTS + 1))
        except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
            self.faults.append(f"{Location(name, _line(error))}: {_reason(error)}")
            return None
        except OSError as error:
            self.faults.append(f"{prefix}gin file {name!r} cannot be read: {error.strerror}.")
            return None
        self._num_statements += len(statements)
        if self._num_statements > MOST_STATEMENTS:
            raise _too_many(where or name, f"{MOST_STATEMENTS:,} statements")
        return GinFile(name, found.resolve(), statements, is_own)


def _too_many(where: Location | str, what: str) -> errors.UserError:
    return errors.UserError(
        f"configuration: {where}: more than {what}, what is included counted in; no configuration "
        "needs so many."
    )


def _text(path: pathlib.Path) -> str:
    """Returns what a file holds, unless it is larger than any configuration."""
    # Some files look ordinary and would make us wait, such as /proc/kmsg.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TooLargeError(
            f"the file has more than {MOST_BYTES:,} bytes, and no gin file needs them"
        )
    return content.decode("utf-8-sig")  # Some editors begin files with a mark.


class TooLargeError(ValueError):
    """Something that no configuration needs; `lineno` is the line, where it is known."""

    def __init__(self, message: str, lineno: int = 0):
        super().__init__(message)
        self.lineno = lineno


def come_with_convt5() -> pathlib.Path:
    """Returns the folder of the gin files that come with convt5: in the checkout or the wheel."""
    beside = PACKAGE.parent / "gin"
    return beside if (beside / "models").is_dir() else PACKAGE / "gin"


def roots() -> list[pathlib.Path]:
    """Returns the folders that gin paths start from: here, the checkout, the installed package."""
    # Beside an installed package, gin/ is gin-config itself.
    checkout = [] if come_with_convt5().is_relative_to(PACKAGE) else [PACKAGE.parent]
    return [pathlib.Path.cwd(), *checkout, PACKAGE]


def parse_value(text: str) -> Any:
    """Returns the value that `text` has in a gin file; raises `SyntaxError` if it has none."""
    try:
        # A file in which the value stands alone: trailing words are an error too.
        (binding,) = _parse_text(f"VALUE = {text}\n", name="value")
    except (SyntaxError, tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(_reason(error)) from None
    if not isinstance(binding, Binding):
        raise SyntaxError(f"{text!r} is no value")
    return binding.value


def parse_key(text: str) -> tuple[str, str, str]:
    """Splits `scope/module.Name.parameter` into its parts; a macro has only a selector."""
    (binding,) = _parse_text(f"{text} = None\n", name="name")
    assert isinstance(binding, Binding)
    return binding.scope, binding.selector, binding.parameter


def _find(name: str, beside: pathlib.Path | None) -> pathlib.Path | None:
    """Returns the path by which a file is found, symbolic links as they are."""
    path = pathlib.Path(os.path.expanduser(name))
    folders = [pathlib.Path.cwd(), *([beside] if beside else []), *roots()[1:]]
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    return next((p for p in candidates if os.path.isfile(p)), None)


def _missing(name: str) -> str:
    """Says where a file was looked for, and which existing ones have similar names."""
    path = pathlib.Path(os.path.expanduser(name))
    if os.path.exists(path):
        return "is no file; name a file in it." if path.is_dir() else "is no ordinary file."
    if path.is_absolute():
        existing = sorted(map(str, _glob(path.parent, "*.gin")))
        places = "there"
    else:
        existing = sorted(
            {
                str(found.relative_to(root))
                for root in roots()
                for pattern in (path.parent / "*.gin", pathlib.Path("gin/**/*.gin"))
                for found in _glob(root, str(pattern))
            }
        )
        places = f"below the working directory or below {roots()[1]}"
    by_name = {pathlib.Path(p).name: p for p in reversed(existing)}
    hint = errors.suggest(name, existing) or errors.suggest(path.name, by_name)
    if not hint and existing:
        hint = f" Existing files: {', '.join(existing[:12])}{', ...' if existing[12:] else ''}."
    for base, full in by_name.items():
        hint = hint if full in hint else hint.replace(f" {base}", f" {full}")
    return f"does not exist {places}; correct the path.{hint}"


def _glob(root: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    try:
        return [found for found in root.glob(pattern) if found.is_file()]
    except (ValueError, NotImplementedError, OSError):
        return []  # Patterns such as "../x/*.gin" from a folder that cannot be listed.


class _Values(config_parser.ParserDelegate):
    """Keeps references and macros as they are written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _parse_text(text: str, *, name: str, is_own: bool = True) -> Iterator[Statement]:
    for statement in config_parser.ConfigParser(text, _Values()):
        location = Location(name, statement.location.line_num, is_own)
        if isinstance(statement, config_parser.ImportStatement):
            found: Statement = Import(
                statement.format(), statement.module, statement.bound_name(), location
            )
            _check_names([found.module, found.name], location.line)
        elif isinstance(statement, config_parser.IncludeStatement):
            found = Include(statement.filename, location)
        elif isinstance(statement, config_parser.BindingStatement):
            found = Binding(
                statement.scope,
                statement.selector,
                statement.arg_name or "",
                statement.value,
                location,
            )
            _check_names([found.name, *_names(found.value, location.line)], location.line)
        else:
            continue  # The head of a block, whose bindings come one by one.
        yield found


def _names(value: Any, line: int, depth: int = 0) -> Iterator[str]:
    """Yields what a value refers to."""
    if depth > MOST_NESTING:
        raise TooLargeError(f"more than {MOST_NESTING} lists in one another", line)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _names(item, line, depth + 1)
    elif isinstance(value, Reference):
        yield "/".join((*value.scopes, value.selector))
    elif isinstance(value, Macro):
        yield value.name


def _check_names(names: Iterable[str], line: int) -> None:
    for name in names:
        if len(name) > _LONGEST_NAME or name.count("/") + name.count(".") > _MOST_PARTS:
            raise TooLargeError(
                f"a name of more than {_LONGEST_NAME} letters or {_MOST_PARTS} parts, {name[:40]!r}"
                "...",
                line,
            )


def _line(error: Exception) -> int:
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    if isinstance(error, tokenize.TokenError):
        return error.args[1][0]
    return error.lineno if isinstance(error, TooLargeError) else 0


def _reason(error: Exception) -> str:
    if isinstance(error, tokenize.TokenError):
        return "a bracket or a quote is never closed."
    if isinstance(error, UnicodeDecodeError):
        return "the file is no UTF-8 text."
    if isinstance(error, (RecursionError, MemoryError)):
        return "lists or signs in one another, too deep to be read."
    if not isinstance(error, SyntaxError):
        return f"{error}."
    line = (error.text or "").strip()
    line = f"{line[:_LONGEST_SHOWN]}..." if len(line) > _LONGEST_SHOWN else line
    shown = f" in {line!r}" if line else ""
    return (
        f"cannot read this as gin{shown}: {_plain(error.msg)} A line is NAME = VALUE; "
        "text values stand in quotes."
    )


def _plain(message: str) -> str:
    # Gin repeats what Python's parser says of its own objects, with their addresses.
    text = " ".join(re.sub(r"malformed node or string.*<ast\..*>", "", message).split())
    return text if text.endswith(".") else f"{text}."
