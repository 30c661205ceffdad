"""Convolution blocks equal those of fairseq (Wu et al. 2019), forward and gradient, in float64."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5.modeling.blocks import Residual
from convt5.modeling.layers import Dense, Mlp, Norm
from convt5.modeling.mixers import KINDS
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.mixers.convolution import Convolution
from convt5.modeling.tree_paths import named_leaves

CASES = [
    "enc_lw_glu_post",
    "enc_dy_glu_post",
    "enc_lw_noglu_pre",
    "enc_dy_glu_pre",
    "dec_lw_glu_post",
    "dec_dy_glu_pre",
    "dec_dy_noglu_post_nosoftmax",
]
TOLERANCE = 1e-10  # Both sides are float64; inputs and parameters are exact float32 values.


def predict_after_masking(monkeypatch, mask) -> None:
    """Zeroes padding before kernels are predicted, which fairseq does.

    Ours reads zero at padding and returns zero there, so real positions agree either way. But
    recorded cotangents are not zero at padding, and reach parameters from there.
    """
    gated = Convolution._gate_input
    seen = jnp.asarray(mask)[..., None]
    monkeypatch.setattr(Convolution, "_gate_input", lambda self, *given: gated(self, *given) * seen)


class Block:
    """The parts of one of our layers without attention to an encoder."""

    def __init__(self, case):
        key = jax.random.key(0)
        emb, channels = case["embed_dim"], case["conv_dim"]
        config = KINDS[case["conv_type"]](
            kernel_size=case["K"],
            num_kernels=case["heads"],
            padding=(case["padding_l"], case["K"] - 1 - case["padding_l"]),
            input_projection="gated" if case["glu"] else "linear",
            projection_bias=True,
            normalize_taps=case["softmax"],
        )
        sizes = SimpleNamespace(
            emb_dim=channels,
            num_heads=1,
            head_dim=1,
            mlp_dim=1,
            mlp="relu",
            dropout_rate=0.0,
            dtype="float32",
            taps_cross_segments=False,
        )
        conv = config.build(sizes, key=key)
        # fairseq's convolution may have other channels than the residual stream.
        conv.input = Dense(emb, channels, key=key, use_bias=True)
        conv.gate = Dense(emb, channels, key=key, use_bias=True) if case["glu"] else None
        conv.output = Dense(channels, emb, key=key, use_bias=True)
        norms = [Norm(emb, kind="layer", epsilon=1e-5) for _ in range(2)]
        mlp = Mlp(emb, case["ffn_dim"], kind="relu", use_bias=True, dropout_rate=0.0, key=key)
        self.parts = {"conv": conv, "norm1": norms[0], "norm2": norms[1], "mlp": mlp}
        order = "pre" if case["normalize_before"] else "post"
        self.residual = Residual(order=order, dropout_rate=0.0)

    def __call__(self, parts, x, segment_ids):
        x = self.residual(x, lambda y: parts["conv"](y, StackInputs(segment_ids)), parts["norm1"])
        return self.residual(x, parts["mlp"], parts["norm2"])


def ours(case, given) -> dict[str, np.ndarray]:
    """fairseq's parameters, or gradients of them, by our names; kernels are [in, out] here."""
    first = given["linear1.weight"].T, given["linear1.bias"]
    channels = case["conv_dim"]
    norms = (
        ("layer_norm1", "layer_norm2")
        if case["side"] == "encoder"
        else ("conv_layer_norm", "final_layer_norm")
    )
    named = {
        "conv/input/kernel": first[0][:, :channels],
        "conv/input/bias": first[1][:channels],
        "conv/output/kernel": given["linear2.weight"].T,
        "conv/output/bias": given["linear2.bias"],
        "mlp/wi/kernel": given["fc1.weight"].T,
        "mlp/wi/bias": given["fc1.bias"],
        "mlp/wo/kernel": given["fc2.weight"].T,
        "mlp/wo/bias": given["fc2.bias"],
    }
    if case["glu"]:
        named["conv/gate/kernel"] = first[0][:, channels:]
        named["conv/gate/bias"] = first[1][channels:]
    for here, there in zip(("norm1", "norm2"), norms, strict=True):
        named[f"{here}/scale"] = given[f"{there}.weight"]
        named[f"{here}/bias"] = given[f"{there}.bias"]
    heads, taps = case["heads"], case["K"]
    if case["conv_type"] == "lightweight":
        named["conv/kernel_logits"] = given["conv.weight"].reshape(heads, taps).T
    else:
        weight = given["conv.weight_linear.weight"].reshape(heads, taps, channels)
        named["conv/predictor/kernel"] = weight.transpose(1, 2, 0)
    return {name: np.asarray(value, np.float64) for name, value in named.items()}


