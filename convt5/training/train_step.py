"""One update, and one evaluation, as jitted functions of a state and a global batch.

A loss returns weighted sums, so means are over the global batch, however it is split among devices
and microbatches. The metrics tell whether all numbers of a step are finite.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5 import errors
from convt5.errors import checks
from convt5.modeling import fsdp
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import BATCH_AXES, MeshConfig, Rule, replicated, without_fsdp
from convt5.modeling.tree_paths import named_leaves
from convt5.ops import dispatch
from convt5.training.averaging import Averaging
from convt5.training.freezing import without_gradients
from convt5.training.optimizer import OptimizerConfig
from convt5.training.schedule import Schedule
from convt5.training.spikes import SKIPPED, SkipSpikes
from convt5.training.train_state import ModelConfig, TrainState, parameters

Tree = Any
Scalar = Float[Array, ""]
Batch = Mapping[str, Array]
Metrics = dict[str, Array]

ALL_FINITE = "all_finite"
NONFINITE_INDEX = "nonfinite_index"
"""Metrics that tell whether the update is finite; `describe_nonfinite` explains the index."""


CROSS_ENTROPY = "cross_entropy"
"""The metric reported as the loss of a run: cross-entropy without regularisers."""

PERPLEXITY = "perplexity"
"""The metric that is reported as the exponential of its mean."""


class LossSums(NamedTuple):
    """Sums over a batch; the training objective is loss_sum / weight_sum.

    Attributes:
        loss_sum: the objective, summed over the batch.
        weight_sum: its divisor, such as the number of target tokens.
        metrics: for each name a sum and its divisor.
        statistics: new values of variables that are not parameters, by name, such as running means
            of batch normalisation. An update writes them to the model.
    """

    loss_sum: Scalar
    weight_sum: Scalar
    metrics: dict[str, tuple[Scalar, Scalar]]
    statistics: Mapping[str, Array] = {}

    def means(self) -> Metrics:
        """Returns the means of all metrics, and of the objective as `loss`.

        A mean with weight 0 is 0; `perplexity` is the exponential of its mean.
        """
        means = {name: _mean(*sums) for name, sums in self.metrics.items()}
        if PERPLEXITY in means:
            means[PERPLEXITY] = jnp.exp(means[PERPLEXITY])
        return {"loss": _mean(self.loss_sum, self.weight_sum), **means}

    def reported(self) -> Metrics:
        """Returns the means under the names that a run reports.

        `loss` is the cross-entropy, and `objective` the training objective with label smoothing and
        z-loss. Without a metric `cross_entropy`, `loss` is the objective.
        """
        means = self.means()
        if CROSS_ENTROPY not in means:
            return means
        return means | {"loss": means[CROSS_ENTROPY], "objective": means["loss"]}


class Loss(Protocol):
    """A loss function of the trainer; `dropout_key` is None only in evaluation."""

    def __call__(
        self, model: Any, batch: Any, *, dropout_key: PRNGKeyArray | None = None
    ) -> LossSums: ...


SumsAndGradients = Callable[[nnx.Module, Batch, PRNGKeyArray], tuple[LossSums, nnx.Module]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The settings of an update: model, loss, optimizer, and how devices share the work.

    Attributes:
        model: description of the model, with a method `build(key)`.
        loss: the loss function, such as `losses.TextLoss`; called on a batch or microbatch.
        optimizer: turns gradients into updates.
        schedule: the learning rate of each step, reported as the metric `learning_rate`.
        mesh: the device mesh; by default all devices split the batch.
        grad_accum_steps: microbatches per batch, to save memory; must divide the batch size. Their
            gradients are summed before the update, which gives the same result. Only batch
            normalisation differs: it sees one microbatch (over all devices), and the mean of its
            statistics over the microbatches is kept.
        ema: keeps an average of the model over its updates, such as `averaging.EMA`. It is saved
            with the model and evaluated like it: each metric of `validation/` and of tasks appears
            again under `ema/`. None disables it.
        skip_spikes: skips updates with an outlying loss or gradient norm, and counts them in the
            metric `skipped_updates`; such a step counts as made. None disables it.
        frozen: regular expressions searched in parameter names; matching parameters do not change,
            and need no gradients and no optimizer state.
        seed: random seed of the initial parameters and of dropout, a 64-bit integer.
        sharding_rules: rules from parameter names to mesh axes.
    """

    model: ModelConfig
    loss: Loss
    optimizer: OptimizerConfig
    schedule: Schedule
    mesh: MeshConfig | None = None
    grad_accum_steps: int = 1
    ema: Averaging | None = None
    skip_spikes: SkipSpikes | None = None
    frozen: Sequence[str] = ()
    seed: int = 0
    sharding_rules: Sequence[Rule] = TEXT_RULES

    def __post_init__(self):
        errors.raise_all(self._faults(), where="train")

    def _faults(self) -> list[str]:
        if checks.fits_64_bits(self.seed):
            return []
        return [f"seed={self.seed} must be an integer of 64 bits."]


