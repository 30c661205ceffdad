"""Entry point of `python -m convt5.infer`: predictions of texts, as JSON lines or in a dialogue."""

import sys
from collections.abc import Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import command_line
from convt5.evaluation.flags import CHECKPOINT_FLAG, EMA_FLAG, INFER_FLAGS
from convt5.runtime import quiet_imports
from convt5.runtime.flags import Flag

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
        CHECKPOINT_FLAG,
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
    """Predicts according to the command line; returns the exit code."""
    arguments = command_line.parse(COMMAND, argv)
    is_dialogue = _check_flags(arguments.flags, arguments.gin_files)
    # Deferred, so that help and usage errors are fast.
    with quiet_imports.without_tensorflow_chatter():
        from convt5.evaluation import infer_command

    return infer_command.run(arguments, is_dialogue=is_dialogue)


def _check_flags(flags: Any, gin_files: Sequence[str]) -> bool:
    """Checks the flags; returns whether inputs are read in a dialogue."""
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
        f"--{name} applies to text input, but --task formats its own inputs; leave it out."
        for name in ("field", "raw", "format", "invalid_utf8")
        if flags.task and getattr(flags, name)
    ]
    if flags.raw and flags.format:
        faults.append("--raw and --format exclude each other; give one of them.")
    is_dialogue = flags.interactive or (not given and sys.stdin.isatty())
    if is_dialogue and flags.output:
        faults.append("--output applies to --input and --task; interactive answers are only shown.")
    errors.raise_all(faults, where="infer")
    return is_dialogue


if __name__ == "__main__":
    command_line.run(main)
