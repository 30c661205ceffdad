"""The T5 of Mesh TensorFlow in NumPy, float64, straight from the description of its forward pass.

It shares no code with convt5 and reads variables by the original's names. Used for sizes of which
the original recorded nothing; `test_mesh_tf_architecture` first checks it on what was recorded.
"""

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """One model: pairs are of encoder and decoder."""

    family: str
    emb: int
    mlp: int
    heads: int
    head_dim: int
    layers: tuple[int, int]
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)
    vocab: int = 128
    positions: int = 20
    old_names: bool = False

    def taps(self, stack: str) -> range:
        side = stack == "decoder"
        return range(self.first[side], self.last[side] + 1)

    def operative_config(self) -> str:
        lines = [f"num_heads = {self.heads}", "SelfAttention.num_heads = %num_heads"]
        owner = "SeparableConv1DLayer" if self.family == "sepconv" else "LocalConvAttnBlock"
        for stack in ("encoder", "decoder"):
            taps = self.taps(stack)
            if self.family in ("lconv", "dconv", "sepconv"):
                lines.append(f"{stack}/transformer_layers.{owner}.min_relative_pos = {taps[0]}")
                lines.append(f"{stack}/transformer_layers.{owner}.max_relative_pos = {taps[-1]}")
            layers = self.layers[stack == "decoder"]
            lines.append(f"{stack}/make_layer_stack.num_layers = {layers}")
        return "\n".join(lines) + "\n"


