"""Imports point one way, and the model runs on hosts that have neither TensorFlow nor seqio."""

import ast
import functools
import pathlib
import sys
import tomllib

import commands
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "convt5").rglob("*.py")) + sorted((ROOT / "tasks").rglob("*.py"))

HEAVY = {"tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "t5", "clu"}


def module_name(path: pathlib.Path) -> str:
    """The dotted name of a file, under which it is imported: tasks/ is convt5.tasks."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("convt5", *parts) if parts[0] == "tasks" else parts).removesuffix(".__init__")


def statements(path: pathlib.Path):
    """The import statements of a file, lazy ones too, but not those for type checkers alone."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        waiting += ast.iter_child_nodes(node)


@functools.cache
def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere, as dotted names."""
    found = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


FILES = {module_name(path): path for path in SOURCES}
FACES = {name for name, path in FILES.items() if path.name == "__init__.py"}


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of convt5 that each of them imports."""
    return {
        name: {other for other in imported(path) & FILES.keys() if other not in FACES} - {name}
        for name, path in FILES.items()
    }


# From the ground up: a module may import only what stands on its own floor or below. A room has
# one floor, but for the files that are named beneath it; no room imports its neighbours of a floor.
FLOORS = [
    ["errors", "ops"],
    ["modeling.tree_paths"],
    ["modeling.sharding"],
    ["modeling.fsdp"],
    ["modeling.sizes"],
    ["modeling.canon"],
    ["modeling.layers"],
    ["modeling.attention"],
    ["modeling.mixers"],
    ["modeling.description"],
    ["modeling.blocks", "modeling.stem", "modeling.placement"],
    ["modeling.model"],
    ["modeling.architecture"],
    ["modeling", "runtime"],
    ["checkpoints", "configuration", "text"],
    ["generation", "reports", "tasks"],
    ["data"],
    ["training"],
    ["vision"],
    ["interchange"],
    ["evaluation"],
    ["analysis"],
    ["benchmarks", "sweeps"],
]
RANK = {name: i for i, row in enumerate(FLOORS) for name in row}


def rank(name: str) -> int:
    """The floor of a module of convt5; commands, which stand in no room, are above all rooms."""
    parts = name.split(".")[1:]
    return RANK.get(".".join(parts[:2]), RANK.get(parts[0], len(FLOORS)))


def room(name: str) -> str:
    return name.split(".")[1]


def reachable(start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports()[start])
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imports()[name]
    return seen


def test_files_import_each_other_in_no_circle():
    assert {name for name in imports() if name in reachable(name)} == set()


def test_imports_point_from_high_level_to_low():
    upward = {
        (name, other)
        for name, others in imports().items()
        for other in others
        if rank(other) > rank(name) or (rank(other) == rank(name) and room(other) != room(name))
    }
    assert upward == set()


def test_a_module_that_imports_what_stands_above_it_is_found():
    assert rank("convt5.modeling.layers") < rank("convt5.modeling.mixers.dynamic")
    assert rank("convt5.errors.rules") < rank("convt5.modeling.model") < rank("convt5.train")
    assert "convt5.runtime.atomic_files" in reachable("convt5.train")
    in_rooms = {name for name in FILES if name.count(".") > 1}
    assert {name for name in in_rooms if rank(name) == len(FLOORS)} == set()


def test_ops_import_only_jax():
    allowed = {"jax", "jaxtyping", "numpy", "convt5", *sys.stdlib_module_names}
    for path in (ROOT / "convt5" / "ops").rglob("*.py"):
        roots = {name.split(".")[0] for name in imported(path)}
        assert roots <= allowed, path
        inside = {name for name in imported(path) if name.startswith("convt5.")}
        assert all(name.startswith("convt5.ops") for name in inside), path


def test_only_the_configuration_imports_gin():
    users = {name for name, path in FILES.items() if "gin" in imported(path)}
    assert users <= {"convt5.configuration.gin_config", "convt5.configuration.gin_files"}


@pytest.mark.slow
def test_model_step_and_decoding_import_where_tensorflow_does_not():
    modules = [
        "convt5",
        "convt5.ops",
        "convt5.modeling.model",
        "convt5.training.losses",
        "convt5.training.train_step",
        "convt5.training.train_state",
        "convt5.training.optimizer",
        "convt5.modeling.sharding",
        "convt5.training.schedule",
        "convt5.generation.decoding",
        "convt5.analysis.costs",
        "convt5.generation.samples",
        "convt5.interchange.loading",
        "convt5.evaluation.infer_command",
        "convt5.text.plain_vocabularies",
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
    others = {path.name for path in (ROOT / "tasks").iterdir() if path.is_file()}
    others = {name for name in others if not name.endswith(".py")}
    assert others == set(settings["package-data"]["convt5.tasks"])


def test_the_gin_folder_is_no_package_of_its_own():
    assert not (ROOT / "gin" / "__init__.py").exists()


def test_every_module_of_ours_that_is_imported_exists():
    known = FILES.keys() | {"convt5.gin"}
    for name, path in FILES.items():
        modules = {
            node.module
            for node in statements(path)
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module
        }
        ours = {module for module in modules if module.split(".")[0] == "convt5"}
        assert ours <= known, name
