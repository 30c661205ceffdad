"""Checkpoints of the original compute what the original computed, and bad ones are named."""

import dataclasses
import functools
import re
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5.errors import UserError
from convt5.interchange.mapping import Imported, build_model, take_apart
from convt5.interchange.operative_config import OperativeConfig
from convt5.modeling.tree_paths import named_leaves
from convt5.training.losses import TextLoss

with warnings.catch_warnings():  # TensorFlow's own imports warn.
    warnings.simplefilter("ignore")
    pytest.importorskip("tensorflow", reason="only TensorFlow reads its checkpoints")
from convt5.interchange import mesh_tf, t5x
from convt5.interchange.tf_checkpoint import Checkpoint

FAMILIES = ["lconv_tiny", "dconv_tiny", "sepconv_tiny", "t5bert_tiny", "t5v1_tiny"]
CONVOLUTIONS = FAMILIES[:3]
QUICK = quick(FAMILIES, chosen=["lconv_tiny"])
TOLERANCE = 2e-5  # The original is float32; a float64 re-implementation differs by up to 6e-6.


@functools.cache
def imported(folder, prefix: str = "model.ckpt-0") -> Imported:
    operative = OperativeConfig.read(folder / "operative_config.gin")
    return mesh_tf.read_model(Checkpoint(str(folder / prefix)), operative)


@functools.cache
def reference(folder) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "reference.npz"))


def changed(original: Imported, **settings):
    return build_model(dataclasses.replace(original.config, **settings), original.params)


def plain_batch(ref, prefix: str = "") -> dict[str, np.ndarray]:
    targets = ref[f"{prefix}targets"]
    batch = {
        "encoder_input_tokens": ref[f"{prefix}inputs"],
        "decoder_input_tokens": ref[f"{prefix}decoder_inputs"],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.float32),
        "decoder_segment_ids": (targets > 0).astype(np.int32),
    }
    if prefix:
        batch |= {
            "encoder_segment_ids": ref[f"{prefix}inputs_segmentation"],
            "encoder_positions": ref[f"{prefix}inputs_position"],
            "decoder_segment_ids": ref[f"{prefix}targets_segmentation"],
            "decoder_positions": ref[f"{prefix}targets_position"],
        }
    return batch


def mean_loss(model, batch, **settings):
    return TextLoss(normalize_by="positions", **settings)(model, batch).means()["loss"]


@jax.jit
def compute(model, batch) -> dict:
    """Everything recorded about ordinary rows, in one compilation."""
    train_loss, gradients = jax.value_and_grad(
        functools.partial(mean_loss, batch=batch, z_loss=1e-4)
    )(model)
    return {
        "encoded": model.encode(batch["encoder_input_tokens"]),
        "logits": model(batch["encoder_input_tokens"], batch["decoder_input_tokens"]),
        "loss_eval": mean_loss(model, batch),
        "loss_train": train_loss,
        "gradients": gradients,
    }


@functools.cache
def computed(folder) -> dict:
    return compute(imported(folder).model(), plain_batch(reference(folder)))


@jax.jit
def compute_packed(model, batch) -> dict:
    names = {name for name in batch if "target" not in name and "weights" not in name}
    return {
        "encoded": model.encode(
            batch["encoder_input_tokens"],
            segment_ids=batch["encoder_segment_ids"],
            positions=batch["encoder_positions"],
        ),
        "logits": model(**{name: batch[name] for name in names}),
        "loss_eval": mean_loss(model, batch),
    }


