"""Counts of the examples read: truncated inputs and targets, and unknown pieces.

The counts are exact and belong to a data position, so a resumed run continues counting.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Counts(NamedTuple):
    """Counts of the examples of one task over all epochs.

    Attributes:
        examples: examples read.
        cut_inputs, cut_targets: those whose inputs or targets are longer than a row.
        unknown_targets: those with a target that the vocabulary cannot reproduce.
    """

    examples: int = 0
    cut_inputs: int = 0
    cut_targets: int = 0
    unknown_targets: int = 0

    def plus(self, flags: np.ndarray) -> "Counts":
        """Returns the counts with these examples added.

        Args:
            flags: bool [examples, 3], in the order of the attributes after `examples`.
        """
        added = (len(flags), *flags.sum(axis=0).tolist())
        return Counts(*(a + b for a, b in zip(self, added, strict=True)))

    def as_text(self) -> str:
        """Formats the counts with their shares."""
        parts = [
            f"cut: {self._share(self.cut_inputs)} of inputs, "
            f"{self._share(self.cut_targets)} of targets"
        ]
        if self.unknown_targets:
            parts.append(f"targets with unknown pieces: {self._share(self.unknown_targets)}")
        return f"{self.examples:,} examples; {'; '.join(parts)}"

    def _share(self, count: int) -> str:
        return f"{count:,} ({count / max(self.examples, 1):.1%})"


def describe(title: str, counts: Mapping[str, Counts]) -> str:
    """Formats the counts of several tasks, one line each."""
    return "\n".join([title, *(f"  {name}: {each.as_text()}" for name, each in counts.items())])
