"""Reads arrays from PyTorch files, one array at a time.

A PyTorch file is a pickle with numbers beside it. `torch.load(weights_only=True)` only makes
tensors, but a small pickle can still request terabytes, or never end. So the pickle is checked
first: it may only build text, numbers, containers and tensors, each once.
"""

import dataclasses
import importlib
import io
import os
import pathlib
import pickletools
import re
import tarfile
import zipfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from convt5 import errors
from convt5.interchange.mapping import Shape
from convt5.runtime import foreign_files

WHOLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"

OLDEST = (2, 10)
"""Oldest safe version of PyTorch: earlier ones can run code from a file with `weights_only`."""

MOST_PICKLE_BYTES = 2**23
"""Most bytes of names, shapes and settings in a file; 10,000 tensors take a quarter of it."""

_REMEDY = "copy it again, or save the state_dict of the model anew with torch.save."
_PROTOCOL = 2  # Pickle protocol of torch.save.
_ZIP = b"PK\x03\x04"
_LEGACY_PICKLES = 5  # Magic number, version, machine, the state and the keys of its storages.
_FLOATS = ("float32", "bfloat16", "float16", "float64")
# Tied arrays occur under several names, but no model repeats everything this often.
_MOST_REPEATS = 8
_MOST_BUILT = 2**26
_ALWAYS_ALLOWED = 2**26

