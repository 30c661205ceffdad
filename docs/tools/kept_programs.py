"""Reports of compiled programs, kept in a file: each takes minutes, and none is made twice.

Pages of `docs/` show them between two marks, so that a table is written again where it stands.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TextIO, TypeVar, cast

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

        Raises:
            UserError: the file cannot be read, or a line of it is no report.
        """
        self._path = path
        self.reports: dict[Program, Report] = {}
        try:
            lines = path.read_text().splitlines() if path.exists() else []
        except OSError as error:
            raise errors.UserError(f"{path} cannot be read ({error.strerror}).") from error
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                self.reports[program(**record["program"])] = {**record["report"]}
            except (ValueError, KeyError, TypeError) as error:
                raise errors.UserError(
                    f"{path}, line {number} is no report of a program ({error!r}); remove the "
                    "line: the program is then compiled again."
                ) from error

    def report(self, program: Program, make: Callable[[], Report]) -> Report:
        """Returns the report of a program; `make` compiles it where there is none.

        Raises:
            UserError: the file cannot be written.
        """
        if program not in self.reports:
            began = time.monotonic()
            # Opened before minutes are spent on what could not be kept.
            with self._opened() as file:
                report = self.reports[program] = make()
                record = {"program": dataclasses.asdict(cast(Any, program)), "report": report}
                file.write(json.dumps(record) + "\n")
            verdict = "does not fit" if "needed" in report else "fits"
            seconds = time.monotonic() - began
            print(f"{program}: {verdict}, after {seconds:.0f} s", file=sys.stderr, flush=True)
        return self.reports[program]

    def _opened(self) -> TextIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("a")
        except OSError as error:
            raise errors.UserError(
                f"--output={self._path.parent} cannot be written ({error.strerror}); give a folder "
                "that can."
            ) from error


def write_tables(page: pathlib.Path, mark: str, text: str | None) -> None:
    """Writes other tables into a file, or only checks that it can take them.

    Args:
        page: the file, which is read again each time: hours lie between the check and the tables.
        mark: see `with_tables`.
        text: the tables; None writes nothing.

    Raises:
        UserError: it cannot be read or written, or does not hold both marks.
    """
    try:
        with page.open("r+") as file:
            written = with_tables(file.read(), mark, text or "")
        if text is not None:
            page.write_text(written)
    except OSError as error:
        raise errors.UserError(
            f"--page={page} cannot be read and written ({error.strerror}); name a page with "
            "places for tables, or leave it out."
        ) from error


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
