"""Finds and reads gin files: their statements, each with its file and line.

Reading imports no modules, so mistakes in files are reported at once. `gin_config` checks the
statements and passes them to gin. Files are untrusted, so their size is bounded far above any real
configuration.
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
"""A file that binds this macro describes a model; see `read_all`."""

REQUIRED = "gin.REQUIRED"
DYNAMIC_REGISTRATION = "__gin__.dynamic_registration"
PACKAGE = pathlib.Path(__file__).resolve().parents[1]

MOST_BYTES = 2**20  # Per file.
MOST_STATEMENTS = 5_000  # In all files.
MOST_INCLUDES = 20  # Nested.
MOST_NESTING = 40  # Of lists, macros and objects.
_MOST_FILES = 200
_LONGEST_NAME = 500
_LONGEST_SHOWN = 200
_MOST_LINKS = 40  # Linux's own limit.
_MOST_PARTS = 30  # Of a name, including scopes.

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
"""Files that mark a folder, and everything below it, as that of a model."""
_BESIDE_MODELS = (*_MODEL_FILES, "cache.json", "checkpoints", "conversion.txt", "summary.json")
"""Files that show that others beside them may have come with a model."""


@dataclasses.dataclass(frozen=True)
class Location:
    """The location of a statement.

    Attributes:
        source: the file, or another origin.
        line: line in the file; 0 for other origins.
        is_own: whether the user wrote it; False for a file that came with a model.
        path: of the file, as several may have the name `source`; None for other origins.
    """

    source: str
    line: int = 0
    is_own: bool = True
    path: pathlib.Path | None = None

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
    """`import module` or `from package import name`; `name` is its name in the file."""

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
    """One file: its name as given, path, statements, and whether the user wrote it."""

    name: str
    path: pathlib.Path
    statements: tuple[Statement, ...]
    is_own: bool

    @property
    def is_model(self) -> bool:
        return any(isinstance(s, Binding) and s.name == MODEL_MARKER for s in self.statements)


def model_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the nearest model folder that contains (or is) a folder, or None."""
    around = (folder, *folder.parents)
    return next((f for f in around if any(_exists(f / name) for name in _MODEL_FILES)), None)


def came_with_model(file: pathlib.Path) -> bool:
    """Returns whether a file is in a run directory or an exported model, by any of its names.

    Such a file may be anybody's: models are copied with everything around them, including links.
    """
    folders = {path.parent for path in _link_chain(file)}
    beside = (folder / name for folder in folders for name in _BESIDE_MODELS)
    return any(map(_exists, beside)) or any(map(model_folder, folders))


def _link_chain(file: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields every path on the way from a name through symbolic links to the file."""
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
    """Returns whether statements require a macro (`%gin.REQUIRED`) and none of them binds it."""
    values = {s.selector: s.value for s in statements if isinstance(s, Binding) and s.is_macro}
    return values.get(macro) == Macro(REQUIRED)


def read_all(names: Sequence[str]) -> list[Import | Binding]:
    """Returns the statements of all files in order, with includes expanded.

    A model file (one that binds MODEL_NAME) among `names` replaces the model file that another one
    includes. The run's own settings still follow it, and nothing of the replaced model remains.
    Otherwise later statements override earlier ones, as in gin.

    Statements of a file that came with a model, and of its includes, have a location that is not
    `is_own`.

    Raises:
        UserError: a file is missing, invalid, includes itself, or is absurdly large; lists all.
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


def lines_of_users(names: Sequence[str]) -> list[str]:
    """Returns the statements of files, and of their includes, that are not convt5's own.

    Comments, spaces and the places of files make no difference. Raises `UserError` as `read_all`.
    """
    reader, folder = _Reader(), own_gin_folder()

    def lines(name: str, where: Location | None, inside: GinFile | None) -> Iterator[str]:
        path = _find(name, inside.path.parent if inside else None)
        if path is not None and path.resolve().is_relative_to(folder):
            return
        file = reader.read(name, where, inside)
        for statement in file.statements if file else ():
            yield repr(dataclasses.replace(statement, location=COMMAND_LINE))
            if isinstance(statement, Include):
                yield from lines(statement.path, statement.location, file)

    found = [line for name in names for line in lines(name, None, None)]
    errors.raise_all(reader.faults, where="configuration")
    return found


class _Reader:
    """Reads files and their includes, and counts what it has read."""

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
                continue  # It is placed where a run file includes a model, or first.
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
                    # The includes of the chosen model are part of it.
                    included, inside = model, None
                yield from self.expand([included], inside, chain)

    def read(
        self, name: str, where: Location | None, inside: GinFile | None = None
    ) -> GinFile | None:
        path = _find(name, inside.path.parent if inside else None)
        prefix = f"{where}: " if where else ""
        if path is None:
            self.faults.append(f"{prefix}gin file {name!r} {_missing(name)}")
            return None
        self._num_files += 1
        if self._num_files > _MOST_FILES:
            raise _too_many(where or name, f"{_MOST_FILES} files")
        is_own = (inside is None or inside.is_own) and not came_with_model(path)
        try:
            parsed = _parse_text(_text(path), name=name, is_own=is_own, path=path)
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
        return GinFile(name, path.resolve(), statements, is_own)


def _too_many(where: Location | str, what: str) -> errors.UserError:
    return errors.UserError(
        f"configuration: {where}: more than {what}, what is included counted in; no configuration "
        "needs so many."
    )


def _text(path: pathlib.Path) -> str:
    """Returns the contents of a file, unless it is larger than any configuration."""
    # Some files, such as /proc/kmsg, look ordinary but block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise TooLargeError(
            f"the file has more than {MOST_BYTES:,} bytes, and no gin file needs them"
        )
    return content.decode("utf-8-sig")  # Some editors write a byte order mark.


