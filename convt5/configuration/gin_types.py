"""Checks literal values of a configuration against the annotations of what they are bound to."""

import collections.abc
import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from convt5 import errors


@dataclasses.dataclass(frozen=True)
class Typed:
    """A value, its annotation, and how to name them in a message."""

    location: str
    name: str
    value: Any
    hint: Any


def hints(target: Any) -> Mapping[str, Any]:
    """Returns the annotations of a class's or function's parameters; none where unreadable."""
    try:
        if isinstance(target, type) and not dataclasses.is_dataclass(target):
            return typing.get_type_hints(target.__init__)
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}  # Names that exist for type checkers only.


def faults(values: Iterable[Typed]) -> Iterator[str]:
    """Yields one sentence for every value that its annotation rules out."""
    for typed in values:
        if fits(typed.value, typed.hint):
            continue
        choices = [c for part in _alternatives(typed.hint) for c in _choices(part)]
        if choices and isinstance(typed.value, str):
            rule = f"must be one of {', '.join(map(str, choices))}."
            rule += errors.suggest(typed.value, map(str, choices))
        else:
            rule = f"must be {' or '.join(dict.fromkeys(_describe(typed.hint)))}."
            rule += _spelling(typed)
        yield f"{typed.location}: {typed.name}={typed.value!r} {rule}"


def fits(value: Any, hint: Any) -> bool:
    """Returns False only where a literal certainly violates an annotation."""
    origin = get_origin(hint)
    if origin is typing.Annotated:
        return fits(value, get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin is tuple or origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        parts = [part for part in get_args(hint) if part is not Ellipsis]
        is_list = isinstance(value, (list, tuple))
        return is_list and all(not parts or any(fits(v, p) for p in parts) for v in value)
    if origin in (dict, collections.abc.Mapping):
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
    is_object = dataclasses.is_dataclass(hint) or getattr(hint, "_is_protocol", False)
    return not (isinstance(hint, type) and is_object)


def is_plain(hint: Any) -> bool:
    """Returns whether only numbers, texts, True, False and None fit: no object does."""
    return set(_alternatives(hint)) <= {int, float, bool, str, type(None)}


def is_literal(value: Any) -> bool:
    """Returns whether a gin file can express `value`."""
    if isinstance(value, (list, tuple)):
        return all(map(is_literal, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


def _alternatives(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (typing.Union, types.UnionType):
        for part in get_args(hint):
            yield from _alternatives(part)
    else:
        yield hint


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _describe(hint: Any) -> Iterator[str]:
    words = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
    for part in _alternatives(hint):
        if part is type(None):
            yield "None"
        elif part in words:
            yield words[part]
        elif choices := _choices(part):
            yield "one of " + ", ".join(map(str, choices))
        elif get_origin(part) is not None:
            inner = [p for p in get_args(part) if p is not Ellipsis]
            yield "a list" + (f" of {' or '.join(_describe(inner[0]))}" if inner else "")
        else:
            yield f"a reference such as @module.{getattr(part, '__name__', part)}()"


def _spelling(typed: Typed) -> str:
    """A remedy for the two common slips of the command line."""
    wanted = set(_alternatives(typed.hint))
    if bool in wanted and str(typed.value).lower() in ("true", "false"):
        return f" Write {str(typed.value).capitalize()}."
    if int in wanted and isinstance(typed.value, float) and typed.value.is_integer():
        return f" Write {int(typed.value)}."
    if str in wanted and not isinstance(typed.value, str):
        return f" Quote it: '\"{typed.value}\"'."
    return ""
