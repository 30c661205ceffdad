"""Finds and reads gin files: the statements they hold, each with its file and line.

Reading imports no module that a file names, so that mistakes in files are reported at once.
`gin_config` checks what was read and hands it to gin.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a statement stands."""

    source: str
    line: int = 0

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
    """One file: how it was named, where it is, and what it says."""

    name: str
    path: pathlib.Path
    statements: tuple[Statement, ...]

    @property
    def is_model(self) -> bool:
        return any(isinstance(s, Binding) and s.name == MODEL_MARKER for s in self.statements)


def is_required(statements: Iterable[Any], macro: str) -> bool:
    """Whether statements demand a macro, `%gin.REQUIRED`, that none of them gives after that."""
    values = {s.selector: s.value for s in statements if isinstance(s, Binding) and s.is_macro}
    return values.get(macro) == Macro(REQUIRED)


def read_all(names: Sequence[str]) -> list[Import | Binding]:
    """Returns the statements of all files in order, includes put in their place.

    A model file (one that binds MODEL_NAME) among `names` takes the place of the model file that
    another one includes, so that a run's own settings still come after it and nothing of the
    replaced model remains. Elsewhere later statements override earlier ones, as gin does.

    Raises:
        UserError: a file is missing, cannot be parsed, or includes itself; all are listed.
    """
    faults: list[str] = []
    files = [file for name in names if (file := _read(name, None, faults))]
    models = [file for file in files if file.is_model]
    if len(models) > 1:
        faults.append(
            f"{' and '.join(file.name for file in models)} are all model files (each binds "
            f"{MODEL_MARKER}), but a run has one model; give one of them."
        )
    errors.raise_all(faults, where="configuration")
    model = models[0] if models else None
    used: set[pathlib.Path] = set()
    statements = list(_expand(files, model, (), used, faults))
    if model and model.path not in used:
        statements = [*_expand([model], None, (), used, faults), *statements]
    errors.raise_all(faults, where="configuration")
    return statements


def _expand(
    files: Iterable[GinFile],
    model: GinFile | None,
    parents: tuple[pathlib.Path, ...],
    used: set[pathlib.Path],
    faults: list[str],
) -> Iterator[Import | Binding]:
    for file in files:
        if not parents and file is model:
            continue  # It stands where a run file includes a model, or before all others.
        used.add(file.path)
        chain = (*parents, file.path)
        for statement in file.statements:
            if not isinstance(statement, Include):
                yield statement
                continue
            included = _read(statement.path, statement.location, faults, beside=file.path.parent)
            if included is None:
                continue
            if included.path in chain:
                faults.append(f"{statement.location}: {statement.path} includes itself.")
                continue
            inside = model
            if model and included.is_model:
                # What the chosen model includes itself is part of it.
                included, inside = model, None
            yield from _expand([included], inside, chain, used, faults)


def roots() -> list[pathlib.Path]:
    """Returns the folders that gin paths start from: here, the checkout, the installed package."""
    # Beside an installed package, gin/ is gin-config itself.
    checkout = [PACKAGE.parent] if (PACKAGE.parent / "gin" / "models").is_dir() else []
    return [pathlib.Path.cwd(), *checkout, PACKAGE]


def parse_value(text: str) -> Any:
    """Returns the value that `text` has in a gin file; raises `SyntaxError` if it has none."""
    try:
        # A file in which the value stands alone: trailing words are an error too.
        (binding,) = _parse_text(f"VALUE = {text}\n", name="value")
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        raise SyntaxError(_reason(error)) from None
    if not isinstance(binding, Binding):
        raise SyntaxError(f"{text!r} is no value")
    return binding.value


def parse_key(text: str) -> tuple[str, str, str]:
    """Splits `scope/module.Name.parameter` into its parts; a macro has only a selector."""
    (binding,) = _parse_text(f"{text} = None\n", name="name")
    assert isinstance(binding, Binding)
    return binding.scope, binding.selector, binding.parameter


def _read(
    name: str, where: Location | None, faults: list[str], beside: pathlib.Path | None = None
) -> GinFile | None:
    path = _find(name, beside)
    prefix = f"{where}: " if where else ""
    if path is None:
        faults.append(f"{prefix}gin file {name!r} {_missing(name)}")
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors begin files with a mark.
        return GinFile(name, path, tuple(_parse_text(text, name=name)))
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        line = _line(error)
        faults.append(f"{Location(name, line)}: {_reason(error)}")
    except OSError as error:
        faults.append(f"{prefix}gin file {name!r} cannot be read: {error.strerror}.")
    return None


def _find(name: str, beside: pathlib.Path | None) -> pathlib.Path | None:
    path = pathlib.Path(name).expanduser()
    folders = [pathlib.Path.cwd(), *([beside] if beside else []), *roots()[1:]]
    candidates = [path] if path.is_absolute() else [folder / path for folder in folders]
    return next((p.resolve() for p in candidates if p.is_file()), None)


def _missing(name: str) -> str:
    """Says where a file was looked for, and which existing ones have similar names."""
    path = pathlib.Path(name).expanduser()
    if path.exists():
        return "is no file; name a file in it." if path.is_dir() else "is no ordinary file."
    if path.is_absolute():
        existing = sorted(str(p) for p in path.parent.glob("*.gin"))
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


def _parse_text(text: str, *, name: str) -> Iterator[Statement]:
    for statement in config_parser.ConfigParser(text, _Values()):
        location = Location(name, statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            yield Import(statement.format(), statement.module, statement.bound_name(), location)
        elif isinstance(statement, config_parser.IncludeStatement):
            yield Include(statement.filename, location)
        elif isinstance(statement, config_parser.BindingStatement):
            yield Binding(
                statement.scope,
                statement.selector,
                statement.arg_name or "",
                statement.value,
                location,
            )


def _line(error: Exception) -> int:
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    if isinstance(error, tokenize.TokenError):
        return error.args[1][0]
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, tokenize.TokenError):
        return "a bracket or a quote is opened and never closed."
    if isinstance(error, UnicodeDecodeError):
        return "the file is no UTF-8 text."
    if not isinstance(error, SyntaxError):
        return f"{error}."
    line = (error.text or "").strip()
    shown = f" in {line!r}" if line else ""
    return (
        f"cannot read this as gin{shown}: {_plain(error.msg)} A line is NAME = VALUE; "
        "text values stand in quotes."
    )


def _plain(message: str) -> str:
    # Gin repeats what Python's parser says of its own objects, with their addresses.
    text = " ".join(re.sub(r"malformed node or string.*<ast\..*>", "", message).split())
    return text if text.endswith(".") else f"{text}."
