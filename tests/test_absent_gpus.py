"""The CPU computes where JAX's plugin for CUDA is installed, but no GPU is there."""

import importlib.metadata
import importlib.util
import os
import types

import pytest

from convt5.runtime import absent_gpus


@pytest.mark.parametrize(
    ("plugins", "has_driver", "has_libtpu", "set_before", "expected"),
    [
        (["xla_cuda13"], False, False, None, "cpu"),
        (["xla_cuda13"], True, False, None, None),
        (["xla_cuda13"], False, True, None, None),
        (["xla_cuda13"], False, False, "cuda", "cuda"),
        (["xla_cuda13", "rocm"], False, False, None, None),
        ([], False, False, None, None),
    ],
)
def test_only_a_plugin_without_its_driver_is_left_out(
    plugins, has_driver, has_libtpu, set_before, expected, tmp_path, monkeypatch
):
    device = tmp_path / "nvidia0"
    if has_driver:
        device.touch()
    monkeypatch.setattr(absent_gpus, "_DEVICES", (str(device),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: has_libtpu or None)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [types.SimpleNamespace(name=name) for name in plugins],
    )
    environment = dict(os.environ)
    environment.pop("JAX_PLATFORMS", None)
    if set_before is not None:
        environment["JAX_PLATFORMS"] = set_before
    monkeypatch.setattr(os, "environ", environment)
    absent_gpus.leave_out()
    assert environment.get("JAX_PLATFORMS") == expected
