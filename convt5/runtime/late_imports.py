"""Postpones imports of packages that TensorFlow and seqio import, but reading data does not need.

Keras imports scikit-learn, SciPy's statistics, pandas and matplotlib. Together with PyGlove, which
seqio asks about rates of mixtures, it takes two fifths of the time of importing these libraries.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence

_POSTPONED = ("keras", "tensorflow_text.python.keras", "h5py", "pyglove")


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Imports these packages later: when, inside or afterwards, something is read from them."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.end()
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for postponed modules, and forgets them when it ends."""

    def __init__(self):
        self._stand_ins: list[_StandIn] = []
        self._has_ended = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target=None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._has_ended or not _is_postponed(fullname):
            return None
        # The spec has the real places: TensorFlow makes `tensorflow.keras` from them.
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        stand_in = _StandIn(spec.name, self)
        self._stand_ins.append(stand_in)
        return stand_in

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def end(self) -> None:
        """Makes later imports find the modules themselves."""
        self._has_ended = True
        for stand_in in self._stand_ins:
            if sys.modules.get(stand_in.__name__) is stand_in:
                del sys.modules[stand_in.__name__]


class _StandIn(types.ModuleType):
    """A module that is imported when something is first read from it."""

    def __init__(self, name: str, finder: _Finder):
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._finder.end()
        return getattr(importlib.import_module(self.__name__), name)


def _is_postponed(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in _POSTPONED)
