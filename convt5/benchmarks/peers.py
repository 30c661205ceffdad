"""T5 implementations of other libraries to compare with, if present: T5X and Hugging Face."""

import functools
import importlib.util
import pathlib

import jax

from convt5.benchmarks import hugging_face, t5x
from convt5.benchmarks.sides import Side
from convt5.modeling.architecture import ConvT5Config

HUGGING_FACE_NEEDS = ("torch", "transformers")


def find_peers(
    suite: str,
    config: ConvT5Config,
    checkout: pathlib.Path | None,
    *,
    with_hugging_face: bool = True,
) -> dict[str, Side]:
    """Returns the peers that are present, as transformers with the sizes of `config`.

    Args:
        suite: what they should run, "train_step" or "decode".
        config: the model with their widths and numbers of layers.
        checkout: the folder of a checkout of T5X, or None.
        with_hugging_face: whether to include Hugging Face's, if installed. It runs on the CPU, so
            it is a peer only where JAX does too.

    Raises:
        UserError: `checkout` is not a checkout of T5X.
    """
    decodes = suite == "decode"
    sides: dict[str, Side] = {}
    if checkout is not None:
        make = t5x.decoder if decodes else t5x.train_step
        sides["T5X"] = functools.partial(make, t5x.make_model(checkout, config), config)
    is_here = jax.default_backend() == "cpu" and all(
        map(importlib.util.find_spec, HUGGING_FACE_NEEDS)
    )
    if with_hugging_face and is_here:
        make = hugging_face.decoder if decodes else hugging_face.train_step
        sides["Hugging Face"] = functools.partial(make, config)
    return sides
