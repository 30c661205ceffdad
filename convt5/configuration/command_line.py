"""The command line of all commands: `--gin_file`, `--gin.NAME=VALUE`, `--help`, exit codes.

Imports nothing heavy, so that help and usage errors are fast.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import itertools
import os
import pathlib
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from convt5 import errors
from convt5.runtime import (
    absent_accelerators,
    ctrl_c,
    host_memory,
    standard_streams,
    terminal,
    xla_flags,
)
from convt5.runtime.flags import Flag

_GIN_HELP = """\
configuration:
  --gin_file=FILE        a gin file; may be repeated, and later files override earlier
                         ones. Paths are relative to the working directory or to the
                         installed package. A file of gin/models replaces the model that
                         a run file includes.
  --gin.NAME=VALUE       sets a macro (--gin.NUM_STEPS=100) or a parameter
                         (--gin.architecture.ConvT5Config.dropout_rate=0.1,
                         --gin.encoder/architecture.StackConfig.kernel_size=9).
                         Strings need no quotes: --gin.RUN_DIR=/tmp/run. May be repeated.
  --trust=MODULE         a module, such as my_tasks, that the settings of a run may import,
                         or that defines the mixing of an exported model. By default,
                         gin files that came with a model may import only convt5,
                         because an import runs code; your own gin files may import
                         anything. May be repeated, or several with commas.
"""

_EXIT_HELP = """\
exit code:
  0 success, 1 a failed run, 2 a usage or configuration error."""

_COLLECTIONS = (50_000, 20, 50)
"""New objects per collection of garbage, and collections per one of older objects."""


TRUST_FLAG = Flag(
    "trust",
    "a module that the settings of a run may import, such as my_tasks, or that defines the "
    "mixing of the model; may be repeated.",
    {"action": "append"},
)
"""Flags of commands without gin settings that may read those of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command and its help.

    Attributes:
        name: run as `python -m convt5.<name>`, or as `python <name>` if it is a file.
        summary: one or two sentences.
        examples: pairs of a comment and the arguments after `python -m convt5.<name>`.
        flags: flags of this command.
        needs_gin_file: whether `--gin_file` is required.
        reads_gin: whether the command accepts gin settings, and trusted modules for them.
    """

    name: str
    summary: str
    examples: Sequence[tuple[str, str]]
    flags: Sequence[Flag] = ()
    needs_gin_file: bool = True
    reads_gin: bool = True

    @property
    def program(self) -> str:
        is_file = self.name.endswith(".py")
        return f"python {self.name}" if is_file else f"python -m convt5.{self.name}"

    def help(self) -> str:
        """Returns the text of `--help`."""
        flags = "".join(_flag_help(flag) for flag in self.flags)
        settings = "[--gin_file=FILE ...] [--gin.NAME=VALUE ...] "
        if self.needs_gin_file:
            settings = f"--gin_file=FILE {settings}"
        examples = "\n".join(
            f"  # {comment}\n  {self.program} {' '.join(arguments.split())}"
            for comment, arguments in self.examples
        )
        return "\n".join(
            [
                f"usage: {self.program} {settings if self.reads_gin else ''}[flags]",
                "",
                textwrap.fill(self.summary, 88),
                "",
                *([_GIN_HELP] if self.reads_gin else []),
                f"flags:\n{flags}  -h, --help             shows this and exits.\n",
                f"examples:\n{examples}\n",
                _EXIT_HELP,
            ]
        )


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        gin_files: gin files as given.
        gin_bindings: bindings as NAME=VALUE.
        trust: modules that gin files of a model may name.
        flags: flags of the command.
    """

    gin_files: tuple[str, ...]
    gin_bindings: tuple[str, ...]
    trust: tuple[str, ...]
    flags: argparse.Namespace

    def settings(self) -> list[str]:
        """Returns the flags that pass these settings to another command."""
        return [
            *(f"--gin_file={name}" for name in self.gin_files),
            *(f"--gin.{binding}" for binding in self.gin_bindings),
            *(f"--trust={module}" for module in self.trust),
        ]


def path(text: str) -> pathlib.Path:
    """Returns the path given by a flag, expanding `~`, which shells do not after `--flag=`."""
    return pathlib.Path(os.path.expanduser(text))


def parse(command: Command, argv: Sequence[str]) -> Arguments:
    """Parses arguments; `--help` prints and exits with 0.

    Raises:
        UserError: an unknown flag (the message names similar ones), a flag without its value, or a
            missing `--gin_file`.
    """
    bindings, rest = _split_bindings(command, argv)
    parser = _Parser(command)
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE")
    if command.reads_gin:
        parser.add_argument("--trust", action="append", metavar="MODULE")
    parser.add_argument("-h", "--help", action=_Help, nargs=0, text=command.help)
    for flag in command.flags:
        parser.add_argument(f"--{flag.name}", **flag.options)
    check_filled(parser, rest, [flag.name for flag in command.flags])
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        known = ["gin_file", "help", "gin.NAME=VALUE", *(flag.name for flag in command.flags)]
        known += ["trust"] if command.reads_gin else []
        parser.error(_unknown(unknown[0], known))
    trusted = getattr(parsed, "trust", None) or ()
    trust = tuple(name.strip() for names in trusted for name in names.split(","))
    arguments = Arguments(tuple(parsed.gin_file), bindings, trust, parsed)
    if not command.reads_gin and (arguments.gin_files or bindings):
        parser.error(f"{arguments.settings()[0]}: {command.name} takes no gin settings")
    if command.needs_gin_file and not parsed.gin_file:
        example = command.examples[0][1]
        parser.error(f"--gin_file is missing: give at least one, for example {example}.")
    return arguments


