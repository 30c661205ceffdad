"""T5, mT5, ByT5, Flan-T5 and UL2 in the format of Hugging Face transformers: config.json, weights.

Import and export use the same table of names. Kernels are [out, in] there and [in, out] here.
Values are only rearranged, so a round trip is exact bit for bit.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from convt5 import errors
from convt5.interchange import safetensors_files, torch_files, weight_files
from convt5.interchange.mapping import (
    Imported,
    Shape,
    Source,
    check_layers,
    import_arrays,
    take_apart,
)
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.layers import MlpKind
from convt5.runtime import foreign_files
from convt5.text import vocabulary_files

CONFIG = "config.json"
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"

_MLP: dict[str, MlpKind] = {
    "relu": "relu",
    "gated-gelu": "gated_gelu",
    "gated-silu": "gated_silu",
}
_FUNCTIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu_new", "gelu_pytorch_tanh"),
    "gated-silu": ("silu", "swish"),
}
"""Values of `dense_act_fn` that compute what a kind of feed-forward layer computes."""

_KINDS = {"t5": "relu", "mt5": "gated-gelu"}
"""Supported model types, and the default kind of their feed-forward layers."""

_COPIES = {
    "encoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.embed_tokens.weight": "a copy of shared.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (
        "unused: encoder-decoder attention has no relative bias"
    ),
}
_SIZES = ("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers")


def is_directory(path: str | pathlib.Path) -> bool:
    """Returns whether a folder holds a transformers model."""
    return "model_type" in (foreign_files.find_json(pathlib.Path(path) / CONFIG) or {})


def read_model(path: str | pathlib.Path, *, allow_unmapped: bool = False) -> Imported:
    """Reads a folder with config.json and weights, whole or in shards.

    Weights are `model.safetensors`, or else `pytorch_model.bin`, for which PyTorch is needed.

    Raises:
        UserError: another architecture, shapes that contradict the config, or damaged files.
    """
    folder = pathlib.Path(path)
    config, _ = read_description(folder)
    files = open_weights(folder)
    check_layers(config, files.shapes, where=str(folder))
    copies = dict(_COPIES)
    if config.tie_output:
        copies["lm_head.weight"] = "a copy of shared.weight: the output is tied"
    found, notes = dict(files.shapes), []
    stored = {}  # Arrays that are saved under another name.
    if (tie := _tie(found, copies)) is not None:
        notes.append(f"shared.weight is absent; {tie}, which is tied to it, replaces it.")
        found["shared.weight"], stored["shared.weight"] = found.pop(tie), tie
    if not config.tie_output and "lm_head.weight" not in found and "shared.weight" in found:
        # transformers 5 ties them without the factor of T5 1.0, and saves one of the two.
        notes.append("lm_head.weight is absent; shared.weight, which is tied to it, replaces it.")
        found["lm_head.weight"] = found["shared.weight"]
        stored["lm_head.weight"] = stored.get("shared.weight", "shared.weight")

    def read(name: str) -> np.ndarray:
        return files.read(stored.get(name, name))

    imported = import_arrays(
        parameter_table(config),
        config,
        found,
        read,
        skipped=copies,
        allow_unmapped=allow_unmapped,
        where=str(folder),
    )
    imported.report.notes += [*notes, *text_notes(folder)]
    _check_copies(read, imported.report.skipped, where=str(folder))
    return imported


def read_description(path: str | pathlib.Path) -> tuple[ConvT5Config, int]:
    """Returns the model that a folder holds, without its arrays, and 0, as it records no step.

    Raises:
        UserError: config.json is missing or damaged, or describes another architecture.
    """
    file = pathlib.Path(path) / CONFIG
    remedy = "pass the folder of a T5 that holds config.json and its weights."
    config = architecture(foreign_files.read_json(file, remedy=remedy), where=str(file))
    check_ids(file.parent)
    return config, 0


def write_model(
    path: str | pathlib.Path,
    config: ConvT5Config,
    params: Mapping[str, np.ndarray],
    *,
    end_id: int = 1,
    longest: int | None = None,
) -> None:
    """Writes config.json, generation_config.json and model.safetensors into an existing folder.

    `end_id` and `longest` are as in `write_generation`.

    Raises:
        UserError: the model is not T5 1.0 or 1.1; names every setting that differs.
    """
    settings = as_settings(config, end_id=end_id)
    folder = pathlib.Path(path)
    arrays = take_apart(parameter_table(config), params)
    # transformers refuses files that do not name their framework.
    safetensors_files.write(folder / WEIGHTS, arrays, metadata={"format": "pt"})
    write_json(folder / CONFIG, settings)
    write_generation(folder, end_id, longest)


def write_generation(folder: pathlib.Path, end_id: int, longest: int | None) -> None:
    """Writes generation_config.json, how `generate` of transformers ends.

    Args:
        folder: an existing folder.
        end_id: the token at which generation stops.
        longest: the most tokens to generate, the last included; None if unknown, for which
            transformers takes 20.
    """
    # The length counts the token with which the decoder starts.
    limit = {} if longest is None else {"max_length": longest + 1}
    write_json(folder / GENERATION, special_ids(end_id) | limit)


def write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def check_ids(folder: pathlib.Path) -> None:
    """Raises `UserError` where transformers pads or starts with another token than 0."""
    faults = [
        f"{file}: {name}={errors.clip(settings[name])} must be 0, as in T5."
        for file in (CONFIG, GENERATION)
        for settings in (foreign_files.find_json(folder / file) or {},)
        for name in ("decoder_start_token_id", "pad_token_id")
        if settings.get(name, 0) not in (0, None)
    ]
    errors.raise_all(faults, where=str(folder))


def special_ids(end_id: int) -> dict[str, int]:
    """Returns the ids that transformers must know in order to generate."""
    return {"pad_token_id": 0, "eos_token_id": end_id, "decoder_start_token_id": 0}


def text_notes(folder: pathlib.Path) -> list[str]:
    """Returns notes on tokens that are not kept: added ones, and an end that is another one."""
    if tokens := vocabulary_files.added_tokens(folder):
        shown = ", ".join(errors.abbreviate([errors.clip(token) for token in tokens]))
        return [
            f"tokens added to {vocabulary_files.HUGGING_FACE_FILE} are read as letters: {shown}."
        ]
    ends = [
        (name, settings["eos_token_id"])
        for name in (GENERATION, CONFIG)  # As transformers prefers them.
        if (settings := foreign_files.find_json(folder / name) or {}).get("eos_token_id")
    ]
    kept = None
    with contextlib.suppress(errors.UserError):  # Another vocabulary may be named.
        kept = vocabulary_files.load(folder)
    usual = kept.targets.end_id if kept else 1
    if not ends or ends[0][1] == usual:
        return []
    why = "with the vocabulary" if kept else "without a vocabulary"
    return [
        f"eos_token_id={errors.clip(ends[0][1])} of {ends[0][0]} is not kept, and {why} texts end "
        f"with {usual}; name the model's with --vocabulary=FILE.model."
    ]


def architecture(settings: Mapping[str, Any], *, where: str = CONFIG) -> ConvT5Config:
    """Returns the model that a config.json describes.

    Raises:
        UserError: settings are missing, or the model is not T5 1.0 or 1.1.
    """
    faults = [f"{name} is missing." for name in _SIZES if name not in settings]
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        faults.append(
            f"model_type={errors.clip(kind)} is an unknown architecture; known are "
            f"{', '.join(_KINDS)}, and with --from=transformers convt5."
        )
        kind = "t5"
    mlp = settings.get("feed_forward_proj", _KINDS[kind])
    if not isinstance(mlp, str) or mlp not in _MLP:
        faults.append(
            f"feed_forward_proj={errors.clip(mlp)} is unknown; known are {', '.join(_MLP)}."
        )
    elif fault := _activation_fault(settings, mlp):
        faults.append(fault)
    faults += [
        f"{name}={errors.clip(settings[name])} must be true or false."
        for name in ("tie_word_embeddings", "scale_decoder_outputs")
        if not isinstance(settings.get(name, True), bool)
    ]
    faults += [
        f"{name}={settings[name]} must be a number."
        for name in ("layer_norm_epsilon", "dropout_rate")
        if isinstance(settings.get(name), bool)
    ]
    errors.raise_all(faults, where=where)
    try:
        return _described(settings, kind, _MLP[mlp])
    except errors.UserError as error:  # Rules name settings only.
        raise errors.UserError(f"{where}: {error}") from None


def _described(settings: Mapping[str, Any], kind: str, mlp: MlpKind) -> ConvT5Config:
    # The tied output of mT5 is scaled as that of T5 in transformers 4, and not in 5.
    is_scaled = kind == "t5" or str(settings.get("transformers_version")).startswith("4.")
    layers = settings["num_layers"]
    decoder_layers = settings.get("num_decoder_layers")
    return ConvT5Config(
        vocab_size=settings["vocab_size"],
        emb_dim=settings["d_model"],
        mlp_dim=settings["d_ff"],
        num_heads=settings["num_heads"],
        head_dim=settings["d_kv"],
        encoder=StackConfig(num_layers=layers, mixing="attention"),
        decoder=StackConfig(
            num_layers=layers if decoder_layers is None else decoder_layers, mixing="attention"
        ),
        norm_epsilon=settings.get("layer_norm_epsilon", 1e-6),
        mlp=mlp,
        # transformers 5 always writes that the output is tied, and False in this key if it is not.
        tie_output=is_scaled
        and settings.get("tie_word_embeddings", kind == "t5")
        and settings.get("scale_decoder_outputs", True),
        positions="relative",
        relative_buckets=settings.get("relative_attention_num_buckets", 32),
        relative_max_distance=settings.get("relative_attention_max_distance", 128),
        dropout_rate=settings.get("dropout_rate", 0.1),
        dtype="float32",
    )


def _activation_fault(settings: Mapping[str, Any], mlp: str) -> str | None:
    """Returns why what transformers derives from `feed_forward_proj`, and may read, differs."""
    is_gated = mlp.startswith("gated-")
    function = settings.get("dense_act_fn", _FUNCTIONS[mlp][0])
    if function in _FUNCTIONS[mlp] and settings.get("is_gated_act", is_gated) is is_gated:
        return None
    return (
        f"dense_act_fn={errors.clip(function)} and is_gated_act="
        f"{errors.clip(settings.get('is_gated_act', is_gated))} take the place of "
        f"feed_forward_proj={mlp} in transformers; known is {_FUNCTIONS[mlp][0]} with {is_gated}."
    )


def is_t5(config: ConvT5Config) -> bool:
    """Returns whether transformers' own T5 can represent a model."""
    try:
        as_settings(config)
    except errors.UserError:
        return False
    return True


