"""TensorFlow 1 checkpoints: variables by name, read one at a time; needs TensorFlow."""

import functools
import pathlib
import re
from typing import Any

import numpy as np

from convt5 import errors
from convt5.errors.checks import MOST_STEPS
from convt5.interchange.mapping import Shape
from convt5.runtime import atomic_files, quiet_imports

STEP = "global_step"
SLOT = re.compile(r"^(?P<variable>.+)_slot_(?P<kind>\w+)$")

_FLOATS = ("bfloat16", "float16", "float32")


class Checkpoint:
    """A TensorFlow 1 checkpoint, read one variable at a time.

    Args:
        path: its prefix (`.../model.ckpt-524288`), one of its files, or its folder, of which the
            newest checkpoint is opened.

    Raises:
        UserError: no checkpoint, missing or truncated files, or an unknown dtype.
    """

    def __init__(self, path: str):
        tf = _tensorflow()
        # Errors of TensorFlow's reader for damaged files.
        self._errors = (tf.errors.OpError, ValueError, RuntimeError, LookupError)
        self.prefix = find_prefix(path)
        self._check_files()
        self._check_index(tf)
        try:
            self._reader = tf.train.load_checkpoint(self.prefix)
            self.shapes: dict[str, Shape] = {
                name: tuple(shape)
                for name, shape in sorted(self._reader.get_variable_to_shape_map().items())
            }
            types = self._reader.get_variable_to_dtype_map()
        except self._errors as error:
            raise self._damaged(error) from None
        self._unread = set(self.shapes)
        self.dtypes = {name: types[name].name for name in self.shapes}
        if "_CHECKPOINTABLE_OBJECT_GRAPH" in self.shapes:
            raise errors.UserError(
                f"checkpoint={self.prefix} was written by TensorFlow 2 objects; Mesh TensorFlow "
                "writes checkpoints by variable name. Pass one of those."
            )
        faults = [
            f"variable {name} is stored as {dtype}, which is none of {', '.join(_FLOATS)}."
            for name, dtype in self.dtypes.items()
            if dtype not in _FLOATS and name != STEP
        ]
        errors.raise_all(faults, where=f"checkpoint={self.prefix}")

    def read(self, name: str) -> np.ndarray:
        """Returns a variable in float32."""
        try:
            value = np.asarray(self._reader.get_tensor(name), np.float32)
        except self._errors as error:
            raise self._damaged(error, name) from None
        self._unread.discard(name)
        return value

    def check_unread(self) -> None:
        """Reads the variables that were not read yet, because a truncated end may affect only them.

        Raises:
            UserError: a variable is damaged.
        """
        for name in sorted(self._unread):
            self.read(name)

    def step(self) -> int:
        """Returns the number of updates made; 0 if not recorded."""
        if STEP not in self.shapes:
            return 0
        try:
            step = int(self._reader.get_tensor(STEP))
            if not 0 <= step < MOST_STEPS:
                raise ValueError(f"its step is {step}")
            return step
        except (TypeError, *self._errors) as error:
            raise self._damaged(error, STEP) from None

    def variables(self) -> dict[str, Shape]:
        """Returns the shapes of all variables except optimizer slots and the step."""
        return {
            name: shape
            for name, shape in self.shapes.items()
            if name != STEP and not SLOT.match(name)
        }

    def slots(self) -> dict[str, Shape]:
        """Returns the shapes of the optimizer's variables."""
        return {name: shape for name, shape in self.shapes.items() if SLOT.match(name)}

    def _check_files(self) -> None:
        """Raises `UserError` for a missing shard; TensorFlow would notice only when reading it."""
        folder, name = pathlib.PurePath(self.prefix).parent, pathlib.PurePath(self.prefix).name
        if atomic_files.is_remote(self.prefix):
            return
        present = {p.name for p in pathlib.Path(folder).glob(f"{name}.data-*-of-*")}
        counts = {int(shard.rsplit("-", 1)[1]) for shard in present}
        total = max(counts, default=1)
        wanted = {f"{name}.data-{i:05d}-of-{total:05d}" for i in range(total)}
        if absent := sorted(wanted - present):
            raise errors.UserError(
                f"checkpoint={self.prefix} lacks {', '.join(absent[:5])}"
                f"{' and others' if len(absent) > 5 else ''}: the index is there, its data is not; "
                "copy all files of the checkpoint again."
            )

    def _check_index(self, tf: Any) -> None:
        """Raises `UserError` for an index that would crash TensorFlow or exhaust memory."""
        from convt5.interchange import tf_index

        def shard_bytes(index: int, count: int) -> int | None:
            name = f"{self.prefix}.data-{index:05d}-of-{count:05d}"
            return tf.io.gfile.stat(name).length if tf.io.gfile.exists(name) else None

        try:
            with tf.io.gfile.GFile(f"{self.prefix}.index", "rb") as file:
                content = file.read(tf_index.MOST_BYTES + 1)
            if len(content) > tf_index.MOST_BYTES:
                raise ValueError(f"the index has more than {tf_index.MOST_BYTES:,} bytes")
            tf_index.check(content, functools.cache(shard_bytes))
        except (ValueError, *self._errors) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception, name: str | None = None) -> errors.UserError:
        return errors.UserError(
            f"checkpoint={self.prefix} cannot be read{f' at variable {name}' if name else ''} "
            f"({_first_line(error)}); the files may be truncated: copy them again and compare "
            "their sizes."
        )


def find_prefix(path: str) -> str:
    """Returns the prefix of a checkpoint, given that, one of its files, or its folder."""
    tf = _tensorflow()
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.rstrip("/"))
    if tf.io.gfile.exists(f"{prefix}.index"):
        return prefix
    if tf.io.gfile.isdir(prefix):
        name = _named_newest(tf, prefix)
        if name and tf.io.gfile.exists(f"{prefix}/{name}.index"):
            return f"{prefix}/{name}"
        prefixes = sorted(name[: -len(".index")] for name in tf.io.gfile.glob(f"{prefix}/*.index"))
        if prefixes:
            return max(prefixes, key=lambda name: int((re.findall(r"\d+$", name) or ["0"])[0]))
    raise errors.UserError(
        f"checkpoint={path} does not exist: expected the files {path}.index and "
        f"{path}.data-00000-of-.... Pass the prefix, such as model.ckpt-524288, without endings."
    )


def _named_newest(tf: Any, folder: str) -> str:
    """Returns the name in the file `checkpoint` of a folder; empty if it names none.

    The path around the name is often that of the folder of which this one is a copy.
    """
    try:
        state = tf.train.get_checkpoint_state(folder)
    except UnicodeDecodeError:  # The file is of another format, such as T5X's.
        state = None
    return pathlib.PurePath(state.model_checkpoint_path).name if state else ""


def _tensorflow():
    """Imports TensorFlow, only when a checkpoint is read."""
    with quiet_imports.without_tensorflow_chatter():
        try:
            import tensorflow as tf
        except ImportError as error:
            raise errors.UserError(
                f"reading checkpoints of TensorFlow needs TensorFlow, which cannot be imported "
                f"({error}); install it with pip install tensorflow."
            ) from None
    return tf


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
