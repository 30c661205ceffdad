"""The command `convt5 settings`: lists every setting, with type, default and meaning."""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from convt5 import errors
from convt5.configuration import command_line
from convt5.runtime import quiet_imports

if TYPE_CHECKING:
    from convt5.configuration.catalogue import Configurable

COMMAND = command_line.Command(
    name="settings",
    summary="Lists every setting that gin files and --gin.NAME=VALUE can bind, with type, default "
    "and meaning.",
    needs_gin_file=False,
    reads_gin=False,
    examples=[
        ("list the classes and functions that have settings", ""),
        ("list the settings of one class", "--name=AdafactorConfig"),
        ("search settings by a word in name or description", "--search=dropout"),
        ("print JSON", "--json"),
    ],
    flags=[
        command_line.Flag(
            "name", "a class or function, such as AdafactorConfig; the flag may be left out."
        ),
        command_line.Flag("search", "a word in the name or the description of a setting."),
        command_line.Flag("json", "prints JSON.", {"action": "store_true"}),
    ],
)


def main(argv: Sequence[str]) -> int:
    named = [f"--name={word}" for word in argv[:1] if not word.startswith("-")]
    flags = command_line.parse(COMMAND, [*named, *argv[len(named) :]]).flags
    with quiet_imports.without_tensorflow_chatter():
        from convt5.configuration import catalogue

        every = catalogue.every_setting()
    if flags.name:
        every = _find_named(every, flags.name)
    if flags.search:
        every = _search(every, flags.search)
    if flags.json:
        json.dump([dataclasses.asdict(each) for each in every], sys.stdout, indent=2)
        print()
    elif flags.name or flags.search:
        print("\n\n".join(map(_details, every)))
    else:
        print(_overview(every))
    return 0


def _find_named(every: Sequence["Configurable"], name: str) -> list["Configurable"]:
    matches = [c for c in every if f".{c.module}.{c.name}".lower().endswith(f".{name}".lower())]
    if not matches:
        names = {text for c in every for text in (c.name, c.name.partition(".")[2])}
        raise errors.UserError(
            f"name={name!r} is no class or function with settings.{errors.suggest(name, names)} "
            "convt5 settings lists them."
        )
    return matches


def _search(every: Sequence["Configurable"], word: str) -> list["Configurable"]:
    """Returns the settings that contain a word, each with its class."""
    word = word.lower()
    matches = []
    for each in every:
        hits = tuple(p for p in each.parameters if word in f"{p.name} {p.meaning}".lower())
        if hits or word in each.meaning.lower():
            matches.append(dataclasses.replace(each, parameters=hits))
    if not matches:
        raise errors.UserError(f"search={word!r} is in no setting; try a shorter word.")
    return matches


def _overview(every: Sequence["Configurable"]) -> str:
    width = max(len(each.name) for each in every)
    lines, module = [], ""
    for each in every:
        if each.module != module:
            module = each.module
            package, _, last = module.rpartition(".")
            lines += ["", f"from {package} import {last}"]
        meaning = textwrap.shorten(each.meaning, 96, placeholder=" ...")
        lines.append(f"  {each.name:<{width}}  {meaning}")
    return "\n".join([*lines[1:], "", "the settings of one: convt5 settings --name=NAME"])


def _details(each: "Configurable") -> str:
    package, _, last = each.module.rpartition(".")
    lines = [f"{each.name}   (from {package} import {last})", *_wrap(each.meaning, 2)]
    for parameter in each.parameters:
        default = "required" if parameter.default is None else f"= {parameter.default}"
        lines += [f"  {parameter.name}: {parameter.type}   {default}"]
        lines += _wrap(parameter.meaning, 6)
    return "\n".join(lines)


def _wrap(text: str, indent: int) -> list[str]:
    blanks = " " * indent
    return textwrap.wrap(text, 92, initial_indent=blanks, subsequent_indent=blanks)


if __name__ == "__main__":
    command_line.run(main)
