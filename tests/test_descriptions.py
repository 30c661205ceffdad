"""A function made from a description has its settings, for people, gin and type checkers."""

import dataclasses
import inspect
from typing import get_type_hints

import pytest
import seqio
from convt5.tasks import synthetic
from convt5.tasks.classification import TextClassification, text_classification
from convt5.tasks.pretraining import TextSpanCorruption, text_span_corruption

from convt5 import errors
from convt5.configuration import catalogue
from convt5.runtime import descriptions
from convt5.training.trainer import TrainRun, train

FUNCTIONS = [
    (text_classification, TextClassification),
    (text_span_corruption, TextSpanCorruption),
    (synthetic.listops, synthetic.ListOps),
    (synthetic.gap_copy, synthetic.GapCopy),
    (synthetic.gap_reverse, synthetic.GapReverse),
    (synthetic.associative_recall, synthetic.AssociativeRecall),
    (synthetic.lookback, synthetic.Lookback),
    (synthetic.pointer_hops, synthetic.PointerHops),
    (synthetic.entailment, synthetic.Entailment),
    (train, TrainRun),
]


@pytest.mark.parametrize(("function", "description"), FUNCTIONS, ids=lambda x: x.__name__)
def test_settings_are_those_of_the_description_and_each_has_a_meaning(function, description):
    name = function.__name__
    assert getattr(inspect.getmodule(function), name) is function
    assert function.__module__ == description.__module__
    assert inspect.signature(function) == inspect.signature(description)
    hints = get_type_hints(function)
    assert hints.pop("return") in (seqio.Task, get_type_hints(TrainRun.train)["return"])
    assert hints.keys() == inspect.signature(description).parameters.keys()
    listed = catalogue._configurable(function, {})
    assert listed.name.rpartition(".")[2] == name
    assert [p.name for p in listed.parameters if not p.meaning] == []


def test_arguments_reach_the_description_by_position_and_by_name():
    for task in (synthetic.gap_copy(3, num_symbols=2), synthetic.gap_copy(num_symbols=2, gap=3)):
        text, target = task.source.example("train", 0)
        assert (len(text), len(target)) == (2 + 3 + 1, 2)


def test_an_unknown_setting_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gaps'"):
        synthetic.gap_copy(gaps=3)


@pytest.mark.parametrize(
    ("function", "settings", "fault"),
    [
        (synthetic.gap_copy, {"gap": 3.5}, "GapCopy: gap=3.5 must be of type int"),
        (synthetic.listops, {"seed": "1"}, "ListOps: seed='1' must be of type int"),
        (
            text_classification,
            {"path": "rows", "labels": ["a", "b"], "text_field": 3},
            "text_field=3 must be of type str or a list of str",
        ),
        (
            text_span_corruption,
            {"path": "text", "noise_density": "0.15"},
            "noise_density='0.15' must be of type float",
        ),
    ],
)
def test_a_setting_of_another_type_is_named(function, settings, fault):
    with pytest.raises(errors.UserError, match=fault):
        function(**settings)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two numbers."""

    a: int
    b: int = 2

    def total(self) -> int:
        return self.a + self.b


def test_the_function_is_what_the_description_is_used_for():
    total = descriptions.function("total", Pair, Pair.total)
    assert (total(1), total(1, b=5)) == (3, 6)
    assert str(inspect.signature(total)) == "(a: int, b: int = 2) -> None"
    assert (total.__name__, total.__doc__) == ("total", "Two numbers.")
