"""A flag of a command, as the module that acts on it describes it."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command beside the gin flags; `options` go to `argparse.add_argument`."""

    name: str
    help: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
