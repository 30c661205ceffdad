"""Writes an imported model as a run directory: checkpoint, gin files and import report."""

import dataclasses
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from convt5.checkpoints.checkpoint import CheckpointConfig, Checkpointer, DataPositions
from convt5.interchange.mapping import Imported
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.runtime import folders
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig, AdamWConfig, OptimizerConfig
from convt5.training.schedule import Cosine, InverseSqrt, Schedule
from convt5.training.train_state import TrainState
from convt5.training.train_step import Loss
from convt5.vision.architecture import ViTConfig
from convt5.vision.losses import VisionLoss

MODEL_FILE = "model.gin"
RUN_FILE = "config.gin"
REPORT = "conversion.txt"

_PRETRAINING_STEPS = 524_288
_LONGEST = {"encoder_length": 512, "decoder_length": 114}


class Training(NamedTuple):
    """How training continues; by default as T5 was pre-trained.

    Attributes:
        optimizer, schedule, loss: as `trainer.train` has them.
        loss_divisor: the constant by which the original divided the sum that `loss` is.
    """

    optimizer: OptimizerConfig = AdafactorConfig()
    schedule: Schedule = InverseSqrt()
    loss: Loss = TextLoss(z_loss=1e-4)
    loss_divisor: float = 1.0


# 400 epochs of ImageNet with batch size 2048, as in arXiv 2106.14881.
_VISION_STEPS = 250_228
_VISION_TRAINING = Training(
    optimizer=AdamWConfig(weight_decay=0.24, max_grad_norm=None),
    schedule=Cosine(peak=1e-3, total_steps=_VISION_STEPS, warmup_steps=3_128, final_fraction=0.005),
    loss=VisionLoss(label_smoothing=0.1),
)


def default_training(config: ConvT5Config | ViTConfig) -> Training:
    """Returns the default training of a kind of model."""
    return _VISION_TRAINING if isinstance(config, ViTConfig) else Training()


def is_import(checkpoint: epath.PathLike) -> bool:
    """Returns whether a run began as an import: its settings name the data to go on with.

    What it was trained on since is saved with it, as vocabulary and task formats.
    """
    return folders.run_folder(checkpoint, REPORT) is not None


def write_run(
    folder: pathlib.Path,
    imported: Imported,
    state: TrainState,
    training: Training,
    *,
    run_dir: pathlib.Path,
    origin: str,
    keeps_vocabulary: bool = False,
) -> None:
    """Writes everything but the vocabulary into `folder`, which will be moved to `run_dir`.

    `keeps_vocabulary` says whether one vocabulary, of inputs and targets, is written there too.
    """
    checkpointer = Checkpointer(
        folder / "checkpoints", CheckpointConfig(), model_config=imported.config
    )
    try:
        # Without a data position, because that of the original is unknown.
        checkpointer.save(imported.step, state, data=DataPositions())
        checkpointer.wait()
    finally:
        checkpointer.close()
    (folder / MODEL_FILE).write_text(model_gin(imported.config, origin=origin))
    about: dict[str, Any] = {"run_dir": run_dir, "origin": origin}
    if isinstance(imported.config, ViTConfig):
        run = vision_run_gin(imported, training, **about)
    else:
        run = run_gin(imported, training, **about, keeps_vocabulary=keeps_vocabulary)
    (folder / RUN_FILE).write_text(run)
    report = imported.report
    (folder / REPORT).write_text(f"{origin}\n{report.overview()}{report.variables()}")


def train_command(run_dir: pathlib.Path) -> str:
    """Returns the shell command that continues training of an imported run."""
    return f"python -m convt5.train {shlex.quote(f'--gin_file={run_dir / RUN_FILE}')}"