def check_filled(
    parser: argparse.ArgumentParser, argv: Sequence[str], names: Iterable[str]
) -> None:
    """Reports an error of a parser for a flag without a value, as of a shell's unset variable."""
    for name in (f"--{name}" for name in names):
        if f"{name}=" in argv or (name, "") in itertools.pairwise(argv):
            parser.error(f"{name} is empty; give it a value, or leave it out.")


def run(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Calls `main(arguments)` and exits with its result, or with one message and no traceback.

    A `UserError` is printed as its message, and its `exit_code` is the exit code. So are file
    system errors about a path, and devices that JAX cannot use. Any other exception is a bug and
    keeps its traceback.
    """
    standard_streams.open_all()
    standard_streams.tolerate_closed_stderr()
    _print_any_text()
    terminal.protect()
    _format_warnings()
    with ctrl_c.CtrlC() as interruption:
        code = _code(main, interruption)
    _drop_what_cannot_be_written()
    raise SystemExit(code)


def _code(
    main: Callable[[Sequence[str]], int | None], interruption: ctrl_c.CtrlC
) -> int | str | None:
    """Calls a command; prints its error, and returns its exit code."""
    try:
        code = _result(main)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _tell("interrupted")
        return ctrl_c.EXIT_CODE
    except BrokenPipeError:
        # The reader of a pipe, such as `| head`, has ended.
        return 0
    except Exception as error:
        known = _known(error)
        if known is None and interruption.received:
            _tell("interrupted")
            return ctrl_c.EXIT_CODE
        if known is None:
            raise
        # A run that was asked to stop is not an error.
        _tell(str(known) if known.exit_code >= 128 else f"error: {known}")
        return 1 if errors.of_full_disk(known.__cause__) else known.exit_code


def _result(main: Callable[[Sequence[str]], int | None]) -> int | str | None:
    xla_flags.check()
    absent_accelerators.leave_out()
    host_memory.keep_freed()
    # Imports and traces make millions of objects that stay: with Python's thresholds, looking for
    # garbage among them takes a fifth of a start.
    gc.set_threshold(*_COLLECTIONS)
    try:
        return main(sys.argv[1:])
    except SystemExit as ended:  # From --help.
        return ended.code


def _known(error: Exception) -> errors.UserError | None:
    """Returns the user error for an exception; None for a bug."""
    if isinstance(error, errors.UserError):
        return error
    of_machine = errors.of_files(error) or errors.of_memory(error)
    return of_machine or absent_accelerators.of_devices(error)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # The exit code is still correct.
        print(text, file=sys.stderr)
        sys.stderr.flush()


def _format_warnings() -> None:
    """Shows warnings of convt5 like its errors; others tell their place in the code."""
    package, usual = os.path.dirname(errors.__path__[0]), warnings.formatwarning

    def formatted(message, category, filename, lineno, line=None) -> str:
        if category is UserWarning and filename.startswith(package):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = formatted


def _drop_what_cannot_be_written() -> None:
    """Prevents Python from flushing unwritable standard output again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_any_text() -> None:
    """Makes files and pipes UTF-8, because texts may have characters that the locale lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = sys.stdout.encoding if sys.stdout.isatty() else "utf-8"
        # Line-buffered, for readers of a pipe or log.
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace", line_buffering=True)


class _Help(argparse.Action):
    """Shows the help immediately, before missing flags are reported."""

    def __init__(self, *args, text: Callable[[], str], **options):
        super().__init__(*args, **options)
        self._text = text

    def __call__(self, *_) -> NoReturn:
        print(self._text())
        raise SystemExit(0)


class _Parser(argparse.ArgumentParser):
    """Raises errors where argparse would print its usage and exit."""

    def __init__(self, command: Command):
        super().__init__(prog=command.program, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        text = message if message.endswith((".", "?")) else f"{message}."
        raise errors.UserError(f"{text} See {self.prog} --help.")


def _split_bindings(command: Command, argv: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Extracts `--gin.NAME=VALUE` and `--gin.NAME VALUE` from the arguments."""
    bindings, rest, arguments = [], [], iter(argv)
    for argument in arguments:
        if not argument.startswith("--gin."):
            rest.append(argument)
            continue
        binding = argument.removeprefix("--gin.")
        if "=" not in binding:
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                _Parser(command).error(f"{argument} has no value; write {argument}=VALUE")
            binding = f"{binding}={value}"
        bindings.append(binding)
    return tuple(bindings), rest


def _unknown(argument: str, known: Sequence[str]) -> str:
    if not argument.startswith("-"):
        return (
            f"unexpected argument {argument!r}: every argument is a flag, such as --gin_file=FILE"
        )
    name = argument.lstrip("-").partition("=")[0]
    hint = errors.suggest(name, known)
    for candidate in known:
        hint = hint.replace(f" {candidate}", f" --{candidate}")
    if not hint and name.isupper():
        hint = f" Did you mean --gin.{name}?"
    return f"unknown flag {argument.partition('=')[0]}.{hint}"


def _flag_help(flag: Flag) -> str:
    value = "" if flag.options.get("action") == "store_true" else f"={flag.name[:1].upper()}"
    first, *more = textwrap.wrap(flag.help, 64)
    head = f"  --{flag.name}{value}"
    lines = [f"{head:<25}{first}" if len(head) < 25 else f"{head}\n{'':25}{first}"]
    return "\n".join([*lines, *(f"{'':25}{line}" for line in more)]) + "\n"
