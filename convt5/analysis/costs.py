"""What a model costs, in closed form: parameters, FLOPs, memory, receptive fields.

Computed from `architecture.ConvT5Config` and sequence lengths alone, before anything is built;
`inspect` prints it and comparisons at equal cost pair models by it. Lengths are in tokens.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from convt5 import schedule
from convt5.architecture import ConvT5Config, MixingConfig, StackName, StemLayer
from convt5.optimizer import OptimizerConfig

Shapes = dict[str, tuple[int, ...]]

TRAINING_FACTOR = 3
"""FLOPs of forward and backward pass over those of the forward pass alone: each product has two
operands, and the gradient of each is one more product of the same size."""

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Reach:
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

    def __str__(self) -> str:
        left = "start" if self.left is None else f"{-self.left}"
        right = "end" if self.right is None else f"{self.right:+}" if self.right else "0"
        return f"{left} .. {right}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of a stack.

    Attributes:
        stack: "encoder" or "decoder".
        index: 0 is the bottom layer.
        mixing: how it mixes the sequence.
        reach: what it and all layers below it read of their own sequence. Decoder layers read the
            whole encoder output besides.
        parameters: number of parameters.
        flops_per_token: forward FLOPs for each token of the stack's sequence.
        activation_bytes: kept for the backward pass for each token of the stack's sequence.
    """

    stack: StackName
    index: int
    mixing: MixingConfig
    reach: Reach
    parameters: int
    flops_per_token: float
    activation_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemCost:
    """One convolution of the encoder's stem, or the dense layer that ends it.

    Attributes:
        index: 0 is the bottom one.
        layer: the convolution; None for the dense layer.
        stride: tokens for each of its outputs.
        reach: tokens that it and all below it read, from the first that an output stands for.
        parameters: number of parameters.
        flops_per_position: forward FLOPs for each output.
        activation_bytes: kept for the backward pass for each output.
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
    """A model at given lengths; FLOPs and bytes are for one example (one row of a batch).

    FLOPs count two for each multiply-add of matrix products, attention and convolution taps.
    Elementwise work (norms, activations, softmax, masks) is left out: 1 % of what the compiler
    counts at emb_dim 512. Attention counts the whole rectangle, masked or not, as it is computed.

    Attributes:
        encoder_length, decoder_length: tokens of the row.
        encoder_positions: of the encoder's layers: fewer than tokens behind a stem with a stride.
        stem: the layers of the encoder's stem, bottom first.
        layers: the encoder's layers, then the decoder's, bottom first.
        shapes: of every parameter by name.
        output_flops: of the logits, forward.
        logits_bytes: of the float32 logits.
        decoding_bytes: what decoding keeps for a row of these lengths.
    """

    encoder_length: int
    decoder_length: int
    encoder_positions: int
    stem: tuple[StemCost, ...]
    layers: tuple[LayerCost, ...]
    shapes: Shapes
    output_flops: float
    logits_bytes: int
    decoding_bytes: int

    @property
    def parameters(self) -> int:
        return num_parameters(self.shapes)

    @property
    def forward_flops(self) -> float:
        return (
            self.output_flops
            + sum(layer.flops_per_token * self._tokens(layer) for layer in self.layers)
            + sum(part.flops_per_position * self._outputs(part) for part in self.stem)
        )

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and backward pass; the optimizer's are few and left out."""
        return TRAINING_FACTOR * self.forward_flops

    @property
    def activation_bytes(self) -> float:
        """Kept between the passes: inputs of products and nonlinear functions, each once.

        An estimate: the compiler may recompute some or keep converted copies of others.
        """
        return sum(layer.activation_bytes * self._tokens(layer) for layer in self.layers) + sum(
            part.activation_bytes * self._outputs(part) for part in self.stem
        )

    def reach(self, stack: StackName) -> Reach:
        """Returns what the whole stack reads of its own sequence, in tokens."""
        return [layer.reach for layer in self.layers if layer.stack == stack][-1]

    def _tokens(self, layer: LayerCost) -> int:
        return self.encoder_positions if layer.stack == "encoder" else self.decoder_length

    def _outputs(self, part: StemCost) -> int:
        return -(-self.encoder_length // part.stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of one training step on one device; an estimate from `activations` on.

    Attributes:
        parameters: float32.
        gradients: float32, as many as are trained.
        optimizer: its state.
        activations: kept between forward and backward pass.
        logits: the float32 logits and their gradient.
        gathered: float32 parameters collected from the devices that hold parts of them; at most.
        average: float32, of a model that is averaged over its updates.
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


def model_cost(config: ConvT5Config, *, encoder_length: int, decoder_length: int) -> ModelCost:
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
        output_flops=2 * config.emb_dim * config.vocab_size * decoder_length,
        logits_bytes=FLOAT32_BYTES * config.vocab_size * decoder_length,
        decoding_bytes=_decoding_bytes(config, **lengths),
    )


