"""Closed-form costs equal what the real model, its gradients and the compiler say."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5.analysis import costs
from convt5.modeling.architecture import ConvT5Config, StackConfig, TextStemConfig
from convt5.modeling.mixers.base import StackInputs
from convt5.modeling.mixers.depthwise import Depthwise
from convt5.modeling.tree_paths import named_leaves
from convt5.ops import depthwise_conv
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, AdamWConfig, SGDConfig
from convt5.training.train_state import abstract_model

CONVOLUTION = StackConfig(num_layers=2, mixing="dynamic", num_kernels=2)
ATTENTION = StackConfig(num_layers=2, mixing="attention")
RELEASED = StackConfig(
    num_layers=2,
    mixing="dynamic",
    kernel_size=9,
    pointwise=True,
    projection_bias=True,
    predictor_bias=True,
    conv_bias=True,
)


def config(stack: StackConfig = CONVOLUTION, **overrides) -> ConvT5Config:
    settings = {
        "vocab_size": 96,
        "emb_dim": 16,
        "mlp_dim": 48,
        "num_heads": 2,
        "head_dim": 4,
        "encoder": stack,
        "decoder": stack,
        "dtype": "float32",
    }
    return ConvT5Config(**{**settings, **overrides})


@pytest.mark.parametrize(
    "model_config",
    [
        config(),
        config(ATTENTION, positions="relative", mlp="gated_gelu", tie_output=False),
        config(RELEASED, positions="learned", max_positions=32, mlp_bias=True, norm="layer"),
        config(
            StackConfig(num_layers=2, mixing=("lightweight", "depthwise"), kernel_size=(4, 3)),
            layer_order="post",
            norm="layer",
        ),
        config(
            StackConfig(num_layers=2, input_projection="none", attention_layers=(-1,)),
            positions="relative",
            layer_order="branch",
        ),
        config(StackConfig(num_layers=1, input_projection="linear", output_projection=False)),
        config(
            StackConfig(num_layers=4, mixing="lightweight", attention_layers=(1, 3)),
            positions="relative",
            stem=TextStemConfig(channels=(8, 8), strides=(2, 1)),
        ),
    ],
    ids=["dynamic", "t5_1_1", "released", "post_norm", "hybrid", "linear", "repeated_and_stem"],
)
def test_parameter_names_and_shapes_are_those_of_the_model(model_config):
    real = {name: leaf.shape for name, leaf in named_leaves(abstract_model(model_config))}
    assert costs.parameter_shapes(model_config) == real


def test_layers_and_the_rest_add_up_to_all_parameters():
    cost = costs.model_cost(config(), encoder_length=8, decoder_length=4)
    outside = {n: s for n, s in cost.shapes.items() if "/layers/" not in n}
    layers = sum(layer.parameters for layer in cost.layers)
    assert layers + costs.num_parameters(outside) == cost.parameters


def test_parameters_of_t5_base_are_the_published_number():
    stack = StackConfig(num_layers=12, mixing="attention")
    base = ConvT5Config(
        vocab_size=32128,
        emb_dim=768,
        mlp_dim=3072,
        num_heads=12,
        head_dim=64,
        encoder=stack,
        decoder=stack,
        positions="relative",
    )
    assert costs.num_parameters(costs.parameter_shapes(base)) == 222_903_552


FLOPS_CASES = {
    "attention": (StackConfig(num_layers=1, mixing="attention"), {"mlp": "gated_gelu"}),
    "depthwise": (StackConfig(num_layers=1, mixing="depthwise", kernel_size=15), {}),
    "lightweight": (StackConfig(num_layers=1, mixing="lightweight", num_kernels=2), {}),
    "dynamic": (StackConfig(num_layers=1, mixing="dynamic", num_kernels=2), {}),
    "released": (dataclasses.replace(RELEASED, num_layers=1), {}),
    "long": (StackConfig(num_layers=1, mixing="long", filter_width=8), {}),
}
ROOM = {"long": 0.02}
"""XLA counts the transforms of real numbers as those of complex ones."""


PROGRAMS = list(itertools.product(FLOPS_CASES, ("forward", "training")))
QUICK_PROGRAMS = [("attention", "training"), ("depthwise", "forward"), ("dynamic", "training")]
QUICK_PROGRAMS += [("released", "forward"), ("long", "forward")]


@pytest.mark.slow
@pytest.mark.parametrize("program", quick(PROGRAMS, chosen=QUICK_PROGRAMS), ids="-".join)
def test_flops_are_those_of_the_program_within_one_percent(program):
    """The program's count holds elementwise work too, which is little at emb_dim 512."""
    case, mode = program
    counted, traced = flops(case, mode)
    assert counted == pytest.approx(traced.cost_analysis()["flops"], rel=ROOM.get(case, 0.01))


