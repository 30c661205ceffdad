"""Adafactor against NumPy written from its formulas and against optax; decay masks; faults."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from convt5.errors import UserError
from convt5.training.optimizer import AdafactorConfig, AdamWConfig, SGDConfig, factored_axes
from convt5.training.schedule import Constant, InverseSqrt

SCHEDULE = InverseSqrt(multiplier=0.05, warmup_steps=2)


def numpy_adafactor(value: np.ndarray, gradients: list, min_dim_to_factor: int) -> np.ndarray:
    """One parameter, float64, as the original computes it (Shazeer and Stern 2018).

    Factored if both sizes of a matrix reach the limit: d0 is the larger dimension (the first of
    equal ones), vr the decayed mean of the squared gradient over d0, vc over d1.
    """
    v = vr = vc = 0.0
    factored = value.ndim == 2 and min(value.shape) >= min_dim_to_factor
    d0, d1 = (0, 1) if value.ndim < 2 or value.shape[0] >= value.shape[1] else (1, 0)
    for s, gradient in enumerate(gradients):
        decay = 1 - (s + 1) ** -0.8
        square = gradient**2 + 1e-30
        if factored:
            vr = decay * vr + (1 - decay) * square.mean(axis=d0)
            vc = decay * vc + (1 - decay) * square.mean(axis=d1)
            row = np.expand_dims(np.sqrt(vr / vr.mean()), d0)
            u = gradient / (row * np.expand_dims(np.sqrt(vc), d1))
        else:
            v = decay * v + (1 - decay) * square
            u = gradient / np.sqrt(v)
        u = u / max(1, np.sqrt((u**2).mean()))
        rate = 0.05 / np.sqrt(max(s, 2))
        value = value - rate * max(np.sqrt((value**2).mean()), 1e-3) * u
    return value


def random_tree(seed: int, shapes: dict[str, tuple[int, ...]], scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return {name: scale * rng.normal(size=shape) for name, shape in shapes.items()}


def train(config, params, gradients, schedule=SCHEDULE):
    optimizer = config.build(schedule) if hasattr(config, "build") else config
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(jax.tree.map(jnp.asarray, gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


SHAPES = {
    "matrix": (6, 4),
    "wide": (4, 6),
    "square": (5, 5),
    "thin": (3, 9),
    "vector": (7,),
    "zeros": (4, 4),
}


def case(steps: int = 4):
    params = random_tree(0, SHAPES, scale=0.3)
    params["zeros"] = np.zeros((4, 4))
    # Gradients of very different size, so that clipping and decay both matter.
    gradients = [random_tree(i + 1, SHAPES, scale=10.0 ** (i - 2)) for i in range(steps)]
    return params, gradients


@pytest.mark.usefixtures("x64")
def test_adafactor_follows_the_formulas_factored_and_not():
    params, gradients = case()
    found, _ = train(AdafactorConfig(min_dim_to_factor=4), params, gradients)
    for name, value in params.items():
        expected = numpy_adafactor(value, [g[name] for g in gradients], 4)
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-9, err_msg=name)


def test_adafactor_without_stacks_is_optax_adafactor():
    params, gradients = case()
    single = jax.tree.map(np.float32, (params, gradients))
    single[0]["filter"] = np.random.default_rng(9).normal(size=(2, 5, 6)).astype(np.float32)
    for gradient in single[1]:
        gradient["filter"] = np.random.default_rng(8).normal(size=(2, 5, 6)).astype(np.float32)
    found, _ = train(AdafactorConfig(min_dim_to_factor=4), *single)
    reference = optax.adafactor(SCHEDULE, min_dim_size_to_factor=4)
    expected, _ = train(reference, *single)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected
    )


def test_stacked_taps_are_trained_as_separate_parameters():
    shapes = {"kernel": (3, 5, 6), "bias": (3, 6)}
    scales = np.array([0.01, 1.0, 10.0], np.float32)
    params = {
        name: value.astype(np.float32) * scales.reshape(3, *[1] * (value.ndim - 1))
        for name, value in random_tree(0, shapes).items()
    }
    gradients = [jax.tree.map(np.float32, random_tree(i, shapes)) for i in (1, 2, 3)]
    config = AdafactorConfig(min_dim_to_factor=4)
    nested = lambda tree: {"mixing": {"predictor": tree}}  # noqa: E731
    together, _ = train(config, nested(params), [nested(g) for g in gradients])
    for tap in range(3):
        taken = lambda tree: {name: value[tap] for name, value in tree.items()}  # noqa: B023, E731
        alone, _ = train(config, taken(params), [taken(g) for g in gradients])
        for name, value in alone.items():
            np.testing.assert_allclose(
                together["mixing"]["predictor"][name][tap], value, rtol=1e-5, atol=1e-7
            )


@pytest.mark.parametrize(
    ("shape", "stacked", "axes"),
    [
        ((128, 256), False, (1, 0)),
        ((128, 128), False, (0, 1)),
        ((127, 512), False, None),
        ((512,), False, None),
        ((9, 128, 256), True, (2, 1)),
        ((256, 128, 7), True, None),
        ((3, 3, 128, 256), False, (3, 2)),
        ((128, 128, 256), False, (2, 0)),
    ],
)
def test_only_two_long_axes_are_factored(shape, stacked, axes):
    assert factored_axes(shape, 128, is_stacked=stacked) == axes


def test_averaged_statistics_keep_the_rank_of_their_parameter():
    _, state = train(AdafactorConfig(min_dim_to_factor=4), {"w": np.ones((4, 6), np.float32)}, [])
    moments = state[1].moments["w"]
    assert jax.tree.map(jnp.shape, moments) == {"row": (4, 1), "column": (1, 6)}


@pytest.mark.parametrize(
    "config", [AdamWConfig(weight_decay=0.5), SGDConfig(weight_decay=0.5)], ids=["adamw", "sgd"]
)
def test_weight_decay_spares_norms_and_biases(config):
    names = ("mlp/wi/kernel", "mlp/wi/bias", "mlp_norm/scale", "mixing/conv_bias", "mixing/skip")
    names += ("encoder/relative_bias/embedding", "token_embedder/embedding")
    params = {name: np.ones(3, np.float32) for name in names}
    zeros = jax.tree.map(np.zeros_like, params)
    after, _ = train(config, params, [zeros], Constant(rate=0.1))
    decayed = {name for name in names if not np.array_equal(after[name], params[name])}
    assert decayed == {"mlp/wi/kernel", "token_embedder/embedding"}
    np.testing.assert_allclose(after["mlp/wi/kernel"], 0.95, rtol=1e-6)


def numpy_scaled_adamw(value: np.ndarray, gradients: list, rate: float, decay: float) -> np.ndarray:
    """One parameter, float64, from the equations: Adam's update times the parameter's rms."""
    m = v = 0.0
    for step, gradient in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        u = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        value = value - rate * (max(np.sqrt((value**2).mean()), 1e-3) * u + decay * value)
    return value


@pytest.mark.usefixtures("x64")
def test_adamw_scaled_by_the_parameter_follows_its_equations_tap_by_tap():
    params, gradients = case()
    params["conv_kernel"] = np.stack([np.full(5, 0.1), np.full(5, 10.0)])
    for i, gradient in enumerate(gradients):
        gradient["conv_kernel"] = random_tree(i, {"k": (2, 5)})["k"]
    config = AdamWConfig(
        scale_by_parameter=True, stacked=["conv_kernel"], weight_decay=0.1, max_grad_norm=None
    )
    rate = 2.0**-6  # Exact in float32, in which schedules are computed.
    after, _ = train(config, params, gradients, Constant(rate=rate))
    for name in SHAPES:
        expected = numpy_scaled_adamw(params[name], [g[name] for g in gradients], rate, 0.1)
        np.testing.assert_allclose(after[name], expected, rtol=1e-9, err_msg=name)
    for tap in range(2):
        own = [g["conv_kernel"][tap] for g in gradients]
        expected = numpy_scaled_adamw(params["conv_kernel"][tap], own, rate, 0.1)
        np.testing.assert_allclose(after["conv_kernel"][tap], expected, rtol=1e-9)


def test_sgd_with_momentum_repeats_earlier_gradients():
    params, gradient = {"w": np.ones(2, np.float32)}, {"w": np.full(2, 0.5, np.float32)}
    after, _ = train(SGDConfig(momentum=0.5), params, [gradient] * 2, Constant(rate=0.1))
    np.testing.assert_allclose(after["w"], 1 - 0.1 * 0.5 * (1 + 1.5), rtol=1e-6)


def test_max_grad_norm_limits_all_gradients_together():
    params = {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}
    gradient = {"a": np.full(1, 3.0, np.float32), "b": np.full(1, 4.0, np.float32)}
    after, _ = train(SGDConfig(max_grad_norm=1.0), params, [gradient], Constant(rate=1.0))
    np.testing.assert_allclose([after["a"][0], after["b"][0]], [-0.6, -0.8], rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdafactorConfig(decay_exponent=0.0), "decay_exponent=0.0 must be positive"),
        (lambda: AdafactorConfig(stacked=["("]), r"stacked: '\(' is no regular expression"),
        (lambda: AdafactorConfig(stacked="bias"), "stacked='bias' must be a list"),
        (lambda: AdamWConfig(min_parameter_scale=0.0), "min_parameter_scale=0.0 must be positive"),
        (lambda: AdamWConfig(b2=1.0), r"b2=1.0 must be in \[0, 1\)"),
        (lambda: SGDConfig(weight_decay=-1.0), "weight_decay=-1.0 must be at least 0"),
    ],
)
def test_an_impossible_optimizer_is_refused_by_name_and_value(make, message):
    with pytest.raises(UserError, match=message):
        make()
