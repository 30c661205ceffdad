"""Which formulation computes an operator: plain JAX anywhere, or kernels on TPU where they serve.

The platform is that of the compiled program, not of the process that compiles it. Each operator
says what its kernels serve and passes None otherwise, so that nothing else ever reaches them.
"""

import contextlib
import contextvars
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jax import lax

Choice = Literal["auto", "plain", "kernels", "interpreted kernels"]
Kernels = Callable[..., Any]
"""Computes with kernels what the plain formulation computes, from the same arrays."""

_choice: contextvars.ContextVar[Choice] = contextvars.ContextVar("choice", default="auto")


@contextlib.contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Sets the formulation for what is traced inside, for tests and comparisons.

    Args:
        choice: "auto": kernels on TPU. "plain": no kernels. "kernels": kernels on any platform,
            which only TPUs have. "interpreted kernels": kernels computed without a TPU, slowly.
            Each takes the plain formulation where there are no kernels. A function that jit has
            traced keeps what it was traced with.
    """
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def wanted() -> bool:
    """Whether kernels may be used; if not, they need not even be imported, which takes time."""
    choice = _choice.get()
    return choice != "plain" and (choice != "auto" or _may_meet_a_tpu())


def interpreted() -> bool:
    """Whether kernels are to be computed without a TPU."""
    return _choice.get() == "interpreted kernels"


def run(plain: Callable[..., Any], kernels: Kernels | None, *arrays: Any) -> Any:
    """Returns what either computes from the arrays; kernels are None where they do not serve."""
    if kernels is None or not wanted():
        return plain(*arrays)
    if _choice.get() != "auto":
        return kernels(*arrays)
    return lax.platform_dependent(*arrays, tpu=kernels, default=plain)


@functools.cache
def _may_meet_a_tpu() -> bool:
    """Whether this process can compile for TPUs at all."""
    return importlib.util.find_spec("libtpu") is not None
