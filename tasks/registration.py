"""Makes tasks, and registers them with seqio unless another project has a task of the name."""

import re
from typing import Any

import seqio
from absl import logging

from convt5 import errors


def task(name: str, **settings: Any) -> seqio.Task:
    """Returns a seqio task.

    Raises:
        UserError: seqio takes no such name.
    """
    if not re.fullmatch(r"[\w.:#]+", name):
        raise errors.UserError(
            f"name={name!r} of a task must consist of letters, digits, '_', '.', ':' and '#', as "
            "seqio requires; rename it, such as 'my_reviews'."
        )
    return seqio.Task(name, **settings)


def add(provider: seqio.Task | seqio.Mixture) -> None:
    """Registers a task or mixture; one that is registered under its name stays, with a warning."""
    if provider.name in {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}:
        logging.warning(
            "seqio has another task %r, which stays; that of convt5 is not registered",
            provider.name,
        )
        return
    is_task = isinstance(provider, seqio.Task)
    registry = seqio.TaskRegistry if is_task else seqio.MixtureRegistry
    registry.add_provider(provider.name, provider)
