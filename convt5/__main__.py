"""Entry point of `convt5` and `python -m convt5`: lists the commands, and runs one by its name."""

import os
import runpy
import sys

import convt5
from convt5 import errors
from convt5.configuration import command_line

COMMANDS = {
    "train": "Pre-trains or fine-tunes a model, or resumes a run.",
    "eval": "Evaluates a trained model, or follows a run as it trains.",
    "infer": "Predicts for files, for lines from a pipe, or interactively.",
    "inspect": "Reports a model's layers, parameters, FLOPs, memory and receptive field.",
    "bench": "Times operators, training steps, decoding and data; compares other libraries.",
    "compare": "Compares runs in a table and a plot.",
    "sweep": "Trains the runs of a study: a grid over settings, models and seeds.",
    "cache": "Tokenises, corrupts and packs training data once, for faster runs.",
    "convert": "Imports models of other formats, and exports them.",
    "models": "Lists the models that come with convt5, with parameters and FLOPs.",
    "settings": "Lists every setting that gin files can bind, with type, default and meaning.",
    "vocabulary": "Trains a SentencePiece vocabulary on your text.",
}


def overview() -> str:
    """Returns the output of `convt5 --help`."""
    lines = (f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    return "\n".join(
        [
            f"convt5 {convt5.__version__}: encoder-decoders built from convolutions, in JAX.",
            "",
            "usage: convt5 COMMAND [flags]     (the same as python -m convt5.COMMAND [flags])",
            "",
            "commands:",
            *lines,
            "",
            "  convt5 COMMAND --help     shows the flags of a command, with examples.",
            "  convt5 --version          shows the version.",
            "",
            "to begin:",
            "  convt5 train --gin_file=gin/runs/quickstart.gin",
        ]
    )


def main() -> None:
    """Runs `convt5 COMMAND ...` as `python -m convt5.COMMAND ...`."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        working_directory = os.getcwd()
        if not sys.flags.safe_path and working_directory not in sys.path:
            # As with `python -m`, the working directory provides the user's own modules.
            sys.path.append(working_directory)
        del sys.argv[1]
        runpy.run_module(convt5.current_name(f"convt5.{name}"), run_name="__main__", alter_sys=True)
    command_line.run(lambda _: _overview(name))


def _overview(name: str) -> int:
    if name == "--version":
        print(convt5.__version__)
    elif name in ("--help", "-h", "help"):
        print(overview())
    else:
        raise errors.UserError(
            f"{name!r} is no command of convt5.{errors.suggest(name, COMMANDS)} "
            "convt5 --help lists them."
        )
    return 0


if __name__ == "__main__":
    main()
