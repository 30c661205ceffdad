"""Trees as flat mappings from names to arrays, and as the nested folders that are written."""

from collections.abc import Mapping
from typing import Any

import jax

from convt5.modeling import tree_paths


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as `encoder/layers/0/mlp/wi/kernel`."""
    return dict(tree_paths.named_leaves(tree))


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves by path as mappings within mappings, one for each part of a path."""
    folders: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parts, name = path.split("/")
        inner = folders
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[name] = leaf
    return folders


def filled(like: Any, folders: Mapping[str, Any]) -> Any:
    """Returns a tree shaped as `like` with the leaves that `nested` has put into folders."""

    def find(path, _):
        found: Any = folders
        for name in tree_paths.path_name(path).split("/"):
            found = found[name]
        return found

    return jax.tree.map_with_path(find, like)