_ITEM_SIZES = {
    **{"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2},
    **{"Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1},
}
_GLOBAL = re.compile(
    r"collections OrderedDict|torch Size|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
    rf"|torch ({'|'.join(_ITEM_SIZES)})Storage"
)
_CHANGE_THE_FIRST = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}


@dataclasses.dataclass(eq=False)
class _Built:
    """A pickled value that is not built: its expanded size, and its value if it is simple."""

    size: int
    value: Any = None
    is_shared: bool = False


class Files:
    """The arrays of some files by name; reading converts to float32.

    Attributes:
        shapes: shapes of the arrays.
        beside: other contents of the outermost mapping, if the state is inside it; None for what is
            no text.
    """

    def __init__(self, paths: list[pathlib.Path], *, inside: str | None = None):
        """Opens the files; numbers are read on request.

        Args:
            paths: the files, each with a mapping from names to tensors.
            inside: the key of that mapping in an outer one, if there is one.

        Raises:
            UserError: PyTorch is missing or too old, or a file is damaged or holds something other
                than arrays.
        """
        self._tensors: dict[str, tuple[Any, pathlib.Path]] = {}
        self.shapes: dict[str, Shape] = {}
        self.beside: dict[str, str | None] = {}
        faults = []
        for path in paths:
            state = _load(path)
            inner = None if inside is None else dict.get(state, inside)
            if isinstance(inner, dict):
                self.beside |= {
                    str(name): value if isinstance(value, str) else None
                    for name, value in dict.items(state)
                    if name != inside
                }
                state = inner
            _check_state(path, state)
            for name, value in dict.items(state):
                if name in self._tensors:
                    faults.append(f"{name} is in {self._tensors[name][1].name} and in {path.name}.")
                self._tensors[name] = value, path
                self.shapes[name] = tuple(value.shape)
        errors.raise_all(errors.abbreviate(faults), where=str(paths[0].parent))

    def read(self, name: str) -> np.ndarray:
        """Returns an array in float32; raises `UserError` for one of integers."""
        tensor, path = self._tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _FLOATS:
            raise errors.UserError(
                f"{path}: {errors.clip(name)} is stored as {kind}, which is none of "
                f"{', '.join(_FLOATS)}."
            )
        return np.array(tensor.detach().float().numpy())  # A copy: the file may change.


def storages(stream: IO[bytes]) -> dict[str, int]:
    """Returns the bytes of every storage that a pickle names, by key, without building anything.

    Values may be referenced repeatedly only while the fully expanded pickle stays small: otherwise
    a few bytes could make a key that takes years to hash.

    Raises:
        ValueError: it builds something other than text, numbers, containers and tensors.
    """
    stack: list[_Built | None] = []  # None is a mark.
    memo: dict[Any, _Built] = {}
    sizes: dict[str, int] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "PROTO" and argument != _PROTOCOL:
            raise ValueError(f"its pickle has protocol {argument}, not {_PROTOCOL}")
        if name == "GLOBAL" and not _GLOBAL.fullmatch(str(argument)):
            raise ValueError(f"it names {errors.clip(argument)}, which is no part of an array")
        try:
            if name == "BINPERSID":
                key, size = _storage(stack[-1])
                if sizes.setdefault(key, size) != size:
                    raise ValueError(f"storage {key} has two sizes")
            _follow(stack, memo, opcode, argument)
        except LookupError:
            raise ValueError("its pickle is damaged") from None
        if stack and stack[-1] is not None and stack[-1].size > _MOST_BUILT:
            raise ValueError("what it holds repeats itself without end")
    return sizes


def _follow(
    stack: list[_Built | None],
    memo: dict[Any, _Built],
    opcode: pickletools.OpcodeInfo,
    argument: Any,
) -> None:
    """Applies an opcode to a stack of descriptions of values."""
    name = opcode.name
    if name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = _last(stack)
    elif name in ("BINGET", "LONG_BINGET"):
        memo[argument].is_shared = True
        stack.append(memo[argument])
    elif name == "MARK":
        stack.append(None)
    elif name not in ("PROTO", "STOP"):
        taken = _take(stack, opcode.stack_before)
        size = 1 + sum(part.size for part in taken)
        if name in _CHANGE_THE_FIRST:
            if taken[0].is_shared:
                raise ValueError("it changes what it has used before")
            taken[0].size = size
            stack.append(taken[0])
        elif name.startswith("TUPLE"):
            stack.append(_Built(size, tuple(part.value for part in taken)))
        else:
            text = len(argument) if isinstance(argument, str | bytes) else 0
            stack.append(_Built(size + text, argument))


def _take(stack: list[_Built | None], before: Sequence[Any]) -> list[_Built]:
    """Pops the operands of an opcode, in order, without its mark."""
    taken = []
    if pickletools.markobject in before:
        while (part := stack.pop()) is not None:
            taken.append(part)
        before = before[: before.index(pickletools.markobject)]
    taken += [_last(stack, take=True) for _ in before]
    return taken[::-1]


def _last(stack: list[_Built | None], *, take: bool = False) -> _Built:
    last = stack.pop() if take else stack[-1]
    if last is None:
        raise ValueError("its pickle is damaged")
    return last


def _storage(built: _Built | None) -> tuple[str, int]:
    """Returns the key and the bytes of the storage that a persistent id names."""
    value = built.value if built else None
    if not isinstance(value, tuple) or len(value) not in (5, 6):
        raise ValueError("it names a storage that is none")
    what, kind, key, _, count, *view = value
    match = _GLOBAL.fullmatch(kind) if isinstance(kind, str) else None
    if what != "storage" or match is None or match[2] is None or any(view):
        raise ValueError("it names a storage that is none")
    if not isinstance(key, str) or type(count) is not int or count < 0:
        raise ValueError("it names a storage that is none")
    return key, count * _ITEM_SIZES[match[2]]


def _load(path: pathlib.Path) -> dict[Any, Any]:
    """Returns the outermost mapping of a file with its tensors."""
    torch = _torch(path)
    try:
        foreign_files.check_regular(path)
        is_zip = _check_container(path)
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        if not isinstance(held, dict):
            raise ValueError(f"it holds {type(held).__name__}, not arrays by name")
    except errors.UserError:
        raise
    except Exception as error:  # Pickle, zipfile and PyTorch raise many kinds.
        told = str(error).partition("\n")[0]  # PyTorch appends advice.
        why = error if isinstance(error, OSError | ValueError) else f"{_kind(error)}: {told}"
        raise foreign_files.unreadable(path, why, _REMEDY) from None
    return held


def _torch(path: pathlib.Path) -> Any:
    try:
        torch = importlib.import_module("torch")  # Not a dependency of convt5.
    except ImportError:
        raise errors.UserError(
            f"{path} is a file of PyTorch, which is not installed; install convt5's extra torch "
            "(pip install 'convt5[torch]'), or save the arrays as .safetensors where PyTorch is."
        ) from None
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < OLDEST:
        raise errors.UserError(
            f"{path} is a file of PyTorch, of which {torch.__version__} is installed; before "
            f"{'.'.join(map(str, OLDEST))} it cannot read files of others safely: upgrade torch."
        )
    return torch


def _check_container(path: pathlib.Path) -> bool:
    """Returns whether a file is a zip file; raises `ValueError` if its sizes are inconsistent."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(MOST_PICKLE_BYTES)
    if start.startswith(_ZIP):
        _check_zip(path, size)
        return True
    if _is_tar(start):
        raise ValueError("it is a tar file of PyTorch before 0.4, which cannot be read safely")
    stream = io.BytesIO(start)
    needed = sum(sum(storages(stream).values()) for _ in range(_LEGACY_PICKLES))
    if needed > size:
        raise ValueError(f"its arrays take {needed:,} bytes, but it has {size:,}")
    return False


def _check_zip(path: pathlib.Path, size: int) -> None:
    """Raises `ValueError` unless members are uncompressed and storages have their stated sizes."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        sizes = {name: member.file_size for name, member in members.items()}
        if len(members) < len(archive.infolist()):
            raise ValueError("a member of it is there twice")
        if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members.values()):
            raise ValueError("a member of it is compressed or encrypted, which PyTorch does not do")
        if sum(sizes.values()) > size:
            raise ValueError(f"its members take {sum(sizes.values()):,} bytes, but it has {size:,}")
        folder, *others = {name.partition("/")[0] for name in members} or {""}
        pickled = f"{folder}/data.pkl"
        if others or pickled not in members:
            raise ValueError("it is no file of PyTorch: it has no data.pkl")
        if f"{folder}/constants.pkl" in members:
            raise ValueError("it is a program of TorchScript, which is never run")
        if sizes[pickled] > MOST_PICKLE_BYTES:
            raise ValueError(f"its data.pkl has {sizes[pickled]:,} bytes")
        for key, needed in storages(io.BytesIO(archive.read(pickled))).items():
            held = sizes.get(f"{pickled.removesuffix('.pkl')}/{key}", 0)
            if held != needed:
                raise ValueError(f"storage {key} takes {needed:,} bytes, but {held} are there")


def _is_tar(start: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(start[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _check_state(path: pathlib.Path, state: dict[Any, Any]) -> None:
    """Raises `UserError` unless a mapping holds named arrays consistent with the file."""
    torch = importlib.import_module("torch")
    told, stored = 0, path.stat().st_size
    for name, value in dict.items(state):
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise errors.UserError(
                f"{path} holds {errors.clip(name)}, which is {_kind(value)} and no array; "
                "expected arrays by name, as the state_dict of a model has them."
            )
        size = value.numel() * value.element_size()
        told += size
        if size > value.untyped_storage().nbytes():
            why = f"{errors.clip(name)} of shape {tuple(value.shape)} repeats its numbers"
            raise foreign_files.unreadable(path, why, _REMEDY)
    if told > max(_ALWAYS_ALLOWED, _MOST_REPEATS * stored):
        why = f"its arrays take {told:,} bytes, but it has {stored:,}"
        raise foreign_files.unreadable(path, why, _REMEDY)


def _kind(value: object) -> str:
    return type(value).__name__
