"""ViT_P and ViT_C give the numbers of the original: outputs, running statistics and gradients."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick

from convt5.interchange import pycls
from convt5.interchange.mapping import take_apart
from convt5.modeling.tree_paths import named_leaves
from convt5.vision.stems import ConvolutionStem

CASES = ("vit_p_token", "vit_p_pooled", "vit_c_token", "vit_c_pooled_deep")
QUICK_CASES = quick(CASES, chosen=["vit_p_token", "vit_c_pooled_deep"])
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
IN_FLOAT32 = 5e-7  # What the references keep in float32 can be compared no closer.


@functools.cache
def recorded(folder: pathlib.Path, case: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{case}.npz") as file:
        return {name: file[name] for name in file.files}


@functools.cache
def imported(folder: pathlib.Path, case: str):
    heads = json.loads((folder / "configs.json").read_text())[case]["config"]["n_heads"]
    return pycls.read_model(folder / f"{case}.npz", num_heads=heads)


def last(x: np.ndarray) -> np.ndarray:
    """Channels go to the end, as in this library."""
    return np.moveaxis(x, 1, -1)


def compute(model, images, cotangent):
    """Everything that the references recorded, by their names."""
    found = {"eval.logits": model(images).logits, "eval.stem": model.stem(images).patches}
    found["eval.encoder_out"] = model.encode(found["eval.stem"])
    if isinstance(model.stem, ConvolutionStem):
        activations = model.stem.activations(images)[0][1:]
        found |= {f"eval.stem_act{i}": x for i, x in enumerate(activations)}
    found["train.stem"] = model.stem(images, train=True).patches

    def loss(model, images):
        output = model(images, train=True)
        return jnp.sum(output.logits * cotangent), output

    (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, images)
    found["train.logits"] = output.logits
    found["train.dimages"] = gradients[1]
    return found, output.statistics, gradients[0]


@functools.cache
def computed(folder: pathlib.Path, case: str, dtype: str):
    model = imported(folder, case)
    config = dataclasses.replace(model.config, dtype=dtype)
    data = recorded(folder, case)
    images = last(data["images"]).astype(dtype)
    built = model._replace(config=config).model()
    return jax.jit(compute)(built, images, data["cotangent"].astype(dtype))


def assert_near(actual, expected: np.ndarray, dtype: str) -> None:
    """Relative to the largest number of the array."""
    scale = np.abs(expected).max() or 1.0
    exact = TOLERANCE[dtype] if expected.dtype == np.float64 else IN_FLOAT32
    error = np.abs(np.asarray(actual, np.float64) - expected).max() / scale
    assert error < max(exact, TOLERANCE[dtype])


@pytest.fixture(params=quick(list(TOLERANCE), chosen=["float32"]))
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.mark.parametrize("case", QUICK_CASES)
def test_outputs_are_those_of_the_original(golden, case, dtype):
    found, _, _ = computed(golden / "vitc", case, dtype)
    data = recorded(golden / "vitc", case)
    names = {name for name in data if name.startswith(("eval.", "train.")) and "grad." not in name}
    assert found.keys() == {name for name in names if not name.startswith("train.new.")}
    for name, value in found.items():
        expected = last(data[name]) if data[name].ndim == 4 else data[name]
        assert value.dtype == dtype
        assert_near(value, expected, dtype)


@pytest.mark.parametrize("case", QUICK_CASES)
def test_running_statistics_move_as_in_the_original(golden, case, dtype):
    _, statistics, _ = computed(golden / "vitc", case, dtype)
    data, model = recorded(golden / "vitc", case), imported(golden / "vitc", case)
    expected = {name.removeprefix("train.new.") for name in data if name.startswith("train.new.")}
    assert bool(expected) == (model.config.stem == "conv")
    sources = {source.path: source.names[0] for source in model.sources}
    assert {sources[path] for path in statistics} == expected
    for path, value in statistics.items():
        assert_near(value, data[f"train.new.{sources[path]}"], dtype)


@pytest.mark.parametrize("case", QUICK_CASES)
def test_gradients_are_those_of_the_original(golden, case, dtype):
    _, _, gradients = computed(golden / "vitc", case, dtype)
    data, model = recorded(golden / "vitc", case), imported(golden / "vitc", case)
    by_path = dict(named_leaves(nnx.state(gradients, nnx.Param)))
    trained = [source for source in model.sources if source.path in by_path]
    found = take_apart(trained, by_path)
    assert found.keys() == {
        name.removeprefix("train.grad.") for name in data if name.startswith("train.grad.")
    }
    for name, gradient in found.items():
        assert_near(gradient, data[f"train.grad.{name}"], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vit_c_token"])
def test_statistics_take_no_part_in_the_gradient(golden, case, dtype):
    _, _, gradients = computed(golden / "vitc", case, dtype)
    for _, gradient in named_leaves(nnx.state(gradients, nnx.BatchStat)):
        np.testing.assert_array_equal(gradient, 0.0)
