"""ConvT5 in PyTorch: a T5 whose layers mix their sequence by convolutions, by attention, or both.

This file computes every text architecture of convt5; `convt5 convert --to=transformers` writes it
beside the weights. Parameters have the names (dots for slashes) and the shapes [in, out] of
convt5's checkpoints; `config.json` holds convt5's description of the model under the key `convt5`.

Shapes: B rows, L positions, M of the encoder's output, D channels of the residual stream, C of any
kind, K taps, H kernels or heads for C / H channels each.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace as Settings

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

ACTIVATIONS = {"relu": fn.relu, "silu": fn.silu, "none": nn.Identity()}
ACTIVATIONS["gelu"] = functools.partial(fn.gelu, approximate="tanh")


class ConvT5Config(PretrainedConfig):
    model_type = "convt5"

    def __init__(self, convt5: dict | None = None, **others):
        super().__init__(**{"is_encoder_decoder": True, **others})
        self.convt5 = convt5 or {}


@dataclasses.dataclass
class Along:
    """What a layer is told about the sequence that it mixes."""

    visible: Tensor  # [B, L, 1], 0 where convolutions read zero
    bias: Tensor | None = None  # [B or 1, H or 1, L, keys], added to the logits of self-attention
    memory: Tensor | None = None  # [B, M, D], the encoder's output, for a decoder
    memory_bias: Tensor | None = None  # [B, 1, 1, M], added to the logits of attention to it
    past: dict[str, Tensor] | None = None  # what the layer keeps while decoding

    def follow(self, name: str, x: Tensor, left: int | None = None, right: int = 0) -> Tensor:
        """Returns x [B, L, C] behind the `left` positions before it (None: all), or zeros.

        While decoding these are kept: the last (K - 1) * dilation inputs of a convolution.
        """
        x = x if name in ("key", "value") else x * self.visible.to(x.dtype)
        before = None if self.past is None else self.past.get(name)
        if before is not None:
            x = torch.cat([before, x], 1)
        elif left is not None:
            x = fn.pad(x, (0, 0, left, right))
        if self.past is not None:
            self.past[name] = x if left is None else x[:, x.shape[1] - left :]
        return x


class DecoderCache:
    """What decoding keeps for each layer, tensors with rows first by name, and positions so far."""

    def __init__(self, num_layers: int):
        self.length, self.layers = 0, [{} for _ in range(num_layers)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for past in self.layers:
            for name in past.keys() - {"memory_key", "memory_value"}:
                past[name] = past[name].index_select(0, beam_idx.to(past[name].device))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def table(rows: int | bool | None, channels: int) -> nn.ParameterDict | None:
    return nn.ParameterDict({"embedding": parameter(rows, channels)}) if rows else None


def dropout(x: Tensor, rate: float, module: nn.Module) -> Tensor:
    """Drops channels of x [B, L, C] for all positions of a row alike, as T5 was trained."""
    return x * fn.dropout(torch.ones_like(x[:, :1]), rate) if module.training and rate else x


def tap_reach(size: int, dilation: int, padding: str | list[int]) -> tuple[int, int]:
    """Returns the positions read left and right of an output; centered even kernels lean left."""
    total, left = (size - 1) * dilation, size // 2 * dilation
    known = {"CAUSAL": (total, 0), "CENTERED": (left, total - left)}
    return known[padding] if isinstance(padding, str) else (padding[0], padding[1])


def weighted_sum(x: Tensor, taps: Tensor, dilation: int) -> Tensor:
    """Returns y[b, t, c] = sum_j taps[b, t, j, h] x[b, t + j * dilation, c], h = floor(c H / C)."""
    count, length = taps.shape[2], x.shape[1] - (taps.shape[2] - 1) * dilation
    grouped = x.unflatten(-1, (taps.shape[3], -1))  # [B, L + (K - 1) * dilation, H, C / H]
    shifted = (grouped[:, j * dilation : j * dilation + length] for j in range(count))
    return sum(taps[:, :, j, :, None].float() * y for j, y in enumerate(shifted)).flatten(-2)


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale; "layer" subtracts the mean before and adds a bias."""

    def __init__(self, channels: int, sizes: Settings, kind: str | None = None):
        super().__init__()
        self.scale, self.epsilon = parameter(channels), sizes.norm_epsilon
        self.bias = parameter(channels) if (kind or sizes.norm) == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.bias is None else x.float() - x.float().mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon) * self.scale
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class Canon(nn.Module):
    """y[t] = x[t] + a(sum_j w[j] x[t + j * dilation - left] + b), each channel by itself.

    Canon layers (Allen-Zhu 2025, arXiv 2512.17351); a is the identity, or SiLU.
    """

    def __init__(self, layer: Settings, name: str, channels: int):
        super().__init__()
        self.kernel = parameter(layer.canon_kernel_size, channels)
        self.bias = parameter(channels) if layer.canon_bias else None
        self.name, self.dilation = f"canon_{name}", layer.canon_dilation
        self.reach = tap_reach(layer.canon_kernel_size, self.dilation, layer.canon_padding)
        self.activation = ACTIVATIONS[layer.canon_activation]

    def forward(self, x: Tensor, along: Along) -> Tensor:
        read = along.follow(self.name, x, *self.reach)
        y = weighted_sum(read, self.kernel[None, None], self.dilation).to(x.dtype)
        return x + self.activation(y if self.bias is None else y + self.bias)


