"""A run that starts from trained parameters takes over what was named, and says what it left."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convt5 import errors
from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.interchange import initialization
from convt5.interchange.initialization import InitFrom
from convt5.modeling.tree_paths import named_leaves
from convt5.training.train_state import TrainState


class Model(nnx.Module):
    def __init__(self, sizes, value):
        self.table = nnx.Param(jnp.full((sizes.rows, 2), value))
        self.head = nnx.Param(jnp.full((3,), value))
        if sizes.extra:
            self.extra = nnx.Param(jnp.full((1,), value))


@dataclasses.dataclass(frozen=True)
class Sizes:
    rows: int = 4
    extra: bool = False


OLD, NEW = 1.0, 0.0


@pytest.fixture
def trained(tmp_path):
    """The checkpoint of a run whose parameters are all 1."""

    def save(sizes=Sizes()):  # noqa: B008  # Frozen.
        path = tmp_path / "run" / "checkpoints"
        writer = Checkpointer(path, CheckpointConfig(), model_config=sizes)
        state = TrainState(jnp.int32(7), Model(sizes, OLD), {})
        writer.save(7, state, data=DataPositions())
        writer.wait()
        writer.close()
        return str(tmp_path / "run")

    return save


def start(path, sizes=Sizes(), **settings):  # noqa: B008  # Frozen.
    model, report = InitFrom(path=path, **settings).apply(Model(sizes, NEW))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(model)}, report


def test_everything_is_taken_over(trained):
    values, report = start(trained())
    assert all((value == OLD).all() for value in values.values())
    assert report.restored == ["head", "table"]
    assert report.text("a") == "2 parameter arrays restored from a"


def test_what_is_excluded_stays_as_it_was_and_is_reported(trained):
    values, report = start(trained(Sizes(extra=True)), exclude=["head", "extra"])
    assert (values["table"] == OLD).all()
    assert (values["head"] == NEW).all()
    assert "freshly initialised: head" in report.text("a")
    assert "left in the checkpoint: extra, head" in report.text("a")


def test_only_what_is_included_is_taken_over(trained):
    values, report = start(trained(), include=["^head$"])
    assert (values["table"] == NEW).all()
    assert report.restored == ["head"]


@pytest.mark.parametrize("rows", [3, 6])
def test_a_table_of_another_length_keeps_the_rows_that_both_have(trained, rows):
    values, report = start(trained(), Sizes(rows=rows), resize=["table"])
    both = min(rows, 4)
    assert values["table"].shape == (rows, 2)
    assert (values["table"][:both] == OLD).all()
    assert (values["table"][both:] == NEW).all()
    assert report.resized == ["table"]


@pytest.mark.parametrize(
    ("saved", "wanted", "settings", "message"),
    [
        (Sizes(), Sizes(rows=5), {}, r"table: \[4,2\] in the checkpoint, \[5,2\] in this model"),
        (Sizes(), Sizes(extra=True), {}, "extra: not in the checkpoint; exclude it"),
        (Sizes(extra=True), Sizes(), {}, "extra: not in this model; exclude it"),
        (Sizes(), Sizes(), {"exclude": ["haed"]}, "exclude: 'haed' matches no parameter"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(trained, saved, wanted, settings, message):
    with pytest.raises(errors.UserError, match=message):
        start(trained(saved), wanted, **settings)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(errors.UserError, match="is no regular expression"):
        InitFrom(path="a", include=["("])


def test_parameters_lie_where_those_of_the_model_lay(trained):
    mesh = jax.make_mesh((4,), ("fsdp",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    fresh = Model(Sizes(), NEW)
    fresh.table = nnx.Param(jax.device_put(fresh.table[...], split))
    model, _ = InitFrom(path=trained(), exclude=["head"]).apply(fresh)
    assert model.table[...].sharding == split
    assert (np.asarray(model.table[...]) == OLD).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"include": "encoder"}, "include='encoder' must be a list"),
        ({"exclude": "head", "resize": "table"}, "InitFrom has 2 faults"),
        ({"include": []}, "loads nothing"),
    ],
)
def test_patterns_that_are_no_list_or_take_over_nothing_are_refused(settings, message):
    with pytest.raises(errors.UserError, match=message):
        InitFrom(path="a", **settings)


def test_a_step_of_a_path_that_has_none_is_refused(trained, monkeypatch):
    path = trained() + "/checkpoints/7"
    assert start(path, step=7)[1].restored
    with pytest.raises(errors.UserError, match="step=5 selects a checkpoint of a run"):
        start(path, step=5)
    monkeypatch.setattr(initialization.loading, "is_exported", lambda _: True)
    with pytest.raises(errors.UserError, match=r"step=5 .* is an exported model; leave out step"):
        start("exported", step=5)
