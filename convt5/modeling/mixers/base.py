"""What every mixing kind is: a frozen description, and the module that it builds.

A kind is one file of this folder and one line of the registry `mixers.KINDS`. Descriptions answer
everything that is asked of a kind before anything is built: the rules of its settings, its
receptive field, its FLOPs and bytes, and where its parameters live on a mesh.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5.modeling.canon import Canon, CanonConfig
from convt5.modeling.layers import DropoutKey
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes, Size

State = Any
"""The arrays that a mixer keeps while decoding: one row for each row of the batch, or `Shared`."""


class Shared(NamedTuple):
    """A part of a decoding state that all rows of the batch share."""

    value: Array


def select_rows(state: State, rows: Int[Array, " rows"]) -> State:
    """Returns the state whose row i is row `rows[i]` of `state`, as beams take over another's."""

    def select(leaf: Array | Shared) -> Array | Shared:
        return leaf if isinstance(leaf, Shared) else leaf[rows]

    return jax.tree.map(select, state, is_leaf=lambda leaf: isinstance(leaf, Shared))


class Reach(NamedTuple):
    """Positions read to the left and to the right of an output position; None for all of them."""

    left: int | None
    right: int | None

    @property
    def size(self) -> int | None:
        """The receptive field in tokens, the position itself included; None for everything."""
        return None if self.left is None or self.right is None else self.left + 1 + self.right

    def then(self, above: "Reach") -> "Reach":
        """Returns the reach of a layer with reach `above` on top of this one."""
        return Reach(_sum(self.left, above.left), _sum(self.right, above.right))

    def strided(self, stride: int) -> "Reach":
        """Returns this reach in tokens, where each position stands for `stride` of them."""
        return Reach(
            None if self.left is None else self.left * stride,
            None if self.right is None else self.right * stride,
        )

    def __str__(self) -> str:
        left = "start" if self.left is None else f"{-self.left}"
        right = "end" if self.right is None else f"{self.right:+}" if self.right else "0"
        return f"{left} .. {right}"


class StackInputs(NamedTuple):
    """What every layer of a stack is told about its sequence, computed once.

    Attributes:
        segment_ids: packed examples, 0 is padding.
        readable: where convolution taps may read; None for everywhere.
        distance_bias: self-attention's bias by distance; None without one.
        memory: the encoder's output, for a decoder.
        memory_segment_ids: the packed examples of the memory.
    """

    segment_ids: Int[Array, "batch length"]
    readable: Bool[Array, "batch length"] | None = None
    distance_bias: Float[Array, "heads distances"] | None = None
    memory: Float[Array, "batch source embed"] | None = None
    memory_segment_ids: Int[Array, "batch source"] | None = None

    def convolve(
        self, canon: Canon, x: Float[Array, "batch length channels"]
    ) -> Float[Array, "batch length channels"]:
        """Convolves the whole sequence; see `canon.Along`."""
        y = canon(x, self.segment_ids, self.readable)
        if canon.taps.split:
            return y
        # Always y. XLA on TPU computes both products of a feed-forward layer as one, and writes no
        # hidden values, only where the first reads the result of an elementwise operation.
        is_any = self.segment_ids != jnp.iinfo(self.segment_ids.dtype).min
        return jnp.where(is_any[..., None], y, 0)


class Position(NamedTuple):
    """What a mixer is told about one position while decoding.

    Attributes:
        index: of the position in each row, from 0.
        readable: whether convolution taps may read it; None for everywhere.
        bias: of attention, for the positions that its state has room for; None without one.
        canons: the states of the layer's Canon layers by name, which each replaces by the next.
    """

    index: Int[Array, " batch"]
    readable: Bool[Array, "batch 1"] | None = None
    bias: Float[Array, "rows heads 1 length"] | None = None
    canons: dict[str, Array] | None = None

    def convolve(
        self, canon: Canon, x: Float[Array, "batch 1 channels"]
    ) -> Float[Array, "batch 1 channels"]:
        """Convolves the next position; see `canon.Along`."""
        if self.canons is None:
            raise ValueError("this position was not given the states of its layer's Canon layers")
        name = canon.taps.name
        y, self.canons[name] = canon.step(x, self.canons[name], self.readable)
        return y