def training_memory(
    config: ConvT5Config,
    optimizer: OptimizerConfig,
    *,
    rows: int,
    encoder_length: int,
    decoder_length: int,
) -> TrainingMemory:
    """Returns the memory of one update on a single device with `rows` examples at a time."""
    cost = model_cost(config, encoder_length=encoder_length, decoder_length=decoder_length)
    parameter_bytes = FLOAT32_BYTES * cost.parameters
    return TrainingMemory(
        parameters=parameter_bytes,
        gradients=parameter_bytes,
        optimizer=optimizer_bytes(optimizer, cost.shapes),
        activations=rows * cost.activation_bytes,
        logits=2 * rows * cost.logits_bytes,
    )


def optimizer_bytes(optimizer: OptimizerConfig, shapes: Shapes) -> int:
    """Returns the bytes of the optimizer's state for float32 parameters of these shapes."""
    parameters = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    state = jax.eval_shape(optimizer.build(schedule.Constant(rate=1.0)).init, parameters)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def num_parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """Returns how many numbers arrays of these shapes hold."""
    return sum(math.prod(shape) for shape in shapes.values())


def stack_reaches(
    layers: Sequence[MixingConfig],
    *,
    causal: bool,
    stride: int = 1,
    below: Reach = Reach(0, 0),  # noqa: B008
) -> tuple[Reach, ...]:
    """Returns, for each layer, what it and the layers below it read of their sequence.

    A convolution adds (kernel_size - 1) * dilation positions to what lies below it.

    Args:
        layers: bottom first.
        causal: attention reads the past alone.
        stride: tokens for each position of these layers.
        below: what the lowest of them reads at its own position.
    """
    reaches = []
    for mixing in layers:
        if _attends(mixing):
            own = Reach(None, 0 if causal else None)
        else:
            left, right = mixing.reach
            own = Reach(left * stride, right * stride)
        below = below.then(own)
        reaches.append(below)
    return tuple(reaches)


def parameter_shapes(config: ConvT5Config) -> Shapes:
    """Returns the shape of every parameter by its name in the model."""
    emb, vocab = config.emb_dim, config.vocab_size
    shapes: Shapes = {"token_embedder/embedding": (vocab, emb)}
    if config.positions == "learned":
        assert config.max_positions is not None
        shapes["position_embedder/embedding"] = (config.max_positions, emb)
    shapes |= _under("stem", _stem_shapes(config))
    for stack in ("encoder", "decoder"):
        layers = _mixings(config, stack)
        if config.positions == "relative" and any(map(_attends, layers)):
            buckets = (config.relative_buckets, config.num_heads)
            shapes[f"{stack}/relative_bias/embedding"] = buckets
        for i, mixing in enumerate(layers):
            layer = _layer_shapes(config, mixing, decoder=stack == "decoder")
            shapes |= _under(f"{stack}/layers/{i}", layer)
        if config.layer_order != "post":
            shapes |= _under(f"{stack}/final_norm", _norm_shapes(config))
    if not config.tie_output:
        shapes["output_head/kernel"] = (emb, vocab)
    return shapes


