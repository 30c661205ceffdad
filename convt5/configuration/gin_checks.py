"""Checks a configuration before anything is built from it.

Each check yields one sentence per fault, with file and line; `gin_config` raises them together.
"""

import importlib
import inspect
import pathlib
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import gin_files, gin_types
from convt5.configuration.gin_files import Import, Location, Macro
from convt5.configuration.gin_names import ResolvedReference, Setting, Target, flatten, own_modules
from convt5.errors import rules
from convt5.runtime import quiet_imports

PROGRAM_MACROS = ("MODEL", "MODEL_NAME")
"""Macros that commands read themselves: the model to build, and its name."""

_MOST_VALUES = 200_000  # Of all settings, and of objects built from them.


def macro_faults(
    final: Mapping[Any, Setting], every: Sequence[Setting], roots: Sequence[Any]
) -> Iterator[str]:
    defined = {setting.name for setting in final.values() if setting.target is None}
    known = defined | {gin_files.REQUIRED}
    used = _used_macros(every, roots)
    for setting in final.values():
        for value in flatten(setting.value):
            if isinstance(value, Macro) and value.name not in known:
                yield (
                    f"{setting.location}: {setting.name} uses %{value.name}, a macro that is not "
                    f"defined; define it or correct the name.{_similar(value.name, defined)}"
                )
    for setting in final.values():
        if setting.target is None and setting.name not in used:
            others = sorted(used - {"MODEL", "MODEL_NAME"})
            hint = _similar(setting.name, used)
            if not hint and others:
                hint = f" Macros in use: {', '.join(errors.abbreviate(others))}."
            yield (
                f"{setting.location}: macro {setting.name}={errors.clip(setting.value)} is not "
                f"used by anything; correct the name or remove it.{hint}"
            )
    for root in roots:
        if isinstance(root, Macro) and root.name not in defined:
            yield (
                f"macro {root.name} is not defined; give a gin file that binds it, such as "
                "--gin_file=gin/models/dynamic_tiny.gin."
            )


def without_unused_macros(final: Mapping[Any, Setting], roots: Sequence[Any]) -> dict[Any, Setting]:
    """Drops macros that nothing uses any more, because each use was overridden.

    The configuration that a run saves must not hold them: `macro_faults` refuses unused macros.
    """
    kept = dict(final)
    while True:
        used = _used_macros(kept.values(), roots)
        unused = [k for k, s in kept.items() if s.target is None and s.name not in used]
        if not unused:
            return kept
        for key in unused:
            del kept[key]


def _used_macros(settings: Iterable[Setting], roots: Sequence[Any]) -> set[str]:
    values = (value for setting in settings for value in flatten(setting.value))
    used = {value.name for value in (*values, *roots) if isinstance(value, Macro)}
    return (used | set(PROGRAM_MACROS)) - {gin_files.REQUIRED}


def _similar(name: str, candidates: Iterable[str]) -> str:
    """Returns `errors.suggest`, ignoring case."""
    by_upper = {candidate.upper(): candidate for candidate in candidates}
    hint = errors.suggest(name.upper(), by_upper)
    for upper, candidate in by_upper.items():
        hint = hint.replace(f" {upper}", f" {candidate}")
    return hint


