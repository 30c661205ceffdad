"""Costs of a model by formula: parameters, FLOPs, memory, receptive fields.

Computed from `architecture.ModelDescription` and sequence lengths alone, before anything is built.
`inspect` prints them, and comparisons at equal cost use them. Lengths are in tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from convt5.modeling import attention
from convt5.modeling.description import ModelDescription, StackName, StemLayer
from convt5.modeling.mixers.base import MixerConfig, Reach
from convt5.modeling.mixers.results import number_of
from convt5.modeling.model import ConvT5
from convt5.modeling.tree_paths import matches, named_leaves
from convt5.training import schedule
from convt5.training.optimizer import OptimizerConfig

Shapes = dict[str, tuple[int, ...]]

TRAINING_FACTOR = 3
"""FLOPs of forward and backward pass relative to the forward pass: each product has two operands,
and the gradient of each is another product of the same size."""

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Costs of one layer of a stack.

    Attributes:
        stack: "encoder" or "decoder".
        index: 0 is the bottom layer.
        mixing: its mixing.
        reach: what it and all layers below it read of their own sequence. Decoder layers also read
            the whole encoder output.
        parameters: number of parameters.
        flops_per_token: forward FLOPs per token of the stack's sequence.
        activation_bytes: bytes kept for the backward pass per token of the stack's sequence.
    """

    stack: StackName
    index: int
    mixing: MixerConfig
    reach: Reach
    parameters: int
    flops_per_token: float
    activation_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemCost:
    """Costs of one convolution of the encoder's stem, or of its final dense layer.

    Attributes:
        index: 0 is the bottom layer.
        layer: the convolution; None for the dense layer.
        stride: tokens per output.
        reach: tokens that it and all below it read, relative to the first token of an output.
        parameters: number of parameters.
        flops_per_position: forward FLOPs per output.
        activation_bytes: bytes kept for the backward pass per output.
    """

    index: int
    layer: StemLayer | None
    stride: int
    reach: Reach
    parameters: int
    flops_per_position: float
    activation_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCost:
    """Costs of a model at given lengths; FLOPs and bytes are per example (row of a batch).

    FLOPs count two for each multiply-add of matrix products, attention and convolution taps. They
    exclude elementwise operations (norms, activations, softmax, masks): 1 % of the compiler's count
    at emb_dim 512. Attention counts all pairs of positions, masked or not, as it computes them.

    Attributes:
        encoder_length, decoder_length: tokens per row.
        encoder_positions: positions of the encoder's layers, fewer than tokens after a strided
            stem.
        stem: the layers of the encoder's stem, bottom first.
        layers: the encoder's layers, then the decoder's, bottom first.
        shapes: shape of every parameter by name.
        output_flops: forward FLOPs of the logits.
        forward_flops: forward FLOPs of the whole model.
        logits_bytes: bytes of the float32 logits.
        decoding_bytes: bytes that decoding keeps per row.
    """

    encoder_length: int
    decoder_length: int
    encoder_positions: int
    stem: tuple[StemCost, ...]
    layers: tuple[LayerCost, ...]
    shapes: Shapes
    output_flops: float
    forward_flops: float
    logits_bytes: int
    decoding_bytes: int

    @property
    def parameters(self) -> int:
        return num_parameters(self.shapes)

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and backward pass; those of the optimizer are negligible."""
        return TRAINING_FACTOR * self.forward_flops

    @property
    def activation_bytes(self) -> float:
        """Bytes kept between the passes: inputs of products and nonlinear functions, each once.

        An estimate: the compiler may recompute some, or keep converted copies of others.
        """
        return sum(layer.activation_bytes * self._tokens(layer) for layer in self.layers) + sum(
            part.activation_bytes * self._outputs(part) for part in self.stem
        )

    def reach(self, stack: StackName) -> Reach:
        """Returns the reach of the whole stack in its own sequence, in tokens."""
        return [layer.reach for layer in self.layers if layer.stack == stack][-1]

    def _tokens(self, layer: LayerCost) -> int:
        return self.encoder_positions if layer.stack == "encoder" else self.decoder_length

    def _outputs(self, part: StemCost) -> int:
        return -(-self.encoder_length // part.stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of one training step on one device; `activations` and later ones are estimates.

    Attributes:
        parameters: float32 parameters.
        gradients: float32 gradients of the trained parameters.
        optimizer: optimizer state.
        activations: activations kept for the backward pass.
        logits: the float32 logits and their gradient.
        gathered: float32 parameters all-gathered over "fsdp", at most.
        average: the float32 average of the model, if one is kept.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: float
    logits: float
    gathered: int = 0
    average: int = 0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def model_cost(config: ModelDescription, *, encoder_length: int, decoder_length: int) -> ModelCost:
    """Returns the costs of a model at given lengths."""
    shapes = parameter_shapes(config)
    positions = config.encoder_positions(encoder_length)
    lengths = {"encoder_length": positions, "decoder_length": decoder_length}
    return ModelCost(
        encoder_length=encoder_length,
        decoder_length=decoder_length,
        encoder_positions=positions,
        stem=_stem_costs(config),
        layers=(
            *_stack_costs(config, "encoder", shapes, **lengths),
            *_stack_costs(config, "decoder", shapes, **lengths),
        ),
        shapes=shapes,
        output_flops=_output_flops(config, decoder_length),
        forward_flops=forward_flops(
            config, encoder_length=encoder_length, decoder_length=decoder_length
        ),
        logits_bytes=FLOAT32_BYTES * config.vocab_size * decoder_length,
        decoding_bytes=_decoding_bytes(config, **lengths),
    )


def forward_flops(config: ModelDescription, *, encoder_length: int, decoder_length: int) -> float:
    """Returns FLOPs of the forward pass of an example; without a stem, no model is traced."""
    positions = config.encoder_positions(encoder_length)
    encoder = (
        _layer_flops(config, mixing, length=positions, source=None) * positions
        for mixing in config.encoder_layers
    )
    decoder = (
        _layer_flops(config, mixing, length=decoder_length, source=positions) * decoder_length
        for mixing in config.decoder_layers
    )
    stem = (
        part.flops_per_position * -(-encoder_length // part.stride) for part in _stem_costs(config)
    )
    return _output_flops(config, decoder_length) + sum((*encoder, *decoder, *stem))


def training_memory(
    config: ModelDescription,
    optimizer: OptimizerConfig,
    *,
    rows: int,
    encoder_length: int,
    decoder_length: int,
    frozen: Sequence[str] = (),
    averaged: bool = False,
) -> TrainingMemory:
    """Returns the memory of one update on a single device with `rows` examples.

    Args:
        config: the model.
        optimizer: the optimizer.
        rows: examples, or those of a microbatch.
        encoder_length, decoder_length: tokens per row.
        frozen: patterns of parameters that are not trained.
        averaged: whether an average of the model is kept.
    """
    cost = model_cost(config, encoder_length=encoder_length, decoder_length=decoder_length)
    trained = {name: s for name, s in cost.shapes.items() if not matches(name, frozen)}
    parameter_bytes = FLOAT32_BYTES * cost.parameters
    return TrainingMemory(
        parameters=parameter_bytes,
        gradients=FLOAT32_BYTES * num_parameters(trained),
        optimizer=optimizer_bytes(optimizer, trained),
        activations=rows * cost.activation_bytes,
        logits=2 * rows * cost.logits_bytes,
        average=parameter_bytes if averaged else 0,
    )


def optimizer_bytes(optimizer: OptimizerConfig, shapes: Shapes) -> int:
    """Returns the bytes of optimizer state for float32 parameters of these shapes."""
    parameters = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    state = jax.eval_shape(optimizer.build(schedule.Constant(rate=1.0)).init, parameters)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def num_parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """Returns the total number of elements of arrays of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def stack_reaches(
    layers: Sequence[MixerConfig],
    *,
    stride: int = 1,
    below: Reach | None = None,
) -> tuple[Reach, ...]:
    """Returns the combined reach of each layer and the layers below it.

    A convolution adds (kernel_size - 1) * dilation positions to the reach below it, and so does
    each Canon layer.

    Args:
        layers: the layers, bottom first.
        stride: tokens per position of these layers.
        below: the reach of the input of the lowest layer.
    """
    below = below or Reach(0, 0)
    reaches = []
    for mixing in layers:
        below = below.then(mixing.layer_reach.strided(stride))
        reaches.append(below)
    return tuple(reaches)


