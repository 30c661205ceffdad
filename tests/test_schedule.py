"""Learning-rate schedules at the steps that matter: the first, the end of warm-up, the last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convt5.errors import UserError
from convt5.training.schedule import Constant, Cosine, EpochCosine, InverseSqrt, Linear

WARM = [
    InverseSqrt(warmup_steps=10, linear_warmup=True),
    Cosine(peak=0.5, warmup_steps=10, total_steps=50),
    Linear(peak=0.5, warmup_steps=10, total_steps=50),
]


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.01), (10_000, 0.01), (40_000, 0.005), (1_000_000, 0.001)]
)
def test_inverse_sqrt_with_defaults_is_the_schedule_of_t5(step, rate):
    np.testing.assert_allclose(InverseSqrt()(step), rate, rtol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(rate=0.1),
        InverseSqrt(),
        EpochCosine(peak=1.0, num_epochs=3, steps_per_epoch=5),
        *WARM,
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_traced_step_gives_the_same_float32_rate_as_a_number(schedule):
    traced = jax.jit(schedule)(jnp.int32(7))
    assert traced.dtype == jnp.float32
    assert traced.shape == ()
    np.testing.assert_allclose(traced, schedule(7), rtol=1e-6)


@pytest.mark.parametrize("schedule", WARM, ids=lambda s: type(s).__name__)
def test_warm_up_rises_in_equal_parts_and_meets_the_fall(schedule):
    rates = np.array([float(schedule(step)) for step in range(13)])
    np.testing.assert_allclose(np.diff(rates[:10]), rates[0], rtol=1e-5)
    np.testing.assert_allclose(rates[9], rates[10], rtol=1e-5)
    assert rates.argmax() in (9, 10)
    assert rates[12] < rates[10]


@pytest.mark.parametrize("kind", [Cosine, Linear])
def test_a_fall_passes_its_middle_and_stays_at_its_end(kind):
    schedule = kind(peak=2.0, total_steps=100, final_fraction=0.5)
    np.testing.assert_allclose(
        [schedule(step) for step in (0, 50, 100, 1000)], [2.0, 1.5, 1.0, 1.0], rtol=1e-6
    )


@pytest.mark.parametrize("warmup_epochs", [0, 5])
def test_a_cosine_by_epochs_changes_once_in_an_epoch_and_is_that_of_the_paper(warmup_epochs):
    schedule = EpochCosine(peak=1e-3, num_epochs=12, steps_per_epoch=7, warmup_epochs=warmup_epochs)
    rates = np.array([float(schedule(step)) for step in range(7 * 13)]).reshape(13, 7)
    np.testing.assert_array_equal(rates, rates[:, :1].repeat(7, axis=1))
    for epoch in range(12):
        expected = 1e-3 * ((1 - 0.005) * 0.5 * (1 + np.cos(np.pi * epoch / 12)) + 0.005)
        if epoch < warmup_epochs:
            expected *= 0.1 * (1 - epoch / warmup_epochs) + epoch / warmup_epochs
        np.testing.assert_allclose(rates[epoch, 0], expected, rtol=1e-5)
    assert rates[12, 0] == rates[11, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpochCosine(peak=1.0, num_epochs=5, steps_per_epoch=0), "steps_per_epoch=0 must"),
        (
            lambda: EpochCosine(peak=1.0, num_epochs=5, steps_per_epoch=1, warmup_factor=2.0),
            r"warmup_factor=2.0 must be in \[0, 1\]",
        ),
        (lambda: Constant(rate=0.0), "rate=0.0 must be a positive finite number"),
        (lambda: InverseSqrt(warmup_steps=0), "warmup_steps=0 must be at least 1"),
        (lambda: Cosine(peak=float("nan"), total_steps=5), "peak=nan"),
        (
            lambda: Linear(peak=1.0, total_steps=5, warmup_steps=5),
            "total_steps=5 must be greater than warmup_steps=5",
        ),
        (lambda: Cosine(peak=1.0, total_steps=5, final_fraction=2.0), "final_fraction=2.0"),
    ],
)
def test_an_impossible_schedule_is_refused_by_name_and_value(make, message):
    with pytest.raises(UserError, match=message):
        make()


MANY = 2**31


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda n: InverseSqrt(warmup_steps=n), "warmup_steps"),
        (lambda n: Cosine(peak=1.0, total_steps=n), "total_steps"),
        (lambda n: Linear(peak=1.0, total_steps=n), "total_steps"),
        (lambda n: Linear(peak=1.0, total_steps=n, warmup_steps=n - 1), "total_steps"),
        (lambda n: EpochCosine(peak=1.0, num_epochs=5, steps_per_epoch=n), "steps_per_epoch"),
        (lambda n: EpochCosine(peak=1.0, num_epochs=n, steps_per_epoch=5), "num_epochs"),
        (
            lambda n: EpochCosine(peak=1.0, num_epochs=5, steps_per_epoch=5, warmup_epochs=n),
            "warmup_epochs",
        ),
    ],
)
def test_counts_that_no_step_can_have_are_refused(make, setting):
    assert np.isfinite(float(jax.jit(make(MANY - 1))(jnp.int32(5))))
    with pytest.raises(UserError, match=f"{setting}=2147483648 must be less than 2147483648"):
        make(MANY)