def expansion_faults(final: Mapping[Any, Setting]) -> Iterator[str]:
    """Yields macros that expand to absurdly many values, or absurdly deep ones.

    Ten lines can double a list ten times, or more.
    """
    macros = {s.name: s for s in final.values() if s.target is None}
    extents: dict[str, tuple[int, int]] = {}

    def extent(value: Any, open_macros: tuple[str, ...]) -> tuple[int, int]:
        """Returns the number of values, and the depth of their nesting."""
        if isinstance(value, Macro):
            if value.name in open_macros or value.name not in macros:
                return 1, 1  # Other checks report these.
            if len(open_macros) > gin_files.MOST_NESTING:
                return 1, len(open_macros)
            if value.name not in extents:
                inner = extent(macros[value.name].value, (*open_macros, value.name))
                extents[value.name] = inner[0], inner[1] + 1
            return extents[value.name]
        if isinstance(value, dict):
            value = (*value.keys(), *value.values())
        if not isinstance(value, (list, tuple)):
            return 1, 1
        parts = [extent(item, open_macros) for item in value]
        return 1 + sum(size for size, _ in parts), 1 + max((d for _, d in parts), default=0)

    total = 0
    for setting in final.values():
        size, depth = extent(setting.value, (setting.name,) if setting.target is None else ())
        total += size
        if depth > gin_files.MOST_NESTING:
            yield (
                f"{setting.location}: {setting.name} has more than {gin_files.MOST_NESTING} lists "
                "and macros in one another; no configuration needs so many."
            )
            return
        if total > _MOST_VALUES:
            yield (
                f"{setting.location}: {setting.name} stands for {size:,} values once its macros "
                f"are replaced, and all settings may have {_MOST_VALUES:,}."
            )
            return


def import_faults(imports: Iterable[Import]) -> Iterator[str]:
    for statement in imports:
        if statement.module != gin_files.DYNAMIC_REGISTRATION:
            try:
                with quiet_imports.without_tensorflow_chatter():
                    importlib.import_module(statement.module)
            except ModuleNotFoundError as error:
                fault = _not_found(statement.module, error)
                yield f"{statement.location}: {statement.text}: {fault}"
            except Exception as error:
                if statement.module.partition(".")[0] == "convt5":
                    raise
                yield f"{statement.location}: {statement.text}: {_failed(error)}"


def _not_found(module: str, error: ModuleNotFoundError) -> str:
    missing = error.name or module
    if module != missing and not module.startswith(f"{missing}."):
        return f"module {module} needs {missing}, which is not installed; install it."
    package, _, name = module.rpartition(".")
    if package.partition(".")[0] == "convt5":
        hint = errors.suggest(name, own_modules()) if package == "convt5" else ""
        return f"there is no module {module}; correct the name.{hint}"
    return (
        f"there is no module {module}; correct the name, install its package, or name the folder "
        "that it lies in: PYTHONPATH=FOLDER before the command."
    )


