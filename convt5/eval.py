"""Entry point of `python -m convt5.eval`: measures checkpoints of a run on tasks or images."""

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from convt5 import errors
from convt5.configuration import command_line
from convt5.evaluation.flags import EMA_FLAG, PREDICT_FLAGS
from convt5.runtime import metric_names, multi_host
from convt5.runtime.flags import Flag

if TYPE_CHECKING:
    from convt5.evaluation import checkpoints
    from convt5.evaluation.evaluator import Evaluator
    from convt5.evaluation.images import ImagePlan
    from convt5.evaluation.results import Outcome, Results
    from convt5.evaluation.run_settings import RunSettings
    from convt5.evaluation.settings import PredictConfig


_TIMEOUT = 3600.0  # Seconds.
_TASK_FLAGS = (
    Flag(
        "task",
        "a registered seqio task or mixture; may be repeated. By default the run's own "
        "evaluation data.",
        {"action": "append"},
    ),
    Flag(
        "predict",
        "decodes also where no metric needs it, so that predictions are written.",
        {"action": "store_true"},
    ),
)
COMMAND = command_line.Command(
    name="eval",
    summary="Evaluates a trained model. On seqio tasks it reports the metrics of the task and "
    "the loss of the targets (for rank classification, of the correct labels); on "
    "labelled images top-1 and top-5 accuracy and the loss. Accuracies are percentages. "
    "Writes metrics (JSON) and predictions (JSON lines) to "
    "RUN_DIR/evaluation/TASK/SPLIT, and scalars to RUN_DIR/evaluation/tensorboard.",
    needs_gin_file=False,
    examples=[
        (
            "evaluate the newest checkpoint of a run on its own validation data",
            "--checkpoint=runs/a",
        ),
        (
            "evaluate the best checkpoint on other tasks, with beam search",
            "--checkpoint=runs/a --step=best --task=imdb --task=trec6 --split=test "
            "--strategy=beam --beam_size=4",
        ),
        (
            "follow a run in progress: evaluate each checkpoint as it appears",
            "--checkpoint=runs/a --follow --timeout=7200",
        ),
        (
            "evaluate an image model; re-estimate its batch statistics on 64 batches first",
            "--checkpoint=runs/digits/vit_c_tiny --split=test --reestimate=64",
        ),
        (
            "evaluate the run of the train command with the same settings, on training examples",
            "--gin_file=gin/runs/quickstart.gin --gin.RUN_DIR=runs/a "
            "--gin.eval/data.DataConfig.split=train --num_examples=1000",
        ),
    ],
    flags=[
        Flag(
            "checkpoint",
            "a run directory, one of its steps, or an exported model (default: the run_dir of "
            "the gin files). Its config.gin is read before other gin files, unless these "
            "describe a run.",
        ),
        Flag(
            "step",
            "latest (the default), best (by the run's best_metric), all, or a list of steps: "
            "100,200.",
            {"default": "latest"},
        ),
        _TASK_FLAGS[0],
        Flag("split", "split of the tasks (default: the run's own split, or validation)."),
        Flag("num_examples", "evaluates only this many examples of each task.", {"type": int}),
        _TASK_FLAGS[1],
        EMA_FLAG,
        Flag(
            "reestimate",
            "images: re-estimates batch statistics on this many batches of training data.",
            {"type": int},
        ),
        Flag(
            "follow",
            "evaluates checkpoints as they appear, until the run ends; skips those already "
            "evaluated with these settings.",
            {"action": "store_true"},
        ),
        Flag(
            "timeout",
            "with --follow: ends after this many seconds without a new checkpoint (default: 3600).",
            {"type": float},
        ),
        Flag("output_dir", "folder of the results (default: RUN_DIR/evaluation)."),
        *PREDICT_FLAGS,
        Flag(
            "dry_run",
            "checks checkpoints, tasks, splits and vocabularies; evaluates nothing.",
            {"action": "store_true"},
        ),
        *multi_host.FLAGS,
    ],
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPlan:
    """What will be evaluated of a text model, checked; `images.ImagePlan` is another.

    Attributes:
        checkpoint: where the model is.
        tasks: seqio tasks.
        split: of each.
        settings: of the run and of the evaluation.
        predict: how texts become predictions; completed.
        ema: whether the average over the updates is measured.
    """

    checkpoint: str
    tasks: Sequence[Any]
    split: str
    settings: "RunSettings"
    predict: "PredictConfig"
    ema: bool = False

    @property
    def last_step(self) -> int | None:
        """The step with which the run ends, where it is known."""
        return self.settings.train.get("num_steps")

    def facts(self) -> list[str]:
        """Returns lines about what would be evaluated."""
        return [
            f"  strategy     {self.predict.strategy}",
            f"  lengths      {self.predict.max_input_length} tokens in, "
            f"{self.predict.max_length} out",
        ]

    def described(self) -> dict[str, Any]:
        """Returns what results depend on, as JSON values."""
        evaluate = self.settings.evaluate
        return {
            **self.predict.described(),
            "num_examples": evaluate.num_examples,
            **({"every_nth": evaluate.every_nth} if evaluate.every_nth > 1 else {}),
            "predict": evaluate.predict,
            "task_seed": evaluate.seed,
            **({"ema": True} if self.ema else {}),
        }

    def evaluator(self, task: Any) -> Callable[[Any, Any, int | None], "Outcome"]:
        """Returns a function of model, mesh and step."""
        from convt5.evaluation.evaluator import Evaluator

        loss = self.settings.train.get("loss")
        read = Evaluator(task, self.split, self.predict, self.settings.evaluate, loss)
        return functools.partial(_measure, read)


Plan: TypeAlias = "TextPlan | ImagePlan"


def main(argv: Sequence[str]) -> int:
    """Evaluates as the command line says; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    with multi_host.joined(arguments.flags):
        return _run(arguments)


def _run(arguments: command_line.Arguments) -> int:
    flags = arguments.flags
    if flags.timeout is not None and not flags.follow:
        raise errors.UserError(f"--timeout={flags.timeout:g} is for --follow; leave it out.")
    settings, checkpoint = _settings(arguments)
    found = _first(checkpoint, flags)
    plan = make_plan(found, checkpoint, settings, flags)
    if flags.dry_run:
        print(describe(plan, flags))
        return 0
    steps = []
    outcomes = 0
    with _opened_results(plan, found, flags.output_dir) as results:
        coming = _noted(_checkpoints(plan, flags), steps)
        for _ in evaluate(plan, coming, results, skip=flags.follow):
            outcomes += 1
    # What was evaluated before needs nothing more.
    if not outcomes and not (flags.follow and steps):
        raise errors.UserError(f"no checkpoint in {checkpoint} was evaluated.")
    return 0


def make_plan(
    found: "checkpoints.Found", checkpoint: str, settings: "RunSettings", flags: Any
) -> Plan:
    """Returns what will be evaluated.

    Raises:
        UserError: no tasks, or tasks that do not fit the model.
    """
    from convt5.evaluation import checkpoints

    config = checkpoints.any_config(found)
    if hasattr(config, "image_size"):
        return _image_plan(config, checkpoint, settings, flags)
    if flags.reestimate is not None:
        raise errors.UserError(
            f"--reestimate={flags.reestimate} is for models of images, and {checkpoint} holds one "
            "of text; leave it out."
        )
    return _text_plan(found, checkpoint, settings, ema=flags.ema)


def _image_plan(config: Any, checkpoint: str, settings: "RunSettings", flags: Any) -> Plan:
    from convt5.evaluation import images

    given = [
        flag.name
        for flag in (*PREDICT_FLAGS, *_TASK_FLAGS)
        if flag.name != "batch_size" and _is_given(getattr(flags, flag.name))
    ]
    given = [f"--{name}" for name in given]
    if settings.evaluate.every_nth != 1:
        given.append("evaluation.EvalConfig.every_nth")
    errors.raise_all(
        [f"{name} is for models of text; leave it out." for name in given], where=checkpoint
    )
    return images.make_plan(
        checkpoint,
        model=config,
        train=settings.train,
        data=settings.data,
        split=settings.evaluate.split,
        batch_size=flags.batch_size,
        num_examples=settings.evaluate.num_examples,
        reestimate=flags.reestimate,
        ema=flags.ema,
    )


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # 0 is a value.


def _text_plan(
    found: "checkpoints.Found", checkpoint: str, settings: "RunSettings", *, ema: bool
) -> TextPlan:
    from convt5.evaluation import checkpoints, run_settings, task_data

    config = checkpoints.model_config(found)
    predict = settings.predict.completed(config, settings.trained_lengths())
    named = list(settings.evaluate.tasks)
    own = getattr(settings.data, "mixture", None)
    if not named and own is None:
        raise errors.UserError(
            f"no task to evaluate {checkpoint} on: its settings name none; give --task=NAME, and a "
            "gin file that imports the module which registers it."
        )
    own_split = getattr(settings.data, "split", None) if not named else None
    split = settings.evaluate.split or own_split or "validation"
    tasks = task_data.find_tasks(named or [own])
    trained = None
    try:
        trained = run_settings.trained_features(checkpoint, settings)
    except errors.UserError as error:
        print(f"vocabularies are not compared: {error}", file=sys.stderr)
    for task in tasks:
        lengths = predict.task_lengths()
        task_data.check_task(
            task,
            split,
            vocab_size=config.vocab_size,
            max_length=lengths["targets"],
            trained=trained,
        )
    return TextPlan(
        checkpoint=checkpoint,
        tasks=tasks,
        split=split,
        settings=settings,
        predict=predict,
        ema=ema,
    )


def describe(plan: Plan, flags: Any) -> str:
    """Returns what would be evaluated."""
    from convt5.evaluation import checkpoints

    steps = [str(f.step) for f in checkpoints.select(plan.checkpoint, flags.step)]
    return "\n".join(
        [
            "The settings are complete and consistent; nothing was computed.",
            f"  checkpoint   {plan.checkpoint}",
            f"  steps        {'as they appear' if flags.follow else ', '.join(steps)}",
            f"  tasks        {', '.join(task.name for task in plan.tasks)}",
            f"  split        {plan.split}",
            *plan.facts(),
        ]
    )


def evaluate(
    plan: Plan,
    found: "Iterator[checkpoints.Found]",
    results: "Results | None",
    *,
    skip: bool = False,
) -> "Iterator[Outcome]":
    """Evaluates checkpoints on all tasks, and writes and prints each result.

    Args:
        plan: from `make_plan`.
        found: checkpoints of one model.
        results: where results are written; None on hosts other than the first.
        skip: leaves out what has results already.
    """
    import jax

    from convt5.evaluation import checkpoints
    from convt5.modeling import sharding

    mesh = sharding.MeshConfig().build(jax.local_devices())
    evaluators: dict[str, Callable[[Any, Any, int | None], Outcome]] = {}
    for one in found:
        wanted = [t for t in plan.tasks if not (skip and _is_done(results, t, plan, one.step))]
        if not wanted:
            continue
        model = checkpoints.load_if_there(one, mesh, ema=plan.ema)
        if model is None:
            print(f"step {one.step}: removed by its run before it was read", file=sys.stderr)
            continue
        for task in wanted:
            if task.name not in evaluators:
                evaluators[task.name] = plan.evaluator(task)
            outcome = evaluators[task.name](model, mesh, one.step)
            if results is not None:
                path = results.write(outcome, one.step)
                print(_summary(outcome, one.step, path), flush=True)
            yield outcome


def _measure(evaluator: "Evaluator", model: Any, mesh: Any, step: int | None) -> "Outcome":
    import jax

    from convt5.evaluation.progress import Progress

    predictor = evaluator.predictor(model, mesh)
    if jax.process_index():
        return evaluator.evaluate(predictor)
    label = evaluator.task.name if step is None else f"{evaluator.task.name}, step {step}"
    progress = Progress(evaluator.num_computed(predictor), label=label)
    with contextlib.closing(progress):
        return evaluator.evaluate(predictor, progress)


def _settings(arguments: command_line.Arguments) -> tuple["RunSettings", str]:
    from convt5.evaluation import checkpoints, run_settings
    from convt5.evaluation.settings import from_flags
    from convt5.training.compilation import enable_persistent_cache

    flags = arguments.flags
    if not flags.checkpoint and not arguments.gin_files:
        raise errors.UserError(
            "--checkpoint is missing: give a run directory, such as --checkpoint=runs/quickstart/"
            "dynamic_tiny. See python -m convt5.eval --help."
        )
    if flags.follow and flags.step != "latest":
        raise errors.UserError(f"--follow takes all checkpoints; leave out --step={flags.step}.")
    if flags.follow and flags.checkpoint:
        flags.checkpoint = str(checkpoints.run_directory(flags.checkpoint))
    if flags.follow and flags.checkpoint and not arguments.gin_files:
        _wait(
            lambda: run_settings.config_file(flags.checkpoint) is not None,
            f"the run directory {flags.checkpoint}",
            flags,
        )
    enable_persistent_cache()
    settings = run_settings.read(
        flags.checkpoint,
        arguments.gin_files,
        arguments.gin_bindings,
        needs_data=not flags.task,
        trust=arguments.trust,
    )
    given = {
        name: value
        for name, value in (
            ("tasks", flags.task),
            ("split", flags.split),
            ("num_examples", flags.num_examples),
            ("predict", flags.predict or None),
        )
        if value is not None
    }
    settings = settings._replace(
        predict=from_flags(settings.predict, vars(flags)),
        evaluate=dataclasses.replace(settings.evaluate, **given),
    )
    checkpoint = flags.checkpoint or settings.train.get("run_dir")
    if not checkpoint:
        raise errors.UserError("the gin files describe no run; give --checkpoint=DIR.")
    return settings, os.path.expanduser(checkpoint)


def _first(checkpoint: str, flags: Any) -> "checkpoints.Found":
    """Returns a checkpoint by which the model is known."""
    from etils import epath

    from convt5.checkpoints.reading import steps_in
    from convt5.evaluation import checkpoints

    if flags.follow:
        _wait(
            lambda: steps_in(epath.Path(checkpoint) / "checkpoints"),
            f"a checkpoint in {checkpoint}",
            flags,
        )
    return checkpoints.select(checkpoint, flags.step)[0]


def _checkpoints(plan: Plan, flags: Any) -> "Iterator[checkpoints.Found]":
    from convt5.evaluation import checkpoints

    if not flags.follow:
        return iter(checkpoints.select(plan.checkpoint, flags.step))
    return checkpoints.follow(plan.checkpoint, last_step=plan.last_step, timeout=_timeout(flags))


def _noted(
    found: "Iterator[checkpoints.Found]", steps: list[int | None]
) -> "Iterator[checkpoints.Found]":
    for one in found:
        steps.append(one.step)
        yield one


@contextlib.contextmanager
def _opened_results(
    plan: Plan, found: "checkpoints.Found", output_dir: str | None
) -> "Iterator[Results | None]":
    import jax

    from convt5.evaluation.results import Results, closing_results

    folder = os.path.expanduser(output_dir or found.run_dir / "evaluation")
    if output_dir is None and os.path.islink(folder):
        raise errors.UserError(
            f"{folder} is a link, and nothing in a run directory is written through links; name "
            "the folder with --output_dir, or remove the link."
        )
    described = plan.described()
    with closing_results(None if jax.process_index() else Results(folder, described)) as results:
        yield results


def _is_done(results: "Results | None", task: Any, plan: Plan, step: int | None) -> bool:
    """Whether there are results already; the first host decides for all."""
    from convt5.evaluation.hosts import first_hosts

    return first_hosts(results is not None and results.exists(task.name, plan.split, step))


def _wait(is_there: Callable[[], Any], what: str, flags: Any) -> None:
    """Waits for a run that has not begun, and says so."""
    start, timeout = time.monotonic(), _timeout(flags)
    if not is_there():
        print(f"waiting for {what}, at most {timeout:g} seconds", file=sys.stderr)
    while not is_there() and time.monotonic() - start < timeout:
        time.sleep(min(10.0, timeout / 10))


def _timeout(flags: Any) -> float:
    return _TIMEOUT if flags.timeout is None else flags.timeout


def _summary(outcome: "Outcome", step: int | None, path: Any) -> str:
    metrics = "  ".join(
        f"{name} {metric_names.shown(name, value)}" for name, value in outcome.metrics.items()
    )
    counts = outcome.counts
    cut = [
        f"{counts[f'truncated_{name}']} {name} cut"
        for name in ("inputs", "targets")
        if counts.get(f"truncated_{name}")
    ]
    if counts.get("skipped_images"):
        cut.append(f"{counts['skipped_images']} images skipped")
    where = "" if step is None else f"step {step}  "
    examples = ", ".join([f"{counts['num_examples']} examples", *cut])
    return f"{where}{outcome.task}/{outcome.split}  {metrics}  ({examples})  {path}"


if __name__ == "__main__":
    command_line.run(main)
