"""Which cases of a parametrised test each commit runs; `-m nightly` runs the others."""

from collections.abc import Sequence
from typing import Any

import pytest


def quick(values: Sequence[Any], *, chosen: Sequence[Any]) -> list[Any]:
    """Marks the values that are not chosen as nightly: each compiles programs much like theirs."""
    assert all(value in values for value in chosen)
    return [pytest.param(v, marks=() if v in chosen else pytest.mark.nightly) for v in values]
