"""Test settings that must hold before jax is imported, and the references beside the project."""

import ast
import dataclasses
import functools
import gc
import importlib.util
import itertools
import os
import pathlib
import re
import sys
from collections.abc import Collection

import commands

# Most of the time of these tests is spent compiling the same small programs: parallel workers,
# commands started by tests, later runs and other checkouts find them here.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(commands.compiled_programs())
commands.settle()
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    commands.keep_to_one_core(int(worker.removeprefix("gw")))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        commands.QUICK_COMPILATION,
    ]
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Other workers and commands that tests start find compiled modules and rewritten tests beside them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The smallest as well: reading one takes 2 ms, compiling it again 10 to 20.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Where in the source each operation comes from takes a twelfth of a step's compilation to keep.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Flax's announced defaults: modules are trees, never graphs (STYLE: NNX dialect, rule 8).
os.environ["NNX_GRAPH_MODE"] = "false"
os.environ["NNX_GRAPH_UPDATES"] = "false"

# PyTorch's compiler crashes where it is loaded behind the others.
if importlib.util.find_spec("triton"):
    importlib.import_module("triton")

import jaxtyping  # noqa: E402
from jaxtyping import _import_hook  # noqa: E402


class ShapedFunctions(_import_hook.JaxtypingTransformer):
    """Wraps the functions whose annotations state a shape, such as `Float[Array, "batch length"]`.

    Other annotations are left to pyright. Wrapping takes milliseconds, in closures at every call of
    the function that defines them, and slows every call.
    """

    def visit_Module(self, node):  # noqa: N802
        assigned = [x for x in node.body if isinstance(x, ast.Assign) and states_shape(x.value)]
        self.aliases = {ast.unparse(target) for x in assigned for target in x.targets}
        return super().visit_Module(node)

    def visit_FunctionDef(self, node):  # noqa: N802
        arguments = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]
        annotations = filter(None, [node.returns, *(x.annotation for x in arguments)])
        if any(states_shape(x, self.aliases) for x in annotations):
            return super().visit_FunctionDef(node)
        self.generic_visit(node)
        return node


def states_shape(annotation: ast.expr, aliases: Collection[str] = ()) -> bool:
    """Returns whether an annotation holds an alias, or a type with a text as a parameter."""
    nodes = list(ast.walk(annotation))
    lists = [x.slice.elts for x in nodes if isinstance(getattr(x, "slice", None), ast.Tuple)]
    parameters = [x.value for elements in lists for x in elements if isinstance(x, ast.Constant)]
    is_alias = any(isinstance(x, ast.Name) and x.id in aliases for x in nodes)
    return is_alias or any(isinstance(value, str) for value in parameters)


_import_hook.JaxtypingTransformer = ShapedFunctions

# Array shapes and dtypes in annotations are checked while tests run; training pays nothing.
jaxtyping.install_import_hook(
    [
        "convt5.ops",
        "convt5.modeling.canon",
        "convt5.modeling.layers",
        "convt5.modeling.attention",
        "convt5.modeling.mixers.base",
        "convt5.modeling.mixers.convolution",
        "convt5.modeling.mixers.depthwise",
        "convt5.modeling.mixers.lightweight",
        "convt5.modeling.mixers.dynamic",
        "convt5.modeling.mixers.attention",
        "convt5.modeling.blocks",
        "convt5.modeling.stem",
        "convt5.modeling.model",
        "convt5.generation.decoding",
        "convt5.generation.search",
        "convt5.generation.mesh_tf_search",
        "convt5.vision.blocks",
        "convt5.vision.model",
        "convt5.vision.stems",
    ],
    "beartype.beartype",
)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from convt5.runtime import late_imports  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_custom_prng", True)

# `settled_heap` collects all garbage once a file.
gc.set_threshold(200_000, 50, 1000)


def share_contexts(make, num_programs: int = 200):
    """Returns `make`, called anew only for every so many programs that JAX lowers.

    A context of MLIR takes 4 ms to make and 2 ms to free, a third of what lowering and compiling
    an operation take. It keeps the constants of its programs, so that none serves for ever.
    """
    calls, kept = itertools.count(), []

    def context():
        if next(calls) % num_programs == 0:
            kept[:] = [make()]
        return kept[0]

    return context


