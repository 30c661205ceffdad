"""Infers the model of a Mesh TensorFlow checkpoint from names, shapes and the operative config.

Supports T5 1.0 and 1.1, T5 with absolute positions, and T5 whose self-attention is replaced by
lightweight, dynamic or depthwise-separable convolutions, of any size.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from convt5 import errors
from convt5.interchange.mapping import Shape
from convt5.interchange.operative_config import ACTIVATIONS, REFERENCE, OperativeConfig, mlp_kind
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.layers import MlpKind
from convt5.ops.geometry import pad_widths

StackName = Literal["encoder", "decoder"]
STACKS: tuple[StackName, ...] = ("encoder", "decoder")
NORMS = ("rms_norm", "layer_norm")
TAPS: dict[str, str] = {
    "lightwt_depthwise_dense": "lightweight",
    "dyn_conv_depthwise_dense": "dynamic",
    "separable_conv1d/depthwise_conv_hack/depthwise_dense": "depthwise",
}
"""Variables of the taps, numbered from 0 at the leftmost."""

_BLOCK = re.compile(r"^(encoder|decoder)/block_(\d+)/layer_(\d+)/([^/]+)(?:/(.+))?$")
_SUBLAYERS = {
    "sublayers_initial": ("dropout",),
    "sublayers_per_layer": ("rms_norm", "call_layer", "dropout", "residual"),
    "sublayers_final": ("rms_norm", "dropout"),
}
"""What surrounds the layers of T5, by the settings of a stack."""

_UNCHANGED = {
    ("SelfAttention", "attention_func"): None,
    ("SelfAttention", "attention_kwargs"): None,
    ("SelfAttention", "fold_scaling_into_initializer"): True,
    ("SelfAttention", "num_memory_heads"): 0,
    ("SelfAttention", "shared_kv"): False,
    ("LocalConvAttnBlock", "activation"): "linear",
    ("SeparableConv1DLayer", "activation"): "linear",
    ("Unitransformer", "sinusoid_positional_embedding"): False,
    ("Unitransformer", "input_full_attention"): False,
    ("VocabEmbedding", "scale_variable_like_classifier_weights"): False,
    ("make_layer_stack", "layer_stack_cls"): "LayerStack",
    ("unit_scaling_convention", "value"): False,
}
"""Settings that change the computation, and their values in T5, by configurable and parameter."""

_T5_HEADS = {512: 8, 768: 12, 1024: 16}
"""Attention heads of T5 small, base and large by width, as in the released models."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The model of a checkpoint.

    Attributes:
        config: the model as it was trained: the decoder's convolutions do not read the start token.
        notes: assumptions where the checkpoint is silent.
    """

    config: ConvT5Config
    notes: tuple[str, ...]


@dataclasses.dataclass(kw_only=True)
class _Layer:
    """The mixing of one block, from its names and shapes."""

    kind: str
    owner: str
    kernel_size: int = 1
    parts: tuple[bool, ...] = ()


def infer_architecture(
    variables: Mapping[str, Shape], operative: OperativeConfig | None = None
) -> Architecture:
    """Infers the model of a checkpoint.

    Args:
        variables: shapes of its variables, without optimizer slots.
        operative: the operative config, needed for what shapes do not show: the padding of
            convolutions, and the number of heads if there is no relative bias.

    Raises:
        UserError: another architecture, or an operative config that contradicts the shapes.
    """
    operative_config = operative or OperativeConfig("")
    notes: list[str] = []
    emb_dim, vocab_size = _embedding(variables)
    layers: dict[StackName, list[_Layer]] = {s: _layers(variables, s) for s in STACKS}
    heads, head_dim = _heads(variables, operative_config, notes)
    mlp_dim = _only_shape(variables, r"DenseReluDense/wi(?:_0)?/kernel$", (emb_dim, None))[1]
    positions, max_positions = _positions(variables)
    faults = _contradictions(
        operative_config,
        sizes={
            "d_model": emb_dim,
            "d_ff": mlp_dim,
            "num_heads": heads,
            "d_kv": head_dim,
        },
        max_positions=max_positions,
        layers=layers,
    )
    mlp = _mlp(variables, operative_config, faults, notes)
    dropout_rate, norm_epsilon = _of_sublayers(operative_config, faults, notes)
    errors.raise_all(faults, where=operative_config.where)
    config = ConvT5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        mlp_dim=mlp_dim,
        num_heads=heads,
        head_dim=head_dim,
        encoder=_stack(layers["encoder"], "encoder", operative_config, notes),
        decoder=_stack(layers["decoder"], "decoder", operative_config, notes),
        norm_epsilon=norm_epsilon,
        mlp=mlp,
        tie_output="decoder/logits/kernel" not in variables,
        positions=positions,
        max_positions=max_positions,
        relative_buckets=_buckets(variables),
        dropout_rate=dropout_rate,
        dtype="float32",
        hide_start_token=True,
    )
    return Architecture(config=config, notes=tuple(notes))


def _embedding(variables: Mapping[str, Shape]) -> tuple[int, int]:
    shape = variables.get("shared/embedding")
    if shape is None or len(shape) != 2:
        shown = ", ".join(list(variables)[:5]) or "none"
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: it has no matrix shared/embedding (its "
            f"first variables: {shown}). Encoder-decoders of Mesh TensorFlow with one token table "
            "for both stacks can be read."
        )
    return shape[1], shape[0]


def _positions(variables: Mapping[str, Shape]) -> tuple[Any, int | None]:
    table = variables.get("shared/positional_embedding")
    relative = _any(variables, r"/relative_attention_bias$")
    if table and relative:
        raise errors.UserError(
            "the checkpoint is of an unknown architecture: it has both absolute positions "
            "(shared/positional_embedding) and a relative bias (relative_attention_bias)."
        )
    if table:
        return "learned", table[0]
    return ("relative" if relative else "none"), None


def _buckets(variables: Mapping[str, Shape]) -> int:
    shapes = [s for name, s in variables.items() if name.endswith("/relative_attention_bias")]
    return shapes[0][-1] if shapes else 32


def _heads(
    variables: Mapping[str, Shape], operative: OperativeConfig, notes: list[str]
) -> tuple[int, int]:
    inner = _only_shape(variables, r"(SelfAttention|EncDecAttention)/q$", (None, None))[1]
    biases = [s for name, s in variables.items() if name.endswith("/relative_attention_bias")]
    settings = [
        operative.get(layer, "num_heads", scope=stack)
        for layer in ("EncDecAttention", "SelfAttention")
        for stack in ("decoder", "encoder")
    ]
    heads = next((s for s in (*settings, operative.macro("num_heads")) if s is not None), None)
    if biases:
        if heads not in (None, biases[0][0]):
            raise errors.UserError(
                f"{operative.where}: num_heads={heads} contradicts relative_attention_bias of "
                f"shape {tuple(biases[0])}, one row per head; pass the config of this checkpoint."
            )
        heads = biases[0][0]
    if heads is None:
        emb_dim = variables["shared/embedding"][1]
        if inner != emb_dim or inner not in _T5_HEADS:
            raise errors.UserError(
                f"the number of heads is unknown: queries of {inner} columns in a model of "
                f"{emb_dim} channels match no T5 without relative bias "
                f"({', '.join(map(str, _T5_HEADS))}); pass --operative_config=FILE, which may "
                "hold just the line `num_heads = N`."
            )
        heads = _T5_HEADS[inner]
        notes.append(f"number of heads not given: {heads} assumed, as in T5 of this width.")
    if not isinstance(heads, int) or heads < 1 or inner % heads:
        raise errors.UserError(
            f"{operative.where}: num_heads={heads!r} contradicts queries of {inner} columns, which "
            "it must divide; pass the config of this checkpoint."
        )
    return heads, inner // heads


def _layers(variables: Mapping[str, Shape], stack: StackName) -> list[_Layer]:
    """Returns the mixing of every block of a stack, from the names in its first sublayer."""
    blocks: dict[int, dict[int, set[str]]] = {}
    for name in variables:
        if (match := _BLOCK.match(name)) and match[1] == stack and match[4] not in NORMS:
            sublayers = blocks.setdefault(int(match[2]), {})
            sublayers.setdefault(int(match[3]), set()).add(match[4])
    expected = [{"EncDecAttention"}] * (stack == "decoder") + [{"DenseReluDense"}]
    if not blocks or sorted(blocks) != list(range(len(blocks))):
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: blocks {sorted(blocks)} of the {stack} "
            "do not run from 0 without gaps."
        )
    for index, sublayers in sorted(blocks.items()):
        layers = [sublayers[i] for i in sorted(sublayers)]
        if layers[1:] != expected or len(layers[0]) != 1:
            text = " | ".join("+".join(sorted(part)) for part in layers)
            raise errors.UserError(
                f"the checkpoint is of an unknown architecture: {stack}/block_{index:03d} is made "
                f"of {text}; known are a convolution or SelfAttention"
                f"{', EncDecAttention' if stack == 'decoder' else ''} and DenseReluDense."
            )
    return [
        _layer(variables, f"{stack}/block_{index:03d}/layer_000", next(iter(blocks[index][0])))
        for index in sorted(blocks)
    ]


def _layer(variables: Mapping[str, Shape], sublayer: str, owner: str) -> _Layer:
    here = f"{sublayer}/{owner}"
    if owner == "SelfAttention":
        return _Layer(kind="attention", owner=owner)
    stems: dict[str, str] = {
        stem: kind
        for stem, kind in TAPS.items()
        if (kind == "depthwise") == (owner == "SeparableConv1DLayer")
        and f"{here}/{stem}_0/kernel" in variables
    }
    if owner not in ("LocalConvAttnBlock", "SeparableConv1DLayer") or len(stems) != 1:
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: {here} is neither attention nor a "
            "lightweight, dynamic or separable convolution."
        )
    stem, kind = stems.popitem()
    taps = 0
    while f"{here}/{stem}_{taps}/kernel" in variables:
        taps += 1
    dense = ["local_conv_inp_0", "local_conv_inp_1", "separable_conv1d/pointwise_dense"]
    dense.append("local_conv_attn_op_projection")
    present = tuple(f"{here}/{name}/kernel" in variables for name in dense)
    biases = {
        f"{here}/{name}/bias" in variables
        for name, there in zip(dense, present, strict=True)
        if there
    }
    if len(biases) > 1:
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: of the dense layers of {here} some "
            "have a bias and some have none."
        )
    conv_bias = "separable_conv1d/depthwise_conv_hack/depthwise_dense_0/bias"
    parts = (
        *present,
        True in biases,
        f"{here}/{stem}_0/bias" in variables and kind == "dynamic",
        f"{here}/{conv_bias}" in variables,
    )
    return _Layer(kind=kind, owner=owner, kernel_size=taps, parts=parts)


def _stack(
    layers: Sequence[_Layer], stack: StackName, operative: OperativeConfig, notes: list[str]
) -> StackConfig:
    convolutions = [layer for layer in layers if layer.kind != "attention"]
    if not convolutions:
        return StackConfig(num_layers=len(layers), mixing="attention")
    if len({(layer.owner, layer.parts) for layer in convolutions}) != 1:
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: the convolution blocks of the {stack} "
            "differ in their dense layers or biases."
        )
    linear, gated, pointwise, output, dense_bias, predictor_bias, conv_bias = convolutions[0].parts
    kinds = [layer.kind for layer in layers]
    sizes = [layer.kernel_size for layer in layers]
    settings = {
        "kernel_size": _one_or_all(sizes),
        "padding": _padding(convolutions, stack, operative, notes),
        "input_projection": "gated" if gated else "linear" if linear else "none",
        "pointwise": pointwise,
        "output_projection": output,
        "projection_bias": dense_bias,
        "predictor_bias": predictor_bias,
        "conv_bias": conv_bias,
    }
    return StackConfig(num_layers=len(layers), mixing=_one_or_all(kinds), **settings)


def _padding(
    convolutions: Sequence[_Layer], stack: StackName, operative: OperativeConfig, notes: list[str]
):
    """Returns the padding of the taps; None means convt5's default, centered or causal."""
    owner = convolutions[0].owner
    first, last = (
        operative.number(owner, f"{end}_relative_pos", None, scope=stack, whole=True)
        for end in ("min", "max")
    )
    sizes = {layer.kernel_size for layer in convolutions}
    if first is None or last is None:
        usual = "centered" if stack == "encoder" else "causal"
        taps = "/".join(map(str, sorted(sizes)))
        if stack == "encoder" and any(size % 2 == 0 for size in sizes):
            raise errors.UserError(
                f"the offsets of the {taps} taps of the encoder are unknown: an even number has "
                "no middle; pass --operative_config=FILE, which may hold just the lines "
                f"`encoder/{owner}.min_relative_pos = A` and `encoder/{owner}.max_relative_pos "
                "= B` beside the others that are needed."
            )
        notes.append(f"tap offsets not given: the {taps} taps of the {stack} are assumed {usual}.")
        return None
    if sizes != {last - first + 1}:
        raise errors.UserError(
            f"{operative.where}: {stack} taps from {first} to {last} are {last - first + 1}, but "
            f"the checkpoint holds {'/'.join(map(str, sorted(sizes)))}; pass the config of this "
            "checkpoint."
        )
    if first > 0 or last < 0:
        raise errors.UserError(
            f"{operative.where}: {stack} taps from {first} to {last} miss the current position, "
            "which convt5's convolutions always hold."
        )
    default = "CENTERED" if stack == "encoder" else "CAUSAL"
    widths = (-first, last)
    return None if pad_widths(last - first + 1, 1, default) == widths else widths


