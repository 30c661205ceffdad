"""Optimizers as frozen descriptions that build optax transformations: Adafactor, AdamW, SGD.

They act on trees of arrays and select parameters by name (`tree_paths`), never by module.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from convt5 import errors
from convt5.errors import checks
from convt5.modeling import canon
from convt5.modeling.mixers import KINDS
from convt5.modeling.tree_paths import matches, named_leaves, pattern_faults
from convt5.training.schedule import Schedule

Tree = Any
Moment = dict[str, Array]

STACKED_TAPS = (
    *canon.stacked_parameters,
    *(name for kind in KINDS.values() for name in kind.stacked_parameters),
)
"""Taps of a convolution, which are one array here and one variable per tap in the original."""

NOT_DECAYED = (r"(^|/)\w*bias(/|$)", r"norm/scale$", r"mixing/skip$")
"""Biases, relative biases, norm scales and the D of Hyena, which should not decay towards zero."""


class OptimizerConfig(Protocol):
    """The interface of optimizer descriptions."""

    def build(self, schedule: Schedule) -> optax.GradientTransformation: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class AdafactorConfig:
    """Adafactor as used to train T5 (Shazeer and Stern 2018, arXiv 1804.04235).

    With step s from 0, gradient g and decay 1 - (s + 1) ** -decay_exponent, each parameter keeps
    the decayed mean v of g^2 + epsilon, or for large matrices only its row and column means. Then
    u = g / sqrt(v); u /= max(1, rms(u) / clipping_threshold);
    parameter -= rate(s) * max(rms(parameter), min_parameter_scale) * u. There is no momentum.

    This equals `optax.adafactor` with these values, except for `stacked` parameters. optax treats a
    convolution kernel as one parameter, so its taps would share statistics, clipping and scale; the
    original holds them as separate variables. If several axes are the second longest (not so in
    our models), the first of them is averaged, as in the original but not in optax.

    Attributes:
        decay_exponent: larger forgets more slowly; T5: 0.8.
        clipping_threshold: largest rms of an update before scaling; None means no limit.
        scale_by_parameter: makes the rate relative to the rms of the parameter.
        min_parameter_scale: minimum of that rms, so that a zero parameter can move.
        epsilon: added to the squared gradient.
        min_dim_to_factor: minimum length of the two longest axes for row and column means.
        stacked: regular expressions searched in parameter names; each index along the first axis of
            a matching array is treated as a separate parameter.
        weight_decay: decay of parameters not in `not_decayed`, scaled by the rate; T5: 0.
        not_decayed: regular expressions searched in parameter names.
        max_grad_norm: clips the global gradient norm before all else; T5: None.
    """

    decay_exponent: float = 0.8
    clipping_threshold: float | None = 1.0
    scale_by_parameter: bool = True
    min_parameter_scale: float = 1e-3
    epsilon: float = 1e-30
    min_dim_to_factor: int = 128
    stacked: Sequence[str] = STACKED_TAPS
    weight_decay: float = 0.0
    not_decayed: Sequence[str] = NOT_DECAYED
    max_grad_norm: float | None = None

    def __post_init__(self):
        faults = _positive_faults(
            decay_exponent=self.decay_exponent,
            clipping_threshold=self.clipping_threshold,
            min_parameter_scale=self.min_parameter_scale,
            epsilon=self.epsilon,
            min_dim_to_factor=self.min_dim_to_factor,
            max_grad_norm=self.max_grad_norm,
        )
        faults += _decay_faults(self.weight_decay)
        faults += pattern_faults(stacked=self.stacked, not_decayed=self.not_decayed)
        errors.raise_all(faults, where="AdafactorConfig")

    def build(self, schedule: Schedule) -> optax.GradientTransformation:
        """Returns the transformation; its updates are added to the parameters."""
        parts = [
            _clip_gradients(self.max_grad_norm),
            scale_by_second_moment(
                decay_exponent=self.decay_exponent,
                epsilon=self.epsilon,
                min_dim_to_factor=self.min_dim_to_factor,
                stacked=self.stacked,
            ),
        ]
        if self.clipping_threshold is not None:
            parts.append(clip_by_rms(self.clipping_threshold, stacked=self.stacked))
        if self.scale_by_parameter:
            parts.append(scale_by_parameter_rms(self.min_parameter_scale, stacked=self.stacked))
        if self.weight_decay:
            parts.append(_decay(self.weight_decay, self.not_decayed))
        return optax.chain(*parts, optax.scale_by_learning_rate(schedule))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class AdamWConfig:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).

    With `scale_by_parameter`, the update of each parameter is multiplied by
    max(rms(parameter), min_parameter_scale), as in Adafactor, so that Adafactor's rates apply.
    Weight decay is not scaled. nanoT5 (Nawrot 2023, arXiv 2309.02373) pre-trains T5 this way, with
    a cosine schedule from 0.02.

    Attributes:
        b1, b2: decay of the first and second moment, in [0, 1).
        epsilon: added to the root of the second moment.
        scale_by_parameter: makes the rate relative to the rms of the parameter.
        min_parameter_scale: minimum of that rms, so that a zero parameter can move.
        stacked: regular expressions searched in parameter names; each index along the first axis of
            a matching array is treated as a separate parameter.
        weight_decay: decay of parameters not in `not_decayed`, scaled by the rate.
        not_decayed: regular expressions searched in parameter names.
        max_grad_norm: clips the global gradient norm before all else; None means no limit.
    """

    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    scale_by_parameter: bool = False
    min_parameter_scale: float = 1e-3
    stacked: Sequence[str] = STACKED_TAPS
    weight_decay: float = 0.01
    not_decayed: Sequence[str] = NOT_DECAYED
    max_grad_norm: float | None = 1.0

    def __post_init__(self):
        faults = _positive_faults(
            epsilon=self.epsilon,
            min_parameter_scale=self.min_parameter_scale,
            max_grad_norm=self.max_grad_norm,
        )
        faults += _fraction_faults(b1=self.b1, b2=self.b2)
        faults += _decay_faults(self.weight_decay)
        faults += pattern_faults(stacked=self.stacked, not_decayed=self.not_decayed)
        errors.raise_all(faults, where="AdamWConfig")

    def build(self, schedule: Schedule) -> optax.GradientTransformation:
        """Returns the transformation; its updates are added to the parameters."""
        decay = _decay(self.weight_decay, self.not_decayed)
        if self.scale_by_parameter:
            scale = scale_by_parameter_rms(self.min_parameter_scale, stacked=self.stacked)
            decay = optax.chain(scale, decay)  # One element: checkpoints name states by position.
        return optax.chain(
            _clip_gradients(self.max_grad_norm),
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.epsilon),
            decay,
            optax.scale_by_learning_rate(schedule),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class SGDConfig:
    """Stochastic gradient descent, optionally with momentum; fields as in `AdamWConfig`."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    not_decayed: Sequence[str] = NOT_DECAYED
    max_grad_norm: float | None = None

    def __post_init__(self):
        faults = _positive_faults(max_grad_norm=self.max_grad_norm)
        faults += _fraction_faults(momentum=self.momentum)
        faults += _decay_faults(self.weight_decay)
        faults += pattern_faults(not_decayed=self.not_decayed)
        errors.raise_all(faults, where="SGDConfig")

    def build(self, schedule: Schedule) -> optax.GradientTransformation:
        """Returns the transformation; its updates are added to the parameters."""
        trace = optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
        # Decay before momentum: it is part of the gradient of the penalised loss, as in torch.
        return optax.chain(
            _clip_gradients(self.max_grad_norm),
            _decay(self.weight_decay, self.not_decayed),
            trace,
            optax.scale_by_learning_rate(schedule),
        )


class SecondMomentState(NamedTuple):
    """The state of Adafactor.

    Attributes:
        count: number of updates made.
        moments: for each parameter {"full": v} or, if factored, {"row": v averaged over the longest
            axis, "column": v averaged over the second longest}. Averaged axes keep length 1, so
            that every array has the rank and the sharding of its parameter.
    """

    count: Int[Array, ""]
    moments: Tree


def scale_by_second_moment(
    *, decay_exponent: float, epsilon: float, min_dim_to_factor: int, stacked: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Divides gradients by the root of their decayed, possibly factored, mean square."""

    def means_of(leaf: Array, is_stacked: bool) -> Moment:
        axes = factored_axes(leaf.shape, min_dim_to_factor, is_stacked=is_stacked)
        if axes is None:
            return {"full": leaf}
        longest, second = axes
        return {
            "row": jnp.mean(leaf, axis=longest, keepdims=True),
            "column": jnp.mean(leaf, axis=second, keepdims=True),
        }

    def init(params: Tree) -> SecondMomentState:
        def zeros(leaf: Array, is_stacked: bool) -> Moment:
            return jax.tree.map(jnp.zeros_like, means_of(leaf, is_stacked))

        return SecondMomentState(jnp.zeros([], jnp.int32), _map_blocks(zeros, stacked, params))

    def update(updates: Tree, state: SecondMomentState, params: Tree | None = None):
        del params
        decay = 1.0 - (state.count + 1.0) ** -decay_exponent

        def next_moment(gradient: Array, is_stacked: bool, moment: Moment) -> Moment:
            means = means_of(jnp.square(gradient) + epsilon, is_stacked)
            return jax.tree.map(
                lambda old, new: (decay * old + (1.0 - decay) * new).astype(old.dtype),
                moment,
                means,
            )

        def scaled(gradient: Array, is_stacked: bool, moment: Moment) -> Array:
            axes = factored_axes(gradient.shape, min_dim_to_factor, is_stacked=is_stacked)
            if axes is None:
                return gradient * jax.lax.rsqrt(moment["full"])
            row_mean = jnp.mean(moment["row"], axis=axes[1], keepdims=True)
            row_factor = jax.lax.rsqrt(moment["row"] / row_mean)
            return gradient * row_factor * jax.lax.rsqrt(moment["column"])

        moments = _map_blocks(next_moment, stacked, updates, state.moments)
        scaled_updates = _map_blocks(scaled, stacked, updates, moments)
        return scaled_updates, SecondMomentState(state.count + 1, moments)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def clip_by_rms(threshold: float, *, stacked: Sequence[str] = ()) -> optax.GradientTransformation:
    """Scales the update of each parameter down to an rms of at most `threshold`."""

    def clip(update: Array, is_stacked: bool) -> Array:
        return update / jnp.maximum(1.0, _rms(update, is_stacked) / threshold)

    return optax.stateless(lambda updates, _: _map_blocks(clip, stacked, updates))


