"""The transformer of ViT: blocks of attention and feed-forward, pre-norm, with biases."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.modeling.layers import Dense, Norm, at_least_float32
from convt5.vision.description import ViTDescription


class QueryKeyValue(nnx.Module):
    """The input projection of attention, to queries, keys and values at once.

    Its kernel [embed, 3, embed] is Xavier uniform as one matrix [embed, 3 * embed], as in torch.
    """

    def __init__(self, emb_dim: int, *, key: PRNGKeyArray):
        init = jax.nn.initializers.glorot_uniform()
        kernel = init(key, (emb_dim, 3 * emb_dim), jnp.float32)
        self.kernel = nnx.Param(kernel.reshape(emb_dim, 3, emb_dim))
        self.bias = nnx.Param(jnp.zeros((3, emb_dim), jnp.float32))

    def __call__(
        self, x: Float[Array, "batch length embed"]
    ) -> Float[Array, "three batch length embed"]:
        y = jnp.einsum("ble,ecd->cbld", x, self.kernel[...].astype(x.dtype))
        return y + self.bias[...].astype(x.dtype)[:, None, None]


class Attention(nnx.Module):
    """Self-attention of all tokens, scaled by 1 / sqrt(head width), softmax in at least float32."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        input_key, output_key = jax.random.split(key)
        dim = config.emb_dim
        self.input = QueryKeyValue(dim, key=input_key)
        self.output = Dense(
            dim, dim, key=output_key, use_bias=True, init=symmetric_uniform(dim**-0.5)
        )
        self.num_heads = config.num_heads

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        projected = self.input(x)
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
        self.wi = _dense(config.emb_dim, config.mlp_dim, key=keys[0], bias_key=keys[1])
        self.wo = _dense(config.mlp_dim, config.emb_dim, key=keys[2], bias_key=keys[3])

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        return self.wo(jax.nn.gelu(self.wi(x), approximate=False))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = norm(config)
        self.attention = Attention(config, key=attention_key)
        self.mlp_norm = norm(config)
        self.mlp = Mlp(config, key=mlp_key)

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Encoder(nnx.Module):
    """The blocks, and the norm that ends them."""

    def __init__(self, config: ViTDescription, *, key: PRNGKeyArray):
        keys = jax.random.split(key, config.num_layers)
        # Any: a list of modules has no element type.
        self.layers: Any = nnx.List([Block(config, key=key) for key in keys])
        self.final_norm = norm(config)

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)


def norm(config: ViTDescription) -> Norm:
    """Returns the layer norm of a model."""
    return Norm(config.emb_dim, kind="layer", epsilon=config.norm_epsilon)


def symmetric_uniform(limit: float) -> jax.nn.initializers.Initializer:
    """Uniform between -limit and limit."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding  # Shardings are decided outside the modules.
        return jax.random.uniform(key, shape, dtype, -limit, limit)

    return init


def _dense(in_dim: int, out_dim: int, *, key: PRNGKeyArray, bias_key: PRNGKeyArray) -> Dense:
    """A dense layer of the MLP: Xavier uniform, and biases that are nearly zero."""
    dense = Dense(
        in_dim, out_dim, key=key, use_bias=True, init=jax.nn.initializers.glorot_uniform()
    )
    dense.bias = nnx.Param(1e-6 * jax.random.normal(bias_key, (out_dim,), jnp.float32))
    return dense
