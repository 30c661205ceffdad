"""A run before anything is allocated or compiled: mesh, shapes, shardings and the step functions.

`trainer` runs it; `train --dry_run` stops here, having checked that everything fits together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from convt5 import errors
from convt5.configuration import checks
from convt5.data import data_shards as shards
from convt5.data.protocols import DataConfig
from convt5.modeling import sharding
from convt5.modeling.placement import TEXT_RULES
from convt5.training.averaging import Averaging
from convt5.training.optimizer import OptimizerConfig
from convt5.training.schedule import Schedule
from convt5.training.spikes import SkipSpikes
from convt5.training.train_state import (
    ModelConfig,
    TrainState,
    abstract_state,
    init_state,
    num_parameters,
    state_shardings,
)
from convt5.training.train_step import Loss, make_eval_step, make_train_step


class Plan(NamedTuple):
    """A run before anything is allocated or compiled.

    Attributes:
        model: what `init_state` builds.
        batch_size: rows of a training batch, over all devices and hosts.
        updates: the optimizer.
        mesh: the devices.
        abstract: shapes and shardings of the state.
        shardings: of the state.
        batch_sharding: of every array of a batch.
        train_step, eval_step: jitted, not yet compiled.
        init_key: for the initial parameters.
        frozen: patterns of the parameters that are not trained.
    """

    model: ModelConfig
    batch_size: int
    updates: optax.GradientTransformation
    mesh: Mesh
    abstract: TrainState
    shardings: TrainState
    batch_sharding: NamedSharding
    train_step: Any
    eval_step: Any
    init_key: PRNGKeyArray
    frozen: Sequence[str] = ()

    def init_state(self) -> TrainState:
        """Allocates the state before the first update."""
        return init_state(
            self.model, self.updates, self.init_key, self.shardings, frozen=self.frozen
        )

    def num_parameters(self) -> int:
        """Returns how many the model has, frozen ones included."""
        return self.num_trained() + num_parameters(self.abstract.model, frozen=True)

    def num_trained(self) -> int:
        return num_parameters(self.abstract.model, frozen=False)


def row_lengths(**data: Any) -> dict[str, int] | None:
    """Returns the tokens of a row by the name of their setting, or None for data without tokens.

    Args:
        data: descriptions of batches by name, such as `data.DataConfig`; None for absent ones.
    """
    found = {
        f"{name}.{field}": getattr(config, field)
        for name, config in data.items()
        for field in ("encoder_length", "decoder_length")
        if hasattr(config, field)
    }
    return found or None


def make_plan(
    *,
    model: ModelConfig,
    loss: Loss,
    optimizer: OptimizerConfig,
    schedule: Schedule,
    batch_size: int,
    eval_data: DataConfig | None = None,
    data_shards: int | None = None,
    lengths: Mapping[str, int] | None = None,
    mesh: sharding.MeshConfig | None = None,
    grad_accum_steps: int = 1,
    ema: Averaging | None = None,
    skip_spikes: SkipSpikes | None = None,
    frozen: Sequence[str] = (),
    seed: int = 0,
    sharding_rules: Sequence[sharding.Rule] = TEXT_RULES,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """Checks that model, batch and devices fit together; arguments as those of `trainer.train`.

    Args:
        batch_size: of the training data, over all devices and hosts.
        lengths: tokens of a row, by the name of their setting; None for batches of other things.
        devices: those to plan for, by default all of every host; others can be compiled for.

    Raises:
        UserError: sizes that the mesh does not divide, or rules or patterns that do not fit the
            model.
    """
    if not checks.fits_64_bits(seed):
        raise errors.UserError(f"train: seed={seed} must be an integer of 64 bits.")
    device_mesh = (mesh or sharding.MeshConfig()).build(devices)
    heads = getattr(model, "num_heads", None)
    split_lengths = getattr(model, "split_lengths", None)
    sharding.check_mesh(
        device_mesh,
        batch_size=batch_size,
        grad_accum_steps=grad_accum_steps,
        tensor_divides={"num_heads": heads} if heads else None,
        lengths=split_lengths(lengths) if lengths and split_lengths else lengths,
    )
    if data_shards is not None:
        if data_shards < 1:
            raise errors.UserError(f"train: data_shards={data_shards} must be at least 1, or None.")
        shards.check(batch_size, data_shards)
    if eval_data is not None:
        sharding.check_rows(device_mesh, eval_data.batch_size, setting="eval_data.batch_size")
    updates = optimizer.build(schedule)
    abstract = abstract_state(
        model,
        updates,
        with_ema=ema is not None,
        with_spikes=skip_spikes is not None,
        frozen=frozen,
    )
    shardings = state_shardings(abstract, device_mesh, sharding_rules)
    batch_sharding = sharding.token_sharding(device_mesh)
    init_key, dropout_key = jax.random.split(_seed_key(seed))
    return Plan(
        model=model,
        batch_size=batch_size,
        updates=updates,
        mesh=device_mesh,
        abstract=jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        ),
        shardings=shardings,
        batch_sharding=batch_sharding,
        train_step=make_train_step(
            loss,
            updates,
            shardings,
            batch_sharding,
            schedule=schedule,
            grad_accum_steps=grad_accum_steps,
            averaging=ema,
            skip_spikes=skip_spikes,
            seed_key=dropout_key,
        ),
        eval_step=make_eval_step(loss, shardings.model, batch_sharding),
        init_key=init_key,
        frozen=frozen,
    )


def _seed_key(seed: int) -> PRNGKeyArray:
    """Returns a key for each integer of 64 bits; jax by itself would drop the upper 32 of them."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
