"""The measured receptive field: as far as the closed form says, and where the gradient lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5.analysis import receptive_field
from convt5.analysis.costs import Reach
from convt5.analysis.receptive_field import Field
from convt5.errors import UserError
from convt5.modeling.architecture import ConvT5Config, StackConfig


def model(stack: StackConfig, **settings):
    config = ConvT5Config(
        vocab_size=32,
        emb_dim=4,
        mlp_dim=4,
        num_heads=1,
        head_dim=4,
        dtype="float32",
        positions="none",
        encoder=stack,
        decoder=stack,
        **settings,
    )
    return config.build(jax.random.key(0))


def tokens(length, rows=2):
    return jax.random.randint(jax.random.key(1), (rows, length), 1, 32)


STACKS = {
    "mixed": StackConfig(
        num_layers=3,
        mixing=("dynamic", "lightweight", "depthwise"),
        kernel_size=(4, 3, 2),
        dilation=(1, 2, 4),
        num_kernels=(2, None, None),
        canon=("AD", "", "BC"),
        canon_kernel_size=(4, 1, 2),
        canon_dilation=(1, 1, 3),
    ),
    "doubling": StackConfig(num_layers=3, mixing="depthwise", kernel_size=2, dilation=(1, 4, 16)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("half", ["encoder", "decoder"])
@pytest.mark.parametrize("stack", quick(list(STACKS), chosen=["mixed"]))
def test_at_initialisation_every_layer_reads_what_the_closed_form_says(stack, half):
    found = receptive_field.measure(model(STACKS[stack]), tokens(80), stack=half)
    assert [field.index for field in found] == list(range(STACKS[stack].num_layers))
    for field in found:
        assert field.extent == field.reach
        assert field.mass.sum() == pytest.approx(1)


@pytest.mark.slow
def test_attention_reads_everything_from_its_layer_upwards():
    stack = StackConfig(num_layers=3, mixing="depthwise", kernel_size=3, attention_layers=(1,))
    below, *others = receptive_field.measure(model(stack), tokens(40))
    assert below.extent == Reach(1, 1)
    for field in others:
        assert field.reach == Reach(None, None)
        assert field.extent == Reach(20, 19)


def test_other_packed_examples_are_not_read():
    ids = jnp.where(jnp.arange(40) < 18, 1, 2)[None].repeat(2, axis=0)
    stack = StackConfig(num_layers=2, mixing="depthwise", kernel_size=7)
    found = receptive_field.measure(model(stack), tokens(40), segment_ids=ids)
    assert found[-1].reach == Reach(6, 6)
    assert found[-1].extent == Reach(2, 6)


@pytest.mark.parametrize("norm", [0.0, np.nan])
def test_an_output_without_a_gradient_has_no_field(monkeypatch, norm):
    monkeypatch.setattr(receptive_field, "_gradient_norms", lambda *_: np.full(8, norm))
    with pytest.raises(UserError, match=rf"add up to {norm:g}, which is no field; give rows"):
        receptive_field.measure(model(STACKS["doubling"]), tokens(8))


def test_a_taps_own_weight_is_its_share_of_the_gradient():
    """One linear layer, seen alone: the gradient is the kernel itself."""
    mass = np.array([0.0, 0.1, 0.6, 0.2, 0.1])
    field = Field(stack="encoder", index=0, position=2, mass=mass, reach=Reach(2, 2))
    assert field.extent == Reach(1, 2)
    assert [field.distance(share) for share in (0.5, 0.9, 0.95, 1.0)] == [0, 1, 2, 2]
    assert field.as_json()["distance"] == {"50%": 0, "95%": 2, "99%": 2}


@pytest.mark.slow
def test_table_and_picture_show_every_layer(tmp_path):
    found = receptive_field.measure(model(STACKS["doubling"]), tokens(64))
    lines = receptive_field.table(found).splitlines()
    assert len(lines) == 4
    assert "encoder 2" in lines[-1]
    assert str(found[-1].reach) in lines[-1]
    pytest.importorskip("matplotlib")
    receptive_field.draw({"doubling": found, "again": found}, tmp_path / "field.png")
    assert (tmp_path / "field.png").stat().st_size > 10_000
