"""Counts the attacks that the tests try, from the lists that they are made of.

`uv run python tests/attacks.py` prints the table of docs/reliability.md.
"""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple


class Row(NamedTuple):
    """A kind of attack, the test file that tries it, and how many cases its lists make."""

    kind: str
    module: str
    count: Callable[[ModuleType], int]


ROWS = [
    Row(
        "Settings of a model that import or call code, through every command and function",
        "test_trust",
        lambda m: len(m.TRAPS) + len(m.ENTRANCES),
    ),
    Row(
        "Exploding gin files: macros, objects and includes that double, megabytes, devices",
        "test_gin_files",
        lambda m: len(m.BOMBS),
    ),
    Row(
        "Obstacles in a run directory: links, pipes, folders and files",
        "test_run_directory",
        lambda m: len(m.IN_THE_WAY),
    ),
    Row(
        "Files and folders removed, replaced or linked elsewhere while a command writes them",
        "test_swaps",
        lambda m: m.COUNT,
    ),
    Row(
        "Names of run directories: brackets, stars, quotes, control characters, too long",
        "test_folders",
        lambda m: len(m.NAMES) + len(m.REFUSED),
    ),
    Row(
        "Index entries that point outside their folder, and invalid data positions",
        "test_untrusted_files",
        lambda m: len(m.OUTSIDE) + 2 * len(m.POSITIONS) + len(m.ROW_POSITIONS) + len(m.SKIPS),
    ),
    Row(
        "PyTorch files: code, overlapping views, storages of 10^12, programs, flipped bytes",
        "test_torch_files",
        lambda m: len(m.HOSTILE) + m.FLIPS * len(m.WHOLE),
    ),
    Row(
        "Files of arrays in a checkpoint: pipes, terabytes, pieces of 2 GB, Blosc, other formats",
        "test_checkpoint",
        lambda m: len(m.ARRAY_FILES),
    ),
    Row(
        "Images whose headers claim more pixels than fit into memory",
        "test_vision_images",
        lambda m: 2 * len(m.HUGE_IMAGES),
    ),
    Row(
        "Invalid names of environment variables, for TPU VMs and Kubernetes",
        "test_launch",
        lambda m: 2 * len(m.NO_NAMES),
    ),
]


def counts() -> Iterator[tuple[str, str, int]]:
    """Yields each kind of attack with its test file and the number of its cases."""
    for row in ROWS:
        yield row.kind, row.module, row.count(importlib.import_module(row.module))
    for kind, count in importlib.import_module("test_foreign_files").ATTACKS.items():
        yield kind, "test_foreign_files", count


def table() -> str:
    """Returns the table in Markdown."""
    found = list(counts())
    lines = ["| attack | cases | tests |", "| --- | ---: | --- |"]
    lines += [f"| {kind} | {count:,} | `tests/{module}.py` |" for kind, module, count in found]
    return "\n".join([*lines, f"| total | {sum(count for *_, count in found):,} | |"])


if __name__ == "__main__":
    importlib.import_module("conftest")  # Settings that must hold before JAX is imported.
    print(table())
