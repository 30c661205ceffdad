"""What a text model is made of: sizes, stem, and the mixing of each layer, without arrays.

Modules are built from these values, `inspect` computes receptive fields and costs from them, gin
files set them. Everything is checked here, before anything is allocated. `architecture` adds to
them what builds a model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from convt5 import errors
from convt5.errors import checks, rules
from convt5.errors.rules import ruled
from convt5.modeling.layers import MlpKind, NormKind
from convt5.modeling.mixers import KINDS
from convt5.modeling.mixers.base import MixerConfig

LayerOrder = Literal["pre", "branch", "post"]
Positions = Literal["none", "learned", "relative"]
StemNorm = Literal["rms", "layer", "none"]
StemActivation = Literal["relu", "gelu", "none"]
Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]
StackName = Literal["encoder", "decoder"]

T = TypeVar("T")
PerLayer = T | Sequence[T]
"""One value for all layers, or a sequence with exactly one value per layer."""

_MIXER_FIELDS = {
    field.name: field
    for kind in KINDS.values()
    for field in dataclasses.fields(kind)
    if field.name != "causal"
}
"""The settings of every mixing kind, which a stack gives to its layers."""


def _with_mixer_settings(stack: type[T]) -> type[T]:
    """Adds the settings and names of all mixing kinds to a stack, so that each is declared once."""
    names: Any = Literal
    fields: list[Any] = [("mixing", PerLayer[names[tuple(KINDS)]], "dynamic")]
    fields += [
        (name, PerLayer[field.type] if rules.is_per_layer(field) else field.type, field.default)
        for name, field in _MIXER_FIELDS.items()
    ]
    made = dataclasses.make_dataclass(
        stack.__name__, fields, bases=(stack,), frozen=True, kw_only=True
    )
    made.__module__, made.__qualname__ = stack.__module__, stack.__qualname__
    declaring = dict.fromkeys(base for kind in KINDS.values() for base in kind.__mro__)
    texts = [
        (base.__doc__ or "").partition("Attributes:\n")[2].rstrip()
        for base in declaring
        if base is not MixerConfig  # The stack says what is causal.
    ]
    made.__doc__ = "\n".join([(stack.__doc__ or "").rstrip(), *filter(None, texts), "    "])
    return made


@_with_mixer_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One stack of layers, encoder or decoder.

    Every setting of a mixing kind (`modeling.mixers`) is a setting of the stack too, and goes to
    the layers of the kinds that have it; those that vary with depth (`kernel_size`, `dilation`,
    `num_kernels`) take one value, or a list with one for each layer. So do the settings of Canon
    layers (`modeling.canon`).

    Attributes:
        num_layers: layers in the stack.
        mixing: the mixing kind of each layer, one of `mixers.KINDS`: one name or a list.
        attention_layers: layers that use attention whatever `mixing` says; negative numbers count
            from the last layer, so [-1] gives the top layer attention.
    """

    num_layers: int
    mixing: PerLayer[str] = "dynamic"
    attention_layers: Sequence[int] = ()

    def __post_init__(self):
        checks.make_plain(self)

    def layers(self, *, causal: bool = False) -> tuple[MixerConfig, ...]:
        """Returns the mixing of every layer, bottom first; call on a checked config."""
        attention = {index % self.num_layers for index in self.attention_layers}
        kinds = _per_layer(self.mixing, self.num_layers)
        return tuple(
            self._layer(KINDS["attention" if i in attention else kind], i, causal=causal)
            for i, kind in enumerate(kinds)
        )

    def _layer(self, kind: type[MixerConfig], index: int, *, causal: bool) -> MixerConfig:
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(kind)
            if field.name in _MIXER_FIELDS
        }
        chosen = {
            name: value[index] if self._is_listed(name) else value
            for name, value in settings.items()
        }
        return kind(causal=causal, **chosen)

    def _is_listed(self, name: str) -> bool:
        """Whether a setting has a value for each layer."""
        may = name == "mixing" or rules.is_per_layer(_MIXER_FIELDS[name])
        return may and _is_list(getattr(self, name))

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every broken rule as one sentence; `where` is encoder or decoder."""
        if wrong := rules.count(self.num_layers):
            return [f"{where}.num_layers={self.num_layers!r} {wrong}"]
        if too_many := checks.layer_faults(self.num_layers, where=f"{where}."):
            return too_many
        found = [
            f"{where}.{name} lists {len(getattr(self, name))} values for {where}.num_layers="
            f"{self.num_layers}; give one value per layer, or a single value for all."
            for name in ("mixing", *_MIXER_FIELDS)
            if self._is_listed(name) and len(getattr(self, name)) != self.num_layers
        ]
        found = found or self._setting_faults(where)
        found += self._kind_faults(where) + self._attention_faults(where)
        if found:
            return found
        for i, layer in enumerate(self.layers()):
            layer_faults = layer.faults(f"{where}[layer {i}]", emb_dim=emb_dim)
            found += [fault for fault in layer_faults if fault not in found]
        return found

    def _setting_faults(self, where: str) -> list[str]:
        """Returns the broken rules of settings that mixers declare."""
        found = []
        for name, field in _MIXER_FIELDS.items():
            value = getattr(self, name)
            if not self._is_listed(name):
                found += rules.field_faults(field, value, f"{where}.")
                continue
            for i, own in enumerate(value):
                found += rules.field_faults(field, own, f"{where}[layer {i}].")
        return found

    def _kind_faults(self, where: str) -> list[str]:
        rule = rules.choice(*KINDS)
        kinds = dict.fromkeys(self.mixing if _is_list(self.mixing) else (self.mixing,))
        return [f"{where}.mixing={kind!r} {wrong}" for kind in kinds if (wrong := rule(kind))]

    def _attention_faults(self, where: str) -> list[str]:
        if not _is_list(self.attention_layers):
            return [
                f"{where}.attention_layers={self.attention_layers!r} must be a list of layers, "
                "such as [-1] for the top layer."
            ]
        return [
            f"{where}.attention_layers holds {index!r}, but layers run from {-self.num_layers} to "
            f"{self.num_layers - 1}; name layers in that range."
            for index in self.attention_layers
            if not isinstance(index, int)
            or isinstance(index, bool)
            or not -self.num_layers <= index < self.num_layers
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemLayer:
    """One convolution of a text stem: output o reads inputs o * stride - left to + right.

    It stands for the inputs o * stride to o * stride + stride - 1 and is centered on them; taps
    that cannot be shared equally lean left, as those of a mixer. So it reads each of its own
    inputs, and the last output of an example reads the last token, whatever the length.
    """

    in_dim: int
    out_dim: int
    kernel_size: int
    stride: int

    @property
    def reach(self) -> tuple[int, int]:
        """Inputs read to the left and to the right of the first that the output stands for."""
        beside = self.kernel_size - self.stride
        left = math.ceil(beside / 2)
        return left, self.kernel_size - 1 - left


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStemConfig:
    """Small convolutions between the embeddings and the encoder, which may shorten its sequence.

    The early convolutions of arXiv 2106.14881 (section 3) in one dimension: convolutions over all
    channels without bias, each followed by a norm and an activation, and a dense layer at the end.
    The norm is not the original's batch norm but takes each position by itself, as all norms of a
    text model do: statistics of a batch would depend on how much padding and which other examples
    stand in it.

    Attributes:
        strides: of each convolution, from the bottom; their product shortens the encoder's
            sequence: an example of n tokens has ceil(n / product) positions. (1, 1) keeps it.
        kernel_size: taps of each, at least its stride, so that no token is left out.
        channels: out of each; None for emb_dim.
        norm: "rms" or "layer" as in `ConvT5Config`; "none".
        activation: "relu" as in the original, "gelu" or "none".
        projection: the dense layer to emb_dim at the end.
    """

    strides: Sequence[int] = (2, 2)
    kernel_size: PerLayer[int] = 3
    channels: PerLayer[int | None] = None
    norm: StemNorm = ruled(rules.choice(StemNorm), default="rms")
    activation: StemActivation = ruled(rules.choice(StemActivation), default="relu")
    projection: bool = ruled(rules.switch, default=True)

    def __post_init__(self):
        checks.make_plain(self)

    @property
    def stride(self) -> int:
        """Tokens for each position of the encoder."""
        return math.prod(self.strides)

    def layers(self, emb_dim: int) -> tuple[StemLayer, ...]:
        """Returns the convolutions, bottom first; call on a checked config."""
        count = len(self.strides)
        widths = [width or emb_dim for width in _per_layer(self.channels, count)]
        taps = _per_layer(self.kernel_size, count)
        return tuple(
            StemLayer(in_dim=in_dim, out_dim=width, kernel_size=size, stride=stride)
            for in_dim, width, size, stride in zip(
                (emb_dim, *widths), widths, taps, self.strides, strict=False
            )
        )

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every broken rule as one sentence."""
        if not _is_list(self.strides) or not self.strides:
            return [
                f"{where}.strides={self.strides!r} must list the stride of each convolution, such "
                "as (2, 2)."
            ]
        found = [
            f"{where}.{name} lists {len(value)} values for {len(self.strides)} strides; give one "
            "value per convolution, or a single value for all."
            for name in ("kernel_size", "channels")
            for value in (getattr(self, name),)
            if _is_list(value) and len(value) != len(self.strides)
        ]
        if found:
            return found
        found += [
            f"{where}.{name} holds {value!r}; it must hold integers of at least 1."
            for name in ("strides", "kernel_size", "channels")
            for value in _per_layer(getattr(self, name), len(self.strides))
            if rules.count(value) and not (name == "channels" and value is None)
        ]
        found += rules.faults(self, f"{where}.")
        if found:
            return found
        layers = self.layers(emb_dim)
        found += [
            f"{where}[convolution {i}].kernel_size={layer.kernel_size} must be at least its stride "
            f"{layer.stride}, or tokens between its windows are never read."
            for i, layer in enumerate(layers)
            if layer.kernel_size < layer.stride
        ]
        if not self.projection and layers[-1].out_dim != emb_dim:
            found.append(
                f"{where}.projection=False needs emb_dim={emb_dim} channels out of the last "
                f"convolution, which has {layers[-1].out_dim}; set the last of channels to None."
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A text-to-text encoder-decoder whose layers mix the sequence as each stack says.

    Attributes:
        vocab_size: rows of the token table; ids at or above it are an error.
        emb_dim, mlp_dim: channels of the residual stream and inside the feed-forward layers.
        num_heads, head_dim: attention heads (encoder-decoder attention, and attention layers).
        encoder, decoder: the two stacks. The decoder is causal and attends to the encoder.
        stem: convolutions in front of the encoder; None for none. With a stride, learned positions
            and distances between encoder positions count the shortened sequence, and rows hold one
            example: an example that begins inside of a window would not be read as it is alone.
        layer_order: "pre" is T5's x + f(norm(x)); "branch" is the paper's norm(f(x)) + x
            (arXiv 2105.03322); "post" is norm(x + f(x)), as in fairseq's default.
        norm: "rms" (T5, no mean, no bias) or "layer" (mean subtracted, with bias).
        norm_epsilon: added to the (mean) square before the root, above 0.
        mlp: "relu" (T5 1.0 and the paper) or "gated_gelu" (T5 1.1).
        mlp_bias: biases in the feed-forward layers.
        tie_output: logits through the token table, scaled by emb_dim ** -0.5 (T5 1.0); otherwise a
            separate output layer (T5 1.1).
        positions: "learned" absolute positions, one table shared by both stacks; "relative" T5
            bias in attention layers; "none".
        max_positions: rows of the learned table, and so the longest sequence; None otherwise.
        relative_buckets, relative_max_distance: T5's bucketing of relative positions: half of the
            buckets of a direction hold one distance each, the others grow up to the longest.
        dropout_rate: on embeddings, each branch, feed-forward activations and attention
            probabilities, in [0, 1).
        dtype: of activations ("bfloat16", "float32"); parameters are float32, and softmax, norms
            and loss are computed in at least float32.
        hide_start_token: the decoder's convolutions read zero where the input id is 0, as the
            released Mesh TensorFlow models were trained.
        taps_cross_segments: convolutions of packed rows read across segment boundaries, as the
            original does. Only for comparison with it: the default never leaks.
        remat: what the backward pass of a layer computes again instead of keeping: "none" keeps
            everything; "full" keeps the inputs of layers alone; "dots_saveable" keeps what matrix
            products give; "dots_with_no_batch_dims_saveable" only those with parameters, not those
            of queries and keys. The names are policies of `jax.checkpoint`; the numbers are equal.
        scan_layers: compiles neighbouring layers of one form once, as a loop over their parameters.
            Numbers and parameters, and so checkpoints and optimizer state, are the same.
    """

    vocab_size: int = ruled(rules.count)
    emb_dim: int = ruled(rules.count)
    mlp_dim: int = ruled(rules.count)
    num_heads: int = ruled(rules.count)
    head_dim: int = ruled(rules.count)
    encoder: StackConfig
    decoder: StackConfig
    stem: TextStemConfig | None = None
    layer_order: LayerOrder = ruled(rules.choice(LayerOrder), default="pre")
    norm: NormKind = ruled(rules.choice(NormKind), default="rms")
    norm_epsilon: float = ruled(rules.positive, default=1e-6)
    mlp: MlpKind = ruled(rules.choice(MlpKind), default="relu")
    mlp_bias: bool = ruled(rules.switch, default=False)
    tie_output: bool = ruled(rules.switch, default=True)
    positions: Positions = ruled(rules.choice(Positions), default="none")
    max_positions: int | None = ruled(rules.count_or("any length"), default=None)
    relative_buckets: int = ruled(rules.count, default=32)
    relative_max_distance: int = ruled(rules.count, default=128)
    dropout_rate: float = ruled(rules.share, default=0.0)
    dtype: str = ruled(rules.choice("bfloat16", "float32", "float64"), default="bfloat16")
    hide_start_token: bool = ruled(rules.switch, default=False)
    taps_cross_segments: bool = ruled(rules.switch, default=False)
    remat: Remat = ruled(rules.choice(Remat), default="none")
    scan_layers: bool = ruled(rules.switch, default=False)

    def __post_init__(self):
        checks.make_plain(self)
        errors.raise_all(self._faults(), where="ConvT5Config")

    @property
    def stem_stride(self) -> int:
        """Tokens for each position of the encoder."""
        return self.stem.stride if self.stem else 1

    def encoder_positions(self, length: int) -> int:
        """Returns the positions of the encoder for a row of `length` tokens."""
        return -(-length // self.stem_stride)

    def most_tokens(self, stack: StackName) -> int | None:
        """Returns the longest row that learned positions have vectors for; None for any length."""
        if self.positions != "learned" or self.max_positions is None:
            return None
        return self.max_positions * (self.stem_stride if stack == "encoder" else 1)

    def split_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Returns what devices that share a row must divide: tokens, and positions behind a stem.

        Args:
            lengths: tokens of a row, by the name of their setting.
        """
        stride = self.stem_stride
        shortened = {
            f"{name} / {stride} (the stem's stride)": self.encoder_positions(length)
            for name, length in lengths.items()
            if stride > 1 and name.endswith("encoder_length")
        }
        return {**lengths, **shortened}

    @property
    def encoder_layers(self) -> tuple[MixerConfig, ...]:
        return self.encoder.layers()

    @property
    def decoder_layers(self) -> tuple[MixerConfig, ...]:
        return self.decoder.layers(causal=True)

    def _faults(self) -> list[str]:
        broken = rules.faults(self)
        found = broken + [
            f"{name}={getattr(self, name)!r} must be a StackConfig."
            for name in ("encoder", "decoder")
            if not isinstance(getattr(self, name), StackConfig)
        ]
        if not (self.stem is None or isinstance(self.stem, TextStemConfig)):
            found.append(f"stem={self.stem!r} must be a TextStemConfig, or None for none.")
        if len(found) > len(broken) or rules.count(self.emb_dim):
            return found
        if self.positions == "learned" and self.max_positions is None:
            found.append(
                "max_positions=None must be the longest sequence in tokens when "
                "positions='learned'."
            )
        if self.stem is not None:
            found += self.stem.faults("stem", emb_dim=self.emb_dim)
        found += self.encoder.faults("encoder", emb_dim=self.emb_dim)
        decoder_faults = self.decoder.faults("decoder", emb_dim=self.emb_dim)
        if not decoder_faults:
            decoder_faults = _canon_direction_faults(self.decoder_layers) or [
                f"decoder[layer {i}] reads {layer.reach.right} positions of the future (padding="
                f"{getattr(layer, 'padding', None)}); a decoder must be causal: leave padding "
                "unset or use 'CAUSAL'."
                for i, layer in enumerate(self.decoder_layers)
                if layer.reach.right != 0
            ]
        return found + decoder_faults or self._projection_faults() + self._relative_faults()

    def _projection_faults(self) -> list[str]:
        """Returns what Canon layers have nothing to convolve; call where all else is right."""
        stacks = {"encoder": self.encoder_layers, "decoder": self.decoder_layers}
        return [
            f"{stack}[layer {i}].canon={layer.canon!r} has a Canon layer at B, on the projections "
            f"of the mixing, but mixing={layer.kind!r} has none there; remove B."
            for stack, layers in stacks.items()
            for i, layer in enumerate(layers)
            if "B" in layer.canon and not layer.projections(self)
        ]

    def _relative_faults(self) -> list[str]:
        """Returns why distances have no buckets; call where all else is right."""
        if self.positions != "relative":
            return []
        found = []
        # An encoder has half of the buckets for either direction.
        shares = {2: self.encoder_layers, 1: self.decoder_layers}
        for directions, layers in shares.items():
            if not any(layer.reads_distances for layer in layers):
                continue
            stack = "decoder" if directions == 1 else "encoder"
            alone = self.relative_buckets // directions // 2
            if alone < 1:
                found.append(
                    f"relative_buckets={self.relative_buckets} must be at least {2 * directions} "
                    f"for attention in the {stack}."
                )
            elif self.relative_max_distance <= alone:
                found.append(
                    f"relative_max_distance={self.relative_max_distance} must be above {alone}: so "
                    f"many of relative_buckets={self.relative_buckets} hold one distance each in "
                    f"the {stack}."
                )
        return found


def _canon_direction_faults(decoder: Sequence[MixerConfig]) -> list[str]:
    padding = next((layer.canon_padding for layer in decoder if layer.canon_reach[1]), None)
    if padding is None:
        return []
    return [
        f"decoder.canon_padding={padding!r} reads positions of the future; a decoder must be "
        "causal: use 'CAUSAL' in the decoder."
    ]


def _per_layer(value: Any, count: int) -> tuple[Any, ...]:
    return tuple(value) if _is_list(value) else (value,) * count


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