class Mixer(nnx.Module):
    """A module in the place of self-attention; its parameters are named by its attributes."""

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        inputs: StackInputs,
        *,
        dropout_key: DropoutKey = None,
    ) -> Float[Array, "batch length embed"]:
        """Mixes a whole sequence."""
        raise NotImplementedError

    def init_state(self, batch: Size, length: int, emb_dim: int, dtype: jnp.dtype) -> State:
        """Returns the state before the first of at most `length` positions."""
        raise NotImplementedError

    def step(
        self, x: Float[Array, "batch 1 embed"], state: State, position: Position
    ) -> tuple[Float[Array, "batch 1 embed"], State]:
        """Mixes the next position; gives the numbers that a call gives for it."""
        raise NotImplementedError

    def room(self, state: State) -> int | None:
        """Returns how many positions a state has room for that grows with the output."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(CanonConfig):
    """How one layer mixes along the sequence. Kinds add their settings as fields.

    The Canon layers of the layer are settings of every kind (`canon`).

    Attributes:
        causal: whether an output may read its own and earlier positions only, as in a decoder.
    """

    causal: bool = False

    kind: ClassVar[str]
    """The name of the kind in gin files."""

    reads_distances: ClassVar[bool] = False
    """Whether relative positions, where the model has them, are a bias of this kind."""

    sharding_rules: ClassVar[tuple[Rule, ...]] = ()
    """Where the parameters live, by patterns of the names behind `mixing/`."""

    stacked_parameters: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names, behind `mixing/`, of arrays that hold one parameter for each index of
    their first axis; `AdafactorConfig.stacked` says what that means."""

    @property
    def tap_columns(self) -> tuple[str, str, str]:
        """Taps, dilation and number of kernels, as `inspect` prints them."""
        return "-", "-", "-"

    @property
    def reach(self) -> Reach:
        """Positions read to the left and to the right of the output position."""
        raise NotImplementedError

    @property
    def layer_reach(self) -> Reach:
        """What a layer of this mixing reads, with its Canon layers."""
        return self.reach.then(Reach(*self.canon_reach))

    def projections(self, sizes: ModelSizes) -> dict[str, int]:
        """Returns the channels of the projections that Canon layers convolve at B, by name.

        The module makes these dense layers with `canon_at("B", name)`, and calls them with its
        inputs or its position.
        """
        return {}

    def canon_channels(self, sizes: ModelSizes) -> int:
        """Returns the channels of all Canon layers of a layer together."""
        hidden = (2 if sizes.mlp == "gated_gelu" else 1) * sizes.mlp_dim
        widths = {"A": sizes.emb_dim, "C": sizes.emb_dim, "D": hidden}
        if "B" in self.canon:
            widths["B"] = sum(self.projections(sizes).values())
        return sum(widths[place] for place in self.canon)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> Mixer:
        """Returns the module with random parameters."""
        raise NotImplementedError

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        """Returns the forward FLOPs for each token of a row of `length` tokens."""
        raise NotImplementedError

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        """Returns the bytes that the backward pass reads, for each token of such a row."""
        raise NotImplementedError

    def state_size(self, sizes: ModelSizes, length: int) -> int:
        """Returns how many numbers decoding keeps for a row of `length` tokens."""
        raise NotImplementedError

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every rule that its settings together break; `where` names the layer.

        Rules of single settings are declared with them, and checked by the stack that has them.
        """
        return []


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def kinds_among(values: Mapping[str, Any]) -> dict[str, type[MixerConfig]]:
    """Returns the descriptions among the names of a module, by the name of their kind.

    Raises:
        TypeError: two of them declare a setting of one name differently; a stack has but one.
    """
    kinds = {
        value.kind: value
        for value in values.values()
        if isinstance(value, type) and issubclass(value, MixerConfig) and hasattr(value, "kind")
    }
    declared: dict[str, tuple[str, Any]] = {}
    for name, kind in kinds.items():
        for field in dataclasses.fields(kind):
            owner, other = declared.setdefault(field.name, (name, field))
            if (field.default, field.metadata) != (other.default, other.metadata):
                raise TypeError(f"{name} and {owner} declare the setting {field.name} differently.")
    return kinds