def scale_by_parameter_rms(
    min_scale: float, *, stacked: Sequence[str] = ()
) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by its rms, at least `min_scale`."""

    def scale(update: Array, is_stacked: bool, parameter: Array) -> Array:
        return update * jnp.maximum(_rms(parameter, is_stacked), min_scale)

    return optax.stateless(lambda updates, params: _map_blocks(scale, stacked, updates, params))


def factored_axes(
    shape: Sequence[int], min_dim_to_factor: int, *, is_stacked: bool = False
) -> tuple[int, int] | None:
    """Returns the longest and second longest axis, or None if statistics are not factored."""
    axes = range(1 if is_stacked else 0, len(shape))
    # A stable sort: the first of equal axes counts as the longest, as in the original.
    longest = sorted(axes, key=lambda axis: -shape[axis])[:2]
    if len(longest) < 2 or shape[longest[1]] < min_dim_to_factor:
        return None
    return longest[0], longest[1]


def _map_blocks(function: Callable[..., Any], stacked: Sequence[str], tree: Tree, *rest: Tree):
    """Maps `function(leaf, is_stacked, *rest)`; `rest` may hold subtrees in place of a leaf."""
    treedef = jax.tree.structure(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return treedef.unflatten(
        function(leaf, matches(name, stacked), *more)
        for (name, leaf), *more in zip(named_leaves(tree), *others, strict=True)
    )


def _rms(leaf: Array, is_stacked: bool) -> Float[Array, "..."]:
    axes = tuple(range(1 if is_stacked else 0, leaf.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(leaf), axis=axes, keepdims=True))


def _decay(weight_decay: float, not_decayed: Sequence[str]) -> optax.GradientTransformation:
    def mask(params: Tree) -> Tree:
        return _map_blocks(lambda _, is_exempt: not is_exempt, not_decayed, params)

    return optax.add_decayed_weights(weight_decay, mask) if weight_decay else optax.identity()


def _clip_gradients(max_norm: float | None) -> optax.GradientTransformation:
    return optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)


def _positive_faults(**values: float | None) -> list[str]:
    return [
        f"{name}={value} must be positive."
        for name, value in values.items()
        if value is not None and not value > 0
    ]


def _fraction_faults(**values: float) -> list[str]:
    return [
        f"{name}={value} must be in [0, 1)." for name, value in values.items() if not 0 <= value < 1
    ]


def _decay_faults(weight_decay: float) -> list[str]:
    return [] if weight_decay >= 0 else [f"weight_decay={weight_decay} must be at least 0."]
