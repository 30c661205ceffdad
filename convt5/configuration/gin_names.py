"""Resolves names in gin files to the settings of classes and functions.

`gin_config` turns statements into these; `gin_checks` and `gin_text` use them.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import convt5
from convt5 import errors
from convt5.configuration import gin_files
from convt5.configuration.gin_files import Binding, Import, Location, Reference

_INCOMPLETE = (
    "{0!r} is a module; name a class or function in it, and a parameter: {0}.NAME.PARAMETER."
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A class or function that bindings name, such as `architecture.ConvT5Config`."""

    module: str
    attributes: str

    def __str__(self) -> str:
        return f"{self.module.rsplit('.', 1)[-1]}.{self.attributes}"

    def load(self) -> Any:
        """Imports the module and returns the object; raises `AttributeError` if it is missing."""
        value = importlib.import_module(self.module)
        for attribute in self.attributes.split("."):
            value = getattr(value, attribute)
        return value


@dataclasses.dataclass(frozen=True)
class Setting:
    """The effective value of a parameter, or of a macro if `target` is None."""

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


@dataclasses.dataclass(frozen=True)
class ResolvedReference:
    """A `gin_files.Reference` with its target in place of a name."""

    scopes: tuple[str, ...]
    target: Target
    call: bool

    def __repr__(self) -> str:
        return f"@{'/'.join((*self.scopes, str(self.target)))}{'()' if self.call else ''}"


class Resolver:
    """Resolves the names by which files refer to modules."""

    def __init__(self, imports: Iterable[Import]):
        self.faults: list[str] = []
        self._named: set[Target] = set()
        self._by_file: dict[pathlib.Path | None, list[Import]] = {}
        for statement in imports:
            if statement.module != gin_files.DYNAMIC_REGISTRATION:
                self._by_file.setdefault(statement.location.path, []).append(statement)

    def setting(self, binding: Binding) -> Setting:
        value = self.value(binding.value, binding.location)
        if binding.is_macro:
            return Setting(binding.scope, None, binding.selector, value, binding.location)
        target = self._target(binding.selector, binding.location)
        self._named.add(target)
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
                    rest = selector.removeprefix(f"{statement.module}.")
                    return Target(convt5.current_name(statement.module), rest)
            elif statement.name == first and rest:
                return Target(convt5.current_name(statement.module), rest)
        if location.line:
            known = {statement.name for statement in self._visible(location)}
            if selector in known:
                self.faults.append(f"{location}: {_INCOMPLETE.format(selector)}")
                return Target(first, rest)
            hint = errors.suggest(first, known) or _import_hint(first, rest)
            self.faults.append(f"{location}: {selector!r} begins with no imported module.{hint}")
            return Target(first, rest)
        # The command line has no imports, so convt5's own modules are recognised.
        names = selector.removeprefix("convt5.")
        room, _, inside = names.partition(".")
        if (gin_files.PACKAGE / room / f"{inside.partition('.')[0]}.py").is_file():
            module, _, rest = inside.partition(".")
            return Target(f"convt5.{room}.{module}", rest)
        first, _, rest = names.partition(".")
        if names in own_modules():
            self.faults.append(f"{location}: {_INCOMPLETE.format(names)}")
            return Target(first, rest)
        modules = _own(first, rest) if rest else []
        if len(modules) == 1:
            return Target(modules[0], rest)
        reason = (
            f"may be one of {', '.join(modules)}. Import the one you mean in a gin file."
            if modules
            else "is not a module.Name of convt5 or of a module that the gin files "
            f"import.{self._qualified(selector)}"
        )
        self.faults.append(f"{location}: {selector!r} {reason}")
        return Target(first, rest)

    def _qualified(self, selector: str) -> str:
        """Suggests the target of a name without its module, or a similar module."""
        for target in self._named:
            if target.attributes.lower() == selector.lower():
                return f" Did you mean {target}?"
        known = {s.name for group in self._by_file.values() for s in group}
        return errors.suggest(selector.partition(".")[0], {*known, *own_modules()})

    def _visible(self, location: Location) -> list[Import]:
        if location.line:
            return self._by_file.get(location.path, [])
        return [s for group in self._by_file.values() for s in group]


def own_modules() -> list[str]:
    """Returns the names by which `module.Name` may refer to modules on a command line."""
    return [path.stem for path in gin_files.PACKAGE.rglob("*.py") if path.stem != "__init__"]


def _own(module: str, attributes: str) -> list[str]:
    """Returns the modules of convt5 that a name may mean: one at the top, or in its packages.

    Of several in packages, returns those that define the attribute. Looks at files without
    importing. Also recognises earlier names of a module.
    """
    top = convt5.current_name(f"convt5.{module}")
    if importlib.util.find_spec(top) is not None:
        return [top]
    candidates = {}
    # In a checkout, the tasks are in another folder.
    for package in sorted({*(path.name for path in gin_files.PACKAGE.iterdir()), "tasks"}):
        spec = importlib.util.find_spec(f"convt5.{package}") if package.isidentifier() else None
        for folder in (spec and spec.submodule_search_locations) or ():
            path = pathlib.Path(folder, f"{module}.py")
            if path.is_file():
                candidates[f"convt5.{package}.{module}"] = path
    name = re.escape(attributes.partition(".")[0])
    definition = re.compile(rf"^(?:class|def) {name}\b", re.MULTILINE)
    defining = [
        module for module, path in candidates.items() if definition.search(path.read_text())
    ]
    return defining or list(candidates)


def _import_hint(module: str, attributes: str) -> str:
    """Describes how to import a module of convt5; empty for other names."""
    lines = [f"from {name.rpartition('.')[0]} import {module}" for name in _own(module, attributes)]
    return f" Import it: {' or '.join(lines)}" if lines else ""


def flatten(value: Any) -> Iterator[Any]:
    """Yields every value inside nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        for item in (*value.keys(), *value.values()):
            yield from flatten(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    else:
        yield value
