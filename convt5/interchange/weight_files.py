"""Which files hold the weights of a model: one, or several that an index in JSON names."""

import pathlib

from convt5 import errors
from convt5.runtime import foreign_files

REMEDY = "it may be truncated: copy it again."


def find(folder: pathlib.Path, whole: str, index: str) -> list[pathlib.Path]:
    """Returns the files of a folder with weights; none where neither of two names is there.

    Args:
        folder: of the model.
        whole: the name of a file with all weights, which is taken first.
        index: the name of a file of JSON whose `weight_map` has the file of each array.

    Raises:
        UserError: an index that is none, or that names a file elsewhere or one that is missing.
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
        if not isinstance(shard, str) or not _is_plain_name(shard):
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


def _is_plain_name(name: str) -> bool:
    return pathlib.PurePath(name).name == name and "\0" not in name and len(name) < 256
