"""T5 self-attention as a mixing kind: the baseline transformer."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from convt5.modeling import attention
from convt5.modeling.attention import Attention, AttentionState
from convt5.modeling.layers import DropoutKey
from convt5.modeling.mixers import base
from convt5.modeling.mixers.base import MixerConfig, Position, Reach
from convt5.modeling.sizes import ModelSizes, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttentionConfig(MixerConfig):
    """Self-attention; its sizes are those of the model."""

    kind = "attention"
    reads_distances = True
    sharding_rules = attention.sharding_rules("mixing")

    @property
    def reach(self) -> Reach:
        return Reach(None, 0 if self.causal else None)

    def projections(self, sizes: ModelSizes) -> dict[str, int]:
        inner = sizes.num_heads * sizes.head_dim
        return {"query": inner, "key": inner, "value": inner}

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> "SelfAttention":
        return SelfAttention(self, sizes, key=key)

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        return attention.flops(sizes, queries=length, keys=length) / length

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        return attention.activation_bytes(sizes, queries=length, keys=length) / length

    def state_size(self, sizes: ModelSizes, length: int) -> int:
        return attention.cache_size(sizes, length)


class SelfAttention(Attention, base.Mixer):
    """Attention of a sequence to itself; decoding caches the keys and values of each position."""

    def __init__(self, config: SelfAttentionConfig, sizes: ModelSizes, *, key: PRNGKeyArray):
        super().__init__(sizes, canon=config, key=key)
        self.causal = config.causal

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: base.StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        return self.attend(
            x,
            x,
            inputs.segment_ids,
            inputs.segment_ids,
            causal=self.causal,
            distance_bias=inputs.distance_bias,
            along=inputs,
            dropout_key=dropout_key,
        )

    def init_state(
        self, batch: Size, length: int, emb_dim: int, dtype: jnp.dtype
    ) -> AttentionState:
        return self.empty_cache(batch, length, dtype)

    def step(
        self, x: Float[Array, "batch 1 embed"], state: AttentionState, position: Position
    ) -> tuple[Float[Array, "batch 1 embed"], AttentionState]:
        return self.append(x, state, position.index, bias=position.bias, along=position)

    def room(self, state: AttentionState) -> int:
        return state.keys.shape[-1]
