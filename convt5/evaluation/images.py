"""Measures a model on labelled images: top-1, top-5, loss, and the prediction for each image.

The loss is the cross-entropy of the labels; the objective of the run is reported beside it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from convt5 import errors
from convt5.checkpoints import record
from convt5.evaluation import checkpoints, hosts
from convt5.evaluation.results import Outcome
from convt5.evaluation.run_settings import RunSettings
from convt5.modeling import sharding
from convt5.runtime import metric_names
from convt5.runtime.progress import Progress
from convt5.training import data_checks, run_directory
from convt5.training.train_state import with_statistics
from convt5.vision.images import ImageBatches, ImageDataConfig
from convt5.vision.losses import VisionLoss, label_ranks, one_hot, soft_cross_entropy
from convt5.vision.statistics import Reestimate

NAME = "images"
_SHOWN = 5  # Classes of each prediction.


class Images(NamedTuple):
    """The images to measure; `name` corresponds to that of a text task."""

    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The checked plan for evaluating a vision model.

    Attributes:
        checkpoint: path of the model.
        tasks: the images, as one task.
        data: the images of the split, each once.
        batches: their batches, of which every host sees all, and computes every n-th.
        loss: the loss of the run, reported as the objective.
        statistics: how batch statistics are re-estimated; None uses the saved ones.
        num_examples: number of images, from the first; None means all.
        ema: whether to measure the average over the updates.
        last_step: last step of the run, if known.
    """

    checkpoint: str
    tasks: Sequence[Images]
    data: ImageDataConfig
    batches: ImageBatches
    loss: VisionLoss
    statistics: Reestimate | None
    num_examples: int | None
    ema: bool
    last_step: int | None

    @property
    def split(self) -> str:
        return self.data.split

    def facts(self) -> list[str]:
        """Returns lines that describe the evaluation."""
        measured = self.statistics
        anew = f"of {measured.num_batches} batches" if measured else "as saved"
        return [f"  images       {self.data.source}", f"  statistics   {anew}"]

    def described(self) -> dict[str, Any]:
        """Returns what results depend on, as JSON values."""
        data = dataclasses.asdict(self.data)
        del data["batch_size"]
        anew = self.statistics
        return {
            "data": {**data, "source": repr(self.data.source)},
            "content": {NAME: self.batches.content},
            "num_examples": self.num_examples,
            "reestimate_batches": anew.num_batches if anew else None,
            **({"reestimate_data": record.describe_config(anew.data)} if anew else {}),
            "label_smoothing": self.loss.label_smoothing,
            # Earlier results were fractions of 1.
            "accuracies": metric_names.PERCENT,
            "ema": self.ema,
        }

    def evaluator(self, task: Images) -> Callable[[Any, Mesh, int | None], Outcome]:
        """Returns a function of model, mesh and step."""
        return ImageEvaluator(self, task)


def make_plan(
    checkpoint: str,
    *,
    model: Any,
    settings: RunSettings,
    batch_size: int | None = None,
    reestimate: int | None = None,
    ema: bool = False,
) -> ImagePlan:
    """Returns the plan of the evaluation.

    Args:
        checkpoint: path of the model.
        model: its description.
        settings: the settings of its run, which name the data, the split and the number of images.
        batch_size: None means that of the data.
        reestimate: batches of training data for re-estimating batch statistics; None uses the saved
            ones.
        ema: whether to measure the average over the updates.

    Raises:
        UserError: the run has no images, or they cannot be read, or do not fit the model.
    """
    train, data, wanted = settings.train, settings.data, settings.evaluate
    if not isinstance(data, ImageDataConfig):
        raise errors.UserError(
            f"no images to evaluate {checkpoint} on: its settings name none; give a gin file that "
            "binds trainer.train.eval_data to an @images.ImageDataConfig()."
        )
    if reestimate is not None and reestimate < 1:
        raise errors.UserError(f"--reestimate={reestimate} must be at least 1 batch.")
    own = train.get("eval_data")
    known: dict[str, Any] = {"split": wanted.split or (own.split if own else "validation")}
    if batch_size is not None:
        known["batch_size"] = batch_size
    data = dataclasses.replace(data, num_epochs=1, shuffle=False, augmentation=None, **known)
    data.check_model(model)
    loss = train.get("loss")
    return ImagePlan(
        checkpoint=checkpoint,
        tasks=[Images(NAME)],
        data=data,
        batches=data.build(process_index=0, process_count=1),
        loss=loss if isinstance(loss, VisionLoss) else VisionLoss(),
        statistics=_statistics(train, reestimate),
        num_examples=wanted.num_examples,
        ema=ema,
        last_step=train.get("num_steps"),
    )


