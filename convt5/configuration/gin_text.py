"""Writes a checked configuration as one gin file that reproduces the run."""

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from convt5.configuration.gin_files import Import
from convt5.configuration.gin_names import ResolvedReference, Setting, Target, flatten

_HEADER = """\
# The resolved configuration, defaults included: given alone as --gin_file it repeats the run.
from __gin__ import dynamic_registration
"""


def text(
    final: Mapping[Any, Setting], defaults: Iterable[Setting], imports: Iterable[Import] = ()
) -> str:
    """Returns imports, macros and bindings, sorted; `defaults` are written like bindings.

    Imports of the user's modules are kept in order, because they may have side effects, such as
    registering a task.
    """
    settings = [*final.values(), *defaults]
    values = (value for setting in settings for value in flatten(setting.value))
    targets = {value.target for value in values if isinstance(value, ResolvedReference)}
    targets |= {setting.target for setting in settings if setting.target}
    names = _module_names({target.module for target in targets}, imports)
    show = _Shower(names)
    macros = sorted(f"{s.name} = {show.value(s.value)}" for s in settings if not s.target)
    bindings = sorted(
        (f"{s.scope}/{show.target(s.target)}", f"{show.setting(s)} = {show.value(s.value)}")
        for s in settings
        if s.target
    )
    groups = itertools.groupby(bindings, key=lambda binding: binding[0])
    sections = [
        _HEADER + "\n".join(_import_lines(names)),
        "\n".join(macros),
        *("\n".join(line for _, line in group) for _, group in groups),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _module_names(modules: Iterable[str], imports: Iterable[Import]) -> dict[str, str]:
    """Returns a short unique name for every module: ours first, then the user's as imported."""
    imported = (statement.module for statement in imports)
    theirs = dict.fromkeys(m for m in imported if not _is_ours(m))
    names: dict[str, str] = {}
    for module in dict.fromkeys((*sorted(filter(_is_ours, modules)), *theirs, *sorted(modules))):
        names[module] = _free_name(module, {"gin", *names.values()})
    return names


def _is_ours(module: str) -> bool:
    # `__gin__` is in the header.
    return module.partition(".")[0] in ("convt5", "__gin__")


def _free_name(module: str, taken: Container[str]) -> str:
    short, long = module.rsplit(".", 1)[-1], module.replace(".", "_")
    numbered = (f"{long}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain((short, long), numbered) if name not in taken)


def _import_lines(names: Mapping[str, str]) -> list[str]:
    ours = sorted(_import_line(item) for item in names.items() if _is_ours(item[0]))
    return [*ours, *(_import_line(item) for item in names.items() if not _is_ours(item[0]))]


def _import_line(item: tuple[str, str]) -> str:
    module, name = item
    package, _, last = module.rpartition(".")
    alias = f" as {name}" if name != last else ""
    return f"from {package} import {last}{alias}" if package else f"import {module}{alias}"


class _Shower:
    """Formats settings as gin, with one name for each module."""

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
