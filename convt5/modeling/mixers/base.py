"""Base classes of a mixing kind: a frozen description, and the module that it builds.

A kind of convt5 is one file of this folder and one line of the registry `mixers.KINDS`; any other
module may define further kinds (docs/mixers.md). The description answers all questions before
anything is built: the rules of its settings, its receptive field, its FLOPs and bytes, and the
sharding of its parameters.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convt5 import errors
from convt5.errors import checks
from convt5.modeling.canon import Canon, CanonConfig
from convt5.modeling.layers import DropoutKey
from convt5.modeling.sharding import Rule
from convt5.modeling.sizes import ModelSizes, Size

State = Any
"""The decoding state of a mixer: arrays with one row for each row of the batch, or `Shared`."""


class Shared(NamedTuple):
    """A part of a decoding state that is shared by all rows of the batch."""

    value: Array


def select_rows(state: State, rows: Int[Array, " rows"]) -> State:
    """Returns the state whose row i is row `rows[i]` of `state`, as beam search needs."""

    def select(leaf: Array | Shared) -> Array | Shared:
        return leaf if isinstance(leaf, Shared) else leaf[rows]

    return jax.tree.map(select, state, is_leaf=lambda leaf: isinstance(leaf, Shared))


class Reach(NamedTuple):
    """Positions read to the left and to the right of an output position; None means all."""

    left: int | None
    right: int | None

    @property
    def size(self) -> int | None:
        """The receptive field in positions, including the position itself; None if unbounded."""
        return None if self.left is None or self.right is None else self.left + 1 + self.right

    def then(self, above: "Reach") -> "Reach":
        """Returns the combined reach of this layer and a layer with reach `above` on top of it."""
        return Reach(_sum(self.left, above.left), _sum(self.right, above.right))

    def strided(self, stride: int) -> "Reach":
        """Returns this reach in tokens if each position represents `stride` tokens."""
        return Reach(
            None if self.left is None else self.left * stride,
            None if self.right is None else self.right * stride,
        )

    def __str__(self) -> str:
        left = "start" if self.left is None else f"{-self.left}"
        right = "end" if self.right is None else f"{self.right:+}" if self.right else "0"
        return f"{left} .. {right}"


class StackInputs(NamedTuple):
    """Inputs that all layers of a stack share, computed once.

    Attributes:
        segment_ids: the packed example of each position; 0 is padding.
        readable: where convolution taps may read; None means everywhere.
        distance_bias: the bias of self-attention by distance, or None.
        memory: the encoder's output, for a decoder.
        memory_segment_ids: the packed example of each memory position.
    """

    segment_ids: Int[Array, "batch length"]
    readable: Bool[Array, "batch length"] | None = None
    distance_bias: Float[Array, "heads distances"] | None = None
    memory: Float[Array, "batch source embed"] | None = None
    memory_segment_ids: Int[Array, "batch source"] | None = None

    def convolve(
        self, canon: Canon, x: Float[Array, "batch length channels"]
    ) -> Float[Array, "batch length channels"]:
        """Applies a Canon layer to the whole sequence."""
        y = canon(x, self.segment_ids, self.readable)
        if canon.taps.split:
            return y
        # Always y. XLA on TPU computes both products of a feed-forward layer as one, and writes no
        # hidden values, only where the first reads the result of an elementwise operation.
        is_any = self.segment_ids != jnp.iinfo(self.segment_ids.dtype).min
        return jnp.where(is_any[..., None], y, 0)


class Position(NamedTuple):
    """Inputs of a mixer for one decoding step.

    Attributes:
        index: the position in each row, from 0.
        readable: whether convolution taps may read this position; None means always.
        bias: the attention bias over all positions of the state, or None.
        canons: the states of the layer's Canon layers by name; each step replaces them.
    """

    index: Int[Array, " batch"]
    readable: Bool[Array, "batch 1"] | None = None
    bias: Float[Array, "rows heads 1 length"] | None = None
    canons: dict[str, Array] | None = None

    def convolve(
        self, canon: Canon, x: Float[Array, "batch 1 channels"]
    ) -> Float[Array, "batch 1 channels"]:
        """Applies a Canon layer to the next position, and replaces the layer's state."""
        if self.canons is None:
            raise ValueError("this position was not given the states of its layer's Canon layers")
        name = canon.taps.name
        y, self.canons[name] = canon.step(x, self.canons[name], self.readable)
        return y


