"""Keeps compiled programs by what they are made from, so that a later start need not trace them.

JAX finds a compiled program by its traced text, and tracing takes most of a warm start. Here it is
found by settings, code, versions, flags and devices. New settings or code whose traced text is that
of a kept program are noted as another way to find it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import pickle
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import monitoring
from jax.experimental import serialize_executable

import convt5
from convt5.errors import checks
from convt5.runtime import atomic_files, machine

_DESCRIBED = ("convt5", "jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose classes and functions compute what their names and fields say."""
_VARIABLES = ("JAX", "XLA", "LIBTPU", "TPU", "CUDA", "NVIDIA", "ROCM", "HIP", "TF_XLA", "NNX")
_VARIABLES += ("FLAX", "PJRT", "NCCL", "OMP")
_SENDER = "TPU_ML_PLATFORM"  # TensorFlow, once imported, names itself here to TPUs.
_PROGRAM, _MOST_KEPT = ".program", 32
_NOTE, _MOST_NOTES = ".note", 256
_DIGEST_BYTES = hashlib.sha256().digest_size


_FOUND_BY_JAX = "/jax/compilation_cache/cache_hits"
"""The event of JAX for a program that its own cache holds."""


@contextlib.contextmanager
def found_by_jax() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether JAX has found a program in its cache meanwhile.

    XLA on CPU writes such a program without its kernels, so that it must not be kept again.
    """
    events = []

    def listen(event: str, **_: Any) -> None:
        events.extend([event] if event == _FOUND_BY_JAX else [])

    monitoring.register_event_listener(listen)
    try:
        yield lambda: bool(events)
    finally:
        monitoring.unregister_event_listener(listen)


class Outputs(NamedTuple):
    """How the results of a program are stored: only what its caller cannot know.

    Attributes:
        unknown: returns plain containers from the results.
        complete: returns the results, given these containers.
    """

    unknown: Callable[[Any], Any]
    complete: Callable[[Any], Any]


class Program(NamedTuple):
    """A compiled program, and facts about it as JSON values."""

    call: Callable[..., Any]
    facts: Mapping[str, Any]


class Store:
    """The kept programs of a run.

    Attributes:
        folder: its files are run, as pickles and as machine code, so that only those are read that
            this user alone can write.
        identity: what the programs of the run are made from; see `identity`.
        devices: the devices that run them.
    """

    def __init__(self, folder: pathlib.Path, identity: str, devices: Sequence[Any]):
        self.folder, self.identity, self.devices = folder, identity, devices
        self._ahead: dict[pathlib.Path, concurrent.futures.Future[_Loaded]] = {}

    def load_ahead(self) -> None:
        """Starts to load all programs that these settings needed before, in the order of need."""
        executor = concurrent.futures.ThreadPoolExecutor(1, "convt5-programs")
        with contextlib.suppress(OSError):
            for note in sorted(self.folder.glob(f"{self.identity}-*{_NOTE}"), key=_age):
                with contextlib.suppress(OSError, ValueError):
                    path = self.noted(note)
                    self._ahead[path] = executor.submit(self._read, path)
        executor.shutdown(wait=False)

    def load(self, path: pathlib.Path) -> "_Loaded":
        """Returns a program; raises various errors if its file cannot be read or run."""
        ahead = self._ahead.pop(path, None)
        return self._read(path) if ahead is None else ahead.result()

    def noted(self, note: pathlib.Path) -> pathlib.Path:
        """Returns the file of the program that a note names."""
        return self.program(_read_own(note).decode("ascii"))

    def program(self, digest: str) -> pathlib.Path:
        return self.folder / f"{pathlib.PurePath(digest).name}{_PROGRAM}"

    def _read(self, path: pathlib.Path) -> "_Loaded":
        content = _read_own(path)
        if hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            raise ValueError(f"{path} is damaged")
        kept = pickle.loads(content[_DIGEST_BYTES:])
        call = serialize_executable.deserialize_and_load(
            kept["program"],
            _input_structure([0] * kept["num_inputs"]),
            jax.tree.structure([0] * kept["num_outputs"]),
            execution_devices=self.devices,
        )
        os.utime(path)  # The latest used are kept.
        return _Loaded(call, kept["outputs"], kept["facts"])


class _Loaded(NamedTuple):
    """A program of flat arguments and results; see `Kept.save`."""

    call: Callable[..., Sequence[Any]]
    outputs: Any
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where a program of a run is kept.

    Attributes:
        store: all programs of the run.
        name: the name of the program.
        outputs: how its results are stored.
    """

    store: Store
    name: str
    outputs: Outputs

    def load(self, args: Sequence[Any], lowered: Any = None) -> Program | None:
        """Returns the program for arguments like `args`, or None if none can be loaded.

        Args:
            args: the arguments; shapes, types and shardings suffice.
            lowered: the traced program, which finds one that other settings have made; None finds
                only those that these settings have made or found.
        """
        store = self.store
        try:
            path = (
                store.noted(self._note(args))
                if lowered is None
                else store.program(self._digest(lowered))
            )
            loaded = store.load(path)
            structure = jax.tree.structure(self.outputs.complete(loaded.outputs))
        except Exception:  # Of another version of the compiler, or damaged: compiled again.
            return None
        if lowered is not None:
            self._remember(args, path)

        def call(*args: Any) -> Any:
            return jax.tree.unflatten(structure, loaded.call(*jax.tree.leaves(args)))

        return Program(call, loaded.facts)

    def save(
        self, args: Sequence[Any], lowered: Any, compiled: Any, facts: Mapping[str, Any]
    ) -> None:
        """Keeps a program that JAX compiled; does nothing if it cannot be kept."""
        try:
            program, inputs, structure = serialize_executable.serialize(compiled)
            unknown = self._unknown_outputs(structure)
            completed = jax.tree.structure(self.outputs.complete(unknown))
            if inputs != _input_structure(args) or completed != structure:
                return
            content = pickle.dumps(
                {
                    "program": program,
                    "num_inputs": inputs.num_leaves,
                    "num_outputs": structure.num_leaves,
                    "outputs": unknown,
                    "facts": dict(facts),
                }
            )
        except Exception:  # Some programs, such as those with callbacks, cannot be written.
            return
        path = self.store.program(self._digest(lowered))
        with contextlib.suppress(OSError), atomic_files.replacing(path) as partial:
            partial.write_bytes(hashlib.sha256(content).digest() + content)
        self._remember(args, path)
        _remove_oldest(self.store.folder, _PROGRAM, _MOST_KEPT)

    def _remember(self, args: Sequence[Any], program: pathlib.Path) -> None:
        """Notes which program these settings need."""
        with contextlib.suppress(OSError), atomic_files.replacing(self._note(args)) as partial:
            partial.write_text(program.stem)
        _remove_oldest(self.store.folder, _NOTE, _MOST_NOTES)

    def _note(self, args: Sequence[Any]) -> pathlib.Path:
        # Other structures than dicts follow from the settings.
        names = [sorted(arg) if isinstance(arg, Mapping) else None for arg in args]
        leaves = jax.tree.leaves(args)
        shapes = [[list(leaf.shape), str(leaf.dtype), str(leaf.sharding)] for leaf in leaves]
        digest = _digest([self.name, names, shapes])
        return self.store.folder / f"{self.store.identity}-{digest}{_NOTE}"

    def _digest(self, lowered: Any) -> str:
        """Returns what tells programs apart: text, results, compiler and devices."""
        unknown = self._unknown_outputs(lowered.out_tree)
        devices = [device.id for device in self.store.devices]
        about = [lowered.as_text(), pickle.dumps(unknown).hex(), devices]
        return _digest([*about, _environment(), _machine()])

    def _unknown_outputs(self, structure: Any) -> Any:
        return self.outputs.unknown(jax.tree.unflatten(structure, range(structure.num_leaves)))


