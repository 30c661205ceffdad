"""Checks shared by the descriptions of all models: plain values, counts, choices."""

import dataclasses
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from convt5 import errors
from convt5.errors import rules

MOST_LAYERS = 1000
MOST_STEPS = 2**31

_Class = typing.TypeVar("_Class")


def typed(kind: type[_Class]) -> type[_Class]:
    """Checks the types of a dataclass of settings before its own rules.

    Gin checks types as it reads files. A program's `Cosine(peak="0.1")` raises the same `UserError`
    instead of the TypeError of a comparison.
    """
    changed: Any = kind
    check_rules = getattr(kind, "__post_init__", lambda self: None)

    def check(self: object) -> None:
        errors.raise_all(type_faults(self), where=type(self).__name__)
        check_rules(self)

    changed.__post_init__ = check
    return kind


def make_plain(description: Any) -> None:
    """Converts sequences and numbers of a frozen dataclass to tuples, ints and floats.

    Gin gives lists, and programs give ranges and NumPy numbers. Tuples are hashable, as the static
    part of a jitted module must be, and a checkpoint describes its model in JSON.
    """
    for field in dataclasses.fields(description):
        object.__setattr__(description, field.name, _plain(getattr(description, field.name)))


def _plain(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, Sequence) else value


def is_description(value: object) -> TypeGuard[Any]:
    """Returns whether a value is an instance of a dataclass, as all descriptions are."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def type_faults(description: Any, where: str = "") -> Iterator[str]:
    """Yields a sentence for each attribute of another type than its annotation.

    A count of 2.5 or NaN, or a switch "no", would otherwise be used silently. Descriptions inside
    `description` are checked too.
    """
    try:
        hints = typing.get_type_hints(type(description))
    except (NameError, TypeError, AttributeError):  # Names that exist only for type checkers.
        hints = {}
    for field in dataclasses.fields(description):
        value, name = getattr(description, field.name), f"{where}{field.name}"
        hint = hints.get(field.name, Any)
        if not _fits(value, hint):
            words = _type_name(hint)
            kind = "" if words.startswith("a ") else "of type "
            yield f"{name}={errors.clip(value)} must be {kind}{words}."
        elif is_description(value):
            yield from type_faults(value, f"{name}.")


def protocol_members(protocol: type) -> set[str]:
    """Returns the methods and attributes that a protocol requires."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {n for base in bases for n in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if name == "__call__" or not name.startswith("_")}


def _fits(value: Any, hint: Any) -> bool:
    """Returns False only if a value certainly violates an annotation."""
    kinds = alternatives(hint)
    if len(kinds) > 1:
        return any(_fits(value, kind) for kind in kinds)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Sequence, tuple):
        is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        return is_list and all(_fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(part, kind)
            for item in value.items()
            for part, kind in zip(item, inner, strict=True)
        )
    if getattr(hint, "_is_protocol", False):
        # A partial implementation may suffice; one without any of the members does not.
        return any(hasattr(value, name) for name in protocol_members(hint))
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast(type, hint))
    if hint in _PLAIN:
        return _PLAIN[hint](value)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):
        return True
    # Other objects may do what is asked without being of the class.
    return type(value) not in (*_PLAIN, bytes, list, tuple, dict) or isinstance(value, kind)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the only type."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _type_name(hint: Any) -> str:
    kinds, origin = alternatives(hint), typing.get_origin(hint)
    if len(kinds) > 1:
        return " or ".join(map(_type_name, kinds))
    inner = [_type_name(kind) for kind in typing.get_args(hint) if kind is not Ellipsis]
    if origin in (Sequence, tuple):
        return f"a list of {inner[0]}"
    if origin is Mapping:
        return f"a dictionary from {inner[0]} to {inner[1]}"
    return getattr(hint, "__name__", str(hint))


def _is_float(value: object) -> bool:
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool) and rules.finite(value)
    return isinstance(value, numbers.Real)


_PLAIN: dict[Any, Callable[[object], bool]] = {
    int: lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    float: _is_float,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str | os.PathLike),
    type(None): lambda value: value is None,
}


def layer_faults(count: int, *, where: str = "") -> list[str]:
    """Returns an error for an absurd number of layers, each of which is an object."""
    if count <= MOST_LAYERS:
        return []
    return [f"{where}num_layers={count} must be at most {MOST_LAYERS}."]


