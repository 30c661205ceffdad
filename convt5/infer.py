"""Entry point of `python -m convt5.infer`: predictions of texts, as JSON lines or in a dialogue."""

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from convt5 import errors
from convt5.configuration import command_line
from convt5.evaluation.flags import EMA_FLAG, INFER_FLAGS
from convt5.runtime import terminal
from convt5.runtime.flags import Flag

if TYPE_CHECKING:
    from convt5.evaluation.inputs import Inputs
    from convt5.evaluation.predictor import Predictor
    from convt5.evaluation.results import ResumableLines
    from convt5.evaluation.run_settings import RunSettings
    from convt5.text.task_format import TaskFormat
    from convt5.text.vocabulary_files import TextFeatures

_CHUNK_BATCHES = 8
"""Batches whose inputs are put together by length, and written at once."""

COMMAND = command_line.Command(
    name="infer",
    summary="Predicts for the lines of a file or of standard input, or for a split of a task. "
    "Inputs are formatted as in training, with the prefix and fields of the run's task "
    "(--raw passes them unchanged). The output has one JSON line per input, with the "
    "input, the predictions and their scores; for a task with labels, the most likely "
    "label and the probability of each label. In a terminal without --input it prompts "
    "for text. The same command completes an interrupted output file.",
    needs_gin_file=False,
    examples=[
        (
            "predict for each line of a file; repeat the command to resume",
            "--checkpoint=runs/a --input=texts.txt --output=predictions.jsonl",
        ),
        (
            "predict for the field 'review' of JSON lines, four predictions each",
            "--checkpoint=runs/a --input=reviews.jsonl --field=review --output=out.jsonl "
            "--strategy=beam --beam_size=4 --length_penalty=0.6",
        ),
        (
            "predict for JSON lines with all fields of the task, such as premise and hypothesis",
            "--checkpoint=runs/mnli --input=pairs.jsonl --output=labels.jsonl",
        ),
        (
            "prompt for text in the terminal, and sample answers",
            "--checkpoint=runs/a --strategy=sampling",
        ),
        (
            "predict for a split of a task",
            "--checkpoint=runs/a --task=trec6 --split=test --output=test.jsonl",
        ),
        (
            "use a model imported by convt5.convert, with its SentencePiece vocabulary",
            "--checkpoint=runs/lconv_base --vocabulary=sentencepiece.model --input=texts.txt",
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
            "latest (the default), best (by the run's best_metric), or a step.",
            {"default": "latest"},
        ),
        Flag(
            "vocabulary",
            "a SentencePiece .model file, or bytes (default: the vocabulary of the run).",
        ),
        Flag(
            "input",
            "a file, glob or folder: text with one input per line, JSON lines (.jsonl, .ndjson, "
            ".json), or tables with a header line (.tsv, .csv); also .gz, .xz or .bz2. - is "
            "standard input, the default.",
        ),
        Flag(
            "invalid_utf8",
            "lines with invalid UTF-8: refuse (the default) ends the command, replace "
            "substitutes U+FFFD, skip drops and counts them.",
            {"choices": ["refuse", "replace", "skip"]},
        ),
        Flag(
            "field",
            "field of JSON lines or tables that holds the text (default: the fields of the "
            "task, or inputs, input, text or sentence). With this flag, or if the task has "
            "several fields, standard input is read as JSON.",
        ),
        Flag("task", "reads inputs from this registered seqio task instead."),
        Flag("split", "split of --task (default: validation)."),
        Flag("num_examples", "predicts for only this many examples of the task.", {"type": int}),
        Flag("output", "JSON lines file (default: standard output)."),
        Flag("interactive", "prompts for text.", {"action": "store_true"}),
        EMA_FLAG,
        *INFER_FLAGS,
        Flag(
            "dry_run",
            "checks the checkpoint, the vocabulary and all inputs; predicts nothing.",
            {"action": "store_true"},
        ),
    ],
)


