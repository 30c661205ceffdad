"""ViT: properties of stems and batch statistics, initialisation, and faults of a description."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from convt5.errors import UserError
from convt5.modeling.tree_paths import named_leaves
from convt5.training.train_state import parameters, with_statistics
from convt5.vision.architecture import ViTConfig
from convt5.vision.stems import BatchNorm, Convolution2D

CONV = {"stem": "conv", "stem_channels": (6, 10, 8), "stem_strides": (2, 2, 1)}
PATCHIFY = {"stem": "patchify", "patch_size": 4}


def tiny(**settings) -> ViTConfig:
    return ViTConfig(
        **{
            "image_size": 16,
            **(CONV if settings.get("stem", "conv") == "conv" else PATCHIFY),
            "num_layers": 2,
            "emb_dim": 8,
            "mlp_dim": 12,
            "num_heads": 2,
            "num_classes": 5,
            "dtype": "float32",
            **settings,
        }
    )


@functools.cache
def model(stem: str = "conv", seed: int = 0, **settings):
    return tiny(stem=stem, **settings).build(jax.random.key(seed))


def with_head(module, seed: int = 1):
    """The head starts at zero; another shows what lies below."""
    kernel = jax.random.normal(jax.random.key(seed), module.head.kernel[...].shape)
    leaves = [kernel if n == "head/kernel" else x for n, x in named_leaves(module)]
    return jax.tree.unflatten(jax.tree.structure(module), leaves)


def images(batch: int = 8, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, (batch, 16, 16, 3)).astype(np.float32)


@jax.jit
def forward(module, x):
    return module(x)


@jax.jit
def train_forward(module, x):
    return module(x, train=True)


@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_convolutions_pad_alike_on_all_sides(size):
    """XLA's SAME pads an even image on the right and at the bottom alone."""
    ones = jax.nn.initializers.ones
    layer = Convolution2D(
        1, 1, kernel_size=3, stride=2, padding=1, use_bias=False, init=ones, key=jax.random.key(0)
    )
    image = np.arange(size * size, dtype=np.float32).reshape(size, size)
    padded = np.pad(image, 1)
    expected = [
        [padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].sum() for j in range((size - 1) // 2 + 1)]
        for i in range((size - 1) // 2 + 1)
    ]
    np.testing.assert_array_equal(layer(jnp.asarray(image)[None, :, :, None])[0, :, :, 0], expected)


@pytest.mark.parametrize("pooling", ["token", "mean"])
@pytest.mark.parametrize("stem", ["conv", "patchify"])
def test_a_new_model_gives_logits_of_zero(stem, pooling):
    found = forward(model(stem, pooling=pooling), images())
    assert found.logits.shape == (8, 5)
    np.testing.assert_array_equal(found.logits, 0.0)


@pytest.mark.parametrize("stem", ["conv", "patchify"])
def test_an_image_is_classified_alone_in_evaluation(stem):
    x = images()
    together = forward(with_head(model(stem)), x).logits
    reversed_rows = forward(with_head(model(stem)), x[::-1]).logits
    np.testing.assert_allclose(together, reversed_rows[::-1], rtol=1e-5, atol=1e-6)
    assert np.ptp(together) > 0.1


@pytest.mark.parametrize("stem", ["patchify", "conv"])
def test_no_images_have_no_logits(stem):
    assert forward(model(stem), images(0)).logits.shape == (0, 5)


def test_training_normalises_by_the_batch_and_evaluation_by_what_runs():
    module = with_head(model())
    x = images()
    output = train_forward(module, x)
    unchanged = forward(module, x)
    assert np.abs(output.logits - unchanged.logits).max() > 1e-3
    for name, value in dict(named_leaves(nnx.state(module, nnx.BatchStat))).items():
        np.testing.assert_array_equal(unchanged.statistics[name], value)
        assert np.abs(output.statistics[name] - value).max() > 0


@pytest.mark.slow
def test_running_statistics_become_those_of_a_batch_seen_again_and_again():
    """Then training and evaluation differ by n / (n - 1) in the variances alone."""
    module, x = with_head(model()), images(batch=64)
    for _ in range(200):
        output = train_forward(module, x)
        module = with_statistics(module, output.statistics)
    np.testing.assert_allclose(forward(module, x).logits, output.logits, atol=2e-2)


def test_statistics_are_put_into_a_model_and_nothing_else_changes():
    module = model()
    statistics = train_forward(module, images()).statistics
    after = dict(named_leaves(with_statistics(module, statistics)))
    for name, leaf in named_leaves(module):
        np.testing.assert_array_equal(after[name], statistics.get(name, leaf))
    for name in ("no/such/mean", "head/bias"):
        with pytest.raises(KeyError, match=name):
            with_statistics(module, {name: jnp.zeros(5)})


def test_optimizers_see_parameters_and_no_statistics():
    names = {name for name, _ in named_leaves(parameters(model()))}
    statistics = set(train_forward(model(), images()).statistics)
    assert len(statistics) == 4
    assert names.isdisjoint(statistics)
    assert names | statistics == {name for name, _ in named_leaves(model())}


@pytest.mark.slow
def test_the_statistics_of_a_split_batch_are_those_of_the_whole():
    """On 8 devices, each with one image of very another brightness."""
    module = with_head(model())
    x = images() + 10 * np.arange(8, dtype=np.float32)[:, None, None, None]
    weights = jax.random.normal(jax.random.key(5), (8, 5))

    def loss(module, x):
        output = module(x, train=True)
        return jnp.sum(output.logits * weights), output

    step = jax.value_and_grad(loss, has_aux=True)
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    spread = jax.jit(step, in_shardings=(whole, split), out_shardings=whole)
    assert len(mesh.devices) == 8
    alone, together = jax.jit(step)(module, x), spread(module, jax.device_put(x, split))
    for expected, found in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        scale = np.abs(expected).max() + 1e-3
        np.testing.assert_allclose(found / scale, expected / scale, atol=2e-5)
    mean = np.asarray(together[0][1].statistics["stem/layers/0/norm/mean"]) / 0.1
    convolved = np.asarray(module.stem.layers[0].convolution(jnp.asarray(x)))
    np.testing.assert_allclose(mean, convolved.mean(axis=(0, 1, 2)), rtol=1e-4)
    # A device that kept to its own image would have found this.
    assert np.abs(mean - convolved[:1].mean(axis=(0, 1, 2))).max() > 1


def test_bfloat16_keeps_statistics_and_logits_in_float32():
    output = train_forward(model(dtype="bfloat16"), images())
    assert output.logits.dtype == jnp.float32
    assert {value.dtype for value in output.statistics.values()} == {jnp.dtype("float32")}


def test_batch_norm_refuses_a_batch_of_one_value():
    norm = BatchNorm(3, epsilon=1e-5, momentum=0.1)
    with pytest.raises(UserError, match="more than one value"):
        norm(jnp.ones((1, 1, 1, 3)), train=True)


def stddev(leaf) -> float:
    return float(np.std(leaf))


def test_parameters_start_as_in_the_original():
    width = 96
    config = tiny(emb_dim=width, mlp_dim=2 * width, stem_channels=(64, 48, width), num_classes=7)
    found = {name: np.asarray(x) for name, x in named_leaves(config.build(jax.random.key(3)))}
    near = functools.partial(pytest.approx, rel=0.1)
    stem = "stem/layers/{}/convolution/kernel"
    assert stddev(found[stem.format(0)]) == near(math.sqrt(2 / 64))
    assert stddev(found[stem.format(1)]) == near(math.sqrt(2 / 48))
    assert stddev(found["stem/output/kernel"]) == near(math.sqrt(1 / width))
    block = "encoder/layers/0"
    packed = math.sqrt(6 / (width + 3 * width))
    assert np.abs(found[f"{block}/attention/input/kernel"]).max() == near(packed)
    assert np.abs(found[f"{block}/attention/output/kernel"]).max() == near(width**-0.5)
    assert np.abs(found[f"{block}/mlp/wi/kernel"]).max() == near(math.sqrt(6 / (3 * width)))
    assert 0 < stddev(found[f"{block}/mlp/wo/bias"]) < 2e-6
    assert stddev(found["position_embedding"]) == near(0.02)
    ones = [x for name, x in found.items() if name.endswith(("scale", "norm/variance"))]
    zeros = [
        x
        for name, x in found.items()
        if name.endswith(("norm/bias", "norm/mean", "input/bias", "output/bias"))
    ] + [found["class_token"], found["head/kernel"], found["head/bias"]]
    assert all((x == 1).all() for x in ones)
    assert all((x == 0).all() for x in zeros)
    patchify = tiny(stem="patchify", emb_dim=width).build(jax.random.key(4))
    assert stddev(patchify.stem.patchify.kernel[...]) == near(math.sqrt(1 / (3 * 16)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 18}, "image_size=18 must be a multiple of the stem's stride of 4"),
        ({"num_heads": 3}, "num_heads=3 must divide emb_dim=8"),
        ({"stem_channels": (6, 10, 9)}, "must end with emb_dim=8"),
        ({"stem_strides": (2, 2)}, "3 convolutions and stem_strides 2"),
        ({"stem_strides": (2, 0, 1)}, "stem_strides=.* must be integers of at least 1"),
        ({"patch_size": 4}, "patch_size=4 is for stem='patchify'"),
        ({"stem": "patchify", "patch_size": None}, "patch_size=None must be"),
        ({"stem": "patchify", "stem_strides": (2,)}, "is for stem='conv'"),
        ({"stem": "convolution"}, "stem='convolution' must be one of patchify, conv"),
        ({"pooling": "tokn"}, "pooling='tokn' must be one of token, mean. Did you mean token"),
        ({"num_classes": 0}, "num_classes=0 must be an integer of at least 1"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"batch_norm_momentum": 0}, "batch_norm_momentum=0 must be in"),
        ({"batch_norm_momentum": None}, "batch_norm_momentum=None must be in"),
        ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 must be positive"),
        ({"norm_epsilon": "a"}, "norm_epsilon='a' must be positive"),
        ({"batch_norm_epsilon": math.inf}, "batch_norm_epsilon=inf must be positive"),
        ({"stem_channels": 5}, "stem_channels=5 must list one integer for each convolution"),
    ],
)
def test_faults_of_a_description_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        tiny(**settings)


@pytest.mark.parametrize("shape", [(2, 16, 16, 1), (2, 12, 16, 3), (2, 3, 16, 16)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(UserError, match=r"make them \(16, 16, 3\)"):
        model()(np.zeros(shape, np.float32))


def test_lists_and_tuples_describe_the_same_model():
    config = tiny()
    assert config == dataclasses.replace(config, stem_channels=[6, 10, 8], stem_strides=[2, 2, 1])
    assert config.num_tokens == 17
    assert dataclasses.replace(config, pooling="mean").num_tokens == 16
