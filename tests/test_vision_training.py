"""Vision models train as text models do: on any mesh, with exact resume, and moving statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from quick import quick

from convt5.checkpoints import checkpoint, reading
from convt5.configuration import gin_config
from convt5.data import DataConfig
from convt5.data.cached_data import CachedDataConfig
from convt5.errors import UserError
from convt5.modeling import sharding
from convt5.modeling.tree_paths import named_leaves
from convt5.training import data_checks, optimizer, run_directory, schedule
from convt5.training.plan import make_plan
from convt5.training.train_state import parameters
from convt5.training.train_step import StepConfig
from convt5.training.trainer import train
from convt5.vision import losses, placement
from convt5.vision.architecture import ViTConfig
from convt5.vision.images import ImageDataConfig
from convt5.vision.sources import Folder, Npz, in_memory
from convt5.vision.statistics import Reestimate

MODEL = ViTConfig(
    image_size=8,
    stem="conv",
    stem_channels=(8, 8),
    stem_strides=(2, 2),
    num_layers=1,
    emb_dim=8,
    mlp_dim=16,
    num_heads=2,
    num_classes=3,
    in_channels=1,
    dtype="float32",
    canon="ABCD",
)
# Of statistics alone, which Canon layers do not touch.
PLAIN = dataclasses.replace(MODEL, canon="")
LOSS = losses.VisionLoss(label_smoothing=0.1)


def batch(seed: int = 0, rows: int = 16) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, rows).astype(np.int32)
    noise = draw.normal(0, 1, (rows, 8, 8, 1))
    images = noise + 3 * labels[:, None, None, None] + 5 * np.arange(rows)[:, None, None, None]
    weights = np.ones(rows, np.float32)
    return {"images": images.astype(np.float32), "labels": labels, "weights": weights}


@functools.cache
def plan(mesh: tuple[int, int, int] = (1, 1, 1), grad_accum_steps: int = 1, model=MODEL):
    data, fsdp, tensor = mesh
    return make_plan(
        StepConfig(
            model=model,
            loss=LOSS,
            optimizer=optimizer.SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.1),
            schedule=schedule.Constant(rate=0.1),
            mesh=sharding.MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
            grad_accum_steps=grad_accum_steps,
            sharding_rules=placement.rules(),
        ),
        batch_size=16,
        devices=jax.devices()[: data * fsdp * tensor],
    )


@functools.cache
def after_two_steps(mesh: tuple[int, int, int] = (1, 1, 1), grad_accum_steps: int = 1):
    """The leaves of the model, by name, on the host."""
    chosen = plan(mesh, grad_accum_steps)
    state = chosen.init_state()
    for seed in range(2):
        placed = jax.device_put(batch(seed), chosen.batch_sharding)
        state, metrics = chosen.train_step(state, placed)
        assert metrics["all_finite"]
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state.model)}


def statistics_of(leaves):
    return {name: x for name, x in leaves.items() if name.endswith(("norm/mean", "norm/variance"))}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", quick([(1, 8, 1), (2, 2, 2)], chosen=[(2, 2, 2)]))
def test_an_update_is_the_same_on_every_mesh(mesh):
    alone, spread = after_two_steps(), after_two_steps(mesh)
    for name, expected in alone.items():
        np.testing.assert_allclose(spread[name], expected, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_running_statistics_are_those_that_the_model_returns():
    chosen = plan()
    state = chosen.init_state()
    expected = jax.jit(lambda m, x: m(x, train=True))(state.model, batch()["images"]).statistics
    names = [name for name, _ in named_leaves(chosen.abstract.opt_state)]
    assert not any("norm/mean" in name or "norm/variance" in name for name in names)
    state, _ = chosen.train_step(state, jax.device_put(batch(), chosen.batch_sharding))
    found = dict(named_leaves(state.model))
    assert len(expected) == 2
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


@pytest.mark.slow
def test_microbatches_move_running_statistics_by_their_mean():
    chosen = plan(grad_accum_steps=2, model=PLAIN)
    state = chosen.init_state()
    images = batch()["images"]
    call = jax.jit(lambda model, x: model(x, train=True).statistics)
    parts = [call(state.model, images[i::2]) for i in range(2)]
    state, _ = chosen.train_step(state, jax.device_put(batch(), chosen.batch_sharding))
    found = dict(named_leaves(state.model))
    for name in parts[0]:
        expected = (parts[0][name] + parts[1][name]) / 2
        np.testing.assert_allclose(found[name], expected, rtol=1e-4)


@pytest.mark.nightly
def test_microbatches_are_the_same_on_a_mesh():
    alone, spread = after_two_steps(grad_accum_steps=2), after_two_steps((2, 2, 2), 2)
    for name, expected in alone.items():
        np.testing.assert_allclose(spread[name], expected, rtol=2e-3, atol=2e-4, err_msg=name)


def test_the_number_of_parameters_counts_no_statistics():
    trained = parameters(plan().abstract.model)
    assert plan().num_parameters() == sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert len(jax.tree.leaves(plan().abstract.model)) == len(jax.tree.leaves(trained)) + 2


@pytest.mark.parametrize("name", ["vit_p_1gf", "vit_c_36gf"])
def test_the_table_places_every_array_of_the_presets(name):
    config = gin_config.load([f"gin/models/{name}.gin"], roots=["%MODEL"]).macro("MODEL")
    mesh = sharding.MeshConfig(data=2, fsdp=2, tensor=1).build(jax.devices()[:4])
    abstract = jax.eval_shape(config.build, jax.random.key(0))
    placed = dict(
        named_leaves(sharding.tree_shardings(abstract, abstract, mesh, placement.rules()))
    )
    assert placed["encoder/layers/0/mlp/wi/kernel"] == NamedSharding(mesh, P("fsdp", "tensor"))


def test_decay_reaches_neither_biases_nor_norms_but_tokens_and_positions():
    chosen = optimizer.AdamWConfig(weight_decay=0.24, max_grad_norm=None)
    updates = chosen.build(schedule.Constant(rate=1.0))
    shapes = parameters(plan().abstract.model)
    ones, zeros = (
        jax.tree.map(lambda x, n=n: np.full(x.shape, n, x.dtype), shapes) for n in (1, 0)
    )
    changes, _ = jax.jit(lambda g, p: updates.update(g, updates.init(p), p))(zeros, ones)
    decayed = {name for name, change in named_leaves(changes) if np.abs(change).max() > 0}
    exempt = {name for name, _ in named_leaves(ones)} - decayed
    assert {"class_token", "position_embedding", "head/kernel"} <= decayed
    assert exempt == {n for n, _ in named_leaves(ones) if n.endswith(("bias", "norm/scale"))}


@dataclasses.dataclass(frozen=True)
class Stripes:
    """Horizontal, vertical or no stripes, with noise."""

    names: tuple[str, ...] = ("none", "rows", "columns")

    def open(self, split):
        draw = np.random.default_rng(3 if split == "train" else 4)
        labels = draw.integers(0, 3, 96)
        images = draw.integers(0, 80, (96, 8, 8, 1))
        images[labels == 1, ::2] += 120
        images[labels == 2, :, ::2] += 120
        return in_memory(images.astype(np.uint8), labels)._replace(class_names=self.names)


def run(folder, **changes):
    data = ImageDataConfig(
        source=Stripes(), batch_size=16, image_size=8, in_channels=1, num_classes=3
    )
    known = {
        "run_dir": str(folder),
        "model": MODEL,
        "loss": LOSS,
        "train_data": data,
        "eval_data": dataclasses.replace(data, split="validation", num_epochs=1),
        "optimizer": optimizer.AdamWConfig(),
        "schedule": schedule.Constant(rate=0.01),
        "checkpoint": checkpoint.CheckpointConfig(every_steps=20),
        "num_steps": 60,
        "sharding_rules": placement.rules(),
    }
    return train(**known | changes)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_steps")
def test_a_run_learns_and_continues_as_if_it_had_never_stopped(tmp_path):
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", num_steps=25)
    parts = run(tmp_path / "parts")
    assert run_directory.find_class_names(tmp_path / "parts") == ["none", "rows", "columns"]
    assert whole.validation_loss < 0.6 < np.log(3)
    assert whole.validation_loss == parts.validation_loss
    abstract = jax.eval_shape(MODEL.build, jax.random.key(0))
    models = [reading.load_params(tmp_path / n, abstract) for n in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *models)
    for _, leaf in named_leaves(nnx.state(models[0], nnx.BatchStat)):
        assert np.abs(leaf).min() > 0


@pytest.mark.slow
def test_statistics_measured_anew_are_those_of_the_model_that_is_saved(tmp_path):
    data = ImageDataConfig(
        source=Stripes(), batch_size=16, image_size=8, in_channels=1, num_classes=3, seed=5
    )
    measure = Reestimate(data=data, num_batches=3)
    run(tmp_path / "run", model=PLAIN, num_steps=5, statistics=measure)
    abstract = jax.eval_shape(PLAIN.build, jax.random.key(0))
    model = reading.load_params(tmp_path / "run", abstract)
    batches = data.build(process_index=0, process_count=1)
    layer = model.stem.layers[0]
    seen = [np.asarray(layer.convolution(jnp.asarray(next(batches)["images"]))) for _ in range(3)]
    np.testing.assert_allclose(
        layer.norm.mean[...], np.mean([x.mean(axis=(0, 1, 2)) for x in seen], axis=0), atol=1e-5
    )
    np.testing.assert_allclose(
        layer.norm.variance[...],
        np.mean([x.var(axis=(0, 1, 2), ddof=1) for x in seen], axis=0),
        rtol=1e-4,
    )
    with pytest.raises(UserError, match="num_batches=0 must be at least 1"):
        Reestimate(data=data, num_batches=0)


def test_statistics_of_batches_that_devices_cannot_share_are_refused_before_the_first_step():
    data = ImageDataConfig(
        source=Stripes(), batch_size=12, image_size=8, in_channels=1, num_classes=3
    )
    measure = Reestimate(data=data, num_batches=1)
    with pytest.raises(UserError, match=r"data.batch_size=12 must be a multiple of data \* fsdp"):
        measure.build(plan((8, 1, 1)))
    measure.build(plan((1, 1, 1)))


def test_images_of_other_classes_than_those_of_training_are_refused(tmp_path):
    source = Stripes(names=("none", "columns", "rows"))
    data = ImageDataConfig(
        source=source, batch_size=16, image_size=8, in_channels=1, num_classes=3, num_epochs=1
    )
    with pytest.raises(UserError, match="eval_data: label 1 is the class 'columns', but in tra"):
        run(tmp_path, eval_data=data)


def test_images_for_a_model_of_text_are_refused():
    config = gin_config.load(["gin/models/t5_tiny.gin"], roots=["%MODEL"])
    data = ImageDataConfig(source=Stripes(), batch_size=16, image_size=4, num_classes=3)
    with pytest.raises(UserError, match="the data are images, and model=ConvT5Config reads none"):
        data.check_model(config.macro("MODEL"))


@pytest.mark.parametrize("kind", [DataConfig, CachedDataConfig])
def test_text_for_a_model_of_images_is_refused(kind):
    config = gin_config.load(["gin/models/vit_c_tiny.gin"], roots=["%MODEL"])
    with pytest.raises(UserError, match="the data are text, and model=ViTConfig reads none"):
        kind.check_model(None, config.macro("MODEL"))


def test_numbers_of_64_bits_are_refused_where_jax_has_none():
    config = gin_config.load(["gin/models/vit_c_tiny.gin"], roots=["%MODEL"]).macro("MODEL")
    with pytest.raises(UserError, match="dtype='float64' needs numbers of 64 bits"):
        dataclasses.replace(config, dtype="float64").build(jax.random.key(0))


def test_images_of_another_size_than_the_model_are_refused(tmp_path):
    data = ImageDataConfig(
        source=Stripes(), batch_size=16, image_size=4, in_channels=1, num_classes=3
    )
    with pytest.raises(UserError, match="image_size=4 of the images differs from image_size=8"):
        run(tmp_path / "run", train_data=data, eval_data=None)


@pytest.mark.parametrize("kind", [Npz, Folder])
def test_images_to_measure_a_model_are_not_those_that_it_is_trained_on(tmp_path, kind):
    def of(name, split="train"):
        return ImageDataConfig(
            source=kind(path=str(tmp_path / name)),
            split=split,
            batch_size=16,
            image_size=8,
            in_channels=1,
            num_classes=3,
            num_epochs=1,
        )

    with pytest.raises(UserError, match=r"split='validation' of path=.*images' is the same images"):
        run(tmp_path / "run", train_data=of("images"), eval_data=of("images", "validation"))
    for held_out in (of("others", "validation"), of("images"), None):
        data_checks.check_images_apart(of("images"), held_out)
    data_checks.check_images_apart(of("{split}"), of("{split}", "validation"))