def count_faults(
    description: object,
    names: Iterable[str],
    *,
    none: str | None = None,
    rule: rules.Rule = rules.size,
) -> list[str]:
    """Returns an error for each attribute that is not an integer of at least 1, or too large.

    Args:
        description: the object with the attributes.
        names: names of the attributes.
        none: the meaning of None, if it is allowed.
        rule: `rules.count` allows values of any size.
    """
    values = {name: getattr(description, name) for name in names}
    alternative = "" if none is None else f", or None for {none}"
    return [
        f"{name}={errors.clip(value)} must be an integer of at least 1{alternative}."
        if rules.count(value)
        else f"{name}={value} {rules.size(value)}"
        for name, value in values.items()
        if rule(value) and not (value is None and none is not None)
    ]


def least_faults(description: object, names: Iterable[str]) -> list[str]:
    """Returns an error for each attribute below 1; None is allowed."""
    values = {name: getattr(description, name) for name in names}
    return [
        f"{name}={value} must be at least 1."
        for name, value in values.items()
        if value is not None and value < 1
    ]


def step_faults(description: object, names: Iterable[str]) -> list[str]:
    """Returns an error for each attribute with more steps than a compiled step can count."""
    values = {name: getattr(description, name) for name in names}
    return [
        f"{name}={value} must be less than {MOST_STEPS} (2 ** 31): steps are counted in 32 bits."
        for name, value in values.items()
        if value >= MOST_STEPS
    ]


def fits_64_bits(number: int) -> bool:
    """Returns whether a number can be a seed: a jax key is made of 64 bits."""
    return isinstance(number, numbers.Integral) and -(2**63) <= number < 2**63


def signature_faults(subclass: type, base: type) -> list[str]:
    """Returns a sentence for each method that cannot be called as its base declares it."""
    faults = []
    for name, declared in vars(base).items():
        if name.startswith("_") and name != "__call__":
            continue
        own = inspect.getattr_static(subclass, name)
        if isinstance(declared, property) and isinstance(own, types.FunctionType):
            faults.append(f"{name} is a method, but must be a property; write @property above it.")
        if not isinstance(declared, types.FunctionType) or own is declared:
            continue
        if not callable(getattr(subclass, name)):
            faults.append(f"{name}={errors.clip(own)} must be a method; see {base.__name__}.")
        elif isinstance(own, types.FunctionType) and (fault := _call_fault(declared, own)):
            faults.append(f"{name} {fault}; see {base.__name__}.")
    return faults


def _call_fault(declared: types.FunctionType, own: types.FunctionType) -> str:
    """Returns why `own` does not take the arguments of `declared`, or ""."""
    wanted = inspect.signature(declared).parameters.values()
    names = [p.name for p in wanted if p.kind is p.KEYWORD_ONLY]
    count = len(wanted) - len(names)
    found = inspect.signature(own)
    try:
        found.bind(*range(count), **dict.fromkeys(names))
    except TypeError as error:
        plain = [p.replace(annotation=p.empty) for p in wanted]
        return (
            f"takes ({', '.join(found.parameters)}), but must take {inspect.Signature(plain)}: "
            f"{error}"
        )
    return ""


def check_reads_text(model: object, what: str = "the data are") -> None:
    """Raises `UserError` for the description of a model without a vocabulary.

    Args:
        model: the description.
        what: what needs text, with its verb, for the message.
    """
    if not hasattr(model, "vocab_size"):
        raise errors.UserError(
            f"configuration: {what} text, and model={type(model).__name__} reads none; give "
            "a model of text, such as --gin_file=gin/models/dynamic_tiny.gin, or a run file of "
            "images."
        )


def check_reads_packed(model: object, what: str, remedy: str) -> None:
    """Raises `UserError` for the description of a model whose stem mixes examples of a row.

    Args:
        model: the description.
        what: what has several examples in a row, with its verb, for the message.
        remedy: the remedy, for the message.
    """
    stride = getattr(model, "stem_stride", 1)
    if stride > 1:
        raise errors.UserError(
            f"{what} several examples in a row, but the encoder's stem has a stride of "
            f"{stride}: an example that begins inside a window would be read differently than "
            f"alone; {remedy}, or set the strides of architecture.TextStemConfig to 1."
        )
