"""Registers tasks with seqio, unless another project has a task of the name."""

import seqio
from absl import logging


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