def canon_at(place: str, layer: Settings, name: str, channels: int) -> Canon | None:
    return Canon(layer, name, channels) if place in layer.canon else None


class Dense(nn.Module):
    """y = x W + b with W [in, out]; a Canon layer may follow."""

    def __init__(self, inward: int, outward: int, bias: bool = False, canon: Canon | None = None):
        super().__init__()
        self.kernel, self.canon = parameter(inward, outward), canon
        self.bias = parameter(outward) if bias else None

    def forward(self, x: Tensor, along: Along | None = None) -> Tensor:
        y = x @ self.kernel if self.bias is None else x @ self.kernel + self.bias
        return y if self.canon is None else self.canon(y, along)


class Mlp(nn.Module):
    """relu(x W_i) W_o of T5 1.0, or (a(x W_0) * (x W_1)) W_o: a is GELU in T5 1.1, SiLU in UL2."""

    def __init__(self, sizes: Settings, layer: Settings):
        super().__init__()
        self.names = ("wi",) if sizes.mlp == "relu" else ("wi_0", "wi_1")
        for name in self.names:
            canon = canon_at("D", layer, name, sizes.mlp_dim)
            setattr(self, name, Dense(sizes.emb_dim, sizes.mlp_dim, sizes.mlp_bias, canon))
        self.wo, self.sizes = Dense(sizes.mlp_dim, sizes.emb_dim, sizes.mlp_bias), sizes

    def forward(self, x: Tensor, along: Along) -> Tensor:
        y, *gated = (getattr(self, name)(x, along) for name in self.names)
        y = ACTIVATIONS[self.sizes.mlp.removeprefix("gated_")](y)
        return self.wo(dropout(y * gated[0] if gated else y, self.sizes.dropout_rate, self))


