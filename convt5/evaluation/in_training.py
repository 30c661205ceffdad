"""Task metrics during training; gin binds them to `trainer.train(task_evals=[...])`."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from convt5.errors import checks
from convt5.evaluation.settings import EvalConfig, PredictConfig
from convt5.modeling.architecture import ConvT5Config
from convt5.text import vocabulary_files
from convt5.text.task_format import TaskFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class TaskEval:
    """A task whose own metrics are part of every evaluation of a run.

    Attributes:
        task: a seqio task, or the name of a registered one; add each task of a mixture separately.
        split: the split to read.
        num_examples, every_nth: selects examples as in `evaluation.EvalConfig`.
        max_input_length, max_length: longest input, and longest target or prediction, in tokens;
            None means the longest label, or without labels the default of `PredictConfig`.
        batch_size: examples computed together on one host.
        name: prefix of its metrics in `metrics.jsonl`: `<name>/accuracy`.
    """

    task: Any
    split: str = "validation"
    num_examples: int | None = None
    every_nth: int = 1
    max_input_length: int
    max_length: int | None = None
    batch_size: int = 64
    name: str = "task"

    def build(self, model: ConvT5Config, mesh: Mesh) -> "TaskMeasure":
        """Reads the examples.

        Raises:
            UserError: as `check`, or there is no example.
        """
        # TensorFlow and seqio are needed only from here on.
        from convt5.evaluation.evaluator import Evaluator

        task = self._find_task(model)
        evaluator = Evaluator(task, self.split, self._predict(model, task), self._config())
        return TaskMeasure(self.name, evaluator, mesh)

    def check(self, model: ConvT5Config) -> None:
        """Checks that the model can be measured on the task, without reading an example.

        Raises:
            UserError: an unknown task or split, a mixture, a number out of range, a label that
                max_length would truncate, or a vocabulary larger than the model's token table.
        """
        self._predict(model, self._find_task(model))
        self._config()

    def check_apart(self, train: Any) -> None:
        """Raises `UserError` if files to measure the task are those of another one.

        Args:
            train: a `data.DataConfig`, on whose tasks the model is trained.
        """
        task = _task_data().find_task(self.task)
        if not task.requires_caching:
            train.check_held_out([task], self.split)

    def kept_text(self) -> vocabulary_files.KeptText | None:
        """Returns the text of each token id; None if no vocabulary file can express it."""
        task_data = _task_data()
        task = task_data.find_task(self.task)
        text = vocabulary_files.of_features(task.output_features)
        has_sentinels = task_data.find_format(task).makes_sentinels
        return text and text._replace(holds_sentinels=has_sentinels)

    def task_formats(self) -> tuple[TaskFormat, ...]:
        """Returns how the task writes its inputs."""
        return (_task_data().find_format(self.task),)

    def _find_task(self, model: ConvT5Config) -> Any:
        task_data = _task_data()
        task = task_data.find_task(self.task)
        task_data.check_task(
            task, self.split, vocab_size=model.vocab_size, max_length=self.max_length
        )
        return task

    def _predict(self, model: ConvT5Config, task: Any) -> PredictConfig:
        return PredictConfig(
            max_input_length=self.max_input_length,
            max_length=self.max_length,
            batch_size=self.batch_size,
        ).completed(model, {"max_length": _task_data().label_checks.longest(task)})

    def _config(self) -> EvalConfig:
        return EvalConfig(
            split=self.split, num_examples=self.num_examples, every_nth=self.every_nth
        )


def _task_data() -> Any:
    """Imports TensorFlow and seqio, which only the examples of a task need."""
    from convt5.evaluation import task_data

    return task_data


class TaskMeasure:
    """Measures the metrics of one task on the current model."""

    def __init__(self, name: str, evaluator: Any, mesh: Mesh):
        self.name = name
        self._evaluator = evaluator
        self._mesh = mesh

    @property
    def identity(self) -> str:
        """Identifies the examples, and how they are measured."""
        return self._evaluator.identity

    def describe(self) -> str:
        """Returns what is measured, and how much of it is truncated."""
        return f"data of {self.name}: {self._evaluator.describe()}"

    def measure(self, model: Any) -> dict[str, float]:
        """Returns the metrics by name; all hosts must call it and get the same."""
        predictor = self._evaluator.predictor(model, self._mesh)
        return self._evaluator.evaluate(predictor).metrics
