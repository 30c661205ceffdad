"""Trees as flat mappings from names to arrays, and as the nested folders that are written."""

from collections.abc import Mapping
from typing import Any

import jax

from convt5 import tree_paths


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, such as `encoder/layers/0/mlp/wi/kernel`."""
    return dict(tree_paths.named_leaves(tree))


def nested(by_path: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, leaf in by_path.items():
        *folders, name = path.split("/")
        inner = nested
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return nested


def filled(like: Any, nested: Mapping[str, Any]) -> Any:
    """Returns a tree shaped as `like` with the leaves of `nested`."""

    def find(path, _):
        found: Any = nested
        for name in tree_paths.path_name(path).split("/"):
            found = found[name]
        return found

    return jax.tree.map_with_path(find, like)