def draw_variables(sizes: Sizes, *, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Returns random variables, each exactly representable in `dtype`."""
    random = np.random.default_rng(seed)
    inner = sizes.heads * sizes.head_dim
    variables = {"global_step": np.asarray(3, np.int64)}
    stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

    def draw(name, *shape, scale=1.0):
        variables[name] = (random.normal(size=shape) * scale).astype(stored)

    def dense(name, inputs, outputs, *, bias=True):
        draw(f"{name}/kernel", inputs, outputs, scale=inputs**-0.5)
        if bias:
            draw(f"{name}/bias", outputs, scale=0.3)

    def attention(name):
        for part in "qkv":
            draw(f"{name}/{part}", sizes.emb, inner, scale=0.5 * sizes.emb**-0.5)
        draw(f"{name}/o", inner, sizes.emb, scale=inner**-0.5)

    def convolution(sublayer, stack):
        separable = sizes.family == "sepconv"
        owner = f"{sublayer}/{'SeparableConv1DLayer' if separable else 'LocalConvAttnBlock'}"
        hack = f"{owner}/separable_conv1d/depthwise_conv_hack/depthwise_dense"
        for i, _ in enumerate(sizes.taps(stack)):
            if separable:
                draw(f"{hack}_{i}/kernel", sizes.emb, scale=0.5)
            elif sizes.family == "lconv":
                draw(f"{owner}/lightwt_depthwise_dense_{i}/kernel", sizes.emb)
            else:
                dense(f"{owner}/dyn_conv_depthwise_dense_{i}", sizes.emb, sizes.emb)
        draw(f"{hack}_0/bias", sizes.emb, scale=0.3)
        dense(f"{owner}/separable_conv1d/pointwise_dense", sizes.emb, sizes.emb)
        if not separable:
            for name in ("local_conv_inp_0", "local_conv_inp_1", "local_conv_attn_op_projection"):
                dense(f"{owner}/{name}", sizes.emb, sizes.emb)

    norm, final = ("layer_norm", "final_layer_norm") if sizes.old_names else ("rms_norm",) * 2
    draw("shared/embedding", sizes.vocab, sizes.emb)
    if sizes.family != "t5v1":
        draw("shared/positional_embedding", sizes.positions, sizes.emb)
    for stack, count in zip(("encoder", "decoder"), sizes.layers, strict=True):
        draw(f"{stack}/{final}/scale", sizes.emb)
        for index in range(count):
            block = f"{stack}/block_{index:03d}"
            if sizes.family in ("t5bert", "t5v1"):
                attention(f"{block}/layer_000/SelfAttention")
            else:
                convolution(f"{block}/layer_000", stack)
            if sizes.family == "t5v1" and index == 0:
                bias = f"{block}/layer_000/SelfAttention/relative_attention_bias"
                draw(bias, sizes.heads, 32)
            last = 1
            if stack == "decoder":
                attention(f"{block}/layer_001/EncDecAttention")
                last = 2
            ff = f"{block}/layer_00{last}/DenseReluDense"
            dense(f"{ff}/wi", sizes.emb, sizes.mlp, bias=False)
            dense(f"{ff}/wo", sizes.mlp, sizes.emb, bias=False)
            for layer in range(last + 1):
                draw(f"{block}/layer_00{layer}/{norm}/scale", sizes.emb)
    return variables


def logits(variables, sizes: Sizes, inputs, decoder_inputs) -> np.ndarray:
    """Returns the original's logits [batch, target, vocab] of rows that are not packed.

    `decoder_inputs` must hold no padding but the start token, so that padding needs no mask.
    """
    v = {name: np.asarray(array, np.float64) for name, array in variables.items()}
    readable = inputs != 0
    encoded = _stack(v, sizes, "encoder", inputs, readable)
    everything = np.ones(decoder_inputs.shape, bool)
    decoded = _stack(v, sizes, "decoder", decoder_inputs, everything, (encoded, readable))
    return decoded * sizes.emb**-0.5 @ v["shared/embedding"].T


def _stack(v, sizes, stack, ids, real, memory=None):
    length = ids.shape[1]
    x = v["shared/embedding"][ids]
    if "shared/positional_embedding" in v:
        x = x + v["shared/positional_embedding"][:length]
    queries, keys = np.arange(length)[:, None], np.arange(length)[None]
    bias = np.where(real[:, None, None], 0.0, -1e9)
    if stack == "decoder":
        bias = bias + np.where(keys > queries, -1e9, 0.0)
    table = f"{stack}/block_000/layer_000/SelfAttention/relative_attention_bias"
    if table in v:
        bias = bias + v[table][:, _bucket(keys - queries, two_sided=stack == "encoder")]
    for index in range(sizes.layers[stack == "decoder"]):
        block = f"{stack}/block_{index:03d}"
        h = _norm(v, f"{block}/layer_000", x) * real[..., None]
        if sizes.family in ("t5bert", "t5v1"):
            x = x + _attention(v, f"{block}/layer_000/SelfAttention", sizes.heads, h, h, bias)
        else:
            x = x + _convolution(v, sizes, f"{block}/layer_000", stack, h, ids != 0)
        last = 1
        if memory is not None:
            encoded, readable = memory
            h = _norm(v, f"{block}/layer_001", x)
            there = np.where(readable[:, None, None], 0.0, -1e9)
            owner = f"{block}/layer_001/EncDecAttention"
            x = x + _attention(v, owner, sizes.heads, h, encoded, there)
            last = 2
        ff = f"{block}/layer_00{last}"
        h = _norm(v, ff, x) * real[..., None]
        inner = np.maximum(h @ v[f"{ff}/DenseReluDense/wi/kernel"], 0)
        x = x + inner @ v[f"{ff}/DenseReluDense/wo/kernel"]
    return _norm(v, stack, x) * real[..., None]


def _norm(v, owner, x):
    names = [f"{owner}/{n}/scale" for n in ("rms_norm", "layer_norm", "final_layer_norm")]
    scale = next(v[name] for name in names if name in v)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def _dense(v, name, x):
    return x @ v[f"{name}/kernel"] + v[f"{name}/bias"]


def _attention(v, owner, heads, h, memory, bias):
    def split(x):  # batch length inner -> batch heads length head_dim
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, value = (
        split(x @ v[f"{owner}/{n}"]) for x, n in ((h, "q"), (memory, "k"), (memory, "v"))
    )
    weights = _softmax(q @ k.swapaxes(2, 3) + bias, axis=-1)
    mixed = (weights @ value).swapaxes(1, 2)
    return mixed.reshape(*mixed.shape[:2], -1) @ v[f"{owner}/o"]


def _convolution(v, sizes, sublayer, stack, h, readable):
    separable = sizes.family == "sepconv"
    owner = f"{sublayer}/{'SeparableConv1DLayer' if separable else 'LocalConvAttnBlock'}"
    hack = f"{owner}/separable_conv1d/depthwise_conv_hack/depthwise_dense"
    offsets = sizes.taps(stack)
    g = h
    if not separable:
        gate = _dense(v, f"{owner}/local_conv_inp_1", h)
        g = _dense(v, f"{owner}/local_conv_inp_0", h) / (1 + np.exp(-gate))
    if separable:
        taps = [v[f"{hack}_{i}/kernel"] for i in range(len(offsets))]
    elif sizes.family == "lconv":
        names = [f"{owner}/lightwt_depthwise_dense_{i}/kernel" for i in range(len(offsets))]
        taps = _softmax(np.stack([v[name] for name in names]), axis=0)
    else:
        names = [f"{owner}/dyn_conv_depthwise_dense_{i}" for i in range(len(offsets))]
        taps = _softmax(np.stack([_dense(v, name, g) for name in names]), axis=0)
    g = g * readable[..., None]
    y = np.zeros_like(g)
    for tap, offset in zip(taps, offsets, strict=True):
        shifted = np.zeros_like(g)
        for t in range(g.shape[1]):
            if 0 <= t + offset < g.shape[1]:
                shifted[:, t] = g[:, t + offset]
        y = y + tap * shifted
    y = _dense(v, f"{owner}/separable_conv1d/pointwise_dense", y + v[f"{hack}_0/bias"])
    return y if separable else _dense(v, f"{owner}/local_conv_attn_op_projection", y)


def _softmax(x, axis):
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    return x / x.sum(axis=axis, keepdims=True)


def _bucket(distance, *, two_sided):
    """32 buckets of key - query up to 128: half exact, half logarithmic."""
    buckets, offset = (16, np.where(distance > 0, 16, 0)) if two_sided else (32, 0)
    n = np.abs(distance) if two_sided else np.maximum(-distance, 0)
    exact = buckets // 2
    scale = (buckets - exact) / np.log(128 / exact)
    far = exact + (np.log(np.maximum(n, 1) / exact) * scale).astype(int)
    return offset + np.where(n < exact, n, np.minimum(far, buckets - 1))
