"""Imports of any size compute what the original's description says, through the command line."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest
from quick import quick

import convt5
from convt5 import convert

with warnings.catch_warnings():  # TensorFlow's own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("tensorflow", reason="only TensorFlow reads its checkpoints")
from mesh_tf_oracle import Sizes, draw_variables, logits
from test_mesh_tf import FAMILIES, TOLERANCE, largest, reference, write_checkpoint

from convt5.interchange.tf_checkpoint import Checkpoint

INPUTS = np.asarray([[5, 9, 100, 3, 7, 8, 2, 1], [4, 90, 6, 1, 0, 0, 0, 0]], np.int32)
TARGETS = np.asarray([[0, 8, 2, 77, 33, 5], [0, 3, 60, 60, 2, 9]], np.int32)

forward = jax.jit(lambda model, *tokens: model(*tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_description_computes_what_was_recorded(golden, family):
    folder, name = golden / "mesh_tf" / family, family.removesuffix("_tiny")
    ref, checkpoint = reference(folder), Checkpoint(str(folder / "model.ckpt-0"))
    variables = {name: checkpoint.read(name) for name in checkpoint.variables()}
    sizes = Sizes(
        family=name, emb=32, mlp=64, heads=4, head_dim=8, layers=(2, 2), first=(-4, -8), last=(4, 0)
    )
    found = logits(variables, sizes, ref["inputs"], ref["decoder_inputs"])
    assert largest(found, ref["logits"], ref["targets"] > 0) < TOLERANCE


LCONV = Sizes(
    family="lconv",
    emb=24,
    mlp=20,
    heads=3,
    head_dim=5,
    layers=(1, 2),
    first=(-3, -4),
    last=(1, 0),
)


OTHERS = [
    (LCONV, "bfloat16"),
    (dataclasses.replace(LCONV, family="dconv", first=(-2, -1), layers=(2, 1)), "float32"),
    (dataclasses.replace(LCONV, family="sepconv", first=(0, -6), last=(3, 0)), "float32"),
    (dataclasses.replace(LCONV, family="t5bert", old_names=True), "bfloat16"),
    (dataclasses.replace(LCONV, family="t5v1", heads=2, layers=(2, 1)), "float32"),
    (dataclasses.replace(LCONV, first=(0, 0), last=(0, 0), old_names=True), "float32"),
]


# `test_mesh_tf` has lightweight convolutions.
@pytest.mark.parametrize(
    "case",
    quick(OTHERS, chosen=OTHERS[1:5]),
    ids=lambda case: f"{case[0].family}{case[0].first}-{case[1]}",
)
def test_other_sizes_compute_what_the_original_describes(tmp_path, capsys, case):
    sizes, dtype = case
    variables = draw_variables(sizes, seed=1, dtype=dtype)
    (tmp_path / "operative_config.gin").write_text(sizes.operative_config())
    prefix = write_checkpoint(tmp_path / "model.ckpt-3", variables)
    out = tmp_path / "run"
    convert.main(["--from=mesh_tf", f"--checkpoint={prefix}", f"--output_dir={out}"])
    assert "0 unmapped, 0 missing" in capsys.readouterr().out
    found = forward(convt5.load_model(out), INPUTS, TARGETS)
    expected = logits(variables, sizes, INPUTS, TARGETS)
    scale = max(1.0, np.abs(expected).max())
    assert largest(found, expected) < TOLERANCE * scale
