"""Measures a model on seqio tasks, by their own metric functions and by the loss of their targets.

Tasks get the same values as from `seqio.Evaluator`: targets and predictions as text after the
task's postprocessor, and scores as log-probabilities of targets.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import seqio
from absl import logging

from convt5 import errors
from convt5.evaluation import hosts
from convt5.evaluation.predictor import (
    Prediction,
    Predictor,
    Progress,
    TargetScore,
    decode_text,
    truncate,
)
from convt5.evaluation.results import Outcome
from convt5.evaluation.settings import EvalConfig, PredictConfig
from convt5.evaluation.task_data import (
    Example,
    are_answers,
    original_text,
    read_examples,
    row_numbers,
    token_ids,
)
from convt5.generation.decoding import NO_REGULARIZERS, Regularizers
from convt5.generation.samples import end_id
from convt5.tasks import vocabularies
from convt5.training.losses import TextLoss

LOSS = "loss"
Value = TypeVar("Value")


class Evaluator:
    """One task, read once, on which any number of models can be measured.

    Args:
        task: checked by `task_data.check_task`.
        split: the split to read.
        predict_config: with all lengths set; they are those of inputs and targets.
        config: how much of the task to use, and whether to decode when no metric requires it.
        loss: the training loss of the models, whose objective is reported beside the cross-entropy;
            None, or a loss other than `TextLoss`, reports none.

    Raises:
        UserError: there is no example.
    """

    def __init__(
        self,
        task: seqio.Task,
        split: str,
        predict_config: PredictConfig,
        config: EvalConfig | None = None,
        loss: Any = None,
    ):
        config = config or EvalConfig()
        self.task = task
        self._loss = loss if isinstance(loss, TextLoss) else None
        self.split = split
        self.predict_config = predict_config
        self._decodes = config.predict or bool(
            task.predict_metric_fns or task.predict_with_aux_metric_fns
        )
        if unmeasured := len(task.metric_objs) - len(task.metric_fns):
            logging.warning(
                "task=%s has %d metric_objs, which convt5 does not evaluate; write them as "
                "metric_fns.",
                task.name,
                unmeasured,
            )
        lengths = predict_config.task_lengths()
        self.examples = read_examples(
            task,
            split,
            lengths=lengths,
            num_examples=config.num_examples,
            every_nth=config.every_nth,
            seed=config.seed,
        )
        end = end_id(task.output_features["targets"].vocabulary)
        fitted = [
            truncate(token_ids(example, "targets"), lengths["targets"], end)
            for example in self.examples
        ]
        self._sources = [token_ids(example, "inputs") for example in self.examples]
        self._targets = [target.tokens for target in fitted]
        _tell_padding(task.name, self._targets)
        rows = row_numbers(self.examples)
        # Examples with the same source are computed together, as predictions rank labels.
        self._groups = _runs(list(zip(rows, self._sources, strict=True)))
        self._are_answers = are_answers(self.examples)

        def num_rows(wanted: Iterable[bool]) -> int:
            return len(set(itertools.compress(rows, wanted)))

        self._counts = {
            "num_examples": len(set(rows)),
            "num_target_tokens": sum(map(len, self._answers(self._targets))),
            "truncated_inputs": num_rows(len(ids) > lengths["inputs"] for ids in self._sources),
            "truncated_targets": num_rows(target.truncated > 0 for target in fitted),
        }
        if not self._counts["num_target_tokens"]:
            raise errors.UserError(
                f"task={task.name}: the targets of split={split} are all empty, or none of its "
                "labels is correct; correct the data."
            )

    @functools.cached_property
    def identity(self) -> str:
        """Identifies the examples, and how they are measured."""
        settings = [self.predict_config.described(), self._decodes, self._are_answers]
        digest = hashlib.sha256(json.dumps(settings).encode())
        rows = row_numbers(self.examples)
        for row, source, target in zip(rows, self._sources, self._targets, strict=True):
            digest.update(np.array([row, len(source), *source, *target], np.int64).tobytes())
        return digest.hexdigest()[:32]

    def describe(self) -> str:
        """Returns the number of examples of the task, and how many are truncated."""
        counts = self._counts
        return (
            f"{self.task.name}, {self.split}: {counts['num_examples']:,} examples, "
            f"{counts['num_target_tokens']:,} target tokens; cut: {counts['truncated_inputs']:,} "
            f"inputs, {counts['truncated_targets']:,} targets"
        )

    def num_computed(self, predictor: Predictor) -> int:
        """Returns how many inputs this host computes for one model, counting repetitions."""
        return len(self._own_groups(predictor)) * (1 + self._decodes)

    def predictor(self, model: Any, mesh: Any = None) -> Predictor:
        """Returns a predictor with the vocabularies of the task."""
        features = self.task.output_features
        return Predictor(
            model,
            features["inputs"].vocabulary,
            self.predict_config,
            target_vocabulary=features["targets"].vocabulary,
            mesh=mesh,
        )

    def evaluate(self, predictor: Predictor, progress: Progress | None = None) -> Outcome:
        """Measures a model; every host must call it and gets the same result.

        Raises:
            UserError: an input is too long and must not be truncated, or a metric fails.
        """
        own_examples = self._own_groups(predictor)
        groups = [self._groups[i] for i in own_examples]
        sources = [self._sources[group[0]] for group in groups]
        scored = predictor.score_choices(
            sources,
            [[self._targets[i] for i in group] for group in groups],
            numbers=own_examples,
            at_least=(max(map(len, self._groups)), max(map(len, self._targets))),
            regularizers=self._regularizers(),
            progress=progress,
        )
        merged = (
            list if predictor.spans_hosts else functools.partial(hosts.merge, examples=own_examples)
        )
        scores = [TargetScore(*parts) for group in merged(scored) for parts in group]
        predictions: list[Prediction] = []
        if self._decodes:
            predicted = predictor.predict_tokens(sources, numbers=own_examples, progress=progress)
            for group, parts in zip(self._groups, merged(predicted), strict=True):
                predictions += [Prediction(*parts)] * len(group)
        metrics = self._of_targets(list(self._answers(scores)))
        for name, value in self._metrics(scores, predictions).items():
            if name == LOSS:
                raise errors.UserError(
                    f"task={self.task.name} has two metrics called {name!r}; rename one of them."
                )
            metrics[name] = value
        return Outcome(
            self.task.name,
            self.split,
            metrics,
            self._counts,
            self._records(scores, predictions),
        )

    def _regularizers(self) -> Regularizers:
        loss = self._loss
        return Regularizers(loss.z_loss, loss.label_smoothing) if loss else NO_REGULARIZERS

    def _of_targets(self, scores: Sequence[TargetScore]) -> dict[str, float]:
        """Returns the metrics that every task has; a task's own of the same name replaces one.

        For a task that ranks labels, they are those of the correct labels.
        """
        nats = -math.fsum(score.log_prob for score in scores)
        loss = nats / self._counts["num_target_tokens"]
        metrics = {LOSS: loss, "perplexity": float(np.exp(loss))}
        sizes = vocabularies.token_bytes(self.task.output_features["targets"].vocabulary)
        if sizes is not None:
            num_bytes = sum(int(sizes[ids].sum()) for ids in self._answers(self._targets))
            metrics |= {"bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {}
        if self._loss is not None:
            total = math.fsum(score.objective for score in scores)
            weights = {
                "tokens": self._counts["num_target_tokens"],
                "positions": len(scores) * self.predict_config.task_lengths()["targets"],
                "nothing": 1,
            }
            metrics["objective"] = total / weights[self._loss.normalize_by]
        return metrics

    def _answers(self, values: Iterable[Value]) -> Iterator[Value]:
        """Drops values of examples with a wrong label."""
        return itertools.compress(values, self._are_answers)

    def _own_groups(self, predictor: Predictor) -> list[int]:
        """Returns the groups of examples that this host computes.

        On a mesh over several hosts, all compute the same batches; otherwise each has a share.
        """
        if predictor.spans_hosts:
            return list(range(len(self._groups)))
        return hosts.share([len(self._sources[group[0]]) for group in self._groups])

    def _metrics(
        self, scores: Sequence[TargetScore], predictions: Sequence[Prediction]
    ) -> dict[str, float]:
        task = self.task
        targets = [
            self._postprocess(text, example, is_target=True)
            for text, example in zip(self._target_texts(), self.examples, strict=True)
        ]
        metrics: list[tuple[str, Any]] = []
        for function in task.score_metric_fns:
            values = np.array([score.log_prob for score in scores])
            metrics += self._run_metric(function, targets, values)
        if task.predict_metric_fns or task.predict_with_aux_metric_fns:
            decode = task.output_features["targets"].vocabulary.decode
            answers = [
                self._postprocess(decode(list(best(p))), example, is_target=False)
                for p, example in zip(predictions, self.examples, strict=True)
            ]
            for function in task.predict_metric_fns:
                metrics += self._run_metric(function, targets, answers)
            aux = {"scores": [p.scores[0] if p.scores else -math.inf for p in predictions]}
            for function in task.predict_with_aux_metric_fns:
                metrics += self._run_metric(function, targets, answers, aux)
        names = [name for name, _ in metrics]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise errors.UserError(
                f"task={task.name} has two metrics called {twice.pop()!r}; rename one of them."
            )
        return {name: number for name, value in metrics if (number := _number(value)) is not None}

    def _run_metric(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        try:
            return list(function(*arguments).items())
        except errors.UserError:
            raise
        except Exception as error:
            # A metric of the task failed: the message names it, the traceback is its cause.
            name = getattr(function, "__name__", function)
            raise RuntimeError(f"metric {name} of task={self.task.name} failed: {error}") from error

    def _postprocess(self, text: str, example: Example, *, is_target: bool) -> Any:
        return self.task.postprocess_fn(text, example=example, is_target=is_target)

    def _target_texts(self) -> list[str]:
        """Returns the targets as metrics get them: without sentinels, like `seqio.Evaluator`."""
        decode = self.task.output_features["targets"].vocabulary.decode
        return [original_text(example, "targets", decode) for example in self.examples]

    def _texts(self, feature: str) -> list[str]:
        vocabulary = self.task.output_features[feature].vocabulary
        decode = functools.partial(decode_text, vocabulary)
        return [original_text(example, feature, decode) for example in self.examples]

    def _records(
        self, scores: Sequence[TargetScore], predictions: Sequence[Prediction]
    ) -> list[dict[str, Any]]:
        records = []
        texts = zip(self._texts("inputs"), self._texts("targets"), scores, strict=True)
        for i, (source, target, score) in enumerate(texts):
            record = {"index": i, "input": source, "target": target, "target_score": score.log_prob}
            if predictions:
                prediction = predictions[i]
                record |= {"predictions": list(prediction.texts), "scores": list(prediction.scores)}
            records.append(record)
        return records


def _tell_padding(task: str, targets: Sequence[Sequence[int]]) -> None:
    """Warns of targets with an id that training takes for padding."""
    if count := sum(0 in target for target in targets):
        logging.warning(
            "task=%s: %d targets hold the id 0 before their end; training takes it for padding and "
            "leaves it out of the loss, but the loss here counts it.",
            task,
            count,
        )


def _runs(values: Sequence[Any]) -> list[list[int]]:
    """Returns the positions of each run of equal values."""
    runs = itertools.groupby(range(len(values)), key=lambda i: values[i])
    return [list(run) for _, run in runs]


def best(prediction: Prediction) -> tuple[int, ...]:
    """Returns the ids of the best result; empty if there is none."""
    return tuple(prediction.tokens[0]) if prediction.tokens else ()


def _number(value: Any) -> float | None:
    """Converts a metric to a float; None for texts, images and other non-scalars."""
    array = np.asarray(value.value if isinstance(value, seqio.metrics.Scalar) else value)
    is_number = array.size == 1 and array.dtype.kind in "biuf"
    return float(array.item()) if is_number else None
