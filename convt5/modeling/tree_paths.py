"""Names of the leaves of a tree, as used in rules, messages and checkpoints.

`optimizer`, `sharding` and `train_step` select parameters by names such as
`encoder/layers/0/mlp/wi/kernel`. A module and the plain dict of its parameters give the same names.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax


def path_name(key_path: tuple[Any, ...]) -> str:
    """Joins a jax key path with slashes, without the attribute inside an NNX variable."""
    # An nnx.Param is a tree node whose only child is its attribute `value`; dict keys are kept.
    if key_path and key_path[-1] == jax.tree_util.GetAttrKey("value"):
        key_path = key_path[:-1]
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns every leaf with its name, in the order of `jax.tree.leaves`."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether any of the regular expressions matches somewhere in the name."""
    return any(re.search(pattern, name) for pattern in patterns)


def pattern_faults(**patterns: Sequence[str]) -> list[str]:
    """Returns errors in settings that are lists of regular expressions."""
    faults = []
    for setting, values in patterns.items():
        if isinstance(values, str):
            # As a list of its letters, a string would match nearly every name.
            faults.append(f"{setting}={values!r} must be a list of regular expressions.")
            continue
        for value in values:
            try:
                re.compile(value)
            except re.error as error:
                faults.append(f"{setting}: {value!r} is no regular expression ({error}).")
    return faults
