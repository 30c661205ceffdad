"""The command `python -m convt5.eval`: measures checkpoints of a run on tasks or images."""

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
from etils import epath

from convt5 import errors
from convt5.checkpoints.reading import steps_in
from convt5.configuration import command_line
from convt5.data.prefetching import told_by_sources
from convt5.evaluation import checkpoints, images, run_settings
from convt5.evaluation.flags import PREDICT_FLAGS, TASK_FLAGS
from convt5.evaluation.hosts import first_hosts
from convt5.evaluation.images import ImagePlan
from convt5.evaluation.results import Outcome, Results, closing_results
from convt5.evaluation.run_settings import RunSettings
from convt5.evaluation.settings import EvalConfig, PredictConfig, from_flags
from convt5.interchange import loading
from convt5.modeling import sharding
from convt5.runtime import folders, metric_names
from convt5.runtime.progress import Progress
from convt5.text import task_format, vocabulary_files
from convt5.training.compilation import enable_persistent_cache
from convt5.training.losses import TextLoss

if TYPE_CHECKING:
    from convt5.evaluation.evaluator import Evaluator

_TIMEOUT = 3600.0  # Seconds.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPlan:
    """The checked plan for evaluating a text model; for images see `images.ImagePlan`.

    Attributes:
        checkpoint: path of the model.
        tasks: seqio tasks.
        split: split of each task.
        settings: settings of the run and of the evaluation.
        predict: how texts become predictions, with all lengths set.
        ema: whether to measure the average over the updates.
    """

    checkpoint: str
    tasks: Sequence[Any]
    split: str
    settings: RunSettings
    predict: PredictConfig
    ema: bool = False

    @property
    def last_step(self) -> int | None:
        """The last step of the run, if known."""
        return self.settings.train.get("num_steps")

    def facts(self) -> list[str]:
        """Returns lines that describe the evaluation."""
        return [
            f"  strategy     {self.predict.strategy_for(None)}",
            f"  lengths      {self.predict.max_input_length} tokens in, "
            f"{self.predict.max_length} out",
        ]

    def described(self) -> dict[str, Any]:
        """Returns what results depend on, as JSON values."""
        evaluate = self.settings.evaluate
        contents = told_by_sources(self.tasks, "fingerprint")
        rows = told_by_sources(self.tasks, "reading")
        texts = {t.name: vocabulary_files.of_features(t.output_features) for t in self.tasks}
        ids = {name: text.fingerprints for name, text in texts.items() if text}
        loss = self.settings.train.get("loss")
        written = list(map(_task_data().find_format, self.tasks))
        marked = [format.task for format in written if format.mark_shared]
        return {
            **self.predict.described(),
            **({"content": contents} if contents else {}),
            **({"rows": rows} if rows else {}),
            **({"vocabularies": ids} if ids else {}),
            **({"loss": dataclasses.asdict(loss)} if isinstance(loss, TextLoss) else {}),
            # Also under the name that it had before "tasks", for results of that time.
            **({"mark_shared": marked} if marked else {}),
            "tasks": task_format.as_json(written),
            "num_examples": evaluate.num_examples,
            **({"every_nth": evaluate.every_nth} if evaluate.every_nth > 1 else {}),
            "predict": evaluate.predict,
            "task_seed": evaluate.seed,
            **({"ema": True} if self.ema else {}),
        }

    def evaluator(self, task: Any) -> Callable[[Any, Any, int | None], Outcome]:
        """Returns a function of model, mesh and step."""
        from convt5.evaluation.evaluator import Evaluator

        loss = self.settings.train.get("loss")
        read = Evaluator(task, self.split, self.predict, self.settings.evaluate, loss)
        return functools.partial(_measure, read)


Plan: TypeAlias = TextPlan | ImagePlan