def _stem_shapes(config: ConvT5Config) -> Shapes:
    if config.stem is None:
        return {}
    shapes: Shapes = {}
    layers = config.stem.layers(config.emb_dim)
    norms = {"none": (), "rms": ("scale",), "layer": ("scale", "bias")}[config.stem.norm]
    for i, layer in enumerate(layers):
        shapes[f"layers/{i}/kernel"] = (layer.kernel_size, layer.in_dim, layer.out_dim)
        shapes |= {f"layers/{i}/norm/{name}": (layer.out_dim,) for name in norms}
    if config.stem.projection:
        shapes["output/kernel"] = (layers[-1].out_dim, config.emb_dim)
    return shapes


def _layer_shapes(config: ConvT5Config, mixing: MixingConfig, *, decoder: bool) -> Shapes:
    mix = _attention_shapes(config) if _attends(mixing) else _convolution_shapes(config, mixing)
    shapes = _under("mixing_norm", _norm_shapes(config)) | _under("mixing", mix)
    if decoder:
        shapes |= _under("cross_norm", _norm_shapes(config))
        shapes |= _under("cross_attention", _attention_shapes(config))
    return shapes | _under("mlp_norm", _norm_shapes(config)) | _under("mlp", _mlp_shapes(config))


def _convolution_shapes(config: ConvT5Config, mixing: MixingConfig) -> Shapes:
    emb, taps = config.emb_dim, mixing.kernel_size
    kernels = mixing.num_kernels or emb
    shapes: Shapes = {}
    for name in _dense_names(mixing):
        shapes |= _under(name, _dense_shapes(emb, emb, bias=mixing.projection_bias))
    if mixing.kind == "depthwise":
        shapes["kernel"] = (taps, emb)
    elif mixing.kind == "lightweight":
        shapes["kernel_logits"] = (taps, kernels)
    else:
        shapes["predictor/kernel"] = (taps, emb, kernels)
        if mixing.predictor_bias:
            shapes["predictor/bias"] = (taps, kernels)
    if mixing.conv_bias:
        shapes["conv_bias"] = (emb,)
    return shapes


def _dense_names(mixing: MixingConfig) -> tuple[str, ...]:
    """The dense layers of a convolution block, in order."""
    present = {
        "input": mixing.input_projection != "none",
        "gate": mixing.input_projection == "gated",
        "pointwise": mixing.pointwise,
        "output": mixing.output_projection,
    }
    return tuple(name for name, is_present in present.items() if is_present)


def _attention_shapes(config: ConvT5Config) -> Shapes:
    emb, inner = config.emb_dim, _inner(config)
    shapes = {f"{name}/kernel": (emb, inner) for name in ("query", "key", "value")}
    return {**shapes, "output/kernel": (inner, emb)}


def _mlp_shapes(config: ConvT5Config) -> Shapes:
    emb, mlp, bias = config.emb_dim, config.mlp_dim, config.mlp_bias
    shapes: Shapes = {}
    for name in ("wi_0", "wi_1") if config.mlp == "gated_gelu" else ("wi",):
        shapes |= _under(name, _dense_shapes(emb, mlp, bias=bias))
    return shapes | _under("wo", _dense_shapes(mlp, emb, bias=bias))


def _dense_shapes(in_dim: int, out_dim: int, *, bias: bool) -> Shapes:
    return {"kernel": (in_dim, out_dim), **({"bias": (out_dim,)} if bias else {})}


def _norm_shapes(config: ConvT5Config) -> Shapes:
    names = ("scale", "bias") if config.norm == "layer" else ("scale",)
    return {name: (config.emb_dim,) for name in names}


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}/{name}": shape for name, shape in shapes.items()}


