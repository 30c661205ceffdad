"""The transformer of ViT: pre-norm blocks of attention and feed-forward, with biases."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.modeling.canon import Along, Canon, CanonTaps, apply_canon
from convt5.modeling.layers import Dense, Norm, at_least_float32, build_layers
from convt5.vision.description import ViTDescription


class QueryKeyValue(nnx.Module):
    """The input projection of attention, to queries, keys and values together.

    Its kernel [embed, 3, embed] is initialised Xavier uniform as one matrix [embed, 3 * embed], as
    in torch.
    """

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        emb_dim = config.emb_dim
        init = jax.nn.initializers.glorot_uniform()
        kernel = init(key, (emb_dim, 3 * emb_dim), jnp.float32)
        self.kernel = nnx.Param(kernel.reshape(emb_dim, 3, emb_dim))
        self.bias = nnx.Param(jnp.zeros((3, emb_dim), jnp.float32))
        canons = [
            _canon(config, "B", name, emb_dim, key=part)
            for name, part in zip(("query", "key", "value"), jax.random.split(key, 3), strict=True)
        ]
        # Any: nnx.List has no element type.
        self.canon: Any = None if None in canons else nnx.List(canons)

    def __call__(
        self, x: Float[Array, "batch length embed"], along: Along | None
    ) -> Float[Array, "three batch length embed"]:
        y = jnp.einsum("ble,ecd->cbld", x, self.kernel[...].astype(x.dtype))
        y = y + self.bias[...].astype(x.dtype)[:, None, None]
        if self.canon is None:
            return y
        parts = zip(self.canon, y, strict=True)
        return jnp.stack([apply_canon(canon, part, along) for canon, part in parts])


class Attention(nnx.Module):
    """Self-attention of all tokens, scaled by 1 / sqrt(head width), softmax in at least float32."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        input_key, output_key = jax.random.split(key)
        dim = config.emb_dim
        self.input = QueryKeyValue(config, key=input_key)
        self.output = Dense(
            dim, dim, key=output_key, use_bias=True, init=symmetric_uniform(dim**-0.5)
        )
        self.num_heads = config.num_heads

    def __call__(
        self, x: Float[Array, "batch length embed"], along: Along | None
    ) -> Float[Array, "batch length embed"]:
        projected = self.input(x, along)
        # three batch length heads head_dim
        head_dim = x.shape[-1] // self.num_heads
        query, key, value = projected.reshape(*projected.shape[:3], self.num_heads, head_dim)
        logits = jnp.einsum(
            "bqhd,bkhd->bhqk", query, key, preferred_element_type=at_least_float32(x.dtype)
        )
        weights = jax.nn.softmax(logits * query.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output(y.reshape(x.shape))


class Mlp(nnx.Module):
    """fc2(GELU(fc1(x))) with the exact GELU."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        dim, width = config.emb_dim, config.mlp_dim
        taps = config.canon_at("D", "wi")
        self.wi = _dense(dim, width, canon=taps, key=keys[0], bias_key=keys[1])
        self.wo = _dense(width, dim, key=keys[2], bias_key=keys[3])

    def __call__(
        self, x: Float[Array, "batch length embed"], along: Along | None
    ) -> Float[Array, "batch length embed"]:
        return self.wo(jax.nn.gelu(self.wi(x, along), approximate=False))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with optional Canon layers."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = norm(config)
        self.attention = Attention(config, key=attention_key)
        self.mlp_norm = norm(config)
        self.mlp = Mlp(config, key=mlp_key)
        self.attention_canon = _canon(config, "A", "attention", config.emb_dim, key=attention_key)
        self.mlp_canon = _canon(config, "C", "mlp", config.emb_dim, key=mlp_key)

    def __call__(
        self, x: Float[Array, "batch length embed"], along: Along | None
    ) -> Float[Array, "batch length embed"]:
        y = apply_canon(self.attention_canon, self.attention_norm(x), along)
        x = x + self.attention(y, along)
        y = apply_canon(self.mlp_canon, self.mlp_norm(x), along)
        return x + self.mlp(y, along)


class Encoder(nnx.Module):
    """The blocks, and the final norm."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        # Any: nnx.List has no element type.
        self.layers: Any = build_layers(
            lambda config, key: Block(config, key=key), [config] * config.num_layers, key
        )
        self.final_norm = norm(config)

    def __call__(
        self, x: Float[Array, "batch length embed"], along: Along | None = None
    ) -> Float[Array, "batch length embed"]:
        """Returns the encoded tokens; `along` is their sequence, for Canon layers."""
        for layer in self.layers:
            x = layer(x, along)
        return self.final_norm(x)


def norm(config: ViTDescription) -> Norm:
    """Returns the layer norm of a model."""
    return Norm(config.emb_dim, kind="layer", epsilon=config.norm_epsilon)


def symmetric_uniform(limit: float) -> jax.nn.initializers.Initializer:
    """Returns the uniform initializer between -limit and limit."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding  # `sharding` decides where parameters live.
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def _canon(
    config: ViTDescription, place: str, name: str, channels: int, *, key: PRNGKeyArray
) -> Canon | None:
    taps = config.canon_at(place, name)
    return None if taps is None else taps.build(channels, key=key)


def _dense(
    in_dim: int,
    out_dim: int,
    *,
    canon: CanonTaps | None = None,
    key: PRNGKeyArray,
    bias_key: PRNGKeyArray,
) -> Dense:
    """Returns a dense layer of the MLP: Xavier uniform kernel, and biases close to zero."""
    init = jax.nn.initializers.glorot_uniform()
    dense = Dense(in_dim, out_dim, key=key, use_bias=True, init=init, canon=canon)
    dense.bias = nnx.Param(1e-6 * jax.random.normal(bias_key, (out_dim,), jnp.float32))
    return dense
