"""A report as one HTML file that needs nothing else: curves to read off, tables to sort, samples.

Its data stands in it as JSON, and its own script alone may run, so that no text of a run is markup.
"""

import base64
import hashlib
import html
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from convt5.errors import printable
from convt5.reports.tables import Table
from convt5.runtime import atomic_files

_MOST_POINTS = 200_000  # Of a page: some megabytes.
_LEAST_OF_A_CURVE, _MOST_OF_A_CURVE = 50, 500
_MOST_LETTERS = 20_000  # Of a sample.
_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


class Curve(NamedTuple):
    """A metric of one run.

    Attributes:
        steps: ascending.
        spent: what training took until then, in the unit of the page; NaN where it is not known.
        values: NaN where they are not finite.
    """

    steps: Sequence[int]
    spent: Sequence[float]
    values: Sequence[float]


class Run(NamedTuple):
    """A run as the page shows it.

    Attributes:
        name: of it.
        curves: by metric.
        samples: texts by step.
    """

    name: str
    curves: Mapping[str, Curve]
    samples: Mapping[int, str] = {}


class Page(NamedTuple):
    """A report.

    Attributes:
        title: of the page.
        runs: whose curves are drawn.
        tables: below the curves, in this order.
        metric: shown first.
        axes: names of metrics with their units.
        falling: metrics of which less is better: their start is left out at first.
        clock: what training takes besides steps, such as time.
        unit: in which that is counted: "s", which is shown as hours and minutes, or any other.
        warnings: above all else.
    """

    title: str
    runs: Sequence[Run]
    tables: Sequence[Table]
    metric: str
    axes: Mapping[str, str]
    falling: Sequence[str]
    clock: str = "training time"
    unit: str = "s"
    warnings: Sequence[str] = ()


def write(path: pathlib.Path, page: Page) -> None:
    """Writes a page."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    script = template.rpartition("<script>")[2].partition("</script>")[0]
    fields = {
        "title": html.escape(printable(page.title)),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Within a script nothing is escaped but what could end it, or begin a comment.
        "data": json.dumps(_data(page), allow_nan=False).replace("<", "\\u003c"),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], template)
    atomic_files.replace_text(path, text)


def differing(settings: Mapping[str, Mapping[str, str]]) -> Table:
    """Returns a table of the settings that are not the same in all runs, a row for each run.

    Args:
        settings: by run, then by name.
    """
    names = dict.fromkeys(name for own in settings.values() for name in own)
    different = [n for n in names if len({own.get(n) for own in settings.values()}) > 1]
    rows = [[run, *(own.get(n, "") for n in different)] for run, own in settings.items()]
    if not different:
        notes = ["All settings that are known are the same."] if len(settings) > 1 else []
        return Table("Settings that differ" if notes else "", notes=notes)
    return Table("Settings that differ", ["run", *different], rows)


def _data(page: Page) -> dict[str, Any]:
    metrics = list(dict.fromkeys(name for run in page.runs for name in run.curves))
    count = sum(len(run.curves) for run in page.runs)
    most = min(_MOST_OF_A_CURVE, max(_LEAST_OF_A_CURVE, _MOST_POINTS // max(count, 1)))
    return {
        "metric": page.metric,
        "metrics": [page.metric, *(name for name in metrics if name != page.metric)]
        if metrics
        else [],
        "names": {name: printable(page.axes.get(name, name)) for name in metrics},
        "falling": list(page.falling),
        "clock": page.clock,
        "unit": page.unit,
        "warnings": list(page.warnings),
        "runs": [
            {
                "name": printable(run.name),
                "curves": {name: _points(curve, most) for name, curve in run.curves.items()},
                "samples": [[s, printable(t[:_MOST_LETTERS])] for s, t in run.samples.items()],
            }
            for run in page.runs
        ],
        "tables": [
            {
                "title": printable(table.title),
                "columns": [printable(name) for name in table.columns],
                "rows": [[printable(cell) for cell in row] for row in table.rows],
                "notes": [printable(note) for note in table.notes],
            }
            for table in page.tables
        ],
    }


def _points(curve: Curve, most: int) -> list[list[float | None]]:
    """Returns steps, what they took, and values of points of a curve, the last among them."""
    every = max(1, math.ceil(len(curve.steps) / most))
    kept = range((len(curve.steps) - 1) % every, len(curve.steps), every)
    return [[curve.steps[i], _finite(curve.spent[i]), _finite(curve.values[i])] for i in kept]


def _finite(value: float) -> float | None:
    """Seven digits are more than a picture shows."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
