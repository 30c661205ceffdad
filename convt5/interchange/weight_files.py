"""Finds the files of a model's weights: one, or several listed in a JSON index."""

import pathlib

from convt5 import errors
from convt5.runtime import foreign_files

REMEDY = "it may be truncated: copy it again."


def find(folder: pathlib.Path, whole: str, index: str) -> list[pathlib.Path]:
    """Returns the weight files in a folder; empty if neither name exists.

    Args:
        folder: folder of the model.
        whole: name of a file with all weights, which takes precedence.
        index: name of a JSON file whose `weight_map` has the file of each array.

    Raises:
        UserError: the index is invalid, or names a missing file or one elsewhere.
    """
    if (folder / whole).is_file():
        return [folder / whole]
    if not (folder / index).is_file():
        return []
    by_name = foreign_files.read_json(folder / index, remedy=REMEDY).get("weight_map")
    if not isinstance(by_name, dict) or not by_name:
        raise errors.UserError(
            f"{folder / index} must have in weight_map the file of each array, not "
            f"{errors.clip(by_name)}; copy it again."
        )
    for shard in by_name.values():
        if not foreign_files.is_file_name(shard):
            raise errors.UserError(
                f"{folder / index} names the file {errors.clip(shard)}; it must be one in the "
                "same folder."
            )
    shards = sorted(set(by_name.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise errors.UserError(
            f"{folder} lacks {', '.join(errors.abbreviate(absent))}, which {index} names."
        )
    return [folder / shard for shard in shards]