class Attention(nn.Module):
    """softmax(Q K^T + bias) V W^O by head, of the sequence, or (cross) memory; Q is not scaled."""

    def __init__(self, sizes: Settings, layer: Settings, cross: bool = False):
        super().__init__()
        self.cross, self.heads, inner = cross, sizes.num_heads, sizes.num_heads * sizes.head_dim
        for name in ("query", "key", "value"):
            canon = None if cross else canon_at("B", layer, name, inner)
            setattr(self, name, Dense(sizes.emb_dim, inner, canon=canon))
        self.output, self.dropout_rate = Dense(inner, sizes.emb_dim), sizes.dropout_rate

    def forward(self, x: Tensor, along: Along) -> Tensor:
        if self.cross:
            kept = {} if along.past is None else along.past
            if "memory_key" not in kept:  # Decoding computes them once.
                kept["memory_key"] = self.key(along.memory)
                kept["memory_value"] = self.value(along.memory)
            key, value, bias = kept["memory_key"], kept["memory_value"], along.memory_bias
        else:
            key, bias = along.follow("key", self.key(x, along)), along.bias
            value = along.follow("value", self.value(x, along))
        heads = [y.unflatten(-1, (self.heads, -1)) for y in (self.query(x, along), key, value)]
        if self.training:  # T5 drops a weight for all queries of a row at once: a value of a head.
            heads[2] = heads[2] * fn.dropout(torch.ones_like(heads[2][..., :1]), self.dropout_rate)
        heads = (y.transpose(1, 2) for y in heads)  # [B, H, L, head_dim]
        y = fn.scaled_dot_product_attention(*heads, attn_mask=bias, scale=1.0)
        return self.output(y.transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    """X1 = (X W^I) * sigmoid(X W^S); X2[t] = sum_j w_j X1[t + offset_j]; X3 = X2 W^O.

    Tay et al. 2021, arXiv 2105.03322. Taps w are free numbers of each channel (depthwise), a
    softmax of numbers that channels share (lightweight, Wu et al. 2019, arXiv 1901.10430) or that
    X1[t] predicts (dynamic), or a function of the distance, for the whole row (long): there
    "hyena" gating is X1 = (X W^K) * (X W^V) and X3 = ((X W^Q) * X2) W^O.
    """

    def __init__(self, sizes: Settings, layer: Settings):
        super().__init__()
        self.layer, width, size = layer, sizes.emb_dim, layer.kernel_size
        shape, bias = (size, layer.num_kernels or width), layer.projection_bias
        if layer.kind == "long":
            bias, inner = False, [layer.filter_width] * layer.filter_layers
            self.before = ("input", "gate") if layer.gating == "glu" else ("query", "key", "value")
            self.behind, self.filter, self.skip = ["output"], nn.Module(), parameter(width)
            inward = [2 * layer.filter_bands + 1, *inner[1:]]
            self.filter.hidden = nn.ModuleList([Dense(n, inner[0], bias=True) for n in inward])
            self.filter.output = parameter(1 if layer.causal else 2, inner[0], width)
        else:
            count = ("none", "linear", "gated").index(layer.input_projection)
            self.before = ("input", "gate")[:count]
            self.behind = ["pointwise"] * layer.pointwise + ["output"] * layer.output_projection
            padding = layer.padding or ("CAUSAL" if layer.causal else "CENTERED")
            self.reach = tap_reach(size, layer.dilation, padding)
            self.conv_bias = parameter(width) if layer.conv_bias else None
        if layer.kind == "dynamic":
            with_bias = {"bias": parameter(*shape)} if layer.predictor_bias else {}
            kernel = parameter(size, width, shape[1])
            self.predictor = nn.ParameterDict({"kernel": kernel, **with_bias})
        elif layer.kind != "long":
            name = "kernel" if layer.kind == "depthwise" else "kernel_logits"
            setattr(self, name, parameter(*shape))
        for name in (*self.before, *self.behind):
            canon = canon_at("B", layer, name, width) if name in self.before else None
            setattr(self, name, Dense(width, width, bias, canon))

    def forward(self, x: Tensor, along: Along) -> Tensor:
        given = [getattr(self, name)(x, along) for name in self.before] or [x]
        y = given[0] * torch.sigmoid(given[1]) if "gate" in self.before else given[0]
        if self.layer.kind == "long":
            y = given[1] * given[2] if len(given) == 3 else y
            read = along.follow("mixing", y).float()
            back, *ahead = long_taps(self.filter, self.layer, read.shape[1])
            back = torch.cat([back[:1] + self.skip, back[1:]])
            y = long_sum(read, back, *ahead)[:, -x.shape[1] :].to(x.dtype)
            y = given[0] * y if len(given) == 3 else y
        else:
            read = along.follow("mixing", y, *self.reach)
            y = weighted_sum(read, self.taps(y), self.layer.dilation).to(x.dtype)
            y = y if self.conv_bias is None else y + self.conv_bias
        for name in self.behind:
            y = getattr(self, name)(y)
        return y

    def taps(self, x: Tensor) -> Tensor:
        """Returns the weights of the taps, [B or 1, L or 1, K, H]."""
        if self.layer.kind == "depthwise":
            return self.kernel[None, None]
        if self.layer.kind == "lightweight":
            taps = self.kernel_logits[None, None].float()
        else:
            taps = torch.einsum("blc,kch->blkh", x, self.predictor["kernel"]).float()
            taps = taps + self.predictor["bias"] if "bias" in self.predictor else taps
        taps = taps.softmax(2) if self.layer.normalize_taps else taps
        return fn.dropout(taps, self.layer.tap_dropout_rate, self.training)


def long_taps(network: nn.Module, layer: Settings, length: int) -> Tensor:
    """Returns h[s, t, c] = window_c(t) * FFN(features(t))[s, c]: taps back (s = 0) and ahead.

    Poli et al. 2023, arXiv 2302.10866. Features are t, cos(2 pi k t), sin(2 pi k t), with t in
    units of `filter_scale`; windows fall to 1 % at 0.3 (first channel) to 1.5 of them.
    """
    exact = {"dtype": torch.float64, "device": network.output.device}
    t = torch.arange(length, **exact)[:, None] / layer.filter_scale
    angles = 2 * math.pi * t * torch.arange(1, layer.filter_bands + 1, **exact)
    y = torch.cat([t, angles.cos(), angles.sin()], 1).to(network.output.dtype)
    for dense in network.hidden:
        y = torch.sin(10.0 * dense(y))
    sides, _, channels = network.output.shape
    rates = torch.linspace(math.log(100) / 0.3, math.log(100) / 1.5, channels, **exact)
    squares = sides / -torch.expm1(-2 * rates / layer.filter_scale)
    return (y @ network.output).float() * (torch.exp(-t * rates) / squares.sqrt()).float()


def long_sum(x: Tensor, back: Tensor, ahead: Tensor | None = None) -> Tensor:
    """Returns y[t] = sum_i back[i] x[t - i] + sum_{i > 0} ahead[i] x[t + i] for x [B, L, D]."""
    length, turned = x.shape[1], torch.zeros_like(back[1:]) if ahead is None else ahead[1:].flip(0)
    # Of 2 L positions, so that nothing wraps around: negative distances count from the end.
    taps = torch.cat([back, torch.zeros_like(back[:1]), turned])
    spectrum = torch.fft.rfft(x, 2 * length, dim=1) * torch.fft.rfft(taps, dim=0)
    return torch.fft.irfft(spectrum, 2 * length, dim=1)[:, :length]


class Layer(nn.Module):
    """Mixing, attention to the encoder in a decoder, and feed-forward, each a branch f.

    The residual stream becomes x + f(norm(x)) ("pre"), x + norm(f(x)) ("branch") or
    norm(x + f(x)) ("post"). Canon layers A and C stand in front of mixing and feed-forward.
    """

    def __init__(self, sizes: Settings, layer: Settings):
        super().__init__()
        mixing, self.sizes = Attention if layer.kind == "attention" else Convolution, sizes
        self.mixing, self.mlp, width = mixing(sizes, layer), Mlp(sizes, layer), sizes.emb_dim
        self.mixing_canon = canon_at("A", layer, "mixing", width)
        self.mlp_canon = canon_at("C", layer, "mlp", width)
        self.cross_attention = Attention(sizes, layer, cross=True) if layer.causal else None
        self.branches = ("mixing", *["cross"] * layer.causal, "mlp")
        for name in self.branches:
            setattr(self, f"{name}_norm", Norm(sizes.emb_dim, sizes))

    def forward(self, x: Tensor, along: Along) -> Tensor:
        order = self.sizes.layer_order
        for name in self.branches:
            norm, canon = getattr(self, f"{name}_norm"), getattr(self, f"{name}_canon", None)
            y, f = norm(x) if order == "pre" else x, getattr(self, name, self.cross_attention)
            y = f(y if canon is None else canon(y, along), along)
            y = dropout(y, self.sizes.dropout_rate, self)
            x = norm(x + y) if order == "post" else x + (norm(y) if order == "branch" else y)
        return x


def layer_settings(stack: dict, i: int, causal: bool) -> Settings:
    """Returns the settings of layer i of a stack, in which lists have a value for each layer."""
    attention = [index % stack["num_layers"] for index in stack["attention_layers"]]
    lists = {k for k, v in stack.items() if isinstance(v, list)} - {"padding", "attention_layers"}
    own = {k: v[i] if k in lists else v for k, v in stack.items()}
    return Settings(kind="attention" if i in attention else own["mixing"], causal=causal, **own)


class Stack(nn.Module):
    """The layers of an encoder or of a decoder, and the norm that ends them."""

    main_input_name = "input_ids"

    def __init__(self, sizes: Settings, decoder: bool):
        super().__init__()
        stack = sizes.decoder if decoder else sizes.encoder
        layers = [layer_settings(stack, i, causal=decoder) for i in range(stack["num_layers"])]
        self.layers = nn.ModuleList([Layer(sizes, layer) for layer in layers])
        self.attends = any(layer.kind == "attention" for layer in layers)
        rows = self.attends and sizes.positions == "relative" and sizes.relative_buckets
        self.relative_bias = table(rows, sizes.num_heads)
        self.final_norm = Norm(sizes.emb_dim, sizes) if sizes.layer_order != "post" else None
        self.sizes, self.is_decoder = sizes, decoder

    def forward(self, x: Tensor, along: Along, keys: Tensor | None, learned, cache=None) -> Tensor:
        """Returns the output for x [B, L, D]; keys [B, positions so far] are 0 where not read."""
        start = cache.length if cache else 0
        position = torch.arange(start + x.shape[1], device=x.device)
        x = x if learned is None else x + fn.embedding(position[start:], learned["embedding"])
        if self.attends:
            along = dataclasses.replace(along, bias=self.bias(x, keys, position))
        x = dropout(x, self.sizes.dropout_rate, self)
        for i, layer in enumerate(self.layers):
            x = layer(x, dataclasses.replace(along, past=cache.layers[i] if cache else None))
        if cache:
            cache.length += x.shape[1]
        return dropout(self.final_norm(x) if self.final_norm else x, self.sizes.dropout_rate, self)

    def bias(self, x: Tensor, keys: Tensor | None, position: Tensor) -> Tensor:
        """Returns [B or 1, H or 1, L, positions so far]: relative positions, and what is hidden."""
        distance = position[None] - position[-x.shape[1] :, None]
        bias = x.new_zeros(1, 1, *distance.shape)
        if self.relative_bias is not None:
            bias = self.relative_bias["embedding"][self.buckets(distance)].permute(2, 0, 1)[None]
        hidden = distance > (0 if self.is_decoder else len(position))
        hidden = hidden if keys is None else hidden | (keys[:, None, None] == 0)
        return torch.where(hidden, torch.finfo(x.dtype).min, bias)

    def buckets(self, distance: Tensor) -> Tensor:
        """Returns the bucket of key position minus query position (Raffel et al. 2020, 2.1)."""
        count, offset = self.sizes.relative_buckets, 0
        if not self.is_decoder:
            count, distance, offset = count // 2, distance.abs(), count // 2 * (distance > 0)
        distance, exact = (-distance if self.is_decoder else distance).clamp(min=0), count // 2
        growth, wide = self.sizes.relative_max_distance / exact, count - exact
        begins = [math.ceil(exact * growth ** (k / wide) * (1 - 1e-12)) for k in range(1, wide)]
        far = exact + torch.bucketize(distance, distance.new_tensor(begins), right=True)
        return offset + torch.where(distance < exact, distance, far)


class Stem(nn.Module):
    """Convolutions that may shorten the encoder's sequence (Xiao et al. 2021, arXiv 2106.14881).

    y[o] = act(norm(sum_j W_j x[o * stride + j - left])), W [K, in, out], centered on the `stride`
    inputs from o * stride, for which output o stands; 0 where all of them are padding.
    """

    def __init__(self, sizes: Settings):
        super().__init__()
        self.settings, width = Settings(**sizes.stem), sizes.emb_dim
        count, kind = len(self.settings.strides), self.settings.norm
        given = (self.settings.kernel_size, self.settings.channels)
        taps, channels = (v if isinstance(v, list) else [v] * count for v in given)
        widths = [width, *(channel or width for channel in channels)]
        self.layers = nn.ModuleList([nn.Module() for _ in range(count)])
        for i, layer in enumerate(self.layers):
            layer.kernel = parameter(taps[i], *widths[i : i + 2])
            layer.norm = None if kind == "none" else Norm(widths[i + 1], sizes, kind)
        self.output = Dense(widths[-1], width) if self.settings.projection else None

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [B, M, D], and which positions of it are no padding, [B, M]."""
        for layer, stride in zip(self.layers, self.settings.strides, strict=True):
            size, length, positions = len(layer.kernel), x.shape[1], -(-x.shape[1] // stride)
            left = (size - stride + 1) // 2
            right = (positions - 1) * stride + size - left - length
            x = fn.pad(x * mask[..., None], (0, 0, left, right)).mT  # [B, in, left + L + right]
            x = fn.conv1d(x, layer.kernel.permute(2, 1, 0), stride=stride).mT
            x = ACTIVATIONS[self.settings.activation](x if layer.norm is None else layer.norm(x))
            mask = fn.pad(mask, (0, positions * stride - length)).unflatten(1, (-1, stride)).amax(2)
            x = x * mask[..., None]
        return (x if self.output is None else self.output(x)), mask


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Tensor | None = None  # the mean cross-entropy of the labels
    logits: Tensor | None = None  # [B, L, vocabulary]
    past: DecoderCache | None = None
    last_hidden_state: Tensor | None = None  # of the encoder, [B, M, D], 0 at padding
    mask: Tensor | None = None  # of it, [B, M], 0 at padding


class ConvT5ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = ConvT5Config
    base_model_prefix = ""
    _no_split_modules = ("Layer",)
    accepts_loss_kwargs = False  # The options of `forward` are none of losses.
    _is_stateful = True  # Its past cannot be cut back, as assisted decoding would.
    _supports_default_dynamic_cache = classmethod(lambda cls: False)  # `forward` makes its own.

    def __init__(self, config: ConvT5Config):
        super().__init__(config)
        self.sizes = sizes = Settings(**config.convt5)
        self.token_embedder = table(sizes.vocab_size, sizes.emb_dim)
        rows = sizes.positions == "learned" and sizes.max_positions
        self.position_embedder = table(rows, sizes.emb_dim)
        self.stem = Stem(sizes) if sizes.stem else None
        self.encoder, self.decoder = Stack(sizes, decoder=False), Stack(sizes, decoder=True)
        self.output_head = None if sizes.tie_output else Dense(sizes.emb_dim, sizes.vocab_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None, decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Output | None = None, past: DecoderCache | None = None,
        labels: Tensor | None = None, use_cache: bool = False, **options: bool,
    ) -> Output:  # fmt: skip
        """Returns logits, and the loss of labels [B, L] that are not -100, if there are some.

        Ids of 0 are padding of the source where no mask says otherwise. Decoder inputs, by default
        the labels shifted right, follow a past; `decoder_attention_mask` is of both.
        """
        if options.keys() - {"return_dict"}:
            raise TypeError(f"of its options, a convt5 model has return_dict; got {[*options]}.")
        encoded = encoder_outputs or self.encode(input_ids, attention_mask)
        ids, keys = decoder_input_ids, decoder_attention_mask
        ids = fn.pad(labels, (1, 0))[:, :-1].clamp(min=0) if ids is None else ids
        past = DecoderCache(len(self.decoder.layers)) if use_cache and past is None else past
        x = fn.embedding(ids, self.token_embedder["embedding"])
        visible = ids != 0 if self.sizes.hide_start_token else torch.ones_like(ids)
        visible = visible if keys is None else visible * (keys[:, -ids.shape[1] :] != 0)
        memory_bias = (1 - encoded.mask[:, None, None]) * torch.finfo(x.dtype).min
        along = Along(visible[..., None], None, encoded.last_hidden_state, memory_bias)
        x = self.decoder(x, along, keys, self.position_embedder, past)
        head, scale = self.output_head, self.sizes.emb_dim**-0.5
        logits = head(x) if head else fn.linear(x * scale, self.token_embedder["embedding"])
        loss = None if labels is None else fn.cross_entropy(logits.float().mT, labels)
        return Output(loss, logits, past)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_) -> Output:
        x = fn.embedding(input_ids, self.token_embedder["embedding"])
        x = x * (torch.rand_like(x[..., :1]) >= self.sizes.token_dropout_rate * self.training)
        mask = ((input_ids if attention_mask is None else attention_mask) != 0).to(x.dtype)
        x, mask = (x, mask) if self.stem is None else self.stem(x, mask)
        x = self.encoder(x, Along(mask[..., None]), mask, self.position_embedder)
        return Output(last_hidden_state=x * mask[..., None], mask=mask)

    def get_encoder(self, modality: str | None = None):
        encoder = functools.partial(self.encode)
        encoder.forward = self.encode
        return encoder

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values=None, **kwargs):
        own = ("encoder_outputs", "attention_mask", "decoder_attention_mask", "use_cache")
        ids = input_ids[:, past_key_values.length if past_key_values else 0 :]
        return {"decoder_input_ids": ids, "past": past_key_values} | {n: kwargs.get(n) for n in own}

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        if outputs.past is not None:  # Beams reorder what has one name or, since 5.24, the other.
            model_kwargs["past_key_values"] = model_kwargs["cache"] = outputs.past
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        for name, value in module.named_parameters(recurse=False):
            if name in ("scale", "bias", "conv_bias", "skip"):
                nn.init.constant_(value, float(name == "scale"))
            else:
                nn.init.trunc_normal_(value, std=value[..., 0].numel() ** -0.5)