def _comment(text: str) -> str:
    """Formats a one-line comment, even if paths in it contain line breaks."""
    return "# " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def model_gin(config: ConvT5Config | ViTConfig, *, origin: str) -> str:
    """Returns a gin file that describes the model, for use with any run file."""
    package, name = "convt5", "architecture.ConvT5Config"
    if isinstance(config, ViTConfig):
        package, name = "convt5.vision", "architecture.ViTConfig"
    lines = [
        _comment(origin),
        "# Give this file beside a run file, whose model it replaces.",
        "from __gin__ import dynamic_registration",
        f"from {package} import architecture",
        "",
        f"MODEL = @{name}()",
        f"MODEL_NAME = {'imported'!r}",
    ]
    if isinstance(config, ViTConfig):
        return "\n".join([*lines, *_vision_bindings(name, config)]) + "\n"
    lines += [
        "architecture.ConvT5Config.encoder = @encoder/architecture.StackConfig()",
        "architecture.ConvT5Config.decoder = @decoder/architecture.StackConfig()",
        *_bindings("architecture.ConvT5Config", config, leave_out=("encoder", "decoder", "stem")),
    ]
    if config.stem is not None:
        lines += [
            "architecture.ConvT5Config.stem = @architecture.TextStemConfig()",
            *_bindings("architecture.TextStemConfig", config.stem),
        ]
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        lines += ["", *_bindings(f"{side}/architecture.StackConfig", stack)]
    return "\n".join(lines) + "\n"


_RUN_MODULES = (
    "checkpoint",
    "data",
    "losses",
    "optimizer",
    "schedule",
    "sharding",
    "trainer",
)


_VOCABULARY_FLAGS = (
    "#   --gin.pretraining.text_span_corruption.vocabulary='@vocabularies.named()'",
    "#   --gin.vocabularies.named.source=spm.model",
)
_KEPT_VOCABULARY = (
    "pretraining.c4_span_corruption.vocabulary = @vocabularies.named()",
    "pretraining.text_span_corruption.vocabulary = @vocabularies.named()",
)


def run_gin(
    imported: Imported,
    training: Training,
    *,
    run_dir: pathlib.Path,
    origin: str,
    keeps_vocabulary: bool = False,
) -> str:
    """Returns a run file that continues pre-training where the import ends."""
    limit = imported.config.max_positions or max(_LONGEST.values())
    schedule = type(training.schedule).__name__
    kept = [*_KEPT_VOCABULARY, f"vocabularies.named.source = {str(run_dir)!r}"]
    lines = [
        _comment(origin),
        "#",
        _comment(f"  {train_command(run_dir)} --gin.NUM_STEPS=..."),
        "#",
        f"# NUM_STEPS counts the {imported.step:,} steps that lie behind. The data is T5's, C4;",
        "# another task is a --gin.data.DataConfig.mixture. Local text, in the model's vocabulary:",
        "#",
        "#   --gin.data.DataConfig.mixture='@pretraining.text_span_corruption()'",
        "#   --gin.pretraining.text_span_corruption.path='corpus/*.txt'",
        *(() if keeps_vocabulary else _VOCABULARY_FLAGS),
        f"include {MODEL_FILE!r}",
        "from __gin__ import dynamic_registration",
        *(f"from convt5 import {name}" for name in _RUN_MODULES),
        "from convt5.tasks import pretraining",
        "from convt5.tasks import vocabularies",
        "",
        f"RUN_DIR = {str(run_dir)!r}",
        f"NUM_STEPS = {max(imported.step, _PRETRAINING_STEPS)}",
        "",
        "trainer.train.run_dir = %RUN_DIR",
        "trainer.train.num_steps = %NUM_STEPS",
        "trainer.train.model = %MODEL",
        "trainer.train.loss = @losses.TextLoss()",
        "trainer.train.optimizer = @optimizer.AdafactorConfig()",
        f"trainer.train.schedule = @schedule.{schedule}()",
        "trainer.train.mesh = @sharding.MeshConfig()",
        "trainer.train.checkpoint = @checkpoint.CheckpointConfig()",
        "trainer.train.train_data = @train/data.DataConfig()",
        "trainer.train.eval_data = @eval/data.DataConfig()",
        "trainer.train.eval_every_steps = 5000",
        "trainer.train.eval_num_batches = 64",
        "checkpoint.CheckpointConfig.every_steps = 5000",
        *_bindings("losses.TextLoss", training.loss),
        *_bindings("optimizer.AdafactorConfig", training.optimizer),
        *_bindings(f"schedule.{schedule}", training.schedule),
        "",
        "data.DataConfig.mixture = @pretraining.c4_span_corruption()",
        *(kept if keeps_vocabulary else ()),
        "data.DataConfig.batch_size = 128",
        *(f"data.DataConfig.{name} = {min(longest, limit)}" for name, longest in _LONGEST.items()),
        "train/data.DataConfig.split = 'train'",
        "eval/data.DataConfig.split = 'validation'",
        "eval/data.DataConfig.num_epochs = 1",
    ]
    return "\n".join(lines) + "\n"