def test_flops_are_those_that_the_compiler_counts_within_two_percent():
    counted, program = flops("dynamic", "training")
    assert counted == pytest.approx(program.compile().cost_analysis()["flops"], rel=0.02)


def flops(case, mode):
    """The closed form for a batch, and the lowered program of the same batch."""
    stack, overrides = FLOPS_CASES[case]
    model_config = config(
        stack, emb_dim=512, mlp_dim=2048, num_heads=8, head_dim=64, vocab_size=512, **overrides
    )
    rows, source, target = 2, 128, 48
    cost = costs.model_cost(model_config, encoder_length=source, decoder_length=target)
    counted = cost.forward_flops if mode == "forward" else cost.training_flops
    return rows * counted, lowered(model_config, rows, source, target, mode)


def abstract_batch(rows, source, target):
    def tokens(length):
        return jax.ShapeDtypeStruct((rows, length), jnp.int32)

    return {
        "encoder_input_tokens": tokens(source),
        "decoder_input_tokens": tokens(target),
        "decoder_target_tokens": tokens(target),
        "decoder_loss_weights": tokens(target),
    }


def lowered(model_config, rows, source, target, mode):
    def loss(model, batch):
        return TextLoss()(model, batch).loss_sum

    function = loss if mode == "forward" else jax.grad(loss)
    return jax.jit(function).lower(
        abstract_model(model_config), abstract_batch(rows, source, target)
    )


def test_flops_of_convolutions_grow_linearly_in_length_and_of_attention_faster():
    def encoder_flops(stack, length):
        cost = costs.model_cost(config(stack), encoder_length=length, decoder_length=4)
        return sum(x.flops_per_token * length for x in cost.layers if x.stack == "encoder")

    assert encoder_flops(CONVOLUTION, 64) == 2 * encoder_flops(CONVOLUTION, 32)
    assert encoder_flops(ATTENTION, 64) > 2 * encoder_flops(ATTENTION, 32)


@pytest.mark.parametrize(
    "optimizer", [AdafactorConfig(), AdamWConfig(), SGDConfig()], ids=["adafactor", "adamw", "sgd"]
)
def test_optimizer_memory_is_that_of_the_real_state(optimizer):
    model_config = config(emb_dim=128, mlp_dim=160)
    shapes = costs.parameter_shapes(model_config)
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    state = optimizer.build(lambda step: 0.1).init(parameters)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert costs.optimizer_bytes(optimizer, shapes) == size


def test_decoding_memory_is_that_of_the_real_state():
    model_config = config(
        StackConfig(num_layers=3, kernel_size=3, dilation=(1, 2, 4), attention_layers=(1,))
    )
    model = abstract_model(model_config)
    source = jax.ShapeDtypeStruct((1, 10), jnp.int32)

    def start(model, source):
        encoded = model.encode(source)
        return model.init_decoding(encoded, encoder_segment_ids=source, length=6).layers

    state = jax.eval_shape(start, model, source)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    cost = costs.model_cost(model_config, encoder_length=10, decoder_length=6)
    assert cost.decoding_bytes == size


PREDICTED_TAPS = StackConfig(num_layers=2, mixing="dynamic", kernel_size=63)


@pytest.mark.parametrize(
    ("stack", "source", "target", "dtype"),
    [
        (CONVOLUTION, 96, 40, "float32"),
        (ATTENTION, 96, 40, "float32"),
        (ATTENTION, 1024, 256, "bfloat16"),
        (RELEASED, 96, 40, "float32"),
        (PREDICTED_TAPS, 96, 40, "bfloat16"),
    ],
    ids=["dynamic", "attention", "long attention", "released", "predicted taps"],
)
def test_activation_memory_is_what_plain_autodiff_keeps_within_a_factor(
    stack, source, target, dtype
):
    """Autodiff without a compiler keeps every intermediate of norms and masks as well."""
    sizes = {"emb_dim": 64, "mlp_dim": 256, "num_heads": 4, "head_dim": 16}
    model_config = config(stack, dtype=dtype, **sizes)
    rows = 2
    batch = abstract_batch(rows, source, target)

    def backward(model, batch):
        return jax.vjp(lambda m: TextLoss()(m, batch).loss_sum, model)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, abstract_model(model_config), batch))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept if leaf.shape[:1] == (rows,))
    cost = costs.model_cost(model_config, encoder_length=source, decoder_length=target)
    estimate = rows * (cost.activation_bytes + cost.logits_bytes)
    assert estimate <= size <= 3 * estimate


@pytest.mark.parametrize("stack", [CONVOLUTION, ATTENTION], ids=["dynamic", "attention"])
def test_activation_memory_grows_linearly_with_the_lengths(stack):
    short, long = (
        costs.model_cost(config(stack), encoder_length=2 * length, decoder_length=length)
        for length in (32, 64)
    )
    assert long.activation_bytes == 2 * short.activation_bytes


