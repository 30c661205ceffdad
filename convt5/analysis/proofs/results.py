"""The result of a proof, and helpers of all proofs."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from convt5.analysis.cost_report import align
from convt5.training.train_state import abstract_model

ROUNDING = 1e-9
"""Largest difference between two programs in float64, relative to the largest output."""

JITTER = 0.1

Stage = tuple[str, Callable[[], Any]]
"""The name of a layer, and a function that returns the model truncated after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """The result for one property.

    Attributes:
        name: the property.
        worst: the largest violation; None if the property does not apply.
        allowed: the tolerance; 0 if nothing may change at all.
        layer: the lowest layer, or the parameter, at which it fails.
        note: why it does not apply, or details of the result.
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
        """Returns plain values; an infinite violation is the text "inf"."""
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
    """Returns a line for each property, followed by details of failures."""
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
    return align([header, *rows], left=(0, 1, 4))


def random_model(config: Any, *, seed: int = 0) -> Any:
    """Returns a model without any zero parameter, so that each can reveal a violation.

    Biases and layers initialised to zero would hide what they read. Matrices are normal with
    variance 1 / inputs, vectors are around 1; both are drawn on the host, without compilation.
    """
    random = np.random.default_rng(seed)

    def drawn(leaf: jax.ShapeDtypeStruct) -> Array:
        noise = random.standard_normal(leaf.shape).clip(-3, 3)
        if len(leaf.shape) > 1:
            values = noise * math.prod(leaf.shape[:-1]) ** -0.5
        else:
            values = 1 + JITTER * noise
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(drawn, abstract_model(config))


def in_float64(model: Any) -> Any:
    """Returns the model in float64 with the same parameters; needs 64-bit mode."""
    config = dataclasses.replace(model.config, dtype="float64")
    structure = jax.tree.structure(abstract_model(config))
    return jax.tree.unflatten(structure, jax.tree.leaves(model))


def first_failing(count: int, fails: Callable[[int], bool]) -> int:
    """Finds the first index that fails, by bisection; all indices after it must fail too."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle + 1, high)
    return low