def run(arguments: command_line.Arguments) -> int:
    """Evaluates according to the flags; returns the exit code."""
    flags = arguments.flags
    if flags.timeout is not None and not flags.follow:
        raise errors.UserError(f"--timeout={flags.timeout:g} is for --follow; leave it out.")
    if not _timeout(flags) >= 0:  # NaN is not.
        raise errors.UserError(
            f"--timeout={flags.timeout:g} must be at least 0 seconds; correct it, or leave it out."
        )
    settings, checkpoint = _settings(arguments)
    found = _first(checkpoint, flags)
    plan = make_plan(found, checkpoint, settings, flags)
    known = None if flags.follow else checkpoints.select(plan.checkpoint, flags.step)
    steps = []
    outcomes = 0
    with _open_results(plan, found, flags.output_dir) as results:
        if results is not None:
            models = {one: checkpoints.describe_if_there(one) for one in known or [found]}
            for task, (one, model) in itertools.product(plan.tasks, models.items()):
                results.check_writable(task.name, plan.split, one.step)
                if replaced := results.replaced(task.name, plan.split, one.step, model):
                    print(replaced, file=sys.stderr)
        if flags.dry_run:
            print(describe(plan, flags))
            return 0
        coming = _follow(plan, flags) if known is None else known
        for _ in evaluate(plan, _note_steps(coming, steps), results, skip=flags.follow):
            outcomes += 1
    # If everything was evaluated before, nothing is left to do.
    if not outcomes and not (flags.follow and steps):
        raise errors.UserError(f"no checkpoint in {checkpoint} was evaluated.")
    return 0


def make_plan(found: checkpoints.Found, checkpoint: str, settings: RunSettings, flags: Any) -> Plan:
    """Returns the plan of the evaluation.

    Raises:
        UserError: there are no tasks, or they do not fit the model.
    """
    config = checkpoints.any_config(found)
    if flags.ema:
        loading.check_average(found.folder)
    if hasattr(config, "image_size"):
        return _image_plan(config, checkpoint, settings, flags)
    if flags.reestimate is not None:
        raise errors.UserError(
            f"--reestimate={flags.reestimate} applies to image models, but {checkpoint} holds a "
            "text model; leave it out."
        )
    return _text_plan(found, checkpoint, settings, ema=flags.ema)


def _image_plan(config: Any, checkpoint: str, settings: RunSettings, flags: Any) -> Plan:
    given = [
        flag.name
        for flag in (*PREDICT_FLAGS, *TASK_FLAGS)
        if flag.name != "batch_size" and _is_given(getattr(flags, flag.name))
    ]
    given = [f"--{name}" for name in given] or [
        f"evaluation.EvalConfig.{name}"
        for name in ("tasks", "every_nth", "predict", "seed")
        if getattr(settings.evaluate, name) != getattr(EvalConfig(), name)
    ]
    errors.raise_all(
        [f"{name} applies to text models; leave it out." for name in given], where=checkpoint
    )
    return images.make_plan(
        checkpoint,
        model=config,
        settings=settings,
        batch_size=flags.batch_size,
        reestimate=flags.reestimate,
        ema=flags.ema,
    )


def _is_given(value: Any) -> bool:
    return value is not None and value is not False  # 0 is a value.


def _text_plan(
    found: checkpoints.Found, checkpoint: str, settings: RunSettings, *, ema: bool
) -> TextPlan:
    task_data = _task_data()
    config = checkpoints.model_config(found)
    predict = settings.predict.completed(config, settings.trained_lengths())
    predict.strategy_for(None)  # Predictors of evaluation get no format whose labels they rank.
    named = list(settings.evaluate.tasks)
    own = getattr(settings.data, "mixture", None)
    if not named and own is None:
        raise errors.UserError(
            f"no task to evaluate {checkpoint} on: its settings name none; give --task=NAME, "
            "and a gin file that imports the module that registers it."
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
    for note in run_settings.format_notes(checkpoint, map(task_data.find_format, tasks)):
        print(note, file=sys.stderr)
    return TextPlan(
        checkpoint=checkpoint,
        tasks=tasks,
        split=split,
        settings=settings,
        predict=predict,
        ema=ema,
    )


def _task_data() -> Any:
    from convt5.evaluation import task_data  # Deferred: vision models need no seqio.

    return task_data


def describe(plan: Plan, flags: Any) -> str:
    """Returns the description of the evaluation for a dry run."""
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
    found: Iterator[checkpoints.Found],
    results: Results | None,
    *,
    skip: bool = False,
) -> Iterator[Outcome]:
    """Evaluates checkpoints on all tasks; writes and prints each result.

    Args:
        plan: the result of `make_plan`.
        found: checkpoints of one model.
        results: where results are written; None except on the first host.
        skip: skips tasks that have results already.
    """
    mesh = sharding.MeshConfig().build(jax.local_devices())
    evaluators: dict[str, Callable[[Any, Any, int | None], Outcome]] = {}
    for one in found:
        about = checkpoints.describe_if_there(one)
        wanted = [
            task
            for task in plan.tasks
            if not (skip and _is_done(results, task.name, plan.split, one.step, about))
        ]
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
                path = results.write(outcome, one.step, about)
                print(_summary(outcome, one.step, path), flush=True)
            yield outcome