def _stem_costs(config: ConvT5Config) -> tuple[StemCost, ...]:
    if config.stem is None:
        return ()
    width = jnp.dtype(config.dtype).itemsize
    shapes, costs, stride, reach = _stem_shapes(config), [], 1, Reach(0, 0)
    for i, layer in enumerate(config.stem.layers(config.emb_dim)):
        left, right = layer.reach
        reach = reach.then(Reach(left * stride, right * stride))
        stride *= layer.stride
        own = {name: shape for name, shape in shapes.items() if name.startswith(f"layers/{i}/")}
        inputs = layer.kernel_size * layer.in_dim
        costs.append(
            StemCost(
                index=i,
                layer=layer,
                stride=stride,
                reach=reach,
                parameters=num_parameters(own),
                flops_per_position=2 * inputs * layer.out_dim,
                # The windows, and what the norm and the activation read.
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
    config: ConvT5Config,
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
        causal=is_decoder,
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
    config: ConvT5Config, mixing: MixingConfig, *, length: int, source: int | None
) -> float:
    """Forward FLOPs per token of a layer; `source` is the encoder's length, for a decoder."""
    matrices = 3 if config.mlp == "gated_gelu" else 2
    flops = 2.0 * matrices * config.emb_dim * config.mlp_dim
    if _attends(mixing):
        flops += _attention_flops(config, queries=length, keys=length) / length
    else:
        flops += _convolution_flops(config, mixing)
    if source is not None:
        flops += _attention_flops(config, queries=length, keys=source) / length
    return flops


def _convolution_flops(config: ConvT5Config, mixing: MixingConfig) -> float:
    emb, taps = config.emb_dim, mixing.kernel_size
    flops = 2 * len(_dense_names(mixing)) * emb * emb + 2 * taps * emb
    if mixing.kind == "dynamic":
        flops += 2 * taps * emb * (mixing.num_kernels or emb)
    return flops


def _attention_flops(config: ConvT5Config, *, queries: int, keys: int) -> float:
    """For the whole sequence: queries and outputs, keys and values, the two products."""
    inner = _inner(config)
    return 4 * config.emb_dim * inner * (queries + keys) + 4 * queries * keys * inner


def _layer_activations(
    config: ConvT5Config, mixing: MixingConfig, *, length: int, source: int | None
) -> float:
    """Bytes per token of what the backward pass of a layer reads besides its parameters."""
    width = jnp.dtype(config.dtype).itemsize
    # The feed-forward layers: what their norm and they read, and what the product wo reads.
    gated = config.mlp == "gated_gelu"
    kept = width * (2 * config.emb_dim + (3 if gated else 1) * config.mlp_dim)
    if _attends(mixing):
        kept += _attention_activations(config, queries=length, keys=length) / length
    else:
        kept += _convolution_activations(config, mixing)
    if source is not None:
        kept += _attention_activations(config, queries=length, keys=source) / length
    return kept


def _convolution_activations(config: ConvT5Config, mixing: MixingConfig) -> float:
    width = jnp.dtype(config.dtype).itemsize
    # Read by the norm, by the block's first products, by the taps.
    vectors = 3
    vectors += 2 if mixing.input_projection == "gated" else 0  # Both factors of the gate.
    vectors += mixing.pointwise + mixing.output_projection
    kept = width * vectors * config.emb_dim
    if mixing.kind == "dynamic":
        # Softmax weights of every position.
        kept += FLOAT32_BYTES * mixing.kernel_size * (mixing.num_kernels or config.emb_dim)
    return kept


def _attention_activations(config: ConvT5Config, *, queries: int, keys: int) -> float:
    """For the whole sequence: norm and query input, q, k, v, their result, float32 weights."""
    width = jnp.dtype(config.dtype).itemsize
    vectors = 2 * config.emb_dim * queries + 2 * _inner(config) * (queries + keys)
    weight_bytes = FLOAT32_BYTES + (width if width < FLOAT32_BYTES else 0)
    return width * vectors + weight_bytes * config.num_heads * queries * keys


def _decoding_bytes(config: ConvT5Config, *, encoder_length: int, decoder_length: int) -> int:
    """Bytes that decoding keeps for one row: taps' inputs, or keys and values, and memory's."""
    width = jnp.dtype(config.dtype).itemsize
    total = 0
    for mixing in config.decoder_layers:
        if _attends(mixing):
            total += 2 * decoder_length * _inner(config)
        else:
            total += (mixing.reach[0] + 1) * config.emb_dim
        total += 2 * encoder_length * _inner(config)
    return width * total


def _mixings(config: ConvT5Config, stack: str) -> tuple[MixingConfig, ...]:
    return config.encoder_layers if stack == "encoder" else config.decoder_layers


def _attends(mixing: MixingConfig) -> bool:
    return mixing.kind == "attention"


def _inner(config: ConvT5Config) -> int:
    return config.num_heads * config.head_dim


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b
