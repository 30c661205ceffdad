"""Loads gin files and command-line bindings strictly, and builds the objects they describe.

Entry points call `load`; everything below them is ordinary Python that never imports gin. Gin
itself ignores misspelt macros and scopes that nobody enters; here they are errors.
"""

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import posixpath
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin

from convt5 import errors, gin_files, gin_types
from convt5.gin_files import Binding, Import, Location, Macro, Reference

PROGRAM_MACROS = ("MODEL", "MODEL_NAME")
"""Macros that commands read themselves: the model to build, and what to call it."""

_HEADER = """\
# The resolved configuration: giving this file alone as --gin_file repeats the run.
from __gin__ import dynamic_registration
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A class or function that bindings name, such as `convt5.architecture.ConvT5Config`."""

    module: str
    attributes: str

    def __str__(self) -> str:
        return f"{self.module.rsplit('.', 1)[-1]}.{self.attributes}"

    def load(self) -> Any:
        """Imports the module and returns the object; raises `AttributeError` if it has none."""
        value = importlib.import_module(self.module)
        for attribute in self.attributes.split("."):
            value = getattr(value, attribute)
        return value


@dataclasses.dataclass(frozen=True)
class Setting:
    """The effective value of one parameter (or of a macro, where `target` is None)."""

    scope: str
    target: Target | None
    parameter: str
    value: Any
    location: Location

    @property
    def key(self) -> tuple[str, Target | None, str]:
        return self.scope, self.target, self.parameter

    @property
    def name(self) -> str:
        prefix = f"{self.scope}/" if self.scope else ""
        return f"{prefix}{self.target}.{self.parameter}" if self.target else prefix + self.parameter