def _digest(about: Any) -> str:
    """Returns the digest of JSON values."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _read_own(path: pathlib.Path) -> bytes:
    """Returns the content of a file that, like its folder, no other user can have written.

    Raises:
        OSError: others can write it, it is a link, or it cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        if not (is_own(os.fstat(file.fileno())) and is_own(path.parent.stat())):
            raise PermissionError(f"others can write {path}")
        return file.read()


def is_own(about: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to the user, and nobody else can write it."""
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def identity(settings: Any) -> str | None:
    """Returns a value that is equal only if the same settings compile to the same programs.

    Returns None if that cannot be known: for settings with classes or functions of other packages
    than convt5, JAX, Flax, Optax and NumPy, and for runs of several processes.

    Args:
        settings: dataclasses, containers, numbers, texts, and functions known by name.
    """
    if jax.process_count() > 1:
        return None
    try:
        described = describe(settings)
    except _UnknownError:
        return None
    parts = [described, _environment(), _machine(), sorted(_code().items())]
    return _digest(parts)


class _UnknownError(Exception):
    """What a value computes cannot be told from its name and fields."""


def describe(value: Any) -> Any:
    """Returns a setting as JSON values."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes, complex):
        return [kind.__name__, repr(value)]
    if kind is dict:
        return ["dict", [[describe(key), describe(item)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return [_name(kind), [describe(item) for item in value]]
    if checks.is_description(value):
        fields = dataclasses.fields(value)
        return [_name(kind), [[f.name, describe(getattr(value, f.name))] for f in fields]]
    if isinstance(value, functools.partial):
        return ["partial", [describe(part) for part in (value.func, value.args, value.keywords)]]
    if isinstance(value, np.dtype | np.generic):
        return [_name(kind), repr(value)]
    return ["name", _name(value)]


def _name(thing: Any) -> str:
    """Returns the full name of a class or function of a known package."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name:
        raise _UnknownError(thing)
    is_known = module == "builtins" or module.partition(".")[0] in _DESCRIBED
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not is_known or found is not thing:
        raise _UnknownError(thing)
    return f"{module}.{name}"


def _environment() -> list[list[str]]:
    """Returns the variables and settings of JAX that may change what is compiled."""
    variables = [
        [name, value]
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_SENDER)
    ]
    names = sorted(jax.config.values)
    return [*sorted(variables), *([n, repr(getattr(jax.config, n, None))] for n in names)]


def _machine() -> list[Any]:
    devices = [[d.platform, d.device_kind, d.id] for d in jax.devices()]
    compiler = jax.devices()[0].client.platform_version
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _DESCRIBED}
    about = machine.describe()
    return [devices, compiler, versions, about, os.cpu_count(), _processor_features()]


def _processor_features() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _code() -> dict[str, str]:
    """Returns a digest of each file of convt5, and of each loaded file of no installed package.

    The latter may change what convt5 computes. Installed packages are told by their versions.
    """
    own = pathlib.Path(convt5.__file__).parent
    files = {str(path) for path in own.rglob("*.py")} | set(_loaded_files())
    return {file: hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest() for file in files}


def _loaded_files() -> Iterator[str]:
    paths = sysconfig.get_paths()
    installed = tuple(os.path.join(paths[name], "") for name in ("stdlib", "purelib", "platlib"))
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and not os.path.abspath(file).startswith(installed):
            yield os.path.abspath(file)


def _input_structure(args: Sequence[Any]) -> Any:
    return jax.tree.structure((tuple(args), {}))


def _age(path: pathlib.Path) -> float:
    return path.stat().st_mtime


def _remove_oldest(folder: pathlib.Path, suffix: str, most: int) -> None:
    with contextlib.suppress(OSError):
        kept = sorted(folder.glob(f"*{suffix}"), key=_age)
        for path in kept[:-most]:
            path.unlink(missing_ok=True)
