"""The files gin/models/vit_* are the models of arXiv 2106.14881, and what they cost."""

import dataclasses
import functools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convt5 import inspect
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.training.train_state import parameters
from convt5.vision.architecture import ViTConfig
from convt5.vision.costs import model_cost, patch_field

# Parameters and multiply-adds of the paper's models, as counted in the original.
ORIGINAL = {
    "vit_p_1gf": (4_830_376, 1.0831e9),
    "vit_c_1gf": (4_567_936, 1.0792e9),
    "vit_p_4gf": (18_507_112, 3.9090e9),
    "vit_c_4gf": (17_754_136, 3.9657e9),
    "vit_p_18gf": (86_567_656, 17.5803e9),
    "vit_c_18gf": (81_573_160, 17.7266e9),
    "vit_p_36gf": (178_364_392, 35.9972e9),
    "vit_c_36gf": (167_796_008, 35.0258e9),
}
SMALL = ("vit_p_tiny", "vit_c_tiny", "vit_p_micro", "vit_c_micro")


@functools.cache
def config(name: str) -> ViTConfig:
    return gin_config.load([f"gin/models/{name}.gin"], roots=["%MODEL"]).macro("MODEL")


def num_parameters(described: ViTConfig) -> int:
    trained = parameters(jax.eval_shape(described.build, jax.random.key(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))


@pytest.mark.parametrize("name", ORIGINAL)
def test_models_have_the_parameters_and_the_cost_of_the_original(name):
    count, multiply_adds = ORIGINAL[name]
    assert num_parameters(config(name)) == count
    assert model_cost(config(name)).total.multiply_adds == pytest.approx(multiply_adds, rel=1e-4)


@pytest.mark.parametrize("name", [*ORIGINAL, *SMALL])
def test_the_closed_form_counts_what_is_built(name):
    assert model_cost(config(name)).total.parameters == num_parameters(config(name))


def drawn(index: int) -> ViTConfig:
    return ViTConfig(
        **{
            "image_size": 24,
            "stem": "conv",
            "stem_channels": (5, 7, 12)[-1 - index % 3 :],
            "stem_strides": (2, 3, 2)[-1 - index % 3 :],
            "num_layers": 1 + index,
            "emb_dim": 12,
            "mlp_dim": 10,
            "num_heads": 4,
            "num_classes": 3,
            "in_channels": 1,
            "pooling": "mean" if index % 2 else "token",
        }
    )


@pytest.mark.parametrize("index", range(3))
def test_the_closed_form_counts_what_is_built_of_any_size(index):
    assert model_cost(drawn(index)).total.parameters == num_parameters(drawn(index))


@pytest.mark.parametrize("size", ["micro", "tiny", "1gf", "4gf", "18gf", "36gf"])
def test_early_convolutions_take_the_place_of_one_block(size):
    patchify, conv = config(f"vit_p_{size}"), config(f"vit_c_{size}")
    assert conv.num_layers == patchify.num_layers - 1
    assert (conv.num_tokens, conv.emb_dim) == (patchify.num_tokens, patchify.emb_dim)
    costs = [model_cost(model).total.multiply_adds for model in (patchify, conv)]
    assert costs[1] == pytest.approx(costs[0], rel=0.04)


def test_costs_are_those_of_every_recorded_architecture(golden):
    for found in json.loads((golden / "vitc" / "architectures.json").read_text()).values():
        stem = {"stem": "patchify", "patch_size": found["patch_size"]}
        if found["stem"] == "conv":
            stem = {
                "stem": "conv",
                "stem_channels": found["stem_channels"],
                "stem_strides": found["stem_strides"],
            }
        cost = model_cost(
            ViTConfig(
                image_size=found["image_size"],
                num_layers=found["blocks"],
                emb_dim=found["hidden"],
                mlp_dim=found["mlp"],
                num_heads=found["heads"],
                num_classes=found["classes"],
                **stem,
            )
        )
        assert cost.total.parameters == found["params"]
        assert cost.total.multiply_adds == found["flops_multiply_add"]
        assert cost.stem.multiply_adds == found["stem_flops"]
        assert cost.block.multiply_adds == found["block_flops"]
        assert cost.num_blocks == found["blocks"]


@pytest.mark.parametrize("name", ["vit_c_tiny", "vit_p_tiny"])
def test_a_patch_is_made_from_the_pixels_whose_gradient_reaches_it(name):
    described = dataclasses.replace(config(name), dtype="float32")
    module = described.build(jax.random.key(0))
    row = described.grid_size // 2

    def one_patch(images):
        return jnp.sum(jnp.abs(module.stem(images).patches[0, row, row]))

    images = jax.random.normal(jax.random.key(1), (1, 32, 32, 3))
    found = np.abs(jax.jit(jax.grad(one_patch))(images)).sum(axis=(0, 3)) > 0
    sides = [np.ptp(np.flatnonzero(found.any(axis=axis))) + 1 for axis in (0, 1)]
    assert sides == [patch_field(described)] * 2


def test_inspect_shows_what_a_vision_model_costs(capsys):
    assert inspect.main(["--gin_file=gin/models/vit_c_1gf.gin"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"total +4,567,936 +1,079,\d{3},\d{3}\n", text)
    assert "11 x block" in text
    assert inspect.main(["--gin_file=gin/runs/digits.gin", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["tokens"]) == ("vit_c_tiny", 17)
    with pytest.raises(UserError, match="--topology is for text models"):
        inspect.main(["--gin_file=gin/models/vit_c_1gf.gin", "--topology=v5e:2x2"])


@pytest.mark.parametrize("name", [*ORIGINAL, *SMALL])
def test_a_model_file_states_its_multiply_adds(name):
    text = pathlib.Path(__file__).parents[1].joinpath(f"gin/models/{name}.gin").read_text()
    count = model_cost(config(name)).total.multiply_adds
    stated = f"{count / 1e9:.4f} G" if count >= 1e9 else f"{count / 1e6:.1f} M"
    assert f"# {stated} multiply-adds for an image." in text
