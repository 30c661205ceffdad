"""Finds registered seqio tasks and mixtures by name."""

import importlib

import seqio

from convt5 import errors


def find_registered(name: str) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture registered under a name.

    Raises:
        UserError: there is none.
    """
    importlib.import_module("convt5.tasks")  # Registers the tasks of convt5.
    names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    if name not in names:
        raise errors.UserError(
            f"task={name} is not registered with seqio; correct the name, or import the module "
            f"that registers it in a gin file.{errors.suggest(name, names)} Registered: "
            f"{', '.join(sorted(names))}."
        )
    return seqio.get_mixture_or_task(name)
