"""Cross-entropy on several devices that split only the batch."""

import functools

import jax
from jax import lax
from jax.sharding import PartitionSpec

from convt5.ops.dispatch import Devices, Formulation


def batch_parts(devices: Devices, batch: int) -> int | None:
    """Returns the number of parts of the batch, or None if another axis is split too."""
    rows = devices.count(devices.rows)
    return rows if rows == devices.mesh.size and batch % rows == 0 else None


def over_rows(devices: Devices, compute: Formulation) -> Formulation:
    """Wraps `compute` to run on each device's rows and to sum all results but dx over devices."""

    def own(x, table, targets, weights):
        sums, gradients = compute(x, table, targets, weights)
        total = functools.partial(lax.psum, axis_name=devices.rows)
        return jax.tree.map(total, sums), (*gradients[:1], *map(total, gradients[1:]))

    split, whole = PartitionSpec(devices.rows), PartitionSpec()

    def run(x, table, targets, weights):
        shapes = jax.eval_shape(compute, x, table, targets, weights)
        gradients = (split, whole) if shapes[1] else ()
        return jax.shard_map(
            own,
            mesh=devices.mesh,
            in_specs=(split, whole, split, split),
            out_specs=((whole,) * 4, gradients),
            check_vma=False,
        )(x, table, targets, weights)

    return run