def _contradictions(
    operative: OperativeConfig,
    *,
    sizes: Mapping[str, int],
    max_positions: int | None,
    layers: Mapping[StackName, Sequence[_Layer]],
) -> list[str]:
    """Returns settings that contradict the shapes, or that convt5 does not implement."""
    faults = [
        f"{name}={operative.macro(name)} contradicts the checkpoint, where it is {size}."
        for name, size in sizes.items()
        if operative.macro(name) not in (None, size)
    ]
    for stack in STACKS:
        wanted = _UNCHANGED | {
            ("make_layer_stack", "num_layers"): len(layers[stack]),
            ("Unitransformer", "d_model"): sizes["d_model"],
            ("DenseReluDense", "hidden_size"): sizes["d_ff"],
            ("SelfAttention", "num_heads"): sizes["num_heads"],
            ("SelfAttention", "key_value_size"): sizes["d_kv"],
        }
        if max_positions is not None:
            wanted["Unitransformer", "max_length"] = max_positions
        wanted |= {
            ("EncDecAttention", name): value
            for (owner, name), value in wanted.items()
            if owner == "SelfAttention"
        }
        for (owner, name), expected in wanted.items():
            value = operative.reference(owner, name, scope=stack)
            if value not in (None, {}, expected):
                faults.append(
                    f"{stack}/{owner}.{name}={value!r} contradicts the checkpoint or what convt5 "
                    f"implements: {expected!r}."
                )
        faults += _sublayer_faults(operative, stack)
    return faults