@pytest.fixture
def quick_compilation():
    """Searches take most of their time to compile; optimised programs give the same ids."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def largest(a, b, where=...) -> float:
    return float(np.abs(np.asarray(a, np.float64) - b)[where].max())


@pytest.mark.parametrize("family", QUICK)
def test_logits_and_encoder_output_equal_the_originals(golden, family):
    folder = golden / "mesh_tf" / family
    ref, ours = reference(folder), computed(folder)
    assert largest(ours["logits"], ref["logits"], ref["targets"] > 0) < TOLERANCE
    assert largest(ours["encoded"], ref["encoder_output"]) < TOLERANCE


@pytest.mark.parametrize("family", QUICK)
def test_losses_equal_the_originals(golden, family):
    folder = golden / "mesh_tf" / family
    ref, ours = reference(folder), computed(folder)
    assert largest(ours["loss_eval"], ref["loss_eval"]) < TOLERANCE
    assert largest(ours["loss_train"], ref["loss_train"]) < TOLERANCE


@pytest.mark.parametrize("family", QUICK)
def test_gradients_of_every_variable_equal_the_originals(golden, family):
    folder = golden / "mesh_tf" / family
    ref = reference(folder)
    gradients = dict(named_leaves(computed(folder)["gradients"]))
    by_name = take_apart(imported(folder).sources, gradients)
    recorded = {key.split("/", 1)[1] for key in ref if key.startswith("grad_l2/")}
    assert by_name.keys() == recorded
    for name, gradient in by_name.items():
        norm = np.linalg.norm(gradient)
        assert norm == pytest.approx(ref[f"grad_l2/{name}"], rel=TOLERANCE)
        total = gradient.sum(dtype=np.float64)
        assert total == pytest.approx(ref[f"grad_sum/{name}"], abs=TOLERANCE)


@pytest.mark.parametrize("family", QUICK)
def test_packed_rows_equal_the_originals_when_taps_may_cross_segments(golden, family):
    folder = golden / "mesh_tf" / family
    ref, model = reference(folder), changed(imported(folder), taps_cross_segments=True)
    ours = compute_packed(model, plain_batch(ref, "packed_"))
    real = ref["packed_targets_segmentation"] > 0
    assert largest(ours["logits"], ref["packed_logits"], real) < TOLERANCE
    assert largest(ours["encoded"], ref["packed_encoder_output"]) < TOLERANCE
    assert largest(ours["loss_eval"], ref["packed_loss_eval"]) < TOLERANCE


def unpacked(ref):
    """Returns the sequences of packed rows as padded rows, and where each came from."""
    sources, targets, places = [], [], []
    for row, segments in enumerate(ref["packed_targets_segmentation"]):
        for segment in range(1, segments.max() + 1):
            source = ref["packed_inputs_segmentation"][row] == segment
            target = segments == segment
            sources.append(np.pad(ref["packed_inputs"][row][source], (0, (~source).sum())))
            targets.append(np.pad(ref["packed_decoder_inputs"][row][target], (0, (~target).sum())))
            places.append((row, target))
    return np.stack(sources), np.stack(targets), places


@pytest.mark.parametrize("family", QUICK)
def test_packed_sequences_equal_the_same_sequences_in_rows_of_their_own(golden, family):
    folder = golden / "mesh_tf" / family
    ref, model = reference(folder), imported(folder).model()
    packed = compute_packed(model, plain_batch(ref, "packed_"))["logits"]
    sources, targets, places = unpacked(ref)
    alone = np.asarray(jax.jit(lambda m, s, t: m(s, t))(model, sources, targets))
    differences = [
        largest(packed[row][target], logits[: target.sum()])
        for (row, target), logits in zip(places, alone, strict=True)
    ]
    assert max(differences) < TOLERANCE
    if family in CONVOLUTIONS:  # The original leaks.
        real = ref["packed_targets_segmentation"] > 0
        assert largest(packed, ref["packed_logits"], real) > 1e-2


def greedy(model, tokens, length: int, *, hide_start_token: bool) -> np.ndarray:
    from convt5.generation.decoding import Greedy, decode

    found = decode(
        model, tokens, max_length=length, strategy=Greedy(), hide_start_token=hide_start_token
    )
    return found.tokens[:, 0]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("family", QUICK)
def test_greedy_decoding_equals_the_originals_with_its_defect(golden, family):
    folder = golden / "mesh_tf" / family
    ref, model = reference(folder), imported(folder).model()
    length = ref["greedy_ids"].shape[1]
    ids = greedy(model, ref["inputs"], length, hide_start_token=False)
    np.testing.assert_array_equal(ids, ref["greedy_ids"])


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("family", QUICK)
def test_beam_search_equals_the_originals_with_its_rules_and_its_defect(golden, family):
    folder = golden / "mesh_tf" / family
    ref, model = reference(folder), imported(folder).model()
    np.testing.assert_array_equal(beam(model, ref), ref["beam4_ids"])


def beam(model, ref) -> np.ndarray:
    from convt5.generation.decoding import MeshTFBeamSearch, decode

    length = ref["beam4_ids"].shape[1]
    found = decode(
        model,
        ref["inputs"],
        max_length=length,
        strategy=MeshTFBeamSearch(),
        hide_start_token=False,
    )
    return found.tokens[:, 0]


def stepwise_logits(model, encoder_inputs, decoder_inputs, *, hide_start_token=None) -> np.ndarray:
    segments = (encoder_inputs != 0).astype(np.int32)
    length = decoder_inputs.shape[1]
    state = jax.jit(
        lambda tokens: model.init_decoding(
            model.encode(tokens), encoder_segment_ids=segments, length=length
        )
    )(encoder_inputs)
    step = jax.jit(lambda s, t: model.decode_step(s, t, hide_start_token=hide_start_token))
    logits = []
    for position in range(decoder_inputs.shape[1]):
        now, state = step(state, jnp.asarray(decoder_inputs[:, position]))
        logits.append(now)
    return np.stack(logits, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", quick(CONVOLUTIONS, chosen=["lconv_tiny"]))
def test_the_defect_of_the_original_is_exactly_the_start_token_left_readable(golden, family):
    folder = golden / "mesh_tf" / family
    ref, original = reference(folder), imported(folder)
    model, unhidden = original.model(), changed(original, hide_start_token=False)
    real = ref["targets"] > 0
    inputs = ref["inputs"], ref["decoder_inputs"]
    default = stepwise_logits(model, *inputs)
    assert largest(default, ref["logits"], real) < TOLERANCE  # Decoding is teacher forcing.
    defective = stepwise_logits(model, *inputs, hide_start_token=False)
    assert largest(defective, jax.jit(lambda m, *a: m(*a))(unhidden, *inputs), real) < TOLERANCE
    assert 0.1 < largest(defective, ref["logits"], real) < 4.0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variable_is_reported_and_none_is_left_over(golden, family):
    folder = golden / "mesh_tf" / family
    report = imported(folder).report
    held = Checkpoint(str(folder / "model.ckpt-0")).shapes
    reported = {name for name, _ in report.mapped} | {name for name, _ in report.skipped}
    assert reported == held.keys()
    assert not report.missing
    assert not report.unmapped


def write_checkpoint(prefix, arrays) -> str:
    import tensorflow as tf

    names = sorted(arrays)
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(arrays[name]) for name in names],
    )
    return str(prefix)


def small_arrays(**changes) -> dict[str, np.ndarray]:
    """The variables of a lightweight model of 1+1 layers, other sizes than the references."""
    random = np.random.default_rng(3)
    emb, mlp, inner, vocab = 24, 40, 24, 130

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32) * 0.3

    arrays = {
        "shared/embedding": normal(vocab, emb),
        "shared/positional_embedding": normal(30, emb),
        "global_step": np.asarray(7, np.int64),
    }
    for stack, taps in (("encoder", 5), ("decoder", 3)):
        arrays[f"{stack}/rms_norm/scale"] = normal(emb)
        block = f"{stack}/block_000"
        conv = f"{block}/layer_000/LocalConvAttnBlock"
        for i in range(taps):
            arrays[f"{conv}/lightwt_depthwise_dense_{i}/kernel"] = normal(emb)
        separable = f"{conv}/separable_conv1d"
        arrays[f"{separable}/depthwise_conv_hack/depthwise_dense_0/bias"] = normal(emb)
        for name in (
            "local_conv_inp_0",
            "local_conv_inp_1",
            "separable_conv1d/pointwise_dense",
            "local_conv_attn_op_projection",
        ):
            arrays[f"{conv}/{name}/kernel"] = normal(emb, emb)
            arrays[f"{conv}/{name}/bias"] = normal(emb)
        last = 1
        if stack == "decoder":
            for name in "qkvo":
                arrays[f"{block}/layer_001/EncDecAttention/{name}"] = normal(emb, inner)
            last = 2
        arrays[f"{block}/layer_00{last}/DenseReluDense/wi/kernel"] = normal(emb, mlp)
        arrays[f"{block}/layer_00{last}/DenseReluDense/wo/kernel"] = normal(mlp, emb)
        for layer in range(last + 1):
            arrays[f"{block}/layer_00{layer}/rms_norm/scale"] = normal(emb)
    return {k: v for k, v in (arrays | changes).items() if v is not None}


HEADS = OperativeConfig("num_heads = 3")


def read_small(tmp_path, operative=HEADS, **changes) -> Imported:
    prefix = write_checkpoint(tmp_path / "model.ckpt-7", small_arrays(**changes))
    return mesh_tf.read_model(Checkpoint(prefix), operative)


def test_sizes_and_filter_widths_come_from_the_checkpoint(tmp_path):
    found = read_small(tmp_path)
    assert found.step == 7
    assert (found.config.num_heads, found.config.head_dim) == (3, 8)
    assert found.config.encoder.kernel_size == 5
    assert found.config.decoder.kernel_size == 3
    assert found.config.max_positions == 30
    assert any("assumed centered" in note for note in found.report.notes)


def test_old_names_of_norms_are_read_as_the_new_ones(tmp_path):
    new = small_arrays()
    old = {
        name.replace("block_000/layer_000/rms", "block_000/layer_000/layer")
        .replace("layer_001/rms", "layer_001/layer")
        .replace("layer_002/rms", "layer_002/layer")
        .replace("coder/rms", "coder/final_layer"): value
        for name, value in new.items()
    }
    assert "encoder/final_layer_norm/scale" in old
    found = mesh_tf.read_model(Checkpoint(write_checkpoint(tmp_path / "old", old)), HEADS)
    np.testing.assert_array_equal(
        found.params["encoder/layers/0/mixing_norm/scale"],
        new["encoder/block_000/layer_000/rms_norm/scale"],
    )


def test_bfloat16_and_float32_read_the_same(tmp_path):
    import ml_dtypes

    exact = {
        name: value.astype(ml_dtypes.bfloat16).astype(np.float32) if value.ndim else value
        for name, value in small_arrays().items()
    }
    short = {n: v.astype(ml_dtypes.bfloat16) if v.ndim else v for n, v in exact.items()}
    one = mesh_tf.read_model(Checkpoint(write_checkpoint(tmp_path / "f32", exact)), HEADS)
    two = mesh_tf.read_model(Checkpoint(write_checkpoint(tmp_path / "bf16", short)), HEADS)
    assert one.config == two.config
    for path, value in one.params.items():
        np.testing.assert_array_equal(value, two.params[path])


def test_taps_lie_where_the_operative_config_says(tmp_path):
    text = """
    num_heads = 3
    # Parameters for encoder/LocalConvAttnBlock:
    encoder/transformer_layers.LocalConvAttnBlock.min_relative_pos = \\
        -1
    encoder/transformer_layers.LocalConvAttnBlock.max_relative_pos = 3  # looks ahead
    """
    found = read_small(tmp_path, OperativeConfig(text))
    assert {layer.reach for layer in found.config.encoder_layers} == {(1, 3)}


def test_a_block_without_one_of_its_dense_layers_is_read_as_such(tmp_path):
    removed = {
        f"{stack}/block_000/layer_000/LocalConvAttnBlock/local_conv_attn_op_projection/{part}": None
        for stack in ("encoder", "decoder")
        for part in ("kernel", "bias")
    }
    found = read_small(tmp_path, **removed)
    assert not found.config.encoder.output_projection
    assert found.config.encoder.pointwise


def test_what_shapes_do_not_show_is_asked_for_or_noted(tmp_path):
    with pytest.raises(UserError, match=r"number of heads is unknown.*`num_heads = N`"):
        read_small(tmp_path, None)
    even = {"encoder/block_000/layer_000/LocalConvAttnBlock/lightwt_depthwise_dense_4/kernel": None}
    with pytest.raises(UserError, match=r"offsets of the 4 taps of the encoder are unknown"):
        read_small(tmp_path, **even)
    place = "num_heads = 3\nencoder/LocalConvAttnBlock.min_relative_pos = -1\n"
    found = read_small(
        tmp_path,
        OperativeConfig(f"{place}encoder/LocalConvAttnBlock.max_relative_pos = 2"),
        **even,
    )
    assert {layer.reach for layer in found.config.encoder_layers} == {(1, 2)}
    assert any("of the decoder are assumed causal" in note for note in found.report.notes)


NORM, CALL = "@transformer.sublayer_rms_norm", "@transformer.sublayer_call_layer"
DROP, ADD = "@transformer.sublayer_dropout", "@transformer.sublayer_residual"


def test_sublayers_of_the_original_and_their_legacy_names_are_read(tmp_path):
    legacy = DROP.replace("sublayer", "sublayer_legacy")
    lines = [
        "num_heads = 3",
        f"SUBLAYERS = [{NORM}, {CALL}, {DROP}, {ADD}]",
        "LayerStack.sublayers_per_layer = %SUBLAYERS",
        f"LayerStack.sublayers_initial = [{legacy}]",
        "LayerStack.sublayers_final = [@sublayer_legacy_final_rms_norm, @sublayer_mask_padding, "
        f"{DROP}]",
        "sublayer_rms_norm.epsilon = 1e-05",
        "decoder/DenseReluDense.dropout_rate = 0.2",
    ]
    arrays = {n.replace("rms_norm", "layer_norm"): a for n, a in small_arrays().items()}
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model.ckpt-7", arrays))
    found = mesh_tf.read_model(checkpoint, OperativeConfig("\n".join(lines)))
    assert found.config.norm_epsilon == 1e-5
    notes = "\n".join(found.report.notes)
    assert "dropout_rate not given: 0.1 assumed" in notes
    assert "decoder/DenseReluDense.dropout_rate is another one, but convt5 has one: 0.1" in notes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("AdafactorOptimizer.clipping_threshold = None", None),
        ("AdafactorOptimizer.clipping_threshold = 2.0", 2.0),
        ("AdafactorOptimizer.epsilon2 = 0.001", 1.0),
    ],
)
def test_an_update_is_clipped_as_in_the_original(line, expected):
    training = mesh_tf.training_settings(OperativeConfig(line))
    assert training.optimizer.clipping_threshold == expected
    training = t5x.training_settings(OperativeConfig(line.replace("Optimizer", "")))
    assert training.optimizer.clipping_threshold == expected


@pytest.mark.parametrize(
    "line",
    [
        "encoder/Unitransformer.token_dropout_rate = 0.1",
        "decoder/Unitransformer.token_dropout_rate = 0.1",
        "Unitransformer.loss_fn = @my.loss",
        "Unitransformer.loss_on_targets_only = True",
        "SelfAttention.z_loss_coeff = 0.1",
        "AdafactorOptimizer.stacked_dim_names = ['layers']",
        "tpu_estimator_model_fn.variable_filter = 'decoder'",
    ],
)
def test_training_that_is_not_implemented_is_named(line):
    name = line.partition(" = ")[0].rpartition("/")[2]
    with pytest.raises(UserError, match=f"{re.escape(name)}=.* is not implemented"):
        mesh_tf.training_settings(OperativeConfig(line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_heads = 5", "num_heads=5 contradicts"),
        ("num_heads = 3\nd_model = 32", "d_model=32 contradicts"),
        ("num_heads = 3\nencoder/LocalConvAttnBlock.activation = 'relu'", "activation='relu'"),
        (
            "num_heads = 3\nencoder/LocalConvAttnBlock.min_relative_pos = -4\n"
            "encoder/LocalConvAttnBlock.max_relative_pos = 4",
            "taps from -4 to 4 are 9, but the checkpoint holds 5",
        ),
        ("num_heads = 3\nUnitransformer.max_length = 31", "max_length=31"),
        ("num_heads = 3\nDenseReluDense.activation = 'gelu'", "encoder/.*activation='gelu'"),
        (
            "num_heads = 3\ndecoder/DenseReluDense.activation = ['gelu', 'linear']",
            r"decoder/DenseReluDense.activation=\['gelu', 'linear'\] contradicts",
        ),
        (
            "num_heads = 3\nencoder/sublayer_dropout.dropout_rate = 0.1\n"
            "decoder/sublayer_dropout.dropout_rate = 0.0",
            "sublayer_dropout.dropout_rate is 0.1 in the encoder and 0.0 in the decoder",
        ),
        *(
            (f"num_heads = 3\n{line}", re.escape(line.rpartition(".")[2].partition(" ")[0]))
            for line in (
                "encoder/SeparableConv1DLayer.activation = 'relu'",
                "EncDecAttention.fold_scaling_into_initializer = False",
                "decoder/EncDecAttention.key_value_size = 24",
                "SelfAttention.attention_kwargs = {'extra_logit': 0.0}",
                "decoder/SelfAttention.attention_func = 'hybrid'",
                "make_layer_stack.layer_stack_cls = @transformer.ReversibleLayerStack",
                "unit_scaling_convention.value = True",
                "encoder/VocabEmbedding.scale_variable_like_classifier_weights = True",
                "LayerStack.sublayers_initial = []",
                f"LayerStack.sublayers_per_layer = [{CALL}, {ADD}, {NORM}]",
                f"LayerStack.sublayers_final = [{NORM}, @my.clip]",
            )
        ),
    ],
)
def test_a_config_that_contradicts_the_shapes_is_named(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_small(tmp_path, OperativeConfig(text))


def gated(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the variables with two inward projections in each feed-forward layer."""
    inward = {n: a for n, a in arrays.items() if n.endswith("/wi/kernel")}
    both = {n.replace("wi", f"wi_{i}"): a + i for n, a in inward.items() for i in range(2)}
    return {n: a for n, a in arrays.items() if n not in inward} | both


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (("['gelu', 'linear']",) * 2, "gated_gelu"),
        (("['swish', 'linear']",) * 2, "gated_silu"),
        (("['silu', 'linear']", "('swish', 'linear')"), "gated_silu"),
        ((None, None), "gated_gelu"),
        (
            ("['relu', 'linear']",) * 2,
            r"\['relu', 'linear'\] contradicts .* or \['swish', ",
        ),
        (("['linear', 'sigmoid']",) * 2, "encoder/.*sigmoid.*decoder/.*sigmoid"),
        (("'relu'",) * 2, "activation='relu' contradicts"),
        (("[['gelu'], 'linear']",) * 2, "contradicts"),
        (("['gelu', 'linear']", "['silu', 'linear']"), "gated_gelu in the encoder and gated_silu"),
    ],
)
def test_the_activations_of_gated_layers_are_those_of_the_config(tmp_path, told, expected):
    lines = [
        f"{stack}/transformer_layers.DenseReluDense.activation = {value}"
        for stack, value in zip(("encoder", "decoder"), told, strict=True)
        if value
    ]
    config = OperativeConfig("\n".join(["num_heads = 3", *lines]))
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model.ckpt-7", gated(small_arrays())))
    if not expected.startswith("gated") or " " in expected:
        with pytest.raises(UserError, match=f"(?s){expected}"):
            mesh_tf.read_model(checkpoint, config)
        return
    found = mesh_tf.read_model(checkpoint, config)
    assert found.config.mlp == expected
    assert any("activation" in note for note in found.report.notes) == (told == (None, None))