class Mixer(nnx.Module):
    """A module in place of self-attention; its attributes name its parameters.

    A subclass that leaves out one of the first three methods, or declares other parameters than are
    given to it, raises `UserError` when it is defined.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        faults = _missing(cls, Mixer, ("__call__", "init_state", "step"))
        errors.raise_all(faults or checks.signature_faults(cls, Mixer), where=full_name(cls))

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
        """Mixes the next position; gives the same numbers as a call on the whole sequence."""
        raise NotImplementedError

    def room(self, state: State) -> int | None:
        """Returns how many positions a state has room for, or None if it does not grow."""
        return None


_ANSWERS = ("reach", "build", "flops", "activation_bytes", "state_size")
"""What every kind must define."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(CanonConfig):
    """How one layer mixes along the sequence. Kinds add their settings as fields.

    Every kind also has the settings of the layer's Canon layers (`canon`). Defining a class with a
    `kind` makes the kind known; it raises `UserError` if the name is taken or a method is missing.

    Attributes:
        causal: whether an output reads only its own and earlier positions, as in a decoder.
    """

    causal: bool = False

    kind: ClassVar[str]
    """The name of the kind in gin files."""

    reads_distances: ClassVar[bool] = False
    """Whether the relative positions of a model are a bias of this kind."""

    unused: ClassVar[tuple[str, ...]] = ()
    """Settings that the kind inherits but does not use."""

    sharding_rules: ClassVar[tuple[Rule, ...]] = ()
    """Sharding rules of the parameters, whose names begin with `mixing/`."""

    stacked_parameters: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names below `mixing/` of arrays that stack parameters along their first axis;
    see `AdafactorConfig.stacked`."""

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if hasattr(cls, "kind"):
            _define(cls)

    def __post_init__(self):
        checks.make_plain(self)

    def described(self) -> dict[str, Any]:
        """Returns what `revive` reads: the kind, the module that defines it, and its settings."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, "module": type(self).__module__, "settings": settings}

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
        """The combined reach of the mixing and of the layer's Canon layers."""
        return self.reach.then(Reach(*self.canon_reach))

    def projections(self, sizes: ModelSizes) -> dict[str, int]:
        """Returns the number of channels of each projection that a Canon layer at B convolves.

        The module builds these dense layers with `canon_at("B", name)`, and calls them with the
        sequence or the decoding position.
        """
        return {}

    def canon_channels(self, sizes: ModelSizes) -> int:
        """Returns the total channels of the layer's Canon layers."""
        hidden = (1 if sizes.mlp == "relu" else 2) * sizes.mlp_dim
        widths = {"A": sizes.emb_dim, "C": sizes.emb_dim, "D": hidden}
        if "B" in self.canon:
            widths["B"] = sum(self.projections(sizes).values())
        return sum(widths[place] for place in self.canon)

    def build(self, sizes: ModelSizes, *, key: PRNGKeyArray) -> Mixer:
        """Returns the module with random parameters."""
        raise NotImplementedError

    def flops(self, sizes: ModelSizes, length: int) -> int | float:
        """Returns the forward FLOPs per token of a row of `length` tokens."""
        raise NotImplementedError

    def activation_bytes(self, sizes: ModelSizes, length: int) -> int | float:
        """Returns the bytes that the backward pass reads per token of a row of `length` tokens."""
        raise NotImplementedError

    def state_size(self, sizes: ModelSizes, length: int) -> int:
        """Returns the number of elements that decoding keeps for a row of `length` tokens."""
        raise NotImplementedError

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every broken rule that involves several settings; `where` names the layer.

        Rules of single settings are declared with the fields, and checked by the stack.
        """
        return []


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


_defined: dict[str, type[MixerConfig]] = {}
"""Every kind that this process has defined, by name."""


def _define(kind: type[MixerConfig]) -> None:
    """Makes a kind known; raises `UserError` if its name is taken or something is missing."""
    name, own_name = kind.kind, full_name(kind)
    known = _defined.get(str(name))
    if known is not None and full_name(known) == own_name:
        if issubclass(kind, known):
            return  # Gin derives a class from each that it calls.
        known = None  # It is defined again, as in a notebook.
    faults = _missing(kind, MixerConfig, _ANSWERS) or checks.signature_faults(kind, MixerConfig)
    if not (isinstance(name, str) and name.isidentifier()):
        faults.append(f"kind={name!r} must be a name of letters, digits and underscores.")
    if known is not None:
        faults.append(f"kind={name!r} is the name of {full_name(known)}; choose another.")
    is_ours = kind.__module__.startswith("convt5.")
    stacked = {pattern for other in _defined.values() for pattern in other.stacked_parameters}
    if not is_ours and not stacked.issuperset(kind.stacked_parameters):
        faults.append(
            f"stacked_parameters={kind.stacked_parameters!r} has no effect outside of convt5; "
            "bind `stacked` of the optimizer instead."
        )
    errors.raise_all(faults, where=own_name)
    _defined[name] = kind


def _missing(subclass: type, base: type, names: tuple[str, ...]) -> list[str]:
    """Returns a sentence if a class does not define what its base only declares."""
    missing = [name for name in names if getattr(subclass, name) is getattr(base, name)]
    return [f"it must define {', '.join(missing)}; see {full_name(base)}."] if missing else []


def full_name(value: type) -> str:
    """Returns the name of a class with its module."""
    return f"{value.__module__}.{value.__qualname__}"


def revive(described: Any) -> Any:
    """Returns the mixing of which `MixerConfig.described` is the description.

    Returns the name of a kind unchanged. Imports nothing: importing a module runs it.

    Raises:
        UserError: no module that this process has imported defines the kind, or it has no such
            settings.
    """
    if not isinstance(described, Mapping):
        return described
    name, module, settings = (described.get(key) for key in ("kind", "module", "settings"))
    kind = _defined.get(str(name))
    if kind is None:
        module = str(module)[:60]
        raise errors.UserError(
            f"the mixing kind {errors.clip(name)} is defined in the module {module}, which convt5 "
            "does not import by itself, because an import runs code. If you trust it, name it, "
            f"--trust={module}, where Python finds it (in the working directory, or with "
            "PYTHONPATH=FOLDER); in a program, import it first."
        )
    if module != kind.__module__:
        warnings.warn(
            f"the mixing kind {name} of the model is that of the module {errors.clip(module)}; "
            f"{full_name(kind)} takes its place",
            stacklevel=2,
        )
    known = [field.name for field in dataclasses.fields(kind)]
    settings = settings if isinstance(settings, Mapping) else {}
    unknown = (
        f"setting {errors.clip(setting)} is unknown.{errors.suggest(setting, known)}"
        for setting in settings.keys() - set(known)
    )
    errors.raise_all(unknown, where=f"the mixing kind {name}")
    return kind(**settings)


def kinds_among(values: Mapping[str, Any]) -> dict[str, type[MixerConfig]]:
    """Returns the mixing kinds among the values of a module, by their name in gin files.

    Raises:
        TypeError: two kinds declare a setting of the same name differently.
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
