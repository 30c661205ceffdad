"""NNX modules shared by all stacks: dense, embedding, norm, feed-forward, dropout.

Modules compute in the dtype of their input and hold float32 parameters. They are pure: they keep no
random state (`dropout_key=None` means deterministic), and a call changes nothing.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convt5 import errors
from convt5.modeling.canon import NO_CANON, Along, Canon, CanonConfig, CanonTaps, apply_canon
from convt5.ops.dense import dense

DropoutKey = PRNGKeyArray | None
NormKind = Literal["rms", "layer"]
MlpKind = Literal["relu", "gated_gelu", "gated_silu"]


def seed_key(seed: int) -> PRNGKeyArray:
    """Returns a distinct key for each 64-bit integer; `jax.random.key` drops the upper 32 bits."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key


class Dense(nnx.Module):
    """y = x @ kernel + bias, kernel [in, out]; truncated normal of scale 1/sqrt(in) as in T5.

    If `canon` is given, a Canon layer convolves y along the sequence.
    """

    canon: Canon | None

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        key: PRNGKeyArray,
        use_bias: bool = False,
        init: jax.nn.initializers.Initializer | None = None,
        canon: CanonTaps | None = None,
    ):
        init = init or truncated_normal(in_dim**-0.5)
        self.kernel = nnx.Param(init(key, (in_dim, out_dim), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((out_dim,), jnp.float32)) if use_bias else None
        self.canon = None if canon is None else canon.build(out_dim, key=key)

    def __call__(
        self, x: Float[Array, "*batch in"], along: Along | None = None
    ) -> Float[Array, "*batch out"]:
        y = dense(x, self.kernel[...].astype(x.dtype))
        y = y if self.bias is None else add_vector(y, self.bias[...])
        return apply_canon(self.canon, y, along)


class Embed(nnx.Module):
    """An embedding table; initialised from a normal of scale 1 as in T5."""

    def __init__(self, rows: int, emb_dim: int, *, key: PRNGKeyArray):
        self.embedding = nnx.Param(jax.random.normal(key, (rows, emb_dim), jnp.float32))

    def __call__(
        self, ids: Int[Array, "batch length"], *, dtype: jnp.dtype
    ) -> Float[Array, "batch length embed"]:
        # An 8-bit index cannot be compared with the length of a longer table.
        ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
        return self.embedding[...].at[ids].get(mode="clip").astype(dtype)

    def attend(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length vocab"]:
        """Returns the product of x with every row, accumulated in at least float32."""
        return jnp.einsum(
            "ble,ve->blv",
            x,
            self.embedding[...].astype(x.dtype),
            preferred_element_type=at_least_float32(x.dtype),
        )


class Norm(nnx.Module):
    """Root-mean-square norm of T5 ("rms"), or layer norm with mean and bias ("layer")."""

    def __init__(self, dim: int, *, kind: NormKind = "rms", epsilon: float = 1e-6):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if kind == "layer" else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(at_least_float32(x.dtype))
        if self.bias is not None:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.epsilon)
        y = y * as_row(self.scale[...].astype(y.dtype), y.ndim)
        if self.bias is not None:
            y = add_vector(y, self.bias[...])
        return y.astype(x.dtype)


class Mlp(nnx.Module):
    """Feed-forward layer: relu(x wi) wo of T5 1.0, or (a(x wi_0) * (x wi_1)) wo.

    a is GELU in T5 1.1 and SiLU in UL2.
    """

    def __init__(
        self,
        emb_dim: int,
        mlp_dim: int,
        *,
        kind: MlpKind,
        use_bias: bool,
        dropout_rate: float,
        canon: CanonConfig = NO_CANON,
        cross_segments: bool = False,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 3)

        def inward(name: str, key: PRNGKeyArray) -> Dense:
            taps = canon.canon_at("D", name, cross_segments=cross_segments)
            return Dense(emb_dim, mlp_dim, key=key, use_bias=use_bias, canon=taps)

        if kind != "relu":
            self.wi_0, self.wi_1 = inward("wi_0", keys[0]), inward("wi_1", keys[1])
        else:
            self.wi = inward("wi", keys[0])
        self.wo = Dense(mlp_dim, emb_dim, key=keys[2], use_bias=use_bias)
        self.kind = kind
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        along: Along | None = None,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        if self.kind == "relu":
            hidden = jax.nn.relu(self.wi(x, along))
        elif self.kind == "gated_gelu":
            hidden = jax.nn.gelu(self.wi_0(x, along), approximate=True) * self.wi_1(x, along)
        else:
            hidden = jax.nn.silu(self.wi_0(x, along)) * self.wi_1(x, along)
        # batch length mlp
        return self.wo(dropout(hidden, self.dropout_rate, dropout_key))


def dropout(
    x: Float[Array, "batch length *rest"], rate: float, key: DropoutKey
) -> Float[Array, "batch length *rest"]:
    """Zeroes features with probability `rate` and scales the rest by 1 / (1 - rate).

    All positions of a row share one mask, as in T5, so its cost does not grow with length.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0], 1, *x.shape[2:]))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def drop_tokens(
    x: Float[Array, "batch length embed"], rate: float, key: DropoutKey
) -> Float[Array, "batch length embed"]:
    """Zeroes whole positions with probability `rate` (Iyyer et al. 2015, section 3.2).

    The others are not scaled: a token that is read is the same in training and in evaluation.
    """
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, (*x.shape[:2], 1))
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


def split_key(key: DropoutKey, num: int) -> tuple[DropoutKey, ...]:
    """Splits a key into `num` keys; None, which means deterministic, stays None."""
    return (None,) * num if key is None else tuple(jax.random.split(key, num))


def build_layers(
    build: Callable[[Any, PRNGKeyArray], nnx.Module], configs: Sequence[Any], key: PRNGKeyArray
) -> nnx.List:
    """Builds a layer for each description, each with its own random numbers.

    Under a trace, such as that of `jax.jit`, one loop builds all layers of equal descriptions. The
    program is compiled in a fraction of the time, and its values are the same.

    Args:
        build: builds a layer from its description and a key.
        configs: descriptions of the layers, bottom first.
        key: random key of all layers.
    """
    keys = jax.random.split(key, len(configs))
    if not isinstance(key, Tracer):
        # JAX keeps the program of each operation, but would compile a loop anew every time.
        return nnx.List([build(config, keys[i]) for i, config in enumerate(configs)])
    layers: dict[int, nnx.Module] = {}
    for config in dict.fromkeys(configs):
        places = [i for i, other in enumerate(configs) if other == config]
        stacked = jax.lax.map(functools.partial(build, config), keys[np.array(places)])
        for n, place in enumerate(places):
            layers[place] = jax.tree.map(operator.itemgetter(n), stacked)
    return nnx.List([layers[place] for place in range(len(configs))])


def truncated_normal(stddev: float) -> jax.nn.initializers.Initializer:
    """Returns T5's normal initialiser of nominal `stddev`, truncated at two without correction."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding  # `sharding` decides where parameters live.
        return stddev * jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype)

    return init


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which softmax, norms and sums of `dtype` values are computed."""
    return jnp.promote_types(dtype, jnp.float32)


def check_dtype(name: str) -> None:
    """Raises `UserError` for a dtype that JAX would silently replace by a narrower one."""
    if jax.dtypes.canonicalize_dtype(name) != jnp.dtype(name):
        raise errors.UserError(
            f"dtype={name!r} needs numbers of 64 bits, which JAX computes with only where it is "
            "asked to; set the environment variable JAX_ENABLE_X64=1, or dtype='float32'."
        )


def as_row(vector: Float[Array, " dim"], ndim: int) -> Float[Array, "..."]:
    """Prepends axes of size one to a vector, so that it broadcasts against `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def add_vector(
    x: Float[Array, "*batch dim"], vector: Float[Array, " dim"]
) -> Float[Array, "*batch dim"]:
    return x + as_row(vector.astype(x.dtype), x.ndim)
