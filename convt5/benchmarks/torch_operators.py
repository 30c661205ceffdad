"""Depthwise convolutions of PyTorch and of causal-conv1d, to compare operators with."""

import importlib
import importlib.util
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

_MOST_CAUSAL_TAPS = 4  # Of the kernels of causal-conv1d.


def find_sides(x: Any, kernel: Any, cotangent: Any) -> Mapping[str, Callable[[], Any]]:
    """Returns forward and backward pass of the libraries that are installed and can run the case.

    They run on the device of JAX, or not at all; causal-conv1d only on a GPU.

    Args:
        x, cotangent: arrays [batch, length, embed] of JAX.
        kernel: array [taps, embed].
    """
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    on_gpu = torch.cuda.is_available()
    if jax.default_backend() != ("gpu" if on_gpu else "cpu"):
        return {}
    sides = {"torch conv1d": _timed(_conv1d(len(kernel)), x, kernel, cotangent)}
    is_served = on_gpu and 2 <= len(kernel) <= _MOST_CAUSAL_TAPS
    if is_served and importlib.util.find_spec("causal_conv1d") is not None:
        causal: Any = importlib.import_module("causal_conv1d")
        convolve = causal.causal_conv1d_fn
        sides["causal-conv1d"] = _timed(convolve, x, kernel, cotangent)
    return sides


def _conv1d(taps: int) -> Callable[[Any, Any], Any]:
    """Returns a convolution of [batch, embed, length] with [embed, taps], of the same length."""
    from torch.nn import functional

    def convolve(x: Any, kernel: Any) -> Any:
        padded = functional.pad(x, (taps // 2, (taps - 1) // 2))
        return functional.conv1d(padded, kernel[:, None], groups=len(kernel))

    return convolve


def _timed(convolve: Callable[[Any, Any], Any], *arrays: Any) -> Callable[[], Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, str(arrays[0].dtype))

    def tensor(array: Any) -> Any:
        """Moves embed before length, as PyTorch has it."""
        moved = np.ascontiguousarray(np.asarray(array, np.float32).swapaxes(-1, -2))
        return torch.from_numpy(moved).to(device, dtype)

    x, kernel, cotangent = map(tensor, arrays)
    x.requires_grad_()
    kernel.requires_grad_()

    # For `jax.block_until_ready`, which waits for what `run` has queued on a GPU.
    queued = types.SimpleNamespace(block_until_ready=torch.cuda.synchronize)

    def run() -> Any:
        torch.autograd.grad(convolve(x, kernel), (x, kernel), cotangent)
        return queued if device == "cuda" else None

    return run