def recorded(golden, name):
    case = next(
        case
        for case in json.loads((golden / "fairseq" / "block.json").read_text())
        if case["name"] == name
    )
    arrays = np.load(golden / "fairseq" / "block.npz")
    found = {key.removeprefix(f"{name}."): arrays[key] for key in arrays.files}
    own = {key for key in arrays.files if key.startswith(f"{name}.")}
    return case, {key: found[key] for key in found if f"{name}.{key}" in own}


def group(arrays, prefix):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def filled(parts, values):
    names = [name for name, _ in named_leaves(parts)]
    assert set(names) == values.keys()
    leaves = [jnp.asarray(values[name]) for name in names]
    return jax.tree.unflatten(jax.tree.structure(parts), leaves)


def batch_first(x) -> jax.Array:
    return jnp.asarray(np.asarray(x, np.float64).swapaxes(0, 1))


def computed(golden, name, monkeypatch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns the output of a block, and the gradients of its input and of its parameters."""
    case, arrays = recorded(golden, name)
    if case["mask"]:
        predict_after_masking(monkeypatch, (~arrays["pad_mask"]).astype(np.float64))
    block = Block(case)
    parts = filled(block.parts, ours(case, group(arrays, "param.")))
    x, everywhere = batch_first(arrays["x"]), jnp.ones((case["B"], case["T"]), jnp.int32)

    @jax.jit
    def run(parts, x, cotangent):
        y, pull_back = jax.vjp(lambda p, x: block(p, x, everywhere), parts, x)
        return y, *pull_back(cotangent)

    y, d_parts, d_x = run(parts, x, batch_first(arrays["cotangent"]))
    return y, d_x, dict(named_leaves(d_parts))


@pytest.mark.parametrize(
    "name",
    quick(CASES, chosen=["enc_lw_glu_post", "dec_dy_noglu_post_nosoftmax"]),
)
def test_output_and_every_gradient_equal_fairseqs(golden, x64, monkeypatch, name):
    case, arrays = recorded(golden, name)
    y, d_x, d_parts = computed(golden, name, monkeypatch)
    np.testing.assert_allclose(y, batch_first(arrays["y"]), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(d_x, batch_first(arrays["dx"]), rtol=0, atol=TOLERANCE)
    expected = ours(case, group(arrays, "grad."))
    gradients = {k: v for k, v in d_parts.items() if k in expected}
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        # fairseq's parameter gradients were stored in float32.
        np.testing.assert_allclose(
            gradient, expected[path], rtol=1e-7, atol=TOLERANCE, err_msg=path
        )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("enc")])
def test_padding_by_segment_ids_gives_fairseqs_output_at_real_positions(golden, x64, name):
    case, arrays = recorded(golden, name)
    block = Block(case)
    parts = filled(block.parts, ours(case, group(arrays, "param.")))
    real = ~arrays["pad_mask"] if case["mask"] else np.ones((case["B"], case["T"]), bool)
    y = jax.jit(block)(parts, batch_first(arrays["x"]), jnp.asarray(real, jnp.int32))
    expected = np.asarray(batch_first(arrays["y"]))
    np.testing.assert_allclose(np.asarray(y)[real], expected[real], rtol=0, atol=TOLERANCE)
