"""Imports T5 1.0 and 1.1 as trained by T5X (`t5x/examples/t5`, and `scalable_t5`).

Names and shapes give the architecture; `model.gin` beside the checkpoint has the training settings.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convt5 import errors
from convt5.interchange.mapping import Arrays, Imported, Shape, Source, import_arrays
from convt5.interchange.operative_config import ACTIVATIONS, OperativeConfig, mlp_kind
from convt5.interchange.run_files import Training
from convt5.interchange.t5x_files import Files, OneByOne
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, factored_axes
from convt5.training.schedule import Constant, InverseSqrt, Schedule

GIN_FILES = ("model.gin", "config.gin", "operative_config.gin")

_TARGET = "target/"
_STATE = "state/param_states/"
_KINDS = ("m", "v", "v_row", "v_col")
_NORMALIZATIONS = {"NUM_REAL_TARGET_TOKENS": "tokens", "NUM_TOTAL_TARGET_TOKENS": "positions"}
_ATTENTION = {"encoder": {"attention": "mixing"}, "decoder": {}}
_ATTENTION["decoder"] = {"self_attention": "mixing", "encoder_decoder_attention": "cross_attention"}
_NORMS = {
    "encoder": {"pre_attention_layer_norm": "mixing_norm", "pre_mlp_layer_norm": "mlp_norm"},
    "decoder": {
        "pre_self_attention_layer_norm": "mixing_norm",
        "pre_cross_attention_layer_norm": "cross_norm",
        "pre_mlp_layer_norm": "mlp_norm",
    },
}


def read_model(
    files: Files, settings: OperativeConfig | None = None, *, allow_unmapped: bool = False
) -> Imported:
    """Reads the parameters of a checkpoint into float32.

    Args:
        files: the open checkpoint.
        settings: its `model.gin`, which must not contradict the shapes.
        allow_unmapped: whether to ignore unknown arrays.

    Raises:
        UserError: another architecture, missing or unknown arrays, or damaged files.
    """
    where = str(files.folder)
    layers = OneByOne(files)
    config = architecture(layers.shapes, settings or OperativeConfig(""), where=where)
    skipped = {name: "optimizer state" for name in layers.shapes if name.startswith("state/")}
    imported = import_arrays(
        _rows(config),
        config,
        layers.shapes,
        layers.read,
        skipped=skipped,
        allow_unmapped=allow_unmapped,
        where=where,
    )
    notes = imported.report.notes
    if settings is None:
        notes.append("no model.gin: dropout, optimizer and schedule are those of T5.")
    if config.mlp != "relu" and not (settings and settings.get("T5Config", "mlp_activations")):
        notes.append(f"mlp_activations not given: {config.mlp} assumed, as in T5 1.1.")
    return imported._replace(step=files.step())


def read_moments(files: Files, imported: Imported) -> dict[str, Arrays]:
    """Reads Adafactor's state: for each parameter the arrays of `optimizer.SecondMomentState`.

    Raises:
        UserError: arrays of the optimizer are missing, or it has momentum.
    """
    if why := _no_moments([name for name in files.shapes if name.startswith(_STATE)]):
        raise errors.UserError(f"{files.folder} {why}; leave out --optimizer.")
    moments, faults, used = {}, [], set()
    for source in imported.sources:
        owner = _STATE + source.names[0].removeprefix(_TARGET)
        names = {kind: f"{owner}/{kind}" for kind in _KINDS if f"{owner}/{kind}" in files.shapes}
        shape = imported.params[source.path].shape
        kept = {kind: n for kind, n in names.items() if files.shapes[n] not in ((1,), ())}
        if "m" in kept:
            raise errors.UserError(
                f"{files.folder} has momentum ({kept['m']}), which AdafactorConfig has not; leave "
                "out --optimizer."
            )
        if "v" in kept:
            moments[source.path] = {"full": _turned(source, files.read(kept["v"]))}
        elif {"v_row", "v_col"} <= kept.keys():
            rows, columns = files.read(kept["v_row"]), files.read(kept["v_col"])
            moments[source.path] = _factored(source, shape, rows, columns)
        else:
            faults.append(f"{owner}/v is missing.")
        used |= set(names.values())
    errors.raise_all(
        errors.abbreviate(faults), where=f"{files.folder} cannot be imported with --optimizer"
    )
    report = imported.report
    report.skipped = [(name, why) for name, why in report.skipped if name not in used]
    report.mapped += [(name, "optimizer state") for name in sorted(used)]
    return moments


def _no_moments(names: list[str]) -> str | None:
    """Returns why the optimizer state of these names is none of Adafactor, layer by layer."""
    if not any(name.endswith(("/v", "/v_row")) for name in names):
        return "holds no optimizer state of Adafactor"
    if any("/layers/" in name for name in names):
        return "has the optimizer state of all layers in one array, which cannot be imported"
    return None


def architecture(
    shapes: Mapping[str, Shape], settings: OperativeConfig, *, where: str
) -> ConvT5Config:
    """Returns the architecture, inferred from the parameters and from the settings.

    Args:
        shapes: the shape of each array of the checkpoint, by name.
        settings: its gin settings.
        where: names the checkpoint in error messages.

    Raises:
        UserError: the parameters are not those of a T5, or contradict the settings.
    """
    found = {
        name.removeprefix(_TARGET): s for name, s in shapes.items() if name.startswith(_TARGET)
    }
    table, bias = "token_embedder/embedding", "encoder/relpos_bias/rel_embedding"
    query = "encoder/layers_0/attention/query/kernel"
    is_gated = "encoder/layers_0/mlp/wi_0/kernel" in found
    inward = f"encoder/layers_0/mlp/{'wi_0' if is_gated else 'wi'}/kernel"
    if absent := [n for n in (table, bias, query, inward) if len(found.get(n, ())) != 2]:
        raise errors.UserError(
            f"{where}: {_TARGET}{absent[0]} is missing or no matrix, so this is no checkpoint of "
            "t5x/examples/t5, the only architecture of T5X that can be read."
        )
    heads, inner = found[bias][0], found[query][1]
    told = settings.get("T5Config", "mlp_activations")
    activations = tuple(told) if isinstance(told, list | tuple) else ()
    if mlp_kind(activations, 1 + is_gated) is None:
        activations = ("gelu", "linear") if is_gated else ("relu",)
    values: dict[str, Any] = {
        "vocab_size": found[table][0],
        "emb_dim": found[table][1],
        "mlp_dim": found[inward][1],
        "num_heads": heads,
        "head_dim": inner // heads if heads and inner % heads == 0 else 0,
        "num_encoder_layers": _count(found, "encoder"),
        "num_decoder_layers": _count(found, "decoder"),
        "logits_via_embedding": "decoder/logits_dense/kernel" not in found,
        "mlp_activations": activations,
    }
    faults = [
        f"T5Config.{name}={told!r}, but the checkpoint has {value!r}."
        for name, value in values.items()
        if (told := settings.get("T5Config", name)) is not None
        and not (tuple(told) == value if isinstance(told, list) else told == value)
    ]
    errors.raise_all(faults, where=f"{where} and {settings.where}")
    return ConvT5Config(
        **{name: values[name] for name in ("vocab_size", "emb_dim", "mlp_dim", "num_heads")},
        head_dim=values["head_dim"],
        encoder=StackConfig(num_layers=values["num_encoder_layers"], mixing="attention"),
        decoder=StackConfig(num_layers=values["num_decoder_layers"], mixing="attention"),
        mlp=ACTIVATIONS[activations],
        tie_output=values["logits_via_embedding"],
        positions="relative",
        relative_buckets=found[bias][1],
        dropout_rate=settings.number("T5Config", "dropout_rate", 0.1),
        dtype="float32",
    )


def training_settings(settings: OperativeConfig | None) -> Training:
    """Returns optimizer, schedule and loss of the original run, as far as its settings tell.

    Raises:
        UserError: a setting that convt5 does not implement, such as momentum or another
            optimizer.
    """
    usual_z_loss = 1e-4 if settings is None else 0.0  # T5's, and that of T5X's class.
    settings = settings or OperativeConfig("")
    settings.check(
        {
            ("EncoderDecoderModel", "optimizer_def"): "Adafactor",
            ("Trainer", "learning_rate_fn"): "create_learning_rate_scheduler",
            ("Adafactor", "beta1"): None,
            ("Adafactor", "weight_decay_rate"): None,
            ("Adafactor", "step_offset"): 0,
            ("Adafactor", "weight_decay_rate_lr_exponent"): None,
            ("Adafactor", "global_norm_clip_threshold"): None,
            ("Adafactor", "max_parameter_scale"): None,
            ("Adafactor", "skip_nan_updates"): False,
            ("create_learning_rate_scheduler", "step_offset"): 0,
            ("create_learning_rate_scheduler", "min_learning_rate"): 1e-8,
        }
    )
    is_factored = settings.switch("Adafactor", "factored", True)
    fewest = settings.number("Adafactor", "min_dim_size_to_factor", 128, whole=True)
    optimizer = AdafactorConfig(
        decay_exponent=settings.number("Adafactor", "decay_rate", 0.8),
        clipping_threshold=settings.limit("Adafactor", "clipping_threshold", 1.0),
        scale_by_parameter=settings.switch("Adafactor", "multiply_by_parameter_scale", True),
        epsilon=settings.number("Adafactor", "epsilon1", 1e-30),
        min_parameter_scale=settings.number("Adafactor", "epsilon2", 1e-3),
        min_dim_to_factor=fewest if is_factored else 2**31,
    )
    normalize_by, divisor = _normalization(settings)
    loss = TextLoss(
        z_loss=settings.number("EncoderDecoderModel", "z_loss", usual_z_loss),
        label_smoothing=settings.number("EncoderDecoderModel", "label_smoothing", 0.0),
        normalize_by=normalize_by,
    )
    return Training(optimizer, _schedule(settings), loss, divisor)


def factoring_as_kept(training: Training, files: Files, imported: Imported) -> Training:
    """Sets `min_dim_to_factor` so that Adafactor factors the same parameters, if one value can."""
    optimizer = training.optimizer
    assert isinstance(optimizer, AdafactorConfig)
    factored, whole = [], [1]
    for source in imported.sources:
        shape = imported.params[source.path].shape
        rows = f"{_STATE}{source.names[0].removeprefix(_TARGET)}/v_row"
        if len(shape) == 2 and rows in files.shapes:
            (whole if files.shapes[rows] == (1,) else factored).append(min(shape))
    fewest, least = min(factored, default=2**31), optimizer.min_dim_to_factor
    if max(whole) < least <= fewest or max(whole) >= fewest:
        return training
    return training._replace(optimizer=dataclasses.replace(optimizer, min_dim_to_factor=fewest))


def _normalization(settings: OperativeConfig) -> tuple[str, float]:
    """Returns `TextLoss.normalize_by`, and the constant by which the loss was divided too."""
    name = ("EncoderDecoderModel", "loss_normalizing_factor")
    factor = settings.get(*name)
    if not isinstance(factor, str):
        return "nothing", settings.divisor(*name)
    if factor.upper() not in _NORMALIZATIONS:
        raise errors.UserError(
            f"{settings.where}: {'.'.join(name)}={factor!r} is not implemented; remove the line to "
            "minimise the sum over the batch."
        )
    return _NORMALIZATIONS[factor.upper()], 1.0


def _schedule(settings: OperativeConfig) -> Schedule:
    name = "create_learning_rate_scheduler"
    base = settings.number(name, "base_learning_rate", 1.0)
    warmup = settings.number(name, "warmup_steps", 10_000, whole=True)
    factors = settings.get(name, "factors")
    if factors == "constant":
        return Constant(rate=base)
    if factors in (None, "constant * rsqrt_decay"):
        return InverseSqrt(multiplier=base, warmup_steps=warmup)
    raise errors.UserError(
        f"{settings.where}: {name}.factors={factors!r} is not implemented; remove the line for "
        "'constant * rsqrt_decay', and set trainer.train.schedule of the run to what you want."
    )


def _rows(config: ConvT5Config) -> Iterator[Source]:
    """Yields the arrays of each parameter."""
    yield _same("token_embedder/embedding", "token_embedder/embedding")
    if not config.tie_output:
        yield _same("output_head/kernel", "decoder/logits_dense/kernel")
    for stack, layers in (("encoder", config.encoder), ("decoder", config.decoder)):
        yield dataclasses.replace(
            _same(f"{stack}/relative_bias/embedding", f"{stack}/relpos_bias/rel_embedding"),
            transposed=True,
        )
        yield _same(f"{stack}/final_norm/scale", f"{stack}/{stack}_norm/scale")
        inward = ("wi",) if config.mlp == "relu" else ("wi_0", "wi_1")
        for i in range(layers.num_layers):
            ours, theirs = f"{stack}/layers/{i}", f"{stack}/layers_{i}"
            for name, own in _NORMS[stack].items():
                yield _same(f"{ours}/{own}/scale", f"{theirs}/{name}/scale")
            for name, own in _ATTENTION[stack].items():
                for part in ("query", "key", "value", "output"):
                    other = "out" if part == "output" else part
                    yield _same(f"{ours}/{own}/{part}/kernel", f"{theirs}/{name}/{other}/kernel")
            for name in (*inward, "wo"):
                yield _same(f"{ours}/mlp/{name}/kernel", f"{theirs}/mlp/{name}/kernel")


def _same(path: str, name: str) -> Source:
    return Source(path=path, names=(_TARGET + name,))


def _count(found: Mapping[str, Shape], stack: str) -> int:
    """Returns the number of layers of a stack, numbered from 0."""
    parts = (name.split("/") for name in found)
    layers = {p[1] for p in parts if len(p) > 2 and p[0] == stack and p[1].startswith("layers_")}
    return len(layers)


def _turned(source: Source, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T if source.transposed else array)


def _factored(source: Source, shape: Shape, rows: np.ndarray, columns: np.ndarray) -> Arrays:
    """Returns the means of a moment, in which averaged axes have length 1.

    T5X's `v_row` keeps the shorter axis, `v_col` the longer; of equal ones, the first and second.
    """
    axes = factored_axes(shape, 1)
    if len(shape) != 2 or axes is None:
        raise errors.UserError(f"the optimizer's memory of {source.path} {shape} is no matrix's.")
    longest, second = axes
    by_axis = {second: rows, longest: columns}
    if shape[0] == shape[1]:
        by_axis = {1: rows, 0: columns} if source.transposed else {0: rows, 1: columns}
    return {
        "row": np.expand_dims(by_axis[second], longest),
        "column": np.expand_dims(by_axis[longest], second),
    }
