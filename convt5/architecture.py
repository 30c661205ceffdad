"""What a convt5 encoder-decoder is made of: sizes and the mixing of each layer, without arrays.

`model` builds modules from these values, `inspect` computes receptive fields and costs from them,
gin files set them. Everything is checked here, before anything is allocated.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

from convt5 import errors
from convt5.configuration import checks
from convt5.ops.padding import Padding, pad_widths

MixingKind = Literal["depthwise", "lightweight", "dynamic", "attention"]
InputProjection = Literal["gated", "linear", "none"]
LayerOrder = Literal["pre", "branch", "post"]
NormKind = Literal["rms", "layer"]
MlpKind = Literal["relu", "gated_gelu"]
Positions = Literal["none", "learned", "relative"]
StemNorm = Literal["rms", "layer", "none"]
StemActivation = Literal["relu", "gelu", "none"]
Remat = Literal["none", "full", "dots_saveable", "dots_with_no_batch_dims_saveable"]
StackName = Literal["encoder", "decoder"]

_SWITCHES = (
    "pointwise",
    "output_projection",
    "projection_bias",
    "predictor_bias",
    "conv_bias",
    "normalize_taps",
)
"""What convolutions have or leave out."""

T = TypeVar("T")
PerLayer = T | Sequence[T]
"""One value for all layers, or a sequence with exactly one value per layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixingConfig:
    """How one layer mixes along the sequence, in the place of T5's self-attention.

    Attributes:
        kind: the operator. Convolutions: `depthwise` (one free kernel per channel), `lightweight`
            (softmax-normalised kernels shared by groups of channels), `dynamic` (kernels predicted
            at each position). `attention`: T5 self-attention.
        kernel_size: taps K. Ignored by attention, as are the following fields.
        dilation: distance between taps; 1 means adjacent.
        num_kernels: kernels H shared by groups of emb_dim / H neighbouring channels; None gives
            each channel its own. Depthwise has one per channel always.
        padding: "CENTERED", "CAUSAL" or explicit (left, right) positions.
        input_projection: "gated" is (X W^I) * sigmoid(X W^S), the gated linear unit of the paper;
            "linear" is X W^I; "none" feeds X itself.
        pointwise: a dense layer directly after the taps, as in a depthwise-separable convolution.
        output_projection: the dense layer W^O that ends the convolution block.
        projection_bias: biases in the dense layers above.
        predictor_bias: a bias in the dense layer that predicts dynamic kernels.
        conv_bias: a bias added to the sum over the taps.
        normalize_taps: the softmax over the taps of lightweight and dynamic convolutions; without
            it the (predicted) numbers themselves are the taps.
        tap_dropout_rate: dropout of the normalised taps (DropConnect of Wu et al. 2019,
            arXiv 1901.10430), in [0, 1).
    """

    kind: MixingKind
    kernel_size: int = 7
    dilation: int = 1
    num_kernels: int | None = None
    padding: Padding = "CENTERED"
    input_projection: InputProjection = "gated"
    pointwise: bool = False
    output_projection: bool = True
    projection_bias: bool = False
    predictor_bias: bool = False
    conv_bias: bool = False
    normalize_taps: bool = True
    tap_dropout_rate: float = 0.0

    @property
    def reach(self) -> tuple[int, int]:
        """Positions read to the left and to the right of the output position."""
        return pad_widths(self.kernel_size, self.dilation, self.padding)

    def faults(self, where: str) -> list[str]:
        """Returns every broken rule as one sentence; `where` names the layer."""
        found = []
        if self.kind not in get_args(MixingKind):
            found.append(
                f"{where}.mixing={self.kind!r} is no mixing; use one of "
                f"{', '.join(get_args(MixingKind))}."
                f"{errors.suggest(str(self.kind), get_args(MixingKind))}"
            )
        if self.kind == "attention":
            return found
        if not checks.is_positive_int(self.kernel_size):
            found.append(
                f"{where}.kernel_size={self.kernel_size!r} must be an integer of at least 1 "
                f"(the number of taps); set {where}.kernel_size to positive integers."
            )
        if not checks.is_positive_int(self.dilation):
            found.append(
                f"{where}.dilation={self.dilation!r} must be an integer of at least 1 "
                f"(1 means adjacent taps); set {where}.dilation to positive integers."
            )
        if self.num_kernels is not None and not checks.is_positive_int(self.num_kernels):
            found.append(
                f"{where}.num_kernels={self.num_kernels!r} must be a positive integer, or None for "
                "one kernel per channel."
            )
        if self.kind == "depthwise" and self.num_kernels is not None:
            found.append(
                f"{where}.num_kernels={self.num_kernels} has no meaning for a depthwise "
                "convolution, which has one kernel per channel; remove it or choose lightweight."
            )
        if self.input_projection not in get_args(InputProjection):
            found.append(
                f"{where}.input_projection={self.input_projection!r} must be one of "
                f"{', '.join(get_args(InputProjection))}."
            )
        if not _is_share(self.tap_dropout_rate):
            found.append(f"{where}.tap_dropout_rate={self.tap_dropout_rate!r} must be in [0, 1).")
        if not found:
            try:
                pad_widths(self.kernel_size, self.dilation, self.padding)
            except ValueError as error:
                found.append(f"{where}: {error}")
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
    """One stack of layers, encoder or decoder; fields typed PerLayer take one value or a list.

    Attributes:
        num_layers: layers in the stack.
        mixing: the mixing of each layer, see `MixingConfig.kind`.
        attention_layers: layers that use attention whatever `mixing` says; negative numbers count
            from the last layer, so [-1] gives the top layer attention.
        kernel_size: taps of each layer.
        dilation: dilation of each layer.
        num_kernels: kernels of each layer; None for one per channel.
        padding: None centers an encoder's taps and makes a decoder's causal.
        input_projection, pointwise, output_projection, projection_bias, predictor_bias, conv_bias,
            normalize_taps, tap_dropout_rate: as in `MixingConfig`, for every convolution.
    """

    num_layers: int
    mixing: PerLayer[MixingKind] = "dynamic"
    attention_layers: Sequence[int] = ()
    kernel_size: PerLayer[int] = 7
    dilation: PerLayer[int] = 1
    num_kernels: PerLayer[int | None] = None
    padding: Padding | None = None
    input_projection: InputProjection = "gated"
    pointwise: bool = False
    output_projection: bool = True
    projection_bias: bool = False
    predictor_bias: bool = False
    conv_bias: bool = False
    normalize_taps: bool = True
    tap_dropout_rate: float = 0.0

    def __post_init__(self):
        checks.make_plain(self)

    def layers(self, *, default_padding: Padding = "CENTERED") -> tuple[MixingConfig, ...]:
        """Returns the mixing of every layer, bottom first; call on a checked config."""
        count = self.num_layers
        per_layer = {
            name: _per_layer(getattr(self, name), count)
            for name in ("mixing", "kernel_size", "dilation", "num_kernels")
        }
        attention = {index % count for index in self.attention_layers}
        shared = {
            name: getattr(self, name)
            for name in ("input_projection", *_SWITCHES, "tap_dropout_rate")
        }
        padding = self.padding if self.padding is not None else default_padding
        return tuple(
            MixingConfig(
                kind="attention" if i in attention else per_layer["mixing"][i],
                kernel_size=per_layer["kernel_size"][i],
                dilation=per_layer["dilation"][i],
                num_kernels=per_layer["num_kernels"][i],
                padding=padding if isinstance(padding, str) else cast(Padding, tuple(padding)),
                **shared,
            )
            for i in range(count)
        )

    def faults(self, where: str, *, emb_dim: int) -> list[str]:
        """Returns every broken rule as one sentence; `where` is encoder or decoder."""
        if not checks.is_positive_int(self.num_layers):
            return [f"{where}.num_layers={self.num_layers!r} must be an integer of at least 1."]
        if too_many := checks.layer_faults(self.num_layers, where=f"{where}."):
            return too_many
        found = checks.bool_faults(self, _SWITCHES, where=f"{where}.")
        for name in ("mixing", "kernel_size", "dilation", "num_kernels"):
            value = getattr(self, name)
            if _is_list(value) and len(value) != self.num_layers:
                found.append(
                    f"{where}.{name} lists {len(value)} values for {where}.num_layers="
                    f"{self.num_layers}; give one value per layer, or a single value for all."
                )
        if not _is_list(self.attention_layers):
            found.append(
                f"{where}.attention_layers={self.attention_layers!r} must be a list of layers, "
                "such as [-1] for the top layer."
            )
        if not (self.padding is None or isinstance(self.padding, str) or _is_list(self.padding)):
            found.append(
                f"{where}.padding={self.padding!r} must be 'CENTERED', 'CAUSAL' or (left, right) "
                "positions."
            )
        if found:
            return found
        for index in self.attention_layers:
            is_index = isinstance(index, int) and not isinstance(index, bool)
            if not is_index or not -self.num_layers <= index < self.num_layers:
                found.append(
                    f"{where}.attention_layers holds {index!r}, but layers run from "
                    f"{-self.num_layers} to {self.num_layers - 1}; name layers in that range."
                )
        if found:
            return found
        for i, layer in enumerate(self.layers()):
            layer_faults = layer.faults(f"{where}[layer {i}]")
            if not layer_faults and layer.num_kernels and emb_dim % layer.num_kernels:
                layer_faults.append(
                    f"{where}[layer {i}].num_kernels={layer.num_kernels} must divide emb_dim="
                    f"{emb_dim}: each kernel serves emb_dim / num_kernels neighbouring channels."
                )
            found += [fault for fault in layer_faults if fault not in found]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemLayer:
    """One convolution of a text stem: output o reads inputs o * stride - left to + right.

    It stands for the inputs o * stride to o * stride + stride - 1 and is centered on them; taps
    that cannot be shared equally lean left, as in `MixingConfig`. So it reads each of its own
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
    norm: StemNorm = "rms"
    activation: StemActivation = "relu"
    projection: bool = True

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
            if not (checks.is_positive_int(value) or (name == "channels" and value is None))
        ]
        found += checks.choice_faults(self, {"norm": StemNorm, "activation": StemActivation})
        found += checks.bool_faults(self, ("projection",), where=f"{where}.")
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
class ConvT5Config:
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

    vocab_size: int
    emb_dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    encoder: StackConfig
    decoder: StackConfig
    stem: TextStemConfig | None = None
    layer_order: LayerOrder = "pre"
    norm: NormKind = "rms"
    norm_epsilon: float = 1e-6
    mlp: MlpKind = "relu"
    mlp_bias: bool = False
    tie_output: bool = True
    positions: Positions = "none"
    max_positions: int | None = None
    relative_buckets: int = 32
    relative_max_distance: int = 128
    dropout_rate: float = 0.0
    dtype: str = "bfloat16"
    hide_start_token: bool = False
    taps_cross_segments: bool = False
    remat: Remat = "none"
    scan_layers: bool = False

    def __post_init__(self):
        checks.make_plain(self)
        errors.raise_all(self._faults(), where="ConvT5Config")

    def build(self, key):
        """Builds the model; under `jax.eval_shape` nothing is allocated."""
        from convt5.modeling.model import ConvT5  # The description must import without jax.

        return ConvT5(self, key=key)

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
    def encoder_layers(self) -> tuple[MixingConfig, ...]:
        return self.encoder.layers(default_padding="CENTERED")

    @property
    def decoder_layers(self) -> tuple[MixingConfig, ...]:
        return self.decoder.layers(default_padding="CAUSAL")

    def _faults(self) -> list[str]:
        sizes = ("vocab_size", "emb_dim", "mlp_dim", "num_heads", "head_dim")
        if found := checks.count_faults(self, sizes):
            return found
        found = [
            f"{name}={getattr(self, name)!r} must be a StackConfig."
            for name in ("encoder", "decoder")
            if not isinstance(getattr(self, name), StackConfig)
        ]
        if not (self.stem is None or isinstance(self.stem, TextStemConfig)):
            found.append(f"stem={self.stem!r} must be a TextStemConfig, or None for none.")
        if found:
            return found
        found = checks.choice_faults(
            self,
            {
                "layer_order": LayerOrder,
                "norm": NormKind,
                "mlp": MlpKind,
                "positions": Positions,
                "remat": Remat,
            },
        )
        switches = (
            "mlp_bias",
            "tie_output",
            "hide_start_token",
            "taps_cross_segments",
            "scan_layers",
        )
        found += checks.bool_faults(self, switches)
        found += checks.count_faults(self, ("relative_buckets", "relative_max_distance"))
        if self.dtype not in ("bfloat16", "float32", "float64"):
            found.append(f"dtype={self.dtype!r} must be bfloat16, float32 or float64.")
        if not _is_share(self.dropout_rate):
            found.append(f"dropout_rate={self.dropout_rate!r} must be in [0, 1).")
        if not (isinstance(self.norm_epsilon, numbers.Real) and 0 < self.norm_epsilon < math.inf):
            found.append(f"norm_epsilon={self.norm_epsilon!r} must be positive.")
        if self.positions == "learned" and not checks.is_positive_int(self.max_positions):
            found.append(
                f"max_positions={self.max_positions!r} must be the longest sequence in tokens when "
                "positions='learned'."
            )
        elif self.max_positions is not None:
            found += checks.count_faults(self, ("max_positions",))
        if self.stem is not None:
            found += self.stem.faults("stem", emb_dim=self.emb_dim)
        encoder_faults = self.encoder.faults("encoder", emb_dim=self.emb_dim)
        found += encoder_faults
        decoder_faults = self.decoder.faults("decoder", emb_dim=self.emb_dim)
        found += decoder_faults
        if not decoder_faults:
            found += [
                f"decoder[layer {i}].padding={layer.padding} reads {layer.reach[1]} positions of "
                "the future; a decoder must be causal: leave padding unset or use 'CAUSAL'."
                for i, layer in enumerate(self.decoder_layers)
                if layer.kind != "attention" and layer.reach[1]
            ]
        return found or self._relative_faults()

    def _relative_faults(self) -> list[str]:
        """Returns why distances have no buckets; call where all else is right."""
        if self.positions != "relative":
            return []
        found = []
        # An encoder has half of the buckets for either direction.
        shares = {2: self.encoder_layers, 1: self.decoder_layers}
        for directions, layers in shares.items():
            if all(layer.kind != "attention" for layer in layers):
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


def _per_layer(value: Any, count: int) -> tuple[Any, ...]:
    return tuple(value) if _is_list(value) else (value,) * count


def _is_share(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 <= float(value) < 1


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
