"""Description of a text model without arrays: sizes, stem, and the mixing of each layer.

Gin files set these values, `architecture` builds modules from them, and `inspect` computes
receptive fields and costs. All rules are checked here, before anything is allocated.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from convt5 import errors
from convt5.errors import checks, rules
from convt5.errors.rules import ruled
from convt5.modeling import canon
from convt5.modeling.layers import MlpKind, NormKind
from convt5.modeling.mixers import KINDS, results
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
"""The settings of all mixing kinds, by name, which a stack passes to its layers."""

_OF_POSITIONS: Mapping[str, Positions] = {
    "max_positions": "learned",
    "relative_buckets": "relative",
    "relative_max_distance": "relative",
}
"""Settings of one kind of positions."""


def _settings_of(kind: type[MixerConfig]) -> set[str]:
    """Returns the names of the settings that layers of a kind use."""
    return {field.name for field in dataclasses.fields(kind)} - {*kind.unused}


def _with_mixer_settings(stack: type[T]) -> type[T]:
    """Adds the settings and names of all mixing kinds to a stack, so each is declared once."""
    names: Any = Literal
    fields: list[Any] = [("mixing", PerLayer[names[tuple(KINDS)] | MixerConfig], "dynamic")]
    fields += [
        (name, PerLayer[field.type] if rules.is_per_layer(field) else field.type, field.default)
        for name, field in _MIXER_FIELDS.items()
    ]
    combined = dataclasses.make_dataclass(
        stack.__name__, fields, bases=(stack,), frozen=True, kw_only=True
    )
    combined.__module__, combined.__qualname__ = stack.__module__, stack.__qualname__
    declaring = dict.fromkeys(base for kind in KINDS.values() for base in kind.__mro__)
    texts = [
        (base.__doc__ or "").partition("Attributes:\n")[2].rstrip()
        for base in declaring
        if base is not MixerConfig  # `causal` follows from the stack.
    ]
    combined.__doc__ = "\n".join([(stack.__doc__ or "").rstrip(), *filter(None, texts), "    "])
    return combined


@_with_mixer_settings
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One stack of layers, encoder or decoder.

    Every setting of a mixing kind (`modeling.mixers`) is also a setting of the stack, which passes
    it to the layers of the kinds that have it. Settings that can vary with depth (`kernel_size`,
    `dilation`, `num_kernels` and those of Canon layers, `modeling.canon`) take one value, or a list
    with one value for each layer.

    Attributes:
        num_layers: number of layers.
        mixing: the mixing kind of each layer, one of `mixers.KINDS`: one name or a list. A
            description of any kind, such as `@my_mixer.Average()`, may take the place of a name; it
            then has all settings of its layers, and those of the stack do not apply to them.
        attention_layers: indices of layers that use attention whatever `mixing` says. Negative
            indices count from the last layer: [-1] makes the top layer attention.
    """

    num_layers: int
    mixing: PerLayer[str | MixerConfig] = "dynamic"
    attention_layers: Sequence[int] = ()

    def __post_init__(self):
        checks.make_plain(self)

    def layers(self, *, causal: bool = False) -> tuple[MixerConfig, ...]:
        """Returns the mixing of every layer, bottom first. The config must be valid."""
        listed = [name for name in _MIXER_FIELDS if self._is_listed(name)]

        @functools.cache
        def layer(mixing: str | MixerConfig, index: int) -> MixerConfig:
            if not isinstance(mixing, str):
                return dataclasses.replace(mixing, causal=causal)
            kind = KINDS[mixing]
            settings = {
                field.name: getattr(self, field.name)
                for field in dataclasses.fields(kind)
                if field.name in _MIXER_FIELDS
            }
            chosen = {name: settings[name][index] for name in listed if name in settings}
            return kind(causal=causal, **settings | chosen)

        return tuple(
            layer(mixing, i if listed else 0) for i, mixing in enumerate(self._mixing_of_layers())
        )

    @property
    def described_kinds(self) -> tuple[str, ...]:
        """The mixing kinds of which a description takes the place of the name."""
        return tuple(m.kind for m in self._mixing_of_layers() if not isinstance(m, str))

    def _mixing_of_layers(self) -> list[str | MixerConfig]:
        attention = {index % self.num_layers for index in self.attention_layers}
        mixing = _per_layer(self.mixing, self.num_layers)
        return ["attention" if i in attention else each for i, each in enumerate(mixing)]

    def _is_listed(self, name: str) -> bool:
        """Returns whether a setting has a value for each layer."""
        may = name == "mixing" or rules.is_per_layer(_MIXER_FIELDS[name])
        return may and _is_list(getattr(self, name))

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every broken rule as one sentence; `where` is "encoder" or "decoder"."""
        if wrong := rules.count(self.num_layers):
            return [f"{where}.num_layers={self.num_layers!r} {wrong}"]
        if too_many := checks.layer_faults(self.num_layers, where=f"{where}."):
            return too_many
        faults = [
            f"{where}.{name} lists {len(getattr(self, name))} values for {where}.num_layers="
            f"{self.num_layers}; give one value per layer, or a single value for all."
            for name in ("mixing", *_MIXER_FIELDS)
            if self._is_listed(name) and len(getattr(self, name)) != self.num_layers
        ]
        faults = faults or self._setting_faults(where)
        faults += self._kind_faults(where) + self._attention_faults(where)
        if faults:
            return faults
        for i, layer in enumerate(self.layers()):
            layer_faults = layer.faults(f"{where}[layer {i}]", emb_dim=emb_dim)
            layer_faults += results.reach_faults(layer)
            faults += [fault for fault in layer_faults if fault not in faults]
        return faults

    def unused(self, where: str) -> list[str]:
        """Returns a sentence for each setting that is changed, and that no layer's kind uses."""
        named = [mixing for mixing in self._mixing_of_layers() if isinstance(mixing, str)]
        used = {name for kind in {*named} for name in _settings_of(KINDS[kind])}
        return (canon.without_places(self, f"{where}.") if named else []) + [
            f"{where}.{name}={getattr(self, name)!r} has no effect: no layer there has the mixing "
            f"{' or '.join(kind for kind in KINDS if name in _settings_of(KINDS[kind]))}."
            for name, field in _MIXER_FIELDS.items()
            if name not in used and getattr(self, name) != field.default
        ]

    def _setting_faults(self, where: str) -> list[str]:
        """Returns the broken rules of single settings, which mixing kinds declare with them."""
        faults = []
        for name, field in _MIXER_FIELDS.items():
            value = getattr(self, name)
            if not self._is_listed(name):
                faults += rules.field_faults(field, value, f"{where}.")
                continue
            for i, layer_value in enumerate(value):
                faults += rules.field_faults(field, layer_value, f"{where}[layer {i}].")
        return faults

    def _kind_faults(self, where: str) -> list[str]:
        rule, faults = rules.choice(*KINDS), []
        for mixing in _per_layer(self.mixing, 1):
            if isinstance(mixing, MixerConfig) and hasattr(mixing, "kind"):
                faults += _description_faults(mixing, f"{where}.mixing: {type(mixing).__name__}.")
            elif wrong := rule(mixing):
                faults.append(f"{where}.mixing={mixing!r} {wrong}")
        return list(dict.fromkeys(faults))

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

    Output o represents inputs o * stride to o * stride + stride - 1. The taps are centered on them;
    with an odd number of taps to spare, they lean left, as in a mixer. Each output thus reads all
    the inputs that it represents, so the last output of an example always reads the last token.
    """

    in_dim: int
    out_dim: int
    kernel_size: int
    stride: int

    @property
    def reach(self) -> tuple[int, int]:
        """Inputs read to the left and to the right of the first input that an output represents."""
        beside = self.kernel_size - self.stride
        left = math.ceil(beside / 2)
        return left, self.kernel_size - 1 - left


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStemConfig:
    """Early convolutions between the embeddings and the encoder, which may shorten the sequence.

    The stem of arXiv 2106.14881 (section 3) in one dimension: convolutions over all channels
    without bias, each followed by a norm and an activation, and a dense layer at the end. The norm
    acts on single positions, as all norms of a text model do, not on the batch as in the original:
    batch statistics would depend on padding and on the other examples.

    Attributes:
        strides: stride of each convolution, bottom first. The encoder sees ceil(n / product)
            positions for an example of n tokens; (1, 1) keeps the length.
        kernel_size: taps of each convolution, at least its stride so that each token is read.
        channels: output channels of each convolution; None means emb_dim.
        norm: "rms" or "layer", as in `ConvT5Config`, or "none".
        activation: "relu" as in the original, "gelu" or "none".
        projection: whether a dense layer to emb_dim ends the stem.
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
        """Tokens per encoder position."""
        return math.prod(self.strides)

    def layers(self, emb_dim: int) -> tuple[StemLayer, ...]:
        """Returns the convolutions, bottom first. The config must be valid."""
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
        faults = [
            f"{where}.{name} lists {len(value)} values for {len(self.strides)} strides; give one "
            "value per convolution, or a single value for all."
            for name in ("kernel_size", "channels")
            for value in (getattr(self, name),)
            if _is_list(value) and len(value) != len(self.strides)
        ]
        if faults:
            return faults
        faults += [
            f"{where}.{name} holds {value!r}; it must hold integers of at least 1."
            for name in ("strides", "kernel_size", "channels")
            for value in _per_layer(getattr(self, name), len(self.strides))
            if rules.count(value) and not (name == "channels" and value is None)
        ]
        faults += rules.faults(self, f"{where}.")
        if faults:
            return faults
        layers = self.layers(emb_dim)
        faults += [
            f"{where}[convolution {i}].kernel_size={layer.kernel_size} must be at least its "
            f"stride {layer.stride}, because tokens between its windows would never be read."
            for i, layer in enumerate(layers)
            if layer.kernel_size < layer.stride
        ]
        if not self.projection and layers[-1].out_dim != emb_dim:
            faults.append(
                f"{where}.projection=False needs emb_dim={emb_dim} channels out of the last "
                f"convolution, which has {layers[-1].out_dim}; set the last of channels to None."
            )
        return faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A text-to-text encoder-decoder with a choice of sequence mixing for each layer.

    Attributes:
        vocab_size: rows of the token table; token ids must be smaller.
        emb_dim, mlp_dim: channels of the residual stream, and of the feed-forward layers.
        num_heads, head_dim: attention heads (encoder-decoder attention, and attention layers).
        encoder, decoder: the two stacks. The decoder is causal and attends to the encoder.
        stem: convolutions in front of the encoder, or None. With a stride, learned positions and
            relative positions in the encoder count the shortened sequence, and each row must hold
            one example, because a window must not contain two.
        layer_order: "pre" is T5's x + f(norm(x)); "branch" is the paper's norm(f(x)) + x
            (arXiv 2105.03322); "post" is norm(x + f(x)), fairseq's default.
        norm: "rms" (T5: no mean, no bias) or "layer" (subtracts the mean, has a bias).
        norm_epsilon: added to the (mean) square before the root; above 0.
        mlp: "relu" (T5 1.0 and the paper), "gated_gelu" (T5 1.1) or "gated_silu" (UL2).
        mlp_bias: whether feed-forward layers have biases.
        tie_output: computes logits with the token table, scaled by emb_dim ** -0.5 (T5 1.0); False
            adds a separate output layer (T5 1.1).
        positions: "learned" absolute positions, one table for both stacks; "relative", T5's bias of
            attention layers; or "none".
        max_positions: rows of the table of learned positions, and so the longest sequence; None
            without them.
        relative_buckets, relative_max_distance: T5's buckets of relative positions. For each
            direction, half of the buckets hold one distance each; the others grow up to the longest
            distance.
        dropout_rate: dropout of embeddings, residual branches, feed-forward activations and
            attention weights, in [0, 1).
        token_dropout_rate: probability with which the encoder reads nothing in place of a token, in
            [0, 1); Mesh TensorFlow's term, also called word dropout.
        dtype: dtype of activations, "bfloat16" or "float32". Parameters are float32; softmax, norms
            and loss are computed in at least float32.
        hide_start_token: convolutions of the decoder read zero where the input id is 0, as the
            released Mesh TensorFlow models were trained.
        taps_cross_segments: convolutions read across the examples of a packed row, as the original
            does. Only for comparison with it; by default nothing leaks.
        remat: rematerialisation of each layer in the backward pass, named after the policies of
            `jax.checkpoint`: "none" stores everything; "full" stores only the inputs of layers;
            "dots_saveable" stores the results of matrix products;
            "dots_with_no_batch_dims_saveable" only of those with parameters, not of queries with
            keys. Results are equal.
        scan_layers: compiles equal neighbouring layers once, as a loop over their parameters.
            Results, checkpoints and optimizer state are equal.
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
    token_dropout_rate: float = ruled(rules.share, default=0.0)
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
        """Tokens per encoder position."""
        return self.stem.stride if self.stem else 1

    def encoder_positions(self, length: int) -> int:
        """Returns the number of encoder positions for a row of `length` tokens."""
        return -(-length // self.stem_stride)

    def most_tokens(self, stack: StackName) -> int | None:
        """Returns the longest row that the learned positions allow; None for any length."""
        if self.positions != "learned" or self.max_positions is None:
            return None
        return self.max_positions * (self.stem_stride if stack == "encoder" else 1)

    def split_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
        """Returns the lengths that the devices sharing a row must divide: before and after a stem.

        Args:
            lengths: tokens per row, by the name of their setting.
        """
        stride = self.stem_stride
        shortened = {
            f"{name} / {stride} (the stem's stride)": self.encoder_positions(length)
            for name, length in lengths.items()
            if stride > 1 and name.endswith("encoder_length")
        }
        return {**lengths, **shortened}

    def unused(self) -> list[str]:
        """Returns a sentence for each setting that is changed, and that no layer uses."""
        fields = {field.name: field for field in dataclasses.fields(ModelDescription)}
        sentences = self.encoder.unused("encoder") + self.decoder.unused("decoder")
        sentences += [
            f"{name}={getattr(self, name)!r} has no effect: positions={self.positions!r}; it needs "
            f"{needed!r}."
            for name, needed in _OF_POSITIONS.items()
            if self.positions != needed and getattr(self, name) != fields[name].default
        ]
        layers = (*self.encoder_layers, *self.decoder_layers)
        if self.positions == "relative" and not any(layer.reads_distances for layer in layers):
            sentences.append(
                "positions='relative' has no effect: no layer has attention, or another mixing "
                "with a bias by distance."
            )
        return sentences

    @property
    def described_kinds(self) -> tuple[str, ...]:
        """The mixing kinds of which a description takes the place of the name."""
        kinds = (*self.encoder.described_kinds, *self.decoder.described_kinds)
        return tuple(dict.fromkeys(kinds))

    @property
    def encoder_layers(self) -> tuple[MixerConfig, ...]:
        return self.encoder.layers()

    @property
    def decoder_layers(self) -> tuple[MixerConfig, ...]:
        return self.decoder.layers(causal=True)

    def _faults(self) -> list[str]:
        broken = rules.faults(self)
        faults = broken + [
            f"{name}={getattr(self, name)!r} must be a StackConfig."
            for name in ("encoder", "decoder")
            if not isinstance(getattr(self, name), StackConfig)
        ]
        if not (self.stem is None or isinstance(self.stem, TextStemConfig)):
            faults.append(f"stem={self.stem!r} must be a TextStemConfig, or None for none.")
        if len(faults) > len(broken) or rules.count(self.emb_dim):
            return faults
        if self.positions == "learned" and self.max_positions is None:
            faults.append(
                "max_positions=None must be the longest sequence in tokens when "
                "positions='learned'."
            )
        if self.stem is not None:
            faults += self.stem.faults("stem", emb_dim=self.emb_dim)
        faults += self.encoder.faults("encoder", emb_dim=self.emb_dim)
        decoder_faults = self.decoder.faults("decoder", emb_dim=self.emb_dim)
        if not decoder_faults:
            decoder_faults = _canon_direction_faults(self.decoder_layers) or [
                f"decoder[layer {i}] reads {layer.reach.right} future positions "
                f"(padding={getattr(layer, 'padding', None)}); a decoder must be causal: leave "
                "padding unset or use 'CAUSAL'."
                if hasattr(layer, "padding")
                else f"decoder[layer {i}] has the reach {layer.reach} ({layer.kind}); a decoder "
                "must be causal: let reach and outputs follow its attribute causal."
                for i, layer in enumerate(self.decoder_layers)
                if layer.reach.right != 0
            ]
        return faults + decoder_faults or self._projection_faults() + self._relative_faults()

    def _projection_faults(self) -> list[str]:
        """Returns Canon layers without projections to convolve; the other rules must hold."""
        stacks = {"encoder": self.encoder_layers, "decoder": self.decoder_layers}
        return [
            f"{stack}[layer {i}].canon={layer.canon!r} has a Canon layer at B, on the projections "
            f"of the mixing, but mixing={layer.kind!r} has none there; remove B."
            for stack, layers in stacks.items()
            for i, layer in enumerate(layers)
            if "B" in layer.canon and not layer.projections(self)
        ]

    def _relative_faults(self) -> list[str]:
        """Returns broken rules of relative buckets; the other rules must hold."""
        if self.positions != "relative":
            return []
        faults = []
        # A bidirectional encoder uses half of the buckets for each direction.
        shares = {2: self.encoder_layers, 1: self.decoder_layers}
        for directions, layers in shares.items():
            if not any(layer.reads_distances for layer in layers):
                continue
            stack = "decoder" if directions == 1 else "encoder"
            single_buckets = self.relative_buckets // directions // 2
            if single_buckets < 1:
                faults.append(
                    f"relative_buckets={self.relative_buckets} must be at least {2 * directions} "
                    f"for attention in the {stack}."
                )
            elif self.relative_max_distance <= single_buckets:
                faults.append(
                    f"relative_max_distance={self.relative_max_distance} must be above "
                    f"{single_buckets}: that many of relative_buckets={self.relative_buckets} "
                    f"hold one distance each in the {stack}."
                )
        return faults


def _canon_direction_faults(decoder: Sequence[MixerConfig]) -> list[str]:
    padding = next((layer.canon_padding for layer in decoder if layer.canon_reach[1]), None)
    if padding is None:
        return []
    return [
        f"decoder.canon_padding={padding!r} reads future positions; a decoder must be causal: "
        "use 'CAUSAL' in the decoder."
    ]


def _description_faults(mixing: MixerConfig, where: str) -> Iterator[str]:
    """Yields the broken rules of a description in place of a kind's name."""
    if "__dataclass_params__" not in vars(type(mixing)):
        yield (
            f"{where}kind={mixing.kind!r}: its class must be decorated with "
            "@dataclasses.dataclass(frozen=True, kw_only=True), which makes settings of its names."
        )
    if mixing.causal:
        yield f"{where}causal=True: the stack decides whether its layers are causal; remove it."
    for field in dataclasses.fields(mixing):
        value = getattr(mixing, field.name)
        if not _is_plain(value):
            yield (
                f"{where}{field.name}={errors.clip(value)} must be a number, text, True, False, "
                "None or a tuple of these, which checkpoints can keep."
            )
    yield from checks.type_faults(mixing, where)
    yield from rules.faults(mixing, where)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _per_layer(value: Any, count: int) -> tuple[Any, ...]:
    return tuple(value) if _is_list(value) else (value,) * count


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
