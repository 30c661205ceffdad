"""The plan of a run: mesh, shapes, shardings and step functions, before any allocation.

`trainer` runs it. `train --dry_run` stops here, after checking that everything fits.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from convt5.modeling import sharding
from convt5.modeling.layers import seed_key
from convt5.training import compilation, programs
from convt5.training.programs import Kept, Outputs, Store
from convt5.training.train_state import (
    TrainState,
    make_init_state,
    new_state,
    num_parameters,
    shapes_of,
    state_shardings,
)
from convt5.training.train_step import StepConfig, make_eval_step, make_train_step


class Plan(NamedTuple):
    """A run before anything is allocated or compiled.

    Attributes:
        config: the settings of an update.
        batch_size: rows of a training batch, over all devices and hosts.
        updates: the optimizer.
        mesh: the device mesh.
        abstract: shapes and shardings of the state.
        shardings: shardings of the state.
        batch_sharding: sharding of every array of a batch.
        train_step, eval_step: not yet compiled; the former is jitted.
        make_state: jitted function from `init_key` to the initial state, not yet compiled.
        init_key: random key for the initial parameters.
        programs: where its compiled programs are kept; None if they are not.
    """

    config: StepConfig
    batch_size: int
    updates: optax.GradientTransformation
    mesh: Mesh
    abstract: TrainState
    shardings: TrainState
    batch_sharding: NamedSharding
    train_step: Any
    eval_step: Any
    make_state: Any
    init_key: PRNGKeyArray
    programs: Store | None = None

    def keeping_programs(self, folder: pathlib.Path | None) -> "Plan":
        """Returns a plan that keeps its compiled programs in a folder, if they can be told apart.

        Starts to load in the background those that an earlier process has kept.
        Call it before anything changes what functions of convt5 compute.
        """
        if folder is None:
            return self
        names = [field.name for field in dataclasses.fields(StepConfig)]
        identity = programs.identity({name: getattr(self.config, name) for name in names})
        if identity is None:
            return self
        store = Store(folder, identity, self.mesh.devices.flatten().tolist())
        store.load_ahead()
        plan = self._replace(programs=store)
        kept = plan._kept("evaluation", Outputs(lambda sums: sums, lambda sums: sums))
        assert kept is not None
        return plan._replace(eval_step=compilation.KeptFunction(self.eval_step, kept))

    def init_state(self) -> TrainState:
        """Allocates the initial state."""
        kept = self._kept("initial state", Outputs(lambda _: None, lambda _: self.abstract))
        if kept is None:
            return self.make_state(self.init_key)
        return compilation.compile_step(self.make_state, self.init_key, kept=kept).call(
            self.init_key
        )

    def compile_train_step(
        self, state: TrainState, batch: Mapping[str, Any]
    ) -> compilation.CompiledStep:
        """Compiles the update for such a state and batch, or loads it."""
        kept = self._kept(
            "training step", Outputs(lambda out: out[1], lambda metrics: (self.abstract, metrics))
        )
        return compilation.compile_step(self.train_step, state, batch, kept=kept)

    def _kept(self, name: str, outputs: Outputs) -> Kept | None:
        if self.programs is None:
            return None
        return Kept(self.programs, name, outputs)

    def num_parameters(self) -> int:
        """Returns the number of parameters of the model, including frozen ones."""
        return self.num_trained() + num_parameters(self.abstract.model, frozen=True)

    def num_trained(self) -> int:
        return num_parameters(self.abstract.model, frozen=False)


def make_plan(
    config: StepConfig,
    *,
    batch_size: int,
    lengths: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """Checks that model, batch and devices fit together, and returns the plan.

    Args:
        config: the settings of an update.
        batch_size: batch size of the training data, over all devices and hosts.
        lengths: tokens per row, by the name of their setting; None for batches without tokens.
        devices: devices to plan for, by default those of all hosts; may be abstract.

    Raises:
        UserError: sizes are not divisible by the mesh, or rules or patterns do not fit the model.
    """
    mesh = (config.mesh or sharding.MeshConfig()).build(devices)
    check_mesh(config, mesh, batch_size=batch_size, lengths=lengths)
    updates = config.optimizer.build(config.schedule)
    make_state = functools.partial(
        new_state,
        config.model,
        updates,
        with_ema=config.ema is not None,
        with_spikes=config.skip_spikes is not None,
        frozen=config.frozen,
    )
    abstract = shapes_of(make_state)
    shardings = state_shardings(abstract, mesh, config.sharding_rules)
    batch_sharding = sharding.token_sharding(mesh)
    init_key, dropout_key = run_keys(config.seed)
    return Plan(
        config=config,
        batch_size=batch_size,
        updates=updates,
        mesh=mesh,
        abstract=jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        ),
        shardings=shardings,
        batch_sharding=batch_sharding,
        train_step=make_train_step(
            config, updates, shardings, batch_sharding, seed_key=dropout_key
        ),
        eval_step=make_eval_step(config.loss, shardings.model, batch_sharding),
        make_state=make_init_state(make_state, shardings),
        init_key=init_key,
    )


def run_keys(seed: int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Returns the keys of the initial parameters and of dropout of a run with this seed."""
    init_key, dropout_key = jax.random.split(seed_key(seed))
    return init_key, dropout_key


def check_mesh(
    config: StepConfig, mesh: Mesh, *, batch_size: int, lengths: Mapping[str, int] | None
) -> None:
    """Raises `UserError` for sizes not divisible by the mesh; arguments as for `make_plan`.

    Args:
        mesh: a mesh of devices, or an abstract one.
    """
    heads = getattr(config.model, "num_heads", None)
    split_lengths = getattr(config.model, "split_lengths", None)
    sharding.check_mesh(
        mesh,
        batch_size=batch_size,
        grad_accum_steps=config.grad_accum_steps,
        tensor_divides={"num_heads": heads} if heads else None,
        lengths=split_lengths(lengths) if lengths and split_lengths else lengths,
    )
