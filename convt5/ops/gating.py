"""Gated linear unit whose two gradients are computed in one pass."""

import jax
from jax import lax
from jaxtyping import Array, Float

from convt5.ops.varying import vary_alike


def gate(x: Float[Array, "*shape"], logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x * sigmoid(logits) (Dauphin et al. 2017, arXiv 1612.08083, equation 1).

    Where x and the logits are dense layers of one input, each gradient is read by two products.
    XLA on TPU would recompute it inside both, from three arrays instead of one: 1 % of the bytes of
    a training step with convolutions.
    """
    return _gate(*vary_alike(x, logits))


@jax.custom_vjp
def _gate(x, logits):
    return x * jax.nn.sigmoid(logits)


def _forward(x, logits):
    return x * jax.nn.sigmoid(logits), (x, logits)


def _backward(residuals, dy):
    x, logits = residuals
    opened = jax.nn.sigmoid(logits)
    return lax.optimization_barrier((dy * opened, dy * x * (opened * (1 - opened))))


_gate.defvjp(_forward, _backward)
