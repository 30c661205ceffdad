"""Canon layers: short residual convolutions beside attention and feed-forward layers.

y[t] = h[t] + sum_j w[j] h[t - j * dilation], j = 0..K-1, separately for each channel (Allen-Zhu
2025, arXiv 2512.17351), at any of four places of a layer with any mixing kind.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5.errors import rules
from convt5.errors.rules import ruled
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import Size
from convt5.ops import depthwise_conv, pad_widths
from convt5.ops.masking import zero_unless

PLACES = "ABCD"
SPLIT_PLACES = "BD"
"""Places whose channels the mesh axis "tensor" splits, like those of the layers they follow."""

CanonActivation = Literal["none", "silu"]

sharding_rules = (
    Rule(r"_canon/(kernel|bias)$", optional=True),
    Rule(r"/canon/(\w+/)?kernel$", (None, "tensor"), optional=True),
    Rule(r"/canon/(\w+/)?bias$", ("tensor",), optional=True),
)
"""Sharding rules: A and C read the residual stream, which is replicated; B and D split channels."""

stacked_parameters = (r"(_|/)canon/(\w+/)?kernel$",)
"""Patterns of arrays that stack one parameter per tap; see `AdafactorConfig.stacked`."""

_KEY_NUMBER = 2**16
"""Folded into the random key of the layer that a Canon layer belongs to.

