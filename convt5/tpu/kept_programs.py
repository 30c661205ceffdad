"""Reports of compiled programs, kept in a file: each takes minutes, and none is made twice.

Pages of `docs/` show them between two marks, so that a table is written again where it stands.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from convt5 import errors

Program = TypeVar("Program")
"""A frozen dataclass of plain values, which says what is compiled."""

Report = Mapping[str, Any]
"""What is told of a program, or {"needed": bytes} of one that does not fit."""

_END = "<!-- end -->"


class KeptPrograms(Generic[Program]):
    """What is known of programs.

    Attributes:
        reports: by program, in the order in which they were made.
    """

    def __init__(self, path: pathlib.Path, program: Callable[..., Program]):
        """Reads what there is.

        Args:
            path: a file of JSON lines, which need not exist yet.
            program: makes a program of its fields.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        self.reports: dict[Program, Report] = {
            program(**record["program"]): record["report"] for record in records
        }

    def report(self, program: Program, make: Callable[[], Report]) -> Report:
        """Returns the report of a program; `make` compiles it where there is none."""
        if program not in self.reports:
            began = time.monotonic()
            report = self.reports[program] = make()
            record = {"program": dataclasses.asdict(cast(Any, program)), "report": report}
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            verdict = "does not fit" if "needed" in report else "fits"
            seconds = time.monotonic() - began
            print(f"{program}: {verdict}, after {seconds:.0f} s", file=sys.stderr, flush=True)
        return self.reports[program]


def with_tables(page: str, mark: str, text: str) -> str:
    """Returns a page with other tables between <!-- mark --> and <!-- end -->.

    Raises:
        UserError: the page does not hold both.
    """
    begin = f"<!-- {mark} -->"
    before, _, rest = page.partition(begin)
    _, end, after = rest.partition(_END)
    if not end:
        raise errors.UserError(f"--page must hold {begin} and {_END}, which tables stand between.")
    return f"{before}{begin}\n{text}\n{end}{after}"
