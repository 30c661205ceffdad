"""The description of a command's flag."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command beside the gin flags; `options` are passed to `add_argument`."""

    name: str
    help: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
