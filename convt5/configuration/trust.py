"""What a settings file may name: convt5's own settings, and modules that the user trusts.

Importing a module runs it, and a reference calls what it names. Files that came with a model are
therefore data: they may only name the settings listed here. The user's own gin files may name
anything, as a program may.
"""

import importlib
import importlib.util
import inspect
import pathlib
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from convt5 import errors
from convt5.configuration import gin_files
from convt5.configuration.gin_files import Import, Location
from convt5.configuration.gin_names import ResolvedReference, Setting, Target, flatten

FLAG = "trust"

FUNCTIONS = frozenset({"convt5.configuration.gin_config.folder", "convt5.vision.placement.rules"})
"""Functions beside those of `convt5.tasks` that `_makes_task` recognises."""

CLASSES = frozenset(
    f"convt5.tasks.{name}"
    for name in (
        "sources.EmbeddedTextSource",
        "sources.PreparedTfdsSource",
        "sources.TextFilesSource",
        "tables.TableSource",
    )
)
"""Classes beside descriptions: frozen dataclasses and named tuples, which only hold values."""

PROGRAMS = frozenset({"convt5.training.trainer.train"})
"""Functions that commands call: files may set their arguments, but not call them."""

_DEFINED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Types of objects that know the module of their definition; others belong where they are."""


class Untrusted(errors.UserError):
    """Raised if a file that came with a model names something that could run code.

    Args:
        message: the message for the user.
        missing: whether it only names modules that do not exist here.
    """

    def __init__(self, message: str, *, missing: bool = False):
        super().__init__(message)
        self.missing = missing


class Trust:
    """The modules besides convt5 that may run.

    Args:
        named: modules named by the user, with `--trust` or `trust=`.
        imports: imports of all files; those of the user's own files are trusted too.

    Raises:
        UserError: a name cannot be that of a module.
    """

    def __init__(self, named: Sequence[str], imports: Iterable[Import]):
        wrong = [name for name in named if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name)]
        if isinstance(named, str) or wrong:
            raise errors.UserError(
                f"{FLAG}={named if isinstance(named, str) else wrong[0]!r} must name a module, "
                f"such as --{FLAG}=my_tasks; in Python it is a list, {FLAG}=['my_tasks']."
            )
        self._modules = tuple(dict.fromkeys((*named, *named_by_own(imports))))

    def check_imports(self, imports: Iterable[Import]) -> None:
        """Raises `Untrusted` for imports that are not allowed; imports nothing."""
        refused = [
            s
            for s in imports
            if not (s.location.is_own or is_convt5(s.module) or self._trusts(s.module))
        ]
        if refused:
            modules = list(dict.fromkeys(s.module for s in refused))
            absent = [m for m in modules if _places(m) is None]
            lines = "\n".join(errors.abbreviate([f"- {s.location}: {s.text}" for s in refused]))
            them = "them" if len(modules) > 1 else "it"
            message = (
                "configuration: settings that came with a model may import only convt5, because "
                f"an import runs code:\n{lines}\nIf you trust {' and '.join(modules)}, name "
                f"{them}: --{FLAG}={','.join(modules)} ({FLAG}={modules!r} in Python), or "
                f"import {them} in a gin file of your own."
            )
            if absent:
                message += (
                    f" Here is no module {' and none of '.join(absent)}: install its package, or "
                    "name the folder that it lies in, PYTHONPATH=FOLDER before the command."
                )
            raise Untrusted(message, missing=absent == modules)
        for statement in imports:
            if not (statement.location.is_own or is_convt5(statement.module)):
                self._check_place(statement)

    def check_targets(self, settings: Iterable[Setting]) -> None:
        """Raises `Untrusted` for names in files of a model that are not settings.

        Looks at what they name without calling it. Its module is already imported.
        """
        refused = [
            fault
            for setting in settings
            if not setting.location.is_own
            for fault in self._refused(setting)
        ]
        if refused:
            raise Untrusted("configuration: " + "\n".join(errors.abbreviate(refused)))

    def _refused(self, setting: Setting) -> Iterator[str]:
        if setting.target is not None and not self._may_bind(setting.target):
            yield self._fault(setting.target, setting.location)
        for value in flatten(setting.value):
            if isinstance(value, ResolvedReference) and not self._may_call(value.target):
                yield self._fault(value.target, setting.location)

    def _fault(self, target: Target, location: Location) -> str:
        value = _found(target)
        module = getattr(value, "__module__", None) if isinstance(value, _DEFINED) else None
        module = module or target.module
        name = f"{target} ({module})" if module != target.module else str(target)
        return (
            f"{location}: {name} is not a setting of convt5, and settings that came with a "
            "model may refer to no other code. If you trust it, name its module: "
            f"--{FLAG}={module} ({FLAG}=[{module!r}] in Python)."
        )

    def _may_bind(self, target: Target) -> bool:
        return _full_name(_found(target)) in PROGRAMS or self._may_call(target)

    def _may_call(self, target: Target) -> bool:
        if is_convt5(target.module) and not self._trusts(target.module):
            return is_setting(_found(target))
        value = _found(target, within={name.partition(".")[0] for name in self._modules})
        if value is None or not isinstance(value, _DEFINED):
            return value is not None
        return is_setting(value) or self._trusts(value.__module__ or "", whole_package=True)

    def _trusts(self, module: str, *, whole_package: bool = False) -> bool:
        """Returns whether a module is a trusted one or inside one.

        With `whole_package`, also what these imported from elsewhere in their package.
        """
        top = module.partition(".")[0]
        return any(
            f"{module}.".startswith(f"{name}.")
            or (whole_package and not is_convt5(module) and name.partition(".")[0] == top)
            for name in self._modules
        )

    def _check_place(self, statement: Import) -> None:
        """Refuses a module with a trusted name that came with the model."""
        for place in _places(statement.module) or ():
            if model := gin_files.model_folder(pathlib.Path(place).parent):
                raise Untrusted(
                    f"{statement.location}: {statement.text}: the module is found at {place}, "
                    f"in the folder of a model ({model}), so it may have come with that model. "
                    "If it is yours, move it to another folder and set PYTHONPATH=FOLDER for "
                    "the command."
                )


def named_by_own(statements: Iterable[Any]) -> list[str]:
    """Returns the modules besides convt5's that the user's own gin files import."""
    imports = (s for s in statements if isinstance(s, Import))
    return [s.module for s in imports if s.location.is_own and not is_convt5(s.module)]


def is_convt5(module: str) -> bool:
    """Returns whether a module is convt5's, or the marker at the start of gin files."""
    return module.partition(".")[0] == "convt5" or module == gin_files.DYNAMIC_REGISTRATION