def make_train_step(
    config: StepConfig,
    updates: optax.GradientTransformation,
    state_shardings: TrainState,
    batch_sharding: NamedSharding,
    *,
    seed_key: PRNGKeyArray,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted update, which donates the state it is given.

    Args:
        config: the settings of an update.
        updates: the result of `config.optimizer.build`.
        state_shardings: shardings of the state, before and after.
        batch_sharding: sharding of every array of the batch.
        seed_key: determines all dropout together with the step number, so that a resumed run
            repeats it.

    Returns:
        A function from state and batch to the next state and scalar metrics: those of
        `LossSums.reported`, `loss_weight`, `grad_norm`, `param_norm` (before the update),
        `learning_rate`, `all_finite` and `nonfinite_index`, and with `skip_spikes` also
        `skipped_updates`. The loss and gradient of a skipped update count as finite. If
        `all_finite` is false, the new state is useless and the old one is gone: keeping it would
        need another copy in memory, and a quarter of the bytes that a small batch moves.
    """
    sums_and_gradients = differentiate(config.loss, state_shardings.model)
    num_parts = config.grad_accum_steps

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(seed_key, state.step)
        sums, gradients = _accumulate(sums_and_gradients, state.model, batch, key, num_parts)
        gradients = jax.tree.map(lambda g: _mean(g, sums.weight_sum), gradients)
        statistics = jax.tree.map(lambda x: x / num_parts, sums.statistics)
        updated = state.apply_gradients(updates, gradients).with_statistics(statistics)
        measured = {"loss": sums.means()["loss"], "grad_norm": optax.tree.norm(gradients)}
        updated, is_left_out = _skip_if_spike(config.skip_spikes, state, updated, measured)
        updated = updated.with_average(config.ema)
        index = _nonfinite_index(
            sums.loss_sum, state.model, gradients, updated, is_left_out=is_left_out
        )
        metrics = {
            **sums.reported(),
            "loss_weight": sums.weight_sum,
            "grad_norm": measured["grad_norm"],
            "param_norm": optax.tree.norm(parameters(state.model)),
            ALL_FINITE: index < 0,
            NONFINITE_INDEX: index,
            "learning_rate": config.schedule(state.step),
        }
        if updated.spikes is not None:
            metrics[SKIPPED] = updated.spikes.skipped
        return updated, metrics

    return jax.jit(
        train_step,
        in_shardings=(state_shardings, batch_sharding),
        out_shardings=(state_shardings, replicated(batch_sharding.mesh)),
        donate_argnums=0,
    )


def _skip_if_spike(
    skip_spikes: SkipSpikes | None, before: TrainState, updated: TrainState, measured: Metrics
) -> tuple[TrainState, Bool[Array, ""]]:
    """Returns the state after an update, or before it if skipped, and whether it was skipped."""
    if skip_spikes is None:
        return updated, jnp.zeros((), bool)
    assert before.spikes is not None
    is_left_out, memory = skip_spikes.judge(before.spikes, measured)
    return dataclasses.replace(updated.unless(is_left_out, before), spikes=memory), is_left_out


def make_eval_step(
    loss: Loss, model_shardings: nnx.Module, batch_sharding: NamedSharding
) -> Callable[[nnx.Module, Batch], LossSums]:
    """Returns the jitted evaluation of one batch, without dropout; its sums can be added."""

    def eval_step(model: nnx.Module, batch: Batch) -> LossSums:
        with _operators_over(model_shardings):
            return loss(_gather(model, model_shardings), batch, dropout_key=None)

    return jax.jit(
        eval_step,
        in_shardings=(model_shardings, batch_sharding),
        out_shardings=replicated(batch_sharding.mesh),
    )


def describe_nonfinite(metrics: Mapping[str, Any], model: nnx.Module) -> str | None:
    """Describes what was not finite in a step; None if all was. `model` may be abstract."""
    index = int(np.asarray(metrics[NONFINITE_INDEX]))
    names = [name for name, _ in named_leaves(model)]
    if index < 0:
        return None
    if index < len(names):
        return f"parameter {names[index]}"
    if index < 2 * len(names):
        return f"gradient of parameter {names[index - len(names)]}"
    return "the loss" if index == 2 * len(names) else "the updated parameters or optimizer state"


def differentiate(loss: Loss, model_shardings: nnx.Module) -> SumsAndGradients:
    """Returns a function from model, batch and key to the sums and gradients of `loss_sum`."""

    def loss_sum(model: nnx.Module, batch: Batch, key: PRNGKeyArray) -> tuple[Scalar, LossSums]:
        whole = _gather(without_gradients(model), model_shardings)
        sums = loss(whole, batch, dropout_key=key)
        return sums.loss_sum, sums

    def sums_and_gradients(model, batch, key):
        with _operators_over(model_shardings):
            (_, sums), gradients = jax.value_and_grad(loss_sum, has_aux=True)(model, batch, key)
        # Accumulated gradients are sharded like the parameters.
        return sums, jax.lax.with_sharding_constraint(gradients, model_shardings)

    return sums_and_gradients


def _gather(model: nnx.Module, model_shardings: nnx.Module) -> nnx.Module:
    """All-gathers parameters over "fsdp"; layers do so themselves when they run."""
    sizes = jax.tree.leaves(model_shardings)[0].mesh.shape
    return fsdp.gather_parameters(
        model, model_shardings, without_fsdp(model_shardings), all_reduce=_uses_all_reduce(sizes)
    )


def _uses_all_reduce(sizes: Mapping[str, int]) -> bool:
    """Returns whether gradients of layers use all-reduce, for mesh axes of these sizes.

    Without "data", the compiler turns this into a reduce-scatter; an explicit reduce-scatter makes
    XLA on TPU decompose each product into a ring, with up to half again the bytes accessed and
    twice the temporaries. With "data", all-reduces would run along both axes, so a reduce-scatter
    is better. But if "tensor" is above 1 as well, the compiler of jaxlib 0.10.2 then silently
    computes wrong gradients (openxla/xla issue 40034).
    """
    return sizes.get("data", 1) == 1 or sizes.get("tensor", 1) > 1


def _operators_over(model_shardings: nnx.Module) -> contextlib.AbstractContextManager[None]:
    """Tells operators how activations are sharded."""
    mesh = jax.tree.leaves(model_shardings)[0].mesh
    devices = dispatch.Devices(mesh, rows=BATCH_AXES, channels=("tensor",), lengths=("sequence",))
    return dispatch.using(devices=devices)


def _accumulate(
    sums_and_gradients: SumsAndGradients,
    model: nnx.Module,
    batch: Batch,
    key: PRNGKeyArray,
    num_parts: int,
) -> tuple[LossSums, nnx.Module]:
    """Returns the sums over the batch and the gradients of `loss_sum`, by microbatches."""
    if num_parts == 1:
        return sums_and_gradients(model, batch, key)

    def add_part(total, part_and_key):
        return jax.tree.map(jnp.add, total, sums_and_gradients(model, *part_and_key)), None

    parts = jax.tree.map(lambda x: _split(x, num_parts), batch)
    keys = jax.random.split(key, num_parts)
    one = jax.eval_shape(sums_and_gradients, model, jax.tree.map(lambda x: x[0], parts), keys[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
    total, _ = jax.lax.scan(add_part, zeros, (parts, keys))
    return total


def _split(x: Array, num_parts: int) -> Array:
    """Cuts rows into parts; part i takes every num_parts-th row from i.

    Neighbouring rows are on the same device, so each device already holds its share of every part.
    """
    return jnp.moveaxis(x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:]), 1, 0)


def _mean(total: Array, weight: Scalar) -> Array:
    """Divides; gives 0 for zero weight, because a batch without targets is valid."""
    return total / jnp.where(weight == 0, 1, weight)


def _nonfinite_index(
    loss_sum: Scalar,
    model: nnx.Module,
    gradients: nnx.Module,
    updated: TrainState,
    *,
    is_left_out: Bool[Array, ""],
) -> Int[Array, ""]:
    """Returns the index of what is first not finite, or -1: parameters, gradients, loss, update.

    Gradients and loss of a skipped update do not count.
    """
    of_batch = [*_finite_norms(gradients), jnp.isfinite(loss_sum)]
    flags = [*_finite_norms(model), *(is_finite | is_left_out for is_finite in of_batch)]
    # Integers are always finite.
    flags.append(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(updated)]).all())
    broken = ~jnp.stack(flags)
    return jnp.where(broken.any(), jnp.argmax(broken), -1).astype(jnp.int32)


def _finite_norms(tree: Tree) -> Sequence[Bool[Array, ""]]:
    # The metrics need the same sums, so this reads no array again. An array whose norm overflows
    # float32 counts as infinite.
    return [jnp.isfinite(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree)]