class Config:
    """A checked configuration.

    Attributes:
        text: the configuration resolved to one gin file: every binding and every default that a
            literal can express, no includes.
    """

    def __init__(self, text: str, macros: Iterable[str]):
        self.text = text
        self._macros = frozenset(macros)

    def macro(self, name: str) -> Any:
        """Returns the value of a macro, with references built."""
        if name not in self._macros:
            raise errors.UserError(f"macro {name} is not defined; set --gin.{name}=VALUE.")
        self._activate()
        # Gin builds references when they are copied.
        return _unwrapped(lambda: copy.deepcopy(gin.query_parameter(f"{name}/gin.macro.value")))

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Returns the bound arguments of `function`, with references built.

        Calling with these, and not through gin, leaves the function's own errors as they are.
        """
        self._activate()
        return _unwrapped(lambda: gin.get_bindings(function))

    def _activate(self) -> None:
        gin.clear_config()
        gin.parse_config(self.text)


def load(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    roots: Sequence[str] = (),
    supplied: Sequence[str] = (),
) -> Config:
    """Returns the checked configuration of `files` in order, then `bindings`.

    Args:
        files: gin files; see `gin_files.read_all` for the order.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        roots: what the program will build, as gin values: "@trainer.train" or "%MODEL". What they
            need must be bound, and a command-line binding they do not reach is an error.
        supplied: parameters of the roots that the program passes itself.

    Raises:
        UserError: listing every fault of the first kind found: files that cannot be read; unknown
            macros; names or parameters that do not exist; values of a wrong type; required
            values that are missing.
    """
    statements = [*gin_files.read_all(files), *map(_command_line_binding, bindings)]
    resolver = _Resolver([s for s in statements if isinstance(s, Import)])
    every = [resolver.setting(s) for s in statements if isinstance(s, Binding)]
    root_values = [resolver.value(gin_files.parse_value(r), gin_files.COMMAND_LINE) for r in roots]
    final = {setting.key: setting for setting in every}
    errors.raise_all([*resolver.faults, *_macro_faults(final, every, root_values)], where="gin")
    errors.raise_all(_import_faults(statements), where="gin")
    errors.raise_all(_target_faults(final.values(), root_values), where="gin")
    errors.raise_all(_scope_faults(final.values(), every), where="gin")
    walk = _Walk(final, supplied)
    for value in root_values:
        walk.visit(value, (), wanted_by="")
    errors.raise_all(gin_types.faults(_typed(final)), where="gin")
    if roots:
        errors.raise_all(_ineffective(final, walk), where="gin")
    if walk.missing:
        raise errors.UserError(_missing_message(walk.missing))
    macros = [setting.name for setting in final.values() if setting.target is None]
    return Config(_text(final, walk.defaults()), macros)


def folder(parts: Sequence[str]) -> str:
    """Joins path parts, so that a gin file can derive a run directory from other settings."""
    return posixpath.join(*parts)


def _command_line_binding(text: str) -> Binding:
    """Parses `NAME=VALUE`; a value that is no gin literal is text, where that is unambiguous."""
    name, equals, value = text.partition("=")
    flag = f"--gin.{name.strip()}"
    if not equals or not name.strip():
        raise errors.UserError(f"--gin.{text}: expected --gin.NAME=VALUE, but there is no '='.")
    try:
        scope, selector, parameter = gin_files.parse_key(name.strip())
    except (SyntaxError, ValueError, AssertionError):
        raise errors.UserError(
            f"{flag}: {name.strip()!r} is no name; use --gin.MACRO=VALUE or "
            "--gin.module.Name.parameter=VALUE, such as --gin.architecture.ConvT5Config.emb_dim=64."
        ) from None
    try:
        parsed = gin_files.parse_value(value)
    except SyntaxError as error:
        if not value.strip() or value.strip()[0] in "'\"[({@%":
            raise errors.UserError(
                f"{flag}={value}: the value cannot be read: {error.msg} Texts need no quotes unless "
                "they start like another kind of value."
            ) from None
        parsed = value
    return Binding(scope, selector, parameter, parsed, Location(flag), file="")


class _Resolver:
    """Replaces the names that files give to modules by what they stand for."""

    def __init__(self, imports: Iterable[Import]):
        self.faults: list[str] = []
        self._by_file: dict[str, list[Import]] = {}
        for statement in imports:
            if statement.module != gin_files.DYNAMIC_REGISTRATION:
                self._by_file.setdefault(statement.location.source, []).append(statement)

    def setting(self, binding: Binding) -> Setting:
        value = self.value(binding.value, binding.location)
        if binding.is_macro:
            return Setting(binding.scope, None, binding.selector, value, binding.location)
        target = self._target(binding.selector, binding.location)
        return Setting(binding.scope, target, binding.parameter, value, binding.location)

    def value(self, value: Any, location: Location) -> Any:
        """Returns `value` with the selector of every reference replaced by a `Target`."""
        if isinstance(value, Reference):
            return ResolvedReference(
                value.scopes, self._target(value.selector, location), value.call
            )
        if isinstance(value, dict):
            items = value.items()
            return {self.value(k, location): self.value(v, location) for k, v in items}
        if isinstance(value, (list, tuple)):
            return type(value)(self.value(item, location) for item in value)
        return value

    def _target(self, selector: str, location: Location) -> Target:
        first, _, rest = selector.partition(".")
        for statement in self._visible(location):
            if statement.text.startswith("import ") and " as " not in statement.text:
                if selector.startswith(f"{statement.module}."):
                    return Target(statement.module, selector.removeprefix(f"{statement.module}."))
            elif statement.name == first and rest:
                return Target(statement.module, rest)
        if location.line:
            known = {statement.name for statement in self._visible(location)}
            hint = errors.suggest(first, known) or f" Import it: from convt5 import {first}"
            self.faults.append(f"{location}: {selector!r} begins with no imported module.{hint}")
            return Target(first, rest)
        # The command line has no import statements: convt5's own modules are understood.
        names = selector.removeprefix("convt5.")
        first, _, rest = names.partition(".")
        if rest and importlib.util.find_spec(f"convt5.{first}") is not None:
            return Target(f"convt5.{first}", rest)
        known = {s.name for group in self._by_file.values() for s in group}
        self.faults.append(
            f"{location}: {selector!r} is no module.Name that the gin files import or convt5 has."
            f"{errors.suggest(first, {*known, *_own_modules()})}"
        )
        return Target(first, rest)

    def _visible(self, location: Location) -> list[Import]:
        if location.line:
            return self._by_file.get(location.source, [])
        return [s for group in self._by_file.values() for s in group]


@dataclasses.dataclass(frozen=True)
class ResolvedReference:
    """As `gin_files.Reference`, with the target in place of a name."""

    scopes: tuple[str, ...]
    target: Target
    call: bool

    def __repr__(self) -> str:
        return f"@{'/'.join((*self.scopes, str(self.target)))}{'()' if self.call else ''}"


def _own_modules() -> list[str]:
    return [path.stem for path in gin_files.PACKAGE.glob("*.py")]


def _flatten(value: Any) -> Iterator[Any]:
    """Yields every value inside nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from _flatten(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _macro_faults(
    final: Mapping[Any, Setting], every: Sequence[Setting], roots: Sequence[Any]
) -> Iterator[str]:
    defined = {setting.name for setting in final.values() if setting.target is None}
    used = {v.name for s in every for v in _flatten(s.value) if isinstance(v, Macro)}
    used |= {*PROGRAM_MACROS, *(root.name for root in roots if isinstance(root, Macro))}
    used -= {gin_files.REQUIRED}
    for setting in final.values():
        for value in _flatten(setting.value):
            if isinstance(value, Macro) and value.name not in (*defined, gin_files.REQUIRED):
                yield (
                    f"{setting.location}: {setting.name} uses %{value.name}, a macro that is not "
                    f"defined; define it or correct the name.{_similar(value.name, defined)}"
                )
    for setting in final.values():
        if setting.target is None and setting.name not in used:
            others = sorted(used - {"MODEL", "MODEL_NAME"})
            hint = _similar(setting.name, used)
            if not hint and others:
                hint = f" Macros in use: {', '.join(others)}."
            yield (
                f"{setting.location}: macro {setting.name}={setting.value!r} is not used by "
                f"anything; correct the name or remove it.{hint}"
            )
    for root in roots:
        if isinstance(root, Macro) and root.name not in defined:
            yield (
                f"macro {root.name} is not defined; give a gin file that binds it, such as "
                "--gin_file=gin/models/dynamic_tiny.gin."
            )


def _similar(name: str, candidates: Iterable[str]) -> str:
    """As `errors.suggest`, whatever the case of the letters."""
    by_upper = {candidate.upper(): candidate for candidate in candidates}
    hint = errors.suggest(name.upper(), by_upper)
    for upper, candidate in by_upper.items():
        hint = hint.replace(f" {upper}", f" {candidate}")
    return hint


def _import_faults(statements: Iterable[Any]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, Import) and statement.module != gin_files.DYNAMIC_REGISTRATION:
            try:
                importlib.import_module(statement.module)
            except ModuleNotFoundError as error:
                yield f"{statement.location}: {statement.text}: {_not_found(statement.module, error)}"


def _not_found(module: str, error: ModuleNotFoundError) -> str:
    missing = error.name or module
    if module != missing and not module.startswith(f"{missing}."):
        return f"module {module} needs {missing}, which is not installed; install it."
    package, _, name = module.rpartition(".")
    hint = errors.suggest(name, _own_modules()) if package == "convt5" else ""
    return f"there is no module {module}; correct the name or install the package.{hint}"


def _target_faults(settings: Iterable[Setting], roots: Sequence[Any]) -> Iterator[str]:
    """Names that do not exist, and parameters that their class or function does not have."""
    reported = set()
    for setting in settings:
        wanted = [v.target for v in _flatten(setting.value) if isinstance(v, ResolvedReference)]
        for target in [*([setting.target] if setting.target else []), *wanted]:
            fault = _load_fault(target)
            if fault and target not in reported:
                reported.add(target)
                yield f"{setting.location}: {fault}"
        if setting.target is None or setting.target in reported:
            continue
        parameters = _parameters(setting.target)
        if parameters is not None and setting.parameter not in parameters:
            yield (
                f"{setting.location}: {setting.target} has no parameter {setting.parameter!r}; "
                f"correct the name.{_similar(setting.parameter, parameters) or _listing(parameters)}"
            )
    for root in roots:
        if isinstance(root, ResolvedReference) and (fault := _load_fault(root.target)):
            yield fault


def _listing(names: Iterable[str]) -> str:
    names = list(names)
    return f" It has: {', '.join(names)}." if names else " It has none."


def _load_fault(target: Target) -> str | None:
    try:
        loaded = target.load()
    except ModuleNotFoundError as error:
        return _not_found(target.module, error)
    except AttributeError:
        module = importlib.import_module(target.module)
        names = [name for name, value in vars(module).items() if _is_configurable(name, value)]
        return (
            f"{target.module} has no {target.attributes!r}; correct the name."
            f"{_similar(target.attributes, names)}"
        )
    if not callable(loaded):
        return f"{target} is no class or function, so nothing can be bound on it."
    return None


def _is_configurable(name: str, value: Any) -> bool:
    return callable(value) and not name.startswith("_")


def _parameters(target: Target) -> dict[str, inspect.Parameter] | None:
    """Returns the parameters that gin can bind, or None if any name is accepted."""
    try:
        found = inspect.signature(target.load()).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return {name: p for name, p in found.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL}


def _scope_faults(settings: Iterable[Setting], every: Sequence[Setting]) -> Iterator[str]:
    """A scope that no reference enters: its bindings would do nothing."""
    entered = {
        "/".join(value.scopes[:depth])
        for setting in every
        for value in _flatten(setting.value)
        if isinstance(value, ResolvedReference)
        for depth in range(1, len(value.scopes) + 1)
    }
    for setting in settings:
        if setting.target is not None and setting.scope and setting.scope not in entered:
            yield (
                f"{setting.location}: {setting.name} has no effect, because nothing refers to "
                f"@{setting.scope}/...; correct the scope.{_similar(setting.scope, entered)}"
            )


class _Walk:
    """Follows references from the roots: what is built, with which settings, and what lacks."""

    def __init__(self, final: Mapping[Any, Setting], supplied: Sequence[str]):
        self.reached: dict[tuple[tuple[str, ...], Target], None] = {}
        self.used_macros: set[str] = set()
        self.missing: dict[str, str] = {}
        self._final = final
        self._supplied = supplied

    def visit(self, value: Any, scope: tuple[str, ...], wanted_by: str) -> None:
        """Visits what building `value` in `scope` needs; `wanted_by` names the parameter."""
        for part in _flatten(value):
            if isinstance(part, Macro):
                self._visit_macro(part, scope, wanted_by)
            elif isinstance(part, ResolvedReference):
                self._visit_target(part.target, part.scopes or scope, is_root=not wanted_by)

    def bound(self, target: Target, scope: tuple[str, ...]) -> dict[str, Setting]:
        """Returns the settings in force for `target` in `scope`: inner scopes win, as in gin."""
        found = {}
        for depth in range(len(scope) + 1):
            prefix = "/".join(scope[:depth])
            for setting in self._final.values():
                if setting.target == target and setting.scope == prefix:
                    found[setting.parameter] = setting
        return found

    def defaults(self) -> Iterator[tuple[Target, str, Any]]:
        """Yields the defaults in force that a gin file can express."""
        seen = set()
        for _, target in self.reached:
            if target in seen:
                continue
            seen.add(target)
            unscoped = self.bound(target, ())
            for name, parameter in (_parameters(target) or {}).items():
                default = parameter.default
                if name not in unscoped and default is not inspect.Parameter.empty:
                    if gin_types.is_literal(default):
                        yield target, name, default

    def _visit_macro(self, macro: Macro, scope: tuple[str, ...], wanted_by: str) -> None:
        if macro.name == gin_files.REQUIRED:
            self.missing[wanted_by] = ""
            return
        self.used_macros.add(macro.name)
        *_, setting = [s for s in self._final.values() if not s.target and s.name == macro.name]
        if setting.value == Macro(gin_files.REQUIRED):
            self.missing[macro.name] = wanted_by
        else:
            # Gin evaluates the value of a macro in a scope of the macro's name.
            self.visit(setting.value, (macro.name,), wanted_by or macro.name)

    def _visit_target(self, target: Target, scope: tuple[str, ...], *, is_root: bool) -> None:
        if (scope, target) in self.reached:
            return
        self.reached[scope, target] = None
        bound = self.bound(target, scope)
        prefix = f"{'/'.join(scope)}/" if scope else ""
        for setting in bound.values():
            self.visit(setting.value, scope, setting.name)
        for name, parameter in (_parameters(target) or {}).items():
            supplied = is_root and name in self._supplied
            if parameter.default is inspect.Parameter.empty and name not in bound and not supplied:
                shown = prefix if prefix.rstrip("/") not in self.used_macros else ""
                self.missing[f"{shown}{target}.{name}"] = ""


def _ineffective(final: Mapping[Any, Setting], walk: _Walk) -> Iterator[str]:
    """Command-line bindings that reach nothing: files may hold unused alternatives."""
    effective = {
        setting.key
        for scope, target in walk.reached
        for setting in walk.bound(target, scope).values()
    }
    for setting in final.values():
        if setting.location.line or setting.target is None or setting.key in effective:
            continue
        same_module = sorted(
            {str(target) for _, target in walk.reached if target.module == setting.target.module}
        )
        hint = f" In use from there: {', '.join(same_module)}." if same_module else ""
        yield (
            f"{setting.location} has no effect, because the configuration does not use "
            f"{setting.target} there; select it first or remove the flag.{hint}"
        )


def _missing_message(missing: Mapping[str, str]) -> str:
    lines = [
        f"- {name}{f' (for {wanted_by})' if wanted_by else ''}: set --gin.{name}=VALUE"
        for name, wanted_by in missing.items()
    ]
    noun = "value is" if len(lines) == 1 else "values are"
    return (
        f"{len(lines)} required {noun} missing; set them on the command line or in a gin file:\n"
        + "\n".join(lines)
    )


def _typed(final: Mapping[Any, Setting]) -> Iterator[gin_types.Typed]:
    """Yields every literal parameter value, macros resolved, with its annotation."""
    macros = {s.name: s for s in final.values() if s.target is None}
    hints: dict[Target, Mapping[str, Any]] = {}
    for setting in final.values():
        if setting.target is None:
            continue
        if setting.target not in hints:
            hints[setting.target] = gin_types.hints(setting.target.load())
        value, location = setting.value, setting.location
        while isinstance(value, Macro) and value.name in macros:
            value, location = macros[value.name].value, macros[value.name].location
        opaque = any(isinstance(v, (Macro, ResolvedReference)) for v in _flatten(value))
        if not opaque and setting.parameter in hints[setting.target]:
            hint = hints[setting.target][setting.parameter]
            yield gin_types.Typed(str(location), setting.name, value, hint)


def _text(final: Mapping[Any, Setting], defaults: Iterable[tuple[Target, str, Any]]) -> str:
    defaults = list(defaults)
    targets = {s.target for s in final.values() if s.target} | {target for target, *_ in defaults}
    targets |= {
        v.target
        for s in final.values()
        for v in _flatten(s.value)
        if isinstance(v, ResolvedReference)
    }
    names = _module_names({target.module for target in targets})
    show = _Shower(names)
    macros = sorted(f"{s.name} = {show.value(s.value)}" for s in final.values() if not s.target)
    bound = sorted(
        (show.target(s.target), s.scope, f"{show.setting(s)} = {show.value(s.value)}")
        for s in final.values()
        if s.target
    )
    left = sorted(f"{show.target(t)}.{name} = {show.value(value)}" for t, name, value in defaults)
    sections = [
        _HEADER + "\n".join(sorted(map(_import_line, names.items()))),
        "\n".join(macros),
        "\n".join(line for *_, line in bound),
        "\n".join(["# Defaults, written out so that the run does not change when they do.", *left]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _module_names(modules: Iterable[str]) -> dict[str, str]:
    """Returns a short unique name for every module."""
    names: dict[str, str] = {}
    for module in sorted(modules):
        short = module.rsplit(".", 1)[-1]
        taken = short in names.values() or short == "gin"
        names[module] = module.replace(".", "_") if taken else short
    return names


def _import_line(item: tuple[str, str]) -> str:
    module, name = item
    package, _, last = module.rpartition(".")
    alias = f" as {name}" if name != last else ""
    return f"from {package} import {last}{alias}" if package else f"import {module}{alias}"


class _Shower:
    """Writes settings as gin, with one name for each module."""

    def __init__(self, names: Mapping[str, str]):
        self._names = names

    def target(self, target: Target) -> str:
        return f"{self._names[target.module]}.{target.attributes}"

    def setting(self, setting: Setting) -> str:
        assert setting.target is not None
        prefix = f"{setting.scope}/" if setting.scope else ""
        return f"{prefix}{self.target(setting.target)}.{setting.parameter}"

    def value(self, value: Any) -> str:
        if isinstance(value, ResolvedReference):
            name = "/".join((*value.scopes, self.target(value.target)))
            return f"@{name}{'()' if value.call else ''}"
        if isinstance(value, dict):
            items = (f"{self.value(k)}: {self.value(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        return repr(value)


def _unwrapped(build: Callable[[], typing.Any]) -> Any:
    """Calls `build`; user errors come out without the lines that gin adds to them."""
    try:
        return build()
    except errors.UserError as error:
        # Gin raises a class of its own making, derived from the original one.
        kind = next(
            base
            for base in type(error).__mro__
            if getattr(sys.modules.get(base.__module__), base.__name__, None) is base
        )
        raise kind(str(error).split("\n  In call to configurable")[0]) from None
