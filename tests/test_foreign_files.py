"""Damaged, hostile and huge files of every format that is read: one message, in bounded memory.

`ATTACKS` counts the cases by kind; `python tests/attacks.py` prints them.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import shutil
import struct
import tracemalloc
import zipfile

import fuzzing
import numpy as np
import pytest
import tf_bundle
import word_pieces
from convt5.tasks import tables, text_files, vocabularies

from convt5 import errors
from convt5.checkpoints import checkpoint, reading, record
from convt5.data import cached_data
from convt5.evaluation import inputs
from convt5.interchange import (
    hugging_face,
    loading,
    operative_config,
    portable,
    pycls,
    safetensors_files,
)
from convt5.interchange.tf_checkpoint import Checkpoint
from convt5.runtime import atomic_files, foreign_files, local_files
from convt5.sweeps import running
from convt5.text import vocabulary_files
from convt5.training import run_log
from convt5.vision import sources

HUGE = 10**12


def refused(read, path, *, name=None):
    """Checks that reading ends in one message that names the file; returns the message."""
    with fuzzing.limited(fuzzing.LIMIT_SECS), pytest.raises(errors.UserError) as caught:
        read(path)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert (name or str(path)) in text
    assert len(text) < 4_000
    return text


# JSON

DEEP = 100_000
JSON = {
    "empty": b"",
    "text": b"model",
    "null": b"null",
    "number": b"1e999",
    "list": b"[]",
    "open": b'{"a": ',
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep and whole": b"[" * DEEP + b"]" * DEEP,
    "twice": b'{"model_type": "t5", "model_type": "t5"}',
    "digits": b'{"step": ' + b"9" * 10_000 + b"}",
    "latin": '{"naïve": 1}'.encode("latin-1"),
    "zeros": bytes(100),
    "huge": b" " * (foreign_files.MOST_JSON_BYTES + 1),
}
_INDEX = safetensors_files.INDEX
JSON_FILES = {
    "convt5.json": portable.read_model,
    "config.json": hugging_face.read_model,
    "cache.json": lambda folder: cached_data.read_about(str(folder)),
    "vocabulary/about.json": vocabulary_files.load,
    _INDEX: safetensors_files.open_all,
    "run.json": running.read_about,
}


@pytest.mark.parametrize("content", JSON.values(), ids=JSON)
@pytest.mark.parametrize("name", JSON_FILES)
def test_a_small_file_of_json_is_one(name, content, tmp_path):
    file = tmp_path / (running.STATUS_FILE if name == "run.json" else name)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    refused(JSON_FILES[name], tmp_path)


OVERWHELMING = {
    "names": ("{" + "".join(f'"{i}": 0, ' for i in range(200_000)) + '"199999": 1}', "twice"),
    "depth": ("[" * 200 + "]" * 200, "too deeply"),
    "objects": ('{"a": [' * 60 + "0" + "]}" * 60, "too deeply"),
    "digits": ("9" * 41, "41 digits"),
    "negative": (f"[-{'9' * 309}]", "310 digits"),
}


@pytest.mark.parametrize(("text", "reason"), OVERWHELMING.values(), ids=OVERWHELMING)
def test_json_that_code_after_its_parser_cannot_take_is_refused_at_once(text, reason):
    with fuzzing.limited(fuzzing.LIMIT_SECS), pytest.raises(ValueError, match=reason):
        foreign_files.parse_json(text)


# Of the others only a regular file makes a folder such a model.
OPENED = [name for name in JSON_FILES if name not in ("convt5.json", _INDEX)]
THINGS = ["folder", "pipe"]


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_regular_file_is_not_opened(name, thing, tmp_path):
    file = tmp_path / (running.STATUS_FILE if name == "run.json" else name)
    file.parent.mkdir(exist_ok=True)
    file.mkdir() if thing == "folder" else os.mkfifo(file)
    refused(JSON_FILES[name], tmp_path)


@pytest.mark.parametrize("thing", THINGS)
def test_features_of_tfds_that_are_no_regular_file_are_not_opened(thing, tmp_path):
    file = tmp_path / "mnist" / "3.0.1" / "features.json"
    file.parent.mkdir(parents=True)
    file.mkdir() if thing == "folder" else os.mkfifo(file)
    refused(lambda _: foreign_files.check_tfds("mnist", str(tmp_path), setting="name"), file)


LINES = [b"null", b"[]", b"{", b"[" * DEEP, b'{"step": 1, "step": 1}', b"\xff", b'{"loss": 1}']


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_record_that_is_none_is_named_with_its_line(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(errors.UserError, match=r"metrics\.jsonl, line 2 is damaged"):
        run_log.read_records(path, need=["step"])


def test_a_record_without_an_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "MOST_LINE_BYTES", 2**21)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n')
    os.truncate(path, 2**40)
    assert "line 2 has more than" in refused(run_log.read_records, path)


# Settings in JSON

T5 = {
    **{"model_type": "t5", "vocab_size": 32, "d_model": 8, "d_ff": 16, "d_kv": 4, "num_heads": 2},
    **{"num_layers": 1, "feed_forward_proj": "relu"},
}
VALUES = [None, "8", 8.5, -1, 0, True, [], {}, [[]], float("nan"), float("inf"), 10**30]
SIZES = ("vocab_size", "d_model", "d_ff", "d_kv", "num_heads", "num_layers")
RATES = ("layer_norm_epsilon", "dropout_rate")
SWITCHES = ("tie_word_embeddings", "scale_decoder_outputs")
FITTING = {
    "feed_forward_proj": [],
    "num_decoder_layers": [None],
    "relative_attention_num_buckets": [],
    **{name: [0] for name in RATES},
    **{name: [True] for name in SWITCHES},
    **{name: [] for name in SIZES},
}
CONFIGS = [
    (name, value)
    for name, fitting in FITTING.items()
    for value in VALUES
    if not any(value is one or (type(value), value) == (type(one), one) for one in fitting)
    # Any size is taken, and then compared with the arrays; any number is a rate of some kind.
    and not (name in SIZES and value == 10**30 and name != "num_layers")
    and not (name == "layer_norm_epsilon" and value in (8.5, 10**30))
]
MISSING = [*SIZES, "model_type"]


@pytest.mark.parametrize(("name", "value"), CONFIGS, ids=str)
def test_a_setting_of_a_t5_of_a_wrong_kind_is_named(name, value):
    with pytest.raises(errors.UserError):
        hugging_face.architecture(T5 | {name: value})


@pytest.mark.parametrize("name", MISSING)
def test_a_setting_of_a_t5_that_is_missing_is_named(name):
    with pytest.raises(errors.UserError, match=name):
        hugging_face.architecture({k: v for k, v in T5.items() if k != name})


ABSURD = [(name, size) for name in SIZES for size in (1_000, 10**9, HUGE)]


@pytest.mark.parametrize(("name", "size"), ABSURD)
def test_sizes_that_the_arrays_do_not_bear_out_are_refused(name, size, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(T5 | {name: size}))
    arrays = {"shared.weight": np.zeros((32, 8), np.float32)}
    safetensors_files.write(tmp_path / safetensors_files.WHOLE, arrays, metadata={})
    with pytest.raises(errors.UserError):
        loading.load_model(tmp_path)


DESCRIPTION = portable.describe(hugging_face.architecture(T5))
DESCRIBED = [
    *[(name, value) for name in DESCRIPTION for value in VALUES],
    *[(f"encoder.{name}", value) for name in DESCRIPTION["encoder"] for value in VALUES],
]


@pytest.mark.parametrize(("name", "value"), DESCRIBED, ids=str)
def test_a_description_of_a_model_is_valid_or_one_message(name, value):
    side, _, inner = name.rpartition(".")
    change = {side: DESCRIPTION[side] | {inner: value}} if side else {name: value}
    message = "convt5.json"
    try:
        portable.revive(DESCRIPTION | change, where="convt5.json")
    except errors.UserError as error:
        message = str(error)
    assert message.startswith("convt5.json")


ABOUT = {
    "version": 1,
    "vocab_size": 300,
    "vocabulary": {"characters": 3},
    "splits": {
        "train": {
            "rows": 2,
            "fingerprint": "x",
            "features": {
                "encoder_input_tokens": {"dtype": "<u2", "length": 4},
                "decoder_input_tokens": {"dtype": "<u2", "length": 4},
            },
        }
    },
    "made_from": {},
}
FEATURE = {"dtype": "<u2", "length": 4}
_TRAIN = ("splits", "train")
_TOKENS = (*_TRAIN, "features", "encoder_input_tokens")
WRONG = [None, "8", 8.5, -1, True, [], [[]], float("nan"), {"a": [1]}]
CACHES = [
    *[(("version",), value) for value in [*WRONG, 0, 2, HUGE]],
    *[(("vocab_size",), value) for value in WRONG],
    *[(("vocabulary",), value) for value in [*WRONG[1:], {}, {"pickle": 1}, {"characters": "1"}]],
    *[(("splits",), value) for value in WRONG],
    *[((*_TRAIN,), value) for value in WRONG],
    *[((*_TRAIN, "rows"), value) for value in [*WRONG, 0]],
    *[((*_TRAIN, "fingerprint"), value) for value in [None, 8.5, -1, [], {}]],
    *[((*_TRAIN, "features"), value) for value in [*WRONG, {}]],
    *[((*_TOKENS, "length"), value) for value in [*WRONG, 0, HUGE]],
    *[((*_TOKENS, "dtype"), value) for value in [*WRONG, "O", "<f4", ">u2", "V1000000000"]],
    *[
        ((*_TRAIN, "features", name), {"dtype": "<u2", "length": 4})
        for name in ("../tokens", "/etc/passwd", "a/b", "a\0b", "", "\x1b[2J", "..")
    ],
]


def changed(about, path, value):
    about = json.loads(json.dumps(about))
    inner = about
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return about


@pytest.mark.parametrize(("path", "value"), CACHES, ids=str)
def test_what_a_cache_says_of_itself_is_checked(path, value, tmp_path):
    file = tmp_path / "cache.json"
    file.write_text(json.dumps(ABOUT))
    cached_data.read_about(str(tmp_path))
    file.write_text(json.dumps(changed(ABOUT, path, value)))
    refused(lambda folder: cached_data.read_about(str(folder)), tmp_path)


RECORD = {
    "format": 1,
    "model": DESCRIPTION,
    "params": {str(i): "float32[32,8]" for i in range(9)},
    "optimizer": {"step": "int32[]"},
}
SHAPES = ["float32", "float32[", "float32[-1]", "float32[a]", "no_type[2]", "float32[1]\n", 7]
RECORDS = [
    *[((part,), value) for part in ("params", "optimizer", "checksums") for value in WRONG],
    *[(("params", "3"), value) for value in [*WRONG, *SHAPES]],
    *[(("format",), value) for value in [*WRONG, 2]],
    *[(("model",), value) for value in WRONG],
    *[(("model", "encoder", "num_layers"), value) for value in (10**9, HUGE, 10**30)],
    *[
        (("best",), value)
        for value in [*WRONG, {"value": "1"}, {"value": [1]}, {"value": 1, "evaluation": [1]}]
    ],
]


def write_record(folder, about):
    (folder / "about").mkdir(parents=True)
    (folder / "about" / "metadata").write_text(json.dumps(record.seal(about)))


def read_record(folder):
    return reading.saved_params(folder).keys(), loading.run_config(folder)


@pytest.mark.parametrize(("path", "value"), RECORDS, ids=str)
def test_what_a_checkpoint_says_of_itself_is_checked(path, value, tmp_path):
    write_record(tmp_path / "2", RECORD)
    assert read_record(tmp_path / "2") == (RECORD["params"].keys(), portable.revive(DESCRIPTION))
    write_record(tmp_path / "1", changed(RECORD, path, value))
    if path == ("best",):
        assert checkpoint.best_step(tmp_path) is None
    elif (*path, value) != ("format", True):
        refused(read_record, tmp_path / "1")


def test_folders_whose_names_only_look_like_steps_are_no_checkpoints(tmp_path):
    write_record(tmp_path / "1", RECORD)
    for name in ("\u00b2", "\u0663", "1_0", "-2", " 3"):
        (tmp_path / name).mkdir()
    assert reading.steps_in(tmp_path) == [1]


PROGRESS = {
    **{"rows": 2, "num_read": 3, "digest": "x", "state": "YQ==", "is_complete": False},
    **{"features": {"encoder_input_tokens": {"dtype": "<u2", "length": 4}}, "tokens": {}},
    "counts": {},
}
UNFINISHED = [
    *[((), value) for value in [*WRONG, {"train": {}}]],
    *[(("train", name), value) for name in PROGRESS for value in ([1], -1)],
    *[(("train", "features", name), FEATURE) for name in ("../tokens", "/tmp/a", "")],
]


@pytest.mark.parametrize(("path", "value"), UNFINISHED, ids=str)
def test_progress_of_a_cache_that_none_wrote_is_not_continued(path, value, tmp_path):
    unfinished = atomic_files.unfinished(tmp_path / "cache", "unfinished")
    (unfinished / "train").mkdir(parents=True)
    (unfinished / "train" / "encoder_input_tokens.bin").write_bytes(bytes(2 * 4 * 2))
    file = unfinished / cached_data._PROGRESS_FILE
    whole = {"identity": "x", "splits": {"train": PROGRESS}}
    file.write_text(json.dumps(whole))
    writer = cached_data.Writer(tmp_path / "cache", identity="x")
    assert writer.written("train") == cached_data.Written(3, b"a", False)
    del writer
    file.write_text(json.dumps(changed(whole, ("splits", *path), value)))
    assert cached_data.Writer(tmp_path / "cache", identity="x").written("train").state is None


ROWS = [("rows", HUGE), ("rows", 3), ("length", 2**24), ("length", 5)]


@pytest.mark.parametrize(("name", "value"), ROWS, ids=str)
def test_rows_that_are_not_there_are_refused(name, value, tmp_path):
    (tmp_path / "train").mkdir()
    for feature in ABOUT["splits"]["train"]["features"]:
        (tmp_path / "train" / f"{feature}.bin").write_bytes(bytes(16))
    path = (*_TRAIN, name) if name == "rows" else (*_TOKENS, name)
    (tmp_path / "cache.json").write_text(json.dumps(changed(ABOUT, path, value)))
    config = cached_data.CachedDataConfig(path=str(tmp_path), batch_size=1)
    refused(lambda _: config.build(process_index=0, process_count=1), tmp_path)
    refused(lambda _: config.check_model(hugging_face.architecture(T5)), tmp_path)


KEPT = {"add_eos": True, "encoder_length": 8, "decoder_length": None, "inputs": {"characters": 3}}
VOCABULARIES = [
    *[("add_eos", value) for value in (None, 1, "yes", [])],
    *[(f"{side}_length", value) for side in ("encoder", "decoder") for value in (-1, 8.5, "8", [])],
    *[(f"{side}_length", HUGE) for side in ("encoder", "decoder")],
    *[(name, value) for name in ("inputs", "targets") for value in (None, [], {}, "bytes", 7)],
    *[("inputs", {"characters": n}) for n in (-1, 8.5, None, True, HUGE)],
    *[("inputs", {kind: 3}) for kind in ("pickle", "../x", "sentencepiece")],
    ("inputs", {"characters": 1, "sentencepiece": 1}),
]


@pytest.mark.parametrize(("name", "value"), VOCABULARIES, ids=str)
def test_what_a_vocabulary_says_of_itself_is_checked(name, value, tmp_path):
    file = tmp_path / "vocabulary" / "about.json"
    file.parent.mkdir()
    file.write_text(json.dumps(KEPT))
    assert vocabulary_files.load(tmp_path) is not None
    file.write_text(json.dumps(KEPT | {name: value}))
    refused(vocabulary_files.load, tmp_path)


# Arrays of NumPy


def npy(descr="'<f4'", shape="(2, 2)", content=bytes(16), *, text=None, version=b"\x01\x00"):
    """Returns a .npy file; `text` is its whole header."""
    text = text or f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text) + 1)
    return b"\x93NUMPY" + version + size + text.encode() + b"\n" + content


ARRAYS = {
    "empty": b"",
    "no magic": b"array" * 20,
    "header cut": npy()[:20],
    "numbers cut": npy()[:-1],
    "more numbers": npy() + b"x",
    "huge": npy(shape=f"({HUGE},)"),
    "huge product": npy(shape="(1000000, 1000000)"),
    "overflow": npy(shape="(4294967296, 4294967296)"),
    "negative": npy(shape="(-2, -2)"),
    "one negative": npy(shape="(-4,)"),
    "many axes": npy(shape=str((1,) * 70), content=bytes(4)),
    "huge and empty": npy(shape="(0, 4611686018427387904, 4611686018427387904)", content=b""),
    "no shape": npy(shape="None"),
    "shape of text": npy(shape="('a',)"),
    "shape of bool": npy(shape="(True, 2.0)"),
    "objects": npy(descr="'|O'"),
    "objects inside": npy(descr="[('a', '|O')]"),
    "records": npy(descr="[('a', '<f4'), ('b', '<f4')]"),
    "subarrays": npy(descr="('<f4', (1000000, 1000000))", shape="()"),
    "text": npy(descr="'<U4'", shape="(1,)"),
    "huge items": npy(descr="'|V2000000000'", shape="()"),
    "times": npy(descr="'<M8[s]'", shape="(2,)"),
    "complex": npy(descr="'<c8'", shape="(2,)"),
    "code": npy(text="__import__('os').abort()"),
    "calls": npy(descr="open('x')"),
    "deep": npy(text="(" * 5_000),
    "deep descr": npy(descr="[" * 3_000 + "]" * 3_000),
    "long": npy(text="{" + " " * 60_000 + "}"),
    "other keys": npy(text="{'a': 1}"),
    "no dict": npy(text="[1, 2]"),
    "not closed": npy(text="{'descr': '<f4'"),
    "header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "version 3": npy(version=b"\x03\x00"),
    "version 9": npy(version=b"\x09\x00"),
}


@pytest.mark.parametrize("content", ARRAYS.values(), ids=ARRAYS)
def test_an_array_that_is_none_is_refused_in_every_file_of_arrays(content, tmp_path):
    sizes = tmp_path / "token_bytes.npy"
    sizes.write_bytes(content)
    refused(lambda _: cached_data._token_bytes(tmp_path), sizes)
    path = tmp_path / "train.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", content)
        archive.writestr("labels.npy", content)
    refused(lambda _: sources.Npz(path=str(path)).open("train"), path)
    refused(pycls.read_model, path)


SIZES_OF_TOKENS = [np.zeros((2, 2)), np.zeros((2, 2), int), np.array([-1]), np.array([True]), 3]


@pytest.mark.parametrize("array", SIZES_OF_TOKENS, ids=range(len(SIZES_OF_TOKENS)))
def test_sizes_of_tokens_are_counts(array, tmp_path):
    np.save(tmp_path / "token_bytes.npy", array)
    refused(lambda folder: cached_data._token_bytes(folder), tmp_path)


IMAGES = npy("'|u1'", "(2, 2, 2)", bytes(range(8)))


def archive(path, *, images=IMAGES):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("images.npy", images)
        made.writestr("labels.npy", npy("'<i8'", "(2,)", bytes(16)))
    return path.getvalue() if isinstance(path, io.BytesIO) else path.read_bytes()


def patched(content, old, new, *, last=True):
    at = content.rindex(old) if last else content.index(old)
    return content[:at] + new + content[at + len(old) :]


def in_directory(content, at, new):
    """Changes bytes of the first member in the directory of an archive."""
    start = content.index(b"PK\x01\x02") + at
    return content[:start] + new + content[start + len(new) :]


ARCHIVES = {
    "empty": lambda c: b"",
    "no archive": lambda c: b"images" * 100,
    "first half": lambda c: c[: len(c) // 2],
    "second half": lambda c: c[len(c) // 2 :],
    "without its end": lambda c: c[:-10],
    "encrypted": lambda c: in_directory(c, 8, b"\x01\x00"),
    "unknown compression": lambda c: in_directory(c, 10, b"\x63\x00"),
    "wrong checksum": lambda c: in_directory(c, 16, b"\x00\x00\x00\x00"),
    "declared 4 GB": lambda c: in_directory(c, 24, b"\xf0\xff\xff\xff"),
    "declared nothing": lambda c: in_directory(c, 24, b"\x00\x00\x00\x00"),
    "outside": lambda c: in_directory(c, 42, b"\xf0\xff\xff\x00"),
    "other name": lambda c: in_directory(c, 46, b"imagex.npy"),
    "twice": lambda c: c.replace(b"labels.npy", b"images.npy"),
    "damaged numbers": lambda c: c[:45] + bytes(20) + c[65:],
}


@pytest.mark.parametrize("damage", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_is_none_is_refused(damage, tmp_path):
    path = tmp_path / "train.npz"
    content = archive(path)
    sources.Npz(path=str(path)).open("train")
    path.write_bytes(damage(content))
    refused(lambda _: sources.Npz(path=str(path)).open("train"), path)
    refused(pycls.read_model, path)


def test_an_archive_of_a_megabyte_that_unpacks_to_more_than_a_hundred_is_refused(tmp_path):
    path = tmp_path / "train.npz"
    size = 2**27
    archive(path, images=npy("'|u1'", f"({size // 4}, 2, 2)", bytes(size)))
    assert path.stat().st_size < 2**20
    tracemalloc.start()
    source = sources.Npz(path=str(path))
    for read in (lambda _: source.check("train"), lambda _: source.open("train"), pycls.read_model):
        assert "unpack to" in refused(read, path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_members_that_share_their_bytes_are_counted_each(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "_ALWAYS_ALLOWED", 2**20)
    path = tmp_path / "train.npz"
    content = archive(path, images=npy("'|u1'", "(1024, 16, 16)", bytes(2**18)))
    with zipfile.ZipFile(path) as opened:
        (first, *_) = opened.infolist()
    with zipfile.ZipFile(path, "a") as made:
        for index in range(100):
            again = zipfile.ZipInfo(f"a{index}.npy")
            for name in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(again, name, getattr(first, name))
            made.filelist.append(again)
            made.NameToInfo[again.filename] = again
        made._didModify = True
    assert path.stat().st_size < len(content) + 100 * 100
    assert "unpack to" in refused(lambda _: sources.Npz(path=str(path)).open("train"), path)


def test_what_nobody_needs_is_not_read(tmp_path):
    path = tmp_path / "train.npz"
    archive(path)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("notes.npy", ARRAYS["objects"])
    assert sources.Npz(path=str(path)).open("train").size == 2


# safetensors


def tensors(header, content=bytes(16), *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def tensor(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS = {
    "empty": b"",
    "short": b"\x01\x00",
    "header of 10^12": tensors({"a": tensor()}, length=HUGE),
    "header of 2^64": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header cut": tensors({"a": tensor()})[:20],
    "no JSON": tensors(b"model"),
    "list": tensors([tensor()]),
    "not UTF-8": tensors(b'{"\xff": 1}'),
    "deep": tensors(b"[" * DEEP),
    "deep value": tensors(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "numbers cut": tensors({"a": tensor()}, bytes(15)),
    "more numbers": tensors({"a": tensor()}, bytes(17)),
    "outside": tensors({"a": tensor(offsets=(0, HUGE))}),
    "outside, huge": tensors({"a": tensor(shape=(HUGE,), offsets=(0, 4 * HUGE))}),
    "backwards": tensors({"a": tensor(offsets=(16, 0))}),
    "negative offsets": tensors({"a": tensor(offsets=(-16, 0))}),
    "overlapping": tensors({"a": tensor(), "b": tensor(offsets=(8, 24))}, bytes(24)),
    "the same bytes": tensors({"a": tensor(), "b": tensor()}),
    "a hole": tensors({"a": tensor(), "b": tensor(offsets=(20, 36))}, bytes(36)),
    "other shape": tensors({"a": tensor(shape=(3, 3))}),
    "huge shape": tensors({"a": tensor(shape=(HUGE,))}),
    "overflowing shape": tensors({"a": tensor(shape=(2**32, 2**32))}),
    "negative shape": tensors({"a": tensor(shape=(-2, -2))}),
    "shape of text": tensors({"a": tensor(shape=("2", "2"))}),
    "unknown type": tensors({"a": tensor(dtype="F33")}),
    "integers": tensors({"a": tensor(dtype="I32")}),
    "bytes": tensors({"a": tensor(dtype="U8", shape=(16,))}),
    "type that is none": tensors({"a": tensor(dtype=None)}),
    "three offsets": tensors({"a": tensor(offsets=(0, 8, 16))}),
    "no offsets": tensors({"a": {"dtype": "F32", "shape": (2, 2)}}),
    "metadata that is none": tensors({"__metadata__": [1], "a": tensor()}),
    "pickle": b"\x80\x04" + b"c" * 100,
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=SAFETENSORS)
def test_tensors_that_are_none_are_refused(content, tmp_path):
    path = tmp_path / safetensors_files.WHOLE
    path.write_bytes(content)
    refused(read_all, path.parent)
    refused(pycls.read_model, path, name=str(tmp_path))


def read_all(folder):
    files = safetensors_files.open_all(folder)
    return [files.read(name) for name in files.shapes]


INDICES = {
    "no map": {},
    "map that is none": {"weight_map": None},
    "list": {"weight_map": ["a"]},
    "empty": {"weight_map": {}},
    "text": {"weight_map": "model"},
    "number": {"weight_map": {"a": 7}},
    "missing": {"weight_map": {"a": "absent.safetensors"}},
    "many missing": {"weight_map": {str(i): f"{i}.safetensors" for i in range(10_000)}},
    "outside": {"weight_map": {"a": "../model.safetensors"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "folder": {"weight_map": {"a": ".."}},
    "no name": {"weight_map": {"a": ""}},
    "zero byte": {"weight_map": {"a": "a\0"}},
    "nested": {"weight_map": {"a": {"b": "c"}}},
    "long": {"weight_map": {"a": "x" * 100_000}},
    "long in bytes": {"weight_map": {"a": "\u00e9" * 200}},
    "surrogate": {"weight_map": {"a": "\ud800"}},
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_that_is_none_is_refused(index, tmp_path):
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps(index))
    refused(safetensors_files.open_all, tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(tensors({"w": tensor()}))
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / safetensors_files.INDEX).write_text(json.dumps(index))
    assert "w is in a.safetensors and in b.safetensors" in refused(
        safetensors_files.open_all, tmp_path
    )


# Checkpoints of TensorFlow 1

_HEADER = {"": tf_bundle.header()}
BUNDLES = {
    "negative": _HEADER | {"a": tf_bundle.entry(-4, -8, size=128)},
    "unknown size": _HEADER | {"a": tf_bundle.entry(-1, size=128)},
    "huge": _HEADER | {"a": tf_bundle.entry(HUGE, size=4 * HUGE)},
    "other size": _HEADER | {"a": tf_bundle.entry(HUGE, size=128)},
    "overflow": _HEADER | {"a": tf_bundle.entry(2**40, 2**40, size=128)},
    "many axes": _HEADER | {"a": tf_bundle.entry(*[1] * 300, size=4)},
    "unknown type": _HEADER | {"a": tf_bundle.entry(4, 8, dtype=99, size=128)},
    "no type": _HEADER | {"a": tf_bundle.entry(4, 8, dtype=0, size=128)},
    "text": _HEADER | {"a": tf_bundle.entry(10**9, dtype=7, size=128)},
    "resource": _HEADER | {"a": tf_bundle.entry(4, dtype=20, size=128)},
    "huge step": _HEADER | {"global_step": tf_bundle.entry(HUGE, dtype=9, size=8 * HUGE)},
    "step of text": _HEADER | {"global_step": tf_bundle.entry(4, dtype=7, size=128)},
    "outside": _HEADER | {"a": tf_bundle.entry(4, 8, offset=HUGE, size=128)},
    "negative offset": _HEADER | {"a": tf_bundle.entry(4, 8, offset=-5, size=128)},
    "other shard": _HEADER | {"a": tf_bundle.entry(4, 8, shard=1_000, size=128)},
    "negative shard": _HEADER | {"a": tf_bundle.entry(4, 8, shard=-1, size=128)},
    "many shards": {"": tf_bundle.header(10**9), "a": tf_bundle.entry(4, 8, size=128)},
    "no shards": {"": tf_bundle.header(0), "a": tf_bundle.entry(4, 8, size=128)},
    "no header": {"a": tf_bundle.entry(4, 8, size=128)},
    "junk": _HEADER | {"a": b"\xff\xff\xff"},
    "junk header": {"": b"\xff\xff", "a": tf_bundle.entry(4, 8, size=128)},
    "other checksum": _HEADER | {"a": tf_bundle.entry(4, 8, size=128)},
}


def read_bundle(prefix):
    checkpoint = Checkpoint(str(prefix))
    for name in checkpoint.shapes:
        checkpoint.read(name)
    checkpoint.step()


@pytest.mark.parametrize("entries", BUNDLES.values(), ids=BUNDLES)
def test_an_index_of_tensorflow_that_is_none_is_refused(entries, tmp_path):
    prefix = tmp_path / "model.ckpt-1"
    (tmp_path / "model.ckpt-1.index").write_bytes(tf_bundle.index(entries))
    (tmp_path / "model.ckpt-1.data-00000-of-00001").write_bytes(bytes(4_096))
    refused(read_bundle, prefix)


OPERATIVE = {
    "deep": "a.b = " + "(" * 5_000,
    "deep list": "a.b = " + "[" * 20_000 + "]" * 20_000,
    "no statement": "hello",
    "never closed": "a.b = (\n" + "1,\n" * 50_000,
    "continued": "a.b = \\\n" * 50_000,
    "huge": "#" * (2**20 + 1),
    "not UTF-8": b"a.b = '\xff'",
}


@pytest.mark.parametrize("text", OPERATIVE.values(), ids=OPERATIVE)
def test_an_operative_config_that_is_none_is_read_or_refused_at_once(text, tmp_path):
    path = tmp_path / "operative_config.gin"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with fuzzing.limited(10), contextlib.suppress(errors.UserError):
        operative_config.OperativeConfig.read(path).number("a", "b", 1.0)


# Vocabularies and text

MODEL = word_pieces.trained_model()
PIECES = {
    "empty": lambda c: b"",
    "text": lambda c: b"pieces\n" * 10,
    "first half": lambda c: c[: len(c) // 2],
    "second half": lambda c: c[len(c) // 2 :],
    "zeros": lambda c: bytes(1_000),
    "declared 2 GB": lambda c: b"\x0a\xff\xff\xff\xff\x07" + c,
}


@pytest.mark.parametrize("damage", PIECES.values(), ids=PIECES)
def test_a_sentencepiece_model_that_is_none_is_refused(damage, tmp_path):
    path = tmp_path / "spm.model"
    path.write_bytes(damage(MODEL))
    refused(lambda path: vocabularies.sentencepiece(str(path)), path)


def test_a_sentencepiece_model_of_a_terabyte_is_not_read(tmp_path):
    for name in ("spiece.model", "spm.model"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**40)
    refused(vocabulary_files.load, tmp_path)
    refused(lambda path: vocabularies.sentencepiece(str(path)), tmp_path / "spm.model")


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
BOMBS = {
    "one line": b"x" * 2**19,
    "many lines": b"x\n" * 2**18,
    "records": b'{"text": "x", "label": "y"}\n' * 2**14,
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_text_that_unpacks_to_far_more_than_its_size_is_refused(
    content, suffix, tmp_path, monkeypatch
):
    monkeypatch.setattr(foreign_files, "_ALWAYS_ALLOWED", 2**16)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](content))

    def read(path):
        with local_files.explain_errors(str(path)), local_files.open_bytes(str(path)) as file:
            for _ in file:
                pass

    assert "unpack to" in refused(read, path)
    assert "unpack to" in refused(lambda path: inputs.from_files(str(path)), path)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_line_without_an_end_is_refused(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "MOST_LINE_BYTES", 2**18)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](b"x\n" * 10 + b"x" * 2**20))
    assert "a line in it" in refused(lambda path: inputs.from_files(str(path)), path)


def read_stream(path):
    with open(path, "rb") as stream:
        list(foreign_files.lines_as_they_come(stream, str(path)))


ENDLESS = {
    "a.txt": lambda path: list(text_files.TextFiles(path=path, separator="line").documents()),
    "paragraph.txt": lambda path: list(text_files.TextFiles(path=path).documents()),
    "a.jsonl": lambda path: list(tables.read_rows(path)),
    "a.csv": lambda path: list(tables.read_rows(path, ["a", "b"])),
    "quoted.csv": lambda path: list(tables.read_rows(path, ["a", "b"])),
    "a.tsv": lambda path: list(tables.read_rows(path, ["a", "b"])),
    "inputs.txt": inputs.from_files,
    "standard input": read_stream,
}
"""Files that hold lines or documents of a gigabyte, and what reads them."""


@pytest.mark.parametrize("name", ENDLESS)
def test_a_line_or_a_document_without_an_end_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "MOST_LINE_BYTES", 2**18)
    path = tmp_path / name
    starts = {
        "paragraph.txt": b"a\n\nb\n" + b"b\n" * 2**18,
        "quoted.csv": b'a,"' + b"b" * 2**9 + b"\n" * 2**18,
    }
    path.write_bytes(starts.get(name, b"a"))
    os.truncate(path, 2**30)
    tracemalloc.start()
    message = refused(lambda path: ENDLESS[name](str(path)), path)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()
    assert "more than" in message or "larger than" in message


# Bytes that flip

FLIPS = 24
"""Of each kind of file: one bit, a few bytes, or the end is gone."""


def read_tensors(folder):
    files = safetensors_files.open_all(folder)
    return [files.read(name) for name in files.shapes]


def read_pieces(folder):
    """Reads a vocabulary, of which seqio keeps what it has read from a path once."""
    copy = folder / f"{len(os.listdir(folder))}.model"
    shutil.copyfile(folder / "spm.model", copy)
    vocabularies.sentencepiece(str(copy))


def read_archive(folder):
    return sources.Npz(path=str(folder / "train.npz")).open("train")


FLIPPED = {
    "cache.json": (json.dumps(ABOUT).encode(), lambda folder: cached_data.read_about(str(folder))),
    "config.json": (
        json.dumps(T5).encode(),
        hugging_face.read_description,
    ),
    "convt5.json": (
        json.dumps({"format": 1, "model": DESCRIPTION}).encode(),
        portable.read_model,
    ),
    "vocabulary/about.json": (json.dumps(KEPT).encode(), vocabulary_files.load),
    "metrics.jsonl": (
        b'{"step": 1, "loss": 2.5}\n' * 3,
        lambda folder: run_log.read_records(folder / "metrics.jsonl", need=["step"]),
    ),
    "token_bytes.npy": (npy("'<i4'", "(4,)", bytes(16)), cached_data._token_bytes),
    "train.npz": (archive(io.BytesIO()), read_archive),
    "model.safetensors": (
        tensors({"a": tensor(), "b": tensor(offsets=(16, 32))}, bytes(32)),
        read_tensors,
    ),
    "model.ckpt-1.index": (
        tf_bundle.index(_HEADER | {f"v{i}": tf_bundle.entry(2, 2, size=16) for i in range(9)}),
        lambda folder: Checkpoint(str(folder / "model.ckpt-1")),
    ),
    "spm.model": (MODEL, read_pieces),
    "a.txt.gz": (gzip.compress(b"text\n" * 50), lambda f: inputs.from_files(str(f / "a.txt.gz"))),
    "a.txt.xz": (lzma.compress(b"text\n" * 50), lambda f: inputs.from_files(str(f / "a.txt.xz"))),
}
"""Files that are whole, and what reads them in a folder."""


@pytest.mark.parametrize("name", FLIPPED)
def test_a_file_with_flipped_bytes_is_read_or_refused(name, tmp_path):
    content, read = FLIPPED[name]
    (tmp_path / "model.ckpt-1.data-00000-of-00001").write_bytes(bytes(64))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if name != "convt5.json":  # It has no arrays here.
        file.write_bytes(content)
        read(tmp_path)
    num_refused = 0
    for seed in range(FLIPS):
        file.write_bytes(fuzzing.flipped(content, seed))
        with fuzzing.limited(fuzzing.LIMIT_SECS), contextlib.suppress(errors.UserError):
            read(tmp_path)
            continue
        num_refused += 1
    assert num_refused


@pytest.mark.parametrize("name", FLIPPED)
def test_a_file_that_may_not_be_read_is_named(name, tmp_path):
    content, read = FLIPPED[name]
    (tmp_path / "model.ckpt-1.data-00000-of-00001").write_bytes(bytes(64))
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("permissions do not bind this user, as they do not bind root")
    if name == "spm.model":  # `read_pieces` copies it.
        refused(lambda _: vocabularies.sentencepiece(str(file)), file)
    else:
        refused(read, tmp_path)


ATTACKS = {
    "Invalid JSON: truncated, nested deep, 8 MB, repeated keys, long numbers, pipes": (
        len(JSON) * len(JSON_FILES)
        + len(THINGS) * (len(OPENED) + 1)
        + len(LINES)
        + len(OVERWHELMING)
        + 1
    ),
    "Settings of models, caches, checkpoints and vocabularies: missing, mistyped or absurd": (
        len(CONFIGS)
        + len(MISSING)
        + len(ABSURD)
        + len(DESCRIBED)
        + len(CACHES)
        + len(RECORDS)
        + len(UNFINISHED)
        + len(ROWS)
        + len(VOCABULARIES)
    ),
    "NumPy arrays and archives: pickles, code, shapes of 10^12, bombs, encrypted, repeated": (
        3 * len(ARRAYS) + len(SIZES_OF_TOKENS) + 2 * len(ARCHIVES) + 3
    ),
    "safetensors and their indices: headers of 10^12, data that overlaps or is missing": (
        2 * len(SAFETENSORS) + len(INDICES) + 1
    ),
    "TensorFlow 1 checkpoints and their gin files: shapes that abort TensorFlow": (
        len(BUNDLES) + len(OPERATIVE)
    ),
    "SentencePiece models; gzip, xz and bzip2 text that unpacks without end": (
        len(PIECES) + 2 + 2 * len(BOMBS) * len(PACKERS) + len(PACKERS)
    ),
    "Lines and documents of a gigabyte in text files and tables": len(ENDLESS),
    "Random flipped or truncated bytes, in twelve formats": FLIPS * len(FLIPPED),
}