`split` uses the lowest numbers, so adding Canon layers changes no other initial parameter.
"""


def _places(value: object) -> str:
    is_set = isinstance(value, str) and set(value) <= set(PLACES) and len(set(value)) == len(value)
    return "" if is_set else "must name places among A, B, C and D, each once, such as 'ABCD'."


class CanonTaps(NamedTuple):
    """The parameters of one Canon layer.

    Attributes:
        name: unique in its layer: the name of the layer that it precedes or the projection that it
            follows.
        kernel_size, dilation, padding, bias, activation: see `CanonConfig`.
        split: whether the mesh axis "tensor" splits its channels.
        cross_segments: whether its taps read other packed examples.
    """

    name: str
    kernel_size: int
    dilation: int
    padding: str
    bias: bool
    activation: CanonActivation
    split: bool
    cross_segments: bool

    def build(self, channels: int, *, key: PRNGKeyArray) -> "Canon":
        """Builds the module; `key` is that of the layer it belongs to."""
        return Canon(self, channels, key=jax.random.fold_in(key, _KEY_NUMBER))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanonConfig:
    """The Canon layers of one layer of a model.

    Attributes:
        canon: their places, any of "ABCD"; "" means none. A: before the mixing, after its norm. B:
            on the projections of the mixing: queries, keys and values, or the inputs of the gate of
            a convolution block. C: before the feed-forward layer, after its norm. D: on the hidden
            units of the feed-forward layer, before their activation (both halves if gated).
        canon_kernel_size: number of taps K.
        canon_dilation: distance between taps; 1 means adjacent.
        canon_padding: "CAUSAL" reads the position and those before it, as published. "CENTERED",
            for encoders, is as in the convolutional mixers.
        canon_bias: adds a bias to the sum over the taps.
        canon_activation: "silu" of that sum, or "none" as published. The residual is added after
            it.
    """

    canon: str = ruled(_places, default="", per_layer=True)
    canon_kernel_size: int = ruled(rules.count, default=4, per_layer=True)
    canon_dilation: int = ruled(rules.count, default=1, per_layer=True)
    canon_padding: str = ruled(rules.choice("CAUSAL", "CENTERED"), default="CAUSAL")
    canon_bias: bool = ruled(rules.switch, default=False)
    canon_activation: CanonActivation = ruled(rules.choice(CanonActivation), default="none")

    def canon_at(self, place: str, name: str, *, cross_segments: bool = False) -> CanonTaps | None:
        """Returns the Canon layer at `place`, or None if there is none."""
        if place not in self.canon:
            return None
        return CanonTaps(
            name=name,
            kernel_size=self.canon_kernel_size,
            dilation=self.canon_dilation,
            padding=self.canon_padding,
            bias=self.canon_bias,
            activation=self.canon_activation,
            split=place in SPLIT_PLACES,
            cross_segments=cross_segments,
        )

    @property
    def canon_summary(self) -> str:
        """A short description of the Canon layers."""
        taps = f"K={self.canon_kernel_size}"
        taps += f", dilation {self.canon_dilation}" if self.canon_dilation > 1 else ""
        return f"{self.canon} ({taps}, {self.canon_padding.lower()})"

    @property
    def canon_reach(self) -> tuple[int, int]:
        """The combined reach of a layer's Canon layers to the left and right, in positions.

        Each reads the outputs of those below it, so their reaches add up.
        """
        widths = pad_widths(self.canon_kernel_size, self.canon_dilation, self.canon_padding)
        left, right = (len(self.canon) * width for width in widths)
        return left, right

    @property
    def canon_slots(self) -> int:
        """Positions that decoding keeps for each Canon layer."""
        return (self.canon_kernel_size - 1) * self.canon_dilation


NO_CANON = CanonConfig()


def without_places(settings: Any, where: str) -> list[str]:
    """Returns a sentence for each changed setting of Canon layers, if none has a place.

    Args:
        settings: has those of `CanonConfig`, each one value or a list by layers.
        where: stands before their names.
    """
    if any(settings.canon):
        return []
    changed = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(CanonConfig)
        if field.name != "canon" and getattr(settings, field.name) != field.default
    }
    return [
        f"{where}{name}={value!r} has no effect: there are no Canon layers; name their places in "
        f"{where}canon."
        for name, value in changed.items()
    ]


class Canon(nnx.Module):
    """One Canon layer.

    Taps are initialised uniformly between -1/sqrt(K) and 1/sqrt(K), biases with zero, as in the
    authors' code (facebookresearch/PhysicsLM4, `canon_helper.py`: the defaults of torch's Conv1d).
    """

    def __init__(self, taps: CanonTaps, channels: int, *, key: PRNGKeyArray):
        limit = taps.kernel_size**-0.5
        shape = (taps.kernel_size, channels)
        self.kernel = nnx.Param(jax.random.uniform(key, shape, jnp.float32, -limit, limit))
        self.bias = nnx.Param(jnp.zeros((channels,), jnp.float32)) if taps.bias else None
        self.taps = taps

    def __call__(
        self,
        x: Float[Array, "batch length channels"],
        segment_ids: Int[Array, "batch length"],
        readable: Bool[Array, "batch length"] | None = None,
    ) -> Float[Array, "batch length channels"]:
        """Convolves whole sequences; taps read zero at padding and where `readable` is false."""
        read = zero_unless(readable, x)
        y = depthwise_conv(
            read,
            self._kernel(),
            dilation=self.taps.dilation,
            padding=self.taps.padding,
            segment_ids=segment_ids,
            taps_cross_segments=self.taps.cross_segments,
            split_channels=self.taps.split,
        )
        return self._add_residual(x, read, y)

    def init_state(self, batch: Size, dtype: jnp.dtype) -> Float[Array, "batch slots channels"]:
        """Returns the inputs before the first position, oldest first: zeros."""
        slots = (self.taps.kernel_size - 1) * self.taps.dilation
        return jnp.zeros((batch, slots, self.kernel.shape[1]), dtype)

    def step(
        self,
        x: Float[Array, "batch 1 channels"],
        state: Float[Array, "batch slots channels"],
        readable: Bool[Array, "batch 1"] | None = None,
    ) -> tuple[Float[Array, "batch 1 channels"], Float[Array, "batch slots channels"]]:
        """Convolves the next position with causal taps; returns the output and the next state."""
        read = zero_unless(readable, x)
        window = jnp.concatenate([state, read], axis=1)
        kernel = self._kernel()
        kernel = kernel.astype(jnp.promote_types(x.dtype, kernel.dtype))
        # batch taps channels
        seen = window[:, :: self.taps.dilation].astype(kernel.dtype)
        y = jnp.sum(seen * kernel[None], axis=1, keepdims=True).astype(x.dtype)
        return self._add_residual(x, read, y), window[:, 1:]

    def _kernel(self) -> Float[Array, "taps channels"]:
        """Returns the taps.

        Without an activation, the residual is included in the current tap, which saves a pass over
        the inputs.
        """
        kernel = self.kernel[...]
        if self.taps.activation != "none":
            return kernel
        left, _ = pad_widths(self.taps.kernel_size, self.taps.dilation, self.taps.padding)
        return kernel.at[left // self.taps.dilation].add(1.0)

    def _add_residual(self, x, read, y):
        """Adds the residual to a sum over the taps, unless the taps include it."""
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None, None]
        if self.taps.activation != "none":
            return x + jax.nn.silu(y)
        return y if read is x else y + (x - read)


@runtime_checkable
class Along(Protocol):
    """The sequence that Canon layers convolve: a whole one, or the positions decoded so far."""

    def convolve(
        self, canon: Canon, x: Float[Array, "batch length channels"]
    ) -> Float[Array, "batch length channels"]: ...


def apply_canon(
    canon: Canon | None, x: Float[Array, "*batch channels"], along: Along | None
) -> Float[Array, "*batch channels"]:
    """Returns the output of a Canon layer, or x if there is none."""
    if canon is None:
        return x
    if along is None:
        raise ValueError(f"the Canon layer at {canon.taps.name} was not told its sequence")
    return along.convolve(canon, x)


def canons_of(module: nnx.Module) -> dict[str, Canon]:
    """Returns the Canon layers of a layer by name."""
    canons = [part for _, part in nnx.iter_modules(module) if isinstance(part, Canon)]
    return {canon.taps.name: canon for canon in canons}
