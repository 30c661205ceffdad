"""What seqio tasks are read from, their source or their cache, with errors that name the task."""

import collections
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import seqio
import tensorflow as tf

from convt5 import errors
from convt5.runtime import local_files
from convt5.tasks import sources, tables

_CACHED_SPLIT = re.compile(r"info\.(.+)\.json")

Built = TypeVar("Built")


def without_autograph(build: Callable[[], Built]) -> Built:
    """Returns `build()`, without AutoGraph if possible, which takes most of the time of a start.

    Functions with statements that only AutoGraph can trace raise errors without it.
    """
    try:
        return tf.autograph.experimental.do_not_convert(build)()
    except (errors.UserError, tf.errors.OpError, OSError):
        raise
    except Exception:  # Raised again with AutoGraph unless that was the reason.
        return build()


def use_caches(folders: str | Iterable[str]) -> None:
    """Makes folders of caches known to seqio, on whose tasks rates and sources then depend."""
    folders = [folders] if isinstance(folders, str) else folders
    known = seqio.get_global_cache_dirs()
    seqio.add_global_cache_dirs([name for name in folders if name not in known])


def splits(task: seqio.Task, *, cached: bool) -> list[str]:
    """Returns the splits of a task.

    Args:
        task: the task.
        cached: whether it is read from its cache, whose source may be gone.

    Raises:
        UserError: the data of its source is not there.
    """
    if cached and task.cache_dir:
        return _cached_splits(task.cache_dir)
    try:
        return sorted(task.splits)
    except (AssertionError, LookupError, OSError, ValueError) as error:
        if isinstance(error, errors.UserError) or not isinstance(task.source, seqio.TfdsDataSource):
            raise
        name, folder = task.source.tfds_dataset.name, task.source.tfds_dataset.data_dir
        raise errors.UserError(
            f"task {task.name!r}: its data set {name!r} of TFDS is not prepared in "
            f"{folder or 'the default folder of TFDS'}; prepare it with `tfds build {name}`, set "
            "TFDS_DATA_DIR to where it is, or read the task from a cache of seqio."
        ) from error


@functools.cache
def _cached_splits(folder: str) -> list[str]:
    names = map(_CACHED_SPLIT.fullmatch, tf.io.gfile.listdir(folder))
    return sorted(name[1] for name in names if name)


def check_apart(trained: Iterable[seqio.Task], measured: Iterable[seqio.Task], split: str) -> None:
    """Checks that files that measure tasks are not those of other tasks that are trained on.

    `check_files` compares the splits of one task, or of tasks of the same files such as denoisers.

    Raises:
        UserError: some files of a task, or examples of TFDS, are also in the "train" of another.
    """
    # Denoisers share a source, whose files are then listed once.
    trained_sources = dict.fromkeys(task.source for task in trained)
    train = [_files(source, "train") for source in trained_sources]
    for source in dict.fromkeys(task.source for task in measured):
        for other in trained_sources:
            if isinstance(source, seqio.TfdsDataSource) and isinstance(other, seqio.TfdsDataSource):
                sources.check_tfds_apart(source, split, other)
        own, held_out = _files(source, "train"), _files(source, split)
        others = [name for names in train if set(names) != set(own) for name in names]
        if local_files.common(others, held_out):
            local_files.check_apart({"train": [*itertools.chain(*train)], split: held_out})


def _files(source: Any, split: str) -> list[str]:
    """Returns the files of a split, as far as they are known."""
    if isinstance(source, sources.TextFilesSource | tables.TableSource):
        return source.files(split) if split in source.splits else []
    is_known = isinstance(source, seqio.FileDataSource) and split in source.splits
    return list(source.list_shards(split)) if is_known else []


def checked_source(task: seqio.Task, split: str, *, cached: bool) -> seqio.DataSource:
    """Returns what training reads a task from, its source or its cache; see `check_files`."""
    source = task._get_cached_source(split) if cached else task.source
    check_files(task, source, split)
    return source


def check_files(task: seqio.Task, source: seqio.DataSource, split: str) -> None:
    """Checks the files of a source that was given their names.

    Raises:
        UserError: no file matches the names of a split, one would be read twice, some of the split
            are also in "train", or files that are compressed or UTF-16 would be read as they are.
    """
    if isinstance(source, seqio.TfdsDataSource):
        sources.check_tfds_apart(source, split, source)
    if not isinstance(source, seqio.FileDataSource):
        return
    splits = {split, *({"train"} & {*source.splits})}
    found = {name: source.list_shards(name) for name in splits}
    local_files.check_apart(found)
    files = found[split]
    packed = [name for name in files if local_files.without_compression(name) != name]
    if packed and isinstance(source, seqio.TextLineDataSource):
        raise errors.UserError(
            f"task {task.name!r}, split={split!r}: seqio.TextLineDataSource reads {packed[0]!r} as "
            "it is, compressed; unpack the files, or read them by a seqio.FunctionDataSource with "
            "tf.data.TextLineDataset(files, compression_type='GZIP')."
        )
    pattern = getattr(source, "_split_to_filepattern", {}).get(split)
    if twice := collections.Counter(files) - collections.Counter(local_files.distinct(files)):
        raise errors.UserError(
            f"task {task.name!r}, split={split!r}: {pattern!r} match {next(iter(twice))!r} twice, "
            "by its name or a link, and would read its rows twice; correct the patterns in it."
        )
    local_files.check_once(files)
    if isinstance(source, seqio.TextLineDataSource):
        for name in files:
            if not local_files.is_remote(name):  # Opening many of those would take long.
                local_files.check_no_utf_16(name)
    if not files:
        raise errors.UserError(
            f"task {task.name!r}, split={split!r}: no file matches {pattern!r} (working directory "
            f"{os.getcwd()!r}); correct the path in the task."
        )