def _measure(evaluator: "Evaluator", model: Any, mesh: Any, step: int | None) -> Outcome:
    predictor = evaluator.predictor(model, mesh)
    if jax.process_index():
        return evaluator.evaluate(predictor)
    label = evaluator.task.name if step is None else f"{evaluator.task.name}, step {step}"
    progress = Progress(evaluator.num_computed(predictor), label=label)
    with contextlib.closing(progress):
        return evaluator.evaluate(predictor, progress)


def _settings(arguments: command_line.Arguments) -> tuple[RunSettings, str]:
    flags = arguments.flags
    if not flags.checkpoint and not arguments.gin_files:
        raise errors.UserError(
            "--checkpoint is missing: give a run directory, such as --checkpoint=runs/quickstart/"
            "dynamic_tiny. See python -m convt5.eval --help."
        )
    if flags.follow and flags.step != "latest":
        raise errors.UserError(
            f"--follow evaluates all checkpoints; leave out --step={flags.step}."
        )
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
        raise errors.UserError("the gin files do not describe a run; give --checkpoint=DIR.")
    return settings, os.path.expanduser(checkpoint)


def _first(checkpoint: str, flags: Any) -> checkpoints.Found:
    """Returns a checkpoint that shows what the model is."""
    if flags.follow:
        _wait(
            lambda: steps_in(epath.Path(checkpoint) / "checkpoints"),
            f"a checkpoint in {checkpoint}",
            flags,
        )
    return checkpoints.select(checkpoint, flags.step)[0]


def _follow(plan: Plan, flags: Any) -> Iterator[checkpoints.Found]:
    return checkpoints.follow(plan.checkpoint, last_step=plan.last_step, timeout=_timeout(flags))


def _note_steps(
    found: Iterable[checkpoints.Found], steps: list[int | None]
) -> Iterator[checkpoints.Found]:
    for one in found:
        steps.append(one.step)
        yield one


@contextlib.contextmanager
def _open_results(
    plan: Plan, found: checkpoints.Found, output_dir: str | None
) -> Iterator[Results | None]:
    folder = os.path.expanduser(output_dir or found.run_dir / "evaluation")
    if output_dir is None and os.path.islink(folder):
        raise errors.UserError(
            f"{folder} is a link, and nothing in a run directory is written through links; name "
            "the folder with --output_dir, or remove the link."
        )
    folders.check_outside_checkpoints(folder, what="output_dir")
    described = plan.described()
    with closing_results(None if jax.process_index() else Results(folder, described)) as results:
        yield results


def _is_done(results: Results | None, *where: Any) -> bool:
    """Returns whether there are results already; the first host decides for all."""
    return first_hosts(results is not None and results.exists(*where))


def _wait(is_there: Callable[[], Any], what: str, flags: Any) -> None:
    """Waits for a run that has not started, with a message."""
    start, timeout = time.monotonic(), _timeout(flags)
    if not is_there():
        print(f"waiting for {what}, at most {timeout:g} seconds", file=sys.stderr)
    while not is_there() and time.monotonic() - start < timeout:
        time.sleep(min(10.0, timeout / 10))


def _timeout(flags: Any) -> float:
    return _TIMEOUT if flags.timeout is None else flags.timeout


def _summary(outcome: Outcome, step: int | None, path: Any) -> str:
    metrics = "  ".join(
        f"{name} {metric_names.format_value(name, value)}"
        for name, value in outcome.metrics.items()
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
