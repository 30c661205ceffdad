"""convt5: pretrain, fine-tune, evaluate and study encoder-decoders built from convolutions.

Importing the package loads nothing else. The model, operators, training step and decoding import
only JAX; data, tasks and evaluation need TensorFlow and seqio.
"""

import importlib
import importlib.util
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For editors; at run time, each is imported on first use.
    from convt5.errors import UserError as UserError
    from convt5.evaluation.predictor import Predictor as Predictor
    from convt5.evaluation.predictor import load_predictor as load_predictor
    from convt5.evaluation.run_settings import load_vocabulary as load_vocabulary
    from convt5.interchange.converting import save_model as save_model
    from convt5.interchange.loading import load_model as load_model
    from convt5.modeling.architecture import ConvT5Config as ConvT5Config
    from convt5.modeling.architecture import StackConfig as StackConfig
    from convt5.modeling.model import ConvT5 as ConvT5
    from convt5.vision.architecture import ViTConfig as ViTConfig
    from convt5.vision.model import ViT as ViT

_FOLDER = os.path.dirname(os.path.realpath(__file__))

_IS_COMMAND = sys.argv[:1] == ["-m"] or os.path.basename((sys.argv or [""])[0]) == "convt5"

if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until `command_line.run` takes over, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if _IS_COMMAND and os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    # The first process of a container never gets a signal for which it has no handler.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path:
    # `python -m convt5.NAME` searches the working directory first, where a `json.py` that came with
    # a model would be run. Moved to the end, it still provides the user's own modules.
    sys.path.append(sys.path.pop(0))

# In a checkout, `python convt5` and `uv run convt5` search this folder first, where `inspect` is
# another module. Modules of this folder are found only by their full names.
sys.path[:] = [path for path in sys.path if os.path.realpath(path) != _FOLDER]

__version__ = "0.1.0"

_LAZY = {
    "ConvT5": "convt5.modeling.model",
    "ConvT5Config": "convt5.modeling.architecture",
    "Predictor": "convt5.evaluation.predictor",
    "StackConfig": "convt5.modeling.architecture",
    "UserError": "convt5.errors",
    "ViT": "convt5.vision.model",
    "ViTConfig": "convt5.vision.architecture",
    "load_model": "convt5.interchange.loading",
    "load_predictor": "convt5.evaluation.predictor",
    "load_vocabulary": "convt5.evaluation.run_settings",
    "save_model": "convt5.interchange.converting",
}

__all__ = [*sorted(_LAZY), "__version__"]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_MOVED = {
    "architecture": "modeling.architecture",
    "batches": "data",
    "cached_data": "data.cached_data",
    "checkpoint": "checkpoints.checkpoint",
    "data.batch_fingerprint": "training.batch_fingerprint",
    "gin_config": "configuration.gin_config",
    "initialization": "interchange.initialization",
    "loading": "interchange.loading",
    "losses": "training.losses",
    "modeling.mixing": "modeling.attention",
    "models": "analysis.models",
    "optimizer": "training.optimizer",
    "samples": "generation.samples",
    "schedule": "training.schedule",
    "sentinels": "text.sentinels",
    "settings": "configuration.settings",
    "sharding": "modeling.sharding",
    "task_format": "text.task_format",
    "tasks.local_files": "runtime.local_files",
    "trainer": "training.trainer",
    "training.initialization": "interchange.initialization",
    "tree_paths": "modeling.tree_paths",
    "vocabulary": "data.vocabulary",
    "vocabulary_files": "text.vocabulary_files",
}
"""Earlier names of modules that programs, gin files and run directories may still use, and their
current names. convt5 itself does not use them."""


def current_name(module: str) -> str:
    """Returns the current name of a module, given any earlier name."""
    for old, new in _MOVED.items():
        if f"{module}.".startswith(f"convt5.{old}."):
            return f"convt5.{new}{module.removeprefix(f'convt5.{old}')}"
    return module


class _MovedModules:
    """Imports a moved module under its earlier name, as the same module object.

    A finder and a loader, without the classes of `importlib.abc`: with these Python 3.13 imports
    `inspect`, before the folder of this package, which has another one, is searched no more.
    """

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if current_name(fullname) == fullname:
            return None
        found = importlib.util.find_spec(current_name(fullname))
        loader: Any = self
        # `python -m` takes the origin for the name of the program.
        return ModuleSpec(fullname, loader, origin=None if found is None else found.origin)

    def get_code(self, fullname: str) -> CodeType | None:
        """Returns the code that `python -m` runs."""
        spec: Any = importlib.util.find_spec(current_name(fullname))
        return spec.loader.get_code(spec.name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(current_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_MovedModules())