class ImageEvaluator:
    """The images of one split, on which any number of models can be measured.

    Raises:
        UserError: the images have other classes than in training.
    """

    def __init__(self, plan: ImagePlan, task: Images):
        self._plan = plan
        self._task = task
        self._batches = plan.batches
        data_checks.check_class_names(
            self._batches.class_names,
            run_directory.find_class_names(plan.checkpoint),
            where=f"split={plan.split!r}",
        )
        self._start = self._batches.get_state()
        size = self._batches.num_images
        self._count = size if plan.num_examples is None else min(size, plan.num_examples)
        self._compute = jax.jit(self._per_image)
        self._measurement: Any = None

    def __call__(self, model: Any, mesh: Mesh, step: int | None) -> Outcome:
        """Measures a model; every host must call it and gets the same result."""
        model = self._with_statistics(model, mesh)
        label = self._task.name if step is None else f"{self._task.name}, step {step}"
        with contextlib.ExitStack() as stack:
            progress = None
            if not jax.process_index():
                share = -(-self._count // jax.process_count())
                progress = stack.enter_context(contextlib.closing(Progress(share, label=label)))
            numbers, records = self._records(model, mesh, progress)
        merged = hosts.merge(records, numbers)
        found = [record for record in merged if record is not None]
        if not found:
            raise errors.UserError(f"split={self._plan.split!r}: none of its images can be read.")
        metrics = {
            **{
                name: float(np.mean([record.pop(name) for record in found]))
                for name in ("loss", "objective")
            },
            "accuracy": 100 * float(np.mean([record["rank"] < 1 for record in found])),
            "top_5_accuracy": 100 * float(np.mean([record["rank"] < 5 for record in found])),
        }
        counts = {"num_examples": len(found), "skipped_images": len(merged) - len(found)}
        return Outcome(self._task.name, self._plan.split, metrics, counts, found)

    def _with_statistics(self, model: Any, mesh: Mesh) -> Any:
        if self._plan.statistics is None:
            return model
        if self._measurement is None:
            placed = checkpoints.shardings(model, mesh)
            where = sharding.batch_sharding(mesh)
            self._measurement = self._plan.statistics.on_devices(placed, where)
        return with_statistics(model, self._measurement(model))

    def _records(
        self, model: nnx.Module, mesh: Mesh, progress: Progress | None
    ) -> tuple[list[int], list[dict[str, Any] | None]]:
        """Returns this host's image numbers and records; None for a skipped image."""
        numbers: list[int] = []
        records: list[dict[str, Any] | None] = []
        names = self._batches.class_names
        for first, batch in self._own_batches():
            rows = min(len(batch["labels"]), self._count - first)
            outputs = jax.device_get(self._compute(model, _place(batch, mesh)))
            for row in range(rows):
                numbers.append(first + row)
                is_image = batch["weights"][row] > 0
                records.append(
                    _record(first + row, row, batch, outputs, names) if is_image else None
                )
            if progress is not None:
                progress(rows)
        return numbers, records

    def _own_batches(self) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        self._batches.set_state(self._start)
        size = self._plan.data.batch_size
        for index, first in enumerate(range(0, self._count, size)):
            if index % jax.process_count() == jax.process_index():
                yield first, next(self._batches)
            else:
                self._batches.skip()

    def _per_image(self, model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        logits = model(batch["images"]).logits
        labels = jnp.asarray(batch["labels"])
        log_probs = jax.nn.log_softmax(logits)
        values, classes = jax.lax.top_k(log_probs, min(_SHOWN, logits.shape[-1]))
        targets = one_hot(labels, logits)
        return {
            "loss": soft_cross_entropy(logits, targets, label_smoothing=0.0),
            "objective": soft_cross_entropy(logits, targets, self._plan.loss.label_smoothing),
            "rank": label_ranks(logits, labels),
            "target_score": jnp.take_along_axis(log_probs, labels[:, None], axis=1)[:, 0],
            "predictions": classes,
            "scores": values,
        }


def _statistics(train: Mapping[str, Any], reestimate: int | None) -> Reestimate | None:
    """Returns the re-estimation configured by the run, or one on its training data."""
    if reestimate is None:
        return None
    own = train.get("statistics")
    if isinstance(own, Reestimate):
        return dataclasses.replace(own, num_batches=reestimate)
    return Reestimate(data=train["train_data"], num_batches=reestimate)


def _place(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Places images and labels on the devices, repeating the last row to fill the batch."""
    where = sharding.batch_sharding(mesh)
    missing = -len(batch["labels"]) % mesh.size
    return {
        name: jax.device_put(
            np.concatenate([batch[name], np.repeat(batch[name][-1:], missing, axis=0)]), where
        )
        for name in ("images", "labels")
    }


def _record(
    number: int,
    row: int,
    batch: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    names: Sequence[str],
) -> dict[str, Any]:
    label = int(batch["labels"][row])
    predicted = outputs["predictions"][row].tolist()
    record = {
        "index": number,
        "label": label,
        "predictions": predicted,
        "scores": outputs["scores"][row].tolist(),
        "target_score": float(outputs["target_score"][row]),
        "rank": int(outputs["rank"][row]),
        "loss": float(outputs["loss"][row]),
        "objective": float(outputs["objective"][row]),
    }
    if names:
        # A model may have more logits than there are classes.
        shown = [names[i] if i < len(names) else str(i) for i in predicted]
        record |= {"label_name": names[label], "prediction_names": shown}
    return record
