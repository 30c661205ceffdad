"""T5 attention: the layer, its cache for decoding, relative position bias and costs.

Decoder layers use it for encoder-decoder attention, whatever mixes their own sequence.
`mixers.attention` makes it a mixing kind.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5.modeling.canon import NO_CANON, Along, CanonConfig
from convt5.modeling.layers import Dense, DropoutKey, at_least_float32
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes, Size
from convt5.ops import attend

FLOAT32_BYTES = 4
_FARTHEST = 2**31 - 1  # Distances have 32 bits.


class AttentionState(NamedTuple):
    """Keys and values of the positions decoded so far, in order.

    Their layout is the one that products with a single query read, and a batch of one row has no
    batch axis. With any other layout, CPUs copy the whole cache at each step.
    """

    keys: Float[Array, "*batch heads head_dim length"]
    values: Float[Array, "*batch heads length head_dim"]


class Attention(nnx.Module):
    """T5 attention: no biases, no 1/sqrt(head_dim) factor (the initial query scale includes it)."""

    def __init__(self, sizes: ModelSizes, *, canon: CanonConfig = NO_CANON, key: PRNGKeyArray):
        emb, heads, head_dim = sizes.emb_dim, sizes.num_heads, sizes.head_dim
        keys = jax.random.split(key, 4)
        inner = heads * head_dim

        def projection(name: str, stddev: float, key: PRNGKeyArray) -> Dense:
            init = jax.nn.initializers.normal(stddev)
            taps = canon.canon_at("B", name, cross_segments=sizes.taps_cross_segments)
            return Dense(emb, inner, key=key, init=init, canon=taps)

        self.query = projection("query", (emb * head_dim) ** -0.5, keys[0])
        self.key = projection("key", emb**-0.5, keys[1])
        self.value = projection("value", emb**-0.5, keys[2])
        self.output = Dense(inner, emb, key=keys[3], init=jax.nn.initializers.normal(inner**-0.5))
        self.num_heads = heads
        self.dropout_rate = sizes.dropout_rate

    def attend(
        self,
        x: Float[Array, "rows target embed"],
        memory: Float[Array, "batch source embed"],
        segment_ids: Int[Array, "rows target"],
        memory_segment_ids: Int[Array, "batch source"],
        *,
        causal: bool = False,
        distance_bias: Float[Array, "heads distances"] | None = None,
        along: Along | None = None,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "rows target embed"]:
        """Attends from x to the memory positions of the same segment; see `ops.attend`.

        Each row of memory serves an equal number of adjacent rows of x: exactly one where attention
        is causal or has a bias. Canon layers convolve along the sequence `along`.
        """
        keys, values = self._keys_and_values(memory, along)
        if dropout_key is not None and self.dropout_rate > 0.0:
            # One dropout mask over the weights for all queries, as in T5: equal to masking values.
            batch, source, heads, _ = values.shape
            dropout_mask = jax.random.bernoulli(
                dropout_key, 1.0 - self.dropout_rate, (batch, heads, source)
            )
            dropout_mask = jnp.swapaxes(dropout_mask, 1, 2)[..., None]
            values = jnp.where(dropout_mask, values / (1.0 - self.dropout_rate), 0.0)
        query = self._heads(self.query(x, along))
        together = memory.shape[0], _per_row(x, memory) * x.shape[1]
        y = attend(
            query.reshape(*together, *query.shape[2:]),
            keys,
            values,
            segment_ids.reshape(together),
            memory_segment_ids,
            causal=causal,
            distance_bias=distance_bias,
        )
        return self.output(y.reshape(*x.shape[:2], y.shape[2] * y.shape[3]))

    def memory_state(self, memory: Float[Array, "batch source embed"]) -> AttentionState:
        """Projects the whole memory once; decoding caches it for encoder-decoder attention."""
        keys, values = self._keys_and_values(memory)
        return AttentionState(keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3))

    def empty_cache(self, batch: Size, length: int, dtype: jnp.dtype) -> AttentionState:
        """Returns an empty self-attention cache with room for `length` positions."""
        head_dim = self.key.kernel[...].shape[1] // self.num_heads
        is_single = isinstance(batch, int) and batch == 1
        rows = () if is_single else (batch,)
        keys = jnp.zeros((*rows, self.num_heads, head_dim, length), dtype)
        return AttentionState(keys, keys.swapaxes(-2, -1))

    def append(
        self,
        x: Float[Array, "batch 1 embed"],
        state: AttentionState,
        position: Int[Array, " batch"],
        *,
        bias: Float[Array, "rows heads 1 length"] | None = None,
        along: Along | None = None,
    ) -> tuple[Float[Array, "batch 1 embed"], AttentionState]:
        """Appends the next position to the cache, and attends to all positions up to it."""
        key, value = self._keys_and_values(x, along)
        if state.keys.ndim == 3:
            state = AttentionState(
                jax.lax.dynamic_update_index_in_dim(state.keys, key[0, 0], position[0], 2),
                jax.lax.dynamic_update_index_in_dim(state.values, value[0, 0], position[0], 1),
            )
        else:
            rows = jnp.arange(x.shape[0])
            state = AttentionState(
                state.keys.at[rows, :, :, position].set(key[:, 0]),
                state.values.at[rows, :, position].set(value[:, 0]),
            )
        seen = jnp.arange(state.keys.shape[-1])[None, None] <= position[:, None, None]
        return self.read(x, state, seen, bias=bias, along=along), state

    def read(
        self,
        x: Float[Array, "rows 1 embed"],
        state: AttentionState,
        mask: Bool[Array, "batch 1 length"],
        *,
        bias: Float[Array, "batch heads 1 length"] | None = None,
        along: Along | None = None,
    ) -> Float[Array, "rows 1 embed"]:
        """Attends from one position to projected keys and values where `mask` is true.

        Each row of keys serves an equal number of adjacent rows of x in one product.
        """
        batch, rows = mask.shape[0], x.shape[0]
        query = self._heads(self.query(x, along))
        query = query.reshape(batch, _per_row(x, mask), *query.shape[2:]).swapaxes(1, 2)
        query = query.reshape(*state.keys.shape[:-2], *query.shape[2:])
        logits = jnp.einsum(
            "...qd,...dk->...qk",
            query,
            state.keys,
            preferred_element_type=at_least_float32(x.dtype),
        )
        # batch heads queries length
        logits = logits.reshape(batch, self.num_heads, *logits.shape[-2:])
        if bias is not None:
            logits = logits + bias.astype(logits.dtype)
        logits = jnp.where(mask[:, None], logits, -1e9)
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        weights = weights.reshape(*state.values.shape[:-2], *weights.shape[-2:])
        y = jnp.einsum("...qk,...kd->...qd", weights, state.values)
        y = y.reshape(batch, self.num_heads, *y.shape[-2:]).swapaxes(1, 2)
        return self.output(y.reshape(rows, 1, self.num_heads * y.shape[-1]))

    def _keys_and_values(
        self, x: Float[Array, "batch length embed"], along: Along | None = None
    ) -> tuple[
        Float[Array, "batch length heads head_dim"], Float[Array, "batch length heads head_dim"]
    ]:
        return self._heads(self.key(x, along)), self._heads(self.value(x, along))

    def _heads(
        self, x: Float[Array, "batch length inner"]
    ) -> Float[Array, "batch length heads head_dim"]:
        # Explicit sizes, here and above: -1 cannot be inferred for arrays without elements.
        return x.reshape(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)


def _per_row(x: Array, memory: Array) -> Size:
    """Returns the number of rows of x that each row of memory serves."""
    rows, batch = x.shape[0], memory.shape[0]
    if rows == batch:
        return 1
    if batch == 0 or rows % batch:
        raise ValueError(f"{rows} rows cannot share {batch} rows of memory evenly.")
    return rows // batch


class RelativeBias(nnx.Module):
    """T5's learned bias per head and bucket of relative position (Raffel et al. 2020)."""

    def __init__(
        self,
        *,
        buckets: int,
        heads: int,
        max_distance: int,
        bidirectional: bool,
        key: PRNGKeyArray,
    ):
        init = jax.nn.initializers.glorot_uniform()
        self.embedding = nnx.Param(init(key, (buckets, heads), jnp.float32))
        self.bidirectional = bidirectional
        self.max_distance = max_distance

    def __call__(
        self, query_positions: Int[Array, "rows target"], key_positions: Int[Array, " source"]
    ) -> Float[Array, "rows heads target source"]:
        distances = key_positions[None, None, :] - query_positions[:, :, None]
        return jnp.moveaxis(self._of(distances), -1, 1)

    def by_distance(self, target: int, source: int) -> Float[Array, "heads distances"]:
        """Returns the bias of each distance, key minus query, from 1 - target to source - 1."""
        return self._of(jnp.arange(1 - target, source)).T

    def _of(self, distances: Int[Array, "..."]) -> Float[Array, "... heads"]:
        table = self.embedding[...]
        buckets = relative_position_bucket(
            distances,
            bidirectional=self.bidirectional,
            num_buckets=table.shape[0],
            max_distance=self.max_distance,
        )
        return table[buckets]


