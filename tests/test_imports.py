"""Imports point one way, and the model runs on hosts that have neither TensorFlow nor seqio."""

import ast
import pathlib
import sys
import tomllib

import commands
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "convt5").rglob("*.py")) + sorted((ROOT / "tasks").rglob("*.py"))

# A module may import only what stands before it here; modules of one row may import each other.
LAYERS = [
    ["errors", "ops"],
    ["architecture"],
    ["modeling.layers"],
    ["modeling.mixing"],
    ["modeling.blocks"],
    ["modeling.model"],
    ["trainer"],
    ["train"],
]
HEAVY = {"tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "t5", "clu"}


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


RANK = {name: i for i, row in enumerate(LAYERS) for name in row}


def rank(name: str) -> int:
    """The row of a module of convt5, or of what is in it; -1 where no row names it."""
    parts = name.split(".")[1:]
    return max(RANK.get(".".join(parts[:count]), -1) for count in (1, 2))


RANKED = [path for path in SOURCES if rank(module_name(path)) >= 0]


@pytest.mark.parametrize("path", RANKED, ids=module_name)
def test_imports_point_from_high_level_to_low(path):
    statements = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
    used = {f"{node.module}.{alias.name}" for node in statements for alias in node.names}
    convt5 = {name for name in used if name.startswith("convt5.")}
    assert {name for name in convt5 if rank(name) > rank(module_name(path))} == set()


def test_a_module_that_imports_what_stands_above_it_is_found():
    assert rank("convt5.modeling.layers.Dense") == rank("convt5.modeling.layers")
    assert rank("convt5.errors.UserError") < rank("convt5.modeling.mixing") < rank("convt5.train")
    assert rank("convt5.training.loop") == -1
    assert len(RANKED) > len(LAYERS)


def test_ops_import_only_jax():
    allowed = {"jax", "jaxtyping", "numpy", "convt5", *sys.stdlib_module_names}
    for path in (ROOT / "convt5" / "ops").glob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert roots <= allowed, path
        inside = {name for name in imported(path) if name.startswith("convt5.")}
        assert all(name.startswith("convt5.ops") for name in inside), path


def test_only_the_configuration_imports_gin():
    users = {module_name(path) for path in SOURCES if "gin" in imported(path)}
    assert users <= {"convt5.gin_config", "convt5.configuration.gin_files"}


def test_model_step_and_decoding_import_where_tensorflow_does_not():
    modules = [
        "convt5",
        "convt5.ops",
        "convt5.modeling.model",
        "convt5.losses",
        "convt5.training.train_step",
        "convt5.training.train_state",
        "convt5.optimizer",
        "convt5.sharding",
        "convt5.schedule",
        "convt5.generation.decoding",
        "convt5.analysis.costs",
        "convt5.samples",
        "convt5.loading",
        "convt5.vision.images",
        "convt5.vision.losses",
        "convt5.vision.statistics",
    ]
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {sorted(HEAVY)!r}:\n"
        "            raise ImportError('refused: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import importlib\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = commands.run([sys.executable, "-c", code], timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_convt5_loads_no_framework():
    names = ("jax", "tensorflow", "seqio", "gin")
    code = f"import convt5, sys; print([m for m in {names} if m in sys.modules])"
    done = commands.run([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stderr


def test_every_package_folder_travels_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {init.parent for init in (ROOT / "convt5").rglob("__init__.py")}
    inside = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert inside | {"convt5.tasks", "convt5.gin"} == set(settings["packages"])


def test_the_gin_folder_is_no_package_of_its_own():
    assert not (ROOT / "gin" / "__init__.py").exists()
