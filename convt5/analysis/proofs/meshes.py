"""The proof that an update on a mesh of devices equals that on one device.

Devices are emulated on the CPU, so that any mesh can be proven anywhere. Activations and their
gradients are float64, so the only differences are roundings of parameters to float32.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from convt5 import errors
from convt5.analysis.proofs.results import Proof, in_float64
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.sharding import BATCH_AXES, MeshConfig
from convt5.modeling.tree_paths import named_leaves
from convt5.training.losses import TextLoss
from convt5.training.plan import Plan, make_plan
from convt5.training.schedule import Constant
from convt5.training.train_step import Loss, StepConfig
from convt5.vision import placement as vision_placement
from convt5.vision.architecture import ViTConfig
from convt5.vision.losses import VisionLoss

ALLOWED = 1e-4
"""Largest difference of an updated value, relative to the largest update of its parameter."""

_LAST_BITS = 2 * float(np.finfo(np.float32).eps)

_ROUNDED = 1e-13
"""Gradients below this, relative to the largest of the model, are rounding errors of zero."""

Batch = Mapping[str, np.ndarray]
RATE = 1e-3
"""Learning rate of the update, whatever the schedule is."""


class _Update(NamedTuple):
    """One update: the loss before it, and parameters by name before and after it."""

    loss: float
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]


def parse(texts: Sequence[str]) -> list[MeshConfig]:
    """Parses meshes such as "data=2,tensor=4"; missing axes have size 1.

    Raises:
        UserError: an unknown axis, or an invalid size.
    """
    axes = list(MeshConfig.__dataclass_fields__)
    meshes = []
    for text in texts:
        sizes = {}
        for part in text.split(","):
            axis, _, size = (piece.strip() for piece in part.partition("="))
            if axis not in axes or axis in sizes or not size.isdecimal() or int(size) < 1:
                raise errors.UserError(
                    f"--mesh={text}: {part!r} must be an axis, each at most once, and its size of "
                    f"at least 1, such as fsdp=2; the axes are {', '.join(axes)}."
                )
            sizes[axis] = int(size)
        meshes.append(MeshConfig(**{axis: sizes.get(axis, 1) for axis in axes}))
    return meshes


def num_devices(mesh: MeshConfig) -> int:
    """Returns the number of devices of a mesh without -1."""
    return math.prod(vars(mesh).values())


def emulate_devices(count: int) -> None:
    """Emulates devices on the CPU; call it before JAX computes anything.

    Raises:
        UserError: JAX has already started, with fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # The existing devices may suffice.
        jax.config.update("jax_num_cpu_devices", count)
    if (present := len(jax.devices("cpu"))) < count:
        raise errors.UserError(
            f"--mesh needs {count} devices, but the CPU is {present} here; set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={count} before Python starts."
        )