def relative_position_bucket(
    relative_position: Int[Array, "..."],
    *,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
) -> Int[Array, "..."]:
    """Returns the bucket of key position minus query position (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each. The others grow logarithmically up to
    `max_distance`, and the last one holds all distances beyond. If bidirectional, each sign has
    half of the buckets.

    Args:
        relative_position: key position minus query position.
        bidirectional: whether keys may follow the query; if not, later keys count as distance 0.
        num_buckets: at least 2, or 4 if bidirectional.
        max_distance: larger than every distance that has its own bucket.

    Raises:
        ValueError: num_buckets or max_distance is too small.
    """
    offset = jnp.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        distance = jnp.maximum(-relative_position, 0)
    exact = num_buckets // 2
    if not 1 <= exact < max_distance:
        raise ValueError(
            f"max_distance={max_distance} must be above the {exact} distances that have a bucket "
            "of their own in each direction, at least 1."
        )
    # Float32 logarithms would put a distance at which a bucket begins on either side of it.
    begins = jnp.asarray(_begins(exact, num_buckets - exact, max_distance), jnp.int32)
    logarithmic = exact + jnp.searchsorted(begins, distance, side="right", method="compare_all")
    return offset + jnp.where(distance < exact, distance, logarithmic.astype(distance.dtype))


