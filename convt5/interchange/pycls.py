"""Vision Transformers of pycls: the names of its state_dict, in any of three containers.

pycls is the code of Xiao et al. 2021 (arXiv 2106.14881). Values are only rearranged. Heads and
strides, which names and shapes do not show, are given or follow the rules of the published models.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from convt5 import errors
from convt5.interchange import safetensors_files, torch_files
from convt5.interchange.mapping import (
    Arrays,
    Imported,
    Shape,
    Source,
    import_arrays,
    parameter_shapes,
)
from convt5.runtime import foreign_files
from convt5.vision.architecture import ViTConfig

HEAD_DIM = 64
"""Channels per attention head in all published models."""

_PREFIX = "param."
_NORMALISATION = {
    "channel_order": "bgr",
    "mean": [0.485, 0.456, 0.406],
    "stddev": [0.229, 0.224, 0.225],
}
"""How pycls normalises colour images."""

_SUFFIXES = (".npz", ".safetensors", ".pth", ".pyth", ".pt")
_CONVOLUTION = (2, 3, 1, 0)  # [out, in, height, width] there, [height, width, in, out] here.
_MATRIX = (1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rearranged(Source):
    """One foreign array whose axes are permuted and then split or merged.

    Attributes:
        foreign_shape: shape of the array.
        axes: permutation of its axes.
        shape: shape of the parameter.
    """

    foreign_shape: Shape
    axes: tuple[int, ...]
    shape: Shape

    def shapes(self, shape: Shape) -> Shape:
        del shape
        return self.foreign_shape

    def assemble(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        array = read(self.names[0]).transpose(self.axes).reshape(self.shape)
        return np.ascontiguousarray(array, dtype=np.float32)

    def take_apart(self, value: np.ndarray) -> Arrays:
        turned = value.reshape([self.foreign_shape[axis] for axis in self.axes])
        return {self.names[0]: np.ascontiguousarray(turned.transpose(np.argsort(self.axes)))}


class Stored(NamedTuple):
    """Arrays of a file by name, read on request.

    Attributes:
        shapes: shapes of the arrays.
        read: returns one of them in float32.
        skipped: other contents of the file, and why they are ignored.
        notes: notes for the user.
        settings: the settings of pycls in the file, such as `VIT.NUM_HEADS`, as text.
    """

    shapes: Mapping[str, Shape]
    read: Callable[[str], np.ndarray]
    skipped: dict[str, str]
    notes: list[str]
    settings: Mapping[str, str]


def read_model(
    path: str | pathlib.Path,
    *,
    num_heads: int | None = None,
    image_size: int | None = None,
    stem_strides: Sequence[int] | None = None,
    allow_unmapped: bool = False,
) -> Imported:
    """Reads a .npz, .safetensors, .pth or .pyth file.

    Args:
        path: the file; names may begin with `param.` or `module.`.
        num_heads: attention heads; by default those that the file tells, or of 64 channels each.
        image_size: image size in pixels; by default that of the position table.
        stem_strides: strides of a conv stem; by default those that the file tells, or 2 wherever
            channels increase.
        allow_unmapped: whether to ignore unknown arrays.

    Raises:
        UserError: the file is unreadable, or its arrays are not those of such a model.
    """
    where = str(path)
    stored = open_arrays(pathlib.Path(path))
    shapes, told = stored.shapes, stored.settings
    num_heads = num_heads or next(iter(_integers(told.get("VIT.NUM_HEADS", ""))), None)
    if "stem.patchify.weight" not in shapes:
        stem_strides = stem_strides or _integers(told.get("VIT.C_STEM_STRIDES", "")) or None
    config = architecture(
        shapes, num_heads=num_heads, image_size=image_size, stem_strides=stem_strides, where=where
    )
    config = dataclasses.replace(config, **_norms(told))
    skipped = stored.skipped | {
        name: "a counter of PyTorch, which is not used"
        for name in shapes
        if name.endswith(".num_batches_tracked")
    }
    imported = import_arrays(
        parameter_table(config),
        config,
        shapes,
        stored.read,
        skipped=skipped,
        allow_unmapped=allow_unmapped,
        where=where,
    )
    imported.report.skipped = list(skipped.items())
    imported.report.notes = [*stored.notes, *_notes(config, num_heads, stem_strides, told)]
    return imported._replace(normalisation=_NORMALISATION if config.in_channels == 3 else {})


def architecture(
    shapes: Mapping[str, Shape],
    *,
    num_heads: int | None = None,
    image_size: int | None = None,
    stem_strides: Sequence[int] | None = None,
    where: str = "the checkpoint",
) -> ViTConfig:
    """Returns the model with arrays of these names and shapes; arguments as for `read_model`.

    Raises:
        UserError: arrays are missing or have inconsistent shapes.
    """
    faults: list[str] = []

    def sizes(name: str, rank: int) -> Shape:
        shape = tuple(shapes.get(name, ()))
        if len(shape) != rank:
            held = f"has shape {shape}" if name in shapes else "is missing"
            faults.append(f"variable {name} {held}, but a ViT of pycls has it, with {rank} axes.")
        return shape if len(shape) == rank else (0,) * rank

    tokens, _, emb_dim = sizes("pos_embedding", 3)
    num_classes, _ = sizes("head.head_fc.weight", 2)
    mlp_dim, _ = sizes("encoder.block_0.mlp_block.linear_1.weight", 2)
    stem = _stem(shapes, sizes, stem_strides, faults)
    if num_heads is None and emb_dim % HEAD_DIM:
        faults.append(
            f"the number of heads is not stored, and {emb_dim} channels make no heads of "
            f"{HEAD_DIM}; pass --num_heads."
        )
    patches = tokens - ("class_token" in shapes)
    side = math.isqrt(max(patches, 0))
    if side**2 != patches:
        faults.append(f"pos_embedding is for {patches} patches, which do not form a square.")
    errors.raise_all(errors.abbreviate(faults), where=where)
    stride = stem.get("patch_size") or math.prod(stem["stem_strides"])
    if image_size is not None and image_size // stride != side:
        raise errors.UserError(
            f"{where}: image_size={image_size} makes {image_size // stride} patches of a stride of "
            f"{stride} along each axis, but pos_embedding is for {side}; pass "
            f"--image_size={side * stride}, or leave it out, or give other --stem_strides."
        )
    return ViTConfig(
        image_size=image_size or side * stride,
        **stem,
        num_layers=1 + max(_indices(shapes, r"encoder\.block_(\d{1,4})\.")),
        emb_dim=emb_dim,
        mlp_dim=mlp_dim,
        num_heads=num_heads or emb_dim // HEAD_DIM,
        num_classes=num_classes,
        pooling="token" if "class_token" in shapes else "mean",
        dtype="float32",
    )


def parameter_table(config: ViTConfig) -> list[Source]:
    """Returns the array of each parameter and of each running statistic."""
    shapes = parameter_shapes(config)
    return [_source(path, name, shapes[path]) for path, name in _names(config)]


def open_arrays(path: pathlib.Path) -> Stored:
    """Opens a file, and removes the prefix of its array names.

    Raises:
        UserError: the file has an unknown format, is damaged, or needs torch, which is missing.
    """
    if path.suffix not in _SUFFIXES:
        raise errors.UserError(
            f"checkpoint={path} must be a file that ends in {', '.join(_SUFFIXES)}."
        )
    if not path.is_file():
        raise errors.UserError(f"checkpoint={path} does not exist; correct the path.")
    notes: list[str] = []
    settings: Mapping[str, str] = {}
    if path.suffix == ".npz":
        shapes, read = _read_npz(path)
    elif path.suffix == ".safetensors":
        files = safetensors_files.Files([path])
        shapes, read = files.shapes, files.read
    else:
        files = torch_files.Files([path], inside="model_state")
        shapes, read = files.shapes, files.read
        if "ema_state" in files.beside:
            notes.append("model_state is read; the file's ema_state is ignored.")
        settings = _settings(files.beside.get("cfg") or "")
    skipped = {}
    if any(name.startswith(_PREFIX) for name in shapes):
        skipped = {
            name: f"no parameter: its name does not begin with {_PREFIX}"
            for name in shapes
            if not name.startswith(_PREFIX)
        }
    names: dict[str, str] = {}
    for name in [name for name in shapes if name not in skipped]:
        short = name.removeprefix(_PREFIX).removeprefix("module.")
        if short in names:
            raise errors.UserError(
                f"{path}: {name} and {names[short]} are both {short}; remove one of them."
            )
        names[short] = name
    return Stored(
        {short: tuple(shapes[name]) for short, name in names.items()},
        lambda short: np.asarray(read(names[short]), np.float32),
        skipped,
        notes,
        settings,
    )


def _settings(text: str) -> dict[str, str]:
    """Returns the settings in the YAML of pycls, by section and name; lists as their lines."""
    found, section, name = {}, "", ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w+): *", line):
            section = match[1]
        elif match := re.fullmatch(r"  (\w+): *(.*)", line):
            name = f"{section}.{match[1]}"
            found[name] = match[2]
        elif line.startswith("  -") and name:
            found[name] += line
    return found


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", text)]


def _norms(told: Mapping[str, str]) -> dict[str, float]:
    """Returns the settings of norms that a file tells."""
    names = {
        "LN.EPS": "norm_epsilon",
        "BN.EPS": "batch_norm_epsilon",
        "BN.MOM": "batch_norm_momentum",
    }
    found = {}
    for name, ours in names.items():
        with contextlib.suppress(KeyError, ValueError):
            found[ours] = float(told[name])
    return found


def _names(config: ViTConfig) -> Iterator[tuple[str, str]]:
    """Yields every path of the model with its name in pycls."""
    if config.pooling == "token":
        yield "class_token", "class_token"
    yield "position_embedding", "pos_embedding"
    if config.stem == "patchify":
        yield from _pairs("stem/patchify", "stem.patchify", "kernel", "bias")
    else:
        for index in range(len(config.stem_channels) - 1):
            ours, theirs = f"stem/layers/{index}", f"stem.cstem{index}"
            yield from _pairs(f"{ours}/convolution", f"{theirs}_conv", "kernel")
            yield from _pairs(f"{ours}/norm", f"{theirs}_bn", "scale", "bias", "mean", "variance")
        yield from _pairs("stem/output", "stem.cstem_last_conv", "kernel", "bias")
    for index in range(config.num_layers):
        ours, theirs = f"encoder/layers/{index}", f"encoder.block_{index}"
        yield from _pairs(f"{ours}/attention_norm", f"{theirs}.ln_1", "scale", "bias")
        attention = f"{theirs}.self_attention.block"
        yield f"{ours}/attention/input/kernel", f"{attention}.in_proj_weight"
        yield f"{ours}/attention/input/bias", f"{attention}.in_proj_bias"
        yield from _pairs(f"{ours}/attention/output", f"{attention}.out_proj", "kernel", "bias")
        yield from _pairs(f"{ours}/mlp_norm", f"{theirs}.ln_2", "scale", "bias")
        yield from _pairs(f"{ours}/mlp/wi", f"{theirs}.mlp_block.linear_1", "kernel", "bias")
        yield from _pairs(f"{ours}/mlp/wo", f"{theirs}.mlp_block.linear_2", "kernel", "bias")
    yield from _pairs("encoder/final_norm", "encoder.ln", "scale", "bias")
    yield from _pairs("head", "head.head_fc", "kernel", "bias")


_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "variance": "running_var",
}


def _pairs(ours: str, theirs: str, *leaves: str) -> Iterator[tuple[str, str]]:
    for leaf in leaves:
        yield f"{ours}/{leaf}", f"{theirs}.{_LEAVES[leaf]}"


def _source(path: str, name: str, shape: Shape) -> Rearranged:
    axes: tuple[int, ...] = tuple(range(len(shape)))
    foreign = shape
    if name == "class_token":
        foreign, axes = (1, 1, *shape), (0, 1, 2)
    elif name == "pos_embedding":
        foreign, axes = (shape[0], 1, shape[1]), (0, 1, 2)
    elif name.endswith("in_proj_weight"):
        foreign, axes = (shape[1] * shape[2], shape[0]), _MATRIX
    elif name.endswith("in_proj_bias"):
        foreign, axes = (math.prod(shape),), (0,)
    elif len(shape) == 4:
        foreign, axes = (shape[3], shape[2], shape[0], shape[1]), _CONVOLUTION
    elif len(shape) == 2:
        foreign, axes = shape[::-1], _MATRIX
    return Rearranged(path=path, names=(name,), foreign_shape=foreign, axes=axes, shape=shape)


def _stem(
    shapes: Mapping[str, Shape],
    sizes: Callable[[str, int], Shape],
    strides: Sequence[int] | None,
    faults: list[str],
) -> dict[str, Any]:
    """Returns the settings of the stem."""
    if "stem.patchify.weight" in shapes:
        shape = sizes("stem.patchify.weight", 4)
        _, in_channels, size, width = shape
        if not faults and (size != width or size < 1):
            faults.append(f"stem.patchify.weight has shape {shape}, whose patches are no squares.")
        if strides:
            faults.append("--stem_strides is for a convolution stem, but this one is patchify.")
        return {"stem": "patchify", "patch_size": size, "in_channels": in_channels}
    count = 1 + max(_indices(shapes, r"stem\.cstem(\d{1,4})_conv\."), default=-1)
    layers = [sizes(f"stem.cstem{index}_conv.weight", 4) for index in range(count)]
    layers.append(sizes("stem.cstem_last_conv.weight", 4))
    channels = [shape[0] for shape in layers]
    in_channels = layers[0][1]
    if strides is not None and len(strides) != len(channels):
        faults.append(
            f"--stem_strides names {len(strides)} strides, but the stem has {len(channels)} "
            "convolutions."
        )
    elif strides is not None and min(strides) < 1:
        faults.append(f"--stem_strides={','.join(map(str, strides))} must be at least 1 each.")
    return {
        "stem": "conv",
        "stem_channels": channels,
        "stem_strides": strides or published_strides(in_channels, channels),
        "in_channels": in_channels,
    }


def published_strides(in_channels: int, channels: Sequence[int]) -> list[int]:
    """Returns the strides of a stem by the rule of the published models.

    They halve the image exactly where a 3x3 convolution increases the channels.
    """
    before = (in_channels, *channels)
    widens = [2 if after > one else 1 for one, after in zip(before, channels, strict=False)]
    return [*widens[:-1], 1]


def _indices(shapes: Mapping[str, Shape], pattern: str) -> list[int]:
    matches = (re.match(pattern, name) for name in shapes)
    return [int(match[1]) for match in matches if match]


def _notes(
    config: ViTConfig,
    num_heads: int | None,
    stem_strides: Sequence[int] | None,
    told: Mapping[str, str],
) -> list[str]:
    notes = ["channels are in the order blue, green, red, as in pycls."]
    if num_heads is None:
        notes.append(f"{config.num_heads} heads, as each has {HEAD_DIM} channels where published.")
    if config.stem == "conv" and stem_strides is None:
        strides = ",".join(map(str, config.stem_strides))
        notes.append(f"strides {strides}: 2 where a convolution widens, as where published.")
    if "LN.EPS" not in told:
        notes.append(f"layer norms have the epsilon {config.norm_epsilon}, as where published.")
    return notes


def _read_npz(path: pathlib.Path) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    file = foreign_files.Npz(path, remedy="it may be truncated: copy it again.")

    def read(name: str) -> np.ndarray:
        if (kind := file.header(name).dtype).kind != "f":
            raise errors.UserError(
                f"{path}: {errors.clip(name)} is stored as {kind}, but weights are floating-point "
                "numbers; save them as float32."
            )
        return file.read(name)

    return {name: file.header(name).shape for name in file.names}, read
