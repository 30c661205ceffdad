"""The command `python -m convt5.infer`: predictions of texts, as JSON lines or in a dialogue."""

import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from convt5 import errors
from convt5.configuration import command_line
from convt5.evaluation import checkpoints, inputs, run_settings, stream
from convt5.evaluation.inputs import Inputs
from convt5.evaluation.predictor import Predictor, decode_text
from convt5.evaluation.results import ResumableLines, check_resumable, json_line
from convt5.evaluation.run_settings import RunSettings
from convt5.evaluation.settings import EvalConfig, PredictConfig, from_flags
from convt5.interchange import loading
from convt5.modeling import sharding
from convt5.runtime import foreign_files, terminal
from convt5.runtime.progress import Progress
from convt5.text import task_format, vocabulary_files
from convt5.text.task_format import TaskFormat
from convt5.text.vocabulary_files import TextFeatures
from convt5.training.compilation import enable_persistent_cache

_CHUNK_BATCHES = 8
"""Batches whose inputs are sorted by length, and written together."""


class _Plan(NamedTuple):
    """The checked plan of predictions.

    Attributes:
        found: the checkpoint.
        features: vocabularies of inputs and predictions.
        config: how texts become predictions, with all lengths set.
        written: the input format of the task; None uses texts unchanged.
        inputs: the inputs; None for a dialogue.
    """

    found: checkpoints.Found
    features: TextFeatures
    config: PredictConfig
    written: TaskFormat | None
    inputs: Inputs | None


def run(arguments: command_line.Arguments, *, is_dialogue: bool) -> int:
    """Checks the flags and predicts; returns the exit code."""
    flags = arguments.flags
    plan = _plan(arguments, is_dialogue=is_dialogue)
    if not flags.task:
        about = run_settings.describe_answers(plan.written, plan.config, raw=flags.raw)
        print(about, file=sys.stderr)
    if plan.inputs is not None:
        _tell_faults(plan.inputs)  # Files are checked whole; a stream has not been read yet.
    if flags.dry_run:
        if flags.output:
            check_resumable(flags.output, _settings_of_output(plan, flags))
        print(_describe(plan))
        return 0
    with contextlib.ExitStack() as stack:
        output = _open_output(stack, flags.output, _settings_of_output(plan, flags))
        if output and plan.inputs and plan.inputs.total == output.num_done:
            stream.check_done(plan.inputs.read(), output.done())
            print(f"{flags.output} is complete: {plan.inputs.total} lines", file=sys.stderr)
            return 0
        mesh = sharding.MeshConfig().build()
        predictor = Predictor(
            checkpoints.load(plan.found, mesh, ema=flags.ema),
            plan.features.inputs,
            plan.config,
            target_vocabulary=plan.features.targets,
            add_eos=plan.features.add_eos,
            mesh=mesh,
            format=plan.written,
            raw=flags.raw,
        )
        if plan.inputs is None:
            _converse(predictor)
        else:
            predict(predictor, plan.inputs, output)
    return 0


def _plan(arguments: command_line.Arguments, *, is_dialogue: bool) -> _Plan:
    """Returns the plan that the flags describe.

    Raises:
        UserError: something is missing, or does not fit the model.
    """
    flags = arguments.flags
    settings = run_settings.read_for_text(
        flags.checkpoint,
        arguments.gin_files,
        arguments.gin_bindings,
        vocabulary=flags.vocabulary,
        trust=arguments.trust,
    )
    checkpoint = flags.checkpoint or settings.train.get("run_dir")
    if not checkpoint:
        raise errors.UserError("the gin files do not describe a run; give --checkpoint=DIR.")
    checkpoint = os.path.expanduser(checkpoint)
    enable_persistent_cache()
    found = _one(checkpoints.select(checkpoint, flags.step), flags.step)
    model = checkpoints.model_config(found)
    if flags.ema:
        loading.check_average(found.folder)
    features = run_settings.chosen_features(
        flags.vocabulary,
        checkpoint,
        settings,
        of_seqio=bool(flags.task),
        trust=arguments.trust,
    )
    vocabulary_files.check_size(features.inputs, model.vocab_size)
    config = from_flags(settings.predict, vars(flags))
    config = config.completed(model, settings.trained_lengths())
    written = _task_format(flags, checkpoint, settings)
    config = dataclasses.replace(config, strategy=config.strategy_for(written))
    asked = None
    if not is_dialogue:
        if flags.task:
            asked = _task_inputs(flags, features, config, model.vocab_size, settings.evaluate)
        else:
            asked = _open_inputs(flags, written)
    return _Plan(found, features, config, written, asked)


def _describe(plan: _Plan) -> str:
    """Returns the output of a dry run."""
    count = "a dialogue" if plan.inputs is None else _counted(plan.inputs)
    vocabulary, config = plan.features.inputs, plan.config
    return (
        "The settings are complete and consistent; nothing was predicted.\n"
        f"  checkpoint   {plan.found.folder}\n"
        f"  vocabulary   {type(vocabulary).__name__}, {vocabulary.vocab_size} ids\n"
        f"  inputs       {count}\n"
        f"  strategy     {config.strategy}\n"
        f"  lengths      {config.max_input_length} tokens in, {config.max_length} out"
    )


def _settings_of_output(plan: _Plan, flags: Any) -> dict[str, Any]:
    """Returns what predictions depend on; a file is continued only with equal settings."""
    written = plan.written if not flags.raw else None
    named = vocabulary_files.of(plan.features.inputs) if flags.vocabulary else None
    return {
        "checkpoint": str(plan.found.folder),
        **plan.found.described(),
        "vocabulary": flags.vocabulary,
        **({"vocabulary_content": named.fingerprint} if named else {}),
        "input": plan.inputs.name if plan.inputs else None,
        "field": flags.field,
        **({"invalid_utf8": flags.invalid_utf8} if flags.invalid_utf8 else {}),
        **({"ema": True} if flags.ema else {}),
        **({"format": task_format.as_json([written])} if written else {}),
        **plan.config.described(),
    }