mlir.make_ir_context = share_contexts(mlir.make_ir_context)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leaves packages out that TensorFlow imports and no test needs, such as Keras."""
    with late_imports.postponed():
        return (yield)


_MARKS = {
    "slow": ("mark.slow",),
    "nightly": ("mark.nightly", "quick("),
    "gpu": ("mark.gpu",),
    "tpu": ("mark.tpu",),
}
"""How tests get the marks that `-m` selects."""


@functools.cache
def names_mark(path: pathlib.Path, mark: str) -> bool:
    """Returns whether a file names a mark, so that some of its tests may have it."""
    text = path.read_text()
    return any(form in text for form in _MARKS[mark])


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves files out that have no test with the mark that `-m` begins with.

    Importing all takes ten seconds, in each worker. Files that are named are not left out.
    """
    first, *others = config.option.markexpr.split()[:2] or [""]
    named = (os.path.abspath(argument.partition("::")[0]) for argument in config.args)
    if first not in _MARKS or others == ["or"] or str(collection_path) in named:
        return None
    return (collection_path.suffix == ".py" and not names_mark(collection_path, first)) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in _MARKS:
        has_mark = item.get_closest_marker(mark) is not None
        assert not has_mark or names_mark(item.path, mark), (
            f"-m {mark} would not find {item.nodeid}"
        )


SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def settled_heap():
    """Keeps collections of garbage quick: what is there when a file begins stays.

    Looking through all imported modules and jax's caches takes seconds, and every read of a
    damaged checkpoint does.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The recorded reference outputs, which lie beside the project's root and never in it."""
    path = SHARED / "golden"
    if not path.is_dir():
        pytest.skip("reference numbers are absent: no ../shared/golden beside the project")
    return path


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """Real data of the paper's tasks, which lies beside the project's root and never in it."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip("real data is absent: no ../shared/data beside the project")
    return path


@pytest.fixture
def x64():
    """Computes in float64 for the duration of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """Shapes as users give them: nothing but the functions themselves looks at them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The folder where the files of gs://bucket and the like lie, for epath and for orbax."""
    from etils.epath import backend, gpath
    from orbax.checkpoint._src.path import gcs_utils

    def here(path):
        return re.sub(r"^\w+:/", str(tmp_path), str(path))

    class Store:
        def __getattr__(self, name):
            act = getattr(backend.os_backend, name)
            return lambda *paths, **settings: act(*map(here, paths), **settings)

    store, disk = Store(), backend.os_backend
    backends = property(lambda path: store if path._uri_scheme else disk)
    monkeypatch.setattr(gpath._GPath, "_backend", backends)
    monkeypatch.setattr(
        gcs_utils, "get_kvstore_for_gcs", lambda url: {"driver": "file", "path": here(url)}
    )
    return tmp_path / "bucket"


@pytest.fixture
def shared_steps(monkeypatch):
    """Compiles the step of runs with equal settings once: for tests of what surrounds the step.

    Not for tests in which something else than settings changes what a step computes.
    """
    trainer = importlib.import_module("convt5.training.trainer")
    compilation = importlib.import_module("convt5.training.compilation")
    train_step = importlib.import_module("convt5.training.train_step")
    make_plan, compile_step = trainer.make_plan, compilation.compile_step

    def plan_once(run, **sizes):
        settings = [getattr(run, field.name) for field in dataclasses.fields(train_step.StepConfig)]
        key = _key([*settings, *sizes.items()])
        if key not in _PLANS:
            _PLANS[key] = make_plan(run, **sizes)
        return _PLANS[key]

    def compile_once(jitted, *args, kept=None):
        del kept
        leaves, structure = jax.tree.flatten(args)
        key = (jitted, structure, *((x.shape, x.dtype, x.sharding) for x in leaves))
        if key not in _STEPS:
            _STEPS[key] = compile_step(jitted, *args)
        return _STEPS[key]

    monkeypatch.setattr(trainer, "make_plan", plan_once)
    monkeypatch.setattr(compilation, "compile_step", compile_once)


_PLANS: dict = {}
_STEPS: dict = {}


def _key(value):
    """Returns settings as something hashable."""
    if isinstance(value, dict):
        value = tuple(value.items())
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(scope="session")
def libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is absent: it comes with the extra tpu, on Linux")


@pytest.fixture
def compiler(libtpu):
    """The TPU compiler without a cache: programs for absent devices cannot be read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
