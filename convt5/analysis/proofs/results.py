"""What a proof finds, and what all of them use."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from convt5.analysis.cost_report import aligned

ROUNDING = 1e-9
"""Largest difference of two programs in float64, relative to the largest output."""

JITTER = 0.1

Stage = tuple[str, Callable[[], Any]]
"""The name of a layer, and what makes the model that ends with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """The result for one property.

    Attributes:
        name: the property.
        worst: the largest violation found; None where the property does not apply.
        allowed: the largest that is no violation; 0 where nothing may change at all.
        layer: the lowest layer at which it fails, or the parameter.
        note: why it does not apply, or what was found.
    """

    name: str
    worst: float | None
    allowed: float = 0.0
    layer: str | None = None
    note: str = ""

    @property
    def result(self) -> str:
        """ "holds", "fails" or "does not apply"."""
        if self.worst is None:
            return "does not apply"
        return "holds" if self.worst <= self.allowed else "fails"  # NaN fails.

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; a violation without limit is the text "inf"."""
        worst = self.worst
        return {
            "property": self.name,
            "result": self.result,
            "worst_violation": worst if worst is None or math.isfinite(worst) else str(worst),
            "allowed": self.allowed,
            "layer": self.layer,
            "note": self.note,
        }


def table(proofs: Sequence[Proof]) -> str:
    """Returns a line for each property, and what is wrong below it."""
    header = ("property", "result", "worst", "allowed", "at")
    rows = [
        (
            proof.name,
            proof.result,
            "" if proof.worst is None else f"{proof.worst:.3g}",
            "" if proof.worst is None else f"{proof.allowed:.3g}",
            "; ".join(text for text in (proof.layer, proof.note) if text),
        )
        for proof in proofs
    ]
    return aligned([header, *rows], left=(0, 1, 4))


def random_model(config: Any, *, seed: int = 0) -> Any:
    """Returns a model in which no parameter is zero, so that every one of them can do harm.

    Biases and layers that begin as nothing would hide what they read. Matrices are normal with
    variance 1 / inputs, vectors lie around 1; both are drawn on the host, without a compilation.
    """
    random = np.random.default_rng(seed)

    def drawn(leaf: jax.ShapeDtypeStruct) -> Array:
        noise = random.standard_normal(leaf.shape).clip(-3, 3)
        if len(leaf.shape) > 1:
            values = noise * math.prod(leaf.shape[:-1]) ** -0.5
        else:
            values = 1 + JITTER * noise
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(drawn, jax.eval_shape(config.build, jax.random.key(0)))


def in_float64(model: Any) -> Any:
    """Returns the model that computes in float64 with the same parameters; needs 64-bit mode."""
    config = dataclasses.replace(model.config, dtype="float64")
    structure = jax.tree.structure(jax.eval_shape(config.build, jax.random.key(0)))
    return jax.tree.unflatten(structure, jax.tree.leaves(model))


def first_failing(count: int, fails: Callable[[int], bool]) -> int:
    """Returns the first index that fails, where the last does, and all behind the first do."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low
