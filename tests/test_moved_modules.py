"""Modules that moved are found under the names they had, and are the same modules."""

import importlib
import importlib.util

import pytest

from convt5.configuration import gin_config
from convt5.training import schedule

DYNAMIC = "from __gin__ import dynamic_registration"
NEW = f"{DYNAMIC}\nfrom convt5.training import schedule"


@pytest.mark.parametrize(
    ("head", "selector"),
    [
        ("from convt5 import schedule", "schedule"),
        ("import convt5.schedule", "convt5.schedule"),
        ("from convt5.training import schedule", "schedule"),
        ("", "schedule"),
        ("", "convt5.schedule"),
        ("", "convt5.training.schedule"),
    ],
)
def test_a_module_that_moved_is_one_module_under_all_its_names(tmp_path, head, selector):
    first = tmp_path / "first.gin"
    first.write_text(f"{NEW}\nschedule.Constant.rate = 1.0\nMODEL = @schedule.Constant()\n")
    overrides = f"{selector}.Constant.rate = 2.0"
    if head:
        second = tmp_path / "second.gin"
        second.write_text(f"{DYNAMIC}\n{head}\n{overrides}\n")
        config = gin_config.load([str(first), str(second)], roots=["%MODEL"])
    else:
        config = gin_config.load([str(first)], [overrides], roots=["%MODEL"])
    assert config.macro("MODEL") == schedule.Constant(rate=2.0)
    assert "from convt5.training import schedule\n" in config.text


def test_programs_import_what_moved_by_its_old_names():
    for module, name in [
        ("convt5.optimizer", "AdafactorConfig"),
        ("convt5.batches.rows", "RowLayout"),
        ("convt5.data", "DataConfig"),
        ("convt5.trainer", "train"),
        ("convt5.modeling.mixing", "relative_position_bucket"),
    ]:
        found = getattr(importlib.import_module(module), name)
        assert found is getattr(importlib.import_module(found.__module__), name)
    moved = importlib.import_module("convt5.losses")
    assert moved.__spec__.name == moved.__name__ == "convt5.training.losses"
    assert importlib.util.find_spec("convt5.nothing") is None
