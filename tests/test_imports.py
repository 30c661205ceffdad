"""Imports point one way, and the model runs on hosts that have neither TensorFlow nor seqio."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "convt5").rglob("*.py")) + sorted((ROOT / "tasks").rglob("*.py"))

# A module may import only what stands before it here; modules of one row may import each other.
LAYERS = [
    ["errors", "ops"],
    ["architecture"],
    ["layers"],
    ["mixing"],
    ["blocks"],
    ["model"],
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


def part(path: pathlib.Path) -> str:
    """The module or package directly below convt5 that a file belongs to."""
    return path.relative_to(ROOT / "convt5").parts[0].removesuffix(".py")


RANKED = [p for p in SOURCES if p.is_relative_to(ROOT / "convt5") and part(p) in RANK]


@pytest.mark.parametrize("path", RANKED, ids=module_name)
def test_imports_point_from_high_level_to_low(path):
    statements = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom)]
    used = set()
    for node in statements:
        package, _, rest = (node.module or "").partition(".")
        if package == "convt5":
            used |= {rest.split(".")[0]} if rest else {alias.name for alias in node.names}
    assert {name for name in used if RANK.get(name, -1) > RANK[part(path)]} == set()


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
        "convt5.model",
        "convt5.losses",
        "convt5.training.train_step",
        "convt5.training.train_state",
        "convt5.optimizer",
        "convt5.sharding",
        "convt5.schedule",
        "convt5.decoding",
        "convt5.costs",
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_import_convt5_loads_no_framework():
    names = ("jax", "tensorflow", "seqio", "gin")
    code = f"import convt5, sys; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_package_folder_travels_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {init.parent for init in (ROOT / "convt5").rglob("__init__.py")}
    inside = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert inside | {"convt5.tasks", "convt5.gin"} == set(settings["packages"])


def test_the_gin_folder_is_no_package_of_its_own():
    assert not (ROOT / "gin" / "__init__.py").exists()