@functools.lru_cache(maxsize=1024)
def parameter_shapes(config: ModelDescription) -> Shapes:
    """Returns the shape of every parameter of the model by name; allocates nothing.

    Layers with equal settings have equal shapes, so one of each is built.
    """
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelDescription)}
    distinct = _DistinctLayers(**settings)
    model = jax.eval_shape(lambda: ConvT5(distinct, key=jax.random.key(0)))
    built = {name: tuple(leaf.shape) for name, leaf in named_leaves(model)}
    in_stacks = ("encoder/layers/", "decoder/layers/")
    shapes = {name: shape for name, shape in built.items() if not name.startswith(in_stacks)}
    for stack, layers, kinds in (
        ("encoder", config.encoder_layers, distinct.encoder_layers),
        ("decoder", config.decoder_layers, distinct.decoder_layers),
    ):
        for i, layer in enumerate(layers):
            prefix = f"{stack}/layers/{kinds.index(layer)}/"
            shapes |= {
                f"{stack}/layers/{i}/{name.removeprefix(prefix)}": shape
                for name, shape in built.items()
                if name.startswith(prefix)
            }
    return shapes


class _DistinctLayers(ModelDescription):
    """A model in which every layer differs from those below it in its stack."""

    @property
    def encoder_layers(self) -> tuple[MixerConfig, ...]:
        return tuple(dict.fromkeys(super().encoder_layers))

    @property
    def decoder_layers(self) -> tuple[MixerConfig, ...]:
        return tuple(dict.fromkeys(super().decoder_layers))