def _places(module: str) -> list[str] | None:
    """Returns the paths of a module's package, without importing; None if it does not exist."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # It was created in this process, without a path.
        return []
    if spec is None:
        return None
    paths = [*(spec.submodule_search_locations or ()), spec.origin]
    return [place for place in paths if place]


def is_setting(value: Any) -> bool:
    """Returns whether gin files may set this: a description of convt5, or a listed name."""
    if not is_convt5(getattr(value, "__module__", None) or ""):
        return False
    if isinstance(value, type):
        parameters = inspect.getattr_static(value, "__dataclass_params__", None)
        holds = parameters is not None and parameters.frozen
        holds = holds or (issubclass(value, tuple) and hasattr(value, "_fields"))
        return holds or _full_name(value) in CLASSES
    return _full_name(value) in FUNCTIONS or _makes_task(value)


def _makes_task(value: Any) -> bool:
    """Returns whether this is a metric, or returns a task, a mixture or a vocabulary."""
    is_public = isinstance(value, types.FunctionType) and not value.__name__.startswith("_")
    if not (is_public and value.__module__.startswith("convt5.tasks.")):
        return False
    returned = value.__annotations__.get("return")
    bases = returned.__mro__ if isinstance(returned, type) else ()
    is_seqio = {base.__name__ for base in bases if base.__module__.startswith("seqio.")}
    return bool(is_seqio & {"Task", "Mixture", "Vocabulary"}) or returned == dict[str, float]


def _full_name(value: Any) -> str:
    """Returns the name under which something was defined."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _found(target: Target, within: Iterable[str] = ()) -> Any:
    """Returns the object that a target names; None if missing or reached through other modules.

    Modules import others, so `module.os.system` does not belong to the module.

    Args:
        target: the name.
        within: packages whose modules may be passed through.
    """
    value: Any = importlib.import_module(target.module)
    *passed, last = target.attributes.split(".")
    for name in passed:
        value = inspect.getattr_static(value, name, None)
        is_module = inspect.ismodule(value)
        if not (isinstance(value, type) or is_module):
            return None
        if is_module and value.__name__.partition(".")[0] not in within:
            return None
    return getattr(value, last, None)
