"""Files of PyTorch hold arrays: those of a model are read, and anything else is one message."""

import collections
import io
import json
import pickle
import struct
import sys
import tarfile
import types
import zipfile
from typing import NamedTuple

import fuzzing
import numpy as np
import pytest
from safetensors.numpy import load_file

from convt5 import convert, errors
from convt5.interchange import hugging_face, torch_files
from convt5.interchange.mapping import parameter_shapes

REASON = "needs the extra torch"


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason=REASON)


# Models of Hugging Face

T5 = {
    **{"model_type": "t5", "vocab_size": 11, "d_model": 6, "d_ff": 10, "d_kv": 4, "num_heads": 3},
    **{"num_layers": 2, "num_decoder_layers": 1, "feed_forward_proj": "relu"},
}


@pytest.fixture
def exported(tmp_path):
    """A folder with a small T5 as safetensors, and its arrays by name."""
    config = hugging_face.architecture(T5)
    draw = np.random.default_rng(7)
    shapes = parameter_shapes(config).items()
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes}
    hugging_face.write_model(tmp_path, config, params)
    arrays = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    return tmp_path, arrays


def save(torch, path, arrays, **options):
    torch.save({name: torch.tensor(array) for name, array in arrays.items()}, path, **options)


def assert_same(imported, arrays):
    found = hugging_face.take_apart(imported.sources, imported.params)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before 1.6"])
def test_a_file_of_pytorch_holds_the_same_model(torch, exported, is_zip):
    folder, arrays = exported
    path = folder / "pytorch_model.bin"
    save(torch, path, arrays, _use_new_zipfile_serialization=is_zip)
    assert_same(hugging_face.read_model(folder), arrays)


def test_shards_of_pytorch_are_read_and_a_missing_one_is_named(torch, exported):
    folder, arrays = exported
    names = sorted(arrays)
    shards = {"one.bin": names[::2], "two.bin": names[1::2]}
    for shard, held in shards.items():
        save(torch, folder / shard, {name: arrays[name] for name in held})
    index = {name: shard for shard, held in shards.items() for name in held}
    (folder / torch_files.INDEX).write_text(json.dumps({"weight_map": index}))
    assert_same(hugging_face.read_model(folder), arrays)
    save(torch, folder / "two.bin", {name: arrays[name] for name in names})
    with pytest.raises(errors.UserError, match=r"is in one\.bin and in two\.bin"):
        hugging_face.read_model(folder)
    (folder / "two.bin").unlink()
    with pytest.raises(errors.UserError, match=r"lacks two\.bin"):
        hugging_face.read_model(folder)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])  # And twice the bytes.
def test_half_precision_becomes_float32(torch, exported, kind):
    folder, arrays = exported
    dtype = getattr(torch, kind)
    halves = {name: torch.tensor(array).to(dtype) for name, array in arrays.items()}
    torch.save(halves, folder / "pytorch_model.bin")
    assert_same(
        hugging_face.read_model(folder), {n: half.float().numpy() for n, half in halves.items()}
    )


def test_ties_are_told_wherever_the_table_lies(torch, exported):
    folder, arrays = exported
    tensors = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in arrays.items()}
    ties = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    path = folder / "pytorch_model.bin"
    torch.save(tensors | dict.fromkeys(ties, tensors["shared.weight"]), path)
    imported = hugging_face.read_model(folder)
    assert_same(imported, arrays)
    assert {name for name, _ in imported.report.skipped} == set(ties)
    tensors["lm_head.weight"] = tensors.pop("shared.weight")
    torch.save(tensors, path)
    imported = hugging_face.read_model(folder)
    assert_same(imported, arrays)
    assert "shared.weight is absent; lm_head.weight, which is tied" in imported.report.overview()


