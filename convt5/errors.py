"""Errors that are the user's to fix: one clear message, no traceback, a documented exit code.

Every command line prints a `UserError` as its message alone and exits with `exit_code`.
"""

import difflib
import errno
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A setting, file or input that is wrong; the message says which, why, and what to change."""

    exit_code = 2


class TrainingError(UserError):
    """A run that was configured correctly but cannot go on, such as a loss that is not finite."""

    exit_code = 1


def of_full_disk(error: BaseException) -> TrainingError | None:
    """Returns what to tell of an error that came from a disk or quota without room, else None.

    Any write can meet it, and none of them can do more about it than say so.
    """
    if not isinstance(error, OSError) or not _means_full_disk(error):
        return None
    where = f" to {error.filename}" if error.filename else ""
    return TrainingError(
        f"nothing more can be written{where}: {error.strerror or error}. Make room on that disk "
        "(`df -h` shows them), then give the same command again; what was saved before is whole."
    )


def _means_full_disk(error: OSError) -> bool:
    if error.errno is None:
        # numpy knows no number for it.
        return "requested and" in str(error) and str(error).endswith("written")
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def suggest(name: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """Returns ` Did you mean a, b or c?` for the candidates nearest to `name`, or ``""``."""
    nearest = difflib.get_close_matches(name, list(candidates), n=limit, cutoff=0.6)
    if not nearest:
        return ""
    *rest, last = nearest
    return f" Did you mean {', '.join(rest) + ' or ' if rest else ''}{last}?"


def shortened(lines: Sequence[str], *, limit: int = 8) -> list[str]:
    """Returns the first lines, and one that counts the others."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return [*lines[:limit], *more]


def raise_all(faults: Iterable[str], *, where: str) -> None:
    """Raises one `UserError` that lists every fault found in `where`; does nothing without any."""
    faults = list(faults)
    if len(faults) == 1:
        raise UserError(f"{where}: {faults[0]}")
    if faults:
        raise UserError(
            f"{where} has {len(faults)} faults:\n" + "\n".join(f"- {f}" for f in faults)
        )
