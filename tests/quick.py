"""Which cases of a parametrised test the quick suite runs; `-m slow` runs the others."""

from collections.abc import Sequence
from typing import Any

import pytest


def quick(values: Sequence[Any], *, chosen: Sequence[Any]) -> list[Any]:
    """Marks the values that are not chosen as slow: each compiles programs much like theirs."""
    assert all(value in values for value in chosen)
    return [pytest.param(v, marks=() if v in chosen else pytest.mark.slow) for v in values]