def _begins(exact: int, count: int, max_distance: int) -> list[int]:
    """Returns the first distance of each of `count` buckets that grow from `exact`, but the first.

    That of the k-th is the least that is at least exact * (max_distance / exact) ** (k / count).
    """
    growth = max_distance / exact
    # Whole numbers come out of float64 as such, or within a few of its digits.
    begins = [math.ceil(exact * growth ** (k / count) * (1 - 1e-12)) for k in range(1, count)]
    return [min(distance, _FARTHEST) for distance in begins]


def sharding_rules(name: str) -> tuple[Rule, ...]:
    """Returns the sharding rules of the parameters of an attention named `name` in its layer."""
    return (
        Rule(rf"{name}/(query|key|value)/kernel$", ("fsdp", "tensor"), optional=True),
        Rule(rf"{name}/output/kernel$", ("tensor", "fsdp"), optional=True),
    )


def flops(sizes: ModelSizes, *, queries: int, keys: int) -> int | float:
    """Returns the forward FLOPs of whole sequences: the projections and the two products."""
    inner = sizes.num_heads * sizes.head_dim
    return 4 * sizes.emb_dim * inner * (queries + keys) + 4 * queries * keys * inner


def activation_bytes(sizes: ModelSizes, *, queries: int, keys: int) -> int | float:
    """Returns the bytes that the backward pass of whole sequences reads.

    These are the inputs of the norm and of the queries, q, k, v, their result, and a float32
    logsumexp for each query and head; `ops.attend` recomputes the weights.
    """
    width = jnp.dtype(sizes.dtype).itemsize
    inner = sizes.num_heads * sizes.head_dim
    vectors = 2 * sizes.emb_dim * queries + 2 * inner * (queries + keys)
    return width * vectors + FLOAT32_BYTES * sizes.num_heads * queries


def cache_size(sizes: ModelSizes, length: int) -> int:
    """Returns the number of elements of the keys and values of `length` positions."""
    return 2 * length * sizes.num_heads * sizes.head_dim
