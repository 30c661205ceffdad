"""Writes docs/code.md, the first line of every module: `uv run python docs/tools/code_map.py`."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "code.md"

INTRODUCTION = """# Map of the code

The first line of every module, folder by folder; written by `uv run python docs/tools/code_map.py`.
Imports between modules point one way, which `tests/test_imports.py` checks.
"""


def first_line(path: pathlib.Path) -> str:
    """Returns the first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path} has no docstring; write one that says what the module holds.")
    return docstring.splitlines()[0].removesuffix(".").replace("|", r"\|")


def table(paths: list[pathlib.Path]) -> str:
    """Returns a table with a row for each module."""
    rows = [f"| `{path.relative_to(ROOT)}` | {first_line(path)} |" for path in paths]
    return "\n".join(["| module | what it holds |", "| --- | --- |", *rows])


def modules(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the modules of a folder in alphabetical order."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def page() -> str:
    """Returns the text of docs/code.md."""
    loose = modules(ROOT / "convt5")
    commands = [path for path in loose if '__name__ == "__main__"' in path.read_text()]
    sections = [
        ("Commands, `python -m convt5.<name>`", "", commands),
        ("`convt5/`", "", [path for path in loose if path not in commands]),
    ]
    packages = sorted((ROOT / "convt5").glob("*/**/__init__.py"))
    for init in [*packages, ROOT / "tasks" / "__init__.py"]:
        name = f"`{init.parent.relative_to(ROOT)}/`"
        sections.append((name, f"{first_line(init)}.\n\n", modules(init.parent)))
    parts = [f"## {name}\n\n{about}{table(paths)}\n" for name, about, paths in sections]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