def _mlp(
    variables: Mapping[str, Shape], operative: OperativeConfig, faults: list[str], notes: list[str]
) -> MlpKind:
    """Returns the kind of the feed-forward layers, which only the config tells."""
    count = 1 + _any(variables, r"DenseReluDense/wi_0/kernel$")
    known = [list(names) for names in ACTIVATIONS if len(names) == count]
    kinds: list[MlpKind] = []
    for stack in STACKS:
        told = operative.get("DenseReluDense", "activation", scope=stack)
        kind = mlp_kind(known[0] if told is None else told, count)
        if kind is None:
            faults.append(
                f"{stack}/DenseReluDense.activation={told!r} contradicts the checkpoint or what "
                f"convt5 implements: {' or '.join(map(str, known))}."
            )
        elif told is None and count > 1:
            notes.append(f"activation of the {stack} not given: {kind} assumed, as in T5 1.1.")
        kinds.append(kind or "relu")
    if len(set(kinds)) > 1 and not faults:
        faults.append(
            f"DenseReluDense.activation is {kinds[0]} in the encoder and {kinds[1]} in the "
            "decoder, but convt5 has one for both."
        )
    return kinds[0]


def _of_sublayers(
    operative: OperativeConfig, faults: list[str], notes: list[str]
) -> tuple[Any, Any]:
    """Returns dropout rate and epsilon; earlier versions had both in the stack itself."""
    is_old = any(_has_own_sublayers(operative, stack) for stack in STACKS)
    dropout = ("LayerStack" if is_old else "sublayer_dropout", "dropout_rate")
    norm = ("LayerStack", "norm_epsilon") if is_old else ("sublayer_rms_norm", "epsilon")
    rate = _of_both(operative, *dropout, 0.1, faults)
    if all(operative.get(*dropout, scope=stack) is None for stack in STACKS):
        notes.append(f"dropout_rate not given: {rate} assumed, as in T5.")
    for stack in STACKS:
        for layer in ("SelfAttention", "EncDecAttention", "DenseReluDense"):
            if operative.number(layer, "dropout_rate", rate, scope=stack) != rate:
                notes.append(
                    f"{stack}/{layer}.dropout_rate is another one, but convt5 has one: {rate}."
                )
    return rate, _of_both(operative, *norm, 1e-6, faults)


