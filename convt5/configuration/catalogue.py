"""Catalogue of every setting that gin files can bind, derived from what the commands build.

A class or function is listed if a command builds it, or if it fits a parameter of a listed one. So
the catalogue needs no list, and includes whatever is added to a room.
"""

import collections.abc
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from convt5.configuration import gin_types, trust
from convt5.configuration.gin_names import ResolvedReference, Target
from convt5.errors import checks

BUILT = (
    "convt5.training.trainer.train",
    "convt5.evaluation.EvalConfig",
    "convt5.evaluation.PredictConfig",
    "convt5.sweeps.study.Study",
    "convt5.sweeps.paper.Paper",
    "convt5.configuration.gin_config.folder",
)
"""What commands build from gin files; all else is part of these."""

_ROOMS = ("checkpoints", "data", "evaluation", "generation", "modeling")
_ROOMS += ("sweeps", "tasks", "training", "vision")
# Of its room, whose other files need PyTorch or set nothing.
_MODULES = ("interchange.initialization",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One setting.

    Attributes:
        name: as bound in gin files, such as `optimizer.AdafactorConfig.decay_exponent`.
        type: its annotation.
        default: its default in Python syntax; None if a value is required.
        meaning: the first sentence of its documentation.
    """

    name: str
    type: str
    default: str | None
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configurable:
    """A class or function that gin files configure.

    Attributes:
        name: as named in gin files, such as `optimizer.AdafactorConfig`.
        module: the module that gin files import it from.
        meaning: the first line of its documentation.
        parameters: its settings.
    """

    name: str
    module: str
    meaning: str
    parameters: tuple[Parameter, ...]


def every_setting() -> list[Configurable]:
    """Returns everything that gin files can set, sorted by module and name.

    Imports all modules of convt5 with settings, and so TensorFlow and seqio.
    """
    candidates = list(_candidates())
    homes = _homes()
    reached = {id(value): value for value in map(_load, BUILT)}
    reached |= {id(v): v for v in candidates if not isinstance(v, type)}  # Tasks, vocabularies.
    waiting = list(reached.values())
    while waiting:
        hints = [
            hint
            for name, hint in gin_types.hints(waiting.pop()).items()
            if name != "return" and _can_hold_an_object(hint)
        ]
        for value in candidates:
            if id(value) not in reached and any(_fits(value, hint) for hint in hints):
                reached[id(value)] = value
                waiting.append(value)
    listed = [_configurable(value, homes) for value in reached.values()]
    return sorted(listed, key=lambda each: (each.module, each.name))


def _load(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


_WITHOUT_SETTINGS = ("convt5.data.beam_jobs", "convt5.modeling.mixers.")
"""Modules that import an optional package, and those whose settings are also `StackConfig`'s."""


def _candidates() -> Iterator[Any]:
    for name in _modules():
        module = importlib.import_module(name)
        for value in list(vars(module).values()):
            is_defined_here = getattr(value, "__module__", None) == module.__name__
            is_public = not getattr(value, "__name__", "_").startswith("_")
            # Named tuples are results of functions, not settings.
            is_result = isinstance(value, type) and issubclass(value, tuple)
            if is_defined_here and is_public and not is_result and trust.is_setting(value):
                yield value


def _modules() -> Iterator[str]:
    for room in _ROOMS:
        package = importlib.import_module(f"convt5.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.startswith(_WITHOUT_SETTINGS):
                yield info.name
    yield from (f"convt5.{module}" for module in _MODULES)


def _homes() -> dict[Any, str]:
    """Returns the public module of re-exported classes, which gin files import."""
    homes = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("convt5.") and name == getattr(module, "__name__", None):
            shown = [*getattr(module, "__all__", ()), *vars(module).get("_LAZY", ())]
            values = [getattr(module, each) for each in shown]
            homes |= {v: name for v in values if getattr(v, "__module__", name) != name}
    return homes


def _can_hold_an_object(hint: Any) -> bool:
    return hint not in (Any, object, inspect.Parameter.empty)


def _fits(value: Any, hint: Any) -> bool:
    parts = typing.get_args(hint)
    if parts and any(_fits(value, part) for part in parts if _can_hold_an_object(part)):
        return True
    if typing.get_origin(hint) is collections.abc.Callable:
        return _is_called_with(value, parts[0])
    if not (isinstance(hint, type) and isinstance(value, type)):
        return False
    if getattr(hint, "_is_protocol", False):
        asked = checks.protocol_members(hint)
        return bool(asked) and all(_does(value, hint, name) for name in asked)
    target = Target(value.__module__, value.__qualname__)
    return gin_types.fits(ResolvedReference((), target, call=True), hint)


def _is_called_with(value: Any, arguments: Any) -> bool:
    """Returns whether instances of a class are callable with these arguments."""
    call = vars(value).get("__call__") if isinstance(value, type) else None
    if call is None or not isinstance(arguments, list):
        return False
    return len(inspect.signature(call).parameters) == 1 + len(arguments)


def _does(value: type, protocol: type, name: str) -> bool:
    """Returns whether a class has a protocol's member, with compatible arguments."""
    expected, actual = getattr(protocol, name, None), getattr(value, name, None)
    if not inspect.isfunction(expected):
        return name in vars(value) or name in getattr(value, "__dataclass_fields__", {})
    if not inspect.isfunction(actual):
        return False
    given, taken = inspect.signature(expected).parameters, inspect.signature(actual).parameters
    needed = {p.name for p in taken.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD}
    return needed <= given.keys() <= taken.keys()


def _configurable(value: Any, homes: Mapping[Any, str]) -> Configurable:
    doc = inspect.getdoc(value) or ""
    module = homes.get(value, value.__module__)
    name = f"{module.rpartition('.')[2]}.{value.__name__}"
    meanings = _meanings(value)
    return Configurable(
        name=name,
        module=module,
        meaning=" ".join(doc.partition("\n\n")[0].split()),
        parameters=tuple(
            Parameter(
                name=f"{name}.{p.name}",
                type=_type_text(p.annotation),
                default=None if p.default is inspect.Parameter.empty else _default_text(p),
                meaning=meanings.get(p.name, ""),
            )
            for p in inspect.signature(value).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ),
    )


def _default_text(parameter: inspect.Parameter) -> str:
    text = repr(parameter.default)
    # Removes memory addresses of objects.
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _type_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _meanings(value: Any) -> Mapping[str, str]:
    """Returns the first sentence about each parameter, from docstrings of a class and its bases."""
    meanings: dict[str, str] = {}
    value = inspect.unwrap(value)
    for each in value.__mro__ if isinstance(value, type) else [value]:
        for name, text in _described_names(inspect.cleandoc(each.__doc__ or "").split("\n")):
            meanings.setdefault(name, text)
    return meanings


def _described_names(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields names and first sentences from the sections `Args` and `Attributes`."""
    inside, names, text = False, "", ""
    for line in [*lines, "End:"]:
        entry = re.match(r"    (\w[\w, ]*): (.*)", line)
        if names and (entry or not line.startswith("     ")):
            sentence = re.split(r"(?<=\.)\s(?=[A-Z])", " ".join(text.split()))[0]
            yield from ((name.strip(), sentence) for name in names.split(","))
            names = ""
        if re.fullmatch(r"\w+:", line):
            inside = line in ("Args:", "Attributes:")
        elif inside and entry:
            names, text = entry.groups()
        elif names:
            text += f" {line}"
