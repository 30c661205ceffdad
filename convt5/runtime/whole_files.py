"""Files that appear under their name only when complete."""

import contextlib
import pathlib
from collections.abc import Iterator

from etils import epath

AnyPath = pathlib.Path | epath.Path


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[AnyPath]:
    """Gives a file to write, which takes the place of `path` unless that fails or is killed."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.replace(path)
