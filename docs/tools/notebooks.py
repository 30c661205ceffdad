"""Runs notebooks in this process, and turns them into pages of the site.

`python docs/tools/notebooks.py docs/quickstart.ipynb` runs one and keeps its outputs in the file.
"""

import base64
import contextlib
import io
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

Notebook = dict[str, Any]


def read(path: pathlib.Path) -> Notebook:
    """Returns the notebook in a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: pathlib.Path, notebook: Notebook) -> None:
    """Writes a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def execute(notebook: Notebook, **settings: Any) -> dict[str, Any]:
    """Runs the code of all cells in their order, and fills in their outputs.

    Args:
        notebook: the notebook; its cells get what they print, and their figures.
        settings: values of variables that a cell tagged "parameters" sets, to use in their stead.

    Returns:
        The variables after the last cell.
    """
    variables: dict[str, Any] = {}
    for number, cell in enumerate(_code_cells(notebook), start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), variables)
        if "parameters" in cell["metadata"].get("tags", ()):
            variables |= settings
        lines = printed.getvalue().splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"] = [*([stream] if lines else []), *_figures()]
        cell["execution_count"] = number
    return variables


def markdown(notebook: Notebook) -> str:
    """Returns a notebook as a page: its text, its code, and their outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                image = "".join(output["data"]["image/png"].split())
                parts.append(f"![figure](data:image/png;base64,{image})")
    return "\n\n".join(parts) + "\n"


def _code_cells(notebook: Notebook) -> Iterator[dict[str, Any]]:
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def _figures() -> list[dict[str, Any]]:
    """Returns the open figures of Matplotlib as outputs, and closes them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(image.getvalue()).decode() + "\n"}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return found


def main(*paths: str) -> None:
    for path in map(pathlib.Path, paths):
        notebook = read(path)
        execute(notebook)
        write(path, notebook)


if __name__ == "__main__":
    main(*sys.argv[1:])
