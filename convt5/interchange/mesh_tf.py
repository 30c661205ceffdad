"""Imports the T5 of Mesh TensorFlow and the convolutional models built on it.

`read_model` returns parameters, `read_moments` optimizer state, `training_settings` the training of
the run. `parameter_table` is the only definition of the names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from convt5 import errors
from convt5.interchange.mapping import Arrays, Imported, Shape, Source, import_arrays
from convt5.interchange.mesh_tf_architecture import NORMS, STACKS, TAPS, infer_architecture
from convt5.interchange.operative_config import OperativeConfig
from convt5.interchange.run_files import Training
from convt5.interchange.tf_checkpoint import STEP, Checkpoint
from convt5.modeling.architecture import ConvT5Config
from convt5.modeling.mixers.convolution import ConvolutionConfig
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig
from convt5.training.schedule import Constant, InverseSqrt, Schedule

_FINAL_NORMS = ("rms_norm", "final_layer_norm", "layer_norm")


def read_model(
    checkpoint: Checkpoint,
    operative: OperativeConfig | None = None,
    *,
    allow_unmapped: bool = False,
) -> Imported:
    """Reads the parameters of a checkpoint into float32.

    Args:
        checkpoint: an open checkpoint.
        operative: its operative config; see `infer_architecture`.
        allow_unmapped: whether to ignore unknown variables.

    Raises:
        UserError: an unknown architecture, missing or unknown variables, or damaged files.
    """
    variables = checkpoint.variables()
    architecture = infer_architecture(variables, operative)
    config = architecture.config
    table = parameter_table(config, variables)
    skipped = {name: "optimizer state" for name in checkpoint.slots()} | {STEP: "the step number"}
    imported = import_arrays(
        table,
        config,
        checkpoint.shapes,
        checkpoint.read,
        skipped=skipped,
        allow_unmapped=allow_unmapped,
        where=f"checkpoint={checkpoint.prefix}",
    )
    imported.report.notes += architecture.notes
    return imported._replace(step=checkpoint.step())


def read_moments(checkpoint: Checkpoint, imported: Imported) -> dict[str, Arrays]:
    """Reads Adafactor's state: for each parameter the arrays of `optimizer.SecondMomentState`.

    Updates the report of `imported`.

    Raises:
        UserError: variables of the optimizer are missing, or belong to another optimizer.
    """
    slots, used, moments, faults = checkpoint.slots(), set(), {}, []
    for source in imported.sources:
        kinds = ("vr", "vc") if f"{source.names[0]}_slot_vr" in slots else ("v",)
        names = {kind: tuple(f"{name}_slot_{kind}" for name in source.names) for kind in kinds}
        absent = [name for group in names.values() for name in group if name not in slots]
        if absent:
            faults.append(f"optimizer variable {absent[0]} is missing.")
            continue
        used |= {name for group in names.values() for name in group}
        shape = source.shapes(imported.params[source.path].shape)
        moments[source.path] = as_moment(source, shape, names, checkpoint.read)
    faults += [f"optimizer variable {name} is not Adafactor's." for name in slots.keys() - used]
    errors.raise_all(
        faults[:20], where=f"checkpoint={checkpoint.prefix} cannot be imported with --optimizer"
    )
    owners = {name: source.path for source in imported.sources for name in source.names}
    report = imported.report
    report.skipped = [(name, why) for name, why in report.skipped if name not in used]
    report.mapped += [
        (name, f"optimizer state of {owners[name.rsplit('_slot_', 1)[0]]}") for name in sorted(used)
    ]
    return moments


def training_settings(operative: OperativeConfig | None) -> Training:
    """Returns optimizer, schedule and loss of the original run, with T5's settings as defaults.

    Raises:
        UserError: a setting is invalid, or not implemented in convt5, such as momentum or another
            optimizer.
    """
    operative = operative or OperativeConfig("")
    operative.check(
        {
            ("run", "optimizer"): "AdafactorOptimizer",
            ("AdafactorOptimizer", "beta1"): 0.0,
            ("AdafactorOptimizer", "decay_rate"): None,
            ("AdafactorOptimizer", "exclude_from_parameter_scale"): None,
            ("AdafactorOptimizer", "stacked_dim_names"): None,
            ("adafactor_decay_rate_pow", "offset"): 0,
            ("learning_rate_schedule_noam", "linear_decay_fraction"): 0.0,
            ("learning_rate_schedule_noam", "offset"): 0,
            ("SelfAttention", "z_loss_coeff"): None,
            ("Unitransformer", "loss_fn"): None,
            ("Unitransformer", "loss_on_targets_only"): False,
            ("Unitransformer", "token_dropout_rate"): 0.0,
            ("tpu_estimator_model_fn", "variable_filter"): "",
        },
        scope="decoder",
    )
    operative.check({("Unitransformer", "token_dropout_rate"): 0.0}, scope="encoder")
    try:
        return Training(_optimizer(operative), _schedule(operative), *_loss_and_divisor(operative))
    except errors.UserError as error:
        if str(error).startswith(operative.where):
            raise
        raise errors.UserError(f"{operative.where}: {error}") from None


def _optimizer(operative: OperativeConfig) -> AdafactorConfig:
    number = functools.partial(operative.number, "AdafactorOptimizer")
    switch = functools.partial(operative.switch, "AdafactorOptimizer")
    fewest = number("min_dim_size_to_factor", 128, whole=True)
    return AdafactorConfig(
        decay_exponent=operative.number("adafactor_decay_rate_pow", "exponent", 0.8),
        clipping_threshold=operative.limit("AdafactorOptimizer", "clipping_threshold", 1.0),
        scale_by_parameter=switch("multiply_by_parameter_scale", True),
        min_parameter_scale=number("epsilon2", 1e-3),
        epsilon=number("epsilon1", 1e-30),
        min_dim_to_factor=fewest if switch("factored", True) else 2**31,
    )


def _schedule(operative: OperativeConfig) -> Schedule:
    number = functools.partial(operative.number, "learning_rate_schedule_noam")
    warmup = number("warmup_steps", None, whole=True)
    constant = operative.number("constant_learning_rate", "learning_rate", None)
    told = operative.reference("run", "learning_rate_schedule")
    if told not in (None, "learning_rate_schedule_noam", "constant_learning_rate"):
        raise errors.UserError(
            f"run.learning_rate_schedule={told!r} is not implemented; remove the line, and set "
            "trainer.train.schedule of the run to what you want."
        )
    if constant is not None and (told == "constant_learning_rate" or told is warmup is None):
        return Constant(rate=constant)
    return InverseSqrt(
        multiplier=number("multiplier", 1.0), warmup_steps=10_000 if warmup is None else warmup
    )


def _loss_and_divisor(operative: OperativeConfig) -> tuple[TextLoss, float]:
    """Returns the loss, and the constant by which the original divided it instead of positions."""
    number = functools.partial(operative.number, "Unitransformer", scope="decoder")
    is_constant = number("loss_denominator", None) is not None
    loss = TextLoss(
        z_loss=number("z_loss", 1e-4),
        label_smoothing=number("label_smoothing", 0.0),
        normalize_by="nothing" if is_constant else "positions",
    )
    return loss, operative.divisor("Unitransformer", "loss_denominator", scope="decoder")


def as_moment(
    source: Source,
    shape: Shape,
    names: Mapping[str, tuple[str, ...]],
    read: Callable[[str], np.ndarray],
) -> Arrays:
    """Returns one parameter's moment, in which averaged axes have length 1.

    Args:
        source: the parameter.
        shape: shape of each of its variables.
        names: the slots v, or vr and vc, of each of its variables.
        read: returns a slot.
    """
    if "v" in names:
        return {"full": dataclasses.replace(source, names=names["v"]).assemble(read)}
    # The original averages over its longer axis first; of equal ones, over the first.
    longer = 1 if shape[1] > shape[0] else 0
    averaged = {longer: names["vr"], 1 - longer: names["vc"]}
    ours = shape[::-1] if source.transposed else shape
    row_axis = 1 if ours[1] > ours[0] else 0
    moment = {}
    for kind, axis in (("row", row_axis), ("column", 1 - row_axis)):
        theirs = averaged[1 - axis if source.transposed else axis]
        flat = Source(path=source.path, names=theirs, stacked=source.stacked)
        moment[kind] = np.expand_dims(flat.assemble(read), axis + int(source.stacked))
    return moment


def parameter_table(config: ConvT5Config, variables: Mapping[str, Shape]) -> list[Source]:
    """Returns the variables of each parameter; `variables` decides between old and new norms."""
    table = [_same("token_embedder/embedding", "shared/embedding")]
    if config.positions == "learned":
        table.append(_same("position_embedder/embedding", "shared/positional_embedding"))
    if not config.tie_output:
        table.append(_same("output_head/kernel", "decoder/logits/kernel"))
    for stack in STACKS:
        mixings = config.encoder_layers if stack == "encoder" else config.decoder_layers
        if config.positions == "relative" and any(mixing.reads_distances for mixing in mixings):
            bias = f"{stack}/block_000/layer_000/SelfAttention/relative_attention_bias"
            path = f"{stack}/relative_bias/embedding"
            table.append(Source(path=path, names=(bias,), transposed=True))
        norms = [f"{stack}/{norm}/scale" for norm in _FINAL_NORMS]
        table.append(_same(f"{stack}/final_norm/scale", _first(norms, variables)))
        for index, mixing in enumerate(mixings):
            block, layer = f"{stack}/block_{index:03d}", f"{stack}/layers/{index}"
            table += _norm(f"{layer}/mixing_norm", f"{block}/layer_000", variables)
            if isinstance(mixing, ConvolutionConfig):
                table += _convolution(f"{layer}/mixing", f"{block}/layer_000", mixing)
            else:
                table += _attention(f"{layer}/mixing", f"{block}/layer_000/SelfAttention")
            last = f"{block}/layer_001"
            if stack == "decoder":
                table += _norm(f"{layer}/cross_norm", last, variables)
                table += _attention(f"{layer}/cross_attention", f"{last}/EncDecAttention")
                last = f"{block}/layer_002"
            table += _norm(f"{layer}/mlp_norm", last, variables)
            inward = ("wi",) if config.mlp == "relu" else ("wi_0", "wi_1")
            table += [
                _same(f"{layer}/mlp/{name}/kernel", f"{last}/DenseReluDense/{name}/kernel")
                for name in (*inward, "wo")
            ]
    return table


def _same(path: str, name: str) -> Source:
    return Source(path=path, names=(name,))


def _norm(path: str, owner: str, variables: Mapping[str, Shape]) -> list[Source]:
    names = [f"{owner}/{norm}/scale" for norm in NORMS]
    return [_same(f"{path}/scale", _first(names, variables))]


def _attention(path: str, owner: str) -> list[Source]:
    ours = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return [_same(f"{path}/{name}/kernel", f"{owner}/{short}") for short, name in ours.items()]


def _convolution(path: str, sublayer: str, mixing: ConvolutionConfig) -> list[Source]:
    separable = mixing.kind == "depthwise"
    owner = f"{sublayer}/{'SeparableConv1DLayer' if separable else 'LocalConvAttnBlock'}"
    stem = next(stem for stem, kind in TAPS.items() if kind == mixing.kind)
    taps = [f"{owner}/{stem}_{i}" for i in range(mixing.kernel_size)]

    def stacked(leaf: str, part: str) -> Source:
        names = tuple(f"{tap}/{part}" for tap in taps)
        return Source(path=f"{path}/{leaf}", names=names, stacked=True)

    def dense(leaf: str, name: str) -> list[Source]:
        parts = ("kernel", "bias") if mixing.projection_bias else ("kernel",)
        return [_same(f"{path}/{leaf}/{part}", f"{owner}/{name}/{part}") for part in parts]

    leaves = {"depthwise": "kernel", "lightweight": "kernel_logits", "dynamic": "predictor/kernel"}
    table = [stacked(leaves[mixing.kind], "kernel")]
    if mixing.kind == "dynamic" and mixing.predictor_bias:
        table.append(stacked("predictor/bias", "bias"))
    if mixing.input_projection != "none":
        table += dense("input", "local_conv_inp_0")
    if mixing.input_projection == "gated":
        table += dense("gate", "local_conv_inp_1")
    if mixing.conv_bias:
        bias = f"{owner}/separable_conv1d/depthwise_conv_hack/depthwise_dense_0/bias"
        table.append(_same(f"{path}/conv_bias", bias))
    if mixing.pointwise:
        table += dense("pointwise", "separable_conv1d/pointwise_dense")
    if mixing.output_projection:
        table += dense("output", "local_conv_attn_op_projection")
    return table


def _first(names: Sequence[str], variables: Mapping[str, Shape]) -> str:
    return next((name for name in names if name in variables), names[0])