def vision_run_gin(
    imported: Imported, training: Training, *, run_dir: pathlib.Path, origin: str
) -> str:
    """Returns a run file that trains an imported vision model on folders of images."""
    schedule = type(training.schedule).__name__
    parts = ("images", "losses", "placement", "sources", "statistics")
    lines = [
        _comment(origin),
        "#",
        _comment(f"  {train_command(run_dir)} --gin.DATA='images/{{split}}'"),
        "#",
        "# DATA holds a folder of image files for each class; {split} is train or val.",
        f"include {MODEL_FILE!r}",
        "from __gin__ import dynamic_registration",
        *(f"from convt5 import {name}" for name in ("optimizer", "schedule", "trainer")),
        "from convt5.vision import augmentation",
        *(f"from convt5.vision import {name}" for name in parts),
        "",
        f"RUN_DIR = {str(run_dir)!r}",
        "DATA = %gin.REQUIRED",
        "",
        "trainer.train.run_dir = %RUN_DIR",
        f"trainer.train.num_steps = {_VISION_STEPS}",
        "trainer.train.model = %MODEL",
        "trainer.train.loss = @losses.VisionLoss()",
        "trainer.train.optimizer = @optimizer.AdamWConfig()",
        f"trainer.train.schedule = @schedule.{schedule}()",
        "trainer.train.sharding_rules = @placement.rules()",
        "trainer.train.statistics = @statistics.Reestimate()",
        "statistics.Reestimate.data = @train/images.ImageDataConfig()",
        "statistics.Reestimate.num_batches = 4",
        "trainer.train.train_data = @train/images.ImageDataConfig()",
        "trainer.train.eval_data = @eval/images.ImageDataConfig()",
        "trainer.train.eval_every_steps = 5000",
        *_bindings("losses.VisionLoss", training.loss),
        *_bindings("optimizer.AdamWConfig", training.optimizer),
        *_bindings(f"schedule.{schedule}", training.schedule),
        "",
        "images.ImageDataConfig.source = @sources.Folder()",
        "sources.Folder.path = %DATA",
        "sources.Folder.channels = %IN_CHANNELS",
        "images.ImageDataConfig.batch_size = 2048",
        "images.ImageDataConfig.image_size = %IMAGE_SIZE",
        "images.ImageDataConfig.in_channels = %IN_CHANNELS",
        "images.ImageDataConfig.num_classes = %NUM_CLASSES",
        *(f"images.ImageDataConfig.{k} = {v!r}" for k, v in imported.normalisation.items()),
        "train/images.ImageDataConfig.split = 'train'",
        "train/images.ImageDataConfig.augmentation = @augmentation.Augmentation()",
        "augmentation.Augmentation.crop_area = [0.08, 1.0]",
        "augmentation.Augmentation.flip = True",
        "augmentation.Augmentation.mixup_alpha = 0.8",
        "augmentation.Augmentation.cutmix_alpha = 1.0",
        "eval/images.ImageDataConfig.split = 'val'",
        "eval/images.ImageDataConfig.num_epochs = 1",
        f"eval/images.ImageDataConfig.resize_size = {imported.config.image_size * 8 // 7}",
    ]
    return "\n".join(lines) + "\n"


def _vision_bindings(name: str, config: ViTConfig) -> Iterator[str]:
    """Yields the settings of a vision model; those that images must match are macros."""
    shared = ("image_size", "in_channels", "num_classes")
    for field in shared:
        yield f"{field.upper()} = {getattr(config, field)}"
    for field in shared:
        yield f"{name}.{field} = %{field.upper()}"
    yield from _bindings(name, config, leave_out=shared)


def _bindings(
    name: str, config: ConvT5Config | StackConfig | Any, *, leave_out: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yields the settings of a dataclass that differ from its defaults."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in leave_out and value != field.default:
            shown = list(value) if isinstance(value, tuple) else value
            yield f"{name}.{field.name} = {shown!r}"