def prove(
    step: StepConfig, model: Any, meshes: Sequence[MeshConfig], *, lengths: Sequence[int] = ()
) -> list[Proof]:
    """Returns for each mesh whether an update on it equals that on one device.

    Args:
        step: loss, optimizer, frozen parameters, microbatches and sharding rules of the update.
        model: the parameters before it.
        meshes: the meshes to prove, without -1.
        lengths: tokens per encoder row and per decoder row, for a text model.

    Raises:
        UserError: a mesh does not divide the model or its batch.
    """
    ways = [math.prod(getattr(mesh, axis) for axis in BATCH_AXES) for mesh in meshes]
    rows = math.lcm(*ways) * step.grad_accum_steps
    rows *= -(-4 // rows)
    config = model.config
    batch = _text_batch(rows, config, *lengths) if lengths else _image_batch(rows, config)
    named = {f"{half}_length": n for half, n in zip(("encoder", "decoder"), lengths, strict=False)}
    devices = jax.devices("cpu")
    with jax.enable_x64(True), jax.default_device(devices[0]):
        step = _in_float64(step, config)

        def update(mesh: MeshConfig) -> _Update:
            plan = make_plan(
                dataclasses.replace(step, mesh=mesh),
                batch_size=rows,
                lengths=named or None,
                devices=devices[: num_devices(mesh)],
            )
            return _update(plan, model, batch)

        alone = update(MeshConfig(data=1))
        is_noise = _is_noise(step.loss, in_float64(model), batch)
        return [_compare(mesh, update(mesh), alone, is_noise) for mesh in meshes]


def _is_noise(loss: Loss, model: Any, batch: Batch) -> dict[str, np.ndarray]:
    """Marks, by name, gradients that are exactly zero but for rounding, as those of key biases.

    Optimizers that normalise gradients turn them into full updates in arbitrary directions.
    """

    def loss_sum(model: Any) -> jax.Array:
        return loss(model, batch, dropout_key=jax.random.key(0)).loss_sum

    sizes = {name: np.abs(g) for name, g in _on_host(jax.jit(jax.grad(loss_sum))(model)).items()}
    largest = max(float(size.max(initial=0.0)) for size in sizes.values())
    return {name: size < _ROUNDED * largest for name, size in sizes.items()}


def _in_float64(step: StepConfig, config: Any) -> StepConfig:
    """Returns an update of the model alone, without averaging and skipping, in float64."""
    names = ("optimizer", "grad_accum_steps", "frozen", "seed", "loss", "sharding_rules")
    settings = {name: getattr(step, name) for name in names}
    if isinstance(config, ViTConfig) and isinstance(step.loss, TextLoss):
        # Gin files of a model alone have no loss and rules.
        settings |= {"loss": VisionLoss(), "sharding_rules": vision_placement.rules()}
    exact = dataclasses.replace(config, dtype="float64")
    return StepConfig(model=exact, schedule=Constant(rate=RATE), **settings)


def _text_batch(rows: int, config: ConvT5Config, encoder_length: int, decoder_length: int) -> Batch:
    """Returns random rows, each with padding in its last eighth."""
    random = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        ids = random.integers(1, config.vocab_size, (rows, length)).astype(np.int32)
        ids[:, length - length // 8 :] = 0
        return ids

    targets = tokens(decoder_length)
    return {
        "encoder_input_tokens": tokens(encoder_length),
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets != 0).astype(np.int32),
    }


def _image_batch(rows: int, config: ViTConfig) -> Batch:
    random = np.random.default_rng(0)
    shape = (rows, config.image_size, config.image_size, config.in_channels)
    return {
        "images": random.standard_normal(shape).astype(np.float32),
        "labels": random.integers(0, config.num_classes, rows).astype(np.int32),
        "weights": np.ones(rows, np.float32),
    }


def _update(plan: Plan, model: Any, batch: Batch) -> _Update:
    state = plan.init_state()
    structure = jax.tree.structure(state.model)
    copied = jax.tree.unflatten(structure, map(jnp.copy, jax.tree.leaves(model)))
    state = jax.device_put(state.starting_with(copied), plan.shardings)
    before = _on_host(state.model)
    state, metrics = plan.train_step(state, jax.device_put(batch, plan.batch_sharding))
    return _Update(float(metrics["loss"]), before, _on_host(state.model))


def _on_host(model: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(model)}


def _compare(
    mesh: MeshConfig, on_mesh: _Update, alone: _Update, is_noise: Mapping[str, np.ndarray]
) -> Proof:
    apart = {name: _difference(name, on_mesh, alone, is_noise[name]) for name in alone.after}
    apart["the loss"] = abs(on_mesh.loss - alone.loss) / abs(alone.loss)
    at, worst = max(apart.items(), key=lambda item: np.nan_to_num(item[1], nan=np.inf))
    text = ", ".join(f"{axis}={size}" for axis, size in vars(mesh).items() if size > 1)
    name = f"the update is the same on {text or 'one device'}"
    proof = Proof(name=name, worst=worst, allowed=ALLOWED)
    return proof if proof.result == "holds" else dataclasses.replace(proof, layer=at)


def _difference(name: str, on_mesh: _Update, alone: _Update, is_noise: np.ndarray) -> float:
    """Returns the difference of a parameter beyond its last bits, relative to its update."""
    after = alone.after[name]
    apart = np.abs(on_mesh.after[name] - after) - _LAST_BITS * np.abs(after)
    apart = max(0.0, float(np.where(is_noise, 0.0, apart).max(initial=0.0)))
    update = float(np.abs(after - alone.before[name]).max(initial=0.0))
    if apart == 0:
        return 0.0
    return apart / update if update else math.inf