class TooLargeError(ValueError):
    """Raised for sizes that no configuration needs; `lineno` is the line, if known."""

    def __init__(self, message: str, lineno: int = 0):
        super().__init__(message)
        self.lineno = lineno


def own_gin_folder() -> pathlib.Path:
    """Returns the folder of convt5's own gin files, in the checkout or the wheel."""
    beside = PACKAGE.parent / "gin"
    return beside if (beside / "models").is_dir() else PACKAGE / "gin"


def roots() -> list[pathlib.Path]:
    """Returns the folders where gin paths start: working directory, checkout, package."""
    # Beside an installed package, gin/ is gin-config itself.
    checkout = [] if own_gin_folder().is_relative_to(PACKAGE) else [PACKAGE.parent]
    return [pathlib.Path.cwd(), *checkout, PACKAGE]


def parse_value(text: str) -> Any:
    """Parses a gin value; raises `SyntaxError` if it is invalid."""
    try:
        # Parsed as a file of one statement, so trailing words are an error.
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
    """Returns the path of a file, without resolving symbolic links; None if it is missing.

    An include is first looked for in the folder of its file, `beside`: the working directory may
    hold another file of this name, such as the `model.gin` of another run.
    """
    path = pathlib.Path(os.path.expanduser(name))
    folders = [*([beside] if beside else []), *roots()]
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    return next((p for p in candidates if os.path.isfile(p)), None)


def _missing(name: str) -> str:
    """Describes where a file was searched, and existing files with similar names."""
    path = pathlib.Path(os.path.expanduser(name))
    if os.path.exists(path):
        return "is no file; name a file in it." if path.is_dir() else "is no ordinary file."
    if path.is_absolute():
        existing = sorted(map(str, _glob(path.parent, "*.gin")))
        places = "there"
    else:
        existing = sorted(
            {
                str(match.relative_to(root))
                for root in roots()
                for pattern in (path.parent / "*.gin", pathlib.Path("gin/**/*.gin"))
                for match in _glob(root, str(pattern))
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
        return [path for path in root.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError, OSError):
        return []  # Patterns such as "../x/*.gin" in a folder that cannot be listed.


class _Values(config_parser.ParserDelegate):
    """Keeps references and macros as written."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        *scopes, selector = scoped_configurable_name.split("/")
        return Reference(tuple(scopes), selector, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


class _Parser(config_parser.ConfigParser):
    """Gin's parser, with errors for keys and signs.

    Gin itself reads `-%NAME` as `%NAME`, takes the last value of a repeated key, and fails without
    a line for a key that is a list.
    """

    def __init__(self, *args: Any):
        self._keys: list[list[Any]] = []  # Of each container that is being read.
        super().__init__(*args)

    def _parse_dict_item(self):
        key, value = super()._parse_dict_item()
        if key in self._keys[-1]:
            self._raise_syntax_error(f"the key {key!r} is there twice.")
        self._keys[-1].append(key)
        return key, value

    def _maybe_parse_container(self):
        self._keys.append([])
        try:
            return super()._maybe_parse_container()
        except TypeError:
            self._raise_syntax_error("a list or a dictionary cannot be a key.")
        finally:
            self._keys.pop()

    def _maybe_parse_basic_type(self):
        token: Any = self._current_token
        is_negative = token.string == "-"
        found, value = super()._maybe_parse_basic_type()
        if is_negative and not found:
            self._raise_syntax_error("a minus sign may stand only before a number.")
        return found, value


def _parse_text(
    text: str, *, name: str, is_own: bool = True, path: pathlib.Path | None = None
) -> Iterator[Statement]:
    for statement in _Parser(text, _Values()):
        location = Location(name, statement.location.line_num, is_own, path)
        if isinstance(statement, config_parser.ImportStatement):
            parsed: Statement = Import(
                statement.format(), statement.module, statement.bound_name(), location
            )
            _check_names([parsed.module, parsed.name], location.line)
        elif isinstance(statement, config_parser.IncludeStatement):
            parsed = Include(statement.filename, location)
        elif isinstance(statement, config_parser.BindingStatement):
            parsed = Binding(
                statement.scope,
                statement.selector,
                statement.arg_name or "",
                statement.value,
                location,
            )
            _check_names([parsed.name, *_names(parsed.value, location.line)], location.line)
        else:
            continue  # The head of a block, whose bindings follow one by one.
        yield parsed


def _names(value: Any, line: int, depth: int = 0) -> Iterator[str]:
    """Yields the names that a value refers to."""
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
    # Gin quotes representations of Python's parser objects, with their addresses.
    text = " ".join(re.sub(r"malformed node or string.*<ast\..*>", "", message).split())
    return text if text.endswith(".") else f"{text}."