def as_settings(config: ConvT5Config, *, end_id: int = 1) -> dict[str, Any]:
    """Returns the config.json of a model; raises `UserError` if transformers' T5 differs."""
    layers = (*config.encoder_layers, *config.decoder_layers)
    kinds = {layer.kind for layer in layers}
    wanted = {
        "positions": "relative",
        "layer_order": "pre",
        "norm": "rms",
        "mlp_bias": False,
        "stem": None,
    }
    faults = [
        f"{name}={getattr(config, name)!r}, but T5 has {value!r}."
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if kinds != {"attention"}:
        others = ", ".join(sorted(kinds - {"attention"}))
        faults.insert(
            0,
            f"mixing={others}, but T5 has attention in every layer; export convolutional models "
            "with --to=transformers.",
        )
    if any(layer.canon for layer in layers):
        faults.append(
            "canon: this model has Canon layers, and T5 has none; export it with --to=transformers."
        )
    errors.raise_all(faults, where="this model cannot be written as a Hugging Face T5")
    activation = next(name for name, kind in _MLP.items() if kind == config.mlp)
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.emb_dim,
        "d_ff": config.mlp_dim,
        "d_kv": config.head_dim,
        "num_heads": config.num_heads,
        "num_layers": config.encoder.num_layers,
        "num_decoder_layers": config.decoder.num_layers,
        "feed_forward_proj": activation,
        "dense_act_fn": activation.removeprefix("gated-").replace("gelu", "gelu_new"),
        "is_gated_act": activation != "relu",
        "tie_word_embeddings": config.tie_output,
        "layer_norm_epsilon": config.norm_epsilon,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout_rate,
        "initializer_factor": 1.0,
        "use_cache": True,
        **special_ids(end_id),
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def parameter_table(config: ConvT5Config) -> list[Source]:
    """Returns the tensors of each parameter."""
    return list(_rows(config))


def _rows(config: ConvT5Config) -> Iterator[Source]:
    yield Source(path="token_embedder/embedding", names=("shared.weight",))
    if not config.tie_output:
        yield _dense("output_head", "lm_head")
    for stack, layers in (
        ("encoder", config.encoder.num_layers),
        ("decoder", config.decoder.num_layers),
    ):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Source(path=f"{stack}/relative_bias/embedding", names=(bias,))
        yield _scale(f"{stack}/final_norm", f"{stack}.final_layer_norm")
        for index in range(layers):
            block, layer = f"{stack}.block.{index}.layer", f"{stack}/layers/{index}"
            yield _scale(f"{layer}/mixing_norm", f"{block}.0.layer_norm")
            yield from _attention(f"{layer}/mixing", f"{block}.0.SelfAttention")
            last = 1
            if stack == "decoder":
                yield _scale(f"{layer}/cross_norm", f"{block}.1.layer_norm")
                yield from _attention(f"{layer}/cross_attention", f"{block}.1.EncDecAttention")
                last = 2
            yield _scale(f"{layer}/mlp_norm", f"{block}.{last}.layer_norm")
            inward = ("wi",) if config.mlp == "relu" else ("wi_0", "wi_1")
            for name in (*inward, "wo"):
                yield _dense(f"{layer}/mlp/{name}", f"{block}.{last}.DenseReluDense.{name}")


def _attention(path: str, owner: str) -> Iterator[Source]:
    for short, name in {"q": "query", "k": "key", "v": "value", "o": "output"}.items():
        yield _dense(f"{path}/{name}", f"{owner}.{short}")


def _dense(path: str, name: str) -> Source:
    return Source(path=f"{path}/kernel", names=(f"{name}.weight",), transposed=True)


def _scale(path: str, name: str) -> Source:
    return Source(path=f"{path}/scale", names=(f"{name}.weight",))


def open_weights(folder: pathlib.Path) -> safetensors_files.Files | torch_files.Files:
    """Opens the weights of a folder; raises `UserError` if they are missing or damaged."""
    known = (safetensors_files, torch_files)
    for reader in known:
        if paths := weight_files.find(folder, reader.WHOLE, reader.INDEX):
            return reader.Files(paths)
    names = ", ".join(name for reader in known for name in (reader.WHOLE, reader.INDEX))
    raise errors.UserError(
        f"{folder} holds none of {names}; download one of them, or convert other files with "
        "transformers' save_pretrained first."
    )


def _tie(found: Mapping[str, Shape], copies: Mapping[str, str]) -> str | None:
    """Returns the name under which the token table is saved, if it is not its own."""
    if "shared.weight" in found:
        return None
    ties = (name for name, why in copies.items() if why.startswith("a copy") and name in found)
    return next(ties, None)


def _check_copies(
    read: Callable[[str], np.ndarray], skipped: list[tuple[str, str]], *, where: str
) -> None:
    """Raises `UserError` if a tensor that should equal the token table differs."""
    for name, why in skipped:
        if why.startswith("a copy") and not np.array_equal(read(name), read("shared.weight")):
            raise errors.UserError(
                f"{where}: {name} differs from shared.weight, but must be a copy of it; "
                "tie_word_embeddings in config.json may be wrong."
            )