def main(argv: Sequence[str]) -> int:
    """Predicts as the command line says; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    is_dialogue = _check_flags(flags, arguments.gin_files)
    from convt5.evaluation import run_settings

    settings = run_settings.read_for_text(
        flags.checkpoint,
        arguments.gin_files,
        arguments.gin_bindings,
        vocabulary=flags.vocabulary,
        trust=arguments.trust,
    )
    checkpoint = flags.checkpoint or settings.train.get("run_dir")
    if not checkpoint:
        raise errors.UserError("the gin files describe no run; give --checkpoint=DIR.")
    checkpoint = os.path.expanduser(checkpoint)

    from convt5.evaluation import checkpoints, stream
    from convt5.evaluation.predictor import Predictor, check_vocabulary_size
    from convt5.evaluation.settings import from_flags
    from convt5.modeling import sharding
    from convt5.text import task_format
    from convt5.training.compilation import enable_persistent_cache

    enable_persistent_cache()
    found = _one(checkpoints.select(checkpoint, flags.step), flags.step)
    model_config = checkpoints.model_config(found)
    features = run_settings.text_features(flags.vocabulary or checkpoint, settings)
    check_vocabulary_size(features.inputs, model_config.vocab_size)
    config = from_flags(settings.predict, vars(flags)).completed(
        model_config, settings.trained_lengths()
    )
    written = _task_format(flags, checkpoint, settings)
    config = dataclasses.replace(config, strategy=config.strategy_for(written))
    inputs = None
    if not is_dialogue:
        inputs = open_inputs(flags, features, config, model_config.vocab_size, written)
    if not flags.task:
        about = run_settings.answers_described(written, config, raw=flags.raw)
        print(about, file=sys.stderr)
    if inputs is not None:
        _tell_faults(inputs)  # Of files, which are checked whole; a stream is not read yet.
    if flags.dry_run:
        count = "a dialogue" if inputs is None else _counted(inputs)
        print(
            "The settings are complete and consistent; nothing was predicted.\n"
            f"  checkpoint   {found.folder}\n"
            f"  vocabulary   {type(features.inputs).__name__}, {features.inputs.vocab_size} ids\n"
            f"  inputs       {count}\n"
            f"  strategy     {config.strategy}\n"
            f"  lengths      {config.max_input_length} tokens in, {config.max_length} out"
        )
        return 0
    settings_of_output = {
        "checkpoint": str(found.folder),
        "vocabulary": flags.vocabulary,
        "input": inputs.name if inputs else None,
        "field": flags.field,
        **({"invalid_utf8": flags.invalid_utf8} if flags.invalid_utf8 else {}),
        **({"ema": True} if flags.ema else {}),
        **({"format": task_format.as_json([written])} if written and not flags.raw else {}),
        **config.described(),
    }
    with contextlib.ExitStack() as stack:
        output = _open_output(stack, flags.output, settings_of_output)
        if output and inputs and inputs.total == output.num_done:
            stream.check_done(inputs.read(), output.done())
            print(f"{flags.output} is complete: {inputs.total} lines", file=sys.stderr)
            return 0
        mesh = sharding.MeshConfig().build()
        predictor = Predictor(
            checkpoints.load(found, mesh, ema=flags.ema),
            features.inputs,
            config,
            target_vocabulary=features.targets,
            add_eos=features.add_eos,
            mesh=mesh,
            format=written,
            raw=flags.raw,
        )
        if inputs is None:
            _converse(predictor)
        else:
            run(predictor, inputs, output)
    return 0


def _task_format(flags: Any, checkpoint: str, settings: "RunSettings") -> "TaskFormat | None":
    """Returns the format of the task that is named, or of the one that the model keeps."""
    from convt5.evaluation import run_settings, task_data

    if not flags.task:
        return run_settings.task_format(checkpoint, settings, flags.format, raw=flags.raw)
    return task_data.find_format(flags.task)


def open_inputs(
    flags: Any,
    features: "TextFeatures",
    config: Any,
    vocab_size: int,
    written: "TaskFormat | None" = None,
) -> "Inputs":
    """Returns what the flags name, checked."""
    from convt5.evaluation import inputs
    from convt5.runtime import foreign_files

    format = None if flags.raw else written
    if flags.task:
        return _task_inputs(flags, features, config, vocab_size)
    how = {"invalid_utf8": flags.invalid_utf8 or "refuse"}
    if flags.input and flags.input != inputs.STDIN:
        return inputs.from_files(flags.input, flags.field, format, **how)
    lines = foreign_files.lines_as_they_come(sys.stdin.buffer, "standard input")
    return inputs.from_stream(lines, flags.field, format, **how)


def run(predictor: "Predictor", inputs: "Inputs", output: "ResumableLines | None") -> None:
    """Predicts from all inputs, into the output or standard output, and says what was cut."""
    from convt5.evaluation import stream
    from convt5.evaluation.progress import Progress
    from convt5.evaluation.results import json_line

    out = _results()
    num_done = output.num_done if output else 0
    # What comes one by one is answered as soon as a batch is full.
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
            f"{cut} inputs were longer than max_input_length="
            f"{predictor.config.max_input_length} tokens and were cut",
            file=sys.stderr,
        )


def _task_inputs(flags: Any, features: "TextFeatures", config: Any, vocab_size: int) -> "Inputs":
    from convt5.evaluation import inputs, task_data
    from convt5.evaluation.predictor import decode_text

    split = flags.split or "validation"
    task = task_data.find_task(flags.task)
    task_data.check_task(task, split, vocab_size=vocab_size, trained=features)
    examples = task_data.read_examples(
        task, split, lengths=config.task_lengths(), num_examples=flags.num_examples
    )

    def items() -> Iterator[inputs.Item]:
        for example in examples:
            # Tasks that rank labels have an example for each of them, all with one input.
            if not example.get("is_correct", True):
                continue
            source, target = (
                task_data.pretokenized(
                    example,
                    name,
                    functools.partial(decode_text, task.output_features[name].vocabulary),
                )
                for name in ("inputs", "targets")
            )
            yield inputs.Item(source, example["inputs"].tolist(), target)

    return inputs.from_examples(f"{task.name}/{split}", items())


def _check_flags(flags: Any, gin_files: Sequence[str]) -> bool:
    """Returns whether texts are asked for in a dialogue."""
    if not flags.checkpoint and not gin_files:
        raise errors.UserError(
            "--checkpoint is missing: give a run directory, such as --checkpoint=runs/quickstart/"
            "dynamic_tiny. See python -m convt5.infer --help."
        )
    given = [name for name in ("input", "task", "interactive") if getattr(flags, name)]
    faults = []
    if len(given) > 1:
        faults.append(f"--{' and --'.join(given)} exclude each other; give one of them.")
    if not flags.task:
        faults += [
            f"--{name} is for --task; leave it out."
            for name in ("split", "num_examples")
            if getattr(flags, name)
        ]
    if flags.num_examples is not None and flags.num_examples < 1:
        faults.append(f"--num_examples={flags.num_examples} must be at least 1.")
    faults += [
        f"--{name} is for texts, and --task writes its own inputs; leave it out."
        for name in ("field", "raw", "format", "invalid_utf8")
        if flags.task and getattr(flags, name)
    ]
    if flags.raw and flags.format:
        faults.append("--raw and --format exclude each other; give one of them.")
    is_dialogue = flags.interactive or (not given and sys.stdin.isatty())
    if is_dialogue and flags.output:
        faults.append("--output is for --input and --task; a dialogue is shown and not kept.")
    errors.raise_all(faults, where="infer")
    return is_dialogue


def _open_output(
    stack: contextlib.ExitStack, path: str | None, settings: dict[str, Any]
) -> "ResumableLines | None":
    if path is None:
        return None
    from convt5.evaluation.results import ResumableLines

    return stack.enter_context(contextlib.closing(ResumableLines(path, settings)))


def _converse(predictor: "Predictor") -> None:
    from convt5.evaluation import stream

    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no UTF-8 are then a fault of their line alone.
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
    """Where predictions go: files and pipes get them as they are, a terminal is not controlled."""
    return sys.stdout if sys.stdout.isatty() else terminal.unchanged(sys.stdout)


def _one(found: Sequence[Any], which: str) -> Any:
    if len(found) != 1:
        steps = ", ".join(str(each.step) for each in found)
        raise errors.UserError(f"--step={which} names several checkpoints ({steps}); name one.")
    return found[0]


def _counted(inputs: "Inputs") -> str:
    count = "as they come" if inputs.total is None else f"{inputs.total:,}"
    return f"{count} from {inputs.name}"


def _tell_faults(inputs: "Inputs") -> None:
    if faults := inputs.faults():
        print(f"input={inputs.name}: {faults}", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main)
