"""Files from elsewhere hold data: none is run, and none reaches outside its folder."""

import ast
import importlib.util
import io
import json
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from convt5 import errors
from convt5.data import cached_data, row_order
from convt5.data.prefetching import position
from convt5.interchange import pycls, safetensors_files
from convt5.vision import sources

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = [p for folder in ("convt5", "tasks", "launch") for p in (ROOT / folder).rglob("*.py")]
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "joblib",
    "marshal",
}
# Programs that convt5 itself has compiled are run as they are: only files that no other user can
# write are read (test_programs.py).
SOURCES.remove(ROOT / "convt5" / "training" / "programs.py")
SAFE_CALLS = {"np.load": ("allow_pickle", False), "torch.load": ("weights_only", True)}
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


@pytest.fixture
def trap(tmp_path):
    """An object whose unpickling would be noticed; it works where pickles are loaded."""
    path = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(path)))
    assert path.exists()
    path.unlink()
    yield Trap(path)
    assert not path.exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_can_load_a_pickle_or_run_what_a_file_says(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & UNSAFE_MODULES
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in NEVER_CALLED
        if called in SAFE_CALLS:
            name, value = SAFE_CALLS[called]
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            assert given.get(name) is value, f"line {node.lineno}: {called} needs {name}={value}"


def test_a_pickle_among_images_is_refused(trap, tmp_path):
    labels = np.zeros(2, np.int64)
    np.savez(tmp_path / "train.npz", images=np.array([trap, trap], object), labels=labels)
    with pytest.raises(errors.UserError, match=r"train\.npz cannot be read .*pickle"):
        sources.Npz(path=str(tmp_path / "{split}.npz")).open("train")


def test_a_pickle_among_parameters_is_refused(trap, tmp_path):
    np.savez(tmp_path / "model.npz", weight=np.array([trap], object))
    with pytest.raises(errors.UserError, match=r"model\.npz cannot be read"):
        pycls._read_npz(tmp_path / "model.npz")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra torch")
def test_a_file_of_torch_that_holds_code_is_refused(trap, tmp_path):
    import torch

    torch.save({"model_state": {"weight": trap}}, tmp_path / "model.pyth")
    with pytest.raises(errors.UserError, match=r"model\.pyth"):
        pycls.read_model(tmp_path / "model.pyth")


def test_a_pickle_in_a_cache_of_rows_is_refused(trap, tmp_path):
    np.save(tmp_path / cached_data.SIZES_FILE, np.array([trap], object), allow_pickle=True)
    with pytest.raises((errors.UserError, ValueError), match="pickle"):
        cached_data._token_bytes(tmp_path)


OUTSIDE = ["../outside.safetensors", "/etc/hostname", "a/b.safetensors", 7]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    np.savez(tmp_path / "outside.safetensors")
    index = {"weight_map": {"weight": name}}
    (folder / safetensors_files.INDEX).write_text(json.dumps(index))
    with pytest.raises(errors.UserError, match=r"must be one in the same folder|cannot be read"):
        safetensors_files.open_all(folder)


def archived(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.json", content)
    return buffer.getvalue()


POSITIONS = [
    b"",
    b"[]",
    b'{"settings": {}, "examples": 3}',
    b'{"settings": {}, "examples": {"count": "a", "tasks": {"t": ["a", 1, 2, 3]}}}',
    *(
        b'{"settings": {}, "examples": {"count": 1, "tasks": {"t": [%s]}}}' % numbers
        for numbers in (
            b"0, 0, -1, 0",
            b"0, 0, 0, -1",
            b"-1, 0, 0, 0",
            b"0, 0, 1%s, 0" % (b"0" * 19),
        )
    ),
    b"PK",
    archived(other="{}"),
    archived(settings="3"),
    archived(settings=" " * 2**21 + "{}"),
]


ROW_POSITIONS = [
    b"",
    b"[]",
    b"[" * 100_000,
    b"{}",
    b'{"settings": {}}',
    b'{"settings": 3, "count": 0}',
    *(b'{"settings": {}, "count": %s}' % c for c in (b"-1", b"1.5", b'"1"', b"null", b"9" * 30)),
]


@pytest.mark.parametrize("snapshot", ROW_POSITIONS, ids=range(len(ROW_POSITIONS)))
def test_a_position_in_rows_that_is_none_is_named(snapshot):
    config = cached_data.CachedDataConfig(path="cache", batch_size=2)
    passes = row_order.Passes(4, config=config, row_slice=slice(0, 2), settings={}, item="row")
    with pytest.raises(errors.UserError, match="position in the checkpoint is damaged"):
        passes.set_state(position(snapshot))
    passes.set_state(position(b'{"settings": {}, "count": 1}', 2))
    assert passes.batch().numbers.tolist() == [6, 7]


@pytest.mark.parametrize("snapshot", POSITIONS)
@pytest.mark.parametrize("skip", [0, 2**62])
def test_a_position_that_is_none_is_named_and_never_unpacked(snapshot, skip):
    iterator = seqio_reader()
    with pytest.raises(errors.UserError, match="position in the checkpoint is damaged"):
        iterator.set_state(position(snapshot, skip))


SKIPS = [257, 2**40, 2**64 - 1]


@pytest.mark.parametrize("skip", SKIPS)
def test_batches_to_skip_are_bounded_because_each_is_read(skip):
    snapshot = b'{"settings": {}, "examples": {"count": 1, "tasks": {"t": [0, 0, 0, 1]}}}'
    iterator = seqio_reader()
    with pytest.raises(errors.UserError, match=r"damaged .* it skips"):
        iterator.set_state(position(snapshot, skip))
    iterator.set_state(position(snapshot))


def seqio_reader():
    """A reader of one task whose data is never read."""
    pytest.importorskip("tensorflow")
    from convt5.data import seqio_batches
    from convt5.data.mixing import MixedStream, TaskStream

    iterator = object.__new__(seqio_batches.BatchIterator)
    iterator._settings = {}
    iterator._examples = MixedStream({"t": TaskStream(None, None, None)}, [1.0], 0)
    return iterator