def test_training_memory_grows_with_rows_in_activations_and_logits_only():
    def memory(rows):
        return costs.training_memory(
            config(), AdamWConfig(), rows=rows, encoder_length=8, decoder_length=4
        )

    one, two = memory(1), memory(2)
    assert (two.parameters, two.gradients) == (one.parameters, one.gradients)
    assert two.activations == 2 * one.activations
    assert two.total - one.total == one.activations + one.logits


def measured_reach(layers, length: int) -> costs.Reach:
    """What the middle output of a stack of taps reads, by gradient; taps are positive."""
    middle = length // 2

    def output(x):
        for layer in layers:
            kernel = jnp.ones((layer.kernel_size, 1), x.dtype)
            x = depthwise_conv(x, kernel, dilation=layer.dilation, padding=layer.tap_padding)
            x = x / layer.kernel_size  # Keeps the product of many taps in range.
        return x[0, middle, 0]

    gradient = jax.jit(jax.grad(output))(jnp.ones((1, length, 1)))
    read = np.flatnonzero(np.asarray(gradient)[0, :, 0])
    return costs.Reach(int(middle - read[0]), int(read[-1] - middle))


@pytest.mark.parametrize(
    ("layers", "length"),
    [
        ([{"kernel_size": 7}] * 3, 40),
        ([{"kernel_size": 4}, {"kernel_size": 2, "dilation": 3}], 40),
        ([{"kernel_size": 3, "dilation": 2**i, "padding": "CAUSAL"} for i in range(4)], 80),
        ([{"kernel_size": 3, "padding": (2, 0)}, {"kernel_size": 5, "padding": (1, 3)}], 40),
    ],
    ids=["window7", "even", "causal", "explicit"],
)
def test_receptive_field_is_the_one_measured_by_gradients(layers, length):
    mixings = [Depthwise(**layer) for layer in layers]
    assert costs.stack_reaches(mixings)[-1] == measured_reach(mixings, length)


def test_wavenet_stack_sees_exactly_4096_tokens():
    stack = StackConfig(
        num_layers=12,
        mixing="depthwise",
        kernel_size=2,
        dilation=[2**i for i in range(12)],
    )
    mixings = stack.layers(causal=True)
    reaches = costs.stack_reaches(mixings)
    assert [reach.size for reach in reaches] == [2**i for i in range(1, 13)]
    assert reaches[-1] == measured_reach(mixings, 8200) == costs.Reach(4095, 0)


@pytest.mark.slow
@pytest.mark.parametrize("stack_name", quick(["encoder", "decoder"], chosen=["decoder"]))
def test_receptive_field_of_the_real_stack_is_the_one_measured_by_gradients(stack_name):
    stack = StackConfig(
        num_layers=3,
        mixing=("dynamic", "lightweight", "depthwise"),
        kernel_size=(4, 3, 2),
        dilation=(1, 2, 4),
        num_kernels=(2, None, None),
    )
    model_config = config(stack, emb_dim=4, mlp_dim=4, num_heads=1)
    model = model_config.build(jax.random.key(0))
    ones = jnp.ones((1, 40), jnp.int32)
    cross = {"memory": jnp.ones((1, 1, 4)), "memory_segment_ids": jnp.ones((1, 1), jnp.int32)}
    inputs = StackInputs(ones, **(cross if stack_name == "decoder" else {}))

    def output(x):
        return jnp.sum(getattr(model, stack_name)(x, inputs)[0, 20])

    gradient = jax.jit(jax.grad(output))(jax.random.normal(jax.random.key(1), (1, 40, 4)))
    read = np.flatnonzero(np.abs(np.asarray(gradient)).sum(-1)[0])
    cost = costs.model_cost(model_config, encoder_length=40, decoder_length=40)
    assert cost.reach(stack_name) == costs.Reach(int(20 - read[0]), int(read[-1] - 20))


def test_attention_reads_the_whole_sequence_from_its_layer_upwards():
    stack = StackConfig(num_layers=3, kernel_size=3, attention_layers=(1,))
    encoder = costs.stack_reaches(stack.layers())
    decoder = costs.stack_reaches(stack.layers(causal=True))
    assert [reach.size for reach in encoder] == [3, None, None]
    assert decoder[-1] == costs.Reach(None, 0)
    assert [str(reach) for reach in (*encoder[:2], decoder[-1])] == [
        "-1 .. +1",
        "start .. end",
        "start .. 0",
    ]


def test_dynamic_convolution_of_few_kernels_costs_less_than_attention_at_equal_size():
    def flops(stack):
        cost = costs.model_cost(
            config(stack, emb_dim=64, num_heads=4, head_dim=16),
            encoder_length=512,
            decoder_length=114,
        )
        return cost.forward_flops

    assert flops(CONVOLUTION) < flops(ATTENTION)
    assert math.isfinite(flops(RELEASED))
