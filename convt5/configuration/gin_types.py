"""Checks values of a configuration against the annotations of their parameters."""

import collections.abc
import dataclasses
import inspect
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from convt5 import errors
from convt5.configuration.gin_names import ResolvedReference
from convt5.errors import checks

_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping)


@dataclasses.dataclass(frozen=True)
class Typed:
    """A value, its annotation, and its name for messages."""

    location: str
    name: str
    value: Any
    hint: Any


def hints(target: Any) -> Mapping[str, Any]:
    """Returns the annotations of a class's or function's parameters; empty if unreadable."""
    try:
        if isinstance(target, type) and not dataclasses.is_dataclass(target):
            return typing.get_type_hints(target.__init__)
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}  # Names that exist only for type checkers.


def faults(values: Iterable[Typed]) -> Iterator[str]:
    """Yields one sentence for every value that violates its annotation."""
    for typed in values:
        if fits(typed.value, typed.hint):
            continue
        choices = [c for part in checks.alternatives(typed.hint) for c in _choices(part)]
        if choices and isinstance(typed.value, str):
            rule = f"must be one of {', '.join(map(str, choices))}."
            rule += errors.suggest(typed.value, map(str, choices))
        else:
            rule = f"must be {' or '.join(dict.fromkeys(_describe(typed.hint)))}."
            rule += _spelling(typed)
        yield f"{typed.location}: {typed.name}={errors.clip(typed.value)} {rule}"


def fits(value: Any, hint: Any) -> bool:
    """Returns False only if a value certainly violates an annotation."""
    origin = get_origin(hint)
    if origin is typing.Annotated:
        return fits(value, get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if isinstance(value, ResolvedReference):
        return _reference_fits(value, hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in _LISTS:
        parts = [part for part in get_args(hint) if part is not Ellipsis]
        is_list = isinstance(value, (list, tuple))
        return is_list and all(not parts or any(fits(v, p) for p in parts) for v in value)
    if origin in _MAPPINGS:
        return isinstance(value, dict)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if origin is collections.abc.Callable:
        return False
    # Only references build objects.
    kind = origin or hint
    if getattr(kind, "_is_protocol", False):
        return False
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def is_literal(value: Any) -> bool:
    """Returns whether a gin file can express `value`."""
    if isinstance(value, (list, tuple)):
        return all(map(is_literal, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _reference_fits(reference: ResolvedReference, hint: Any) -> bool:
    """Returns `fits` for a reference; results of functions are unknown, so they always fit."""
    target, kind = reference.target.load(), get_origin(hint) or hint
    is_class = isinstance(target, type)
    if reference.call and not is_class:
        return True
    if kind is collections.abc.Callable:
        # A class whose instances are callable must be instantiated.
        return not is_class or reference.call == _has(target, "__call__")
    if not isinstance(kind, type) or kind in (Any, object):
        return kind is not Literal
    is_protocol = getattr(kind, "_is_protocol", False)
    if not reference.call:
        # A function fits a protocol that only requires a call.
        return kind is type or (
            not is_class and is_protocol and checks.protocol_members(kind) == {"__call__"}
        )
    if kind in _LISTS or kind in _MAPPINGS:
        return _has(target, "__iter__")
    if is_protocol:
        # A partial implementation may suffice; one without any of the members does not.
        return any(
            _has(target, name) and _is_meant(target, kind, name)
            for name in checks.protocol_members(kind)
        )
    return issubclass(target, kind)


def _has(target: type, name: str) -> bool:
    """Returns whether a class, not only its metaclass, has an attribute."""
    return any(name in {**vars(base), **inspect.get_annotations(base)} for base in target.__mro__)


def _is_meant(target: type, protocol: type, name: str) -> bool:
    """Returns whether an attribute implements the protocol's: many descriptions have a `build`.

    Our own methods are compared by their arguments; others may name these differently.
    """
    expected, actual = getattr(protocol, name, None), getattr(target, name, None)
    is_ours = target.__module__.startswith("convt5.")
    if not (is_ours and inspect.isfunction(expected) and inspect.isfunction(actual)):
        return True
    return (
        inspect.signature(expected).parameters.keys() <= inspect.signature(actual).parameters.keys()
    )


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _describe(hint: Any) -> Iterator[str]:
    words = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
    for part in checks.alternatives(hint):
        if part is type(None):
            yield "None"
        elif part in words:
            yield words[part]
        elif choices := _choices(part):
            yield "one of " + ", ".join(map(str, choices))
        elif get_origin(part) is collections.abc.Callable:
            yield "a reference to something that can be called"
        elif get_origin(part) in _MAPPINGS:
            yield "a dictionary"
        elif get_origin(part) is os.PathLike:
            yield "text"
        elif get_origin(part) is not None:
            inner = [p for p in get_args(part) if p is not Ellipsis]
            yield "a list" + (
                f" of {' or '.join(dict.fromkeys(_describe(inner[0])))}" if inner else ""
            )
        else:
            yield f"a reference such as @module.{getattr(part, '__name__', part)}()"


def _spelling(typed: Typed) -> str:
    """Suggests a remedy for common mistakes."""
    value = typed.value
    if isinstance(value, ResolvedReference):
        built = dataclasses.replace(value, call=True)
        if not value.call and fits(built, typed.hint):
            return f" Write {built!r}: the parentheses build it."
    if fits([value], typed.hint):
        return f" Write {[value]!r}."
    wanted = set(checks.alternatives(typed.hint))
    if bool in wanted and str(typed.value).lower() in ("true", "false"):
        return f" Write {str(typed.value).capitalize()}."
    if int in wanted and isinstance(typed.value, float) and typed.value.is_integer():
        return f" Write {int(typed.value)}."
    if str in wanted and not isinstance(typed.value, str):
        return f" Quote it: '\"{typed.value}\"'."
    return ""