@pytest.mark.parametrize("old_names", [True, False])
def test_dropout_and_epsilon_are_read_where_the_stack_has_them(tmp_path, old_names):
    arrays = small_arrays()
    if old_names:
        arrays = {name.replace("rms_norm", "layer_norm"): array for name, array in arrays.items()}
    lines = ["num_heads = 3"]
    for stack in ("encoder", "decoder"):
        old = (0.25, 1e-5) if old_names else (None, None)
        lines.append(f"{stack}/transformer.LayerStack.dropout_rate = {old[0]}")
        lines.append(f"{stack}/transformer.LayerStack.norm_epsilon = {old[1]}")
    if not old_names:
        lines += ["sublayer_dropout.dropout_rate = 0.25", "sublayer_rms_norm.epsilon = 1e-05"]
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "model.ckpt-7", arrays))
    found = mesh_tf.read_model(checkpoint, OperativeConfig("\n".join(lines))).config
    assert (found.dropout_rate, found.norm_epsilon) == (0.25, 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared/embedding": None}, "unknown architecture"),
        ({"encoder/block_000/layer_000/rms_norm/scale": None}, "scale is missing"),
        ({"encoder/mystery": np.zeros(3, np.float32)}, "encoder/mystery .* belongs to no part"),
        ({"encoder/mystery": np.zeros(3, np.int8)}, "stored as int8"),
        ({"global_step": np.asarray(-1, np.int64)}, r"global_step \(its step is -1\)"),
        ({"global_step": np.asarray(2**31, np.int64)}, r"global_step \(its step is 2147483648\)"),
        ({"decoder/rms_norm/scale": np.zeros(25, np.float32)}, r"shape \(25,\), expected \(24,\)"),
        (
            {"encoder/block_000/layer_000/SelfAttention/q": np.zeros((24, 24), np.float32)},
            "unknown architecture: encoder/block_000",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read_small(tmp_path, **changes)


def test_unmapped_variables_are_left_out_only_when_asked(tmp_path):
    extra = {"encoder/mystery": np.zeros(3, np.float32)}
    prefix = write_checkpoint(tmp_path / "extra", small_arrays(**extra))
    found = mesh_tf.read_model(Checkpoint(prefix), HEADS, allow_unmapped=True)
    assert found.report.unmapped == ["encoder/mystery"]


@pytest.fixture
def copied(golden, tmp_path):
    for path in (golden / "mesh_tf" / "lconv_tiny").glob("model.ckpt-0.*"):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


def test_a_truncated_shard_is_named(copied):
    shard = copied / "model.ckpt-0.data-00001-of-00002"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(UserError, match="truncated"):
        mesh_tf.read_model(Checkpoint(str(copied / "model.ckpt-0")), OperativeConfig("num_heads=4"))


def test_an_index_without_data_is_named(copied):
    (copied / "model.ckpt-0.data-00001-of-00002").unlink()
    with pytest.raises(UserError, match=r"lacks model\.ckpt-0\.data-00001-of-00002"):
        Checkpoint(str(copied / "model.ckpt-0"))


def test_a_path_without_checkpoint_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Checkpoint(str(tmp_path / "model.ckpt-3"))


@pytest.mark.parametrize("name", ["model.ckpt-0", "model.ckpt-9", "\x80"])
def test_a_copied_folder_is_read_whatever_its_file_checkpoint_names(copied, name):
    other = copied / "other"
    other.mkdir()
    for path in copied.glob("model.ckpt-0.*"):
        shutil.copyfile(path, other / path.name.replace("model.ckpt-0", name))
    text = f'model_checkpoint_path: "{other}/{name}"\n'
    (copied / "checkpoint").write_bytes(text.encode("latin-1"))
    assert Checkpoint(str(copied)).prefix == str(copied / "model.ckpt-0")


def test_the_folder_or_any_file_of_a_checkpoint_names_it(copied):
    prefix = str(copied / "model.ckpt-0")
    assert Checkpoint(str(copied)).prefix == prefix
    assert Checkpoint(f"{prefix}.index").prefix == prefix