def _task_format(flags: Any, checkpoint: str, settings: RunSettings) -> TaskFormat | None:
    """Returns the format of the named task, or of the one saved with the model."""
    if not flags.task:
        return run_settings.task_format(checkpoint, settings, flags.format, raw=flags.raw)
    return _task_data().find_format(flags.task)


def _task_data() -> Any:
    """Imports TensorFlow and seqio, which only the examples of a task need."""
    from convt5.evaluation import task_data

    return task_data


def _open_inputs(flags: Any, written: TaskFormat | None) -> Inputs:
    """Returns the checked inputs of files or of standard input."""
    format = None if flags.raw else written
    how = {"invalid_utf8": flags.invalid_utf8 or "refuse"}
    if flags.input and flags.input != inputs.STDIN:
        return inputs.from_files(flags.input, flags.field, format, **how, output=flags.output)
    lines = foreign_files.lines_as_they_come(sys.stdin.buffer, "standard input")
    return inputs.from_stream(lines, flags.field, format, **how)


def predict(predictor: Predictor, inputs: Inputs, output: ResumableLines | None) -> None:
    """Predicts all inputs, to the output or standard output, and reports truncation."""
    out = _results()
    num_done = output.num_done if output else 0
    # Inputs of a stream are answered as soon as a batch is full.
    batches = 1 if inputs.total is None else _CHUNK_BATCHES
    progress = Progress(inputs.total, done=num_done)
    cut = 0
    with contextlib.closing(progress):
        if output and num_done:
            progress.message(f"continues after {num_done} lines of {output.path}")
        for records in stream.predictions(
            predictor,
            inputs.read(),
            chunk_size=batches * predictor.config.batch_size,
            done=output.done() if output else (),
            progress=progress,
        ):
            cut += sum(record["truncated"] > 0 for record in records)
            if output:
                output.write(records)
            else:
                out.write("".join(map(json_line, records)))
                out.flush()
    if inputs.total is None:
        _tell_faults(inputs)
    if cut:
        print(
            f"{cut} inputs were longer than "
            f"max_input_length={predictor.config.max_input_length} tokens and were truncated",
            file=sys.stderr,
        )


def _task_inputs(
    flags: Any, features: TextFeatures, config: Any, vocab_size: int, evaluate: EvalConfig
) -> Inputs:
    """Returns the rows of a task that `eval` would measure."""
    task_data = _task_data()
    split = flags.split or evaluate.split or "validation"
    task = task_data.find_task(flags.task)
    task_data.check_task(task, split, vocab_size=vocab_size, trained=features)
    examples = task_data.read_examples(
        task,
        split,
        lengths=config.task_lengths(),
        num_examples=flags.num_examples or evaluate.num_examples,
        every_nth=evaluate.every_nth,
        seed=evaluate.seed,
    )
    name = f"{task.name}/{split}"
    name += f", one of {evaluate.every_nth}" if evaluate.every_nth > 1 else ""
    name += f", seed {evaluate.seed}" if evaluate.seed else ""

    def text(example: Mapping[str, Any], name: str) -> str:
        decode = functools.partial(decode_text, task.output_features[name].vocabulary)
        return task_data.original_text(example, name, decode)

    def items() -> Iterator[inputs.Item]:
        numbered = zip(task_data.row_numbers(examples), examples, strict=True)
        for _, pairs in itertools.groupby(numbered, key=operator.itemgetter(0)):
            # Tasks that rank labels have one example per label, with equal inputs.
            of_row = [example for _, example in pairs]
            right = [example for example in of_row if example.get("is_correct", True)]
            target = text(right[0], "targets") if right else None
            tokens = task_data.token_ids(of_row[0], "inputs")
            yield inputs.Item(text(of_row[0], "inputs"), tokens, target)

    return inputs.from_examples(name, items())


def _open_output(
    stack: contextlib.ExitStack, path: str | None, settings: dict[str, Any]
) -> ResumableLines | None:
    if path is None:
        return None
    return stack.enter_context(contextlib.closing(ResumableLines(path, settings)))


def _converse(predictor: Predictor) -> None:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid UTF-8 is then an error only of its own line.
        sys.stdin.reconfigure(errors="surrogateescape")
    prompt = ""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # Lines can be edited and recalled.
        prompt = "> "
        wanted = " and ".join(predictor.fields) or "a text"
        print(f"Type {wanted}; Ctrl-D ends.", file=sys.stderr)

    def ask(field: str = "") -> str:
        return input(f"{errors.printable(field)}{prompt}" if prompt else "")

    stream.converse(predictor, ask, _results(), fields=predictor.fields)


def _results() -> TextIO:
    """Returns the stream for predictions: raw for files and pipes, escaped for a terminal."""
    return sys.stdout if sys.stdout.isatty() else terminal.unchanged(sys.stdout)


def _one(found: Sequence[Any], which: str) -> Any:
    if len(found) != 1:
        steps = ", ".join(str(each.step) for each in found)
        raise errors.UserError(f"--step={which} names several checkpoints ({steps}); name one.")
    return found[0]


def _counted(inputs: Inputs) -> str:
    count = "as they come" if inputs.total is None else f"{inputs.total:,}"
    return f"{count} from {inputs.name}"


def _tell_faults(inputs: Inputs) -> None:
    if faults := inputs.faults():
        print(f"input={inputs.name}: {faults}", file=sys.stderr)
