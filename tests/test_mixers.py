"""What the registry of mixing kinds asks of them, and what decoding does with their states."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from convt5.errors import rules
from convt5.errors.rules import ruled
from convt5.modeling.mixers import KINDS
from convt5.modeling.mixers.base import MixerConfig, Shared, kinds_among, select_rows


def test_kinds_are_known_by_their_names():
    assert set(KINDS) >= {"attention", "depthwise", "dynamic", "lightweight"}
    assert all(kind.kind == name for name, kind in KINDS.items())


def test_kinds_that_declare_one_setting_differently_are_refused():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(KINDS["attention"]):
        kind = "other"
        kernel_size: int = ruled(rules.count, default=9, per_layer=True)

    assert kinds_among({"one": KINDS["dynamic"], "base": MixerConfig, "number": 1}) == {
        "dynamic": KINDS["dynamic"]
    }
    with pytest.raises(TypeError, match="other and dynamic declare the setting kernel_size"):
        kinds_among({"one": KINDS["dynamic"], "two": Other})


def test_beams_take_over_rows_of_a_state_but_not_what_rows_share():
    rows, all_rows = jnp.arange(6).reshape(3, 2), jnp.arange(5)
    selected, shared = select_rows((rows, Shared(all_rows)), jnp.array([2, 2, 0]))
    np.testing.assert_array_equal(selected, [[4, 5], [4, 5], [0, 1]])
    np.testing.assert_array_equal(shared.value, all_rows)