def _has_own_sublayers(operative: OperativeConfig, stack: StackName) -> bool:
    """Returns whether a stack makes its sublayers itself, and ignores lists of them."""
    return operative.get("LayerStack", "dropout_rate", scope=stack) is not None


def _sublayer_faults(operative: OperativeConfig, stack: StackName) -> list[str]:
    """Returns lists of sublayers in another order than T5's, or with others."""
    if _has_own_sublayers(operative, stack):
        return []
    faults = []
    for name, usual in _SUBLAYERS.items():
        told = operative.get("LayerStack", name, scope=stack)
        names = re.findall(REFERENCE, str(told))
        plain = [re.sub(r"^sublayer_(legacy_)?(final_)?", "", each) for each in names]
        # Every layer hides padding from itself.
        if told is not None and [each for each in plain if each != "mask_padding"] != [*usual]:
            faults.append(
                f"{stack}/LayerStack.{name}={told!r} is not what convt5 implements: "
                f"{', '.join(usual)}."
            )
    return faults


def _of_both(
    operative: OperativeConfig, configurable: str, parameter: str, default: float, faults: list[str]
) -> Any:
    """Returns a number that convt5 has for both stacks."""
    first, second = (
        operative.number(configurable, parameter, default, scope=stack) for stack in STACKS
    )
    if first != second:
        faults.append(
            f"{configurable}.{parameter} is {first} in the encoder and {second} in the decoder, "
            "but convt5 has one for both."
        )
    return first


def _only_shape(
    variables: Mapping[str, Shape], pattern: str, like: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Returns the common shape of all variables of a kind."""
    shapes = {shape for name, shape in variables.items() if re.search(pattern, name)}
    (shape,) = shapes if len(shapes) == 1 else ((),)
    if len(shape) != 2 or any(a not in (None, b) for a, b in zip(like, shape, strict=True)):
        raise errors.UserError(
            f"the checkpoint is of an unknown architecture: variables {pattern} have shapes "
            f"{sorted(shapes)}; expected one matrix shape {like} for all layers."
        )
    return shape[0], shape[1]


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else tuple(values)


def _any(variables: Mapping[str, Shape], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in variables)