def test_tensors_that_are_missing_or_too_many_are_told_together(torch, exported):
    folder, arrays = exported
    gone = "decoder.final_layer_norm.weight"
    changed = {name: array for name, array in arrays.items() if name != gone}
    save(torch, folder / "pytorch_model.bin", changed | {"adapter.weight": np.ones(3)})
    with pytest.raises(errors.UserError, match=rf"(?s){gone} is missing.*adapter.weight \(3,\)"):
        hugging_face.read_model(folder)


def test_the_command_imports_a_folder_as_it_is_downloaded(torch, exported, tmp_path_factory):
    folder, arrays = exported
    save(torch, folder / "pytorch_model.bin", arrays)
    out = tmp_path_factory.mktemp("out") / "run"
    assert convert.main(["--from=hf", f"--checkpoint={folder}", f"--output_dir={out}"]) == 0
    assert "mapped    shared.weight ->" in (out / "conversion.txt").read_text()


def test_a_folder_without_weights_names_all_that_would_do(exported):
    with pytest.raises(errors.UserError, match=r"model\.safetensors, .*pytorch_model\.bin\.index"):
        hugging_face.read_model(exported[0])


VERSIONS = {"none": None, "old": "2.9.1+cpu"}


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
def test_without_pytorch_or_with_an_old_one_the_remedy_is_told(exported, monkeypatch, version):
    fake = version and types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "torch", fake)
    (exported[0] / "pytorch_model.bin").write_bytes(b"")
    message = r"pytorch_model\.bin is a file of PyTorch, .*(pip install 'convt5\[torch\]'|upgrade)"
    with pytest.raises(errors.UserError, match=message):
        hugging_face.read_model(exported[0])


# What is no file of arrays


class Storage(NamedTuple):
    kind: str = "FloatStorage"
    count: object = 4
    key: object = "0"


FLOATS = Storage()
MAGIC = 0x1950A86A20F9469CFC6C  # A file before PyTorch 1.6 begins with it.


class Call:
    """Pickled as a call."""

    def __init__(self, module, name, *arguments):
        self._function, self._arguments = f"{module} {name}", arguments

    def __reduce__(self):
        return Global(self._function), self._arguments


class Global:
    """Pickled as a name, which need not exist here."""

    def __init__(self, name):
        self.name = name

    def __call__(self):
        raise AssertionError


class Pickler(pickle._Pickler):
    """Writes what `torch.save` writes, of things that torch would not make."""

    view: tuple = ()

    def save(self, value, *rest, **options):
        if isinstance(value, Global):
            self.write(pickle.GLOBAL + value.name.replace(" ", "\n").encode() + b"\n")
        else:
            super().save(value, *rest, **options)

    def persistent_id(self, value):
        if isinstance(value, Storage):
            kind = Global(f"torch {value.kind}")
            return ("storage", kind, value.key, "cpu", value.count, *self.view)
        return None


class OldPickler(Pickler):
    view = (None,)


def pickled(value, protocol=2, pickler=Pickler):
    stream = io.BytesIO()
    pickler(stream, protocol).dump(value)
    return stream.getvalue()


