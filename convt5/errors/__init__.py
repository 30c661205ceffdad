"""Errors that the user can fix: one clear message, no traceback, a documented exit code.

Every command prints a `UserError` as its message alone, and exits with its `exit_code`.
"""

import difflib
import errno
import itertools
import os
import re
from collections.abc import Iterable, Sequence

_MOST_FAULTS = 30  # Listed in one message.
_LONGEST_MESSAGE = 10_000
_MOST_CANDIDATES = 300
_LONGEST_NAME = 200
_CONTROL = re.compile(
    # All control characters except tabs and line feeds, which could move a terminal's cursor or
    # query it; characters that change the direction of text; and surrogates from invalid bytes.
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escapes characters that control a terminal, such as `\\x1b`.

    Names of files, settings, records and predictions may contain anything.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(ValueError):
    """An invalid setting, file or input; the message says which, why, and what to change."""

    exit_code = 2

    def __init__(self, message: object = "", *more: object):
        text = printable(str(message))
        if len(text) > _LONGEST_MESSAGE:
            text = f"{text[:_LONGEST_MESSAGE]}..."
        super().__init__(text, *more)


class TrainingError(UserError):
    """A valid run that cannot continue, for instance because its loss is not finite."""

    exit_code = 1


def of_full_disk(error: BaseException | None) -> TrainingError | None:
    """Returns the user error for a disk, quota or limit without room; None for other errors.

    Any write can fail this way, and the only remedy is to report it.
    """
    if error is None or not _means_full_disk(error):
        return None
    file = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1][:300]
    return TrainingError(
        f"nothing more can be written{f' to {file}' if file else ''}: {reason}. Free space on "
        "that disk (`df -h` shows disks), or raise the file size limit (`ulimit -f`), then "
        "repeat the command; everything saved before is intact."
    )


def lack_of_room(error: BaseException) -> str | None:
    """Returns the system's message about a disk without room; None for other errors.

    Some writers wrap it in long messages of their own.
    """
    if not _means_full_disk(error):
        return None
    numbers = [n for n in _NO_ROOM if n == getattr(error, "errno", None)] or _NO_ROOM
    return next((os.strerror(n) for n in numbers if os.strerror(n) in str(error)), None)


def of_memory(error: BaseException, *, about: str = "") -> UserError | None:
    """Returns the user error for a lack of memory; None for other errors.

    Args:
        error: what Python, JAX or TensorFlow raised.
        about: the sizes that need the memory, if they are known.
    """
    text = str(error)
    # On-chip memory ("vmem") depends on a kernel, not on settings.
    is_of_device = "RESOURCE_EXHAUSTED" in text and "vmem" not in text
    if not (is_of_device or isinstance(error, MemoryError)):
        return None
    reason = (text.strip().splitlines() or ["the system refuses more"])[0][:300]
    sizes = about or "batch sizes, lengths, numbers of results or the model"
    return TrainingError(f"there is too little memory ({reason}); lower {sizes}.")


def of_files(error: BaseException) -> UserError | None:
    """Returns the user error for an error about a path or a bucket; None for other errors.

    Missing paths are not included: whoever looks for one has a better message.
    """
    if full := of_full_disk(error):
        return full
    if url := _BUCKET.search(str(error)) if type(error).__module__ == _OF_STORES else None:
        return of_store(url[0], error)
    if isinstance(error, FileNotFoundError) and _NO_TEMPORARY in str(error):
        return TrainingError(
            f"{error.strerror}: none of these folders can be written. Free space there, raise the "
            "file size limit (`ulimit -f`), or set TMPDIR to a folder that can be written."
        )
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _OF_PATHS:
        return None
    return UserError(
        f"{os.fsdecode(error.filename)!r}: {error.strerror}; {_OF_PATHS[error.errno]}."
    )


def of_store(url: str, error: BaseException) -> TrainingError:
    """Returns the user error for an object store that refuses or does not answer."""
    return TrainingError(
        f"{url} cannot be used ({' '.join(str(error).split())[:300]}); check the name of the "
        "bucket, your permissions and the network, then repeat the command."
    )


_OF_PATHS = {
    errno.ENAMETOOLONG: "choose a shorter name; a suffix may be added to it",
    errno.ELOOP: "remove the links that lead to themselves, or choose another path",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a path that can be written",
    errno.ENOTDIR: "a part of the path is not a folder; choose another path",
    errno.EISDIR: "it must be a file; choose another path",
}


_BUCKET = re.compile(r"\b(gs|s3|az|hf)://[^\s'\"]+")
_OF_STORES = "tensorflow.python.framework.errors_impl"  # What TensorFlow raises for them.
_NO_TEMPORARY = "No usable temporary directory"  # An error of Python's tempfile.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _means_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    text = str(error)
    if isinstance(error, OSError) and "requested and" in text and text.endswith("written"):
        return True  # Numpy's error.
    # Writers in other languages raise their own errors.
    return any(os.strerror(number) in text for number in _NO_ROOM)


def suggest(name: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """Returns ` Did you mean a, b or c?` with the candidates nearest to `name`, or ``""``."""
    candidates = list(itertools.islice(candidates, _MOST_CANDIDATES + 1))
    if len(candidates) > _MOST_CANDIDATES or len(name) > _LONGEST_NAME:
        return ""  # Comparing such a long name takes too long.
    nearest = difflib.get_close_matches(name, candidates, n=limit, cutoff=0.6)
    if not nearest:
        return ""
    *rest, last = nearest
    return f" Did you mean {', '.join(rest) + ' or ' if rest else ''}{last}?"


def clip(value: object, *, limit: int = 60) -> str:
    """Returns the representation of a value, truncated: files may contain megabytes of it."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    except ValueError:  # Python writes no integer of more than 4,300 digits.
        text = "<more than 4,300 digits>"
    return text if len(text) <= limit else f"{text[:limit]}..."


def abbreviate(lines: Sequence[str], *, limit: int = 8) -> list[str]:
    """Returns the first lines, and one that counts the rest."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return [*lines[:limit], *more]


def raise_all(faults: Iterable[str], *, where: str) -> None:
    """Raises one `UserError` that lists every fault in `where`; does nothing if there is none."""
    # Each fault may take long, because suggestions are computed for it.
    faults = list(itertools.islice(faults, _MOST_FAULTS + 1))
    if len(faults) == 1:
        raise UserError(f"{where}: {faults[0]}")
    if faults:
        count = len(faults) if len(faults) <= _MOST_FAULTS else f"more than {_MOST_FAULTS}"
        lines = "\n".join(f"- {fault}" for fault in faults[:_MOST_FAULTS])
        raise UserError(f"{where} has {count} faults:\n{lines}")
