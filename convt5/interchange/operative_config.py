"""Reads settings as plain values from a gin file of another library.

The file names functions of Mesh TensorFlow, which can no longer be imported, so gin cannot parse
it. Only literal values, lists and macros matter here.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from convt5 import errors
from convt5.modeling.layers import MlpKind
from convt5.runtime import foreign_files

_STATEMENT = re.compile(
    r"^(?P<scope>(?:[\w.-]+/)*)(?P<selector>[A-Za-z_][\w.]*)\s*=\s*(?P<value>.+)$", re.DOTALL
)
Number = float | None

ACTIVATIONS: dict[tuple[str, ...], MlpKind] = {
    ("relu",): "relu",
    ("gelu", "linear"): "gated_gelu",
    ("silu", "linear"): "gated_silu",
    ("swish", "linear"): "gated_silu",
}
"""Activations of a feed-forward layer, one for each projection into it."""

_MOST_BYTES = 2**20

_BLOCK = re.compile(r"^(?P<name>[\w./]+):\s*(#.*)?$")
_IN_BLOCK = re.compile(r"^\s+[A-Za-z_]\w*\s*=(?!=)")

REFERENCE = r"@(?:[\w-]+[./])*(\w+)"
"""A reference (@module.f), of which the last part is a group."""

# Nothing is tried in two ways, so that the time for a line grows with its length only.
_TEXT = r"""'(?:[^'\\]|\\.|\\$)*+(?:'|$)|"(?:[^"\\]|\\.|\\$)*+(?:"|$)"""
_COMMENT = re.compile(rf"""^((?:[^'"#]|{_TEXT})*+)#.*$""")


class OperativeConfig:
    """The bindings of a gin file, by scope, configurable and parameter.

    Args:
        text: contents of the file.
        where: name of the file for messages.

    Attributes:
        includes: its statements that include other files, which are not read.
    """

    def __init__(self, text: str, *, where: str = "the operative config"):
        self.where = where
        self._macros: dict[str, str] = {}
        self._bindings: dict[tuple[str, str, str], str] = {}
        statements = list(_statements(text))
        self.includes = [each for each in statements if re.match(r"include\b", each)]
        for statement in statements:
            if re.match(r"(import|include|from)\b", statement):
                continue
            match = _STATEMENT.match(statement)
            if match is None:
                raise errors.UserError(
                    f"{where}: {statement.splitlines()[0]!r} is no gin statement; pass the "
                    "operative_config.gin that was written beside the checkpoint."
                )
            self._add(match["scope"].strip("/"), match["selector"], match["value"].strip())

    @classmethod
    def read(cls, path: epath.PathLike) -> "OperativeConfig":
        """Reads a file.

        Raises:
            UserError: the file is unreadable, or not a gin file.
        """
        try:
            text = foreign_files.read_bytes(path, _MOST_BYTES).decode()
        except (OSError, ValueError) as error:
            raise errors.UserError(
                f"operative_config={path} cannot be read ({error}); pass the gin file that was "
                "written beside the checkpoint."
            ) from None
        return cls(text, where=f"operative_config={path}")

    def get(self, configurable: str, parameter: str, *, scope: str = "") -> Any:
        """Returns a value bound in `scope`, or else without scope, or None.

        `configurable` is matched at the end of the full name. References (@f) are returned as text.
        """
        value = self._bound(configurable, parameter, scope)
        return None if value is None else self._value(value)

    def _bound(self, configurable: str, parameter: str, scope: str) -> str | None:
        matches: dict[bool, str] = {}
        for (bound_scope, selector, name), value in self._bindings.items():
            if name != parameter or not f".{selector}".endswith(f".{configurable}"):
                continue
            scopes = bound_scope.split("/") if bound_scope else []
            if not scopes or scope in scopes:
                matches[bool(scopes)] = value
        return matches.get(True, matches.get(False))

    def number(
        self,
        configurable: str,
        parameter: str,
        default: Number,
        *,
        scope: str = "",
        whole: bool = False,
    ) -> Any:
        """Returns a number as `get` does, or the default if nothing is bound.

        Args:
            configurable, parameter, scope: as in `get`.
            default: the original's default, or None.
            whole: accepts only integers.

        Raises:
            UserError: the value is not such a number.
        """
        value = self.get(configurable, parameter, scope=scope)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not whole:
                return value
            if value == value // 1:
                return int(value)
        raise self._of_wrong_kind(
            configurable, parameter, value, "an integer" if whole else "a number"
        )

    def limit(self, configurable: str, parameter: str, default: float) -> float | None:
        """Returns a number as `number` does; None where it is bound, which means without a limit.

        Raises:
            UserError: the value is neither.
        """
        bound = self._bound(configurable, parameter, "")
        is_none = bound is not None and self._value(bound) is None
        return None if is_none else self.number(configurable, parameter, default)

    def divisor(self, configurable: str, parameter: str, *, scope: str = "") -> float:
        """Returns a number by which a loss is divided, as `get` does, or 1 if nothing is bound.

        Raises:
            UserError: the value is not such a number.
        """
        value = self.number(configurable, parameter, 1.0, scope=scope)
        if 0 < value < 2**63:  # Its square fits in float32.
            return float(value)
        raise self._of_wrong_kind(configurable, parameter, value, "above 0, and below 2**63")

    def switch(self, configurable: str, parameter: str, default: bool) -> bool:
        """Returns True or False as `get` does, or the default if nothing is bound.

        Raises:
            UserError: the value is neither.
        """
        value = self.get(configurable, parameter)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self._of_wrong_kind(configurable, parameter, value, "True or False")

    def check(self, usual: Mapping[tuple[str, str], Any], *, scope: str = "") -> None:
        """Checks that settings that convt5 lacks are unset, or have the usual values.

        Args:
            usual: the value of each configurable and parameter; None means unset.
            scope: as in `get`.

        Raises:
            UserError: names every other value.
        """
        errors.raise_all(
            [
                f"{'.'.join(name)}={value!r} is not implemented; remove the line to train with "
                f"{expected!r} instead."
                for name, expected in usual.items()
                if (value := self.reference(*name, scope=scope)) not in (None, expected)
            ],
            where=self.where,
        )

    def reference(self, configurable: str, parameter: str, *, scope: str = "") -> Any:
        """Returns a value as `get` does, but of a reference (@module.f()) only its name f."""
        value = self.get(configurable, parameter, scope=scope)
        match = re.fullmatch(rf"{REFERENCE}(?:\(\))?", str(value))
        return match[1] if match else value

    def _of_wrong_kind(
        self, configurable: str, parameter: str, value: Any, wanted: str
    ) -> errors.UserError:
        undefined = isinstance(value, str) and value.startswith("%")
        remedy = f"define the macro {value[1:]}" if undefined else "correct the line"
        return errors.UserError(
            f"{self.where}: {configurable}.{parameter}={value!r} must be {wanted}; {remedy}, or "
            "remove it."
        )

    def macro(self, name: str) -> Any:
        """Returns the value of a macro, or None."""
        return self._value(self._macros[name]) if name in self._macros else None

    def _add(self, scope: str, selector: str, value: str) -> None:
        configurable, _, parameter = selector.rpartition(".")
        if not configurable:
            self._macros[selector] = value
        elif selector in ("macro.value", "gin.macro.value"):
            self._macros[scope] = value
        else:
            self._bindings[scope, configurable, parameter] = value

    def _value(self, text: str, *, depth: int = 0) -> Any:
        if text.startswith("%") and text[1:] in self._macros and depth < 10:
            return self._value(self._macros[text[1:]], depth=depth + 1)
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text


def mlp_kind(activations: Any, count: int) -> MlpKind | None:
    """Returns the feed-forward layer with `count` inward projections of these activations."""
    names = tuple(activations) if isinstance(activations, list | tuple) else (activations,)
    for known, kind in ACTIVATIONS.items():
        if known == names and len(known) == count:
            return kind
    return None


def _statements(text: str) -> Iterator[str]:
    """Yields statements, without comments and with continued lines and open brackets joined."""
    parts: list[str] = []
    depth = 0
    for line in _without_blocks(text):
        commented = _COMMENT.match(line)
        part = (commented[1] if commented else line).strip()
        is_continued = part.endswith("\\")
        if part := part.removesuffix("\\").rstrip():
            parts.append(part)
            outside = re.sub(_TEXT, "", part)
            depth += sum(map(outside.count, "([{")) - sum(map(outside.count, ")]}"))
        if parts and depth <= 0 and not is_continued:
            yield " ".join(parts)
            parts, depth = [], 0
    if parts:
        yield " ".join(parts)


def _without_blocks(text: str) -> Iterator[str]:
    """Yields lines in which bindings below `name:` include that name."""
    block = None
    for line in text.splitlines():
        if match := _BLOCK.match(line):
            block = match["name"]
            continue
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            block = None
        yield f"{block}.{line.strip()}" if block and _IN_BLOCK.match(line) else line
