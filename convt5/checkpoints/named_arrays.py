"""Converts trees to flat mappings from names to arrays, and to the nested dicts on disk."""

from collections.abc import Mapping
from typing import Any

import jax

from convt5.modeling import tree_paths


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as `encoder/layers/0/mlp/wi/kernel`."""
    return dict(tree_paths.named_leaves(tree))


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Converts leaves by path to nested dicts, one level for each part of a path."""
    folders: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parts, name = path.split("/")
        inner = folders
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[name] = leaf
    return folders


def fill(like: Any, folders: Mapping[str, Any]) -> Any:
    """Returns a tree like `like` whose leaves come from the nested dicts of `nest`."""

    def find(path, _):
        node: Any = folders
        for name in tree_paths.path_name(path).split("/"):
            node = node[name]
        return node

    return jax.tree.map_with_path(find, like)