def tensor(shape=(2, 2), stride=(2, 1), storage=FLOATS, offset=0):
    hooks = collections.OrderedDict()
    return Call("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, stride, False, hooks)


def zipped(content, data=bytes(16), *, compression=zipfile.ZIP_STORED, **more):
    stream = io.BytesIO()
    members = {"data.pkl": content, "byteorder": b"little", "data/0": data, "version": b"3\n"}
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, member in (members | more).items():
            if member is not None:
                archive.writestr(name if name[0] == "/" else f"archive/{name}", member)
    return stream.getvalue()


def saved(value, data=bytes(16)):
    return zipped(pickled(value), data)


def legacy(value, keys=("0",), data=b"\x04" + bytes(7 + 16)):
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = [MAGIC, 1001, machine, value, list(keys)]
    return b"".join(pickled(part, pickler=OldPickler) for part in parts) + data


def doubled_lists(times=200):
    value = []
    for _ in range(times):
        value = [value, value]
    return value


def doubled_key(times=200):
    """A mapping whose key, a tuple of tuples that are twice the same, takes years to hash."""
    steps = (b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(times))
    return b"\x80\x02})q\x00" + b"".join(steps) + b"K\x01s."


def doubled_mappings(times=200):
    value = {}
    for _ in range(times):
        value = {"a": value, "b": value}
    return value


def archived():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return stream.getvalue()


HUGE = 10**12
DEEP = 20_000
WHOLE = {"zip": saved({"a": tensor()}), "before 1.6": legacy({"a": tensor()})}
HOSTILE = {
    "empty": b"",
    "text": b"arrays",
    "half a zip": WHOLE["zip"][:200],
    "half of an old one": WHOLE["before 1.6"][:-20],
    "tar": archived(),
    "pickle": pickle.dumps({"a": 1}),
    "code": saved({"a": Call("posix", "system", "exit 1")}),
    "old code": legacy({"a": Call("builtins", "eval", "1")}),
    "code in the name of a machine": b"".join(
        map(pickled, (MAGIC, 1001, Call("posix", "system", "exit 1")))
    ),
    "a module": saved(Call("transformers.models.t5.modeling_t5", "T5Model")),
    "a function of torch": saved({"a": Call("torch", "load", "a")}),
    "memory": saved({"a": Call("builtins", "bytearray", HUGE)}),
    "old memory": legacy({"a": Call("builtins", "bytearray", HUGE)}),
    "a set": saved({"a": Call("builtins", "set", [1])}),
    "meta": saved(
        {"a": Call("torch._utils", "_rebuild_meta_tensor_no_storage", Global("torch float32"))}
    ),
    "sparse": saved({"a": Call("torch._utils", "_rebuild_sparse_tensor", Global("torch strided"))}),
    "repeated view": saved({"a": tensor((HUGE,), (0,))}),
    "repeated in part": saved({"a": tensor((2, 2, 2), (2, 1, 0))}),
    "overlapping": saved({"a": tensor((3, 3), (1, 0))}),
    "repeated view of halves": saved({"a": tensor((HUGE,), (0,), Storage("HalfStorage", 8))}),
    "old repeated view": legacy({"a": tensor((HUGE,), (0,))}),
    "many of the same": saved(
        {str(i): tensor((2**19,), (1,), Storage(count=2**19)) for i in range(40)}, bytes(2**21)
    ),
    "huge": saved({"a": tensor((HUGE,), (1,), Storage(count=HUGE))}),
    "old huge": legacy({"a": tensor((HUGE,), (1,), Storage(count=HUGE))}),
    "more than its file": saved({"a": tensor((5,), (1,), Storage(count=5))}),
    "less than its file": saved({"a": tensor((3,), (1,), Storage(count=3))}),
    "beyond its storage": saved({"a": tensor((5,), (1,))}),
    "offset": saved({"a": tensor(offset=1)}),
    "huge offset": saved({"a": tensor(offset=2**62)}),
    "negative offset": saved({"a": tensor(offset=-1)}),
    "negative": saved({"a": tensor((-2, -2))}),
    "negative stride": saved({"a": tensor(stride=(-2, 1))}),
    "negative count": saved({"a": tensor(storage=Storage(count=-4))}),
    "count of text": saved({"a": tensor(storage=Storage(count="4"))}),
    "long count": saved({"a": tensor(storage=Storage(count=2**70))}),
    "overflow": saved({"a": tensor((2**32, 2**32), (0, 0))}),
    "shape of text": saved({"a": tensor(("a",), (1,))}),
    "no such file": saved({"a": tensor(storage=Storage(key="../0"))}),
    "key that is none": saved({"a": tensor(storage=Storage(key=7))}),
    "storage of another kind": saved({"a": tensor(storage=Storage("QInt8Storage"))}),
    "complex": saved({"a": tensor(storage=Storage("ComplexFloatStorage", 2))}),
    "two sizes": saved({"a": tensor(), "b": tensor(storage=Storage("HalfStorage", 4))}),
    "storage alone": saved({"a": Storage()}),
    "no arguments": saved({"a": Call("torch._utils", "_rebuild_tensor_v2")}),
    "numbers": saved({"a": 1}),
    "text for arrays": saved({"a": "b"}),
    "list": saved([tensor()]),
    "one array": saved(tensor()),
    "nothing": saved(None),
    "names of numbers": saved({1: tensor()}),
    "arrays in arrays": saved({"model": {"a": tensor()}}),
    "tuples doubled": zipped(doubled_key()),
    "lists doubled": saved({"a": doubled_lists()}),
    "mappings doubled": saved(doubled_mappings()),
    "old tuples doubled": b"".join(map(pickled, (MAGIC, 1001))) + doubled_key(),
    "deep": zipped(b"\x80\x02}K\x01" + b"]" * DEEP + b"a" * (DEEP - 1) + b"s."),
    "deep key": zipped(b"\x80\x02}" + b")" + b"\x85" * DEEP + b"K\x01s."),
    "deep and open": zipped(b"\x80\x02" + b"(" * 100_000),
    "text doubled": zipped(
        b"\x80\x02X\x00\x00\x10\x00" + b"x" * 2**20 + b"q\x00](" + b"h\x00" * 1000 + b"e."
    ),
    "changed after use": zipped(b"\x80\x02]q\x00h\x00h\x00a."),
    "protocol 4": zipped(pickled({"a": 1}, protocol=4)),
    "protocol 0": zipped(b"(dp0\nS'a'\np1\nI1\ns."),
    "nothing on the stack": zipped(b"\x80\x02."),
    "no end": zipped(b"\x80\x02}"),
    "memo that is none": zipped(b"\x80\x02h\x07."),
    "no mark": zipped(b"\x80\x02e."),
    "megabytes": zipped(b"\x80\x02" + b"]0" * (torch_files.MOST_PICKLE_BYTES // 2) + b"."),
    "a string of gigabytes": zipped(b"\x80\x02X\xff\xff\xff\x7fabc."),
    "packed": zipped(pickled({"a": tensor()}), compression=zipfile.ZIP_DEFLATED),
    "no pickle": zipped(None),
    "no numbers": zipped(pickled({"a": tensor()}), None),
    "other order of bytes": zipped(pickled({"a": tensor()}), byteorder=b"middle"),
    "program": zipped(pickled({"a": tensor()}), **{"constants.pkl": b"\x80\x02)."}),
    "two folders": zipped(pickled({"a": tensor()}), **{"/other/data.pkl": b"\x80\x02)."}),
    "old keys": legacy({"a": tensor()}, keys=("1",)),
    "old numbers of another count": legacy({"a": tensor()}, data=struct.pack("<q", 5) + bytes(20)),
}
"""Files of which none is read."""


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_what_the_attacks_are_made_from_is_read(torch, content, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    files = torch_files.Files([path])
    assert files.shapes == {"a": (2, 2)}
    np.testing.assert_array_equal(files.read("a"), np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_file_of_arrays_is_refused(torch, content, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with fuzzing.limited(fuzzing.LIMIT_SECS), pytest.raises(errors.UserError) as caught:
        torch_files.Files([path])
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1_000
    assert caught.value.exit_code == 2


def test_an_array_of_integers_is_refused_when_it_is_read(torch, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(saved({"a": tensor(storage=Storage("IntStorage"))}))
    files = torch_files.Files([path])
    with pytest.raises(errors.UserError, match=r"'a' is stored as int32, which is none of float32"):
        files.read("a")


FLIPS = 40


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_a_file_of_pytorch_with_flipped_bytes_is_read_or_refused(torch, content, tmp_path):
    path = tmp_path / "a.bin"
    num_refused = 0
    for seed in range(FLIPS):
        path.write_bytes(fuzzing.flipped(content, seed))
        try:
            with fuzzing.limited(fuzzing.LIMIT_SECS):
                files = torch_files.Files([path])
                for name in files.shapes:
                    files.read(name)
        except errors.UserError:
            num_refused += 1
    assert num_refused