def _output_flops(config: ModelDescription, decoder_length: int) -> float:
    return 2 * config.emb_dim * config.vocab_size * decoder_length


def _stem_costs(config: ModelDescription) -> tuple[StemCost, ...]:
    if config.stem is None:
        return ()
    width = jnp.dtype(config.dtype).itemsize
    shapes = {
        name.removeprefix("stem/"): shape
        for name, shape in parameter_shapes(config).items()
        if name.startswith("stem/")
    }
    costs, stride, reach = [], 1, Reach(0, 0)
    for i, layer in enumerate(config.stem.layers(config.emb_dim)):
        left, right = layer.reach
        reach = reach.then(Reach(left, right).strided(stride))
        stride *= layer.stride
        layer_shapes = {
            name: shape for name, shape in shapes.items() if name.startswith(f"layers/{i}/")
        }
        inputs = layer.kernel_size * layer.in_dim
        costs.append(
            StemCost(
                index=i,
                layer=layer,
                stride=stride,
                reach=reach,
                parameters=num_parameters(layer_shapes),
                flops_per_position=2 * inputs * layer.out_dim,
                # The windows, and the inputs of norm and activation.
                activation_bytes=width * (inputs + 2 * layer.out_dim),
            )
        )
    if "output/kernel" in shapes:
        in_dim, out_dim = shapes["output/kernel"]
        costs.append(
            StemCost(
                index=len(costs),
                layer=None,
                stride=stride,
                reach=reach,
                parameters=in_dim * out_dim,
                flops_per_position=2 * in_dim * out_dim,
                activation_bytes=width * in_dim,
            )
        )
    return tuple(costs)


def _stack_costs(
    config: ModelDescription,
    stack: StackName,
    shapes: Shapes,
    *,
    encoder_length: int,
    decoder_length: int,
) -> list[LayerCost]:
    layers = _mixings(config, stack)
    is_decoder = stack == "decoder"
    length = decoder_length if is_decoder else encoder_length
    source = encoder_length if is_decoder else None
    stem = _stem_costs(config) if not is_decoder else ()
    reaches = stack_reaches(
        layers,
        stride=stem[-1].stride if stem else 1,
        below=stem[-1].reach if stem else Reach(0, 0),
    )
    return [
        LayerCost(
            stack=stack,
            index=i,
            mixing=mixing,
            reach=reach,
            parameters=num_parameters(
                {n: s for n, s in shapes.items() if n.startswith(f"{stack}/layers/{i}/")}
            ),
            flops_per_token=_layer_flops(config, mixing, length=length, source=source),
            activation_bytes=_layer_activations(config, mixing, length=length, source=source),
        )
        for i, (mixing, reach) in enumerate(zip(layers, reaches, strict=True))
    ]


def _layer_flops(
    config: ModelDescription, mixing: MixerConfig, *, length: int, source: int | None
) -> float:
    """Returns the forward FLOPs per token of a layer; `source` is the encoder's length, if any."""
    matrices = 2 if config.mlp == "relu" else 3
    flops = 2.0 * matrices * config.emb_dim * config.mlp_dim
    flops += number_of(mixing, "flops", config, length)
    flops += 2 * mixing.canon_kernel_size * mixing.canon_channels(config)
    if source is not None:
        flops += attention.flops(config, queries=length, keys=source) / length
    return flops


def _layer_activations(
    config: ModelDescription, mixing: MixerConfig, *, length: int, source: int | None
) -> float:
    """Returns the bytes per token of the activations that a layer's backward pass reads."""
    width = jnp.dtype(config.dtype).itemsize
    # The feed-forward layer: the inputs of its norm and products, and of the product wo.
    gated = config.mlp != "relu"
    kept = width * (2 * config.emb_dim + (3 if gated else 1) * config.mlp_dim)
    kept += number_of(mixing, "activation_bytes", config, length)
    # The input of each Canon layer, and of its activation.
    vectors = 1 if mixing.canon_activation == "none" else 2
    kept += width * vectors * mixing.canon_channels(config)
    if source is not None:
        kept += attention.activation_bytes(config, queries=length, keys=source) / length
    return kept


def _decoding_bytes(config: ModelDescription, *, encoder_length: int, decoder_length: int) -> int:
    """Returns the bytes that decoding keeps per row: taps' inputs, or keys and values."""
    memory = attention.cache_size(config, encoder_length)
    numbers = sum(
        number_of(mixing, "state_size", config, decoder_length)
        + mixing.canon_slots * mixing.canon_channels(config)
        + memory
        for mixing in config.decoder_layers
    )
    return jnp.dtype(config.dtype).itemsize * numbers


def _mixings(config: ModelDescription, stack: str) -> tuple[MixerConfig, ...]:
    return config.encoder_layers if stack == "encoder" else config.decoder_layers