def _failed(error: Exception) -> str:
    """Describes an error raised by a user's module during import, with its location."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append((error.filename, error.lineno))
    file, line = next((at for at in reversed(lines) if not _is_installed(at[0])), lines[-1])
    why = f"{type(error).__name__}: {error}".rstrip(".")
    return f"{file}:{line} raised {why}; correct the module."


def _is_installed(file: str) -> bool:
    path = pathlib.Path(file)
    is_ours = path.is_relative_to(gin_files.PACKAGE)
    return file.startswith("<frozen") or "site-packages" in path.parts or is_ours


def target_faults(settings: Iterable[Setting], roots: Sequence[Any]) -> Iterator[str]:
    """Yields names that do not exist, and parameters that their class or function lacks."""
    reported = set()
    for setting in settings:
        wanted = [v.target for v in flatten(setting.value) if isinstance(v, ResolvedReference)]
        for target in [*([setting.target] if setting.target else []), *wanted]:
            fault = _load_fault(target)
            if fault and target not in reported:
                reported.add(target)
                yield f"{setting.location}: {fault}"
        if setting.target is None or setting.target in reported:
            continue
        names = parameters(setting.target)
        if names is not None and setting.parameter not in names:
            yield (
                f"{setting.location}: {setting.target} has no parameter {setting.parameter!r}; "
                f"correct the name.{_similar(setting.parameter, names) or _listing(names)}"
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


def parameters(target: Target) -> dict[str, inspect.Parameter] | None:
    """Returns the parameters that gin can bind; None if any name is accepted."""
    try:
        signature = inspect.signature(target.load()).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        return None
    return {
        name: p for name, p in signature.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL
    }


def scope_faults(settings: Iterable[Setting], every: Sequence[Setting]) -> Iterator[str]:
    """Yields scopes that no reference enters, whose bindings would have no effect."""
    entered = {
        "/".join(value.scopes[:depth])
        for setting in every
        for value in flatten(setting.value)
        if isinstance(value, ResolvedReference)
        for depth in range(1, len(value.scopes) + 1)
    }
    for setting in settings:
        if setting.target is not None and setting.scope and setting.scope not in entered:
            yield (
                f"{setting.location}: {setting.name} has no effect, because nothing refers to "
                f"@{setting.scope}/...; correct the scope.{_similar(setting.scope, entered)}"
            )


class Walk:
    """Follows references from the roots; records what is built and what is missing."""

    def __init__(self, final: Mapping[Any, Setting], supplied: Sequence[str]):
        # What is built, and the number of values in it, including its parts.
        self.reached: dict[tuple[tuple[str, ...], Target], int] = {}
        self.used_macros: set[str] = set()
        self.missing: dict[str, str] = {}
        self._final = final
        self._supplied = supplied
        self._macros: dict[str, int] = {}  # Number of values, by name.
        self._open: list[Any] = []  # Being visited, outermost first.

    def visit(self, value: Any, scope: tuple[str, ...], wanted_by: str) -> int:
        """Visits what building `value` in `scope` needs; `wanted_by` names the parameter.

        Returns the number of values in it.
        """
        count = 0
        for part in flatten(value):
            count += 1
            if isinstance(part, Macro):
                self._enter(part, wanted_by)
                count += self._visit_macro(part, scope, wanted_by)
                self._open.pop()
            elif isinstance(part, ResolvedReference):
                self._enter((part.target, part.scopes or scope), wanted_by)
                count += self._visit_target(part.target, part.scopes or scope, not wanted_by)
                self._open.pop()
        if count > _MOST_VALUES:
            raise errors.UserError(
                f"configuration: {wanted_by} is built of {count:,} values, those of its parts "
                f"counted in, and may be of {_MOST_VALUES:,}; nothing needs so many."
            )
        return count

    def _enter(self, what: Any, wanted_by: str) -> None:
        if what in self._open:
            raise errors.UserError(
                f"configuration: {wanted_by} refers to itself, so it cannot be built; set it to "
                "another value."
            )
        if len(self._open) > gin_files.MOST_NESTING:
            raise errors.UserError(
                f"configuration: {wanted_by} lies in more than {gin_files.MOST_NESTING} other "
                "settings; no configuration needs so many in one another."
            )
        self._open.append(what)

    def bound(self, target: Target, scope: tuple[str, ...]) -> dict[str, Setting]:
        """Returns the effective settings of `target` in `scope`; inner scopes win, as in gin."""
        settings = {}
        for depth in range(len(scope) + 1):
            prefix = "/".join(scope[:depth])
            for setting in self._final.values():
                if setting.target == target and setting.scope == prefix:
                    settings[setting.parameter] = setting
        return settings

    def defaults(self) -> Iterator[Setting]:
        """Yields effective defaults that a gin file can express, as settings without scope."""
        seen = set()
        for _, target in self.reached:
            if target in seen:
                continue
            seen.add(target)
            unscoped = self.bound(target, ())
            for name, parameter in (parameters(target) or {}).items():
                default = parameter.default
                if name not in (*unscoped, *self._supplied) and gin_types.is_literal(default):
                    yield Setting("", target, name, default, gin_files.Location("default"))

    def _visit_macro(self, macro: Macro, scope: tuple[str, ...], wanted_by: str) -> int:
        if macro.name == gin_files.REQUIRED:
            self.missing[wanted_by] = ""
            return 0
        if macro.name in self._macros:
            return self._macros[macro.name]
        self.used_macros.add(macro.name)
        *_, setting = [s for s in self._final.values() if not s.target and s.name == macro.name]
        if setting.value == Macro(gin_files.REQUIRED):
            self.missing[macro.name] = wanted_by
            return 0
        # Gin evaluates the value of a macro in a scope of the macro's name.
        count = self.visit(setting.value, (macro.name,), wanted_by or macro.name)
        self._macros[macro.name] = count
        return count

    def _visit_target(self, target: Target, scope: tuple[str, ...], is_root: bool) -> int:
        if (scope, target) in self.reached:
            return self.reached[scope, target]
        self.reached[scope, target] = 0
        bound = self.bound(target, scope)
        prefix = f"{'/'.join(scope)}/" if scope else ""
        count = sum(self.visit(s.value, scope, s.name) for s in bound.values())
        self.reached[scope, target] = count
        for name, parameter in (parameters(target) or {}).items():
            supplied = is_root and name in self._supplied
            if parameter.default is inspect.Parameter.empty and name not in bound and not supplied:
                shown = prefix if prefix.rstrip("/") not in self.used_macros else ""
                self.missing[f"{shown}{target}.{name}"] = ""
        return count


def ineffective(final: Mapping[Any, Setting], walk: Walk) -> Iterator[str]:
    """Yields command-line bindings without effect; files may hold unused alternatives."""
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


def ineffective_macros(
    final: Mapping[Any, Setting], every: Sequence[Setting], walk: Walk
) -> Iterator[str]:
    """Yields macros of the command line that nothing of what is built reads.

    They are no errors: an axis of a study may only label its runs. A macro that a file requires, or
    sets to one that a file requires, may be given in any case.
    """
    known = {gin_files.REQUIRED}
    for _ in range(2):
        known |= {s.name for s in every if not s.target and s.value in [*map(Macro, known)]}
    known |= {*walk.used_macros, *PROGRAM_MACROS}
    for macro in final.values():
        if macro.target is not None or macro.location.line or macro.name in known:
            continue
        users = [s.name for s in final.values() if Macro(macro.name) in [*flatten(s.value)]]
        why = (
            f"only {', '.join(errors.abbreviate(users))} would use %{macro.name}, which the "
            "configuration does not build; select what needs it, or leave it out."
            if users
            else f"others replace the settings that use %{macro.name}; leave out one or the other."
        )
        yield f"{macro.location} has no effect: {why}"


def missing_message(missing: Mapping[str, str]) -> str:
    lines = [
        f"- {name}{f' (for {wanted_by})' if wanted_by else ''}: set --gin.{name}=VALUE"
        for name, wanted_by in missing.items()
    ]
    noun = "value is" if len(lines) == 1 else "values are"
    return (
        f"{len(lines)} required {noun} missing; set them on the command line or in a gin file:\n"
        + "\n".join(lines)
    )


def number_faults(settings: Iterable[Setting]) -> Iterator[str]:
    """Yields numbers such as 1e400 and 10**400, which no float holds."""
    for setting in settings:
        for value in flatten(setting.value):
            if isinstance(value, int | float) and not rules.finite(value):
                shown = errors.clip(value)
                yield f"{setting.location}: {setting.name}={shown} must be a finite number."


def typed(final: Mapping[Any, Setting]) -> Iterator[gin_types.Typed]:
    """Yields values with their annotations, with macros resolved."""
    macros = {s.name: s for s in final.values() if s.target is None}
    hints: dict[Target, Mapping[str, Any]] = {}
    for setting in final.values():
        if setting.target is None:
            continue
        if setting.target not in hints:
            hints[setting.target] = gin_types.hints(setting.target.load())
        value, location = _resolve(setting.value, setting.location, macros)
        is_known = not any(isinstance(v, Macro) for v in flatten(value))
        if is_known and setting.parameter in hints[setting.target]:
            hint = hints[setting.target][setting.parameter]
            yield gin_types.Typed(str(location), setting.name, value, hint)


def _resolve(
    value: Any, location: Location, macros: Mapping[str, Setting], inside: tuple[str, ...] = ()
) -> tuple[Any, Location]:
    """Returns a value with macros replaced, and its location: of the last macro, if it is one.

    Unknown and circular macros are left; other checks report these.
    """
    if isinstance(value, Macro) and value.name in macros and value.name not in inside:
        setting = macros[value.name]
        return _resolve(setting.value, setting.location, macros, (*inside, value.name))
    if isinstance(value, dict):
        return {k: _resolve(v, location, macros, inside)[0] for k, v in value.items()}, location
    if isinstance(value, (list, tuple)):
        items = (_resolve(item, location, macros, inside)[0] for item in value)
        return type(value)(items), location
    return value, location
