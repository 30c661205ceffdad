"""Validity rules that are declared with the fields of a frozen description.

`ruled` gives a field its default and its rule. `faults` lists every broken rule of a description as
a sentence with the setting, the value and the rule. Rules about several fields are ordinary code of
their description.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeGuard, get_args

from convt5 import errors

Rule = Callable[[object], str]
"""Returns what a value must be, as the end of a sentence, or "" if it is valid."""


MOST = 2**24
"""The largest size that a command holds in memory: float32 counts no further, and lengths too."""


def ruled(rule: Rule, default: Any = dataclasses.MISSING, *, per_layer: bool = False) -> Any:
    """Returns a dataclass field that `faults` checks.

    Args:
        rule: the rule of its values.
        default: default of the field; without one it is required.
        per_layer: whether a stack may give one value for each layer.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "per_layer": per_layer})


def is_per_layer(field: dataclasses.Field) -> bool:
    """Returns whether a stack may give this field one value for each layer."""
    return field.metadata.get("per_layer", False)


def faults(description: Any, where: str = "") -> list[str]:
    """Returns a sentence for every field whose rule is broken; `where` precedes its name."""
    return [
        fault
        for field in dataclasses.fields(description)
        for fault in field_faults(field, getattr(description, field.name), where)
    ]


def field_faults(field: dataclasses.Field, value: object, where: str = "") -> list[str]:
    """Returns a sentence if `value` breaks the rule of a field."""
    broken = field.metadata["rule"](value) if "rule" in field.metadata else ""
    return [f"{where}{field.name}={errors.clip(value)} {broken}"] if broken else []


def count(value: object) -> str:
    """Rule: an integer of at least 1; True is not one."""
    return "" if _is_count(value) else "must be an integer of at least 1."


def size(value: object) -> str:
    """Rule: an integer from 1 to `MOST`, for what is held in memory at once."""
    if not _is_count(value):
        return count(value)
    return "" if value <= MOST else f"must be at most {MOST:,} (2 ** 24), which fills any memory."


def count_or(meaning: str) -> Rule:
    """Returns the rule: an integer of at least 1, or None, which stands for `meaning`."""

    def rule(value: object) -> str:
        if value is None or _is_count(value):
            return ""
        return f"must be an integer of at least 1, or None for {meaning}."

    return rule


def switch(value: object) -> str:
    """Rule: True or False. Other values, such as texts, would count as true."""
    return "" if isinstance(value, bool) else "must be True or False."


def share(value: object) -> str:
    """Rule: a number in [0, 1)."""
    return "" if finite(value) and 0 <= value < 1 else "must be in [0, 1)."


def positive(value: object) -> str:
    """Rule: a finite number above 0."""
    return "" if finite(value) and value > 0 else "must be positive."


def choice(*allowed: Any) -> Rule:
    """Returns the rule: one of some values, or of those of a `typing.Literal`."""
    values = get_args(allowed[0]) or allowed

    def rule(value: object) -> str:
        if isinstance(value, str) and value in values:
            return ""
        near = errors.suggest(str(value), values)
        return f"must be one of {', '.join(values)}.{near}"

    return rule


def finite(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that a float can hold: 10**400 is none."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
